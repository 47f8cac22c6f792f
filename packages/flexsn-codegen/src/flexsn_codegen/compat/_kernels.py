"""Compiles kernels from the source of a step and a `FlexSNInfo`. All operands are dense arguments of the kernels."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from flexsn_codegen.scan._backward import backward_source
from flexsn_codegen.scan._forward import forward_source
from flexsn_codegen.scan._spec import BackwardSpec, ForwardSpec
from flexsn_codegen.source._cache import compile_triton_code_str
from flexsn_codegen.source._source import DENSE, CoreSource, InputLayout, KernelSource
from flexsn_codegen.targets.triton import TRITON
from flexsn_graph import Port, Role, ports


class StepInfo(Protocol):
    """The fields of `flexsn_graph.FlexSNInfo` that this module reads."""

    @property
    def num_inputs(self) -> int: ...
    @property
    def num_outputs(self) -> int: ...
    @property
    def num_states(self) -> int: ...
    @property
    def fwd_core_args(self) -> tuple[str, ...]: ...
    @property
    def fwd_core_returns(self) -> tuple[str, ...]: ...


def get_flexsn_inference_kernel(core_str: str, core_name: str, info: StepInfo, verbose: bool = False) -> Any:
    """The kernel `(*inputs, *init_states, *outputs, *state_seqs, T, NCL, BLOCK)` of a float32 step.

    Args:
        core_str, core_name: results of `generate_triton_code_str` for a graph
            `[*inputs, *states] -> [*outputs, *new_states]`.
        info: the names and the counts of arguments and results of that graph.
        verbose: prints the kernel's source.

    Returns:
        A `triton.JITFunction`. `NCL` is the number of elements of a step. Launch the kernel with `cdiv(NCL, BLOCK)`
        programs. Sequences have shape `[T, *step]`, states have shape `[*step]`, and all of these tensors are
        contiguous.
    """
    return _compile_forward("inference", core_str, core_name, info, verbose, state_seqs=True)


def get_flexsn_inference_final_state_kernel(
    core_str: str, core_name: str, info: StepInfo, verbose: bool = False
) -> Any:
    """Like `get_flexsn_inference_kernel`, with final states `[*step]` instead of state sequences."""
    return _compile_forward("inference_final_state", core_str, core_name, info, verbose, state_seqs=False)


def get_flexsn_forward_kernel(core_str: str, core_name: str, info: StepInfo, verbose: bool = False) -> Any:
    """The kernel `(*inputs, *init_states, *outputs, *state_seqs, *intermediates, T, NCL, BLOCK)`.

    Args:
        core_str, core_name: results of `generate_triton_code_str` for a graph
            `[*inputs, *states] -> [*outputs, *new_states, *intermediates]`.
        info: the names and the counts of arguments and results of that graph. The kernel writes all intermediates,
            including duplicates.
    """
    saved = len(info.fwd_core_returns) - info.num_outputs - info.num_states
    return _compile_forward("forward", core_str, core_name, info, verbose, state_seqs=True, saved=saved)


def get_flexsn_backward_kernel(core_str: str, core_name: str, info: StepInfo, verbose: bool = False) -> Any:
    """The kernel of the gradient, computed from saved intermediates.

    Its arguments are `(*intermediates, *grad_outputs, *grad_state_seqs, *grad_inputs, *grad_init_states, T, NCL,
    BLOCK)`.

    Args:
        core_str, core_name: results of `generate_triton_code_str` for a graph
            `[*intermediates, *grad_outputs, *grad_new_states] -> [*grad_inputs, *grad_states]`. None of these gradients
            may be missing.
        info: the names and the counts of arguments and results of the forward graph.
    """
    num_results = info.num_outputs + info.num_states
    saved = len(info.fwd_core_returns) - num_results
    arguments = (
        *ports(Role.SAVED, saved),
        *ports(Role.GRAD_OUTPUT, info.num_outputs),
        *ports(Role.GRAD_STATE, info.num_states),
    )
    gradients = (*ports(Role.GRAD_INPUT, info.num_inputs), *ports(Role.GRAD_STATE, info.num_states))
    num_primals = info.num_inputs + info.num_states
    spec = BackwardSpec(
        inputs=(InputLayout(),) * info.num_inputs,
        states=(DENSE,) * info.num_states,
        state_dtypes=(torch.float32,) * info.num_states,
        lifted=(),
        num_outputs=info.num_outputs,
        grad_outputs=(True,) * info.num_outputs,
        grad_state_seqs=(True,) * info.num_states,
        grad_final_states=(False,) * info.num_states,
        gradients=tuple(range(num_primals)),
        grad_inputs=(True,) * info.num_inputs,
        grad_states=(True,) * info.num_states,
        grad_lifted=(),
        lifted_dtypes=(),
        saved=saved,
    )
    core = _as_core(core_str, core_name, arguments, gradients)
    return _compile(backward_source("backward", None, core, spec), verbose)


def _compile_forward(
    name: str,
    core_str: str,
    core_name: str,
    info: StepInfo,
    verbose: bool,
    *,
    state_seqs: bool,
    saved: int = 0,
) -> Any:
    num_lifted = len(info.fwd_core_args) - info.num_inputs - info.num_states
    states = ports(Role.STATE, info.num_states)
    arguments = (*ports(Role.INPUT, info.num_inputs), *states, *ports(Role.LIFTED, num_lifted))
    results = (*ports(Role.OUTPUT, info.num_outputs), *states, *ports(Role.SAVED, saved))
    spec = ForwardSpec(
        inputs=(InputLayout(),) * info.num_inputs,
        states=(DENSE,) * info.num_states,
        state_dtypes=(torch.float32,) * info.num_states,
        lifted=(DENSE,) * num_lifted,
        outputs=(True,) * info.num_outputs,
        state_seqs=(state_seqs,) * info.num_states,
        final_states=(not state_seqs,) * info.num_states,
        saved=saved,
    )
    core = _as_core(core_str, core_name, arguments, results)
    return _compile(forward_source(name, core, spec), verbose)


def _as_core(core_str: str, core_name: str, arguments: tuple[Port, ...], results: tuple[Port, ...]) -> CoreSource:
    return CoreSource(core_name, core_str.removeprefix(TRITON.header).strip() + "\n", arguments, results, TRITON)


def _compile(source: KernelSource, verbose: bool) -> Any:
    if verbose:
        print(source.source)
    return compile_triton_code_str(source.source, source.name, verbose)
