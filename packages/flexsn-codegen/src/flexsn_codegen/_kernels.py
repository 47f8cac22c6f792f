"""The kernels of one function: one for each structure and kind of arguments."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen._calls import Structure, check_signature
from flexsn_codegen._checks import without_tensors
from flexsn_codegen._cut import CutFunction
from flexsn_codegen._kernel import Kernel
from flexsn_codegen._layout import plan_layout
from flexsn_codegen._numerics import Numerics
from flexsn_graph import TorchError
from flexsn_graph.reads import Reads

_handles = itertools.count(1)
_functions: weakref.WeakValueDictionary[str, Kernels] = weakref.WeakValueDictionary()


class Kernels:
    """The kernels of a function, made when they are first asked for.

    Attributes:
        handle: finds it again: see `kernels_of`.
        cuts: the function as one that cuts, for the structures and kinds of arguments in which graphs have it so.
        captured: by a kernel's key, the tensors that it captures, as they were when it was last looked for.
        list_calls: calls over lists that graphs name.
        captured_by_cuts: the same of the function as one that cuts, by structures.
    """

    def __init__(self, fn: Callable[..., Any], name: str, numerics: Numerics, *, autograd: bool) -> None:
        self.fn, self.name, self.numerics, self.autograd = fn, name, numerics, autograd
        self.captured: dict[str, tuple[Tensor, ...]] = {}
        self.cuts: dict[tuple[Any, ...], CutFunction] = {}
        self.list_calls: dict[tuple[Any, ...], Any] = {}
        self.captured_by_cuts: dict[Structure, tuple[Tensor, ...]] = {}
        self.handle = str(next(_handles))  # compilers may make symbols of whole numbers
        self._known: dict[tuple[Any, ...], tuple[Kernel, Reads]] = {}
        _functions[self.handle] = self

    def find(
        self, structure: Structure, tensors: Sequence[Tensor], numbers: Sequence[Any]
    ) -> tuple[Kernel, tuple[Tensor, ...]]:
        """The kernel for such a call, and the captured tensors as they are now."""
        key = (structure, *[(t.dtype, t.dim(), t.device.type) for t in tensors])
        found = self._known.get(key)
        if found is not None:
            kernel, reads = found
            captured = reads.fetch()
            if captured is not None:
                kernel.captured[:] = captured  # a trace for other tensors meets those of now
                return kernel, captured
        check_signature(self.fn, self.name, structure)
        plan_layout(tensors)  # they broadcast, or it says so
        reads = Reads(self.fn)
        try:
            kernel = Kernel.of(
                self.fn, self.name, self.numerics, structure, tensors, numbers, autograd=self.autograd, reads=reads
            )
        except (TypeError, TorchError):
            if tensors or isinstance(self.fn, torch.nn.Module):
                raise
            raise without_tensors(self.name) from None
        self._known[key] = kernel, reads
        captured = self.captured[kernel.key] = tuple(kernel.captured)
        return kernel, captured

    def reads_of(self, kernel: Kernel) -> Reads:
        """What the function reads besides its arguments, for one of its kernels."""
        return next(reads for known, reads in self._known.values() if known is kernel)

    def all(self) -> list[Kernel]:
        """Those that there are."""
        return [kernel for kernel, _ in self._known.values()]


def kernels_of(handle: str) -> Kernels:
    """The kernels of the function that has this handle."""
    return _functions[handle]
