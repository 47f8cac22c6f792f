"""Numbers for tensors of other shapes than the step: those of branches, of a soma, of a smaller population."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch


class Fitted(NamedTuple):
    """How numbers of a tensor's shape are made of draws, which have the step's shape.

    Attributes:
        num_draws: 1, or the size of the dimension that the step lacks.
        function, arguments: make the result of one draw, or of the list of several; `None`: a draw is the result.
    """

    num_draws: int = 1
    function: Callable[..., Any] | None = None
    arguments: tuple[int, ...] = ()

    def of(self, draws: Sequence[Any], call: Callable[[Callable[..., Any], tuple[Any, ...]], Any]) -> Any:
        """The result of `num_draws` draws, where `call` applies a function to arguments."""
        if self.function is None:
            return draws[0]
        operand = list(draws) if self.function is torch.stack else draws[0]
        return call(self.function, (operand, *self.arguments))


def fitted(shape: Sequence[int], step: Sequence[int]) -> Fitted | None:
    """How numbers of a shape are made; `None`: they are not. The number of rows, which comes first, is read of neither.

    - One dimension more than the step: a draw for each of its elements.
    - One less: of the step's draw, the first along it.
    - A smaller last dimension, of several elements: of the step's draw, the first ones.
    """
    rest, own = list(shape[1:]), list(step[1:])
    if len(shape) == len(step) and rest == own:
        return Fitted()
    for dim in range(len(shape) - 1, 0, -1):
        if [*shape[1:dim], *shape[dim + 1 :]] == own and len(shape) > 1:
            return Fitted(shape[dim], torch.stack, (dim,)) if shape[dim] else None
    for dim in range(len(step) - 1, 0, -1):
        if [*step[1:dim], *step[dim + 1 :]] == rest:
            return Fitted(1, torch.select, (dim, 0))
    if rest and len(rest) == len(own) and rest[:-1] == own[:-1] and 1 < rest[-1] < own[-1]:
        return Fitted(1, torch.narrow, (-1, 0, rest[-1]))
    return None
