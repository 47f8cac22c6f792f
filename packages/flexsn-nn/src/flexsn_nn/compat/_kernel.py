"""`FlexSNKernel`: the compiled scan of a step function, as a callable object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexsn_nn._run_kernels import run_between_graphs, run_kernels
from flexsn_nn.errors import InputCountError
from flexsn_runtime import ScanProgram


class FlexSNKernel:
    """Compiled scan of a step function, without a stored state.

    Args:
        core, num_inputs, num_states, num_outputs, example_inputs, requires_grad, residuals: same as in `FlexSN`.

    A call takes `(*input_seqs, *init_states)` and returns `(*output_seqs, *state_seqs)`. Sequences are `[T, *step]`,
    and states are `[*step]`. The call is differentiable. Results have the inputs' memory format, as after an
    elementwise operation.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: the number of tensors is wrong, or the shapes of the tensors do not match.
        RuntimeError: the tensors are on several devices, or on a device that cannot run compiled kernels.
    """

    def __init__(
        self,
        core: Callable[..., Any],
        num_inputs: int,
        num_states: int,
        num_outputs: int,
        example_inputs: Sequence[Tensor] | None = None,
        requires_grad: Sequence[bool] | None = None,
        *,
        residuals: str = "auto",
    ) -> None:
        self._program = ScanProgram(core, num_inputs, num_states, num_outputs, requires_grad, residuals=residuals)
        if example_inputs is not None:
            self._program.specialize_examples(example_inputs)

    def __call__(self, *args: Tensor) -> tuple[Tensor, ...]:
        program = self._program
        for i, value in enumerate(args):
            if not isinstance(value, Tensor):
                raise TypeError(f"argument {i} is a {type(value).__name__}; a kernel takes tensors.")
        if len(args) != program.num_inputs + program.num_states:
            raise InputCountError(
                f"got {len(args)} tensors; num_inputs + num_states is {program.num_inputs} + "
                f"{program.num_states} = {program.num_inputs + program.num_states}."
            )
        run = run_between_graphs if torch.compiler.is_compiling() else run_kernels
        results: tuple[Tensor, ...] = run(program, args, True)
        return results
