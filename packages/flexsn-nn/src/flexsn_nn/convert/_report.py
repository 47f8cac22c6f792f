"""Report of a conversion: replaced modules, modules that were not replaced, and new keys of a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Converted:
    """A module that was replaced.

    Attributes:
        name: name as in `named_modules()`. For the whole network, the name of the class.
        before, after: names of the classes, for example `spikingjelly LIFNode` and `LIF`.
        differences: one sentence for each difference in behaviour; empty if there are none.
    """

    name: str
    before: str
    after: str
    differences: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Left:
    """A module of another library that was not replaced.

    Attributes:
        name, kind: name as in `Converted`, and name of the class.
        reason: reason why the module was not replaced, and advice.
    """

    name: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class Moved:
    """New key of a parameter or buffer, and its new shape if the shape has changed."""

    key: str
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """Result of loading a checkpoint.

    Attributes:
        dropped: reasons why the converted network does not use entries of the checkpoint, by key of the entry.
        missing: keys of the network that the checkpoint lacks.
        unexpected: keys of the checkpoint that neither the original nor the converted network has.
    """

    dropped: Mapping[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


@dataclass(frozen=True)
class Conversion:
    """A converted network, and the report of its conversion. `print` shows the report.

    Attributes:
        model: the converted network. It is the argument of `convert`, changed in place, unless the argument itself
            was replaced, for example a single neuron.
        converted: modules that were replaced.
        left: modules that were not replaced, and the reasons.
        moved: new keys and shapes of the tensors of replaced modules, by key of the original state dict.
        dropped: reasons why tensors of replaced modules were removed, by key of the original state dict.
    """

    model: nn.Module
    converted: list[Converted] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    moved: dict[str, Moved] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)

    def map_state_dict(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Converts a state dict of the original network to the keys and shapes of the converted network.

        Keys that do not belong to a replaced module do not change. Keys in `dropped` are left out.
        """
        mapped = {}
        for key, value in state.items():
            if key in self.dropped:
                continue
            place = self.moved.get(key, Moved(key))
            mapped[place.key] = value if place.shape is None else value.reshape(place.shape)
        return mapped

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> Loaded:
        """Loads a checkpoint of the original network into `model`.

        Args:
            state: result of the other library's `state_dict()`.
            strict: True if missing and unexpected keys are errors.

        Returns:
            The dropped, missing and unexpected keys.

        Raises:
            RuntimeError: a tensor has another shape or, with `strict`, keys are missing or unexpected. PyTorch raises
                this error.
        """
        result = self.model.load_state_dict(self.map_state_dict(state), strict=strict)
        dropped = {key: reason for key, reason in self.dropped.items() if key in state}
        return Loaded(dropped, tuple(result.missing_keys), tuple(result.unexpected_keys))

    def __str__(self) -> str:
        lines = [f"{len(self.converted)} converted, {len(self.left)} left unchanged"]
        for item in self.converted:
            lines.append(f"  {item.name}: {item.before} -> {item.after}")
            lines += [f"    differs: {difference}" for difference in item.differences]
        lines += [f"  left {item.name}: {item.kind}: {item.reason}" for item in self.left]
        for key, place in self.moved.items():
            if place != Moved(key):
                shape = "" if place.shape is None else f" as {list(place.shape)}"
                lines.append(f"  moved {key} -> {place.key}{shape}")
        lines += [f"  dropped {key}: {reason}" for key, reason in self.dropped.items()]
        return "\n".join(lines)
