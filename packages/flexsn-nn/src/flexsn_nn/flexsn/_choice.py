"""Chooses the backend for a neuron's call, and records the reasons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flexsn_nn._backends import (
    COMPILED,
    Backend,
    StepMode,
    choose,
    choose_for_onnx,
    written_in,
)
from flexsn_nn._example_outputs import Spec, compare_specs
from flexsn_nn._inputs import check_input
from flexsn_nn._portability import portability
from flexsn_nn._programs import StepProgram
from flexsn_nn._refusals import kinds_of
from flexsn_nn._state_shapes import step_shape
from flexsn_nn._stateful import is_own
from flexsn_nn._torch_private import constant, is_onnx_exporting
from flexsn_nn._unregistered import warn_of_unregistered
from flexsn_nn.errors import ExampleError, InputCountError, InputShapeError
from flexsn_nn.flexsn._states import KeepsStates
from flexsn_nn.transforms._compose import added, before, key_of
from flexsn_nn.transforms._transform import Call, Transform, Values
from flexsn_runtime import ScanProgram, transform_at_work

PLAIN = frozenset({Tensor, nn.Parameter})


# Beginning of the reason for a call that runs as a loop because kernels reject the core.
_INSTEAD = "the loop ran instead: here as on a GPU, compiled kernels refuse"


class Chooses(KeepsStates):
    """Part of `FlexSN` that checks the inputs of a call and chooses its backend."""

    _output_specs: list[Spec] | None
    _ready_made: bool | None
    _undelayed: Callable[..., Any] | None = None  # core whose kernels cannot load earlier steps

    def _check_inputs(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Checks the inputs of a call, and returns the inputs of the core."""
        for i, value in enumerate(inputs):
            check_input(f"input {i}", value, type(self).__name__, has_time=self._step_mode == "m")
        if len(inputs) != self.num_inputs or not inputs:
            raise InputCountError(f"got {len(inputs)} inputs; num_inputs is {self.num_inputs}.")
        if self._step_mode == "m" and not all(x.dim() for x in inputs):
            raise InputShapeError(
                "an input has no dimensions; in step mode 'm' it is a sequence [T, *step]. For single steps, set "
                "step_mode='s'."
            )
        return inputs

    # Dynamo computes the result while it traces, treats the result as a constant, and guards the sources of the
    # arguments.
    @constant
    def _choose(self, backend: Backend, step_mode: StepMode, device: torch.device, compiling: bool) -> str:
        """Returns the name of the backend. Chooses once for each type of device, and separately for compilers."""
        if compiling and is_onnx_exporting():
            return choose_for_onnx(backend)
        situation = (device.type, compiling)
        choice = self._decisions.choice(situation)
        if choice is None:
            choice = choose(backend, step_mode, device, compiling)
            if not self._decisions:
                warn_of_unregistered(self.core)
            self._decisions.record_choice(situation, choice)
        return choice.backend

    def _may_fall_back(self, backend: str) -> bool:
        """True if, with `backend="auto"`, a call that kernels reject runs as a loop.

        On a GPU, a sequence that kernels reject raises an error. A single step may run without kernels on any device,
        because its caller loops over time in any case.
        """
        return backend == "cpp" or (self._step_mode == "s" and backend in COMPILED)

    def _can_run_kernels(
        self, inputs: tuple[Tensor, ...], states: list[Tensor], transforms: tuple[Transform, ...]
    ) -> bool:
        """True if the checks before a run accept this call for kernels. Outside of compilers, records the outcome."""
        reason = self._why_loop(inputs, states) or self._why_unchanged(inputs, states, transforms)
        if not torch.compiler.is_compiling():
            self._decisions.record_run((inputs[0].device.type, False), reason, kinds_of(self.modules()))
        return reason is None

    def _why_loop(self, inputs: tuple[Tensor, ...], states: list[Tensor]) -> str | None:
        """Returns the reason why a call runs as a loop although kernels are chosen; `None` if kernels can run it."""
        if not PLAIN.issuperset(map(type, (*inputs, *states))):
            other = next(type(t).__name__ for t in (*inputs, *states) if type(t) not in PLAIN)
            return f"the loop, in calls with {other}: kernels would bypass the code of this type of tensor"
        transform = transform_at_work()
        if transform is not None:
            return f"the loop, in calls inside of {transform}, which supports operations but no kernels"
        if self._step_mode == "m" and inputs[0].shape[:1] in ((), (0,)):
            return "the loop, in calls without steps (T == 0)"
        is_ready_made = self._ready_made
        if is_ready_made is None:
            is_ready_made = self.__dict__["_ready_made"] = self._is_ready_made()
        if is_ready_made:
            return None
        reason = self._find_refusal(inputs, states, training=self._needs_gradients((*inputs, *states)))
        return None if reason is None else f"{_INSTEAD} the core: {reason}"

    def _why_unchanged(
        self, inputs: tuple[Tensor, ...], states: list[Tensor], transforms: tuple[Transform, ...]
    ) -> str | None:
        """Returns the reason why kernels reject the core with a user's transforms; `None` if there is no reason."""
        reason = None
        if any(not is_own(type(transform)) for transform in transforms):
            reason = self._find_refusal(
                inputs, states, training=self._needs_gradients((*inputs, *states)), transforms=transforms
            )
        return None if reason is None else f"{_INSTEAD} the core with its transforms: {reason}"

    def _needs_gradients(self, tensors: Sequence[Tensor]) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *self.parameters()))

    def _report_portability(
        self,
        inputs: tuple[Tensor, ...],
        states: list[Tensor],
        results: Sequence[Tensor],
        transforms: tuple[Transform, ...],
    ) -> None:
        """Reports, once for each reason, that kernels on a GPU would reject the call that has just run as a loop."""
        foreign = tuple(transform for transform in transforms if not is_own(type(transform)))
        if portability() == "ignore" or inputs[0].shape[:1] == (0,) or (self._is_ready_made() and not foreign):
            return
        training = any(result.requires_grad for result in results)
        self._refusals.report_once(self._find_refusal(inputs, states, training=training, transforms=foreign))

    def _find_refusal(
        self,
        inputs: tuple[Tensor, ...],
        states: list[Tensor],
        *,
        training: bool,
        transforms: tuple[Transform, ...] = (),
    ) -> str | None:
        """Returns the reason why kernels reject the core with a user's transforms; `None` if kernels accept it."""
        all_transforms = (
            *self._own_transforms,
            *(transform for transform in transforms if not is_own(type(transform))),
        )
        all_transforms = self._add_example_draws(all_transforms)
        more_inputs: Values = ()
        if len(all_transforms) > len(self._own_transforms):
            call = self._call("cpp", inputs)  # as if kernels ran
            inputs, all_transforms = before(call, all_transforms)
            more_inputs, more_states = added(call._replace(inputs=inputs), all_transforms)
            if more_states:
                states = [*(states or self._create_initial_states(inputs)), *more_states]
        return self._refusals.find_reason(
            lambda: self._get_step_program(all_transforms).scan,
            (*inputs, *more_inputs),
            states,
            single=self._step_mode == "s",
            training=training,
            modules=self.modules(),
            changes=key_of(all_transforms),
        )

    def _is_ready_made(self) -> bool:
        """True if the whole core belongs to this package, so that kernels certainly accept it."""
        return False

    def _is_empty(self, inputs: Sequence[Tensor]) -> bool:
        """True for a sequence with zero steps. False inside of compilers, where the number of steps may be a symbol."""
        empty = self._step_mode == "m" and not torch.compiler.is_compiling() and inputs[0].shape[:1] == (0,)
        return bool(empty)

    def _predict_specs(self, inputs: Sequence[Tensor], states: Sequence[Tensor] = ()) -> list[Spec] | None:
        """Returns shapes and dtypes of one step's outputs; `None` if they are unknown until the core runs."""
        if not self.num_outputs:
            return []
        step = step_shape(inputs, self._step_mode)
        specs = self._output_specs
        return specs if specs is not None and all(tuple(shape) == tuple(step) for shape, _ in specs) else None

    def _find_empty_specs(self, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> list[Spec]:
        """Returns shapes and dtypes of one step's outputs, for a sequence with zero steps.

        If the examples have another shape than the step, they are compared with a trace of the core. This comparison is
        omitted if tracing fails.
        """
        predicted_specs = self._predict_specs(inputs, states)
        if predicted_specs is not None:
            return predicted_specs
        if self._output_specs is None:
            return self._derive_specs(inputs, states)
        try:
            specs = self._trace_specs(inputs, states)
        except Exception:  # the core may raise any error for tensors without data
            return self._output_specs
        compare_specs(self._output_specs, specs)
        return self._output_specs

    def _derive_specs(self, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> list[Spec]:
        """Raises `ExampleError`, because the outputs' shapes and dtypes are unknown without examples."""
        raise ExampleError(
            "the input has no steps (T == 0), and the shape and dtype of an output are unknown without one: give "
            "FlexSN example_outputs=(...), one step's outputs."
        )

    def _get_program(self) -> ScanProgram:
        """Returns the program of kernels for calls without transforms."""
        return self._get_step_program(self._add_example_draws(self._own_transforms)).scan

    def _complete_call(self, call: Call) -> tuple[ScanProgram, Values]:
        """Returns the program of kernels for a call without transforms, and the inputs of the program's step."""
        inputs, transforms = before(call, self._add_example_draws(self._own_transforms))
        return self._get_step_program(transforms).scan, (*inputs, *added(call._replace(inputs=inputs), transforms)[0])

    def _specialize_examples(self, examples: Sequence[Tensor]) -> list[Spec]:
        """Returns shapes and dtypes of a step's outputs.

        Args:
            examples: one step's inputs and states.
        """
        program = self._get_program()
        if self._find_drawing_class(()) is not None and len(examples) == self.num_inputs + self.num_states:
            inputs, states = tuple(examples[: self.num_inputs]), examples[self.num_inputs :]
            program, inputs = self._complete_call(Call(inputs, "s", True, False, lambda: None))
            examples = *inputs, *states
        outputs = program.specialize_examples(examples).trace.outputs
        return [(value.shape, value.dtype) for value in outputs]

    def _trace_specs(self, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> list[Spec]:
        """Returns shapes and dtypes of one step's outputs from a trace. The values of the arguments do not matter."""
        program, step_inputs = self._complete_call(Call(tuple(inputs), "m", True, False, lambda: None))
        outputs = program.specialize(step_inputs, states)[0].trace.outputs
        return [(value.shape, value.dtype) for value in outputs]

    def _get_step_program(self, transforms: Sequence[Transform]) -> StepProgram:
        """Returns the program from which kernels are built; see `Programs.get`.

        Args:
            transforms: all transforms of a call, including those of the neuron.
        """
        core: Callable[..., Any] = self.core
        return self._programs.get(core, self.requires_grad, written_in(self._backend), transforms)

    def _can_absorb(self, inputs: tuple[Tensor, ...]) -> bool:
        """True if only the step reads the values of the first input, so that the step can apply a function to it."""
        return not self._starts_by_input() and PLAIN.issuperset(map(type, inputs))

    def _call(self, backend: str, inputs: tuple[Tensor, ...]) -> Call:
        """Returns the description of the call that transforms receive."""
        compiling = torch.compiler.is_compiling()
        kernels = backend in COMPILED
        in_step = (kernels or (backend == "hop" and compiling)) and self._can_absorb(inputs)

        def initial_states() -> list[Tensor] | None:
            return None if self._starts_at_zero() else self._create_initial_states(inputs)

        runs = kernels and not compiling
        delays = runs and in_step and self._step_mode == "m" and self._undelayed is not self.core
        return Call(inputs, self._step_mode, runs, in_step, initial_states, delays and self._uses_triton(inputs))

    def _uses_triton(self, inputs: Sequence[Tensor]) -> bool:
        """True if kernels for these inputs are written in Triton."""
        device = inputs[0].device.type if inputs else ""
        return device == "cuda" or (device == "cpu" and written_in(self._backend) == "triton")
