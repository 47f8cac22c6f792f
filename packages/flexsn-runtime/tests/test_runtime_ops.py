"""The five custom ops pass `opcheck`, equal the loop, and can be compiled."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from runtime_cores import DEVICE, STEP, Core, hard_lif, loop, random, soft_lif
from torch import Tensor

from flexsn_runtime import (
    DoubleBackwardError,
    TensorCountError,
    UnknownHandleError,
    build_inference_final_state_kernel,
    build_inference_kernel,
    build_training_kernels,
    flexsn_inductor_backward,
    flexsn_inductor_inference,
    flexsn_inductor_inference_final_state,
    flexsn_inductor_training,
    flexsn_inductor_training_final_state,
    get_flexsn_kernel_handle,
    register_flexsn_kernel_handle,
    release_flexsn_kernel_handle,
)
from flexsn_runtime.compat._handles import _handles

Op = Callable[[int, list[Tensor]], list[Tensor]]
INFERENCE: tuple[Op, ...] = (flexsn_inductor_inference, flexsn_inductor_inference_final_state)
TRAINING: tuple[Op, ...] = (flexsn_inductor_training, flexsn_inductor_training_final_state)

OPERATOR = torch.ops.flexsn.flexsn_inductor_inference.default
W = random(STEP[1], seed=5).requires_grad_()
X, V = random(6, *STEP), random(*STEP, seed=1)


def with_gain(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = v * 0.5 + x * W
    return h * h, h


def register(core: Core, **options: Any) -> int:
    examples = (torch.zeros(STEP, device=DEVICE), torch.zeros(STEP, device=DEVICE))
    inference, inference_info = build_inference_kernel(core, 1, 1, 1, examples)
    final, final_info = build_inference_final_state_kernel(core, 1, 1, 1, examples)
    forward, backward, info = build_training_kernels(core, 1, 1, 1, examples, **options)
    return register_flexsn_kernel_handle(
        inference_kernel=inference,
        inference_info=inference_info,
        inference_final_state_kernel=final,
        inference_final_state_info=final_info,
        forward_kernel=forward,
        backward_kernel=backward,
        training_info=info,
    )


@pytest.fixture
def handle() -> Iterator[int]:
    """Yields a handle of `with_gain`."""
    number = register(with_gain)
    yield number
    release_flexsn_kernel_handle(number)


@pytest.fixture
def hard() -> Iterator[int]:
    """Yields a handle of `hard_lif`, whose output is not differentiable."""
    number = register(hard_lif)
    yield number
    release_flexsn_kernel_handle(number)


def draw_leaves() -> tuple[Tensor, Tensor]:
    return X.clone().requires_grad_(), V.clone().requires_grad_()


def compute_reference(x: Tensor, v: Tensor, *, final: bool, core: Core = with_gain) -> list[Tensor]:
    output, states = loop(core, 1, [x], [v])
    return [output, states[-1] if final else states]


# -- values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("final", [False, True], ids=["seqs", "final"])
def test_inference_equals_the_loop(handle: int, final: bool) -> None:
    actual = INFERENCE[final](handle, [X, V, W.detach()])
    for a, b in zip(actual, compute_reference(X, V, final=final), strict=True):
        assert torch.equal(a, b)
        assert not a.requires_grad


def test_inference_has_no_gradient(handle: int) -> None:
    output = flexsn_inductor_inference(handle, [X, V, W])[0]
    with pytest.raises(RuntimeError, match="flexsn_inductor_inference"):
        output.sum().backward()


def test_new_shapes_are_specialised_inside_of_the_op(handle: int) -> None:
    x, v = X[:, :5].clone().requires_grad_(), V[:5].clone().requires_grad_()
    actual, expected = flexsn_inductor_training(handle, [x, v, W])[:2], compute_reference(x, v, final=False)
    gradients = torch.autograd.grad(actual[0].sum(), [x, v, W])
    for a, b in zip(gradients, torch.autograd.grad(expected[0].sum(), [x, v, W]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("final", [False, True], ids=["seqs", "final"])
def test_training_equals_the_loop(handle: int, final: bool) -> None:
    x, v = draw_leaves()
    actual, expected = TRAINING[final](handle, [x, v, W])[:2], compute_reference(x, v, final=final)
    weights = [torch.rand_like(t) - 0.4 for t in expected]
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)
    gradients = torch.autograd.grad(actual, [x, v, W], weights)
    for a, b in zip(gradients, torch.autograd.grad(expected, [x, v, W], weights), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.long(all_but=["*inference_final_state*", "*training)*"])
@pytest.mark.parametrize("op", [*INFERENCE, *TRAINING], ids=str)
def test_missing_states_mean_zeros(hard: int, op: Op) -> None:
    for a, b in zip(op(hard, [X]), op(hard, [X, torch.zeros_like(V)]), strict=True):
        assert torch.equal(a, b)


def test_missing_states_have_the_gradients_of_zeros(hard: int) -> None:
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    flexsn_inductor_training(hard, [x])[1].sum().backward()
    flexsn_inductor_training(hard, [y, torch.zeros_like(V)])[1].sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert torch.equal(x.grad, y.grad)


def test_outputs_may_be_not_differentiable(hard: int) -> None:
    x, v = draw_leaves()
    output, state, checkpoints = flexsn_inductor_training(hard, [x, v])
    assert not output.requires_grad
    assert state.requires_grad
    assert not checkpoints.requires_grad


def test_requires_grad_mask_of_the_handle_applies() -> None:
    handle = register(soft_lif, requires_grad=(True, False))
    x, v = draw_leaves()
    flexsn_inductor_training(handle, [x, v])[0].sum().backward()
    assert x.grad is not None
    assert v.grad is None
    only = X.clone()
    flexsn_inductor_training(handle, [only, v])[0].sum().backward()
    assert v.grad is None
    release_flexsn_kernel_handle(handle)


def test_only_tensors_that_require_grad_have_gradients(handle: int) -> None:
    v = V.clone().requires_grad_()
    flexsn_inductor_training(handle, [X, v, W.detach()])[0].sum().backward()
    expected = torch.autograd.grad(compute_reference(X, w := V.clone().requires_grad_(), final=True)[0].sum(), w)[0]
    assert v.grad is not None
    torch.testing.assert_close(v.grad, expected, rtol=1e-4, atol=1e-4)


def test_forgotten_parameters_are_refused(handle: int) -> None:
    """Checks that an error names missing parameters, because an op has gradients only for its arguments."""
    with pytest.raises(TensorCountError, match=r"1 tensors that require grad.*pass the captured tensors"):
        flexsn_inductor_training(handle, [X, V])


# -- handles -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [*INFERENCE, *TRAINING], ids=str)
def test_unknown_handle_is_refused(op: Op) -> None:
    with pytest.raises(UnknownHandleError, match="no kernel handle 123456789"):
        op(123456789, [X])


def test_handle_without_the_requested_kernel_is_refused() -> None:
    forward, backward, info = build_training_kernels(soft_lif, 1, 1, 1)
    handle = register_flexsn_kernel_handle(
        inference_kernel=None,
        inference_info=None,
        inference_final_state_kernel=None,
        inference_final_state_info=None,
        forward_kernel=forward,
        backward_kernel=backward,
        training_info=info,
    )
    with pytest.raises(UnknownHandleError, match=f"handle {handle} was registered without .* inference"):
        flexsn_inductor_inference(handle, [X])
    release_flexsn_kernel_handle(handle)


def test_saved_context_keeps_the_handle_alive() -> None:
    handle = register(soft_lif)
    x, v = draw_leaves()
    results = flexsn_inductor_training(handle, [x, v])
    release_flexsn_kernel_handle(handle)  # as after deleting the module
    assert get_flexsn_kernel_handle(handle).active_refs == 1
    results[0].sum().backward()
    expected = torch.autograd.grad(loop(soft_lif, 1, [y := X.clone().requires_grad_()], [V])[0].sum(), y)[0]
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected)
    del results
    gc.collect()
    assert handle not in _handles


def test_deleted_context_releases_the_handle() -> None:
    handle = register(soft_lif)
    x, v = draw_leaves()
    results = flexsn_inductor_training(handle, [x, v])
    alive = weakref.ref(get_flexsn_kernel_handle(handle).forward_kernel.program)  # type: ignore[union-attr]
    release_flexsn_kernel_handle(handle)
    assert handle in _handles
    del results
    gc.collect()
    assert handle not in _handles
    assert alive() is None


def test_no_context_is_saved_without_gradients(handle: int) -> None:
    with torch.no_grad():
        flexsn_inductor_training(handle, [X, V, W])
    assert get_flexsn_kernel_handle(handle).active_refs == 0


# -- opcheck -------------------------------------------------------------------------------------------

# torch's opcheck reads the gradients of copies of the arguments, about which torch 2.15 warns.
OPCHECK_WARNS = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.mark.long(all_but=["*final_state*"])
@pytest.mark.parametrize("op", INFERENCE, ids=str)
def test_inference_passes_opcheck(handle: int, op: Any) -> None:
    for x in (X, X[:0], X.transpose(1, 2).contiguous().transpose(1, 2)):
        assert set(torch.library.opcheck(op, (handle, [x, V, W.detach()])).values()) == {"SUCCESS"}


@pytest.mark.long(all_but=["*training_final_state*"])
@OPCHECK_WARNS
@pytest.mark.parametrize("op", TRAINING, ids=str)
def test_training_passes_opcheck(handle: int, op: Any) -> None:
    x, v = draw_leaves()
    assert set(torch.library.opcheck(op, (handle, [x, v, W])).values()) == {"SUCCESS"}
    assert set(torch.library.opcheck(op, (handle, [X, V, W.detach()])).values()) == {"SUCCESS"}


@pytest.mark.long(all_but=["*training)*"])
@OPCHECK_WARNS
@pytest.mark.parametrize("op", TRAINING, ids=str)
def test_training_without_states_and_with_fixed_outputs_passes_opcheck(hard: int, op: Any) -> None:
    x, _ = draw_leaves()
    assert set(torch.library.opcheck(op, (hard, [x])).values()) == {"SUCCESS"}


@pytest.mark.long(all_but=["(True, False, True)", "(False, True, False)"])
@pytest.mark.parametrize("required", [(True, True, True), (True, False, True), (False, True, False)], ids=str)
def test_backward_passes_opcheck(handle: int, required: tuple[bool, ...]) -> None:
    with torch.no_grad():
        output, _, checkpoints = flexsn_inductor_training(handle, [X, V, W])
    args = [torch.ones_like(output), None, X.transpose(1, 2).contiguous().transpose(1, 2), V, W.detach()]
    results = torch.library.opcheck(flexsn_inductor_backward, (handle, [*args, checkpoints], required, True))
    assert set(results.values()) == {"SUCCESS"}


# -- modes ---------------------------------------------------------------------------------------------


def test_inference_mode_and_no_grad_have_no_gradients(handle: int) -> None:
    expected = compute_reference(X, V, final=False)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            for op in (flexsn_inductor_inference, flexsn_inductor_training):
                output = op(handle, [X, V, W])[0]
                assert torch.equal(output, expected[0])
                assert not output.requires_grad


def test_double_backward_is_refused_by_name(handle: int) -> None:
    x, v = draw_leaves()
    output = flexsn_inductor_training(handle, [x, v, W])[0]
    (grad,) = torch.autograd.grad((output * output).sum(), x, create_graph=True)
    with pytest.raises(DoubleBackwardError, match=r"no gradient itself .*backend='torch'"):
        grad.sum().backward()


# -- compilers -----------------------------------------------------------------------------------------


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.long(all_but=["dynamic"])
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_training_equals_the_loop(handle: int, dynamic: bool) -> None:
    def step(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        output, state, _ = flexsn_inductor_training_final_state(handle, [x * 2.0, v, w])
        return output + 1.0, state

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for steps in (6, 3):
        x, v = X[:steps].clone().requires_grad_(), V.clone().requires_grad_()
        expected = compute_reference(x * 2.0, v, final=True)
        expected[0] = expected[0] + 1.0
        actual = compiled(x, v, W)
        weights = [torch.rand_like(t) - 0.4 for t in expected]
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b)
        gradients = torch.autograd.grad(actual, [x, v, W], weights)
        for a, b in zip(gradients, torch.autograd.grad(expected, [x, v, W], weights), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_double_backward_is_refused(handle: int) -> None:
    """Checks the error of torch, because code that AOTAutograd compiles has no second derivative."""
    step = torch.compile(lambda x: flexsn_inductor_training(handle, [x, V, W])[0] * 2.0, backend="aot_eager")
    x, _ = draw_leaves()
    loss = step(x).square().sum()
    with pytest.raises(RuntimeError, match=r"double backward|requires create_graph=False"):
        torch.autograd.grad(loss, x, create_graph=True)[0].sum().backward()


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_inference_for_several_lengths_is_compiled_once(handle: int) -> None:
    compilations = []

    def backend(module: Any, inputs: Any) -> Any:
        compilations.append(module)
        return module

    @torch.compile(fullgraph=True, backend=backend, dynamic=True)
    def run(x: Tensor, v: Tensor, w: Tensor) -> list[Tensor]:
        results: list[Tensor] = flexsn_inductor_inference(handle, [x, v, w])
        return results

    w = W.detach()
    for steps in (6, 4, 3):
        x = X[:steps].clone()  # a view of X would be compiled separately
        for a, b in zip(run(x, V, w), compute_reference(x, V, final=False), strict=True):
            assert torch.equal(a, b)
    assert len(compilations) == 1
    assert compilations[0].graph.find_nodes(op="call_function", target=OPERATOR)
