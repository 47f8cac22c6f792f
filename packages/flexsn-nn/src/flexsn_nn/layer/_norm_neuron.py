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
    """`neuron(norm(x))`, where the neuron's step does what the norm does after its statistics.

    The normalised sequence is never written, nor kept for the backward. What is kept is `x` and what the neuron keeps:

        h = (x - mean) scale + shift        in the step; scale = weight / sqrt(var + eps), shift = bias
        s, v = neuron(h, v)

    Statistics, running statistics and gradients are the norm's, over all steps and the batch, as of
    `OverTime(norm)`. With the same statistics, outputs are those of the neuron on `(x - mean) scale + shift` computed
    beforehand, to the bit in float32; PyTorch's norms differ from that in the last bits, and so between devices. Where
    no compiled kernels run, the norm itself does, and then the neuron.

    Args:
        norm: `nn.BatchNorm1d` to `3d` or `nn.SyncBatchNorm`, or an `OverTime` of one alone, as
            `ThresholdDependentBatchNorm2d`. In evaluation, running statistics are read, as always.
        neuron: any `FlexSN`; its first input is what is normalised. Its hooks see `x`.

    Raises:
        ParameterError: another norm, or a neuron that is no `FlexSN`.

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
            raise ParameterError(f"neuron is {type(neuron).__name__}, which has no step that could take the norm in.")
        self.norm = norm
        self.neuron = neuron

    def forward(self, x: Tensor, *others: Tensor, **options: Unpack[StepChanges]) -> Tensor | list[Tensor]:
        """`[T, B, C, ...] -> [T, B, C, ...]`, or in step mode `"s"` `[B, C, ...] -> [B, C, ...]`.

        Args:
            x: what is normalised; the convolution's output, say.
            others: further inputs of the neuron.
            options: `lengths`, `resets`, `transforms`, as of the neuron. The statistics are those of all steps, of
                padding, too.

        Raises:
            InputShapeError: a shape that the norm does not take.
            The errors of the neuron.
        """
        output: Tensor | list[Tensor] = self.neuron(x, *others, affine=self._normalisation(), **options)
        return output

    def step(
        self,
        inputs: Tensor | Sequence[Tensor],
        states: Sequence[Tensor] | None = None,
        **options: Unpack[StepChanges],
    ) -> tuple[Tensor | list[Tensor], list[Tensor]]:
        """As `FlexSN.step`: the neuron keeps nothing. (The norm keeps its running statistics.)"""
        return self.neuron.step(inputs, states, affine=self._normalisation(), **options)

    def explain(self, x: Tensor, *others: Tensor) -> str:
        """`FlexSN.explain` of the neuron with the norm in its step. Running statistics stay as they are."""
        return self.neuron.explain(x, *others, affine=self._normalisation())

    def _normalisation(self) -> Normalisation:
        norm = norm_of(self.norm)
        if norm is None:
            raise ParameterError(f"norm was replaced by a {type(self.norm).__name__}, which the neuron cannot take in.")
        return Normalisation(norm, 2 if self.neuron.step_mode == "m" else 1)


def norm_of(module: nn.Module) -> BatchNorm | None:
    """The batch norm that a layer is, or is made of alone."""
    if isinstance(module, OverTime) and len(module) == 1:
        module = module[0]
    return module if is_batch_norm(module) else None
