"""One class per mistake; each is also a built-in kind, so that existing ``except`` clauses work."""

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
    """``num_inputs`` is below 1, or another count below 0, or ``zero_states`` is not ``num_states`` long."""


class TooFewTensorsError(ValueError):
    """Fewer tensors came than ``num_inputs + num_states``."""


class SequenceLengthError(ValueError):
    """The input sequences have no, or not the same, leading (time) dimension."""


class ScanLengthError(ValueError):
    """``length`` is missing, no number of steps, or another one than the input sequences have."""


class ScanDimError(ValueError, IndexError):
    """A sequence has no dimension ``dim``."""


class NonzeroStateError(ValueError):
    """An initial state that ``zero_states`` says to be zeros is not."""


class CoreArityError(ValueError):
    """The core's positional parameters cannot take the inputs, states and lifted tensors."""


class CoreReturnCountError(ValueError):
    """The core returned another number of values than ``num_outputs + num_states``."""


class EmptyScanError(ValueError):
    """``T == 0``, and ``output_template_specs`` does not say what the outputs look like."""


class StateChangedError(ValueError):
    """A state came back from the core with another shape, dtype or device."""


class CarryStructureError(ValueError):
    """The step returned a carry of another structure than that which it took."""


class OutputChangedError(ValueError):
    """An output has another shape, dtype or device than at the first step."""


class NotATensorError(TypeError):
    """A tensor is required and something else was received, as an argument or from the core."""


class RandomOpError(NotImplementedError):
    """The core draws random numbers inside the operator, whose backward would draw them again."""


class MutationError(RuntimeError):
    """The core writes into one of its arguments inside the operator."""


class LoweringError(ValueError):
    """The requested lowering is unknown, or is unavailable here; or a lowering has made a mistake."""


class LoweringGradientError(RuntimeError):
    """A gradient is required through an operator that is known to compute it wrongly."""


class RematError(ValueError):
    """``remat`` is no number of steps, or a transform of torch.func is active, which keeps carries its own way."""


class DoubleBackwardError(NotImplementedError):
    """The gradient of a gradient is required, which scans in kernels and in graphs do not have."""
