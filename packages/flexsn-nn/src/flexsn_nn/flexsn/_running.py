"""Runs a call of a neuron: applies the call's transforms, and runs the step in kernels or in a loop over time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexsn_hop import eager_scan, eager_scan_final_state, flex_sn_scan, flex_sn_scan_final_state
from flexsn_nn._affine import Producer
from flexsn_nn._backends import COMPILED, KERNEL_BACKENDS
from flexsn_nn._diagnosis import explain_devices, explain_dtypes
from flexsn_nn._example_outputs import Spec
from flexsn_nn._programs import StepProgram
from flexsn_nn._run_kernels import BETWEEN, run_kernels
from flexsn_nn._torch_private import backward_pass, between_graphs
from flexsn_nn.errors import DrawError, PlacementError
from flexsn_nn.flexsn._choice import PLAIN, Chooses
from flexsn_nn.noise._draws import Draws, Means
from flexsn_nn.transforms._absorbed import Absorb, parts_of
from flexsn_nn.transforms._bits import SpikesAsBits
from flexsn_nn.transforms._compose import Counts, added, before, compose, key_of, pass_ends
from flexsn_nn.transforms._delayed import Delayed
from flexsn_nn.transforms._transform import Transform, Values
from flexsn_runtime import (
    LateInputError,
    RepeatedCall,
    SpikeBitsError,
    TraceError,
    find_call,
    single_step,
    transform_at_work,
)

Ran = tuple[list[Tensor], list[Tensor], list[Tensor]]
_Kinds = tuple[type[Transform], ...]
_Description = tuple[str, bool, _Kinds]


class _Repeats(NamedTuple):
    """An earlier call that later calls may repeat.

    Attributes:
        program: program that runs the later calls.
        description: results of the call, as described by `Runs._describe_results`. Only calls with an equal description
            repeat the call.
    """

    program: StepProgram
    description: _Description


class _Again(NamedTuple):
    """Earlier call that the compiled launcher repeats.

    Such a call has no transforms except an `Absorb`, whose function computes the first input, and a `SpikesAsBits`.

    Attributes:
        core: core of the earlier call.
        call: the earlier call, prepared for repetition.
        run: function of the compiled launcher that runs such calls.
        num_states: number of states that the neuron had before the call; 0 if the call omitted the initial states.
        packs: True if a `PackedSpikes` was active.
        front: key of the function that computes the first input; `None` if the call had no such function.
        places: for each captured tensor, its position among the tensors of the function.
        bits: True if the last result contains bits.
    """

    core: object
    call: RepeatedCall
    run: Callable[[Sequence[Tensor | None]], list[Tensor] | None]
    num_states: int
    packs: bool
    front: Hashable
    places: tuple[int, ...]
    bits: bool


class Runs(Chooses):
    """Part of `FlexSN` that runs calls."""

    _repeats: _Repeats | None
    _again: _Again | None

    def _run(
        self,
        inputs: tuple[Tensor, ...],
        states: list[Tensor],
        *,
        keep: bool,
        transforms: tuple[Transform, ...] = (),
    ) -> Ran:
        """Runs `_run_unexplained`. If an operation of the core fails, the error names the cause, if the cause is found.

        If the core draws random numbers unexpectedly, the call is repeated with a transform for these numbers.
        """
        if torch.compiler.is_compiling():
            return self._run_unexplained(inputs, states, keep=keep, transforms=transforms)
        try:
            return self._run_unexplained(inputs, states, keep=keep, transforms=transforms)
        except DrawError:
            if self._draws or any(isinstance(transform, Draws | Means) for transform in transforms):
                raise
            self._draws = True  # a function that the core calls draws random numbers
            changes = self._add_draws(transforms, begins=not states, keep=states is self.states)
            return self._run_unexplained(inputs, states, keep=keep, transforms=changes)
        except (RuntimeError, ValueError) as error:
            if inputs and all(isinstance(x, Tensor) for x in inputs):
                self._explain_error(inputs, states, error)
            raise

    def _explain_error(self, inputs: Sequence[Tensor], states: Sequence[Tensor], error: Exception) -> None:
        """Raises a clearer error than `error` if the cause is found. The search is too slow to precede every call.

        Args:
            inputs, states: arguments of the failed call.
        """
        explain_devices(inputs, self, self.core, error)
        explain_dtypes(inputs, error)

    def _run_unexplained(
        self,
        inputs: tuple[Tensor, ...],
        states: list[Tensor],
        *,
        keep: bool,
        transforms: tuple[Transform, ...] = (),
    ) -> Ran:
        """Returns outputs, final states and state sequences. Only a call with `keep` in step mode `"m"` has sequences.

        Args:
            states: states at the beginning of this call; empty for the initial states.
            transforms: transforms of this call, without `_own_transforms`.
        """
        inputs = self._check_inputs(inputs)
        if not PLAIN.issuperset(map(type, inputs)) and _are_sharded(inputs):
            if transforms:
                inputs, transforms = before(self._call("torch", inputs), transforms)
            if transforms:
                names = ", ".join(type(transform).__name__ for transform in transforms)
                raise PlacementError(
                    f"the inputs are DTensors, and the call changes the step ({names}): call the neuron with each "
                    "process's local part, x.to_local(), and with the lengths, resets or transforms of that part. "
                    "Random numbers are those of its rows: flexsn_nn.random.configure(net, seed=..., first_row=...)."
                )
            ran: Ran = self._run_shards(inputs, states, keep=keep)
            return ran
        compiling = torch.compiler.is_compiling()
        backend = self._choose(self._backend, self._step_mode, inputs[0].device, compiling)
        if self._backend == "auto" and self._may_fall_back(backend):
            if self._can_run_kernels(inputs, states, transforms):
                try:
                    return self._run_on(backend, inputs, states, keep, transforms)
                except (TraceError, NotImplementedError):
                    if compiling:
                        raise
                    self._refusals.forget()  # the core may have changed since the check
                    self._decisions.forget((inputs[0].device.type, False))
                    if self._can_run_kernels(inputs, states, transforms):
                        raise
            backend = "torch"
        if self._is_empty(inputs) and not transforms and self._predict_specs(inputs) is not None:
            backend = "torch" if backend in COMPILED else backend  # no kernel is launched, and the core is not traced
        return self._run_on(backend, inputs, states, keep, transforms)

    def _run_on(
        self,
        backend: str,
        inputs: tuple[Tensor, ...],
        states: list[Tensor],
        keep: bool,
        transforms: tuple[Transform, ...],
    ) -> Ran:
        """Runs a call on the chosen backend. Returns outputs, final states and state sequences, like `_run`."""
        compiling = torch.compiler.is_compiling()
        at_zero = compiling and not states and self._starts_at_zero()
        call_inputs, call_states, call_transforms = inputs, states, transforms
        transforms = (*self._own_transforms, *transforms)
        more_inputs: Values = ()
        more_states: Values = ()
        call = self._call(backend, inputs) if transforms else None
        if call is not None:
            inputs, transforms = before(call, transforms)
        left_out = False
        if states:
            states = self._prepare_states(states, inputs)
        elif backend not in COMPILED or not self._can_omit_states(inputs) or not _start_at_zero(transforms):
            states = self._create_initial_states(inputs)
        else:
            left_out = True
        if call is not None:
            more_inputs, more_states = added(call._replace(inputs=inputs), transforms, at_zero=left_out)
        tensors = (*inputs, *more_inputs), (*states, *more_states)
        if backend in COMPILED:
            if compiling:
                results = self._run_between_graphs(*tensors, keep, transforms)
            else:
                lacks = any(transform.optional and transform not in transforms for transform in call_transforms)
                kinds = None if lacks else tuple(map(type, call_transforms))
                try:
                    results = self._run_kernels(*tensors, keep, transforms, kinds)
                except LateInputError:
                    self.__dict__["_undelayed"] = self.core
                    return self._run_on(backend, call_inputs, call_states, keep, call_transforms)
        else:
            results = self._run_core(backend, *tensors, keep, at_zero, transforms)
            if backend == "torch" and self._backend == "auto" and self._step_mode == "m" and not compiling:
                self._report_portability(call_inputs, states, results, call_transforms)
        end = self.num_outputs + sum(transform.num_outputs for transform in transforms)
        outputs, finals = list(results[:end]), list(results[end:])
        sequences: list[Tensor] = []
        if keep and self._step_mode == "m":
            sequences = finals
            if inputs[0].shape[0] > 0:
                finals = [sequence[-1] for sequence in sequences]
            else:
                finals = [state.clone() for state in (*(states or self._create_initial_states(inputs)), *more_states)]
        if transforms:
            pass_ends(transforms, outputs[self.num_outputs :], finals[self.num_states :])
        return outputs[: self.num_outputs], finals[: self.num_states], sequences[: self.num_states]

    # -- with transforms -----------------------------------------------------------------------------------

    def _run_kernels(
        self,
        inputs: tuple[Tensor, ...],
        states: tuple[Tensor, ...],
        keep: bool,
        transforms: tuple[Transform, ...],
        kinds: _Kinds | None,
    ) -> Sequence[Tensor]:
        """Runs compiled kernels. Returns `(*outputs, *final_states)`, or `(*outputs, *state_sequences)`.

        Args:
            inputs, states: inputs and states, including those of the transforms.
            kinds: types of the call's transforms, without `_own_transforms`. Later calls with transforms of these types
                may repeat this call. `None` if no call may repeat it.
        """
        program = self._get_step_program(transforms)
        try:
            if self._step_mode == "s":
                results = self._launch_step(program, inputs, states, transforms)
            else:
                results = run_kernels(program.scan, (*inputs, *states), keep, program.changes(transforms))
        except SpikeBitsError as error:
            if not program.scan.bits:
                raise
            self._bits.refuse(self.core, str(error))
            without = tuple(transform for transform in transforms if not transform.bits)
            return self._run_kernels(inputs, states, keep, without, None)
        if kinds is not None:
            mode = self._step_mode
            self.__dict__["_repeats"] = _Repeats(program, (mode, keep and mode == "m", kinds))
        return self._store_bits(program, results)

    def _launch_step(
        self,
        program: StepProgram,
        inputs: tuple[Tensor, ...],
        states: tuple[Tensor, ...],
        transforms: tuple[Transform, ...],
    ) -> Sequence[Tensor]:
        # A single step runs as a scan over one step, with the checks and the results of a scan.
        if program.stand_ins is None:
            return single_step(program.scan, inputs, states)
        sequences = [x.unsqueeze(0) for x in inputs]
        results = run_kernels(program.scan, (*sequences, *states), False, program.changes(transforms))
        end = program.scan.num_outputs
        return [*[output.squeeze(0) for output in results[:end]], *results[end:]]

    @between_graphs(BETWEEN)
    def _run_between_graphs(
        self,
        inputs: tuple[Tensor, ...],
        states: tuple[Tensor, ...],
        keep: bool,
        transforms: tuple[Transform, ...],
    ) -> Sequence[Tensor]:
        return self._run_kernels(inputs, states, keep, transforms, None)

    def _store_bits(self, program: StepProgram, results: Sequence[Tensor]) -> Sequence[Tensor]:
        """Stores the last result of a program that writes bits, which holds the bits. Returns the other results."""
        if not program.scan.bits:
            return results
        *others, bits = results
        self._bits.note(others[0], bits)
        return others

    def _run_core(
        self,
        backend: str,
        inputs: tuple[Tensor, ...],
        states: tuple[Tensor, ...],
        keep: bool,
        at_zero: bool,
        transforms: tuple[Transform, ...],
    ) -> Sequence[Tensor]:
        """Runs the core in a loop or as the scan operator. Returns outputs, then state sequences or final states.

        Args:
            inputs, states: inputs and states, including those of the transforms.
            at_zero: True if a compiler may assume that the neuron's states are zeros.
        """
        single = self._step_mode == "s"
        counts = Counts(self.num_inputs, self.num_states, self.num_outputs)
        core = compose(self.core, counts, transforms, [transform.tensors for transform in transforms])
        if self.requires_grad is not None:  # kernels apply this setting themselves
            inputs = (*_detach_disallowed(inputs, self.requires_grad[: self.num_inputs]), *inputs[self.num_inputs :])
            states = (*_detach_disallowed(states, self.requires_grad[self.num_inputs :]), *states[self.num_states :])
        if single:
            backend, keep, at_zero = "torch", False, False
            inputs = tuple([x.unsqueeze(0) for x in inputs])
        sequences, finals = _SCANS[backend]
        specs: Sequence[Spec] | None = self._output_specs
        if self._is_empty(inputs):
            specs = self._find_empty_specs(inputs[: self.num_inputs], states[: self.num_states])
        elif specs is None and torch.compiler.is_compiling() and inputs[0].dim() > 0 and inputs[0].shape[0] == 0:
            specs = self._predict_specs(inputs[: self.num_inputs], states[: self.num_states])
        options: dict[str, object] = {}
        if backend == "hop" and at_zero:
            options["zero_states"] = tuple([i < self.num_states for i in range(len(states))])
        if backend == "hop" and self._backend in KERNEL_BACKENDS:
            options["lowering"] = "kernel"  # kernels are requested, so the operator must become kernels
        num_outputs = counts.with_all(transforms).outputs
        results = (sequences if keep else finals)(
            core,
            len(inputs),
            len(states),
            num_outputs,
            *inputs,
            *states,
            output_template_specs=specs,
            **options,
        )
        if not single:
            return results
        return [*[output.squeeze(0) for output in results[:num_outputs]], *results[num_outputs:]]

    @between_graphs("a neuron on DTensors runs between the graphs of torch.compile")
    def _run_shards(self, inputs: tuple[Tensor, ...], states: list[Tensor], *, keep: bool) -> Ran:
        """Runs a call with `DTensor` inputs. Each process runs its part of the step."""
        from flexsn_nn._shards import StepShards, check_parts  # takes as long to import as the rest of flexsn_nn

        lead = 1 if self._step_mode == "m" else 0
        shards = StepShards.of(inputs, lead)
        parts = tuple(shards.local(x) for x in inputs)
        own_states = [shards.state(state, i) for i, state in enumerate(states)]
        with shards.local_parameters(self) as local:
            if shards.is_cut:
                sequences = parts if lead else [x.unsqueeze(0) for x in parts]
                check_parts(self._get_program(), sequences, own_states or self._create_initial_states(parts), local)
            outputs, new_states, state_seqs = self._run(parts, own_states, keep=keep)
        return (
            [shards.whole(output, lead) for output in outputs],
            [shards.whole(state, 0) for state in new_states],
            [shards.whole(sequence, lead) for sequence in state_seqs],
        )

    # -- repeated calls ------------------------------------------------------------------------------------

    def _forget_repeats(self) -> None:
        """Prevents the next call from repeating an earlier call, so that the next call records its backend."""
        self.__dict__["_repeats"] = None

    def _can_write_bits(self) -> bool:
        """True if kernels may write the bits of the first output."""
        if not torch.is_grad_enabled() or self._step_mode == "s" or self.spike_range != (0, 1):
            return False
        return self._bits.why_refused(self.core) is None

    def _describe_results(self, transforms: tuple[Transform, ...]) -> _Description:
        """Describes the results of a `forward` call: step mode, whether sequences are stored, types of transforms."""
        attributes = self.__dict__  # reading this dict is five times as fast as reading a module's attributes
        mode = attributes["_step_mode"]
        return mode, attributes["store_state_seqs"] and mode == "m", tuple(map(type, transforms))

    def _repeat(
        self, inputs: tuple[Tensor, ...], transforms: tuple[Transform, ...]
    ) -> tuple[Tensor | list[Tensor] | None, tuple[Tensor, ...], tuple[Transform, ...]]:
        """Runs a call of `forward` with the program of an earlier call, if the call can repeat the earlier call.

        Returns:
            The result, the inputs and the transforms. The result is `None` if no earlier call can be repeated. The
            caller then runs the call with the returned inputs and transforms, so that a norm computes its statistics
            only once.
        """
        no_repetition = None, inputs, transforms
        attributes = self.__dict__
        repeats: _Repeats | None = attributes["_repeats"]
        if repeats is None or repeats.description != self._describe_results(transforms):
            return no_repetition
        program = repeats.program
        if (attributes["core"] if "core" in attributes else attributes["_modules"].get("core")) is not program.core:
            return no_repetition  # another core was registered without an assignment
        single = attributes["_step_mode"] == "s"
        states, num_states = attributes["states"], attributes["num_states"]
        all_transforms = (*self._own_transforms, *transforms)
        tensors, changes, used_transforms = inputs, None, all_transforms
        if all_transforms:
            are_plain = len(inputs) == attributes["num_inputs"] and PLAIN.issuperset(map(type, inputs))
            if not are_plain or (not single and not inputs[0].dim()) or transform_at_work() is not None:
                return no_repetition
        if single:
            if not states:
                return no_repetition
        elif len(states) != num_states and (states or not self._can_omit_states(inputs)):
            return no_repetition
        if all_transforms:
            call = self._call("cpp", inputs)  # kernels ran the earlier call
            inputs, used_transforms = before(call, all_transforms)
            constant = self._own_transforms
            no_repetition = (
                None,
                inputs,
                tuple([t for t in used_transforms if t not in constant]) if constant else used_transforms,
            )
            if key_of(used_transforms) != program.key:
                return no_repetition
            left_out = not states and _start_at_zero(used_transforms)
            left_out = left_out and (not constant or self._can_omit_states(inputs))  # checked above if not `constant`
            more_inputs, more_states = added(call._replace(inputs=inputs), used_transforms, at_zero=left_out)
            tensors = (*inputs, *more_inputs)
            changes = program.changes(used_transforms)
            if more_states:
                states = (*(states or self._create_initial_states(inputs)), *more_states)
        if single and program.stand_ins is not None:
            return no_repetition
        replacements, completion = (None, None) if changes is None else changes
        formula, keep = completion and completion.formula, repeats.description[1]
        match = find_call(program.scan, tensors, states, replacements, formula, single=single, state_seqs=keep)
        results = None if match is None else match[0].run(match[1])
        if match is None or results is None or (keep and not len(inputs[0])):
            return no_repetition
        attributes["_again"] = None
        if not keep and getattr(match[0].run, "is_native", False):
            self._note_again(program, *match, transforms, replacements)
        if program.scan.bits:
            results = self._store_bits(program, results)
        end, end_of_program, count = attributes["num_outputs"], program.scan.num_outputs, attributes["num_states"]
        carried = list(results[end_of_program:])
        # The update bypasses nn.Module's __setattr__, because __setattr__ takes half the time of a kernel launch.
        finals = [sequence[-1] for sequence in carried] if keep else carried
        if used_transforms:
            pass_ends(used_transforms, results[end:end_of_program], finals[count:])
            carried, finals = carried[:count], finals[:count]
        attributes.update(states=finals, state_seqs=carried if keep else [], spike_counts=None)
        return results[0] if end == 1 else list(results[:end]), inputs, transforms

    def _run_again(self, inputs: tuple[Tensor, ...], front: Producer | Delayed | None) -> Tensor | list[Tensor] | None:
        """Repeats the call that `_note_again` stored, with these inputs. Returns `None` if this is not possible."""
        attributes = self.__dict__
        again: _Again | None = attributes["_again"]
        states = attributes["states"]
        if (
            again is None
            or len(states) != again.num_states
            or (states and attributes["_looks_for_sharing"] and torch.is_grad_enabled())
            or (attributes["_bits"].num_users > 0) is not again.packs
            or self._shared_transforms
            or "_exchange" in attributes
            or (attributes["core"] if "core" in attributes else attributes["_modules"].get("core")) is not again.core
            or backward_pass() != -1
        ):
            return None
        call = again.call
        if not call.step.trace.reads.holds() or call.run.watched():  # type: ignore[attr-defined]
            return None
        parts = None if front is None else parts_of(front)
        if (front is None) is not (parts is None) or again.front != (None if parts is None else parts.key):
            return None
        lifted: tuple[Tensor | None, ...]
        if parts is not None:
            lifted = (*[parts.tensors[i] for i in again.places], *parts.more)
        else:
            lifted = (call.step.captured() or (None,)) if call.captures else ()
        results = again.run((*inputs, *states, *call.at_zero, *lifted))
        if results is None:
            return None
        if again.bits:
            bits = results.pop()
            attributes["_bits"].note(results[0], bits)
        end = attributes["num_outputs"]
        attributes["states"], attributes["state_seqs"], attributes["spike_counts"] = results[end:], [], None
        return results[0] if end == 1 else results[:end]

    def _note_again(
        self,
        program: StepProgram,
        call: RepeatedCall,
        tensors: tuple[Tensor | None, ...],
        transforms: tuple[Transform, ...],
        replacements: Mapping[int, Tensor] | None,
    ) -> None:
        """Stores a call for `_run_again`, if the compiled launcher can run such calls.

        Args:
            tensors: tensors with which `call.run` was called.
            transforms: transforms of the call, before their method `before` is called.
            replacements: tensors of the transforms, by the ids of their stand-ins.
        """
        attributes, scan = self.__dict__, program.scan
        others = [transform for transform in transforms if not isinstance(transform, SpikesAsBits)]
        if scan.requires_grad is not None or attributes["_draws"] or self._own_transforms or self._shared_transforms:
            return
        front: Hashable = None
        places: tuple[int, ...] = ()
        compute = None
        if others:
            parts = parts_of(others[0].producer) if len(others) == 1 and type(others[0]) is Absorb else None
            positions = None if parts is None or replacements is None else call.places(replacements)
            if parts is None or positions is None:
                return
            first, end = len(tensors) - len(positions), len(tensors)
            are_unchanged = [a is b for a, b in zip(parts.tensors, (replacements or {}).values(), strict=True)]
            front, places = parts.key, tuple([positions.index(i) for i in range(first, end)])
            tensors = (*tensors[:first], *[parts.tensors[i] for i in places], *parts.more)
            if parts.compute is not None:
                compute = partial(_compute_tensors, parts.compute, positions, end)
            if not all(are_unchanged[0 if compute is None else are_unchanged.count(False) :]):
                return
        run = call.again(front, tensors, compute)
        if run is not None:
            num_states = len(attributes["states"])
            attributes["_again"] = _Again(
                program.core, call, run, num_states, attributes["_bits"].num_users > 0, front, places, any(scan.bits)
            )


def _compute_tensors(
    compute: Callable[..., tuple[Tensor, ...]], places: Sequence[int], end: int, tensors: Sequence[Tensor | None]
) -> dict[int, Tensor]:
    """Runs `FrontParts.compute`. Returns the computed tensors by their positions among the tensors of a call.

    Args:
        places: positions of `FrontParts.tensors` among the tensors of the call.
        end: position of the first tensor of `FrontParts.more`.
        tensors: tensors of the call. The first tensor is the neuron's first input.
    """
    computed_tensors = compute(tensors[0], *[tensors[place] for place in places], *tensors[end:])
    return dict(zip(places, computed_tensors, strict=False))


# For each backend, the scan that returns state sequences, and the scan that returns final states.
_SCANS: dict[str, tuple[Callable[..., tuple[Tensor, ...]], Callable[..., tuple[Tensor, ...]]]] = {
    "torch": (eager_scan, eager_scan_final_state),
    "hop": (flex_sn_scan, flex_sn_scan_final_state),
}


def _start_at_zero(transforms: Sequence[Transform]) -> bool:
    """True if all states that transforms add begin at zero."""
    return all(transform.starts_at_zero or not transform.num_states for transform in transforms)


def _detach_disallowed(tensors: Sequence[Tensor], allowed: Sequence[bool]) -> list[Tensor]:
    """Detaches the inputs or states whose entry in `allowed` is False."""
    return [t if flows else t.detach() for t, flows in zip(tensors, allowed, strict=False)]


def _are_sharded(inputs: Sequence[Tensor]) -> bool:
    """True if an input is a `DTensor`. Does not import the module of that class."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(x, module.DTensor) for x in inputs)
