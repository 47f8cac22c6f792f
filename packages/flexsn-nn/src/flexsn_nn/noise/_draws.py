"""The transforms of calls that draw: the numbers' places as inputs, or means."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexsn_nn.noise import _captured as _captured  # defines operators of captured steps
from flexsn_nn.noise._current import Places, drawing
from flexsn_nn.noise._numbers import Numbers
from flexsn_nn.transforms._transform import Call, Changed, Core, Own, Transform, Values


class Draws(Transform):
    """Gives a step the places of its random numbers. It is the outermost: other transforms may draw, too.

    One object serves one call, whose places are computed once, whichever way the call takes.

    Args:
        numbers: of the neuron.
        begins, keep: as of `Numbers.places`.
    """

    num_inputs = len(Places._fields)

    def __init__(self, numbers: Numbers, *, begins: bool, keep: bool) -> None:
        self._numbers = numbers
        self._begins = begins
        self._keep = keep
        self._places: Places | None = None

    def inputs(self, call: Call) -> Sequence[torch.Tensor]:
        """The places, `[T, *step]` each, which broadcast."""
        if self._places is None:
            steps = call.num_steps if call.step_mode == "m" else None
            self._places = self._numbers.places(
                call.step_shape, steps, call.inputs[0].device, begins=self._begins, keep=self._keep
            )
        return self._places

    def step(self, core: Core, inputs: Values, states: Values, own: Own) -> Changed:
        """The step, in which draws know their places."""
        places = Places(*own.inputs)
        if torch.compiler.is_dynamo_compiling():  # a captured step may not change an object: `number_draws`
            torch.ops.flexsn_nn.places(*places)
            return Changed(*core(inputs, states))
        return Changed(*drawing(places, lambda: core(inputs, states)))


class Means(Transform):
    """Gives a step the mean of each number that it draws."""

    def step(self, core: Core, inputs: Values, states: Values, own: Own) -> Changed:
        """The step, in which draws give means."""
        if torch.compiler.is_dynamo_compiling():
            torch.ops.flexsn_nn.means()
            return Changed(*core(inputs, states))
        return Changed(*drawing(None, lambda: core(inputs, states)))


def example() -> Draws:
    """For traces: places of some key, which no generator draws."""
    numbers = Numbers()
    numbers.configure(0, 0, None, None)
    return Draws(numbers, begins=True, keep=False)
