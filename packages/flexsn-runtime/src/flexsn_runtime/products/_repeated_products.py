"""The products of one layer. Once the compiled launcher is loaded, they run without Python."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexsn_runtime._torch_private import has_saved_tensors_hooks, is_batched, transform_at_work, untraced
from flexsn_runtime.calls._recorded import recorded
from flexsn_runtime.native import Again, NativeScan, can_be_native, compiled_launcher, may_launch
from flexsn_runtime.products._kernels import is_aligned
from flexsn_runtime.products._linear import (
    LATE,
    Linked,
    Links,
    Operands,
    arrives_in_one_form,
    backward_kind,
    flowing,
    linked_linear,
    links_of,
    plan_of,
)
from flexsn_runtime.products._plans import OPERANDS, SAVED, Forward, backward_plan

# Number of calls between two checks whether the compiled launcher is loaded. Each check reads environment variables.
_CHECK_INTERVAL = 64
# Maximum number of layouts for which the calls of a layer are stored.
_MOST = 8


class _StoredCall(NamedTuple):
    """Calls of one layout.

    Attributes:
        options: the numbers of parts, a flag that is True if links are requested, and the scale.
        sums: True if there is a link for the sum of gradients.
    """

    options: tuple[tuple[int, int], bool, float]
    native: NativeScan
    again: Again
    forward: Forward
    sums: bool


class RepeatedProducts:
    """Runs `linked_linear` for one layer."""

    def __init__(self) -> None:
        self._calls: tuple[_StoredCall, ...] = ()
        self._count = 0

    def __reduce__(self) -> tuple[type[RepeatedProducts], tuple[()]]:
        return RepeatedProducts, ()  # copies and pickles have no stored calls

    def run(
        self,
        s: Tensor,
        written: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        parts: tuple[int, int],
        *,
        links: bool,
        scale: float = 1.0,
    ) -> Linked:
        """Computes `linked_linear`."""
        operands, options = (s, written, weight, bias), (parts, links, scale)
        if self._calls and not has_saved_tensors_hooks():
            for call in self._calls:
                if (
                    call.options == options
                    and not call.native.watched()
                    and (results := call.again(operands)) is not None
                ):
                    return _make_linked(call, results)
        product = linked_linear(s, written, weight, bias, parts, links=links, scale=scale)
        self._count += 1
        # If the layout changes in most calls, only some of the calls are handed over to the launcher.
        is_due = 0 < len(self._calls) < _MOST or self._count % _CHECK_INTERVAL == 1
        if is_due and may_launch(s.device):
            self._hand_over(operands, options)
        return product

    def _hand_over(self, operands: Operands, options: tuple[tuple[int, int], bool, float]) -> None:
        """Passes calls like this one to the compiled launcher, if the launcher is loaded and can execute them."""
        s, _written, weight, _bias = operands
        module = compiled_launcher(s.device, self._count)
        if module is None or s.numel() == 0 or weight.shape[0] == 0 or has_saved_tensors_hooks():
            return
        if any(t is not None and not t.is_contiguous() for t in operands):
            return
        parts, links, scale = options
        needs = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in operands]
        count = links_of(s, weight, parts, links)
        with untraced():  # hides this work from all dispatch modes
            sums = count > 0 and needs[3]
            forward = plan_of(operands, parts[0], links=count, sums=sums, scale=scale)
            saved: list[int | None] = [None] * SAVED
            if any(needs):
                spikes, pieces = forward.spikes if needs[2] else None, forward.pieces if needs[0] else None
                saved = [0, spikes, 2, pieces, forward.seen]
            _, recording = recorded(forward.plan.run, operands, range(1, forward.results))
            if isinstance(recording, str) or not can_be_native(recording):
                return
            owner = _Owner(parts, scale)
            num_returned = forward.results + (forward.seen is not None)
            native = NativeScan(
                module,
                lambda _: owner,
                recording,
                first_bits=forward.results,
                first_kept=num_returned,
                fixed=range(forward.results, num_returned),
                saved=saved,
                links=forward.results > 1,
            )
        owner.native = weakref.ref(native)
        self._calls = (_StoredCall(options, native, native.again(operands), forward, sums), *self._calls[: _MOST - 1])


def _make_linked(call: _StoredCall, results: list[Tensor]) -> Linked:
    forward = call.forward
    y = results[0]
    record = None if forward.seen is None else results[forward.results]
    if forward.results == 1 or not y.requires_grad:
        return Linked(y, record, None)
    end = forward.results - call.sums
    return Linked(y, record, Links(tuple(results[1:end]), results[end] if call.sums else None))


class _Owner:
    """Computes gradients that the compiled launcher cannot compute, and registers backwards with the launcher.

    Args:
        parts, scale: same as for `linked_linear`.
    """

    def __init__(self, parts: tuple[int, int], scale: float) -> None:
        self._parts, self._scale = parts, scale
        self.native: weakref.ref[NativeScan] | None = None

    def reads_hold(self) -> bool:
        return True

    def gradients(self, tensors: Sequence[Tensor | None], needs_grad: Sequence[bool]) -> Sequence[Tensor | None]:
        saved, grads = tensors[:SAVED], tensors[SAVED:]
        of_operands = needs_grad[0], needs_grad[2], needs_grad[3]
        gradients_of_operands = flowing(saved, grads, self._parts, self._scale, of_operands)
        if not torch.is_grad_enabled() and transform_at_work() is None:
            self._register(tensors, needs_grad, of_operands)
        return gradients_of_operands

    def refuse_hooks(self) -> None:
        raise RuntimeError(LATE)

    def _register(
        self, tensors: Sequence[Tensor | None], needs_grad: Sequence[bool], of_operands: tuple[bool, bool, bool]
    ) -> None:
        native = None if self.native is None else self.native()
        saved, grads = tensors[:SAVED], tensors[SAVED:]
        present_grads = [grad for grad in grads if grad is not None]
        if native is None or not present_grads or any(map(is_batched, present_grads)):
            return
        if any(t is not None and not t.is_contiguous() for t in tensors) or not all(map(is_aligned, present_grads)):
            return
        parts = grads[1 : 1 + self._parts[1]]
        if parts and not arrives_in_one_form(grads[0], parts):
            return
        with untraced():
            kind = backward_kind(saved, grads, self._parts, self._scale, of_operands)
            plan = backward_plan(kind)
            _, recording = recorded(lambda arguments: plan.run(arguments)[:OPERANDS], tensors)
            native.follow(tensors, needs_grad, recording, reads=False)
