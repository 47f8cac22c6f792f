"""Writes spikes as bits, in addition to the first output."""

from __future__ import annotations

from flexsn_nn.transforms._transform import Call, Changed, Core, Own, Transform, Values


class SpikesAsBits(Transform):
    """Makes kernels also write the first output as bits, for `memory.PackedSpikes`."""

    optional = True

    @property
    def bits(self) -> bool:
        """True, so that kernels write the bits."""
        return True

    def before(self, call: Call) -> tuple[Values, Transform | None]:
        """Applies the transform if kernels run over a sequence."""
        return call.inputs, self if call.kernels and call.step_mode == "m" else None

    def step(self, core: Core, inputs: Values, states: Values, own: Own) -> Changed:
        """Runs the unchanged step."""
        return Changed(*core(inputs, states))
