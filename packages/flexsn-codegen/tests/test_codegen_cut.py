"""Functions that cut dimensions into pieces and join them, compared with eager mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

from flexsn_codegen import ArgumentError, UnsupportedOpError, pointwise
from flexsn_codegen.functions._kernel import Kernel
from flexsn_codegen.targets.cpp import CPP, why_no_compiler
from flexsn_graph import trace_cells

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark: list[pytest.MarkDecorator] = [] if DEVICE == "cpu" else [pytest.mark.gpu]
Function = Callable[..., Any]


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + len(shape) + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def of_a_part(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat((rotary(x[..., :8], cos, sin), x[..., 8:]), -1)


def lstm(gates: Tensor, bias: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = (gates + bias).chunk(4, 1)
    new = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(new), new


def unequal(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x.split([3, 6], 1)
    return second * y, first - 1.0


def quaternions(p: Tensor, q: Tensor) -> Tensor:
    a, b = p[..., 0], p[..., 1:].unbind(-1)
    c, d = q[..., 0], q[..., 1:].unbind(-1)
    return torch.stack((a * c - b[0] * d[0] - b[1] * d[1] - b[2] * d[2], a * d[0] + b[0] * c, b[1] * c, a * d[2]), -1)


def views(x: Tensor, y: Tensor) -> Tensor:
    heads = x.view(x.shape[0], 3, 2, 4).transpose(1, 2)
    return (heads[:, 0] * y + heads[:, 1].neg()).permute(0, 2, 1)


def in_place(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[..., : x.shape[-1] // 2] = x[..., x.shape[-1] // 2 :] * 2.0
    return out + x


def colours(image: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    r, g, b = image.unbind(-3)
    grey = 0.3 * r + 0.6 * g + 0.1 * b
    return grey * weight, torch.stack((r - grey, g, b), -3)


def looked_up(index: Tensor, table: Tensor, scale: Tensor) -> Tensor:
    return table[index] * scale + functional.embedding(index % 3, table[:6].view(3, 2)).sum(-1)


CASES: dict[str, tuple[Function, list[tuple[int, ...]]]] = {
    "swiglu": (swiglu, [(5, 14)]),
    "glu": (lambda x: functional.glu(x, 1), [(3, 10, 7)]),
    "rotary": (rotary, [(2, 3, 5, 8), (5, 8), (5, 8)]),
    "interleaved": (interleaved, [(2, 5, 3, 8), (5, 1, 4), (5, 1, 4)]),
    "of_a_part": (of_a_part, [(2, 5, 12), (5, 8), (5, 8)]),
    "lstm": (lstm, [(5, 24), (24,), (5, 6)]),
    "unequal": (unequal, [(5, 9), (5, 6)]),
    "quaternions": (quaternions, [(5, 4), (1, 4)]),
    "views": (views, [(5, 24), (3, 4)]),
    "in_place": (in_place, [(5, 6)]),
    "colours": (colours, [(2, 3, 4, 5), (4, 5)]),
    "outer": (lambda x, y: x[:, None] * y, [(5,), (7,)]),
    "two": (lambda q, k, w: (swiglu(q) * w, swiglu(k)), [(2, 3, 8), (2, 5, 8), (4,)]),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[Function, list[tuple[int, ...]]]:
    return CASES[request.param]


def make_tuple(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


@pytest.mark.long(
    all_but=[
        "unequal-float32",
        "rotary-bfloat16",
        "in_place-float32",
        "quaternions-bfloat16",
        "views-bfloat16",
        "lstm-bfloat16",
    ]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_results_and_gradients_equal_eager(case: tuple[Function, list[tuple[int, ...]]], dtype: torch.dtype) -> None:
    function, shapes = case
    tensors = [draw(*s, dtype=dtype, seed=i).requires_grad_() for i, s in enumerate(shapes)]
    fused = pointwise(function, autograd=True)
    expected, actual = make_tuple(function(*tensors)), make_tuple(fused(*tensors))
    weights = [draw(*e.shape, dtype=dtype) for e in expected]
    pairs = [*zip(actual, expected, strict=True)]
    gradients = (torch.autograd.grad(r, tensors, weights) for r in (actual, expected))
    pairs += [*zip(*gradients, strict=True)]
    if dtype == torch.bfloat16:
        # If sums of rounded terms cancel, both results have large errors. So both are compared with float64.
        exact = compute_exactly(function, tensors, weights)
        for (ours, theirs), true in zip(pairs, exact, strict=True):
            room = 0.016 * true.abs() + 1e-5 + 1.5 * (theirs - true).abs().max()
            assert ((ours - true).abs() <= room).all()
        return
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs)


def compute_exactly(function: Function, tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    """Returns results and gradients in float64."""
    wide = [t.detach().double().requires_grad_() for t in tensors]
    results = make_tuple(function(*wide))
    return [*results, *torch.autograd.grad(results, wide, [w.double() for w in weights])]


@pytest.mark.long(all_but=["in_place"])
@pytest.mark.parametrize("name", ["rotary", "lstm", "in_place"])
def test_gradients_pass_gradgradcheck(name: str) -> None:
    function, shapes = CASES[name]
    tensors = [draw(*s, seed=i).requires_grad_() for i, s in enumerate(shapes)]
    fused = pointwise(function, autograd=True)
    torch.autograd.gradcheck(fused, tensors, fast_mode=True)
    torch.autograd.gradgradcheck(fused, tensors, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_small_tables_and_their_gradients_equal_eager_mode(dtype: torch.dtype) -> None:
    index = torch.randint(-8, 8, (5, 7), device=DEVICE)
    table, scale = draw(8, dtype=dtype).requires_grad_(), draw(5, 1, dtype=dtype).requires_grad_()
    expected, actual = (f(index, table, scale) for f in (looked_up, pointwise(looked_up, autograd=True)))
    torch.testing.assert_close(actual, expected)
    weight = draw(5, 7, dtype=dtype)
    pairs = zip(*(torch.autograd.grad(r, [table, scale], weight) for r in (actual, expected)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs)


def test_index_out_of_range_gives_nan() -> None:
    actual = pointwise(lambda i, table: table[i])(torch.tensor([[1, 2, -3]], device=DEVICE), draw(2))
    assert actual.isnan().tolist() == [[False, True, True]]


@pytest.mark.parametrize("right", [False, True])
def test_bucketize_equals_eager_mode(right: bool) -> None:
    x = torch.tensor([-2.0, -1.0, 0.0, 0.5, 3.0, float("inf"), float("nan")], device=DEVICE)
    boundaries = torch.tensor([-1.0, 0.5, 0.5, 3.0], device=DEVICE)

    def search(x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return torch.bucketize(x, b, right=right, out_int32=True), torch.searchsorted(b, x, right=right)

    def constants(x: Tensor) -> Tensor:
        return torch.bucketize(x, torch.tensor([-1.0, 0.5, 0.5, 3.0], device=x.device), right=right)

    for actual, expected in zip(pointwise(search)(x, boundaries), search(x, boundaries), strict=True):
        assert actual.dtype == expected.dtype
        assert actual.tolist() == expected.tolist()
    assert pointwise(constants)(x).tolist() == constants(x).tolist()


def test_arguments_may_be_strided_and_are_not_copied() -> None:
    x, cos, sin = draw(2, 5, 3, 16)[..., ::2].transpose(1, 2), draw(5, 8), draw(8, 5).t()
    assert torch.equal(pointwise(rotary)(x, cos, sin), rotary(x, cos, sin))


def test_one_trace_serves_all_sizes_of_uncut_dimensions() -> None:
    shapes = []

    def record_shape(x: Tensor, bias: Tensor) -> Tensor:
        shapes.append(x.shape)
        return swiglu(x + bias)

    fused = pointwise(record_shape)
    bias = draw(16)
    fused(draw(5, 16), bias)
    num_traces = len(shapes)
    for rows in (1, 2, 300, 0):
        x = draw(rows, 16)
        torch.testing.assert_close(fused(x, bias), swiglu(x + bias))
    assert len([s for s in shapes[num_traces:] if s[0] not in (1,)]) == 0
    torch.testing.assert_close(fused(draw(5, 18), draw(18)), swiglu(draw(5, 18) + draw(18)))


def test_size_that_a_function_reads_is_read_again_for_other_sizes() -> None:
    def mean_of_rows(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return first * second / x.shape[0]

    fused = pointwise(mean_of_rows)
    for rows in (4, 5):
        torch.testing.assert_close(fused(draw(rows, 6)), mean_of_rows(draw(rows, 6)))


def test_kernel_processes_the_elements_of_one_piece() -> None:
    # The step has two operands for each argument, and two stores.
    (step,) = trace_cells(rotary, [torch.empty(s) for s in CASES["rotary"][1]], [False] * 3, "rotary").steps
    assert step.sizes == (2, 3, 5, 4)
    assert [part.tensor for part in step.inputs] == [0, 0, 1, 1, 2, 2]
    assert len(step.outputs) == 2


def moved(x: Tensor) -> Tensor:
    return torch.cat((x, x.t()), 0)


@pytest.mark.parametrize(
    ("function", "shape", "match"),
    [
        (moved, (70, 70), "mixes elements"),
        (lambda x: x[1:] - x[:-1], (1000,), "into 1000 pieces, but at most 64 are possible(.|\n)*test_codegen_cut"),
        (lambda x: x.chunk(2)[0].sum(0), (40, 100), "sum.dim_IntList reduces dimension 0 of 2"),
        (lambda x: x.chunk(2)[0].softmax(0), (40, 100), "_softmax.default reduces dimension 0 of 2"),
        (lambda x: x.cumsum(0)[:2], (4, 100), "cumsum.default does not work element by element"),
    ],
)
def test_functions_that_mix_elements_are_refused(function: Function, shape: tuple[int, ...], match: str) -> None:
    with pytest.raises(UnsupportedOpError, match=match):
        pointwise(function)(draw(*shape))


def test_errors_name_the_callers_shapes() -> None:
    with pytest.raises(ArgumentError, match=r"\[5, 12\], \[5, 7\] do not broadcast") as raised:
        pointwise(lambda x, y: x.chunk(2, -1)[0] * y)(draw(5, 12), draw(5, 7))
    assert "a dimension of length" in str(raised.value.__cause__) or "size of tensor" in str(raised.value.__cause__)
    with pytest.raises(ValueError, match=r"dimension 1 is size 7(.|\n)*test_codegen_cut"):
        pointwise(lambda x: functional.glu(x))(draw(3, 7))
    with pytest.raises(ArgumentError, match=r"\[3\], \[4\] do not broadcast"):
        pointwise(torch.mul)(draw(3), draw(4))


@pytest.mark.skipif(why_no_compiler() is not None or DEVICE != "cpu", reason="needs a C++ compiler")
@pytest.mark.parametrize("name", ["lstm", "interleaved"])
def test_kernels_in_cpp_equal_eager_mode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexsn_codegen.functions._kernel.target_on", lambda device, name: CPP)
    monkeypatch.setattr("flexsn_codegen.functions._kernels.target_on", lambda device, name: CPP)
    function, shapes = CASES[name]
    tensors = [draw(*s, seed=i, dtype=torch.float32) for i, s in enumerate(shapes)]
    for actual, expected in zip(make_tuple(pointwise(function)(*tensors)), make_tuple(function(*tensors)), strict=True):
        torch.testing.assert_close(actual, expected)


def limited(x: Tensor, limit: float = 3.0, beta: float = 1.0) -> Tensor:
    gate, up = x.chunk(2, -1)
    return (functional.silu(gate * beta) * up).clamp(max=limit)


def differentiate(result: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [result, *torch.autograd.grad(result.sum(), tensors)]


def test_numbers_are_arguments_of_kernels_on_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[str] = []
    make_trace = Kernel._make_trace

    def count_trace(kernel: Kernel, *arguments: Any) -> Any:
        traced.append(kernel.name)
        return make_trace(kernel, *arguments)

    monkeypatch.setattr(Kernel, "_make_trace", count_trace)
    fused = pointwise(limited, autograd=True)
    x = draw(5, 14).requires_grad_()
    for limit in (3.0, 0.5, 0.25, 1.5):
        pairs = [differentiate(f(x, limit, beta=limit / 2), [x]) for f in (fused, limited)]
        for a, e in zip(*pairs, strict=True):
            torch.testing.assert_close(a, e)
    assert sorted(traced) == ["limited", "limited_backward"]
    # An integer may determine the cut. With 14 columns, the first pieces for n = 7 and for n = 10 are equal.
    pieces: Any = pointwise(lambda x, n: x.chunk(n, -1)[0] * 2)
    for n in (2, 7, 2):
        assert torch.equal(pieces(x.detach(), n), x.detach().chunk(n, -1)[0] * 2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck copies tensors
def test_compiled_and_transformed_kernels_equal_eager_mode() -> None:
    torch.compiler.reset()
    fused, cell = pointwise(limited, autograd=True), pointwise(lstm, autograd=True)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *a: cell(*a)[0] * 2, backend=counter, fullgraph=True, dynamic=True)
    for rows in (5, 7, 11):
        tensors = [draw(*s).requires_grad_() for s in ((rows, 24), (24,), (rows, 6))]
        both = [differentiate(result, tensors) for result in (compiled(*tensors), lstm(*tensors)[0] * 2)]
        for a, e in zip(*both, strict=True):
            torch.testing.assert_close(a, e)
    assert counter.frame_count == 1
    counter = CompileCounterWithBackend("aot_eager")

    def doubled(x: Tensor, limit: float) -> Any:
        return fused(x * 2, limit, beta=0.5)

    scaled = torch.compile(doubled, backend=counter, fullgraph=True)
    x = draw(5, 14).requires_grad_()
    for limit in (0.5, 0.7, 0.9, 1.1, 1.3):
        both = [differentiate(result, [x]) for result in (scaled(x, limit), limited(x * 2, limit, 0.5))]
        for a, e in zip(*both, strict=True):
            torch.testing.assert_close(a, e)
    assert counter.frame_count == 2

    xs, rows_of = draw(3, 5, 14), torch.func.vmap
    torch.testing.assert_close(rows_of(fused)(xs), rows_of(limited)(xs))
    actual, expected = torch.func.grad(lambda x: fused(x).sum()), torch.func.grad(lambda x: limited(x).sum())
    torch.testing.assert_close(rows_of(actual)(xs), rows_of(expected)(xs))
    gate, bias, state = draw(2, 5, 24), draw(24), draw(5, 2, 6)
    for a, e in zip(*(rows_of(f, in_dims=(0, None, 1))(gate, bias, state) for f in (cell, lstm)), strict=True):
        torch.testing.assert_close(a, e)
    exported = torch.export.export(Limited(fused), (xs[0],))
    torch.testing.assert_close(exported.module()(xs[0]), limited(xs[0], 0.5))
    cut_kernel = fused._kernels.cuts[("call", (("tensor",), ("float",)), ()), ((x.dtype, x.dim()),)]
    torch.library.opcheck(torch.ops.flexsn_codegen.pointwise.default, ([x], [0.5], [False], cut_kernel.key))


class Limited(torch.nn.Module):
    def __init__(self, fused: Any) -> None:
        super().__init__()
        self.fused = fused

    def forward(self, x: Tensor) -> Any:
        return self.fused(x, 0.5)
