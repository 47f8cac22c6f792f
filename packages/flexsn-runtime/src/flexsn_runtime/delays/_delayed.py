"""Differentiable delays of sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexsn_runtime._torch_private import SingleLevelFunction, is_batched, transform_at_work
from flexsn_runtime.backend import why_unavailable
from flexsn_runtime.delays import _launch

# On the CPU, PyTorch's operations are faster than Triton's interpreter.
_DEVICES = {"cuda"}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Taps = Callable[[Tensor], Tensor]


def why_no_delay_kernel(x: Tensor) -> str | None:
    """Returns the reason why no kernel can delay the sequence `x`, `[T, *step]`; `None` if a kernel can delay `x`."""
    if type(x) not in (Tensor, torch.nn.Parameter):
        return f"it is a {type(x).__name__}"
    if torch.compiler.is_compiling() or transform_at_work() is not None:
        return "a compiler or a transform traces its operations"
    if x.dtype not in _DTYPES:
        return f"it is {x.dtype}"
    if x.numel() == 0:
        return "it is empty"
    if x.device.type not in _DEVICES:
        return f"it is on {x.device.type}"
    return why_unavailable(x.device)


def delay_between(
    x: Tensor, past: Tensor | None, whole: Tensor, fraction: Tensor | None, inner: int, most: int
) -> Tensor:
    """Returns the values of `x` from `whole + fraction` steps before each step; see `_launch.between`.

    Gradients flow to `x`, `past` and `fraction`. `why_no_delay_kernel(x)` must be `None`.
    """
    x, past = x.contiguous(), None if past is None else past.contiguous()
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, past, fraction)):
        y: Tensor = _Between.apply(x, past, whole, fraction, inner, most)
        return y
    return _launch.between(x, past, whole, fraction, inner, most)


def delay_by_taps(x: Tensor, past: Tensor | None, delay: Tensor, taps_of: Taps, slopes_of: Taps, inner: int) -> Tensor:
    """Computes `y[t] = sum over l of taps[l] x[t - l]`; see `_launch.filtered`.

    Gradients flow to `x`, `past` and `delay`. `why_no_delay_kernel(x)` must be `None`.

    Args:
        delay: `[size]`.
        taps_of: differentiable function that maps delays to `taps`, `[most + 1, size]`; each column depends on one
            delay.
        slopes_of: function that maps delays to the derivatives of the taps.
    """
    x, past = x.contiguous(), None if past is None else past.contiguous()
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, past, delay)):
        y: Tensor = _Filtered.apply(x, past, delay, taps_of, slopes_of, inner)
        return y
    return _launch.filtered(x, past, taps_of(delay.detach()).contiguous(), inner)


class _Between(SingleLevelFunction):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, past: Tensor | None, whole: Tensor, fraction: Tensor | None, inner: int, most: int
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.inner, ctx.most = inner, most
        ctx.save_for_backward(x if ctx.needs_input_grad[3] else None, past, whole, fraction)
        return _launch.between(x, past, whole, fraction, inner, most)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (grad,) = grads
        if grad is None:
            return (None,) * 6
        x, past, whole, fraction = ctx.saved_tensors
        if _is_traced(grad):

            def compute(x: Tensor, past: Tensor | None, fraction: Tensor | None) -> Tensor:
                return _compute_between(x, past, whole, fraction, ctx.inner, ctx.most)

            needs = [ctx.needs_input_grad[i] for i in (0, 1, 3)]
            of_x, of_past, of_fraction = _differentiate(compute, [x, past, fraction], needs, grad)
            return of_x, of_past, None, of_fraction, None, None
        of_x, of_past, total = _launch.between_gradient(
            grad.contiguous(), x, past, whole, fraction, ctx.inner, ctx.most
        )
        of_fraction = None if total is None else _sum_by_delay(total, whole.numel(), ctx.inner).to(fraction.dtype)
        return of_x, of_past, None, of_fraction, None, None


class _Filtered(SingleLevelFunction):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, past: Tensor | None, delay: Tensor, taps_of: Taps, slopes_of: Taps, inner: int
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.inner, ctx.taps_of = inner, taps_of
        learned = ctx.needs_input_grad[2]
        taps = taps_of(delay).contiguous()
        slopes = slopes_of(delay).contiguous() if learned else taps
        ctx.save_for_backward(x if learned else None, past, delay, taps, slopes)
        return _launch.filtered(x, past, taps, inner)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (grad,) = grads
        if grad is None:
            return (None,) * 6
        x, past, delay, taps, slopes = ctx.saved_tensors
        if _is_traced(grad):

            def compute(x: Tensor, past: Tensor | None, delay: Tensor) -> Tensor:
                return _compute_filtered(x, past, ctx.taps_of(delay), ctx.inner)

            return *_differentiate(compute, [x, past, delay], ctx.needs_input_grad[:3], grad), None, None, None
        of_x, of_past, total = _launch.filter_gradient(grad.contiguous(), x, past, taps, slopes, ctx.inner)
        of_delay = None if total is None else _sum_by_delay(total, delay.numel(), ctx.inner).to(delay.dtype)
        return of_x, of_past, of_delay, None, None, None


def _sum_by_delay(total: Tensor, size: int, inner: int) -> Tensor:
    """Returns, for each delay, the sum over the elements that have this delay, in a fixed order."""
    return total.reshape(-1, size, inner).sum((0, 2))


# -- PyTorch's operations, for second gradients and batched gradients ------------------------------------------


def _is_traced(grad: Tensor) -> bool:
    """True if a backward must run as PyTorch's operations, because autograd, a mode or a transform processes them."""
    return torch.is_grad_enabled() or transform_at_work() is not None or is_batched(grad)


def _differentiate(
    function: Callable[..., Tensor], tensors: Sequence[Tensor | None], needs: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """Returns the gradients with respect to these tensors; `None` for each gradient that is not needed."""
    create_graph = torch.is_grad_enabled()
    first, *others = tensors
    if first is None:  # zeros, because no needed gradient depends on the values of this tensor
        first = torch.zeros_like(grad).requires_grad_()
    arguments = [first, *others]
    with torch.enable_grad():
        y = function(*arguments)
    needed_tensors = [t for t, is_needed in zip(arguments, needs, strict=True) if is_needed and t is not None]
    gradients = iter(torch.autograd.grad(y, needed_tensors, grad, create_graph=create_graph))
    return [next(gradients) if is_needed else None for is_needed in needs]


def _expand_delays(delays: Tensor, step: Sequence[int], inner: int) -> Tensor:
    """Returns, for each element of a step, the value of its delay: `[..., size] -> [..., *step]`."""
    delay_by_element = delays.repeat_interleave(inner, -1)
    copies = math.prod(step) // delay_by_element.shape[-1]
    return delay_by_element.repeat(*[1] * (delay_by_element.dim() - 1), copies).view(
        *delay_by_element.shape[:-1], *step
    )


def _prepend_past(x: Tensor, past: Tensor | None, most: int) -> Tensor:
    return torch.cat([x.new_zeros((most, *x.shape[1:])) if past is None else past, x])


def _compute_between(
    x: Tensor, past: Tensor | None, whole: Tensor, fraction: Tensor | None, inner: int, most: int
) -> Tensor:
    values, step = _prepend_past(x, past, most), x.shape[1:]
    index = most + torch.arange(len(x), device=x.device).view(-1, *[1] * len(step))
    place = index - _expand_delays(whole.long(), step, inner)
    late = values.gather(0, place)
    if fraction is None:
        return late
    later = values.gather(0, place - 1)
    return late + _expand_delays(fraction, step, inner) * (later - late)


def _compute_filtered(x: Tensor, past: Tensor | None, taps: Tensor, inner: int) -> Tensor:
    most = len(taps) - 1
    values, weights = _prepend_past(x, past, most), _expand_delays(taps, x.shape[1:], inner)
    terms = [weights[n] * values[most - n : most - n + len(x)] for n in range(most + 1)]
    return torch.stack(terms).sum(0).to(x.dtype)
