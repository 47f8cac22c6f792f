"""Completes the gradient of a scan's first input. A part of this gradient does not flow through the scan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from flexsn_runtime._saved import saved_of
from flexsn_runtime._torch_private import transform_at_work
from flexsn_runtime.program._program import ScanProgram
from flexsn_runtime.program._repeated import scan_again


class Formula(Protocol):
    """A function that is elementwise in its first two arguments. Both are `[*step]` or `[T, *step]`."""

    def __call__(self, gradient: Tensor, x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """Computes the whole gradient of `x`, of which `gradient` is the part that flows through the scan."""


class GradientFormula:
    """A `Formula`, and a kernel that computes it.

    Args:
        formula: the formula as PyTorch operations, for arguments that kernels do not accept.
        program: program whose core, `core(gradient, x)`, computes the same formula and captures the other tensors.
        instead: function that maps the formula's tensors, in order, to the argument `instead` of `prepare`.
        dim: number of dimensions of a step. It distinguishes a step from a sequence.
        has_kernels: predicate that is True for a device with kernels.
    """

    def __init__(
        self,
        formula: Formula,
        program: ScanProgram,
        instead: Callable[[Sequence[Tensor]], Mapping[int, Tensor]],
        dim: int,
        has_kernels: Callable[[torch.device], bool],
    ) -> None:
        self._formula, self._program, self._instead = formula, program, instead
        self._dim, self._has_kernels = dim, has_kernels

    def of(self, gradient: Tensor, x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """Computes the whole gradient of `x`, which is `[T, *step]` or `[*step]`.

        In grad mode, PyTorch's operations compute this gradient, so that it is differentiable. They also compute it for
        arguments that kernels do not accept.
        """
        if torch.is_grad_enabled() or not self._can_use_kernels(gradient, x):
            return self._formula(gradient, x, tensors)
        (result,) = scan_again(self._program, self._to_sequences(gradient, x), (), self._instead(tensors))
        return result.squeeze(0) if x.dim() == self._dim else result

    def _can_use_kernels(self, gradient: Tensor, x: Tensor) -> bool:
        if type(gradient) is not Tensor or type(x) is not Tensor or gradient.shape != x.shape or not x.numel():
            return False
        return transform_at_work() is None and self._has_kernels(x.device)

    def _to_sequences(self, gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the program's inputs, as sequences."""
        return (gradient.unsqueeze(0), x.unsqueeze(0)) if x.dim() == self._dim else (gradient, x)


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """The part of the gradient of a scan's first input that does not flow through the scan, in one call.

    This part exists if a value was computed from `x` without a graph, and the step captures this value. For example,
    with a norm before a neuron, the step captures mean, variance, weight and bias. The gradient through the statistics
    depends on these tensors, the number of values, and the gradients of weight and bias. In this example, `constants`
    are mean and variance, `others` are weight and bias, and `more` is the number of values.

    Attributes:
        formula: formula that takes `(*others, *constants, *more, *gradients of others)`.
        others: positions, in the argument `instead` of `prepare`, of the captured tensors whose gradients the formula
            takes.
        constants: positions of the other captured tensors that the formula takes.
        more: further tensors that the formula takes. They are equal for all `x` of one layout.
    """

    formula: GradientFormula
    others: tuple[int, ...]
    constants: tuple[int, ...]
    more: tuple[Tensor, ...]

    def joined(
        self,
        x: Tensor,
        captured: Sequence[Tensor],
        reduced: Callable[[list[Tensor]], list[Tensor]] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Passes `x` and `others` through an autograd node that completes the gradient of `x`.

        Returns the new `x`, and `captured` with the new `others`.

        Args:
            reduced: function that maps the gradients of `others` in this process to the gradients that the formula
                takes; `None` if the formula takes the gradients of this process.
        """
        tensors = list(captured)
        others, constants = [tensors[i] for i in self.others], [tensors[i] for i in self.constants]
        x, *others = _Joined.apply(self.formula, reduced, len(others), x, *others, *constants, *self.more)
        for i, other in zip(self.others, others, strict=True):
            tensors[i] = other
        return x, tensors


class _Joined(torch.autograd.Function):
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
        x, *tensors = saved_of(ctx)
        gradient, *of_others = gradients
        _, _, _, needs_x, *_ = ctx.needs_input_grad
        whole_gradient = (
            completed_gradient(ctx.formula, gradient, x, tensors, of_others, ctx.reduced) if needs_x else None
        )
        return None, None, None, whole_gradient, *of_others, *[None] * (len(tensors) - len(of_others))


def completed_gradient(
    formula: GradientFormula,
    gradient: Tensor | None,
    x: Tensor,
    tensors: Sequence[Tensor],
    of_others: Sequence[Tensor | None],
    reduced: Callable[[list[Tensor]], list[Tensor]] | None = None,
) -> Tensor:
    """Computes the whole gradient of `x`.

    Args:
        gradient, of_others: gradient of `x` through the scan, and gradients of `others`; `None` for each gradient that
            is zero.
        tensors: `(*others, *constants, *more)`.
        reduced: same as for `Completion.joined`.
    """
    others = tensors[: len(of_others)]
    sums = [torch.zeros_like(t) if g is None else g for t, g in zip(others, of_others, strict=True)]
    if reduced is not None:
        sums = reduced(sums)
    return formula.of(torch.zeros_like(x) if gradient is None else gradient, x, [*tensors, *sums])
