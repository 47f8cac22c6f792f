"""A function over lists of tensors, such as an optimizer's step over a model. On a GPU, similar tensors share a launch.

The launches of a call are prepared once and reused by later calls on tensors of equal kinds. Such a call compares all
properties for which the launches were prepared (shapes, strides, dtypes, devices, addresses) in a few passes over the
tensors, with functions that Python implements in C. If addresses have changed, the call updates the tables of
addresses. Then the call launches the kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen.functions._calls import Lists, results_together
from flexsn_codegen.functions._checks import (
    check_gradients,
    check_tensors,
    check_writes,
    make_list_error,
    mark_written,
    needs_gradients,
)
from flexsn_codegen.functions._in_turn import InTurn, Placed
from flexsn_codegen.functions._kernel import Kernel
from flexsn_codegen.functions._kernels import Kernels
from flexsn_codegen.functions._launch import addresses_of, target_on
from flexsn_codegen.functions._plan import Plan, Trace
from flexsn_codegen.functions._run import run
from flexsn_codegen.functions._together import Group, Member, TableKernels
from flexsn_graph import TorchError

_MAX_STEPS = 16
_get_properties = attrgetter("shape", "dtype", "device", "requires_grad")


@dataclass(frozen=True, slots=True)
class Call:
    """The call of the function for one index of the lists.

    Attributes:
        positions: the positions of the call's tensors among all tensors.
        results: the position of the call's first result. Results follow all tensors.
    """

    kernel: Kernel
    variant: Trace
    plan: Plan
    positions: list[int]
    results: int

    @property
    def cells(self) -> list[int]:
        """The position of each of the kernel's tensors among all tensors and results."""
        count = len(self.positions)
        return [
            self.positions[operand.tensor] if operand.tensor < count else self.results + operand.tensor - count
            for operand in self.plan.launches[0].operands
        ]


@dataclass(slots=True)
class Step:
    """A prepared call over lists, for tensors of equal kinds. It refers to addresses, not to tensors.

    Attributes:
        key: values, other than properties of tensors, that have to be equal in a later call.
        kinds: result of `_describe_tensors` for all tensors, with the captured tensors last.
        fetches: functions that fetch captured tensors, or return `None` if the user's function now reads other values.
        variants: traces of the calls, without duplicates.
        returns: True if any call returns a value other than `None`.
        in_turn: C++ kernels that one call from Python launches one after the other, or `None` if there are none.
        singles: calls that are launched separately.
        written: positions of the tensors to which the calls write.
        ends: for each tensor, the number of bytes from its address to its end.
        is_written: for each tensor, True if a call writes to it.
        addresses: addresses of all tensors in the last call.
    """

    key: tuple[Any, ...]
    kinds: list[Any]
    fetches: list[Callable[[], tuple[Tensor, ...] | None]]
    calls: list[Call]
    variants: list[Trace]
    returns: bool
    groups: list[Group]
    in_turn: InTurn | None
    singles: list[Call]
    written: list[int]
    ends: Tensor
    is_written: Tensor
    addresses: list[int]

    def captured(self) -> list[Tensor] | None:
        """The current captured tensors, or `None` if the function now reads other values."""
        results: list[Tensor] = []
        for fetch in self.fetches:
            captured = fetch()
            if captured is None:
                return None
            results += captured
        return results

    def fits(self, numbers: Sequence[Any]) -> bool:
        """True if this object is valid for a call with these numbers."""
        return all(variant.fits(numbers) for variant in self.variants)

    def run(self, tensors: list[Tensor], numbers: Sequence[Any], addresses: list[int]) -> list[Any] | None:
        """Launches all kernels.

        Args:
            addresses: addresses of the tensors.

        Returns:
            The return values of the calls. `None` if the prepared launches are invalid for these tensors. In that case,
            nothing was launched.
        """
        has_moved = addresses != self.addresses
        device = tensors[0].device
        results: list[Tensor] = []
        if has_moved or self.returns:
            results = self._allocate_results(device)
            all_addresses = torch.tensor([*addresses, *map(Tensor.data_ptr, results)], dtype=torch.int64, device="cpu")
            tensor_addresses = all_addresses[: len(addresses)]
            if has_moved and not (
                are_apart(tensor_addresses, self.ends, self.is_written)
                and all(group.fits(all_addresses) for group in self.groups)
            ):
                return None
            self._place(all_addresses, device)
            self.addresses = addresses
        words: dict[int, list[int]] = {}
        for group in self.groups:
            group.launch(_encode_numbers(words, group.variant, numbers))
        if self.in_turn is not None:
            self.in_turn.run([_encode_numbers(words, variant, numbers) for variant in self.in_turn.variants])
        if self.singles:
            operands = [*tensors, *results]
            for call in self.singles:
                cells = (*call.positions, *range(call.results, call.results + len(call.plan.new)))
                call.plan.launches[0].run([operands[i] for i in cells], _encode_numbers(words, call.variant, numbers))
        if self.written:
            mark_written([tensors[i] for i in self.written])
        return self._rebuild_returned(tensors, results)

    def _allocate_results(self, device: torch.device) -> list[Tensor]:
        return [
            torch.empty_strided(memory.shape, memory.strides, dtype=memory.dtype, device=device)
            for call in self.calls
            for memory in call.plan.new
        ]

    def _place(self, addresses: Tensor, device: torch.device) -> None:
        if self.in_turn is not None:
            self.in_turn.place(addresses)
        if not self.groups:
            return
        if device.type != "cpu":
            addresses = addresses.pin_memory().to(device, non_blocking=True)
        for group in self.groups:
            group.place(addresses)

    def _rebuild_returned(self, tensors: list[Tensor], results: list[Tensor]) -> list[Any]:
        if not self.returns:
            return [None] * len(self.calls)
        result, start = [], 0
        for call in self.calls:
            count = len(call.plan.new)
            call_tensors = [tensors[i] for i in call.positions]
            result.append(results_together(call.kernel.result, results[start : start + count], call_tensors))
            start += count
        return result


class OverLists:
    """Calls of a function over lists.

    Args:
        kernels: the kernels of the function.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._tables = TableKernels()
        self._steps: list[Step] = []  # the most recently used step comes first
        # A step's tables belong to one call at a time, from the update of the addresses to the launch.
        self._one_call = threading.RLock()

    def __call__(self, lists: Lists) -> list[Any]:
        """Calls the function for each index of the lists, and returns its return values."""
        with self._one_call:
            return self._call(lists)

    def _call(self, lists: Lists) -> list[Any]:
        tensors = lists.tensors
        device = tensors[0].device
        stream = 0
        if device.type == "cuda":
            # A captured CUDA graph would read a table that no longer exists when the graph is replayed.
            if torch.cuda.is_current_stream_capturing():
                self._check_gradients(tensors)
                return self._call_one_by_one(lists)
            # Tables are created in stream order, so they may be incomplete on another stream.
            stream = torch.cuda.current_stream(device).cuda_stream
        key = (lists.structure, lists.count, lists.common, torch.is_grad_enabled(), stream)
        try:
            kinds, addresses = _describe_tensors(tensors), addresses_of(tensors)
        except RuntimeError:
            # Raises a clearer error for tensors without strides, such as sparse tensors.
            check_tensors(self._kernels.name, tensors)
            raise
        for i, step in enumerate(self._steps):
            if step.key != key or not _starts_with(step.kinds, kinds, len(tensors)):
                continue
            captured = step.captured()
            if captured is None or not step.fits(lists.numbers):
                continue
            if captured:
                if step.kinds != _describe_tensors([*tensors, *captured]):
                    continue
                tensors, addresses = [*tensors, *captured], [*addresses, *addresses_of(captured)]
            if i:
                self._steps.insert(0, self._steps.pop(i))
            result = step.run(tensors, lists.numbers, addresses)
            if result is not None:
                return result
            del self._steps[0]
            break
        return self._prepare_and_call(lists, key)

    def _call_one_by_one(self, lists: Lists) -> list[Any]:
        return [run(self._kernels, lists.structure, lists.parts(i), None) for i in range(lists.count)]

    def _check_gradients(self, tensors: Sequence[Tensor]) -> None:
        if needs_gradients(tensors):
            check_gradients(f"{self._kernels.name}.foreach", writes=True, autograd=False)

    def _prepare_and_call(self, lists: Lists, key: tuple[Any, ...]) -> list[Any]:
        name, numbers = self._kernels.name, lists.numbers
        tensors = lists.tensors
        check_tensors(name, tensors)
        self._check_gradients(tensors)
        if any(map(Tensor.is_neg, tensors)):
            return self._call_one_by_one(lists)
        results: list[tuple[Kernel, list[int]]] = []
        captured_positions: dict[str, list[int]] = {}  # for each kernel, the positions of its captured tensors
        fetches = []
        for i in range(lists.count):
            positions = lists.positions(i)
            call_tensors = [tensors[p] for p in positions]
            try:
                kernel, captured = self._kernels.find(lists.structure, call_tensors, numbers)
            except TorchError as error:
                raise make_list_error(name, lists.structure, error) or error from error
            if kernel.key not in captured_positions:
                check_tensors(name, [*call_tensors, *captured])
                captured_positions[kernel.key] = list(range(len(tensors), len(tensors) + len(captured)))
                tensors = [*tensors, *captured]
                fetches.append(kernel.captured.fetch)
            results.append((kernel, [*positions, *captured_positions[kernel.key]]))
        calls = []
        target = target_on(tensors[0].device, name)
        start = len(tensors)
        for kernel, positions in results:
            call_tensors = [tensors[p] for p in positions]
            self._check_gradients(call_tensors)
            check_writes(kernel, call_tensors)
            variant = kernel.variant(call_tensors, numbers, [False] * len(call_tensors), target)
            plan = variant.plan(call_tensors)
            calls.append(Call(kernel, variant, plan, positions, start))
            start += len(plan.new)
        step = self._prepare_step(key, tensors, fetches, calls)
        addresses = addresses_of(tensors)
        returned = step.run(tensors, numbers, addresses)
        if returned is None:  # one call writes to memory that another call uses
            return self._call_one_by_one(lists)
        self._steps.insert(0, step)
        del self._steps[_MAX_STEPS:]
        return returned

    def _prepare_step(
        self,
        key: tuple[Any, ...],
        tensors: list[Tensor],
        fetches: list[Callable[[], tuple[Tensor, ...] | None]],
        calls: list[Call],
    ) -> Step:
        addresses = [*map(Tensor.data_ptr, tensors), *[0] * sum(len(call.plan.new) for call in calls)]
        dtypes = [*(t.dtype for t in tensors), *(memory.dtype for call in calls for memory in call.plan.new)]
        members_by_key: dict[tuple[Any, ...], list[Member]] = {}
        singles = []
        placed = []
        for call in calls:
            launch, cells = call.plan.launches[0], call.cells
            if launch.numel == 0:
                continue
            member = Member(call.variant, launch, cells, tuple(dtypes[cell] for cell in cells))
            placed_launch = Placed(call.variant, launch, cells, member.dtypes)
            if member.can_join:
                members_by_key.setdefault(member.key(addresses), []).append(member)
            elif placed_launch.is_in_cpp:
                placed.append(placed_launch)
            else:
                singles.append(call)
        groups = [
            self._tables.group(members, aligned=alignment, device=tensors[0].device)
            for (_, _, alignment, _), members in members_by_key.items()
        ]
        written = sorted({call.positions[i] for call in calls for i in call.kernel.written})
        is_written = torch.zeros(len(tensors), dtype=torch.bool, device="cpu")
        is_written[written] = True
        return Step(
            key=key,
            kinds=_describe_tensors(tensors),
            fetches=fetches,
            calls=calls,
            variants=list({id(call.variant): call.variant for call in calls}.values()),
            returns=any(call.kernel.result != ("constant", None) for call in calls),
            groups=groups,
            in_turn=InTurn(placed) if placed else None,
            singles=singles,
            written=written,
            ends=torch.tensor([_measure_extent(t) for t in tensors], dtype=torch.int64, device="cpu"),
            is_written=is_written,
            addresses=[],
        )


def are_apart(addresses: Tensor, extents: Tensor, is_written: Tensor) -> bool:
    """True if no written tensor shares bytes with another tensor.

    Args:
        addresses, extents: `[tensors]`, int64: the first byte of each tensor, and the number of bytes that it spans.
        is_written: `[tensors]`, bool.
    """
    starts, order = torch.where(extents == 0, 0, addresses).sort()
    ends = starts + extents[order]
    written = is_written[order]
    largest_ends = ends.cummax(0).values[:-1]
    largest_written_ends = torch.where(written, ends, 0).cummax(0).values[:-1]
    conflict = (written[1:] & (starts[1:] < largest_ends)) | (starts[1:] < largest_written_ends)
    return not bool(conflict.any())


def _describe_tensors(tensors: Sequence[Tensor]) -> list[Any]:
    """Describes tensors in three lists: all properties for which launches are prepared, except for addresses."""
    return [list(map(_get_properties, tensors)), list(map(Tensor.stride, tensors)), list(map(Tensor.is_neg, tensors))]


def _starts_with(all_kinds: list[Any], kinds: list[Any], count: int) -> bool:
    """True if `kinds` describes the same tensors as the first `count` entries of each list in `all_kinds`."""
    if len(all_kinds[0]) == count:
        return all_kinds == kinds
    return all(all_values[:count] == values for all_values, values in zip(all_kinds, kinds, strict=True))


def _encode_numbers(words_by_variant: dict[int, list[int]], variant: Trace, numbers: Sequence[Any]) -> list[int]:
    entry = words_by_variant.get(id(variant))
    if entry is None:
        (entry,) = variant.words(numbers)
        words_by_variant[id(variant)] = entry
    return entry


def _measure_extent(tensor: Tensor) -> int:
    """The number of bytes from the first element to the end of the last element."""
    if tensor.numel() == 0:
        return 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()
