"""What touches private parts of torch. Seen working on torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import sympy
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

# `torch.autograd.Function` looks for transforms of `torch.func` first, at every `apply`.
SingleLevelFunction = torch.autograd.function._SingleLevelFunction

# Of a thread that is in no operator and in no mode; as it is when this package is imported.
_INCLUDED = torch._C._dispatch_tls_local_include_set()
_EXCLUDED = torch._C._dispatch_tls_local_exclude_set()


@contextmanager
def as_outside() -> Iterator[None]:
    """For tracing where something of the caller's is switched on or off.

    Inside a custom op's implementation, dispatch keys are off that a trace needs; and what a trace saves for
    its own backward is nothing for the caller's saved-tensor hooks (activation checkpointing).
    """
    # Not by hooks that change nothing: where an op saves its own result, torch would keep the two alive for good.
    before = torch._C._autograd._saved_tensors_hooks_set_tracing(True)
    try:
        with torch._C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED):
            yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(before)


@contextmanager
def untraced() -> Iterator[None]:
    """Like `as_outside`, and no dispatch mode sees what happens: for real tensors while a graph is traced."""
    with as_outside(), _disable_current_modes():
        yield


_MODES = {
    torch._C._TorchDispatchModeKey.PROXY: "make_fx",
    torch._C._TorchDispatchModeKey.FUNCTIONAL: "functionalization",
    torch._C._TorchDispatchModeKey.FAKE: "FakeTensorMode",
}


def transform_at_work() -> str | None:
    """Which transform of torch's the caller is inside of that would not see a launch; `None` outside of any.

    `torch.func`, forward mode, and what traces or stands in for operators.
    """
    if torch._C._are_functorch_transforms_active():
        return "a transform of torch.func (grad, vjp, vmap, jvp, ...)"
    if forward_ad._current_level >= 0:
        return "torch.autograd.forward_ad"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace (torch.export records programs that it can be part of)"
    if torch._C._len_torch_dispatch_stack():
        return next((name for key, name in _MODES.items() if torch._C._get_dispatch_mode(key) is not None), None)
    return None


def is_batched(tensor: torch.Tensor | None) -> bool:
    """Whether a gradient stands for several: `is_grads_batched`, or `vmap` of a backward."""
    functorch = torch._C._functorch
    return tensor is not None and (functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor))


def size_expression(size: int | torch.SymInt) -> sympy.Expr:
    """A size as a formula of symbols."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def size_hint(size: int | torch.SymInt) -> int | None:
    """What a symbolic size was when it was traced, if that is known. Asking puts no guard on it."""
    hint: int | None = size.node.hint if isinstance(size, torch.SymInt) else size  # type: ignore[assignment]
    return hint
