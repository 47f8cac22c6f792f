"""Exception classes, one for each cause of an error. Each class is a subclass of a built-in exception."""

from __future__ import annotations

from flexsn_codegen.errors import DeviceError as DeviceError
from flexsn_codegen.errors import TransformError as TransformError
from flexsn_hop.errors import DoubleBackwardError as DoubleBackwardError


class BackendUnavailableError(RuntimeError):
    """Compiled kernels cannot run on this device or machine."""


class LauncherError(ValueError):
    """`FLEXSN_LAUNCHER` has an invalid value."""


class TensorCountError(ValueError):
    """The number of tensors differs from the number that the step function takes or returns."""


class ShapeError(ValueError):
    """The shapes do not belong to one scan: T differs, or the shape of a state differs from the shape of the step."""


class DtypeError(TypeError):
    """Kernels do not support a dtype, or a tensor was passed for a captured tensor of another dtype."""


class LayoutError(TypeError):
    """A tensor is not a dense array in memory. For example, the tensor is sparse, nested, quantized or fake."""


class ResidualsError(ValueError):
    """The choice of values to save for the backward is unknown."""


class SpikeBitsError(ValueError):
    """Bits are requested for an output with values other than 0 and 1, or for a step that has no single kernel."""


class LateInputError(ValueError):
    """Late inputs are requested for a step that has no single kernel for all steps."""


class TemplateNeededError(ValueError):
    """The shape of a gradient cannot be derived from the arguments."""


class UnknownHandleError(RuntimeError):
    """A kernel handle was never registered, or has been removed."""


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
    """Programs of a kernel gave up waiting for each other, so the kernel's results are NaN."""


class UnsupportedScanError(NotImplementedError):
    """Kernels cannot be generated for a step in a compiler's graph."""


class SymbolicSizeError(UnsupportedScanError):
    """Kernels cannot be generated for symbolic sizes in a compiler's graph."""
