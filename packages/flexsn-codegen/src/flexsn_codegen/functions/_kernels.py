"""The kernels of one function: one kernel for each structure and kind of arguments."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen.errors import ArgumentError, TraceError
from flexsn_codegen.functions._calls import Structure, check_signature
from flexsn_codegen.functions._checks import check_tensors, make_no_tensors_error
from flexsn_codegen.functions._cutting import cut_for_graphs, cut_of
from flexsn_codegen.functions._kernel import Kernel
from flexsn_codegen.functions._launch import target_on
from flexsn_codegen.functions._layout import plan_layout
from flexsn_codegen.source._numerics import Numerics
from flexsn_codegen.targets import Target
from flexsn_graph import TRACE_LOCK, DataDependentError, MutationError, NothingCutError, TorchError

# The largest number of stored kernels that cut dimensions.
_MAX_CUTS = 256
_handles = itertools.count(1)
_functions: weakref.WeakValueDictionary[str, Kernels] = weakref.WeakValueDictionary()


class Kernels:
    """The kernels of a function. Each kernel is made at its first use.

    Attributes:
        handle: text by which `kernels_of` finds this object.
        cuts: kernels that cut dimensions, by the structure and the kinds of a graph's arguments.
        captured: the captured tensors of each kernel, by the kernel's key. At each call, graphs read the tensors from
            here.
        list_calls: calls over lists to which graphs refer.
    """

    def __init__(self, fn: Callable[..., Any], name: str, numerics: Numerics, *, autograd: bool) -> None:
        self.fn, self.name, self.numerics, self.autograd = fn, name, numerics, autograd
        self.captured: dict[str, tuple[Tensor, ...]] = {}
        self.cuts: dict[tuple[Any, ...], Kernel] = {}
        self.list_calls: dict[tuple[Any, ...], Any] = {}
        self.handle = str(next(_handles))  # a text, because compilers may turn integers into symbols
        self._kernels: dict[tuple[Any, ...], Kernel] = {}
        self._cut_kernels: dict[tuple[Any, ...], Kernel] = {}
        self._last_cut: dict[Structure, Kernel] = {}
        _functions[self.handle] = self

    def find(
        self, structure: Structure, tensors: Sequence[Tensor], numbers: Sequence[Any]
    ) -> tuple[Kernel, tuple[Tensor, ...]]:
        """The kernel on whole tensors for a call, and the current captured tensors."""
        key = _make_key(structure, tensors)
        result = self._fetch(key)
        if result is None:
            with TRACE_LOCK:
                # Another thread may have made the kernel in the meantime.
                result = self._fetch(key) or self._make(key, structure, tensors, numbers)
        return result

    def _fetch(self, key: tuple[Any, ...]) -> tuple[Kernel, tuple[Tensor, ...]] | None:
        kernel = self._kernels.get(key)
        captured = None if kernel is None else kernel.captured.fetch()
        return None if kernel is None or captured is None else (kernel, captured)

    def _make(
        self, key: tuple[Any, ...], structure: Structure, tensors: Sequence[Tensor], numbers: Sequence[Any]
    ) -> tuple[Kernel, tuple[Tensor, ...]]:
        check_signature(self.fn, self.name, structure)
        plan_layout(tensors)  # raises an error if the tensors do not broadcast
        try:
            kernel = Kernel.of(self.fn, self.name, self.numerics, structure, tensors, numbers)
        except (TypeError, TorchError):
            if tensors or isinstance(self.fn, torch.nn.Module):
                raise
            raise make_no_tensors_error(self.name) from None
        self._kernels[key] = kernel
        return kernel, tuple(kernel.captured.tensors)

    def find_cut(self, structure: Structure, tensors: Sequence[Tensor]) -> tuple[Kernel, tuple[Tensor, ...]] | None:
        """The kernel that cuts the tensors of a call, and the current captured tensors.

        `None` if there is no such kernel yet, or if a value that its function reads has changed.
        """
        result = self._cut_kernels.get(_make_key(structure, tensors)) if self._cut_kernels else None
        captured = None if result is None else result.captured.fetch()
        return None if result is None or captured is None else (result, captured)

    def cut_after(
        self,
        error: Exception,
        structure: Structure,
        tensors: Sequence[Tensor],
        numbers: Sequence[Any],
        target: Target | None = None,
    ) -> tuple[Kernel, tuple[Tensor, ...]]:
        """Makes the kernel that cuts the tensors of a call. Returns the kernel and the captured tensors.

        Args:
            error: the error that the kernel on whole tensors has raised.
            target: language of the kernel. By default, the language for the tensors' device.

        Raises:
            `error`, if the function cuts nothing, or if the kernel that cuts tensors fails for the same reason.
            Otherwise, the error of the kernel that cuts tensors.
        """
        grad = torch.is_grad_enabled()
        try:
            # Torch may reject the shapes of the trace and accept the shapes of the arguments.
            must_cut = not isinstance(error, TorchError)
            cut = cut_of(self.fn, self.name, self.numerics, structure, tensors, numbers, must_cut=must_cut)
            captured = tuple(cut.captured.tensors)
            all_tensors = [*tensors, *captured]
            check_tensors(self.name, all_tensors)
            requested = [grad and t.requires_grad for t in all_tensors]
            cut.variant(all_tensors, numbers, requested, target or target_on(all_tensors[0].device, self.name))
        except NothingCutError:
            raise error from None
        except (TorchError, MutationError) as second:
            if isinstance(error, ArgumentError) or isinstance(second, MutationError):
                raise error from second
            raise second from None  # the message of `second` names the arguments' own shapes
        except TraceError:
            # A decision depends on a captured tensor, which is not a constant in kernels that cut tensors, either.
            if isinstance(error, DataDependentError):
                raise error from None
            raise
        if len(self._cut_kernels) >= _MAX_CUTS:
            self._cut_kernels.clear()
        self._cut_kernels[_make_key(structure, tensors)] = cut
        self._last_cut[structure] = cut
        return cut, captured

    def cut_for_graphs(
        self,
        structure: Structure,
        kinds: tuple[tuple[torch.dtype, int], ...],
        numbers: Sequence[Any],
        otherwise: Exception,
    ) -> Kernel:
        """The kernel that cuts dimensions of unknown sizes, for a graph. See `_cutting.cut_for_graphs`."""
        eager_kernel = self._last_cut.get(structure)
        kernel = cut_for_graphs(self.fn, self.name, self.numerics, structure, kinds, numbers, eager_kernel, otherwise)
        self.cuts[structure, kinds] = kernel
        return kernel

    def all(self) -> list[Kernel]:
        """All existing kernels on whole tensors."""
        return list(self._kernels.values())


def _make_key(structure: Structure, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    return (structure, *[(t.dtype, t.dim(), t.device.type) for t in tensors])


def kernels_of(handle: str) -> Kernels:
    """The kernels of the function that has this handle."""
    return _functions[handle]
