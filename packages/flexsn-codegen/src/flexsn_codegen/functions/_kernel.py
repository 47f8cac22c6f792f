"""A function in one structure of arguments: its traces, its kernels, and those of its gradients."""

from __future__ import annotations

import contextlib
import uuid
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen.errors import ArgumentError, KernelGoneError, TraceError
from flexsn_codegen.functions._calls import Structure, put_together, results_apart
from flexsn_codegen.functions._captured import Captured
from flexsn_codegen.functions._follow import Conditions, follow, hold, integers
from flexsn_codegen.functions._host_numbers import Expression, Notes, noting
from flexsn_codegen.functions._launch import launch, target_on
from flexsn_codegen.functions._layout import Plan, plan_layout
from flexsn_codegen.source._core import emit_core
from flexsn_codegen.source._numerics import Numerics
from flexsn_codegen.source._source import CoreSource, KernelSource, StepLayout
from flexsn_codegen.targets import Target
from flexsn_codegen.targets.cpp import CPP
from flexsn_graph import (
    MAX_DIMENSIONS,
    TRACE_LOCK,
    ArgumentType,
    Effects,
    MutationError,
    PointwiseGraph,
    Role,
    Substituted,
    TorchError,
    gradient_of,
    pointwise_effects,
    trace_pointwise,
)
from flexsn_graph.callers import warn

_MAX_PLANS = 1024
# As many kernels are kept that were made for some values of the numbers alone.
_MAX_VARIANTS = 32
PREFIX = "host"

Bound = Callable[..., tuple[Tensor, ...]]
"""From all tensors, the captured ones last, to the results and the written arguments."""


@dataclass(slots=True)
class Variant:
    """A trace that serves all numbers that meet its conditions.

    Attributes:
        conditions: what was decided by the numbers, with its outcome.
        slots: for each number that the kernel takes, what it is computed by.
    """

    traced: PointwiseGraph
    source: CoreSource
    conditions: Conditions
    slots: Sequence[Expression]
    built: dict[tuple[Any, ...], Built] = field(default_factory=dict)

    def fits(self, numbers: Sequence[Any]) -> bool:
        """Whether a call with these numbers would be traced alike."""
        return hold(self.conditions, numbers)

    def integers(self, numbers: Sequence[Any]) -> list[int]:
        """What the kernel takes for the numbers, in order."""
        return integers(self.source, self.slots, numbers)


@dataclass(slots=True)
class Built:
    """A kernel for one layout of the arguments; compiled at the first launch."""

    source: KernelSource
    kernel: Any = None

    def compiled(self) -> Any:
        if self.kernel is None:
            self.kernel = self.source.target.compile(self.source)
        return self.kernel


@dataclass(frozen=True, slots=True)
class Planned:
    """All of a launch but where its tensors are, and the numbers of the call.

    Attributes:
        plan: how it walks its tensors.
        dtypes: of the results that are new memory.
        operands: for each of the kernel's tensors, where it is among those of the call and then the results.
        integers: the kernel's, without those of the numbers, which come last.
    """

    built: Built
    plan: Plan
    dtypes: Sequence[torch.dtype]
    operands: Sequence[int]
    integers: Sequence[int]


@dataclass(frozen=True, slots=True)
class Launch:
    """All of one launch: a kernel, its tensors in the order of its parameters, and its integers."""

    built: Built
    tensors: Sequence[Tensor]
    numbers: Sequence[int]
    numel: int


class Kernel:
    """A function of tensors and numbers, in one structure of arguments and for one kind of tensors.

    Args:
        bind: for one trace's numbers, the function of the tensors alone.
        captured: what the function reads besides its arguments.
        written: positions of the tensors that the function changes.
        result: the structure of what it returns.
        gradient: whether it is that of another function.

    Attributes:
        key: names it in graphs.
    """

    def __init__(
        self,
        name: str,
        numerics: Numerics,
        bind: Callable[[Notes], Bound],
        *,
        autograd: bool,
        captured: Captured,
        written: tuple[int, ...] = (),
        result: Structure = ("other", ""),
        gradient: bool = False,
    ) -> None:
        self.name, self.numerics, self.autograd = name, numerics, autograd
        self.written, self.result = written, result
        self.captured = captured
        self.key = named(name, self)
        self._bind = bind
        self._gradient = gradient
        self._variants: dict[tuple[Any, ...], list[Variant]] = {}
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._gradients: dict[tuple[Any, ...], Kernel] = {}

    @staticmethod
    def of(
        fn: Callable[..., Any],
        name: str,
        numerics: Numerics,
        structure: Structure,
        examples: Sequence[Tensor],
        numbers: Sequence[Any],
        *,
        autograd: bool,
    ) -> Kernel:
        """A kernel of a user's function.

        Args:
            examples: the tensors of a call, of which shape, dtype and device are looked at.
            numbers: those of a call.
        """

        def call(tensors: Sequence[Tensor], notes: Notes) -> Any:
            args, kwargs = put_together(structure, tensors, notes.arguments())
            with noting() if notes.numbers else ExitStack():
                return fn(*args, **kwargs)

        def unbound(*tensors: Tensor) -> Any:
            return call(tensors, Notes(numbers))

        types, dimensions = _types(examples), _dimensions(examples)
        device = examples[0].device if examples else torch.device("cpu")
        captured = Captured(fn, name)
        met: dict[int, Tensor] = {}
        try:
            with captured.reads.restored():
                effects = pointwise_effects(unbound, types, dimensions, device, name, captured.reads, met)
                with captured.reads.preserved():
                    pointwise_effects(unbound, types, dimensions, device, name)
                captured.keep(effects.captured)
        except TorchError:
            if not met:
                # It may know better what is wrong, but for writes, which are fine here.
                with contextlib.suppress(MutationError), captured.reads.preserved():
                    trace_pointwise(unbound, types, dimensions, device, name)
            raise
        results: list[Tensor] = []
        result = results_apart(effects.returned, _known(effects.written, effects.arguments), results)
        _check_result(name, result, effects)
        count = len(examples)

        def bind(notes: Notes) -> Bound:
            def function(*tensors: Tensor) -> tuple[Tensor, ...]:
                passed = list(tensors[:count])
                for i in effects.written:
                    passed[i] = passed[i].clone()
                stand_ins = dict(zip(map(id, captured.tensors), tensors[count:], strict=True))
                with captured.reads.preserved(), Substituted(stand_ins) if stand_ins else ExitStack():
                    returned = call(passed, notes)
                found: list[Tensor] = []
                if results_apart(returned, _known(effects.written, passed), found) != result:
                    raise TraceError(
                        f"{name} returns another structure for other numbers or other gradients: return the same "
                        "number of tensors, nested in the same way, in each call."
                    )
                return (*found, *(passed[i] for i in effects.written))

            return function

        written = effects.written
        return Kernel(name, numerics, bind, autograd=autograd, captured=captured, written=written, result=result)

    # -- traces --------------------------------------------------------------------------------------------

    def variant(
        self,
        tensors: Sequence[Tensor],
        numbers: Sequence[Any],
        wanted: Sequence[bool],
        target: Target,
        scalars: Sequence[bool] | None = None,
    ) -> Variant:
        """The trace for such tensors and numbers.

        Args:
            tensors: all of them, the captured ones last.
            wanted: for each, whether autograd follows what is computed from it.
            scalars: for each, whether it promotes as a tensor without dimensions; by default, if it has none.
        """
        dimensions = _dimensions(tensors)
        if dimensions > MAX_DIMENSIONS:
            raise ArgumentError(f"{self.name} takes tensors of at most {MAX_DIMENSIONS} dimensions.")
        flags = [t.dim() == 0 for t in tensors] if scalars is None else scalars
        types = tuple(
            ArgumentType(t.dtype, scalar and dimensions > 0, want)
            for t, scalar, want in zip(tensors, flags, wanted, strict=True)
        )
        device = tensors[0].device
        variants = self._variants.setdefault((target.name, dimensions, device.type, types), [])
        for variant in variants:
            if variant.fits(numbers):
                return variant
        with TRACE_LOCK:
            # Another thread may have made it meanwhile.
            for variant in variants:
                if variant.fits(numbers):
                    return variant
            return self._new_variant(variants, types, dimensions, device, numbers, target)

    def _new_variant(
        self,
        variants: list[Variant],
        types: Sequence[ArgumentType],
        dimensions: int,
        device: torch.device,
        numbers: Sequence[Any],
        target: Target,
    ) -> Variant:
        if len(variants) >= _MAX_VARIANTS:
            warn(
                f"{self.name} has been compiled {_MAX_VARIANTS} times for other numbers: it decides by their values, "
                "or gives them to functions that cannot be followed (int(x), float(x), range(x)). Compute what changes "
                "from call to call with Python's operators and the functions of `math`, or pass it as a tensor without "
                "dimensions.",
                otherwise=self.captured.where,
            )
            variants.clear()
        variant = self._traced(types, dimensions, device, list(numbers), target)
        variants.insert(0, variant)
        return variant

    def _traced(
        self, types: Sequence[ArgumentType], dimensions: int, device: torch.device, numbers: list[Any], target: Target
    ) -> Variant:
        def trace(notes: Notes) -> tuple[PointwiseGraph, list[CoreSource], object]:
            bound = self._bind(notes)
            traced = trace_pointwise(
                bound, types, dimensions, device, self.name, gradient=self._gradient, reads=self.captured.reads
            )
            source = emit_core(
                traced.step,
                self.name,
                prune=True,
                precision=self.numerics.precision,
                fast_math=self.numerics.fast_math,
                target=target,
                numbers=PREFIX if notes.numbers else None,
            )
            return traced, [source], None

        with self.captured.traced():
            traced, sources, conditions, slots = follow(trace, numbers)
        return Variant(traced, sources[0], conditions, slots[0])

    def merged(self, read: Sequence[Tensor], written: Sequence[Tensor]) -> list[Tensor]:
        """Its tensors, from those that it reads alone and those that it writes, each in order."""
        of_read, of_written = iter(read), iter(written)
        return [next(of_written if i in self.written else of_read) for i in range(len(read) + len(written))]

    # -- launches ------------------------------------------------------------------------------------------

    def plan(self, tensors: Sequence[Tensor], outs: Sequence[Tensor] = ()) -> Plan:
        """How a kernel walks these tensors, and those of `outs`, which have the shape that they broadcast to."""
        every = (*tensors, *outs)
        if any(type(size) is not int for t in every for size in (*t.shape, *t.stride())):
            return plan_layout(every)  # symbols
        key = tuple([(t.shape, t.stride()) for t in every])
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[key] = plan_layout(every)
        return plan

    def built(self, variant: Variant, plan: Plan, num_inputs: int, num_outs: int = 0) -> Built:
        """The kernel for a layout."""
        key = (plan.layouts, num_outs)
        built = variant.built.get(key)
        if built is None:
            source = _source(self.name, variant, plan.layouts, num_inputs, self.written, num_outs)
            built = variant.built[key] = Built(source)
        return built

    def planned(self, tensors: Sequence[Tensor], variant: Variant, outs: Sequence[Tensor] = ()) -> Planned:
        """All of a launch but where its tensors are, and the numbers of the call.

        Args:
            outs: as for `prepare`.
        """
        plan = self.plan(tensors, outs)
        self._check_written(tensors, plan)
        num_results = len(variant.traced.dtypes) - len(self.written)
        built = self.built(variant, plan, len(tensors), len(outs))
        operands, integers = [], [plan.numel]
        for param in built.source.params:
            operand = param.index
            where: int | None = param.index
            if param.role is Role.OUTPUT:
                where = _place_of_output(param.index, num_results, len(tensors), self.written, len(outs))
                written = param.index >= num_results
                operand = self.written[param.index - num_results] if written else len(tensors) + param.index
            operands.append(operand)
            if where is not None:
                integers += plan.numbers[where]
        return Planned(built, plan, variant.traced.dtypes[:num_results], operands, integers)

    def prepare(
        self,
        tensors: Sequence[Tensor],
        numbers: Sequence[Any],
        variant: Variant,
        outs: Sequence[Tensor] = (),
    ) -> tuple[list[Tensor], Launch]:
        """The results, not yet computed, and the launch that computes them.

        Args:
            outs: where the results are to be written; none: to new memory.
        """
        planned = self.planned(tensors, variant, outs)
        plan, first = planned.plan, tensors[0]
        results = list(outs) or [
            first.new_empty_strided(plan.shape, plan.strides, dtype=dtype) for dtype in planned.dtypes
        ]
        every = [*tensors, *results]
        integers = [*planned.integers, *variant.integers(numbers)]
        return results, Launch(planned.built, [every[i] for i in planned.operands], integers, plan.numel)

    def _check_written(self, tensors: Sequence[Tensor], plan: Plan) -> None:
        for i in self.written:
            if tuple(tensors[i].shape) != plan.shape:
                raise ArgumentError(
                    f"{self.name} writes to its tensor {i}, of shape {list(tensors[i].shape)}, and its arguments "
                    f"broadcast to {list(plan.shape)}: what is written in place has the shape of all."
                )

    def run(
        self,
        tensors: Sequence[Tensor],
        numbers: Sequence[Any],
        wanted: Sequence[bool],
        outs: Sequence[Tensor] = (),
        scalars: Sequence[bool] | None = None,
    ) -> tuple[list[Tensor], Variant]:
        """Launches; the results, without the written arguments."""
        target = target_on(tensors[0].device, self.name)
        variant = self.variant(tensors, numbers, wanted, target, scalars)
        given = [t.detach().resolve_neg() for t in tensors]
        for i in self.written:
            given[i] = tensors[i].detach()
        results, todo = self.prepare(given, numbers, variant, outs)
        if todo.numel:
            launch(
                target,
                todo.built.compiled(),
                todo.tensors,
                todo.numbers,
                todo.numel,
                fast_math=self.numerics.fast_math,
            )
        return results, variant

    def source(self, tensors: Sequence[Tensor], numbers: Sequence[Any], target: Target) -> KernelSource:
        """The kernel for such arguments."""
        variant = self.variant(tensors, numbers, [False] * len(tensors), target)
        return self.built(variant, self.plan(tensors), len(tensors)).source

    def empty_results(
        self, tensors: Sequence[Tensor], numbers: Sequence[Any], target: Target, scalars: Sequence[bool] | None
    ) -> list[Tensor]:
        """Memory for the results, without the written arguments."""
        variant = self.variant(tensors, numbers, [False] * len(tensors), target, scalars)
        plan = self.plan(tensors)
        dtypes = variant.traced.dtypes[: len(variant.traced.dtypes) - len(self.written)]
        return [tensors[0].new_empty_strided(plan.shape, plan.strides, dtype=dtype) for dtype in dtypes]

    # -- gradients -----------------------------------------------------------------------------------------

    def gradient(self, wanted: Sequence[bool], differentiable: Sequence[bool]) -> Kernel:
        """The kernel `(*tensors, *gradients of the differentiable results) -> (*wanted gradients)`.

        Each gradient has the shape that all arguments broadcast to; that of an argument without dimensions may be
        of a wider dtype, to be summed in it.
        """
        key = (tuple(wanted), tuple(differentiable))
        found = self._gradients.get(key)
        if found is None:

            def bind(notes: Notes) -> Bound:
                return gradient_of(self._bind(notes), len(wanted), differentiable, wanted)

            found = self._gradients[key] = Kernel(
                f"{self.name}_backward",
                self.numerics,
                bind,
                autograd=self.autograd,
                captured=self.captured,
                gradient=True,
            )
        return found


_kernels: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def named(name: str, kernel: object) -> str:
    """A key for a kernel of this name, by which graphs find it as long as there is the kernel."""
    key = f"{name}-{uuid.uuid4().hex}"
    _kernels[key] = kernel
    return key


def kernel_of(key: str) -> Any:
    """The kernel that a graph names: a `Kernel`, or a `CutFunction`.

    Raises:
        KernelGoneError: it is not in this process, or no longer.
    """
    kernel = _kernels.get(key)
    if kernel is None:
        raise KernelGoneError(
            f"a graph launches the kernel of {key.rpartition('-')[0]!r}, which is not there: the function that "
            "`pointwise` returned was deleted, or the graph was made by another process. Keep the function as long as "
            "the graph; before saving an exported program, call its run_decompositions()."
        )
    return kernel


def _types(tensors: Sequence[Tensor]) -> list[ArgumentType]:
    dimensions = _dimensions(tensors)
    return [ArgumentType(t.dtype, t.dim() == 0 and dimensions > 0) for t in tensors]


def _dimensions(tensors: Sequence[Tensor]) -> int:
    return max((t.dim() for t in tensors), default=0)


def _known(written: Sequence[int], passed: Sequence[Tensor]) -> Callable[[Tensor], int | None]:
    places = {id(passed[i]): i for i in written}
    return lambda tensor: places.get(id(tensor))


def _check_result(name: str, result: Structure, effects: Effects) -> None:
    kinds = _kinds(result)
    wrong = next((part[1] for part in kinds if part[0] == "other"), None)
    if wrong is not None:
        raise TraceError(
            f"{name} returned {wrong!r}: a kernel's results are tensors, or tuples, lists and dicts of tensors."
        )
    if not effects.written and not any(part[0] == "tensor" for part in kinds):
        raise TraceError(f"{name} returned no tensor and changed none: there is nothing to compute.")


def _kinds(result: Structure) -> list[Structure]:
    if result[0] in ("tuple", "list", "named"):
        return [kind for part in result[1] for kind in _kinds(part)]
    if result[0] == "dict":
        return [kind for _, part in result[1] for kind in _kinds(part)]
    return [result]


def _place_of_output(
    index: int, num_results: int, num_inputs: int, written: Sequence[int], num_outs: int
) -> int | None:
    """Where an output's layout is among a plan's; `None`: it is new memory, dense in the kernel's order."""
    if index >= num_results:
        return written[index - num_results]
    return num_inputs + index if num_outs else None


def _source(
    name: str, variant: Variant, layouts: Sequence[StepLayout], num_inputs: int, written: Sequence[int], num_outs: int
) -> KernelSource:
    """The kernel `(*inputs that are used, *results, *written, N, *numbers of the strided tensors, *numbers)`."""
    core = variant.source
    w = core.target.writer(sizes=["N"])
    w.begin()
    inputs = [w.add(port.role, port.index, layouts[port.index]) for port in core.arguments]
    count = len(variant.traced.dtypes)
    results = []
    for i in range(count):
        place = _place_of_output(i, count - len(written), num_inputs, written, num_outs)
        results.append(w.add(Role.OUTPUT, i) if place is None else w.add(Role.OUTPUT, i, layouts[place]))
    numbers = w.add_numbers(core)
    for port in inputs:
        w.load(port.name, port)
    w.call([port.name for port in results], core, [*(port.name for port in inputs), *numbers])
    for port in results:
        w.store(port, port.name)
    source = w.finish(f"{name}_kernel", [core], "One program: BLOCK elements.")
    if core.target is CPP and (written or num_outs):
        # What is written may be what is read: the compiler is not to be told otherwise.
        source = replace(source, source=source.source.replace("* __restrict ", "* "))
    return source
