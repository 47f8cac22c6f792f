"""Recurrent steps in one launch, compared with the loop. Results are bitwise equal if every sum has only one term."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from recurrent_cores import (
    CELLS,
    GRU,
    LSTM,
    RLIF,
    Cell,
    Dense,
    GatedGRU,
    Hidden,
    LearnedDecay,
    LowRank,
    OfMembrane,
    Powers,
    Sliced,
)
from test_recurrent import BOTH, DEVICE, differentiate, make_core, make_sequences, run
from torch import Tensor

from flexsn_codegen.recurrent import Loop, NotOneLaunchError
from flexsn_codegen.targets.triton._recurrent import Tiles
from flexsn_runtime import RecurrentSpecialization, ScanProgram, prepare, scan
from flexsn_runtime.launches._cluster_launch import LaunchedClusters
from flexsn_runtime.launches._cooperative_launch import MARKS, CooperativeKernel, CooperativeLaunch
from flexsn_runtime.recurrent import _one_launch, _staged, _tiles
from flexsn_runtime.recurrent._over_time import OverTime

gpu = pytest.mark.gpu


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that records, for each loop over several steps, `"one launch"` or the reason why there is no
    single launch.
    """
    descriptions: list[str] = []
    original = _one_launch.run_in_one_launch

    def record(step: RecurrentSpecialization, over: OverTime) -> str:
        try:
            return original(step, over)
        except NotOneLaunchError as error:
            if str(error) != "there is only one step":
                descriptions.append(str(error))
            raise

    def record_launches(launch: Any) -> Any:  # a repeated call launches the kernel directly
        def run(*arguments: Any) -> None:
            launch(*arguments)
            descriptions.append("one launch")

        return run

    monkeypatch.setenv("FLEXSN_LAUNCHER", "python")
    monkeypatch.setattr(_staged, "run_in_one_launch", record)
    for kind in (CooperativeLaunch, LaunchedClusters):
        monkeypatch.setattr(kind, "__call__", record_launches(kind.__call__))
    return descriptions


SetExchange = Callable[[bool], None]


@pytest.fixture
def set_exchange(monkeypatch: pytest.MonkeyPatch) -> SetExchange:
    """Returns a function that selects one of two kinds of tiles. With True, programs exchange the values of shared
    rows. With False, each program has all columns of its rows.
    """

    def choose(is_exchanged: bool) -> None:
        monkeypatch.setenv("FLEXSN_CLUSTERS", "0")
        if DEVICE.type == "cuda":
            monkeypatch.setattr(_tiles, "held_tiles", (lambda *_, **__: None) if is_exchanged else held_tiles)
            return
        tiles = Tiles(16 if is_exchanged else 8, 1, 32, 4, ahead=2, exchanged=is_exchanged)
        monkeypatch.setattr(_one_launch, "tiles_for", lambda *_, **__: iter([tiles]))

    held_tiles = _tiles.held_tiles
    return choose


def check(cell: type[Cell], num_steps: int, batch: int, size: int, dtype: torch.dtype) -> None:
    """Checks that results, and gradients of inputs and initial states, equal the loop."""
    core = make_core(cell, size, Powers(), dtype)
    tensors = make_sequences(core, num_steps, batch, size, dtype=dtype)
    expected, expected_gradients = differentiate(core, tensors, None, state_seqs=False)
    actual, gradients = differentiate(core, tensors, "triton", state_seqs=False)
    count = len(tensors)
    for a, b in zip([*actual, *gradients[:count]], [*expected, *expected_gradients[:count]], strict=True):
        assert a is not None
        assert b is not None
        # Kernels split a float32 value into bfloat16 parts. If the value is very small, its last part is too small for
        # bfloat16.
        tiny = b.abs() < 1e-30
        assert torch.equal(a.masked_fill(tiny, 0.0), b.masked_fill(tiny, 0.0))
        assert ((a - b).abs().double() < 1e-36).all()


@pytest.mark.long(all_but=["RLIF-4-3-20-dtype1"])
@pytest.mark.parametrize(
    ("cell", "num_steps", "batch", "size", "dtype"),
    [
        (RLIF, 3, 17, 37, torch.float32),
        (RLIF, 4, 3, 20, torch.bfloat16),
        (LowRank, 3, 5, 19, torch.float16),
        pytest.param(Hidden, 2, 33, 18, torch.float32, marks=pytest.mark.long),
    ],
)
def test_one_launch_equals_the_loop(
    cell: type[Cell], num_steps: int, batch: int, size: int, dtype: torch.dtype, launches: list[str]
) -> None:
    check(cell, num_steps, batch, size, dtype)
    assert launches == ["one launch"] * 2


# -- programs that have all columns -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "num_steps", "batch", "size", "dtype"),
    [
        (RLIF, 3, 17, 37, torch.float32),
        pytest.param(RLIF, 4, 3, 20, torch.bfloat16, marks=pytest.mark.long),
        (LowRank, 3, 5, 19, torch.float16),
    ],
)
def test_one_launch_without_exchange_equals_the_loop(
    cell: type[Cell],
    num_steps: int,
    batch: int,
    size: int,
    dtype: torch.dtype,
    set_exchange: SetExchange,
    launches: list[str],
) -> None:
    set_exchange(False)
    check(cell, num_steps, batch, size, dtype)
    assert launches == ["one launch"] * 2


_ALWAYS_TESTED = (LSTM, GatedGRU, Sliced)


@pytest.mark.long(all_but=["GatedGRU", "Sliced"])
@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=[] if cell in _ALWAYS_TESTED else pytest.mark.long) for cell in CELLS],
    ids=lambda cell: cell.__name__,
)
def test_exchange_does_not_change_results(cell: type[Cell], set_exchange: SetExchange) -> None:
    """Compares launches with and without exchange, for cells with gates, slices of a value, and successive products.
    Each sum has only one term.
    """
    actual = []
    for is_exchanged in (True, False):
        set_exchange(is_exchanged)
        core = make_core(cell, 9, Powers())
        results, gradients = differentiate(core, make_sequences(core, 3, 11, 9), "triton", state_seqs=False)
        actual.append([*results, *gradients])
    for a, b in zip(*actual, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


@pytest.mark.parametrize("is_exchanged", [True, False], ids=["exchanged", "held"])
def test_nan_in_padding_does_not_spread(is_exchanged: bool, set_exchange: SetExchange, launches: list[str]) -> None:
    class Ratio(Cell):
        """A step that computes 0 / 0 in the padding, which contains zeros."""

        num_states = 1

        def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            v = (v @ self.v + 1) / x
            return v, v

    set_exchange(is_exchanged)
    core = make_core(Ratio, 9, Powers())
    x, v = (torch.full_like(t, 2.0) for t in make_sequences(core, 4, 5, 9))
    with torch.no_grad():
        actual, expected = (run(core, (x, v), target) for target in ("triton", None))
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)
    assert launches == ["one launch"]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the tiles of this test only run in the interpreter")
@pytest.mark.parametrize(
    ("size", "batch", "dtype", "expected"),
    [
        (64, 9, torch.float32, (8, 4)),
        (128, 9, torch.bfloat16, (8, 8)),
        (128, 16, torch.float32, (8, 8)),
        (128, 17, torch.float32, (8, 4)),
        (129, 9, torch.float32, None),
    ],
)
def test_matrices_that_fit_are_kept_in_registers(
    size: int, batch: int, dtype: torch.dtype, expected: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the rows and warps that are chosen for a device with two multiprocessors."""
    choices: list[Tiles | None] = []

    def record(loop: Loop, device: torch.device, *, from_zero: bool) -> Iterator[Tiles]:
        choices.append(_tiles.held_tiles(loop, 2, from_zero=from_zero))
        return iter([Tiles(16, 1, 32, 4, ahead=2)])

    monkeypatch.setattr(_one_launch, "tiles_for", record)
    core = make_core(RLIF, size, Powers(), dtype)
    with torch.no_grad():
        run(core, make_sequences(core, 2, batch, size, dtype=dtype), "triton", state_seqs=False)
    (tiles,) = choices
    assert (tiles and (tiles.rows, tiles.num_warps)) == expected


def test_explain_describes_programs_with_all_columns(set_exchange: SetExchange) -> None:
    set_exchange(False)
    core = make_core(RLIF, 20, Powers())
    tensors = make_sequences(core, 3, 17, 20)
    step, arguments = prepare(ScanProgram(core, 1, 2, 1), tensors)
    assert isinstance(step, RecurrentSpecialization)
    scan(step, arguments, state_seqs=False)
    assert step.loops.descriptions["forward"] == (
        "one launch for all steps, of 3 programs of 8 rows x 32 columns, which keep the whole matrices and exchange "
        "nothing"
    )


# -- the end of a sequence, and precision ------------------------------------------------------------------------


@pytest.mark.long(all_but=["LearnedDecay"])
@pytest.mark.parametrize("cell", [RLIF, OfMembrane, LearnedDecay, Hidden], ids=lambda cell: cell.__name__)
def test_last_states_may_have_no_gradients(cell: type[Cell], launches: list[str]) -> None:
    results = differentiate_outputs(make_core(cell, 20, Powers()), 4, 5, 20)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(*(gradients[: 1 + cell.num_states] for gradients in results), strict=True):
        assert torch.equal(a, b)
    assert launches == ["one launch"] * 2


def test_product_of_absent_gradients_is_absent(launches: list[str]) -> None:
    """Checks that products of absent gradients are not computed. Zeros for these gradients would be multiplied by an
    infinite state, and the product would be NaN.
    """

    class Late(Cell):
        num_states = 1

        def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            return v, x + v @ self.v

    results = differentiate_outputs(make_core(Late, 20, Powers()), 4, 5, 20, last=float("inf"))
    for a, b in zip(*results, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b)
    assert launches == ["one launch"] * 2


def differentiate_outputs(core: Cell, num_steps: int, *step: int, last: float = 0.0) -> list[tuple[Tensor, ...]]:
    """Returns the gradients of a loss that only reads the outputs, in the loop and in kernels.

    Args:
        last: value that is added to the input of the second-to-last step.
    """
    tensors = make_sequences(core, num_steps, *step)
    with torch.no_grad():
        tensors[0][-2] += last
    results = []
    for target in BOTH:
        output = run(core, tensors, target, state_seqs=False)[0]
        weights = (torch.arange(output.numel(), device=DEVICE) % 5 - 2.0).reshape(output.shape) / 4
        results.append(torch.autograd.grad(output, [*tensors, *core.parameters()], weights))
    return results


def test_float32_products_are_exact_to_24_bits(launches: list[str]) -> None:
    """Checks products of operands with 24 significant bits and different magnitudes. Their errors must not exceed twice
    the errors of a library's product.
    """
    core = make_core(GRU, 21, Dense())
    x, h = make_sequences(core, 3, 6, 21, bits=20)
    with torch.no_grad():
        core.v.mul_(torch.logspace(-3, 1, core.v.numel(), device=DEVICE).reshape(core.v.shape))
        actual = run(core, (x, h), "triton")
        loop = run(core, (x, h), None)
        exact = run(core.double(), (x.double(), h.double()), None)
    assert launches == ["one launch"]
    for a, b, c in zip(actual, loop, exact, strict=True):
        assert (a - c).abs().max() <= 2 * (b - c).abs().max() + 1e-6


@pytest.mark.parametrize(("precision", "bits"), [("high", 14), ("medium", 6)])
def test_float32_follows_the_precision_setting(precision: str, bits: int, launches: list[str]) -> None:
    check_bits(21, precision, bits)
    assert launches == ["one launch"]


def check_bits(size: int, precision: str, bits: int) -> None:
    """Checks that products agree with float64 in `bits` bits, but not in `bits + 7` bits."""
    core = make_core(GRU, size, Dense())
    tensors = [t.detach() for t in make_sequences(core, 3, 6, size, bits=20)]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with torch.no_grad():
            actual = run(core, tensors, "triton", state_seqs=False)
            exact = run(core.double(), [t.double() for t in tensors], None, state_seqs=False)
    finally:
        torch.set_float32_matmul_precision(before)
    error = max(float((a - c).abs().max() / c.abs().max()) for a, c in zip(actual, exact, strict=True))
    assert 2.0 ** -(bits + 7) < error < 2.0**-bits


def test_padding_is_less_than_a_chunk() -> None:
    tiles = Tiles(16, 64, 128, 4, ahead=1)
    assert tiles.chunks(3 * 1024) == [128] * 24
    assert tiles.chunks(1100) == [128] * 9
    assert tiles.chunks(100) == [128]
    assert tiles.chunks(3) == [16]


def test_smaller_tiles_are_tried_if_the_first_do_not_fit(monkeypatch: pytest.MonkeyPatch, launches: list[str]) -> None:
    tried: list[Tiles] = []

    def try_two_tiles(*_: object, **__: object) -> Iterator[Tiles]:
        for chunk in (32, 16):
            tried.append(Tiles(16, 1, chunk, 4, ahead=1))
            yield tried[-1]

    class Crowded(CooperativeKernel):
        """A kernel without space for the first tiles."""

        def _count_resident(self, tensors: Sequence[Tensor], numbers: Sequence[int]) -> int:
            return int(tried[-1].chunk == 16)

    monkeypatch.setattr(_one_launch, "tiles_for", try_two_tiles)
    monkeypatch.setattr(_one_launch, "CooperativeKernel", Crowded)
    check(RLIF, 3, 5, 37, torch.float32)
    assert launches == ["one launch"] * 2
    assert [tiles.chunk for tiles in tried] == [32, 16] * 2


def test_infinity_and_nan_propagate(launches: list[str]) -> None:
    core = make_core(LSTM, 9, Powers())
    x, h, c = (t.detach() for t in make_sequences(core, 3, 4, 9))
    x[1, 0, 0], x[1, 1, 3] = float("nan"), float("inf")
    for a, b in zip(run(core, (x, h, c), "triton"), run(core, (x, h, c), None), strict=True):
        assert torch.equal(a.isnan(), b.isnan())
    assert launches == ["one launch"]


def test_largest_values_stay_finite() -> None:
    """Checks that a float32 value is not rounded up when it is split into parts, because it would become infinite."""

    class Accumulator(Cell):
        num_states = 1

        def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            v = v @ self.v + x
            return v, v

    core = make_core(Accumulator, 3, lambda rows, columns: torch.eye(rows, columns))
    x = torch.zeros(3, 2, 3, device=DEVICE)
    x[0] = torch.finfo(torch.float32).max
    with torch.no_grad():
        output, _ = run(core, (x, torch.zeros(2, 3, device=DEVICE)), "triton", state_seqs=False)
    assert torch.equal(output, x[:1].expand_as(x))


def test_explain_names_the_obstacle_to_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(RLIF, 9, Powers())
    x, s, v = make_sequences(core, 3, 4, 9)
    step, arguments = prepare(ScanProgram(core, 1, 2, 1), (x, s, v))
    assert isinstance(step, RecurrentSpecialization)
    first = scan(step, arguments, state_seqs=False)
    assert step.loops.descriptions["forward"].startswith("one launch")
    monkeypatch.setenv("FLEXSN_ONE_LAUNCH", "0")
    for a, b in zip(scan(step, arguments, state_seqs=False), first, strict=True):
        assert torch.equal(a, b)
    assert step.loops.descriptions["forward"] == "launches step by step, because FLEXSN_ONE_LAUNCH is 0"


# -- many programs on a GPU, which wait for each other -----------------------------------------------------------


@gpu
@pytest.mark.parametrize(
    ("batch", "size"), [(1, 1), (1, 250), (37, 1), (37, 33), (37, 128), (37, 250), (37, 512), (300, 33), (300, 512)]
)
@pytest.mark.parametrize("is_exchanged", [True, False], ids=["exchanged", "held"])
def test_many_programs_equal_the_loop(
    size: int, batch: int, is_exchanged: bool, set_exchange: SetExchange, launches: list[str]
) -> None:
    set_exchange(is_exchanged)
    for dtype in (torch.float32, torch.bfloat16):
        check(RLIF, 20, batch, size, dtype)
    assert launches == ["one launch"] * 4


@gpu
@pytest.mark.parametrize("is_exchanged", [True, False], ids=["exchanged", "held"])
def test_rows_may_exceed_the_programs_that_fit_at_once(
    is_exchanged: bool, set_exchange: SetExchange, launches: list[str]
) -> None:
    set_exchange(is_exchanged)
    check(RLIF, 10, 9000, 200, torch.bfloat16)
    assert launches == ["one launch"] * 2


@gpu
@pytest.mark.parametrize("num_steps", [2, 3, 1000])
@pytest.mark.parametrize("is_exchanged", [True, False], ids=["exchanged", "held"])
def test_any_number_of_steps_equals_the_loop(
    num_steps: int, is_exchanged: bool, set_exchange: SetExchange, launches: list[str]
) -> None:
    set_exchange(is_exchanged)
    check(RLIF, num_steps, 40, 96, torch.float32)
    assert launches == ["one launch"] * 2


def check_on_two_streams(size: int, dtype: torch.dtype) -> None:
    """Checks 10 000 launches that alternate between two streams. Some of their results are compared with the loop."""
    core = make_core(RLIF, size, Powers(), dtype)
    x, s, v = (t.detach() for t in make_sequences(core, 3, 64, size, dtype=dtype))
    expected = run(core, (x, s, v), None)
    step, arguments = prepare(ScanProgram(core, 1, 2, 1), (x, s, v))  # the step is traced on the current stream
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    difference_counts = torch.zeros(2, device="cuda")
    with torch.no_grad():
        for i in range(10_000):
            with torch.cuda.stream(streams[i % 2]):
                results = scan(step, arguments, state_seqs=True)
                if i % 100 < 2:
                    for a, b in zip(results, expected, strict=True):
                        difference_counts[i % 2] += (a != b).sum()
    torch.cuda.synchronize()
    assert difference_counts.tolist() == [0, 0]


@gpu
def test_launches_may_alternate_between_two_streams(set_exchange: SetExchange, launches: list[str]) -> None:
    set_exchange(True)
    check_on_two_streams(128, torch.bfloat16)
    assert launches == ["one launch"] * 10_000


@gpu
@pytest.mark.parametrize("size", [64, 200])
def test_repeated_calls_are_bitwise_equal(size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        core = make_core(LSTM, size, Dense(), dtype)
        tensors = make_sequences(core, 50, 70, size, dtype=dtype, bits=10)
        first = differentiate(core, tensors, "triton", state_seqs=False)
        for _ in range(3):
            repeated = differentiate(core, tensors, "triton", state_seqs=False)
            for a, b in zip([*first[0], *first[1]], [*repeated[0], *repeated[1]], strict=True):
                assert a is not None
                assert b is not None
                assert torch.equal(a, b)


@gpu
def test_waiting_programs_give_up(monkeypatch: pytest.MonkeyPatch, set_exchange: SetExchange) -> None:
    """Runs a launch in which one program is missing, and checks that the results are NaN and the next call raises an
    error.
    """
    set_exchange(True)
    from flexsn_runtime.errors import GaveUpError
    from flexsn_runtime.launches._cooperative_launch import CooperativeLaunch

    core = make_core(RLIF, 128, Powers())
    x, s, v = (t.detach() for t in make_sequences(core, 3, 16, 128))
    with torch.no_grad():
        expected = run(core, (x, s, v), "triton")
        call_kernel = CooperativeLaunch.__call__

        def launch_without_one_program(self: CooperativeLaunch, tensors: list[Tensor], programs: int) -> None:
            call_kernel(self, tensors, programs - 1)

        with monkeypatch.context() as patch:
            patch.setattr(CooperativeLaunch, "__call__", launch_without_one_program)
            results = run(core, (x, s, v), "triton")
            torch.cuda.synchronize()
        assert all(result[..., :16].isnan().all() for result in results)
        with pytest.raises(GaveUpError):
            run(core, (x, s, v), "triton")
        for a, b in zip(run(core, (x, s, v), "triton"), expected, strict=True):
            assert torch.equal(a, b)
    MARKS.check(torch.device(DEVICE.type, torch.cuda.current_device()))


@gpu
@pytest.mark.parametrize("is_exchanged", [True, False], ids=["exchanged", "held"])
def test_cuda_graph_replays_one_launch(is_exchanged: bool, set_exchange: SetExchange) -> None:
    set_exchange(is_exchanged)
    core = make_core(RLIF, 128, Powers())
    x, s, v = (t.detach() for t in make_sequences(core, 5, 33, 128))
    program = ScanProgram(core, 1, 2, 1)
    step, arguments = prepare(program, (x, s, v))
    with torch.no_grad():
        scan(step, arguments, state_seqs=False)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = scan(step, arguments, state_seqs=False)
        x.copy_(x.flip(0))
        graph.replay()
        expected = run(core, (x, s, v), None, state_seqs=False)
    for a, b in zip(results, expected, strict=True):
        assert torch.equal(a, b)
