"""Options of a neuron's call other than its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from torch import Tensor

from flexsn_nn._affine import Producer
from flexsn_nn.transforms._transform import Transform


class StepChanges(TypedDict, total=False):
    """Changes of the step in one call; see `FlexSN.forward` for the meaning of each change."""

    lengths: Tensor | None
    resets: Tensor | None
    transforms: Sequence[Transform]


class CallOptions(StepChanges, total=False):
    """All options of one call; see `FlexSN.forward` for the meaning of each option."""

    affine: Producer | None
