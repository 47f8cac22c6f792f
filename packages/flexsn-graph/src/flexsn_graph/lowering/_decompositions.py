"""Decompositions of ops, with the results of eager mode. They extend and correct the decompositions of torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexsn_graph._torch_private import Table, decomposition_table, rounded
from flexsn_graph.ir._ops import POLYNOMIALS

_aten = torch.ops.aten
_HALF_DTYPES = {torch.float16, torch.bfloat16}


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    copied = source.to(target.dtype).expand(target.shape)
    # A broadcast value is copied into new memory, which can be viewed in any shape.
    return copied if source.shape == target.shape else copied.clone(memory_format=torch.contiguous_format)


def _index_put(target: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """Decomposes `target[mask] = value`, by which cores often reset a state. Other indices are not pointwise."""
    mask = indices[0]
    if (
        len(indices) == 1
        and mask is not None
        and mask.dtype == torch.bool
        and mask.shape == target.shape
        and values.numel() == 1
        and not accumulate
    ):
        return torch.where(mask, values.reshape(()), target)
    return NotImplemented


def _in_common_dtype(decomposition: Callable[..., Any], *values: Any) -> Any:
    """Rounds numbers and tensors without dimensions to the half dtype of the other arguments, then decomposes the op.

    Eager mode rounds them in the same way. As a result, the bfloat16 value 0.30078125 is not above 0.3. The
    decomposition in torch's table compares in float32 instead.
    """
    dtype = torch.result_type(*values)
    if dtype in _HALF_DTYPES:
        values = tuple(_round_to_half(value, dtype) for value in values)
    return decomposition(*values)


def _round_to_half(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype)
    return rounded(value, dtype) if isinstance(value, float) else value


def _sum_on_cpu(decomposition: Callable[..., Any], x: Any, y: Any, alpha: Any = 1) -> Any:
    """Adds or subtracts. On the CPU only, as in eager mode, rounds numbers to the half dtype of the other arguments."""
    dtype = torch.result_type(x, y)
    if dtype in _HALF_DTYPES and _is_on_cpu(x, y):
        x, y, alpha = (_round_to_half(value, dtype) for value in (x, y, alpha))
    # If `alpha` is passed, torch's table multiplies by it, even if it is 1.
    return decomposition(x, y) if alpha == 1 else decomposition(x, y, alpha=alpha)


def _product_on_cpu(decomposition: Callable[..., Any], x: Any, y: Any) -> Any:
    """Multiplies or divides. On the CPU, first rounds a first argument without dimensions to the half dtype.

    Eager mode, too, rounds this argument on the CPU only.
    """
    dtype = torch.result_type(x, y)
    if dtype in _HALF_DTYPES and _is_on_cpu(x, y) and isinstance(x, Tensor):
        x = x.to(dtype)
    return decomposition(x, y)


def _is_on_cpu(*values: Any) -> bool:
    return all(value.device.type == "cpu" for value in values if isinstance(value, Tensor))


def _pow_by_number(x: Tensor, exponent: float) -> Any:
    """Writes out the powers 3 and -2 of half values.

    Eager mode rounds these powers after each product, except for float16 on a CPU.
    """
    if x.dtype == torch.bfloat16 or (x.dtype == torch.float16 and x.device.type != "cpu"):
        if exponent == 3.0:
            return x * x * x
        if exponent == -2.0:
            return (x * x).reciprocal()
    return _in_common_dtype(decomposition_table[_aten.pow.Tensor_Scalar], x, exponent)


def _signbit(x: Tensor) -> Tensor:
    """Returns False for a negative float16 NaN on a GPU, because eager mode widens the value and so drops the sign."""
    negative: Tensor = decomposition_table[_aten.signbit.default](x)
    return negative & (x == x) if x.dtype == torch.float16 and x.device.type != "cpu" else negative


def _round_logarithm(decomposition: Callable[..., Any], logarithm: Callable[..., Any], x: Any, y: Any) -> Any:
    """Decomposes `xlogy` and `xlog1py` of half values: rounds the logarithm, then the product.

    The decomposition in torch's table rounds only the product.
    """
    dtype = torch.result_type(x, y)
    if dtype not in _HALF_DTYPES:
        return decomposition(x, y)
    x, y = (v.to(dtype) if isinstance(v, Tensor) else torch.scalar_tensor(v, dtype=dtype) for v in (x, y))
    return torch.where(y.isnan(), math.nan, torch.where(x == 0.0, 0.0, x * logarithm(y)))


def _fake_quantize(x: Tensor, scale: Any, zero_point: Any, low: int, high: int) -> tuple[Tensor, Tensor]:
    """Multiplies by the rounded reciprocal of the scale, as eager mode does.

    The second result is the mask of unclamped values.
    """
    wide = _widen(x)
    inverse = 1.0 / scale if isinstance(scale, Tensor) else rounded(1.0 / rounded(scale, torch.float32), torch.float32)
    quantized = torch.round(wide * inverse) + zero_point
    inside = (quantized >= low) & (quantized <= high)
    scale = scale if isinstance(scale, Tensor) else rounded(scale, torch.float32)
    return ((quantized.clamp(low, high) - zero_point) * scale).to(x.dtype), inside


def _fake_quantize_tensor_qparams(
    x: Tensor, scale: Tensor, zero_point: Tensor, enabled: Tensor, low: int, high: int
) -> tuple[Tensor, Tensor]:
    result, inside = _fake_quantize(x, scale, zero_point, low, high)
    return torch.where(enabled != 0, result, x), inside | (enabled == 0)


def _fake_quantize_per_channel(
    x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, low: int, high: int
) -> tuple[Tensor, Tensor]:
    shape = [-1 if d == axis % x.dim() else 1 for d in range(x.dim())]
    return _fake_quantize(x, scale.view(shape), zero_point.view(shape), low, high)


def _glu(x: Tensor, dim: int = -1) -> Tensor:
    """Rounds half values once, at the end. The decomposition in torch's table rounds them after each op instead."""
    value, gate = (_widen(half) for half in x.chunk(2, dim))
    return (value * torch.sigmoid(gate)).to(x.dtype)


def _glu_backward(grad: Tensor, x: Tensor, dim: int) -> Tensor:
    value, gate = (_widen(half) for half in x.chunk(2, dim))
    slope, share = _widen(grad), torch.sigmoid(gate)
    if x.device.type == "cpu":  # eager mode rounds the share, because it stores the share in the gradient's memory
        share = _widen(share.to(x.dtype))
    return torch.cat([share * slope, (1.0 - share) * share * slope * value], dim).to(x.dtype)


def _logit(x: Tensor, eps: float | None = None) -> Tensor:
    """Rounds half values once, at the end. The decomposition in torch's table rounds them after each op instead."""
    wide = _widen(x)
    if not wide.is_floating_point():
        wide = wide.to(torch.get_default_dtype())
    if eps is not None:
        wide = wide.clamp(eps, 1.0 - eps)
    return torch.log(wide / (1.0 - wide)).to(x.dtype if x.is_floating_point() else wide.dtype)


def _logit_backward(grad: Tensor, x: Tensor, eps: float | None = None) -> Tensor:
    """Computes the gradient of `logit`. Unlike the decomposition in torch's table, it is correct at -0 and NaN."""
    wide, slope = _widen(x), _widen(grad)
    inside = slope / (wide * (1.0 - wide))
    if eps is not None:
        result = torch.where((wide < eps) | (wide > 1.0 - eps), 0.0, inside)
    else:
        result = torch.where((wide == 0.0) | (wide == 1.0), slope * math.inf, inside)
        result = torch.where((wide < 0.0) | (wide > 1.0), math.nan, result)
    return result.to(x.dtype)


def _bce_with_logits(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = 1,
) -> Tensor:
    """Computes the loss. It is correct for infinite `x`, for which the decomposition in torch's table gives NaN."""
    log_sigmoid = torch.nn.functional.logsigmoid(x)
    if pos_weight is not None:
        log_sigmoid = log_sigmoid * ((pos_weight - 1.0) * target + 1.0)
    loss = (1.0 - target) * x - log_sigmoid
    if weight is not None:
        loss = loss * weight
    return loss.mean() if reduction == 1 else loss.sum() if reduction == 2 else loss


def _smooth_l1_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int, beta: float) -> Tensor:
    """Computes the gradient. Unlike torch's decomposition, it is correct where the arguments are NaN or equal."""
    slope, distance = _widen(grad), _widen(x) - _widen(target)
    if reduction == 1:
        slope = slope / x.numel()
    result = torch.where(distance >= beta, slope, slope * distance / beta)
    return torch.where(distance <= -beta, -slope, result).to(grad.dtype)


def _soft_margin_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int) -> Tensor:
    """The gradient, in the order of eager mode: it is NaN where `exp` overflows. Torch's table gives numbers there."""
    z = torch.exp(-target * x)
    scale = -1.0 / x.numel() if reduction == 1 else -1.0
    return target * z * scale / (z + 1.0) * grad


def _shrink_backward(grad: Tensor, x: Tensor, width: float) -> Tensor:
    return torch.where((x >= -width) & (x <= width), 0.0, grad)


def _polynomial(polynomial: Callable[..., Any], x: Any, degree: Any) -> Any:
    """Accepts a number instead of one of the two tensors. The number does not promote the dtype."""
    other = x if isinstance(x, Tensor) else degree
    dtype = other.dtype if other.is_floating_point() else torch.get_default_dtype()
    tensors = (a if isinstance(a, Tensor) else torch.scalar_tensor(a, dtype=dtype) for a in (x, degree))
    return polynomial(*tensors)


def _clamp(x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    """Clamps by one comparison per limit, because NaN is not beyond any limit. Torch's table detects NaN separately."""
    limits = [limit for limit in (low, high) if limit is not None]
    if not x.is_floating_point() or not all(type(limit) in (int, float) and limit == limit for limit in limits):
        clamped: Tensor = decomposition_table[_aten.clamp.default](x, low, high)
        return clamped
    if low is not None:
        x = torch.where(x < low, low, x)
    return x if high is None else torch.where(x > high, high, x)


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.float32) if x.dtype in _HALF_DTYPES else x


_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_IN_COMMON_DTYPE = [
    *(getattr(getattr(_aten, name), kind) for name in _COMPARISONS for kind in ("Scalar", "Tensor")),
    *(_aten.fmod.Scalar, _aten.fmod.Tensor),
    *(_aten.pow.Scalar, _aten.pow.Tensor_Tensor),
    *(_aten.remainder.Scalar, _aten.remainder.Scalar_Tensor, _aten.remainder.Tensor),
]

_SUMS = [getattr(getattr(_aten, name), kind) for name in ("add", "sub", "rsub") for kind in ("Scalar", "Tensor")]
_PRODUCTS = [getattr(getattr(_aten, name), kind) for name in ("mul", "div") for kind in ("Scalar", "Tensor")]

_LOGARITHMS = {_aten.xlogy: torch.log, _aten.special_xlog1py: torch.log1p}
_PRODUCTS_WITH_LOGARITHMS: Table = {
    op: functools.partial(_round_logarithm, decomposition_table[op], logarithm)
    for packet, logarithm in _LOGARITHMS.items()
    for op in (getattr(packet, overload) for overload in packet.overloads())
    if op in decomposition_table and "out" not in op._overloadname.lower()
}

_POLYNOMIALS_OF_NUMBERS: Table = {
    getattr(packet, overload): functools.partial(_polynomial, packet.default)
    for packet in (getattr(_aten, name) for name in POLYNOMIALS)
    for overload in ("n_scalar", "x_scalar")
}

# Ops that torch's tables do not decompose, because torch's own backends have kernels for them.
MISSING_IN_TORCH: Table = {
    _aten.copy.default: _copy,
    _aten.index_put.default: _index_put,
    _aten.__lshift__.Scalar: torch.bitwise_left_shift,
    _aten.__lshift__.Tensor: torch.bitwise_left_shift,
    _aten.__rshift__.Scalar: torch.bitwise_right_shift,
    _aten.__rshift__.Tensor: torch.bitwise_right_shift,
}

# Views that only torch's own references call, and that `functionalize` does not support.
_VIEW_PRIMS = ("broadcast_in_dim", "collapse_view", "split_dim", "squeeze", "transpose", "view_of")

# Ops that are decomposed during recording, because `functionalize` decomposes them differently or not at all.
DURING_RECORDING: Table = {
    _aten.binary_cross_entropy_with_logits.default: _bce_with_logits,
    **{getattr(torch.ops.prims, name).default: getattr(torch.ops.prims, name).impl_aten for name in _VIEW_PRIMS},
}

TO_PRIMS: Table = {
    **decomposition_table,
    **{op: functools.partial(_in_common_dtype, decomposition_table[op]) for op in _IN_COMMON_DTYPE},
    **{op: functools.partial(_sum_on_cpu, decomposition_table[op]) for op in _SUMS},
    **{op: functools.partial(_product_on_cpu, decomposition_table[op]) for op in _PRODUCTS},
    **MISSING_IN_TORCH,
    **_POLYNOMIALS_OF_NUMBERS,
    **_PRODUCTS_WITH_LOGARITHMS,
    _aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default: _fake_quantize_tensor_qparams,
    _aten.fake_quantize_per_channel_affine_cachemask.default: _fake_quantize_per_channel,
    _aten.fake_quantize_per_tensor_affine_cachemask.default: _fake_quantize,
    _aten.binary_cross_entropy_with_logits.default: _bce_with_logits,
    _aten.clamp.default: _clamp,
    _aten.glu.default: _glu,
    _aten.glu_backward.default: _glu_backward,
    _aten.hardshrink_backward.default: _shrink_backward,
    _aten.logit.default: _logit,
    _aten.logit_backward.default: _logit_backward,
    _aten.pow.Tensor_Scalar: _pow_by_number,
    _aten.signbit.default: _signbit,
    _aten.smooth_l1_loss_backward.default: _smooth_l1_backward,
    _aten.soft_margin_loss_backward.default: _soft_margin_backward,
    _aten.softshrink_backward.default: _shrink_backward,
}


def prims_of_inductor() -> Table:
    """Prims that Inductor adds and uses for the gradient of a softmax.

    The table is empty until Inductor is imported. Kernels round each operation separately, as eager mode does.
    """
    fma = getattr(torch.ops.prims, "fma", None)
    return {} if fma is None else {fma.default: lambda x, y, z: x * y + z}
