"""`FlexSN`: a step function as a module that keeps its state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import Proxy

from flexsn_nn._affine import Producer
from flexsn_nn._backends import Choice, check_backend, check_step_mode, choose
from flexsn_nn._checks import check_name
from flexsn_nn._decisions import Decisions
from flexsn_nn._example_outputs import compare_specs, specs_of
from flexsn_nn._explain import constants, kernels, launchers, products, segments, traffic, without_hash
from flexsn_nn._firing import EVERY, Firing, is_enabled
from flexsn_nn._freed_graphs import GraphOfCall, graph_of
from flexsn_nn._handover import Handover
from flexsn_nn._leaf import refuse_proxies
from flexsn_nn._programs import Programs
from flexsn_nn._refusals import Refusals, kinds_of
from flexsn_nn._shared_states import feeds_itself, warn_of_sharing
from flexsn_nn._spike_bits import SpikeBits
from flexsn_nn._stateful import check_first_run
from flexsn_nn._torch_private import backward_pass, is_exporting, is_jit_tracing, recomputation
from flexsn_nn._unregistered import unregistered
from flexsn_nn.errors import ExportError
from flexsn_nn.flexsn._exports import InExport
from flexsn_nn.flexsn._options import CallOptions
from flexsn_nn.flexsn._running import Runs
from flexsn_nn.flexsn._states import for_autograd
from flexsn_nn.noise._found import draws
from flexsn_nn.noise._numbers import Numbers
from flexsn_nn.transforms._absorbed import Absorb, InStep
from flexsn_nn.transforms._bits import SpikesAsBits
from flexsn_nn.transforms._compose import Counts, added, before, check_transforms
from flexsn_nn.transforms._counts import SpikeCounts, per_channel
from flexsn_nn.transforms._delayed import Delayed
from flexsn_nn.transforms._lengths import Lengths
from flexsn_nn.transforms._precision import PRECISIONS, InFloat32
from flexsn_nn.transforms._resets import Resets
from flexsn_nn.transforms._transform import Transform
from flexsn_runtime import BackendUnavailableError


class SequenceRunner(Protocol):
    """Object that runs a neuron's calls between layers with exact products; see `flexsn_nn.exact`."""

    def run(self, neuron: FlexSN, inputs: tuple[Tensor, ...]) -> Tensor | None:
        """Returns the output of a call. If the result is `None`, the neuron itself runs the call."""


# Value of `FlexSN._describe_results` for a call with a sequence but without state sequences and transforms.
_SEQUENCE = ("m", False, ())


class FlexSN(Runs):
    """A spiking neuron, or any other elementwise recurrence, defined by one time step.

    The module keeps the state from call to call until `reset()`. With the method `step`, the caller keeps the state.

    Args:
        core: one time step, `core(*inputs, *states) -> (*outputs, *new_states)`. The computation is pointwise over the
            step's elements, except for products with captured matrices along its last dimension. The core is a
            function, or an `nn.Module` whose parameters become parameters of this module. Tensors that the core
            captures get gradients. The first call warns of captured parameters that belong to neither a module nor an
            optimizer.
        num_inputs, num_states, num_outputs: numbers of inputs, states and outputs of the core.
        example_inputs: one step's inputs and states. With these examples, errors in the core are raised at
            construction.
        requires_grad: for each input and each initial state, True if a gradient may flow to it; `None` if gradients may
            flow to all of them.
        step_mode: `"m"` if inputs are sequences `[T, *step]`, `"s"` if each call is one step `[*step]`.
        backend: `"triton"` or `"inductor"` (two names for one backend) for compiled kernels on a GPU; `"cpp"` for
            compiled kernels on the CPU; `"hop"` for the scan as one operator; `"torch"` for a plain loop. `"auto"`
            chooses kernels if they can run. Otherwise, `"auto"` chooses the operator inside of `torch.compile`, and
            the loop elsewhere.
        store_state_seqs: True to keep the states after every step in `state_seqs`.
        example_outputs: one step's outputs. These examples determine the shapes and dtypes if `T == 0`.
        precision: `"eager"` passes the tensors to the core unchanged. `"float32"` widens float16 and bfloat16 inputs,
            keeps the states in float32, and rounds outputs to the first input's dtype.
        residuals: values that compiled kernels save for the backward, in addition to the inputs. `"recompute"` saves
            states at intervals, from which the other values are computed again. `"save"` saves the fewest bytes from
            which the gradient can be computed. `"auto"` selects the option that moves fewer bytes. Under
            `torch.compile`, kernels always recompute.
        watch_firing: True to warn, once, if the neuron never or always fires in training (`FiringWarning`). Every 16th
            call is checked, or every 129th call in step mode `"s"`, and no check waits for a GPU.
            `FLEXSN_WATCH_FIRING=0` in the environment turns the warning off for neurons that are created afterwards.

    Attributes:
        states: current states, `[*step]` each. Empty before the first call and after `reset()`.
        state_seqs: state sequences of the last call, `[T, *step]` each. Empty unless `store_state_seqs`.
        count_spikes: True if each call also computes `spike_counts`. Initially False.
        spike_counts: `[C]`, float32 (or the output's dtype, if it is wider): the first output of the last call, summed
            over all dimensions except channels. Channels are the step's second or only dimension. Compiled kernels sum
            over time during the scan, and do not read the spikes again. In single steps, loops and compiled graphs, the
            finished output is summed. The counts are differentiable, so a regulariser of firing rates needs no gradient
            of a sequence. `None` unless `count_spikes`.

    Raises:
        UnknownNameError: the backend, the step mode or the precision is unknown.
        StepModeError: the backend cannot run in the step mode.
        ResidualsError: the choice of residuals is unknown.
        ValueError: the numbers of inputs, states and outputs contradict each other. With `example_inputs`, also raised
            if the numbers contradict the core.

    Example:
        >>> def integrate_and_fire(x, v):
        ...     h = v + x
        ...     spike = (h >= 1.0).to(h.dtype)
        ...     return spike, h - spike
        >>> neuron = FlexSN(integrate_and_fire, num_inputs=1, num_states=1, num_outputs=1)
        >>> neuron(torch.full((4, 2), 0.5))[:, 0].tolist()
        [0.0, 1.0, 0.0, 1.0]
    """

    def __init__(
        self,
        core: Callable[..., Any],
        num_inputs: int,
        num_states: int,
        num_outputs: int,
        example_inputs: Sequence[Tensor] | None = None,
        requires_grad: Sequence[bool] | None = None,
        step_mode: str = "m",
        backend: str = "auto",
        store_state_seqs: bool = False,
        example_outputs: Sequence[Tensor] | None = None,
        *,
        precision: str = "eager",
        residuals: str = "auto",
        watch_firing: bool = True,
    ) -> None:
        super().__init__()
        check_name("precision", precision, PRECISIONS)
        self.core = core
        if precision == "float32":
            self._own_transforms = (InFloat32(),)
        self.num_inputs = num_inputs
        self.num_states = num_states
        self.num_outputs = num_outputs
        self.requires_grad = requires_grad
        self._residuals = residuals
        self._step_mode = check_step_mode(step_mode)
        self._backend = check_backend(backend, step_mode)
        self.store_state_seqs = store_state_seqs
        self._output_specs = specs_of(example_outputs, num_outputs)
        self._numbers = Numbers()
        self._draws = draws(core)
        self._programs = Programs(Counts(num_inputs, num_states, num_outputs), residuals)
        self._handover: Handover | None = None
        self._spike_range = None
        self._decisions = Decisions()
        self._refusals = Refusals()
        # `_ready_made` stores whether kernels certainly accept the core, and the other two attributes store calls that
        # later calls may repeat. Assigning any attribute clears all three.
        self._ready_made = None
        self._repeats = self._again = None
        self.states = []
        self.state_seqs = []
        self.count_spikes = False
        self.spike_counts = None
        self._bits = SpikeBits()
        # Shape of the step, and shapes of the states that `init_states` created for this step.
        self._shapes_for = None
        self._looks_for_sharing = True
        self._exported = None  # states within the program that torch.export traces
        self._graph = None  # autograd graph of the loop's last call
        self._firing = Firing() if watch_firing and is_enabled() else None
        self._reset_in = recomputation()  # recomputation in which the states were last reset or assigned
        self._get_program()
        if example_inputs is not None:
            compare_specs(self._output_specs, self._specialize_examples(example_inputs))

    def forward(
        self,
        *inputs: Tensor,
        affine: Producer | None = None,
        lengths: Tensor | None = None,
        resets: Tensor | None = None,
        transforms: Sequence[Transform] = (),
    ) -> Tensor | list[Tensor]:
        """Runs the neuron from its current state.

        Args:
            inputs: `num_inputs` tensors, `[T, *step]` each in step mode `"m"`, or `[*step]` in `"s"`. Inputs may
                broadcast against each other after T.
            affine: operation on the first input before the step. Compiled kernels include the operation in the step,
                and do not write its result.
            lengths: `[B]`, whole numbers from 0 to T. After the end of a sequence, its outputs are zeros and its state
                does not change (`transforms.Lengths`). B is the first dimension of a step.
            resets: `[T, B]`, booleans; `[B]` in `"s"`. A marked step begins with the initial states
                (`transforms.Resets`).
            transforms: other changes of the step in this call, with the innermost first.

        Returns:
            The output `[T, *step]` (`[*step]` in `"s"`), or a list if there are several outputs. Outputs, states and
            gradients have the inputs' memory format, as after an elementwise operation.

        Raises:
            TypeError, InputCountError: the inputs are not `num_inputs` tensors.
            StateError: the state belongs to inputs of another shape, or the call is a recomputation
                (`torch.utils.checkpoint`), which would begin with the wrong state.
            BackendUnavailableError: compiled kernels are requested, but cannot run.
            ExportError: the call is inside of `torch.jit.trace`, or it is inside of `torch.export` and the neuron has a
                state. An exported program begins with the initial state. Later calls of the neuron within the program
                continue from the state of the first call; with `strict=True`, later calls raise this error.
            ParameterError: `lengths` or `resets` do not match the input.
            StepModeError: `lengths` are passed in step mode `"s"`.
            ExampleError: `T == 0` in a loop without `example_outputs`, or `example_outputs` differ from the core's
                outputs.
        """
        if inputs.__class__ is not tuple:  # torch.fx traces the neuron itself
            raise refuse_proxies(type(self).__name__)
        compiling = torch.compiler.is_compiling()
        firing = None if compiling else self._firing
        if firing is not None and self.training:
            firing.calls_left -= 1
            if firing.calls_left == 0:
                firing.calls_left = EVERY[self._step_mode]  # set before the call, which may raise an error
                options: CallOptions = {
                    "affine": affine,
                    "lengths": lengths,
                    "resets": resets,
                    "transforms": transforms,
                }
                result = FlexSN.forward(self, *inputs, **options)
                firing.look(self, result if isinstance(result, Tensor) else result[0])
                return result
        front: Producer | Delayed | None = affine
        if self._handover is not None:
            inputs, front = self._handover.take(inputs, affine)
        if not compiling and self.__dict__["_again"] is not None and lengths is resets is None and not transforms:
            again = self._run_again(inputs, front)
            if again is not None:
                return again
        changes = self._collect_transforms(inputs, front, lengths, resets, transforms)
        counts = SpikeCounts() if self.count_spikes else None
        if counts is not None:
            changes = (*changes, counts)
        if not compiling:
            if backward_pass() != -1:
                check_first_run("the neuron", self._reset_in, "neuron.step, or a function that calls reset() first")
            if any(map(Tensor.is_inference, self.states)):
                self.__dict__["states"] = for_autograd(self.states)
            if self._looks_for_sharing and self.states and torch.is_grad_enabled():
                self._look_for_sharing(inputs)
            if self._bits.num_users > 0:
                self._bits.forget()
                if self._can_write_bits():
                    changes = (*changes, SpikesAsBits())
            if changes or self._draws:
                changes = self._add_draws(changes, begins=not self.states, keep=True)
            exchange: SequenceRunner | None = self.__dict__.get("_exchange")
            if exchange is not None and len(inputs) == 1 and not self._own_transforms:
                output = exchange.run(self, inputs) if self._describe_results(changes) == _SEQUENCE else None
                if output is not None:
                    return output
            repeated, inputs, changes = self._repeat(inputs, changes)
            if repeated is not None:
                if counts is not None and counts.total is not None:
                    self.__dict__["spike_counts"] = per_channel(counts.total, lead=0)
                return repeated
            graph: GraphOfCall | None = self.__dict__.get("_graph")
            if graph is not None and torch.is_grad_enabled():
                graph.watch(self.states)
        exporting = compiling and not self._carries and is_exporting()
        begin = self._get_export_states() if exporting else self.states
        if compiling:
            changes = self._add_draws(changes, begins=not begin, keep=not exporting)
        if not compiling and is_jit_tracing():
            raise ExportError(
                "torch.jit.trace records the loop for one T, and the neuron's current state. Use "
                "torch.export.export, torch.onnx.export(dynamo=True), or torch.compile: docs/deployment.md."
            )
        outputs, states, state_seqs = self._run(inputs, begin, keep=self.store_state_seqs, transforms=changes)
        spikes = None
        if counts is not None and counts.total is not None:
            spikes = per_channel(counts.total, lead=0)
        elif counts is not None:
            spikes = per_channel(outputs[0], lead=1 if self._step_mode == "m" else 0)
        if exporting:
            if not torch.compiler.is_dynamo_compiling():
                self.__dict__["_exported"] = InExport(states)
        elif compiling:
            self.states, self.state_seqs, self.spike_counts = states, state_seqs, spikes
        else:
            self._store_results(states, state_seqs, spikes)
            # Backwards of kernels detect a freed graph by themselves.
            self.__dict__["_graph"] = None if self._repeats is not None else graph_of(outputs)
        return outputs[0] if self.num_outputs == 1 else outputs

    def _look_for_sharing(self, inputs: Sequence[Tensor]) -> None:
        """Warns if the inputs depend on the output of the neuron's previous call. Checks one call only.

        Single steps are not checked, because an output that becomes an input of the next step is a recurrent
        connection.
        """
        differentiable = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
        if self._step_mode == "m" and differentiable and all(x.dim() and len(x) > 1 for x in differentiable):
            self.__dict__["_looks_for_sharing"] = False
            if feeds_itself(differentiable, self.states, self._graph):
                warn_of_sharing(self)

    def step(
        self,
        inputs: Tensor | Sequence[Tensor],
        states: Sequence[Tensor] | None = None,
        *,
        affine: Producer | None = None,
        lengths: Tensor | None = None,
        resets: Tensor | None = None,
        transforms: Sequence[Transform] = (),
    ) -> tuple[Tensor | list[Tensor], list[Tensor]]:
        """Runs the neuron from `states`, and returns the new states. The module stores no state.

        In step mode `"m"`, the method runs a whole sequence; in `"s"`, one step.

        Args:
            inputs: inputs of `forward`: a tensor, or `num_inputs` tensors.
            states: `num_states` tensors, `[*step]` each; `None` for the initial states.
            affine, lengths, resets, transforms: same as for `forward`.

        Returns:
            Result of `forward`, and the states after the call.

        Raises:
            The errors of `forward`.

        Example:
            >>> neuron = FlexSN(lambda x, v: (x + v, x + v), 1, 1, 1)
            >>> output, states = neuron.step(torch.ones(3, 2))
            >>> output, states = neuron.step(torch.ones(1, 2), states)
            >>> output
            tensor([[4., 4.]])
        """
        if isinstance(inputs, Proxy):
            raise refuse_proxies(type(self).__name__)
        if not isinstance(inputs, Iterable):
            raise TypeError(
                f"inputs is a {type(inputs).__name__}; give a tensor, or num_inputs={self.num_inputs} of them."
            )
        tensors = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        front: Producer | Delayed | None = affine
        if self._handover is not None:
            tensors, front = self._handover.take(tensors, affine)
        changes = self._collect_transforms(tensors, front, lengths, resets, transforms)
        initial_states = self._to_states(states)
        changes = self._add_draws(changes, begins=not initial_states, keep=False)
        outputs, new_states, _ = self._run(tensors, initial_states, keep=False, transforms=changes)
        return outputs[0] if self.num_outputs == 1 else outputs, new_states

    def _collect_transforms(
        self,
        inputs: tuple[Tensor, ...],
        front: Producer | Delayed | None,
        lengths: Tensor | None,
        resets: Tensor | None,
        transforms: Sequence[Transform],
    ) -> tuple[Transform, ...]:
        """Returns the transforms of one call, with the innermost first. Does not include `_own_transforms`."""
        if transforms:
            check_transforms(transforms)
        chain: tuple[Transform, ...] = (*transforms, *self._shared_transforms)
        if front is not None and not isinstance(front, Delayed):
            flows = self.requires_grad is None or self.requires_grad[0]
            chain = (Absorb(front, flows=flows), *chain)
        chain = (*self._list_completing_transforms(inputs), *chain)
        if resets is not None:
            chain = (*chain, Resets(resets))
        if isinstance(front, Delayed):  # resets leave the state of the delay unchanged
            chain = (*chain, front)
        return chain if lengths is None else (*chain, Lengths(lengths))

    def _list_completing_transforms(self, inputs: tuple[Tensor, ...]) -> tuple[Transform, ...]:
        """Returns transforms that compute the inputs that a call omits."""
        return ()

    def explain(self, *inputs: Tensor, affine: Producer | None = None) -> str:
        """Describes the backends of the neuron's calls, the reasons for their choice, and the compiled kernels.

        Args:
            inputs: same as for `forward`. If inputs are passed, the text also describes the bytes that a call with
                these inputs moves through memory, and the copies that the memory layout of the inputs requires.
            affine: same as for `forward`.
        """
        kinds = kinds_of(self.modules())
        lines = self._decisions.lines(kinds)
        if not self._decisions.has_kernels:
            lines += [
                f"  on a GPU, compiled kernels refuse the core: {reason}" for reason in self._refusals.reasons(kinds)
            ]
        if not lines:
            lines = [f"backend={self._backend!r}: nothing has run yet.{self._predict_backend(inputs)}"]
        if affine is not None and not self._can_absorb(inputs):
            lines.append("the affine part of the input is computed before the step: init_states reads the input")
            affine = None
        launched = self._decisions.has_launched(kinds)
        transforms = [*self._own_transforms, *self._list_completing_transforms(inputs)]
        if affine is not None:
            with torch.no_grad():
                transforms.append(InStep(affine.frozen().absorbed(inputs[0])[1], flows=True))
        if self.count_spikes and launched and self._step_mode == "m":
            transforms.append(SpikeCounts())
        all_transforms = self._add_example_draws(tuple(transforms))
        tensors = self._check_inputs(inputs) if inputs else ()
        call = self._call(self._backend, tensors)._replace(kernels=True)
        if inputs and len(all_transforms) > len(transforms):
            _, all_transforms = before(call, all_transforms)
        program = self._get_step_program(all_transforms).scan
        lines += [
            *kernels(program),
            *segments(self._programs.scans),
            *launchers(program),
            *products(program),
            *constants(program),
        ]
        if inputs:
            counts = any(transform.num_states for transform in all_transforms)
            states = None if self._can_omit_states(tensors) and not counts else self._create_initial_states(tensors)
            more_inputs, more_states = added(call, all_transforms)
            tensors = (*tensors, *more_inputs)
            if states is not None:
                states += more_states
            sequences = [x.unsqueeze(0) for x in tensors] if self._step_mode == "s" else tensors
            lines += traffic(program, sequences, states, keep=self.store_state_seqs)
        packing_refusal = self._bits.why_refused(self.core)
        if packing_refusal is not None:
            lines.append(f"spikes are packed after the kernel: {packing_refusal}")
        names = unregistered(self.core)
        if names:
            lines.append(f"captured parameters that are in no module and no optimizer: {', '.join(names)}")
        return "\n".join(lines)

    def _predict_backend(self, inputs: tuple[Tensor, ...]) -> str:
        """Names the backend that would run a call with these inputs, and the reason. Returns `""` without inputs."""
        if not inputs:
            return ""
        checked = self._check_inputs(inputs)
        try:
            choice = choose(self._backend, self._step_mode, checked[0].device, False)
        except BackendUnavailableError as error:
            return f" These inputs would raise: {error}"
        loop_reason = None
        if self._backend == "auto" and self._may_fall_back(choice.backend):
            loop_reason = self._why_loop(checked, [])
        if loop_reason is not None:
            return f" These inputs would run on torch: {loop_reason}"
        return f" These inputs would run on {choice.backend}: {choice.reason}"

    def latest_choice(self, device: str) -> Choice | None:
        """Returns the last recorded choice for calls outside of compilers on a type of device, or `None`."""
        return self._decisions.latest((device, False), kinds_of(self.modules()))

    def kernel_names(self) -> tuple[str, ...]:
        """Returns the names of the kernels that were built so far."""
        return tuple(dict.fromkeys(map(without_hash, self._programs.kernel_names())))

    def extra_repr(self) -> str:
        core = getattr(self.core, "__name__", type(self.core).__name__)
        return (
            f"core={core}, num_inputs={self.num_inputs}, num_states={self.num_states}, "
            f"num_outputs={self.num_outputs}, step_mode={self._step_mode!r}, backend={self._backend!r}"
        )
