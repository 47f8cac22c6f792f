"""Base class of traced steps with kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from typing import Any, Self

import torch
from torch import Tensor

from flexsn_codegen import CoreSource, KernelSource, Numerics, Target, compile_options, emit_core
from flexsn_graph import CoreTrace, RecurrentTrace, StepGraph, StepTrace, StepValue
from flexsn_runtime._recent import Recent
from flexsn_runtime._torch_private import alike, never
from flexsn_runtime.backend import BACKENDS, TargetName
from flexsn_runtime.errors import CapturedTensorError, DtypeError
from flexsn_runtime.launches._kernel import CompiledKernel
from flexsn_runtime.launches._launches import Launch
from flexsn_runtime.operands._order import ScanFormat
from flexsn_runtime.step._tracing import trace_values


class CoreSpecialization:
    """A traced step and its kernels, for one device, one backend and one set of shapes and dtypes."""

    def __init__(
        self,
        trace: CoreTrace,
        name: str,
        device: torch.device,
        numerics: Numerics,
        target: TargetName,
        kernels: Recent[CompiledKernel] | None,
    ) -> None:
        self.device = device
        self.numerics = numerics
        # With fast math, kernels have another name, because the compiler's options differ, and are not part of the
        # source.
        self.name = f"{name}_fast" if numerics.fast_math else name
        self.trace = trace
        self.backend = BACKENDS[target]
        self._options = compile_options("hip" if torch.version.hip else "cuda", fast_math=numerics.fast_math)
        self.trained = tuple(t.requires_grad for t in (*trace.captured, *(alias for _, alias in trace.aliases)))
        self.state_dtypes = _check_dtypes("state", trace.states, self.backend.target)
        self.lifted_dtypes = _check_dtypes("captured tensor", trace.lifted_values, self.backend.target)
        self._kernels: Recent[CompiledKernel] = Recent() if kernels is None else kernels
        self._kernel_names: dict[str, None] = {}
        # Predicate: True for tensors that the step accepts in place of the captured tensors.
        self._is_like_captured: Callable[..., bool] = never
        self._lock = threading.RLock()

    def of_twin(
        self, core: Callable[..., Any], inputs: Sequence[StepValue], states: Sequence[StepValue]
    ) -> Self | None:
        """Returns this step for another core with the same code. Kernels are shared; the batch size may differ.

        The result holds no references to this step's core. The result is `None` if the other core has to be traced; see
        `CoreTrace.of_twin` and `of_batch`.
        """
        trace: CoreTrace | None = self.trace.of_twin(core)
        if trace is not None and (trace.inputs, trace.states) != (tuple(inputs), tuple(states)):
            trace = trace.of_batch(inputs, states)
        if trace is None:
            return None
        twin = copy(self)
        twin._begin(trace)
        return twin

    def written_in(self, target: TargetName) -> Self:
        """Returns this step with kernels in another language. The kernels are not generated yet.

        Raises:
            DtypeError: the language lacks a dtype of the step.
        """
        other = copy(self)
        other.backend = BACKENDS[target]
        _check_dtypes("state", self.trace.states, other.backend.target)
        _check_dtypes("captured tensor", self.trace.lifted_values, other.backend.target)
        other._kernels, other._kernel_names = Recent(), {}
        other._forget_sources()
        return other

    def _forget_sources(self) -> None:
        """Drops the sources of kernels, so that they are generated again."""

    def _begin(self, trace: CoreTrace) -> None:
        """Prepares a copy for another core. Replaces the trace, and resets everything that twins do not share."""
        self.trace = trace
        self._is_like_captured = never
        self._kernel_names = dict(self._kernel_names)

    def forget_plans(self) -> None:
        """Reads plans from disk again, and prepares launches again."""

    @property
    def walks_segments(self) -> bool:
        """True if kernels can process segments of time in parallel."""
        return self.backend.target.segments

    def segment_kernel(self, key: Hashable, write: Callable[[], KernelSource]) -> CompiledKernel:
        """Returns a kernel of a scan in segments. Equal keys mean equal results of `write`."""
        return self._find_kernel(("segments", key), write)

    def check(self, *, training: bool) -> None:
        """Raises each error that kernel generation would raise, without compiling kernels.

        Args:
            training: True if gradients will be needed.
        """
        raise NotImplementedError

    def captured_now(self) -> tuple[Tensor, ...] | None:
        """Returns the captured tensors as they are now; `None` if the step has to be traced again."""
        return self.trace.reads.fetch()

    def format(
        self, inputs: Sequence[Tensor], states: Sequence[Tensor | None], shape: tuple[int, ...] | None = None
    ) -> ScanFormat:
        """Returns the memory format of the results of a scan over these sequences and initial states.

        Args:
            shape: shape of one step's result; `None` for the step's shape.
        """
        return ScanFormat.of(self.trace.step_shape if shape is None else shape, inputs, states)

    def captured(self, instead: Mapping[int, Tensor] | None = None) -> tuple[Tensor, ...] | None:
        """Returns the lifted tensors for the current captured tensors; `None` if the step has to be traced again.

        Args:
            instead: replacements of captured tensors, by the `id` of the captured tensor. A replacement has the shape,
                strides and dtype of the captured tensor.
        """
        captured_values = self.trace.reads.fetch()
        if captured_values is None or not (captured_values or self.trace.lifted_values):
            return captured_values
        if not self._is_like_captured(*captured_values):
            if not self._accepts(captured_values):
                return None
            self._is_like_captured = alike(captured_values)
        trace = self.trace
        if trace.aliases:
            captured = captured_values[: len(trace.captured)]
            for (i, _), alias in zip(trace.aliases, captured_values[len(captured) :], strict=True):
                if alias.data_ptr() != captured[i].data_ptr() or alias.stride() != captured[i].stride():
                    return None
            captured_values = captured
        if instead is not None:
            captured_values = tuple([instead.get(id(tensor), tensor) for tensor in captured_values])
        return trace.lift(captured_values)

    def _accepts(self, fetched: Sequence[Tensor]) -> bool:
        """True if the step can read these tensors instead of the tensors that the trace captured."""
        for tensor, trained in zip(fetched, self.trained, strict=True):
            if tensor.requires_grad != trained:
                return False
        tensors = fetched[: len(self.trace.captured)]
        for tensor, value in zip(tensors, self.trace.captured_values, strict=True):
            if tensor.dtype != value.dtype or tensor.shape != value.shape:
                return False
        return self.trace.fits(tensors)

    def _emit_graph(
        self,
        graph: StepGraph,
        role: str,
        *,
        fast_division: bool = False,
        takes_numbers: bool = False,
        once: bool = False,
        target: Target | None = None,
    ) -> CoreSource:
        return emit_core(
            graph,
            f"{self.name}_{role}",
            prune=True,
            precision=self.numerics.precision,
            fast_math=self.numerics.fast_math,
            fast_division=fast_division,
            target=target or self.backend.target,
            numbers=role if takes_numbers else None,
            once=once and self.backend.target.once,
        )

    def _retrace_if_changed(self, last: CoreTrace, computes_the_same: Callable[[CoreTrace], bool]) -> CoreTrace:
        """Returns `last`, or a new trace of the core if the core now captures other tensors.

        To derive a VJP, a trace runs the core again. The core must then read the tensors that this trace has captured.

        Args:
            last: a trace of this step.
            computes_the_same: predicate that is True if a new trace computes this step, too.

        Raises:
            CapturedTensorError: the core now computes something else.
        """
        changed = ", ".join(place.name for place in last.reads.changed()) or "some of its tensors"
        captured = last.reads.fetch()
        if captured is not None and all(a is b for a, b in zip(captured, last.captured, strict=False)):
            for tensor, value in zip(last.captured, last.captured_values, strict=True):
                if StepValue.of(tensor) != value:
                    raise CapturedTensorError(
                        f"a captured tensor was {list(value.shape)} {value.dtype} in the forward whose gradient is "
                        f"computed and is {list(tensor.shape)} {tensor.dtype} now. Call backward() before that change."
                    )
            return last
        counts = (last.num_inputs, last.num_states, last.num_outputs)
        products = isinstance(last, RecurrentTrace)
        on_pieces = isinstance(last, StepTrace) and last.is_on_pieces
        values = (*last.inputs, *last.states)
        new = trace_values(last.core, counts, values, self.device, products=products, on_pieces=on_pieces)
        has_same_values = type(new) is type(last) and new.lifted_values == last.lifted_values
        if captured is None or not has_same_values or not computes_the_same(new):
            raise CapturedTensorError(
                "the core has changed since the forward whose gradient is computed: captured values were "
                f"replaced ({changed}). Call backward() before that."
            )
        return new

    def check_backward(self) -> None:
        """Raises an error if values that the backward formulas read have changed since the trace."""
        changed = self.trace.reads.changed_for_backward()
        if changed:
            raise changed_between(", ".join(changed))

    def check_unchanged(self) -> None:
        """Raises an error if values that the core reads have changed since the trace.

        Changes of captured tensors are allowed.
        """
        changed = self.trace.reads.changed()
        others = [place.name for place, value in changed.items() if not isinstance(value, Tensor)]
        if others:
            raise changed_between(", ".join(others))

    def carrying(self, needs_grad: Sequence[bool]) -> tuple[bool, ...]:
        """Returns `needs_grad`, with True for floating-point states. Their gradients always pass from step to step."""
        first, first_lifted = self.trace.num_inputs, self.trace.num_inputs + self.trace.num_states
        are_floating = (value.dtype.is_floating_point for value in self.trace.states)
        return (*needs_grad[:first], *are_floating, *needs_grad[first_lifted:])

    @property
    def kernel_names(self) -> tuple[str, ...]:
        """Names of all kernels that have been used."""
        with self._lock:
            return tuple(self._kernel_names)

    def close(self) -> None:
        """Drops the compiled kernels."""
        with self._lock:
            self._kernels.clear()
            self._kernel_names.clear()

    def _find_kernel(self, key: Hashable, write: Callable[[], KernelSource]) -> CompiledKernel:
        key = (self.backend.target.name, key)  # a step's name does not distinguish targets
        with self._lock:
            kernel = self._kernels.get(key)
            if kernel is None:
                source = write()
                function = source.target.compile(source)
                kernel = CompiledKernel(function, source.params, source.sizes, self._options, self._launch)
                self._kernels[key] = kernel
            self._kernel_names[kernel.function.__name__] = None
            return kernel

    @property
    def _launch(self) -> Callable[..., Launch]:
        """The function that makes launches of the kernels."""
        return self.backend.launch


def changed_between(names: str) -> CapturedTensorError:
    """Returns the error for a value that was replaced between the forward and the backward."""
    return CapturedTensorError(
        f"{names} was replaced between the forward and the backward that reads it. Call backward() before that."
    )


def _check_dtypes(role: str, values: Sequence[StepValue], target: Target) -> tuple[torch.dtype, ...]:
    """Returns the dtypes of values. Raises an error if kernels do not support one of them."""
    for i, value in enumerate(values):
        if not target.supports(value.dtype):
            raise DtypeError(
                f"{role} {i} is {value.dtype}, which kernels do not support. Convert it outside of the step, or use "
                "backend='torch'."
            )
    return tuple(value.dtype for value in values)
