"""Applies layers without state to every step of a sequence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, fx, nn
from torch.fx import Proxy

from flexsn_nn._backends import StepMode, check_step_mode
from flexsn_nn._batch_affine import BatchNorm, Normalisation, is_batch_norm
from flexsn_nn._flexsn import FlexSN
from flexsn_nn._handover import Handover
from flexsn_nn._stateful import Stateful
from flexsn_nn.errors import InputShapeError, StepModeError


class OverTime(nn.Sequential):
    """A container that runs layers on `[T, B, ...]` as on one batch `[T B, ...]`.

    The layers have no state. Examples are convolutions and pooling. `nn.Linear` and other layers that accept any number
    of leading dimensions do not need `OverTime`.

    Args:
        layers: same as for `nn.Sequential`.
        step_mode: `"m"` if the input is a sequence. With `"s"`, the input is one step `[B, ...]`, and the layers run on
            this step directly. `functional.set_step_mode` sets this mode together with the mode of the neurons.

    Raises:
        StepModeError: a layer is a neuron, or another layer with a state, and would mistake the batch for time.
        UnknownNameError: the step mode is unknown.

    Example:
        >>> import torch
        >>> layer = OverTime(nn.Conv2d(3, 8, 3), nn.AvgPool2d(2))
        >>> layer(torch.zeros(10, 2, 3, 6, 6)).shape
        torch.Size([10, 2, 8, 2, 2])
    """

    _step_mode: StepMode = "m"
    _handover: Handover | None = None

    def __init__(self, *layers: Any, step_mode: str = "m") -> None:
        super().__init__(*layers)
        self.step_mode = step_mode
        for name, layer in self.named_modules():
            if isinstance(layer, Stateful):
                raise StepModeError(
                    f"layer {name} keeps a state ({type(layer).__name__}): OverTime makes one batch of all steps, and "
                    "the layer would take it for time. Put it after OverTime(...), not inside."
                )
            if isinstance(layer, FlexSN):
                raise StepModeError(
                    f"layer {name} is a neuron ({type(layer).__name__}): OverTime makes one batch of all steps, and "
                    "the neuron would take it for time. Put it after OverTime(...), not inside."
                )

    @property
    def step_mode(self) -> StepMode:
        """`"m"` for sequences, `"s"` for single steps."""
        return self._step_mode

    @step_mode.setter
    def step_mode(self, step_mode: str) -> None:
        self._step_mode = check_step_mode(step_mode)

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        """Runs the layers: `[T, B, ...] -> [T, B, ...]`, or `[B, ...] -> [B, ...]` in step mode `"s"`.

        Raises:
            TypeError: the input is not one tensor, or a layer does not return a tensor.
            InputShapeError: a sequence has no batch dimension, or the layers change the number of samples.
        """
        if not isinstance(x, Proxy) and (others or not isinstance(x, Tensor)):
            received = f"{1 + len(others)} inputs" if others else f"a {type(x).__name__}"
            raise TypeError(
                f"OverTime got {received}; it takes one tensor. Put a layer with several inputs into your own module: "
                "x.flatten(0, 1) makes one batch of all steps, and y.unflatten(0, (T, B)) divides it into steps."
            )
        single = self._step_mode == "s"
        layers: Iterable[nn.Module] = self
        norm = None
        # A graph of torch.fx contains the norm itself, so nothing is handed over when the graph runs.
        if self._handover is not None and not isinstance(x, Proxy):
            layers, norm = split_norm(self)
        folded = x if single else fold_time(x)
        for layer in layers:
            folded = layer(folded)
            if not isinstance(folded, Tensor | Proxy):
                raise TypeError(
                    f"{type(layer).__name__} inside of OverTime returns a {type(folded).__name__}; OverTime takes "
                    "layers that return one tensor [batch, ...]. Put it into a module that returns the tensor that "
                    "you need."
                )
        result = folded if single else unfold_time(folded, x)
        if norm is not None and self._handover is not None:
            self._handover.give(result, Normalisation(norm, 1 if single else 2))
        return result

    def __getitem__(self, index: Any) -> Any:
        part = super().__getitem__(index)
        if isinstance(part, OverTime):
            part.step_mode = self._step_mode
        return part

    def extra_repr(self) -> str:
        notes = [] if self._step_mode == "m" else [f"step_mode={self._step_mode!r}"]
        if self._handover is not None:
            notes.append("the neuron after it computes its last norm")
        return ", ".join(notes)


@fx.wrap
def fold_time(x: Tensor) -> Tensor:
    """Folds time into the batch: `[T, B, ...] -> [T B, ...]`."""
    if x.dim() < 2:
        raise InputShapeError(
            f"OverTime got an input of shape {list(x.shape)}; in step mode 'm' it takes sequences [T, B, ...]. "
            "For single steps [B, ...], use functional.set_step_mode(net, 's')."
        )
    return x.flatten(0, 1)


@fx.wrap
def unfold_time(folded: Tensor, x: Tensor) -> Tensor:
    """Unfolds time from the batch: `[T B, ...] -> [T, B, ...]`. T and B are the sizes of `x`."""
    if not folded.dim() or folded.shape[0] != x.shape[0] * x.shape[1]:
        raise InputShapeError(
            f"the layers inside of OverTime return the shape {list(folded.shape)} for a batch of "
            f"{x.shape[0] * x.shape[1]} (T={x.shape[0]} times B={x.shape[1]}): they must keep the first dimension."
        )
    return folded.reshape(*x.shape[:2], *folded.shape[1:])


def split_norm(layers: nn.Sequential) -> tuple[list[nn.Module], BatchNorm | None]:
    """Splits layers into the batch norm at their end and the layers before it.

    Returns all layers and `None` if the last layer is not a batch norm, or if hooks are registered on the norm or on a
    container of the norm, because hooks need the output of their module.
    """
    *front, last = layers if len(layers) else (None,)
    if type(last) is nn.Sequential and not _has_hooks(last):
        inner_layers, norm = split_norm(last)
        return ([*front, *inner_layers], norm) if norm is not None else (list(layers), None)
    if is_batch_norm(last) and not _has_hooks(last):
        return front, last
    return list(layers), None


def _has_hooks(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)
