"""`FlexSN`: a step function as a module that keeps its state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flexsn_hop import eager_scan, eager_scan_final_state, flex_sn_scan, flex_sn_scan_final_state
from flexsn_nn._backends import Choice, check_backend, check_step_mode, choose
from flexsn_nn.errors import InputCountError, StateError
from flexsn_runtime import ScanProgram, ShapeError, prepare, scan


class FlexSN(nn.Module):
    """A spiking neuron, or any recurrence that works element by element, from one time step of it.

    The state lives on the module from call to call until `reset()`.

    Args:
        core: `core(*inputs, *states) -> (*outputs, *new_states)`: one time step, pointwise over the step's
            elements. A function, or an `nn.Module`, whose parameters become this module's. Tensors that it
            captures get gradients.
        num_inputs, num_states, num_outputs: how many of each.
        example_inputs: one step's inputs and states; with them, errors in the core come at construction.
        requires_grad: for each input and (initial) state, whether a gradient may flow to it; `None`: to all.
        step_mode: `"m"`: inputs are sequences `[T, *step]`; `"s"`: one step `[*step]` per call.
        backend: `"triton"` or `"inductor"` (one path under two labels): compiled kernels; `"hop"`: the scan
            as one operator; `"torch"`: a plain loop; `"auto"`: kernels where they run, else the loop.
        store_state_seqs: whether to keep the states after every step, in `state_seqs`.
        example_outputs: one step's outputs; gives shapes and dtypes when `T == 0`.

    Attributes:
        states: `[*step]` each, or empty before the first call and after `reset()`.
        state_seqs: `[T, *step]` each, of the last call, if `store_state_seqs`.

    Raises:
        UnknownNameError, StepModeError: an unknown backend or step mode, or two that do not go together.
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
    ) -> None:
        super().__init__()
        self.core = core
        self.num_inputs = num_inputs
        self.num_states = num_states
        self.num_outputs = num_outputs
        self.requires_grad = requires_grad
        self._step_mode = check_step_mode(step_mode)
        self._backend = check_backend(backend, step_mode)
        self.store_state_seqs = store_state_seqs
        self._output_specs = None if example_outputs is None else [(tuple(t.shape), t.dtype) for t in example_outputs]
        self._program: ScanProgram | None = ScanProgram(core, num_inputs, num_states, num_outputs, requires_grad)
        self._choice: Choice | None = None
        self.states: list[Tensor] = []
        self.state_seqs: list[Tensor] = []
        if example_inputs is not None:
            self._program.specialize_examples(example_inputs)

    @property
    def backend(self) -> str:
        """The backend asked for; `explain()` says which one runs."""
        return self._backend

    @backend.setter
    def backend(self, backend: str) -> None:
        self._backend = check_backend(backend, self._step_mode)

    @property
    def step_mode(self) -> str:
        """`"m"` for sequences, `"s"` for single steps."""
        return self._step_mode

    @step_mode.setter
    def step_mode(self, step_mode: str) -> None:
        mode = check_step_mode(step_mode)
        check_backend(self._backend, mode)
        self._step_mode = mode

    def forward(self, *inputs: Tensor) -> Tensor | list[Tensor]:
        """Runs the neuron, from the state that it has.

        Args:
            inputs: `num_inputs` tensors, `[T, *step]` each in step mode `"m"`, `[*step]` in `"s"`. Inputs may
                broadcast against each other behind T.

        Returns:
            The output `[T, *step]` (`[*step]` in `"s"`); a list of them when there are several.

        Raises:
            TypeError, InputCountError: not `num_inputs` tensors.
            StateError: the state was made for inputs of another shape.
            BackendUnavailableError: compiled kernels were asked for and cannot run.
        """
        self._check_inputs(inputs)
        choice = self._choose(inputs[0].device)
        if self._step_mode == "s":
            outputs, states = self._single_step(inputs)
            state_seqs: list[Tensor] = []
        else:
            outputs, states, state_seqs = self._multi_step(choice, inputs)
        self.states = states
        self.state_seqs = state_seqs
        return outputs[0] if self.num_outputs == 1 else outputs

    def reset(self) -> None:
        """Forgets the state: the next call starts from the initial one."""
        self.states = []
        self.state_seqs = []

    def detach(self) -> None:
        """Cuts the state off from the graph that led to it (truncated backpropagation through time)."""
        self.states = [state.detach() for state in self.states]
        self.state_seqs = [state.detach() for state in self.state_seqs]

    def init_states(self, num_states: int, step_mode: str, *inputs: Tensor) -> list[Tensor]:
        """The initial states, `[*step]` each. Zeros of the first input's dtype; override for others.

        Args:
            num_states: how many.
            step_mode: whether `inputs` lead with time (`"m"`).
            inputs: as given to `forward`.
        """
        shape = _step_shape(inputs, step_mode)
        return [inputs[0].new_zeros(shape) for _ in range(num_states)]

    def explain(self) -> str:
        """Which backend the last call ran on, and why."""
        if self._choice is None:
            return f"backend={self._backend!r}: nothing has run yet."
        return f"{self._choice.backend}: {self._choice.reason}"

    def extra_repr(self) -> str:
        core = getattr(self.core, "__name__", type(self.core).__name__)
        return (
            f"core={core}, num_inputs={self.num_inputs}, num_states={self.num_states}, "
            f"num_outputs={self.num_outputs}, step_mode={self._step_mode!r}, backend={self._backend!r}"
        )

    # -- running -----------------------------------------------------------------------------------------

    def _multi_step(
        self, choice: Choice, inputs: tuple[Tensor, ...]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Outputs, final states, and state sequences if they are kept."""
        keep = self.store_state_seqs
        initial = self._initial_states(inputs, zeros_are_none=choice.backend == "triton")
        if choice.backend == "triton":
            results = _run_kernels(self._get_program(), (*inputs, *initial), keep)
        else:
            sequences, finals = _SCANS[choice.backend]
            results = (sequences if keep else finals)(
                self.core,
                self.num_inputs,
                self.num_states,
                self.num_outputs,
                *self._masked((*inputs, *initial)),
                output_template_specs=self._output_specs,
            )
        outputs, carried = list(results[: self.num_outputs]), list(results[self.num_outputs :])
        if not keep:
            return outputs, carried, []
        if inputs[0].shape[0] > 0:
            final = [sequence[-1] for sequence in carried]
        else:
            final = [state.clone() for state in initial or self._initial_states(inputs)]
        return outputs, final, carried

    def _single_step(self, inputs: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]]:
        # One step is a scan of length 1: the same checks, the same results.
        primals = self._masked((*inputs, *self._initial_states(inputs)))
        sequences = [x.unsqueeze(0) for x in primals[: self.num_inputs]]
        counts = (self.num_inputs, self.num_states, self.num_outputs)
        results = eager_scan_final_state(self.core, *counts, *sequences, *primals[self.num_inputs :])
        outputs = [output.squeeze(0) for output in results[: self.num_outputs]]
        return outputs, list(results[self.num_outputs :])

    def _masked(self, primals: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Inputs and states, detached where `requires_grad` says so. (Kernels do it by themselves.)"""
        if self.requires_grad is None:
            return primals
        return tuple(t if allowed else t.detach() for t, allowed in zip(primals, self.requires_grad, strict=True))

    def _initial_states(self, inputs: tuple[Tensor, ...], *, zeros_are_none: bool = False) -> list[Tensor]:
        """The states that the scan begins with; empty with `zeros_are_none` if they are the default ones."""
        if not self.states:
            if zeros_are_none and type(self).init_states is FlexSN.init_states:
                return []  # kernels start at zero without reading zeros
            states = list(self.init_states(self.num_states, self._step_mode, *inputs))
            if len(states) != self.num_states:
                raise StateError(f"init_states returned {len(states)} tensors; num_states is {self.num_states}.")
            return states
        shape = _step_shape(inputs, self._step_mode)
        for i, state in enumerate(self.states):
            if state.shape != shape or state.device != inputs[0].device:
                raise StateError(
                    f"state {i} has shape {list(state.shape)} on {state.device}, from an earlier call; this "
                    f"input's step has {list(shape)} on {inputs[0].device}. Call reset() between batches."
                )
        return self.states

    def _check_inputs(self, inputs: Sequence[object]) -> None:
        for i, value in enumerate(inputs):
            if not isinstance(value, Tensor):
                raise TypeError(f"input {i} is a {type(value).__name__}; a neuron takes tensors.")
        if len(inputs) != self.num_inputs or not inputs:
            raise InputCountError(f"got {len(inputs)} inputs; num_inputs is {self.num_inputs}.")

    def _choose(self, device: torch.device) -> Choice:
        self._choice = choose(self._backend, self._step_mode, device)
        return self._choice

    def _get_program(self) -> ScanProgram:
        if self._program is None:
            self._program = ScanProgram(
                self.core, self.num_inputs, self.num_states, self.num_outputs, self.requires_grad
            )
        return self._program

    # -- copies and moves --------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: kernels are built again, the state is cut off from its graph."""
        attributes = self.__dict__.copy()
        attributes["_program"] = None
        attributes["states"] = [state.detach() for state in self.states]
        attributes["state_seqs"] = [state.detach() for state in self.state_seqs]
        return attributes

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FlexSN:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.states = [fn(state) for state in self.states]
        self.state_seqs = [fn(state) for state in self.state_seqs]
        return self


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="compiled kernels are launched between the graphs of torch.compile; for one graph, use backend='hop'"
)
def _run_kernels(program: ScanProgram, tensors: tuple[Tensor, ...], state_seqs: bool) -> tuple[Tensor, ...]:
    step, arguments = prepare(program, tensors)
    return scan(step, arguments, state_seqs=state_seqs)


# By backend: the scan that keeps the state sequences, and the one that keeps the final states.
_SCANS: dict[str, tuple[Callable[..., tuple[Tensor, ...]], Callable[..., tuple[Tensor, ...]]]] = {
    "torch": (eager_scan, eager_scan_final_state),
    "hop": (flex_sn_scan, flex_sn_scan_final_state),
}


def _step_shape(inputs: Sequence[Tensor], step_mode: str) -> tuple[int, ...]:
    shapes = {tuple(x.shape[1:] if step_mode == "m" else x.shape) for x in inputs}
    if len(shapes) == 1:
        return shapes.pop()
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        raise ShapeError(
            f"the inputs' steps have the shapes {', '.join(str(list(s)) for s in sorted(shapes))}, which do "
            "not broadcast to one: give all of them the shape of the step, or sizes of 1."
        ) from None
