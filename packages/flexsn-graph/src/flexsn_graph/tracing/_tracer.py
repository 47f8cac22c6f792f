"""Runs a function on fake tensors and records its operations, forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, fx

from flexsn_graph._location import is_raised_by_torch, raised_at
from flexsn_graph._torch_private import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    fake_like,
    forget_fake_results,
    gradients,
    reachable_nodes,
    record,
    recording_nodes,
    without_hooks,
)
from flexsn_graph.errors import (
    CaptureError,
    StatefulCoreError,
    TorchError,
    TraceError,
    UnsupportedCoreError,
    UnsupportedOpError,
)
from flexsn_graph.ir._layout import LiftedLayout
from flexsn_graph.lowering._decompositions import DURING_RECORDING, TO_PRIMS
from flexsn_graph.lowering._lowering import lower
from flexsn_graph.reads import Reads
from flexsn_graph.tracing._before import compute_before
from flexsn_graph.tracing._calls import CoreCalls
from flexsn_graph.tracing._capture import CaptureMode
from flexsn_graph.tracing._captures import Captures
from flexsn_graph.tracing._core import check_examples
from flexsn_graph.tracing._positions import check_positions
from flexsn_graph.tracing._prologue import Hoists, Prologue
from flexsn_graph.tracing._refusals import make_value_error
from flexsn_graph.versions import UnsupportedVersionError


class Tracer:
    """A function that runs on fake tensors.

    Args:
        fn: the function.
        examples: arguments of the function, of which only shape, dtype and device matter.
        as_results: converts the return value of `fn` to a tuple of tensors, or raises an error.
        requires_grad: for each argument, True if it is differentiable. `None` means all floating-point arguments.
        hoists: selects the calls on captured tensors alone that run before the loop.
        keep_views: True if views of values that are computed before the loop remain views. An in-place op on one view
            then changes all views.
        reads: records the other values that `fn` reads.
        captures: creates the object that stores the captured tensors.

    Attributes:
        mode: the fake mode of all tensors in this tracer.
        captures: the tensors that `fn` captures, and values that `fn` computes from captured tensors alone.
        lifted: numbers of the values in `captures` that the step needs.
        results: fake tensors with the properties of the function's results.
        differentiable: for each result, True if a gradient can flow through it.
        leads_to: for each result, the positions in `primals` to which its gradient may flow.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        examples: Sequence[Tensor],
        as_results: Callable[[Any], tuple[Tensor, ...]],
        requires_grad: Sequence[bool] | None = None,
        hoists: Hoists = Hoists.NOTHING,
        keep_views: bool = False,
        reads: Reads | None = None,
        captures: Callable[[FakeTensorMode], Captures] = Captures,
    ) -> None:
        check_examples(examples)
        self._reads = Reads(fn, follow=False) if reads is None else reads
        self._fn = fn
        self._hoists = hoists
        self._keep_views = keep_views
        self._as_results = as_results
        self._requires_grad = [True] * len(examples) if requires_grad is None else list(requires_grad)
        # Errors by the position of an example that torch cannot differentiate, such as the target of a loss.
        self._constant_errors: dict[int, TorchError] = {}
        forget_fake_results()
        self.mode = FakeTensorMode()
        self.examples = [fake_like(self.mode, t) for t in examples]
        self.captures = captures(self.mode)
        # The function's calls and the numbers of the values that the function read. The key states whether gradients
        # were enabled, whether the run was complete, and which tensors required gradients.
        self._trails: dict[tuple[bool, ...], tuple[list[tuple[str, ...]], set[int]]] = {}
        needed: set[int] = set()
        with self._reads.recording():
            self.results, self.differentiable = self._discover(needed)
        self.lifted = self.captures.lifted = tuple(sorted(needed))
        self.leads_to = tuple(map(self._find_positions, self._reached))
        self._trained = {number: t.requires_grad for number, t in self.captures.tensors.items()}

    @property
    def lifted_values(self) -> list[FakeTensor]:
        """Fake tensors with the properties of the lifted tensors."""
        return [self.captures.stand_ins[number] for number in self.lifted]

    @property
    def primals(self) -> list[FakeTensor]:
        """`[*examples, *lifted_values]`."""
        return [*self.examples, *self.lifted_values]

    @property
    def computed(self) -> list[int]:
        """The numbers of the lifted values that are not captured."""
        return [number for number in self.lifted if number not in self.captures.tensors]

    @property
    def is_plain(self) -> bool:
        """True if no call writes to values computed from captured tensors or gives them a custom gradient."""
        return all(call.is_plain for call in self.captures.decided.values())

    def prologue(self) -> Prologue:
        """The function from the captured tensors to the lifted tensors."""
        needed, before = set(self.lifted), None
        if self.computed:
            with self._as_discovered():
                needed, before = compute_before(self)
        tensors = {number: t for number, t in self.captures.tensors.items() if number in needed}
        return Prologue(tensors, self.lifted, before)

    def aliases(self, captured: Sequence[Tensor]) -> tuple[tuple[int, Tensor], ...]:
        """Other captured tensors that share memory with one of `captured`, each with the position of that tensor."""
        numbers = [next(n for n, t in self.captures.tensors.items() if t is tensor) for tensor in captured]
        return tuple((numbers.index(n), t) for n, t in self.captures.aliases if n in numbers)

    def compute(self, arguments: Sequence[Tensor]) -> tuple[list[Tensor], CoreCalls]:
        """Computes the lifted values that are not captured, by a complete run of the function."""
        with torch.enable_grad():
            leaves = self._make_leaves(arguments)
            results, calls = self._run(leaves, is_complete=True)
            computed = dict(calls.computed)
            if any(number not in computed for number in self.computed):  # a backward formula computes the value
                roots = [t for t in results if t.requires_grad]
                ones = [torch.ones_like(self.captures.stand_in(t)) for t in roots]
                targets = [*([t] for t in leaves if t.requires_grad), *self._list_trained_targets(calls).values()]
                with suppress(RuntimeError), self._capturing(ones, is_complete=True) as (_, of_backward):
                    self._differentiate(roots, targets, ones)
                computed = {**of_backward.computed, **computed}
        missing = [number for number in self.computed if number not in computed]
        if missing:
            call = self.captures.call_of(missing[0])
            assert call is not None
            raise CaptureError(
                f"the core calls {call.name} on captured tensors alone, which has to be done before the loop, but this "
                "call could not be found again. Make the call outside of the core.",
                call.name,
                call.location,
            )
        return [computed[number] for number in self.computed], calls

    def gradients_of(self, value: Tensor, gradient: Tensor, calls: CoreCalls) -> list[Tensor | None]:
        """Computes gradients of captured tensors from the gradient of a value that `compute` returned.

        The list has an entry for each captured tensor that requires a gradient. The entry is `None` if no gradient
        flows to the tensor.

        Raises:
            UnsupportedCoreError: autograd cannot differentiate the value.
        """
        targets = list(self._list_trained_targets(calls).values())
        if not value.requires_grad:
            return [None] * len(targets)
        with self._explaining([value]), self._capturing([gradient], is_complete=True):
            return self._differentiate([value], targets, [gradient])

    def record_forward(self) -> fx.GraphModule:
        """Records `[*primals] -> [*results]` as ATen ops."""

        def forward(*arguments: Tensor) -> list[Tensor]:
            # Gradients are enabled so that the lifted values are the same as in the VJP. No gradient is computed here.
            with torch.enable_grad():
                results, _ = self._run(self._make_leaves(arguments[: len(self.examples)]))
            return [self.captures.stand_in(t).detach() for t in results]

        with self._as_discovered():
            return record(forward, self.primals, self.mode, DURING_RECORDING)

    def record_vjp(
        self, cotangents: Sequence[bool], requested: Sequence[bool], *, with_results: bool = False
    ) -> tuple[fx.GraphModule, tuple[int | None, ...]]:
        """Records `[*primals, *present cotangents] -> [*results if with_results, *gradients]` as ATen ops.

        Returns:
            The graph, and for each primal, the position of its gradient among the gradients, or `None`.
        """
        positions: list[int | None] = []

        def vjp(*arguments: Tensor) -> list[Tensor]:
            cotangent_values = iter(arguments[len(self.primals) :])
            weights = [next(cotangent_values) if is_present else None for is_present in cotangents]
            results, result = self._compute_gradients(arguments[: len(self.examples)], weights, requested)
            count = iter(range(len(result)))
            positions.extend(None if g is None else next(count) for g in result)
            first = [self.captures.stand_in(t) for t in results] if with_results else []
            return [*first, *(g for g in result if g is not None)]

        present = [t for t, is_present in zip(self.results, cotangents, strict=True) if is_present]
        with self._as_discovered(), self._reads.recording():
            recorded = record(vjp, [*self.primals, *present], self.mode, DURING_RECORDING)
        return recorded, tuple(positions)

    def lower(
        self,
        recorded: fx.GraphModule,
        step_shape: Sequence[int],
        positions: Sequence[int | None] = (),
        forward_layouts: Mapping[int, LiftedLayout] | None = None,
        *,
        sums_allowed: bool = False,
    ) -> tuple[fx.GraphModule, dict[int, LiftedLayout]]:
        """Lowers a recorded graph, checks that it is pointwise, and finds the layouts of its captured tensors.

        Args:
            recorded: the result of `record_forward` or `record_vjp`.
            step_shape: shape of one step.
            positions: positions of the gradients, as returned by `record_vjp`.
            forward_layouts: for a VJP, the layouts of captured tensors in the forward graph.
            sums_allowed: see `check_positions`.
        """
        lowered = self.lowered(recorded)
        roles, gradient_of = self.roles(lowered, positions)
        layouts = check_positions(
            lowered.graph, step_shape, roles, gradient_of, forward_layouts or {}, sums_allowed=sums_allowed
        )
        return lowered, layouts

    def roles(
        self, lowered: fx.GraphModule, positions: Sequence[int | None]
    ) -> tuple[list[int | None], list[int | None]]:
        """Finds the meaning of the placeholders and results of a lowered graph.

        Returns:
            For each placeholder, the index of its lifted tensor, or `None`. For each result, the index of the
            placeholder whose gradient the result is, or `None`.
        """
        count = sum(n.op == "placeholder" for n in lowered.graph.nodes)
        num_others = count - len(self.primals)
        lifted = [None] * len(self.examples) + list(range(len(self.lifted)))
        gradient_of = [primal for primal, p in enumerate(positions) if p is not None]
        results = next(n for n in reversed(lowered.graph.nodes) if n.op == "output").args[0]
        first = [None] * (len(results) - len(gradient_of))
        return [*lifted, *[None] * num_others], [*first, *gradient_of]

    def lowered(self, recorded: fx.GraphModule, undecomposed: Collection[Any] = ()) -> fx.GraphModule:
        """A recorded graph without mutation. All ops except for those in `undecomposed` are decomposed."""
        table = (
            {op: decomposition for op, decomposition in TO_PRIMS.items() if op not in undecomposed}
            if undecomposed
            else TO_PRIMS
        )
        with explained():
            return lower(recorded, self.mode, table)

    def _make_leaves(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        leaves = [t.detach() for t in tensors]
        for leaf, is_differentiable in zip(leaves, self._requires_grad, strict=True):
            leaf.requires_grad_(is_differentiable and leaf.is_floating_point())
        return leaves

    def _run(
        self, arguments: Sequence[Tensor], needed: set[int] | None = None, *, is_complete: bool = False
    ) -> tuple[tuple[Tensor, ...], CoreCalls]:
        """Calls the function. During discovery, adds to `needed` the numbers of the values that the step reads."""
        self.captures.locations.clear()
        with self._capturing(arguments, needed, is_complete=is_complete, forward=True) as (mode, calls), explained():
            returned = self._fn(*arguments)
            calls.is_core_running = False
            results = calls.finish(self._as_results(returned))
        # Autograd itself makes a few calls, which depend on which tensors require gradients.
        captured = (t.requires_grad for t in self.captures.tensors.values())
        recording = (torch.is_grad_enabled(), is_complete, *self._requires_grad, *captured)
        if (mode.trail, mode.numbers_read) != self._trails.setdefault(recording, (mode.trail, mode.numbers_read)):
            raise StatefulCoreError(
                "the core behaves differently in each call, but it must depend on its arguments alone. Return "
                "changing values as states, and create captured tensors before tracing.",
                "state",
                None,
            )
        if needed is not None:
            needed.update(*(mode.sources_of(t) for t in results))
        return results, calls

    @contextmanager
    def _capturing(
        self,
        frozen: Sequence[Tensor],
        needed: set[int] | None = None,
        *,
        is_complete: bool = False,
        forward: bool = False,
    ) -> Iterator[tuple[CaptureMode, CoreCalls]]:
        mode = CaptureMode(self.captures, may_add=needed is not None, frozen=frozen)
        arguments = frozen if forward else None
        calls = CoreCalls(
            mode,
            self._hoists,
            is_complete=is_complete,
            arguments=arguments,
            keep_views=self._keep_views,
            note=self._reads.note,
        )
        try:
            with self._reads.run(mode.origin), calls, mode, without_hooks(list(self.captures.tensors.values())):
                yield mode, calls
        except RuntimeError as error:
            if mode.refusal is not None:
                raise mode.refusal from None
            if any(t.is_inference() for t in self.captures.tensors.values()) and "Inference tensor" in str(error):
                raise CaptureError(
                    "the core captures a tensor that was made under torch.inference_mode(), for which autograd records "
                    "nothing. Create it outside of inference_mode, or capture a .clone() that is created outside.",
                    "capture",
                    raised_at(error.__cause__ or error.__context__ or error),
                ) from None
            raise
        finally:
            if needed is not None:
                needed.update(mode.numbers_read)

    @contextmanager
    def _as_discovered(self) -> Iterator[None]:
        """Resets `requires_grad` of captured tensors to its value at discovery, because users may have changed it."""
        captured = self.captures.tensors.items()
        changed = [t for n, t in captured if t.requires_grad != self._trained.get(n, t.requires_grad)]
        for tensor in changed:
            tensor.requires_grad_(not tensor.requires_grad)
        try:
            yield
        finally:
            for tensor in changed:
                tensor.requires_grad_(not tensor.requires_grad)

    def _discover(self, needed: set[int]) -> tuple[list[FakeTensor], tuple[bool, ...]]:
        """Runs forward and backward once to find the captured tensors and the differentiable results.

        The backward is necessary because a surrogate's parameter may be read in the backward formula only.
        """
        with self.mode, torch.no_grad():
            # Gradients are disabled in the first run, so that the error for an in-place op on an argument names the op.
            # Autograd would only report that the argument is a leaf.
            self._run([t.detach() for t in self.examples], set())
        with self.mode, torch.enable_grad():
            leaves = self._make_leaves(self.examples)
            try:
                results, calls = self._run(leaves, needed)
            except TorchError as error:
                self._find_constants(error)
                leaves = self._make_leaves(self.examples)
                results, calls = self._run(leaves, needed)
            stand_ins = [self.captures.stand_in(t) for t in results]
            roots = [t for t in results if t.requires_grad]
            if roots:
                captured = self._list_trained_targets(calls)
                of_leaves = [[t] for t in leaves if t.requires_grad]
                ones = [torch.ones_like(self.captures.stand_in(t)) for t in roots]
                of_captured: list[Tensor | None] = [targets[0] for targets in captured.values()]
                # An error is raised again later if a gradient is required. Inference does not need gradients.
                with suppress(RuntimeError), self._reads.of_backward(), self._capturing(ones, needed):
                    result = self._differentiate(roots, [*of_leaves, *captured.values()], ones)
                    of_captured = result[len(of_leaves) :]
                needed.update(n for n, g in zip(captured, of_captured, strict=True) if g is not None)
            self._reached = [self._find_reached(t, leaves, calls) for t in results]
            descriptions = [fake_like(self.mode, t) for t in stand_ins]
        return descriptions, tuple(t.requires_grad for t in results)

    def _find_reached(self, result: Tensor, leaves: Sequence[Tensor], calls: CoreCalls) -> set[int] | None:
        """The examples and captured values that autograd reaches from a result.

        The set contains the position of each example, and -1 minus the number of each captured value. `None` if
        autograd reaches any other variable.
        """
        if not result.requires_grad:
            return set()
        position_by_id = {id(leaf): i for i, leaf in enumerate(leaves)}
        for number in {*self.captures.tensors, *calls.variables}:
            position_by_id.update((id(t), -1 - number) for t in self._list_targets(number, calls))
        ends, reached = self._find_history_nodes(), set[int]()
        if result.grad_fn is None:
            return {position_by_id[id(result)]} if id(result) in position_by_id else None
        for node, _ in reachable_nodes([result.grad_fn], stop=ends):
            variable = ends[node] if node in ends else getattr(node, "variable", None)
            if variable is not None and id(variable) not in position_by_id:
                return None
            if variable is not None:
                reached.add(position_by_id[id(variable)])
        return reached

    def _find_positions(self, reached: set[int] | None) -> frozenset[int]:
        """The positions in `primals` for a result of `_find_reached`.

        Returns all positions if `reached` is `None` or contains a captured value that is not lifted.
        """
        count = len(self.examples)
        position_by_key = {-1 - number: i for i, number in enumerate(self.lifted, count)}
        if reached is None or any(key < 0 and key not in position_by_key for key in reached):
            return frozenset(range(count + len(self.lifted)))
        if not reached:
            return frozenset()
        # A captured tensor that does not require a gradient now, or a value computed from it, may require one later.
        tensors = self.captures.tensors
        later = {i for i, n in enumerate(self.lifted, count) if n not in tensors or not tensors[n].requires_grad}
        return frozenset({position_by_key.get(key, key) for key in reached} | later)

    def _find_constants(self, error: TorchError) -> None:
        """Finds the examples that torch cannot differentiate. A run that differentiated all examples raised `error`."""
        originals = self._requires_grad
        for i, needs_gradient in enumerate(originals):
            self._requires_grad = [needs_gradient and i == j for j in range(len(originals))]
            try:
                self._run(self._make_leaves(self.examples))
            except TorchError as constant_error:
                self._constant_errors[i] = constant_error
        self._requires_grad = [False] * len(originals)
        try:
            self._run(self._make_leaves(self.examples))
        except TorchError as constant_error:
            raise _recording_error(constant_error) from constant_error
        if not self._constant_errors:
            raise _recording_error(error) from error
        self._requires_grad = [
            needs_gradient and i not in self._constant_errors for i, needs_gradient in enumerate(originals)
        ]

    def _compute_gradients(
        self, arguments: Sequence[Tensor], weights: Sequence[Tensor | None], requested: Sequence[bool]
    ) -> tuple[tuple[Tensor, ...], list[Tensor | None]]:
        for i, constant_error in self._constant_errors.items():
            if requested[i]:
                raise constant_error
        with torch.enable_grad():
            leaves = self._make_leaves(arguments)
            results, calls = self._run(leaves)
            targets = {i: [leaf] for i, leaf in enumerate(leaves) if requested[i] and leaf.requires_grad}
            for i, number in enumerate(self.lifted, len(leaves)):
                of_lifted = self._list_targets(number, calls)
                if requested[i] and of_lifted:
                    targets[i] = of_lifted
            weighted = [(t, w) for t, w in zip(results, weights, strict=True) if w is not None and t.requires_grad]
            if not weighted or not targets:
                return results, [None] * len(requested)
            roots, given_cotangents = [t for t, _ in weighted], [w for _, w in weighted]
            with self._explaining(roots), self._reads.of_backward(), self._capturing([*arguments, *given_cotangents]):
                gradient_by_primal = dict(
                    zip(targets, self._differentiate(roots, list(targets.values()), given_cotangents), strict=True)
                )
        return results, [gradient_by_primal.get(i) for i in range(len(requested))]

    # -- targets of autograd ----------------------------------------------------------------------

    def _list_targets(self, number: int, calls: CoreCalls) -> list[Tensor]:
        """The tensors that represent a value for autograd: the captured tensor, and the variable that replaces it."""
        candidates = (self.captures.tensors.get(number), calls.variables.get(number))
        return [t for t in candidates if t is not None and t.requires_grad]

    def _list_trained_targets(self, calls: CoreCalls) -> dict[int, list[Tensor]]:
        """Targets of the captured tensors that require a gradient, by number."""
        return {n: self._list_targets(n, calls) for n, t in self.captures.tensors.items() if t.requires_grad}

    def _differentiate(
        self, roots: Sequence[Tensor], targets: Sequence[Sequence[Tensor]], cotangents: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """The gradient of each value in `targets`, which is the sum of the gradients of its tensors."""
        self._check_histories(roots)
        results = iter(gradients(roots, [t for candidates in targets for t in candidates], cotangents))
        sums: list[Tensor | None] = []
        for candidates in targets:
            parts = [part for part in (next(results) for _ in candidates) if part is not None]
            sums.append(functools.reduce(torch.add, parts) if parts else None)
        return sums

    def _check_histories(self, roots: Sequence[Tensor]) -> None:
        """Refuses a captured tensor that was not replaced and whose autograd history leads to another captured tensor.

        Autograd would continue through this history and count the gradient of the other tensor twice.
        """
        ends = self._find_history_nodes()
        if not ends:
            return
        leaves = {id(t) for t in self.captures.tensors.values() if t.requires_grad}
        for node, reached_from in reachable_nodes([t.grad_fn for t in roots], stop=ends):
            if node not in ends:
                continue
            for other, _ in reachable_nodes([following for following, _ in node.next_functions]):
                if other in ends or id(getattr(other, "variable", None)) in leaves:
                    name = "a function" if reached_from is None else reached_from.name()
                    raise CaptureError(
                        f"the core passes to {name} a captured tensor, {list(ends[node].shape)} {ends[node].dtype}, "
                        "that was computed from another captured tensor. Compute it in the core, or pass a `.clone()` "
                        "of it to the function.",
                        name,
                        None if reached_from is None else self.captures.location_of(reached_from._sequence_nr()),
                    )

    def _find_history_nodes(self) -> dict[Any, Tensor]:
        """The autograd nodes that computed captured tensors, each with its tensor."""
        return {t.grad_fn: t for t in self.captures.tensors.values() if t.grad_fn is not None}

    @contextmanager
    def _explaining(self, roots: Sequence[Tensor]) -> Iterator[None]:
        """Adds the user's line to errors that autograd raises about the core's gradient."""
        executed: list[Any] = []
        try:
            with recording_nodes([t.grad_fn for t in roots], self._find_history_nodes()) as executed:
                yield
        except (UnsupportedCoreError, UnsupportedVersionError):
            raise
        except RuntimeError as error:
            # The node of an op without a derivative has no location. In that case, the node that ran before it is used.
            results = (self.captures.location_of(node._sequence_nr()) for node in reversed(executed))
            location = next((result for result in results if result is not None), None)
            message = f"autograd cannot differentiate the core: {error}"
            raise UnsupportedCoreError(message, "autograd", location) from error


def _recording_error(error: TorchError) -> UnsupportedCoreError:
    cause = error.__cause__ or error
    return UnsupportedCoreError(
        f"the core runs without gradients, but torch refuses to record it for gradients: {cause}",
        "autograd",
        raised_at(cause),
    )


@contextmanager
def explained() -> Iterator[None]:
    """Replaces errors that torch raises with errors of this package that name the user's line."""
    try:
        yield
    except (TraceError, UnsupportedOpError, UnsupportedVersionError):
        raise
    except Exception as error:
        if not is_raised_by_torch(error):
            raise
        location = raised_at(error)
        if isinstance(error, DataDependentOutputException):
            raise make_value_error(str(error), location) from error
        suffix = "" if location is None else f"\n  at {location}"
        raise TorchError(f"torch cannot trace the core: {error}{suffix}") from error
