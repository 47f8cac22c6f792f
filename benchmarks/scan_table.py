"""Times of neurons on a GPU, compared with the copy floor, in inference and training, eagerly and in a CUDA graph.

    python benchmarks/scan_table.py [--output FILE] [--models LIF IF ...] [--shapes 8x6400000 ...]

A stream is one `T x NCL` tensor that is read or written once. `copy` is the time of a copy that moves the bytes that
every call has to move. Inference moves the inputs and the outputs. Training also moves the gradients of the outputs,
the inputs again, and the gradients of the inputs. `call` is a whole call of the module, through autograd.
`graph` is a replay of the same call, captured in a CUDA graph. The gradients of two runs have to agree to the last bit;
otherwise, the script stops.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from measure import capture_graph, copy_floor, describe_machine, milliseconds, publish, run_in_processes, table
from scan_models import MODELS, Work

SHAPES = ("8x6400000", "32x1600000", "128x524288", "512x32768", "1024x8192")
# Limits of time / copy, in inference and in training.
FLOAT32_LIMITS = {
    "8x6400000": (1.16, 1.18),
    "32x1600000": (1.12, 1.12),
    "128x524288": (1.12, 1.12),
    "512x32768": (1.12, 1.4),
    "1024x8192": (1.9, 2.9),
}
BFLOAT16_LIMIT = 1.22
BFLOAT16_SHAPES = SHAPES[:3]
HEADER = ["neuron", "T x NCL", "what", "streams", "copy", "call", "graph", "call / copy", "graph / copy", "at most"]

Case = tuple[str, str, torch.dtype]  # model, shape, dtype


def list_cases(models: list[str], shapes: list[str]) -> list[Case]:
    float32_cases: list[Case] = [(model, shape, torch.float32) for model in models for shape in shapes]
    return float32_cases + [("LIF", shape, torch.bfloat16) for shape in shapes if "LIF" in models]


def find_limits(case: Case) -> tuple[float, float] | tuple[str, str]:
    model, shape, dtype = case
    if model != "LIF" or shape not in FLOAT32_LIMITS:
        return "", ""
    if dtype == torch.float32:
        return FLOAT32_LIMITS[shape]
    return (BFLOAT16_LIMIT, BFLOAT16_LIMIT) if shape in BFLOAT16_SHAPES else ("", "")


def make_work(case: Case, device: torch.device) -> Work:
    model, shape, dtype = case
    steps, ncl = map(int, shape.split("x"))
    return Work(MODELS[model], steps, ncl, device, dtype)


def compile_one(case: Case) -> None:
    """Compiles the kernels into Triton's cache. Runs in a separate process."""
    work = make_work(case, torch.device("cuda"))
    work.infer()
    work.train()


def assert_gradients_repeat(work: Work, case: Case) -> None:
    for first, second in zip(work.train(), work.train(), strict=True):
        if not torch.equal(first, second):
            raise AssertionError(f"{case}: gradients differ from one run to the next.")


def measure_graph(function: Callable[[], object], device: torch.device) -> tuple[float | None, str]:
    """Returns the time of the captured call in ms and an empty text, or `None` and the reason for a failed capture."""
    if device.type != "cuda":
        return None, ""
    try:
        return milliseconds(capture_graph(function), device), ""
    except RuntimeError as error:
        return None, str(error).splitlines()[0]


def measure(case: Case, device: torch.device) -> tuple[list[list[str]], list[str]]:
    """Returns the rows of the table for inference and training, and the reasons for failed captures."""
    model, shape, dtype = case
    work = make_work(case, device)
    elements = work.inputs[0].numel()
    assert_gradients_repeat(work, case)
    kinds = (
        ("inference", MODELS[model].inference_streams, work.infer),
        ("training", MODELS[model].training_streams, work.train),
    )
    rows, failures = [], []
    for (work_name, streams, function), limit in zip(kinds, find_limits(case), strict=True):
        floor = copy_floor(elements, streams, device, dtype)
        call = milliseconds(function, device)
        graph, failure = measure_graph(function, device)
        if failure:
            failures.append(f"{model}, {shape}, {work_name}: capture failed: {failure}")
        name = model if dtype == torch.float32 else f"{model}, {str(dtype).removeprefix('torch.')}"
        times = [f"{floor:.4f}", f"{call:.4f}", "" if graph is None else f"{graph:.4f}"]
        ratios = [f"{call / floor:.2f}", "" if graph is None else f"{graph / floor:.2f}"]
        rows.append([name, shape.replace("x", " x "), work_name, str(streams), *times, *ratios, str(limit)])
    return rows, failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "scan_table.md")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="MODEL")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="TxNCL")
    parser.add_argument("--device", default="cuda", help="cpu: Triton's interpreter, to test this script")
    options = parser.parse_args()
    device = torch.device(options.device)
    all_cases = list_cases(options.models, options.shapes)
    if device.type == "cuda":
        run_in_processes(compile_one, all_cases)
    rows, failures = [], []
    for case in all_cases:
        rows_of_case, failures_of_case = measure(case, device)
        rows += rows_of_case
        failures += failures_of_case
    lines = [
        "# Scans against the copy floor",
        "",
        "`python benchmarks/scan_table.py`: medians in ms, in one run. `copy` moves as many bytes as `streams` tensors",
        "of `T x NCL`. `call` is a call of the module, through autograd, and `graph` is its replay as a CUDA graph.",
        "Gradients of two runs were equal to the last bit in every row.",
        describe_machine(device),
        "",
        *table(HEADER, rows),
        *(["", *failures] if failures else []),
    ]
    publish(lines, options.output)


if __name__ == "__main__":
    main()
