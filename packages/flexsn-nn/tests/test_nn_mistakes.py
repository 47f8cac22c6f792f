"""Mistakes of users: errors describe the mistake in the user's terms and name the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from flexsn_nn import (
    LI,
    LIAF,
    LIF,
    ExampleError,
    ExportError,
    FlexSN,
    Leaky,
    ParameterError,
    Synaptic,
    UnknownAttributeError,
    UnknownParameterError,
    functional,
    neuron,
    surrogate,
)
from flexsn_runtime import ShapeError, TransformError

pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*"),  # These functions are deprecated, but still in use.
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]

X = torch.linspace(-1.0, 1.0, 24).reshape(3, 2, 4)
STEP = torch.zeros(2, 4)
backends = pytest.mark.parametrize("backend", ["torch", "hop", "triton"])
loops = pytest.mark.parametrize("backend", ["torch", "hop"])


def leaky(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = 0.5 * v + x
    return torch.tanh(h), h


def make_neuron(core: Callable[..., Any] = leaky, **options: Any) -> FlexSN:
    return FlexSN(core, 1, 1, 1, **options)


# -- torch's transforms, traces and inference mode -----------------------------------------------------


def test_several_gradients_at_once_are_supported_by_loops_and_refused_by_kernels() -> None:
    """Checks batched gradients. The error of kernels suggests one gradient at a time."""

    def differentiate_batched(backend: str) -> Tensor:
        x = X.clone().requires_grad_()
        output = cast(Tensor, make_neuron(backend=backend)(x))
        (gradient,) = torch.autograd.grad(output, x, torch.stack([output, -output]).detach(), is_grads_batched=True)
        return gradient

    def compute_jacobian(backend: str) -> Any:
        layer = make_neuron(backend=backend)
        return torch.autograd.functional.jacobian(lambda x: layer.step(x)[0], X, vectorize=True)

    torch.testing.assert_close(differentiate_batched("hop"), differentiate_batched("torch"))
    torch.testing.assert_close(compute_jacobian("hop"), compute_jacobian("torch"))
    for run in (differentiate_batched, compute_jacobian):
        with pytest.raises(TransformError, match=r"one gradient at a time.*vectorize=False, or use backend='torch'"):
            run("triton")
    layer = make_neuron(backend="triton")
    one_by_one = torch.autograd.functional.jacobian(lambda x: layer.step(x)[0], X)
    torch.testing.assert_close(one_by_one, compute_jacobian("torch"))


@backends
def test_jit_trace_of_a_neuron_is_refused(backend: str) -> None:
    with pytest.raises(ExportError, match=r"torch\.jit\.trace records .*torch\.export\.export"):
        torch.jit.trace(make_neuron(backend=backend), (X,), check_trace=False)


def test_jit_trace_of_a_step_in_kernels_is_refused() -> None:
    layer = make_neuron(backend="triton")
    with pytest.raises(TransformError, match=r"inside of torch\.jit\.trace"):
        torch.jit.trace(lambda x: layer.step(x)[0], (X,), check_trace=False)


def test_jvp_of_torch_func_is_supported_by_loops_and_refused_by_kernels() -> None:
    def jvp(backend: str) -> Any:
        layer = make_neuron(backend=backend)
        return torch.func.jvp(lambda x: layer.step(x)[0], (X,), (X,))

    torch.testing.assert_close(jvp("hop"), jvp("torch"))
    with pytest.raises(TransformError, match=r"torch\.func.*backend='torch'"):
        jvp("triton")


def test_a_captured_tensor_of_inference_mode_is_refused_by_kernels() -> None:
    with torch.inference_mode():
        w = torch.ones(4)

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return x * w, v + x

    assert torch.equal(cast(Tensor, make_neuron(core, backend="torch")(X)), X)
    with pytest.raises(NotImplementedError, match=r"(?s)inference_mode.*\.clone\(\).*return x \* w"):
        make_neuron(core, backend="triton")(X)
    w = w.clone()
    assert torch.equal(cast(Tensor, make_neuron(core, backend="triton")(X)), X)


# -- examples and empty sequences ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("examples", "kind", "message"),
    [
        ((torch.zeros(2, 3), STEP), ShapeError, r"shapes \[2, 3\], \[2, 4\], which do not broadcast to one step"),
        (STEP, TypeError, "example_inputs is a tensor; give a tuple of 2"),
        ((STEP, 1.0), TypeError, "example input 1 is a float"),
        ((STEP,), ValueError, "1 example inputs for 1 inputs and 1 states: give 2"),
    ],
)
def test_wrong_example_inputs_are_refused(examples: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make_neuron(example_inputs=examples)


@pytest.mark.parametrize(
    ("outputs", "kind", "message"),
    [
        ((STEP, STEP), ExampleError, "there are 2 example_outputs; num_outputs is 1"),
        ((), ExampleError, "there are 0 example_outputs"),
        (STEP, TypeError, "example_outputs is a tensor; give a tuple of num_outputs=1"),
        ((0.0,), TypeError, r"example_outputs\[0\] is a float"),
        ((torch.zeros(2, 5),), ExampleError, r"example_outputs\[0\] is \[2, 5\] .*the core returns \[2, 4\]"),
        ((STEP.double(),), ExampleError, r"is \[2, 4\] torch.float64; .*returns \[2, 4\] torch.float32"),
    ],
)
def test_wrong_example_outputs_are_refused(outputs: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make_neuron(example_inputs=(STEP, STEP), example_outputs=outputs)


@loops
def test_a_sequence_without_steps_requires_example_outputs(backend: str) -> None:
    def draws(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return x + torch.randn_like(x), v

    for core in (leaky, draws):
        with pytest.raises(ExampleError, match=r"no steps \(T == 0\).*example_outputs=\(\.\.\.\)"):
            make_neuron(core, backend=backend)(X[:0])
        assert cast(Tensor, make_neuron(core, backend=backend, example_outputs=(STEP,))(X[:0])).shape == (0, 2, 4)


@loops
def test_example_outputs_of_another_batch_size_are_refused(backend: str) -> None:
    with pytest.raises(ExampleError, match=r"example_outputs\[0\] is \[3, 4\]"):
        make_neuron(backend=backend, example_outputs=(torch.zeros(3, 4),))(X[:0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FlexSN(cast(Any, 3), 1, 1, 1), "core is a int: give a function or a module"),
        (lambda: FlexSN(nn.ReLU, 1, 1, 1), "core is the class ReLU: give an instance of it"),
        (lambda: FlexSN(leaky, cast(Any, 1.0), 1, 1), "num_inputs is 1.0; it must be a whole number"),
        (lambda: FlexSN(leaky, 1, -1, 1), "num_states is -1"),
        (lambda: FlexSN(leaky, 1, 1, cast(Any, "1")), "num_outputs is '1'"),
    ],
)
def test_wrong_cores_and_counts_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


# -- neurons and their states --------------------------------------------------------------------------


@backends
def test_assigning_none_to_states_resets_them(backend: str) -> None:
    layer = make_neuron(backend=backend)
    first = layer(X)
    layer.states = None  # type: ignore[assignment]
    assert layer.states == []
    assert torch.equal(cast(Tensor, layer(X)), cast(Tensor, first))
    layer.states = tuple(layer.states)  # type: ignore[assignment]
    assert isinstance(layer.states, list)
    with pytest.raises(TypeError, match="states is a tensor; give a list of num_states=1 tensors"):
        layer.states = STEP  # type: ignore[assignment]
    functional.set_states(nn.Sequential(layer), {"0": None})  # type: ignore[dict-item]
    assert layer.states == []


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (LIF, {"beta": 0.9}, r"LIF has no argument 'beta'\. .*tau=1 / \(1 - beta\).*Leaky"),
        (LIF, {"threshold": 1.0}, r"LIF has no argument 'threshold'\. Did you mean 'v_threshold'"),
        (LIF, {"spike_grad": surrogate.ATan()}, r"'spike_grad'\. It is `surrogate_function`"),
        (LIF, {"tauu": 2.0}, "Did you mean 'tau'"),
        (LIF, {"backends": "torch"}, "Did you mean 'backend'"),
        (Leaky, {"beta": 0.9, "v_threshold": 1.0}, r"Leaky has no argument 'v_threshold'\. Did you mean 'threshold'"),
        (Leaky, {"beta": 0.9, "init_hidden": True}, "Leave it out"),
        (LI, {"nonsense": 1}, r"LI has no argument 'nonsense'\. It has tau, decay_input, "),
    ],
)
def test_an_unknown_argument_is_refused_with_a_hint(
    make: Callable[..., object], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnknownParameterError, match=message):
        make(**arguments)
    assert issubclass(UnknownParameterError, TypeError)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: LIF(surrogate_function=f), "surrogate_function is the class ATan; give an instance: ATan()"),
        (lambda f: Leaky(0.9, spike_grad=f), "spike_grad is the class ATan"),
        (lambda f: LIAF(f, False), "act is the class ATan"),
        (lambda f: neuron.GatedLIF(T=2, surrogate_function=f), "surrogate_function is the class ATan"),
    ],
)
def test_a_class_as_surrogate_is_refused(make: Callable[[Any], object], message: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(message)):
        make(surrogate.ATan)


@pytest.mark.parametrize("value", [torch.tensor(0.0), nn.Parameter(torch.zeros(4))])
def test_wrong_types_of_v_reset_and_surrogate_function_are_refused(value: Tensor) -> None:
    with pytest.raises(ParameterError, match=r"v_reset is a tensor; expected one number.*float\(v_reset\)"):
        LIF(v_reset=cast(Any, value))
    for wrong in ("zero", True):
        with pytest.raises(ParameterError, match=r"v_reset is .*give a number"):
            LIF(v_reset=cast(Any, wrong))
    with pytest.raises(ParameterError, match="surrogate_function is 'atan', a str"):
        LIF(surrogate_function=cast(Any, "atan"))


@pytest.mark.parametrize(
    ("make", "name", "words"),
    [
        (LIF, "v", r'neuron\.state\("v"\)'),
        (lambda: Synaptic(0.9, 0.8), "i", r'neuron\.state\("i"\)'),
        (lambda: Leaky(0.9), "mem", r'neuron\.state\("v"\)'),
        (LIF, "v_seq", r'neuron\.state_seq\("v"\).*store_state_seqs'),
        (LIF, "functional_forward", r"neuron\.step\(inputs, states\)"),
        (LIF, "multi_step_forward", "call the neuron"),
        (lambda: Leaky(0.9), "reset_mem", r"neuron\.reset\(\)"),
    ],
)
def test_names_of_other_libraries_get_hints(make: Callable[[], Any], name: str, words: str) -> None:
    layer = make()
    with pytest.raises(UnknownAttributeError, match=words):
        getattr(layer, name)
    assert not hasattr(layer, name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = layer.nonsense


def test_a_state_cannot_be_assigned_by_name() -> None:
    layer = LIF()
    with pytest.raises(UnknownAttributeError, match=r"no step would read 'v'.*neuron\.states = \[\.\.\.\]"):
        layer.v = 0.0


# -- backends ------------------------------------------------------------------------------------------


def test_supported_backends_depend_on_the_step_mode() -> None:
    layer = LIF()
    assert layer.supported_backends == ("auto", "triton", "inductor", "cpp", "hop", "torch")
    layer.step_mode = "s"
    for name in layer.supported_backends:
        layer.backend = name
    assert "triton" not in layer.supported_backends


def test_the_backend_of_selected_neurons_is_set() -> None:
    net = nn.Sequential(LIF(), nn.Linear(2, 2), Leaky(0.9), make_neuron())
    functional.set_backend(net, "torch", instance=LIF)
    assert [cast(FlexSN, net[i]).backend for i in (0, 2, 3)] == ["torch", "auto", "auto"]
    functional.set_backend(net, "hop", instance=(Leaky, nn.Linear))
    assert [cast(FlexSN, net[i]).backend for i in (0, 2, 3)] == ["torch", "hop", "auto"]
    functional.set_backend(net, "torch")
    assert {cast(FlexSN, net[i]).backend for i in (0, 2, 3)} == {"torch"}
