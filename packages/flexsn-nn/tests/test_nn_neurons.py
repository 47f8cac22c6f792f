"""Neurons compared with their equations, in values, states and all gradients, on every backend."""

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

# A step has 70 elements: two full blocks of the smallest kernels, which have 32 elements, and a part of a third.
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
    # The parallel neurons are not scans, and another file tests them.
    parallel = {"PSN", "MaskedPSN", "SlidingPSN"}
    kinds = {name for name in neuron.__all__ if isinstance(getattr(neuron, name), type)} - parallel
    tested = {type(case.make()) for case in CASES}
    bases = {"Neuron", "ImmediateReset", "DelayedReset", "Feedback", "RunOptions", "ResetOptions", "SpikeOptions"}
    assert {getattr(neuron, name) for name in kinds - bases} == tested


@EACH
def test_loop_equals_the_equation(case: Case) -> None:
    made = case.make(backend="torch")
    x = draw_input(case, 9, STEP)
    wanted = run_oracle(case, made, x)
    if case.fires:
        assert 0.02 < (wanted.outputs > 0).double().mean() < 0.98, "the input should make some fire"
    assert_same(run_neuron(made, x), wanted)
    states = draw_states(case, STEP)
    assert_same(run_neuron(made, x, states), run_oracle(case, made, x, states))


@EACH
def test_operator_equals_the_equation(case: Case) -> None:
    made = case.make(backend="hop")
    x = draw_input(case, 5, STEP)
    states = draw_states(case, STEP)
    assert_same(run_neuron(made, x, states), run_oracle(case, made, x, states))


# If an input has fewer elements than the step, kernels of steps with a product have no gradients, so the loop runs.
@pytest.mark.long(all_but=["lif", "alif", "gated_lif", "stochastic", "izhikevich", "rleaky_at_once_zero"])
@pytest.mark.parametrize("case", [c for c in CASES if c.name != "recurrent_gated_lif"], ids=lambda case: case.name)
def test_kernels_equal_the_equation(case: Case) -> None:
    made = case.make(backend="triton")
    x = draw_input(case, 5, STEP)
    states = draw_states(case, STEP)
    assert_same(run_neuron(made, x, states), run_oracle(case, made, x, states))
    assert made.explain().startswith("triton")


@pytest.mark.long(all_but=["refractory_relative", "leaky_zero"])
@SOME
def test_kernels_begin_with_the_state_of_the_equation(case: Case) -> None:
    made = case.make(backend="triton")
    x = draw_input(case, 3, STEP)
    assert_same(run_neuron(made, x), run_oracle(case, made, x))


@EACH
def test_chunks_of_time_equal_one_run(case: Case) -> None:
    made = case.make(backend="torch")
    x = draw_input(case, 9, (3, 35))
    whole = made(x)
    states = list(made.states)
    made.reset()
    parts = [made(chunk) for chunk in torch.split(x, [4, 1, 4])]
    assert torch.equal(torch.cat(parts), whole)
    assert all(torch.equal(a, b) for a, b in zip(made.states, states, strict=True))


@EACH
def test_single_steps_equal_one_run(case: Case) -> None:
    made = case.make(backend="torch")
    x = draw_input(case, 5, (3, 35))
    whole = made(x)
    made.reset()
    made.step_mode = "s"
    assert torch.equal(torch.stack([made(step) for step in x]), whole)


SMOOTH = [case for case in CASES if case.smooth is not None]


@pytest.mark.parametrize("case", SMOOTH, ids=[case.name for case in SMOOTH])
def test_gradcheck_of_the_smooth_parts(case: Case) -> None:
    """Checks that autograd's gradient equals the numerical one with a smooth function instead of the step."""
    assert case.smooth is not None
    made = case.make(backend="torch", **case.smooth)
    names = [name for name, _ in made.named_parameters()]
    shape = (1, 35) if any(p.numel() > 1 for p in made.parameters()) else (2,)
    x = draw_input(case, 3, shape).requires_grad_()
    states = [state.requires_grad_() for state in draw_states(case, shape)]

    def run(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        made.states = list(rest[: len(states)])
        replaced = dict(zip(names, rest[len(states) :], strict=True))
        return torch.func.functional_call(made, replaced, (x,)), *made.states

    params = [p.detach().clone().requires_grad_() for p in made.parameters()]
    assert torch.autograd.gradcheck(run, (x, *states, *params), fast_mode=shape != (2,))


@SOME
def test_copies_compute_equal_results_separately(case: Case) -> None:
    made = case.make(backend="torch")
    x = draw_input(case, 4, STEP)
    wanted = made(x).detach()
    made.reset()
    for twin in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(twin(x), wanted)
        assert made.states == []
        for parameter in twin.parameters():
            parameter.data.zero_()
        twin.reset()
        assert torch.equal(made(x), wanted)
        made.reset()


def test_state_dict_moves_parameters() -> None:
    source, target = PLIF(init_tau=3.0), PLIF(init_tau=torch.tensor(1.5))
    target.load_state_dict(source.state_dict())
    assert list(source.state_dict()) == ["w"]
    assert target.tau.item() == pytest.approx(3.0)


def test_kernels_follow_a_replaced_constant() -> None:
    x = torch.full((3, 4), 1.2)
    made = LIF(tau=2.0, backend="triton")
    before = made(x)
    made.reset()
    made.tau = 1.0
    after = made(x)
    assert before[0, 0] == 0
    assert after[0, 0] == 1
    assert torch.equal(after, LIF(tau=1.0, backend="torch")(x))


def test_a_constant_becomes_a_tensor_and_a_number_again() -> None:
    x = torch.full((3, 2), 1.2)
    made = LIF(tau=1.0, backend="triton")
    assert made(x)[0].tolist() == [1, 1]
    made.reset()
    made.tau = torch.tensor([1.0, 2.0])
    assert made(x)[0].tolist() == [1, 0]
    for tau, spikes in (
        (torch.nn.Parameter(torch.tensor([2.0, 1.0])), [0, 1]),
        (torch.tensor([1.0, 2.0]), [1, 0]),
        (2.0, [0, 0]),
    ):
        made.reset()
        made.hold("tau", tau)
        assert made(x)[0].tolist() == spikes
    assert list(made.state_dict()) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@SOME
def test_half_precision_states_remain_half(case: Case, dtype: torch.dtype) -> None:
    """Checks that float32 parameters, as under autocast, do not widen the state."""
    made = case.make(backend="torch").float()
    x = draw_input(case, 4, STEP).to(dtype).requires_grad_()
    output = made(x)
    gradients = torch.autograd.grad(output.sum(), [x, *made.parameters()])
    assert {output.dtype, *(state.dtype for state in made.states)} == {dtype}
    assert [g.dtype for g in gradients] == [dtype, *[torch.float32] * (len(gradients) - 1)]


class GpuAutocast(TorchDispatchMode):
    """Simulates autocast of a GPU in a core. Unlike that of a CPU, it computes these functions in float32."""

    WIDENED: ClassVar[set[str]] = {"exp", "expm1", "log", "log1p", "pow", "reciprocal", "rsqrt", "softplus", "tan"}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in self.WIDENED:
            args = tree_map_only(Tensor, Tensor.float, args)
        return func(*args, **(kwargs or {}))


def assert_stays_narrow(made: Neuron, x: Tensor) -> None:
    made.backend = "torch"
    with torch.no_grad(), GpuAutocast():  # type: ignore[no-untyped-call]
        output = made(x.bfloat16())
    assert {output.dtype, *(state.dtype for state in made.states)} == {torch.bfloat16}


@EACH
def test_autocast_on_a_gpu_does_not_widen_states(case: Case) -> None:
    assert_stays_narrow(case.make().float(), draw_input(case, 4, STEP))


def test_autocast_on_a_gpu_does_not_widen_states_by_parameters_per_channel() -> None:
    each = torch.linspace(0.5, 0.9, STEP[1])
    x = torch.rand(4, *STEP)
    for made in (
        neuron.ALIF(tau_a=2.0 + each),
        neuron.Alpha(alpha=each, beta=each - 0.1),
        neuron.Lapicque(beta=each),
        neuron.EIF(delta_T=each),
        neuron.KLIF(scale_reset=True, init_k=each),
    ):
        assert_stays_narrow(made, x)


def test_a_custom_neuron() -> None:
    """Tests the example in the docstring of `Neuron`; its parameters are found."""

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


def test_states_by_name() -> None:
    made = neuron.ALIF(tau_a=2.0, store_state_seqs=True, backend="torch")
    assert made.state("a") is None
    assert made.state_seq("a") is None
    made(torch.full((3, 2), 5.0))
    a, a_seq = made.state("a"), made.state_seq("a")
    assert a is not None
    assert a_seq is not None
    assert torch.equal(a_seq[-1], a)
    assert a_seq[0].tolist() == [1.0, 1.0]
