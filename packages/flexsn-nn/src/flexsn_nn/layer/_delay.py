"""Signals that arrive later."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from flexsn_nn._checks import Range, check_count, check_device, check_number, check_tensor
from flexsn_nn._numbers import fit_checkpoint, learned
from flexsn_nn._ranges import Ranges
from flexsn_nn._stateful import Stateful, check_kept
from flexsn_nn._within import within
from flexsn_nn.errors import ParameterError


class Delay(Stateful):
    """`y[t] = x[t - delay]`, zeros before the first step; between two steps, the line through both of them.

        y[t] = (1 - f) x[t - n] + f x[t - n - 1],    n = floor(delay), f = delay - n

    Keeps the last inputs from call to call until `reset()`. The gradient of a learned delay is
    `x[t - n - 1] - x[t - n]`.

    Args:
        delay: in steps, at least 0: a number; or a tensor of delays that broadcasts to the step (`[C, 1, 1]` for one
            per channel of `[B, C, H, W]`), or an `nn.Parameter` of them.
        max_delay: the largest delay that is kept, a whole number of steps; learned delays beyond it, or below 0, count
            as the nearest one within, with its gradient (`RangeWarning`). `None`: the largest of `delay`, rounded up,
            and twice that, at least 1, if it is learned.
        learn: whether to make an `nn.Parameter` of `delay`; one number is one of shape `[1]`.
        step_mode: `"m"`: `[T, *step]`; `"s"`: `[*step]`.

    Raises:
        ParameterError: a delay below 0 or above `max_delay`.

    Example:
        >>> Delay(1)(torch.tensor([[1.0], [2.0], [4.0]])).flatten().tolist()
        [0.0, 1.0, 2.0]
        >>> Delay(0.5)(torch.tensor([[1.0], [2.0], [4.0]])).flatten().tolist()
        [0.5, 1.5, 3.0]
    """

    delay: float | Tensor

    def __init__(
        self,
        delay: float | Tensor,
        max_delay: int | None = None,
        learn: bool = False,
        step_mode: str = "m",
    ) -> None:
        super().__init__(step_mode)
        check_number("delay", delay, at_least=0)
        is_learned = learn or isinstance(delay, nn.Parameter)
        largest = float(delay.detach().max()) if isinstance(delay, Tensor) else delay
        if max_delay is None:
            max_delay = math.ceil(largest)
            if is_learned:
                max_delay = max(1, 2 * max_delay)
        check_count("max_delay", max_delay, at_least=0)
        self.max_delay = max_delay
        self._ranges = Ranges()
        self._check_largest(largest)
        if isinstance(delay, nn.Parameter):
            self.delay = delay
        elif learn:
            self.delay = learned(delay, _dtype(delay))
        elif isinstance(delay, Tensor):
            self.register_buffer("delay", delay)
        else:
            self.delay = delay

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "delay" and not isinstance(value, Tensor):
            check_number(name, value, at_least=0)
            self._check_largest(value)
        super().__setattr__(name, value)

    @property
    def _limits(self) -> Range:
        return {"at_least": 0, "at_most": self.max_delay}

    def _check_largest(self, delay: float) -> None:
        if delay > self.max_delay:
            raise ParameterError(f"delay is {delay:g}, above max_delay={self.max_delay}.")

    def forward(self, x: Tensor) -> Tensor:
        """`[T, *step] -> [T, *step]`, or `[*step] -> [*step]` in step mode `"s"`.

        Raises:
            StateError: kept inputs of another shape or dtype.
        """
        check_tensor("the input", x, dims=1 if self.step_mode == "m" else 0)
        if isinstance(self.delay, Tensor):
            check_device("delay", self.delay, x)
        if not torch.compiler.is_compiling():
            self._ranges.look(self, {"delay": self._limits})
        new = x if self.step_mode == "m" else x.unsqueeze(0)
        seen = torch.cat([self._history(new), new])
        self.states = [seen[len(new) :]] if self.max_delay else []
        y = self._delayed(seen, len(new))
        return y if self.step_mode == "m" else y.squeeze(0)

    def initial_states(self, x: Tensor) -> list[Tensor]:
        """Zeros `[max_delay, *step]`, in the place of earlier inputs."""
        step = x.shape[1:] if self.step_mode == "m" else x.shape
        return [x.new_zeros((self.max_delay, *step))] if self.max_delay else []

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        fit_checkpoint(state_dict, prefix, self._parameters, ["delay"])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _history(self, new: Tensor) -> Tensor:
        """The last `max_delay` inputs, zeros at first."""
        shape = torch.Size((self.max_delay, *new.shape[1:]))
        if not self.max_delay or not self.states:
            return new.new_zeros(shape)
        (history,) = self.states
        check_kept("what the delay keeps of earlier inputs", history, shape, new)
        return history

    def _delayed(self, seen: Tensor, steps: int) -> Tensor:
        delay = self.delay
        if not seen.is_floating_point() and (isinstance(delay, Tensor) or delay % 1):
            seen = seen.to(torch.get_default_dtype())  # for what lies between two steps
        if not isinstance(delay, Tensor):
            whole = math.floor(delay)
            late = self._shifted(seen, steps, whole)
            if delay == whole:
                return late
            return late + (delay - whole) * (self._shifted(seen, steps, whole + 1) - late)
        delay = delay.to(torch.promote_types(seen.dtype, torch.float32))
        delay = within(delay, **self._limits)
        # The last whole step has none behind it: a delay of max_delay is max_delay - 1, and a whole step.
        whole_steps = delay.detach().floor().clamp(max=max(self.max_delay - 1, 0))
        step = seen.shape[1:]
        fraction = (delay - whole_steps).to(seen.dtype)
        index = self.max_delay + torch.arange(steps, device=seen.device).view(-1, *[1] * len(step))
        index = (index - whole_steps.long()).expand(steps, *step)
        late = seen.gather(0, index)
        if not self.max_delay:
            return late
        return late + fraction * (seen.gather(0, index - 1) - late)

    def _shifted(self, seen: Tensor, steps: int, by: int) -> Tensor:
        return seen[self.max_delay - by : self.max_delay - by + steps]

    def extra_repr(self) -> str:
        shown = list(self.delay.shape) if isinstance(self.delay, Tensor) else self.delay
        return f"delay={shown}, max_delay={self.max_delay}, step_mode={self.step_mode!r}"


def _dtype(value: float | Tensor) -> torch.dtype:
    return value.dtype if isinstance(value, Tensor) else torch.get_default_dtype()
