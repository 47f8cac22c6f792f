"""A target that is defined outside of the packages. It runs a scan and its gradient."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy_target import NUMPY
from scan_cores import CASES, Case, problem
from torch import Tensor

from flexsn_codegen import (
    DENSE,
    BackwardSpec,
    ForwardSpec,
    InputLayout,
    KernelSource,
    UnsupportedOpError,
    backward_source,
    emit_core,
    forward_source,
    supported_ops,
)
from flexsn_graph import Port, Role, trace_step
from flexsn_hop import eager_scan_final_state

STEP = (3, 5)
STEPS, CHUNK, SEGMENT = 11, 8, 4
# Syntax of Triton. Examples in docstrings do not match this pattern.
_TRITON = re.compile(r"^(?!\s*\.\.\.).*\btl\.\w|^@triton\.", re.MULTILINE)
SELECTED = [case for case in CASES if case.name in {"lif_soft", "plif_scalar", "plif_channel", "izhikevich"}]


def run(kernel: KernelSource, tensors: Mapping[Port, Tensor], sizes: Mapping[str, int]) -> None:
    arrays = [tensors[port].detach().numpy().reshape(-1) for port in kernel.params]
    with np.errstate(invalid="ignore", over="ignore"):
        kernel.target.compile(kernel)(*arrays, *(sizes[name] for name in kernel.sizes))


def list_ports(role: Role, tensors: list[Tensor]) -> dict[Port, Tensor]:
    return {Port(role, i): tensor for i, tensor in enumerate(tensors)}


@pytest.mark.long(
    all_but=[
        "lif_soft-True-False",
        "plif_scalar-True-True",
        "plif_channel-False-False",
        "izhikevich-True-True",
    ]
)
@pytest.mark.parametrize(("takes_numbers", "computes_once"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("case", SELECTED, ids=lambda case: case.name)
def test_scan_and_its_gradient_equal_the_loop(case: Case, takes_numbers: bool, computes_once: bool) -> None:
    instance = problem(case, STEPS, STEP, dtype=torch.float64)
    num_inputs, num_states, num_outputs = instance.counts
    examples = [*(x[0] for x in instance.inputs), *instance.states]
    trace = trace_step(instance.core, *instance.counts, examples)
    assert trace.lifted == tuple(instance.parameters)
    required = (True,) * (len(examples) + len(instance.parameters))
    vjp = trace.vjp(trace.differentiable, required)
    # A parameter is a scalar, or has one element per channel, with the index `off // 1 % C * 1`.
    layouts = tuple(0 if p.dim() == 0 else 1 for p in instance.parameters)
    sizes = {"T": STEPS, "NCL": 15}
    for i in range(len(instance.parameters)):
        sizes |= {f"lifted_{i}_inner0": 1, f"lifted_{i}_size0": STEP[-1], f"lifted_{i}_stride0": 1}
    dtypes = (torch.float64,) * num_states
    numbers = ("step", "vjp") if takes_numbers else (None, None)
    core = emit_core(trace.forward, "step", prune=True, numbers=numbers[0], once=computes_once, target=NUMPY)
    gradient = emit_core(vjp, "vjp", prune=True, numbers=numbers[1], once=computes_once, target=NUMPY)
    assert bool(core.numbers) == takes_numbers
    # Only functions of parameters, such as time constants, are computed once.
    assert (core.once is not None) == (gradient.once is not None) == (computes_once and bool(instance.parameters))
    sizes |= core.integers | gradient.integers
    forward = forward_source(
        "forward",
        core,
        ForwardSpec(
            inputs=(InputLayout(),) * num_inputs,
            states=(DENSE,) * num_states,
            state_dtypes=dtypes,
            lifted=layouts,
            outputs=(True,) * num_outputs,
            state_seqs=(False,) * num_states,
            final_states=(True,) * num_states,
            segment=SEGMENT,
            chunk=CHUNK,
        ),
    )
    outputs = [torch.zeros(STEPS, *STEP, dtype=torch.float64) for _ in range(num_outputs)]
    finals = [torch.zeros(STEP, dtype=torch.float64) for _ in range(num_states)]
    saved_states = [torch.zeros((STEPS - 1) // SEGMENT, *STEP, dtype=torch.float64) for _ in range(num_states)]
    primals = {
        **list_ports(Role.INPUT, instance.inputs),
        **list_ports(Role.STATE, instance.states),
        **list_ports(Role.LIFTED, instance.parameters),
    }
    checkpoints = list_ports(Role.CHECKPOINT, saved_states)
    results = {**list_ports(Role.OUTPUT, outputs), **list_ports(Role.FINAL_STATE, finals)}
    run(forward, {**primals, **results, **checkpoints}, sizes)
    expected = eager_scan_final_state(instance.core, *instance.counts, *instance.inputs, *instance.states)
    for actual, result in zip([*outputs, *finals], expected, strict=True):
        torch.testing.assert_close(actual, result)

    backward = backward_source(
        "backward",
        core,
        gradient,
        BackwardSpec(
            inputs=(InputLayout(),) * num_inputs,
            states=(DENSE,) * num_states,
            state_dtypes=dtypes,
            lifted=layouts,
            num_outputs=num_outputs,
            grad_outputs=trace.differentiable[:num_outputs],
            grad_state_seqs=(False,) * num_states,
            grad_final_states=(True,) * num_states,
            gradients=vjp.gradients,
            grad_inputs=(True,) * num_inputs,
            grad_states=(True,) * num_states,
            grad_lifted=(True,) * len(instance.parameters),
            lifted_dtypes=(torch.float64,) * len(instance.parameters),
            chunk=SEGMENT,
            summed_lifted=tuple(layout == 0 for layout in layouts),
        ),
    )
    weights = [torch.randn_like(result) for result in expected]
    gradients = {
        **list_ports(Role.GRAD_INPUT, [torch.zeros_like(x) for x in instance.inputs]),
        **list_ports(Role.GRAD_STATE, [torch.zeros_like(v) for v in instance.states]),
        **list_ports(
            Role.GRAD_LIFTED, [torch.zeros(STEP if p.dim() else (1,), dtype=p.dtype) for p in instance.parameters]
        ),
    }
    cotangents = {
        **list_ports(Role.GRAD_OUTPUT, weights[:num_outputs]),
        **list_ports(Role.GRAD_FINAL_STATE, weights[num_outputs:]),
    }
    run(backward, {**primals, **checkpoints, **cotangents, **gradients}, sizes)
    expected_gradients = torch.autograd.grad(expected, instance.leaves, weights)
    for (port, actual), result in zip(gradients.items(), expected_gradients, strict=True):
        torch.testing.assert_close(
            actual.sum_to_size(result.shape) if port.role is Role.GRAD_LIFTED else actual, result
        )


def test_ops_without_a_rule_are_refused() -> None:
    assert torch.ops.prims.tanh.default in supported_ops()
    assert torch.ops.prims.tanh.default not in supported_ops(NUMPY)
    trace = trace_step(lambda x: (torch.tanh(x),), 1, 0, 1, (torch.zeros(3),))
    with pytest.raises(UnsupportedOpError, match=r"prims\.tanh\.default has no rule") as caught:
        emit_core(trace.forward, "step", prune=True, target=NUMPY)
    assert "test_scan_target.py" in str(caught.value)


def test_unsupported_dtypes_are_refused() -> None:
    trace = trace_step(lambda x: (x + 1.0,), 1, 0, 1, (torch.zeros(3, dtype=torch.bfloat16),))
    with pytest.raises(UnsupportedOpError, match="bfloat16, which NumPy does not have"):
        emit_core(trace.forward, "step", prune=True, target=NUMPY)


def test_unsupported_rows_are_refused() -> None:
    trace = trace_step(lambda x, v: (x + v, x), 1, 1, 1, (torch.zeros(3), torch.zeros(3)))
    vjp = trace.vjp((True, True), (True, True))
    spec = BackwardSpec(
        inputs=(InputLayout(),),
        states=(DENSE,),
        state_dtypes=(torch.float32,),
        lifted=(),
        num_outputs=1,
        grad_outputs=(True,),
        grad_state_seqs=(False,),
        grad_final_states=(True,),
        gradients=vjp.gradients,
        grad_inputs=(True,),
        grad_states=(True,),
        grad_lifted=(),
        lifted_dtypes=(),
        rows=True,
    )
    with pytest.raises(UnsupportedOpError, match="kernels in NumPy cannot walk rows"):
        backward_source("backward", None, emit_core(vjp, "vjp", prune=True, target=NUMPY), spec)


def test_only_one_folder_contains_triton_syntax() -> None:
    root = Path(__file__).resolve().parents[1]
    triton = root / "packages/flexsn-codegen/src/flexsn_codegen/targets/triton"
    other_files = [
        str(path.relative_to(root))
        for path in root.glob("packages/*/src/**/*.py")
        if triton not in path.parents and _TRITON.search(path.read_text(encoding="utf-8"))
    ]
    assert other_files == []
    assert _TRITON.search((triton / "_writer.py").read_text(encoding="utf-8"))
