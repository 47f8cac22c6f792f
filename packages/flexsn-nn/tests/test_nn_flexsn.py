"""`FlexSN`: equal results on all backends, and states that are stored, reset, detached, copied and moved."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from spawned_work import run_in_child, soft_lif
from torch import Tensor, nn

from flexsn_nn import (
    BackendUnavailableError,
    FlexSN,
    InputCountError,
    StateError,
    StepModeError,
    UnknownNameError,
)
from flexsn_runtime import _availability

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
BACKENDS = ("torch", "hop", "triton", "inductor", "cpp", "auto")
# In these tests, "auto" chooses "cpp" on the CPU, and "inductor" launches the kernels of "triton".
backends = pytest.mark.parametrize(
    "backend", [pytest.param(b, marks=[pytest.mark.long] if b in ("cpp", "inductor") else []) for b in BACKENDS]
)
# The size of a step exceeds two of the interpreter's blocks of 512 elements.
STEP = (3, 371)


def two_in_two_out(x: Tensor, y: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    current = 0.5 * i + x * y
    h = 0.75 * v + current
    return h - y, h * h, current, h


class Decay(nn.Module):
    """A core with a parameter and a buffer. In evaluation, it computes another function than in training."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.linspace(0.1, 0.9, STEP[1]))
        self.register_buffer("bias", torch.linspace(-1.0, 1.0, STEP[1]))

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v * self.decay + x + self.bias
        return (h * h if self.training else h), h


class StartsAtHalf(FlexSN):
    def init_states(self, num_states: int, step_mode: str, *inputs: Tensor) -> list[Tensor]:
        return [state + 0.5 for state in super().init_states(num_states, step_mode, *inputs)]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def make_neuron(backend: str = "torch", **options: Any) -> FlexSN:
    return FlexSN(soft_lif, 1, 1, 1, backend=backend, **options)


def as_tensor(result: Tensor | list[Tensor]) -> Tensor:
    assert isinstance(result, Tensor)
    return result


# -- equal results on all backends ----------------------------------------------------------------------


@pytest.mark.long(all_but=["final-hop", "seqs-torch", "final-inductor", "final-triton", "final-auto", "final-cpp"])
@backends
@pytest.mark.parametrize("store", [False, True], ids=["final", "seqs"])
def test_results_and_gradients_are_equal_on_all_backends(backend: str, store: bool) -> None:
    results = []
    for name in ("torch", backend):
        core = Decay().to(DEVICE)
        layer = FlexSN(core, 1, 1, 1, backend=name, store_state_seqs=store)
        x = random(5, *STEP).requires_grad_()
        first = as_tensor(layer(x))
        second = as_tensor(layer(x * 0.5))  # This call continues from the state of the first call.
        total = first.sum() + second.square().sum() + layer.states[0].sum()
        if store:
            total = total + layer.state_seqs[0][1].sum()
        grads = torch.autograd.grad(total, [x, core.decay])
        results.append((first, second, layer.states[0], *layer.state_seqs, *grads))
    assert len(results[0]) == len(results[1]) == (6 if store else 5)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@backends
def test_several_outputs_are_a_list(backend: str) -> None:
    x, y = random(4, *STEP).requires_grad_(), random(4, *STEP, seed=1).requires_grad_()
    expected = FlexSN(two_in_two_out, 2, 2, 2, backend="torch")(x, y)
    outputs = FlexSN(two_in_two_out, 2, 2, 2, backend=backend)(x, y)
    assert isinstance(outputs, list)
    assert len(outputs) == 2
    for a, b in zip(outputs, expected, strict=True):
        torch.testing.assert_close(a, b)
    weights = [torch.rand_like(t) for t in expected]
    gradients = torch.autograd.grad(outputs, [x, y], weights)
    for a, b in zip(gradients, torch.autograd.grad(expected, [x, y], weights), strict=True):
        torch.testing.assert_close(a, b)


@backends
def test_inputs_are_broadcast(backend: str) -> None:
    x, y = random(4, *STEP), random(4, 1, STEP[1], seed=1).requires_grad_()
    outputs = FlexSN(two_in_two_out, 2, 2, 2, backend=backend)(x, y)
    expected = FlexSN(two_in_two_out, 2, 2, 2, backend="torch")(x, y)
    for a, b in zip(outputs, expected, strict=True):
        torch.testing.assert_close(a, b)
    grads = [torch.autograd.grad(results[1].sum(), y)[0] for results in (outputs, expected)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@backends
def test_a_core_without_states_runs(backend: str) -> None:
    layer = FlexSN(lambda x: x * 2.0 + 1.0, 1, 0, 1, backend=backend)
    x = random(4, *STEP)
    assert torch.equal(as_tensor(layer(x)), x * 2.0 + 1.0)
    assert layer.states == []


@pytest.mark.parametrize("backend", ["torch", "hop", "auto"])
def test_single_steps_equal_a_sequence(backend: str) -> None:
    x = random(5, *STEP).requires_grad_()
    sequence_neuron, step_neuron = make_neuron(), make_neuron(backend, step_mode="s")
    expected = as_tensor(sequence_neuron(x))
    outputs = torch.stack([as_tensor(step_neuron(step)) for step in x])
    assert torch.equal(outputs, expected)
    assert torch.equal(step_neuron.states[0], sequence_neuron.states[0])
    (a,), (b,) = (torch.autograd.grad(t.square().sum(), x) for t in (outputs, expected))
    torch.testing.assert_close(a, b)


@pytest.mark.long(all_but=["torch", "hop", "auto"])
@backends
def test_requires_grad_blocks_gradients(backend: str) -> None:
    """Checks that a False entry blocks the gradient of an input, or of a state from call to call."""
    x = random(3, *STEP).requires_grad_()
    y = random(3, *STEP, seed=1).requires_grad_()
    layer = FlexSN(two_in_two_out, 2, 2, 2, backend=backend, requires_grad=(True, False, False, True))
    layer(x, y)
    layer(x.detach(), y)[1].sum().backward()
    assert y.grad is None
    assert x.grad is not None, "x has a gradient through the second state"
    blocked = FlexSN(two_in_two_out, 2, 2, 2, backend=backend, requires_grad=(True, True, False, False))
    x.grad = None
    blocked(x, y.detach())
    blocked(x.detach(), y)[1].sum().backward()
    assert x.grad is None
    assert y.grad is not None


def test_requires_grad_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"requires_grad has 1 entries .* give 2"):
        make_neuron(requires_grad=(True,))


# -- no steps ------------------------------------------------------------------------------------------


@pytest.mark.long(all_but=["seqs-hop", "final-torch", "final-triton", "final-auto"])
@backends
@pytest.mark.parametrize("store", [False, True], ids=["final", "seqs"])
def test_a_sequence_without_steps_keeps_the_state(backend: str, store: bool) -> None:
    layer = make_neuron(backend, store_state_seqs=store, example_outputs=[torch.zeros(STEP)])
    output = as_tensor(layer(random(0, *STEP)))
    assert output.shape == (0, *STEP)
    assert output.dtype == torch.float32
    assert torch.equal(layer.states[0], torch.zeros(STEP, device=DEVICE))
    assert [s.shape for s in layer.state_seqs] == ([(0, *STEP)] if store else [])
    layer(random(2, *STEP))
    before = layer.states[0]
    layer(random(0, *STEP))
    assert torch.equal(layer.states[0], before)
    assert layer.states[0].data_ptr() != before.data_ptr()


@pytest.mark.parametrize("backend", ["torch", "hop"])
def test_a_sequence_without_steps_needs_example_outputs(backend: str) -> None:
    with pytest.raises(ValueError, match="T == 0"):
        make_neuron(backend)(random(0, *STEP))


# -- state ---------------------------------------------------------------------------------------------


@backends
def test_the_state_continues_until_reset(backend: str) -> None:
    x = random(6, *STEP)
    layer = make_neuron(backend)
    assert layer.states == []
    expected = as_tensor(layer(x))
    final = layer.states[0]
    layer.reset()
    assert layer.states == []
    assert layer.state_seqs == []
    halves = torch.cat([as_tensor(layer(x[:2])), as_tensor(layer(x[2:]))])
    assert torch.equal(halves, expected)
    assert torch.equal(layer.states[0], final)


@backends
def test_detach_cuts_the_graph(backend: str) -> None:
    x = random(3, *STEP).requires_grad_()
    layer = make_neuron(backend, store_state_seqs=True)
    layer(x)
    assert layer.states[0].requires_grad
    layer.detach()
    assert not layer.states[0].requires_grad
    assert not layer.state_seqs[0].requires_grad
    output = as_tensor(layer(x.detach()))
    assert not output.requires_grad


@backends
def test_state_sequences_end_in_the_state(backend: str) -> None:
    layer = make_neuron(backend, store_state_seqs=True)
    x = random(4, *STEP)
    layer(x)
    assert layer.state_seqs[0].shape == (4, *STEP)
    assert torch.equal(layer.state_seqs[0][-1], layer.states[0])
    layer.store_state_seqs = False
    layer(x)
    assert layer.state_seqs == []


@backends
def test_overridden_initial_states_are_used(backend: str) -> None:
    x = random(3, *STEP)
    layer = StartsAtHalf(soft_lif, 1, 1, 1, backend=backend)
    expected = make_neuron()
    expected.states = [torch.full(STEP, 0.5, device=DEVICE)]
    assert torch.equal(as_tensor(layer(x)), as_tensor(expected(x)))


@backends
def test_a_wrong_number_of_initial_states_is_refused(backend: str) -> None:
    class Wrong(FlexSN):
        def init_states(self, num_states: int, step_mode: str, *inputs: Tensor) -> list[Tensor]:
            return [inputs[0][0]] * 3

    with pytest.raises(StateError, match="init_states returned 3 tensors; num_states is 1"):
        Wrong(soft_lif, 1, 1, 1, backend=backend)(random(3, *STEP))


@backends
def test_another_batch_size_without_reset_is_refused(backend: str) -> None:
    layer = make_neuron(backend)
    layer(random(2, 4, 5))
    with pytest.raises(StateError, match=r"state 0 has shape \[4, 5\].*\[3, 5\].*Call reset\(\)"):
        layer(random(2, 3, 5))
    layer.reset()
    assert as_tensor(layer(random(2, 3, 5))).shape == (2, 3, 5)


@pytest.mark.long(all_but=["torch", "hop", "auto"])
@backends
def test_truncated_backpropagation_trains(backend: str) -> None:
    """Trains with two calls and an optimizer step between them. The second backward must not reach the first call."""
    core = Decay().to(DEVICE)
    layer = FlexSN(core, 1, 1, 1, backend=backend)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-4)
    for i in range(2):
        layer.detach()
        optimizer.zero_grad()
        as_tensor(layer(random(3, *STEP, seed=i))).mean().backward()
        optimizer.step()
    assert core.decay.grad is not None
    assert core.decay.grad.any()


def test_modified_states_are_detected() -> None:
    layer = make_neuron("auto" if HAS_GPU else "triton")
    x = random(3, *STEP).requires_grad_()
    layer(x)
    output = as_tensor(layer(x))
    with torch.no_grad():
        x.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


# -- as a module ---------------------------------------------------------------------------------------


def test_a_module_core_registers_its_parameters() -> None:
    layer = FlexSN(Decay(), 1, 1, 1)
    assert dict(layer.named_parameters()).keys() == {"core.decay"}
    assert dict(layer.named_buffers()).keys() == {"core.bias"}


@pytest.mark.long(all_but=["torch", "hop", "auto"])
@backends
def test_a_state_dict_is_loaded(backend: str) -> None:
    x = random(3, *STEP)
    source, target = (FlexSN(Decay().to(DEVICE), 1, 1, 1, backend=backend) for _ in range(2))
    target(x)  # This call builds the kernels before the new values are loaded.
    target.reset()
    with torch.no_grad():
        source.core.decay.mul_(0.5)  # type: ignore[attr-defined]
        source.core.bias.add_(1.0)  # type: ignore[attr-defined]
    target.load_state_dict(source.state_dict())
    assert torch.equal(as_tensor(source(x)), as_tensor(target(x)))
    third = FlexSN(Decay().to(DEVICE), 1, 1, 1, backend=backend)
    third(x)
    third.reset()
    third.load_state_dict(source.state_dict(), assign=True)
    as_tensor(third(x)).sum().backward()
    assert third.core.decay.grad is not None  # type: ignore[attr-defined]
    source.reset()
    third.reset()
    assert torch.equal(as_tensor(source(x)), as_tensor(third(x)))


@pytest.mark.long(all_but=["torch", "hop", "auto"])
@backends
def test_to_converts_core_and_state(backend: str) -> None:
    layer = FlexSN(Decay().to(DEVICE), 1, 1, 1, backend=backend, store_state_seqs=True)
    layer(random(3, *STEP))
    layer.to(torch.float64)
    assert layer.states[0].dtype == torch.float64
    assert layer.state_seqs[0].dtype == torch.float64
    x = random(3, *STEP, dtype=torch.float64)
    output = as_tensor(layer(x))
    assert output.dtype == torch.float64
    assert layer.core.decay.dtype == torch.float64  # type: ignore[attr-defined]


@pytest.mark.long(all_but=["torch", "hop", "auto"])
@backends
def test_training_mode_changes_the_core(backend: str) -> None:
    layer, x = FlexSN(Decay().to(DEVICE), 1, 1, 1, backend=backend), random(3, *STEP)
    for training in (True, False, True):
        layer.train(training)
        layer.reset()
        output = as_tensor(layer(x))
        state = layer.core(x[0], torch.zeros_like(x[0]))[0]
        assert torch.equal(output[0], state)


def list_copy_functions() -> list[Callable[[FlexSN], FlexSN]]:
    def by_torch_save(layer: FlexSN) -> FlexSN:
        buffer = io.BytesIO()
        torch.save(layer, buffer)
        buffer.seek(0)
        loaded: FlexSN = torch.load(buffer, weights_only=False)
        return loaded

    def by_pickle(layer: FlexSN) -> FlexSN:
        loaded: FlexSN = pickle.loads(pickle.dumps(layer))
        return loaded

    return [copy.deepcopy, by_pickle, by_torch_save]


@pytest.mark.long(all_but=["deepcopy-hop", "deepcopy-torch", "by_pickle-triton", "by_torch_save-auto"])
@backends
@pytest.mark.parametrize("make", list_copy_functions(), ids=lambda make: make.__name__)
def test_copies_continue_separately(backend: str, make: Callable[[FlexSN], FlexSN]) -> None:
    layer = FlexSN(Decay().to(DEVICE), 1, 1, 1, backend=backend)
    x = random(3, *STEP)
    layer(x)
    copied = make(layer)
    assert torch.equal(copied.states[0], layer.states[0])
    assert not copied.states[0].requires_grad
    assert copied.core is not layer.core
    assert torch.equal(as_tensor(copied(x)), as_tensor(layer(x)))
    with torch.no_grad():
        layer.core.decay.zero_()  # type: ignore[attr-defined]
    copied.reset()
    layer.reset()
    assert not torch.equal(as_tensor(copied(x)), as_tensor(layer(x)))
    as_tensor(copied(x)).sum().backward()
    assert copied.core.decay.grad is not None  # type: ignore[attr-defined]
    assert layer.core.decay.grad is None  # type: ignore[attr-defined]


def test_a_copy_before_the_first_call_runs() -> None:
    copied = copy.deepcopy(make_neuron("triton"))
    x = random(3, *STEP)
    assert torch.equal(as_tensor(copied(x)), as_tensor(make_neuron()(x)))


def test_a_neuron_runs_in_a_spawned_process() -> None:
    layer = make_neuron("torch" if HAS_GPU else "triton")
    x = random(3, 5)
    expected = layer(x)
    layer.reset()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert torch.equal(pool.apply(run_in_child, (layer, x)), expected)


@pytest.mark.long(all_but=["torch", "hop", "auto"])
@backends
def test_two_modules_share_a_core(backend: str) -> None:
    core = Decay().to(DEVICE)
    first, second = (FlexSN(core, 1, 1, 1, backend=backend) for _ in range(2))
    x = random(3, *STEP)
    assert torch.equal(as_tensor(first(x)), as_tensor(second(x)))
    (as_tensor(first(x)).sum() + as_tensor(second(x)).sum()).backward()
    gradient, core.decay.grad = core.decay.grad, None
    first.reset()
    first(x)
    (2 * as_tensor(first(x)).sum()).backward()
    assert gradient is not None
    assert core.decay.grad is not None
    torch.testing.assert_close(gradient, core.decay.grad, rtol=1e-4, atol=1e-4)


def test_repr_lists_the_arguments() -> None:
    assert repr(make_neuron("hop")) == (
        "FlexSN(core=soft_lif, num_inputs=1, num_states=1, num_outputs=1, step_mode='m', backend='hop')"
    )


# -- the choice of a backend ---------------------------------------------------------------------------


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown backend 'tritn'; known: .*Did you mean 'triton'\?"):
        make_neuron("tritn")
    with pytest.raises(UnknownNameError, match="unknown step_mode 'x'; known: 's', 'm'"):
        make_neuron(step_mode="x")
    layer = make_neuron()
    with pytest.raises(UnknownNameError, match="unknown backend 'cuda'"):
        layer.backend = "cuda"
    with pytest.raises(UnknownNameError, match="unknown step_mode 'multi'"):
        layer.step_mode = "multi"
    assert (layer.backend, layer.step_mode) == ("torch", "m")


@pytest.mark.parametrize("backend", ["triton", "inductor"])
def test_kernels_need_sequences(backend: str) -> None:
    message = f"backend='{backend}' compiles the loop over time and needs step_mode='m'.*backend='torch'"
    with pytest.raises(StepModeError, match=message):
        make_neuron(backend, step_mode="s")
    layer = make_neuron(backend)
    with pytest.raises(StepModeError, match=message):
        layer.step_mode = "s"
    layer = make_neuron("torch", step_mode="s")
    with pytest.raises(StepModeError, match=message):
        layer.backend = backend


def test_kernels_without_gpu_and_interpreter_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_availability, "_INTERPRETED", False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    layer = FlexSN(lambda x, v: (x + v, x + v), 1, 1, 1, backend="triton")
    with pytest.raises(BackendUnavailableError) as refused:
        layer(torch.zeros(2, 3))
    assert str(refused.value).startswith("backend='triton' cannot run: the tensors are on the CPU")
    for remedy in (".to('cuda')", "backend='torch'", "TRITON_INTERPRET=1"):
        assert remedy in str(refused.value)
    layer.backend = "auto"
    layer(torch.zeros(2, 3))
    reason = "compiled kernels cannot run: CXX names 'no-such-compiler', which does not exist."
    assert layer.explain().startswith(f"torch: {reason}")
    assert issubclass(BackendUnavailableError, RuntimeError)


# -- mistakes ------------------------------------------------------------------------------------------


@backends
def test_wrong_inputs_are_refused(backend: str) -> None:
    layer = FlexSN(two_in_two_out, 2, 2, 2, backend=backend)
    x = random(3, *STEP)
    with pytest.raises(InputCountError, match="got 1 inputs; num_inputs is 2"):
        layer(x)
    with pytest.raises(InputCountError, match="got 0 inputs; num_inputs is 2"):
        layer()
    with pytest.raises(TypeError, match="input 1 is a float; a neuron takes tensors"):
        layer(x, 1.0)
    with pytest.raises(ValueError, match=r"3.* 2|2.* 3"):
        layer(x, x[:2])
    with pytest.raises(ValueError, match=r"\[3, 37[01]\], \[3, 37[01]\], which do not broadcast to one"):
        layer(x, x[..., 1:])
    with pytest.raises(ValueError, match=r"\[T, \*step\]"):
        layer(x[0, 0, 0], x)
    assert layer.states == []


@backends
def test_a_core_that_returns_a_wrong_number_of_values_is_refused(backend: str) -> None:
    layer = FlexSN(soft_lif, 1, 1, 2, backend=backend)
    with pytest.raises(ValueError, match=r"returned 2 values; num_outputs \+ num_states is .*3"):
        layer(random(3, *STEP))


@backends
def test_a_state_that_changes_its_dtype_is_refused(backend: str) -> None:
    layer = FlexSN(lambda x, v: (x, (v + x).double()), 1, 1, 1, backend=backend)
    with pytest.raises(ValueError, match=r"state 0 .*float32.*float64.*keeps its shape"):
        layer(random(3, *STEP))


@backends
def test_a_state_that_changes_its_shape_is_refused(backend: str) -> None:
    layer = FlexSN(lambda x, v: (x, (v + x)[:1]), 1, 1, 1, backend=backend)
    with pytest.raises(ValueError, match=r"state 0 .*\[3, 371\].*\[1, 371\].*keeps its shape"):
        layer(random(3, *STEP))


def test_examples_make_construction_raise_errors_of_the_core() -> None:
    examples = (torch.zeros(STEP), torch.zeros(STEP))
    with pytest.raises(ValueError, match="returned 2 values"):
        FlexSN(soft_lif, 1, 1, 2, example_inputs=examples)
    with pytest.raises(ValueError, match="1 example inputs for 1 inputs and 1 states: give 2"):
        FlexSN(soft_lif, 1, 1, 1, example_inputs=examples[:1])
    assert make_neuron("triton", example_inputs=examples).states == []


def test_an_op_without_a_rule_names_op_and_line() -> None:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v + x
        return torch.special.airy_ai(h), h

    x = random(2, 3)
    with pytest.raises(NotImplementedError, match=r"(?s)airy_ai.*no rule.*test_nn_flexsn\.py.*airy_ai\(h"):
        FlexSN(core, 1, 1, 1, backend="triton")(x)
    expected = torch.special.airy_ai(x[0])
    assert torch.equal(as_tensor(FlexSN(core, 1, 1, 1, backend="torch")(x))[0], expected)


@pytest.mark.long(all_but=["eager-torch", "float32-hop", "eager-triton", "eager-auto"])
@backends
@pytest.mark.parametrize("precision", ["eager", "float32"])
def test_an_assigned_core_replaces_the_first_one(backend: str, precision: str) -> None:
    x = random(4, *STEP).requires_grad_()
    layer = make_neuron(backend, precision=precision)
    cores: list[Callable[..., Any]] = [soft_lif, lambda x, v: (x * v, x + v), Decay().to(DEVICE), Decay().to(DEVICE)]
    for core in cores:
        layer.core = core
        layer.reset()
        expected = FlexSN(core, 1, 1, 1, backend="torch", precision=precision)
        torch.testing.assert_close(as_tensor(layer(x)), as_tensor(expected(x)), rtol=1e-6, atol=1e-6)
    layer.requires_grad = [False, True]
    layer.reset()
    as_tensor(layer(x)).sum().backward()
    assert x.grad is None
