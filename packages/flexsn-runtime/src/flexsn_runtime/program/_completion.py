"""What completes the gradient of a scan's first input, where more flows to it than through the scan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from flexsn_runtime._torch_private import transform_at_work, untraced
from flexsn_runtime.kernels._scan import forward_scan
from flexsn_runtime.launches._by_address import ByAddress
from flexsn_runtime.program._arguments import prepare
from flexsn_runtime.program._program import ScanProgram
from flexsn_runtime.program._repeated import remember, repeated_scan
from flexsn_runtime.recurrent._staged_autograd import scan
from flexsn_runtime.step._pointwise_step import Specialization


class Formula(Protocol):
    """Elementwise in the first two: of a step, or of a sequence `[T, *step]`."""

    def __call__(self, gradient: Tensor, x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """The whole gradient of `x`, of what comes to it, `x`, and other tensors."""


class GradientFormula:
    """A formula of the whole gradient of `x`, and a kernel for it.

    Args:
        formula: by PyTorch's operations, for what kernels refuse.
        program: scans `core(gradient, x)`, the same formula of tensors that it captures.
        stand_ins: what it captures, in the formula's order.
        dim: how many dimensions a step has; `x` may be one.
        has_kernels: whether there are kernels on a device.
    """

    def __init__(
        self,
        formula: Formula,
        program: ScanProgram,
        stand_ins: Sequence[Tensor],
        dim: int,
        has_kernels: Callable[[torch.device], bool],
    ) -> None:
        self._formula, self._program, self._dim, self._has_kernels = formula, program, dim, has_kernels
        self._stand_ins = [id(tensor) for tensor in stand_ins]

    def of(self, gradient: Tensor, x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """The gradient of `x`, `[T, *step]` or `[*step]`; a second one is that of PyTorch's operations."""
        if torch.is_grad_enabled() or not self._suits_kernels(gradient, x):
            return self._formula(gradient, x, tensors)
        program, (given, instead) = self._program, self._operands(gradient, x, tensors)
        results = repeated_scan(program, given, (), instead)
        if results is None:
            step, arguments = prepare(program, given, instead=instead)
            results = scan(step, arguments, state_seqs=False)
            remember(program, given, (), step, arguments, instead=instead)
        (result,) = results
        return result.squeeze(0) if x.dim() == self._dim else result

    def by_address(self, gradient: Tensor, x: Tensor, tensors: Sequence[Tensor]) -> ByAddress | None:
        """How the kernel is launched for tensors like these; `None`: it is not, or not by its address.

        Its places are in `[gradient, x, *tensors, written]`.
        """
        if not self._suits_kernels(gradient, x) or not all(t.is_contiguous() for t in tensors):
            return None
        with untraced(), torch.no_grad():  # nobody's mode has to know
            given, instead = self._operands(gradient, x, tensors)
            step, arguments = prepare(self._program, given, instead=instead)
            captured = step.captured()
            if captured is None or not isinstance(step, Specialization):
                return None
            prepared = forward_scan(step, arguments, state_seqs=False, training=False)
            prepared.run(arguments.all)  # it has an address then
            launch = prepared.by_address()
        if launch is None:
            return None
        places = [0, 1, *(2 + self._stand_ins.index(id(tensor)) for tensor in captured), 2 + len(tensors)]
        (written,) = launch.written
        assert written is not None
        written = written.squeeze(0) if x.dim() == self._dim else written
        return ByAddress(launch.entry, tuple(places[i] for i in launch.places), (written,))

    def _suits_kernels(self, gradient: Tensor, x: Tensor) -> bool:
        if type(gradient) is not Tensor or type(x) is not Tensor or gradient.shape != x.shape or not x.numel():
            return False
        return transform_at_work() is None and self._has_kernels(x.device)

    def _operands(
        self, gradient: Tensor, x: Tensor, tensors: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, Tensor], dict[int, Tensor]]:
        """The inputs of the program, and what it reads instead of what it captures."""
        given = (gradient.unsqueeze(0), x.unsqueeze(0)) if x.dim() == self._dim else (gradient, x)
        return given, {one: t.contiguous() for one, t in zip(self._stand_ins, tensors, strict=True)}


@dataclass(frozen=True, slots=True)
class Completion:
    """A formula, and what it takes in one call: what a step captures, and was computed of `x` without a graph.

    The formula's tensors are `(*others, *constants, *more, *gradients of others)`.

    Attributes:
        others: which of the captured tensors have gradients that it takes.
        constants: which others of the captured tensors it takes.
        more: tensors, the same for all `x` of one layout, if nothing is `reduced`.
        reduced: of the gradients of `others` in this process, those that the formula takes; `None`: the same.
    """

    formula: GradientFormula
    others: tuple[int, ...]
    constants: tuple[int, ...]
    more: tuple[Tensor, ...]
    reduced: Callable[[list[Tensor]], list[Tensor]] | None = None

    def joined(self, x: Tensor, captured: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """`x` and what is captured as they are: results of a node that completes the gradient of `x`."""
        found = list(captured)
        others = [found[i] for i in self.others]
        constants = [*(found[i] for i in self.constants), *self.more]
        x, *others = _Completed.apply(self.formula, self.reduced, len(others), x, *others, *constants)
        for i, other in zip(self.others, others, strict=True):
            found[i] = other
        return x, found


class _Completed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, formula: GradientFormula, reduced: Any, num_others: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.formula, ctx.reduced = formula, reduced
        ctx.set_materialize_grads(False)
        return tensors[: 1 + num_others]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        x, *tensors = ctx.saved_tensors
        gradient, *of_others = gradients
        completed = None
        if ctx.needs_input_grad[3]:
            sums = with_zeros(of_others, tensors)
            if ctx.reduced is not None:
                sums = ctx.reduced(sums)
            gradient = torch.zeros_like(x) if gradient is None else gradient
            completed = ctx.formula.of(gradient, x, [*tensors, *sums])
        return None, None, None, completed, *of_others, *[None] * (len(tensors) - len(of_others))


def with_zeros(gradients: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    """Gradients, and zeros where none flows."""
    return [torch.zeros_like(t) if g is None else g for t, g in zip(like, gradients, strict=False)]
