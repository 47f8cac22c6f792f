"""Compiled graphs whose steps also compute the functions before a neuron: equal results, and fewer stored values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsn_nn import LIF, FlexSN, OverTime, functional
from flexsn_nn.fusion import AbsorbingBackend, fuse_norms
from flexsn_nn.fusion._pointwise import _FUNCTIONS, _METHODS
from flexsn_nn.memory import PackingBackend
from flexsn_runtime import ScanProgram, why_refused

EAGER = "aot_eager"
T, B, C = 5, 2, 3

Before = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.manual_seed(0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def smooth(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = v + (x - v) / 2.0
    return torch.sigmoid(3.0 * (h - 0.5)), torch.tanh(h)


class Preceded(nn.Module):
    """A neuron whose input is a function of `x` and `y`."""

    def __init__(self, before: Before, *others: nn.Module) -> None:
        super().__init__()
        self.before = before
        self.neuron = FlexSN(smooth, 1, 1, 1)
        self.others = nn.ModuleList(others)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        output = self.neuron(self.before(x, y))
        assert isinstance(output, Tensor)
        return output


def compute_results(net: nn.Module, x: Tensor, y: Tensor, backend: Any, **options: Any) -> list[Tensor]:
    """Returns the output, and the gradients of the inputs and parameters."""
    functional.reset_net(net)
    for module in net.modules():
        if isinstance(module, FlexSN):
            module.backend = "torch" if backend is None else "hop"
    run = net if backend is None else torch.compile(net, backend=backend, fullgraph=True, **options)
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    output = run(x, y)
    leaves = [x, y, *net.parameters()]
    gradients = torch.autograd.grad(output.float().square().sum(), leaves, allow_unused=True)
    return [output, *(torch.zeros(()) if gradient is None else gradient for gradient in gradients)]


def draw_pair(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(T, *shape), torch.rand(T, *shape)


CHANNELS = torch.rand(C, 1).add_(0.5)
CASES: dict[str, tuple[Before, int]] = {
    "scaled": (lambda x, y: 2 * x + 0.1, 2),
    "residual": (lambda x, y: x + y, 1),
    "residual, activated": (lambda x, y: torch.relu(x - y.abs()) / 3, 4),
    "per channel": (lambda x, y: x * CHANNELS - CHANNELS, 2),
    "of one step": (lambda x, y: x * y[0], 1),
    "of one step, with time": (lambda x, y: x.mul(y[:1]), 1),
    "broadcast sequence": (lambda x, y: x + y[:, :1, :1], 1),
    "cast": (lambda x, y: x.double().float() * y.to(torch.float32), 4),
    "chosen": (lambda x, y: torch.where(x.sigmoid() * 2 + 1, x, y) if x.dtype is torch.bool else x.clamp(-1, 1), 1),
    "to keywords": (lambda x, y: torch.add(x, y, alpha=2), 1),
    "folded": (lambda x, y: (x.flatten(0, 1) * 2 + 1).view(T, B, C, 4), 2),
    "folded, two": (lambda x, y: torch.tanh(x.flatten(0, 1) * y.flatten(0, 1)).reshape(x.shape), 2),
    "twice the same": (lambda x, y: x * x, 1),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.long(
    all_but=["False-residual, activated", "False-per channel", "False-of one step, with time", "False-folded, two"]
)
def test_functions_are_absorbed_with_equal_results(case: str, dynamic: bool) -> None:
    before, count = CASES[case]
    net, (x, y) = Preceded(before), draw_pair(B, C, 4)
    backend = AbsorbingBackend(EAGER)
    results, expected = compute_results(net, x, y, backend, dynamic=dynamic), compute_results(net, x, y, None)
    assert {len(entry.producers) for entry in backend.absorbed} == {count}
    assert not backend.left
    assert all("test_nn_absorbing_backend.py:" in name for name in backend.absorbed[0].producers)
    assert torch.equal(results[0], expected[0])
    assert results[1].abs().max() > 0
    torch.testing.assert_close(results[1:], expected[1:])


def test_messages_name_the_users_lines_below_frames_of_torch() -> None:
    """Checks stacks in which frames of torch are also below the user's lines."""
    before, count = CASES["per channel"]
    net, (x, y) = Preceded(before), draw_pair(B, C, 4)
    backend = AbsorbingBackend(EAGER)
    with torch.device("cpu"):
        compute_results(net, x, y, backend, dynamic=False)
    (names,) = {entry.producers for entry in backend.absorbed}
    assert len(names) == count
    assert all("test_nn_absorbing_backend.py:" in name for name in names)


def written_after(x: Tensor, y: Tensor) -> Tensor:
    before = x * 2
    before.add_(y)
    return before


def operand_written(x: Tensor, y: Tensor) -> Tensor:
    other = y.clone()
    before = x + other
    other.add_(1)
    return before


def part_written(x: Tensor, y: Tensor) -> Tensor:
    other = y.clone()
    before = x - other
    other[0].zero_()
    return before


def data_written(x: Tensor, y: Tensor) -> Tensor:
    other = y.clone()
    data = other.data
    before = x + other
    data.add_(1)
    return before


def list_written(x: Tensor, y: Tensor) -> Tensor:
    other = y.detach().clone()
    before = x + other
    torch._foreach_add_([other], 1.0)
    return before


def without_gradient(x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        before = x * 2
    return before + y


def in_autocast(x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.exp(x) * 2


LEFT: dict[str, tuple[Before, str | None]] = {
    "written after": (written_after, None),
    "operand written": (operand_written, "changed in place"),
    "part written": (part_written, "changed in place"),
    "data written": (data_written, "after it"),
    "list written": (list_written, "after it"),
    "no_grad": (without_gradient, "after it"),
    "autocast": (in_autocast, "after it"),
    "sum over time": (lambda x, y: x.cumsum(0), None),
    "other order": (lambda x, y: (x.transpose(0, 1) * 2).transpose(0, 1), None),
    "folded otherwise": (lambda x, y: (x.flatten(1, 2) * 2).unflatten(1, (B, C)), None),
    "along time": (lambda x, y: x * torch.arange(T, dtype=x.dtype).view(T, 1, 1, 1), None),
    "size": (lambda x, y: x * x.shape[1], None),
}


@pytest.mark.parametrize("case", LEFT)
@pytest.mark.long(all_but=["written after", "list written", "no_grad", "autocast", "folded otherwise"])
def test_functions_that_are_not_absorbed_are_reported(case: str) -> None:
    before, reason = LEFT[case]
    net, (x, y) = Preceded(before), draw_pair(B, C, 4)
    backend = AbsorbingBackend(EAGER)
    results, expected = compute_results(net, x, y, backend), compute_results(net, x, y, None)
    assert torch.equal(results[0], expected[0])
    torch.testing.assert_close(results[1:], expected[1:])
    if reason is not None:
        assert any(reason in entry.reason for entry in backend.left)
        assert reason in str(backend)


class Shared(nn.Module):
    """Two neurons that read one sum. If `elsewhere`, another function also reads this sum."""

    def __init__(self, elsewhere: bool) -> None:
        super().__init__()
        self.one, self.other, self.elsewhere = FlexSN(smooth, 1, 1, 1), FlexSN(smooth, 1, 1, 1), elsewhere

    def forward(self, x: Tensor, y: Tensor) -> Any:
        both = x + y
        total: Any = self.one(both) * self.other(both)
        return total + both if self.elsewhere else total


@pytest.mark.long(all_but=["True"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_several_layers_read_one_result(elsewhere: bool) -> None:
    net, (x, y) = Shared(elsewhere), draw_pair(B, 4)
    backend = AbsorbingBackend(EAGER)
    results, expected = compute_results(net, x, y, backend), compute_results(net, x, y, None)
    torch.testing.assert_close(results, expected)
    assert len(backend.absorbed) == (0 if elsewhere else 2)
    assert [entry.reason.split(",")[0] for entry in backend.left] == ["another node reads its result"] * elsewhere


def test_a_scale_is_computed_again_for_each_reader() -> None:
    """Checks a scale that is computed before two readers. Each neuron still reads one sequence."""
    net, (x, y) = Preceded(lambda x, y: x), draw_pair(B, 4)
    net.forward = lambda x, y: net.neuron(2 * x) + (2 * x).sum() + y  # type: ignore[method-assign]
    backend = AbsorbingBackend(EAGER)
    torch.testing.assert_close(compute_results(net, x, y, backend), compute_results(net, x, y, None))
    assert len(backend.absorbed) == 1


class Weighted(nn.Module):
    """A layer that uses one weight before a neuron and in the neuron's step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))
        self.neuron = FlexSN(lambda x, v: smooth(x * self.weight, v), 1, 1, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        output = self.neuron(torch.relu(x + self.weight) + y)
        assert isinstance(output, Tensor)
        return output


@pytest.mark.parametrize("num_steps", [1, T])
@pytest.mark.long(all_but=["5"])
def test_the_step_also_captures_a_value_of_the_absorbed_function(num_steps: int) -> None:
    net, (x, y) = Weighted(), draw_pair(B, 4)
    backend = AbsorbingBackend(EAGER)
    net.neuron = FlexSN(net.neuron.core, 1, 1, 1, example_outputs=(x[0],))
    results, expected = (compute_results(net, x[:num_steps], y[:num_steps], b) for b in (backend, None))
    assert len(backend.absorbed[0].producers) == 3
    torch.testing.assert_close(results, expected)


def test_functions_are_absorbed_within_autocast() -> None:
    net, (x, y) = Preceded(lambda x, y: torch.exp(x.bfloat16()) * 2 + y), draw_pair(B, 4)
    backend = AbsorbingBackend(EAGER)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results, expected = (compute_results(net, x, y, b) for b in (backend, EAGER))
    assert len(backend.absorbed) == 1
    assert torch.equal(results[0], expected[0])
    torch.testing.assert_close(results[1:], expected[1:])


def test_a_step_without_dimensions_absorbs_nothing() -> None:
    net = Preceded(lambda x, y: x * torch.tensor(2.0, dtype=torch.float64))
    backend = AbsorbingBackend(EAGER)
    results, expected = (compute_results(net, torch.ones(T), torch.ones(T), b) for b in (backend, None))
    assert not backend.absorbed
    torch.testing.assert_close(results, expected)


def test_kernels_accept_all_absorbed_functions() -> None:
    functions: list[Any] = [*_FUNCTIONS, *(getattr(Tensor, name) for name in _METHODS)]
    further_arguments: dict[str, tuple[Any, ...]] = {"clamp": (0.0, 0.5), "to": (torch.float32,)}
    binary = ("add", "sub", "mul", "div", "true_divide", "truediv", "maximum", "minimum")

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        total = x
        for function in functions:
            name = function.__name__
            if name == "where":
                total = total + function(x > v, x, v)
            else:
                total = (
                    total
                    + (function(x, v) if name in binary else function(x, *further_arguments.get(name, ()))).float()
                )
        return total, v

    assert why_refused(ScanProgram(core, 1, 1, 1), [torch.rand(3, 4)], None, training=True) is None


# -- norms ---------------------------------------------------------------------------------------------------


def make_convolutional(norm: nn.Module, **to: Any) -> nn.Sequential:
    net = nn.Sequential(OverTime(nn.Conv2d(2, C, 3, bias=False), norm), LIF(v_threshold=0.3)).to(**to)
    for tensor in norm.parameters():
        nn.init.uniform_(tensor, 0.5, 1.0)
    return net


def train_once(net: nn.Module, x: Tensor, backend: Any, **options: Any) -> tuple[list[Tensor], list[Tensor], int]:
    """Returns the output and the gradients; the buffers; and the number of elements that autograd stores."""
    functional.reset_net(net)
    torch.compiler.reset()
    num_stored = 0

    def note(tensor: Tensor) -> Tensor:
        nonlocal num_stored
        num_stored += tensor.numel()
        return tensor

    x = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = torch.compile(net, backend=backend, **options)(x)
    gradients = torch.autograd.grad(output.float().square().sum(), [x, *net.parameters()])
    return [output, *gradients], list(net.buffers()), num_stored


NORMS: dict[str, Callable[[], nn.Module]] = {
    "as usual": lambda: nn.BatchNorm2d(C),
    "not affine": lambda: nn.BatchNorm2d(C, affine=False),
    "untracked": lambda: nn.BatchNorm2d(C, track_running_stats=False),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.long(all_but=["False-True-dtype0-as usual"])
def test_absorbed_norms_equal_norms_fused_by_hand(norm: str, dtype: torch.dtype, training: bool, dynamic: bool) -> None:
    net = make_convolutional(NORMS[norm](), dtype=dtype).train(training)
    fused = copy.deepcopy(net)
    assert len(fuse_norms(fused).fused) == 1
    x = torch.rand(T, B, 2, 6, 6, dtype=dtype)
    backend = AbsorbingBackend(EAGER)
    results, buffers, _ = train_once(net, x, backend, dynamic=dynamic)
    expected, expected_buffers, _ = train_once(fused, x, EAGER, dynamic=dynamic)
    (entry,) = set(backend.absorbed)  # With symbolic sizes, the graph is compiled twice.
    assert entry.producers[0].startswith("batch_norm (")
    assert 0.01 < results[0].float().mean() < 0.95
    for a, b in zip([*results, *buffers], [*expected, *expected_buffers], strict=True):
        assert torch.equal(a, b)


def test_an_absorbed_norm_stores_fewer_tensors() -> None:
    net = nn.Sequential(make_convolutional(nn.BatchNorm2d(C)), OverTime(nn.Conv2d(C, 2, 3)))
    x = torch.rand(T, B, 2, 9, 9)
    partitioned = "aot_eager_decomp_partition"
    results, _, num_stored = train_once(net, x, AbsorbingBackend(partitioned))
    expected, _, num_unabsorbed = train_once(net, x, partitioned)
    assert torch.equal(results[0], expected[0])
    torch.testing.assert_close(results[1:], expected[1:], rtol=1e-4, atol=1e-4)
    assert num_unabsorbed - num_stored > 0.9 * T * B * C * 7 * 7
    _, _, num_packed = train_once(net, x, AbsorbingBackend(PackingBackend(partitioned)))
    assert num_stored - num_packed > 0.8 * T * B * C * 7 * 7


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.long(all_but=["True"])
def test_the_step_absorbs_a_relu_before_a_norm_but_no_sum(residual: bool) -> None:
    """Checks that the step also computes a relu between the linear layer and the norm, but not a sum."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (OverTime(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
            self.first, self.second = FlexSN(smooth, 1, 1, 1), FlexSN(smooth, 1, 1, 1)
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Any:
            spikes: Any = self.first(self.one(x))
            frames = self.two(spikes).flatten(0, 1).relu()
            return self.second(self.norm(frames + x.flatten(0, 1) if residual else frames).unflatten(0, x.shape[:2]))

    net, x = Block(), torch.randn(T, 6, 4)
    unabsorbed = copy.deepcopy(net)
    backend = AbsorbingBackend(EAGER)
    results, buffers, _ = train_once(net, x, backend)
    expected, expected_buffers, _ = train_once(unabsorbed, x, EAGER)
    assert [len(entry.producers) for entry in backend.absorbed] == ([1, 1] if residual else [1, 2])
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(buffers, expected_buffers)


class TwoReaders(nn.Module):
    """A norm whose result a neuron and another function read."""

    def __init__(self, other: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = OverTime(nn.BatchNorm1d(4))
        self.neuron = FlexSN(smooth, 1, 1, 1)
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        normalised = self.norm(x)
        output = self.neuron(normalised)
        assert isinstance(output, Tensor)
        return output + self.other(normalised)


READERS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "a sum": (lambda x: x.cumsum(0), 0),
    "another neuron": (FlexSN(smooth, 1, 1, 1), 2),
}


@pytest.mark.long(all_but=["a sum"])
@pytest.mark.parametrize("reader", READERS)
def test_statistics_are_updated_once(reader: str) -> None:
    other, count = READERS[reader]
    net, x = TwoReaders(other), torch.randn(T, 6, 4)
    unabsorbed = copy.deepcopy(net)
    backend = AbsorbingBackend(EAGER)
    results, buffers, _ = train_once(net, x, backend)
    expected, expected_buffers, _ = train_once(unabsorbed, x, EAGER)
    assert len(backend.absorbed) == count
    torch.testing.assert_close(results, expected)
    torch.testing.assert_close(buffers, expected_buffers)
    assert buffers[2] == 1


@pytest.mark.long
def test_norms_are_absorbed_by_inductor() -> None:
    net, x = nn.Sequential(OverTime(nn.Linear(3, 4), nn.BatchNorm1d(4)), FlexSN(smooth, 1, 1, 1)), torch.randn(T, 6, 3)
    unabsorbed = copy.deepcopy(net)
    backend = AbsorbingBackend()
    results, buffers, _ = train_once(net, x, backend)
    expected, expected_buffers, _ = train_once(unabsorbed, x, EAGER)
    assert len(backend.absorbed) == 1
    torch.testing.assert_close(results, expected)
    torch.testing.assert_close(buffers, expected_buffers)
