"""How compiled kernels run a neuron, in eager mode and between the graphs of `torch.compile`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flexsn_nn._affine import Absorbed, Behind
from flexsn_nn._torch_private import between_graphs
from flexsn_runtime import ScanProgram, prepare, remember, repeated_scan, scan, single_step


def run_kernels(
    program: ScanProgram, tensors: tuple[Tensor, ...], state_seqs: bool, affine: Absorbed | None = None
) -> tuple[Tensor, ...]:
    """`(*output_seqs, *state_seqs)`, or with the final states in the place of their sequences.

    Args:
        affine: of the first input, of a step `Behind` one.
    """
    if affine is None:
        step, arguments = prepare(program, tensors)
    else:
        assert isinstance(program.core, Behind)
        step, arguments = prepare(program, tensors, instead=program.core.instead(affine.tensors))
    return scan(step, arguments, state_seqs=state_seqs)


def run_again(
    program: ScanProgram, inputs: Sequence[Tensor], states: Sequence[Tensor], affine: Absorbed | None
) -> tuple[Tensor, ...]:
    """`(*output_seqs, *final_states)`, by what an earlier call has found out, if there was one like it.

    Args:
        affine: as for `run_kernels`.
    """
    instead = None
    if affine is not None:
        assert isinstance(program.core, Behind)
        instead = program.core.instead(affine.tensors)
    results = repeated_scan(program, inputs, states, instead)
    if results is not None:
        return tuple(results)
    step, arguments = prepare(program, (*inputs, *states), instead=instead)
    results = scan(step, arguments, state_seqs=False)
    remember(program, inputs, states, step, arguments, instead=instead)
    return results


_BETWEEN = "compiled kernels are launched between the graphs of torch.compile; for one graph, use backend='hop'"
run_between_graphs = between_graphs(_BETWEEN)(run_kernels)
run_step_between_graphs = between_graphs(_BETWEEN)(single_step)
