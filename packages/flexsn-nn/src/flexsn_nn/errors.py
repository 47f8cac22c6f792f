"""One exception class per mistake; each is also a built-in kind."""

from __future__ import annotations


class UnknownNameError(ValueError):
    """A name that does not exist: of a backend, a step mode, a reset mechanism, a state, a neuron."""


class ParameterError(ValueError):
    """A parameter out of its range, or two that do not go together."""


class StepModeError(ValueError):
    """A backend or a parameter that cannot be used in the requested step mode."""


class CaptureWarning(UserWarning):
    """A captured step, or a part of it, runs by Python: the message says why, and where."""


class InputCountError(ValueError):
    """Another number of tensors than the neuron takes."""


class InputDtypeError(TypeError):
    """A neuron was given numbers that a membrane does not add up: integers, booleans, complex ones, float8."""


class InputLayoutError(TypeError):
    """A tensor that has no dense steps: nested, sparse, quantised, or with named dimensions."""


class InputShapeError(ValueError):
    """An input without the dimensions that the step mode requires."""


class HandoverError(RuntimeError):
    """A norm was fused into a neuron that was then called with something else than what stands in front of it."""


class StateError(ValueError):
    """States that do not fit the input, or another number of them than the neuron has."""


class DrawError(ValueError):
    """A random number of `flexsn_nn.random` that no step draws, or of another shape than the step."""


class PlacementError(ValueError):
    """A `DTensor` that lies on the processes in a way in which none can run its part of the step by itself."""


class ExampleError(ValueError):
    """`example_outputs` of another number, shape or dtype than the core's outputs; or none, where one is needed."""


class ExportError(RuntimeError):
    """A state that is kept on the module, in a program that has no module; or a loop over time that it would unroll."""


class UnknownParameterError(TypeError):
    """A neuron was given an argument that it does not have."""


class UnknownAttributeError(AttributeError):
    """An attribute that neurons of other libraries have, and these have under another name."""


class PortabilityWarning(UserWarning):
    """A core runs as a loop here, and compiled kernels will refuse it on a GPU."""


class RangeWarning(UserWarning):
    """A learned number has left its range, and counts as the nearest number in it."""


class FiringWarning(UserWarning):
    """A layer never, or always, fires in training."""


class SharedStateWarning(UserWarning):
    """One instance stands in two places of a network, and its state goes from one to the other."""


class PortabilityError(NotImplementedError):
    """A core runs as a loop here, and compiled kernels will refuse it on a GPU, under `set_portability("error")`."""


class NirError(ValueError):
    """A network that NIR cannot express, or a graph that cannot be read without changing its meaning."""


class MissingExtraError(ImportError):
    """An optional dependency is not installed."""


class ConversionError(ValueError):
    """A network of another library that cannot be converted as a whole."""
