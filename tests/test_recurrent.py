"""Cores that mix neurons through matrices. Kernels and products run step by step, and the loop is the reference."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from recurrent_cores import (
    CELLS,
    GRU,
    LSTM,
    RLIF,
    Adaptive,
    Biased,
    Cell,
    Dense,
    GatedGRU,
    Heads,
    Hidden,
    Late,
    LearnedDecay,
    LowRank,
    Masked,
    Matrix,
    MinimalGRU,
    OfInputToo,
    Powers,
    RandomCell,
    Readout,
    Sliced,
    Synaptic,
    Transposed,
    WideInput,
)
from torch import Tensor

from flexsn_hop import eager_scan, eager_scan_final_state
from flexsn_runtime import RecurrentSpecialization, ScanProgram, TargetName, prepare, scan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TARGETS: tuple[TargetName, ...] = ("triton",) if DEVICE.type == "cuda" else ("triton", "cpp")
BOTH: tuple[TargetName | None, ...] = (None, "triton")
Results = tuple[list[Tensor], list[Tensor | None]]

# The other cells, which run with `--long`, are similar to these.
_ALWAYS_TESTED = (Adaptive, GatedGRU, Heads, Hidden, LSTM, LearnedDecay, LowRank, Masked, OfInputToo, Readout, Sliced)
cells = pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=[] if cell in _ALWAYS_TESTED else pytest.mark.long) for cell in CELLS],
    ids=lambda cell: cell.__name__,
)


def make_core(
    cell: type[Cell], size: int, matrix: Matrix, dtype: torch.dtype = torch.float32, *, soft: bool = False
) -> Cell:
    return cell(size, matrix, soft=soft).to(DEVICE, dtype)


def make_sequences(
    core: Cell, num_steps: int, *step: int, dtype: torch.dtype = torch.float32, bits: int = 3
) -> list[Tensor]:
    """Returns inputs `[T, *step]` and initial states `[*step]`. Their values are multiples of `2**-bits`."""
    generator = torch.Generator().manual_seed(7)
    scale = 2.0**bits
    shapes = [(num_steps, *step), *[step] * core.num_states]
    return [
        ((torch.randn(shape, generator=generator) * scale).round() / scale).to(DEVICE, dtype).requires_grad_()
        for shape in shapes
    ]


def run(core: Cell, tensors: Sequence[Tensor], target: TargetName | None, *, state_seqs: bool = True) -> list[Tensor]:
    """Returns the results of kernels and products, or of the loop if `target` is `None`."""
    if target is None:
        loop = eager_scan if state_seqs else eager_scan_final_state
        return list(loop(core, 1, core.num_states, 1, *tensors))
    program = ScanProgram(core, 1, core.num_states, 1, on_cpu=target)
    step, arguments = prepare(program, tensors)
    assert isinstance(step, RecurrentSpecialization)
    return list(scan(step, arguments, state_seqs=state_seqs))


def differentiate(
    core: Cell, tensors: Sequence[Tensor], target: TargetName | None, *, state_seqs: bool = True
) -> Results:
    """Returns the results, and the gradients of a loss with respect to tensors and parameters. The elements of the
    results have different weights in the loss, and each weight has few significant bits.
    """
    results = run(core, tensors, target, state_seqs=state_seqs)
    loss = torch.zeros((), device=DEVICE, dtype=torch.float64)
    for i, result in enumerate(results):
        weights = (torch.arange(result.numel(), device=DEVICE) % (5 + i) - 2).reshape(result.shape) / 4
        loss = loss + (result * weights).double().sum()
    leaves = [*tensors, *core.parameters()]
    return results, list(torch.autograd.grad(loss, leaves, allow_unused=True))


# Cells with functions, such as tanh, whose last bits differ between kernels and eager mode on the CPU.
_ROUNDED = (MinimalGRU, GRU, GatedGRU, LSTM, WideInput)
# The gradient of a state of these cells has one term for each gate. Autograd adds the terms in another order.
_GATED = _ROUNDED
# A state of these cells is also an output, and the step reads the state twice. Autograd adds the three terms of its
# gradient in another order.
_THREE_TERMS = (Adaptive, Late, Synaptic, Transposed)


@pytest.mark.long(all_but=["*LowRank*"])
@cells
def test_sums_of_one_term_are_bitwise_equal(cell: type[Cell]) -> None:
    check_equal(cell, "triton")


@pytest.mark.long(all_but=["*RLIF*"])
@pytest.mark.skipif(DEVICE.type == "cuda", reason="kernels in C++ run on the CPU")
@pytest.mark.parametrize("cell", [RLIF, LearnedDecay], ids=lambda cell: cell.__name__)
def test_sums_of_one_term_are_bitwise_equal_in_cpp(cell: type[Cell]) -> None:
    check_equal(cell, "cpp")


@pytest.mark.long
@pytest.mark.skipif(DEVICE.type == "cuda", reason="kernels in C++ run on the CPU")
@cells
def test_all_cells_are_bitwise_equal_in_cpp(cell: type[Cell]) -> None:
    check_equal(cell, "cpp")


def check_equal(cell: type[Cell], target: TargetName) -> None:
    core = make_core(cell, 9, Powers())
    tensors = make_sequences(core, 5, 61, 9)
    # The loss reads no state sequences, because their gradients would be additional terms of sums.
    expected, expected_gradients = differentiate(core, tensors, None, state_seqs=False)
    actual, gradients = differentiate(core, tensors, target, state_seqs=False)
    exact = DEVICE.type == "cuda" or cell not in _ROUNDED
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
        assert torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    for i, (grad, expected_gradient) in enumerate(zip(gradients, expected_gradients, strict=True)):
        assert grad is not None
        assert expected_gradient is not None
        assert grad.dtype == expected_gradient.dtype
        if i < len(tensors) and exact and cell not in (*_THREE_TERMS, *_GATED):
            assert torch.equal(grad, expected_gradient), i
        else:
            torch.testing.assert_close(grad, expected_gradient, rtol=2e-5, atol=2e-5)


@pytest.mark.long(all_but=["*RLIF*"])
@pytest.mark.parametrize("cell", [RLIF, Masked, Hidden], ids=lambda cell: cell.__name__)
def test_exact_sums_are_bitwise_equal(cell: type[Cell]) -> None:
    """Checks that spikes and states equal the loop, because all sums are exact in any order."""
    core = make_core(cell, 37, Dense(bits=3))
    tensors = make_sequences(core, 5, 17, 37)
    with torch.no_grad():
        for a, b in zip(run(core, tensors, "triton"), run(core, tensors, None), strict=True):
            assert torch.equal(a, b)


@pytest.mark.long(all_but=["*LSTM*"])
@cells
def test_float64_gradients_equal_the_loop(cell: type[Cell]) -> None:
    """Checks that, for dense matrices, results and the gradients of inputs, initial states and captured tensors are
    within 1e-10 of the loop.
    """
    core = make_core(cell, 6, Dense(), torch.float64, soft=True)
    tensors = make_sequences(core, 3, 5, 6, dtype=torch.float64)
    expected, expected_gradients = differentiate(core, tensors, None)
    actual, gradients = differentiate(core, tensors, "triton")
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    for grad, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert grad is not None
        assert expected_gradient is not None
        torch.testing.assert_close(grad, expected_gradient, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("cell", [Adaptive, pytest.param(GatedGRU, marks=pytest.mark.long)], ids=str)
def test_gradients_equal_finite_differences(cell: type[Cell]) -> None:
    core = make_core(cell, 2, Dense(), torch.float64, soft=True)
    tensors = make_sequences(core, 2, 2, 2, dtype=torch.float64)
    program = ScanProgram(core, 1, core.num_states, 1)
    parameters = list(core.parameters())

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        step, arguments = prepare(program, values[: len(tensors)])
        return scan(step, arguments, state_seqs=True)

    assert torch.autograd.gradcheck(function, (*tensors, *parameters), fast_mode=True)


@pytest.mark.long
def test_any_tensors_may_require_gradients() -> None:
    core = make_core(OfInputToo, 5, Powers())
    tensors = make_sequences(core, 3, 4, 5)
    candidates = [*tensors, *core.parameters()]
    for mask in range(1, 2 ** len(candidates)):
        if mask not in (0b1, 0b110, 0b1000, 0b10100, 0b101101):
            continue
        for i, tensor in enumerate(candidates):
            tensor.requires_grad_(bool(mask >> i & 1))
        leaves = [t for t in candidates if t.requires_grad]
        results = []
        for target in BOTH:
            outputs = run(core, tensors, target)
            loss = sum((r * (i + 1)).sum() for i, r in enumerate(outputs) if r.requires_grad)
            assert isinstance(loss, Tensor)
            results.append(torch.autograd.grad(loss, leaves, allow_unused=True))
        for a, b in zip(*results, strict=True):
            assert a is not None
            assert b is not None
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.long(all_but=["*bfloat16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_equals_the_loop(dtype: torch.dtype) -> None:
    core = make_core(Biased, 9, Powers(), dtype)
    tensors = make_sequences(core, 4, 11, 9, dtype=dtype, bits=2)
    expected, expected_gradients = differentiate(core, tensors, None)
    actual, gradients = differentiate(core, tensors, "triton")
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == dtype
        assert torch.equal(a, b)
    for grad, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert grad is not None
        assert expected_gradient is not None
        assert grad.dtype == dtype
        torch.testing.assert_close(grad.float(), expected_gradient.float(), rtol=0.05, atol=0.05)


def test_autocast_applies_to_products() -> None:
    core = make_core(RLIF, 9, Powers())
    tensors = make_sequences(core, 4, 11, 9)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        expected, expected_gradients = differentiate(core, tensors, None)
        actual, gradients = differentiate(core, tensors, "triton")
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    for grad, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert grad is not None
        assert expected_gradient is not None
        assert grad.dtype == expected_gradient.dtype
        torch.testing.assert_close(grad, expected_gradient, rtol=0.03, atol=0.03)


@pytest.mark.long(all_but=["step2"])
@pytest.mark.parametrize("step", [(1, 1), (9,), (2, 3, 9), (0, 9)])
def test_steps_may_have_other_shapes(step: tuple[int, ...]) -> None:
    core = make_core(Biased, step[-1], Powers())
    tensors = make_sequences(core, 3, *step)
    expected, expected_gradients = differentiate(core, tensors, None)
    actual, gradients = differentiate(core, tensors, "triton")
    for a, b in zip([*actual, *gradients], [*expected, *expected_gradients], strict=True):
        assert a is not None
        assert b is not None
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.long(all_but=["1"])
@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_sequences_may_have_few_steps(num_steps: int) -> None:
    core = make_core(RLIF, 9, Powers())
    x, s, v = make_sequences(core, num_steps, 4, 9)
    program = ScanProgram(core, 1, 2, 1)
    for state_seqs in (True, False):
        step, arguments = prepare(program, (x, s, v))
        outputs = scan(step, arguments, state_seqs=state_seqs)
        assert outputs[0].shape == (num_steps, 4, 9)
        if num_steps == 0 and not state_seqs:
            assert torch.equal(outputs[1], s)
            assert torch.equal(outputs[2], v)
            (grad,) = torch.autograd.grad(outputs[2].sum(), [v])
            assert torch.equal(grad, torch.ones_like(v))
    step, arguments = prepare(program, (x,))  # the initial states are zero
    zero = torch.zeros(4, 9, device=DEVICE)
    if num_steps:
        expected = eager_scan(core, 1, 2, 1, x, zero, zero)
        for a, b in zip(scan(step, arguments, state_seqs=True), expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.long
def test_inputs_may_have_any_memory_format() -> None:
    core = make_core(RLIF, 9, Powers())
    x, s, v = (t.detach() for t in make_sequences(core, 4, 6, 9))
    batch_first = x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    shared_sample = x[:, :1].clone().requires_grad_()
    for sequence in (batch_first, shared_sample, x[:1].expand(4, 6, 9).requires_grad_()):
        expected, expected_gradients = differentiate(core, [sequence, s.requires_grad_(), v.requires_grad_()], None)
        actual, gradients = differentiate(core, [sequence, s, v], "triton")
        for a, b in zip(actual, expected, strict=True):
            assert torch.equal(a, b)
        for grad, expected_gradient in zip(gradients, expected_gradients, strict=True):
            assert grad is not None
            assert expected_gradient is not None
            assert grad.shape == expected_gradient.shape
            torch.testing.assert_close(grad, expected_gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_new_sizes_compile_nothing() -> None:
    core = make_core(RLIF, 8, Powers())
    program = ScanProgram(core, 1, 2, 1)
    names = set()
    for num_steps, batch in ((3, 4), (5, 6), (4, 8)):
        x, *_ = make_sequences(core, num_steps, batch, 8)
        step, arguments = prepare(program, (x,))
        scan(step, arguments, state_seqs=False)[0].sum().backward()
        names |= set(step.kernel_names)
    assert len(names) == 2  # the names of the forward and of the backward


def test_changed_matrices_are_read() -> None:
    core = make_core(RLIF, 5, Powers())
    program = ScanProgram(core, 1, 2, 1)
    x, s, v = make_sequences(core, 3, 4, 5)
    for scale in (1.0, 0.5):
        with torch.no_grad():
            core.v.mul_(scale)
        step, arguments = prepare(program, (x, s, v))
        for a, b in zip(scan(step, arguments, state_seqs=True), run(core, (x, s, v), None), strict=True):
            assert torch.equal(a, b)


@pytest.mark.long(all_but=["Masked"])
@pytest.mark.parametrize("cell", [RLIF, OfInputToo, Masked, Heads], ids=lambda cell: cell.__name__)
def test_gradients_flow_to_replaced_parameters(cell: type[Cell]) -> None:
    """Checks that gradients flow to the new parameters after parameters are replaced, as `load_state_dict(assign=True)`
    does.
    """
    core = make_core(cell, 6, Powers(), soft=True)
    program = ScanProgram(core, 1, core.num_states, 1)
    tensors = make_sequences(core, 3, 4, 6)
    for mask in (0b1, 0b10, 0b100, 0b111):
        for module in core.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, torch.nn.Parameter(parameter.detach() * 0.75))
        tensors[0].requires_grad_(bool(mask & 1))
        for parameter in core.parameters():
            parameter.requires_grad_(bool(mask & 2))
        tensors[1].requires_grad_(bool(mask & 4))
        leaves = [t for t in (*tensors[:2], *core.parameters()) if t.requires_grad]
        step, arguments = prepare(program, tensors)
        outputs_of_both = scan(step, arguments, state_seqs=True)[0], run(core, tensors, None)[0]
        torch.testing.assert_close(*outputs_of_both)
        gradients = [
            torch.autograd.grad(outputs.square().sum(), leaves, allow_unused=True) for outputs in outputs_of_both
        ]
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b)


def test_results_can_be_changed_in_place() -> None:
    """Checks that in-place changes of the results do not affect the backward."""
    core = make_core(RLIF, 5, Powers())
    tensors = make_sequences(core, 3, 4, 5)
    results = []
    for target in BOTH:
        outputs = run(core, tensors, target)
        loss = outputs[0].sum()
        with torch.no_grad():
            for result in outputs:
                result.zero_()
        results.append(torch.autograd.grad(loss, tensors))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_last_state_receives_no_gradient() -> None:
    """Checks that the last state receives no gradient, instead of a zero gradient. A root at zero would multiply the
    zero by an infinite derivative, and return NaN.
    """

    class Root(Cell):
        num_states = 1

        def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            q = F.linear(v, self.v) + x
            return q, q.abs().sqrt()

    core = make_core(Root, 4, Powers())
    x = torch.zeros(3, 2, 4, device=DEVICE)
    x[:-1] = 1.0
    v = torch.ones(2, 4, device=DEVICE)
    with torch.no_grad():
        for step in x[:-1]:
            v = core(step, v)[1]
        x[-1] = -F.linear(v, core.v)
    arguments = [x.requires_grad_(), torch.ones(2, 4, device=DEVICE, requires_grad=True)]
    results = []
    for target in BOTH:
        spikes, _ = run(core, arguments, target, state_seqs=False)
        results.append(torch.autograd.grad(spikes.sum(), [*arguments, core.v]))
    for a, b in zip(*results, strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a, b)


def test_double_backward_is_refused() -> None:
    core = make_core(RLIF, 5, Powers())
    tensors = make_sequences(core, 2, 4, 5)
    (grad,) = torch.autograd.grad(run(core, tensors, "triton")[0].sum(), tensors[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        grad.sum().backward()


REFUSED = {
    "of_two_values": (lambda x, v: (v, x + v @ (v.t() @ x)), "multiplies two values of the step by each other"),
    "over_the_batch": (lambda x, v: (v, x + torch.ones(4, 4, device=DEVICE) @ v), "that is not the last one"),
    "pooling": (lambda x, v: (v, x + F.avg_pool1d(v[:, None], 3, 1, 1)[:, 0]), "avg_pool"),
    "sum": (lambda x, v: (v, (x + v @ torch.ones(4, 4, device=DEVICE)).sum(0, keepdim=True).expand(4, 4)), "sum"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_name_unsupported_operations(name: str) -> None:
    core, words = REFUSED[name]
    with pytest.raises(NotImplementedError, match=words) as caught:
        ScanProgram(core, 1, 1, 1).specialize_examples((torch.zeros(4, 4, device=DEVICE),) * 2)
    assert "test_recurrent.py" in str(caught.value)


@pytest.mark.long(all_but=["0"])
@pytest.mark.parametrize("seed", range(2))
def test_random_cores_equal_the_loop(seed: int) -> None:
    core = RandomCell(5, Dense(), soft=True, seed=seed).to(DEVICE, torch.float64)
    tensors = make_sequences(core, 3, 4, 5, dtype=torch.float64)
    expected, expected_gradients = differentiate(core, tensors, None)
    actual, gradients = differentiate(core, tensors, "triton")
    for a, b in zip([*actual, *gradients], [*expected, *expected_gradients], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 60))
def test_more_random_cores_equal_the_loop(seed: int) -> None:
    test_random_cores_equal_the_loop(seed)


@pytest.mark.long
def test_a_thousand_steps_equal_the_loop() -> None:
    core = make_core(RLIF, 7, Powers())
    tensors = make_sequences(core, 1000, 3, 7)
    expected, expected_gradients = differentiate(core, tensors, None, state_seqs=False)
    actual, gradients = differentiate(core, tensors, TARGETS[-1], state_seqs=False)
    for a, b in zip([*actual, *gradients[:3]], [*expected, *expected_gradients[:3]], strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)
