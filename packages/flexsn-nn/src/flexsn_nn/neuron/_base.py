"""Base class of neurons whose step is a method, with named parameters, named states, and checks of the inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from typing import Any, ClassVar, TypedDict, Unpack

import torch
from torch import Tensor, nn

from flexsn_nn._affine import Producer
from flexsn_nn._checks import Range, check_name, check_number
from flexsn_nn._example_outputs import Spec
from flexsn_nn._flexsn import FlexSN
from flexsn_nn._hints import of_attribute, of_parameter
from flexsn_nn._inputs import check_real
from flexsn_nn._leaf import refuse_proxies
from flexsn_nn._numbers import fit_checkpoint, learned
from flexsn_nn._ranges import Ranges
from flexsn_nn._state_shapes import step_shape
from flexsn_nn._within import within
from flexsn_nn.errors import (
    ExampleError,
    ParameterError,
    StateError,
    UnknownAttributeError,
    UnknownParameterError,
)
from flexsn_nn.flexsn._options import CallOptions


class RunOptions(TypedDict, total=False):
    """Settings of a neuron's calls; see `FlexSN` for their meaning and defaults."""

    step_mode: str
    backend: str
    store_state_seqs: bool
    precision: str
    residuals: str
    watch_firing: bool


class Neuron(FlexSN):
    """A `FlexSN` whose step function is its own method `dynamics`.

    To write a neuron, name its states, store its parameters with `hold` or `hold_number`, and write one time step:

        class LeakyIntegrator(Neuron):
            state_names = ("v",)
            decay: float | Tensor

            def __init__(self, decay: float = 0.9) -> None:
                super().__init__()
                self.hold_number("decay", decay, at_least=0, at_most=1)

            def dynamics(self, x, v):
                h = self.bounded("decay", self.decay, v) * v + x
                return h, h

    `ImmediateReset` adds a threshold and a reset.

    Args:
        num_inputs: number of inputs that `dynamics` takes before its states.
        options: `step_mode`, `backend`, `store_state_seqs`, `precision`, `residuals`, `watch_firing`, same as in
            `FlexSN`.

    Attributes:
        state_names: names of the states. `dynamics` takes them in this order, and returns them after its output.
        dynamics: `dynamics(*inputs, *states) -> (output, *new_states)`, one time step.
    """

    state_names: ClassVar[tuple[str, ...]] = ("v",)
    dynamics: Callable[..., tuple[Tensor, ...]]

    def __init__(self, num_inputs: int = 1, **options: Unpack[RunOptions]) -> None:
        for name in options.keys() - RunOptions.__annotations__.keys():
            classes = [kind for kind in type(self).__mro__ if issubclass(kind, Neuron)]
            parameters = [parameter for kind in classes for parameter in signature(kind.__init__).parameters]
            names = dict.fromkeys((*parameters, *RunOptions.__annotations__))
            hint = of_parameter(name, [parameter for parameter in names if parameter not in ("self", "options")])
            raise UnknownParameterError(f"{type(self).__name__} has no argument {name!r}. {hint}")
        super().__init__(self.dynamics, num_inputs, len(self.state_names), 1, **options)
        self._held: list[str] = []
        self._limits: dict[str, Range] = {}
        self._ranges = Ranges()

    def hold(self, name: str, value: object, *, learn: bool = False) -> None:
        """Stores a parameter as the attribute `name`, and replaces an earlier parameter with this name.

        Args:
            value: value of the parameter. An `nn.Parameter` is learned. Any other tensor becomes a buffer, and must
                broadcast to the step (`[C, 1, 1]` for a value per channel of `[B, C, H, W]`). A value that is not a
                tensor becomes a constant of the compiled kernel.
            learn: True to make an `nn.Parameter` of a number or a tensor.
        """
        if hasattr(self, name):
            delattr(self, name)
            self._programs.forget()  # the former value may be a buffer, and the new value a parameter
        if name not in self._held:
            self._held.append(name)
        if learn and not isinstance(value, nn.Parameter):
            value = learned(value, _get_float_dtype(value))
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            self.register_buffer(name, value)
        else:
            setattr(self, name, value)

    def hold_number(self, name: str, value: float | Tensor, *, learn: bool = False, **limits: Unpack[Range]) -> None:
        """Stores a number, or a tensor of numbers, like `hold`, and checks its range.

        Numbers that are assigned later are also checked. If an optimizer moves a parameter out of its range, the
        parameter keeps its value. `bounded` then returns the nearest number in the range, with the gradient at that
        number. This gradient leads the parameter back into the range if the loss decreases in that direction. The next
        call warns about the parameter, once (`RangeWarning`). Inside of `torch.compile`, no call warns, and only
        `explain()` reports that a parameter is out of range.

        Args:
            limits: `at_least`, `above`, `at_most`, `below`, and a `hint` for the error message.

        Raises:
            ParameterError: the value is out of range, not finite, or not a number.
        """
        check_number(name, value, **limits)
        self.hold(name, value, learn=learn)
        self._limits[name] = limits

    def bounded(self, name: str, value: float | Tensor, like: Tensor) -> float | Tensor:
        """Returns a parameter in the dtype of `like`, within the limits of `hold_number`, for use in `dynamics`.

        The gradient is the gradient at the nearest number in the range, as in `functional.within`.

        Args:
            name: name of the parameter.
            value: current value of the parameter: the neuron's attribute with this name.
            like: tensor with which the parameter is combined.
        """
        fitted = fit(value, like)
        return within(fitted, **self._limits[name]) if isinstance(fitted, Tensor) else fitted

    def __setattr__(self, name: str, value: Any) -> None:
        # A check of a tensor would wait for the tensor's device. Instead, `bounded` limits the tensor's values in each
        # step.
        if name in self.__dict__.get("_limits", ()) and not isinstance(value, Tensor):
            check_number(name, value, **self._limits[name])
        if name in self.state_names:
            raise UnknownAttributeError(f"no step would read {name!r}: {of_attribute(name, self.state_names)}.")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            hint = of_attribute(name, self.state_names)
            if hint is None:
                raise
        raise UnknownAttributeError(f"{type(self).__name__} has no attribute {name!r}: {hint}.")

    def forward(self, *inputs: Tensor, **options: Unpack[CallOptions]) -> Tensor:
        """Runs the neuron from its current state.

        Args:
            inputs: floating-point tensors, `[T, *step]` in step mode `"m"`, or `[*step]` in `"s"`. In `"m"`, the first
                dimension is always time, even if your data is batch-first.
            options: `lengths`, `resets`, `transforms`, `affine`, same as in `FlexSN`.

        Returns:
            The output, shaped like the input. The output is one tensor, so `spikes, v = neuron(x)` would unpack its
            steps. Use `step` to get the states.

        Raises:
            InputDtypeError: the input is integer, boolean, complex or float8. The error is a `TypeError`.
            InputLayoutError: the input is nested, sparse or quantised, or has named dimensions. The error is a
                `TypeError`.
            InputShapeError: a sequence has no dimensions. The error is a `ValueError`.
        """
        if inputs.__class__ is not tuple:  # torch.fx traces the neuron itself
            raise refuse_proxies(type(self).__name__)
        if not torch.compiler.is_compiling():
            self._check_ranges()
        output = super().forward(*inputs, **options)
        assert isinstance(output, Tensor)
        return output

    def _check_ranges(self) -> None:
        """Warns once for each learned number that has left its range."""
        attributes = self.__dict__
        attributes["_ranges"].look(self, attributes["_limits"])

    def step(
        self,
        inputs: Tensor | Sequence[Tensor],
        states: Sequence[Tensor] | None = None,
        **options: Unpack[CallOptions],
    ) -> tuple[Tensor, list[Tensor]]:
        """Runs the neuron from `states`: `output, states = neuron.step(x, states)`. The module stores no states."""
        if not torch.compiler.is_compiling():
            self._check_ranges()
        output, new_states = super().step(inputs, states, **options)
        assert isinstance(output, Tensor)
        return output, new_states

    def state(self, name: str = "v") -> Tensor | None:
        """Returns the state with this name, `[*step]`; `None` before the first call and after `reset()`."""
        index = self._find_state_index(name)
        return self.states[index] if self.states else None

    def state_seq(self, name: str = "v") -> Tensor | None:
        """Returns the state after each step of the last call, `[T, *step]`.

        Returns `None` without `store_state_seqs`, in step mode `"s"`, before the first call and after `reset()`.
        """
        index = self._find_state_index(name)
        return self.state_seqs[index] if self.state_seqs else None

    def explain(self, *inputs: Tensor, affine: Producer | None = None) -> str:
        """Returns the text of `FlexSN.explain`, with a line for each parameter out of range. Waits for the device."""
        return "\n".join([super().explain(*inputs, affine=affine), *self._list_strays()])

    def _list_strays(self) -> Iterator[str]:
        for name, limits in self._limits.items():
            try:
                check_number(name, getattr(self, name), **limits)
            except ParameterError as error:
                yield f"a parameter has left its range, and counts as the nearest number in it: {error}"

    def extra_repr(self) -> str:
        names = dict.fromkeys([*self._held, *self._parameters, *self._buffers])
        shown = (f"{name}={_show(getattr(self, name))}" for name in names)
        return ", ".join([*shown, f"step_mode={self.step_mode!r}", f"backend={self.backend!r}"])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        fit_checkpoint(state_dict, prefix, self._parameters, self._held)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _explain_error(self, inputs: Sequence[Tensor], states: Sequence[Tensor], error: Exception) -> None:
        super()._explain_error(inputs, states, error)
        x = inputs[0]
        shape = x.shape[1:] if self.step_mode == "m" else x.shape
        for name in self._held:
            value = getattr(self, name)
            if isinstance(value, Tensor) and not _can_broadcast(value.shape, shape):
                raise ParameterError(
                    f"{name} has shape {list(value.shape)}, which does not broadcast to a step of {list(shape)}. For "
                    "a value per channel of [B, C, H, W], give it the shape [C, 1, 1]."
                ) from error
        for name, state in zip(self.state_names, states, strict=False):
            if state.dtype != self._state_dtype([x]):
                raise StateError(
                    f"the state {name} is {state.dtype} and the input {x.dtype}. Call reset() between batches of "
                    "different dtypes, or pass matching states."
                ) from error

    def _check_inputs(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        inputs = super()._check_inputs(inputs)
        for i, x in enumerate(inputs):
            check_real("the input" if len(inputs) == 1 else f"input {i}", x)
        return inputs

    def _is_ready_made(self) -> bool:
        """True if the step, and all objects that the neuron holds, belong to this package and not to the user."""
        values = (getattr(self, name) for name in self._held)
        return _is_own(self) and all(
            value is None or isinstance(value, bool | int | float | str | Tensor) or _is_own(value) for value in values
        )

    def _predict_specs(self, inputs: Sequence[Tensor], states: Sequence[Tensor] = ()) -> list[Spec] | None:
        """Returns the shape and dtype of a ready-made neuron's output without a trace; `None` for a user's neuron.

        The shape is that of a step of the inputs. The dtype is the promoted dtype of the first input and the states.
        With `precision="float32"`, the output has the dtype of the first input.
        """
        if not _is_own(self):
            return None
        promoted = () if self.precision == "float32" else states
        dtype = functools.reduce(torch.promote_types, (state.dtype for state in promoted), inputs[0].dtype)
        return [(step_shape(inputs, self.step_mode), dtype)]

    def _derive_specs(self, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> list[Spec]:
        """Traces the user's `dynamics` to find the shapes and dtypes of the outputs."""
        try:
            return self._trace_specs(inputs, states)
        except Exception as error:  # on tensors without data, `dynamics` may raise any error
            raise ExampleError(
                f"the input has no steps (T == 0), and {type(self).__name__}.dynamics cannot be traced, so the shape "
                "of an output is unknown: leave out sequences without steps."
            ) from error

    def _find_state_index(self, name: str) -> int:
        check_name("state", name, self.state_names)
        return self.state_names.index(name)


def fit(value: float | Tensor, like: Tensor) -> float | Tensor:
    """Returns `value` in the dtype of `like`.

    Without this conversion, a float32 parameter per channel, or a float32 result of `exp` or `log` under autocast,
    would widen a half-precision state. If `like` has no dimensions, a tensor with one element also loses its
    dimensions.
    """
    if not isinstance(value, Tensor):
        return value
    return value.to(like.dtype) if like.dim() or not value.dim() else value.to(like.dtype).squeeze()


def _can_broadcast(shape: Sequence[int], target: Sequence[int]) -> bool:
    """True if a tensor of `shape` can be expanded to `target`."""
    return len(shape) <= len(target) and all(
        a in (1, b) for a, b in zip(reversed(shape), reversed(target), strict=False)
    )


def _is_own(value: object) -> bool:
    return type(value).__module__.startswith("flexsn_nn.")


def _get_float_dtype(value: object) -> torch.dtype:
    return value.dtype if isinstance(value, Tensor) else torch.get_default_dtype()


def _show(value: object) -> str:
    if not isinstance(value, Tensor):
        return getattr(value, "__name__", repr(value))
    kind = "Parameter" if isinstance(value, nn.Parameter) else "Tensor"
    return f"{value.item():.4g} ({kind})" if value.numel() == 1 else f"{kind}{list(value.shape)}"
