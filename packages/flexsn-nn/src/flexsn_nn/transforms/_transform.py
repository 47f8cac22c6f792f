"""`Transform`: a change of a step function, represented by an object with a key."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flexsn_nn._state_shapes import step_shape
from flexsn_runtime import Completion

Values = tuple[Tensor, ...]


class Core(Protocol):
    """The step that a transform changes: the neuron's step, with the changes by earlier transforms."""

    def __call__(self, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> tuple[Values, Values]:
        """Computes one step: `(outputs, new states)`."""


class Own(NamedTuple):
    """Arguments of one step that belong to a transform.

    Attributes:
        inputs: the current step of each sequence that `Transform.inputs` returned.
        states: the transform's states after the previous step; in the first step, the results of `Transform.states`.
        tensors: tensors of `Transform.tensors`, or their stand-ins in a trace.
    """

    inputs: Values
    states: Values
    tensors: Values


class Changed(NamedTuple):
    """Results of a changed step.

    Attributes:
        outputs, states: results of the step. Their number and dtypes are those of the core's results.
        own_outputs, own_states: `num_outputs` outputs and `num_states` states that the transform adds.
    """

    outputs: Values
    states: Values
    own_outputs: Values = ()
    own_states: Values = ()


class Call(NamedTuple):
    """A call of a neuron, as an argument of transforms.

    Attributes:
        inputs: inputs of the neuron, `[T, *step]` each in step mode `"m"`, `[*step]` in `"s"`.
        step_mode: `"m"` or `"s"`.
        kernels: True if compiled kernels run the call, outside of compilers.
        in_step: True if functions of the first input can be part of the step, as in kernels and in a compiler's
            operator.
        initial_states: function that returns the initial states, `[*step]` each, or `None` for zeros.
        delays: True if the kernels of the call can load earlier steps.
    """

    inputs: Values
    step_mode: str
    kernels: bool
    in_step: bool
    initial_states: Callable[[], list[Tensor] | None]
    delays: bool = False

    @property
    def step_shape(self) -> tuple[int, ...]:
        """Shape to which the steps of the inputs broadcast."""
        return step_shape(self.inputs, self.step_mode)

    @property
    def num_steps(self) -> int:
        """T; 1 in step mode `"s"`."""
        return self.inputs[0].shape[0] if self.step_mode == "m" else 1


class Transform:
    """A change of a step function for one call. A transform can add inputs, states and outputs, and change results.

    Derive from this class and write `step`. Set the counts of added values, and return the values from `inputs`,
    `states` and `tensors`. Numbers and flags that `step` reads from the object must be part of `key`, and tensors that
    it reads must be part of `tensors`. A step is traced once for all calls with equal keys. Later calls pass other
    tensors to the same kernel.

    Attributes:
        num_inputs, num_states, num_outputs: counts of added inputs, states and outputs.
        optional: True if calls that do not run in kernels may leave the transform out.
        counts_down: True if the added inputs are int32 numbers that decrease by 1 in each step. Only their sign
            matters. For kernels, `inputs` may return the numbers of the first step, expanded over time. Kernels then
            count down without reading the numbers, and end early where the step returns zeros and keeps its states.
        looks_back: maximum delay of the neuron's first input. The added input contains the delays in steps:
            floating-point numbers of one step, expanded over time. At each step, kernels load the first input from the
            step that is earlier by the delay, rounded down and limited to `looks_back`. For steps before the first
            step, kernels load zeros. `None` if the transform adds no delays. Only calls with `Call.delays` have kernels
            that load earlier steps.
        starts_at_zero: True if added states begin at zero.

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
        """Key, by default the layout of the tensors. Transforms of one class with equal keys share one trace."""
        return layout_of(self.tensors)

    @property
    def tensors(self) -> Values:
        """Tensors that the step captures. Each tensor broadcasts to the step. For gradients, see `learned`."""
        return ()

    @property
    def learned(self) -> tuple[bool, ...]:
        """For each tensor, True if a gradient may flow to it."""
        return tuple(tensor.is_floating_point() for tensor in self.tensors)

    @property
    def completion(self) -> Completion | None:
        """Completion of the first input's gradient, with indices into `tensors`."""
        return None

    @property
    def bits(self) -> bool:
        """True if kernels also write the first output as bits, as the last result."""
        return False

    def before(self, call: Call) -> tuple[Values, Transform | None]:
        """Returns the inputs of the step, and the transform to use in this call; `None` for no transform."""
        return call.inputs, self

    def inputs(self, call: Call) -> Sequence[Tensor]:
        """Returns `num_inputs` sequences `[T, *step]`, or steps `[*step]` in mode `"s"`. Steps may broadcast."""
        return ()

    def states(self, call: Call) -> Sequence[Tensor]:
        """Returns the values of `num_states` states at the beginning of every call, `[*step]` each."""
        return ()

    def state_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of the neuron's states, given their dtype without this transform."""
        return dtype

    def step(self, core: Core, inputs: Values, states: Values, own: Own) -> Changed:
        """Computes one step.

        Args:
            core: step without this change.
            inputs, states: arguments for `core`.
            own: arguments that this transform adds.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step(core, inputs, states, own).")

    def ended(self, outputs: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        """Receives the transform's added outputs `[T, *step]` and its final states `[*step]` after the call."""


def layout_of(tensors: Sequence[Tensor]) -> Hashable:
    """Returns a key: shapes, dtypes and devices of tensors."""
    return tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
