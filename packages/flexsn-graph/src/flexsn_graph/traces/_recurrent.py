"""Traces a time step that mixes elements along its last dimension, as pointwise stages with products between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

from torch import Tensor, fx

from flexsn_graph._torch_private import undisturbed
from flexsn_graph.errors import CoreReturnError, NonPointwiseError, UnsupportedCoreError, WrittenViewError
from flexsn_graph.ir._ops import is_zero
from flexsn_graph.ir._ports import Port, Role, ports
from flexsn_graph.ir._products import KEPT_OPS
from flexsn_graph.ir._step_graph import GRADIENTS
from flexsn_graph.staging import Keys, has_products, is_of_any_batch, resized, stage
from flexsn_graph.staging._staged_step import StagedStep
from flexsn_graph.traces._cut import CutTrace, cut_step
from flexsn_graph.traces._step import CoreTrace, StepTrace, StepValue, trace_step
from flexsn_graph.tracing._core import unwrap_compiled
from flexsn_graph.tracing._prologue import Hoists


class NoProductsError(Exception):
    """The step has no products with matrices."""


class RecurrentTrace(CoreTrace):
    """A traced step function with products of its values and captured matrices. `trace_core` creates it.

    With `Hoists.EVERYTHING`, `lift` computes all values that depend on captured tensors alone, such as a mask times a
    matrix, before the loop.

    Attributes:
        forward: `[*inputs, *states, *lifted] -> [*outputs, *new_states]`, as stages and products.
    """

    forward: StagedStep

    def _find_shape(self, results: Sequence[StepValue]) -> tuple[int, ...]:
        """The shape of the results with the most neurons.

        Results may have different numbers of neurons, but must have equal numbers of rows.
        """
        rows = {value.shape[:-1] for value in results}
        if len(rows) > 1 or any(not value.shape for value in results):
            return super()._find_shape(results)
        return max(value.shape for value in results)

    def _trace(self) -> None:
        arguments = self._primals
        results = (*ports(Role.OUTPUT, self.num_outputs), *ports(Role.STATE, self.num_states))
        tracer = self._get_tracer()
        lowered = tracer.lowered(tracer.record_forward(), KEPT_OPS)
        if not has_products(lowered.graph, arguments):
            raise NoProductsError
        self._keys = Keys()
        self.forward, self._port_by_key = stage(lowered, arguments, results, carried=Role.STATE, keys=self._keys)

    def _is_of_any_batch(self) -> bool:
        return is_of_any_batch(self.forward, self.step_shape, [value.shape for value in self.lifted_values])

    def _resize(self, old: int, new: int) -> None:
        self.forward = resized(self.forward, old, new)

    def _adopt(self, other: Self) -> None:
        self._keys, self._port_by_key = other._keys, other._port_by_key

    def vjp(
        self, cotangents: Sequence[bool], wanted: Sequence[bool], kept: Collection[Port] | None = None
    ) -> StagedStep:
        """The step's VJP.

        Args:
            cotangents, wanted: see `StepTrace.vjp`.
            kept: operands and products of the forward that the VJP may read. `None` for all.

        Raises:
            RequiresGradError: the masks do not fit the step.
            UnsupportedCoreError: a backward formula cannot be split into stages and products.
        """
        self._check_masks(cotangents, wanted)
        primals = self._primals
        cotangent_ports = (*ports(Role.GRAD_OUTPUT, self.num_outputs), *ports(Role.GRAD_STATE, self.num_states))
        arguments = (
            *primals,
            *(port for port, is_present in zip(cotangent_ports, cotangents, strict=True) if is_present),
        )
        existing = {key: port for key, port in self._port_by_key.items() if kept is None or port in kept}
        with undisturbed(), self.reads.restored():
            tracer = self._get_tracer()
            recorded, gradients = tracer.record_vjp(cotangents, wanted)
            lowered = tracer.lowered(recorded, KEPT_OPS)
            results = [
                Port(GRADIENTS[p.role], p.index)
                for p, position in zip(primals, gradients, strict=True)
                if position is not None
            ]
            results = _remove_zeros(lowered.graph, results)
            staged, _ = stage(lowered, arguments, results, carried=Role.GRAD_STATE, keys=self._keys, existing=existing)
        return replace(staged, shifts=self.forward.shifts)


def _remove_zeros(vjp: fx.Graph, gradients: Sequence[Port]) -> list[Port]:
    """Removes the gradients that are the constant 0 from a lowered VJP. Returns the other gradients."""
    output = next(n for n in reversed(vjp.nodes) if n.op == "output")
    entries: Any = output.args[0]
    positions = [i for i, entry in enumerate(entries) if not is_zero(entry)]
    output.args = (tuple(entries[i] for i in positions),)
    vjp.eliminate_dead_code()
    return [gradients[i] for i in positions]


def trace_core(
    core: Callable[..., Any],
    num_inputs: int,
    num_states: int,
    num_outputs: int,
    example_inputs: Sequence[Tensor],
    *,
    follow: bool = True,
    hoist: bool = True,
) -> StepTrace | RecurrentTrace | CutTrace:
    """Traces a core like `trace_step`, but the core may also combine elements of the step.

    The core may multiply values of the step by captured matrices, or reduce values along the last dimension.
    Alternatively, the core may combine elements along small dimensions that some of its inputs or results lack, if the
    step can be split into pieces with one value per element.

    Args:
        core, num_inputs, num_states, num_outputs, example_inputs, follow: see `trace_step`.
        hoist: for a core with products, True if `lift` computes all values that depend on captured tensors alone. If
            False, these values are computed in the step. Pass False for a core with its own gradient formula, such as
            an `autograd.Function`. `hoist` does not affect pointwise cores or traces of pieces.

    Returns:
        The result of `trace_step` if the core is pointwise. Otherwise, a trace of stages and products if the core has
        products, or else a trace of pieces.

    Raises:
        The errors of `trace_step`.

    Example:
        >>> V = torch.eye(3)
        >>> step = trace_core(lambda x, v: (v, x + v @ V), 1, 1, 1, (torch.zeros(2, 3), torch.zeros(2, 3)))
        >>> [product.name for product in step.forward.products]
        ['aten.mm.default']
    """
    counts = (num_inputs, num_states, num_outputs)
    try:
        return trace_step(core, *counts, example_inputs, follow=follow)
    except (NonPointwiseError, CoreReturnError) as error:
        refusal: Exception = error
    try:
        core = unwrap_compiled(core)
        hoists = Hoists.EVERYTHING if hoist else Hoists.NOTHING
        make = partial(RecurrentTrace, core, *counts, example_inputs, follow, hoists)
        with undisturbed():
            try:
                try:
                    return make()
                except WrittenViewError:
                    return make(keep_views=True)
            except NoProductsError:
                pass
            except (NonPointwiseError, CoreReturnError) as error:
                refusal = error
        try:
            return cut_step(core, *counts, example_inputs, follow=follow)
        except NonPointwiseError as error:
            if isinstance(refusal, CoreReturnError):
                raise
            del error
        except (WrittenViewError, UnsupportedCoreError, CoreReturnError):
            pass
        raise refusal
    finally:  # the error refers to this frame, which would keep all callers' values alive until a garbage collection
        del refusal
