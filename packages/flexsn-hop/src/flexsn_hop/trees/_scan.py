"""``scan``: recurrences on trees of tensors, based on the operator ``flex_sn_scan``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from flexsn_hop._torch_private import HigherOrderOperator, capture_with_dynamo, is_tracing, is_transforming
from flexsn_hop.trees._tree_capture import offer_trees_to_dynamo
from flexsn_hop.trees._tree_loop import clock, run_trees
from flexsn_hop.trees._trees import TreeCall, check_tree_call

__all__ = ["scan"]

Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")


def scan(
    step: Callable[[Carry, X], tuple[Carry, Y]],
    init: Carry,
    xs: X | None = None,
    *,
    length: int | None = None,
    reverse: bool = False,
    dim: int = 0,
    remat: int | None = None,
) -> tuple[Carry, Y]:
    """Calls ``step`` once for each time step, and passes the carry on to the next step.

    In eager mode, the scan is a loop with ordinary autograd. Under ``torch.compile``, ``make_fx`` and
    ``torch.export``, the scan is one node of the graph, :data:`flex_sn_scan`, and one node in the graph of the
    backward. The size of these nodes does not depend on the number of steps.

    Args:
        step: The function of one time step, ``step(carry, x) -> (new_carry, y)``. Tensors that ``step`` captures (in a
            closure, as parameters of a module, in a ``functools.partial``, or in a bound method) receive gradients.
        init: The first carry: a tensor, or containers of ``torch.utils._pytree`` that contain tensors and None
            (dict, list, tuple, namedtuple, registered dataclasses).
            A carry keeps its structure, and each tensor keeps its shape, dtype and device.
        xs: The sequences: a tensor, or containers of the kinds listed for ``init``. ``step`` receives their slices
            along ``dim``. If ``xs`` is None or a tree without tensors, ``step`` receives ``xs`` unchanged, ``length``
            times.
        length: The number of steps T, an int or a symbolic size. Required if ``xs`` has no tensor. Otherwise,
            ``length`` must be None or the length of ``xs``. If ``length`` depends on data, compilers need a check that
            ``length`` is not 0: ``torch._check(length >= 1)``.
        reverse: True to go from the last slice to the first slice. The y for the slice at position t is at position t.
        dim: The dimension of time, in all of ``xs`` and in the returned sequences. A negative dimension
            counts from the last dimension of each tensor.
        remat: If ``remat`` is an integer K, only the carry of every K-th step is stored, and the backward recomputes
            the other steps. About ``T / K + K`` carries are then in memory. This number is least for ``K = sqrt(T)``.
            The gradients are bitwise equal to the gradients without ``remat``. If ``remat`` is None, autograd stores
            all tensors that the backward needs.

    Returns:
        ``(carry, ys)``: the last carry, which does not share memory with an argument, and the sequences of y, with
        T elements along ``dim``. A y may have any shape and dtype, which must be the same at every step. A leaf of y
        that is None is None in ``ys``. For ``T == 0``, the carry is a copy of ``init``, and the sequences are empty,
        with the shapes and dtypes that ``step`` returns for fake tensors.

    Raises:
        CoreArityError: ``step`` cannot be called with two positional arguments (a ``ValueError``).
        CoreReturnCountError: ``step`` did not return a pair (a ``ValueError``).
        CarryStructureError: ``step`` returned a carry with a different structure (a ``ValueError``).
        StateChangedError: A tensor of the carry changed its shape, dtype or device in a step (a ``ValueError``).
        OutputChangedError: The structure, a shape, a dtype or a device of y changed between steps (a ``ValueError``).
        SequenceLengthError: The sequences have unequal lengths (a ``ValueError``).
        ScanLengthError: ``length`` is missing, negative, or not the length of ``xs`` (a ``ValueError``).
        ScanDimError: A sequence has no dimension ``dim`` (a ``ValueError``, an ``IndexError``).
        RematError: ``remat`` is below 1, or a transform of torch.func is active (a ``ValueError``).
        NotATensorError: A leaf is neither a tensor nor None (a ``TypeError``).
        EmptyScanError: ``T == 0``, and ``step`` cannot run on fake tensors (a ``ValueError``).

    Under a compiler, the errors of :data:`flex_sn_scan` may also be raised.

    Example:
        >>> import torch
        >>> from flexsn_hop import scan
        >>> def running_mean(carry, x):
        ...     total, count = carry["total"] + x, carry["count"] + 1
        ...     return {"total": total, "count": count}, total / count
        >>> init = {"total": torch.tensor(0.0), "count": torch.tensor(0)}
        >>> carry, means = scan(running_mean, init, torch.tensor([1.0, 3.0, 8.0]))
        >>> means, carry["count"]
        (tensor([1., 2., 4.]), tensor(3))
        >>> scan(lambda power, _: (2 * power, power), torch.tensor(1), length=5)
        (tensor(32), tensor([ 1,  2,  4,  8, 16]))
    """
    return _tree_scan(step, init, xs, length, reverse, dim, remat)


class _TreeScan(HigherOrderOperator):
    """The operator that :func:`scan` calls, so that Dynamo can trace the call. No graph contains this operator."""

    def __init__(self) -> None:
        super().__init__("flexsn_scan")  # type: ignore[no-untyped-call]

    @property
    def __name__(self) -> str:
        """The operator's name. See :attr:`FlexSNScan.__name__`."""
        offer_trees_to_dynamo(self._name)
        return str(self._name)

    @__name__.setter
    def __name__(self, name: str) -> None:
        assert name == self._name

    def __call__(
        self,
        step: Callable[..., Any] | None,
        init: Any,
        xs: Any,
        length: Any,
        reverse: bool,
        dim: int,
        remat: int | None = None,
    ) -> tuple[Any, Any]:
        call = TreeCall.of(step, init, xs, length, reverse, dim, remat)
        check_tree_call(call)
        if is_transforming() or not is_tracing((*call.states, *call.inputs)):
            return run_trees(call)
        return _capture(call)


_tree_scan = _TreeScan()


def _capture(call: TreeCall) -> tuple[Any, Any]:
    """Makes Dynamo capture the call for the active tracer."""
    num_states = len(call.states)
    # The number of steps is passed as the size of a tensor, because a symbolic number cannot be captured.
    ticks = [] if call.inputs else [clock(call.states, call.length)]

    def run(*tensors: torch.Tensor) -> Any:
        inputs = tensors[num_states : num_states + len(call.inputs)]
        length = tensors[-1].shape[0] if ticks else None
        return _tree_scan(
            call.step,
            call.carry.fill(tensors[:num_states]),
            call.x.fill(inputs),
            length,
            call.reverse,
            call.dim,
            call.remat,
        )

    return capture_with_dynamo(run, *call.states, *call.inputs, *ticks)  # type: ignore[no-any-return]
