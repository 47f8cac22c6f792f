"""How compiled kernels run a neuron, in eager mode and between the graphs of `torch.compile`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flexsn_nn._programs import UNCHANGED, Changes
from flexsn_nn._torch_private import between_graphs
from flexsn_runtime import ScanProgram, completed_scan, prepare, scan, scan_again


def run_kernels(
    program: ScanProgram, tensors: tuple[Tensor, ...], state_seqs: bool, changes: Changes = UNCHANGED
) -> tuple[Tensor, ...]:
    """`(*output_seqs, *state_seqs)`, or with the final states in the place of their sequences.

    Args:
        changes: of the program's transforms.
    """
    instead, completion = changes
    if instead is None or completion is None:
        step, arguments = prepare(program, tensors, instead=instead)
        return scan(step, arguments, state_seqs=state_seqs)
    inputs, states = tensors[: program.num_inputs], tensors[program.num_inputs :]
    return tuple(completed_scan(program, inputs, states, instead, completion, state_seqs=state_seqs))


def run_again(
    program: ScanProgram, inputs: Sequence[Tensor], states: Sequence[Tensor], changes: Changes = UNCHANGED
) -> tuple[Tensor, ...]:
    """`(*output_seqs, *final_states)`, by what an earlier call has found out, if there was one like it.

    Args:
        changes: as for `run_kernels`.
    """
    instead, completion = changes
    if instead is None or completion is None:
        return scan_again(program, inputs, states, instead)
    return tuple(completed_scan(program, inputs, states, instead, completion, state_seqs=False))


BETWEEN = "compiled kernels are launched between the graphs of torch.compile; for one graph, use backend='hop'"
run_between_graphs = between_graphs(BETWEEN)(run_kernels)
