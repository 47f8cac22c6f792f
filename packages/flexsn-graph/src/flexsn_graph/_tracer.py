"""Runs a function on fake tensors and records what it does, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, fx

from flexsn_graph._capture import CaptureMode, Captures, ValueReads
from flexsn_graph._core import check_examples
from flexsn_graph._layout import LiftedLayout
from flexsn_graph._positions import check_positions
from flexsn_graph._torch_private import (
    FakeTensor,
    FakeTensorMode,
    fake_like,
    lower,
    record,
    without_hooks,
)
from flexsn_graph.errors import StatefulCoreError, UnsupportedCoreError


class Tracer:
    """A function on fake tensors.

    Args:
        fn: the function.
        examples: its arguments; only shape, dtype and device are looked at.
        as_results: turns what `fn` returns into a tuple of tensors, or raises.
        requires_grad: which arguments are differentiable; `None`: all that can be.

    Attributes:
        mode: the fake mode of everything here.
        captures: the tensors that `fn` captures.
        results: fake tensors like the function's results.
        differentiable: for each result, whether a gradient can flow through it.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        examples: Sequence[Tensor],
        as_results: Callable[[Any], tuple[Tensor, ...]],
        requires_grad: Sequence[bool] | None = None,
    ) -> None:
        check_examples(examples)
        self._fn = fn
        self._as_results = as_results
        self._requires_grad = [True] * len(examples) if requires_grad is None else requires_grad
        self.mode = FakeTensorMode()
        self.examples = [fake_like(self.mode, t) for t in examples]
        self.captures = Captures(self.mode)
        self._trails: dict[tuple[bool, ...], list[tuple[str, ...]]] = {}
        self._met: set[int] | None = None
        self.results, self.differentiable = self._discover()

    @property
    def primals(self) -> list[FakeTensor]:
        """`[*examples, *stand-ins of the captured tensors]`."""
        return [*self.examples, *self.captures.stand_ins]

    def record_forward(self) -> fx.GraphModule:
        """`[*primals] -> [*results]`, as ATen ops."""

        def forward(*arguments: Tensor) -> list[Tensor]:
            results = self._run(arguments[: len(self.examples)])
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
            results, gradients = self._gradients(
                arguments[: len(self.examples)], weights, wanted
            )
            count = iter(range(len(gradients)))
            positions.extend(None if g is None else next(count) for g in gradients)
            first = [self.captures.stand_in(t) for t in results] if with_results else []
            return [*first, *(g for g in gradients if g is not None)]

        present = [t for t, there in zip(self.results, cotangents, strict=True) if there]
        recorded = record(vjp, [*self.primals, *present], self.mode)
        return recorded, tuple(positions)

    def lower(
        self,
        recorded: fx.GraphModule,
        step_shape: Sequence[int],
        gradients: Sequence[int | None] = (),
        known: Mapping[int, LiftedLayout] | None = None,
    ) -> tuple[fx.GraphModule, dict[int, LiftedLayout]]:
        """Lowers a recorded graph, checks that it is pointwise, and finds its captured tensors' layouts.

        Args:
            recorded: what `record_forward` or `record_vjp` returned.
            step_shape: shape of one step.
            gradients: the gradients' positions, as `record_vjp` returned them.
            known: the layouts in the forward graph.
        """
        lowered = lower(recorded, self.mode)
        count = sum(n.op == "placeholder" for n in lowered.graph.nodes)
        others = count - len(self.primals)
        lifted = [None] * len(self.examples) + list(range(len(self.captures.tensors)))
        gradient_of = [primal for primal, p in enumerate(gradients) if p is not None]
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

    def _run(self, arguments: Sequence[Tensor], *, may_add: bool = False) -> tuple[Tensor, ...]:
        with self._capturing(arguments, may_add=may_add) as mode:
            returned = self._fn(*arguments)
        # Autograd itself calls a little more, depending on what needs a gradient.
        recording = (torch.is_grad_enabled(), *(t.requires_grad for t in self.captures.tensors))
        if self._met is None:
            self._met = mode.met
        if mode.trail != self._trails.setdefault(recording, mode.trail) or mode.met != self._met:
            raise StatefulCoreError(
                "the core does something else in each call: it must depend on its arguments alone. Return "
                "what changes as a state, and create captured tensors before tracing.",
                "state",
                None,
            )
        return self._as_results(returned)

    @contextmanager
    def _capturing(self, frozen: Sequence[Tensor], *, may_add: bool = False) -> Iterator[CaptureMode]:
        mode = CaptureMode(self.captures, may_add=may_add, frozen=frozen)
        try:
            with ValueReads(), mode, without_hooks(self.captures.tensors):
                yield mode
        except RuntimeError:
            if mode.refusal is None:
                raise
            raise mode.refusal from None

    def _discover(self) -> tuple[list[FakeTensor], tuple[bool, ...]]:
        """Runs forward and backward once to see which tensors they capture and what is differentiable.

        The backward too: a surrogate's parameter may be read in the backward formula alone.
        """
        with self.mode, torch.no_grad():
            # First without gradients: there an in-place op on an argument is refused by name, while
            # autograd would only say that it is a leaf.
            self._run([t.detach() for t in self.examples], may_add=True)
        with self.mode, torch.enable_grad():
            leaves = self._leaves(self.examples)
            results = self._run(leaves, may_add=True)
            stand_ins = [self.captures.stand_in(t) for t in results]
            roots = [t for t in results if t.requires_grad]
            if roots:
                wanted = [t for t in (*leaves, *self.captures.tensors) if t.requires_grad]
                ones = [torch.ones_like(self.captures.stand_in(t)) for t in roots]
                # What goes wrong here is told when a gradient is asked for; inference needs none.
                with suppress(RuntimeError), self._capturing(ones, may_add=True):
                    torch.autograd.grad(roots, wanted, ones, allow_unused=True)
            described = [fake_like(self.mode, t) for t in stand_ins]
        return described, tuple(t.requires_grad for t in results)

    def _gradients(
        self, arguments: Sequence[Tensor], weights: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> tuple[tuple[Tensor, ...], list[Tensor | None]]:
        with torch.enable_grad():
            leaves = self._leaves(arguments)
            results = self._run(leaves)
            primals = [*leaves, *self.captures.tensors]
            asked = [want and t.requires_grad for t, want in zip(primals, wanted, strict=True)]
            weighted = [
                (t, w)
                for t, w in zip(results, weights, strict=True)
                if w is not None and t.requires_grad
            ]
            if not weighted or not any(asked):
                return results, [None] * len(primals)
            sought = [t for t, ask in zip(primals, asked, strict=True) if ask]
            roots, given = [t for t, _ in weighted], [w for _, w in weighted]
            try:
                with self._capturing([*arguments, *given]):
                    found = iter(torch.autograd.grad(roots, sought, given, allow_unused=True))
            except UnsupportedCoreError:
                raise
            except RuntimeError as error:
                raise UnsupportedCoreError(
                    f"autograd cannot differentiate the core: {error}", "autograd", None
                ) from error
        return results, [next(found) if ask else None for ask in asked]
