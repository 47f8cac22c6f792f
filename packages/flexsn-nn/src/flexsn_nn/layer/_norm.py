"""Batch norms that scale the input to the threshold of the next neuron."""

from __future__ import annotations

from typing import Any

from torch import nn

from flexsn_nn._checks import check_number
from flexsn_nn._over_time import OverTime
from flexsn_nn.errors import ParameterError


class _ThresholdDependent(OverTime):
    """Batch norm `y = weight (x - mean) / sqrt(var + eps) + bias`, with statistics over steps and batch.

    The initial `weight` is `alpha v_threshold`.

    Args:
        num_features: number of channels.
        alpha: 1 before a neuron, `1 / sqrt(2)` in each of two branches that are added.
        v_threshold: threshold of the next neuron.
        options: `eps`, `momentum`, `track_running_stats`, same as in PyTorch's batch norm.
    """

    kind: type[Any]

    def __init__(self, num_features: int, alpha: float = 1.0, v_threshold: float = 1.0, **options: Any) -> None:
        check_number("alpha", alpha, above=0)
        check_number("v_threshold", v_threshold, above=0)
        norm = self.kind(num_features, **options)
        if norm.weight is None:
            raise ParameterError(
                "affine=False creates no weight, but tdBN needs one, with the initial value alpha v_threshold."
            )
        super().__init__(norm)
        nn.init.constant_(norm.weight, alpha * v_threshold)


class ThresholdDependentBatchNorm1d(_ThresholdDependent):
    """tdBN for `[T, B, C]` or `[T, B, C, L]`: see `ThresholdDependentBatchNorm2d`."""

    kind = nn.BatchNorm1d


class ThresholdDependentBatchNorm2d(_ThresholdDependent):
    """tdBN for `[T, B, C, H, W]`: batch norm over steps and batch. The initial `weight` is `alpha v_threshold`.

    For any input, the initial output is about as large as the threshold, so some of the neurons fire, but not all. The
    layer is an `OverTime` of PyTorch's own batch norm, which `nn.SyncBatchNorm.convert_sync_batchnorm` can convert.

    Args:
        num_features: number of channels.
        alpha: 1 before a neuron, `1 / sqrt(2)` in each of two branches that are added.
        v_threshold: threshold of the next neuron, above 0.
        options: `eps`, `momentum`, `track_running_stats`, same as in `nn.BatchNorm2d`.

    Source: Zheng et al., "Going deeper with directly-trained larger spiking neural networks", AAAI 2021.
    """

    kind = nn.BatchNorm2d


class ThresholdDependentBatchNorm3d(_ThresholdDependent):
    """tdBN for `[T, B, C, D, H, W]`: see `ThresholdDependentBatchNorm2d`."""

    kind = nn.BatchNorm3d
