"""The kernels of one function: one for each structure and kind of arguments."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen.functions._calls import Structure, check_signature
from flexsn_codegen.functions._checks import without_tensors
from flexsn_codegen.functions._cut import CutFunction
from flexsn_codegen.functions._kernel import Kernel
from flexsn_codegen.functions._layout import plan_layout
from flexsn_codegen.source._numerics import Numerics
from flexsn_graph import TRACE_LOCK, TorchError

_handles = itertools.count(1)
_functions: weakref.WeakValueDictionary[str, Kernels] = weakref.WeakValueDictionary()


class Kernels:
    """The kernels of a function, made when they are first asked for.

    Attributes:
        handle: finds it again: see `kernels_of`.
        cuts: the function as one that cuts, for the structures and kinds of arguments in which graphs have it so.
        captured: by a kernel's key, the tensors that it captures, for graphs, which read them here at each call.
        list_calls: calls over lists that graphs name.
        known_cuts: the function as one that cuts, by the structures of calls in eager mode.
    """

    def __init__(self, fn: Callable[..., Any], name: str, numerics: Numerics, *, autograd: bool) -> None:
        self.fn, self.name, self.numerics, self.autograd = fn, name, numerics, autograd
        self.captured: dict[str, tuple[Tensor, ...]] = {}
        self.cuts: dict[tuple[Any, ...], CutFunction] = {}
        self.list_calls: dict[tuple[Any, ...], Any] = {}
        self.known_cuts: dict[Structure, CutFunction] = {}
        self.handle = str(next(_handles))  # compilers may make symbols of whole numbers
        self._known: dict[tuple[Any, ...], Kernel] = {}
        _functions[self.handle] = self

    def find(
        self, structure: Structure, tensors: Sequence[Tensor], numbers: Sequence[Any]
    ) -> tuple[Kernel, tuple[Tensor, ...]]:
        """The kernel for such a call, and the captured tensors as they are now."""
        key = (structure, *[(t.dtype, t.dim(), t.device.type) for t in tensors])
        found = self._fetched(key)
        if found is None:
            with TRACE_LOCK:
                # Another thread may have made it meanwhile.
                found = self._fetched(key) or self._made(key, structure, tensors, numbers)
        return found

    def _fetched(self, key: tuple[Any, ...]) -> tuple[Kernel, tuple[Tensor, ...]] | None:
        kernel = self._known.get(key)
        captured = None if kernel is None else kernel.captured.fetch()
        return None if kernel is None or captured is None else (kernel, captured)

    def _made(
        self, key: tuple[Any, ...], structure: Structure, tensors: Sequence[Tensor], numbers: Sequence[Any]
    ) -> tuple[Kernel, tuple[Tensor, ...]]:
        check_signature(self.fn, self.name, structure)
        plan_layout(tensors)  # they broadcast, or it says so
        try:
            kernel = Kernel.of(self.fn, self.name, self.numerics, structure, tensors, numbers, autograd=self.autograd)
        except (TypeError, TorchError):
            if tensors or isinstance(self.fn, torch.nn.Module):
                raise
            raise without_tensors(self.name) from None
        self._known[key] = kernel
        return kernel, tuple(kernel.captured.tensors)

    def all(self) -> list[Kernel]:
        """Those that there are."""
        return list(self._known.values())


def kernels_of(handle: str) -> Kernels:
    """The kernels of the function that has this handle."""
    return _functions[handle]
