"""Layouts in which a kernel reads a scan's arguments, and the integers that describe these layouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexsn_codegen import InputLayout, Late, StepLayout
from flexsn_graph import LiftedLayout, Port, Role
from flexsn_hop.formats import contiguous_strides
from flexsn_runtime._torch_private import alike, size_expression
from flexsn_runtime.operands._layout import DENSE_TERMS, Terms, broadcast_strides, step_terms
from flexsn_runtime.operands._order import StepOrder


class Arguments(NamedTuple):
    """The tensors of one scan.

    Attributes:
        inputs: `[T, *step]` each, or with dimensions after T that broadcast to the step.
        states: initial states `[*step]` each; `None` for zeros.
        lifted: lifted tensors, of any shape.
        layout: `layout_key` of all tensors; `None` if it is not computed yet.
    """

    inputs: tuple[Tensor, ...]
    states: tuple[Tensor | None, ...]
    lifted: tuple[Tensor, ...]
    layout: tuple[object, ...] | None = None

    @classmethod
    def of(cls, tensors: Sequence[Any], num_inputs: int, num_states: int, num_lifted: int) -> Arguments:
        """Takes `[*inputs, *states, *lifted]` from the beginning of `tensors`."""
        first_lifted = num_inputs + num_states
        return cls(
            tuple(tensors[:num_inputs]),
            tuple(tensors[num_inputs:first_lifted]),
            tuple(tensors[first_lifted : first_lifted + num_lifted]),
        )

    @property
    def num_steps(self) -> int:
        return self.inputs[0].shape[0]

    @property
    def device(self) -> torch.device:
        return self.inputs[0].device

    @property
    def key(self) -> tuple[object, ...]:
        """The `layout_key` of all tensors."""
        return layout_key(self.all) if self.layout is None else self.layout

    @property
    def all(self) -> tuple[Tensor | None, ...]:
        return (*self.inputs, *self.states, *self.lifted)


def layout_key(tensors: Iterable[Tensor | None]) -> tuple[object, ...]:
    """Returns a key that is equal for tensors that can share a prepared launch.

    Triton compiles for the alignment of pointers, so the alignment is part of the key. The key also contains the
    tensors' types, and whether each tensor has memory and is lazily negated.
    """
    return tuple(
        [
            None
            if t is None
            else (type(t), t.shape, t.stride(), t.dtype, t.device, p % 16 if (p := t.data_ptr()) else None, t.is_neg())
            for t in tensors
        ]
    )


def same_layout(tensors: Sequence[Tensor | None]) -> Callable[[Sequence[Tensor | None]], bool]:
    """Returns a function that compares other tensors with these. It returns True only if the `layout_key` is equal.

    A comparison takes a tenth of the time that the computation of a key takes. The result may be False for tensors with
    an equal key, because the function also compares all other properties that `alike` compares.
    """
    is_present = [t is not None for t in tensors]
    present = [t for t in tensors if t is not None]
    are_alike, count = alike(present), len(tensors)
    alignments = [_find_alignment(t) for t in present]
    are_all_present = len(present) == count

    def are_same(others: Sequence[Any]) -> bool:
        if not are_all_present:
            if [t is not None for t in others] != is_present:
                return False
            others = [t for t in others if t is not None]
        elif len(others) != count:
            return False
        if not are_alike(*others):  # False for objects that are not tensors
            return False
        for tensor, alignment in zip(others, alignments, strict=True):
            address = tensor.data_ptr()
            if (address % 16 if address else None) != alignment:
                return False
        return True

    return are_same


def _find_alignment(tensor: Tensor) -> int | None:
    """Returns the address of a tensor modulo 16; `None` if the tensor has no memory."""
    address = tensor.data_ptr()
    return address % 16 if address else None


_NO_DELAYS: Mapping[int, Late] = MappingProxyType({})


class Operands:
    """Layouts in which a kernel reads the arguments of a call. Calls with an equal `layout_key` share them.

    Args:
        arguments: arguments of one of these calls.
        layouts: layout of each lifted tensor over a step, by the tensor's index. The step does not read lifted tensors
            without a layout.
        shape: the step's shape.
        order: order in which the kernel counts the step's elements.
        counts: indices of inputs that count down. If such an input is one step that is expanded over time, the kernel
            reads only this step.
        late: delays of each delayed input, by the input's index. An input that holds delays is one step that is
            expanded over time.

    Attributes:
        inputs, states, lifted, lifted_like: the attributes with these names in the kernel's spec.
        sizes: the kernel's integer arguments by name.
    """

    def __init__(
        self,
        arguments: Arguments,
        layouts: Mapping[int, LiftedLayout],
        shape: tuple[int, ...],
        order: StepOrder,
        counts: Collection[int] = (),
        late: Mapping[int, Late] = _NO_DELAYS,
    ) -> None:
        self._shape, self._order = shape, order
        self.sizes: dict[str, int] = {"T": arguments.num_steps, "NCL": math.prod(shape)}
        self.inputs = tuple(
            self._describe_counted(Port(Role.INPUT, i), x)
            if i in counts and is_expanded(x)
            else self._describe_sequence(Port(Role.INPUT, i), x.shape, x.stride())
            for i, x in enumerate(arguments.inputs)
        )
        if late:
            self._delay(arguments.inputs, late)
        self.states = tuple(
            None if v is None else self._describe_step(Port(Role.STATE, i), v.stride())
            for i, v in enumerate(arguments.states)
        )
        # Maps a layout to the index of the first lifted tensor with this layout.
        first: dict[tuple[object, ...], int] = {}
        lifted_terms = [self._describe_lifted(i, layouts.get(i)) for i in range(len(arguments.lifted))]
        self.lifted = tuple(terms.layout for terms in lifted_terms)
        self.lifted_like = tuple(first.setdefault(_make_comparable(terms), i) for i, terms in enumerate(lifted_terms))
        # Maps the index of each lifted tensor that `move` replaces to the offset at which the kernel begins to read.
        self._moved = {
            i: layout.offset
            for i, layout in layouts.items()
            if layout.offset or not _is_plain(arguments.lifted[i], arguments.device)
        }
        self._device = arguments.device

    @property
    def params(self) -> tuple[Port, ...]:
        """The kernel's parameters for `[*inputs, *states, *lifted]`."""
        roles = {Role.INPUT: self.inputs, Role.STATE: self.states, Role.LIFTED: self.lifted}
        return tuple(Port(role, i) for role, layouts in roles.items() for i in range(len(layouts)))

    @property
    def moved(self) -> tuple[int, ...]:
        """The positions among `[*inputs, *states, *lifted]` at which `move` replaces tensors."""
        return tuple(len(self.inputs) + len(self.states) + i for i in self._moved)

    def move(self, tensors: list[Tensor | None]) -> None:
        """Replaces each lifted tensor that the kernel cannot read by a copy or a view that the kernel can read.

        For example, a scalar on the CPU is copied to the device of CUDA tensors.

        Args:
            tensors: list that begins with the tensors `[*inputs, *states, *lifted]` of a call.
        """
        first_lifted = len(self.inputs) + len(self.states)
        for i, offset in self._moved.items():
            lifted = tensors[first_lifted + i]
            assert lifted is not None
            tensors[first_lifted + i] = lifted.detach().to(self._device).contiguous().resolve_neg().view(-1)[offset:]

    def strided(
        self, tensors: Iterable[tuple[Port, Sequence[int], Sequence[int]]]
    ) -> tuple[tuple[Port, InputLayout], ...]:
        """Returns the layouts, for the kernel's spec, of the tensors that are not dense in the kernel's element order.

        Args:
            tensors: the kernel's tensors other than the arguments, with their shapes and strides. Each tensor is a
                sequence (`[T, *step]` or `[rows, *step]`), a step (`[*step]`), or contiguous steps in one dimension.
        """
        layouts = []
        for param, shape, strides in tensors:
            if param.role in _STEPS:
                layout = InputLayout(self._describe_step(param, strides))
            elif len(shape) == len(self._shape) + 1:
                layout = self._describe_sequence(param, shape, strides)
            else:
                layout = InputLayout(self._describe_step(param, contiguous_strides(self._shape)))
            if layout != _DENSE:
                layouts.append((param, layout))
        return tuple(layouts)

    def _describe_sequence(self, param: Port, shape: Sequence[int], strides: Sequence[int]) -> InputLayout:
        layout = self._describe_step(param, broadcast_strides(shape[1:], strides[1:], self._shape))
        # The distance between steps matters only if the sequence has a second step.
        strided_time = shape[0] != 1 and strides[0] != self.sizes["NCL"]
        if strided_time:
            self.sizes[f"{param.name}_time"] = strides[0]
        return InputLayout(layout, strided_time)

    def _delay(self, inputs: Sequence[Tensor], late: Mapping[int, Late]) -> None:
        layouts = list(self.inputs)
        for i, delays in late.items():
            layouts[i] = replace(layouts[i], late=delays)
            layout = self._describe_one_step(Port(Role.INPUT, delays.by), inputs[delays.by])
            layouts[delays.by] = InputLayout(layout, once=True)
        self.inputs = tuple(layouts)

    def _describe_counted(self, param: Port, x: Tensor) -> InputLayout:
        return InputLayout(self._describe_one_step(param, x), counts_down=True)

    def _describe_one_step(self, param: Port, x: Tensor) -> StepLayout:
        """Returns the layout of one step of a sequence whose steps share memory."""
        return self._describe_step(param, broadcast_strides(x.shape[1:], x.stride()[1:], self._shape))

    def _describe_lifted(self, i: int, layout: LiftedLayout | None) -> Terms:
        if layout is None:
            return DENSE_TERMS  # the step never reads this tensor
        return self._describe_terms(Port(Role.LIFTED, i), layout.strides)

    def _describe_step(self, param: Port, strides: Sequence[int]) -> StepLayout:
        return self._describe_terms(param, strides).layout

    def _describe_terms(self, param: Port, strides: Sequence[int]) -> Terms:
        """Returns the layout of a tensor over a step, and adds the integers that describe the layout to `sizes`.

        Args:
            strides: the tensor's stride along each dimension of the step.
        """
        terms = step_terms(self._order.shape(self._shape), self._order.shape(strides))
        for i, number in enumerate(terms.numbers):
            kind = ("inner", "size", "stride")[i % 3]
            self.sizes[f"{param.name}_{kind}{i // 3}"] = number
        return terms


def loaded_early(layouts: tuple[InputLayout, ...], inputs: Sequence[Tensor], stages: int) -> tuple[InputLayout, ...]:
    """Returns the layouts of inputs in a kernel.

    If `stages` is not 1, inputs of one byte per element, such as masks, are loaded before their use, unless they count
    down.

    Args:
        stages: number of chunks in flight, see `LaunchConfig`.
    """
    if stages == 1:
        return layouts
    return tuple(
        replace(layout, early=True) if x.element_size() == 1 and not layout.counts_down else layout
        for layout, x in zip(layouts, inputs, strict=True)
    )


def is_expanded(x: Tensor) -> bool:
    """True if a sequence `[T, *step]` has several steps that share the memory of one step."""
    return x.shape[0] > 1 and x.stride(0) == 0


def picker(positions: Sequence[int]) -> Callable[[Sequence[Tensor | None]], Sequence[Tensor]]:
    """Returns a function that picks the tensors at these positions, in this order."""
    pick: Callable[[Sequence[Tensor | None]], Any] = itemgetter(*positions)
    return pick if len(positions) > 1 else lambda tensors: (pick(tensors),)


def _make_comparable(terms: Terms) -> tuple[object, ...]:
    """Returns a key of terms. Two keys are equal if the terms are equal for all values of the symbols in the terms."""
    return terms.layout, *[number if type(number) is int else size_expression(number) for number in terms.numbers]


_DENSE = InputLayout()
_STEPS = frozenset({Role.FINAL_STATE, Role.GRAD_FINAL_STATE, Role.GRAD_STATE})


def _is_plain(tensor: Tensor, device: torch.device) -> bool:
    return tensor.is_contiguous() and tensor.device == device and not tensor.is_neg()
