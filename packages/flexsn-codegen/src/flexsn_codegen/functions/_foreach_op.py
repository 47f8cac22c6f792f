"""Calls over lists in compiled graphs: one operator makes all calls, and launches kernels as in eager mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen._torch_private_modes import FunctionalTensorMode, before_transforms, constant, is_exporting
from flexsn_codegen.errors import OF_A_CALL
from flexsn_codegen.functions._by_values import like, merge_by_type, returns_nothing, split_by_type
from flexsn_codegen.functions._calls import Lists, Structure, new_results, results_together
from flexsn_codegen.functions._checks import check_gradients, needs_gradients
from flexsn_codegen.functions._foreach import OverLists
from flexsn_codegen.functions._kernel import Kernel, kernel_of, register_kernel
from flexsn_codegen.functions._kernels import Kernels, kernels_of
from flexsn_codegen.functions._launch import target_of
from flexsn_codegen.functions._pointwise_op import pointwise_in_place_op, pointwise_op
from flexsn_codegen.functions._recorded import available_device, follow_reads, sample_numbers
from flexsn_codegen.functions._writes import overlap_in_graph


@dataclass(slots=True, weakref_slot=True)
class ListsCall:
    """A call over lists, to which graphs refer by its key.

    Attributes:
        name: name of the function.
        over_lists: launches the kernels.
        structure, common, count: see `Lists`.
        kernels: the kernel for each index of the lists.
        positions: for each index of the lists, the positions of the call's tensors among all tensors.
        written: the positions of all written tensors.
        key: the key by which graphs find this object.
    """

    name: str
    over_lists: OverLists
    structure: Structure
    common: tuple[bool, ...]
    count: int
    kernels: list[Kernel]
    positions: list[list[int]]
    written: tuple[int, ...]
    key: str = ""

    def merged(self, read: Sequence[Tensor], written: Sequence[Tensor]) -> list[Tensor]:
        """All tensors in order, merged from the tensors that are only read and the tensors that are written."""
        next_read, next_written = iter(read), iter(written)
        return [next(next_written if i in self.written else next_read) for i in range(len(read) + len(written))]

    def run(self, tensors: list[Tensor], numbers: Sequence[Any]) -> list[Tensor]:
        """Launches all kernels. Returns the new results, in the order of the lists."""
        columns: list[Sequence[Tensor]] = []
        start = 0
        for common in self.common:
            end = start + (1 if common else self.count)
            columns.append(tensors[start:end])
            start = end
        lists = Lists(self.structure, columns, list(self.common), list(numbers), self.count, tensors)
        with torch.no_grad():
            returned = self.over_lists(lists)
        return [
            r
            for kernel, call_result in zip(self.kernels, returned, strict=True)
            for r in new_results(kernel.result, call_result)
        ]

    def empty_results(self, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> list[Tensor]:
        """Allocates memory for the new results of all kernels."""
        target, values = target_of(tensors[0].device), like(numbers)
        pairs = zip(self.kernels, self.positions, strict=True)
        return [
            r
            for kernel, call_positions in pairs
            for r in kernel.empty_results([tensors[i] for i in call_positions], values, target, None)
        ]

    def has_shared_memory(self, tensors: Sequence[Tensor]) -> bool:
        """True if a written tensor may share memory with another tensor. The tensors belong to a compiler's graph."""
        by_storage: dict[int, list[int]] = {}
        for i, tensor in enumerate(tensors):
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(i)
        return any(
            overlap_in_graph(tensors[i], tensors[j]) is not False
            for sharing in by_storage.values()
            for i in sharing
            if i in self.written
            for j in sharing
            if j != i
        )

    def one_by_one(self, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> list[Tensor]:
        """Calls an operator for each index of the lists. Returns the new results, in the order of the lists."""
        results: list[Tensor] = []
        for kernel, positions in zip(self.kernels, self.positions, strict=True):
            call_tensors = [tensors[i] for i in positions]
            if kernel.written:
                read = [t for i, t in enumerate(call_tensors) if i not in kernel.written]
                results += pointwise_in_place_op(read, [call_tensors[i] for i in kernel.written], numbers, kernel.key)
            else:
                results += pointwise_op(call_tensors, numbers, [t.dim() == 0 for t in call_tensors], kernel.key)
        return results


def lists_by_operator(kernels: Kernels, lists: Lists) -> list[Any] | None:
    """Records a call over lists in a graph. Returns the results, or `None` if each index needs a separate operator."""
    tensors = lists.tensors
    if needs_gradients(tensors):
        check_gradients(f"{kernels.name}.foreach", writes=True, autograd=False)
    kinds = tuple([(t.dtype, t.dim()) for t in tensors])
    prepared = _prepare(
        kernels.handle, lists.structure, tuple(lists.common), lists.count, kinds, tensors[0].device.type
    )
    if prepared is None:
        return None
    key, written, places, results = prepared
    read = [t for i, t in enumerate(tensors) if i not in written]
    changed = [tensors[i] for i in written]
    new_tensors = pointwise_foreach_op(read, changed, lists.numbers, key)
    returned, start = [], 0
    for call_positions, (result, count) in zip(places, results, strict=True):
        returned.append(
            results_together(result, new_tensors[start : start + count], [tensors[i] for i in call_positions])
        )
        start += count
    return returned


@constant
def _prepare(
    handle: str,
    structure: Structure,
    common: tuple[bool, ...],
    count: int,
    kinds: tuple[tuple[torch.dtype, int], ...],
    device: str,
) -> tuple[str, tuple[int, ...], tuple[tuple[int, ...], ...], tuple[tuple[Structure, int], ...]] | None:
    """The key of a call over lists, the positions of written tensors, and two entries for each index of the lists.

    The entries are the positions of the tensors, and the structure of the return value with the number of new tensors.
    The result is `None` if each index needs a separate operator.
    """
    kernels = kernels_of(handle)
    call_key = (structure, common, count, kinds, device)
    call = kernels.list_calls.get(call_key)
    if call is None or any(kernel.captured.fetch() is None for kernel in call.kernels):
        call = _make_call(kernels, structure, common, count, kinds, device)
        if call is None:
            return None
        kernels.list_calls[call_key] = call
    for kernel in {id(kernel): kernel for kernel in call.kernels}.values():
        follow_reads(kernels, kernel)
    results = tuple((kernel.result, _count_tensors(kernel.result)) for kernel in call.kernels)
    return call.key, call.written, tuple(map(tuple, call.positions)), results


def _make_call(
    kernels: Kernels,
    structure: Structure,
    common: tuple[bool, ...],
    count: int,
    kinds: Sequence[tuple[torch.dtype, int]],
    device: str,
) -> ListsCall | None:
    examples = [torch.empty((1,) * dims, dtype=dtype, device=available_device(device)) for dtype, dims in kinds]
    columns: list[Sequence[Tensor]] = []
    start = 0
    for is_common in common:
        columns.append(examples[start : start + (1 if is_common else count)])
        start += len(columns[-1])
    positions = Lists(structure, columns, list(common), [], count, examples)
    call_kernels: list[Kernel] = []
    places = [positions.positions(i) for i in range(count)]
    for call_positions in places:
        try:
            kernel, captured = kernels.find(structure, [examples[i] for i in call_positions], sample_numbers(structure))
        except OF_A_CALL:
            raise
        except Exception:
            return None  # the separate call for one index will raise the error
        if captured:
            return None  # a compiler has to observe the captured tensors
        call_kernels.append(kernel)
    written = sorted(
        {call_positions[i] for kernel, call_positions in zip(call_kernels, places, strict=True) for i in kernel.written}
    )
    call = ListsCall(kernels.name, OverLists(kernels), structure, common, count, call_kernels, places, tuple(written))
    call.key = register_kernel(kernels.name, call)
    return call


def _count_tensors(result: Structure) -> int:
    if result[0] in ("tuple", "list", "named"):
        return sum(_count_tensors(part) for part in result[1])
    if result[0] == "dict":
        return sum(_count_tensors(part) for _, part in result[1])
    return int(result[0] == "tensor")


@torch.library.custom_op(
    "flexsn_codegen::pointwise_foreach",
    mutates_args=("written",),
    schema="(Tensor[] read, Tensor(a!)[] written, Scalar[] numbers, str call) -> Tensor[]",
)
def pointwise_foreach_op(
    read: Sequence[Tensor], written: Sequence[Tensor], numbers: Sequence[Any], call: str
) -> list[Tensor]:
    """Runs a function for each index of some lists.

    Args:
        read, written: the tensors that all calls only read, and the tensors that a call writes, both in order.
        call: key of a `ListsCall`.
    """
    lists_call: ListsCall = kernel_of(call)
    return lists_call.run(lists_call.merged(read, written), numbers)


@pointwise_foreach_op.register_fake
def _(read: Sequence[Tensor], written: Sequence[Tensor], numbers: Sequence[Any], call: str) -> list[Tensor]:
    result: ListsCall = kernel_of(call)
    return result.empty_results(result.merged(read, written), numbers)


@torch.library.custom_op(
    "flexsn_codegen::pointwise_foreach_by_values",
    mutates_args=("changed",),
    schema="(Tensor[] read, Tensor(a!)[] changed, Tensor[] floats, SymInt[] ints, bool[] is_float, str call) -> ()",
)
def pointwise_foreach_by_values_op(
    read: Sequence[Tensor],
    changed: Sequence[Tensor],
    floats: Sequence[Tensor],
    ints: Sequence[int],
    is_float: Sequence[bool],
    call: str,
) -> None:
    """Runs a call over lists. Numbers and results are arguments as in `_by_values.pointwise_by_values_op`."""
    lists_call: ListsCall = kernel_of(call)
    count = len(lists_call.written)
    results = lists_call.run(lists_call.merged(read, changed[:count]), merge_by_type(floats, ints, is_float))
    for out, result in zip(changed[count:], results, strict=True):
        out.copy_(result)


pointwise_foreach_by_values_op.register_fake(returns_nothing)


@pointwise_foreach_op.register_torch_dispatch(FunctionalTensorMode)
def _(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    read, written, numbers, key = args
    call: ListsCall = kernel_of(key)
    tensors = call.merged(read, written)
    with mode:
        # In two cases, each index has a separate operator: in exported programs, which have to contain the source of
        # each kernel, and if tensors share memory, because compilers assume that an operator does not write to memory
        # that it also reads.
        if is_exporting() or call.has_shared_memory(tensors):
            return call.one_by_one(tensors, numbers)
        results = call.empty_results(tensors, numbers)
        pointwise_foreach_by_values_op(read, [*written, *results], *split_by_type(numbers), key)
        return results


def _call_transformed(
    read: Sequence[Tensor], written: Sequence[Tensor], numbers: Sequence[Any], key: str
) -> list[Tensor]:
    call: ListsCall = kernel_of(key)
    return call.one_by_one(call.merged(read, written), numbers)


before_transforms("pointwise_foreach", _call_transformed)
