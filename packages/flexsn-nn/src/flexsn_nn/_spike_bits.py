"""Spikes as bits. Inside of `memory.PackedSpikes`, the kernel of a neuron writes the spikes and their bits."""

from __future__ import annotations

from torch import Tensor


class SpikeBits:
    """Bits of one neuron's first output, or the reason why kernels cannot write them.

    Copies and pickles contain no bits and no reason.

    Attributes:
        num_users: number of active `PackedSpikes` that use the bits.
    """

    def __init__(self) -> None:
        self.num_users = 0
        self._refused: tuple[object, str] | None = None
        self._written: tuple[Tensor, int, Tensor] | None = None

    def __reduce__(self) -> tuple[type[SpikeBits], tuple[()]]:
        return SpikeBits, ()

    def refuse(self, core: object, reason: str) -> None:
        """Records the reason why kernels of `core` cannot write bits."""
        self._refused = core, reason

    def why_refused(self, core: object) -> str | None:
        """Returns the reason why kernels of `core` cannot write bits; `None` if no reason is recorded."""
        return self._refused[1] if self._refused is not None and self._refused[0] is core else None

    def note(self, output: Tensor, bits: Tensor) -> None:
        """Stores the bits of `output` until `take` or the next call, if `bits` has a row for each step."""
        if bits.shape[0] == output.shape[0]:
            self._written = output, output._version, bits

    def take(self, output: Tensor) -> Tensor | None:
        """Returns the bits of `output`, and drops the stored bits.

        Returns `None` if no bits of `output` are stored, or if `output` has changed since the bits were written.
        """
        written, self._written = self._written, None
        if written is None or written[0] is not output or written[1] != output._version:
            return None
        return written[2]

    def forget(self) -> None:
        """Drops stored bits."""
        self._written = None
