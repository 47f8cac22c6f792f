"""Exception classes, one for each cause of an error. Each class is a subclass of a built-in exception."""

from __future__ import annotations

__all__ = [
    "CarryStructureError",
    "CoreArityError",
    "CoreReturnCountError",
    "DoubleBackwardError",
    "EmptyScanError",
    "LoweringError",
    "LoweringGradientError",
    "MutationError",
    "NonzeroStateError",
    "NotATensorError",
    "OutputChangedError",
    "RandomOpError",
    "RematError",
    "ScanCountError",
    "ScanDimError",
    "ScanLengthError",
    "SequenceLengthError",
    "StateChangedError",
    "TooFewTensorsError",
]


class ScanCountError(ValueError):
    """``num_inputs`` is below 1, another count is below 0, or the length of ``zero_states`` is not ``num_states``."""


class TooFewTensorsError(ValueError):
    """The call passes fewer than ``num_inputs + num_states`` tensors."""


class SequenceLengthError(ValueError):
    """An input sequence has no leading (time) dimension, or its length differs from the length of another sequence."""


class ScanLengthError(ValueError):
    """``length`` is missing, is not a number of steps, or differs from the length of the input sequences."""


class ScanDimError(ValueError, IndexError):
    """A sequence has no dimension ``dim``."""


class NonzeroStateError(ValueError):
    """An initial state is not zeros, although ``zero_states`` is True for this state."""


class CoreArityError(ValueError):
    """The core's positional parameters cannot take the inputs, states and lifted tensors."""


class CoreReturnCountError(ValueError):
    """The core returned a number of values that differs from ``num_outputs + num_states``."""


class EmptyScanError(ValueError):
    """``T == 0``, and ``output_template_specs`` does not describe the outputs."""


class StateChangedError(ValueError):
    """The core returned a state that differs in shape, dtype or device from the state that the core received."""


class CarryStructureError(ValueError):
    """The step returned a carry that differs in structure from the carry that the step received."""


class OutputChangedError(ValueError):
    """An output of a step differs in shape, dtype or device from the same output of the first step."""


class NotATensorError(TypeError):
    """An argument or a result of the core is not a tensor, although it must be one."""


class RandomOpError(NotImplementedError):
    """The core draws random numbers inside the operator. The backward would draw different random numbers."""


class MutationError(RuntimeError):
    """The core writes to one of its arguments inside the operator."""


class LoweringError(ValueError):
    """The requested lowering is unknown or unavailable, or a lowering returned wrong results."""


class LoweringGradientError(RuntimeError):
    """A gradient is required of an operator that is known to compute wrong gradients."""


class RematError(ValueError):
    """``remat`` is below 1, or a transform of torch.func is active, in which ``remat`` would have no effect."""


class DoubleBackwardError(NotImplementedError):
    """The gradient of a gradient is required, which scans in kernels and in graphs do not compute."""
