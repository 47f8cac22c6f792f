"""A number that changes between calls is an argument of the kernels, and has the same bits as in the loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from runtime_cores import DEVICE, Core, compiled, loop
from torch import Tensor, nn

from flexsn_codegen.targets.cpp import why_no_compiler
from flexsn_runtime import (
    CapturedTensorError,
    PointwiseProgram,
    build_training_kernels,
    flexsn_backward,
    flexsn_forward,
    prepare,
    register_flexsn_kernel_handle,
    release_flexsn_kernel_handle,
    scan,
)

SHAPE = (2, 3)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)


NEEDS_CPP = pytest.mark.skipif(
    DEVICE.type != "cpu" or why_no_compiler() is not None, reason="kernels in C++ need a compiler, and run on the CPU"
)


def list_thresholds(count: int) -> list[float]:
    """Returns `count` different thresholds, as in an annealing schedule."""
    return [0.25 + 1.5 / (i + 1.37) + 1e-9 * i for i in range(count)]


class Spike(torch.autograd.Function):
    """A step with the derivative `slope / (1 + (slope x)²)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, neuron: Neuron) -> Tensor:
        ctx.neuron = neuron
        ctx.save_for_backward(x)
        return (x >= 0.0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        slope = ctx.neuron.slope
        return grads[0] * slope / (1.0 + (slope * x) ** 2), None


class Neuron(nn.Module):
    """A neuron with a slope. Its `value` is the threshold, the decay, a divisor and a numerator."""

    def __init__(self) -> None:
        super().__init__()
        self.value = 1.0
        self.slope = 1.0

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        decay = math.exp(-1.0 / (1.0 + abs(self.value)))
        h = decay * v + (x - 0.125) / self.value
        s = Spike.apply(h - self.value, self)
        soft = torch.where(h > 0.3 * self.value, h.abs() * self.value, self.value / (1.0 + h * h))
        return s + soft, h * (1.0 - s)


def draw(dtype: torch.dtype, *lead: int) -> Tensor:
    size = math.prod((*lead, *SHAPE))
    return torch.linspace(-2.0, 2.0, size, dtype=torch.float64).reshape(*lead, *SHAPE).to(DEVICE, dtype)


def differentiate(run: Callable[[Tensor, Tensor], tuple[Tensor, ...]], dtype: torch.dtype) -> tuple[Tensor, ...]:
    x, v = draw(dtype, 3).requires_grad_(), draw(dtype).requires_grad_()
    output, state = run(x, v)
    # Only the output has a gradient, because the kernel for this case is compiled together with the forward.
    grads = torch.autograd.grad((output * output).sum(), (x, v), allow_unused=True, materialize_grads=True)
    return (output.detach(), state.detach(), *grads)


def assert_alike(core: Core, program: PointwiseProgram, dtype: torch.dtype) -> None:
    actual = differentiate(lambda x, v: compiled(program, 1, [x], [v]), dtype)
    expected = differentiate(lambda x, v: loop(core, 1, [x], [v]), dtype)
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a.dtype == b.dtype
        # For extreme values, the results are NaN, in the loop and in kernels.
        if i < 2:
            torch.testing.assert_close(a, b, rtol=0.0, atol=0.0, equal_nan=True)
        else:
            torch.testing.assert_close(a, b, equal_nan=True)


def list_kernels(program: PointwiseProgram, direction: str) -> list[str]:
    """Returns the names of the existing kernels of one direction. The name of a kernel contains its direction."""
    names = {kernel.function.__name__ for kernel in program._kernels.values()}
    return sorted(name for name in names if f"_{direction}_" in name)


@pytest.mark.long(all_but=["triton-torch.bfloat16-recompute", "cpp-torch.float64-recompute"])
@pytest.mark.parametrize(
    ("language", "dtype", "residuals"),
    [
        ("triton", torch.float32, "recompute"),
        ("triton", torch.float64, "save"),
        ("triton", torch.bfloat16, "recompute"),
        pytest.param("cpp", torch.float32, "save", marks=NEEDS_CPP),
        pytest.param("cpp", torch.float64, "recompute", marks=NEEDS_CPP),
        pytest.param("cpp", torch.bfloat16, "recompute", marks=NEEDS_CPP),
    ],
    ids=str,
)
def test_two_kernels_per_direction_suffice_for_all_values(language: Any, dtype: torch.dtype, residuals: str) -> None:
    core = Neuron().to(DEVICE)
    program = PointwiseProgram(core, 1, 1, 1, residuals=residuals, on_cpu=language)
    for value in list_thresholds(4):
        core.value = value
        core.slope = 2.0 * value
        assert_alike(core, program, dtype)
    assert len(list_kernels(program, "forward")) == 2
    assert len(list_kernels(program, "backward")) == 2


def test_slope_changes_only_the_backward() -> None:
    core = Neuron().to(DEVICE)
    program = PointwiseProgram(core, 1, 1, 1)
    for value in list_thresholds(4):
        core.slope = value
        assert_alike(core, program, torch.float32)
    assert len(list_kernels(program, "forward")) <= 2
    assert len(list_kernels(program, "backward")) == 2


def test_numbers_may_begin_to_change_one_after_the_other() -> None:
    """Checks that the second number becomes an argument when the first number changes."""
    core = Neuron().to(DEVICE)
    program = PointwiseProgram(core, 1, 1, 1)
    for value in list_thresholds(3):
        core.value = value
        assert_alike(core, program, torch.float32)
    for value in list_thresholds(3):
        core.slope = value
        assert_alike(core, program, torch.float32)
    assert len(list_kernels(program, "forward")) == 2
    assert len(list_kernels(program, "backward")) == 2


def test_numbers_may_be_equal_at_first() -> None:
    """Tests equal terms, which are computed once. Different values need another graph, with numbers as arguments."""
    a = b = 1.0

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return (x - a) * (x - b), v * a + x * b

    program = PointwiseProgram(core, 1, 1, 1)
    for a in list_thresholds(6):  # noqa: B007
        assert_alike(core, program, torch.float32)
    for b in list_thresholds(4):  # noqa: B007
        assert_alike(core, program, torch.float32)
    assert len(list_kernels(program, "forward")) == 2
    assert len(list_kernels(program, "backward")) == 2


@pytest.mark.long
@DTYPES
def test_many_values_need_few_kernels(dtype: torch.dtype) -> None:
    core = Neuron().to(DEVICE)
    program = PointwiseProgram(core, 1, 1, 1)
    x, v = draw(dtype, 3), draw(dtype)
    names = set()
    for value in list_thresholds(25):
        core.value = value
        step, arguments = prepare(program, (x, v))
        scan(step, arguments, state_seqs=False)
        names.add(step.core().name)
    assert len(names) == 2
    assert len(program.specializations) <= 4
    assert_alike(core, program, dtype)


EXTREMES = [0.1, -0.0, 0.0, 1e-42, 3e38, -1e39, 1e300, math.inf, -math.inf, math.nan, 5e-324, 16, 1, True, 2**40]


@pytest.mark.long(all_but=["*float32"])
@DTYPES
def test_extreme_values_have_the_bits_of_constants(dtype: torch.dtype) -> None:
    value: Any = 0.5

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(x > value, x * value + v, value - x), (x + value) / value

    program = PointwiseProgram(core, 1, 1, 1)
    compiled(program, 1, [draw(dtype, 3)], [draw(dtype)])
    for value in EXTREMES:
        literal = PointwiseProgram(core, 1, 1, 1)  # its source contains the number
        for a, b in zip(
            compiled(program, 1, [draw(dtype, 3)], [draw(dtype)]),
            compiled(literal, 1, [draw(dtype, 3)], [draw(dtype)]),
            strict=True,
        ):
            assert a.dtype == b.dtype
            as_bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
            assert torch.equal(a.view(as_bits), b.view(as_bits)), value


@pytest.mark.long(all_but=["*float64"])
@NEEDS_CPP
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_extreme_values_have_the_bits_of_the_loop_in_cpp(dtype: torch.dtype) -> None:
    value: Any = 0.5

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(x > value, x * value + v, value - x), (x + value) / value

    program = PointwiseProgram(core, 1, 1, 1, on_cpu="cpp")
    x, v = draw(dtype, 3), draw(dtype)
    compiled(program, 1, [x], [v])
    for value in [number for number in EXTREMES if number is not True]:  # torch does not subtract from True
        for a, b in zip(compiled(program, 1, [x], [v]), loop(core, 1, [x], [v]), strict=True):
            torch.testing.assert_close(a, b, rtol=0.0, atol=0.0, equal_nan=True)
            assert torch.equal(a.signbit() & ~a.isnan(), b.signbit() & ~b.isnan()), value
    assert len(list_kernels(program, "forward")) == 2


INTEGERS = [1, 0, 3, 16, 100, 255, -5, 2**31 - 1, -(2**31), 2**31, 2**40 + 7, -(2**63), 2**63 - 1]
KINDS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@pytest.mark.long(all_but=["triton-torch.uint8"])
@pytest.mark.parametrize(
    ("language", "dtype"),
    [
        *(("triton", kind) for kind in KINDS),
        pytest.param("cpp", torch.int64, marks=NEEDS_CPP),
        pytest.param("cpp", torch.int8, marks=NEEDS_CPP),
    ],
    ids=str,
)
def test_integers_equal_the_loop(language: Any, dtype: torch.dtype) -> None:
    value = 7

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return (x * value + v) ^ value, torch.where(x > value, x, v + value)

    program = PointwiseProgram(core, 1, 1, 1, on_cpu=language)
    x, v = (torch.arange(n, device=DEVICE).reshape(*s, *SHAPE).to(dtype) for n, s in ((18, (3,)), (6, ())))
    limits = torch.iinfo(dtype)
    for value in (7, *(i for i in INTEGERS if limits.min <= i <= limits.max)):
        actual, expected = compiled(program, 1, [x], [v]), loop(core, 1, [x], [v])
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(actual, expected, strict=True)), value
    assert len(list_kernels(program, "forward")) == 2


def test_flags_equal_the_loop() -> None:
    flag, number = True, 1

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return x & flag, (v ^ flag) | (x == bool(number % 2))

    program = PointwiseProgram(core, 1, 1, 1)
    x = torch.arange(18, device=DEVICE).reshape(3, *SHAPE) % 3 == 0
    v = torch.arange(6, device=DEVICE).reshape(SHAPE) > 2
    for flag, number in ((True, 1), (False, 1), (True, 2), (False, 3), (False, 4)):
        actual, expected = compiled(program, 1, [x], [v]), loop(core, 1, [x], [v])
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)), (flag, number)


@pytest.mark.parametrize("exponents", [[2.5, 2.6, 2.0, 2.7, 0.5, 3.0, 1.25, -1.0]], ids=str)
def test_exponents_need_few_kernels(exponents: list[float]) -> None:
    """Tests exponents that eager mode computes as products. Only a few of them have separate kernels."""
    exponent = 2.25

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return x.abs() ** exponent, v

    program = PointwiseProgram(core, 1, 1, 1)
    for exponent in (2.25, *exponents):  # noqa: B007
        x = draw(torch.float32, 3)
        actual, expected = compiled(program, 1, [x], [x[0]]), loop(core, 1, [x], [x[0]])
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=0.0)  # powers differ by an ulp between libraries
    assert len(list_kernels(program, "forward")) <= 2 + 4


def test_number_may_decide_a_branch_or_a_count() -> None:
    core = Neuron().to(DEVICE)

    def branching(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(round(core.value)):
            x = x * core.value
        return core(x, v) if core.value > 0.5 else (v, x)

    program = PointwiseProgram(branching, 1, 1, 1)
    for value in (0.75, 1.25, 0.25, 2.0, 0.75, 2.25, 1.0, 0.125):
        core.value = value
        assert_alike(branching, program, torch.float32)
    assert len(list_kernels(program, "forward")) <= 1 + 3


def test_flag_does_not_make_numbers_arguments() -> None:
    core = Neuron().to(DEVICE)
    program = PointwiseProgram(lambda x, v: core(x if core.training else -x, v), 1, 1, 1)
    x, v = draw(torch.float32, 3), draw(torch.float32)
    for mode in (True, False, True):
        core.train(mode)
        step, _ = prepare(program, (x, v))
        assert not step.core().numbers
    assert len(program.specializations) == 2
    core.value = 0.75
    step, _ = prepare(program, (x, v))
    assert step.core().numbers


def test_backward_has_the_numbers_of_its_forward() -> None:
    """Compares with the loop, whose graph contains the numbers."""

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v * 0.5 + x * value
        return h * h, h

    program = PointwiseProgram(core, 1, 1, 1, residuals="save")
    pairs = []
    for value in (0.25, 0.75, 1.25):  # noqa: B007
        x = draw(torch.float32, 3).requires_grad_()
        pairs.append((x, compiled(program, 1, [x], [draw(torch.float32)])[0]))
        pairs.append((x, loop(core, 1, [x], [draw(torch.float32)])[0]))
    grads = [torch.autograd.grad(output.sum(), x)[0] for x, output in pairs]
    for actual, expected in zip(grads[::2], grads[1::2], strict=True):
        torch.testing.assert_close(actual, expected)


def test_slope_that_changes_between_forward_and_backward_is_refused() -> None:
    core = Neuron().to(DEVICE)
    program = PointwiseProgram(core, 1, 1, 1)
    for value in list_thresholds(3):
        core.slope = value
        x = draw(torch.float32, 3).requires_grad_()
        output = compiled(program, 1, [x], [draw(torch.float32)])[0]
        core.slope = value + 1.0
        with pytest.raises(CapturedTensorError, match="Call backward"):
            output.sum().backward()


def register_handle(core: Core) -> int:
    forward, backward, info = build_training_kernels(core, 1, 1, 1, (draw(torch.float32), draw(torch.float32)))
    return register_flexsn_kernel_handle(
        inference_kernel=None,
        inference_info=None,
        inference_final_state_kernel=None,
        inference_final_state_info=None,
        forward_kernel=forward,
        backward_kernel=backward,
        training_info=info,
    )


@pytest.mark.long(all_but=["True"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_custom_operator_follows_numbers_and_refuses_a_change_before_its_backward(is_compiled: bool) -> None:
    core = Neuron().to(DEVICE)
    handle = register_handle(core)

    def run(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        output, state, *_ = torch.ops.flexsn.flexsn_inductor_training(handle, [x, v])
        return output, state

    scans = torch.compile(run, backend="aot_eager", fullgraph=True) if is_compiled else run
    try:
        for value in list_thresholds(3):
            core.value = value
            actual = differentiate(scans, torch.float32)
            expected = differentiate(lambda x, v: loop(core, 1, [x], [v]), torch.float32)
            for a, b in zip(actual, expected, strict=True):
                torch.testing.assert_close(a, b)
            output = scans(draw(torch.float32, 3).requires_grad_(), draw(torch.float32))[0]
            core.value = value + 1.0
            with pytest.raises(CapturedTensorError, match="was replaced between the forward and the backward"):
                output.sum().backward()
    finally:
        release_flexsn_kernel_handle(handle)


def test_functions_without_autograd_refuse_a_change_before_the_backward() -> None:
    core = Neuron().to(DEVICE)
    forward, backward, info = build_training_kernels(core, 1, 1, 1, (draw(torch.float32), draw(torch.float32)))
    x, v = draw(torch.float32, 3), draw(torch.float32)
    results = {}
    for value in list_thresholds(2):
        core.value = value
        results[value] = flexsn_forward(forward, info, x, v)
    first, second = results.values()
    flexsn_backward(backward, info, second[0], None, *second[2:])
    with pytest.raises(CapturedTensorError, match="was replaced between the forward and the backward"):
        flexsn_backward(backward, info, first[0], None, *first[2:])
    core.value += 1.0
    copies = [t.clone() for t in second[2:]]  # copies of the step's arguments do not refer to the step
    with pytest.raises(CapturedTensorError, match="was replaced between the forward and the backward"):
        flexsn_backward(backward, info, second[0], None, *copies)


def test_restored_values_are_not_traced_again() -> None:
    core = Neuron().to(DEVICE)
    program = PointwiseProgram(core, 1, 1, 1)
    x, v = draw(torch.float32, 3), draw(torch.float32)
    steps: dict[float, Any] = {}
    for value in (0.5, 1.5, 0.5, 1.5, 0.5):
        core.value = value
        step, _ = prepare(program, (x, v))
        assert steps.setdefault(value, step) is step


@pytest.mark.gpu
@DTYPES
def test_few_kernels_are_compiled_on_a_gpu(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Tests values that include numbers for which Triton compiles special code, such as 1 and multiples of 16."""
    from triton import knobs

    compiled_now: list[str] = []

    def hook(*args: Any, **options: Any) -> None:
        compiled_now.append(str(options["fn"].name))

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", hook)
    core = Neuron().to(DEVICE)
    program = PointwiseProgram(core, 1, 1, 1)
    for value in [1.0, 16.0, 0.0625, 2.0**-126, 2.0**-149, *list_thresholds(20)]:
        core.value = value
        core.slope = 2.0 * value
        assert_alike(core, program, dtype)
    assert len([name for name in compiled_now if "_forward_" in name]) <= 2, compiled_now
    assert len([name for name in compiled_now if "_backward_" in name]) <= 2, compiled_now


@pytest.mark.gpu
def test_captured_graph_keeps_the_number_of_its_capture() -> None:
    core = Neuron().to(DEVICE)
    program = PointwiseProgram(core, 1, 1, 1)
    x, v = draw(torch.float32, 3), draw(torch.float32)

    def run() -> Tensor:
        return compiled(program, 1, [x], [v])[0]

    expected = {}
    for value in (0.5, 0.75, 1.25):
        core.value = value
        expected[value] = run().clone()
    core.value = 0.75
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = run()
    core.value = 1.25
    assert torch.equal(run(), expected[1.25])
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(held, expected[0.75])
