"""One exception class for each kind of mistake; each is also a built-in exception."""

from __future__ import annotations


class UnknownNameError(ValueError):
    """Unknown name of a backend, a step mode, a reset mechanism, a state or a neuron."""


class ParameterError(ValueError):
    """A parameter is out of its range, or two parameters exclude each other."""


class StepModeError(ValueError):
    """A backend or a parameter cannot be used in the requested step mode."""


class CaptureWarning(UserWarning):
    """A captured step, or a part of it, runs in Python; the message gives the reason and the place."""


class InputCountError(ValueError):
    """The number of tensors differs from the number that the neuron takes."""


class InputDtypeError(TypeError):
    """Numbers that a membrane cannot sum were passed to a neuron: integers, booleans, complex numbers, float8."""


class InputLayoutError(TypeError):
    """A tensor has no dense steps: it is nested, sparse, quantised, or has named dimensions."""


class InputShapeError(ValueError):
    """An input lacks the dimensions that the step mode requires."""


class HandoverError(RuntimeError):
    """A norm was fused into a neuron, and the neuron was then called with an input from elsewhere."""


class StateError(ValueError):
    """States do not fit the input, or their number differs from the neuron's."""


class DrawError(ValueError):
    """A random number of `flexsn_nn.random` is drawn by no step, or its shape differs from the step's."""


class PlacementError(ValueError):
    """The placement of a `DTensor` lets no process run its part of the step alone."""


class ExampleError(ValueError):
    """`example_outputs` are missing, or their number, shapes or dtypes differ from those of the core's outputs."""


class ExportError(RuntimeError):
    """A program without modules would have to store a state, or would unroll a loop over time."""


class UnknownParameterError(TypeError):
    """A neuron was called with an argument that it does not have."""


class UnknownAttributeError(AttributeError):
    """An attribute exists in other libraries' neurons, and has another name here."""


class PortabilityWarning(UserWarning):
    """A core runs as a loop here, but compiled kernels will refuse it on a GPU."""


class RangeWarning(UserWarning):
    """A learned number has left its range, and counts as the nearest number in it."""


class FiringWarning(UserWarning):
    """A layer never or always fires in training."""


class SharedStateWarning(UserWarning):
    """One instance is at two places of a network, and the second continues with the state of the first."""


class PortabilityError(NotImplementedError):
    """A core runs as a loop here, but compiled kernels will refuse it on a GPU; for `set_portability("error")`."""


class NirError(ValueError):
    """NIR cannot express a network, or reading a graph would change its meaning."""


class MissingExtraError(ImportError):
    """An optional dependency is not installed."""


class ConversionError(ValueError):
    """A network of another library cannot be converted as a whole."""
