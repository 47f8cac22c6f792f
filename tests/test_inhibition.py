"""Steps that reduce values over the neurons of a row. Kernels and a library's reductions are compared with the loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from inhibiting_cores import CELLS, Divided, ExciteInhibit, First, Lateral, Normed, Soft, Winner
from recurrent_cores import Cell, Dense
from test_recurrent import DEVICE, TARGETS, differentiate, make_core, make_sequences, run
from torch import Tensor

from flexsn_nn import FlexSN
from flexsn_runtime import RecurrentSpecialization, ScanProgram, TargetName, prepare, scan

cells = pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.__name__)


def check(core: Cell, tensors: list[Tensor], target: TargetName, *, rtol: float = 1e-10, atol: float = 1e-10) -> None:
    expected, expected_gradients = differentiate(core, tensors, None)
    actual, gradients = differentiate(core, tensors, target)
    for a, b in zip([*actual, *gradients], [*expected, *expected_gradients], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


@pytest.mark.long(
    all_but=[f"{cell}-{TARGETS[-1]}" for cell in ("Lateral", "Least", "Soft", "Divided", "Deviating", "Ahead")]
    + ["Normed-triton", "Winner-triton", "First-triton"]
)
@pytest.mark.parametrize("target", TARGETS)
@cells
def test_results_and_gradients_equal_the_loop(cell: type[Cell], target: TargetName) -> None:
    core = make_core(cell, 9, Dense(), torch.float64, soft=True)
    tensors = make_sequences(core, 5, 61, 9, dtype=torch.float64)
    check(core, tensors, target)


@pytest.mark.long(all_but=["Winner-(9, 9)"])
@pytest.mark.parametrize("step", [(9, 9), (1, 6), (7,), (3, 2, 5), (4, 1)], ids=str)
@pytest.mark.parametrize("cell", [Divided, Winner], ids=lambda cell: cell.__name__)
def test_steps_may_have_other_shapes(cell: type[Cell], step: tuple[int, ...]) -> None:
    if cell is Divided and step[-1] == 1:
        step = (4, 2)  # a reduction over one element is not traced as a sum
    core = make_core(cell, step[-1], Dense(), torch.float64, soft=True)
    check(core, make_sequences(core, 3, *step, dtype=torch.float64), TARGETS[-1])


@pytest.mark.long(all_but=["*Winner*"])
@pytest.mark.parametrize("cell", [Soft, Winner], ids=lambda cell: cell.__name__)
def test_gradients_equal_finite_differences(cell: type[Cell]) -> None:
    core = make_core(cell, 4, Dense(), torch.float64, soft=True)
    generator = torch.Generator().manual_seed(3)
    shapes = [(3, 2, 4), (2, 4), (2, 4)]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).to(DEVICE).requires_grad_() for s in shapes]
    if cell is Winner:  # the choice of a winner has no gradient, but the maximum has one
        core.forward = lambda x, s, v: ((x + v).amax(-1, keepdim=True) * s, x + s / 2, v - x.amin(-1, keepdim=True))
    assert torch.autograd.gradcheck(lambda *t: tuple(run(core, t, TARGETS[-1])), tensors)


@pytest.mark.parametrize("cell", [Winner, First], ids=lambda cell: cell.__name__)
def test_gradients_of_equal_maxima_equal_the_loop(cell: type[Cell]) -> None:
    """Checks the gradients of equal maxima. Equal maxima share the gradient. If the step also uses the position of the
    maximum, the first maximum receives the whole gradient.
    """
    core = make_core(cell, 8, Dense())
    tensors = [torch.ones_like(t).requires_grad_() for t in make_sequences(core, 4, 6, 8)]
    with torch.no_grad():
        tensors[0][:, :, :4] += 1
    expected, expected_gradients = differentiate(core, tensors, None)
    actual, gradients = differentiate(core, tensors, TARGETS[-1])
    for a, b in zip([*actual, *gradients], [*expected, *expected_gradients], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_exact_sums_are_bitwise_equal() -> None:
    core = make_core(Lateral, 8, Dense())
    tensors = make_sequences(core, 3, 67, 8, bits=2)
    for target in TARGETS:
        for a, b in zip(run(core, tensors, target), run(core, tensors, None), strict=True):
            assert torch.equal(a, b)


@pytest.mark.long(all_but=["*bfloat16*"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_equals_the_loop(dtype: torch.dtype) -> None:
    core = make_core(Soft, 9, Dense(), dtype)
    check(core, make_sequences(core, 3, 7, 9, dtype=dtype, bits=2), TARGETS[-1], rtol=2e-2, atol=2e-2)


REFUSED = {
    "over the batch": (lambda x, v: (v, x - v.mean(0, keepdim=True)), "aten.mean.dim reduces dimensions \\[0\\]"),
    "over everything": (lambda x, v: (v, x - v.sum()), "aten.sum.default reduces dimensions \\[0, 1\\]"),
    "over the batch, after a row": (lambda x, v: (v, x.softmax(-1) - v.amax(0)), "aten.amax.default reduces"),
    "sort": (lambda x, v: (v, x.sort(-1).values), "aten.sort"),
    "topk": (lambda x, v: (v, x.topk(4, -1).values), "aten.topk"),
    "cumsum": (lambda x, v: (v, x.cumsum(-1)), "aten.cumsum"),
    "sort after a row": (lambda x, v: (v, x.softmax(-1).sort(-1).values), "aten.sort"),
    "position of all": (lambda x, v: (v, x * x.argmax()), "aten.argmax"),
    "position over the batch": (lambda x, v: (v, x - x.max(0, keepdim=True).values), "aten.amax.default reduces"),
    "value at a position": (lambda x, v: (v, x.gather(-1, v.argmax(-1, keepdim=True)) + v), "aten.gather"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_name_unsupported_operations(name: str) -> None:
    core, words = REFUSED[name]
    with pytest.raises(NotImplementedError, match=words) as caught:
        ScanProgram(core, 1, 1, 1).specialize_examples((torch.zeros(4, 4, device=DEVICE),) * 2)
    assert "test_inhibition.py" in str(caught.value)


ONE_LAUNCH_EACH = ("one launch for all steps", "one launch for all steps")


def check_launches(core: Cell, tensors: list[Tensor], bound: float = 1e-5) -> list[str]:
    """Checks the results and gradients of kernels. Returns the descriptions of the forward's and the backward's
    launches.
    """
    program = ScanProgram(core, 1, core.num_states, 1, on_cpu="triton")
    step, arguments = prepare(program, tensors)
    assert isinstance(step, RecurrentSpecialization)
    actual = []
    for results in (scan(step, arguments, state_seqs=False), run(core, tensors, None, state_seqs=False)):
        leaves = [tensors[0], *core.parameters()]
        actual.append([*results, *torch.autograd.grad(results[0].sum() + results[1].sum() + results[2].sum(), leaves)])
    for result, expected in zip(*actual, strict=True):
        torch.testing.assert_close(result, expected, rtol=bound, atol=bound)
    return [step.loops.descriptions[direction] for direction in ("forward", "backward")]


@pytest.mark.long(all_but=["Winner"])
@pytest.mark.parametrize("cell", [Winner, ExciteInhibit], ids=lambda cell: cell.__name__)
def test_programs_with_whole_rows_exchange_nothing(cell: type[Cell]) -> None:
    descriptions = check_launches(
        make_core(cell, 9, Dense(), soft=True), make_sequences(make_core(cell, 9, Dense()), 3, 11, 9)
    )
    assert tuple(description.split(",")[0] for description in descriptions) == ONE_LAUNCH_EACH
    assert all(description.endswith("exchange nothing") for description in descriptions)


@pytest.mark.long(all_but=["ExciteInhibit"])
@pytest.mark.parametrize("cell", [Normed, ExciteInhibit], ids=lambda cell: cell.__name__)
def test_programs_with_shared_rows_exchange_values(cell: type[Cell]) -> None:
    """Checks matrices that are too large for one program, so several programs share a row."""
    core = make_core(cell, 210, Dense(), soft=True)
    descriptions = check_launches(core, make_sequences(core, 3, 19, 210), 1e-4)
    assert tuple(description.split(",")[0] for description in descriptions) == ONE_LAUNCH_EACH
    assert all("values a step" in description for description in descriptions)


@pytest.mark.gpu
@pytest.mark.parametrize("neurons", [210, 512])
@pytest.mark.parametrize("cell", [Normed, ExciteInhibit], ids=lambda cell: cell.__name__)
def test_programs_with_shared_rows_exchange_values_on_a_gpu(cell: type[Cell], neurons: int) -> None:
    core = make_core(cell, neurons, Dense(), soft=True)
    descriptions = check_launches(core, make_sequences(core, 7, 131, neurons), 1e-3)
    assert tuple(description.split(",")[0] for description in descriptions) == ONE_LAUNCH_EACH
    assert all("values a step" in description for description in descriptions)


class _Inhibited(torch.nn.Module):
    """A membrane that the mean of its row inhibits. The output is a softmax over the row."""

    def __init__(self) -> None:
        super().__init__()
        self.strength = torch.nn.Parameter(torch.tensor(0.25))

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = 0.5 * v + x - self.strength * x.mean(-1, keepdim=True)
        return torch.softmax(h, -1), h


def _differentiate_call(neuron: FlexSN, run: Callable[..., Tensor], x: Tensor, **options: Tensor) -> list[Tensor]:
    neuron.reset()
    y = run(x, **options)
    return [y.detach(), *torch.autograd.grad((y * x.detach()).sum(), [x, *neuron.parameters()])]


def test_reductions_work_with_lengths_resets_graphs_and_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks reductions over rows with lengths and resets, in compiled graphs, and in exported programs."""
    core = _Inhibited().double()
    loop, kernels = FlexSN(core, 1, 1, 1, backend="torch"), FlexSN(core, 1, 1, 1, backend="cpp")
    x = torch.randn(6, 37, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    lengths = torch.arange(37) % 7
    resets = torch.rand(6, 37, generator=torch.Generator().manual_seed(1)) < 0.3
    for options in ({}, {"lengths": lengths}, {"resets": resets}):
        expected = _differentiate_call(loop, loop, x, **options)
        torch.testing.assert_close(
            _differentiate_call(kernels, kernels, x, **options), expected, rtol=1e-10, atol=1e-10
        )
    expected = _differentiate_call(loop, loop, x)
    monkeypatch.setenv("FLEXSN_HOP_LOWERING", "kernel")
    graph = FlexSN(core, 1, 1, 1, backend="hop")
    compiled = torch.compile(graph, fullgraph=True)
    torch.testing.assert_close(_differentiate_call(graph, compiled, x), expected, rtol=1e-10, atol=1e-10)
    graph.reset()
    program = torch.export.export(graph, (x.detach(),))
    torch.testing.assert_close(program.module()(x.detach()), expected[0], rtol=1e-10, atol=1e-10)
