"""Neurons compared with their equations: outputs, states and all gradients, on every backend."""

from __future__ import annotations

import copy
import pickle
from typing import Any, ClassVar

import pytest
import torch
from nn_equations import CASES, Case, assert_same, draw_input, draw_states, run_neuron, run_oracle
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from flexsn_nn import LIF, PLIF, neuron
from flexsn_nn.neuron import Neuron

# Kernels run on CPU tensors in this file.
pytestmark = pytest.mark.usefixtures("interpreted")

# A step has 70 elements: two full blocks of the smallest kernels, which have 32 elements, and a part of a third block.
STEP = (2, 35)
EACH = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
SOME = pytest.mark.parametrize(
    "case",
    [
        c
        for c in CASES
        if c.name in {"plif", "adex", "klif_scaled", "leaky_zero", "gated_lif", "clif", "refractory_relative"}
    ],
    ids=lambda case: case.name,
)


def test_every_neuron_has_a_case() -> None:
    # The parallel neurons are not scans. Another file tests them.
    parallel = {"PSN", "MaskedPSN", "SlidingPSN"}
    kinds = {name for name in neuron.__all__ if isinstance(getattr(neuron, name), type)} - parallel
    tested = {type(case.make()) for case in CASES}
    bases = {"Neuron", "ImmediateReset", "DelayedReset", "Feedback", "RunOptions", "ResetOptions", "SpikeOptions"}
    assert {getattr(neuron, name) for name in kinds - bases} == tested


@EACH
def test_loop_equals_the_equation(case: Case) -> None:
    layer = case.make(backend="torch")
    x = draw_input(case, 9, STEP)
    expected = run_oracle(case, layer, x)
    if case.fires:
        assert 0.02 < (expected.outputs > 0).double().mean() < 0.98, "the input should make some neurons fire"
    assert_same(run_neuron(layer, x), expected)
    states = draw_states(case, STEP)
    assert_same(run_neuron(layer, x, states), run_oracle(case, layer, x, states))


@EACH
def test_operator_equals_the_equation(case: Case) -> None:
    layer = case.make(backend="hop")
    x = draw_input(case, 5, STEP)
    states = draw_states(case, STEP)
    assert_same(run_neuron(layer, x, states), run_oracle(case, layer, x, states))


# Kernels of steps with a product have no gradients of an input with fewer elements than the step. The loop runs then.
@pytest.mark.long(all_but=["lif", "alif", "gated_lif", "stochastic", "izhikevich", "rleaky_at_once_zero"])
@pytest.mark.parametrize("case", [c for c in CASES if c.name != "recurrent_gated_lif"], ids=lambda case: case.name)
def test_kernels_equal_the_equation(case: Case) -> None:
    layer = case.make(backend="triton")
    x = draw_input(case, 5, STEP)
    states = draw_states(case, STEP)
    assert_same(run_neuron(layer, x, states), run_oracle(case, layer, x, states))
    assert layer.explain().startswith("triton")


@pytest.mark.long(all_but=["refractory_relative", "leaky_zero"])
@SOME
def test_kernels_begin_with_the_state_of_the_equation(case: Case) -> None:
    layer = case.make(backend="triton")
    x = draw_input(case, 3, STEP)
    assert_same(run_neuron(layer, x), run_oracle(case, layer, x))


@EACH
def test_chunks_of_time_equal_one_run(case: Case) -> None:
    layer = case.make(backend="torch")
    x = draw_input(case, 9, (3, 35))
    expected = layer(x)
    states = list(layer.states)
    layer.reset()
    parts = [layer(chunk) for chunk in torch.split(x, [4, 1, 4])]
    assert torch.equal(torch.cat(parts), expected)
    assert all(torch.equal(a, b) for a, b in zip(layer.states, states, strict=True))


@EACH
def test_single_steps_equal_one_run(case: Case) -> None:
    layer = case.make(backend="torch")
    x = draw_input(case, 5, (3, 35))
    expected = layer(x)
    layer.reset()
    layer.step_mode = "s"
    assert torch.equal(torch.stack([layer(step) for step in x]), expected)


SMOOTH = [case for case in CASES if case.smooth is not None]


@pytest.mark.parametrize("case", SMOOTH, ids=[case.name for case in SMOOTH])
def test_gradients_with_a_smooth_function_pass_gradcheck(case: Case) -> None:
    """Checks gradients against numerical ones, with a smooth function instead of the spike."""
    assert case.smooth is not None
    layer = case.make(backend="torch", **case.smooth)
    names = [name for name, _ in layer.named_parameters()]
    shape = (1, 35) if any(p.numel() > 1 for p in layer.parameters()) else (2,)
    x = draw_input(case, 3, shape).requires_grad_()
    states = [state.requires_grad_() for state in draw_states(case, shape)]

    def run(x: Tensor, *states_and_parameters: Tensor) -> tuple[Tensor, ...]:
        layer.states = list(states_and_parameters[: len(states)])
        parameters = dict(zip(names, states_and_parameters[len(states) :], strict=True))
        return torch.func.functional_call(layer, parameters, (x,)), *layer.states

    params = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    assert torch.autograd.gradcheck(run, (x, *states, *params), fast_mode=shape != (2,))


@SOME
def test_copies_compute_equal_results_separately(case: Case) -> None:
    layer = case.make(backend="torch")
    x = draw_input(case, 4, STEP)
    expected = layer(x).detach()
    layer.reset()
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), expected)
        assert layer.states == []
        for parameter in twin.parameters():
            parameter.data.zero_()
        twin.reset()
        assert torch.equal(layer(x), expected)
        layer.reset()


def test_a_state_dict_contains_parameters() -> None:
    source, target = PLIF(init_tau=3.0), PLIF(init_tau=torch.tensor(1.5))
    target.load_state_dict(source.state_dict())
    assert list(source.state_dict()) == ["w"]
    assert target.tau.item() == pytest.approx(3.0)


def test_kernels_follow_a_replaced_constant() -> None:
    x = torch.full((3, 4), 1.2)
    layer = LIF(tau=2.0, backend="triton")
    first = layer(x)
    layer.reset()
    layer.tau = 1.0
    second = layer(x)
    assert first[0, 0] == 0
    assert second[0, 0] == 1
    assert torch.equal(second, LIF(tau=1.0, backend="torch")(x))


def test_a_constant_becomes_a_tensor_and_a_scalar_again() -> None:
    x = torch.full((3, 2), 1.2)
    layer = LIF(tau=1.0, backend="triton")
    assert layer(x)[0].tolist() == [1, 1]
    layer.reset()
    layer.tau = torch.tensor([1.0, 2.0])
    assert layer(x)[0].tolist() == [1, 0]
    for tau, spikes in (
        (torch.nn.Parameter(torch.tensor([2.0, 1.0])), [0, 1]),
        (torch.tensor([1.0, 2.0]), [1, 0]),
        (2.0, [0, 0]),
    ):
        layer.reset()
        layer.hold("tau", tau)
        assert layer(x)[0].tolist() == spikes
    assert list(layer.state_dict()) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@SOME
def test_states_in_half_precision_remain_in_half_precision(case: Case, dtype: torch.dtype) -> None:
    """Checks that float32 parameters, as under autocast, do not widen the state."""
    layer = case.make(backend="torch").float()
    x = draw_input(case, 4, STEP).to(dtype).requires_grad_()
    output = layer(x)
    gradients = torch.autograd.grad(output.sum(), [x, *layer.parameters()])
    assert {output.dtype, *(state.dtype for state in layer.states)} == {dtype}
    assert [g.dtype for g in gradients] == [dtype, *[torch.float32] * (len(gradients) - 1)]


class GpuAutocast(TorchDispatchMode):
    """A mode that simulates autocast on a GPU. Unlike autocast on a CPU, it computes these functions in float32."""

    WIDENED: ClassVar[set[str]] = {"exp", "expm1", "log", "log1p", "pow", "reciprocal", "rsqrt", "softplus", "tan"}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in self.WIDENED:
            args = tree_map_only(Tensor, Tensor.float, args)
        return func(*args, **(kwargs or {}))


def assert_stays_narrow(layer: Neuron, x: Tensor) -> None:
    layer.backend = "torch"
    with torch.no_grad(), GpuAutocast():  # type: ignore[no-untyped-call]
        output = layer(x.bfloat16())
    assert {output.dtype, *(state.dtype for state in layer.states)} == {torch.bfloat16}


@EACH
def test_autocast_on_a_gpu_does_not_widen_states(case: Case) -> None:
    assert_stays_narrow(case.make().float(), draw_input(case, 4, STEP))


def test_autocast_on_a_gpu_does_not_widen_states_with_parameters_per_channel() -> None:
    per_channel = torch.linspace(0.5, 0.9, STEP[1])
    x = torch.rand(4, *STEP)
    for layer in (
        neuron.ALIF(tau_a=2.0 + per_channel),
        neuron.Alpha(alpha=per_channel, beta=per_channel - 0.1),
        neuron.Lapicque(beta=per_channel),
        neuron.EIF(delta_T=per_channel),
        neuron.KLIF(scale_reset=True, init_k=per_channel),
    ):
        assert_stays_narrow(layer, x)


def test_the_example_of_a_custom_neuron_runs_and_learns() -> None:
    """Checks the example in the docstring of `Neuron`, and that its parameter has a gradient."""

    class LeakyIntegrator(Neuron):
        state_names = ("v",)
        decay: float | Tensor

        def __init__(self, decay: float | Tensor = 0.9, **options: str) -> None:
            super().__init__(**options)  # type: ignore[arg-type]
            self.hold("decay", decay)

        def dynamics(self, x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            h = neuron.fit(self.decay, v) * v + x
            return h, h

    x = torch.ones(3, 2)
    constant = LeakyIntegrator(0.5)
    assert constant(x)[:, 0].tolist() == [1.0, 1.5, 1.75]
    learned = LeakyIntegrator(torch.nn.Parameter(torch.tensor([0.5, 1.0])), backend="triton")
    outputs = learned(x)
    (gradient,) = torch.autograd.grad(outputs.sum(), list(learned.parameters()))
    assert outputs.tolist() == [[1.0, 1.0], [1.5, 2.0], [1.75, 3.0]]
    # The gradient is d/dd of 1 + (d + 1) + (d² + d + 1).
    assert gradient.tolist() == [3.0, 4.0]


def test_states_are_read_by_name() -> None:
    layer = neuron.ALIF(tau_a=2.0, store_state_seqs=True, backend="torch")
    assert layer.state("a") is None
    assert layer.state_seq("a") is None
    layer(torch.full((3, 2), 5.0))
    a, a_seq = layer.state("a"), layer.state_seq("a")
    assert a is not None
    assert a_seq is not None
    assert torch.equal(a_seq[-1], a)
    assert a_seq[0].tolist() == [1.0, 1.0]
