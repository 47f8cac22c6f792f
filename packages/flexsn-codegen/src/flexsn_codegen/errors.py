"""One exception class per mistake; each is also a built-in kind."""

from __future__ import annotations


class UnsupportedOpError(NotImplementedError):
    """A graph holds an op that has no rule.

    Attributes:
        op: the op's name, e.g. ``"prims.igamma.default"``.
    """

    def __init__(self, message: str, op: str) -> None:
        super().__init__(message)
        self.op = op


class PrecisionError(ValueError):
    """An unknown `precision`."""


class GraphError(ValueError):
    """A graph that cannot be turned into source: no output, or a node without a dtype."""


class KernelNameError(ValueError):
    """The source defines no kernel of the given name."""


class CacheFolderError(RuntimeError):
    """The folder for generated sources could be changed by others."""


class TritonMissingError(ImportError):
    """Triton is not installed."""


class TraceError(ValueError):
    """A function that no pointwise kernel can be made of: its results, what it captures, what it reads."""


class ArgumentError(TypeError):
    """A pointwise kernel was called with something else than tensors of supported dtypes."""


class DeviceError(RuntimeError):
    """Tensors on several devices, or on one that Triton cannot use here."""


class AutogradError(RuntimeError):
    """A gradient was asked of a pointwise kernel that was made without."""


class OfflineCompileError(RuntimeError):
    """A kernel could not be compiled for a target."""
