"""Scans as compiled loops, whose steps run Inductor's code in shared memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hop_alone import no_kernels  # noqa: F401  a fixture
from scan_steps import RECURRENCES, looped, loss, parameters_of, recurrence
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from flexsn_hop import _torch_private, flex_sn_scan, scan
from flexsn_hop.errors import LoweringError
from flexsn_hop.lowering import _compiled_loop, _opaque, _step_graphs

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

Step = Callable[[Any, Any], tuple[Any, Any]]


@pytest.fixture(autouse=True)
def compiled_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allows only the compiled loop."""
    torch._dynamo.reset()
    monkeypatch.setenv("FLEXSN_HOP_LOWERING", "compiled_loop")


@pytest.fixture
def layouts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Records the layouts of steps. Their graphs are not compiled, because Inductor needs seconds for each step."""
    recorded: list[Any] = []

    def compile_step(module: Any, sequences: Any, rows: Any, *_: Any) -> Callable[[list[Any]], None]:
        def layout(sequences: Sequence[Tensor], rows: Sequence[Tensor]) -> Any:
            ends = [(sequence.shape[1:], sequence.stride()) for sequence in sequences]
            return [*ends, *((row.shape, row.stride()) for row in rows)]

        recorded.append(layout(sequences, rows))
        expected = recorded[-1]

        def run(args: list[Any]) -> None:
            number, *tensors = args
            assert all(0 <= number < sequence.shape[0] for sequence in tensors[: len(sequences)])
            assert layout(tensors[: len(sequences)], tensors[len(sequences) :]) == expected
            module(*args)

        return run

    monkeypatch.setattr(_step_graphs, "compile_step", compile_step)
    _opaque._decode.cache_clear()
    yield recorded
    _opaque._decode.cache_clear()


def differentiate(run: Callable[..., Any], step: Any, init: Any, xs: Any, options: dict[str, Any]) -> Any:
    """Returns results, and gradients of all floating-point leaves and of the step's parameters."""
    init, xs = tree_map(lambda t: t.detach().requires_grad_(t.is_floating_point()) if t is not None else t, (init, xs))
    leaves = [t for t in tree_leaves((init, xs)) if t is not None and t.requires_grad] + parameters_of(step)
    results = run(step, init, xs, **options)
    return results, torch.autograd.grad(loss(results), leaves, allow_unused=True)


def run_compiled(step: Any, init: Any, xs: Any, **options: Any) -> Any:
    return torch.compile(lambda init, xs: scan(step, init, xs, **options), fullgraph=True)(init, xs)


def assert_equal_to_loop(step: Any, init: Any, xs: Any, **options: Any) -> None:
    expected, expected_grads = differentiate(looped, step, init, xs, options)
    results, gradients = differentiate(run_compiled, step, init, xs, options)
    torch.testing.assert_close(results, expected)
    torch.testing.assert_close(gradients, expected_grads)


@pytest.mark.long(all_but=["minimal_gru"])
@pytest.mark.parametrize("name", RECURRENCES)
def test_recurrences_equal_the_loop(name: str) -> None:
    case = recurrence(name, 7)
    assert_equal_to_loop(case.step, case.init, case.xs, **case.options)


@pytest.mark.long(all_but=["minimal_gru-1", "kalman-9", "map-2"])
@pytest.mark.usefixtures("layouts")
@pytest.mark.parametrize("steps", [1, 2, 9])
@pytest.mark.parametrize("name", RECURRENCES)
def test_recurrences_as_graphs_equal_the_loop(name: str, steps: int) -> None:
    case = recurrence(name, steps)
    assert_equal_to_loop(case.step, case.init, case.xs, **case.options)


def delay(carry: Any, x: Tensor) -> Any:
    """Delays by three states, of which only the last has a gradient at the end."""
    first, second, third = carry
    return (x, first, second), third.sqrt()


def exchange(carry: Any, x: Tensor) -> Any:
    first, second = carry
    return (second * x, first), None


def through(carry: Any, x: Tensor) -> Any:
    return carry, carry * x


def constant(carry: Tensor, x: Tensor) -> Any:
    return torch.full_like(carry, 0.5), carry * x


@pytest.mark.long(all_but=["True-delay", "False-exchange"])
@pytest.mark.usefixtures("layouts")
@pytest.mark.parametrize("step", [delay, exchange, through, constant], ids=lambda step: step.__name__)
@pytest.mark.parametrize("through_results", [True, False])
def test_absent_gradients_equal_those_of_the_loop(step: Step, through_results: bool) -> None:
    """Tests absent gradients. Zeros instead of them would be multiplied by infinite derivatives."""
    number = {"delay": 3, "exchange": 2}.get(step.__name__, 0)
    leaves = [torch.rand(4, dtype=torch.float64, requires_grad=True) for _ in range(max(1, number))]
    with torch.no_grad():
        leaves[-1][0] = 0
    init = tuple(leaves) if number else leaves[0]
    xs = torch.rand(6, 4, dtype=torch.float64, requires_grad=True)

    def objective(run: Callable[..., Any], init: Any, xs: Tensor) -> Tensor:
        carry, ys = run(step, init, xs)
        return (tree_leaves(carry)[0] if through_results or ys is None else ys[-1]).sum()  # type: ignore[no-any-return]

    def train(first: Tensor) -> Any:
        return torch.autograd.grad(first, [*leaves, xs], allow_unused=True) if first.requires_grad else None

    expected = train(objective(looped, init, xs))
    actual = train(torch.compile(objective, fullgraph=True)(scan, init, xs))
    assert (actual is None) == (expected is None)
    for ours, theirs in zip(actual or (), expected or (), strict=True):
        torch.testing.assert_close(ours if ours is not None else theirs, theirs if theirs is not None else ours)


def test_all_lengths_share_compiled_code(layouts: list[Any]) -> None:
    """Checks that compiled code does not depend on the number of steps, for any position of the time dimension."""
    weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        _, ys = scan(lambda h, x: ((h @ weight).tanh() + x, h), x[:, 0], x, dim=1)
        return ys

    network = torch.compile(run, fullgraph=True, dynamic=True)
    for steps in (4, 11, 400):
        x = torch.randn(2, steps, 3, dtype=torch.float64, requires_grad=True)
        network(x).sum().backward()
        assert len(layouts) <= 2


@pytest.mark.long(all_but=["None"])
@pytest.mark.usefixtures("layouts")
@pytest.mark.parametrize("remat", [None, 1, 3, 7])
def test_blocks_and_segments_need_not_be_multiples(remat: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests blocks and segments whose lengths are not multiples of each other."""
    monkeypatch.setattr(_compiled_loop, "BLOCK", 4)
    case = recurrence("minimal_gru", 19)
    expected, expected_grads = differentiate(looped, case.step, case.init, case.xs, case.options)
    results, gradients = differentiate(run_compiled, case.step, case.init, case.xs, {**case.options, "remat": remat})
    torch.testing.assert_close(results, expected)
    torch.testing.assert_close(gradients, expected_grads)


def test_states_of_several_formats_equal_the_loop(layouts: list[Any]) -> None:
    """Tests state sequences, channels-last, 0-d and integer states, and a core that uses sizes."""

    def core(x: Tensor, v: Tensor, count: Tensor, scale: Tensor) -> Any:
        v = v * scale + x.mean(-1, keepdim=True) * x.shape[0]
        return v.sum(1), v, count + 1, scale * 0.9

    arguments = [
        torch.randn(5, 2, 3, 4, 4).to(memory_format=torch.channels_last_3d).double(),
        torch.randn(2, 3, 4, 4).double(),
        torch.tensor(0),
        torch.tensor(0.5, dtype=torch.float64),
    ]
    for argument in arguments:
        argument.requires_grad_(argument.is_floating_point())
    leaves = [argument for argument in arguments if argument.requires_grad]

    def train(*args: Tensor) -> Any:
        results = flex_sn_scan(core, 1, 3, 1, *args)
        return results, sum(r.square().sum() for r in results if r.is_floating_point())

    expected, total = train(*arguments)
    expected_grads = torch.autograd.grad(total, leaves)
    results, total = torch.compile(train, fullgraph=True, dynamic=True)(*arguments)
    gradients = torch.autograd.grad(total, leaves)
    torch.testing.assert_close(results, expected)
    torch.testing.assert_close(gradients, expected_grads)
    assert [r.stride() for r in results] == [r.stride() for r in expected]
    assert [g.stride() for g in gradients] == [g.stride() for g in expected_grads]


def fail(*_: Any) -> Any:
    raise RuntimeError("no C++ compiler")


def test_steps_that_cannot_be_compiled_run_as_operators(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_step_graphs, "compile_step", fail)
    _opaque._decode.cache_clear()
    _opaque._log_once.cache_clear()
    init, xs = torch.zeros(3), torch.randn(5, 3)

    def run(init: Tensor, xs: Tensor) -> Any:
        return scan(lambda h, x: (h * 0.75 + x, h), init, xs)

    with pytest.raises(LoweringError, match=r"'compiled_loop' is not available.*RuntimeError: no C.. compiler"):
        torch.compile(run, fullgraph=True)(init, xs)
    torch._dynamo.reset()
    monkeypatch.setenv("FLEXSN_HOP_LOWERING", "auto")
    with caplog.at_level(logging.WARNING, "flexsn_hop"):
        results = torch.compile(run, fullgraph=True)(init, xs)
    torch.testing.assert_close(results, run(init, xs))
    assert sum("operator by operator" in message and "no C++ compiler" in message for message in caplog.messages) == 1
    _opaque._decode.cache_clear()


@pytest.mark.usefixtures("layouts")
def test_tensors_without_elements_equal_the_loop() -> None:
    assert_equal_to_loop(lambda h, x: (h + x, h), torch.zeros(0, dtype=torch.float64), torch.zeros(5, 0).double())


def test_number_of_the_row_is_an_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests lengths of up to more than one block. Inductor's code for each direction uses the row as an offset."""
    compiles: list[Any] = []

    def compile_step(*args: Any) -> Any:
        compiles.append(args)
        return _torch_private.compile_step(*args)

    monkeypatch.setattr(_step_graphs, "compile_step", compile_step)

    def step(carry: Tensor, x: Any) -> Any:
        carry = torch.tanh(0.5 * carry + x[0] * x[1])
        return carry, carry.sum(-1) + x[1].sum()

    network = torch.compile(lambda *args: scan(step, *args), fullgraph=True, dynamic=True)
    for steps in (2, 3, 2 * _step_graphs.BLOCK + 5):
        xs = [torch.randn(steps, 2, 3, dtype=torch.float64), torch.randn(steps, 3, dtype=torch.float64)]
        leaves = [torch.randn(2, 3, dtype=torch.float64), *xs]
        for leaf in leaves:
            leaf.requires_grad_()
        for _ in range(2):
            expected, results = looped(step, leaves[0], xs), network(leaves[0], xs)
            torch.testing.assert_close(results, expected)
            gradients = torch.autograd.grad(loss(results), leaves)
            torch.testing.assert_close(gradients, torch.autograd.grad(loss(expected), leaves))
    assert len(compiles) == 2


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "diagonal": lambda x: x.diagonal(),
    "another diagonal": lambda x: x.diagonal(1),
    "as_strided": lambda x: x.as_strided((2, 2), (3, 2)),
    "of a part": lambda x: x[1:].diagonal(),
    "row": lambda x: x[1],
    "window": lambda x: x.unfold(0, 2, 1),
}


@pytest.mark.long(all_but=["diagonal", "as_strided"])
@pytest.mark.usefixtures("layouts")
@pytest.mark.parametrize("name", PARTS)
def test_gradients_of_parts_equal_the_loop(name: str) -> None:
    """Tests gradients of parts. Inductor allocates zeros for such a gradient, and then writes the part into them."""
    part = PARTS[name]
    assert_equal_to_loop(
        lambda h, x: (torch.tanh(h), part(x) + 0.0), torch.rand(2).double(), torch.rand(4, 3, 3).double()
    )


def _masked_after_index(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    v = torch.zeros(3, 2, dtype=x.dtype)
    v[INDEX] = x
    v[v > 0.1] = 0.3
    return 0.5 * carry + torch.tanh(v), v.sum(0)


def _rows_masked_after_index(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    v = carry.index_put((INDEX,), x, accumulate=True)
    v[v[:, 0] > 0.1] = 0.3
    return torch.sin(v), v.cumsum(0)


def _added_by_mask(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    v = carry.index_put((INDEX,), x)
    v = v.index_put((v > 0.1,), torch.tensor([0.3], dtype=x.dtype), accumulate=True)
    return torch.sin(v), v * x


INDEX = torch.tensor([2, 0, 1])


@pytest.mark.long(all_but=["_masked_after_index"])
@pytest.mark.parametrize("step", [_masked_after_index, _rows_masked_after_index, _added_by_mask])
def test_masks_after_index_tensors_equal_eager_mode(step: Step) -> None:
    # Inductor of torch 2.11 and 2.13 has wrong results for such an assignment by a mask.
    x = torch.randn(5, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    init = torch.full((3, 2), 0.2, dtype=torch.float64, requires_grad=True)

    def run(init: Tensor, x: Tensor) -> list[Tensor]:
        return tree_leaves(scan(step, init, x))

    for _ in range(2):
        actual, expected = torch.compile(run, fullgraph=True)(init, x), run(init, x)
        torch.testing.assert_close(actual, expected)
        gradients = [torch.autograd.grad(loss(results), [init, x]) for results in (actual, expected)]
        torch.testing.assert_close(*gradients)
