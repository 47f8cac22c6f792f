"""The first output, also as bits."""

from __future__ import annotations

from flexsn_nn.transforms._transform import Call, Changed, Core, Own, Transform, Values


class SpikesAsBits(Transform):
    """Kernels also write the first output as bits, for `memory.PackedSpikes`."""

    optional = True

    @property
    def bits(self) -> bool:
        """True."""
        return True

    def before(self, call: Call) -> tuple[Values, Transform | None]:
        """In kernels over sequences alone."""
        return call.inputs, self if call.kernels and call.step_mode == "m" else None

    def step(self, core: Core, inputs: Values, states: Values, own: Own) -> Changed:
        """As it is."""
        return Changed(*core(inputs, states))
