"""One exception class per mistake; each is also a built-in kind."""

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
    """An unknown `precision`."""


class GraphError(ValueError):
    """A graph that cannot be turned into source: no output, or a node without a dtype."""


class KernelNameError(ValueError):
    """The source defines no kernel of the given name."""


class CacheFolderError(RuntimeError):
    """The folder for generated sources could be changed by others."""


class CompilerMissingError(RuntimeError):
    """There is no C++ compiler on this machine."""


class CompilationError(RuntimeError):
    """A compiler, of C++ or of CUDA C++, refused a generated kernel, or a GPU has no room for it."""


class TritonMissingError(ImportError):
    """Triton is not installed."""


class ArgumentError(TypeError):
    """A pointwise kernel was called with something else than tensors of supported dtypes."""


class SignatureError(ArgumentError):
    """A pointwise kernel was called as its function cannot be called."""


class DeviceError(RuntimeError):
    """Tensors are on several devices, or on one without compiled kernels."""


class AutogradError(RuntimeError):
    """A gradient is required of a pointwise kernel that was made without one."""


class KernelGoneError(RuntimeError):
    """A graph launches a pointwise kernel that this process does not have."""


class TransformError(NotImplementedError):
    """A kernel inside of a function transform (`torch.func`), forward-mode differentiation or a tracer."""


class WriteError(RuntimeError):
    """A tensor that a kernel is to write to, and cannot: it overlaps with itself or with another argument."""


class OfflineCompileError(RuntimeError):
    """A kernel could not be compiled for a target."""


# What is wrong with a call, whatever the function does.
OF_A_CALL = (
    *(AutogradError, DeviceError, SignatureError, TransformError, WriteError),
    *(CompilationError, CompilerMissingError),
)
