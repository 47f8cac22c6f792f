"""Times of training steps, times of their kernels, and peak memory of whole networks, compared with the same networks
with ReLU.

    python benchmarks/whole_networks.py [--output benchmarks/results/whole_networks.md] [--only "B 32" fp32]
        [--format channels-last] [--neurons "FlexSN LIF" compiled] [--seconds 150]

A step is a forward, cross entropy of the mean over time, a backward, and fused SGD. The network with ReLU instead of
neurons, on the same T·B frames, is the lower limit, because neurons without cost would take as long. The compiled
launcher launches eager training steps, unless FLEXSN_LAUNCHER names another launcher.

FlexSN's neurons run in several forms. They run after the norms; with the norms in their steps (`fuse_norms`); with
fused norms and pooling in kernels (`spike_pooling`); and, in addition, with spikes also stored as bits
(`PackedSpikes`). Either the kernels write the bits, or PyTorch operations pack the spikes afterwards. The networks with
ReLU and with FlexSN also run compiled. The compiled networks with FlexSN also run with norms and residual additions in
the steps of the neurons (`AbsorbingBackend`), with bits (`PackingBackend`), and with both. If SpikingJelly is
installed, its LIFNode runs with its Triton kernels, as a loop, and compiled. If snnTorch is installed, its Leaky runs
in networks without norms.

Each network runs in each memory format (of the convolutions' weights and of the input), eagerly and as a CUDA graph.
Rows named "captured" show steps as users call them: in `flexsn_nn.graphs.capture`, and in SpikingJelly's
`StaticCudaGraph` of forward and backward, followed by the optimizer and resets, as in SpikingJelly's training script.
Such a call copies its arguments into the memory of the graph. Its peak memory is the peak memory of the capture. The
script also draws the ratios to ReLU in an SVG file with the same name as the table. Figures are printed as soon as they
are measured. If a step fails, its row shows the error. After `--seconds`, no further step starts.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from measure import capture_graph, describe_machine, kernel_time, milliseconds, publish, table
from network_plot import draw
from networks import Activation, Spikformer, make_feed_forward, make_sew_resnet18, make_vgg8
from peer_neurons import (
    SnnTorchLeaky,
    is_installed,
    list_resets,
    make_spikingjelly_graph,
    make_spikingjelly_lif,
    make_spikingjelly_loop,
)
from torch import Tensor, nn

from flexsn_nn import LIF, CaptureWarning, graphs, spike_pooling
from flexsn_nn.functional import reset_net
from flexsn_nn.fusion import AbsorbingBackend, fuse_norms
from flexsn_nn.memory import PackedSpikes, PackingBackend
from flexsn_runtime import launcher_in_words


@dataclass(frozen=True, slots=True)
class Case:
    """A network and its input."""

    name: str
    make: Callable[[Activation], nn.Module]
    shape: tuple[int, ...]
    classes: int
    dtype: torch.dtype

    @property
    def formats(self) -> tuple[torch.memory_format, ...]:
        images = len(self.shape) == 5
        return (torch.contiguous_format, torch.channels_last) if images else (torch.contiguous_format,)

    @property
    def normed(self) -> bool:
        """True if norms precede the neurons."""
        return len(self.shape) > 3


FORMATS = {torch.contiguous_format: "contiguous", torch.channels_last: "channels-last"}
Row = tuple[float, ...]
TURNS = 7
# Duration of a round of steps, in ms. A round has at most eight steps.
MEASURED_MS = 100

CASES = (
    Case("VGG-8, T 4, B 64, 32², bf16", make_vgg8, (4, 64, 3, 32, 32), 10, torch.bfloat16),
    Case("SEW-ResNet18, T 4, B 32, 224², bf16", make_sew_resnet18, (4, 32, 3, 224, 224), 1000, torch.bfloat16),
    Case("SEW-ResNet18, T 4, B 64, 224², bf16", make_sew_resnet18, (4, 64, 3, 224, 224), 1000, torch.bfloat16),
    Case(
        "700-512-512-20, T 250, B 256, fp32",
        lambda activation: make_feed_forward(activation, 700, 512, 512, 20),
        (250, 256, 700),
        20,
        torch.float32,
    ),
    Case(
        "784-1000-1000-10, T 25, B 128, fp32",
        lambda activation: make_feed_forward(activation, 784, 1000, 1000, 10),
        (25, 128, 784),
        10,
        torch.float32,
    ),
    Case(
        "64-128-128-10, T 4, B 64, fp32",
        lambda activation: make_feed_forward(activation, 64, 128, 128, 10),
        (4, 64, 64),
        10,
        torch.float32,
    ),
    Case("Spikformer, 4 blocks, T 4, B 32, bf16", Spikformer, (4, 32, 384, 196), 1000, torch.bfloat16),
)


@dataclass(frozen=True, slots=True)
class Variant:
    """Neurons, and a way to run them.

    Attributes:
        fused: True if the steps of the neurons compute the norms.
        packed: True if spikes are kept as bits.
        by_kernels: True if kernels write the bits, False if PyTorch operations pack the spikes.
        compiled: True if `torch.compile` is used. If `packed` is also True, its backend is `PackingBackend`.
        absorbed: True if `AbsorbingBackend` is used.
        pooled: True if `spike_pooling` is used.
        captured: True if `flexsn_nn.graphs.capture` is used, or `StaticCudaGraph` for SpikingJelly's neurons.
    """

    activation: Activation
    fused: bool = False
    packed: bool = False
    by_kernels: bool = True
    compiled: bool = False
    absorbed: bool = False
    pooled: bool = False
    captured: bool = False


def make_variants(case: Case) -> dict[str, Variant]:
    variant_by_name = {"ReLU": Variant(nn.ReLU), "FlexSN LIF": Variant(LIF)}
    if case.normed:
        variant_by_name["the same, norms fused"] = Variant(LIF, fused=True)
        variant_by_name["the same, norms fused, pooled by kernels"] = Variant(LIF, fused=True, pooled=True)
    normed = case.normed
    variant_by_name["the same, spikes as bits"] = Variant(LIF, fused=normed, pooled=normed, packed=True)
    variant_by_name["the same, bits packed afterwards"] = Variant(
        LIF, fused=normed, pooled=normed, packed=True, by_kernels=False
    )
    if is_installed("spikingjelly"):
        variant_by_name["SpikingJelly LIFNode"] = Variant(make_spikingjelly_lif)
        variant_by_name["a loop of SpikingJelly LIFNode"] = Variant(make_spikingjelly_loop)
    if is_installed("snntorch") and not case.normed:
        variant_by_name["snnTorch Leaky"] = Variant(SnnTorchLeaky)
    variant_by_name["captured ReLU"] = Variant(nn.ReLU, captured=True)
    variant_by_name["captured FlexSN LIF"] = Variant(LIF, fused=normed, pooled=normed, captured=True)
    variant_by_name["captured FlexSN LIF, spikes as bits"] = Variant(
        LIF, fused=normed, pooled=normed, packed=True, captured=True
    )
    if is_installed("spikingjelly"):
        variant_by_name["captured SpikingJelly LIFNode"] = Variant(make_spikingjelly_lif, captured=True)
    variant_by_name["compiled ReLU"] = Variant(nn.ReLU, compiled=True)
    variant_by_name["compiled"] = Variant(LIF, compiled=True)
    variant_by_name["compiled, absorbing"] = Variant(LIF, compiled=True, absorbed=True)
    variant_by_name["compiled, spikes as bits"] = Variant(LIF, compiled=True, packed=True)
    variant_by_name["compiled, absorbing, spikes as bits"] = Variant(LIF, compiled=True, packed=True, absorbed=True)
    if is_installed("spikingjelly"):
        variant_by_name["compiled SpikingJelly LIFNode"] = Variant(make_spikingjelly_lif, compiled=True)
    return variant_by_name


class RowName(NamedTuple):
    """Name of a row: a network, its memory format, and the name of a variant."""

    case: Case
    form: str
    name: str

    @property
    def variant(self) -> Variant:
        return make_variants(self.case)[self.name]

    @property
    def memory_format(self) -> torch.memory_format:
        return next(form for form in self.case.formats if FORMATS[form] == self.form)


def mean_loss(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.mean(0).float(), labels)


def make_training_step(
    case: Case, variant: Variant, memory_format: torch.memory_format, device: torch.device
) -> Callable[[], None]:
    torch.manual_seed(0)
    net = case.make(variant.activation).to(device)
    if variant.fused:
        fuse_norms(net)
    if variant.pooled:
        spike_pooling(net)
    packs = variant.packed and not variant.compiled
    packing = PackedSpikes(net, by_kernels=variant.by_kernels) if packs else nullcontext()
    frames = torch.rand(case.shape, device=device)
    if len(case.formats) > 1:
        net = net.to(memory_format=memory_format)
        frames = frames.flatten(0, 1).contiguous(memory_format=memory_format).unflatten(0, case.shape[:2])
    run: Callable[[Tensor], Tensor] = net
    if variant.compiled:
        torch.compiler.reset()
        backend = PackingBackend() if variant.packed else "inductor"
        run = torch.compile(net, backend=AbsorbingBackend(backend) if variant.absorbed else backend)
    labels = torch.randint(case.classes, (case.shape[1],), device=device)
    others = list_resets(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, fused=True)

    if variant.captured:
        if others:
            return make_spikingjelly_step(case, net, optimizer, others, frames, labels)
        rate = torch.tensor(1e-3, device=device)
        optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9, fused=True)
        autocast = None if case.dtype == torch.float32 else case.dtype
        captured = graphs.capture(net, mean_loss, optimizer, autocast=autocast)

        def captured_step() -> None:
            with packing:
                captured(frames, labels)

        return captured_step

    def step() -> None:
        with packing, torch.autocast(device.type, dtype=case.dtype, enabled=case.dtype != torch.float32):
            out = run(frames)
            # The next batch starts from the initial states, and the memory of the last states is free for the backward.
            reset_net(net)
            for reset in others:
                reset()
            loss = mean_loss(out, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def make_spikingjelly_step(
    case: Case,
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    others: Sequence[Callable[[], object]],
    frames: Tensor,
    labels: Tensor,
) -> Callable[[], None]:
    """Returns a training step in SpikingJelly's `StaticCudaGraph`, as in SpikingJelly's training script."""

    def forward_and_backward(frames: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(frames.device.type, dtype=case.dtype, enabled=case.dtype != torch.float32):
            loss = mean_loss(net(frames), labels)
        loss.backward()
        return loss

    graph = make_spikingjelly_graph(forward_and_backward)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        graph(frames, labels)
        optimizer.step()
        for reset in others:
            reset()

    return step


Steps = dict[RowName, Callable[[], None]]


def measure_walls(rows: Sequence[RowName], until: float) -> tuple[dict[RowName, Row | str], Steps]:
    """Measures training steps of one network.

    The results of a step are the median and the minimum wall time in ms, the same two times with the backward in the
    caller's thread, and the peak memory in MiB. The rounds of the steps alternate, so that slow periods of a host
    affect all steps.

    Args:
        until: time, as in `time.perf_counter`, after which no further step is prepared.

    Returns:
        The results, and the steps that are not captured. Captured steps are deleted, because they hold much memory.
    """
    steps: Steps = {}
    results: dict[RowName, Row | str] = {}
    peaks = {}
    for row in rows:
        if time.perf_counter() > until:
            results[row] = "not run"
            continue
        try:
            before = torch.cuda.memory_allocated()
            step = make_training_step(row.case, row.variant, row.memory_format, torch.device("cuda"))
            # A replay allocates nothing, so the peak of a captured step is the peak of its capture.
            before_peak, until_peak = (1, 5) if row.variant.captured else (3, 1)
            for _ in range(before_peak):
                step()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            for _ in range(until_peak):
                step()
            torch.cuda.synchronize()
            peaks[row] = (torch.cuda.max_memory_allocated() - before) / 2**20
            steps[row] = step
        except Exception as error:
            results[row] = describe_error(error)
    times: dict[RowName, tuple[list[float], list[float]]] = {row: ([], []) for row in steps}
    counts = {row: max(1, min(8, int(MEASURED_MS / measure_step(step, 1)))) for row, step in steps.items()}
    for _ in range(TURNS):
        for row, step in steps.items():
            for threads, measured in zip((True, row.variant.captured), times[row], strict=True):
                with torch.autograd.set_multithreading_enabled(threads):
                    measured.append(measure_step(step, counts[row]))
    for row, (in_own, in_caller) in times.items():
        medians, least = map(statistics.median, (in_own, in_caller)), map(min, (in_own, in_caller))
        results[row] = (*itertools.chain(*zip(medians, least, strict=True)), peaks[row])
    return results, {row: step for row, step in steps.items() if not row.variant.captured}


def measure_step(step: Callable[[], None], count: int = 8) -> float:
    """Returns the mean wall time in ms of `count` successive steps. The GPU is idle when the first step starts."""
    step()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begun) / count


def measure_device(row: RowName, step: Callable[[], None] | None) -> Row | str:
    """Returns the times in ms of the kernels of a step and of its CUDA graph, or the reason why the times are missing.

    Args:
        step: a step that has already run, or `None` to make a new step.
    """
    try:
        return _measure_device(row, step)
    except Exception as error:
        return describe_error(error)
    finally:
        free_memory()


def _measure_device(row: RowName, step: Callable[[], None] | None) -> Row:
    device, captured = torch.device("cuda"), row.variant.captured
    if step is None:
        step = make_training_step(row.case, row.variant, row.memory_format, device)
        for _ in range(6 if captured else 4):
            step()
    kernels, _ = kernel_time(step, 5)
    try:
        in_graph = milliseconds(step if captured else capture_graph(step), device, warmup=50, rep=200)
    except Exception:
        in_graph = float("nan")  # a step that waits for the device cannot be captured
    return kernels / 1e3, in_graph


def describe_error(error: Exception) -> str:
    """Returns the text that a row shows for an error."""
    return f"failed: {type(error).__name__}: {str(error).splitlines()[0][:120]}"


def free_memory() -> None:
    """Frees the memory of a row."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # 32 MiB for each stream of a capture, which would count for the next row
    torch.cuda.empty_cache()


def format_cells(figures: Row | str, limit: Row | str | None, count: int) -> list[str]:
    """Returns `count` cells: figures with their ratios to `limit`, or the reason why the figures are missing."""
    if isinstance(figures, str):
        return [figures, *[""] * (count - 1)]
    if limit is None or isinstance(limit, str):
        return [f"{value:.2f}" for value in figures]
    return [f"{value:.2f} ({value / least:.2f})" for value, least in zip(figures, limit, strict=True)]


def compute_ratios(results_by_row: Mapping[RowName, Sequence[Row | str]]) -> dict[str, dict[tuple[str, str], float]]:
    """Returns the ratios to ReLU in the same network, by the name of the figure and by the pair (network, neuron)."""
    ratios_by_figure: dict[str, dict[tuple[str, str], float]] = {
        "time of a step": {},
        "peak memory": {},
        "time in a graph": {},
    }
    for (case, form, name), results_of_row in results_by_row.items():
        limits = results_by_row[RowName(case, form, "ReLU")]
        for title, index, column in (("time of a step", 0, 0), ("peak memory", 0, 4), ("time in a graph", 1, 1)):
            value, limit = results_of_row[index], limits[index]
            if name != "ReLU" and not isinstance(value, str) and not isinstance(limit, str):
                ratio = value[column] / limit[column]
                if math.isfinite(ratio):  # a step that cannot be captured has no time in a graph
                    ratios_by_figure[title][f"{case.name}, {form}", name] = ratio
    return ratios_by_figure


def print_result(begun: float, row: RowName, result: Row | str) -> None:
    print(f"{time.perf_counter() - begun:.0f} s", row.case.name, *row[1:], result, sep=" | ", flush=True)


HEADER = (
    "network",
    "format",
    "neurons",
    "step, ms",
    "least",
    "backward in its thread",
    "least",
    "peak, MiB",
    "its kernels",
    "in a CUDA graph",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "whole_networks.md")
    parser.add_argument("--only", nargs="*", default=[""], help="only cases whose name contains one of these texts")
    parser.add_argument("--neurons", nargs="*", default=[""], help="only neurons whose name begins so, e.g. compiled")
    parser.add_argument("--format", default="", choices=["", *FORMATS.values()], help="only this memory format")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no further row starts after this time")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    os.environ.setdefault("FLEXSN_LAUNCHER", "compiled")
    warnings.simplefilter("error", CaptureWarning)  # a step that runs in Python must not count as captured
    begun = time.perf_counter()
    rows = [
        RowName(case, FORMATS[memory_format], name)
        for case in CASES
        if any(part in case.name for part in options.only)
        for memory_format in case.formats
        if len(case.formats) == 1 or options.format in ("", FORMATS[memory_format])
        for name in make_variants(case)
        if name == "ReLU" or name.startswith(tuple(options.neurons))
    ]
    # The profiler may slow down later launches in this process, so all wall times are measured before it runs.
    results_by_row: dict[RowName, list[Row | str]] = {row: [] for row in rows}
    steps: Steps = {}
    for _, group in itertools.groupby(rows, key=lambda row: (row.case, row.form)):
        measured, uncaptured = measure_walls(list(group), begun + options.seconds * 0.6)
        steps |= uncaptured
        for row, result in measured.items():
            print_result(begun, row, result)
            results_by_row[row].append(result)
        free_memory()
    for row in rows:
        is_late = time.perf_counter() - begun > options.seconds
        results_by_row[row].append("not run" if is_late else measure_device(row, steps.pop(row, None)))
        print_result(begun, row, results_by_row[row][-1])
    lines = []
    for (case, form, name), results_of_row in results_by_row.items():
        limits = results_by_row[RowName(case, form, "ReLU")] if name != "ReLU" else (None, None)
        first, second = (format_cells(*three) for three in zip(results_of_row, limits, (5, 2), strict=True))
        lines.append((case.name, form, name, *first, *second))
    draw(compute_ratios(results_by_row), options.output.with_suffix(".svg"))
    selection = {"--only": options.only, "--format": [options.format], "--neurons": options.neurons}
    arguments = "".join(f" {name} {' '.join(map(repr, values))}" for name, values in selection.items() if any(values))
    publish(
        [
            "# Whole networks compared with ReLU",
            "",
            f"`python benchmarks/whole_networks.py{arguments}`: a step of training (forward, cross entropy, backward,",
            "fused SGD), in ms, with the ratio to ReLU in the same run in brackets. Wall times are the median and the",
            f"minimum of {TURNS} rounds. The neurons of a network alternate within a round, and other work on the host",
            "disturbs the minimum least. bf16 means autocast. The second pair of wall times is measured with",
            "torch.autograd.set_multithreading_enabled(False). The profiler measures the kernels. Captured rows use",
            "`graphs.capture`, or SpikingJelly's StaticCudaGraph of forward and backward. Their last column is the",
            f"time of the whole call. Eager steps are launched by: {launcher_in_words(torch.device('cuda'))}.",
            describe_machine(torch.device("cuda")),
            "",
            *table(HEADER, lines),
        ],
        options.output,
    )


if __name__ == "__main__":
    main()
