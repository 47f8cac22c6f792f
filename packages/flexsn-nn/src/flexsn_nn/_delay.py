"""A layer that delays signals."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexsn_nn._checks import Range, check_count, check_device, check_name, check_number, check_tensor
from flexsn_nn._handover import Handover
from flexsn_nn._numbers import fit_checkpoint, learned
from flexsn_nn._ranges import Ranges
from flexsn_nn._stateful import Stateful, check_stored_state
from flexsn_nn._within import within
from flexsn_nn.errors import ParameterError
from flexsn_nn.transforms._delayed import Delayed
from flexsn_runtime import delay_between, delay_by_taps, transform_at_work, why_no_delay_kernel

INTERPOLATIONS = ("linear", "triangle", "gaussian")


class Delay(Stateful):
    """A layer that computes `y[t] = x[t - delay]`, with zeros before the first step.

    For fractional delays, values are interpolated:

        linear     y[t] = (1 - f) x[t - n] + f x[t - n - 1],    n = floor(delay), f = delay - n
        triangle   y[t] = sum over l of max(0, width - abs(l - delay)) / width^2 * x[t - l]
        gaussian   y[t] = sum over l of w[l] x[t - l] / sum over l of w[l],    w[l] = exp(-(l - delay)^2 / (2 width^2))

    The layer keeps the last inputs from call to call until `reset()`. For `"linear"`, the gradient of a learned delay
    is `x[t - n - 1] - x[t - n]`, which depends on two steps only. For the other interpolations, the gradient
    depends on all steps within about `width` of the delay. You can decrease `width` during training, for example with
    `layer.width = 0.5`. In evaluation, `"triangle"` and `"gaussian"` round the delay to a whole step, so that delayed
    spikes are spikes.

    Args:
        delay: delay in steps, at least 0: a number; a tensor of delays that broadcasts to the step, such as `[C, 1, 1]`
            with one delay per channel of `[B, C, H, W]`; or an `nn.Parameter`.
        max_delay: largest possible delay, a whole number of steps. A learned delay above `max_delay` or below 0 counts
            as the nearest delay within the range, gets the gradient of that delay, and causes a `RangeWarning`. `None`
            stands for the largest value of `delay`, rounded up; for a learned delay, for twice this whole number, and
            at least 1.
        learn: True to make `delay` an `nn.Parameter`. A number becomes a parameter of shape `[1]`.
        step_mode: `"m"` for `[T, *step]`, `"s"` for `[*step]`.
        interpolation: `"linear"`, `"triangle"`, or `"gaussian"`.
        width: width in steps, above 0: half of the base of the triangle (a width of 1 is equal to `"linear"`), or the
            standard deviation of the Gaussian. The width is stored as a buffer.

    Raises:
        ParameterError: a delay is below 0 or above `max_delay`; the width is not above 0; or a width is passed with
            `"linear"`.
        UnknownNameError: the interpolation is unknown.

    Sources: Hammouamri et al., "Learning delays in spiking neural networks using dilated convolutions with learnable
    spacings", ICLR 2024 (Gaussian). Queant et al., "DelRec: learning delays in recurrent spiking neural networks", 2025
    (triangle).

    Example:
        >>> Delay(1)(torch.tensor([[1.0], [2.0], [4.0]])).flatten().tolist()
        [0.0, 1.0, 2.0]
        >>> Delay(0.5)(torch.tensor([[1.0], [2.0], [4.0]])).flatten().tolist()
        [0.5, 1.5, 3.0]
    """

    delay: float | Tensor
    width: Tensor
    _handover: Handover | None = None

    def __init__(
        self,
        delay: float | Tensor,
        max_delay: int | None = None,
        learn: bool = False,
        step_mode: str = "m",
        interpolation: str = "linear",
        width: float | None = None,
    ) -> None:
        super().__init__(step_mode)
        check_name("interpolation", interpolation, INTERPOLATIONS)
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
        self.interpolation = interpolation
        if self._spreads:
            if not isinstance(delay, Tensor) and not learn:
                delay = torch.tensor(float(delay))
            check_number("width", 1.0 if width is None else width, above=0)
            self.register_buffer("width", torch.tensor(1.0 if width is None else float(width)))
        elif width is not None:
            raise ParameterError(_NO_WIDTH)
        if isinstance(delay, nn.Parameter):
            self.delay = delay
        elif learn:
            self.delay = learned(delay, _get_dtype(delay))
        elif isinstance(delay, Tensor):
            self.register_buffer("delay", delay)
        else:
            self.delay = delay

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "delay" and not isinstance(value, Tensor):
            check_number(name, value, at_least=0)
            self._check_largest(value)
        if name == "width" and not isinstance(value, Tensor):
            check_number(name, value, above=0)
            if not self._spreads:
                raise ParameterError(_NO_WIDTH)
            with torch.no_grad():
                self.width.fill_(value)
            return
        super().__setattr__(name, value)

    @property
    def _spreads(self) -> bool:
        return self.interpolation != "linear"

    @property
    def _limits(self) -> Range:
        return {"at_least": 0, "at_most": self.max_delay}

    def _check_largest(self, delay: float) -> None:
        if delay > self.max_delay:
            raise ParameterError(f"delay is {delay:g}, above max_delay={self.max_delay}.")

    def look_at_range(self) -> None:
        """Warns, once for each layer, if a learned delay has left its range."""
        self._ranges.look(self, {"delay": self._limits})

    def strays(self) -> Iterator[str]:
        """Yields a message for `explain()` if a delay has left its range. The check waits for the device."""
        try:
            check_number("delay", self.delay, **self._limits)
        except ParameterError as error:
            yield f"a parameter has left its range, and counts as the nearest number in it: {error}"

    def in_evaluation(self) -> float | Tensor:
        """Returns the delay that evaluation uses: within its range, and rounded unless `interpolation="linear"`."""
        if not isinstance(self.delay, Tensor):
            return self.delay
        delay = self.delay.detach().clamp(0, self.max_delay)
        return delay.round() if self._spreads else delay

    def forward(self, x: Tensor) -> Tensor:
        """Delays a sequence: `[T, *step] -> [T, *step]`, or `[*step] -> [*step]` in step mode `"s"`.

        Raises:
            TypeError, InputShapeError: the input is not a tensor, or a sequence has no dimension of time.
            DeviceError: the delays and the input are on different devices.
            StateError: the stored earlier inputs have another shape, dtype or device.
        """
        check_tensor("the input", x, dims=1 if self.step_mode == "m" else 0)
        if isinstance(self.delay, Tensor):
            check_device("delay", self.delay, x)
        if not torch.compiler.is_compiling():
            self.look_at_range()
        new = x if self.step_mode == "m" else x.unsqueeze(0)
        if self._handover is not None and self._can_hand_over(x):
            self._store_inputs(x)
            self._handover.give(x, Delayed(self))
            return x
        y = self._delay_by_kernel(new, self._get_history(new) if self.states else None)
        if y is not None:
            self._store_inputs(new)
            return y if self.step_mode == "m" else y.squeeze(0)
        values = torch.cat([self._get_history(new), new])
        steps = new.shape[0]  # `len` would be a constant in torch.export
        self.states = [values[steps:]] if self.max_delay else []
        y = self._delay_values(values, steps)
        return y if self.step_mode == "m" else y.squeeze(0)

    # -- in the step of the next neuron --------------------------------------------------------------------

    @property
    def is_between(self) -> bool:
        """True if delayed values are interpolated between two steps."""
        if self._spreads:
            return False
        return bool(self.max_delay) and (isinstance(self.delay, Tensor) or self.delay % 1 != 0)

    def fits(self, x: Tensor) -> bool:
        """True if the delays broadcast to the steps of a sequence and are on its device."""
        delay = self.delay
        if not isinstance(delay, Tensor):
            return True
        return delay.device == x.device and _flatten(delay, x.shape[1:]) is not None

    def of(self, x: Tensor) -> Tensor:
        """Delays a sequence `[T, *step] -> [T, *step]` without earlier inputs, and stores no inputs."""
        y = self._delay_by_kernel(x, None)
        return (
            self._delay_values(torch.cat([x.new_zeros((self.max_delay, *x.shape[1:])), x]), len(x)) if y is None else y
        )

    def steps_back(self) -> float | Tensor:
        """Returns the delays. Callers use only the whole steps of each delay."""
        if not isinstance(self.delay, Tensor):
            return self.delay
        return self.in_evaluation() if self._spreads else self.delay.detach()

    def between(self, late: Tensor, later: Tensor | None = None, delay: Tensor | None = None) -> Tensor:
        """Interpolates the delayed value of a step.

        Args:
            late: value of `x` from `floor(delay)` steps ago.
            later: value of `x` from `floor(delay) + 1` steps ago; `None` if the delays are whole steps.
            delay: `self.delay`, or its stand-in in a trace; `None` if `self.delay` is a number.
        """
        if later is None:
            return late
        if delay is None:
            assert not isinstance(self.delay, Tensor)
            return _interpolate(late, later, self.delay - math.floor(self.delay))
        delay = self._clamp(delay, late.dtype)
        return _interpolate(late, later, (delay - self._round_down(delay)).to(late.dtype))

    def _can_hand_over(self, x: Tensor) -> bool:
        """True if the next neuron can receive the sequence together with this layer, and apply the delay itself."""
        if self._handover is None or self.step_mode != "m" or self.states or not self.max_delay:
            return False
        if self._spreads and (self.training or not isinstance(self.delay, Tensor)):
            return False
        if torch.compiler.is_compiling() or transform_at_work() is not None:
            return False
        return type(x) in (Tensor, nn.Parameter) and x.is_floating_point() and x.numel() > 0

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        fit_checkpoint(state_dict, prefix, self._parameters, ["delay"])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def initial_states(self, x: Tensor) -> list[Tensor]:
        """Returns zeros `[max_delay, *step]`, which replace the missing earlier inputs."""
        step = x.shape[1:] if self.step_mode == "m" else x.shape
        return [x.new_zeros((self.max_delay, *step))] if self.max_delay else []

    def _get_history(self, new: Tensor) -> Tensor:
        """Returns the last `max_delay` inputs. Inputs before the first call are zeros."""
        shape = torch.Size((self.max_delay, *new.shape[1:]))
        if not self.max_delay or not self.states:
            return new.new_zeros(shape)
        (history,) = self.states
        check_stored_state("the delay's record of earlier inputs", history, shape, new)
        return history

    def of_past(self, past: Sequence[Tensor]) -> Tensor:
        """Computes the delayed value from past values, for step functions that store their own past.

        Args:
            past: `max_delay + 1` tensors of one shape, to which the delay broadcasts. `past[l]` is the value from `l`
                steps ago.

        Returns:
            A tensor with the shape and dtype of the values.
        """
        delay = self.delay
        if not isinstance(delay, Tensor):
            num_steps = math.floor(delay)
            if delay == num_steps:
                return past[num_steps]
            return _interpolate(past[num_steps], past[num_steps + 1], delay - num_steps)
        dtype = past[0].dtype
        delay = _to_value_of_step(self._clamp(delay, dtype), past[-1])
        if self._spreads:
            return self._spread(past, delay) if self.training else _select(past, delay.detach().round())
        whole_steps = self._round_down(delay)
        late = _select(past[:-1] or past, whole_steps)
        if not self.max_delay:
            return late
        return _interpolate(late, _select(past[1:], whole_steps), (delay - whole_steps).to(dtype))

    def _spread(self, past: Sequence[Tensor], delay: Tensor) -> Tensor:
        width = self.width.to(delay.dtype)
        nearest = delay.detach().round() - delay
        distances = [steps - delay for steps in range(len(past))]
        if self.interpolation == "triangle":
            weights = [(width - distance.abs()).clamp(min=0) for distance in distances]
        else:  # exponents are relative to the nearest step, so that weights of a small width do not vanish
            weights = [torch.exp((nearest * nearest - d * d) / (2 * width * width)) for d in distances]
        total = _add_up([weight * value for weight, value in zip(weights, past, strict=True)])
        # Multiplying by the reciprocal is cheaper than dividing, because the gradient of each past value contains this
        # factor.
        spread = total * (1 / (width * width if self.interpolation == "triangle" else _add_up(weights)))
        return spread.to(past[0].dtype)

    def _clamp(self, delay: Tensor, dtype: torch.dtype) -> Tensor:
        return within(delay.to(torch.promote_types(dtype, torch.float32)), **self._limits)

    def _round_down(self, delay: Tensor) -> Tensor:
        """Returns the whole steps of a delay, at most `max_delay - 1`.

        A delay of `max_delay` is therefore interpolated as `max_delay - 1` whole steps and a fraction of 1. No value
        from `max_delay + 1` steps ago is stored.
        """
        return delay.detach().floor().clamp(max=self.max_delay - 1 if self.max_delay else 0)

    def _delay_values(self, values: Tensor, steps: int) -> Tensor:
        delay = self.delay
        if not values.is_floating_point() and (isinstance(delay, Tensor) or delay % 1):
            values = values.to(torch.get_default_dtype())  # integers cannot represent values between two steps
        if not isinstance(delay, Tensor) or (self._spreads and self.training):
            return self.of_past([self._shift(values, steps, by) for by in range(self.max_delay + 1)])
        delay = self._clamp(delay, values.dtype)
        if self._spreads:
            return self._gather(values, steps, delay.detach().round())
        whole_steps = self._round_down(delay)
        late = self._gather(values, steps, whole_steps)
        if not self.max_delay:
            return late
        fraction = (delay - whole_steps).to(values.dtype)
        return _interpolate(late, self._gather(values, steps, whole_steps + 1), fraction)

    def _delay_by_kernel(self, new: Tensor, past: Tensor | None) -> Tensor | None:
        """Returns the delayed sequence after `past` (zeros if `None`), or `None` if no kernel can compute it."""
        if not isinstance(self.delay, Tensor) or not self.max_delay or why_no_delay_kernel(new) is not None:
            return None
        flat = _flatten(self.delay, new.shape[1:])
        if flat is None:
            return None
        max_delay = self.max_delay
        delay, inner = self._clamp(flat.delays, new.dtype), flat.inner
        if self._spreads and self.training:
            return delay_by_taps(new, past, delay, self._compute_taps, self._compute_slopes, inner)
        if self._spreads:
            return delay_between(new, past, delay.detach().round().int(), None, inner, max_delay)
        whole_steps = self._round_down(delay)
        return delay_between(new, past, whole_steps.int(), (delay - whole_steps).to(new.dtype), inner, max_delay)

    def _store_inputs(self, new: Tensor) -> None:
        """Stores the last `max_delay` inputs."""
        before = len(new) - self.max_delay
        if before >= 0:
            self.states = [new[before:].clone()]  # a copy, because the caller may write to the input
        else:
            self.states = [torch.cat([self._get_history(new)[len(new) :], new])]

    def _compute_taps(self, delay: Tensor) -> Tensor:
        """Maps delays `[size]` to weights `[max_delay + 1, size]`. Row `l` weights the value from `l` steps ago."""
        width, distance = self._compute_distances(delay)
        if self.interpolation == "triangle":
            return (width - distance.abs()).clamp(min=0) / (width * width)
        nearest = delay.detach().round() - delay
        weights = torch.exp((nearest * nearest - distance * distance) / (2 * width * width))
        return weights / weights.sum(0)

    def _compute_slopes(self, delay: Tensor) -> Tensor:
        """Returns the derivatives of `_compute_taps` with respect to the delay."""
        width, distance = self._compute_distances(delay)
        if self.interpolation == "triangle":
            return distance.sign() * (distance.abs() <= width) / (width * width)
        taps, slopes = self._compute_taps(delay), distance / (width * width)
        return taps * (slopes - (taps * slopes).sum(0))

    def _compute_distances(self, delay: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the width, and the distance of each whole step from the delay, `[max_delay + 1, size]`."""
        steps = torch.arange(self.max_delay + 1, device=delay.device, dtype=delay.dtype)
        return self.width.to(delay.dtype), steps.unsqueeze(1) - delay

    def _gather(self, values: Tensor, steps: int, delay: Tensor) -> Tensor:
        """Delays each element by its own number of whole steps."""
        step = values.shape[1:]
        index = self.max_delay + torch.arange(steps, device=values.device).view(-1, *[1] * len(step))
        return values.gather(0, (index - delay.long()).expand(steps, *step))

    def _shift(self, values: Tensor, steps: int, by: int) -> Tensor:
        return values[self.max_delay - by : self.max_delay - by + steps]

    def extra_repr(self) -> str:
        shown = list(self.delay.shape) if isinstance(self.delay, Tensor) else self.delay
        spread = f", interpolation={self.interpolation!r}, width={float(self.width):.4g}" if self._spreads else ""
        fused = "" if self._handover is None else ", computed by the next neuron"
        return f"delay={shown}, max_delay={self.max_delay}{spread}, step_mode={self.step_mode!r}{fused}"


class _FlatDelays(NamedTuple):
    """Delays of a step's elements. The delay of element `e` has the index `e // inner % len(delays)`."""

    delays: Tensor
    inner: int


def _flatten(delay: Tensor, step: Sequence[int]) -> _FlatDelays | None:
    """Returns the delays of a step in one dimension, or `None` if the delays do not broadcast to the step."""
    if delay.dim() > len(step):
        return None
    shape = (1,) * (len(step) - delay.dim()) + tuple(delay.shape)
    if any(size not in (1, step_size) for size, step_size in zip(shape, step, strict=True)):
        return None
    varying = [i for i, size in enumerate(shape) if size != 1]
    if not varying:
        return _FlatDelays(delay.reshape(1), 1)
    first, last = varying[0], varying[-1]
    if shape[first : last + 1] == tuple(step[first : last + 1]):
        return _FlatDelays(delay.reshape(-1), math.prod(step[last + 1 :]))
    return _FlatDelays(delay.expand(step).reshape(-1), 1)


_NO_WIDTH = "interpolation is 'linear', which has no width: give interpolation='gaussian' or 'triangle'."


def _interpolate(late: Tensor, later: Tensor, fraction: float | Tensor) -> Tensor:
    return late + fraction * (later - late)


def _to_value_of_step(delay: Tensor, value: Tensor) -> Tensor:
    """Returns the delay as a value of the step.

    If the delay were a captured tensor, a kernel would load a weight for each past step, and sum the gradient of each
    weight over time. If the delay is a value of the step, the kernel computes the weights in registers. The condition
    is always True. Its only purpose is that the result depends on values of the step.
    """
    return torch.where((value == value) | (value != value), delay, 0)


def _select(values: Sequence[Tensor], index: Tensor) -> Tensor:
    """Selects for each element the value whose position in `values` is the element's `index`.

    The first value, which is the most recent one, is added last. So kernels can add the other values before the first
    value is ready.
    """
    return _add_up([torch.where(index == i, value, 0) for i, value in enumerate(values)])


def _add_up(values: Sequence[Tensor]) -> Tensor:
    """Adds the values, from the last to the first."""
    return functools.reduce(torch.add, reversed(values))


def _get_dtype(value: float | Tensor) -> torch.dtype:
    return value.dtype if isinstance(value, Tensor) else torch.get_default_dtype()
