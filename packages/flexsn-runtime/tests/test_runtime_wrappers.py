"""`build_*` and the functions of tensors equal the loop and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from runtime_cores import STEP, Core, hard_lif, loop, random, soft_lif
from torch import Tensor

from flexsn_codegen import UnsupportedOpError
from flexsn_graph import CoreArityError, NonPointwiseError, StateMismatchError
from flexsn_runtime import (
    DeviceError,
    DtypeError,
    ShapeError,
    TemplateNeededError,
    TensorCountError,
    build_inference_final_state_kernel,
    build_inference_kernel,
    build_training_kernels,
    flexsn_backward,
    flexsn_forward,
    flexsn_inference,
    flexsn_inference_final_state,
)
from flexsn_runtime.launches._launch import Launch

X, V = random(6, *STEP), random(*STEP, seed=1)
EXAMPLES = (X[0], V)
BUILDERS: list[Callable[..., tuple[Any, ...]]] = [
    build_inference_kernel,
    build_inference_final_state_kernel,
    build_training_kernels,
]
builders = pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(Launch, "__call__", refuse)


def with_gain() -> tuple[Core, Tensor]:
    w = random(STEP[1], seed=5).requires_grad_()

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v * 0.5 + x * w
        return h * h, h

    return core, w


# -- building ------------------------------------------------------------------------------------------


@builders
def test_info_describes_the_step(build: Callable[..., tuple[Any, ...]]) -> None:
    *kernels, info = build(soft_lif, 1, 1, 1)
    assert (info.num_inputs, info.num_states, info.num_outputs) == (1, 1, 1)
    assert len(kernels) == (2 if build is build_training_kernels else 1)
    *_, info = build(soft_lif, 1, 1, 1, (torch.zeros(2, 3, dtype=torch.float64),) * 2)
    assert len(info.fwd_core_args) == 2


@builders
@pytest.mark.parametrize(
    ("counts", "examples", "kind", "message"),
    [
        ((0, 1, 1), None, TensorCountError, r"num_inputs is 0; a scan needs at least one"),
        ((1, 2, 1), None, CoreArityError, r"cannot take 3 positional arguments \(1 inputs and 2 states\)"),
        ((1, 1, 2), None, CoreArityError, r"returned 2 values; .* is 2 \+ 1 = 3: return"),
        ((1, 1, 1), 1, TensorCountError, r"1 example inputs for 1 inputs and 1 states: give 2"),
        ((1, 1, 1), 3, TensorCountError, r"3 example inputs for 1 inputs and 1 states: give 2"),
    ],
)
def test_errors_name_both_counts(
    build: Callable[..., tuple[Any, ...]],
    counts: tuple[int, int, int],
    examples: int | None,
    kind: type[Exception],
    message: str,
) -> None:
    assert issubclass(kind, ValueError)
    example_inputs = None if examples is None else (torch.zeros(1),) * examples
    with pytest.raises(kind, match=message):
        build(soft_lif, *counts, example_inputs)


def test_requires_grad_of_wrong_length_is_refused() -> None:
    with pytest.raises(TensorCountError, match="has 1 entries for 1 inputs and 1 states: give 2"):
        build_training_kernels(soft_lif, 1, 1, 1, requires_grad=(True,))


def test_op_without_a_rule_is_named_when_building() -> None:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.special.airy_ai(x + v)
        return h, h

    with pytest.raises(UnsupportedOpError, match=r"(?s)airy_ai.*no rule.*test_runtime_wrappers\.py.*airy_ai"):
        build_inference_kernel(core, 1, 1, 1)


def test_examples_are_required_if_one_element_is_not_enough() -> None:
    core, _ = with_gain()
    with pytest.raises(StateMismatchError, match=r"state 0 goes in as \[1\] .*\[37\].* give example_inputs"):
        build_inference_kernel(core, 1, 1, 1)


def test_core_that_mixes_elements_is_refused_when_building() -> None:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v + x.cumsum(0)
        return h, h

    with pytest.raises(NonPointwiseError, match="cumsum"):
        build_inference_kernel(core, 1, 1, 1, (torch.zeros(3), torch.zeros(3)))


# -- forward -------------------------------------------------------------------------------------------


def test_inference_equals_the_loop() -> None:
    kernel, info = build_inference_kernel(hard_lif, 1, 1, 1)
    expected = loop(hard_lif, 1, [X], [V])
    for a, b in zip(flexsn_inference(kernel, info, X, V), expected, strict=True):
        assert torch.equal(a, b)
    from_zero = loop(hard_lif, 1, [X], [torch.zeros_like(V)])
    for a, b in zip(flexsn_inference(kernel, info, X), from_zero, strict=True):
        assert torch.equal(a, b)


def test_inference_returns_the_final_state() -> None:
    kernel, info = build_inference_final_state_kernel(hard_lif, 1, 1, 1)
    spikes, v = loop(hard_lif, 1, [X], [V])
    output, final = flexsn_inference_final_state(kernel, info, X, V)
    assert torch.equal(output, spikes)
    assert torch.equal(final, v[-1])
    spikes, v = loop(hard_lif, 1, [X], [torch.zeros_like(V)])
    assert torch.equal(flexsn_inference_final_state(kernel, info, X)[1], v[-1])


def test_captured_tensors_can_be_passed() -> None:
    core, w = with_gain()
    kernel, info = build_inference_kernel(core, 1, 1, 1, EXAMPLES)
    assert torch.equal(flexsn_inference(kernel, info, X, V, w)[0], flexsn_inference(kernel, info, X, V)[0])
    doubled = flexsn_inference(kernel, info, X, V, w.detach() * 2)[0]
    with torch.no_grad():
        w.mul_(2)
    assert torch.equal(doubled, flexsn_inference(kernel, info, X, V)[0])


def test_flat_arguments_are_distinguished_by_their_number() -> None:
    a, b = random(STEP[1], seed=5), random(STEP[1], seed=6)

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v * a + x * b
        return h, h

    kernel, info = build_inference_kernel(core, 1, 1, 1, EXAMPLES)
    from_zero = loop(core, 1, [X], [torch.zeros_like(V)])
    assert torch.equal(flexsn_inference(kernel, info, X, a, b)[0], from_zero[0])
    for count in (0, 5):
        with pytest.raises(TensorCountError, match=rf"got {count} tensors; the step takes 1 input .* 1 .* 2 captured"):
            flexsn_inference(kernel, info, *[X] * count)


@pytest.mark.parametrize("num_states", [0, 1], ids=["zeros", "states"])
def test_second_call_reuses_the_checks_of_the_first(num_states: int, monkeypatch: pytest.MonkeyPatch) -> None:
    core, w = with_gain()
    kernel, info = build_inference_kernel(core, 1, 1, 1, EXAMPLES)
    # The step has one captured tensor and one state. Calls pass the state, both, or neither of them.
    calls = [(X, V, w), (X, V)] if num_states else [(X,)]
    expected = [flexsn_inference(kernel, info, *call) for call in calls]

    def refuse(*args: object) -> None:
        raise AssertionError("specialised again")

    monkeypatch.setattr(kernel.program, "specialize", refuse)
    for call, results in zip(calls, expected, strict=True):
        for a, b in zip(flexsn_inference(kernel, info, *call), results, strict=True):
            assert torch.equal(a, b)
    if num_states:
        doubled = flexsn_inference(kernel, info, X, V, w.detach() * 2)[0]
        assert torch.equal(doubled, loop(lambda x, v: core(x * 2, v), 1, [X], [V])[0])


def test_lifted_tensors_of_another_shape_or_dtype_are_refused() -> None:
    a, b = random(STEP[1], seed=5), random(*STEP, seed=6).double()

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v * a + (x * b).to(x.dtype)
        return h, h

    forward, backward, info = build_training_kernels(core, 1, 1, 1, EXAMPLES)
    expected = flexsn_inference(forward, info, X, V)[0]
    assert torch.equal(flexsn_inference(forward, info, X, V, a, b)[0], expected)
    saved = flexsn_forward(forward, info, X, V, a, b)[2:]
    with pytest.raises(
        ShapeError, match=r"captured tensor 0 was passed as \[41, 37\] float64; the core captures \[37\] float32"
    ):
        flexsn_inference(forward, info, X, V, b, a)
    with pytest.raises(
        DtypeError, match=r"captured tensor 1 was passed as .* float32; .* float64\. .*ScanProgram\.lifted"
    ):
        flexsn_inference(forward, info, X, V, a, b.float())
    with pytest.raises(ShapeError, match=r"captured tensor 0 "):
        flexsn_backward(backward, info, torch.ones_like(X), None, X, V, b, a, saved[-1])


# -- backward ------------------------------------------------------------------------------------------


def save_for_backward(core: Core, *args: Tensor, **options: Any) -> tuple[Any, Any, tuple[Tensor, ...]]:
    forward, backward, info = build_training_kernels(core, 1, 1, 1, EXAMPLES, **options)
    results = flexsn_forward(forward, info, *args)
    for a, b in zip(results[:2], loop(core, 1, [args[0]], [args[1]]), strict=True):
        assert torch.equal(a, b)
    return backward, info, results[2:]


@pytest.mark.parametrize("present", [(True, True), (True, False), (False, True)], ids=str)
def test_backward_equals_autograd(present: tuple[bool, bool]) -> None:
    core, w = with_gain()
    backward, info, saved = save_for_backward(core, X, V)
    grads = [torch.rand_like(X) - 0.4 if is_present else None for is_present in present]
    actual = flexsn_backward(backward, info, *grads, *saved)
    x, v = X.clone().requires_grad_(), V.clone().requires_grad_()
    pairs = [(r, g) for r, g in zip(loop(core, 1, [x], [v]), grads, strict=True) if g is not None]
    expected = torch.autograd.grad([r for r, _ in pairs], [x, v, w], [g for _, g in pairs])
    assert len(actual) == 3
    for a, b in zip(actual, expected, strict=True):
        assert a is not None
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_backward_without_any_gradient_is_zero() -> None:
    core, w = with_gain()
    backward, info, saved = save_for_backward(core, X, V)
    for gradient, like in zip(flexsn_backward(backward, info, None, None, *saved), (X, V, w), strict=True):
        assert gradient is not None
        assert gradient.shape == like.shape
        assert not gradient.any()


def test_missing_states_are_zeros_in_the_backward() -> None:
    core, _ = with_gain()
    forward, backward, info = build_training_kernels(core, 1, 1, 1, EXAMPLES)
    saved = flexsn_forward(forward, info, X)[2:]
    actual = flexsn_backward(backward, info, torch.ones_like(X), None, *saved)
    zeros = flexsn_forward(forward, info, X, torch.zeros_like(V))[2:]
    expected = flexsn_backward(backward, info, torch.ones_like(X), None, *zeros)
    assert actual[1] is None
    for i in (0, 2):
        a, b = actual[i], expected[i]
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


def test_backward_returns_only_allowed_gradients() -> None:
    backward, info, saved = save_for_backward(soft_lif, X, V, requires_grad=(True, False))
    grad_x, grad_v = flexsn_backward(backward, info, torch.ones_like(X), None, *saved)
    assert grad_x is not None
    assert grad_v is None


def test_core_without_differentiable_outputs_can_be_trained_through_its_state() -> None:
    backward, info, saved = save_for_backward(hard_lif, X, V)
    grad_x, _ = flexsn_backward(backward, info, torch.ones_like(X), torch.ones_like(X), *saved)
    x = X.clone().requires_grad_()
    expected = torch.autograd.grad(loop(hard_lif, 1, [x], [V])[1].sum(), x)[0]
    assert grad_x is not None
    torch.testing.assert_close(grad_x, expected)


def test_backward_names_missing_tensors() -> None:
    core, _ = with_gain()
    backward, info, saved = save_for_backward(core, X, V)
    grad = torch.ones_like(X)
    with pytest.raises(TensorCountError, match=r"got 1 arguments; the gradients .* come first \(2 arguments;"):
        flexsn_backward(backward, info, grad)
    with pytest.raises(TensorCountError, match="no saved tensors: pass the tensors that flexsn_forward returned"):
        flexsn_backward(backward, info, grad, None)
    with pytest.raises(TemplateNeededError, match="pass input_templates"):
        flexsn_backward(backward, info, None, None, state_templates=[V])
    with pytest.raises(TemplateNeededError, match="pass state_templates"):
        flexsn_backward(backward, info, None, None, input_templates=[X])
    with pytest.raises(TensorCountError, match="input_templates has 2 tensors; the step takes 1 inputs"):
        flexsn_backward(backward, info, None, None, input_templates=[X, X], state_templates=[V])
    with pytest.raises(TensorCountError, match=r"5 tensors follow the gradients; .* 1 captured"):
        flexsn_backward(backward, info, grad, None, *saved, X)


# -- no steps ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_launch")
def test_forward_of_no_steps_returns_empty_outputs() -> None:
    empty = X[:0]
    kernel, info = build_inference_kernel(soft_lif, 1, 1, 1)
    for result in flexsn_inference(kernel, info, empty, V):
        assert result.shape == (0, *STEP)
    final_kernel, info = build_inference_final_state_kernel(soft_lif, 1, 1, 1)
    output, final = flexsn_inference_final_state(final_kernel, info, empty, V)
    assert output.shape == (0, *STEP)
    assert torch.equal(final, V)
    assert final.data_ptr() != V.data_ptr()
    _, final = flexsn_inference_final_state(final_kernel, info, empty)
    assert torch.equal(final, torch.zeros_like(V))


@pytest.mark.usefixtures("no_launch")
def test_backward_of_no_steps_returns_zeros() -> None:
    core, w = with_gain()
    forward, backward, info = build_training_kernels(core, 1, 1, 1, EXAMPLES)
    empty = X[:0]
    saved = flexsn_forward(forward, info, empty, V)[2:]
    with_saved = flexsn_backward(backward, info, empty, empty, *saved)
    by_templates = flexsn_backward(backward, info, empty, None, input_templates=[empty], state_templates=[V])
    for gradients in (with_saved, by_templates):
        for gradient, like in zip(gradients, (empty, V, w), strict=True):
            assert gradient is not None
            assert gradient.shape == like.shape
            assert gradient.dtype == like.dtype
            assert not gradient.any()


@pytest.mark.usefixtures("no_launch")
def test_fixture_no_launch_detects_a_launch() -> None:
    kernel, info = build_inference_kernel(soft_lif, 1, 1, 1)
    with pytest.raises(AssertionError, match="a kernel was launched"):
        flexsn_inference(kernel, info, X, V)


# -- what comes in -------------------------------------------------------------------------------------


def test_wrong_tensors_are_named() -> None:
    def core(x: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v + x * y
        return h, h

    kernel, info = build_inference_kernel(core, 2, 1, 1)
    not_a_tensor: Any = [1.0]
    with pytest.raises(TypeError, match="argument 1 is a list; a scan takes tensors"):
        flexsn_inference(kernel, info, X, not_a_tensor, V)
    with pytest.raises(ShapeError, match="have 6, 5 time steps: their leading dimension T must be equal"):
        flexsn_inference(kernel, info, X, X[:5], V)
    with pytest.raises(ShapeError, match=r"input 1 has no dimensions; an input sequence is \[T, \*step\]"):
        flexsn_inference(kernel, info, X, X[0, 0, 0], V)
    with pytest.raises(ShapeError, match=r"\[41, 37\], \[41, 36\], which do not broadcast"):
        flexsn_inference(kernel, info, X, X[..., 1:], V)
    with pytest.raises(DeviceError, match="are on cpu and meta: move them to one device"):
        flexsn_inference(kernel, info, X.cpu(), X.to("meta"), V.cpu())


def test_state_with_a_wrong_shape_is_refused() -> None:
    kernel, info = build_inference_kernel(soft_lif, 1, 1, 1)
    with pytest.raises(ValueError, match=r"state 0 .*\[37\].*\[41, 37\].*Initialise"):
        flexsn_inference(kernel, info, X, V[0])

    def keeps(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return x, v

    kernel, info = build_inference_kernel(keeps, 1, 1, 1)
    with pytest.raises(ValueError, match=r"\[37\], \[41, 37\]: all outputs and states"):
        flexsn_inference(kernel, info, X, V[0])


@pytest.mark.parametrize("absent", [None, 0, 1], ids=["both", "states", "outputs"])
def test_backward_of_no_steps_takes_shapes_from_the_gradients(absent: int | None) -> None:
    core, w = with_gain()
    backward, info, _ = save_for_backward(core, X, V)
    grads: list[Tensor | None] = [X[:0], X[:0].clone()]
    if absent is not None:
        grads[absent] = None
    grad_x, grad_v, grad_w = flexsn_backward(backward, info, *grads)
    for gradient, like in ((grad_x, X[:0]), (grad_v, V), (grad_w, w)):
        assert gradient is not None
        assert torch.equal(gradient, torch.zeros_like(like))
