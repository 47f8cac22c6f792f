"""How compiled kernels run a neuron, in eager mode and between the graphs of `torch.compile`."""

from __future__ import annotations

from torch import Tensor

from flexsn_nn._affine import Absorbed, Behind
from flexsn_nn._torch_private import between_graphs
from flexsn_runtime import ScanProgram, completed_scan, run_program, single_step


def run_kernels(
    program: ScanProgram, tensors: tuple[Tensor, ...], state_seqs: bool, affine: Absorbed | None = None
) -> tuple[Tensor, ...]:
    """`(*output_seqs, *state_seqs)`, or with the final states in the place of their sequences.

    Args:
        affine: of the first input, of a step `Behind` one.
    """
    inputs, states = tensors[: program.num_inputs], tensors[program.num_inputs :]
    instead = _instead(program, affine)
    completion = None if affine is None else affine.completion
    if instead is None or completion is None:
        return run_program(program, inputs, states, instead, state_seqs=state_seqs)
    return tuple(completed_scan(program, inputs, states, instead, completion, state_seqs=state_seqs))


def _instead(program: ScanProgram, affine: Absorbed | None) -> dict[int, Tensor] | None:
    if affine is None:
        return None
    assert isinstance(program.core, Behind)
    return program.core.instead(affine.tensors)


_BETWEEN = "compiled kernels are launched between the graphs of torch.compile; for one graph, use backend='hop'"
run_between_graphs = between_graphs(_BETWEEN)(run_kernels)
run_step_between_graphs = between_graphs(_BETWEEN)(single_step)
