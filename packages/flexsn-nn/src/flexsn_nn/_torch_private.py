"""Access to private names of torch. Names outside of `torch._dynamo` are looked up when this module is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

from flexsn_hop.versions import lacking, private

_UNSEEN = "neurons cannot distinguish a call from a recomputation, and do not run inside of activation checkpointing"

backward_pass = private("torch._C", "_current_graph_task_id", _UNSEEN)
_tracing_state = private("torch._C", "_get_tracing_state", "neurons cannot detect that `torch.jit.trace` records them")
_disable_dynamo = private(
    "torch._compile", "_disable_dynamo", "importing neurons takes longer", default=torch.compiler.disable
)
_current_node = private("torch._C", "_current_autograd_node", _UNSEEN)
_keeps_graph = private(
    "torch._C",
    "_autograd._get_current_graph_task_keep_graph",
    "a forgotten reset between two training steps gets torch's own error",
    default=lambda: True,
)
private("torch._C", "_functions.AccumulateGrad._sequence_nr", _UNSEEN)
_ESCAPED = "a state that a transform of torch.func has left on a neuron is not recognised"
_is_wrapped = private("torch._C", "_functorch.is_functorch_wrapped_tensor", _ESCAPED, default=lambda tensor: False)
_unwrap_if_dead = private("torch._C", "_functorch.unwrap_if_dead", _ESCAPED, default=lambda tensor: tensor)
_is_batched = private("torch._C", "_functorch.is_batchedtensor", _ESCAPED, default=lambda tensor: False)
_level_of = private("torch._C", "_functorch.maybe_get_level", _ESCAPED, default=lambda tensor: -1)
_current_level = private("torch._C", "_functorch.maybe_current_level", _ESCAPED, default=lambda: None)


def _copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


_tracing_context = private(
    "torch._guards",
    "TracingContext.try_get",
    "a second call of a neuron inside of one `torch.export` is refused",
    default=lambda: None,
)
_foreach_copy = private("torch", "_foreach_copy_", "captured steps copy tensors one by one", default=_copy_each)
_KEPT_BACK = "after a capture that failed, the allocator of a GPU does not free memory"
_end_allocation = private("torch._C", "_cuda_endAllocateToPool", _KEPT_BACK, default=lambda device, pool: None)
_release_pool = private("torch._C", "_cuda_releasePool", _KEPT_BACK, default=lambda device, pool: None)
# In torch 2.11, Dynamo evaluates the function `torch.compiler.is_exporting` as True even in `torch.compile`. The flag
# that this function reads is evaluated correctly. Since torch 2.12, the function is evaluated correctly, too.
_FUNCTION_IS_RIGHT = torch.__version__.split(".")[:2] != ["2", "11"] or bool(
    lacking("torch.compiler", ["_is_exporting_flag"])
)

# `torch.fx.Tracer.is_leaf_module` compares the beginning of a module's `__module__` with `torch.nn`. The attribute can
# also be set on an instance.
LEAF_NAMESPACE = "torch.nn.flexsn_nn"

# Layout of MKL-DNN tensors; reading `Tensor.is_mkldnn` would add a node to Dynamo's graphs.
MKLDNN: torch.layout | None = private("torch", "_mkldnn", "MKL-DNN tensors get an unclear error", default=None)

_Function = TypeVar("_Function", bound=Callable[..., Any])


def is_exporting() -> bool:
    """True if `torch.export` traces the call."""
    return torch.compiler.is_exporting() if _FUNCTION_IS_RIGHT else torch.compiler._is_exporting_flag


def tracing_context() -> object | None:
    """Returns the active trace of a compiler or of `torch.export`; `None` if no active trace is known."""
    return _tracing_context()  # type: ignore[no-any-return]


def is_onnx_exporting() -> bool:
    """True if `torch.onnx.export` records the call. Does not import `torch.onnx`."""
    onnx = sys.modules.get("torch.onnx")
    return onnx is not None and bool(onnx.is_in_onnx_export())


def between_graphs(reason: str) -> Callable[[_Function], _Function]:
    """Returns a decorator like `torch.compiler.disable` that delays the slow import of Dynamo until the first call.

    Args:
        reason: reason why the function runs between the graphs of `torch.compile`, for messages about graph breaks.
    """

    def decorate(function: _Function) -> _Function:
        disabled = _disable_dynamo(function)
        disabled._torchdynamo_disable, disabled._torchdynamo_disable_msg = True, reason
        return disabled  # type: ignore[no-any-return]

    return decorate


def constant(function: _Function) -> _Function:
    """Marks a function as `torch.compiler.assume_constant_result` does, without importing Dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def compiler_of(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that `torch.compile` calls for `backend`, which is a function or a name."""
    if not isinstance(backend, str):
        return backend
    consequence = "`memory.PackingBackend` and `fusion.AbsorbingBackend` take functions only, and no names"
    find = private("torch._dynamo", "lookup_backend", consequence)
    compiler: Callable[..., Any] = find(backend)
    return compiler


def keeps_graph() -> bool:
    """True in a backward pass with `retain_graph=True`."""
    return bool(_keeps_graph())


def current_node() -> Any:
    """Returns the graph node that the backward pass is executing."""
    return _current_node()


def is_jit_tracing() -> bool:
    """True if `torch.jit.trace` records the current call."""
    return _tracing_state() is not None


def after_transforms(tensor: torch.Tensor) -> torch.Tensor | None:
    """Unwraps a tensor that was wrapped by transforms of `torch.func` that have ended.

    Returns `None` for a tensor that stands for one sample of a `vmap` that has ended.
    """
    while _is_wrapped(tensor):
        plain = _unwrap_if_dead(tensor)
        if plain is tensor:
            break
        tensor = plain
    if _is_batched(tensor) and _level_of(tensor) > (_current_level() or 0):
        return None
    return tensor


def recomputation() -> tuple[int, int] | None:
    """Identifies the current recomputation of this thread, which is a forward inside of a node's backward.

    Returns `None` outside of recomputations.
    """
    number: int = backward_pass()
    if number == -1:
        return None
    node = _current_node()
    return number, -1 if node is None else node._sequence_nr()


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies each source to its target, in few launches."""
    _foreach_copy(targets, sources)


def end_allocation_to_pool(device: int, pool: Any) -> None:
    """Makes the allocator of a GPU leave the pool of a failed capture, and frees the memory of the pool.

    Args:
        device: index of the GPU.
        pool: memory pool of the capture.
    """
    with suppress(RuntimeError):  # raised if the allocator has already left the capture
        _end_allocation(device, pool)
        _release_pool(device, pool)
