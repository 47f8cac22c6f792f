"""The functions `build_*`, and their results: the kernels of a step for one purpose, specialized on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexsn_graph import FlexSNInfo, StateMismatchError, extract_info
from flexsn_runtime._availability import kernel_device
from flexsn_runtime.program._program import PointwiseProgram


@dataclass(frozen=True, slots=True)
class ScanKernel:
    """The kernels of one step function, for one purpose.

    One kernel is compiled for each combination of dtypes, layouts and gradients. A compiled kernel runs for any sizes.

    Attributes:
        program: the step function.
        state_seqs: True if state sequences are written, False if only final states are written.
    """

    program: PointwiseProgram
    state_seqs: bool

    def close(self) -> None:
        """Releases the compiled kernels."""
        self.program.close()


def build_inference_kernel(
    core_fn: Callable[..., Any],
    num_inputs: int,
    num_states: int,
    num_outputs: int,
    example_inputs: Sequence[Tensor] | None = None,
) -> tuple[ScanKernel, FlexSNInfo]:
    """Builds the kernel of the forward scan that returns outputs and state sequences.

    Args:
        core_fn: `core(*inputs, *states) -> (*outputs, *new_states)`.
        num_inputs, num_states, num_outputs: numbers of inputs, states and outputs.
        example_inputs: one step's inputs and states; `None` for float32 tensors of one element.

    Returns:
        The kernel, for `flexsn_inference`, and the description of the step.

    Raises:
        ValueError: the number of examples, arguments or results is wrong. The message contains the expected number and
            the actual number.
        NotImplementedError: a scan does not support an operation of the core, or an op has no rule.
    """
    program = PointwiseProgram(core_fn, num_inputs, num_states, num_outputs)
    return ScanKernel(program, state_seqs=True), describe(program, example_inputs)


def build_inference_final_state_kernel(
    core_fn: Callable[..., Any],
    num_inputs: int,
    num_states: int,
    num_outputs: int,
    example_inputs: Sequence[Tensor] | None = None,
) -> tuple[ScanKernel, FlexSNInfo]:
    """Builds a kernel as `build_inference_kernel` does. The kernel writes final states instead of state sequences."""
    program = PointwiseProgram(core_fn, num_inputs, num_states, num_outputs)
    return ScanKernel(program, state_seqs=False), describe(program, example_inputs)


def build_training_kernels(
    core_fn: Callable[..., Any],
    num_inputs: int,
    num_states: int,
    num_outputs: int,
    example_inputs: Sequence[Tensor] | None = None,
    requires_grad: Sequence[bool] | None = None,
) -> tuple[ScanKernel, ScanKernel, FlexSNInfo]:
    """Builds the kernels of the forward scan that saves checkpoints, and of the backward scan.

    Args:
        requires_grad: for each input and state, True if its gradient may be needed; `None` if every gradient may be
            needed.

    Returns:
        `(forward, backward, info)`, for `flexsn_forward` and `flexsn_backward`.
    """
    program = PointwiseProgram(core_fn, num_inputs, num_states, num_outputs, requires_grad)
    info = describe(program, example_inputs)
    return ScanKernel(program, state_seqs=True), ScanKernel(program, state_seqs=True), info


def describe(program: PointwiseProgram, example_inputs: Sequence[Tensor] | None) -> FlexSNInfo:
    """Returns the description of a step.

    Traces the step and generates its source, so that errors are raised now and not in the first call.
    """
    expected = program.num_inputs + program.num_states
    example = torch.zeros(1, device=kernel_device())
    examples = (example,) * expected if example_inputs is None else tuple(example_inputs)
    try:
        step = program.specialize_examples(examples)
    except StateMismatchError as error:
        if example_inputs is not None:
            raise
        raise StateMismatchError(
            f"{error} The step was traced for float32 tensors of one element: if the core needs other "
            "tensors, for example because it captures a tensor with a shape, give example_inputs."
        ) from None
    step.core()
    return extract_info(step.trace.forward.graph, program.num_inputs, program.num_states, program.num_outputs)
