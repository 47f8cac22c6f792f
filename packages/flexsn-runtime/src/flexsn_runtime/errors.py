"""One exception class per mistake; each is also a built-in kind."""

from __future__ import annotations

from flexsn_codegen.errors import DeviceError as DeviceError
from flexsn_codegen.errors import TransformError as TransformError
from flexsn_hop.errors import DoubleBackwardError as DoubleBackwardError


class BackendUnavailableError(RuntimeError):
    """Compiled kernels cannot run here."""


class LauncherError(ValueError):
    """`FLEXSN_LAUNCHER` says something that it may not say."""


class TensorCountError(ValueError):
    """Another number of tensors than the step function takes."""


class ShapeError(ValueError):
    """Shapes that do not belong to one scan: unequal T, or a state that is not like the step."""


class DtypeError(TypeError):
    """A dtype that kernels do not have, or another one than the step reads a captured tensor in."""


class LayoutError(TypeError):
    """A tensor that is no dense array of numbers in memory: a sparse, nested, quantized or fake one."""


class ResidualsError(ValueError):
    """An unknown choice of what is kept for the backward."""


class SpikeBitsError(ValueError):
    """Bits are requested of an output that is not known to be 0 or 1, or that no kernel of one launch writes."""


class LateInputError(ValueError):
    """Late inputs are requested of a step that has no kernel of its own for all steps."""


class TemplateNeededError(ValueError):
    """A gradient's shape cannot be known from what was given."""


class UnknownHandleError(RuntimeError):
    """A kernel handle that was never registered, or has been removed."""


class CapturedTensorError(RuntimeError):
    """A tensor captured by the step function was replaced between forward and backward."""


class FreedGraphError(RuntimeError):
    """A backward reached a scan of an earlier graph, which has been freed: a state was neither reset nor detached."""

    def __init__(self) -> None:
        super().__init__(  # `native/launcher.cpp` has the same words
            "backward a second time through a scan whose graph an earlier backward has freed. If this is the next "
            "training step, a state that the scan returned still belongs to the graph of an earlier step: reset it "
            "between sequences (functional.reset_net(net), neuron.reset()), or cut it off between parts of one "
            "sequence (functional.detach_net(net), neuron.detach()). To go through one graph twice, give the first "
            "backward retain_graph=True."
        )


class StepGoneError(RuntimeError):
    """A backward needs its step, which has been dropped with its neuron, or for many others."""


class GaveUpError(RuntimeError):
    """Programs of a kernel waited for each other in vain; its results are not a number."""


class UnsupportedScanError(NotImplementedError):
    """A step in a compiler's graph of which kernels cannot be made."""


class SymbolicSizeError(UnsupportedScanError):
    """Symbolic sizes of which kernels cannot be made."""
