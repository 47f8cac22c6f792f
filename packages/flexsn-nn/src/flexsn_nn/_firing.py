"""One-time warning for a layer that never or always fires in training."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexsn_hop.callers import warn
from flexsn_nn.errors import FiringWarning
from flexsn_runtime import transform_at_work

if TYPE_CHECKING:
    from flexsn_nn._flexsn import FlexSN

# A check follows every 16th call, or every 129th single step. No common sequence length is a multiple of 129, so the
# checked steps are at different positions of their sequences.
EVERY = {"m": 16, "s": 129}
# Number of successive checks that must find the layer silent, or always firing, before the warning is given.
_NUM_CHECKS = {"m": 4, "s": 8}
_PAGE = "docs/my-network-does-not-learn.md"


def is_enabled() -> bool:
    """True unless the environment variable `FLEXSN_WATCH_FIRING` is 0, which turns the warning off."""
    return os.environ.get("FLEXSN_WATCH_FIRING", "1") != "0"


class Firing:
    """Check of a neuron's spikes in some of its calls.

    After every 16th call in training (every 129th single step), the nonzero elements of the output are counted. On a
    GPU, the count is copied to the host asynchronously. A later check reads the count if the copy is complete, so no
    call waits for the device. Compiled graphs and replays of CUDA graphs are not checked.

    Attributes:
        calls_left: number of calls until the next check. `FlexSN.forward` decreases this number, and checks the call
            when the number reaches 0. If the number is negative, no call is checked.
    """

    def __init__(self) -> None:
        self.calls_left = EVERY["m"]
        self._silent = self._full = 0
        self._pending: tuple[Tensor, torch.cuda.Event, torch.Size] | None = None

    def __reduce__(self) -> tuple[type[Firing], tuple[()]]:
        """Makes copies and pickles begin with counts of zero."""
        return Firing, ()

    def look(self, neuron: FlexSN, output: Tensor) -> None:
        """Counts the nonzero elements of a plain output with gradients, unless counting would wait for the device."""
        if type(output) is not Tensor or not output.numel() or not torch.is_grad_enabled():
            return
        if transform_at_work() is not None:
            return
        if output.device.type == "cpu":
            self._record_count(neuron, int(torch.count_nonzero(output.detach())), output.shape)
        elif output.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            self._count_on_gpu(neuron, output.detach())

    def _count_on_gpu(self, neuron: FlexSN, output: Tensor) -> None:
        if self._pending is not None:
            count, event, shape = self._pending
            if not event.query():
                return
            self._pending = None
            self._record_count(neuron, int(count), shape)
        with torch.cuda.device(output.device):
            count = torch.empty((), dtype=torch.int64, device="cpu", pin_memory=True)
            count.copy_(torch.count_nonzero(output), non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._pending = count, event, output.shape

    def _record_count(self, neuron: FlexSN, count: int, shape: torch.Size) -> None:
        self._silent = self._silent + 1 if count == 0 else 0
        is_full = count == shape.numel() and neuron.spike_range == (0, 1)
        self._full = self._full + 1 if is_full else 0
        if max(self._silent, self._full) < _NUM_CHECKS[neuron.step_mode]:
            return
        self.calls_left = 0
        is_silent = self._silent > 0
        behaviour = "never fires" if is_silent else "fires always"
        warn(
            f"a layer {behaviour} in training: {type(neuron).__name__}, whose output of shape {list(shape)} was "
            f"{'all 0' if is_silent else 'all 1'} in the last {_NUM_CHECKS[neuron.step_mode]} checks. "
            f"{_suggest_remedy(neuron, is_silent)} See {_PAGE}. This warning is given once; "
            "watch_firing=False, or FLEXSN_WATCH_FIRING=0 in the environment, turns it off.",
            FiringWarning,
        )


def _suggest_remedy(neuron: FlexSN, silent: bool) -> str:
    if not silent:
        return "Make its input or the weights in front of it smaller, or its threshold higher."
    inner = getattr(neuron, "neuron", neuron)  # the neuron inside of a Recurrent
    if getattr(inner, "decay_input", False) is True:
        return (
            "It divides its input by tau: pass decay_input=False, make the input or the weights in front of it larger, "
            "or initialize the weights with init.fluctuation_driven_."
        )
    return (
        "Make its input or the weights in front of it larger, initialize the weights with init.fluctuation_driven_, or "
        "lower its threshold."
    )
