"""One exception class for each kind of mistake. Each class is derived from a built-in exception."""

from __future__ import annotations


class UnknownNameError(ValueError):
    """A name is unknown, for example that of a backend, a step mode, a reset mechanism, a state or a layer."""


class ParameterError(ValueError):
    """An argument has an unsuitable type, shape or value, or two arguments exclude each other."""


class StepModeError(ValueError):
    """A backend, a parameter or a layer cannot be used in the requested step mode."""


class CaptureWarning(UserWarning):
    """A captured step, or a part of it, runs in Python. The message gives the reason and the line of code."""


class InputCountError(ValueError):
    """The number of tensors in a call differs from the number of inputs, or of inputs and states."""


class InputDtypeError(TypeError):
    """The elements of an input are not real floating-point numbers of at least 16 bits."""


class InputLayoutError(TypeError):
    """A tensor is nested, sparse, quantised or packed, has MKL-DNN's layout, or has named dimensions."""


class InputShapeError(ValueError):
    """An input lacks the dimensions that the step mode requires, or has sizes that a layer does not accept."""


class HandoverError(RuntimeError):
    """A neuron with a fused norm or delay was called with an input that does not come from that norm or delay."""


class StateError(ValueError):
    """States are missing, do not match the input or the neuron, or belong to another run or sample."""


class DrawError(ValueError):
    """`flexsn_nn.random` was called outside of a step, for an unsupported shape, or in an unsupported scan."""


class PlacementError(ValueError):
    """The placements of the tensors, or the step itself, do not allow each process to run its part independently."""


class ExampleError(ValueError):
    """`example_outputs` are missing, or their number, shapes or dtypes differ from those of the core's outputs."""


class ExportError(RuntimeError):
    """A neuron cannot be exported or scripted, for example because the program would have to store a state."""


class UnknownParameterError(TypeError):
    """An argument was passed to the constructor of a neuron under a name that no parameter has."""


class UnknownAttributeError(AttributeError):
    """The attribute exists in neurons of other libraries, but has another name here."""


class PortabilityWarning(UserWarning):
    """A core runs as a loop here, but compiled kernels will reject it on a GPU."""


class RangeWarning(UserWarning):
    """A learned number has left its range, and counts as the nearest number in the range."""


class FiringWarning(UserWarning):
    """A layer never or always fires in training."""


class SharedStateWarning(UserWarning):
    """A network calls one module twice, and the second call continues from the state of the first call."""


class PortabilityError(NotImplementedError):
    """A core runs as a loop here, but kernels will reject it on a GPU. Raised only after `set_portability("error")`."""


class NirError(ValueError):
    """NIR cannot represent a network, or a network cannot represent a NIR graph without changing its meaning."""


class MissingExtraError(ImportError):
    """An optional dependency is not installed."""


class ConversionError(ValueError):
    """Some modules of a network from another library cannot be converted."""
