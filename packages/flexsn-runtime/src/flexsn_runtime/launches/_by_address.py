"""A launch with what it allocates, as the compiled launcher takes it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexsn_runtime.launches._entry import Entry
from flexsn_runtime.launches._large_memory import is_large
from flexsn_runtime.launches._launches import Launch


class ByAddress(NamedTuple):
    """A launch of a kernel by its address.

    Attributes:
        entry: the kernel.
        places: where the tensors that it takes are, in `[*given, *written]`.
        written: tensors like those that are allocated for a call, without memory; `None`: none.
    """

    entry: Entry
    places: tuple[int, ...]
    written: tuple[Tensor | None, ...]

    @classmethod
    def of(
        cls, launch: Launch, places: Sequence[int], written: Sequence[Tensor | None], device: torch.device
    ) -> ByAddress | None:
        """`None`: it cannot be launched so, or what it writes lies in memory of ours."""
        entry = launch.entry()
        if entry is None:
            return None
        if device.type == "cpu" and any(is_large(t.shape, t.stride(), t.dtype) for t in written if t is not None):
            return None
        return cls(entry, tuple(places), tuple(written))

    def without(self, gone: Collection[int], num_given: int) -> ByAddress:
        """The launch in calls that lack some tensors, which the kernel does not take.

        Args:
            gone: the places of these in `[*given, *written]`.
            num_given: number of tensors given, these included.
        """
        places = [place - sum(other < place for other in gone) for place in self.places]
        written = [t for i, t in enumerate(self.written, num_given) if i not in gone]
        return ByAddress(self.entry, tuple(places), tuple(written))
