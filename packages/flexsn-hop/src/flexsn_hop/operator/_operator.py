"""``flex_sn_scan``, the scan as one higher-order operator, and a second operator for its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flexsn_hop._layout import BackwardLayout, ScanLayout
from flexsn_hop._torch_private import (
    HigherOrderOperator,
    LowersItself,
    capture_with_dynamo,
    implement,
    is_tracing,
    is_transforming,
    outside_of_tracing,
    refuse_autograd,
)
from flexsn_hop.loop._arguments import OutputTemplateSpec, ScanCall, StepFunction, check_call, check_zero_states
from flexsn_hop.loop._eager import empty_scan
from flexsn_hop.loop._loop import (
    backward_loop,
    backward_samples,
    backward_shapes,
    forward_loop,
    forward_samples,
    forward_shapes,
)
from flexsn_hop.lowering._inductor import lower
from flexsn_hop.lowering._lowering import requested_lowering
from flexsn_hop.operator._dynamo import offer_to_dynamo
from flexsn_hop.operator._inspect import inspect_step

__all__ = [
    "FlexSNScan",
    "FlexSNScanBackward",
    "flex_sn_scan",
    "flex_sn_scan_backward",
    "flex_sn_scan_final_state",
]


class FlexSNScan(LowersItself, HigherOrderOperator):
    """The scan over time as one operator. ``flex_sn_scan`` is its only instance.

    The operator has the arguments, results and errors of :func:`eager_scan`. A direct call runs the loop of
    :func:`eager_scan`. Under ``torch.compile``, ``make_fx`` and ``torch.export``, a graph contains one node for the
    scan, and one node for its backward. The size of the nodes does not depend on the number of steps. The first
    argument of a node is the graph of the core.

    Args:
        core_fn: The function of one time step, ``core(*inputs, *states, *lifted) -> (*outputs, *new_states)``.
            Tensors that the core captures (in a closure, as parameters, in a ``functools.partial``, or in a bound
            method) become arguments of the node and receive gradients.
        num_inputs: Number of input sequences, at least 1.
        num_states: Number of states.
        num_outputs: Number of outputs of one step.
        *flat_args: ``[*input_seqs, *init_states, *lifted]``. See :func:`eager_scan`.
        output_template_specs: Description of the outputs for ``T == 0``. See :func:`eager_scan`.
        final_state: True to return the last states ``[*step]`` instead of the state sequences, as
            :func:`flex_sn_scan_final_state` does.
        lowering: The form of a compiled scan: ``"auto"``, ``"kernel"``, ``"compiled_loop"``, ``"scan"``,
            ``"while_loop"``, ``"loop"`` or the name of a registered lowering. None selects the value of
            the environment variable ``FLEXSN_HOP_LOWERING``, or ``"auto"`` if the variable is not set.
        zero_states: For each initial state, True if the caller guarantees that the state is zeros, so that
            kernels need not read it. Empty if no initial state is known to be zeros.
        checkpoints, version, remat: Arguments that this package sets in graphs. Do not pass these arguments.

    Returns:
        ``(*output_seqs, *state_seqs)``, or ``(*output_seqs, *final_states)``.

    Raises:
        The errors of :func:`eager_scan`.
        NonzeroStateError: ``zero_states`` is True for a state that is not zeros (a
            ``ValueError``). Only a call that runs the loop checks the values.
        RandomOpError: Under a compiler, the core draws random numbers (a ``NotImplementedError``).
        MutationError: Under a compiler, the core writes to its arguments (a ``RuntimeError``). Dynamo raises its
            own error about a mutation.
        LoweringError: The lowering is unknown or unavailable (a ``ValueError``).

    Restrictions:
        Under a compiler, gradients of gradients are rejected, and the transforms of ``torch.func``
        receive the unrolled loop instead of the node.

    Example:
        >>> import torch
        >>> from flexsn_hop import flex_sn_scan
        >>> def integrate(x, v):
        ...     h = v + x
        ...     spike = (h >= 1).to(h)
        ...     return spike, h - spike
        >>> spikes, v = flex_sn_scan(integrate, 1, 1, 1, torch.full((3, 2), 0.5), torch.zeros(2))
        >>> spikes[:, 0]
        tensor([0., 1., 0.])
    """

    def __init__(self) -> None:
        super().__init__("flex_sn_scan", cacheable=True)  # type: ignore[no-untyped-call]

    @property
    def __name__(self) -> str:
        """The operator's name.

        Dynamo looks up the tracing rule of an operator by this name. Reading the name therefore registers the operator
        with Dynamo. A registration when this module is imported would import all of Dynamo.
        """
        offer_to_dynamo(self._name)
        return str(self._name)

    @__name__.setter
    def __name__(self, name: str) -> None:
        assert name == self._name

    def __reduce__(self) -> tuple[Callable[[], FlexSNScan], tuple[()]]:
        """Makes copies and unpickled objects refer to the only instance."""
        return _the_operator, ()

    def __call__(
        self,
        core_fn: StepFunction,
        num_inputs: int,
        num_states: int,
        num_outputs: int,
        *flat_args: torch.Tensor,
        output_template_specs: Sequence[OutputTemplateSpec] | None = None,
        final_state: bool = False,
        lowering: str | None = None,
        zero_states: Sequence[bool] = (),
        checkpoints: tuple[int, int] = (0, 0),
        version: str = "",
        remat: int = 0,
    ) -> tuple[torch.Tensor, ...]:
        zeros = tuple(zero_states)
        layout = ScanLayout(num_inputs, num_states, num_outputs, final_state, *checkpoints, zero_states=zeros)
        lowered = self.inductor_call([core_fn], [*layout.counts, *flat_args])
        if lowered is not None:
            return lower(lowered.without(3), layout, lowering, len(flat_args))  # type: ignore[return-value]
        call = ScanCall(core_fn, layout, flat_args, output_template_specs)
        check_call(call, captured=isinstance(core_fn, torch.fx.GraphModule))
        name = requested_lowering(lowering)
        if call.steps == 0:
            return empty_scan(call)
        if is_transforming():
            return forward_loop(core_fn, layout, flat_args)
        if not is_tracing(flat_args):
            check_zero_states(call)
            return forward_loop(core_fn, layout, flat_args)
        if not isinstance(core_fn, torch.fx.GraphModule):

            def run(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
                return flex_sn_scan(
                    core_fn,
                    *layout.counts,
                    *args,
                    final_state=final_state,
                    lowering=name,
                    zero_states=zeros,
                    remat=remat,
                )

            return capture_with_dynamo(run, *flat_args)  # type: ignore[no-any-return]
        with outside_of_tracing(flat_args) as fakes:
            samples = forward_samples(layout, fakes)
        inspect_step(core_fn, samples)
        return self.redispatch(
            core_fn,
            *layout.counts,
            *flat_args,
            final_state=final_state,
            lowering=name,
            zero_states=zeros,
            checkpoints=checkpoints,
            version=version,
            remat=remat,
        )

    def redispatch(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """Calls the implementation for the next dispatch key, without repeating the checks of ``__call__``."""
        return super().__call__(*args, **kwargs)  # type: ignore[no-any-return, no-untyped-call]


class FlexSNScanBackward(LowersItself, HigherOrderOperator):
    """The backward of the scan as an operator. Only autograd and compilers call this operator.

    The arguments are the core's graph, the graph of the step's VJP, the numbers of inputs, states and outputs, and the
    arguments that :class:`BackwardLayout` defines.
    """

    def __init__(self) -> None:
        super().__init__("flex_sn_scan_backward", cacheable=True)  # type: ignore[no-untyped-call]

    def __call__(self, core: StepFunction, vjp: StepFunction, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        lowered = self.inductor_call([core, vjp], args)
        if lowered is not None:
            layout, _ = _read_backward_layout((core, vjp, *args), kwargs)
            return lower(lowered.without(3), layout, kwargs["lowering"], layout.num_given)  # type: ignore[return-value]
        return self.redispatch(core, vjp, *args, **kwargs)

    def redispatch(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """Calls the implementation for the next dispatch key."""
        return super().__call__(*args, **kwargs)  # type: ignore[no-any-return, no-untyped-call]


flex_sn_scan = FlexSNScan()


def _the_operator() -> FlexSNScan:
    return flex_sn_scan


def flex_sn_scan_final_state(
    core_fn: StepFunction,
    num_inputs: int,
    num_states: int,
    num_outputs: int,
    *flat_args: torch.Tensor,
    output_template_specs: Sequence[OutputTemplateSpec] | None = None,
    lowering: str | None = None,
    zero_states: Sequence[bool] = (),
) -> tuple[torch.Tensor, ...]:
    """:data:`flex_sn_scan` with the last states as results instead of the state sequences.

    This function calls the same operator with ``final_state=True``. No state sequence is returned, but training may
    save state sequences. Results and errors are those of :func:`eager_scan_final_state`.

    Example:
        >>> import torch
        >>> from flexsn_hop import flex_sn_scan_final_state
        >>> total, last = flex_sn_scan_final_state(
        ...     lambda x, v: (x + v, x + v), 1, 1, 1, torch.ones(4, 2), torch.zeros(2)
        ... )
        >>> last
        tensor([4., 4.])
    """
    return flex_sn_scan(
        core_fn,
        num_inputs,
        num_states,
        num_outputs,
        *flat_args,
        output_template_specs=output_template_specs,
        final_state=True,
        lowering=lowering,
        zero_states=zero_states,
    )


flex_sn_scan_backward = FlexSNScanBackward()


def _read_forward_layout(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[ScanLayout, Sequence[Any]]:
    """Returns the layout and the flat arguments of a call ``flex_sn_scan(core, I, S, O, *flat_args, **kwargs)``."""
    interval, spare = kwargs["checkpoints"]
    layout = ScanLayout(args[1], args[2], args[3], kwargs["final_state"], interval, spare, kwargs["zero_states"])
    return layout, args[4:]


def _read_backward_layout(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[BackwardLayout, Sequence[Any]]:
    """Returns the layout and tensors of a call ``flex_sn_scan_backward(core, vjp, I, S, O, *tensors, **kwargs)``."""
    options = {key: value for key, value in kwargs.items() if key not in ("lowering", "version")}
    final_state, zero_states = options.pop("final_state"), options.pop("zero_states")
    scan = ScanLayout(args[2], args[3], args[4], final_state, zero_states=zero_states)
    return BackwardLayout(scan, **options), args[5:]


def _run_forward(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    return forward_loop(args[0], *_read_forward_layout(args, kwargs))


def _find_forward_shapes(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    return forward_shapes(args[0], *_read_forward_layout(args, kwargs))


def _make_forward_samples(*args: Any, **kwargs: Any) -> list[Sequence[Any]]:
    return [forward_samples(*_read_forward_layout(args, kwargs))]


def _run_backward(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    return backward_loop(args[0], args[1], *_read_backward_layout(args, kwargs))


def _find_backward_shapes(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    layout, tensors = _read_backward_layout(args, kwargs)
    return backward_shapes(args[1], layout, tensors, backward_samples(layout, tensors))


def _make_backward_samples(*args: Any, **kwargs: Any) -> list[Sequence[Any]]:
    layout, tensors = _read_backward_layout(args, kwargs)
    flat_args, *_ = layout.split(tensors)
    return [forward_samples(layout.scan, flat_args), backward_samples(layout, tensors)]


implement(
    flex_sn_scan,
    dense=_run_forward,
    shapes=_find_forward_shapes,
    num_graphs=1,
    samples=_make_forward_samples,
)
implement(
    flex_sn_scan_backward,
    dense=_run_backward,
    shapes=_find_backward_shapes,
    num_graphs=2,
    samples=_make_backward_samples,
)
refuse_autograd(flex_sn_scan_backward)
