"""With residuals, a step and its VJP have equal results, and move the fewest bytes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from graph_cores import CASES, PLIF, Case, Core
from graph_eval import evaluate, read_lifted, run_forward
from torch import Tensor

from flexsn_graph import (
    Residuals,
    Role,
    StepGraph,
    StepTrace,
    keep_residuals,
    ports,
    trace_step,
    without_cotangents,
)


def make_trace(case: Case, arguments: list[Tensor]) -> tuple[StepTrace, StepGraph]:
    trace = trace_step(case.core, *case.counts, arguments)
    return trace, trace.vjp(trace.differentiable, [True] * (len(arguments) + len(trace.lifted_values)))


def lift(trace: StepTrace, residuals: Residuals) -> list[Tensor]:
    layouts = residuals.forward.layouts
    return [read_lifted(t, layouts.get(i), trace.step_shape) for i, t in enumerate(trace.lift(trace.captured))]


PARAMETRIC = Case("plif_per_channel", PLIF(torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5], dtype=torch.float64)))


@pytest.mark.long(all_but=["two_by_two", "plif_per_channel", "lif_hard", "alif"])
@pytest.mark.parametrize("case", [*CASES, PARAMETRIC], ids=lambda case: case.name)
def test_values_and_all_subsets_of_gradients_are_equal(case: Case) -> None:
    arguments = case.arguments()
    trace, vjp = make_trace(case, arguments)
    residuals = keep_residuals(trace, vjp)
    lifted_values = lift(trace, residuals)
    results = evaluate(residuals.forward.graph, [*arguments, *lifted_values], trace.step_shape)
    forward_results = run_forward(trace, arguments)
    assert all(torch.equal(a, b) for a, b in zip(results, forward_results, strict=False))
    saved = results[len(forward_results) :]
    assert [t.dtype for t in saved] == list(residuals.dtypes)
    assert not any(port.role is Role.STATE for port in residuals.vjp.used)

    cotangents = (*ports(Role.GRAD_OUTPUT, case.num_outputs), *ports(Role.GRAD_STATE, case.num_states))
    for present in itertools.product([False, True], repeat=len(forward_results)):
        absent = {port for port, is_present in zip(cotangents, present, strict=True) if not is_present}
        fewer = without_cotangents(residuals.vjp, absent)
        assert not absent & set(fewer.arguments)
        grads = [torch.full_like(t, 0.5 + i) for i, t in enumerate(forward_results) if present[i]]
        expected = trace.vjp(present, [True] * len(vjp.gradients))
        reference = evaluate(expected.graph, [*arguments, *lifted_values, *grads], trace.step_shape)
        actual = evaluate(fewer.graph, [*arguments, *lifted_values, *saved, *grads], trace.step_shape)
        for a, b in zip(fewer.gradients, expected.gradients, strict=True):
            if a is None or b is None:
                assert a is None or not actual[a].any()
                assert b is None or not reference[b].any()
            else:
                torch.testing.assert_close(actual[a], reference[b])


def measure_residuals(core: Core, num_inputs: int, *shapes: tuple[int, ...]) -> tuple[tuple[torch.dtype, ...], float]:
    examples = [torch.zeros(shape) for shape in shapes]
    trace = trace_step(core, num_inputs, len(examples) - num_inputs, 1, examples)
    residuals = keep_residuals(trace, trace.vjp(trace.differentiable, [True] * len(examples)))
    return residuals.dtypes, residuals.traffic


def test_fewest_bytes_are_moved() -> None:
    shape = (3, 5)
    # The backward reads an input again. The forward writes a state, or a value that depends on it.
    assert measure_residuals(lambda x, v: (x * x, v + x), 1, shape, shape) == ((), 4.0)
    assert measure_residuals(lambda x, v: (v * v, v + x), 1, shape, shape) == ((torch.float32,), 8.0)
    assert measure_residuals(lambda x, v: ((v + x) * (v + x), v + x), 1, shape, shape) == ((torch.float32,), 8.0)
    # Here, only the condition is saved.
    assert measure_residuals(lambda x, v: (torch.relu(v + x), v + x), 1, shape, shape) == ((torch.bool,), 2.0)
    # Here, nothing is saved, or only an input that is smaller than the step.
    assert measure_residuals(lambda x, v: (v + 2.0 * x, v), 1, shape, shape) == ((), 0.0)
    dtypes, traffic = measure_residuals(lambda x, y, v: (x * y, v), 2, shape, (5,), shape)
    assert dtypes == ()
    assert math.isclose(traffic, 4.0 + 4.0 / 3)
