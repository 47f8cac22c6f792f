"""Runs a step with matrix products over time, without autograd.

Each pointwise stage is a kernel. A library computes each other part, which is a product or a reduction. If possible,
one launch runs the whole loop. Otherwise, the parts run step after step, with no other op in between. The values of a
step get their places in memory before the loop begins. In the loop, a launch therefore takes a list of addresses that
are already computed, and a product is a call with three tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from flexsn_codegen import CoreSource, ForwardSpec, KernelSource, Numerics, forward_source
from flexsn_codegen.recurrent import NotOneLaunchError, exact_values
from flexsn_codegen.targets.cuda import CUDA
from flexsn_graph import (
    CoreTrace,
    Phase,
    Port,
    Product,
    RecurrentTrace,
    Role,
    Stage,
    StagedStep,
    Term,
    View,
    absent_at_first,
    convolution_weight,
    is_of_any_batch,
    resized,
    staged_ends_early,
    without_carried_filters,
)
from flexsn_hop.formats import memory_order
from flexsn_runtime._recent import Recent
from flexsn_runtime._torch_private import as_outside, convolution_into
from flexsn_runtime.backend import TargetName
from flexsn_runtime.calls._recorded import not_repeated, noted
from flexsn_runtime.launches._kernel import CompiledKernel
from flexsn_runtime.launches._launches import Launch, LaunchByAddress, launch
from flexsn_runtime.operands._operands import Arguments, Operands, is_expanded
from flexsn_runtime.operands._order import ScanFormat, StepOrder
from flexsn_runtime.plans._buckets import LaunchConfig, StepCost
from flexsn_runtime.recurrent._one_launch import Loops, one_launch, run_in_one_launch
from flexsn_runtime.recurrent._over_time import OverTime, Rows, ViewLayout
from flexsn_runtime.recurrent._weights import compilations_of_sum, summed_product
from flexsn_runtime.step._specialization import CoreSpecialization

if TYPE_CHECKING:
    from flexsn_runtime.recurrent._backward_plan import BackwardPlan

_aten = torch.ops.aten
_prims = torch.ops.prims
Act = Callable[[int], object]


class RecurrentSpecialization(CoreSpecialization):
    """A traced step with matrix products, and the kernels that exist for it.

    Args:
        counts: indices of the inputs that count down.
    """

    trace: RecurrentTrace

    def __init__(
        self,
        trace: RecurrentTrace,
        name: str,
        device: torch.device,
        numerics: Numerics,
        target: TargetName,
        kernels: Recent[CompiledKernel] | None = None,
        counts: tuple[int, ...] = (),
    ) -> None:
        super().__init__(trace, name, device, numerics, target, kernels)
        self._counts = counts
        # The trace from which VJPs are derived. If the core captures other tensors, another trace replaces it. Prepared
        # launches belong to the stages of the first trace.
        self._differentiated: CoreTrace = trace
        self._cores: dict[int, tuple[Stage, CoreSource]] = {}
        self._vjps: dict[Any, StagedStep] = {}
        self._whole_vjps: dict[Any, StagedStep | None] = {}
        self._kept: dict[tuple[bool, ...], frozenset[Port]] = {}
        self._exact: frozenset[Port] | None = None
        self.loops = Loops()
        # For each kind of call, the values that a forward keeps for the backward, and the plan of a backward.
        self.lasting: Recent[frozenset[Port]] = Recent()
        self.backward_plans: Recent[BackwardPlan] = Recent()
        # For each layout, the common parts of calls. Keys contain the ids of stages and views, which live as long as
        # the entries.
        self.prepared: Recent[_Prepared] = Recent()
        self.view_layouts: Recent[ViewLayout] = Recent()
        self._formats: Recent[ScanFormat] = Recent()
        # Functions that run calls, by the layout of their arguments.
        self.calls: Recent[Callable[[Sequence[Tensor | None]], tuple[Tensor, ...]]] = Recent()

    @cached_property
    def ending(self) -> Port | None:
        """The only input that counts down.

        `None` if several inputs or no inputs count down, or if a step with counts of 0 or less may change a state or
        return an output other than 0.
        """
        if len(self._counts) != 1 or not staged_ends_early(self.trace.forward, self._counts):
            return None
        return Port(Role.INPUT, self._counts[0])

    def counted(self, arguments: Arguments) -> Arguments:
        """Returns the arguments, with the whole sequence of counts for each expanded input that counts down."""
        inputs = list(arguments.inputs)
        for i in self._counts:
            if is_expanded(inputs[i]):
                steps = torch.arange(len(inputs[i]), device=inputs[i].device, dtype=inputs[i].dtype)
                inputs[i] = inputs[i] - steps.view(-1, *[1] * (inputs[i].dim() - 1))
        return Arguments(tuple(inputs), arguments.states, arguments.lifted)

    def _begin(self, trace: CoreTrace) -> None:
        old = self.trace.step_shape
        super()._begin(trace)
        self._differentiated, self.calls = trace, Recent()
        if trace.step_shape != old:
            self._resize(old[0], trace.step_shape[0])

    def _resize(self, old: int, new: int) -> None:
        """Changes the batch size of the VJPs, and drops everything that was prepared for stages of the old size."""
        shapes = [value.shape for value in self.trace.lifted_values]
        fitting = {k: v for k, v in self._vjps.items() if is_of_any_batch(v, (old, *self.trace.step_shape[1:]), shapes)}
        self._vjps = {key: resized(vjp, old, new) for key, vjp in fitting.items()}
        self._cores, self._whole_vjps, self._kept, self.loops = {}, {}, {}, Loops()
        self.lasting, self.backward_plans, self.prepared, self.view_layouts = Recent(), Recent(), Recent(), Recent()
        self._formats = Recent()

    def _forget_sources(self) -> None:
        self._cores, self.loops, self.prepared, self.calls = {}, Loops(), Recent(), Recent()

    def format(
        self, inputs: Sequence[Tensor], states: Sequence[Tensor | None], shape: tuple[int, ...] | None = None
    ) -> ScanFormat:
        key = shape, *[None if t is None else (t.shape, t.stride()) for t in (*inputs, *states)]
        form = self._formats.get(key)
        if form is None:
            form = self._formats[key] = super().format(inputs, states, shape)
        return form

    @property
    def exact_values(self) -> frozenset[Port]:
        """Values of the forward whose elements bfloat16 can represent exactly."""
        if self._exact is None:
            self._exact = exact_values(self.trace.forward)
        return self._exact

    def forget_plans(self) -> None:
        self.prepared.clear()
        self.calls.clear()

    def close(self) -> None:
        super().close()
        self.prepared.clear()
        self.calls.clear()

    def vjp(
        self, cotangents: tuple[bool, ...], wanted: tuple[bool, ...], kept: frozenset[Port] | None = None
    ) -> StagedStep:
        """Returns the step's VJP.

        If `kept` is not `None`, the VJP reads only those operands and products of the forward that are in `kept`.
        """
        key = (cotangents, wanted, kept)
        with self._lock:
            complete_vjp = self._vjps.get((cotangents, wanted, None))
            if complete_vjp is not None and kept is not None and kept.issuperset(complete_vjp.saved):
                return complete_vjp
            if key not in self._vjps:
                self._differentiated = self._retrace_if_changed(self._differentiated, self._computes_the_same)
                assert isinstance(self._differentiated, RecurrentTrace)
                with as_outside():
                    self._vjps[key] = self._differentiated.vjp(cotangents, wanted, kept)
            return self._vjps[key]

    def _computes_the_same(self, other: CoreTrace) -> bool:
        """True if another trace has the same forward, so that its VJPs can read the values that this forward keeps."""
        assert isinstance(other, RecurrentTrace)
        return self._describe(other.forward) == self._describe(self.trace.forward)

    def _describe(self, staged: StagedStep) -> tuple[object, ...]:
        """Returns a description that is equal for steps with the same computation."""
        parts = [
            part
            if isinstance(part, Product)
            else (part.phase, part.shape, part.reads, part.writes, self._emit_graph(part.graph, "stage").name)
            for part in staged.parts
        ]
        matrices = str(staged.matrices.graph)
        return staged.arguments, staged.results, parts, staged.values, staged.assembled, matrices, staged.shifts

    def vjp_of_all_steps(
        self,
        cotangents: tuple[bool, ...],
        wanted: tuple[bool, ...],
        kept: frozenset[Port],
        absent: frozenset[Port],
        unneeded: frozenset[Port],
    ) -> StagedStep | None:
        """Returns one VJP for all steps, although the last step receives no gradients of some states.

        `absent_at_first` makes this VJP. The result is `None` if earlier steps receive no gradient of a state either.

        Args:
            unneeded: absent gradients whose values before the first step are not needed.
        """
        key = (cotangents, wanted, kept, absent, unneeded)
        with self._lock:
            if key not in self._whole_vjps:
                vjp = without_carried_filters(self.vjp(cotangents, wanted, kept), unneeded)
                carried_ports = {port for port in vjp.arguments if port.role is Role.GRAD_STATE}
                is_shared = carried_ports <= set(vjp.results)
                self._whole_vjps[key] = absent_at_first(vjp, absent & carried_ports) if is_shared else None
            return self._whole_vjps[key]

    def kept(self, wanted: tuple[bool, ...]) -> dict[Port, tuple[tuple[int, ...], torch.dtype]]:
        """Returns shapes and dtypes of the values that the forward keeps for each step: states, operands and products.

        Args:
            wanted: for each of `[*inputs, *states, *lifted]`, True if its gradient will be needed.
        """
        vjp = self.vjp(self.trace.differentiable, self.carrying(wanted))
        read = {view.source for part in vjp.parts for view in part.reads}
        read |= {view.source for term in vjp.terms for view in term.values}
        ports = {port for port in read if port.role is Role.STATE} | set(vjp.saved)
        return {port: self.trace.forward.values[port] for port in ports}

    def kept_ports(self, wanted: tuple[bool, ...]) -> frozenset[Port]:
        """Returns the ports in the result of `kept`."""
        ports = self._kept.get(wanted)
        if ports is None:
            ports = self._kept[wanted] = frozenset(self.kept(wanted))
        return ports

    def check(self, *, training: bool) -> None:
        """Raises each error that kernel generation for the step raises, without compiling kernels."""
        steps = [self.trace.forward]
        if training:
            trace = self.trace
            values = (*trace.inputs, *trace.states, *trace.lifted_values)
            steps.append(self.vjp(trace.differentiable, tuple(value.dtype.is_floating_point for value in values)))
        for staged in steps:
            for stage in staged.stages:
                self.core_of(stage)

    def core_of(self, stage: Stage) -> CoreSource:
        """Returns the source of a stage, for blocks of values."""
        with self._lock:
            entry = self._cores.get(id(stage))
            if entry is None:
                entry = self._cores[id(stage)] = stage, self._emit_graph(stage.graph, "stage")
            return entry[1]

    def core_in_cuda(self, stage: Stage) -> CoreSource:
        """Returns the source of a stage in CUDA C++, for one element."""
        return self._emit_graph(stage.graph, "stage", target=CUDA)

    def config(self, stage: Stage) -> LaunchConfig:
        """Returns the launch settings of a stage."""
        size = math.prod(stage.shape)
        num_ops = sum(node.op == "call_function" for node in stage.graph.graph.nodes)
        cost = StepCost(num_ops, tuple(view.dtype.itemsize for view in stage.reads), ())
        default = self.backend.plan(self.backend.size_class(size), cost, 0).inference
        return LaunchConfig(chunk=1, block=default.block, num_warps=default.num_warps)

    def loop_kernel(self, source: KernelSource) -> CompiledKernel:
        """Returns the kernel of a loop in one launch."""
        return self._find_kernel(source.name, lambda: source)

    def stage_kernel(self, stage: Stage, spec: ForwardSpec) -> CompiledKernel:
        core = self.core_of(stage)

        def write() -> KernelSource:
            return forward_source(f"{self.name}_stage", core, spec)

        return self._find_kernel((spec, core.name), write)


class _Prepared(NamedTuple):
    """The kernel and launches of a stage on tensors of one layout.

    Attributes:
        stage: the stage. It is kept alive, because its id is part of a key.
        kernel: the kernel.
        integers: integer arguments of the kernel.
        operands: operands of the kernel, with copies of the lifted tensors that the kernel cannot read directly.
        launches: launches by alignment of the addresses.
    """

    stage: Stage
    kernel: CompiledKernel
    integers: Mapping[str, int]
    operands: Operands
    launches: dict[Any, Launch]


class StagedScan:
    """Runs the parts of a step for all steps."""

    def __init__(self, step: RecurrentSpecialization, over: OverTime) -> None:
        self._step, self._over, self._staged, self._num_steps = step, over, over.staged, over.num_steps
        self._lifted_layouts = (*_list_layouts(over.lifted), *((t.device, t.is_neg()) for t in over.lifted))
        self._alive: list[Any] = []  # memory to which addresses point

    def run(self) -> None:
        """Runs all steps."""
        parts = self._staged.parts
        for part in parts:
            if part.phase is Phase.BEFORE:
                self._run_whole(part)
        if not self._run_in_one_launch():
            self._run_step_by_step()
        for part in parts:
            if part.phase is Phase.AFTER:
                self._run_whole(part)

    def compile(self) -> None:
        """Compiles the launches of `run`."""
        in_steps = False
        try:
            one_launch(self._step, self._over)
        except NotOneLaunchError:
            in_steps = True
        for stage in self._staged.stages:
            if stage.phase is not Phase.LOOP:
                launched, tensors = self._prepare_whole(stage)
                launched.compile(tensors)
            elif in_steps:
                prepared, arguments = self._prepare_steps(stage)
                example = [a.tensors()[0] if isinstance(a, Rows) else a for a in arguments]
                self._find_launch(prepared, example).compile(example)

    def _run_in_one_launch(self) -> bool:
        """Runs the loop in one launch, if possible. Returns True on success."""
        loops, over = self._step.loops, self._over
        try:
            description = run_in_one_launch(self._step, over)
        except NotOneLaunchError as error:
            not_repeated("it launches step by step")
            if over.num_steps > 1:
                loops.descriptions[over.direction] = f"launches step by step, because {error}"
            return False
        loops.descriptions[over.direction] = description
        return True

    def _run_step_by_step(self) -> None:
        for port in self._staged.absent:
            before = self._over.reads[port]
            before.memory[(before.first + self._num_steps - 1) % len(before.memory)].zero_()
        rows = [(into.unbind(0), arriving.unbind(0)) for into, arriving in self._over.arriving]
        acts = [self._make_act(part) for part in self._staged.parts if part.phase is Phase.LOOP]
        steps: Iterable[int] = range(self._num_steps)
        for t in reversed(steps) if self._over.backwards else steps:  # type: ignore[call-overload]
            for into, arriving in rows:
                into[t + 1].add_(arriving[t])
            for act in acts:
                act(t)

    # -- values ----------------------------------------------------------------------------------------------

    def _view_read(self, view: View) -> Rows:
        if view.source.role is Role.CAME_STATE:  # all rows have the same alignment
            flags = torch.ones((self._num_steps, 16), dtype=torch.bool, device=self._step.device)
            flags[-1] = False
            return Rows(flags[:, 0], 0, self._num_steps)
        return self._over.reads[view.source].through(view, self._step.view_layouts)

    def _view_written(self, view: View) -> Rows:
        return self._over.writes[view.source].through(view, self._step.view_layouts)

    # -- a part in the loop ----------------------------------------------------------------------------------

    def _make_act(self, part: Stage | Product) -> Act:
        if isinstance(part, Stage):
            return self._make_launches(part)
        return self._make_multiplications(part)

    def _prepare_steps(self, stage: Stage) -> tuple[_Prepared, list[Rows | Tensor]]:
        """Prepares a stage, and its arguments for launches step by step."""
        reads = [self._view_read(view) for view in stage.reads]
        writes = [self._view_written(view) for view in stage.writes]
        firsts = [rows.memory[:1] for rows in (*reads, *writes)]
        prepared = self._prepare(stage, firsts[: len(reads)], firsts[len(reads) :])
        kernel, lifted = prepared.kernel, self._move_lifted(prepared, firsts[: len(reads)])
        values: dict[Port, Rows | Tensor] = dict(lifted.items())
        values |= {Port(Role.INPUT, i): rows for i, rows in enumerate(reads)}
        values |= {Port(Role.OUTPUT, i): rows for i, rows in enumerate(writes)}
        return prepared, [values[port] for port in kernel.params]

    def _make_launches(self, stage: Stage) -> Act:
        prepared, arguments = self._prepare_steps(stage)
        if self._step.backend.by_address:
            columns = [a.addresses() if isinstance(a, Rows) else [a.data_ptr()] * self._num_steps for a in arguments]
            self._alive.append(arguments)
            example = [a.memory[0] if isinstance(a, Rows) else a for a in arguments]
            launched = cast(LaunchByAddress, self._find_launch(prepared, example))
            return launched.at(example, list(zip(*columns, strict=True)))
        tensors = [a.tensors() if isinstance(a, Rows) else [a] * self._num_steps for a in arguments]
        by_step = list(zip(*tensors, strict=True))

        def act(t: int) -> None:
            row = by_step[t]
            self._find_launch(prepared, row)(row)

        return act

    def _find_launch(self, prepared: _Prepared, tensors: Sequence[Tensor]) -> Launch:
        """Returns the launch of a stage on tensors like these. Triton compiles for the alignment of addresses."""
        alignment = tuple([t.data_ptr() % 16 == 0 for t in tensors])
        launched = prepared.launches.get(alignment)
        if launched is None:
            config = self._step.config(prepared.stage)
            launched = launch(prepared.kernel, prepared.integers, config, self._step.device)
            prepared.launches[alignment] = launched
        return launched

    def _prepare(self, stage: Stage, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> _Prepared:
        """Prepares the launch of a stage on tensors `[steps, *shape]` of these layouts."""
        key = (id(stage), _list_layouts(reads), _list_layouts(writes), self._lifted_layouts)
        prepared = self._step.prepared.get(key)
        if prepared is not None:
            return prepared
        dims = tuple(range(len(stage.shape)))
        if self._staged.has_convolutions:  # values have the memory format of the inputs
            dims = memory_order(stage.shape, [(tuple(t.shape[1:]), t.stride()[1:]) for t in writes])
        order = StepOrder(dims)
        arguments = Arguments(tuple(reads), (), tuple(self._over.lifted))
        operands = Operands(arguments, stage.graph.layouts, stage.shape, order)
        outputs = [Port(Role.OUTPUT, i) for i in range(len(writes))]
        spec = ForwardSpec(
            inputs=operands.inputs,
            states=(),
            state_dtypes=(),
            lifted=operands.lifted,
            lifted_like=operands.lifted_like,
            outputs=(True,) * len(writes),
            state_seqs=(),
            final_states=(),
            chunk=1,
            rest=False,
            strided=operands.strided((p, t.shape, t.stride()) for p, t in zip(outputs, writes, strict=True)),
        )
        kernel = self._step.stage_kernel(stage, spec)
        integers = operands.sizes | self._step.core_of(stage).integers
        prepared = self._step.prepared[key] = _Prepared(stage, kernel, integers, operands, {})
        return prepared

    def _move_lifted(self, prepared: _Prepared, reads: Sequence[Tensor]) -> dict[Port, Tensor]:
        """Returns the lifted tensors in layouts that the kernel can read."""
        tensors: list[Tensor | None] = [*reads, *self._over.lifted]
        prepared.operands.move(tensors)
        return {Port(Role.LIFTED, i): t for i, t in enumerate(tensors[len(reads) :]) if t is not None}

    def _make_multiplications(self, product: Product) -> Act:
        out = self._view_written(product.result).tensors()
        if out[0].shape != product.shape:
            out = [tensor.view(product.shape) for tensor in out]
        multiply = _OUT[product.op]
        fixed_operands: list[Any] = []
        operands_by_step: list[tuple[int, list[Tensor]]] = []
        for i, argument in enumerate(product.args):
            if isinstance(argument, View) and argument.source.role is not Role.MATRIX:
                operands_by_step.append((i, self._view_read(argument).tensors()))
                fixed_operands.append(None)
            else:
                fixed_operands.append(self._find_constant(argument))
        options = dict(product.kwargs)
        if len(operands_by_step) == 1 and not options:
            ((place, values),) = operands_by_step
            if product.is_convolution and place == 0:
                into = convolution_into(out[0], values[0], fixed_operands[1], fixed_operands[2], fixed_operands[3:])
                if into is not None:
                    return lambda t: into(values[t], out[t])
            before, after = fixed_operands[:place], fixed_operands[place + 1 :]
            if not before and len(after) == 1:
                (matrix,) = after
                return lambda t: multiply(values[t], matrix, out=out[t])
            return lambda t: multiply(*before, values[t], *after, out=out[t])

        def act(t: int) -> None:
            arguments = list(fixed_operands)
            for place, values in operands_by_step:
                arguments[place] = values[t]
            multiply(*arguments, **options, out=out[t])

        return act

    def _find_constant(self, argument: Any) -> Any:
        return self._over.matrices[argument.source.index] if isinstance(argument, View) else argument

    # -- a part for all steps at once --------------------------------------------------------------------------

    def _prepare_whole(self, stage: Stage) -> tuple[Launch, list[Tensor]]:
        """Returns the launch of a stage for all steps at once, and its tensors."""
        reads = [self._view_read(view).sequence for view in stage.reads]
        writes = [self._view_written(view).sequence for view in stage.writes]
        prepared = self._prepare(stage, reads, writes)
        values = dict(self._move_lifted(prepared, reads))
        values |= {Port(Role.INPUT, i): t for i, t in enumerate(reads)}
        values |= {Port(Role.OUTPUT, i): t for i, t in enumerate(writes)}
        tensors = [values[port] for port in prepared.kernel.params]
        return self._find_launch(prepared, tensors), tensors

    def _run_whole(self, part: Stage | Product) -> None:
        if isinstance(part, Stage):
            launched, tensors = self._prepare_whole(part)
            noted(launched, tensors)
        elif not self._multiply_whole(part):
            act = self._make_multiplications(part)
            for t in range(self._num_steps):
                act(t)

    def _multiply_whole(self, product: Product) -> bool:
        """Computes the products or reductions of all steps in one operation, if possible. Returns True on success."""
        if product.is_reduction:
            value, *numbers = product.args
            _OUT[product.op](self._view_read(value).sequence, *numbers, out=self._view_written(product.result).sequence)
            return True
        if product.is_convolution:
            return self._convolve_whole(product)
        if product.op not in (_aten.mm.default, _aten.addmm.default):
            return False
        *addends, left, right = (
            self._view_read(a).sequence
            if isinstance(a, View) and a.source.role is not Role.MATRIX
            else self._find_constant(a)
            for a in product.args
        )
        if left.dim() != 3 or any(a.dim() > 1 and a.shape[0] != 1 for a in addends):
            return False
        out = self._view_written(product.result).sequence
        if out.shape[1:] != product.shape:
            return False
        rows = out.numel() // max(1, out.shape[-1])
        if not out.is_contiguous() or right.dim() != 2:
            return False
        flat = out.view(rows, out.shape[-1])
        _OUT[product.op](*addends, left.reshape(rows, left.shape[-1]), right, **product.kwargs, out=flat)
        return True

    def _convolve_whole(self, product: Product) -> bool:
        """Computes one convolution of the frames of all steps, if possible. Returns True on success."""
        out = self._view_written(product.result).sequence
        value, *rest = (
            self._view_read(a).sequence
            if isinstance(a, View) and a.source.role is not Role.MATRIX
            else self._find_constant(a)
            for a in product.args
        )
        if out.shape[1:] != product.shape:
            return False
        frames = _aten.convolution.default(value.flatten(0, 1), *rest)
        frames = frames.view(out.shape)
        if product.result.source.role is Role.PRODUCT and frames.stride() == out.stride():
            out.set_(frames)  # takes over the memory, because copying many frames is slow
        else:
            out.copy_(frames)
        return True

    # -- sums over time ----------------------------------------------------------------------------------------

    def _is_exact(self, view: View) -> bool:
        """True if bfloat16 can represent all elements that the forward writes to the value of a view."""
        port = view.source
        return (self._staged.saved[port.index] if port.role is Role.SAVED else port) in self._step.exact_values

    def compilations_of(self, term: Term) -> list[Callable[[], object]]:
        """Returns functions that compile the launches of `summed`."""
        if term.op is not _aten.mm.default:
            return []
        left, right = (self._view_read(view).sequence for view in term.values)
        return compilations_of_sum(left, right, (self._is_exact(term.values[0]), self._is_exact(term.values[1])))

    def summed(self, term: Term) -> Tensor:
        """Computes one term of the gradient of a lifted tensor."""
        values = [self._view_read(view).sequence for view in term.values]
        total = _sum_over_time(term, values, [self._is_exact(view) for view in term.values])
        for target, args, kwargs in term.calls:
            fixed = tuple(a(self._find_constant(a)) if isinstance(a, View) else a for a in args)
            total = View(Port(Role.MATRIX, 0), ((target, fixed, kwargs),), (), total.dtype)(total)
        return total


def _list_layouts(tensors: Iterable[Tensor]) -> tuple[object, ...]:
    return tuple([(t.shape, t.stride(), t.dtype) for t in tensors])


def _sum_over_time(term: Term, values: Sequence[Tensor], exact: Sequence[bool]) -> Tensor:
    """Sums a value of each step, or a product of two such values, over time."""
    op = term.op
    if op is None:
        (value,) = values
        is_half = value.dtype in (torch.float16, torch.bfloat16)
        return value.sum(0, dtype=torch.float32 if is_half else None)
    left, right = values
    if op is convolution_weight:  # a sum over the batch, so one call sums over all steps
        total: Tensor = convolution_weight(left.flatten(0, 1), right.flatten(0, 1), *term.numbers)
        return total
    if op is _aten.mm.default:
        return summed_product(left, right, (exact[0], exact[1]))
    if op is _aten.bmm.default:
        steps, count, rows, inner = left.shape
        joined_matrix = left.permute(1, 2, 0, 3).reshape(count, rows, steps * inner)
        return joined_matrix @ right.permute(1, 0, 2, 3).reshape(count, steps * inner, right.shape[3])
    return torch.einsum("tkb,tb->k", left, right)  # product of matrix and vector


def _sum_rows(value: Tensor, dims: list[int], *, out: Tensor) -> Tensor:
    total: Tensor = _aten.sum.IntList_out(value, dims, dtype=out.dtype, out=out)
    return total


def _compute_variance_of_rows(value: Tensor, dims: list[int], correction: float = 1.0, *, out: Tensor) -> Tensor:
    variance: Tensor = _aten.var.correction_out(value, dims, correction=correction, out=out)
    return variance


def _convolve(value: Tensor, weight: Tensor, *rest: Any, out: Tensor) -> Tensor:
    return out.copy_(_aten.convolution.default(value, weight, *rest))


_OUT: dict[Any, Callable[..., Tensor]] = {
    _prims.sum.default: _sum_rows,
    _prims.amax.default: _aten.amax.out,
    _prims.amin.default: _aten.amin.out,
    _prims.var.default: _compute_variance_of_rows,
    _aten.mm.default: _aten.mm.out,
    _aten.addmm.default: _aten.addmm.out,
    _aten.bmm.default: _aten.bmm.out,
    _aten.baddbmm.default: _aten.baddbmm.out,
    _aten.mv.default: _aten.mv.out,
    _aten.addmv.default: _aten.addmv.out,
    _aten.convolution.default: _convolve,
}
