"""Times of recurrent LIF neurons in one launch: programs that share rows and exchange spikes, compared with programs
that have all columns.

    python benchmarks/recurrence_tiles.py [--output FILE] [--shapes 250x256x128 ...] [--dtypes ...] [--seconds 90]

A shape is T x batch x neurons. Several processes compile the kernels first. The times of kernels in a call without
gradients, and in the forward and backward of a training step, come from the profiler. The times of a whole forward and
of a whole training step come from replays of a CUDA graph. The results of each choice of tiles are compared with the
results of programs that exchange spikes. Weights and inputs are chosen so that all sums are exact. The comparison
counts the spikes that differ, and shows the largest difference of the input's gradients relative to the largest
gradient.
cuDNN's nn.RNN also multiplies the input by a matrix, and rounds float32 to TF32. After `--seconds`, no further
measurement starts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from measure import capture_graph, describe_machine, publish, run_in_processes, table
from recurrence import Layer, Run, make_inference, make_training_step, measure_seconds
from torch import Tensor, nn

from flexsn_codegen.recurrent import NotOneLaunchError
from flexsn_codegen.targets.triton._recurrent import Tiles
from flexsn_runtime.recurrent import _one_launch, _tiles

SHAPES = ("250x256x128", "250x128x256", "250x2048x128", "250x256x64", "250x32x128")
DTYPES = ("float32", "bfloat16")


def make_tiles(rows: int, num_warps: int) -> Tiles:
    """Returns the tiles of programs that have all columns."""
    return Tiles(rows, 1, 512, num_warps, ahead=1, exchanged=False)


# Choices in the order of measurement. `None` means that programs exchange spikes.
CHOICES: dict[str, Tiles | None] = {
    "exchange": None,
    "8 rows, 4 warps": make_tiles(8, 4),
    "8 rows, 8 warps": make_tiles(8, 8),
    "16 rows, 8 warps": make_tiles(16, 8),
    "16 rows, 4 warps": make_tiles(16, 4),
    "16 rows, 16 warps": make_tiles(16, 16),
}


class Case(NamedTuple):
    """One measured shape and dtype, with its tiles."""

    shape: str
    dtype: str
    tiles: str


class Times(NamedTuple):
    """Times of a layer, and differences of its results from the results of programs that exchange spikes.

    `inference`, `forward` and `backward` are the microseconds of a kernel per time step. `replayed_forward` and
    `replayed_training` are the milliseconds of a replayed forward and training step.
    """

    inference: str
    forward: str
    backward: str
    replayed_forward: float
    replayed_training: float
    spikes: int
    gradient: float


@contextmanager
def use_tiles(choice: str) -> Iterator[None]:
    """Makes the kernels that are compiled in this context use the tiles with the name `choice`."""
    tiles, module = CHOICES[choice], cast(Any, _one_launch)
    original = module.tiles_for

    def choose_tiles(loop: Any, device: torch.device, *, from_zero: bool) -> Iterator[Tiles]:
        if tiles is None:
            return _tiles.exchanged_tiles(loop, device, from_zero=from_zero)
        if _tiles.held_tiles(loop, 1, from_zero=from_zero) is None:
            raise NotOneLaunchError("matrices do not fit into registers")
        return iter([tiles])

    module.tiles_for = choose_tiles
    try:
        yield
    finally:
        module.tiles_for = original


def make_operands(shape: str, dtype: str) -> tuple[Layer, Tensor, Tensor]:
    """Returns a layer, its input and a gradient of the output. The elements of all three have few significant bits."""
    steps, batch, hidden = map(int, shape.split("x"))
    generator = torch.Generator("cuda").manual_seed(0)

    def few_bits(*size: int) -> Tensor:
        return torch.randint(-8, 9, size, generator=generator, device="cuda").to(getattr(torch, dtype)) / 8

    layer = Layer(hidden, "auto").to("cuda", getattr(torch, dtype))
    with torch.no_grad():
        next(layer.parameters()).copy_(few_bits(hidden, hidden) / 2)
    return layer, few_bits(steps, batch, hidden) + 0.5, few_bits(steps, batch, hidden)


def compile_case(case: Case) -> None:
    """Compiles the kernels of a case into the cache on disk. They do not depend on T, so that three steps suffice."""
    _, batch, hidden = case.shape.split("x")
    layer, x, weight = make_operands(f"3x{batch}x{hidden}", case.dtype)
    try:
        with use_tiles(case.tiles):
            make_training_step(layer, x, weight)()
            make_inference(layer, x)()
    except Exception as error:  # the measurement will report the error again
        print(case, error, flush=True)


def compute_results(layer: Layer, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the spikes, and the gradient of the input."""
    leaf = x.clone().requires_grad_()
    spikes = layer(leaf)
    (gradient,) = torch.autograd.grad(spikes, [leaf], weight)
    return spikes.detach(), gradient


def measure_kernels(run: Run, num_steps: int) -> dict[str, str]:
    """Returns the microseconds of the kernels ``"forward"`` and ``"backward"``, divided by the number of steps."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            run()
        torch.cuda.synchronize()
    us_by_pass = {}
    for event in profile.key_averages():
        if "_loop_" in event.key:
            pass_name = "backward" if "_loop_backward_" in event.key else "forward"
            us_by_pass[pass_name] = f"{event.self_device_time_total / event.count / num_steps:.2f}"
    return us_by_pass


def measure_case(case: Case, expected: tuple[Tensor, Tensor] | None) -> tuple[Times, tuple[Tensor, Tensor]]:
    """Returns the times and the results of a case.

    Args:
        expected: results of programs that exchange spikes, or `None` if the case itself measures these programs.
    """
    device = torch.device("cuda")
    num_steps = int(case.shape.split("x")[0])
    layer, x, weight = make_operands(case.shape, case.dtype)
    with use_tiles(case.tiles):
        actual = compute_results(layer, x, weight)
        for line in str(layer.layer.explain()).splitlines():
            if line.strip().startswith("the last ") and "one launch for all steps" not in line:
                raise RuntimeError(line.strip())
        forward, train = make_inference(layer, x), make_training_step(layer, x, weight)
        forward()
        spikes, gradient = expected or actual
        inference_us, training_us = measure_kernels(forward, num_steps), measure_kernels(train, num_steps)
        times = Times(
            inference_us["forward"],
            training_us["forward"],
            training_us["backward"],
            1e3 * measure_seconds(capture_graph(forward), device),
            1e3 * measure_seconds(capture_graph(train), device),
            int((actual[0] != spikes).sum()),
            float((actual[1] - gradient).abs().max() / gradient.abs().max()),
        )
    return times, actual


def measure_rnn(shape: str, dtype: str) -> list[str]:
    """Returns the milliseconds of cuDNN's forward and training step, called eagerly and in a CUDA graph."""
    steps, batch, hidden = map(int, shape.split("x"))
    device = torch.device("cuda")
    layer = nn.RNN(hidden, hidden, bias=False, device=device, dtype=getattr(torch, dtype))
    x = torch.randn(steps, batch, hidden, device=device, dtype=getattr(torch, dtype))
    forward, train = make_inference(layer, x), make_training_step(layer, x, torch.randn_like(x))
    cells = [f"{1e3 * measure_seconds(run, device):.2f}" for run in (forward, train)]
    for run in (forward, train):
        try:
            cells.append(f"{1e3 * measure_seconds(capture_graph(run), device):.2f}")
        except Exception as error:
            cells.append(f"not captured: {str(error).splitlines()[0][:80]}")
            torch.cuda.synchronize()
    return cells


def main(shapes: list[str], dtypes: list[str], seconds: float, path: Path) -> None:
    begun = time.perf_counter()
    cases = [Case(shape, dtype, tiles) for tiles in CHOICES for shape in shapes for dtype in dtypes]
    sizes = {(case.shape.split("x")[2], case.dtype, case.tiles): case for case in cases if case.tiles != "exchange"}
    run_in_processes(compile_case, [*sizes.values(), *(case for case in cases if case.tiles == "exchange")])
    print(f"compiled after {time.perf_counter() - begun:.0f} s", flush=True)
    rows: dict[Case, list[str]] = {}
    expected: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
    for case in cases:
        key = (case.shape, case.dtype)
        if time.perf_counter() - begun > seconds:
            rows[case] = ["no time was left"]
            continue
        try:
            times, actual = measure_case(case, expected.get(key))
            expected.setdefault(key, actual)
            rows[case] = [f"{value:.3g}" if isinstance(value, float) else str(value) for value in times]
        except Exception as error:  # compilers and devices may raise any error, and the rest is still measured
            rows[case] = [(str(error).splitlines() or [repr(error)])[0][:160]]
        print(*case, *rows[case], flush=True)
    rnn_rows = []
    for shape in shapes:
        for dtype in dtypes:
            try:
                rnn_rows.append([shape, dtype, *measure_rnn(shape, dtype)])
            except Exception as error:
                rnn_rows.append([shape, dtype, str(error).splitlines()[0][:160]])
    kernels = ("kernel without gradients, µs a step", "forward kernel", "backward kernel")
    replayed = ("forward in a CUDA graph, ms", "training in a CUDA graph, ms")
    sorted_cases = sorted(cases, key=lambda case: (shapes.index(case.shape), dtypes.index(case.dtype)))
    lines = [
        "# Tiles of recurrent LIF",
        "",
        f"`python benchmarks/recurrence_tiles.py`. {describe_machine(torch.device('cuda'))}",
        "",
        *table(
            ("T x B x H", "dtype", "tiles", *kernels, *replayed, "spikes that differ", "gradient differs by"),
            [[*case, *rows[case]] for case in sorted_cases],
        ),
        "",
        "cuDNN's nn.RNN:",
        "",
        *table(("T x B x H", "dtype", "forward, ms", "training, ms", *replayed), rnn_rows),
    ]
    publish(lines, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "recurrence_tiles.md")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES))
    parser.add_argument("--seconds", type=float, default=90.0)
    options = parser.parse_args()
    main(options.shapes, options.dtypes, options.seconds, options.output)
