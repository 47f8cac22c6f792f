"""One-time warning that an optimizer has moved a learned number out of its range."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from flexsn_hop.callers import warn
from flexsn_nn._checks import Range, check_number
from flexsn_nn.errors import ParameterError, RangeWarning
from flexsn_runtime import transform_at_work

_LED_BACK = "It gets the gradient of this number, and returns to its range when the loss falls in that direction."
_POLE = "Below the range, its gradient is 0: set it back, and use a smaller learning rate, or learn its logarithm."
# On a GPU, checking a parameter takes a few launches, so a check follows only one out of `_CHANGES` changes.
_CHANGES = 16


class Ranges:
    """Range checks for the learned parameters of one module.

    A parameter is checked in the first call after a change in place, such as an optimizer step. On the CPU, the
    parameter is compared immediately. On a GPU, one out of 16 changes starts a comparison on the device, and a later
    call reads its result, so no call waits for the device. Changes through `parameter.data` are not detected.
    """

    def __init__(self) -> None:
        self._stamps: dict[str, tuple[int, int]] = {}
        self._changes: dict[str, int] = {}
        self._pending: dict[str, tuple[Tensor, torch.cuda.Event]] = {}
        self._warned: set[str] = set()

    def __reduce__(self) -> tuple[type[Ranges], tuple[()]]:
        """Makes copies and pickles begin without results of earlier checks."""
        return Ranges, ()

    def written(self) -> None:
        """Treats all parameters as changed, because a CUDA graph writes to them without changing their versions."""
        self._stamps.clear()

    def look(self, module: nn.Module, limits: Mapping[str, Range]) -> None:
        """Warns of parameters that have left their range. Warns once for each parameter.

        Args:
            module: owner of the parameters.
            limits: ranges, by name of the parameter.
        """
        parameters = module._parameters
        for name, allowed in limits.items():
            value = parameters.get(name)
            if value is None or name in self._warned:
                continue
            if name in self._pending:
                self._read_result(module, name, value, allowed)
            stamp = id(value), value._version
            if self._stamps.get(name) != stamp and type(value) is nn.Parameter and transform_at_work() is None:
                self._stamps[name] = stamp
                self._compare(module, name, value, allowed)

    def _compare(self, module: nn.Module, name: str, value: nn.Parameter, allowed: Range) -> None:
        if value.device.type == "cpu":
            self._warn(module, name, value, allowed)
            return
        count = self._changes[name] = self._changes.get(name, -1) + 1
        if value.device.type != "cuda" or count % _CHANGES or name in self._pending:
            return
        if torch.cuda.is_current_stream_capturing():
            return
        with torch.no_grad(), torch.cuda.device(value.device):
            is_outside = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
            is_outside.copy_(_is_outside(value, allowed), non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._pending[name] = is_outside, event

    def _read_result(self, module: nn.Module, name: str, value: nn.Parameter, allowed: Range) -> None:
        is_outside, event = self._pending[name]
        if torch.cuda.is_current_stream_capturing() or not event.query():
            return
        del self._pending[name]
        if is_outside:
            self._warn(module, name, value, allowed)  # waits for the device only here

    def _warn(self, module: nn.Module, name: str, value: nn.Parameter, allowed: Range) -> None:
        try:
            check_number(name, value, **allowed)
        except ParameterError as error:
            self._warned.add(name)
            warn(
                f"a learned parameter of {type(module).__name__} has left its range, and counts as the nearest number "
                f"in it: {error} {_POLE if _has_pole(allowed) else _LED_BACK}",
                RangeWarning,
            )


def _has_pole(allowed: Range) -> bool:
    return "above" in allowed and not allowed.get("finite")


def _is_outside(value: Tensor, allowed: Range) -> Tensor:
    """Returns a tensor without dimensions, which is True if an element is out of range or not finite."""
    is_inside = value.isfinite()
    if "at_least" in allowed:
        is_inside = is_inside & (value >= allowed["at_least"])
    if "above" in allowed:
        is_inside = is_inside & (value > allowed["above"])
    if "at_most" in allowed:
        is_inside = is_inside & (value <= allowed["at_most"])
    if "below" in allowed:
        is_inside = is_inside & (value < allowed["below"])
    return ~is_inside.all()
