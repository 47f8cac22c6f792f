"""What a kernel reads of a scan's arguments: how each is laid out, and the numbers that say so."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexsn_codegen import DENSE, InputLayout, Param, Role
from flexsn_graph import LiftedLayout
from flexsn_runtime._layout import Terms, broadcast_strides, step_terms


class Arguments(NamedTuple):
    """The tensors of one scan.

    Attributes:
        inputs: `[T, *step]` each, or what broadcasts to it behind T.
        states: initial states `[*step]`; `None` starts at zero.
        lifted: captured tensors, of any shape.
        prepared: the forward scans that are prepared for their layout, by what they write; `None`: not known.
    """

    inputs: tuple[Tensor, ...]
    states: tuple[Tensor | None, ...]
    lifted: tuple[Tensor, ...]
    prepared: dict[Hashable, Any] | None = None

    @classmethod
    def of(cls, tensors: Sequence[Any], num_inputs: int, num_states: int, num_lifted: int) -> Arguments:
        """The first of `tensors`: `[*inputs, *states, *lifted]`."""
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
    def all(self) -> tuple[Tensor | None, ...]:
        return (*self.inputs, *self.states, *self.lifted)


def layout_key(tensors: Iterable[Tensor | None]) -> tuple[object, ...]:
    """Equal for tensors that one prepared launch serves: Triton compiles for the alignment of pointers, too.

    Their types are part of it, and whether they have a pointer: some have none that a kernel could follow.
    """
    return tuple(
        [
            None
            if t is None
            else (type(t), t.shape, t.stride(), t.dtype, t.device, p % 16 if (p := t.data_ptr()) else None, t.is_neg())
            for t in tensors
        ]
    )


class Operands:
    """How a kernel reads arguments of one layout.

    Args:
        arguments: any that have the layout.
        layouts: how the step reads each lifted tensor; one that is missing is not read.
        shape: the step's.

    Attributes:
        inputs, states, lifted: for the kernel's spec.
        sizes: the kernel's integer arguments by name.
    """

    def __init__(self, arguments: Arguments, layouts: Mapping[int, LiftedLayout], shape: tuple[int, ...]) -> None:
        ncl = math.prod(shape)
        self.sizes: dict[str, int] = {"T": arguments.num_steps, "NCL": ncl}
        self.inputs = tuple(self._input(i, x, shape, ncl) for i, x in enumerate(arguments.inputs))
        self.states = tuple(self._state(i, v, shape) for i, v in enumerate(arguments.states))
        self.lifted = tuple(self._lifted(i, layouts.get(i), shape) for i in range(len(arguments.lifted)))
        # The layouts count in elements of contiguous tensors on the kernel's device.
        self._moved = {
            i: layout.offset
            for i, layout in layouts.items()
            if layout.offset or not _is_plain(arguments.lifted[i], arguments.device)
        }
        self._device = arguments.device

    @property
    def params(self) -> tuple[Param, ...]:
        """The parameters for `[*inputs, *states, *lifted]`."""
        roles = {Role.INPUT: self.inputs, Role.STATE: self.states, Role.LIFTED: self.lifted}
        return tuple(Param(role, i) for role, layouts in roles.items() for i in range(len(layouts)))

    def move(self, tensors: list[Tensor | None]) -> None:
        """Puts what the kernel reads in the place of lifted tensors that it cannot read as they are.

        A CPU scalar among CUDA tensors is moved, say.

        Args:
            tensors: begins with `[*inputs, *states, *lifted]` of this layout.
        """
        first_lifted = len(self.inputs) + len(self.states)
        for i, offset in self._moved.items():
            lifted = tensors[first_lifted + i]
            assert lifted is not None
            tensors[first_lifted + i] = lifted.detach().to(self._device).contiguous().resolve_neg().view(-1)[offset:]

    def _input(self, i: int, x: Tensor, shape: tuple[int, ...], ncl: int) -> InputLayout:
        if x.is_contiguous() and tuple(x.shape[1:]) == shape:
            return InputLayout()
        param = Param(Role.INPUT, i)
        strides = broadcast_strides(x.shape[1:], x.stride()[1:], shape)
        terms = self._terms(param, step_terms(shape, strides))
        strided_time = x.stride(0) != ncl
        if strided_time:
            self.sizes[f"{param.name}_time"] = x.stride(0)
        return InputLayout(terms.layout, strided_time)

    def _state(self, i: int, state: Tensor | None, shape: tuple[int, ...]) -> int | None:
        if state is None:
            return None
        return self._terms(Param(Role.STATE, i), step_terms(shape, state.stride())).layout

    def _lifted(self, i: int, layout: LiftedLayout | None, shape: tuple[int, ...]) -> int:
        if layout is None:
            return DENSE  # never read
        return self._terms(Param(Role.LIFTED, i), step_terms(shape, layout.strides)).layout

    def _terms(self, param: Param, terms: Terms) -> Terms:
        for i, number in enumerate(terms.numbers):
            kind = ("inner", "size", "stride")[i % 3]
            self.sizes[f"{param.name}_{kind}{i // 3}"] = number
        return terms


def _is_plain(tensor: Tensor, device: torch.device) -> bool:
    return tensor.is_contiguous() and tensor.device == device and not tensor.is_neg()
