"""Reports of `fuse_norms`, `fuse_delays` and `AbsorbingBackend`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FusedNorm:
    """A norm that its neuron computes.

    Attributes:
        norm, layer, neuron: names, as in `named_modules()`: of the norm, of the `OverTime` that it ends, of the neuron.
    """

    norm: str
    layer: str
    neuron: str

    def __str__(self) -> str:
        return f"{self.norm} into {self.neuron}"


@dataclass(frozen=True, slots=True)
class LeftNorm:
    """A norm that stays as it is, and why."""

    norm: str
    reason: str

    def __str__(self) -> str:
        return f"{self.norm}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Fusion:
    """The batch norms of a network: those that neurons compute now, and the others. `print` it.

    Attributes:
        fused: in the order of `named_modules()`, also those that were fused before.
        left: the others.
    """

    fused: tuple[FusedNorm, ...]
    left: tuple[LeftNorm, ...]

    def __str__(self) -> str:
        lines = [f"{len(self.fused)} of {len(self.fused) + len(self.left)} batch norms are computed by neurons"]
        lines += [f"  {one}" for one in self.fused]
        if self.left:
            lines += ["as they were:", *(f"  {one}" for one in self.left)]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class DelayFusion:
    """The delays of a network: those that neurons make now, and the others. `print` it.

    Attributes:
        fused: by the name of a delay, the name of its neuron; also those that were fused before.
        left: by the name of a delay that stays as it is, the reason.
    """

    fused: dict[str, str]
    left: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{len(self.fused)} of {len(self.fused) + len(self.left)} delays are made by neurons"]
        lines += [f"  {delay} into {neuron}" for delay, neuron in self.fused.items()]
        if self.left:
            lines += ["as they were:", *(f"  {delay}: {reason}" for delay, reason in self.left.items())]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Absorbed:
    """Functions in front of one input of a scan that the scan's step computes.

    Attributes:
        scan: the scan's name in the graph.
        producers: functions, with the lines that they come from; the last one gives the input.
    """

    scan: str
    producers: tuple[str, ...]

    def __str__(self) -> str:
        return f"{', '.join(self.producers)} into {self.scan}"


@dataclass(frozen=True, slots=True)
class LeftProducer:
    """A function in front of a scan that its step could compute, and why it does not."""

    producer: str
    reason: str

    def __str__(self) -> str:
        return f"{self.producer}: {self.reason}"
