"""Runs a scan with gradients as one `autograd.Function`, which adds little overhead to the two kernels.

The custom ops in `compat/_ops.py` do the same for compilers, but their dispatch takes several times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexsn_runtime._saved import saved_of
from flexsn_runtime._torch_private import SingleLevelFunction
from flexsn_runtime.kernels._scan import forward_scan
from flexsn_runtime.kernels._trained import Trained, trained_scan
from flexsn_runtime.native import Again
from flexsn_runtime.operands._operands import Arguments
from flexsn_runtime.step._pointwise_step import Specialization


def scan_pointwise(step: Specialization, arguments: Arguments, *, state_seqs: bool) -> tuple[Tensor, ...]:
    """Runs a scan that is differentiable if necessary.

    Returns `(*output_seqs, *state_seqs, *bits)` or `(*output_seqs, *final_states, *bits)`.
    """
    tensors = arguments.all
    if torch.is_grad_enabled():
        needs_grad = tuple([t is not None and t.requires_grad for t in tensors])
        if True in needs_grad:
            return run_trained(trained_scan(step, arguments, needs_grad, state_seqs=state_seqs), tensors)
    return tuple(forward_scan(step, arguments, state_seqs=state_seqs, training=False).run(tensors))


def run_trained(scan: Trained, tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Runs a prepared scan on `[*inputs, *states, *lifted]`. Returns the results of `scan_pointwise`."""
    return TrainedRun(scan)(tensors)


@dataclass(slots=True)
class TrainedRun:
    """Runs calls of a prepared scan, like `run_trained`.

    Attributes:
        is_native: True if the compiled launcher has executed a call.
    """

    scan: Trained
    is_native: bool = False

    def __call__(self, tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        native = self.scan.native
        if native is not None and not native.watched():
            self.is_native = True
            return tuple(native.run(tensors))
        results: tuple[Tensor, ...] = _Scan.apply(self.scan, *tensors)
        return results

    def watched(self) -> bool:
        """True if a launch hook is set, which the compiled launcher would not call, or if the launcher has no scan."""
        native = self.scan.native
        return native is None or native.watched()

    def again(self, tensors: Sequence[Tensor | None]) -> Again | None:
        """Returns `NativeScan.again(tensors)`; `None` if the launcher has no scan. Requires `is_native`."""
        native = self.scan.native
        return None if native is None else native.again(tensors)


class _Scan(SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, scan: Trained, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        written = scan.run(tensors)
        end = scan.first_kept
        ctx.save_for_backward(*tensors, *written[end:])
        ctx.scan = scan
        ctx.set_materialize_grads(False)
        if scan.fixed:
            ctx.mark_non_differentiable(*[written[i] for i in scan.fixed])
        return tuple(written[:end])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        scan: Trained = ctx.scan
        tensors = (*saved_of(ctx), *grads[: scan.first_bits])
        return None, *scan.gradients(tensors, ctx.needs_input_grad[1:])
