"""The examples of `docs/fuse-pointwise.md` and `docs/scan.md`, compared with `torch.compile` and torch's scans.

    python benchmarks/pointwise_peers.py [--output FILE] [--seconds 80] [--without WAY ...] [--device cuda] [--scale 1]

Figures are medians of whole calls in ms, including Python. Training is a forward and a backward. `first` is the time of
the first calls, including compilation. The loop is a Python function that calls the step T times. `torch.compile` also
compiles this loop, but only for short sequences, because the compilation of a long loop would take minutes. If a way
rejects a function, the table shows the error. If `--seconds` have passed, the remaining rows say "no time was left".
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fused_optimizers import adamw
from measure import describe_machine, milliseconds, publish, table
from torch import Tensor
from torch.nn import functional

import flexsn_nn  # noqa: F401 - registers the kernels that replace scans
from flexsn_codegen import pointwise
from flexsn_hop import scan

Function = Callable[..., Any]
HEADER = ["example", "size", "way", "first, s", "inference, ms", "training, ms", "differs by"]


@dataclass(frozen=True)
class Example:
    """A function to measure in several ways.

    Attributes:
        arguments: function that makes the arguments, which require gradients if the backward is measured.
        ways: functions by name. The first function is the reference with which all other functions are compared.
        trains: True if a backward is measured.
    """

    name: str
    size: str
    arguments: Callable[[], list[Tensor]]
    ways: dict[str, Function]
    trains: bool = True


def gelu_gate(x: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    """Computes a gated unit with a bias and clamping."""
    return (x * functional.gelu(gate + bias, approximate="tanh")).clamp(-8.0, 8.0)


def snake(x: Tensor, alpha: Tensor) -> Tensor:
    """Computes equation 3 of Ziyin, Hartwig and Ueda, Neural Networks Fail to Learn Periodic Functions."""
    return x + torch.sin(alpha * x).square() / alpha


def moving_average(mean: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    mean = mean + 0.1 * (x - mean)
    return mean, mean


def minimal_gru(h: Tensor, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Computes a step of a GRU whose gate and candidate depend only on the input.

    Source: Feng et al., Were RNNs All We Needed?, section 3.1.
    """
    gate, new = x[0].sigmoid(), x[1].tanh()
    h = (1 - gate) * h + gate * new
    return h, h


def kalman(carry: tuple[Tensor, Tensor], z: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Computes a step of a scalar Kalman filter for each element.

    Source: Kalman, A New Approach to Linear Filtering and Prediction Problems.
    """
    mean, variance = carry
    variance = variance + 0.01
    gain = variance / (variance + 0.25)
    mean = mean + gain * (z - mean)
    return (mean, (1 - gain) * variance), mean


def combine_steps(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Combines two steps of `h = decay h + new`."""
    return a[0] * b[0], b[0] * a[1] + b[1]


def make_associative(function: Function) -> Function:
    """Returns a function that computes a linear recurrence by torch's associative scan. `function` computes the decays
    and the new terms.
    """

    def call(*tensors: Tensor) -> Tensor:
        from torch._higher_order_ops.associative_scan import associative_scan

        states: Tensor = associative_scan(combine_steps, function(*tensors), dim=0, combine_mode="pointwise")[1]
        return states

    return call


def make_recurrences(shapes: list[tuple[int, int]], device: torch.device) -> Iterator[Example]:
    from torch._higher_order_ops.scan import scan as torch_scan

    def compute_average_factors(x: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.zeros_like(x[:1])
        return torch.cat([first, torch.full_like(x[1:], 0.9)]), torch.cat([x[:1], 0.1 * x[1:]])

    def compute_gru_factors(gate: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        gate = gate.sigmoid()
        return 1 - gate, gate * new.tanh()

    def make_carry(name: str, x: Tensor) -> Any:
        zero = torch.zeros_like(x[0])
        return {"moving average": x[0], "Kalman filter": (zero, zero + 1)}.get(name, zero)

    steps: list[tuple[str, Function, int, Function | None]] = [
        ("moving average", moving_average, 1, make_associative(compute_average_factors)),
        ("minimal GRU", minimal_gru, 2, make_associative(compute_gru_factors)),
        ("Kalman filter", kalman, 1, None),
    ]
    for steps_in_time, elements in shapes:
        for name, step, count, by_association in steps:

            def arguments(count: int = count, size: tuple[int, int] = (steps_in_time, elements)) -> list[Tensor]:
                return [torch.randn(size, device=device, requires_grad=True) for _ in range(count)]

            def run_loop(*xs: Tensor, step: Function = step, name: str = name) -> Tensor:
                carry, ys = make_carry(name, xs[0]), []
                for t in range(len(xs[0])):
                    carry, y = step(carry, xs[0][t] if len(xs) == 1 else tuple(x[t] for x in xs))
                    ys.append(y)
                return torch.stack(ys)

            def run_our_scan(*xs: Tensor, step: Function = step, name: str = name) -> Tensor:
                ys_of_scan: Tensor = scan(step, make_carry(name, xs[0]), xs[0] if len(xs) == 1 else xs)[1]
                return ys_of_scan

            def run_torch_scan(*xs: Tensor, step: Function = step, name: str = name) -> Tensor:
                def step_without_aliases(
                    carry: Any, x: Any
                ) -> Any:  # torch's scan refuses two results that share memory
                    carry, y = step(carry, x)
                    return carry, y.clone()

                ys_of_scan: Tensor = torch_scan(
                    step_without_aliases, make_carry(name, xs[0]), xs[0] if len(xs) == 1 else xs
                )[1]
                return ys_of_scan

            ways = {"loop": run_loop, "flexsn_hop.scan": compile_function(run_our_scan)}
            if steps_in_time <= 16:
                ways["torch.compile of the loop"] = compile_function(run_loop)
            else:
                ways["torch's scan"] = compile_function(run_torch_scan)
                if by_association is not None:
                    ways["torch's associative_scan"] = compile_function(by_association)
            yield Example(name, f"{steps_in_time} x {elements}", arguments, ways)


def compile_function(function: Function) -> Function:
    compiled_function: Function = torch.compile(function, fullgraph=True, dynamic=False)
    return compiled_function


def make_chains(rows: int, columns: int, device: torch.device) -> Iterator[Example]:
    def make_maker(*sizes: tuple[int, ...]) -> Callable[[], list[Tensor]]:
        return lambda: [(torch.rand(size, device=device) + 0.5).requires_grad_() for size in sizes]

    wide = (rows, columns)
    for function, sizes in ((gelu_gate, (wide, wide, (columns,))), (snake, (wide, (columns,)))):
        ways = {
            "eager": function,
            "pointwise": pointwise(function, autograd=True),
            "torch.compile": compile_function(function),
        }
        if function is gelu_gate:
            ways["pointwise in torch.compile"] = compile_function(pointwise(function, autograd=True))
        yield Example(function.__name__, f"{rows} x {columns}", make_maker(*sizes), ways)
    settings = (3, 1e-3, (0.9, 0.999), 1e-8, 0.01)

    def return_result(step: Function) -> Function:
        def call(*tensors_of_step: Tensor) -> Tensor:
            step(*tensors_of_step, *settings)
            return tensors_of_step[0]

        return call

    def make_tensors() -> list[Tensor]:
        return [torch.rand(rows * columns, device=device) for _ in range(4)]

    optimizers = {
        "eager": return_result(adamw),
        "pointwise": return_result(pointwise(adamw)),
        "torch.compile": compile_function(return_result(adamw)),
    }
    yield Example("AdamW, one tensor", f"{rows * columns}", make_tensors, optimizers, trains=False)


def measure_example(
    example: Example, device: torch.device, deadline: float, excluded: list[str]
) -> Iterator[list[str]]:
    """Yields a row for each way, except for the ways in `without`."""
    expected: Tensor | None = None
    for way, function in example.ways.items():
        if way in excluded:
            continue
        labels = [example.name, example.size, way]
        if time.perf_counter() > deadline:
            yield [*labels, "no time was left", "", "", ""]
            continue
        torch.compiler.reset()  # examples share code, and torch only compiles a few versions of one function
        torch.manual_seed(0)
        tensors = example.arguments()
        plain = [t.detach() for t in tensors]
        try:
            begun = time.perf_counter()
            with torch.no_grad():
                result = function(*(t.clone() for t in plain))
            synchronize(device)
            first = time.perf_counter() - begun
            if expected is None:
                expected = result.clone()
            difference = float((result - expected).abs().max())
            with torch.no_grad():
                inference = milliseconds(lambda: function(*plain), device)  # noqa: B023 - called here
            training = ""
            if example.trains:
                weights = torch.randn_like(result)

                def train() -> None:
                    torch.autograd.grad(function(*tensors), tensors, weights)  # noqa: B023 - called here

                begun = time.perf_counter()
                train()
                synchronize(device)
                first += time.perf_counter() - begun
                training = f"{milliseconds(train, device):.3f}"
        except Exception as error:
            reason = str(error).strip().splitlines()[0][:80].replace("|", "/") if str(error).strip() else ""
            yield [*labels, f"{type(error).__name__}: {reason}", "", "", ""]
            continue
        yield [*labels, f"{first:.1f}", f"{inference:.3f}", training, f"{difference:.1e}"]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/pointwise_peers.md"))
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--without", nargs="*", default=[], help="ways that are not measured, such as torch's scans")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=int, default=1, help="divisor of the sizes")
    options = parser.parse_args()
    device, scale = torch.device(options.device), math.isqrt(options.scale)
    deadline = time.perf_counter() + options.seconds
    torch.set_float32_matmul_precision("highest")
    rows: list[list[str]] = []
    note = f"`python benchmarks/pointwise_peers.py`: medians of whole calls, float32. {describe_machine(device)}"
    head = ["# Pointwise functions and recurrences: peers", "", note, ""]
    shapes = [(1024 if options.scale == 1 else 24, 65536 // options.scale), (16, 4194304 // options.scale)]
    for examples in (make_chains(8192 // scale, 8192 // scale, device), make_recurrences(shapes, device)):
        for example in examples:
            for row in measure_example(example, device, deadline, options.without):
                rows.append(row)
                # The table is written after each row, because the next row may take longer than the available time.
                publish([*head, *table(HEADER, rows)], options.output)


if __name__ == "__main__":
    main()
