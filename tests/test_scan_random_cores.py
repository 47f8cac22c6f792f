"""Random step functions, compiled and compared with the eager scan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scan_cores import hard_spike
from torch import Tensor

from flexsn_hop import eager_scan
from flexsn_runtime import ScanProgram, TargetName, prepare, scan

# The elements are a block of 512 elements, the interpreter's block size, and a partial block. Parameters with different
# shapes broadcast to this shape.
STEP = (9, 61)
PARAMETER_SHAPES = ((), STEP[-1:], (STEP[0], 1), STEP)

# Ops with one, two and three operands. Arithmetic has the same bits on every device.
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "relu": torch.relu,
    "square": torch.square,
    "double": lambda a: a * 2.0,
    "third": lambda a: a / 3.0,
    "from one": lambda a: 1.0 - a,
    "clamp": lambda a: a.clamp(-0.75, 0.5),
    "detached": lambda a: a.detach() + a,
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda a, b: a / (1.0 + b.abs()),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "lerp": lambda a, b: a + (b - a) * 0.25,
}
# Functions that are not continuous. Kernels and the loop have to compute equal bits of their arguments.
DISCONTINUOUS: dict[str, Callable[..., Tensor]] = {
    "spike": lambda a: hard_spike(a - 0.25),
    "greater": lambda a, b: (a > b).to(a.dtype),
    "where": lambda a, b, c: torch.where(a >= 0.1, b, c),
    "masked": lambda a, b: (a * b).masked_fill(b < 0.0, 0.5),
}
# Functions whose rounding differs between implementations.
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": lambda a: torch.exp(-a.abs()),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "log1p": lambda a: torch.log1p(a.abs()),
    "sin": torch.sin,
    "sqrt": lambda a: torch.sqrt(1.0 + a * a),
}
ARITHMETIC: dict[str, Callable[..., Tensor]] = {**UNARY, **BINARY, **DISCONTINUOUS}
SMOOTH: dict[str, Callable[..., Tensor]] = {**UNARY, **BINARY, **FUNCTIONS}
OPERANDS = {
    **dict.fromkeys((*UNARY, *FUNCTIONS, "spike"), 1),
    **dict.fromkeys((*BINARY, "greater", "masked"), 2),
    "where": 3,
}


def bound(a: Tensor) -> Tensor:
    """Maps values to the interval (-1, 1), so that states stay small over time."""
    return a / (1.0 + a.abs())


@dataclass(frozen=True)
class Recipe:
    """A step function as a sequence of ops. Each op reads values from a list and adds its result to the list. At first,
    the list contains the inputs, the states and the parameters.

    Attributes:
        lines: name of each op, and the positions of its operands.
        outputs, new_states: positions of the returned values.
        parameters: shapes of the captured tensors.
    """

    num_inputs: int
    lines: tuple[tuple[str, tuple[int, ...]], ...]
    outputs: tuple[int, ...]
    new_states: tuple[int, ...]
    parameters: tuple[tuple[int, ...], ...]

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.num_inputs, len(self.new_states), len(self.outputs)

    def core(self, captured: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        ops = {**ARITHMETIC, **SMOOTH}

        def step(*arguments: Tensor) -> tuple[Tensor, ...]:
            values = [*arguments, *captured]
            for name, operands in self.lines:
                values.append(ops[name](*(values[i] for i in operands)))
            # If a result is an argument, the argument is returned unchanged.
            returned = (*self.outputs, *self.new_states)
            return tuple(values[i] if i < len(arguments) else bound(values[i]) for i in returned)

        return step


@st.composite
def recipes(draw: st.DrawFn, ops: Sequence[str]) -> Recipe:
    num_inputs, num_states = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    parameters = tuple(draw(st.lists(st.sampled_from(PARAMETER_SHAPES), max_size=2)))
    # For each value, True if it has the shape of the step. All returned values must have this shape.
    is_full = [True] * (num_inputs + num_states) + [shape == STEP for shape in parameters]
    lines = []
    for _ in range(draw(st.integers(1, 8))):
        name = draw(st.sampled_from(ops))
        operands = tuple(draw(st.integers(0, len(is_full) - 1)) for _ in range(OPERANDS[name]))
        lines.append((name, operands))
        is_full.append(any(is_full[i] for i in operands))
    # Later values depend on more lines. They come first, because hypothesis draws the first elements more often.
    returnable = [i for i, has_step_shape in enumerate(is_full) if has_step_shape]
    position = st.sampled_from(returnable[::-1])
    outputs = tuple(draw(st.lists(position, min_size=1, max_size=2)))
    return Recipe(num_inputs, tuple(lines), outputs, tuple(draw(position) for _ in range(num_states)), parameters)


def make_leaf(shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return values.to(device=device, dtype=dtype).requires_grad_()


def assert_equal_to_the_loop(
    recipe: Recipe,
    steps: int,
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    residuals: str = "auto",
    on_cpu: TargetName = "triton",
    forward: float = 0.0,
    gradient: float | None,
) -> None:
    """Compares results with the tolerance `forward`, and gradients with the tolerance `gradient`. If `gradient` is
    `None`, gradients are not compared.
    """
    draw_leaf = partial(make_leaf, dtype=dtype, device=device)
    num_inputs, num_states, _ = recipe.counts
    inputs = [draw_leaf((steps, *STEP), seed=i) for i in range(num_inputs)]
    states = [draw_leaf(STEP, seed=10 + i) for i in range(num_states)]
    captured = [draw_leaf(shape, seed=20 + i) for i, shape in enumerate(recipe.parameters)]
    core = recipe.core(captured)
    program = ScanProgram(core, *recipe.counts, residuals=residuals, on_cpu=on_cpu)
    actual = scan(*prepare(program, (*inputs, *states)), state_seqs=True)
    expected = eager_scan(core, *recipe.counts, *inputs, *states)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=forward, atol=forward)
    pairs = [(a, b) for a, b in zip(actual, expected, strict=True) if b.requires_grad]
    if gradient is None or not pairs:
        return
    leaves = [*inputs, *states, *captured]
    weights = [make_leaf(tuple(b.shape), 30 + i, dtype, device).detach() for i, (_, b) in enumerate(pairs)]
    gradients = torch.autograd.grad([a for a, _ in pairs], leaves, weights, allow_unused=True)
    expected_gradients = torch.autograd.grad([b for _, b in pairs], leaves, weights, allow_unused=True)
    for value, a, b in zip(leaves, gradients, expected_gradients, strict=True):
        reference = torch.zeros_like(value) if b is None else b
        # Large terms may cancel, so the tolerance is relative to the largest element.
        scale = max(1.0, float(reference.abs().max()))
        torch.testing.assert_close(
            torch.zeros_like(value) if a is None else a, reference, rtol=gradient, atol=gradient * scale
        )


# All runs of the tests draw the same examples.
random_cores = partial(
    settings,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
# The lengths are near multiples of 4 and 8 steps, which are the chunks in the interpreter.
num_steps = st.sampled_from([1, 3, 7, 8, 9, 11, 14])
policies = st.sampled_from(["recompute", "save"])


# benchmarks/random_gradients.py runs thousands of examples.
examples = pytest.mark.parametrize("examples", [6, pytest.param(15, marks=pytest.mark.long)])


@examples
def test_float32_arithmetic_is_bitwise_equal(interpreted: None, examples: int) -> None:
    @random_cores(max_examples=examples)
    @given(recipes(list(ARITHMETIC)), num_steps, policies)
    def check(recipe: Recipe, steps: int, residuals: str) -> None:
        assert_equal_to_the_loop(recipe, steps, torch.float32, residuals=residuals, gradient=1e-4)

    check()


@examples
def test_half_precision_arithmetic_is_bitwise_equal(interpreted: None, examples: int) -> None:
    @random_cores(max_examples=examples)
    @given(recipes(list(ARITHMETIC)), num_steps, st.sampled_from([torch.float16, torch.bfloat16]))
    def check(recipe: Recipe, steps: int, dtype: torch.dtype) -> None:
        assert_equal_to_the_loop(recipe, steps, dtype, gradient=None)

    check()


@examples
def test_float64_functions_equal_the_loop(interpreted: None, examples: int) -> None:
    @random_cores(max_examples=examples)
    @given(recipes(list(SMOOTH)), num_steps, policies)
    def check(recipe: Recipe, steps: int, residuals: str) -> None:
        assert_equal_to_the_loop(recipe, steps, torch.float64, residuals=residuals, forward=1e-12, gradient=1e-10)

    check()


@examples
def test_float32_arithmetic_in_cpp_is_bitwise_equal(compiler: None, examples: int) -> None:
    @random_cores(max_examples=examples)
    @given(recipes(list(ARITHMETIC)), num_steps, policies)
    def check(recipe: Recipe, steps: int, residuals: str) -> None:
        assert_equal_to_the_loop(recipe, steps, torch.float32, residuals=residuals, on_cpu="cpp", gradient=1e-4)

    check()


@pytest.mark.long
@random_cores(max_examples=6)
@given(recipes(list(ARITHMETIC)), num_steps, st.sampled_from([torch.float16, torch.bfloat16]))
def test_half_precision_arithmetic_in_cpp_is_bitwise_equal(
    compiler: None, recipe: Recipe, steps: int, dtype: torch.dtype
) -> None:
    assert_equal_to_the_loop(recipe, steps, dtype, on_cpu="cpp", gradient=None)


@pytest.mark.long
@random_cores(max_examples=12)
@given(recipes(list(SMOOTH)), num_steps, policies)
def test_float64_functions_in_cpp_equal_the_loop(compiler: None, recipe: Recipe, steps: int, residuals: str) -> None:
    assert_equal_to_the_loop(
        recipe, steps, torch.float64, residuals=residuals, on_cpu="cpp", forward=1e-12, gradient=1e-10
    )


@pytest.mark.gpu
@random_cores(max_examples=8)  # each example compiles its own kernels, which takes seconds
@given(recipes(list(ARITHMETIC) + list(FUNCTIONS)), num_steps, policies)
def test_float32_values_are_bitwise_equal_on_the_gpu(recipe: Recipe, steps: int, residuals: str) -> None:
    assert_equal_to_the_loop(recipe, steps, torch.float32, device="cuda", residuals=residuals, gradient=1e-4)


@pytest.mark.gpu
@random_cores(max_examples=5)
@given(recipes(list(ARITHMETIC) + list(FUNCTIONS)), num_steps)
def test_float64_values_equal_the_loop_on_the_gpu(recipe: Recipe, steps: int) -> None:
    assert_equal_to_the_loop(recipe, steps, torch.float64, device="cuda", forward=1e-13, gradient=1e-10)
