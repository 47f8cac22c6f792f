"""Exceptions, one class for each kind of mistake. Each class is derived from a built-in exception."""

from __future__ import annotations

from flexsn_graph import TraceError, UnsupportedOpError

__all__ = [
    "ArgumentError",
    "AutogradError",
    "CacheFolderError",
    "CompilationError",
    "CompilerMissingError",
    "DeviceError",
    "GraphError",
    "KernelGoneError",
    "KernelNameError",
    "OfflineCompileError",
    "PrecisionError",
    "SignatureError",
    "TraceError",
    "TransformError",
    "TritonMissingError",
    "UnsupportedOpError",
    "WriteError",
]


class PrecisionError(ValueError):
    """`precision` is unknown."""


class GraphError(ValueError):
    """A graph cannot be turned into source, for example because it returns nothing, or because a node has no dtype."""


class KernelNameError(ValueError):
    """The source does not define a kernel with the requested name."""


class CacheFolderError(RuntimeError):
    """The folder for generated sources is unusable: other users can write to it, or this user cannot."""


class CompilerMissingError(RuntimeError):
    """This machine has no C++ compiler."""


class CompilationError(RuntimeError):
    """The C++ or CUDA compiler rejected a generated kernel, or the kernel needs more resources than the GPU has."""


class TritonMissingError(ImportError):
    """Triton is not installed."""


class ArgumentError(TypeError):
    """An argument of a pointwise kernel has an unsupported type, dtype, layout or shape, or no argument is a tensor."""


class SignatureError(ArgumentError):
    """The arguments of a pointwise kernel do not fit the signature of its function."""


class DeviceError(RuntimeError):
    """Tensors are on several devices, or on a device for which no kernels can be compiled."""


class AutogradError(RuntimeError):
    """A pointwise kernel cannot compute a required gradient, or captured values have changed since the forward."""


class KernelGoneError(RuntimeError):
    """A graph launches a pointwise kernel that does not exist in this process."""


class TransformError(NotImplementedError):
    """A kernel does not support the transform, the forward-mode derivative or the tracer in which it was called."""


class WriteError(RuntimeError):
    """A kernel cannot write to a tensor that overlaps with itself or another argument, or to a lazily negated view."""


class OfflineCompileError(RuntimeError):
    """`compile_offline` cannot compile a kernel for a GPU."""


# Errors about one call. Another call of the same function may succeed.
OF_A_CALL = (
    *(AutogradError, DeviceError, SignatureError, TransformError, WriteError),
    *(CompilationError, CompilerMissingError),
)
