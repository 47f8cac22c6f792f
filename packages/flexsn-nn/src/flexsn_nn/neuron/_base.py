"""What all neurons share: parameters by name, states by name, and a look at what comes in."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypedDict, Unpack

import torch
from torch import Tensor, nn

from flexsn_nn._checks import check_name
from flexsn_nn._flexsn import FlexSN
from flexsn_nn._zoo_errors import InputDtypeError


class RunOptions(TypedDict, total=False):
    """How a neuron runs; see `FlexSN` for the meaning and the defaults."""

    step_mode: str
    backend: str
    store_state_seqs: bool


class Neuron(FlexSN):
    """A `FlexSN` whose step function is its own method `dynamics`.

    To write a neuron, name its states, keep its parameters with `hold`, and write one time step:

        class LeakyIntegrator(Neuron):
            state_names = ("v",)
            decay: float | Tensor

            def __init__(self, decay: float = 0.9) -> None:
                super().__init__()
                self.hold("decay", decay)

            def dynamics(self, x, v):
                h = fit(self.decay, v) * v + x
                return h, h

    `ImmediateReset` adds a threshold and a reset.

    Args:
        num_inputs: how many inputs `dynamics` takes before its states.
        options: `step_mode`, `backend`, `store_state_seqs`, as in `FlexSN`.

    Attributes:
        state_names: the states that `dynamics` takes, and returns behind its one output, in this order.
        dynamics: `dynamics(*inputs, *states) -> (output, *new_states)`, one time step.
    """

    state_names: ClassVar[tuple[str, ...]] = ("v",)
    dynamics: Callable[..., tuple[Tensor, ...]]

    def __init__(self, num_inputs: int = 1, **options: Unpack[RunOptions]) -> None:
        super().__init__(self.dynamics, num_inputs, len(self.state_names), 1, **options)
        self._constants: list[str] = []

    def hold(self, name: str, value: object, *, learn: bool = False) -> None:
        """Keeps a parameter as the attribute `name`, in the place of an earlier one.

        Args:
            value: an `nn.Parameter` is learned; a tensor becomes a buffer, and must broadcast to the step
                (`[C, 1, 1]` for a value per channel of `[B, C, H, W]`); anything else is a constant of the
                compiled kernel.
            learn: whether to make an `nn.Parameter` of a number or a tensor.
        """
        if hasattr(self, name):
            delattr(self, name)
            self._program = None  # it would look for a buffer where there is a parameter now
        if name in self._constants:
            self._constants.remove(name)
        if learn and not isinstance(value, nn.Parameter):
            value = nn.Parameter(torch.as_tensor(value, dtype=_float_dtype(value)).detach().clone())
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            self.register_buffer(name, value)
            return
        setattr(self, name, value)
        if not isinstance(value, nn.Parameter):
            self._constants.append(name)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Runs the neuron, from the state that it has.

        Args:
            inputs: `[T, *step]` in step mode `"m"`, `[*step]` in `"s"`; floating point.

        Returns:
            The output, shaped like the input.

        Raises:
            InputDtypeError: an integer or boolean input (a `TypeError`).
        """
        for x in inputs:
            if isinstance(x, Tensor) and not x.is_floating_point():
                raise InputDtypeError(
                    f"the input is {x.dtype}; a membrane needs floating-point input: x.float()."
                )
        output = super().forward(*inputs)
        assert isinstance(output, Tensor)
        return output

    def state(self, name: str = "v") -> Tensor | None:
        """The state of this name, `[*step]`; `None` before the first call and after `reset()`."""
        index = self._state_index(name)
        return self.states[index] if self.states else None

    def state_seq(self, name: str = "v") -> Tensor | None:
        """The state after each step of the last call, `[T, *step]`, if `store_state_seqs`, else `None`."""
        index = self._state_index(name)
        return self.state_seqs[index] if self.state_seqs else None

    def extra_repr(self) -> str:
        held = [*self._constants, *self._parameters, *self._buffers]
        shown = (f"{name}={_show(getattr(self, name))}" for name in held)
        return ", ".join([*shown, f"step_mode={self.step_mode!r}", f"backend={self.backend!r}"])

    def _state_index(self, name: str) -> int:
        check_name("state", name, self.state_names)
        return self.state_names.index(name)


def fit(value: float | Tensor, like: Tensor) -> float | Tensor:
    """`value` in the dtype of `like`: a float32 parameter per channel must not widen a half state."""
    return value.to(like.dtype) if isinstance(value, Tensor) else value


def _float_dtype(value: object) -> torch.dtype:
    return value.dtype if isinstance(value, Tensor) else torch.get_default_dtype()


def _show(value: object) -> str:
    if not isinstance(value, Tensor):
        return getattr(value, "__name__", repr(value))
    kind = "Parameter" if isinstance(value, nn.Parameter) else "Tensor"
    return f"{value.item():.4g} ({kind})" if value.numel() == 1 else f"{kind}{list(value.shape)}"
