"""Reports of `fuse_norms`, `fuse_delays` and `AbsorbingBackend`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FusedNorm:
    """A norm that a neuron computes.

    Attributes:
        norm, layer, neuron: names of the norm, its `OverTime` and the neuron, same as in `named_modules()`.
    """

    norm: str
    layer: str
    neuron: str

    def __str__(self) -> str:
        return f"{self.norm} into {self.neuron}"


@dataclass(frozen=True, slots=True)
class LeftNorm:
    """A norm that was not fused, and the reason."""

    norm: str
    reason: str

    def __str__(self) -> str:
        return f"{self.norm}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Fusion:
    """Batch norms of a network that neurons compute, and batch norms that were not fused. `print` shows the report.

    Attributes:
        fused: fused norms in the order of `named_modules()`, including norms that were fused before.
        left: norms that were not fused.
    """

    fused: tuple[FusedNorm, ...]
    left: tuple[LeftNorm, ...]

    def __str__(self) -> str:
        lines = [f"{len(self.fused)} of {len(self.fused) + len(self.left)} batch norms are computed by neurons"]
        lines += [f"  {norm}" for norm in self.fused]
        if self.left:
            lines += ["unchanged:", *(f"  {norm}" for norm in self.left)]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class DelayFusion:
    """Delays of a network that neurons compute, and delays that were not fused. `print` shows the report.

    Attributes:
        fused: names of the neurons, by name of the delay. Includes delays that were fused before.
        left: reasons why delays were not fused, by name of the delay.
    """

    fused: dict[str, str]
    left: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{len(self.fused)} of {len(self.fused) + len(self.left)} delays are computed by neurons"]
        lines += [f"  {delay} into {neuron}" for delay, neuron in self.fused.items()]
        if self.left:
            lines += ["unchanged:", *(f"  {delay}: {reason}" for delay, reason in self.left.items())]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Absorbed:
    """Functions that a scan's step computes to produce one of the scan's inputs.

    Attributes:
        scan: name of the scan in the graph.
        producers: functions, with the lines of code where they are called. The last function produces the input.
    """

    scan: str
    producers: tuple[str, ...]

    def __str__(self) -> str:
        return f"{', '.join(self.producers)} into {self.scan}"


@dataclass(frozen=True, slots=True)
class LeftProducer:
    """A function that produces a scan's input, and the reason why the scan's step does not compute this function."""

    producer: str
    reason: str

    def __str__(self) -> str:
        return f"{self.producer}: {self.reason}"
