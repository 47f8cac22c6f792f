"""A scan of a step with matrix products as an operator, for compilers: its graphs are an argument, as text, so that a
program that was compiled by another process has them.

A compiled graph has one node of it, whatever T is. Sizes are numbers again where it runs, and so a step is traced for
them as it is in eager mode. The backward runs the forward once more, for what it needs of each step.
"""

from __future__ import annotations

import base64
import functools
import json
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from flexsn_codegen import Numerics
from flexsn_graph import Port, RecurrentTrace, Role, trace_core
from flexsn_runtime._recent import Recent
from flexsn_runtime._torch_private import as_outside, untraced
from flexsn_runtime.backend import TargetName, target_on
from flexsn_runtime.errors import UnsupportedScanError
from flexsn_runtime.graphs._differentiable import differentiable
from flexsn_runtime.graphs._symbols import Assignment
from flexsn_runtime.operands._operands import Arguments
from flexsn_runtime.operands._order import ScanFormat, strides_like
from flexsn_runtime.recurrent._staged import RecurrentSpecialization
from flexsn_runtime.recurrent._staged_autograd import backward_staged, forward_staged, without_autocast

Step = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class StagedGraph:
    """A scan of a step that comes as graphs, or the gradient of one.

    Attributes:
        core: `[*inputs, *states, *lifted] -> [*outputs, *new_states]`.
        num_inputs, num_states, num_outputs: how many of each.
        zero_states: for each initial state, whether it is zeros.
        final_state: whether the last states are results, and not those of all steps.
        interval, spare: a checkpoint is kept of the states before each `interval` steps but the first; behind them
            there are `spare` rows without meaning. Without an `interval`, none.
        on_cpu: what kernels on the CPU are written in.
        vjp: `[*inputs, *states, *lifted, *cotangents] -> [*gradients]`; `None`: it is the forward.
        cotangents: for each of `[*outputs, *new_states]`, whether `vjp` takes its gradient.
        wanted: for each of `[*inputs, *states, *lifted]`, whether `vjp` gives its gradient.
        needs: the same of those that are results.
        came: for each of `[*outputs, *state results]`, whether its gradient is an argument.
    """

    core: Step
    num_inputs: int
    num_states: int
    num_outputs: int
    zero_states: tuple[bool, ...]
    final_state: bool
    interval: int
    spare: int
    on_cpu: TargetName
    vjp: Step | None = None
    cotangents: tuple[bool, ...] = ()
    wanted: tuple[bool, ...] = ()
    needs: tuple[bool, ...] = ()
    came: tuple[bool, ...] = ()

    @property
    def num_primals(self) -> int:
        return self.num_inputs + self.num_states

    def __call__(self, args: Sequence[Any]) -> list[Tensor]:
        """Records the operator, or runs it, on `[*input_seqs, *init_states, *lifted, *gradients]`.

        Tensors are what it takes, and, of the lifted ones, sizes.
        """
        sizes = [i for i, value in enumerate(args) if not isinstance(value, Tensor)]
        tensors = [value for value in args if isinstance(value, Tensor)]
        found: list[Tensor] = run_staged(_text(self), tensors, [args[i] for i in sizes], sizes)
        return found

    def check(self, args: Sequence[Any]) -> None:
        """Raises what tracing the step and making its kernels raise.

        Args:
            args: as for the call, but for gradients and checkpoints. Sizes that are symbols stand for any.
        """
        assigned = Assignment([size for value in args for size in _sizes_of(value)], 0)
        likes = tuple(_Like.of(value, i < self.num_inputs, assigned) for i, value in enumerate(args))
        made = _specialized(_text(self), self, likes, args[0].device)
        made.step.check(training=self.vjp is not None)


class _Like(NamedTuple):
    """How a tensor of one step lies in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, value: Any, is_sequence: bool, number: Callable[[int], int]) -> _Like | int:
        """That of an argument, or the size that it is.

        Args:
            is_sequence: whether its first dimension is T.
            number: of a size.
        """
        if not isinstance(value, Tensor):
            return number(value)
        shape = tuple(map(number, value.shape[is_sequence:]))
        stride = tuple(map(number, value.stride()[is_sequence:]))
        return cls(shape, stride, value.dtype, value.device)

    def primal(self) -> Tensor:
        """One element, whatever the size: the tracer looks at shape, dtype and device alone."""
        tensor = torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)
        return tensor.requires_grad_(tensor.is_floating_point())

    def lifted(self) -> Tensor:
        """With strides: a trace may compute with it before the loop."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return tensor.requires_grad_(tensor.is_floating_point())


def _sizes_of(value: Any) -> list[int]:
    return [*value.shape, *value.stride()] if isinstance(value, Tensor) else [value]


class _Specialized:
    """The step for arguments of one layout.

    Attributes:
        step: has the kernels.
        captured: positions, among the arguments, of the tensors that the step captures.
    """

    def __init__(self, graph: StagedGraph, likes: Sequence[_Like | int], device: torch.device) -> None:
        first_lifted = graph.num_primals
        with untraced():
            primals = [like.primal() for like in likes[:first_lifted] if isinstance(like, _Like)]
            lifted = [like.lifted() if isinstance(like, _Like) else like for like in likes[first_lifted:]]
            run = graph.core
            if graph.vjp is not None:
                run = differentiable(run, graph.vjp, graph.cotangents, graph.wanted)

            def core(*values: Tensor) -> tuple[Tensor, ...]:
                return tuple(run(*values, *lifted))

            counts = (graph.num_inputs, graph.num_states, graph.num_outputs)
            trace = trace_core(core, *counts, primals, follow=False, hoist=graph.vjp is None)
        if not isinstance(trace, RecurrentTrace):
            raise UnsupportedScanError("the step has no products with matrices for tensors of these sizes.")
        self.step = RecurrentSpecialization(trace, "scan", device, Numerics(), target_on(device, graph.on_cpu))
        positions = {id(value): first_lifted + i for i, value in enumerate(lifted)}
        self.captured = [positions[id(tensor)] for tensor in trace.captured]
        for value in lifted:
            if isinstance(value, Tensor):
                value.untyped_storage().resize_(0)  # nobody reads it

    def arguments(self, graph: StagedGraph, args: Sequence[Any], lifted: Sequence[Tensor]) -> Arguments:
        inputs, states = args[: graph.num_inputs], args[graph.num_inputs : graph.num_primals]
        zeros = graph.zero_states or (False,) * graph.num_states
        return Arguments(
            tuple(x.resolve_neg() for x in inputs),
            tuple(None if zero else state.resolve_neg() for state, zero in zip(states, zeros, strict=True)),
            tuple(lifted),
        )


# -- what the operator does ----------------------------------------------------------------------------------------


def _run(
    program: str, tensors: Sequence[Tensor], sizes: Sequence[int] | None, size_positions: Sequence[int] | None
) -> list[Tensor]:
    graph = _graph(program)
    args = _merged(tensors, sizes, size_positions)
    device = args[0].device
    count = len(graph.needs) if graph.vjp is not None else len(args)
    likes = tuple(_Like.of(value, i < graph.num_inputs, int) for i, value in enumerate(args[:count]))
    with as_outside(), torch.no_grad(), without_autocast(device):
        made = _specialized(program, graph, likes, device)
        return (_forward if graph.vjp is None else _backward)(graph, made, args)


def _specialized(
    program: str, graph: StagedGraph, likes: tuple[_Like | int, ...], device: torch.device
) -> _Specialized:
    key = (program, device, likes)
    found = _made.get(key)
    if found is None:
        found = _made[key] = _Specialized(graph, likes, device)
    return found


_made: Recent[_Specialized] = Recent()


def _forward(graph: StagedGraph, made: _Specialized, args: Sequence[Any]) -> list[Tensor]:
    step = made.step
    arguments = made.arguments(graph, args, step.trace.lift([args[i] for i in made.captured]))
    rows = (arguments.num_steps - 1) // graph.interval if graph.interval else 0
    kept = frozenset(Port(Role.STATE, i) for i in range(graph.num_states)) if rows else frozenset()
    returned, memory = forward_staged(step, arguments, state_seqs=not graph.final_state, kept=kept)
    results = list(returned)
    if graph.interval:
        form = step.format(arguments.inputs, arguments.states)
        for i, value in enumerate(step.trace.states):
            shape = (rows + graph.spare, *value.shape)
            unit = max(1, functools.reduce(lambda n, size: n * size, value.shape, 1))
            checkpoints = torch.empty_strided(shape, (unit, *form.step), dtype=value.dtype, device=arguments.device)
            if rows:
                checkpoints[:rows].copy_(memory[Port(Role.STATE, i)][graph.interval :: graph.interval][:rows])
            checkpoints[rows:].zero_()  # the same results on every run
            results.append(checkpoints)
    return results


def _backward(graph: StagedGraph, made: _Specialized, args: Sequence[Any]) -> list[Tensor]:
    step, count = made.step, len(graph.needs)
    with torch.enable_grad():
        leaves = [args[i].detach().requires_grad_(graph.needs[i]) for i in made.captured]
        computed = step.trace.lift(leaves)
    arguments = made.arguments(graph, args, [tensor.detach() for tensor in computed])
    came = iter(args[count:])
    gradients = [next(came) if there else None for there in graph.came]
    needed = (*graph.needs[: graph.num_primals], *(tensor.requires_grad for tensor in computed))
    kept = frozenset(step.kept(step.carrying(needed)))
    _, memory = forward_staged(step, arguments, state_seqs=not graph.final_state, kept=kept, needed=needed)
    found = backward_staged(step, arguments, memory, kept, gradients, needed, state_seqs=not graph.final_state)
    by_position: dict[int, Tensor | None] = dict(enumerate(found[: graph.num_primals]))
    pairs = [(t, g) for t, g in zip(computed, found[graph.num_primals :], strict=True) if g is not None]
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    if pairs and trained:
        of_captured = torch.autograd.grad([t for t, _ in pairs], trained, [g for _, g in pairs], allow_unused=True)
        positions = [i for i, leaf in zip(made.captured, leaves, strict=True) if leaf.requires_grad]
        by_position.update(zip(positions, of_captured, strict=True))
    # What the step does not read has no gradient there.
    return [_like_argument(by_position.get(i), args[i]) for i, need in enumerate(graph.needs) if need]


def _like_argument(gradient: Tensor | None, argument: Tensor) -> Tensor:
    """A gradient in the memory format of what it is of, or zeros."""
    strides = strides_like(argument)
    if gradient is None:
        return torch.zeros_like(argument.new_empty_strided(argument.shape, strides))
    if gradient.stride() == strides and gradient._base is None:
        return gradient
    return torch.empty_strided(argument.shape, strides, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


def _shapes(
    program: str, tensors: Sequence[Tensor], sizes: Sequence[int] | None, size_positions: Sequence[int] | None
) -> list[Tensor]:
    """Tensors like the results, for sizes that may be symbols."""
    graph = _graph(program)
    args = _merged(tensors, sizes, size_positions)
    if graph.vjp is not None:
        arguments = (args[i] for i, need in enumerate(graph.needs) if need)
        return [t.new_empty_strided(t.shape, strides_like(t, guarded=True)) for t in arguments]
    inputs, states = args[: graph.num_inputs], args[graph.num_inputs : graph.num_primals]
    values = tuple(graph.core(*(x.select(0, 0) for x in inputs), *states, *args[graph.num_primals :]))
    num_steps, shape = inputs[0].shape[0], values[0].shape
    zeros = graph.zero_states or (False,) * graph.num_states
    given = [None if zero else state for state, zero in zip(states, zeros, strict=True)]
    form = ScanFormat.of(shape, inputs, given, guarded=True)
    sequence = ((num_steps, *shape), form.sequence)
    results, carried = values[: graph.num_outputs], values[graph.num_outputs :]

    def allocate(like: Sequence[Tensor], size: Sequence[int], strides: Sequence[int]) -> list[Tensor]:
        return [inputs[0].new_empty_strided(tuple(size), tuple(strides), dtype=v.dtype) for v in like]

    found = allocate(results, *sequence)
    found += allocate(carried, *((shape, form.step) if graph.final_state else sequence))
    if graph.interval:
        rows = (num_steps - 1) // graph.interval + graph.spare
        unit = functools.reduce(lambda n, size: n * size, shape, 1)
        found += allocate(carried, (rows, *shape), (unit, *form.step))
    return found


def _merged(tensors: Sequence[Tensor], sizes: Sequence[int] | None, size_positions: Sequence[int] | None) -> list[Any]:
    """The arguments; AOTInductor's runtime gives an empty list as `None`."""
    args: list[Any] = list(tensors)
    for position, size in zip(size_positions or (), sizes or (), strict=True):  # ascending positions
        args.insert(position, size)
    return args


# Kernels read any strides: a compiler need not copy an argument to a certain layout.
torch.library.define(
    "flexsn_runtime::run_staged",
    "(str program, Tensor[] tensors, SymInt[] sizes, int[] size_positions) -> Tensor[]",
    tags=(torch.Tag.flexible_layout,),
)
torch.library.impl("flexsn_runtime::run_staged", "CompositeExplicitAutograd", _run)
torch.library.register_fake("flexsn_runtime::run_staged", _shapes)

run_staged = torch.ops.flexsn_runtime.run_staged.default


# -- as text -------------------------------------------------------------------------------------------------------

_GRAPHS = ("core", "vjp")


def _text(graph: StagedGraph) -> str:
    """In base64: code generators write it into a string literal of Python or C++."""
    fields = {name: getattr(graph, name) for name in StagedGraph.__slots__ if name not in _GRAPHS}
    sources = {name: _source(step) for name in _GRAPHS if (step := getattr(graph, name)) is not None}
    return base64.b64encode(json.dumps([fields, sources]).encode()).decode()


@functools.lru_cache(maxsize=256)
def _graph(program: str) -> StagedGraph:
    fields, sources = json.loads(base64.b64decode(program))
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    values |= {name: _function(source) for name, source in sources.items()}
    return StagedGraph(**values)


def _source(step: Step) -> str:
    """Python that defines `forward(self, *arguments)`. The graph holds no constant tensors."""
    code = cast("fx.GraphModule", step).graph.python_code(root_module="self")
    lines = ["import torch", "inf, nan = float('inf'), float('nan')"]
    for name, value in code.globals.items():
        if isinstance(value, types.ModuleType):
            lines.append(f"import {value.__name__} as {name}")
        elif getattr(torch, name, None) is value:
            lines.append(f"from torch import {name}")
        elif not name.startswith("fx_pytree") and name not in ("pytree", "NoneType", "inf", "nan"):
            raise UnsupportedScanError(f"the core uses {name} ({value!r}), which cannot be written as text.")
    return "\n".join([*lines, code.src])


def _function(source: str) -> Step:
    namespace: dict[str, Any] = {}
    exec(compile(source, "<step of a scan>", "exec"), namespace)
    return functools.partial(namespace["forward"], None)
