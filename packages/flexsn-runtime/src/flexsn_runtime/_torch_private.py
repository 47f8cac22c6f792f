"""Access to private names of torch. Importing this module checks that each name exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from flexsn_hop.versions import expect, needed, private

if TYPE_CHECKING:
    import sympy

_NO_TRACE = "steps cannot be traced, and nothing can be compiled"
_BLIND = "compiled kernels cannot be called: they would not see a transform of torch.func, and give wrong gradients"
_NO_SIZES = "a compiled graph of symbolic sizes runs as a loop"

# `torch.autograd.Function` checks for transforms of `torch.func` at every `apply`. `_SingleLevelFunction` saves the
# time of this check.
if TYPE_CHECKING:
    from torch._ops import OpOverload as OpOverload
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

    SingleLevelFunction = torch.autograd.Function
else:
    OpOverload = private("torch._ops", "OpOverload", "calls are not launched by the compiled launcher", default=())
    TorchDispatchMode = private("torch.utils._python_dispatch", "TorchDispatchMode", _NO_TRACE)
    SingleLevelFunction = private(
        "torch.autograd.function",
        "_SingleLevelFunction",
        "calls of compiled kernels take longer",
        default=torch.autograd.Function,
    )
_included_keys = private("torch._C", "_dispatch_tls_local_include_set", _NO_TRACE, default=lambda: None)
_excluded_keys = private("torch._C", "_dispatch_tls_local_exclude_set", _NO_TRACE, default=lambda: None)
_force_keys = private("torch._C", "_ForceDispatchKeyGuard", _NO_TRACE)
_set_hooks_tracing = private("torch._C", "_autograd._saved_tensors_hooks_set_tracing", _NO_TRACE)
_disable_current_modes = private("torch.utils._python_dispatch", "_disable_current_modes", _NO_TRACE)
are_transforms_active = private("torch._C", "_are_functorch_transforms_active", _BLIND)
tracing_state = private("torch._C", "_get_tracing_state", _BLIND)
_is_batched = private("torch._C", "_functorch.is_batchedtensor", _BLIND)
_is_legacy_batched = private("torch._C", "_functorch.is_legacy_batchedtensor", _BLIND, default=lambda tensor: False)
_saved_tensors_hooks = private(
    "torch._C", "_autograd._top_saved_tensors_default_hooks", _BLIND, default=lambda ignores_tracing: None
)
number_of_modes = private("torch._C", "_len_torch_dispatch_stack", _BLIND)
# Returns the nesting level of forward mode, which is at least 0 inside of forward mode. If this version of torch does
# not expose the level, always returns 0.
forward_level: Callable[[], int] = partial(getattr, forward_ad, "_current_level", 0)
_mode_of = private("torch._C", "_get_dispatch_mode", _BLIND)
_sees_forward_mode = private("torch.autograd.forward_ad", "_current_level", _BLIND, default=None) is not None
expect("torch.fx.experimental.sym_node", ["SymNode.expr", "SymNode.hint"], _NO_SIZES)  # sympy is slow to import
# Returns True if `torch.autocast` is on for at least one device.
is_any_autocast = private("torch._C", "_is_any_autocast_enabled", "calls take longer", default=lambda: True)

_TensorGuards = private("torch._C", "_dynamo.guards.TensorGuards", "calls take longer", default=None)

# The dispatch keys of a thread that runs no operator and no mode, as read when this module is imported.
_INCLUDED = _included_keys()
_EXCLUDED = _excluded_keys()


@contextmanager
def as_outside() -> Iterator[None]:
    """Returns a context for tracing that is independent of the caller's dispatch keys and saved-tensor hooks.

    The implementation of a custom op runs without some dispatch keys that tracing needs. Also, the caller's
    saved-tensor hooks (activation checkpointing) must not receive the tensors that a trace saves for its own backward.
    """
    # An alternative, hooks that change nothing, would leak memory: if an op saves its own result, torch would free
    # neither the op nor the result.
    before = _set_hooks_tracing(True)
    try:
        with _force_keys(_INCLUDED, _EXCLUDED):
            yield
    finally:
        _set_hooks_tracing(before)


@contextmanager
def untraced() -> Iterator[None]:
    """Returns a context like `as_outside`, in which the dispatch modes of an active tracer are also disabled."""
    with as_outside(), _disable_current_modes():
        yield


_MODES = {
    private("torch._C", f"_TorchDispatchModeKey.{key}", _BLIND, default=key): name
    for key, name in (("PROXY", "make_fx"), ("FUNCTIONAL", "functionalization"), ("FAKE", "FakeTensorMode"))
}


def transform_at_work() -> str | None:
    """Returns the name of an active transform that a launch would bypass; `None` if no such transform is active.

    Such transforms are those of `torch.func`, forward mode, `torch.jit.trace`, and modes that trace or replace
    operators.
    """
    if are_transforms_active():
        return "a transform of torch.func (grad, vjp, vmap, jvp, ...)"
    if not _sees_forward_mode:
        needed("torch.autograd.forward_ad", "_current_level", _BLIND)
    if forward_ad._current_level >= 0:
        return "torch.autograd.forward_ad"
    if tracing_state() is not None:
        return "torch.jit.trace (torch.export can record it)"
    if number_of_modes():
        return next((name for key, name in _MODES.items() if _mode_of(key) is not None), None)
    return None


def alike(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Returns a fast function that compares `len(tensors)` other tensors with `tensors`.

    If the function returns True, the tensors have equal types, dtypes, devices, shapes, strides and `requires_grad`,
    and equal flags for lazy negation. In addition, autocast, modes, `torch.func` and inference mode are as they were
    when `alike` was called. The function does not compare grad mode, forward mode, autocast's dtype or memory
    addresses. It returns False if any tensor is not a plain tensor or parameter.
    """
    if _TensorGuards is None or not all(type(t) in _PLAIN and t.layout is torch.strided for t in tensors):
        return never
    check: Callable[..., bool] = _TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(t.shape) for t in tensors],
        dynamic_dims_strides=[list(t.stride()) for t in tensors],
    ).check
    return check


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def never(*tensors: object) -> bool:
    """Returns False, for any tensors. Can be called like the functions that `alike` returns."""
    return False


def is_batched(tensor: torch.Tensor | None) -> bool:
    """True if a gradient is a batch of gradients, under `is_grads_batched=True` or `vmap` of a backward."""
    return tensor is not None and bool(_is_batched(tensor) or _is_legacy_batched(tensor))


def has_saved_tensors_hooks() -> bool:
    """True inside of `torch.autograd.graph.saved_tensors_hooks`."""
    return _saved_tensors_hooks(False) is not None


def size_expression(size: int | torch.SymInt) -> sympy.Expr:
    """Returns the sympy expression of a size."""
    if isinstance(size, torch.SymInt):
        return _read_symbol(size, "expr")
    import sympy

    return sympy.Integer(size)


def size_hint(size: int | torch.SymInt) -> int | None:
    """Returns the value of a symbolic size during tracing; `None` if the value is unknown. Adds no guard."""
    hint: int | None = _read_symbol(size, "hint") if isinstance(size, torch.SymInt) else size
    return hint


def _read_symbol(size: torch.SymInt, attribute: str) -> Any:
    try:
        return getattr(size.node, attribute)
    except AttributeError:
        needed("torch.fx.experimental.sym_node", f"SymNode.{attribute}", _NO_SIZES)
        raise


_COPIED = "results of convolutions in steps are copied"
_select_conv_backend = private("torch._C", "_select_conv_backend", _COPIED, default=None)
_CUDNN = private("torch._C", "_ConvBackend.Cudnn", _COPIED, default=None)
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def convolution_into(
    out: torch.Tensor, value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, numbers: Sequence[Any]
) -> Callable[[torch.Tensor, torch.Tensor], object] | None:
    """Returns a function `(value, out)` by which cuDNN writes a convolution to `out`.

    The function uses the algorithm that PyTorch selects. A transposed convolution of stride 1 is computed as a
    convolution with the mirrored weight, which cuDNN can also write to existing memory.

    Args:
        out, value: tensors with the same layouts as in all later calls.
        numbers: stride, padding, dilation, transposed, output_padding and groups.

    Returns:
        The function; `None` if cuDNN does not write this convolution to existing memory, so that PyTorch allocates the
        result.
    """
    stride, padding, dilation, transposed, output_padding, groups = numbers
    if _select_conv_backend is None or bias is not None or not value.is_cuda or 0 in value.shape:
        return None
    channels_last = _FORMATS.get(value.dim())
    if channels_last is None:
        return None
    if transposed:
        if groups != 1 or any(s != 1 for s in stride) or any(output_padding):
            return None
        padding = [d * (k - 1) - p for d, k, p in zip(dilation, weight.shape[2:], padding, strict=False)]
        if len(padding) != weight.dim() - 2 or min(padding) < 0:
            return None
        memory_format = torch.contiguous_format if weight.is_contiguous() else channels_last
        weight = weight.flip(*range(2, weight.dim())).transpose(0, 1).contiguous(memory_format=memory_format)
        transposed = False
    of_value, of_weight, of_out = (
        (t.is_contiguous(), t.is_contiguous(memory_format=channels_last)) for t in (value, weight, out)
    )
    # Contiguous, but not channels-last. Tensors that are both contiguous and channels-last are left to PyTorch.
    contiguous = (True, False)
    if (of_value, of_weight, of_out) != (contiguous,) * 3 and (of_value, of_out) != ((False, True),) * 2:
        return None
    try:
        backend = _select_conv_backend(
            value, weight, None, stride, padding, dilation, transposed, output_padding, groups, None
        )
        tf32 = bool(torch.backends.cudnn.allow_tf32)
    except (RuntimeError, TypeError):
        return None
    if backend != _CUDNN:
        return None
    is_deterministic = torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    settings = (padding, stride, dilation, groups, torch.backends.cudnn.benchmark, is_deterministic, tf32)
    write: Any = torch.ops.aten.cudnn_convolution.out
    return lambda value, out: write(value, weight, *settings, out=out)


def copy_each(into: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copies each tensor into the tensor at the same position in `into`, which has the same shape and dtype.

    If all tensors have one dtype, they are copied in few launches.
    """
    if len({tensor.dtype for tensor in tensors}) == 1:
        torch._foreach_copy_(list(into), list(tensors))
        return
    for target, tensor in zip(into, tensors, strict=True):
        target.copy_(tensor)
