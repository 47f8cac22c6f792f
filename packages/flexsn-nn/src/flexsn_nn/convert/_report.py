"""Reports of a conversion: what it did, what it left, and where each tensor of a checkpoint went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Converted:
    """A module that was replaced.

    Attributes:
        name: as in `named_modules()`; the class's name if it is the whole network.
        before, after: classes, `spikingjelly LIFNode` and `LIF`, say.
        differences: what it does otherwise than before, each a sentence; empty: nothing.
    """

    name: str
    before: str
    after: str
    differences: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Left:
    """A module of another library that stayed as it was.

    Attributes:
        name, kind: as in `Converted`.
        reason: why, and what to do about it.
    """

    name: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class Moved:
    """The new place of a parameter or buffer: its key, and its shape if that is another one."""

    key: str
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """Result of loading a checkpoint.

    Attributes:
        dropped: by key of the checkpoint, why the converted network has no use for it.
        missing: keys that the network has and the checkpoint has not.
        unexpected: keys that neither the network before nor after has.
    """

    dropped: Mapping[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


@dataclass(frozen=True)
class Conversion:
    """A converted network, and the report; `print` it.

    Attributes:
        model: the network: the one given, changed in place, unless it was itself one neuron.
        converted: what was replaced.
        left: what was not, and why.
        moved: state-dict keys of replaced modules: where they are now.
        dropped: state-dict keys of replaced modules that were removed, and why.
    """

    model: nn.Module
    converted: list[Converted] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    moved: dict[str, Moved] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)

    def map_state_dict(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state dict of the network before, with the keys and shapes of the converted one.

        Keys that were not of a replaced module stay as they are; those of `dropped` are left out.
        """
        mapped = {}
        for key, value in state.items():
            if key in self.dropped:
                continue
            place = self.moved.get(key, Moved(key))
            mapped[place.key] = value if place.shape is None else value.reshape(place.shape)
        return mapped

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> Loaded:
        """Loads a checkpoint of the network before into `model`.

        Args:
            state: from the other library's `state_dict()`.
            strict: whether missing and unexpected keys are an error.

        Returns:
            What was dropped, missing and unexpected.

        Raises:
            RuntimeError: a tensor of another shape, or, if `strict`, missing or unexpected keys; nothing says more
                than PyTorch's own message.
        """
        result = self.model.load_state_dict(self.map_state_dict(state), strict=strict)
        dropped = {key: why for key, why in self.dropped.items() if key in state}
        return Loaded(dropped, tuple(result.missing_keys), tuple(result.unexpected_keys))

    def __str__(self) -> str:
        lines = [f"{len(self.converted)} converted, {len(self.left)} left as they were"]
        for item in self.converted:
            lines.append(f"  {item.name}: {item.before} -> {item.after}")
            lines += [f"    differs: {difference}" for difference in item.differences]
        lines += [f"  left {item.name}: {item.kind}: {item.reason}" for item in self.left]
        for key, place in self.moved.items():
            if place != Moved(key):
                shape = "" if place.shape is None else f" as {list(place.shape)}"
                lines.append(f"  moved {key} -> {place.key}{shape}")
        lines += [f"  dropped {key}: {why}" for key, why in self.dropped.items()]
        return "\n".join(lines)
