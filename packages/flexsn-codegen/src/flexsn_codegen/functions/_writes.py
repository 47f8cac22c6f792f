"""Checks that the elements of a written tensor have distinct addresses, and that no other tensor shares its memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexsn_codegen.errors import ArgumentError, WriteError


def check_written(name: str, written_name: str, tensor: Tensor) -> None:
    """Raises `WriteError` for a tensor with two elements at one address, or for a lazily negated or conjugated view.

    Args:
        name: name of the function.
        written_name: name of the tensor, for the message.
    """
    if tensor.is_neg() or tensor.is_conj():
        raise WriteError(f"{written_name} of {name} is a lazily negated view. Write to a separate tensor.")
    extent = 0
    if tensor.numel() == 0:
        return
    for stride, size in sorted(_list_steps(tensor)):
        if stride <= extent:
            raise WriteError(
                f"{written_name} of {name}, of shape {list(tensor.shape)} and strides {list(tensor.stride())}, has "
                "several elements at one address (it is expanded, or its windows overlap), so it cannot be "
                "written to. Write to a .clone() of it."
            )
        extent += stride * (size - 1)


def check_apart(name: str, written_name: str, written: Tensor, other: str, read: Tensor, *, may_be_same: bool) -> None:
    """Raises `WriteError` if a written tensor shares memory with another tensor.

    Args:
        may_be_same: True if the two tensors may have the same address, shape and strides, because each element is read
            before it is written.
    """
    if not _may_overlap(written, read):
        return
    is_same = (
        written.data_ptr() == read.data_ptr() and written.shape == read.shape and written.stride() == read.stride()
    )
    if is_same and may_be_same:
        return
    raise make_shared_memory_error(name, written_name, other)


def make_shared_memory_error(name: str, written_name: str, other: str) -> WriteError:
    """The error for a written tensor that shares memory with another tensor."""
    return WriteError(
        f"{written_name} of {name} is written to, but shares memory with {other}: values that are read there would "
        "depend on the order in which elements are computed. Pass a .clone() of one of the two."
    )


def overlap_in_graph(a: Tensor, b: Tensor) -> bool | None:
    """True if two tensors of a compiler's graph, which have no data, share memory. `None` if a size is a symbol.

    Strides and offsets count as sizes.
    """
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return False
    if any(type(n) is not int for t in (a, b) for n in (*t.shape, *t.stride(), t.storage_offset())):
        return None
    if a.numel() == 0 or b.numel() == 0:
        return False
    first_a, first_b = (int(t.storage_offset()) * t.element_size() for t in (a, b))
    return _share_memory(a, first_a, b, first_b)


def _may_overlap(a: Tensor, b: Tensor) -> bool:
    """True if two tensors may share memory."""
    if a.numel() == 0 or b.numel() == 0 or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    return _share_memory(a, a.data_ptr(), b, b.data_ptr())


def _share_memory(a: Tensor, first_a: int, b: Tensor, first_b: int) -> bool:
    last_a, last_b = first_a + _measure_extent(a), first_b + _measure_extent(b)
    if last_a <= first_b or last_b <= first_a:
        return False
    # Columns of one matrix are interleaved, but share no memory.
    interleaved = a.stride() == b.stride() and a.shape == b.shape and a.dtype == b.dtype
    return not (interleaved and _are_interleaved(a, b))


def _are_interleaved(a: Tensor, b: Tensor) -> bool:
    """True if two tensors with equal layouts are interleaved, so that each fills gaps of the other tensor."""
    distance = abs(int(a.storage_offset()) - int(b.storage_offset()))
    inner = 1
    steps = sorted(_list_steps(a))
    for stride, size in steps:
        outer_fit = all(other % stride == 0 for other, _ in steps if other > stride)
        if outer_fit and inner <= distance and distance + inner <= stride:
            return True
        inner = max(inner, stride * (size - 1) + inner)
    return False


def _list_steps(tensor: Tensor) -> list[tuple[int, int]]:
    """`(stride, size)` of each dimension with more than one element."""
    pairs = zip(list(tensor.stride()), list(tensor.shape), strict=True)
    return [(int(stride), int(size)) for stride, size in pairs if size != 1]


def _measure_extent(tensor: Tensor) -> int:
    """The number of bytes from the tensor's first element to the end of its last element."""
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()


def check_outs(
    name: str, outs: Sequence[Tensor], dtypes: Sequence[torch.dtype], shape: Sequence[int], device: torch.device
) -> None:
    """Raises `ArgumentError` if the count, shapes, dtypes or devices of `outs` differ from those of the results."""
    if len(outs) != len(dtypes):
        raise ArgumentError(f"{name} has {len(dtypes)} results, but out= contains {len(outs)} tensors.")
    for i, (out, dtype) in enumerate(zip(outs, dtypes, strict=True)):
        if out.dtype != dtype or tuple(out.shape) != tuple(shape) or out.device != device:
            raise ArgumentError(
                f"tensor {i} of out= is {list(out.shape)} {out.dtype} on {out.device}, but result {i} of {name} is "
                f"{list(shape)} {dtype} on {device}."
            )
