"""Spikes as bits, which a neuron's kernel writes together with the spikes inside of `memory.PackedSpikes`."""

from __future__ import annotations

from torch import Tensor


class SpikeBits:
    """Bits of one neuron's first output, or the reason why kernels do not write them.

    Copies and pickles begin empty.

    Attributes:
        asked: number of active `PackedSpikes` that use the bits.
    """

    def __init__(self) -> None:
        self.asked = 0
        self._refused: tuple[object, str] | None = None
        self._written: tuple[Tensor, int, Tensor] | None = None

    def __reduce__(self) -> tuple[type[SpikeBits], tuple[()]]:
        return SpikeBits, ()

    def refuse(self, core: object, why: str) -> None:
        """Records the reason why kernels of `core` cannot write bits."""
        self._refused = core, why

    def why_refused(self, core: object) -> str | None:
        """Returns the reason why kernels of `core` do not write bits; `None` if there is none."""
        return self._refused[1] if self._refused is not None and self._refused[0] is core else None

    def note(self, output: Tensor, bits: Tensor) -> None:
        """Stores the bits of `output` until `take` or the next call, if each step has a row of bits."""
        if bits.shape[0] == output.shape[0]:
            self._written = output, output._version, bits

    def take(self, output: Tensor) -> Tensor | None:
        """Returns the bits of `output` if `output` has not changed since they were written, and drops them."""
        written, self._written = self._written, None
        if written is None or written[0] is not output or written[1] != output._version:
            return None
        return written[2]

    def forget(self) -> None:
        """Drops stored bits."""
        self._written = None
