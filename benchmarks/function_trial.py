"""About thirty functions of other projects, each as one kernel, compared with eager mode and `torch.compile`.

    python benchmarks/function_trial.py [--output FILE] [--device cpu] [--only TEXT ...] [--rounds 15] [--times 1]

Figures are medians of the times of whole calls. A round calls the function in eager mode, by `torch.compile` and by
`pointwise`, in one process. A ratio is computed in each round, and the table shows the median. On the CPU, the time is
the CPU time of the process with one thread, including Python. Therefore, other processes on the machine do not change
this time. The C library is set to keep freed memory. Otherwise, page faults would take most of the time on a CPU. Page
faults vary from call to call, and cost the same in all three ways. Training is a forward and a backward for one random
gradient. `differs by` is the largest difference between the results of the kernel and of eager mode. `raises` means
that `torch.compile` raises an error in this pass.

On a GPU, each function has a separate process. The processes compile at the same time, and measure one after another.
The GPU starts a series of calls only when all of them are in the queue, so that the time excludes Python. `--times 16`
makes tensors 16 times as large along the first dimension.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from measure import describe_machine, publish, table
from torch import Tensor
from torch.nn import functional

from flexsn_codegen import pointwise

Function = Callable[..., Any]
HEADER = ["function", "pass", "eager, ms", "torch.compile, ms", "pointwise, ms", "to eager", "to compile", "differs by"]


@dataclass(frozen=True)
class Trial:
    """A function to measure, and a description of its arguments.

    Attributes:
        shapes: shapes of the arguments.
        dtypes: dtypes of the first arguments. All other arguments are float32.
        trains: True if the backward is measured.
        low, high: limits of the arguments' values.
        transposed: True if the last argument is a transposed view.
    """

    name: str
    function: Function
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...] = ()
    trains: bool = True
    low: float = -3.0
    high: float = 3.0
    transposed: bool = False


def bias(x: Tensor, b: Tensor) -> Tensor:
    return x * b


def bias_gelu(x: Tensor, b: Tensor) -> Tensor:
    return functional.gelu(x + b, approximate="tanh")


def per_row(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale


def channel(x: Tensor, weight: Tensor, b: Tensor) -> Tensor:
    return torch.relu(x * weight + b)


def product_of_chunks(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return a * b


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def rotary_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


def int8_per_row(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).round().clamp(-128, 127).to(torch.int8)


def from_int8(q: Tensor, scale: Tensor) -> Tensor:
    return q.to(torch.float32) * scale


def to_uint8(x: Tensor) -> Tensor:
    return (x * 255).clamp(0, 255).to(torch.uint8)


def from_uint8(x: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    return (x.to(torch.float32) / 255 - mean) / deviation


def remainder(x: Tensor, y: Tensor) -> Tensor:
    return x % y


def wrapped_angle(x: Tensor) -> Tensor:
    return (x + math.pi) % (2 * math.pi) - math.pi


def angle(y: Tensor, x: Tensor) -> Tensor:
    return torch.atan2(y, x)


def sine(x: Tensor) -> Tensor:
    return torch.sin(x)


def snake(x: Tensor, a: Tensor) -> Tensor:
    return x + torch.sin(a * x).square() / a


def half_chain(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x * y + 0.5) * 0.9 - y


def mish(x: Tensor) -> Tensor:
    return x * torch.tanh(functional.softplus(x))


def lerp(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return x + w * (y - x)


def ddim(x: Tensor, noise: Tensor, alpha: Tensor) -> Tensor:
    return (x - (1 - alpha).sqrt() * noise) / alpha.sqrt()


def huber(x: Tensor, y: Tensor) -> Tensor:
    difference = (x - y).abs()
    return torch.where(difference < 1, 0.5 * difference * difference, difference - 0.5)


def focal(x: Tensor, y: Tensor) -> Tensor:
    p = torch.sigmoid(x)
    return -(y * (1 - p) ** 2 * torch.log(p + 1e-6) + (1 - y) * p**2 * torch.log(1 - p + 1e-6))


def outer(x: Tensor, y: Tensor) -> Tensor:
    return torch.exp(-((x - y) ** 2))


def symmetric(x: Tensor, transposed: Tensor) -> Tensor:
    return (x + transposed) * 0.5


def gray(x: Tensor) -> Tensor:
    return 0.299 * x[..., 0] + 0.587 * x[..., 1] + 0.114 * x[..., 2]


def colour_scale(x: Tensor, scale: Tensor) -> Tensor:
    return (x - 0.5) * scale


def lstm_cell(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * g * g
    return p - 1e-3 * m / (v.sqrt() + 1e-8), m, v


def lennard_jones(r: Tensor) -> Tensor:
    s = (1.0 / r) ** 6
    return 4 * (s * s - s)


def logistic(x: Tensor, rate: Tensor) -> Tensor:
    return torch.sigmoid(x) * rate + torch.log1p(x.abs())


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def layer_norm(x: Tensor, weight: Tensor, b: Tensor) -> Tensor:
    return functional.layer_norm(x, (x.shape[-1],), weight, b)


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def int8_scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


_LARGE = (1024, 1024)
_HALF, _INT8, _UINT8 = torch.float16, torch.int8, torch.uint8
TRIALS = [
    Trial("x * bias", bias, (_LARGE, (1024,))),
    Trial("gelu(x + bias)", bias_gelu, (_LARGE, (1024,))),
    Trial("per row", per_row, (_LARGE, (1024, 1))),
    Trial("NCHW channel", channel, ((8, 64, 48, 48), (64, 1, 1), (64, 1, 1))),
    Trial("NHWC channel", channel, ((8, 48, 48, 64), (64,), (64,))),
    Trial("product of chunks", product_of_chunks, ((1024, 2048),)),
    Trial("SwiGLU by chunk", swiglu, ((1024, 2048),)),
    Trial("rotary, halves", rotary, ((4, 8, 512, 64), (512, 32), (512, 32))),
    Trial("rotary, pairs", rotary_pairs, ((4, 8, 512, 64), (512, 32), (512, 32))),
    Trial("int8 per row", int8_per_row, (_LARGE, (1024, 1)), trains=False, low=0.02),
    Trial("from int8 per row", from_int8, (_LARGE, (1024, 1)), (_INT8, torch.float32), trains=False),
    Trial("float to uint8", to_uint8, (_LARGE,), trains=False, low=0.0, high=1.0),
    Trial("uint8 image, normed", from_uint8, ((8, 224, 224, 3), (3,), (3,)), (_UINT8,), trains=False, low=0.5),
    Trial("x % y", remainder, (_LARGE, _LARGE), low=0.1),
    Trial("wrapped angle", wrapped_angle, (_LARGE,), low=-9.0, high=9.0),
    Trial("atan2", angle, (_LARGE, _LARGE)),
    Trial("sin", sine, (_LARGE,)),
    Trial("snake", snake, (_LARGE, (1024,)), low=0.1),
    Trial("float16 chain", half_chain, (_LARGE, _LARGE), (_HALF, _HALF)),
    Trial("mish", mish, (_LARGE,)),
    Trial("lerp", lerp, (_LARGE, _LARGE, (1024, 1))),
    Trial("DDIM step", ddim, ((8, 4, 128, 128), (8, 4, 128, 128), (8, 1, 1, 1)), low=0.1, high=0.9),
    Trial("Huber", huber, (_LARGE, _LARGE)),
    Trial("focal loss", focal, (_LARGE, _LARGE), low=0.0, high=1.0),
    Trial("outer, exp", outer, ((1024, 1), (1, 1024))),
    Trial("x + y.T", symmetric, (_LARGE, _LARGE), transposed=True),
    Trial("RGB to gray", gray, ((8, 224, 224, 3),)),
    Trial("3 channels, scaled", colour_scale, ((8, 224, 224, 3), (3,))),
    Trial("LSTM cell", lstm_cell, ((1024, 2048), (1024, 512))),
    Trial("Adam", adam, (_LARGE, _LARGE, _LARGE, _LARGE), trains=False, low=0.01),
    Trial("Lennard-Jones", lennard_jones, (_LARGE,), low=0.8),
    Trial("logistic, log1p", logistic, (_LARGE, ())),
    Trial("RMSNorm", rms_norm, (_LARGE, (1024,))),
    Trial("LayerNorm", layer_norm, (_LARGE, (1024,), (1024,))),
    Trial("softmax", softmax, (_LARGE,)),
    Trial("int8, own scale", int8_scaled, (_LARGE,), trains=False),
]


def make_arguments(trial: Trial, device: torch.device, *, trained: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    tensors = []
    for i, shape in enumerate(trial.shapes):
        dtype = trial.dtypes[i] if i < len(trial.dtypes) else torch.float32
        is_transposed = trial.transposed and i == len(trial.shapes) - 1
        sizes = shape[::-1] if is_transposed else shape
        values = torch.rand(sizes, generator=generator) * (trial.high - trial.low) + trial.low
        tensor = (values * 40 if not dtype.is_floating_point else values).to(dtype).to(device)
        if is_transposed:
            tensor = tensor.t()
        tensors.append(tensor.requires_grad_() if trained and dtype.is_floating_point else tensor)
    return tensors


def make_inference(function: Function, arguments: list[Tensor]) -> Callable[[], Any]:
    def call() -> Any:
        with torch.no_grad():
            return function(*arguments)

    return call


def make_training_step(function: Function, arguments: list[Tensor], gradients: list[Tensor]) -> Callable[[], Any]:
    leaves = [t for t in arguments if t.requires_grad]

    def call() -> Any:
        return torch.autograd.grad(_list_results(function(*arguments)), leaves, gradients)

    return call


def _list_results(returned: Any) -> list[Tensor]:
    return list(returned) if isinstance(returned, tuple | list) else [returned]


def enlarge(trial: Trial, times: int) -> Trial:
    """Returns the trial with tensors that are `times` times as large along the first dimension."""
    dimensions = max(map(len, trial.shapes))
    largest = max(shape[0] for shape in trial.shapes if len(shape) == dimensions)
    shapes = tuple(
        (largest * times, *shape[1:]) if len(shape) == dimensions and shape[0] == largest else shape
        for shape in trial.shapes
    )
    return replace(trial, shapes=shapes)


def time_on_gpu(call: Callable[[], Any], cycles: int = 20_000_000) -> float:
    """Returns the time in ms that a GPU takes for a call. Several calls are in the queue before the GPU starts.

    Args:
        cycles: number of clock cycles for which the GPU waits first. If some calls are not in the queue after this
            wait, the measurement is repeated with a wait that is twice as long.
    """
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)
    begun.record()
    for _ in range(_QUEUED):
        call()
    has_waited = not begun.query()
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / _QUEUED if has_waited else time_on_gpu(call, 2 * cycles)


_QUEUED = 20


def time_on_cpu(call: Callable[[], Any]) -> float:
    """Returns the time in ms of a call on the CPU."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    begun = clock()
    for _ in range(3):
        call()
    return (clock() - begun) / 3 * 1e3


def time_calls(calls: list[Callable[[], Any] | None], rounds: int, device: torch.device) -> list[list[float]]:
    """Returns a list of times in ms for each call. The list of a call that is `None` is empty. The calls alternate."""
    for call in calls:
        for _ in range(3):
            if call is not None:
                call()
    times: list[list[float]] = [[] for _ in calls]
    measure = time_on_gpu if device.type == "cuda" else time_on_cpu
    gc.collect()
    for _ in range(rounds):
        for times_of_call, call in zip(times, calls, strict=True):
            if call is not None:
                times_of_call.append(measure(call))
    return times


Calls = dict[str, list[Callable[[], Any] | None]]


def make_calls(trial: Trial, device: torch.device) -> tuple[Calls, float]:
    """Returns the compiled calls of the three ways for each pass, and the largest difference between the results.

    If `torch.compile` raises an error, its call is `None`.
    """
    torch._dynamo.reset()
    compiled, fused = torch.compile(trial.function), pointwise(trial.function, autograd=True)
    ways = (trial.function, compiled, fused)
    plain = make_arguments(trial, device, trained=False)
    with torch.no_grad():
        pairs = zip(_list_results(fused(*plain)), _list_results(trial.function(*plain)), strict=True)
        difference = max((a.double() - b.double()).abs().max().item() for a, b in pairs)
    calls_by_pass: Calls = {"inference": [make_inference(way, plain) for way in ways]}
    if trial.trains:
        leaves = make_arguments(trial, device, trained=True)
        gradients = [torch.rand_like(r) for r in _list_results(trial.function(*leaves))]
        calls_by_pass["training"] = [make_training_step(way, leaves, gradients) for way in ways]
    for pass_name, calls in calls_by_pass.items():
        for i, call in enumerate(calls):
            assert call is not None
            try:
                call()
            except Exception as error:
                if i != 1:
                    raise
                print(f"{trial.name}, {pass_name}: torch.compile raises {type(error).__name__}: {error}", flush=True)
                calls[i] = None
    return calls_by_pass, difference


def measure_rows(
    name: str, calls_by_pass: Calls, difference: float, device: torch.device, rounds: int
) -> list[list[str]]:
    rows = []
    for pass_name, calls in calls_by_pass.items():
        times = time_calls(calls, rounds, device)
        ratios = [
            f"{statistics.median(ours / theirs for ours, theirs in zip(times[2], times[k], strict=True)):.2f}"
            if times[k]
            else ""
            for k in (0, 1)
        ]
        medians = [f"{statistics.median(times_of_way):.3f}" if times_of_way else "raises" for times_of_way in times]
        rows.append([name, pass_name, *medians, *ratios, f"{difference:.1e}"])
    return rows


def keep_memory() -> None:
    """Makes the C library keep freed memory."""
    threshold, mapped = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(mapped, 1 << 30)
        ctypes.CDLL(None).mallopt(threshold, (1 << 31) - 1)


def run_process(number: int, times: int, rounds: int, ready: Any, turn: Any, answers: Any) -> None:
    """Compiles a function, waits until all functions are compiled, and then measures this function while no other
    process measures.
    """
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    device = torch.device("cuda")
    calls_by_pass, rows = None, []
    try:
        calls_by_pass, difference = make_calls(enlarge(TRIALS[number], times), device)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        rows = [[TRIALS[number].name, f"{type(error).__name__}: {lines[0][:200]}".replace("|", "/"), *[""] * 6]]
    ready.wait(timeout=240)
    with turn:
        if calls_by_pass is not None:
            rows = measure_rows(TRIALS[number].name, calls_by_pass, difference, device, rounds)
            torch.cuda.synchronize()
    answers.put((number, rows))


def run_on_gpu(numbers: Sequence[int], times: int, rounds: int) -> list[list[str]]:
    spawn = multiprocessing.get_context("spawn")
    ready, turn, answers = spawn.Barrier(len(numbers)), spawn.Lock(), spawn.Queue()
    processes = [
        spawn.Process(target=run_process, args=(number, times, rounds, ready, turn, answers)) for number in numbers
    ]
    for process in processes:
        process.start()
    rows_by_number = dict(answers.get(timeout=300) for _ in processes)
    for process in processes:
        process.join()
    return [row for number in numbers for row in rows_by_number[number]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "function_trial.md")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="+", default=[""])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--times", type=int, default=1)
    options = parser.parse_args()
    device = torch.device(options.device)
    numbers = [i for i, trial in enumerate(TRIALS) if any(text in trial.name for text in options.only)]
    rows = []
    if device.type == "cuda":
        rows = run_on_gpu(numbers, options.times, options.rounds)
    else:
        keep_memory()
        for i in numbers:
            rows += measure_rows(
                TRIALS[i].name, *make_calls(enlarge(TRIALS[i], options.times), device), device, options.rounds
            )
            print(*(" | ".join(row) for row in rows[-2:]), sep="\n", flush=True)
    larger_by = f" --times {options.times}" if options.times > 1 else ""
    head = f"`python benchmarks/function_trial.py{larger_by}`: medians of {options.rounds} alternating rounds, "
    head += "GPU time. " if device.type == "cuda" else f"{torch.get_num_threads()} threads. "
    publish(
        ["# Functions of other projects", "", head + describe_machine(device), "", *table(HEADER, rows)], options.output
    )


if __name__ == "__main__":
    main()
