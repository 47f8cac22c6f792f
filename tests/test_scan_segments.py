"""Scans whose segments of time run in parallel, compared with serial kernels. Values are bitwise equal, and gradients
are equal up to rounding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from scan_cores import CASES, Case, Problem, problem
from torch import Tensor

from flexsn_nn import FlexSN
from flexsn_nn.neuron import ALIF, LIF
from flexsn_runtime import PointwiseProgram, Specialization, TargetName, prepare, scan
from flexsn_runtime.plans._segments import ON_GPU, SegmentRule, using_segments
from flexsn_runtime.segments._backward import SegmentedBackward
from flexsn_runtime.segments._choice import choose_segments
from flexsn_runtime.segments._forward import SegmentedForward
from flexsn_runtime.segments._kernels import InSegments

# In the interpreter, a step has two blocks, the second of which is partial. Segments have different lengths, and one
# chunk is partial.
STEPS, STEP = 75, (3, 200)
RULE = SegmentRule(elements=5 * 600, largest=600, steps=8, fewest=2, warm_up=12, longest=16)
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(params=["triton", "cpp"])
def language(request: pytest.FixtureRequest) -> TargetName:
    """Returns the language of the kernels on the CPU."""
    request.getfixturevalue("interpreted" if request.param == "triton" else "compiler")
    target: TargetName = request.param
    return target


def run(
    p: Problem,
    rule: SegmentRule | None,
    *,
    on_cpu: TargetName = "triton",
    weights: Callable[[Sequence[Tensor]], list[Tensor | None]] | None = None,
    state_seqs: bool = False,
    residuals: str = "recompute",
) -> tuple[list[Tensor], list[Tensor | None], Specialization]:
    """Returns the results of a scan, their gradients, and the step of the scan."""
    program = PointwiseProgram(p.core, *p.counts, residuals=residuals, on_cpu=on_cpu)
    with using_segments(rule):
        step, arguments = prepare(program, (*p.inputs, *p.states))
        results = scan(step, arguments, state_seqs=state_seqs)
        differentiable = [r for r in results if r.requires_grad]
        weights_of_results = (weights or draw_weights)(differentiable)
        weighted = [(r, w) for r, w in zip(differentiable, weights_of_results, strict=True) if w is not None]
        gradients = torch.autograd.grad([r for r, _ in weighted], p.leaves, [w for _, w in weighted], allow_unused=True)
    assert isinstance(step, Specialization)
    return [r.detach() for r in results], list(gradients), step


def draw_weights(results: Sequence[Tensor]) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r) for r in results]


def weight_first_result(results: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns weights for the first result, the spikes, and `None` for all other results."""
    return [draw_weights(results[:1])[0], *[None] * (len(results) - 1)]


def has_kernel(step: Specialization, purpose: str) -> bool:
    return any(purpose in name for name in step.kernel_names)


def have_same_bits(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    pairs = zip(actual, expected, strict=True)
    return all(a.shape == b.shape and torch.equal(view_bytes(a), view_bytes(b)) for a, b in pairs)


def view_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)  # a 0-d tensor cannot be viewed as bytes


def check_gradients(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None], rtol: float) -> None:
    for actual_gradient, expected_gradient in zip(actual, expected, strict=True):
        assert (actual_gradient is None) == (expected_gradient is None)
        if actual_gradient is not None and expected_gradient is not None:
            scale = float(expected_gradient.abs().max())
            torch.testing.assert_close(actual_gradient, expected_gradient, rtol=0.0, atol=rtol * scale)


@pytest.mark.long(all_but=["triton-lif_hard", "cpp-lif_hard"])
@cases
def test_results_and_gradients_equal_serial_kernels(case: Case, language: TargetName) -> None:
    p = problem(case, STEPS, STEP, dtype=torch.float64)
    expected, expected_gradients, _ = run(p, None, on_cpu=language)
    actual, gradients, step = run(p, RULE, on_cpu=language)
    assert has_kernel(step, "_forward_guess")
    assert has_kernel(step, "_backward_maps")
    assert have_same_bits(actual, expected)
    check_gradients(gradients, expected_gradients, 1e-13)
    repeated, repeated_gradients, _ = run(p, RULE, on_cpu=language)
    assert have_same_bits(repeated, actual)
    assert have_same_bits(repeated_gradients, gradients)  # type: ignore[arg-type]


OPTIONS: dict[str, dict[str, Any]] = {
    "state sequences": {"state_seqs": True},
    "saved": {"residuals": "save"},
    "gradients of outputs alone": {"weights": weight_first_result},
}


@pytest.mark.long(all_but=["triton-lif_hard-gradients of outputs alone", "cpp-plif_scalar-saved"])
@pytest.mark.parametrize("option", OPTIONS)
@cases
def test_options_do_not_change_results(case: Case, option: str, language: TargetName) -> None:
    p = problem(case, STEPS, STEP, dtype=torch.float64)
    expected, expected_gradients, _ = run(p, None, on_cpu=language, **OPTIONS[option])
    actual, gradients, step = run(p, RULE, on_cpu=language, **OPTIONS[option])
    assert has_kernel(step, "_backward_maps")
    assert have_same_bits(actual, expected)
    check_gradients(gradients, expected_gradients, 1e-13)


@pytest.mark.long(all_but=["triton-bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_narrow_dtypes_equal_serial_kernels(dtype: torch.dtype, language: TargetName) -> None:
    (case,) = [case for case in CASES if case.name == "lif_soft"]
    p = problem(case, STEPS, STEP, dtype=dtype)
    expected, expected_gradients, _ = run(p, None, on_cpu=language)
    actual, gradients, _ = run(p, RULE, on_cpu=language)
    assert have_same_bits(actual, expected)
    check_gradients(gradients, expected_gradients, 2e-6 if dtype == torch.float32 else 2e-2)


def forgetful(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = 0.0625 * v + x
    s = (h >= 1.0).to(x.dtype)
    return s, h * (1.0 - s)


def integrating(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = v + x
    s = (h >= 1.0).to(x.dtype)
    return s, h - s


@pytest.mark.long(all_but=["triton-forgetful", "cpp-integrating"])
@pytest.mark.parametrize("core", [forgetful, integrating], ids=lambda core: core.__name__)
def test_repairs_adapt_the_warm_up(core: Callable[..., Any], language: TargetName) -> None:
    """Checks a first warm-up of 4 steps, which is too short for all segments. `forgetful` needs a longer warm-up. For
    `integrating`, no warm-up is long enough.
    """
    generator = torch.Generator().manual_seed(0)
    x, v = torch.randn(STEPS, *STEP, generator=generator), torch.randn(STEP, generator=generator)
    program = PointwiseProgram(core, 1, 1, 1, on_cpu=language)
    with using_segments(None), torch.no_grad():
        expected = scan(*prepare(program, (x, v)), state_seqs=False)
    rule = replace(RULE, warm_up=4)
    reports = []
    with using_segments(rule), torch.no_grad():
        for _ in range(4):
            step, arguments = prepare(program, (x, v))
            assert have_same_bits(scan(step, arguments, state_seqs=False), expected)
            (speculation,) = step.speculations.values()
            reports.append((speculation.last, speculation.converges))
    first = reports[0][0]
    assert first.elements == (first.segments - 1) * 600  # all segments except the first were repaired
    if core is forgetful:
        assert reports[-1][1]
        assert reports[-1][0].elements == 0
        assert f"a warm-up of {reports[-1][0].warm_up} steps; 0 of 2400" in speculation.in_words()
    else:
        assert not reports[-1][1]
        assert "do not converge" in speculation.in_words()


@pytest.mark.long(all_but=["cpp"])
def test_only_wrong_segments_are_repaired(language: TargetName) -> None:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.where(x < 0.0, torch.zeros_like(v), v) + x
        return h, h

    x = torch.rand(STEPS, *STEP)
    x[20:24] = -1.0  # the core forgets its state in these steps, so the guess of the next segment is right
    x[STEPS // 2 - 8 :, 0, :7] = -1.0
    p = Problem(core, (1, 1, 1), [x.requires_grad_()], [torch.rand(STEP).requires_grad_()], [])
    expected, _, _ = run(p, None, on_cpu=language)
    actual, _, step = run(p, replace(RULE, warm_up=4), on_cpu=language)
    assert have_same_bits(actual, expected)
    (speculation,) = step.speculations.values()
    assert 0 < speculation.last.elements < speculation.last.total


def holding(x: Tensor, hold: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.where(hold > 0.0, v, 0.0625 * v) + x
    return h, h


@pytest.mark.long(all_but=["cpp"])
def test_few_repairs_do_not_lengthen_the_warm_up(language: TargetName) -> None:
    """Checks that the warm-up stays short if one element holds its state across a seam, for longer than the longest
    warm-up. Each call then repairs a segment of this element.
    """
    x, hold, v = torch.randn(160, *STEP), torch.zeros(160, *STEP), torch.randn(STEP)
    hold[22:46, 1, 7] = 1.0
    program = PointwiseProgram(holding, 2, 1, 1, on_cpu=language)
    with using_segments(None), torch.no_grad():
        expected = scan(*prepare(program, (x, hold, v)), state_seqs=False)
    with using_segments(replace(RULE, elements=8 * 600)), torch.no_grad():
        for _ in range(4):
            step, arguments = prepare(program, (x, hold, v))
            assert have_same_bits(scan(step, arguments, state_seqs=False), expected)
    assert isinstance(step, Specialization)
    (speculation,) = step.speculations.values()
    assert speculation.converges
    assert (speculation.last.segments, speculation.last.warm_up) == (8, 12)
    assert 0 < speculation.last.elements <= 600


@pytest.mark.long(all_but=["cpp"])
def test_short_sequences_run_in_segments_in_first_calls_and_captures(
    language: TargetName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks which calls with short sequences run in segments. The first calls, which choose the warm-up, and captures
    of CUDA graphs run in segments. Other calls are serial.
    """
    (case,) = [case for case in CASES if case.name == "lif_hard"]
    p = problem(case, STEPS, STEP, dtype=torch.float64)
    expected, expected_gradients, _ = run(p, None, on_cpu=language)
    program = PointwiseProgram(p.core, *p.counts, on_cpu=language)
    launches: list[type] = []

    def record(self: InSegments[Any], tensors: Sequence[Tensor], scratch: object) -> None:
        launches.append(type(self))

    monkeypatch.setattr(SegmentedForward, "_finish", record)
    monkeypatch.setattr(SegmentedBackward, "_finish", record)
    with using_segments(replace(RULE, launched=STEPS + 1)):
        for n in range(10):
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda recording=n == 9: recording)
            step, arguments = prepare(program, (*p.inputs, *p.states))
            results = scan(step, arguments, state_seqs=False)
            differentiable = [r for r in results if r.requires_grad]
            gradients = torch.autograd.grad(differentiable, p.leaves, draw_weights(differentiable), allow_unused=True)
            assert have_same_bits([r.detach() for r in results], expected)
            check_gradients(gradients, expected_gradients, 1e-13)
            assert launches == ([] if n == 8 else [SegmentedForward, SegmentedBackward])
            launches.clear()


@pytest.mark.long(all_but=["cpp"])
def test_overflowing_derivatives_do_not_change_gradients(language: TargetName) -> None:
    """Checks a segment whose product of derivatives is infinite, while the gradient at its end is zero."""

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.where(x > 0.0, v * 1e30, v)
        return h + x, h * 0.5

    x = torch.zeros(STEPS, *STEP)
    x[60:64, 1] = 1.0  # elements in the first and in the second block
    x.requires_grad_()
    p = Problem(core, (1, 1, 1), [x], [torch.zeros(STEP).requires_grad_()], [])

    def weights(results: Sequence[Tensor]) -> list[Tensor | None]:
        weight = torch.randn(results[0].shape, generator=torch.Generator().manual_seed(1))
        weight[30:] = 0.0
        return [weight, None]

    expected, expected_gradients, _ = run(p, None, on_cpu=language, weights=weights)
    assert all(g is not None and bool(g.isfinite().all()) for g in expected_gradients)
    actual, gradients, step = run(p, RULE, on_cpu=language, weights=weights)
    assert has_kernel(step, "_backward_maps")
    assert have_same_bits(actual, expected)
    check_gradients(gradients, expected_gradients, 1e-6)


class Clipped(torch.autograd.Function):
    """An identity that clips its gradient, so the gradient is not a linear function of the incoming gradient."""

    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        return v.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].clamp(-0.1, 0.1)


@pytest.mark.long(all_but=["cpp"])
def test_nonlinear_backward_stays_serial(language: TargetName) -> None:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = 0.5 * Clipped.apply(v) + x
        return h, h

    x = torch.randn(STEPS, *STEP, generator=torch.Generator().manual_seed(0)).requires_grad_()
    p = Problem(core, (1, 1, 1), [x], [torch.zeros(STEP).requires_grad_()], [])
    expected, expected_gradients, _ = run(p, None, on_cpu=language)
    actual, gradients, step = run(p, RULE, on_cpu=language)
    assert has_kernel(step, "_forward_guess")
    assert not has_kernel(step, "_backward_maps")
    assert have_same_bits(actual, expected)
    assert have_same_bits(gradients, expected_gradients)  # type: ignore[arg-type]


def resonator(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotates the state by an angle of 0.1, multiplies its length by 0.999, and adds the input and a constant."""
    rotated = 0.999 * (0.995 * v - 0.0998 * w) + torch.tanh(x)
    return rotated + x, rotated, 0.999 * (0.0998 * v + 0.995 * w) + 1.0


def gated(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    z = torch.sigmoid(x)
    h = (1.0 - z) * v + z * x
    return h, h


AFFINE = {"resonator": (resonator, 2), "gated": (gated, 1)}


@pytest.mark.long(all_but=["cpp-resonator", "triton-gated"])
@pytest.mark.parametrize("name", AFFINE)
def test_affine_steps_run_in_segments_with_fast_math(name: str, language: TargetName) -> None:
    core, num_states = AFFINE[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS, *STEP, generator=generator, dtype=torch.float64).requires_grad_()
    states = [torch.randn(STEP, generator=generator, dtype=torch.float64) for _ in range(num_states)]
    results = []
    for rule in (None, RULE):
        program = PointwiseProgram(core, 1, num_states, 1, fast_math=True, on_cpu=language)  # type: ignore[arg-type]
        with using_segments(rule):
            step, arguments = prepare(program, (x, *states))
            actual = scan(step, arguments, state_seqs=False)
            results.append([*actual, *torch.autograd.grad(actual[0].square().sum(), x)])
    assert has_kernel(step, "_forward_starts")
    assert any("maps of states are combined" in line for line in step.segments_in_words())
    for result, serial_result in zip(*results, strict=True):
        torch.testing.assert_close(result, serial_result, rtol=1e-11, atol=1e-11)


def ending(x: Tensor, remaining: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.where(remaining > 0, 0.0625 * v + torch.sin(x), v)
    return torch.where(remaining > 0, h, 0.0), h


def continuing(x: Tensor, remaining: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Decays after the end of the sequence, where it still has outputs."""
    h = 0.0625 * v + torch.where(remaining > 0, torch.sin(x), 0.0)
    return h, h


@pytest.mark.long(all_but=["cpp-ending"])
@pytest.mark.parametrize("core", [ending, continuing], ids=lambda core: core.__name__)
def test_countdown_inputs_equal_serial_kernels(core: Callable[..., Any], language: TargetName) -> None:
    """Checks steps with an input that counts the remaining steps of a sequence: an affine step with fast math, and a
    step that continues after the end of its sequence.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS, *STEP, generator=generator, dtype=torch.float64).requires_grad_()
    remaining = torch.tensor([74, 31, 0], dtype=torch.int32)[:, None].expand(STEPS, 3, 1)
    state = torch.randn(STEP, generator=generator, dtype=torch.float64)
    results = []
    for rule in (None, RULE):
        program = PointwiseProgram(core, 2, 1, 1, fast_math=core is ending, on_cpu=language, counts_down=(False, True))
        with using_segments(rule):
            step, arguments = prepare(program, (x, remaining, state))
            actual = scan(step, arguments, state_seqs=True)
            results.append([*actual, *torch.autograd.grad(actual[0].square().sum() + actual[1].sum(), x)])
    assert step.ends == (core is ending)
    assert has_kernel(step, "_forward_starts" if core is ending else "_forward_guess")
    assert has_kernel(step, "_backward_maps")
    for result, serial_result in zip(*results, strict=True):
        torch.testing.assert_close(result, serial_result, rtol=1e-11, atol=1e-11)


@pytest.mark.long(all_but=["cpp"])
def test_nonaffine_steps_are_serial_with_fast_math(language: TargetName) -> None:
    (case,) = [case for case in CASES if case.name == "lif_hard"]
    p = problem(case, STEPS, STEP)
    program = PointwiseProgram(p.core, *p.counts, fast_math=True, on_cpu=language)
    with using_segments(RULE), torch.no_grad():
        step, arguments = prepare(program, (*p.inputs, *p.states))
        scan(step, arguments, state_seqs=False)
    assert [name for name in step.kernel_names if "guess" in name or "starts" in name] == []
    assert step.kernel_names


@pytest.mark.long(all_but=["triton"])
def test_warm_ups_are_stored(language: TargetName, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXSN_CACHE_DIR", str(tmp_path))
    (case,) = [case for case in CASES if case.name == "lif_hard"]
    p = problem(case, STEPS, STEP)
    rule = replace(RULE, warm_up=4, is_stored=True)
    run(p, rule, on_cpu=language)
    _, _, step = run(p, rule, on_cpu=language)
    (speculation,) = step.speculations.values()
    assert speculation.last.warm_up == 8


@pytest.mark.long(all_but=["triton"])
def test_explain_reports_segments_warm_up_and_repairs(language: TargetName) -> None:
    neuron = LIF(backend=language)
    x = torch.randn(STEPS, *STEP, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with using_segments(replace(RULE, longest=64)):
        neuron(x).sum().backward()
        text = neuron.explain()
    assert "few neurons over many steps: forward: 5 segments side by side, each after a warm-up of 12 steps; " in text
    assert "of 3000 were computed again" in text
    assert "backward over 75 steps: 5 segments side by side" in text


def draw_resets() -> Tensor:
    resets = torch.rand(STEPS, STEP[0], generator=torch.Generator().manual_seed(3)) < 0.1
    resets[40:48, 1] = True
    return resets


CHANGES: dict[str, dict[str, Tensor]] = {
    # Sequences end within a segment, in the first chunk of a segment, at a seam, before the first step, or after the
    # last full chunk.
    "lengths": {"lengths": torch.tensor([STEPS, 31, 0])},
    "lengths at seams": {"lengths": torch.tensor([1, 32, 74])},
    "resets": {"resets": draw_resets()},
    "both": {"lengths": torch.tensor([STEPS - 1, 16, 75]), "resets": draw_resets()},
}


@pytest.mark.long(all_but=["cpp-True-lengths", "cpp-False-resets"])
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("stores_states", [False, True])
def test_lengths_and_resets_equal_serial_kernels(name: str, stores_states: bool, language: TargetName) -> None:
    """Checks lengths and resets in segments. After the end of a sequence, results are right for any guess. After a
    reset, guesses are right.
    """
    x_data = torch.randn(STEPS, *STEP, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    options = CHANGES[name]
    x_data[torch.arange(STEPS)[:, None] >= options.get("lengths", torch.tensor([STEPS] * 3))] = torch.nan
    actual = []
    for rule in (None, RULE):
        neuron = ALIF(tau=2.0, tau_a=1.5, backend=language, store_state_seqs=stores_states)
        x = x_data.clone().requires_grad_()
        with using_segments(rule):
            spikes = neuron(x, lengths=options.get("lengths"), resets=options.get("resets"))
            assert len(neuron.state_seqs) == 2 * stores_states
            results = [spikes, *neuron.states, *neuron.state_seqs]
            weights = draw_weights(results)
            loss = torch.stack([(r * w).sum() for r, w in zip(results, weights, strict=True)]).sum()
            (gradient,) = torch.autograd.grad(loss, x)
        actual.append(([result.detach() for result in results], gradient, neuron))
    (expected, expected_gradient, _), (results, gradient, neuron) = actual
    assert have_same_bits(results, expected)
    check_gradients([gradient], [expected_gradient], 1e-12)
    names = neuron.kernel_names()
    assert any("_forward_repair" in kernel for kernel in names)
    assert any("_backward_maps" in kernel for kernel in names)
    assert any("_forward_ended" in kernel for kernel in names) == ("lengths" in options and stores_states)


@pytest.mark.long(all_but=["cpp-16"])
@pytest.mark.parametrize("warm_up", [4, 16])
def test_segments_after_an_end_are_not_repaired(warm_up: int, language: TargetName) -> None:
    """Checks that segments after the end of a sequence are not computed again, although their guesses are wrong."""
    x = torch.randn(STEPS, *STEP, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([31, 16, 0])
    results = []
    for rule in (None, replace(RULE, warm_up=warm_up)):
        neuron = FlexSN(forgetful, 1, 1, 1, backend=language)
        neuron.store_state_seqs = True
        with using_segments(rule), torch.no_grad():
            results.append([neuron(x, lengths=lengths), *neuron.states, *neuron.state_seqs])
    assert have_same_bits(*results)
    repaired = int(re.findall(r"; (\d+) of \d+ were computed again", neuron.explain())[0])
    assert (repaired == 0) == (warm_up == 16)


def test_rule_selects_few_neurons_and_long_sequences() -> None:
    rule = SegmentRule(elements=2**16, largest=2**13)
    assert rule.count(1024, 16384) == 64
    assert rule.count(256, 65536) == 256
    assert rule.count(8192, 1024) == 8
    assert rule.count(8193, 2**20) == rule.count(1024, 256) == 1
    assert rule.count(1024, 16384, warm_up=1024) == 16
    assert rule.count(1, 2**31 - 1) * (2**31 - 1) <= 2**31
    assert replace(rule, shortest=1024).count(256, 1023) == 1
    assert replace(rule, shortest=1024).count(256, 1024) == 8


def adding(x: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = 0.5 * v + x + y
    return h, h


@pytest.mark.parametrize(
    ("dtype", "largest"), [(torch.float64, 4095), (torch.float32, 8191), (torch.bfloat16, 8192)], ids=str
)
def test_steps_that_move_many_bytes_are_serial(dtype: torch.dtype, largest: int, interpreted: None) -> None:
    """Checks the largest steps that run in segments. The input and output of 8192 elements saturate the memory
    bandwidth of an H100 in float32, but not in bfloat16.
    """
    program = PointwiseProgram(forgetful, 1, 1, 1)
    for elements, runs_in_segments in ((largest, True), (largest + 1, False)):
        x = torch.zeros((), dtype=dtype).expand(1024, elements)
        with using_segments(ON_GPU):
            assert (choose_segments(*prepare(program, (x,))) is not None) == runs_in_segments


def test_bytes_of_all_sequences_are_counted(interpreted: None) -> None:
    program = PointwiseProgram(adding, 2, 1, 1)
    for elements, runs_in_segments in ((5461, True), (5462, False)):  # each element moves 12 bytes
        x = torch.zeros(()).expand(1024, elements)
        with using_segments(ON_GPU):
            assert (choose_segments(*prepare(program, (x, x))) is not None) == runs_in_segments


@pytest.mark.gpu
@pytest.mark.parametrize("residuals", ["recompute", "save"])
@cases
def test_segments_equal_serial_kernels_on_the_gpu(case: Case, residuals: str) -> None:
    p = problem(case, 2055, (3, 217), device="cuda")
    expected, expected_gradients, _ = run(p, None, residuals=residuals)
    for warm_up in (4, 64):
        rule = SegmentRule(elements=2**16, largest=2**13, warm_up=warm_up)
        actual, gradients, step = run(p, rule, residuals=residuals)
        assert has_kernel(step, "_backward_maps")
        assert have_same_bits(actual, expected)
        check_gradients(gradients, expected_gradients, 2e-5)
        repeated, repeated_gradients, _ = run(p, rule, residuals=residuals)
        assert have_same_bits(repeated, actual)
        assert have_same_bits(repeated_gradients, gradients)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_warm_ups_are_learned_on_the_gpu_without_waiting() -> None:
    (case,) = [case for case in CASES if case.name == "lif_hard"]
    p = problem(case, 4096, (3, 217), device="cuda")
    program = PointwiseProgram(p.core, *p.counts)
    with using_segments(SegmentRule(elements=2**16, largest=2**13, warm_up=4)), torch.no_grad():
        for _ in range(8):
            step, arguments = prepare(program, (*p.inputs, *p.states))
            scan(step, arguments, state_seqs=False)
            torch.cuda.synchronize()
    (speculation,) = step.speculations.values()
    assert speculation.last.warm_up > 4
    assert speculation.last.elements < speculation.last.total


@pytest.mark.gpu
@pytest.mark.parametrize("stores_states", [False, True])
def test_lengths_equal_serial_kernels_on_the_gpu(stores_states: bool) -> None:
    lengths = torch.tensor([2055, 700, 3])
    x_data = torch.randn(2055, 3, 217, generator=torch.Generator().manual_seed(0)).cuda()
    x_data[torch.arange(2055)[:, None] >= lengths] = torch.nan
    actual = []
    for rule in (
        None,
        SegmentRule(elements=2**16, largest=2**13, warm_up=4),
        SegmentRule(elements=2**16, largest=2**13),
    ):
        neuron = LIF(backend="triton", store_state_seqs=stores_states).cuda()
        x = x_data.clone().requires_grad_()
        with using_segments(rule):
            spikes = neuron(x, lengths=lengths)
            results = [spikes, *neuron.states, *neuron.state_seqs]
            loss = torch.stack([(r * w).sum() for r, w in zip(results, draw_weights(results), strict=True)]).sum()
            (gradient,) = torch.autograd.grad(loss, x)
        actual.append(([result.detach() for result in results], gradient))
        assert any("_forward_guess" in name for name in neuron.kernel_names()) == (rule is not None)
    for results, gradient in actual[1:]:
        assert have_same_bits(results, actual[0][0])
        check_gradients([gradient], [actual[0][1]], 2e-5)
