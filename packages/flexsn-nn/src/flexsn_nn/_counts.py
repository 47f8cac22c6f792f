"""Spike counts: added up by the step itself, so that nobody reads the spikes again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Counting:
    """`core` with one more state behind its own: the sum of its first output over time, `[*step]`.

    Compiled kernels keep it in a register, and write it once. Its gradient is one of a final state: added to that of
    the output at every step, and no sequence.

    Args:
        core: the step.
    """

    def __init__(self, core: Callable[..., Any]) -> None:
        self.core = core
        self.__name__: str = getattr(core, "__name__", type(core).__name__)

    def __call__(self, *values: Tensor) -> tuple[Tensor, ...]:
        *given, count = values
        results = self.core(*given)
        every = (results,) if isinstance(results, Tensor) else tuple(results)
        return (*every, count + every[0].to(count.dtype))


def count_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which outputs of a dtype are summed: float32, or a wider one."""
    return torch.promote_types(dtype, torch.float32)


def from_zero(states: Sequence[Tensor], like: Tensor) -> list[Tensor]:
    """Initial states, and a count of nothing behind them.

    Args:
        like: an input.
    """
    zero = like.new_zeros((), dtype=count_dtype(like.dtype))
    return [*states, zero.expand(states[0].shape)]


def per_channel(values: Tensor, *, lead: int) -> Tensor:
    """The sum over all but channels, `[C]`: the second dimension of a step, or the only one.

    Args:
        values: `[*step]` behind `lead` dimensions.
    """
    step = values.dim() - lead
    channel = lead + min(1, step - 1)
    dims = [d for d in range(values.dim()) if step == 0 or d != channel]
    return values.sum(dims, dtype=count_dtype(values.dtype)) if dims else values.to(count_dtype(values.dtype))
