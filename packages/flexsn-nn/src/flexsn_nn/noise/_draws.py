"""Transforms that pass the places of random numbers to a step, or replace the numbers by their means."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexsn_nn.noise import _captured as _captured  # defines the operators of captured steps
from flexsn_nn.noise._current import Elements, Places, drawing
from flexsn_nn.noise._numbers import Numbers
from flexsn_nn.transforms._transform import Call, Changed, Core, Own, Transform, Values
from flexsn_runtime import words_of_elements


class Draws(Transform):
    """Transform that passes the places of random numbers to a step.

    `Draws` must be the outermost transform, because other transforms may also draw numbers. One object serves one call.
    The call's key is drawn once, even if the call is first tried with kernels and then runs as a loop. Kernels compute
    the words of an element before their loop over time. Loops in Python receive words that are computed before the
    loop.

    Args:
        numbers: key and steps of the neuron's random numbers.
        begins, keep: arguments of `Numbers.places`.
    """

    num_inputs = 1

    def __init__(self, numbers: Numbers, *, begins: bool, keep: bool) -> None:
        self._numbers = numbers
        self._begins = begins
        self._keep = keep
        self._places: tuple[Elements, Tensor] | None = None
        self._tensors: Values = ()

    @property
    def tensors(self) -> Values:
        """Tensors from which the words of the elements are computed, or the words themselves."""
        return self._tensors

    def before(self, call: Call) -> tuple[Values, Transform | None]:
        """Prepares `tensors` for the step of this call."""
        elements, _ = self._get_places(call)
        in_step = call.kernels or torch.compiler.is_compiling()
        self._tensors = tuple(elements) if in_step else words_of_elements(*elements)
        return call.inputs, self

    def inputs(self, call: Call) -> Sequence[Tensor]:
        """Returns the index of each step, `[T, 1, ...]`, or `[1, ...]` in step mode `"s"`."""
        return (self._get_places(call)[1],)

    def _get_places(self, call: Call) -> tuple[Elements, Tensor]:
        if self._places is None:
            steps = call.num_steps if call.step_mode == "m" else None
            self._places = self._numbers.places(
                call.step_shape, steps, call.inputs[0].device, begins=self._begins, keep=self._keep
            )
        return self._places

    def step(self, core: Core, inputs: Values, states: Values, own: Own) -> Changed:
        """Runs the step with the places of its random numbers."""
        words = own.tensors
        if len(words) == len(Elements._fields):
            word = torch.ops.flexsn_graph.element_word
            words = tuple([word(*own.tensors, index=i) for i in range(3)])
        places = Places(*words, *own.inputs)
        if torch.compiler.is_dynamo_compiling():  # a captured step must not change objects; see `number_draws`
            torch.ops.flexsn_nn.places(*places)
            return Changed(*core(inputs, states))
        return Changed(*drawing(places, lambda: core(inputs, states)))


class Means(Transform):
    """Transform that replaces each random number of a step by its mean."""

    def step(self, core: Core, inputs: Values, states: Values, own: Own) -> Changed:
        """Runs the step. Draws inside of the step return means."""
        if torch.compiler.is_dynamo_compiling():
            torch.ops.flexsn_nn.means()
            return Changed(*core(inputs, states))
        return Changed(*drawing(None, lambda: core(inputs, states)))


def example() -> Draws:
    """Returns a transform for traces. The transform's key is derived from seed 0, and not drawn from a generator."""
    numbers = Numbers()
    numbers.configure(0, 0, None, None)
    return Draws(numbers, begins=True, keep=False)
