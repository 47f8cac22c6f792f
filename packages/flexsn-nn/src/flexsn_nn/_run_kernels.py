"""Runs a neuron's compiled kernels, in eager mode and between the graphs of `torch.compile`."""

from __future__ import annotations

from torch import Tensor

from flexsn_nn._programs import UNCHANGED, Changes
from flexsn_nn._torch_private import between_graphs
from flexsn_runtime import ScanProgram, completed_scan, run_program


def run_kernels(
    program: ScanProgram, tensors: tuple[Tensor, ...], state_seqs: bool, changes: Changes = UNCHANGED
) -> tuple[Tensor, ...]:
    """Runs the kernels of a program. Returns `(*output_seqs, *state_seqs)`.

    Without `state_seqs`, returns the final states instead of the state sequences.

    Args:
        changes: arguments for the program's transforms.
    """
    inputs, states = tensors[: program.num_inputs], tensors[program.num_inputs :]
    replacements, completion = changes
    if replacements is None or completion is None:
        return run_program(program, inputs, states, replacements, state_seqs=state_seqs)
    return tuple(completed_scan(program, inputs, states, replacements, completion, state_seqs=state_seqs))


BETWEEN = "compiled kernels are launched between the graphs of torch.compile; for one graph, use backend='hop'"
run_between_graphs = between_graphs(BETWEEN)(run_kernels)
