"""A batch norm and a neuron as one layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from torch import Tensor, nn

from flexsn_nn._batch_affine import BatchNorm, Normalisation, is_batch_norm
from flexsn_nn._flexsn import FlexSN
from flexsn_nn._leaf import Leaf
from flexsn_nn._over_time import OverTime
from flexsn_nn.errors import ParameterError
from flexsn_nn.flexsn._options import StepChanges


class NormNeuron(Leaf):
    """A layer that computes `neuron(norm(x))`. The norm computes its statistics, and the neuron's step applies them.

    The normalised sequence is neither written nor stored for the backward. The backward reads `x` and the values that
    the neuron stores. The step computes

        h = (x - mean) scale + shift        scale = weight / sqrt(var + eps), shift = bias
        s, v = neuron(h, v)

    Statistics, running statistics and gradients are those of `OverTime(norm)`, over all steps and the batch. For equal
    statistics, outputs in float32 are bitwise equal to those of the neuron for the input `(x - mean) scale + shift`.
    PyTorch's norms differ from this formula in the last bits, and their results also differ between devices. Without
    compiled kernels, the norm itself runs before the neuron.

    Args:
        norm: an `nn.BatchNorm1d`, `nn.BatchNorm2d`, `nn.BatchNorm3d` or `nn.SyncBatchNorm`; or an `OverTime` whose only
            layer is one of these norms, such as `ThresholdDependentBatchNorm2d`. In evaluation mode, the norm uses its
            running statistics as usual.
        neuron: any `FlexSN`. Its step normalises the first input, so hooks on the neuron receive `x`.

    Raises:
        ParameterError: the norm is not supported, or `neuron` is not a `FlexSN`.

    Example:
        >>> import torch
        >>> from flexsn_nn import LIF, OverTime
        >>> layer = nn.Sequential(OverTime(nn.Conv2d(3, 8, 3, bias=False)), NormNeuron(nn.BatchNorm2d(8), LIF()))
        >>> layer(torch.rand(4, 2, 3, 6, 6)).shape
        torch.Size([4, 2, 8, 4, 4])
    """

    def __init__(self, norm: nn.Module, neuron: FlexSN) -> None:
        super().__init__()
        if norm_of(norm) is None:
            raise ParameterError(
                f"norm is {type(norm).__name__}; give one of PyTorch's BatchNorm1d, 2d, 3d or SyncBatchNorm, or an "
                "OverTime of one. Other norms stay in front of the neuron."
            )
        if not isinstance(neuron, FlexSN):
            raise ParameterError(f"neuron is {type(neuron).__name__}, which has no step that can compute the norm.")
        self.norm = norm
        self.neuron = neuron

    def forward(self, x: Tensor, *others: Tensor, **options: Unpack[StepChanges]) -> Tensor | list[Tensor]:
        """Maps `[T, B, C, ...] -> [T, B, C, ...]`, or `[B, C, ...] -> [B, C, ...]` in step mode `"s"`.

        Args:
            x: tensor to normalise, for example the output of a convolution.
            others: other inputs of the neuron.
            options: `lengths`, `resets`, `transforms`, same as for the neuron. The statistics include all steps, even
                padding.

        Raises:
            InputShapeError: the norm does not accept the shape of `x`.
            The errors of the neuron.
        """
        output: Tensor | list[Tensor] = self.neuron(x, *others, affine=self._create_normalisation(), **options)
        return output

    def step(
        self,
        inputs: Tensor | Sequence[Tensor],
        states: Sequence[Tensor] | None = None,
        **options: Unpack[StepChanges],
    ) -> tuple[Tensor | list[Tensor], list[Tensor]]:
        """Runs `FlexSN.step` of the neuron, which stores no states. The norm updates its running statistics."""
        return self.neuron.step(inputs, states, affine=self._create_normalisation(), **options)

    def explain(self, x: Tensor, *others: Tensor) -> str:
        """Returns the text of `FlexSN.explain` for the neuron with the norm in its step. Changes no statistics."""
        return self.neuron.explain(x, *others, affine=self._create_normalisation())

    def _create_normalisation(self) -> Normalisation:
        norm = norm_of(self.norm)
        if norm is None:
            raise ParameterError(f"norm was replaced by a {type(self.norm).__name__}, which the neuron cannot compute.")
        return Normalisation(norm, 2 if self.neuron.step_mode == "m" else 1)


def norm_of(module: nn.Module) -> BatchNorm | None:
    """Returns `module` if it is a batch norm. For an `OverTime` whose only layer is a batch norm, returns this layer.

    Returns `None` for all other modules.
    """
    if isinstance(module, OverTime) and len(module) == 1:
        module = module[0]
    return module if is_batch_norm(module) else None
