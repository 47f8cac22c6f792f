"""Recurrent neurons, in which a matrix connects the spikes of a step to the input of the next step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Unpack

from torch import Tensor, nn

from flexsn_nn._backends import COMPILED
from flexsn_nn._checks import check_function
from flexsn_nn._delay import Delay
from flexsn_nn._flexsn import FlexSN
from flexsn_nn.errors import ParameterError
from flexsn_nn.neuron._base import Neuron, RunOptions
from flexsn_nn.neuron._connections import Initialize, connection
from flexsn_nn.noise._found import draws
from flexsn_nn.transforms._transform import Transform


class Feedback(Neuron):
    """A neuron that feeds its previous output back through `recurrent`.

    The previous output `s` is the first state of `dynamics`. In a subclass, `dynamics` adds `self.recurrent(s)` to the
    neuron's input, and returns the output twice: as the output, and as the new `s`.

    Attributes:
        recurrent: module that maps `[*step] -> [*step]`.
    """

    recurrent: nn.Module

    @property
    def V(self) -> Tensor:
        """Recurrent weights, `[features, features]`. Element `[i, j]` is the weight from neuron `j` to neuron `i`.

        With `all_to_all=False`, the weights are `[features]` or `[1]`, or have the shape of the tensor given as `V`.
        The weights of a convolution are `[channels, channels, *kernel_size]`.
        """
        weights: Tensor = self.recurrent.weight if hasattr(self.recurrent, "weight") else self.recurrent.V  # type: ignore[assignment]
        return weights

    def _check_inputs(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        inputs = super()._check_inputs(inputs)
        check: Any = getattr(self.recurrent, "check", None)
        if check is not None:
            check(inputs[0].shape[1:] if self.step_mode == "m" else inputs[0].shape)
        return inputs

    def _is_ready_made(self) -> bool:
        """False: kernels may reject the step, for example because of its recurrent module."""
        return False

    def _may_fall_back(self, backend: str) -> bool:
        """True for backends with kernels. Users cannot change this step, so if kernels reject it, a loop runs."""
        return backend in COMPILED

    def _report_portability(self, *call: object) -> None:
        """Does not warn, because this layer may run as a loop on a GPU, too. `explain` reports the loop."""


class Recurrent(Feedback):
    """`s' = neuron(x + V s, v)`: any neuron whose previous output is fed back into its input.

    With delays, an earlier output is fed back: `s[t - 1 - delay[i]]` for neuron `i` (axonal delays). Each step first
    filters the past outputs of each neuron, and then computes one product, for any number of delays.

    The matrix product of each step is part of the step function, and thus of the loop over time.

    Args:
        neuron: `FlexSN` with one output: a ready-made neuron or your own. If the neuron has several inputs, the
            feedback is added to the first input. The neuron is part of this module, and its own state is not used.
        features: number of neurons, which is the size of the step's last dimension.
        all_to_all: if True, `V` is a matrix `[features, features]`. If False, every neuron is connected only to itself,
            with weights in the shape of the tensor `V`. If `V` is a number, the weights are `[features]`, or one weight
            for all neurons if `features` is `None`.
        V: initial weights with `all_to_all=False`: a number, or a tensor that broadcasts to the step.
        bias: True if the matrix has a bias. A linear layer before this layer usually has a bias already.
        learn_recurrent: True if gradients flow to the weights.
        init: function that sets the matrix in place, such as `torch.nn.init.orthogonal_`; `None` for a uniform
            distribution in `±1 / sqrt(features)`, as in `nn.Linear`.
        recurrent: your own module instead of the matrix, for example with a mask or a matrix of low rank. It maps
            `[*step] -> [*step]`. If you pass a module, leave out the arguments from `features` to `init`.
        delay: delay of the feedback in steps, in addition to the one step that recurrence always takes: a number; a
            tensor that broadcasts to the step, such as `[features]`; an `nn.Parameter`; or a `layer.Delay`, which
            defines how delays are learned, for example `Delay(20 * torch.rand(features), max_delay=20, learn=True,
            interpolation="gaussian", width=5.0)`. The `layer.Delay` becomes part of this module, and its own state is
            not used. `None` for no delay.
        options: same as in `FlexSN`. The defaults are the settings of `neuron`.

    Attributes:
        neuron: the neuron.
        recurrent: your own module; or a module whose parameter is `weight`, or `V` with `all_to_all=False`.
        delay: a `layer.Delay`, or `None`.

    Raises:
        ParameterError: `neuron` is not a `FlexSN` or has several outputs, or arguments exclude each other.
        InputShapeError: raised in a call if the step has another number of neurons.

    The states are `s`, which is initially zero, and the states of the neuron. With delays, the states `s_1` to `s_N`
    follow `s`. These states are the outputs before `s`, and `N` is `max_delay`.

    Example:
        >>> from flexsn_nn import LIF
        >>> layer = Recurrent(LIF(tau=2.0), features=3)
        >>> layer(torch.rand(5, 2, 3)).shape
        torch.Size([5, 2, 3])
        >>> [tuple(state.shape) for state in layer.states]  # s and v
        [(2, 3), (2, 3)]
    """

    neuron: FlexSN
    delay: Delay | None

    def __init__(
        self,
        neuron: FlexSN,
        features: int | None = None,
        all_to_all: bool = True,
        V: float | Tensor = 1.0,
        bias: bool = False,
        learn_recurrent: bool = True,
        init: Initialize | None = None,
        recurrent: nn.Module | None = None,
        delay: float | Tensor | Delay | None = None,
        **options: Unpack[RunOptions],
    ) -> None:
        if not isinstance(neuron, FlexSN):
            advice = "give a FlexSN, such as LIF()"
            if isinstance(neuron, type):
                advice = f"give an instance: {neuron.__name__}(...)"
            raise ParameterError(f"neuron is {neuron!r}; {advice}.")
        if neuron.num_outputs != 1:
            raise ParameterError(
                f"the neuron has num_outputs={neuron.num_outputs}; only one output can be fed back: write a step that "
                "contains the feedback, FlexSN(core, ...)."
            )
        neuron_states = (
            neuron.state_names if isinstance(neuron, Neuron) else tuple(f"state {i}" for i in range(neuron.num_states))
        )
        if not isinstance(delay, Delay | None):
            delay = Delay(delay)
        past = tuple(f"s_{i}" for i in range(1, 1 + (delay.max_delay if delay else 0)))
        object.__setattr__(self, "state_names", ("s", *past, *neuron_states))  # set on this object, not on the class
        settings: RunOptions = {
            "step_mode": neuron.step_mode,
            "backend": neuron.backend,
            "store_state_seqs": neuron.store_state_seqs,
            "precision": neuron.precision,
            "residuals": neuron.residuals,
            "watch_firing": neuron.watch_firing,
        }
        settings.update(options)
        super().__init__(neuron.num_inputs, **settings)
        if neuron.requires_grad is not None:
            requires_grad = list(neuron.requires_grad)
            self.requires_grad = [*requires_grad[: self.num_inputs], True, *requires_grad[self.num_inputs :]]
        self.neuron = neuron
        self.delay = delay
        if recurrent is None:
            self.recurrent = connection(features, all_to_all, V, bias, learn_recurrent, init)
        else:
            check_function("recurrent", recurrent)
            if (features, all_to_all, bias, learn_recurrent, init) != (None, True, False, True, None):
                raise ParameterError("recurrent is your own module: leave out the arguments of the matrix.")
            self.recurrent = recurrent
        self._draws = draws(self.core)  # reads the neuron, which is only now set
        self._set_neuron_step_mode()

    @property
    def step_mode(self) -> str:
        """`"m"` for sequences, `"s"` for single steps."""
        return self._step_mode

    @step_mode.setter
    def step_mode(self, step_mode: str) -> None:
        FlexSN.step_mode.fset(self, step_mode)  # type: ignore[attr-defined]
        self._set_neuron_step_mode()

    def _set_neuron_step_mode(self) -> None:
        """Sets the neuron's step mode, which affects the checks of inputs. The neuron's backend is never used."""
        self.neuron._step_mode = self._step_mode

    def dynamics(self, *args: Tensor) -> tuple[Tensor, ...]:
        """Computes one step, `(x, *other inputs, s, *states) -> (output, output, *states)`."""
        x, *others = args[: self.num_inputs]
        num_past = self._num_past
        past, states = args[self.num_inputs : self.num_inputs + num_past], args[self.num_inputs + num_past :]
        s = past[0] if self.delay is None else self.delay.of_past(past)
        returned = self.neuron.core(self.driven(x, s), *others, *states)
        output, *new_states = (returned,) if isinstance(returned, Tensor) else returned
        return output, output, *past[:-1], *new_states

    @property
    def _num_past(self) -> int:
        """Number of outputs that are stored as states."""
        return 1 if self.delay is None else 1 + self.delay.max_delay

    def driven(self, x: Tensor, s: Tensor) -> Tensor:
        """Computes the neuron's input: the input of the layer plus the feedback."""
        fed_back: Tensor = self.recurrent(s)
        return x + fed_back

    def init_states(self, num_states: int, step_mode: str, *inputs: Tensor) -> list[Tensor]:
        """Returns the initial states: past outputs are 0, and the other states are those of the neuron."""
        past = super().init_states(self._num_past, step_mode, *inputs)
        states = self.neuron.init_states(num_states - self._num_past, step_mode, *inputs)
        return [*past, *self._convert_states(states)]

    def _check_ranges(self) -> None:
        super()._check_ranges()
        if isinstance(self.neuron, Neuron):
            self.neuron._check_ranges()
        if self.delay is not None:
            self.delay.look_at_range()

    def _list_strays(self) -> Iterator[str]:
        yield from super()._list_strays()
        if isinstance(self.neuron, Neuron):
            yield from self.neuron._list_strays()
        if self.delay is not None:
            yield from self.delay.strays()

    def _starts_at_zero(self) -> bool:
        return self._starts_by(Recurrent) and self.neuron._starts_at_zero()

    def _starts_by_input(self) -> bool:
        return super()._starts_by_input() or self.neuron._starts_by_input()

    def _own_spike_range(self) -> tuple[int, int] | None:
        return self.neuron.spike_range if type(self).dynamics is Recurrent.dynamics else None

    def _check_inputs(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # The neuron may add inputs, such as noise.
        return super()._check_inputs(self.neuron._check_inputs(inputs))

    def _list_completing_transforms(self, inputs: tuple[Tensor, ...]) -> tuple[Transform, ...]:
        return self.neuron._list_completing_transforms(inputs)
