"""One exception class for each mistake. Each is a subclass of a built-in exception."""

from __future__ import annotations

from flexsn_codegen.errors import DeviceError as DeviceError
from flexsn_codegen.errors import TransformError as TransformError
from flexsn_hop.errors import DoubleBackwardError as DoubleBackwardError


class BackendUnavailableError(RuntimeError):
    """Compiled kernels cannot run here."""


class LauncherError(ValueError):
    """`FLEXSN_LAUNCHER` has an invalid value."""


class TensorCountError(ValueError):
    """The number of tensors differs from the number that the step function takes or returns."""


class ShapeError(ValueError):
    """Shapes that do not belong to one scan: unequal T, or a state whose shape differs from the step's."""


class DtypeError(TypeError):
    """A dtype that kernels do not support, or that differs from the dtype in which the step reads a captured tensor."""


class LayoutError(TypeError):
    """A tensor that is not a dense array of numbers in memory: a sparse, nested, quantized or fake one."""


class ResidualsError(ValueError):
    """An unknown choice of values to save for the backward."""


class SpikeBitsError(ValueError):
    """Bits are requested for an output that may be neither 0 nor 1, or for a step that has no single kernel."""


class LateInputError(ValueError):
    """Late inputs are requested for a step that has no single kernel for all steps."""


class TemplateNeededError(ValueError):
    """The shape of a gradient cannot be derived from the arguments."""


class UnknownHandleError(RuntimeError):
    """A kernel handle that was never registered, or has been removed."""


class CapturedTensorError(RuntimeError):
    """A tensor captured by the step function was replaced between forward and backward."""


class FreedGraphError(RuntimeError):
    """A backward reached a scan of an earlier, freed graph, because a state was neither reset nor detached."""

    def __init__(self) -> None:
        super().__init__(  # `native/launcher.cpp` has this text, too
            "backward a second time through a scan whose graph an earlier backward has freed. If this is the next "
            "training step, a state that the scan returned still belongs to the graph of an earlier step: reset it "
            "between sequences (functional.reset_net(net), neuron.reset()), or cut it off between parts of one "
            "sequence (functional.detach_net(net), neuron.detach()). To go through one graph twice, give the first "
            "backward retain_graph=True."
        )


class StepGoneError(RuntimeError):
    """A backward needs a step that no longer exists: its neuron was deleted, or many newer steps displaced it."""


class GaveUpError(RuntimeError):
    """Programs of a kernel waited for each other in vain; the kernel's results are NaN."""


class UnsupportedScanError(NotImplementedError):
    """A step in a compiler's graph for which kernels cannot be generated."""


class SymbolicSizeError(UnsupportedScanError):
    """Symbolic sizes for which kernels cannot be generated."""
