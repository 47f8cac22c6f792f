"""A scan that the compiled launcher runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flexsn_runtime.launches._by_address import ByAddress
from flexsn_runtime.launches._sum import PlainSum


class NativeScan:
    """A scan with gradients, as `kernels._trained.TrainedScan` has it prepared.

    Args:
        module: the compiled launcher.
        owner: has `reads_hold()`, which a backward asks first, and `gradients(tensors, needed)`, which one that is not
            like the one that was told calls, with what that was told with. It is not kept alive.
        there: which tensors of a call are; the others are states that begin with zeros.
        launch: of the forward. It writes `first_kept` results, the last ones from `first_bits` on bits, and then what
            is for the backward.
        fixed: the results that no gradient flows through.
    """

    def __init__(
        self,
        module: ModuleType,
        owner: Any,
        there: Sequence[bool],
        launch: ByAddress,
        *,
        first_bits: int,
        first_kept: int,
        fixed: Sequence[int],
    ) -> None:
        self._module = module
        self._absent = [i for i, one in enumerate(there) if not one]
        self.watched: Callable[[], bool] = launch.entry.watched
        """Whether launches are to be told to somebody whom this would not tell."""
        launch = launch.without(self._absent, len(there))
        self._scan = module.Scan(
            weakref.ref(owner),
            list(there),
            list(launch.written),
            _kernel(module, launch),
            first_bits,
            first_kept,
            list(fixed),
        )

    def run(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """The results of a call, joined to autograd.

        Args:
            tensors: `[*inputs, *states, *lifted]`, of the layout that was prepared.
        """
        results: list[Tensor] = self._scan.run(tensors)
        return results

    def follow(
        self,
        given: Sequence[Tensor | None],
        needed: Sequence[bool],
        launch: ByAddress,
        copies: Mapping[int, Tensor],
        sums: Mapping[int, PlainSum],
    ) -> None:
        """Tells a backward, which is launched from now on wherever what comes has the layout of this.

        Args:
            given: what `TrainedScan.gradients` takes.
            needed: the same.
            launch: writes a gradient for each tensor that is needed.
            copies: by place in `given`, what is like the copy that the kernel gets.
            sums: what becomes of some of them then, by tensor.
        """
        absent = self._absent
        launch = launch.without([*absent, *(len(given) + i for i in absent)], len(given))
        self._scan.follow(
            [t for i, t in enumerate(given) if i not in absent],
            [need for i, need in enumerate(needed) if i not in absent],
            list(launch.written),
            _kernel(self._module, launch),
            [(place - sum(i < place for i in absent), like) for place, like in copies.items()],
            [_sum(self._module, sums.get(i)) for i in range(len(needed)) if i not in absent],
        )


def _sum(module: ModuleType, plain: PlainSum | None) -> Any:
    return None if plain is None else module.Sum(list(plain.sum.steps), plain.shape, torch.empty(0, dtype=plain.dtype))


def _kernel(module: ModuleType, launch: ByAddress) -> Any:
    entry = launch.entry
    return module.Kernel(
        entry.address,
        list(launch.places),
        list(entry.numbers),
        entry.programs,
        entry.threads,
        entry.shared,
        entry.kept,
    )
