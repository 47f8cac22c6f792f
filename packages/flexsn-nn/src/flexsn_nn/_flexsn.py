"""`FlexSN`: a step function as a module that keeps its state."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from flexsn_hop import eager_scan, eager_scan_final_state, flex_sn_scan, flex_sn_scan_final_state
from flexsn_nn._affine import Absorbed, Behind, Producer, behind
from flexsn_nn._backends import (
    BACKENDS,
    COMPILED,
    KERNEL_BACKENDS,
    Backend,
    Choice,
    StepMode,
    check_backend,
    check_step_mode,
    choose,
    choose_for_onnx,
    takes_step_mode,
    written_in,
)
from flexsn_nn._checks import check_count, check_name
from flexsn_nn._counts import from_zero, per_channel
from flexsn_nn._decisions import Decisions
from flexsn_nn._diagnosis import explain_devices, explain_dtypes
from flexsn_nn._draws import draws
from flexsn_nn._example_outputs import Spec, compare_specs, specs_of
from flexsn_nn._explain import constants, kernels, launchers, products, traffic, without_hash
from flexsn_nn._freed_graphs import GraphOfCall, graph_of
from flexsn_nn._handover import Handover
from flexsn_nn._inputs import check_input
from flexsn_nn._leaf import Leaf, refuse_proxies
from flexsn_nn._noise import NUM_PLACES, Drawing, Means, Numbers, example_places
from flexsn_nn._portability import portability
from flexsn_nn._precision import PRECISIONS, InFloat32, widened, widened_dtype
from flexsn_nn._programs import Programs
from flexsn_nn._refusals import Refusals, kinds_of
from flexsn_nn._run_kernels import run_again, run_between_graphs, run_kernels, run_step_between_graphs
from flexsn_nn._spike_bits import SpikeBits
from flexsn_nn._state_shapes import check_states, plain_states, step_shape
from flexsn_nn._stateful import check_first_run, is_own, is_own_forward
from flexsn_nn._torch_private import (
    between_graphs,
    constant,
    is_exporting,
    is_jit_tracing,
    is_onnx_exporting,
    recomputation,
)
from flexsn_nn._unregistered import unregistered, warn_of_unregistered
from flexsn_nn.errors import (
    DrawError,
    ExampleError,
    ExportError,
    InputCountError,
    InputShapeError,
    PlacementError,
    StateError,
)
from flexsn_runtime import (
    ScanProgram,
    SpikeBitsError,
    TraceError,
    repeated_scan,
    repeated_step,
    single_step,
    transform_at_work,
)

_PLAIN = frozenset({Tensor, nn.Parameter})
_Ran = tuple[list[Tensor], list[Tensor], list[Tensor]]
_Asked = tuple[str, bool, bool, bool]


class _Repeats(NamedTuple):
    """An earlier call that others may repeat.

    Attributes:
        program: runs them.
        asked: what such a call returns and leaves behind: `FlexSN._asked`. A call that differs in it takes the long
            way.
    """

    program: ScanProgram
    asked: _Asked


class FlexSN(Leaf):
    """A spiking neuron, or any recurrence that works element by element, from one time step of it.

    The state lives on the module from call to call until `reset()`; or, with `step`, in the caller's hands.

    Args:
        core: `core(*inputs, *states) -> (*outputs, *new_states)`: one time step, pointwise over the step's
            elements, but for products with captured matrices along its last dimension. A function, or an
            `nn.Module`, whose parameters become this module's. Tensors that it captures get gradients; parameters
            among them that no module and no optimizer has are warned of at the first call.
        num_inputs, num_states, num_outputs: how many of each.
        example_inputs: one step's inputs and states; with them, errors in the core come at construction.
        requires_grad: for each input and (initial) state, whether a gradient may flow to it; `None`: to all.
        step_mode: `"m"`: inputs are sequences `[T, *step]`; `"s"`: one step `[*step]` per call.
        backend: `"triton"` or `"inductor"` (one path under two labels): compiled kernels on a GPU; `"cpp"`: compiled
            kernels on the CPU; `"hop"`: the scan as one operator; `"torch"`: a plain loop; `"auto"`: kernels where
            they run; elsewhere the operator inside `torch.compile`, and the loop outside of it.
        store_state_seqs: whether to keep the states after every step, in `state_seqs`.
        example_outputs: one step's outputs; gives shapes and dtypes when `T == 0`.
        precision: `"eager"`: what the core computes on the tensors as they are; `"float32"`: float16 and
            bfloat16 inputs are widened, the states are float32, and outputs are rounded to the first input's
            dtype.
        residuals: what compiled kernels keep for the backward besides the inputs: `"recompute"`: the states now and
            then, from which the rest is computed again; `"save"`: the fewest bytes from which the gradient can be
            computed; `"auto"`: whichever moves fewer bytes. Under `torch.compile`, they recompute.

    Attributes:
        states: `[*step]` each, or empty before the first call and after `reset()`.
        state_seqs: `[T, *step]` each, of the last call, if `store_state_seqs`.
        count_spikes: whether each call also gives `spike_counts`; `False` at first.
        spike_counts: `[C]`, float32 (or the output's dtype, if that is wider): the (first) output of the last call,
            summed over all dimensions but the step's second one, or its only one. Compiled kernels sum over time as
            they go, and the spikes are not read again; single steps, loops and graphs sum the output. Differentiable:
            what a regulariser of rates adds to the gradient needs no sequence. `None` if nobody asked.

    Raises:
        UnknownNameError, StepModeError: an unknown backend, step mode or precision, or two that do not go
            together.
        ResidualsError: unknown residuals.
        ValueError: numbers that do not fit each other, or, with `example_inputs`, the core.

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
    ) -> None:
        super().__init__()
        check_name("precision", precision, PRECISIONS)
        self.core = core
        self._widening = InFloat32(core, num_outputs) if precision == "float32" else None
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
        self._drawing: Drawing | Means | None = None
        self._programs = Programs(num_inputs, num_states, num_outputs, residuals)
        self._handover: Handover | None = None
        self._spike_range: tuple[int, int] | None = None
        self._decisions = Decisions()
        self._refusals = Refusals()
        # Until an attribute is assigned: whether kernels are known to take the core, and what has run single steps.
        self._ready_made: bool | None = None
        self._repeats: _Repeats | None = None
        self.states: list[Tensor] = []
        self.state_seqs: list[Tensor] = []
        self.count_spikes = False
        self.spike_counts: Tensor | None = None
        self._bits = SpikeBits()
        # Of states that `init_states` made: the step's shape, and theirs.
        self._shapes_for: tuple[torch.Size, list[torch.Size]] | None = None
        self._graph: GraphOfCall | None = None  # of the loop's last call
        self._reset_in = recomputation()  # in which reset() was called last
        program = self._get_program()
        if example_inputs is not None:
            step = program.specialize_examples(self._with_examples(example_inputs))
            compare_specs(self._output_specs, [(value.shape, value.dtype) for value in step.trace.outputs])

    @property
    def backend(self) -> str:
        """The backend asked for; `explain()` says which one runs."""
        return self._backend

    @backend.setter
    def backend(self, backend: str) -> None:
        self._backend = check_backend(backend, self._step_mode)
        self._forget_decisions()

    @property
    def step_mode(self) -> str:
        """`"m"` for sequences, `"s"` for single steps."""
        return self._step_mode

    @step_mode.setter
    def step_mode(self, step_mode: str) -> None:
        mode = check_step_mode(step_mode)
        check_backend(self._backend, mode)
        self._step_mode = mode
        self._forget_decisions()

    @property
    def supported_backends(self) -> tuple[str, ...]:
        """The backends that can be asked for in this step mode. (SpikingJelly's `set_backend` looks here.)"""
        return tuple(name for name in BACKENDS if takes_step_mode(name, self._step_mode))

    @property
    def spike_range(self) -> tuple[int, int] | None:
        """Between which whole numbers the (first) output is, both included: `(0, 1)` for spikes; `None`: anything.

        Ready-made neurons know it. Set it of a step of your own that gives nothing else, and
        `memory.PackedSpikes` keeps its output as bits.
        """
        if self._spike_range is None and is_own_forward(self):
            return self._own_spike_range()
        return self._spike_range

    @spike_range.setter
    def spike_range(self, spike_range: tuple[int, int] | None) -> None:
        if spike_range is not None:
            low, high = spike_range
            check_count("spike_range[0]", low, at_least=-(2**31))
            check_count("spike_range[1]", high, at_least=low + 1)
            spike_range = low, high
        self._spike_range = spike_range

    def _own_spike_range(self) -> tuple[int, int] | None:
        """What the step is known to give, whatever it is set to."""
        return None

    @property
    def precision(self) -> str:
        """`"eager"` or `"float32"`."""
        return "eager" if self._widening is None else "float32"

    @property
    def residuals(self) -> str:
        """What is kept for the backward: `"auto"`, `"recompute"` or `"save"`."""
        return self._residuals

    def __setattr__(self, name: str, value: Any) -> None:
        kept: Any = self._as_states(value) if name == "states" else value
        super().__setattr__(name, kept)
        if not torch.compiler.is_compiling():
            self.__dict__.update(_ready_made=None, _repeats=None)
            if name == "states":
                self.__dict__.update(_graph=None, _reset_in=recomputation())
            if name == "core":
                self.__dict__["_draws"] = draws(value)
                self._forget_decisions()

    def _forget_decisions(self) -> None:
        """Begins the account of what runs again: another core, or another way to run it."""
        if "_decisions" in self.__dict__:  # not in the constructor
            self._decisions.clear()
            self._refusals = Refusals()

    def _as_states(self, states: Any) -> list[Any]:
        """What `states` is set to; `None` is a reset."""
        if isinstance(states, Tensor):
            raise TypeError(f"states is a tensor; give a list of num_states={self.num_states} tensors.")
        if states is not None and not isinstance(states, Iterable):
            raise TypeError(
                f"states is a {type(states).__name__}; give a list of num_states={self.num_states} tensors."
            )
        return [] if states is None else list(states)

    def forward(self, *inputs: Tensor, affine: Producer | None = None) -> Tensor | list[Tensor]:
        """Runs the neuron, from the state that it has.

        Args:
            inputs: `num_inputs` tensors, `[T, *step]` each in step mode `"m"`, `[*step]` in `"s"`. Inputs may
                broadcast against each other behind T.
            affine: what to do with the first input before the step; compiled kernels do it in the step itself, and the
                sequence is not written.

        Returns:
            The output `[T, *step]` (`[*step]` in `"s"`); a list of them when there are several. Outputs, states and
            gradients have the inputs' memory format, as after an elementwise operation.

        Raises:
            TypeError, InputCountError: not `num_inputs` tensors.
            StateError: the state was made for inputs of another shape; or the call is a recomputation
                (`torch.utils.checkpoint`), which would begin at the wrong state.
            BackendUnavailableError: compiled kernels were asked for and cannot run.
            ExportError: inside `torch.export`, with a state. What is exported begins at the initial state. Or inside
                `torch.jit.trace`.
            ExampleError: `T == 0` in a loop without `example_outputs`, or with some that are not like the core's.
        """
        if inputs.__class__ is not tuple:  # a tracer of torch.fx that was given the neuron alone
            raise refuse_proxies(type(self).__name__)
        compiling = torch.compiler.is_compiling()
        packing = False
        if self._handover is not None:
            inputs, affine = self._handover.take(inputs, affine)
        if not compiling:
            check_first_run("the neuron", self._reset_in, "neuron.step, or a function that calls reset() first")
            if any(state.is_inference() for state in self.states):
                self.__dict__["states"] = _for_autograd(self.states)
            if self._bits.asked > 0:
                self._bits.forget()
                packing = self._packs()
            repeated = None
            if affine is None:
                repeated = self._repeat(inputs, packing)
            elif self._has_absorbed(inputs):
                x, absorbed = affine.absorbed(inputs[0])
                inputs, affine = (x, *inputs[1:]), absorbed
                repeated = self._repeat(inputs, packing, absorbed)
            if repeated is not None:
                return repeated
            graph: GraphOfCall | None = self.__dict__.get("_graph")
            if graph is not None and torch.is_grad_enabled():
                graph.watch(self.states)
        exporting = compiling and is_exporting()
        if exporting and self.states:
            raise ExportError(
                "the neuron has a state, which an exported program cannot keep. Call reset() before exporting, or "
                "export a module that calls neuron.step(inputs, states) and returns the states."
            )
        if not compiling and is_jit_tracing():
            raise ExportError(
                "torch.jit.trace records the loop for one T, and the state that the neuron has now. Use "
                "torch.export.export, torch.onnx.export(dynamo=True), or torch.compile: docs/deployment.md."
            )
        counting = self.count_spikes
        outputs, states, state_seqs = self._run(
            inputs, self.states, keep=self.store_state_seqs, affine=affine, count=counting, pack=packing
        )
        counts = None
        if counting and len(states) > self.num_states:
            counts = per_channel(states[-1], lead=0)
            states, state_seqs = states[:-1], state_seqs[: self.num_states]
        elif counting:
            counts = per_channel(outputs[0], lead=1 if self._step_mode == "m" else 0)
        if compiling and not exporting:
            self.states, self.state_seqs, self.spike_counts = states, state_seqs, counts
        elif not compiling:
            self._hold_results(states, state_seqs, counts)
            # Kernels' own backwards say it by themselves.
            self.__dict__["_graph"] = None if self._repeats is not None else graph_of(outputs)
        return outputs[0] if self.num_outputs == 1 else outputs

    def _hold_results(self, states: list[Tensor], state_seqs: list[Tensor], counts: Tensor | None) -> None:
        """Everything that a call leaves on the module, whichever way it ran."""
        # Not through nn.Module's __setattr__, which takes half as long as launching a kernel.
        self.__dict__.update(states=states, state_seqs=state_seqs, spike_counts=counts)

    def step(
        self,
        inputs: Tensor | Sequence[Tensor],
        states: Sequence[Tensor] | None = None,
        *,
        affine: Producer | None = None,
    ) -> tuple[Tensor | list[Tensor], list[Tensor]]:
        """Runs the neuron from the states given, and returns the new ones: the module keeps nothing.

        In step mode `"m"` this runs a whole sequence, in `"s"` one step.

        Args:
            inputs: the inputs of `forward`: a tensor, or `num_inputs` of them.
            states: `num_states` tensors, `[*step]` each; `None`: the initial ones.
            affine: as for `forward`.

        Returns:
            What `forward` returns, and the states after it.

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
        given = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        if self._handover is not None:
            given, affine = self._handover.take(given, affine)
        outputs, new_states, _ = self._run(given, self._as_states(states), keep=False, affine=affine)
        return outputs[0] if self.num_outputs == 1 else outputs, new_states

    def reset(self) -> None:
        """Forgets the state: the next call starts from the initial one."""
        if torch.compiler.is_compiling():
            self.states, self.state_seqs, self.spike_counts = [], [], None
        else:  # as in forward
            self._forget(recomputation())

    def _forget(self, inside: tuple[int, int] | None) -> None:
        """A reset outside of compilers.

        Args:
            inside: the `recomputation()` that this is in.
        """
        self.__dict__.update(states=[], state_seqs=[], spike_counts=None, _graph=None, _reset_in=inside)

    def detach(self) -> None:
        """Cuts the state off from the graph that led to it (truncated backpropagation through time)."""
        states = [state.detach() for state in self.states]
        state_seqs = [state.detach() for state in self.state_seqs]
        counts = None if self.spike_counts is None else self.spike_counts.detach()
        if torch.compiler.is_compiling():
            self.states, self.state_seqs, self.spike_counts = states, state_seqs, counts
        else:  # no assignment from outside, which would begin a second run of checkpointing
            self._hold_results(states, state_seqs, counts)

    def init_states(self, num_states: int, step_mode: str, *inputs: Tensor) -> list[Tensor]:
        """The initial states, `[*step]` each. Zeros of the first input's dtype; override for others.

        They have the memory format of the first input that has the step's shape.

        Args:
            num_states: how many.
            step_mode: whether `inputs` lead with time (`"m"`).
            inputs: as given to `forward`.
        """
        shape = step_shape(inputs, step_mode)
        dtype = self._state_dtype(inputs)
        for x in inputs:
            if step_mode == "s" and x.shape == shape:
                return [torch.zeros_like(x, dtype=dtype) for _ in range(num_states)]
            if step_mode == "m" and x.shape[1:] == shape and x.shape[0] > 0:
                return [torch.zeros_like(x[0], dtype=dtype) for _ in range(num_states)]
        return [inputs[0].new_zeros(shape, dtype=dtype) for _ in range(num_states)]

    def explain(self, *inputs: Tensor, affine: Producer | None = None) -> str:
        """What runs and why, what was refused and why, and what each call moves through memory.

        Args:
            inputs: as for `forward`; with them, also the bytes of a call with these, and the copies that their
                layout costs.
            affine: as for `forward`.
        """
        kinds = kinds_of(self.modules())
        lines = self._decisions.lines(kinds)
        if not self._decisions.has_kernels:
            lines += [f"  on a GPU, compiled kernels refuse the core: {why}" for why in self._refusals.reasons(kinds)]
        if not lines:
            lines = [f"backend={self._backend!r}: nothing has run yet."]
        absorbed = None
        if affine is not None and not self._absorbs(inputs):
            lines.append("the affine part of the input is computed before the step: init_states looks at the input")
        elif affine is not None:
            with torch.no_grad():
                absorbed = affine.frozen().absorbed(inputs[0])[1]
        launched = self._decisions.has_launched(kinds)
        counting = self.count_spikes and launched and self._step_mode == "m" and self.num_states > 0
        program = self._get_program(absorbed, counting=counting)
        lines += [*kernels(program), *launchers(program), *products(program), *constants(program)]
        if inputs:
            given = self._checked(inputs)
            if self._has_places():
                shape, steps = step_shape(given, self._step_mode), len(given[0]) if self._step_mode == "m" else None
                given = (*given, *example_places(shape, steps, given[0].device))
            states = None if self._kernels_start_alike(given) and not counting else self._initial(given)
            if states is not None and counting:
                states = from_zero(states, given[0])
            sequences = [x.unsqueeze(0) for x in given] if self._step_mode == "s" else given
            lines += traffic(program, sequences, states, keep=self.store_state_seqs)
        unpacked = self._bits.why_refused(self.core)
        if unpacked is not None:
            lines.append(f"spikes are packed after the kernel: {unpacked}")
        names = unregistered(self.core)
        if names:
            lines.append(f"captured parameters that no module and no optimizer has: {', '.join(names)}")
        return "\n".join(lines)

    def latest_choice(self, device: str) -> Choice | None:
        """The backend of calls outside of compilers on a type of device, and the reason; `None`: none ran yet."""
        return self._decisions.latest((device, False), kinds_of(self.modules()))

    def kernel_names(self) -> tuple[str, ...]:
        """Names of the kernels that were built so far."""
        program = self._get_program()
        names = [name for step in program.specializations for name in step.kernel_names]
        return tuple(dict.fromkeys(map(without_hash, names)))

    def extra_repr(self) -> str:
        core = getattr(self.core, "__name__", type(self.core).__name__)
        return (
            f"core={core}, num_inputs={self.num_inputs}, num_states={self.num_states}, "
            f"num_outputs={self.num_outputs}, step_mode={self._step_mode!r}, backend={self._backend!r}"
        )

    # -- running -----------------------------------------------------------------------------------------

    def _run(
        self,
        inputs: tuple[Tensor, ...],
        states: list[Tensor],
        *,
        keep: bool,
        affine: Producer | None = None,
        count: bool = False,
        pack: bool = False,
    ) -> _Ran:
        """As `_run_unexplained`, and an error of the core's operations names the argument that is the cause."""
        if torch.compiler.is_compiling():
            return self._run_unexplained(inputs, states, keep=keep, affine=affine, count=count, pack=pack)
        try:
            return self._run_unexplained(inputs, states, keep=keep, affine=affine, count=count, pack=pack)
        except DrawError:
            if self._draws:
                raise
            self._draws = True  # by a function that the core's code does not name
            return self._run(inputs, states, keep=keep, affine=affine, count=count, pack=pack)
        except (RuntimeError, ValueError) as error:
            if inputs and all(isinstance(x, Tensor) for x in inputs):
                self._explain_error(inputs, states, error)
            raise

    def _explain_error(self, inputs: Sequence[Tensor], states: Sequence[Tensor], error: Exception) -> None:
        """Raises a clearer error than `error`, by checks too slow for a call that succeeds.

        Args:
            inputs, states: of the call that failed.
        """
        explain_devices(inputs, self, self.core, error)
        explain_dtypes(inputs, error)

    def _run_unexplained(
        self,
        inputs: tuple[Tensor, ...],
        states: list[Tensor],
        *,
        keep: bool,
        affine: Producer | None = None,
        count: bool = False,
        pack: bool = False,
    ) -> _Ran:
        """Outputs, final states, and the state sequences if they are to be kept.

        Args:
            states: empty for the initial ones.
            affine: as for `forward`.
            count: if kernels can, there is one more state: what `Counting` counts.
            pack: if kernels can, `SpikeBits` has the bits of the first output then.
        """
        inputs = self._checked(inputs)
        if affine is not None and not self._absorbs(inputs):
            inputs, affine = (affine.of(inputs[0]), *inputs[1:]), None
        if not _PLAIN.issuperset(map(type, inputs)) and _are_sharded(inputs):
            if self._has_places():
                raise PlacementError(
                    "the step draws random numbers, which have no rows of their own on DTensors yet: call it with "
                    "local parts, x.to_local(), and set flexsn_nn.random.configure(net, seed=..., first_row=...)."
                )
            ran: _Ran = self._run_shards(inputs, states, keep=keep)
            return ran
        compiling = torch.compiler.is_compiling()
        if self._draws:
            inputs = self._with_places(inputs, begins=not states, keep=states is self.states)
        backend = self._choose(self._backend, self._step_mode, inputs[0].device, compiling)
        if self._backend == "auto" and self._asks_kernels(backend):
            if self._kernels_take(inputs, states):
                try:
                    return self._run_on(backend, inputs, states, keep, affine, count, pack)
                except (TraceError, NotImplementedError):
                    if compiling:
                        raise
                    self._refusals.forget()  # the core may have changed since
                    self._decisions.forget((inputs[0].device.type, False))
                    if self._kernels_take(inputs, states):
                        raise
            backend = "torch"
        if self._is_empty(inputs) and affine is None and self._specs_beforehand(inputs) is not None:
            backend = "torch" if backend in COMPILED else backend  # nothing to launch, and no trace of the core
        return self._run_on(backend, inputs, states, keep, affine, count, pack)

    def _run_on(
        self,
        backend: str,
        inputs: tuple[Tensor, ...],
        states: list[Tensor],
        keep: bool,
        affine: Producer | None,
        count: bool,
        pack: bool,
    ) -> _Ran:
        """As `_run`, by the backend that was chosen."""
        compiling = torch.compiler.is_compiling()
        absorbed: Absorbed | None = None
        if affine is not None:
            x, *others = inputs
            if backend in COMPILED or (backend == "hop" and compiling):
                x, absorbed = affine.absorbed(x)
                if self.requires_grad is not None and not self.requires_grad[0]:
                    absorbed = absorbed.with_tensors(*(tensor.detach() for tensor in absorbed.tensors))
            else:
                x = affine.of(x)
            inputs = (x, *others)
        at_zero = compiling and not states and self._starts_at_zero()
        if states:
            states = self._fitting(states, inputs)
        elif backend not in COMPILED or count or not self._kernels_start_alike(inputs):
            states = self._initial(inputs)
        if self._step_mode == "s":
            return *self._single_step(backend, inputs, states, absorbed, compiling), []
        if backend in COMPILED:
            count = count and not compiling and bool(states)
            if count:
                states = from_zero(states, inputs[0])
            results = None
            if pack:
                results = self._run_packing(inputs, states, keep, absorbed, count)
            if results is None:
                program = self._get_program(absorbed, counting=count)
                if compiling or keep:
                    run = run_between_graphs if compiling else run_kernels
                    results = run(program, (*inputs, *states), keep, absorbed)
                else:
                    results = run_again(program, inputs, states, absorbed)
                    self._remember(program, count=count, pack=False)
        else:
            results = self._run_core(backend, (*inputs, *states), keep, at_zero, absorbed)
            if backend == "torch" and self._backend == "auto" and not compiling:
                self._ask_for_portability(inputs, states, results)
        outputs, carried = list(results[: self.num_outputs]), list(results[self.num_outputs :])
        if not keep:
            return outputs, carried, []
        if inputs[0].shape[0] > 0:
            return outputs, [sequence[-1] for sequence in carried], carried
        return outputs, [state.clone() for state in states or self._initial(inputs)], carried

    def _is_empty(self, inputs: Sequence[Tensor]) -> bool:
        """True of a sequence without steps, outside of compilers, where the number of steps is a number."""
        empty = self._step_mode == "m" and not torch.compiler.is_compiling() and inputs[0].shape[:1] == (0,)
        return bool(empty)

    def _packs(self) -> bool:
        """Whether kernels may write the bits of the first output."""
        if not torch.is_grad_enabled() or self._step_mode == "s" or self.spike_range != (0, 1):
            return False
        return self._bits.why_refused(self.core) is None

    def _run_packing(
        self,
        inputs: tuple[Tensor, ...],
        states: list[Tensor],
        keep: bool,
        affine: Absorbed | None,
        count: bool,
    ) -> tuple[Tensor, ...] | None:
        """As kernels run it, and notes the bits of the first output; `None`: it is not known to be 0 or 1."""
        program = self._get_program(affine, counting=count, packing=True)
        try:
            if keep:
                *results, bits = run_kernels(program, (*inputs, *states), True, affine)
            else:
                *results, bits = run_again(program, inputs, states, affine)
                self._remember(program, count=count, pack=True)
        except SpikeBitsError as error:
            self._bits.refuse(self.core, str(error))
            return None
        self._bits.note(results[0], bits)
        return tuple(results)

    def _asked(self, packing: bool) -> _Asked:
        """Results and side effects of a call of `forward`, by the attributes as they are now."""
        own = self.__dict__  # a module's attributes take five times as long
        mode = own["_step_mode"]
        return mode, own["store_state_seqs"] and mode == "m", own["count_spikes"], packing

    def _remember(self, program: ScanProgram, *, count: bool, pack: bool) -> None:
        """Lets `_repeat` make calls of this program, if it can: those that keep no sequences and count nothing."""
        if not count and self._widening is None and not self._draws:
            self.__dict__["_repeats"] = _Repeats(program, (self._step_mode, False, False, pack))

    def _has_absorbed(self, inputs: tuple[Tensor, ...]) -> bool:
        """Whether the call before took into its step what it was given for it, and would again with these inputs."""
        own = self.__dict__
        repeats: _Repeats | None = own["_repeats"]
        if repeats is None:
            return False
        fits = len(inputs) == own["num_inputs"] and type(inputs[0]) is Tensor and own["_step_mode"] == "m"
        if not fits or not isinstance(repeats.program.core, Behind) or transform_at_work() is not None:
            return False
        return repeats.asked == self._asked(bool(repeats.program.bits))

    def _repeat(
        self, inputs: tuple[Tensor, ...], packing: bool, affine: Absorbed | None = None
    ) -> Tensor | list[Tensor] | None:
        """What `forward` returns, of a call like an earlier one of the same program; `None`: there was none.

        Args:
            packing: whether kernels are to write the bits of the first output.
            affine: of the first input, in the step.
        """
        own = self.__dict__
        repeats: _Repeats | None = own["_repeats"]
        if repeats is None or repeats.asked != self._asked(packing):
            return None
        program = repeats.program
        core, instead = program.core, None
        if affine is not None:
            if not isinstance(core, Behind) or core.kind != affine.kind:
                return None
            instead = core.instead(affine.tensors)
            core = core.core
        if (own["core"] if "core" in own else own["_modules"].get("core")) is not core:
            return None  # one that was registered, and not assigned
        states = own["states"]
        if own["_step_mode"] == "s":
            results = repeated_step(program, inputs, states) if states else None
        elif len(states) != own["num_states"] and (states or not self._starts_at_zero()):
            return None
        else:
            completion = None if affine is None else affine.completion
            results = repeated_scan(program, inputs, states, instead, completion and completion.formula)
        if results is None:
            return None
        end = own["num_outputs"]
        if packing:
            *results, bits = results
            self._bits.note(results[0], bits)
        self._hold_results(list(results[end:]), [], None)
        return results[0] if end == 1 else list(results[:end])

    @between_graphs("a neuron on DTensors runs between the graphs of torch.compile")
    def _run_shards(self, inputs: tuple[Tensor, ...], states: list[Tensor], *, keep: bool) -> _Ran:
        """As `_run`, of `DTensor`: each process runs its part of the step."""
        from flexsn_nn._shards import StepShards, check_parts  # takes as long to import as all of flexsn_nn

        lead = 1 if self._step_mode == "m" else 0
        shards = StepShards.of(inputs, lead)
        parts = tuple(shards.local(x) for x in inputs)
        own = [shards.state(state, i) for i, state in enumerate(states)]
        with shards.local_parameters(self) as local:
            if shards.is_cut:
                sequences = parts if lead else [x.unsqueeze(0) for x in parts]
                check_parts(self._get_program(), sequences, own or self._initial(parts), local)
            outputs, new_states, state_seqs = self._run(parts, own, keep=keep)
        return (
            [shards.whole(output, lead) for output in outputs],
            [shards.whole(state, 0) for state in new_states],
            [shards.whole(sequence, lead) for sequence in state_seqs],
        )

    def _run_core(
        self, backend: str, primals: tuple[Tensor, ...], keep: bool, at_zero: bool, affine: Absorbed | None = None
    ) -> tuple[Tensor, ...]:
        """Outputs, and the state sequences or the final states, by the core itself.

        Args:
            at_zero: whether a compiler may take the states for zeros.
            affine: as for `forward`.
        """
        assert affine is None or affine.completion is None, "kernels complete gradients"
        sequences, finals = _SCANS[backend]
        specs: Sequence[Spec] | None = self._output_specs
        if self._is_empty(primals):
            specs = self._empty_specs(primals)
        elif specs is None and torch.compiler.is_compiling() and primals[0].dim() > 0 and primals[0].shape[0] == 0:
            specs = self._specs_beforehand(primals[: self.num_inputs])
        options: dict[str, object] = {}
        if backend == "hop" and at_zero:
            options["zero_states"] = (True,) * self.num_states
        if backend == "hop" and self._backend in KERNEL_BACKENDS:
            options["lowering"] = "kernel"  # kernels were asked for: the operator may not become anything else
        core = self._step_function()
        return (sequences if keep else finals)(
            core if affine is None else behind(core, affine),
            self._num_core_inputs(),
            self.num_states,
            self.num_outputs,
            *self._masked(primals),
            output_template_specs=specs,
            **options,
        )

    def _specs_beforehand(self, inputs: Sequence[Tensor]) -> list[Spec] | None:
        """Shapes and dtypes of one step's outputs, where they are known without the core; `None`: they are not."""
        if not self.num_outputs:
            return []
        step = step_shape(inputs, self._step_mode)
        given = self._output_specs
        return given if given is not None and all(tuple(shape) == tuple(step) for shape, _ in given) else None

    def _empty_specs(self, primals: Sequence[Tensor]) -> list[Spec]:
        """Shapes and dtypes of one step's outputs for a sequence without steps.

        Examples of another shape than the step's are compared with a trace of the core, if it can be traced.
        """
        known = self._specs_beforehand(primals[: self.num_inputs])
        if known is not None:
            return known
        if self._output_specs is None:
            return self._traced_specs(primals)
        try:
            end = self._num_core_inputs()
            step, _ = self._get_program().specialize(primals[:end], primals[end:])
        except Exception:  # the core may raise anything on tensors without data
            return self._output_specs
        compare_specs(self._output_specs, [(value.shape, value.dtype) for value in step.trace.outputs])
        return self._output_specs

    def _traced_specs(self, primals: Sequence[Tensor]) -> list[Spec]:
        """Where no example says it."""
        raise ExampleError(
            "the input has no steps (T == 0), and the loop cannot know what an output looks like without one: give "
            "FlexSN example_outputs=(...), one step's outputs."
        )

    def _asks_kernels(self, backend: str) -> bool:
        """Whether the loop runs what the kernels of a backend that "auto" has chosen refuse.

        On a GPU, sequences of such a core are refused; for single steps the loop is no worse than itself.
        """
        return backend == "cpp" or (self._step_mode == "s" and backend in COMPILED)

    def _kernels_take(self, inputs: tuple[Tensor, ...], states: list[Tensor]) -> bool:
        """True if kernels can run what the loop can, on these tensors, as far as that shows beforehand."""
        why = self._why_loop(inputs, states)
        if not torch.compiler.is_compiling():
            self._decisions.ran((inputs[0].device.type, False), why, kinds_of(self.modules()))
        return why is None

    def _why_loop(self, inputs: tuple[Tensor, ...], states: list[Tensor]) -> str | None:
        """Why the loop runs a call for which kernels are chosen; `None`: they run it."""
        if not _PLAIN.issuperset(map(type, (*inputs, *states))):
            other = next(type(t).__name__ for t in (*inputs, *states) if type(t) not in _PLAIN)
            return f"the loop, in calls with {other}: kernels would bypass what this type of tensor does"
        transform = transform_at_work()
        if transform is not None:
            return f"the loop, in calls inside of {transform}, which sees operations and no kernels"
        if self._step_mode == "m" and inputs[0].shape[:1] in ((), (0,)):
            return "the loop, in calls without steps (T == 0)"
        ready = self._ready_made
        if ready is None:
            ready = self.__dict__["_ready_made"] = self._is_ready_made()
        if ready:
            return None
        given = (*inputs, *states)
        training = torch.is_grad_enabled() and any(t.requires_grad for t in (*given, *self.parameters()))
        why = self._refusal(inputs, states, training=training)
        if why is None:
            return None
        return f"the loop ran instead: here as on a GPU, compiled kernels refuse the core: {why}"

    def _ask_for_portability(self, inputs: tuple[Tensor, ...], states: list[Tensor], results: Sequence[Tensor]) -> None:
        """Says, once, what kernels would refuse of what the loop has just run."""
        if portability() == "ignore" or self._is_ready_made() or inputs[0].shape[:1] == (0,):
            return
        self._refusals.tell(self._refusal(inputs, states, training=any(result.requires_grad for result in results)))

    def _refusal(self, inputs: tuple[Tensor, ...], states: list[Tensor], *, training: bool) -> str | None:
        """Why kernels refuse the core, if they do."""
        return self._refusals.why(
            self._get_program,
            inputs,
            states,
            single=self._step_mode == "s",
            training=training,
            modules=self.modules(),
        )

    def _is_ready_made(self) -> bool:
        """Whether all of the core is this package's, which kernels take."""
        return False

    def _single_step(
        self,
        backend: str,
        inputs: tuple[Tensor, ...],
        states: list[Tensor],
        affine: Absorbed | None,
        compiling: bool,
    ) -> tuple[list[Tensor], list[Tensor]]:
        # One step is a scan of length 1: the same checks, the same results.
        if backend in COMPILED and affine is None:
            program = self._get_program()
            results = (run_step_between_graphs if compiling else single_step)(program, inputs, states)
            if not compiling:
                self._remember(program, count=False, pack=False)
            return results[: self.num_outputs], results[self.num_outputs :]
        primals = (*[x.unsqueeze(0) for x in inputs], *states)
        if backend in COMPILED:
            run = run_between_graphs if compiling else run_kernels
            found = run(self._get_program(affine), primals, False, affine)
        else:
            found = self._run_core("torch", primals, keep=False, at_zero=False, affine=affine)
        return [output.squeeze(0) for output in found[: self.num_outputs]], list(found[self.num_outputs :])

    def _masked(self, primals: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Inputs and states, detached where `requires_grad` says so. (Kernels do it by themselves.)"""
        if self.requires_grad is None:
            return primals
        allowed = (*self.requires_grad[: self.num_inputs], *(True,) * (len(primals) - len(self.requires_grad)))
        allowed = (*allowed, *self.requires_grad[self.num_inputs :])
        return tuple(t if may else t.detach() for t, may in zip(primals, allowed, strict=True))

    def _starts_at_zero(self) -> bool:
        """True if `init_states` makes zeros, so that no call of it is needed."""
        return self._starts_by(FlexSN)

    def _starts_by(self, kind: type[FlexSN]) -> bool:
        """True if `init_states` is that of a class: neither a subclass nor an assignment to the object changed it."""
        return type(self).init_states is kind.init_states and "init_states" not in self.__dict__

    def _kernels_start_alike(self, inputs: Sequence[Tensor]) -> bool:
        """Whether the initial states are what kernels start from by themselves: zeros of the first input's dtype."""
        return self._starts_at_zero() and (self._widening is None or self._state_dtype(inputs) == inputs[0].dtype)

    def _state_dtype(self, inputs: Sequence[Tensor]) -> torch.dtype:
        return inputs[0].dtype if self._widening is None else widened_dtype(inputs[0].dtype)

    def _initial(self, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        if torch.compiler.is_compiling() and self._starts_at_zero():
            # One zero that all elements read: a compiler would write out as many as there are elements.
            zero = inputs[0].new_zeros((), dtype=self._state_dtype(inputs))
            return [zero.expand(step_shape(inputs, self._step_mode)) for _ in range(self.num_states)]
        states = list(self.init_states(self.num_states, self._step_mode, *inputs[: self.num_inputs]))
        if len(states) != self.num_states:
            raise StateError(f"init_states returned {len(states)} tensors; num_states is {self.num_states}.")
        if not torch.compiler.is_compiling():
            self.__dict__["_shapes_for"] = torch.Size(step_shape(inputs, self._step_mode)), [s.shape for s in states]
        return states

    def _state_shapes(self, inputs: tuple[Tensor, ...]) -> list[torch.Size]:
        """The shapes that the states have for these inputs: those of the initial ones."""
        shape = torch.Size(step_shape(inputs, self._step_mode))
        if self._starts_by(FlexSN):
            return [shape] * self.num_states
        if torch.compiler.is_compiling():
            return [state.shape for state in self._initial(inputs)]
        if self._shapes_for is None or self._shapes_for[0] != shape:
            with torch.no_grad():
                self._shapes_for = shape, [state.shape for state in self._initial(inputs)]
        return self._shapes_for[1]

    def _fitting(self, states: list[Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """The states, or an error if they are not for these inputs."""
        if len(states) != self.num_states:
            raise StateError(f"there are {len(states)} states; num_states is {self.num_states}.")
        if not torch.compiler.is_compiling():
            states = plain_states(states)
        shape, device = step_shape(inputs, self._step_mode), inputs[0].device
        check_states(states, shape, device, lambda: self._state_shapes(inputs))
        if not torch.compiler.is_compiling():
            states = _for_autograd(states)
        # A module that was moved to half precision has moved its states, too.
        return states if self._widening is None else [widened(state) for state in states]

    def _checked(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The inputs of the core, from those of a call."""
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

    # Dynamo asks for the result and takes it for a constant; it guards what the arguments are made of.
    @constant
    def _choose(self, backend: Backend, step_mode: StepMode, device: torch.device, compiling: bool) -> str:
        """What runs; decided once for each type of device, inside and outside of compilers."""
        if compiling and is_onnx_exporting():
            return choose_for_onnx(backend)
        situation = (device.type, compiling)
        choice = self._decisions.choice(situation)
        if choice is None:
            choice = choose(backend, step_mode, device, compiling)
            if not self._decisions:
                warn_of_unregistered(self.core)
            self._decisions.choose(situation, choice)
        return choice.backend

    def _get_program(
        self, affine: Absorbed | None = None, *, counting: bool = False, packing: bool = False
    ) -> ScanProgram:
        """What kernels are made from, as `Programs.get` says."""
        core, on_cpu = self._step_function(), written_in(self._backend)
        return self._programs.get(core, self.requires_grad, on_cpu, affine, counting=counting, packing=packing)

    def _absorbs(self, inputs: tuple[Tensor, ...]) -> bool:
        """Whether nobody but the step asks for the first input."""
        return not self._starts_by_input() and _PLAIN.issuperset(map(type, inputs))

    def _starts_by_input(self) -> bool:
        """True if `init_states` may read more of the inputs than shape, dtype and format: a user's may."""
        return not is_own(self.init_states)

    def _step_function(self) -> Callable[..., Any]:
        """The core as it runs; another one may have been assigned."""
        core = self._core_of_call()
        if self._widening is not None:
            if not torch.compiler.is_compiling() and self._widening.core is not core:
                self._widening = InFloat32(core, self.num_outputs)
            core = self._widening
        if not self._draws:
            return core
        kind = Drawing if self._has_places() else Means
        drawing = self._drawing
        if not isinstance(drawing, kind) or drawing.core is not core:
            drawing = self._drawing = Drawing(core, self.num_inputs) if kind is Drawing else Means(core)
        return drawing

    def _core_of_call(self) -> Callable[..., Any]:
        """The step, as it is for the call under way."""
        core: Callable[..., Any] = self.core
        return core

    # -- random numbers ------------------------------------------------------------------------------------

    def _has_places(self) -> bool:
        """True if the step as it runs now has inputs from which it computes random numbers."""
        return self._draws and (self.training or self._numbers.in_evaluation)

    def _num_core_inputs(self) -> int:
        return self.num_inputs + NUM_PLACES if self._has_places() else self.num_inputs

    def _with_places(self, inputs: tuple[Tensor, ...], *, begins: bool, keep: bool) -> tuple[Tensor, ...]:
        """The inputs, and those from which random numbers are computed.

        Args:
            begins, keep: as of `Numbers.places`.
        """
        drawing = self._step_function()
        if not isinstance(drawing, Drawing):
            return inputs
        shape, device = step_shape(inputs, self._step_mode), inputs[0].device
        drawing.column = self._numbers.columns(shape, device)
        steps = inputs[0].shape[0] if self._step_mode == "m" else None
        keep = keep and not is_exporting()
        return (*inputs, *self._numbers.places(shape, steps, device, begins=begins, keep=keep))

    def _with_examples(self, examples: Sequence[Tensor]) -> Sequence[Tensor]:
        """One step's inputs and states, with the inputs from which random numbers are computed."""
        drawing = self._step_function()
        if not isinstance(drawing, Drawing) or len(examples) != self.num_inputs + self.num_states:
            return examples
        inputs, states = examples[: self.num_inputs], examples[self.num_inputs :]
        shape, device = step_shape(inputs, "s"), inputs[0].device
        drawing.column = self._numbers.columns(shape, device)
        return (*inputs, *example_places(shape, None, device), *states)

    # -- copies and moves --------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: kernels are built again, the state is cut off from its graph."""
        attributes = self.__dict__.copy()
        attributes["_repeats"] = attributes["_graph"] = attributes["_drawing"] = None
        attributes["_numbers"] = copy(self._numbers)
        attributes["_programs"], attributes["_bits"] = copy(self._programs), copy(self._bits)
        attributes["states"] = [state.detach() for state in self.states]
        attributes["state_seqs"] = [state.detach() for state in self.state_seqs]
        attributes["spike_counts"] = None if self.spike_counts is None else self.spike_counts.detach()
        return attributes

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FlexSN:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.states = [fn(state) for state in self.states]
        self.state_seqs = [fn(state) for state in self.state_seqs]
        self._numbers.apply(fn)
        return self


# By backend: the scan that keeps the state sequences, and the one that keeps the final states.
_SCANS: dict[str, tuple[Callable[..., tuple[Tensor, ...]], Callable[..., tuple[Tensor, ...]]]] = {
    "torch": (eager_scan, eager_scan_final_state),
    "hop": (flex_sn_scan, flex_sn_scan_final_state),
}


def _for_autograd(states: list[Tensor]) -> list[Tensor]:
    """States of `torch.inference_mode` as copies that autograd may save, outside of it."""
    if torch.is_inference_mode_enabled():
        return states
    return [state.clone() if state.is_inference() else state for state in states]


def _are_sharded(inputs: Sequence[Tensor]) -> bool:
    """Whether there is a `DTensor` among the inputs; without importing what they are defined in."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(x, module.DTensor) for x in inputs)
