"""Runs a function on fake tensors and records what it does, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, fx

from flexsn_graph._calls import CoreCalls
from flexsn_graph._capture import CaptureMode
from flexsn_graph._captures import Captures
from flexsn_graph._core import check_examples
from flexsn_graph._layout import LiftedLayout
from flexsn_graph._positions import check_positions
from flexsn_graph._prologue import Hoists, Prologue
from flexsn_graph._torch_private import (
    FakeTensor,
    FakeTensorMode,
    fake_like,
    gradients,
    lower,
    record,
    without_hooks,
)
from flexsn_graph.errors import StatefulCoreError, UnsupportedCoreError
from flexsn_graph.versions import UnsupportedVersionError


class Tracer:
    """A function on fake tensors.

    Args:
        fn: the function.
        examples: its arguments; only shape, dtype and device are looked at.
        as_results: turns what `fn` returns into a tuple of tensors, or raises.
        requires_grad: which arguments are differentiable; `None`: all that can be.
        hoists: what is computed before the step, from captured tensors alone.

    Attributes:
        mode: the fake mode of everything here.
        captures: the tensors that `fn` captures, and what it computes from them alone.
        lifted: the numbers of those values that the step needs.
        results: fake tensors like the function's results.
        differentiable: for each result, whether a gradient can flow through it.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        examples: Sequence[Tensor],
        as_results: Callable[[Any], tuple[Tensor, ...]],
        requires_grad: Sequence[bool] | None = None,
        hoists: Hoists = Hoists.NOTHING,
    ) -> None:
        check_examples(examples)
        self._fn = fn
        self._hoists = hoists
        self._as_results = as_results
        self._requires_grad = [True] * len(examples) if requires_grad is None else requires_grad
        self.mode = FakeTensorMode()
        self.examples = [fake_like(self.mode, t) for t in examples]
        self.captures = Captures(self.mode)
        self._trails: dict[tuple[bool, ...], list[tuple[str, ...]]] = {}
        self._met: set[int] | None = None
        needed: set[int] = set()
        self.results, self.differentiable = self._discover(needed)
        self.lifted = self.captures.lifted = tuple(sorted(needed))

    @property
    def lifted_values(self) -> list[FakeTensor]:
        """Fake tensors like the lifted ones."""
        return [self.captures.stand_ins[number] for number in self.lifted]

    @property
    def primals(self) -> list[FakeTensor]:
        """`[*examples, *lifted_values]`."""
        return [*self.examples, *self.lifted_values]

    def prologue(self) -> Prologue:
        """From the captured tensors to the lifted ones."""
        return Prologue(self.captures.decided.values(), self.captures.tensors, self.lifted)

    def record_forward(self) -> fx.GraphModule:
        """`[*primals] -> [*results]`, as ATen ops."""

        def forward(*arguments: Tensor) -> list[Tensor]:
            results, _ = self._run(arguments[: len(self.examples)])
            return [self.captures.stand_in(t) for t in results]

        with torch.no_grad():
            return record(forward, self.primals, self.mode)

    def record_vjp(
        self, cotangents: Sequence[bool], wanted: Sequence[bool], *, with_results: bool = False
    ) -> tuple[fx.GraphModule, tuple[int | None, ...]]:
        """`[*primals, *present cotangents] -> [*results if with_results, *gradients]`, as ATen ops.

        Returns:
            The graph, and for each primal the position of its gradient among the gradients, or `None`.
        """
        positions: list[int | None] = []

        def vjp(*arguments: Tensor) -> list[Tensor]:
            given = iter(arguments[len(self.primals) :])
            weights = [next(given) if there else None for there in cotangents]
            results, found = self._gradients(arguments[: len(self.examples)], weights, wanted)
            count = iter(range(len(found)))
            positions.extend(None if g is None else next(count) for g in found)
            first = [self.captures.stand_in(t) for t in results] if with_results else []
            return [*first, *(g for g in found if g is not None)]

        present = [t for t, there in zip(self.results, cotangents, strict=True) if there]
        recorded = record(vjp, [*self.primals, *present], self.mode)
        return recorded, tuple(positions)

    def lower(
        self,
        recorded: fx.GraphModule,
        step_shape: Sequence[int],
        positions: Sequence[int | None] = (),
        known: Mapping[int, LiftedLayout] | None = None,
    ) -> tuple[fx.GraphModule, dict[int, LiftedLayout]]:
        """Lowers a recorded graph, checks that it is pointwise, and finds its captured tensors' layouts.

        Args:
            recorded: what `record_forward` or `record_vjp` returned.
            step_shape: shape of one step.
            positions: the gradients' positions, as `record_vjp` returned them.
            known: the layouts in the forward graph.
        """
        lowered = lower(recorded, self.mode)
        count = sum(n.op == "placeholder" for n in lowered.graph.nodes)
        others = count - len(self.primals)
        lifted = [None] * len(self.examples) + list(range(len(self.lifted)))
        gradient_of = [primal for primal, p in enumerate(positions) if p is not None]
        results = next(n for n in reversed(lowered.graph.nodes) if n.op == "output").args[0]
        first = [None] * (len(results) - len(gradient_of))
        roles = [*lifted, *[None] * others]
        layouts = check_positions(lowered.graph, step_shape, roles, [*first, *gradient_of], known or {})
        return lowered, layouts

    def _leaves(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        leaves = [t.detach() for t in tensors]
        for leaf, want in zip(leaves, self._requires_grad, strict=True):
            leaf.requires_grad_(want and leaf.is_floating_point())
        return leaves

    def _run(
        self, arguments: Sequence[Tensor], needed: set[int] | None = None
    ) -> tuple[tuple[Tensor, ...], CoreCalls]:
        """Calls the function. With `needed` this is discovery: the values that the step reads are added to it."""
        self.captures.locations.clear()
        with self._capturing(arguments, needed) as (mode, calls):
            returned = self._fn(*arguments)
        # Autograd itself calls a little more, depending on what needs a gradient.
        recording = (torch.is_grad_enabled(), *(t.requires_grad for t in self.captures.tensors.values()))
        if self._met is None:
            self._met = mode.met
        if mode.trail != self._trails.setdefault(recording, mode.trail) or mode.met != self._met:
            raise StatefulCoreError(
                "the core does something else in each call: it must depend on its arguments alone. Return "
                "what changes as a state, and create captured tensors before tracing.",
                "state",
                None,
            )
        results = self._as_results(returned)
        if needed is not None:
            needed.update(*(mode.behind(self.captures.stand_in(t)) for t in results))
        return results, calls

    @contextmanager
    def _capturing(
        self, frozen: Sequence[Tensor], needed: set[int] | None = None
    ) -> Iterator[tuple[CaptureMode, CoreCalls]]:
        mode = CaptureMode(self.captures, may_add=needed is not None, frozen=frozen)
        calls = CoreCalls(mode, self._hoists)
        try:
            with calls, mode, without_hooks(list(self.captures.tensors.values())):
                yield mode, calls
        except RuntimeError:
            if mode.refusal is None:
                raise
            raise mode.refusal from None
        finally:
            if needed is not None:
                needed.update(mode.met)

    def _discover(self, needed: set[int]) -> tuple[list[FakeTensor], tuple[bool, ...]]:
        """Runs forward and backward once to see which tensors they capture and what is differentiable.

        The backward too: a surrogate's parameter may be read in the backward formula alone.
        """
        with self.mode, torch.no_grad():
            # First without gradients: there an in-place op on an argument is refused by name, while
            # autograd would only say that it is a leaf.
            self._run([t.detach() for t in self.examples], needed)
        with self.mode, torch.enable_grad():
            leaves = self._leaves(self.examples)
            results, _ = self._run(leaves, needed)
            stand_ins = [self.captures.stand_in(t) for t in results]
            roots = [t for t in results if t.requires_grad]
            if roots:
                captured = {n: t for n, t in self.captures.tensors.items() if t.requires_grad}
                wanted = [*(t for t in leaves if t.requires_grad), *captured.values()]
                ones = [torch.ones_like(self.captures.stand_in(t)) for t in roots]
                found: tuple[Tensor | None, ...] = tuple(wanted)
                # What goes wrong here is told when a gradient is asked for; inference needs none.
                with suppress(RuntimeError), self._capturing(ones, needed):
                    found = gradients(roots, wanted, ones)
                of_captured = found[len(wanted) - len(captured) :]
                needed.update(n for n, g in zip(captured, of_captured, strict=True) if g is not None)
            described = [fake_like(self.mode, t) for t in stand_ins]
        return described, tuple(t.requires_grad for t in results)

    def _gradients(
        self, arguments: Sequence[Tensor], weights: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> tuple[tuple[Tensor, ...], list[Tensor | None]]:
        with torch.enable_grad():
            leaves = self._leaves(arguments)
            results, calls = self._run(leaves)
            primals = [*leaves, *(self._variable(number, calls) for number in self.lifted)]
            sought = {
                i: t
                for i, (t, want) in enumerate(zip(primals, wanted, strict=True))
                if want and t is not None and t.requires_grad
            }
            weighted = [
                (t, w)
                for t, w in zip(results, weights, strict=True)
                if w is not None and t.requires_grad
            ]
            if not weighted or not sought:
                return results, [None] * len(primals)
            roots, given = [t for t, _ in weighted], [w for _, w in weighted]
            try:
                with self._capturing([*arguments, *given]):
                    found = gradients(roots, list(sought.values()), given)
            except (UnsupportedCoreError, UnsupportedVersionError):
                raise
            except RuntimeError as error:
                raise UnsupportedCoreError(
                    f"autograd cannot differentiate the core: {error}", "autograd", None
                ) from error
        by_primal = dict(zip(sought, found, strict=True))
        return results, [by_primal.get(i) for i in range(len(primals))]

    def _variable(self, number: int, calls: CoreCalls) -> Tensor | None:
        """What autograd knows a lifted value as: the captured tensor itself, or what stands for a computed one."""
        return self.captures.tensors.get(number, calls.variables.get(number))
