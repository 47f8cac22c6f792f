"""`s W^T + b` of spikes, and its gradients: an autograd function, and operators for compilers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn import functional as F

from flexsn_runtime._torch_private import SingleLevelFunction, is_batched, transform_at_work
from flexsn_runtime.backend import why_unavailable
from flexsn_runtime.errors import DeviceError, DtypeError, ShapeError
from flexsn_runtime.products._tiles import seen_size

MOST_PARTS = 3


def spike_linear(
    s: Tensor, weight: Tensor, bias: Tensor | None, weight_parts: int = 3, grad_parts: int = 3
) -> tuple[Tensor, Tensor | None]:
    """As `torch.nn.functional.linear` of float32 tensors, fast where `s` consists of spikes or small whole numbers.

    Numbers of `s` take one bfloat16 each; those of `weight` and of the output's gradient take `weight_parts` and
    `grad_parts`: three hold a float32, two 16 bits, one 8. The kernel checks `s`: rows with a number that is not whole
    in a bfloat16 are computed again in float32, and so is the gradient of the weight. Where kernels cannot run, and
    inside of transforms of `torch.func`, torch's product runs. Infinite numbers may give NaN.

    Args:
        s: `[..., K]` float32.
        weight: `[N, K]` float32.
        bias: `[N]` float32.
        weight_parts, grad_parts: 1 to 3.

    Returns:
        `[..., N]` float32, and an int32 record that is not 0 where rows were computed again; `None`: torch's product
        ran. Second derivatives are those of torch's product.

    Raises:
        DtypeError: a tensor is not float32.
        ShapeError: shapes that do not fit.
        ValueError: another number of parts.
    """
    _check(s, weight, bias, weight_parts, grad_parts)
    if torch.compiler.is_compiling():
        compiled: tuple[Tensor, Tensor] = spike_linear_op(s, weight, bias, weight_parts, grad_parts)
        return compiled
    if not _are_plain(s, weight, bias) or transform_at_work() is not None or why_unavailable(s.device) is not None:
        return F.linear(s, weight, bias), None
    result: tuple[Tensor, Tensor] = _SpikeLinear.apply(s, weight, bias, weight_parts, grad_parts)
    return result


def _are_plain(*tensors: Tensor | None) -> bool:
    """True for tensors that have memory of their own, as a `DTensor` has not."""
    return all(tensor is None or type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)


def _check(s: Tensor, weight: Tensor, bias: Tensor | None, weight_parts: int, grad_parts: int) -> None:
    for name, tensor in (("s", s), ("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != torch.float32:
            raise DtypeError(f"{name} is {tensor.dtype}; products with spikes are of float32 tensors.")
    if s.dim() < 1 or weight.dim() != 2 or s.shape[-1] != weight.shape[1]:
        raise ShapeError(f"s is {list(s.shape)} and weight {list(weight.shape)}; they are [..., K] and [N, K].")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"bias is {list(bias.shape)}; weight {list(weight.shape)} needs [{weight.shape[0]}].")
    if weight.device != s.device or (bias is not None and bias.device != s.device):
        raise DeviceError(f"s is on {s.device}, weight on {weight.device}: all tensors belong on one device.")
    for parts in (weight_parts, grad_parts):
        if not 1 <= parts <= MOST_PARTS:
            raise ValueError(f"{parts} parts; a float32 has 1 to {MOST_PARTS}.")


# -- what is launched --------------------------------------------------------------------------------------------------


def _forward(s: Tensor, weight: Tensor, bias: Tensor | None, weight_parts: int) -> tuple[Tensor, Tensor]:
    shape = (*s.shape[:-1], weight.shape[0])
    rows = _rows(s)
    if why_unavailable(s.device) is not None or 0 in (*rows.shape, weight.shape[0]):
        size = seen_size(rows.shape[0])
        return F.linear(s, weight, bias).contiguous(), torch.zeros(size, dtype=torch.int32, device=s.device)
    from flexsn_runtime.products._launch import outputs

    y, seen = outputs(rows, weight, bias, weight_parts)
    return y.view(shape), seen


def _gradients(
    grad: Tensor,
    s: Tensor,
    weight: Tensor,
    seen: Tensor,
    parts: tuple[int, int],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    rows, grads = _rows(s), _rows(grad)
    weight_parts, grad_parts = parts
    of_s = of_weight = None
    if why_unavailable(s.device) is not None or 0 in (*rows.shape, weight.shape[0]):
        return _plain_gradients(grad, s, weight, wanted)
    from flexsn_runtime.products._launch import input_gradient, split, weight_gradient

    if wanted[0] or wanted[1]:
        pieces = split(grads, grad_parts)
        if wanted[0]:
            of_s = input_gradient(pieces, weight, weight_parts).view(s.shape)
        if wanted[1]:
            of_weight = weight_gradient(grads, pieces, rows, seen)
    return [of_s, of_weight, grads.sum(0) if wanted[2] else None]


def _plain_gradients(grad: Tensor, s: Tensor, weight: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
    rows, grads = _rows(s), _rows(grad)
    return [
        grad @ weight if wanted[0] else None,
        grads.t() @ rows if wanted[1] else None,
        grads.sum(0) if wanted[2] else None,
    ]


def _rows(x: Tensor) -> Tensor:
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


# -- eager mode --------------------------------------------------------------------------------------------------------


class _SpikeLinear(SingleLevelFunction):
    @staticmethod
    def forward(
        ctx: Any, s: Tensor, weight: Tensor, bias: Tensor | None, weight_parts: int, grad_parts: int
    ) -> tuple[Tensor, Tensor]:
        y, seen = _forward(s, weight, bias, weight_parts)
        ctx.mark_non_differentiable(seen)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(s, weight, seen)
        ctx.parts = weight_parts, grad_parts
        return y, seen

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        grad = grads[0]
        if grad is None:
            return None, None, None, None, None
        s, weight, seen = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:3])
        if torch.is_grad_enabled() or transform_at_work() is not None or is_batched(grad):
            return *_plain_gradients(grad, s, weight, wanted), None, None
        return *_gradients(grad, s, weight, seen, ctx.parts, wanted), None, None


# -- for compilers -----------------------------------------------------------------------------------------------------


# `Optional`, because torch reads the annotation at run time to make the schema.
@torch.library.custom_op("flexsn::spike_linear", mutates_args=())
def spike_linear_op(
    s: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],  # noqa: UP045
    weight_parts: int,
    grad_parts: int,
) -> tuple[Tensor, Tensor]:
    """The result of `spike_linear`, and where `s` is not whole, which the backward takes."""
    return _forward(s, weight, bias, weight_parts)


@spike_linear_op.register_fake
def _(
    s: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],  # noqa: UP045
    weight_parts: int,
    grad_parts: int,
) -> tuple[Tensor, Tensor]:
    y = s.new_empty((*s.shape[:-1], weight.shape[0]))
    return y, s.new_empty((seen_size(s.shape[:-1].numel()),), dtype=torch.int32)


@torch.library.custom_op("flexsn::spike_linear_backward", mutates_args=())
def spike_linear_backward_op(
    grad: Tensor,
    s: Tensor,
    weight: Tensor,
    seen: Tensor,
    weight_parts: int,
    grad_parts: int,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """The gradients of `s`, `weight` and `bias` that are `wanted`, one for each true entry."""
    found = _gradients(grad, s, weight, seen, (weight_parts, grad_parts), wanted)
    return [gradient for gradient in found if gradient is not None]


@spike_linear_backward_op.register_fake
def _(
    grad: Tensor,
    s: Tensor,
    weight: Tensor,
    seen: Tensor,
    weight_parts: int,
    grad_parts: int,
    wanted: Sequence[bool],
) -> list[Tensor]:
    shapes = (s.shape, weight.shape, weight.shape[:1])
    return [s.new_empty(shape) for shape, want in zip(shapes, wanted, strict=True) if want]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    s, weight, _, *ctx.parts = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(s, weight, output[1])


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> Any:
    s, weight, seen = ctx.saved_tensors
    wanted = [bool(want) and grad is not None for want in ctx.needs_input_grad[:3]]
    if grad is None or not any(wanted):
        return None, None, None, None, None
    if torch.is_grad_enabled():  # `create_graph`
        return *_plain_gradients(grad, s, weight, wanted), None, None
    found = iter(spike_linear_backward_op(grad, s, weight, seen, *ctx.parts, wanted))
    return *(next(found) if want else None for want in wanted), None, None


spike_linear_op.register_autograd(_backward, setup_context=_setup)
