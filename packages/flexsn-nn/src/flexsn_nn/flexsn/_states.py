"""The state of a neuron between its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, Self

import torch
from torch import Tensor

from flexsn_nn._freed_graphs import GraphOfCall
from flexsn_nn._programs import Programs
from flexsn_nn._spike_bits import SpikeBits
from flexsn_nn._state_shapes import check_states, plain_states, step_shape
from flexsn_nn._stateful import is_own
from flexsn_nn._torch_private import constant, is_exporting, recomputation
from flexsn_nn.errors import ExportError, StateError
from flexsn_nn.flexsn._exports import InExport
from flexsn_nn.flexsn._settings import Settings
from flexsn_nn.noise._draws import Draws, Means, example
from flexsn_nn.noise._found import draws, step_draws
from flexsn_nn.transforms._transform import Transform


class KeepsStates(Settings):
    """Part of `FlexSN` that stores the results of calls, and creates and checks initial states.

    Attributes:
        states, state_seqs, count_spikes, spike_counts: same as in `FlexSN`.
    """

    states: list[Tensor]
    state_seqs: list[Tensor]
    count_spikes: bool
    spike_counts: Tensor | None
    _bits: SpikeBits
    _programs: Programs
    _shapes_for: tuple[torch.Size, list[torch.Size]] | None
    _graph: GraphOfCall | None
    _exported: InExport | None = None
    # True in a call that receives its states as arguments and returns them: see `functional.stateless`.
    _carries: bool = False

    def __setattr__(self, name: str, value: Any) -> None:
        stored: Any = self._to_states(value) if name == "states" else value
        super().__setattr__(name, stored)
        if not torch.compiler.is_compiling():
            self.__dict__.update(_ready_made=None, _repeats=None, _again=None)
            if name == "states":
                self.__dict__.update(_graph=None, _reset_in=recomputation())
            if name == "core":
                self.__dict__["_draws"] = draws(value)
                self._forget_decisions()

    def _to_states(self, states: Any) -> list[Any]:
        """Converts a value that is assigned to `states` to a list. `None` becomes an empty list, which is a reset."""
        if isinstance(states, Tensor):
            raise TypeError(f"states is a tensor; give a list of num_states={self.num_states} tensors.")
        if states is not None and not isinstance(states, Iterable):
            raise TypeError(
                f"states is a {type(states).__name__}; give a list of num_states={self.num_states} tensors."
            )
        return [] if states is None else list(states)

    def _store_results(self, states: list[Tensor], state_seqs: list[Tensor], counts: Tensor | None) -> None:
        """Stores all results of a call on the module."""
        # Bypasses nn.Module's __setattr__, because __setattr__ takes half the time of a kernel launch.
        self.__dict__.update(states=states, state_seqs=state_seqs, spike_counts=counts)

    def reset(self) -> None:
        """Drops the state, so that the next call begins with the initial state."""
        if torch.compiler.is_compiling():
            self.states, self.state_seqs, self.spike_counts = [], [], None
            if is_exporting():
                self._end_export()
        else:  # bypasses `__setattr__`, as `forward` does
            self._forget(recomputation())

    def _forget(self, current_recomputation: tuple[int, int] | None) -> None:
        """Resets the neuron outside of compilers.

        Args:
            current_recomputation: result of `recomputation()` during the reset.
        """
        self.__dict__.update(states=[], state_seqs=[], spike_counts=None, _graph=None, _reset_in=current_recomputation)

    def detach(self) -> None:
        """Detaches the state from its graph (truncated backpropagation through time)."""
        states = [state.detach() for state in self.states]
        state_seqs = [state.detach() for state in self.state_seqs]
        counts = None if self.spike_counts is None else self.spike_counts.detach()
        if torch.compiler.is_compiling():
            self.states, self.state_seqs, self.spike_counts = states, state_seqs, counts
        else:  # not an assignment, because an assignment of `states` would count as a reset during recomputation
            self._store_results(states, state_seqs, counts)

    def _get_export_states(self) -> list[Tensor]:
        """Returns the states at the beginning of a call inside of `torch.export`; empty for the initial states.

        Raises:
            ExportError: the exported program would not begin or continue like the neuron.
        """
        if self.states:
            raise ExportError(
                "the neuron has a state, which an exported program cannot keep. Call reset() before exporting, or "
                "export functional.stateless(net), or a module that calls neuron.step(inputs, states) and returns the "
                "states."
            )
        if torch.compiler.is_dynamo_compiling():
            if self._is_exported_again():
                raise ExportError(
                    "the neuron is called a second time in one program, and torch.export.export(strict=True) cannot "
                    "pass its state from call to call. Export with strict=False, or a module that calls "
                    "neuron.step(inputs, states) and passes the states on."
                )
            return []
        exported = self._exported
        return [] if exported is None or not exported.is_now() else exported.states

    @constant  # Dynamo runs this method without tracing it, so that the assignment is not part of the graph
    def _is_exported_again(self) -> bool:
        exported = self._exported
        self.__dict__["_exported"] = InExport(())
        return exported is not None and exported.is_now()

    @constant
    def _end_export(self) -> None:
        self.__dict__["_exported"] = None

    def init_states(self, num_states: int, step_mode: str, *inputs: Tensor) -> list[Tensor]:
        """Returns the initial states, each of shape `[*step]`: zeros in the first input's dtype.

        With `precision="float32"`, the states for a half-precision input are in float32.

        To begin with other states, override this method.

        The states have the memory format of the first input that has the step's shape.

        Args:
            num_states: number of states.
            step_mode: `"m"` if time is the first dimension of `inputs`, `"s"` if they are single steps.
            inputs: arguments of `forward`.
        """
        shape = step_shape(inputs, step_mode)
        dtype = self._state_dtype(inputs)
        for x in inputs:
            if step_mode == "s" and x.shape == shape:
                return [torch.zeros_like(x, dtype=dtype) for _ in range(num_states)]
            if step_mode == "m" and x.shape[1:] == shape and x.shape[0] > 0:
                return [torch.zeros_like(x[0], dtype=dtype) for _ in range(num_states)]
        return [inputs[0].new_zeros(shape, dtype=dtype) for _ in range(num_states)]

    def _starts_at_zero(self) -> bool:
        """True if `init_states` certainly returns zeros, so that this method need not be called."""
        return self._starts_by(KeepsStates)

    def _starts_by(self, kind: type[KeepsStates]) -> bool:
        """True if `init_states` is the method of the class `kind`: no subclass and no assignment has replaced it."""
        return type(self).init_states is kind.init_states and "init_states" not in self.__dict__

    def _starts_by_input(self) -> bool:
        """True if `init_states` is a user's method, which may also read the values of the inputs."""
        # In torch 2.11, Dynamo mistakes `__module__` of a bound method for a descriptor.
        attributes = self.__dict__
        return not is_own(attributes["init_states"] if "init_states" in attributes else type(self).init_states)

    def _can_omit_states(self, inputs: Sequence[Tensor]) -> bool:
        """True if kernels need not receive the initial states, because these are zeros in the first input's dtype."""
        if not self._own_transforms:
            return self._starts_at_zero()
        return self._starts_at_zero() and self._state_dtype(inputs) == inputs[0].dtype

    def _state_dtype(self, inputs: Sequence[Tensor]) -> torch.dtype:
        dtype: torch.dtype = inputs[0].dtype
        for transform in self._own_transforms:
            dtype = transform.state_dtype(dtype)
        return dtype

    def _convert_states(self, states: Sequence[Tensor]) -> list[Tensor]:
        """Converts states to the dtypes that the neuron's transforms require."""
        return [state.to(self._state_dtype([state])) for state in states] if self._own_transforms else [*states]

    def _create_initial_states(self, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        if torch.compiler.is_compiling() and self._starts_at_zero():
            # All elements are views of a single zero. A compiler would otherwise write one zero for each element.
            zero = inputs[0].new_zeros((), dtype=self._state_dtype(inputs))
            return [zero.expand(step_shape(inputs, self._step_mode)) for _ in range(self.num_states)]
        states = list(self.init_states(self.num_states, self._step_mode, *inputs))
        if len(states) != self.num_states:
            raise StateError(f"init_states returned {len(states)} tensors; num_states is {self.num_states}.")
        if not torch.compiler.is_compiling():
            self.__dict__["_shapes_for"] = torch.Size(step_shape(inputs, self._step_mode)), [s.shape for s in states]
        return states

    def _state_shapes(self, inputs: tuple[Tensor, ...]) -> list[torch.Size]:
        """Returns the shapes of the states for these inputs, which are the shapes of the initial states."""
        shape = torch.Size(step_shape(inputs, self._step_mode))
        if self._starts_by(KeepsStates):
            return [shape] * self.num_states
        if torch.compiler.is_compiling():
            return [state.shape for state in self._create_initial_states(inputs)]
        if self._shapes_for is None or self._shapes_for[0] != shape:
            with torch.no_grad():
                self._shapes_for = shape, [state.shape for state in self._create_initial_states(inputs)]
        return self._shapes_for[1]

    def _prepare_states(self, states: list[Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """Prepares states for a call with these inputs. Raises an error if the states do not match the inputs."""
        if len(states) != self.num_states:
            raise StateError(f"there are {len(states)} states; num_states is {self.num_states}.")
        if not torch.compiler.is_compiling():
            states = plain_states(states)
        shape, device = step_shape(inputs, self._step_mode), inputs[0].device
        check_states(states, shape, device, lambda: self._state_shapes(inputs))
        if not torch.compiler.is_compiling():
            states = for_autograd(states)
        # States may have another dtype, because converting a module to half precision also converts its states.
        return self._convert_states(states)

    # -- random numbers ------------------------------------------------------------------------------------

    def _find_drawing_class(self, transforms: Sequence[Transform]) -> type[Transform] | None:
        """Returns the class of the transform for the random numbers of the step; `None` if the step draws none.

        Args:
            transforms: transforms of the call, whose steps may also draw numbers.
        """
        draws: bool = self._draws
        for transform in transforms:
            draws = draws or step_draws(type(transform))
        if not draws:
            return None
        return Draws if self.training or self._numbers.in_evaluation else Means

    def _add_draws(self, transforms: tuple[Transform, ...], *, begins: bool, keep: bool) -> tuple[Transform, ...]:
        """Adds a transform that passes the places of random numbers to the step, if the step draws any.

        In evaluation, the transform may replace the numbers by their means instead.

        Args:
            begins, keep: arguments of `Numbers.places`.
        """
        kind = self._find_drawing_class(transforms)
        if kind is None:
            return transforms
        return *transforms, Means() if kind is Means else Draws(self._numbers, begins=begins, keep=keep)

    def _add_example_draws(self, transforms: tuple[Transform, ...]) -> tuple[Transform, ...]:
        """Adds the transform of `_add_draws` for a trace, without changing a generator."""
        kind = self._find_drawing_class(transforms)
        if kind is None:
            return transforms
        return *transforms, Means() if kind is Means else example()

    def __getstate__(self) -> dict[str, Any]:
        """Returns the attributes for copies and pickles, without kernels and with detached states."""
        attributes = self.__dict__.copy()
        attributes["_repeats"] = attributes["_again"] = attributes["_graph"] = attributes["_exported"] = None
        attributes["_numbers"] = copy(self._numbers)
        attributes["_programs"], attributes["_bits"] = copy(self._programs), copy(self._bits)
        attributes["states"] = [state.detach() for state in self.states]
        attributes["state_seqs"] = [state.detach() for state in self.state_seqs]
        attributes["spike_counts"] = None if self.spike_counts is None else self.spike_counts.detach()
        return attributes

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.states = [fn(state) for state in self.states]
        self.state_seqs = [fn(state) for state in self.state_seqs]
        self._numbers.apply(fn)
        return self


def for_autograd(states: list[Tensor]) -> list[Tensor]:
    """Copies states that were created in `torch.inference_mode`, so that autograd can save them.

    Does nothing inside of `torch.inference_mode`.
    """
    if torch.is_inference_mode_enabled():
        return states
    return [state.clone() if state.is_inference() else state for state in states]
