"""Layers that keep a state from call to call, but are not scans."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flexsn_nn._backends import StepMode, check_step_mode
from flexsn_nn._checks import check_tensor
from flexsn_nn._freed_graphs import GraphOfCall, graph_of_states
from flexsn_nn._leaf import Leaf
from flexsn_nn._torch_private import is_exporting, recomputation
from flexsn_nn.errors import ExportError, InputDtypeError, StateError


def is_own(function: object) -> bool:
    """True if a function or method belongs to this package."""
    module: str = getattr(function, "__module__", "")
    return module.startswith("flexsn_nn.")


def is_own_forward(module: nn.Module) -> bool:
    """True if the `forward` of a module is defined in this package, and not in a user's subclass."""
    return is_own(module.forward)


def check_first_run(name: str, reset_in: tuple[int, int] | None, remedy: str) -> None:
    """Raises `StateError` in the second run of activation checkpointing, unless the state was set during that run.

    Args:
        name: name of the module, for the message.
        reset_in: value of `recomputation()` when the state was last reset or set.
        remedy: advice on what to checkpoint instead, for the message.
    """
    if recomputation() not in (None, reset_in):
        raise StateError(
            f"activation checkpointing runs {name} a second time, and the second run would not begin with the state "
            f"of the first run. Checkpoint {remedy}."
        )


class Stateful(Leaf):
    """Base class of layers that keep a state, like neurons.

    `functional.reset_net`, `detach_net`, `get_states`, `set_states` and `set_step_mode` also work on such layers. Your
    own layer derives from this class, reads `self.states` in its `forward`, and assigns the new states. Reading
    `self.states` raises an error if an old state would give wrong results.

    Args:
        step_mode: `"m"` for sequences `[T, *step]`, `"s"` for single steps.

    Attributes:
        steps_apart: class attribute, True if each step of the output depends only on the same step of the input.
            `functional.run` then accepts lengths and resets for networks with this layer.
        states: tensors; empty before the first call and after `reset()`. States are not part of `state_dict()`.

    Raises:
        StateError: `states` is read in the second run of `torch.utils.checkpoint`, although neither `reset()` nor an
            assignment has set the states during that run.
        ExportError: `states` is read inside of `torch.export`, and was set by calls before the export.

    Example:
        >>> class Sum(Stateful):
        ...     def forward(self, x: Tensor) -> Tensor:
        ...         before = self.states[0] if self.states else torch.zeros_like(x[0])
        ...         y = before + x.cumsum(0)
        ...         self.states = [y[-1]]
        ...         return y
        >>> layer = Sum()
        >>> layer(torch.ones(2, 1)).flatten().tolist(), layer(torch.ones(2, 1)).flatten().tolist()
        ([1.0, 2.0], [3.0, 4.0])
    """

    steps_apart: ClassVar[bool] = False

    def __init__(self, step_mode: str = "m") -> None:
        super().__init__()
        self._step_mode: StepMode = check_step_mode(step_mode)
        self._states: list[Tensor] = []
        self._reset_in = recomputation()
        self._set_in_export = False
        self._graph: GraphOfCall | None = None  # graph of the states, until a call reads them

    @property
    def step_mode(self) -> str:
        """`"m"` for sequences, `"s"` for single steps."""
        return self._step_mode

    @step_mode.setter
    def step_mode(self, step_mode: str) -> None:
        self._step_mode = check_step_mode(step_mode)

    @property
    def states(self) -> list[Tensor]:
        """States at the beginning of the next call."""
        if not torch.compiler.is_compiling():
            check_first_run(
                f"the layer {type(self).__name__}", self._reset_in, "a function that calls its reset() first"
            )
            if self._graph is not None and torch.is_grad_enabled():
                self._graph.watch(self._states)
                self._graph = None
        elif self._states and not self._set_in_export and is_exporting():
            raise ExportError(
                f"the layer {type(self).__name__} has a state, which an exported program cannot keep. Call reset() "
                "before exporting."
            )
        return self._states

    @states.setter
    def states(self, states: list[Tensor] | None) -> None:
        if isinstance(states, Tensor):
            raise TypeError("states is a tensor; give a list of tensors.")
        if states is not None and not isinstance(states, Iterable):
            raise TypeError(f"states is a {type(states).__name__}; give a list of tensors.")
        self._states = [] if states is None else list(states)
        if torch.compiler.is_compiling():
            self._set_in_export = is_exporting()
        else:
            self._reset_in, self._set_in_export = recomputation(), False
            self._graph = graph_of_states(self._states)

    def initial_states(self, x: Tensor) -> list[Tensor]:
        """Returns the states before the first call with `x`, for `functional.stateless`.

        Your own layer overrides this method.

        Raises:
            StateError: the layer does not define its initial states.
        """
        raise StateError(
            f"{type(self).__name__} does not define its initial states: give it a method initial_states(x) that "
            "returns a list of tensors."
        )

    def reset(self) -> None:
        """Drops the state."""
        self.states = []

    def detach(self) -> None:
        """Detaches the state from its graph."""
        self._states = [state.detach() for state in self._states]
        if not torch.compiler.is_compiling():
            self._graph = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns the attributes for copies and pickles. The state is detached from its graph."""
        return {**self.__dict__, "_states": [state.detach() for state in self._states], "_graph": None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Stateful:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._states = [fn(state) for state in self._states]
        return self


def check_stored_state(name: str, state: Tensor, shape: torch.Size, like: Tensor) -> None:
    """Raises `StateError` unless a state matches the step of a call.

    Args:
        name: name of the state, for the message.
        state: the state.
        shape: expected shape for this call.
        like: input with the expected dtype and device.
    """
    actual = f"{list(state.shape)} {state.dtype} on {state.device}"
    expected = f"{list(shape)} {like.dtype} on {like.device}"
    if state.shape != shape or state.dtype != like.dtype or state.device != like.device:
        raise StateError(f"{name} is {actual}; for this input it is {expected}. Call reset() between batches.")


def check_floating(name: str, x: Tensor) -> None:
    """Raises `InputDtypeError` or `TypeError` unless the input is a floating-point tensor."""
    check_tensor("the input", x)
    if not x.is_floating_point():
        raise InputDtypeError(f"the input is {x.dtype}; {name} needs floating-point input: x.float().")
