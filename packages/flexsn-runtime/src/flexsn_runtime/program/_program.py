"""A step function and its kernels, specialized on shapes and dtypes."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen import Late, Numerics, Precision
from flexsn_graph import CutTrace, RecurrentTrace, StateMismatchError, StepPieces, StepValue, TorchError
from flexsn_runtime._recent import Recent
from flexsn_runtime.backend import TargetName, backend_on, target_on
from flexsn_runtime.errors import LateInputError, ShapeError, SpikeBitsError, TensorCountError
from flexsn_runtime.launches._kernel import CompiledKernel
from flexsn_runtime.operands._layout import broadcast_shape
from flexsn_runtime.program._autocast import autocast_now, under_autocast
from flexsn_runtime.program._cut_step import CutSpecialization
from flexsn_runtime.program._twins import TwinsOf
from flexsn_runtime.recurrent._staged import RecurrentSpecialization
from flexsn_runtime.step._pointwise_step import Specialization
from flexsn_runtime.step._residuals import check_policy
from flexsn_runtime.step._specialization import CoreSpecialization
from flexsn_runtime.step._tracing import Core, trace_values

# Maximum number of traces for one set of shapes and dtypes. A value that has changed, such as a flag, may change back.
_MOST_TRACES = 4


@dataclass(frozen=True, slots=True)
class Signature:
    """Descriptions of the arguments, and the settings, for which a step is traced."""

    device: str
    autocast: torch.dtype | None
    inputs: tuple[StepValue, ...]
    states: tuple[StepValue, ...]


class ScanProgram:
    """A step function that is scanned over time. Calls specialize the function on their shapes and dtypes.

    If the step multiplies its values by captured matrices, one kernel computes all steps if possible. Otherwise, `scan`
    launches kernels step by step, and a library computes the products between the launches.

    Args:
        core: `core(*inputs, *states) -> (*outputs, *new_states)`.
        num_inputs, num_states, num_outputs: numbers of inputs, states and outputs.
        requires_grad: for each input and state, True if its gradient may ever be needed; `None` if every gradient may
            be needed.
        precision: `"eager"` rounds float16 and bfloat16 values after each op, as in the loop. `"float32"` rounds only
            outputs and states, after each step.
        fast_math: True to allow approximate division and functions, and fused multiply-add (in C++, fused multiply-add
            and products with reciprocals). Results are close to the loop's, but not equal. The backward may compute
            states that differ from the forward's in the last bits.
        residuals: values that the forward saves for the backward, in addition to its arguments. `"recompute"` saves
            states at intervals, from which all other states are computed again. `"save"` saves the fewest bytes from
            which the gradient can be computed. `"auto"` selects whichever of the two moves fewer bytes. Only `scan`
            uses this setting: the custom ops, the wrappers and compiled graphs recompute.
        on_cpu: language of kernels on the CPU: C++, or Triton, which runs in its interpreter there.
        bits: for each output, True if the forward also writes the output as bits. A bit is 1 if the element is not 0. A
            byte contains the bits of 8 elements of a step, and its lowest bit belongs to the first of these elements.
            Bits follow the other results of `scan`, as uint8 `[T, bytes]`, where the number of bytes is a multiple of
            4. If the output's elements are not stored step after step, no bits are written, and the tensor of bits is
            `[0, bytes]`. An empty sequence means that no output has bits.
        counts_down: for each input, True if the input is the number of remaining steps of a sequence: an int32 that
            decreases by 1 in each step. Only the sign of this number matters. The input is passed as `[T, *step]`, or
            as its first step expanded over time. If its first step is expanded, kernels end when the sequences end. An
            empty sequence means that no input counts down.
        late: for each input, a description of its delays; `None` for an input without delays. The delays are the values
            of another input, which is one step expanded over time. For an element with a delay of d, kernels load the
            value of d steps earlier, and write the gradient to that step. Only elementwise steps in Triton have such
            inputs. An empty sequence means that no input is late.
        zero_one: for each output, True to raise an error for a step whose output is not known to be 0 or 1. An
            empty sequence means that no output is checked.
        pieces: pieces of another core's values, on which `core` runs; `None` if `core` runs on whole values. On pieces,
            `core` may contain all operations that `trace_step(on_pieces=True)` accepts.

    Raises:
        PrecisionError: the precision is unknown.
        TypeError: `core` is a class, or not callable.
        TensorCountError: a number of inputs, states or outputs is not valid, or the number of entries of
            `requires_grad`, `bits`, `zero_one` or `counts_down` does not match these numbers.
        LateInputError: raised when the step is traced: a step with late inputs has matrix products, sums over neurons,
            or states of several shapes.
        SpikeBitsError: raised when the step is traced: an output in `bits` or `zero_one` is not known to be 0 or 1, or
            a step with such outputs has products or runs on pieces.
        ResidualsError: the choice of residuals is unknown.
    """

    takes_products = True

    def __init__(
        self,
        core: Core,
        num_inputs: int,
        num_states: int,
        num_outputs: int,
        requires_grad: Sequence[bool] | None = None,
        *,
        precision: Precision = "eager",
        fast_math: bool = False,
        residuals: str = "auto",
        on_cpu: TargetName = "triton",
        bits: Sequence[bool] = (),
        zero_one: Sequence[bool] = (),
        pieces: StepPieces | None = None,
        counts_down: Sequence[bool] = (),
        late: Sequence[Late | None] = (),
    ) -> None:
        if isinstance(core, type) or not callable(core):
            description = (
                f"the class {core.__name__}: give an instance of it"
                if isinstance(core, type)
                else (f"a {type(core).__name__}: give a function or a module")
            )
            raise TypeError(f"core is {description}, core(*inputs, *states) -> (*outputs, *new_states).")
        for name, count in {"num_inputs": num_inputs, "num_states": num_states, "num_outputs": num_outputs}.items():
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise TensorCountError(f"{name} is {count!r}; it must be a whole number of at least 0.")
        if num_inputs < 1:
            raise TensorCountError(
                f"num_inputs is {num_inputs}; a scan needs at least one input sequence, whose leading "
                "dimension is the number of steps."
            )
        expected = num_inputs + num_states
        if requires_grad is not None and len(requires_grad) != expected:
            raise TensorCountError(
                f"requires_grad has {len(requires_grad)} entries for {num_inputs} inputs and {num_states} "
                f"states: give {expected}."
            )
        for name, flags in (("bits", bits), ("zero_one", zero_one)):
            if len(flags) not in (0, num_outputs):
                raise TensorCountError(
                    f"{name} has {len(flags)} entries for {num_outputs} outputs: give one for each, or none."
                )
        if len(counts_down) not in (0, num_inputs):
            raise TensorCountError(
                f"counts_down has {len(counts_down)} entries for {num_inputs} inputs: give one for each, or none."
            )
        self.core = core
        self.num_inputs = num_inputs
        self.num_states = num_states
        self.num_outputs = num_outputs
        self.requires_grad = requires_grad
        self.numerics = Numerics(precision, fast_math)
        self.residuals = check_policy(residuals)
        self.on_cpu: TargetName = on_cpu
        self.bits = tuple(bits)
        self.zero_one = tuple(zero_one)
        self._pieces = pieces
        self.counts_down = tuple(counts_down)
        self.late = tuple(late)
        # For each signature, the specializations, with the most recently used specialization first.
        self._specializations: Recent[list[CoreSpecialization]] = Recent()
        self._kernels: Recent[CompiledKernel] = Recent()
        self._takes_numbers = False  # True once a number that the core reads has changed
        # For each set of shapes and dtypes, the step of the last forward that will be differentiated.
        self._differentiated: Recent[CoreSpecialization] = Recent()
        # For each kind of call, the earlier calls, with the latest call first; see `_repeated.py`. This dictionary also
        # maps the layout of the arguments of `prepare` to the step and to the position of the first lifted tensor.
        self.plans: Recent[tuple[Any, ...]] = Recent()
        self._latest: CoreSpecialization | None = None
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Describes a copy of the program, which is traced and compiled separately."""
        arguments = (self.core, self.num_inputs, self.num_states, self.num_outputs, self.requires_grad)
        precision, fast_math = self.numerics.precision, self.numerics.fast_math
        make = partial(
            type(self),
            precision=precision,
            fast_math=fast_math,
            residuals=self.residuals,
            on_cpu=self.on_cpu,
            bits=self.bits,
            zero_one=self.zero_one,
            pieces=self._pieces,
            counts_down=self.counts_down,
            late=self.late,
        )
        return make, arguments

    def masked(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns inputs, with or without states. Detaches each tensor whose gradient `requires_grad` excludes."""
        if self.requires_grad is None:
            return tuple(tensors)
        return tuple(
            [t if is_allowed else t.detach() for t, is_allowed in zip(tensors, self.requires_grad, strict=False)]
        )

    @property
    def num_lifted(self) -> int | None:
        """The number of lifted tensors; `None` before the first specialization."""
        return None if self._latest is None else len(self._latest.trace.lifted_values)

    def specialize(
        self, inputs: Sequence[Tensor], states: Sequence[Tensor] | None, *, autocast: bool = True
    ) -> tuple[CoreSpecialization, tuple[Tensor, ...]]:
        """Returns the step for these shapes and dtypes, and its lifted tensors for the current captured tensors.

        Args:
            inputs: sequences `[T, *step]`.
            states: initial states `[*step]`; `None` for zeros of the step's shape and the first input's dtype.
            autocast: True to apply an active `torch.autocast` inside of the core, as in a loop.
        """
        step_inputs = tuple(StepValue(tuple(x.shape[1:]), x.dtype) for x in inputs)
        step_shape = broadcast_shape([value.shape for value in step_inputs])
        if states is None:
            step_states = (StepValue(step_shape, step_inputs[0].dtype),) * self.num_states
        else:
            step_states = tuple(StepValue.of(v) for v in states)
        device = inputs[0].device
        return self._specialize(device, step_inputs, step_states, autocast_now(device) if autocast else None)

    def specialize_examples(self, examples: Sequence[Tensor]) -> CoreSpecialization:
        """Returns the step for the shapes and dtypes of one step's inputs and states."""
        expected = self.num_inputs + self.num_states
        if isinstance(examples, Tensor):
            raise TypeError(f"example_inputs is a tensor; give a tuple of {expected}: one step's inputs and states.")
        if len(examples) != expected:
            raise TensorCountError(
                f"{len(examples)} example inputs for {self.num_inputs} inputs and {self.num_states} states: "
                f"give {expected}, of one step each."
            )
        for i, example in enumerate(examples):
            if not isinstance(example, Tensor):
                raise TypeError(f"example input {i} is a {type(example).__name__}; give a tensor.")
        values = tuple(StepValue.of(t) for t in examples)
        inputs, states = values[: self.num_inputs], values[self.num_inputs :]
        try:
            return self._specialize(examples[0].device, inputs, states)[0]
        except TorchError:  # with other shapes, torch may accept the step
            try:
                torch.broadcast_shapes(*(value.shape for value in values))
            except RuntimeError:
                shapes = ", ".join(str(list(value.shape)) for value in values)
                raise ShapeError(
                    f"the example inputs have the shapes {shapes}, which do not broadcast to one step: give one step's "
                    "inputs and states, without time, of one batch."
                ) from None
            raise

    def specialize_like(
        self, inputs: Sequence[torch.dtype], states: Sequence[torch.dtype] | None
    ) -> CoreSpecialization:
        """Returns a step for tensors of these dtypes and of unknown sizes. The step has the sizes of the last trace.

        Args:
            states: dtypes of the states; `None` for the dtype of the first input.

        Raises:
            ShapeError: inputs and states alone do not determine the shape of the results.
        """
        latest = self._latest
        assert latest is not None, "a handle's step is traced when the handle is built"
        trace = latest.trace
        if broadcast_shape([v.shape for v in (*trace.inputs, *trace.states)]) != trace.step_shape:
            raise ShapeError(
                f"the outputs have the shape {list(trace.step_shape)} only because of a captured tensor, so a "
                "compiler cannot derive this shape. Expand an input to it."
            )
        state_dtypes = [inputs[0]] * self.num_states if states is None else states
        step, _ = self._specialize(
            latest.device,
            tuple(StepValue(v.shape, d) for v, d in zip(trace.inputs, inputs, strict=True)),
            tuple(StepValue(v.shape, d) for v, d in zip(trace.states, state_dtypes, strict=True)),
        )
        return step

    def will_be_differentiated(self, step: CoreSpecialization) -> None:
        """Stores the step of a forward whose backward receives only the program."""
        self._differentiated[step.trace.inputs, step.trace.states] = step

    def check_differentiated(self, step: CoreSpecialization) -> None:
        """Raises an error if the last forward of these shapes ran another step, whose core has changed since then."""
        differentiated_step = self._differentiated.get((step.trace.inputs, step.trace.states), step)
        if differentiated_step is not step:
            differentiated_step.check_unchanged()

    @property
    def specializations(self) -> tuple[CoreSpecialization, ...]:
        """The specializations that exist now. If a step runs on pieces, the steps on these pieces replace this step."""
        with self._lock:
            specializations: list[CoreSpecialization] = []
            for steps in self._specializations.values():
                for step in steps:
                    specializations += step.program.specializations if isinstance(step, CutSpecialization) else [step]
            return tuple(specializations)

    def lifted(self) -> tuple[Tensor, ...]:
        """Returns the lifted tensors for the current captured tensors; empty before the first specialization."""
        if self._latest is None:
            return ()
        return self._latest.captured() or self._latest.trace.lift(self._latest.trace.captured)

    def forget_plans(self) -> None:
        """Makes later launches use the plans that are now on disk."""
        with self._lock:
            self.plans.clear()
            for steps in self._specializations.values():
                for step in steps:
                    step.forget_plans()

    def close(self) -> None:
        """Drops the compiled kernels. Later calls of the program compile the kernels again."""
        with self._lock:
            self._specializations.clear()
            self._differentiated.clear()
            self.plans.clear()
            if self._latest is not None:
                self._latest.close()

    def _specialize(
        self,
        device: torch.device,
        inputs: tuple[StepValue, ...],
        states: tuple[StepValue, ...],
        autocast: torch.dtype | None = None,
    ) -> tuple[CoreSpecialization, tuple[Tensor, ...]]:
        signature = Signature(device.type, autocast, inputs, states)
        specialized = self._find_specialization(signature)
        if specialized is not None:
            return specialized
        with self._lock:
            specialized = self._find_specialization(signature)
            if specialized is None:
                earlier = self._specializations.get(signature, [])
                self._takes_numbers |= any(step.trace.reads.has_other_numbers() for step in earlier[:1])
                step = self._latest = self._share_or_trace(signature, device)
                self._specializations[signature] = [step, *earlier[: _MOST_TRACES - 1]]
                specialized = step, step.captured() or step.trace.lift(step.trace.captured)
            return specialized

    def _find_specialization(self, signature: Signature) -> tuple[CoreSpecialization, tuple[Tensor, ...]] | None:
        steps = self._specializations.get(signature, [])
        for step in steps:
            captured = step.captured()
            if captured is None:
                continue
            if step is not steps[0]:
                others = (other for other in steps if other is not step)
                self._specializations[signature], self._latest = [step, *others], step
            return step, captured
        return None

    def _share_or_trace(self, signature: Signature, device: torch.device) -> CoreSpecialization:
        counts = (self.num_inputs, self.num_states, self.num_outputs)
        core = under_autocast(self.core, device, signature.autocast)
        kind: tuple[Hashable, ...] = (device, signature.autocast, counts, self.numerics, self.residuals)
        kind += (self.on_cpu, self.bits, self.zero_one, self.counts_down, self.late, self._pieces)
        backend_on(device, self.on_cpu).begin(device)
        twins = TwinsOf(core, signature.inputs, signature.states, (*kind, self._takes_numbers, self.takes_products))
        return twins.step() or twins.remember(self._trace_core(core, signature, device, counts))

    def _trace_core(
        self, core: Core, signature: Signature, device: torch.device, counts: tuple[int, int, int]
    ) -> CoreSpecialization:
        try:
            values = (*signature.inputs, *signature.states)
            on_pieces = self._pieces is not None
            products = self.takes_products and not on_pieces
            trace = trace_values(core, counts, values, device, products=products, on_pieces=on_pieces)
        except StateMismatchError as error:
            if signature.autocast is None:
                raise
            raise StateMismatchError(
                f"{error} torch.autocast is on, so some operations return float32: convert their results "
                "back, or carry the state in float32, as FlexSN(precision='float32') does."
            ) from None
        late = {i: delays for i, delays in enumerate(self.late) if delays is not None}
        if late and isinstance(trace, CutTrace | RecurrentTrace):
            raise LateInputError(
                "a step with matrix products, sums over neurons, or states of several shapes cannot have late "
                "inputs: delay them before the step."
            )
        if isinstance(trace, CutTrace):
            return self._specialize_on_pieces(trace, device)
        for i, value in enumerate(() if isinstance(trace, RecurrentTrace) else signature.states):
            if value.shape != trace.step_shape:
                raise ShapeError(
                    f"state {i} has shape {list(value.shape)}; the step has {list(trace.step_shape)}: "
                    "initialise it with the step's shape."
                )
        name = getattr(self.core, "__name__", type(self.core).__name__)
        target = target_on(device, self.on_cpu)
        counting = tuple(i for i, counts in enumerate(self.counts_down) if counts)
        if isinstance(trace, RecurrentTrace):
            if any((*self.bits, *self.zero_one)):
                raise SpikeBitsError(
                    "a step with matrix products is launched in parts, which cannot write bits of its outputs. Leave "
                    "bits out."
                )
            return RecurrentSpecialization(trace, name, device, self.numerics, target, self._kernels, counting)
        return Specialization(
            trace,
            name,
            device,
            self.numerics,
            self.residuals,
            target,
            self._kernels,
            takes_numbers=self._takes_numbers,
            bits=self.bits,
            zero_one=self.zero_one,
            counts=counting,
            late=late,
        )

    def _specialize_on_pieces(self, trace: CutTrace, device: torch.device) -> CutSpecialization:
        if any((*self.bits, *self.zero_one)):
            raise SpikeBitsError("a step on pieces of its values cannot write bits of its outputs. Leave bits out.")
        name = getattr(self.core, "__name__", type(self.core).__name__)
        core: Any = partial(trace.pieces.core, self.core)
        core.__name__, core.core = name, self.core
        program = ScanProgram(
            core,
            *trace.pieces.counts,
            precision=self.numerics.precision,
            fast_math=self.numerics.fast_math,
            on_cpu=self.on_cpu,
            residuals="recompute",
            pieces=trace.pieces,
            counts_down=[
                counts
                for pieces, counts in zip(trace.pieces.inputs, self.counts_down, strict=False)
                for _ in range(pieces.count)
            ],
        )
        return CutSpecialization(trace, name, device, self.numerics, target_on(device, self.on_cpu), program)


class PointwiseProgram(ScanProgram):
    """A program for pointwise steps only, which have one kernel for all steps.

    Custom ops, plain wrappers and the tuner use this class, because they support only such kernels. The arguments are
    those of `ScanProgram`.
    """

    takes_products = False

    def specialize(
        self, inputs: Sequence[Tensor], states: Sequence[Tensor] | None, *, autocast: bool = True
    ) -> tuple[Specialization, tuple[Tensor, ...]]:
        step, captured = super().specialize(inputs, states, autocast=autocast)
        return _require_pointwise(step), captured

    def specialize_examples(self, examples: Sequence[Tensor]) -> Specialization:
        return _require_pointwise(super().specialize_examples(examples))

    def specialize_like(self, inputs: Sequence[torch.dtype], states: Sequence[torch.dtype] | None) -> Specialization:
        return _require_pointwise(super().specialize_like(inputs, states))

    @property
    def specializations(self) -> tuple[Specialization, ...]:
        return tuple(map(_require_pointwise, super().specializations))


def _require_pointwise(step: CoreSpecialization) -> Specialization:
    assert isinstance(step, Specialization)
    return step
