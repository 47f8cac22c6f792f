"""Layers without state over every step of a sequence."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from flexsn_nn._backends import StepMode, check_step_mode
from flexsn_nn._flexsn import FlexSN
from flexsn_nn.errors import InputShapeError, StepModeError


class OverTime(nn.Sequential):
    """Runs layers without state on `[T, B, ...]` as on one batch `[T B, ...]`: convolutions, norms, pooling.

    `nn.Linear` and other layers that take any number of leading dimensions do not need it.

    Args:
        layers: as for `nn.Sequential`.
        step_mode: `"m"`: the input is a sequence; `"s"`: it is one step `[B, ...]`, and the layers run on it as they
            are. `functional.set_step_mode` sets it with that of the neurons.

    Raises:
        StepModeError: a layer is a neuron, whose time would be folded into the batch.
        UnknownNameError: another step mode.

    Example:
        >>> import torch
        >>> layer = OverTime(nn.Conv2d(3, 8, 3), nn.AvgPool2d(2))
        >>> layer(torch.zeros(10, 2, 3, 6, 6)).shape
        torch.Size([10, 2, 8, 2, 2])
    """

    _step_mode: StepMode = "m"

    def __init__(self, *layers: Any, step_mode: str = "m") -> None:
        super().__init__(*layers)
        self.step_mode = step_mode
        for name, layer in self.named_modules():
            if isinstance(layer, FlexSN):
                raise StepModeError(
                    f"layer {name} is a neuron ({type(layer).__name__}): OverTime makes one batch of all steps, and "
                    "the neuron would take it for time. Put it behind OverTime(...), not inside."
                )

    @property
    def step_mode(self) -> StepMode:
        """`"m"` for sequences, `"s"` for single steps."""
        return self._step_mode

    @step_mode.setter
    def step_mode(self, step_mode: str) -> None:
        self._step_mode = check_step_mode(step_mode)

    def forward(self, x: Tensor) -> Tensor:
        """`[T, B, ...] -> [T, B, ...]`; in step mode `"s"` `[B, ...] -> [B, ...]`.

        Raises:
            InputShapeError: a sequence without a batch.
        """
        if self._step_mode == "s":
            return super().forward(x)  # type: ignore[no-any-return, no-untyped-call]
        if x.dim() < 2:
            raise InputShapeError(
                f"OverTime got an input of shape {list(x.shape)}; in step mode 'm' it takes sequences [T, B, ...]. "
                "For single steps [B, ...], use functional.set_step_mode(net, 's')."
            )
        folded = x.flatten(0, 1)
        for layer in self:
            folded = layer(folded)
        return folded.reshape(*x.shape[:2], *folded.shape[1:])

    def __getitem__(self, index: Any) -> Any:
        part = super().__getitem__(index)
        if isinstance(part, OverTime):
            part.step_mode = self._step_mode
        return part

    def extra_repr(self) -> str:
        return "" if self._step_mode == "m" else f"step_mode={self._step_mode!r}"
