"""Splits tensors of a step into pieces, each with one value per element of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from flexsn_graph.cells._parts import Axis

# The outermost factor is the first one. An integer is a count of cells.
Factors: TypeAlias = tuple[Axis | int, ...]


@dataclass(frozen=True, slots=True)
class Pieces:
    """The factors by which a tensor is split into pieces of the shape `[*step]`.

    A piece has size 1 along each axis of the step on which the tensor does not depend.

    Attributes:
        dimensions: the factors of each dimension of the tensor: axes of the step, and cells.
        rank: number of the step's axes.

    Example:
        >>> dendrites = Pieces(((Axis(0),), (Axis(1),), (4,)), 2)
        >>> soma, *others = dendrites.split(torch.arange(24).view(2, 3, 4))
        >>> soma.tolist()
        [[0, 4, 8], [12, 16, 20]]
        >>> dendrites.join([soma, *others]).shape
        torch.Size([2, 3, 4])
    """

    dimensions: tuple[Factors, ...]
    rank: int

    @property
    def count(self) -> int:
        """Number of pieces."""
        return math.prod(self._counts)

    @property
    def _factors(self) -> list[Axis | int]:
        return [factor for dimension in self.dimensions for factor in dimension]

    @property
    def _counts(self) -> list[int]:
        return [factor for factor in self._factors if not isinstance(factor, Axis)]

    @property
    def _axes(self) -> list[int]:
        """Numbers of the axes, in the order of the tensor's dimensions."""
        return [factor.number for factor in self._factors if isinstance(factor, Axis)]

    @property
    def _order(self) -> list[int]:
        """Indices of the factors: first the axes in the order of their numbers, then the cells."""
        factors = self._factors
        axes = [i for i, factor in enumerate(factors) if isinstance(factor, Axis)]
        axes.sort(key=lambda i: factors[i].number)  # type: ignore[union-attr]
        return [*axes, *(i for i, factor in enumerate(factors) if not isinstance(factor, Axis))]

    def split(self, tensor: Tensor, lead: int = 0) -> list[Tensor]:
        """The pieces of a tensor, as views.

        Args:
            lead: number of dimensions before those of the step, such as time.
        """
        at = lead
        for factors in self.dimensions:
            if not factors:
                tensor = tensor.squeeze(at)
            elif len(factors) > 1:
                tensor = tensor.unflatten(at, [-1 if isinstance(f, Axis) else f for f in factors])
            at += len(factors)
        tensor = tensor.permute([*range(lead), *(lead + i for i in self._order)])
        numbers, counts = sorted(self._axes), self._counts
        for number in range(self.rank):
            if number not in numbers:
                tensor = tensor.unsqueeze(lead + number)
        if not counts:
            return [tensor]
        if len(counts) > 1:
            tensor = tensor.flatten(lead + self.rank)
        return list(tensor.unbind(-1))

    def join(self, pieces: Sequence[Tensor], lead: int = 0) -> Tensor:
        """Joins pieces into a tensor.

        Pieces have size 1 along each axis of the step that the tensor lacks.
        """
        counts = self._counts
        tensor = torch.stack(list(pieces), -1) if counts else pieces[0]
        if len(counts) > 1:
            tensor = tensor.unflatten(-1, counts)
        numbers = sorted(self._axes)
        for number in reversed(range(self.rank)):
            if number not in numbers:
                tensor = tensor.squeeze(lead + number)
        inverse_order = sorted(range(len(self._order)), key=self._order.__getitem__)
        tensor = tensor.permute([*range(lead), *(lead + i for i in inverse_order)])
        at = lead
        for factors in self.dimensions:
            if not factors:
                tensor = tensor.unsqueeze(at)
            elif len(factors) > 1:
                tensor = tensor.flatten(at, at + len(factors) - 1)
            at += 1
        return tensor

    def shape(self, sizes: Sequence[Any]) -> tuple[Any, ...]:
        """The shape of a piece of a tensor whose shape is `sizes`. The sizes may be symbolic."""
        result: list[Any] = [1] * self.rank
        for factors, size in zip(self.dimensions, sizes, strict=True):
            cells = math.prod(f for f in factors if not isinstance(f, Axis))
            for factor in factors:
                if isinstance(factor, Axis):
                    result[factor.number] = size if cells == 1 else size // cells
        return tuple(result)


@dataclass(frozen=True, slots=True)
class StepPieces:
    """The pieces of a step's arguments and results.

    Attributes:
        inputs, states, outputs: the `Pieces` of each tensor.
        lifted: the `Pieces` of each lifted tensor. Its axes are numbered in the order of its dimensions.
    """

    inputs: tuple[Pieces, ...]
    states: tuple[Pieces, ...]
    outputs: tuple[Pieces, ...]
    lifted: tuple[Pieces, ...] = ()

    @property
    def counts(self) -> tuple[int, int, int]:
        """Numbers of pieces of inputs, states and outputs."""
        groups = (self.inputs, self.states, self.outputs)
        inputs, states, outputs = (sum(pieces.count for pieces in group) for group in groups)
        return inputs, states, outputs

    def core(self, core: Callable[..., Any], *values: Tensor) -> tuple[Tensor, ...]:
        """Joins pieces of inputs and states, calls a step function with the tensors, and splits its results."""
        results = core(*join((*self.inputs, *self.states), values))
        tensors = tuple(results) if isinstance(results, tuple | list) else (results,)
        return tuple(split((*self.outputs, *self.states), tensors))


def split(pieces: Sequence[Pieces], tensors: Sequence[Tensor], lead: int = 0) -> list[Tensor]:
    """All pieces of the tensors, in order."""
    return [
        piece
        for tensor_pieces, tensor in zip(pieces, tensors, strict=True)
        for piece in tensor_pieces.split(tensor, lead)
    ]


def join(pieces: Sequence[Pieces], values: Sequence[Tensor], lead: int = 0) -> list[Tensor]:
    """Joins pieces into tensors, in order."""
    result, at = [], 0
    for tensor_pieces in pieces:
        result.append(tensor_pieces.join(values[at : at + tensor_pieces.count], lead))
        at += tensor_pieces.count
    return result
