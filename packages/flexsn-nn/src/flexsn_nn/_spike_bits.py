"""Spikes as bits, which a neuron's kernel writes with the spikes inside of `memory.PackedSpikes`."""

from __future__ import annotations

from torch import Tensor


class SpikeBits:
    """Bits of one neuron's first output; or the reason why kernels do not write them.

    Copies and pickles are as new.

    Attributes:
        asked: number of active `PackedSpikes` that use them.
    """

    def __init__(self) -> None:
        self.asked = 0
        self._refused: tuple[object, str] | None = None
        self._written: tuple[Tensor, int, Tensor] | None = None

    def __reduce__(self) -> tuple[type[SpikeBits], tuple[()]]:
        return SpikeBits, ()

    def refuse(self, core: object, why: str) -> None:
        """Notes that kernels of `core` cannot write any."""
        self._refused = core, why

    def why_refused(self, core: object) -> str | None:
        """Why kernels of `core` do not write any."""
        return self._refused[1] if self._refused is not None and self._refused[0] is core else None

    def note(self, output: Tensor, bits: Tensor) -> None:
        """Keeps the bits of `output` until `take` or the next call; does nothing unless each step has a row of bits."""
        if bits.shape[0] == output.shape[0]:
            self._written = output, output._version, bits

    def take(self, output: Tensor) -> Tensor | None:
        """Returns the bits of `output`, if they were written for it and it is unchanged; and forgets them."""
        written, self._written = self._written, None
        if written is None or written[0] is not output or written[1] != output._version:
            return None
        return written[2]

    def forget(self) -> None:
        """Drops bits that were not taken."""
        self._written = None
