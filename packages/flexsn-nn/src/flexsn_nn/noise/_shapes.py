"""Random numbers for tensors whose shapes differ from the step's: for branches, a soma, or a smaller population."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch


class ShapeRule(NamedTuple):
    """Rule that derives numbers with a tensor's shape from draws with the step's shape.

    Attributes:
        num_draws: number of draws: 1, or the size of the dimension that the step lacks.
        function: function that is applied to the draw, or to the list of draws; `None` if the draw itself is the
            result.
        arguments: other arguments of the function.
    """

    num_draws: int = 1
    function: Callable[..., Any] | None = None
    arguments: tuple[int, ...] = ()

    def derive(self, draws: Sequence[Any], call: Callable[[Callable[..., Any], tuple[Any, ...]], Any]) -> Any:
        """Derives the numbers from draws.

        Args:
            draws: the `num_draws` draws, which are tensors or nodes of a graph.
            call: function that applies a function to a tuple of arguments, or adds the call to a graph.
        """
        if self.function is None:
            return draws[0]
        operand = list(draws) if self.function is torch.stack else draws[0]
        return call(self.function, (operand, *self.arguments))


def find_shape_rule(shape: Sequence[int], step: Sequence[int]) -> ShapeRule | None:
    """Returns the rule for numbers of this shape; `None` if there is no rule. Ignores the first dimension (rows).

    - If the shape has one dimension more than the step, there is one draw for each index of this dimension.
    - If the shape has one dimension less, the numbers are those at index 0 of the missing dimension in the step's draw.
    - If the last dimension is smaller than the step's and larger than 1, the numbers are the first elements of the
      step's draw along this dimension.
    """
    rest, step_rest = list(shape[1:]), list(step[1:])
    if len(shape) == len(step) and rest == step_rest:
        return ShapeRule()
    for dim in range(len(shape) - 1, 0, -1):
        if [*shape[1:dim], *shape[dim + 1 :]] == step_rest and len(shape) > 1:
            return ShapeRule(shape[dim], torch.stack, (dim,)) if shape[dim] else None
    for dim in range(len(step) - 1, 0, -1):
        if [*step[1:dim], *step[dim + 1 :]] == rest:
            return ShapeRule(1, torch.select, (dim, 0))
    if rest and len(rest) == len(step_rest) and rest[:-1] == step_rest[:-1] and 1 < rest[-1] < step_rest[-1]:
        return ShapeRule(1, torch.narrow, (-1, 0, rest[-1]))
    return None
