"""One exception class for each kind of mistake that tracing detects. Each class extends a built-in exception."""

from __future__ import annotations

from flexsn_graph._location import SourceLocation


class TraceError(ValueError):
    """The step function could not be turned into a graph."""


class NothingCutError(TraceError):
    """The traced function cuts no dimension, although this trace is only for functions that cut dimensions."""


class TorchError(TraceError, RuntimeError):
    """Torch raised an error while a function ran on tensors without data."""


class ExampleError(TypeError):
    """An example is not a dense tensor."""


class CoreArityError(TraceError):
    """The number of arguments or results of the step function differs from the number in the call."""


class CoreReturnError(TraceError):
    """The step function returned something that is not a tensor or a flat sequence of tensors."""


class StateMismatchError(TraceError):
    """A new state differs from the state in shape or dtype, so it cannot be carried over time."""


class RequiresGradError(TraceError):
    """`requires_grad` does not fit the arguments, or no result is differentiable."""


class GraphArityError(ValueError):
    """The number of arguments or results of a graph differs from the number in the call."""


class UnsupportedOpError(NotImplementedError):
    """An op that kernels cannot contain.

    Attributes:
        op: the operator's name, e.g. ``"aten.bernoulli.p"``.
        location: the user's line that calls the op, or `None` if the line is unknown.
    """

    def __init__(self, message: str, op: str, location: SourceLocation | None = None) -> None:
        super().__init__(message if location is None else f"{message}\n  at {location}")
        self.op = op
        self.location = location


class UnsupportedCoreError(UnsupportedOpError):
    """The step function does something that a scan kernel cannot do."""


class StatefulCoreError(UnsupportedCoreError):
    """The step function behaves differently in each call, or keeps tensors from one call to the next."""


class RandomOpError(UnsupportedCoreError):
    """A random op: the backward pass recomputes the step and would draw different numbers."""


class DataDependentError(UnsupportedCoreError):
    """Python control flow or `.item()` on a tensor's value."""


class MutationError(UnsupportedCoreError):
    """An in-place op on an input, a state or a captured tensor."""


class WrittenViewError(MutationError):
    """An in-place op on one of several views of a value that is computed before the loop."""


class NonPointwiseError(UnsupportedCoreError):
    """An op that mixes elements of the step, such as a reduction, a matrix product or a gather."""

    _in_any_step = False  # True if the op cannot be computed before the loop, because it reads a value of the step


class ComplexDtypeError(UnsupportedCoreError):
    """A complex tensor: kernels compute with real numbers."""


class CaptureError(UnsupportedCoreError):
    """A captured tensor is used in a way that kernels do not support."""


class TwoLayoutsError(CaptureError):
    """A captured tensor is read in two layouts, but the kernel can load it in only one layout."""
