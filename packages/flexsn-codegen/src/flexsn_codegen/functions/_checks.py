"""Checks of a call of a pointwise kernel, before anything is launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flexsn_codegen._torch_private_modes import is_batched_by_autograd, is_forward_mode
from flexsn_codegen.errors import ArgumentError, AutogradError, DeviceError, TransformError
from flexsn_codegen.functions._kernel import Kernel
from flexsn_codegen.functions._layout import plan_layout
from flexsn_codegen.functions._writes import (
    check_apart,
    check_outs,
    check_written,
    make_shared_memory_error,
    overlap_in_graph,
)
from flexsn_codegen.targets.triton import TRITON


def check_tensors(name: str, tensors: Sequence[Tensor]) -> None:
    """Raises `ArgumentError` for tensors that kernels cannot read, and `DeviceError` for tensors on several devices."""
    device = tensors[0].device if tensors else None
    for i, value in enumerate(tensors):
        remedy = _find_remedy(value)
        if remedy is not None:
            kind = "a nested tensor of " if value.is_nested else ""
            layout = "" if value.layout is torch.strided else f" of layout {value.layout}"
            description = f"{kind}{value.dtype}{layout}"
            raise ArgumentError(f"tensor {i} of {name} is {description}, which kernels cannot read. {remedy}")
        if value.device != device:
            devices = sorted({str(t.device) for t in tensors})
            raise DeviceError(f"the arguments of {name} are on {devices}: move them to one device.")


def _find_remedy(tensor: Tensor) -> str | None:
    """Advice for a tensor that kernels cannot read, or `None` for other tensors."""
    if tensor.is_nested:
        return "Pass its parts one by one, or the .values() of a jagged tensor."
    if tensor.is_quantized:
        return "Pass its .dequantize(), or its .int_repr()."
    if tensor.layout is not torch.strided:
        return "Pass its .to_dense(), or its .values()."
    if tensor.is_complex():
        return "Pass its real and its imaginary part (torch.view_as_real) as two tensors."
    if not TRITON.supports(tensor.dtype):
        return "Convert it with .to(), e.g. to bfloat16. Of float8 dtypes, kernels read float8_e4m3fn and float8_e5m2."
    return None


def make_no_tensors_error(name: str) -> ArgumentError:
    """The error for a call without tensors."""
    return ArgumentError(
        f"{name} was called without tensors, but a kernel needs a tensor, whose shape its results have."
    )


def check_writes(kernel: Kernel, tensors: Sequence[Tensor]) -> None:
    """Raises `WriteError` if the kernel must not write to its tensors."""
    for i in kernel.written:
        written_name = f"tensor {i}"
        check_written(kernel.name, written_name, tensors[i])
        for j, other in enumerate(tensors):
            if j != i:
                check_apart(kernel.name, written_name, tensors[i], f"tensor {j}", other, may_be_same=False)


def check_writes_in_graph(kernel: Any, tensors: Sequence[Tensor]) -> None:
    """For a call in a compiler's graph, raises `WriteError` if a written tensor shares memory with another tensor."""
    for i in kernel.written:
        for j, other in enumerate(tensors):
            if j != i and overlap_in_graph(tensors[i], other):
                raise make_shared_memory_error(kernel.name, f"tensor {i}", f"tensor {j}")


def check_into(
    kernel: Kernel, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype], outs: Sequence[Tensor]
) -> None:
    """Raises `ArgumentError` or `WriteError` if the kernel's results cannot be written to `outs`."""
    if kernel.written:
        raise make_into_error(kernel.name)
    check_outs(kernel.name, outs, dtypes, plan_layout(tensors)[0], tensors[0].device)
    for i, out in enumerate(outs):
        out_name = f"tensor {i} of out="
        check_written(kernel.name, out_name, out)
        for j, other in enumerate(tensors):
            check_apart(kernel.name, out_name, out, f"tensor {j}", other, may_be_same=True)
        for j, other in enumerate(outs):
            if j != i:
                check_apart(kernel.name, out_name, out, f"tensor {j} of out=", other, may_be_same=False)


def outs_of(name: str, out: Any) -> list[Tensor]:
    """The tensors of the argument `out` of `into`. Raises `ArgumentError` for an object that is not a tensor."""
    if isinstance(out, Tensor):
        return [out]
    outs = list(out) if isinstance(out, list | tuple) else [out]
    for i, value in enumerate(outs):
        if not isinstance(value, Tensor):
            raise ArgumentError(
                f"entry {i} of the first argument of {name}.into is a {type(value).__name__}: pass a tensor for each "
                "result, with its shape and dtype, such as one made by torch.empty."
            )
    return outs


def make_into_error(name: str) -> ArgumentError:
    """The error for a call of `into` if the function writes in place."""
    return ArgumentError(f"{name} already writes to its arguments: call it without `into`.")


def make_list_error(name: str, structure: tuple[Any, ...], error: Exception) -> ArgumentError | None:
    """The error for a call in which a list contains objects other than tensors, or `None` for any other call."""
    _, positional, named = structure
    for position, part in [*enumerate(positional), *named]:
        if part[0] == "list":
            return ArgumentError(
                f"argument {position!r} of {name}.foreach is a list that contains objects other than tensors, so each "
                "call receives the whole list, with which the function cannot compute. To pass a different number to "
                f"each call, pass a list of tensors without dimensions: [torch.tensor(number), ...]. ({error})"
            )
    return None


def needs_gradients(tensors: Sequence[Tensor]) -> bool:
    """True if autograd has to follow computations on the tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:  # a plain loop is fastest, and compilers can follow the loop
            if tensor.requires_grad:
                return True
    return False


def is_followed(tensors: Sequence[Tensor]) -> bool:
    """True if derivatives of computations on the tensors are needed, in reverse or forward mode."""
    return needs_gradients(tensors) or has_tangents(tensors)


def check_gradients(name: str, *, writes: bool, autograd: bool) -> None:
    """For a call that requires gradients, raises `AutogradError` if the kernel has none.

    Args:
        writes: True if the call writes to existing tensors.
        autograd: True if the function was made with `autograd=True`.
    """
    if writes:
        raise AutogradError(
            f"{name} writes to tensors in place, but a tensor that it reads or writes requires a gradient. "
            f"Gradients cannot flow through such a call. Call {name} under torch.no_grad(), like an optimizer's step, "
            "or return the new values."
        )
    if not autograd:
        raise AutogradError(
            f"a tensor that {name} reads requires a gradient, but {name} was made with autograd=False. Make {name} "
            "with pointwise(..., autograd=True), or call it under torch.no_grad()."
        )


def check_batched(cotangents: Sequence[Tensor | None]) -> None:
    """Raises `TransformError` for cotangents that autograd itself has batched."""
    for cotangent in cotangents:
        if cotangent is not None and is_batched_by_autograd(cotangent):
            raise TransformError(
                "a kernel cannot compute batched gradients of torch.autograd (is_grads_batched=True, vectorize=True). "
                "Use torch.func.jacrev, or torch.func.vmap of a function that calls torch.autograd.grad."
            )


def has_tangents(tensors: Sequence[Tensor]) -> bool:
    """True if forward-mode derivatives are computed with respect to any of these tensors."""
    return is_forward_mode() and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def make_forward_mode_error(name: str) -> TransformError:
    """The error for a call that writes in place while forward-mode derivatives are computed."""
    return TransformError(
        f"{name} writes to tensors in place, which has no forward-mode derivative (torch.func.jvp, jacfwd, "
        "forward_ad). Return the new values, or call it outside of the derivative."
    )


def mark_written(tensors: Sequence[Tensor]) -> None:
    """Marks tensors as written, so that autograd detects changes of values that it has saved."""
    torch.autograd.graph.increment_version(tensors)  # skips inference tensors
