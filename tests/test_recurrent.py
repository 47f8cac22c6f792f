"""Cores that mix neurons through matrices: kernels and products, step by step, against the loop."""

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

# The other cells are of the same kinds.
_FIRST = (Adaptive, GatedGRU, Heads, Hidden, LSTM, LearnedDecay, LowRank, Masked, OfInputToo, Readout, Sliced)
cells = pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=[] if cell in _FIRST else pytest.mark.long) for cell in CELLS],
    ids=lambda cell: cell.__name__,
)


def made(
    cell: type[Cell], size: int, matrix: Matrix, dtype: torch.dtype = torch.float32, *, soft: bool = False
) -> Cell:
    return cell(size, matrix, soft=soft).to(DEVICE, dtype)


def sequences(
    core: Cell, num_steps: int, *step: int, dtype: torch.dtype = torch.float32, bits: int = 3
) -> list[Tensor]:
    """Returns inputs `[T, *step]` and initial states `[*step]`, with numbers of few bits."""
    generator = torch.Generator().manual_seed(7)
    scale = 2.0**bits
    shapes = [(num_steps, *step), *[step] * core.num_states]
    return [
        ((torch.randn(shape, generator=generator) * scale).round() / scale).to(DEVICE, dtype).requires_grad_()
        for shape in shapes
    ]


def run(core: Cell, tensors: Sequence[Tensor], target: TargetName | None, *, state_seqs: bool = True) -> list[Tensor]:
    """Runs the loop, or kernels and products."""
    if target is None:
        loop = eager_scan if state_seqs else eager_scan_final_state
        return list(loop(core, 1, core.num_states, 1, *tensors))
    program = ScanProgram(core, 1, core.num_states, 1, on_cpu=target)
    step, arguments = prepare(program, tensors)
    assert isinstance(step, RecurrentSpecialization)
    return list(scan(step, arguments, state_seqs=state_seqs))


def differentiated(
    core: Cell, tensors: Sequence[Tensor], target: TargetName | None, *, state_seqs: bool = True
) -> Results:
    """Returns results, and gradients of tensors and parameters for a loss with different weights of few bits."""
    results = run(core, tensors, target, state_seqs=state_seqs)
    loss = torch.zeros((), device=DEVICE, dtype=torch.float64)
    for i, result in enumerate(results):
        weights = (torch.arange(result.numel(), device=DEVICE) % (5 + i) - 2).reshape(result.shape) / 4
        loss = loss + (result * weights).double().sum()
    wanted = [*tensors, *core.parameters()]
    return results, list(torch.autograd.grad(loss, wanted, allow_unused=True))


# Cells with functions whose last bits differ in eager mode on the CPU.
_ROUNDED = (MinimalGRU, GRU, GatedGRU, LSTM, WideInput)
# Cells with a state that is also an output and is read twice: autograd adds three terms in another order.
_GATED = _ROUNDED  # a state's gradient sums one term per gate, in any order
_THREE_TERMS = (Adaptive, Late, Synaptic, Transposed)


@pytest.mark.long(all_but=["*LowRank*"])
@cells
def test_nothing_differs_where_every_sum_has_one_term(cell: type[Cell]) -> None:
    check_equal(cell, "triton")


@pytest.mark.long(all_but=["*RLIF*"])
@pytest.mark.skipif(DEVICE.type == "cuda", reason="kernels in C++ run on the CPU")
@pytest.mark.parametrize("cell", [RLIF, LearnedDecay], ids=lambda cell: cell.__name__)
def test_nothing_differs_in_cpp(cell: type[Cell]) -> None:
    check_equal(cell, "cpp")


@pytest.mark.long
@pytest.mark.skipif(DEVICE.type == "cuda", reason="kernels in C++ run on the CPU")
@cells
def test_nothing_differs_in_cpp_of_any_cell(cell: type[Cell]) -> None:
    check_equal(cell, "cpp")


def check_equal(cell: type[Cell], target: TargetName) -> None:
    core = made(cell, 9, Powers())
    tensors = sequences(core, 5, 61, 9)
    # Without state sequences, whose gradients would be further terms.
    expected, expected_gradients = differentiated(core, tensors, None, state_seqs=False)
    got, gradients = differentiated(core, tensors, target, state_seqs=False)
    exact = DEVICE.type == "cuda" or cell not in _ROUNDED
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
        assert torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    for i, (grad, wanted) in enumerate(zip(gradients, expected_gradients, strict=True)):
        assert grad is not None
        assert wanted is not None
        assert grad.dtype == wanted.dtype
        if i < len(tensors) and exact and cell not in (*_THREE_TERMS, *_GATED):
            assert torch.equal(grad, wanted), i
        else:
            torch.testing.assert_close(grad, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.long(all_but=["*RLIF*"])
@pytest.mark.parametrize("cell", [RLIF, Masked, Hidden], ids=lambda cell: cell.__name__)
def test_spikes_with_dense_matrices_of_few_bits(cell: type[Cell]) -> None:
    """Checks that spikes and states equal the loop's, since all sums are exact in any order."""
    core = made(cell, 37, Dense(bits=3))
    tensors = sequences(core, 5, 17, 37)
    with torch.no_grad():
        for a, b in zip(run(core, tensors, "triton"), run(core, tensors, None), strict=True):
            assert torch.equal(a, b)


@pytest.mark.long(all_but=["*LSTM*"])
@cells
def test_gradients_in_float64(cell: type[Cell]) -> None:
    """Checks gradients of inputs, initial states and captured tensors with dense matrices: within 1e-10 of the loop."""
    core = made(cell, 6, Dense(), torch.float64, soft=True)
    tensors = sequences(core, 3, 5, 6, dtype=torch.float64)
    expected, expected_gradients = differentiated(core, tensors, None)
    got, gradients = differentiated(core, tensors, "triton")
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    for grad, wanted in zip(gradients, expected_gradients, strict=True):
        assert grad is not None
        assert wanted is not None
        torch.testing.assert_close(grad, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("cell", [Adaptive, pytest.param(GatedGRU, marks=pytest.mark.long)], ids=str)
def test_gradcheck(cell: type[Cell]) -> None:
    core = made(cell, 2, Dense(), torch.float64, soft=True)
    tensors = sequences(core, 2, 2, 2, dtype=torch.float64)
    program = ScanProgram(core, 1, core.num_states, 1)
    parameters = list(core.parameters())

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        step, arguments = prepare(program, values[: len(tensors)])
        return scan(step, arguments, state_seqs=True)

    assert torch.autograd.gradcheck(function, (*tensors, *parameters))


@pytest.mark.long
def test_gradients_in_any_combination() -> None:
    core = made(OfInputToo, 5, Powers())
    tensors = sequences(core, 3, 4, 5)
    everything = [*tensors, *core.parameters()]
    for number in range(1, 2 ** len(everything)):
        if number not in (0b1, 0b110, 0b1000, 0b10100, 0b101101):
            continue
        for i, tensor in enumerate(everything):
            tensor.requires_grad_(bool(number >> i & 1))
        wanted = [t for t in everything if t.requires_grad]
        found = []
        for target in BOTH:
            outputs = run(core, tensors, target)
            loss = sum((r * (i + 1)).sum() for i, r in enumerate(outputs) if r.requires_grad)
            assert isinstance(loss, Tensor)
            found.append(torch.autograd.grad(loss, wanted, allow_unused=True))
        for a, b in zip(*found, strict=True):
            assert a is not None
            assert b is not None
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.long(all_but=["*bfloat16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    core = made(Biased, 9, Powers(), dtype)
    tensors = sequences(core, 4, 11, 9, dtype=dtype, bits=2)
    expected, expected_gradients = differentiated(core, tensors, None)
    got, gradients = differentiated(core, tensors, "triton")
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == dtype
        assert torch.equal(a, b)
    for grad, wanted in zip(gradients, expected_gradients, strict=True):
        assert grad is not None
        assert wanted is not None
        assert grad.dtype == dtype
        torch.testing.assert_close(grad.float(), wanted.float(), rtol=0.05, atol=0.05)


def test_autocast_reaches_the_products() -> None:
    core = made(RLIF, 9, Powers())
    tensors = sequences(core, 4, 11, 9)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        expected, expected_gradients = differentiated(core, tensors, None)
        got, gradients = differentiated(core, tensors, "triton")
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    for grad, wanted in zip(gradients, expected_gradients, strict=True):
        assert grad is not None
        assert wanted is not None
        assert grad.dtype == wanted.dtype
        torch.testing.assert_close(grad, wanted, rtol=0.03, atol=0.03)


@pytest.mark.long(all_but=["step2"])
@pytest.mark.parametrize("step", [(1, 1), (9,), (2, 3, 9), (0, 9)])
def test_steps_of_other_shapes(step: tuple[int, ...]) -> None:
    core = made(Biased, step[-1], Powers())
    tensors = sequences(core, 3, *step)
    expected, expected_gradients = differentiated(core, tensors, None)
    got, gradients = differentiated(core, tensors, "triton")
    for a, b in zip([*got, *gradients], [*expected, *expected_gradients], strict=True):
        assert a is not None
        assert b is not None
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.long(all_but=["1"])
@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_few_steps(num_steps: int) -> None:
    core = made(RLIF, 9, Powers())
    x, s, v = sequences(core, num_steps, 4, 9)
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
    step, arguments = prepare(program, (x,))  # states of zero
    zero = torch.zeros(4, 9, device=DEVICE)
    if num_steps:
        expected = eager_scan(core, 1, 2, 1, x, zero, zero)
        for a, b in zip(scan(step, arguments, state_seqs=True), expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.long
def test_inputs_in_any_memory_format() -> None:
    core = made(RLIF, 9, Powers())
    x, s, v = (t.detach() for t in sequences(core, 4, 6, 9))
    batch_first = x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    one_for_all = x[:, :1].clone().requires_grad_()
    for given in (batch_first, one_for_all, x[:1].expand(4, 6, 9).requires_grad_()):
        expected, expected_gradients = differentiated(core, [given, s.requires_grad_(), v.requires_grad_()], None)
        got, gradients = differentiated(core, [given, s, v], "triton")
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)
        for grad, wanted in zip(gradients, expected_gradients, strict=True):
            assert grad is not None
            assert wanted is not None
            assert grad.shape == wanted.shape
            torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_sizes_compile_nothing_again() -> None:
    core = made(RLIF, 8, Powers())
    program = ScanProgram(core, 1, 2, 1)
    names = set()
    for num_steps, batch in ((3, 4), (5, 6), (4, 8)):
        x, *_ = sequences(core, num_steps, batch, 8)
        step, arguments = prepare(program, (x,))
        scan(step, arguments, state_seqs=False)[0].sum().backward()
        names |= set(step.kernel_names)
    assert len(names) == 2  # of the forward and the backward


def test_matrices_are_read_anew() -> None:
    core = made(RLIF, 5, Powers())
    program = ScanProgram(core, 1, 2, 1)
    x, s, v = sequences(core, 3, 4, 5)
    for scale in (1.0, 0.5):
        with torch.no_grad():
            core.v.mul_(scale)
        step, arguments = prepare(program, (x, s, v))
        for a, b in zip(scan(step, arguments, state_seqs=True), run(core, (x, s, v), None), strict=True):
            assert torch.equal(a, b)


@pytest.mark.long(all_but=["Masked"])
@pytest.mark.parametrize("cell", [RLIF, OfInputToo, Masked, Heads], ids=lambda cell: cell.__name__)
def test_parameters_are_replaced_between_calls_that_want_other_gradients(cell: type[Cell]) -> None:
    """Tests replaced parameters, as by `load_state_dict(assign=True)`: gradients flow to the new parameters."""
    core = made(cell, 6, Powers(), soft=True)
    program = ScanProgram(core, 1, core.num_states, 1)
    tensors = sequences(core, 3, 4, 6)
    for number in (0b1, 0b10, 0b100, 0b111):
        for module in core.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, torch.nn.Parameter(parameter.detach() * 0.75))
        tensors[0].requires_grad_(bool(number & 1))
        for parameter in core.parameters():
            parameter.requires_grad_(bool(number & 2))
        tensors[1].requires_grad_(bool(number & 4))
        wanted = [t for t in (*tensors[:2], *core.parameters()) if t.requires_grad]
        step, arguments = prepare(program, tensors)
        both = scan(step, arguments, state_seqs=True)[0], run(core, tensors, None)[0]
        torch.testing.assert_close(*both)
        found = [torch.autograd.grad(outputs.square().sum(), wanted, allow_unused=True) for outputs in both]
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)


def test_results_are_nobody_elses() -> None:
    """Checks that in-place changes of results do not affect the backward."""
    core = made(RLIF, 5, Powers())
    tensors = sequences(core, 3, 4, 5)
    found = []
    for target in BOTH:
        outputs = run(core, tensors, target)
        loss = outputs[0].sum()
        with torch.no_grad():
            for result in outputs:
                result.zero_()
        found.append(torch.autograd.grad(loss, tensors))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_no_gradient_comes_to_the_last_state() -> None:
    """Checks that no gradient is passed: a zero would be multiplied by the infinite derivative of a root at zero."""

    class Root(Cell):
        num_states = 1

        def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            q = F.linear(v, self.v) + x
            return q, q.abs().sqrt()

    core = made(Root, 4, Powers())
    x = torch.zeros(3, 2, 4, device=DEVICE)
    x[:-1] = 1.0
    v = torch.ones(2, 4, device=DEVICE)
    with torch.no_grad():
        for one in x[:-1]:
            v = core(one, v)[1]
        x[-1] = -F.linear(v, core.v)
    given = [x.requires_grad_(), torch.ones(2, 4, device=DEVICE, requires_grad=True)]
    found = []
    for target in BOTH:
        spikes, _ = run(core, given, target, state_seqs=False)
        found.append(torch.autograd.grad(spikes.sum(), [*given, core.v]))
    for a, b in zip(*found, strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a, b)


def test_double_backward_is_refused() -> None:
    core = made(RLIF, 5, Powers())
    tensors = sequences(core, 2, 4, 5)
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
def test_refusals(name: str) -> None:
    core, words = REFUSED[name]
    with pytest.raises(NotImplementedError, match=words) as caught:
        ScanProgram(core, 1, 1, 1).specialize_examples((torch.zeros(4, 4, device=DEVICE),) * 2)
    assert "test_recurrent.py" in str(caught.value)


@pytest.mark.long(all_but=["0"])
@pytest.mark.parametrize("seed", range(2))
def test_random_cores(seed: int) -> None:
    core = RandomCell(5, Dense(), soft=True, seed=seed).to(DEVICE, torch.float64)
    tensors = sequences(core, 3, 4, 5, dtype=torch.float64)
    expected, expected_gradients = differentiated(core, tensors, None)
    got, gradients = differentiated(core, tensors, "triton")
    for a, b in zip([*got, *gradients], [*expected, *expected_gradients], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 60))
def test_more_random_cores(seed: int) -> None:
    test_random_cores(seed)


@pytest.mark.long
def test_a_thousand_steps() -> None:
    core = made(RLIF, 7, Powers())
    tensors = sequences(core, 1000, 3, 7)
    expected, expected_gradients = differentiated(core, tensors, None, state_seqs=False)
    got, gradients = differentiated(core, tensors, TARGETS[-1], state_seqs=False)
    for a, b in zip([*got, *gradients[:3]], [*expected, *expected_gradients[:3]], strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)
