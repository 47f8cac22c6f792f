"""One exception class per mistake; each is also a built-in kind."""

from __future__ import annotations


class UnknownNameError(ValueError):
    """A backend or step mode that does not exist."""


class StepModeError(ValueError):
    """A backend that cannot run in the step mode asked for."""


class InputCountError(ValueError):
    """Another number of tensors than the neuron takes."""


class StateError(ValueError):
    """The state that is kept does not fit the input."""
