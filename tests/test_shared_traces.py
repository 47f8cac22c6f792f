"""Sharing of traces and kernels. Instances, copies and programs share them if their cores have equal code."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recurrent_cores import CELLS, Cell
from torch import Tensor, nn

from flexsn_hop import eager_scan_final_state
from flexsn_nn import ALIF, LIF, PLIF, RALIF, RLIF, FlexSN, Recurrent
from flexsn_runtime import ScanProgram, prepare, scan
from flexsn_runtime.program import _program as program
from flexsn_runtime.step._tracing import trace_values

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE = 37
NEURONS: dict[str, Callable[[], FlexSN]] = {
    "LIF": LIF,
    "ALIF": ALIF,
    "PLIF": PLIF,
    "RLIF": lambda: RLIF(SIZE),
    "RALIF": lambda: RALIF(SIZE),
    "Recurrent": lambda: Recurrent(LIF(), SIZE),
}


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns a list that records each core that is traced."""
    cores: list[Any] = []

    def record(core: Any, *args: Any, **options: Any) -> Any:
        cores.append(core)
        return trace_values(core, *args, **options)

    monkeypatch.setattr(program, "trace_values", record)
    return cores


def draw_sequence(batch: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    return (3 * torch.randn(9, batch, SIZE, generator=generator)).to(DEVICE)


def train(neuron: FlexSN, x: Tensor) -> list[Tensor]:
    """Returns the outputs, and the gradients of the input and of the parameters."""
    neuron.reset()
    x = x.clone().requires_grad_()
    out = neuron(x)
    weights = torch.linspace(-1, 1, out.numel(), device=x.device).reshape(out.shape)
    gradients = torch.autograd.grad((out * weights).sum(), [x, *neuron.parameters()])
    neuron.reset()
    return [out.detach(), *gradients]


def check(neuron: FlexSN, x: Tensor) -> None:
    loop = copy.deepcopy(neuron)
    loop.backend = "torch"
    actual, expected = train(neuron, x), train(loop, x)
    torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=0)
    torch.testing.assert_close(actual[1:], expected[1:], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NEURONS)
def test_instances_share_traces_on_a_gpu(name: str, traces: list[Any]) -> None:
    check_instances(name, traces)


@pytest.mark.long(all_but=["PLIF", "RALIF", "Recurrent"])
@pytest.mark.parametrize("name", NEURONS)
def test_instances_share_traces(name: str, traces: list[Any]) -> None:
    check_instances(name, traces)


def check_instances(name: str, traces: list[Any]) -> None:
    x = draw_sequence()
    first = NEURONS[name]().to(DEVICE)
    check(first, x)
    count = len(traces)
    second, third = NEURONS[name]().to(DEVICE), copy.deepcopy(first)
    fourth = pickle.loads(pickle.dumps(first))
    for neuron in (second, third, fourth):
        with torch.no_grad():
            for parameter in neuron.parameters():
                parameter.mul_(0.75)
        check(neuron, x)
    check(first, x)
    assert len(traces) == count


def test_instances_may_require_other_gradients(traces: list[Any]) -> None:
    x = draw_sequence()
    first, second = RLIF(SIZE).to(DEVICE), RLIF(SIZE).to(DEVICE)
    for neuron in (first, second):
        with torch.no_grad():
            neuron(x)
    assert len(traces) <= 1
    check(second, x)
    check(first, x)


def test_changed_instance_does_not_affect_others(traces: list[Any]) -> None:
    x = draw_sequence()
    first, second = LIF().to(DEVICE), LIF().to(DEVICE)
    check(first, x)
    check(second, x)
    first.v_threshold = 0.5
    check(first, x)
    check(second, x)
    second.v_threshold = 0.5
    count = len(traces)
    check(second, x)
    assert len(traces) == count, "the second neuron shares the first neuron's trace with this threshold"


class Owner(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, SIZE))

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        v = 0.5 * v + x * self.weight * self.factor
        return v.clamp(-1.0, 1.0), v


def test_change_of_one_instance_does_not_affect_the_backward_of_another() -> None:
    x = draw_sequence()
    owners = [Owner(2.0).to(DEVICE) for _ in range(2)]
    first, second = (FlexSN(owner, 1, 1, 1) for owner in owners)
    check(first, x)
    out = second(x.requires_grad_())
    owners[0].factor = 7.0
    (actual,) = torch.autograd.grad(out.sum(), x)
    second.reset()
    second.backend = "torch"
    (expected,) = torch.autograd.grad(second(x).sum(), x)
    torch.testing.assert_close(actual, expected)


def test_first_instance_is_freed() -> None:
    first = RLIF(SIZE).to(DEVICE)
    check(first, draw_sequence())
    second = RLIF(SIZE).to(DEVICE)
    check(second, draw_sequence())
    reference = weakref.ref(first.recurrent.weight)
    del first
    for _ in range(3):  # a finalizer may delay the release of a cycle until the next collection
        gc.collect()
    assert reference() is None
    check(second, draw_sequence())
    check(RLIF(SIZE).to(DEVICE), draw_sequence())


@pytest.mark.long(all_but=["PLIF", "RALIF", "Recurrent"])
@pytest.mark.parametrize("name", NEURONS)
def test_batch_sizes_share_traces(name: str, traces: list[Any]) -> None:
    neuron = NEURONS[name]().to(DEVICE)
    check(neuron, draw_sequence(5))
    count = len(traces)
    for batch in (6, 3, 5, 64):
        check(neuron, draw_sequence(batch))
        check(NEURONS[name]().to(DEVICE), draw_sequence(batch))
    assert len(traces) == count
    for batch in (1, 2, SIZE):
        check(neuron, draw_sequence(batch))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NEURONS)
def test_all_batch_sizes_equal_the_loop_on_a_gpu(name: str) -> None:
    neuron = NEURONS[name]().to(DEVICE)
    for batch in (5, 6, 64, 1, SIZE, 512):
        check(neuron, draw_sequence(batch))


@pytest.mark.long(all_but=["LSTM"])
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.__name__)
def test_cells_equal_the_loop_for_all_batch_sizes(cell: type[Cell]) -> None:
    def draw_normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.4

    core = cell(9, draw_normal).to(DEVICE)
    kernels = ScanProgram(core, 1, core.num_states, 1, on_cpu="cpp")
    for batch in (4, 5, 1, 9, 4):
        tensors = [draw_normal(6, batch, 9), *[draw_normal(batch, 9)] * core.num_states]
        tensors = [t.to(DEVICE).requires_grad_() for t in tensors]
        captured = list(core.parameters())
        step, arguments = prepare(kernels, tensors)
        actual = scan(step, arguments, state_seqs=False)
        expected = eager_scan_final_state(core, 1, core.num_states, 1, *tensors)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        losses = [torch.stack([(r * r.cos().detach()).sum() for r in results]).sum() for results in (actual, expected)]
        gradients = [torch.autograd.grad(loss, [*tensors, *captured], allow_unused=True) for loss in losses]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
