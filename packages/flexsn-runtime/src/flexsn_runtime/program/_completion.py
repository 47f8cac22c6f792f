"""Completes the gradient of a scan's first input, where more flows to it than through the scan."""

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
    """A function, elementwise in the first two arguments, which are a step or a sequence `[T, *step]`."""

    def __call__(self, gradient: Tensor, x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """The whole gradient of `x`, of what comes to it, `x`, and other tensors."""


class GradientFormula:
    """A `Formula` with a kernel that computes it.

    Args:
        formula: by PyTorch's operations, for what kernels refuse.
        program: scans `core(gradient, x)`, the same formula of tensors that it captures.
        instead: of the formula's tensors, `instead` of `prepare`, in their order.
        dim: how many dimensions a step has; `x` may be one.
        has_kernels: whether there are kernels on a device.
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
        """The gradient of `x`, `[T, *step]` or `[*step]`; a second one is that of PyTorch's operations."""
        if torch.is_grad_enabled() or not self._suits_kernels(gradient, x):
            return self._formula(gradient, x, tensors)
        (result,) = scan_again(self._program, self._inputs(gradient, x), (), self._instead(tensors))
        return result.squeeze(0) if x.dim() == self._dim else result

    def _suits_kernels(self, gradient: Tensor, x: Tensor) -> bool:
        if type(gradient) is not Tensor or type(x) is not Tensor or gradient.shape != x.shape or not x.numel():
            return False
        return transform_at_work() is None and self._has_kernels(x.device)

    def _inputs(self, gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The program's inputs, which are sequences."""
        return (gradient.unsqueeze(0), x.unsqueeze(0)) if x.dim() == self._dim else (gradient, x)


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """The gradient of a scan's first input besides what flows to it through the scan, in one call.

    Something was computed of `x` without a graph, and the step captures it. Of a norm in front of a neuron, the step
    captures mean, variance, weight and bias. The gradient through the statistics needs these, the number of values, and
    the gradients of weight and bias: `constants` are mean and variance, `others` weight and bias, `more` the number.

    Attributes:
        formula: takes `(*others, *constants, *more, *gradients of others)`.
        others: which captured tensors have gradients that it takes, by their order in `instead` of `prepare`.
        constants: which other captured tensors it takes.
        more: tensors that are the same for all `x` of one layout.
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
        """`x` and what is captured as they are: results of a node of its own, which completes the gradient of `x`.

        Args:
            reduced: of the gradients of `others` in this process, those that the formula takes; `None`: the same.
        """
        found = list(captured)
        others, constants = [found[i] for i in self.others], [found[i] for i in self.constants]
        x, *others = _Joined.apply(self.formula, reduced, len(others), x, *others, *constants, *self.more)
        for i, other in zip(self.others, others, strict=True):
            found[i] = other
        return x, found


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
        completed = completed_gradient(ctx.formula, gradient, x, tensors, of_others, ctx.reduced) if needs_x else None
        return None, None, None, completed, *of_others, *[None] * (len(tensors) - len(of_others))


def completed_gradient(
    formula: GradientFormula,
    gradient: Tensor | None,
    x: Tensor,
    tensors: Sequence[Tensor],
    of_others: Sequence[Tensor | None],
    reduced: Callable[[list[Tensor]], list[Tensor]] | None = None,
) -> Tensor:
    """The whole gradient of `x`.

    Args:
        gradient, of_others: of `x` through the scan, and of others; `None`: none flows.
        tensors: `(*others, *constants, *more)`.
        reduced: as for `Completion.joined`.
    """
    others = tensors[: len(of_others)]
    sums = [torch.zeros_like(t) if g is None else g for t, g in zip(others, of_others, strict=True)]
    if reduced is not None:
        sums = reduced(sums)
    return formula.of(torch.zeros_like(x) if gradient is None else gradient, x, [*tensors, *sums])
