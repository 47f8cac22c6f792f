"""Gradients do not depend on the choice of the values that the forward saves for the backward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch
from runtime_cores import DEVICE, STEP, hard_lif, loop, random, soft_lif
from torch import Tensor

from flexsn_graph import Role
from flexsn_runtime import PointwiseProgram, ResidualsError, Specialization, prepare, scan

STEPS = 9
GAIN = random(STEP[1], seed=11).requires_grad_()


class RectangularSpike(torch.autograd.Function):
    """A step function whose gradient is 1 within 0.5 of the threshold."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return (h >= 0.0).to(h.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (h,) = ctx.saved_tensors
        return torch.where(h.abs() < 0.5, grads[0], 0.0)


def rectangular_if(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = v + x
    spike: Tensor = RectangularSpike.apply(h - 0.5)
    return spike, h - spike


def leaky_integrator(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = 0.75 * v + x
    return h, h


def four_dendrites(a: Tensor, b: Tensor, c: Tensor, d: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return soft_lif(a + 0.5 * b - c + 0.25 * d, v)


def learned(x: Tensor, y: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    i = 0.5 * i + x * torch.sigmoid(GAIN).to(x.dtype)
    h = v + i * y
    return h.clamp(-1.0, 1.0), i - y, i, 0.5 * h


def with_a_count(x: Tensor, n: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    n = n + (x > 0.0).to(n.dtype)
    h = v + x * n
    return h * h, n, 0.5 * h


# A step function, and the counts of its inputs, states and outputs.
Case = tuple[Callable[..., Any], tuple[int, int, int]]
CASES: list[Case] = [
    (soft_lif, (1, 1, 1)),
    (hard_lif, (1, 1, 1)),
    (rectangular_if, (1, 1, 1)),
    (leaky_integrator, (1, 1, 1)),
    (four_dendrites, (4, 1, 1)),
    (learned, (2, 2, 2)),
    (with_a_count, (1, 2, 1)),
]


def program_of(core: Callable[..., Any], counts: tuple[int, int, int], residuals: str) -> PointwiseProgram:
    return PointwiseProgram(core, *counts, residuals=residuals)


def draw_arguments(
    core: Callable[..., Any], inputs: int, states: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    tensors = [random(STEPS, *STEP, dtype=dtype, seed=i) for i in range(inputs)]
    tensors += [random(*STEP, dtype=dtype, seed=20 + i) for i in range(states)]
    if core is with_a_count:
        tensors[1] = tensors[1].to(torch.int32)
    return [t.requires_grad_(t.is_floating_point()) for t in tensors]


def run(program: PointwiseProgram, tensors: Sequence[Tensor], *, state_seqs: bool = True) -> tuple[Tensor, ...]:
    step, prepared = prepare(program, tensors)
    return scan(step, prepared, state_seqs=state_seqs)


def differentiate(
    results: Sequence[Tensor], leaves: Sequence[Tensor], present: Sequence[bool] | None = None
) -> tuple[Tensor, ...]:
    """Returns the gradients of a weighted sum of the results that are differentiable and `present`."""
    differentiable = [
        r for r, p in zip(results, present or [True] * len(results), strict=True) if p and r.requires_grad
    ]
    weights = [random(*r.shape, dtype=r.dtype, seed=40 + i) for i, r in enumerate(differentiable)]
    return torch.autograd.grad(differentiable, leaves, weights, allow_unused=True, materialize_grads=True)


def assert_same_gradients(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Compares gradients bitwise in the interpreter. On a GPU, recomputed divisions may differ by 2 ulp."""
    for a, b in zip(actual, expected, strict=True):
        if DEVICE.type == "cpu":
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b)


def find_choice(program: PointwiseProgram, tensors: Sequence[Tensor]) -> tuple[torch.dtype, ...] | None:
    """Returns the dtypes of the values that are saved for all gradients, or `None` for checkpoints."""
    step, prepared = prepare(program, tensors)
    residuals = step.residuals(tuple(t is not None and t.is_floating_point() for t in prepared.all))
    return None if residuals is None else residuals.dtypes


@pytest.mark.long(all_but=["learned-True", "hard_lif-False"])
@pytest.mark.parametrize("state_seqs", [True, False])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].__name__)
def test_gradients_do_not_depend_on_saved_values(case: Case, state_seqs: bool) -> None:
    core, counts = case
    tensors = draw_arguments(core, counts[0], counts[1])
    leaves = [t for t in tensors if t.requires_grad] + ([GAIN] if core is learned else [])
    outcomes = []
    for residuals in ("save", "recompute", "auto"):
        results = run(program_of(core, counts, residuals), tensors, state_seqs=state_seqs)
        outcomes.append((results, differentiate(results, leaves)))
    for results, grads in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results, outcomes[0][0], strict=True))
        assert_same_gradients(grads, outcomes[0][1])
    if state_seqs:
        expected = loop(core, counts[2], tensors[: counts[0]], tensors[counts[0] :])
        for a, b in zip(outcomes[0][1], differentiate(expected, leaves), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.long(all_but=["present6"])
@pytest.mark.parametrize(
    "present", [(a, b, c, d) for a in (0, 1) for b in (0, 1) for c in (0, 1) for d in (0, 1) if a + b + c + d]
)
def test_all_subsets_of_incoming_gradients_are_right(present: tuple[int, ...]) -> None:
    tensors = draw_arguments(learned, 2, 2)
    masks = [bool(p) for p in present]
    leaves = [*tensors, GAIN]
    saving_gradients = differentiate(run(PointwiseProgram(learned, 2, 2, 2, residuals="save"), tensors), leaves, masks)
    recomputing_gradients = differentiate(
        run(PointwiseProgram(learned, 2, 2, 2, residuals="recompute"), tensors), leaves, masks
    )
    expected = differentiate(loop(learned, 2, tensors[:2], tensors[2:]), leaves, masks)
    for a, b, c in zip(saving_gradients, recomputing_gradients, expected, strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-4)


def test_absent_gradient_is_not_multiplied() -> None:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = 0.5 * v + x
        return torch.sqrt(x), h * h, h  # the gradient of the root is infinite at 0

    x, v = torch.zeros(STEPS, *STEP, device=DEVICE).requires_grad_(), random(*STEP).requires_grad_()
    for residuals in ("save", "recompute"):
        results = run(PointwiseProgram(core, 1, 1, 2, residuals=residuals), [x, v])
        (gradient,) = torch.autograd.grad(results[1].sum(), [x])
        assert gradient.isfinite().all()


@pytest.mark.long(all_but=["[024]"])
@pytest.mark.parametrize("number", range(5))
def test_any_subset_of_gradients_may_be_requested(number: int) -> None:
    tensors = draw_arguments(learned, 2, 2)
    leaf = [*tensors, GAIN][number]
    results = run(PointwiseProgram(learned, 2, 2, 2, residuals="save"), tensors)
    expected = loop(learned, 2, tensors[:2], tensors[2:])
    (actual,), (reference,) = differentiate(results, [leaf]), differentiate(expected, [leaf])
    torch.testing.assert_close(actual, reference, rtol=1e-4, atol=1e-4)


# Other cases have surrogate gradients, which are no derivatives. A test above compares these with the loop.
SMOOTH = [case for case in CASES if case[0] not in (hard_lif, rectangular_if)]


@pytest.mark.long(all_but=["learned"])
@pytest.mark.parametrize("case", SMOOTH, ids=lambda case: case[0].__name__)
def test_gradients_pass_gradcheck(case: Case) -> None:
    core, counts = case
    tensors = [
        t.detach()[..., :2, :].requires_grad_(t.requires_grad)
        for t in draw_arguments(core, counts[0], counts[1], torch.float64)
    ]
    program = program_of(core, counts, "save")

    def call(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(r for r in run(program, values) if r.is_floating_point())

    assert torch.autograd.gradcheck(call, tensors, fast_mode=True)


def test_choice_moves_fewer_bytes() -> None:
    def choose(core: Callable[..., Any], *counts: int) -> tuple[torch.dtype, ...] | None:
        inputs, states, outputs = counts
        return find_choice(PointwiseProgram(core, inputs, states, outputs), draw_arguments(core, inputs, states))

    assert choose(soft_lif, 1, 1, 1) is None  # reads x again, instead of writing and reading h
    assert choose(four_dendrites, 4, 1, 1) == (torch.float32,)  # writes and reads h, instead of four inputs
    assert choose(rectangular_if, 1, 1, 1) is None  # a single byte does not move faster than four bytes
    assert choose(leaky_integrator, 1, 1, 1) == ()  # the gradient is constant


@pytest.mark.parametrize("residuals", ["save", "recompute"])
def test_residuals_can_be_requested(residuals: str) -> None:
    tensors = draw_arguments(soft_lif, 1, 1)
    program = PointwiseProgram(soft_lif, 1, 1, 1, residuals=residuals)
    assert find_choice(program, tensors) == ((torch.float32,) if residuals == "save" else None)
    assert find_choice(copy.deepcopy(program), tensors) == find_choice(program, tensors)


@pytest.mark.parametrize("residuals", ["save", "recompute"])
def test_constant_gradient_reads_no_values(residuals: str) -> None:
    program = program_of(leaky_integrator, (1, 1, 1), residuals)
    x, v = draw_arguments(leaky_integrator, 1, 1)
    run(program, [x, v], state_seqs=False)[0].sum().backward()
    (step,) = program.specializations
    (backward,) = (k for k in step._kernels.values() if any(p.role is Role.GRAD_INPUT for p in k.params))
    assert {p.role for p in backward.params} == {Role.GRAD_OUTPUT, Role.GRAD_INPUT, Role.GRAD_STATE}


def test_unknown_choice_is_refused() -> None:
    with pytest.raises(ResidualsError, match=r"residuals='keep'.*'auto', 'recompute', 'save'"):
        PointwiseProgram(soft_lif, 1, 1, 1, residuals="keep")


def test_only_the_condition_is_saved_for_a_rectangular_surrogate() -> None:
    tensors = draw_arguments(rectangular_if, 1, 1)
    saved: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        run(PointwiseProgram(rectangular_if, 1, 1, 1, residuals="save"), tensors)
    assert [(t.dtype, t.shape) for t in saved[2:]] == [(torch.bool, tensors[0].shape)]


@pytest.mark.long(all_but=["float32"])
@pytest.mark.parametrize("precision", ["eager", "float32"])
def test_half_precision_values_are_saved_without_rounding(precision: Literal["eager", "float32"]) -> None:
    """Checks that values that are wider in registers than their dtype are saved without rounding."""
    tensors = draw_arguments(learned, 2, 2, torch.bfloat16)
    outcomes = []
    for residuals in ("save", "recompute"):
        program = PointwiseProgram(learned, 2, 2, 2, precision=precision, residuals=residuals)
        results = run(program, tensors)
        outcomes.append((results, differentiate(results, [*tensors, GAIN])))
    assert all(torch.equal(a, b) for a, b in zip(outcomes[0][0], outcomes[1][0], strict=True))
    assert_same_gradients(outcomes[0][1], outcomes[1][1])


@pytest.mark.parametrize("shape", [(0, *STEP), (3, 0)])
def test_scan_without_elements_has_gradients(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape, device=DEVICE).requires_grad_()
    v = torch.ones(shape[1:], device=DEVICE).requires_grad_()
    results = run(PointwiseProgram(soft_lif, 1, 1, 1, residuals="save"), [x, v], state_seqs=False)
    of_input, of_state = torch.autograd.grad(results[1].sum(), [x, v], allow_unused=True)
    # Without steps, results do not depend on the input.
    assert of_input is None if shape[0] == 0 else of_input.shape == x.shape
    assert torch.equal(of_state, torch.ones_like(v))


def test_step_without_a_gradient_runs() -> None:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return (x > v).to(x.dtype), v.detach()

    step: Specialization
    x, v = draw_arguments(core, 1, 1)
    for residuals in ("auto", "save"):
        step, prepared = prepare(PointwiseProgram(core, 1, 1, 1, residuals=residuals), [x, v])
        spikes, _ = scan(step, prepared, state_seqs=False)
        assert not spikes.requires_grad
        assert torch.equal(spikes, (x > v).to(x.dtype))
