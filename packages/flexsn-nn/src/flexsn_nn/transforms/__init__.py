"""Changes of a step that can be combined: `Lengths`, `Resets`, and a base class for your own transforms."""

from __future__ import annotations

from flexsn_nn.transforms._lengths import Lengths
from flexsn_nn.transforms._resets import Resets
from flexsn_nn.transforms._transform import Call, Changed, Core, Own, Transform

__all__ = ["Call", "Changed", "Core", "Lengths", "Own", "Resets", "Transform"]
