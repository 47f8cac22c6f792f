"""`Transform`: a change of a step function, as a value with a key."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flexsn_nn._state_shapes import step_shape
from flexsn_runtime import Completion

Values = tuple[Tensor, ...]


class Core(Protocol):
    """The step that a transform changes: a neuron's, with the changes of the transforms before."""

    def __call__(self, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> tuple[Values, Values]:
        """`(outputs, new states)` of one step."""


class Own(NamedTuple):
    """A transform's own arguments of one step.

    Attributes:
        inputs: one step of each sequence of `Transform.inputs`.
        states: `Transform.states`, as the step before left them.
        tensors: `Transform.tensors`, or what stands for them in a trace.
    """

    inputs: Values
    states: Values
    tensors: Values


class Changed(NamedTuple):
    """Results of a changed step.

    Attributes:
        outputs, states: the step's, in the number and with the dtypes that the core returns.
        own_outputs, own_states: the transform's: `num_outputs` and `num_states` of them.
    """

    outputs: Values
    states: Values
    own_outputs: Values = ()
    own_states: Values = ()


class Call(NamedTuple):
    """The call of a neuron that a transform is used in.

    Attributes:
        inputs: of the neuron, `[T, *step]` each in step mode `"m"`, `[*step]` in `"s"`.
        step_mode: `"m"` or `"s"`.
        kernels: compiled kernels run the call, outside of compilers.
        in_step: functions of the first input can be part of the step: kernels or a compiler's operator run it.
        initial_states: makes them, `[*step]` each; `None`: they are zeros.
        delays: kernels that can load earlier steps run the call.
    """

    inputs: Values
    step_mode: str
    kernels: bool
    in_step: bool
    initial_states: Callable[[], list[Tensor] | None]
    delays: bool = False

    @property
    def step_shape(self) -> tuple[int, ...]:
        """The shape that the inputs' steps broadcast to."""
        return step_shape(self.inputs, self.step_mode)

    @property
    def num_steps(self) -> int:
        """T; 1 in step mode `"s"`."""
        return self.inputs[0].shape[0] if self.step_mode == "m" else 1


class Transform:
    """A change of a step function, for one call: more inputs, states or outputs, and other results.

    Derive from it and write `step`. Set the counts of what is added, and give it by `inputs`, `states` and `tensors`.
    Numbers and flags that `step` reads from the object belong into `key`; tensors into `tensors`: a step is traced
    once for all calls with equal keys, and further calls pass other tensors to the same kernel.

    Attributes:
        num_inputs, num_states, num_outputs: how many of each are added.
        optional: calls may run without it, where kernels do not run.
        counts_down: the inputs that are added are numbers, int32, that are less by 1 in each step, and of which only
            the sign counts. In calls of kernels `inputs` may give their first step, expanded over time: kernels count
            by themselves, and end early where the step gives zeros and keeps its states.
        looks_back: the input that is added holds numbers of steps, floating point, one step expanded over time:
            kernels load the neuron's first input that many steps earlier, rounded down and at most `looks_back`, and
            zeros before the first step. `None`: none does. Calls with `Call.delays` alone have such kernels.
        starts_at_zero: states that are added begin with zeros, as those of the neuron do in calls that leave them out.

    Example: see docs/transforms.md.
    """

    num_inputs: int = 0
    num_states: int = 0
    num_outputs: int = 0
    optional: bool = False
    counts_down: bool = False
    looks_back: int | None = None
    starts_at_zero: bool = False

    @property
    def key(self) -> Hashable:
        """Equal for transforms of one class that one trace serves; at first, the layout of the tensors."""
        return layout_of(self.tensors)

    @property
    def tensors(self) -> Values:
        """Tensors that the step captures; each broadcasts to the step. Gradients flow to them."""
        return ()

    @property
    def learned(self) -> tuple[bool, ...]:
        """For each tensor, whether a gradient may flow to it."""
        return tuple(tensor.is_floating_point() for tensor in self.tensors)

    @property
    def completion(self) -> Completion | None:
        """Completion of the first input's gradient, with indices into `tensors`."""
        return None

    @property
    def bits(self) -> bool:
        """Kernels also write the first output as bits, as the last of the results."""
        return False

    def before(self, call: Call) -> tuple[Values, Transform | None]:
        """The inputs of the step and the transform to use in this call; `None`: the call needs none."""
        return call.inputs, self

    def inputs(self, call: Call) -> Sequence[Tensor]:
        """`num_inputs` sequences `[T, *step]`; steps `[*step]` in step mode `"s"`. They may broadcast after T."""
        return ()

    def states(self, call: Call) -> Sequence[Tensor]:
        """The initial values of `num_states` states, `[*step]` each. They begin again with each call."""
        return ()

    def state_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the neuron's states, from the dtype that they have without this transform."""
        return dtype

    def step(self, core: Core, inputs: Values, states: Values, own: Own) -> Changed:
        """One step.

        Args:
            core: the step without this change.
            inputs, states: what `core` is called with.
            own: what this transform adds.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step(core, inputs, states, own).")

    def ended(self, outputs: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        """Receives, after the call, the transform's own outputs `[T, *step]` and its final states `[*step]`."""


def layout_of(tensors: Sequence[Tensor]) -> Hashable:
    """Shapes, dtypes and devices."""
    return tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
