"""Recurrent steps in thread-block clusters. The generated source compiles without a GPU. On a GPU, the results equal
those of the plain loop.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from recurrent_cores import (
    CELLS,
    GRU,
    LSTM,
    RLIF,
    SLSTM,
    Adaptive,
    Cell,
    Dense,
    GatedGRU,
    Hidden,
    Late,
    LowRank,
    Masked,
    Powers,
)
from recurrent_processes import count_differences, set_barrier
from test_one_launch import check, check_bits, check_on_two_streams
from test_recurrent import DEVICE, check_equal, differentiate, make_core, make_sequences, run

from flexsn_codegen.recurrent import Loop, NotOneLaunchError, StageCall
from flexsn_codegen.targets.cuda import Cluster, CudaKernel, cluster_source, why_no_nvrtc
from flexsn_codegen.targets.triton._recurrent import Tiles
from flexsn_graph import Port, Role
from flexsn_runtime import RecurrentSpecialization, ScanProgram, prepare, scan
from flexsn_runtime.launches._cluster_launch import LaunchedClusters
from flexsn_runtime.recurrent import _clusters, _one_launch
from flexsn_runtime.recurrent._one_launch import Loops, Memory
from flexsn_runtime.recurrent._over_time import OverTime

gpu = pytest.mark.gpu
HOPPER = (9, 0)
CLUSTERS = (Cluster(2, 1, 1), Cluster(4, 2, 3, held=0, stored=1, compact=True))

# Divisions of a loop among the blocks of a cluster: with one or several warps for a sum; with matrices in registers, in
# shared memory, in neither, or in both; with one or two slots for the values that blocks send.
DIVISIONS = (
    Cluster(2, 1, 1),
    Cluster(4, 2, 2),
    Cluster(8, 4, 1),
    Cluster(16, 1, 4),
    Cluster(8, 2, 3, held=1, stored=1, slots=1, compact=True),
    Cluster(8, 2, 3, held=1),
    Cluster(2, 4, 3, held=0),
    Cluster(4, 1, 2, held=5, slots=1),
    Cluster(4, 4, 1, held=0, compact=True),
    Cluster(4, 2, 1, held=2, stored=0),
)


def list_dtypes(params: tuple[Port, ...], loop: Loop, over: OverTime, memory: Memory) -> list[torch.dtype]:
    """Returns the dtypes of a kernel's tensors."""
    carried = list(loop.carried.values())
    dtypes = []
    for port in params:
        if port in memory.tensors:
            dtypes.append(memory.tensors[port].dtype)
        elif port.role in (Role.STATE, Role.FINAL_STATE):
            dtypes.append(carried[port.index][1])
        elif port.role is Role.MATRIX:
            dtypes.append(memory.matrices[port.index].dtype)
        else:
            assert port.role is Role.LIFTED
            dtypes.append(over.lifted[port.index].dtype)
    return dtypes


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records, for each loop compiled for an H100, ``"forward"``, ``"backward"``, or the reason why it has no
    kernel.
    """
    if why_no_nvrtc() is not None:
        pytest.skip("NVRTC is missing, because torch was built without CUDA")
    directions: list[str] = []
    make_kernel = Loops.kernel

    def compile_kernel(
        self: Loops, step: RecurrentSpecialization, over: OverTime, loop: Loop, memory: Memory, tiles: Tiles
    ) -> Any:
        cores = [step.core_in_cuda(part.stage) if isinstance(part, StageCall) else None for part in loop.parts]
        for cluster in CLUSTERS:
            if cluster.stored is not None and len(loop.exchanges) == 1:
                cluster = dataclasses.replace(cluster, slots=1)
            try:
                written = cluster_source("loop", _one_launch._make_spec(step, over, loop, memory, cores), cluster)
            except NotOneLaunchError as error:
                directions.append(str(error))
                continue
            dtypes = list_dtypes(written.source.params, loop, over, memory)
            assert CudaKernel(written.source).cubin(dtypes, HOPPER)
            directions.append(over.direction)
        return make_kernel(self, step, over, loop, memory, tiles)

    monkeypatch.setattr(Loops, "kernel", compile_kernel)
    return directions


@pytest.mark.skipif(DEVICE.type == "cuda", reason="on a GPU the kernels run")
@pytest.mark.long(all_but=["Late-float32", "GRU-float32", "RLIF-bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "cell", [RLIF, GRU, LSTM, Adaptive, Masked, GatedGRU, Hidden, Late, LowRank, SLSTM], ids=lambda cell: cell.__name__
)
def test_sources_compile_without_a_gpu(
    cell: type[Cell], dtype: torch.dtype, compiled: list[str], interpreted: None
) -> None:
    core = make_core(cell, 37, Powers(), dtype)
    differentiate(core, make_sequences(core, 2, 3, 37, dtype=dtype), "triton", state_seqs=False)
    assert compiled[:2] == ["forward", "forward"]
    assert set(compiled[2:]) <= {"backward"}  # in bfloat16, some backwards take several launches
    assert dtype != torch.float32 or len(compiled) == 4


def test_preferred_division_has_the_fewest_passes(monkeypatch: pytest.MonkeyPatch, interpreted: None) -> None:
    """Checks that the preferred division has the fewest passes. Among divisions with the same number of passes, it
    has the fewest rows and blocks, and two warps for a sum.
    """
    divisions: dict[tuple[str, int], Cluster | None] = {}

    def kernel(
        self: Loops, step: RecurrentSpecialization, over: OverTime, loop: Loop, memory: Memory, tiles: Tiles
    ) -> Any:
        for rows in (128, 600):
            larger_loop = dataclasses.replace(loop, num_rows=rows)
            divisions[over.direction, rows] = next(
                _clusters.clusters_for(larger_loop, 132, from_zero=over.from_zero), None
            )
        raise NotOneLaunchError("this test only lists divisions")

    monkeypatch.setattr(Loops, "kernel", kernel)
    core = make_core(RLIF, 256, Powers(), torch.float32)
    differentiate(core, make_sequences(core, 2, 3, 256, dtype=torch.float32), "triton", state_seqs=False)
    assert divisions == {
        ("forward", 128): Cluster(4, 2, 1),
        ("forward", 600): Cluster(4, 2, 3),
        ("backward", 128): Cluster(4, 2, 1),
        ("backward", 600): Cluster(4, 2, 3),
    }


# -- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.fixture
def descriptions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the direction of each loop that ran in clusters. Loops that fit into one program also run in clusters."""
    texts: list[str] = []
    original = _one_launch.InClusters.run

    launch = LaunchedClusters.__call__
    directions: dict[LaunchedClusters, str] = {}

    def run_and_note(self: Any, over: OverTime) -> str:
        directions[self.kernel.launch(self.tensors(over), self.groups, self.numbers)] = over.direction
        return original(self, over)

    def launch_and_record(
        self: LaunchedClusters, *arguments: Any
    ) -> None:  # repeated calls launch through this method as well
        launch(self, *arguments)
        texts.append(directions[self])

    monkeypatch.setenv("FLEXSN_LAUNCHER", "python")
    monkeypatch.setattr(_one_launch, "held_tiles", lambda *_, **__: None)
    monkeypatch.setattr(_one_launch.InClusters, "run", run_and_note)
    monkeypatch.setattr(LaunchedClusters, "__call__", launch_and_record)
    return texts


@gpu
@pytest.mark.parametrize(("batch", "size"), [(1, 1), (37, 33), (9, 128), (37, 250), (130, 256), (300, 137)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_clusters_equal_the_loop(
    batch: int, size: int, dtype: torch.dtype, descriptions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype != torch.float32:  # in other dtypes, blocks exchange faster through global memory
        divisions = [Cluster(blocks, 1, row_tiles) for row_tiles in (1, 2) for blocks in (4, 8)]
        monkeypatch.setattr(_one_launch, "clusters_for", lambda *_, **__: iter(divisions))
    check(RLIF, 20, batch, size, dtype)
    assert descriptions == ["forward", "backward"]


@gpu
@pytest.mark.parametrize("cluster", DIVISIONS, ids=repr)
def test_divisions_equal_the_loop(cluster: Cluster, descriptions: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_one_launch, "clusters_for", lambda *_, **__: iter([cluster]))
    check(RLIF, 7, 45, 120, torch.float32)
    assert descriptions == ["forward", "backward"]


@gpu
@pytest.mark.parametrize(
    "cluster", [Cluster(4, 2, 3, held=1), Cluster(8, 4, 2, held=0, stored=1, compact=True)], ids=repr
)
@pytest.mark.parametrize("cell", [GRU, LSTM, GatedGRU, Masked, LowRank, Hidden], ids=lambda cell: cell.__name__)
def test_divisions_of_several_matrices_equal_the_loop(
    cell: type[Cell], cluster: Cluster, descriptions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests cores with several matrices, some of which are in shared or global memory. If a step has only one exchange
    and matrices in shared memory, there is one slot for the values that blocks send.
    """

    def list_divisions(loop: Loop, *_: Any, **__: Any) -> Any:
        has_one_exchange = cluster.stored is not None and len(loop.exchanges) == 1
        return iter([dataclasses.replace(cluster, slots=1 if has_one_exchange else 2)])

    monkeypatch.setattr(_one_launch, "clusters_for", list_divisions)
    check_dense(cell, 120)
    assert "forward" in descriptions


@gpu
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.__name__)
def test_cells_equal_the_loop(cell: type[Cell], descriptions: list[str]) -> None:
    """Checks that results have the bits of the loop, for matrices whose sums have only one term. Cells that do not fit
    into a cluster run in other kernels.
    """
    check_equal(cell, "triton")


@gpu
@pytest.mark.parametrize("cell", [GRU, LSTM, LowRank, SLSTM], ids=lambda cell: cell.__name__)
def test_dense_matrices_in_float32_are_close_to_float64(cell: type[Cell], descriptions: list[str]) -> None:
    check_dense(cell, 144)


@gpu
@pytest.mark.parametrize(("precision", "bits"), [("high", 14), ("medium", 6)])
def test_float32_follows_the_precision_setting(precision: str, bits: int, descriptions: list[str]) -> None:
    check_bits(144, precision, bits)
    assert descriptions == ["forward"]


@gpu
@pytest.mark.parametrize("cell", [GRU, LSTM], ids=lambda cell: cell.__name__)
def test_gates_in_half_precision_are_close_to_float64(cell: type[Cell], descriptions: list[str]) -> None:
    check_dense(cell, 144, torch.bfloat16, 6e-2)
    assert "forward" in descriptions  # in bfloat16, some backwards take several launches


def check_dense(cell: type[Cell], size: int, dtype: torch.dtype = torch.float32, tolerance: float = 2e-5) -> None:
    """Compares the results for dense matrices with float64, within the rounding of float32."""
    core = make_core(cell, size, Dense(), dtype)
    tensors = make_sequences(core, 12, 50, size, dtype=dtype, bits=10)
    actual, gradients = differentiate(core, tensors, "triton", state_seqs=False)
    exact = make_core(cell, size, Dense(), torch.float64)
    expected, exact_gradients = differentiate(
        exact, tuple(t.detach().double().requires_grad_() for t in tensors), None, state_seqs=False
    )
    for a, b in zip([*actual, *gradients], [*expected, *exact_gradients], strict=True):
        assert a is not None
        assert b is not None
        assert (a.double() - b).abs().max() < tolerance * b.abs().max().clamp(min=1)


@gpu
def test_ten_thousand_launches_on_two_streams_equal_the_loop(descriptions: list[str]) -> None:
    check_on_two_streams(256, torch.float32)
    assert set(descriptions) == {"forward"}  # repeated calls run in the way that was recorded first


@gpu
@pytest.mark.parametrize("clusters", [True, False], ids=["clusters", "programs"])
def test_two_processes_can_share_one_gpu(clusters: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs two processes that alternate on one GPU. A block must not wait for a block that is not running."""
    monkeypatch.setenv("FLEXSN_CLUSTERS", str(int(clusters)))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn, initializer=set_barrier, initargs=(spawn.Barrier(2),)) as pool:
        for description, count in pool.map(count_differences, [2000, 2000]):
            assert ("clusters" in description) == clusters
            assert description.startswith("one launch")
            assert count == 0


@gpu
def test_clusters_run_in_a_thread_without_a_gpu_context(descriptions: list[str]) -> None:
    core = make_core(RLIF, 256, Powers())
    tensors = tuple(t.detach() for t in make_sequences(core, 4, 20, 256))
    expected = run(core, tensors, None)
    with ThreadPoolExecutor(1) as pool:
        results = pool.submit(run, core, tensors, "triton").result()
    for a, b in zip(results, expected, strict=True):
        assert torch.equal(a, b)
    assert descriptions == ["forward"]


@gpu
def test_clusters_run_in_a_cuda_graph(descriptions: list[str]) -> None:
    core = make_core(RLIF, 256, Powers())
    x, s, v = (t.detach() for t in make_sequences(core, 5, 33, 256))
    step, arguments = prepare(ScanProgram(core, 1, 2, 1), (x, s, v))
    with torch.no_grad():
        expected = [result.clone() for result in scan(step, arguments, state_seqs=False)]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = scan(step, arguments, state_seqs=False)
        for result in results:
            result.zero_()
        graph.replay()
    for a, b in zip(results, expected, strict=True):
        assert torch.equal(a, b)


@gpu
def test_clusters_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(RLIF, 256, Powers())
    tensors = tuple(t.detach() for t in make_sequences(core, 3, 16, 256))
    step, arguments = prepare(ScanProgram(core, 1, 2, 1), tensors)
    assert isinstance(step, RecurrentSpecialization)
    scan(step, arguments, state_seqs=False)
    assert "clusters" in step.loops.descriptions["forward"]
    monkeypatch.setenv("FLEXSN_CLUSTERS", "0")
    assert _clusters.why_no_clusters(torch.device("cuda")) == "FLEXSN_CLUSTERS is 0"
    other, arguments = prepare(ScanProgram(make_core(RLIF, 256, Powers()), 1, 2, 1), tensors)
    assert isinstance(other, RecurrentSpecialization)
    scan(other, arguments, state_seqs=False)
    assert "clusters" not in other.loops.descriptions["forward"]
