"""Path of a warm call: the number of this project's functions that the call enters, the number of their files, and the
CPU time.

    python benchmarks/call_path.py [--output benchmarks/results/call_path.md] [--paths]

A call is warm after it has run a few times. `calls` is the number of functions of the packages that the call enters,
starting with `FlexSN.forward`. `files` is the number of files that define these functions. A generated function checks
the values that a core reads. It counts as a call without a file. A training step is a forward and a backward, both in
this thread. Kernels are launched by Python, or by the compiled launcher. `us` is the CPU time of a call in which
nothing is counted. This time is the shortest of several runs on the CPU, and the runs of all rows alternate. A
recurrent step in one launch has a GPU kernel, which does not run here, so its `us` covers only the rest of the call.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from measure import describe_machine, publish, table
from torch import nn

from flexsn_nn import ALIF, LIF, RLIF, FlexSN, functional
from flexsn_nn.layer import NormNeuron
from flexsn_nn.memory import PackedSpikes
from flexsn_runtime.launches._cooperative_launch import CooperativeLaunch

STEPS, BATCH, FEATURES = 4, 4, 32
WARM, CALLS, RUNS = 6, 100, 10
_PACKAGES = ("flexsn_graph", "flexsn_codegen", "flexsn_runtime", "flexsn_hop", "flexsn_nn")
_GENERATED = "<flexsn_graph.reads>"
Call = Callable[[], object]


def trace_path(call: Call) -> list[tuple[str, str]]:
    """Calls a function, and returns the file and the name of each function of the project that is entered, in order."""
    entered: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call":
            package = next((p for p in _PACKAGES if f"{os.sep}{p}{os.sep}" in code.co_filename), None)
            if package is not None:
                entered.append((package + code.co_filename.rpartition(package)[2], code.co_qualname))
            elif code.co_filename == _GENERATED:
                entered.append((_GENERATED, code.co_qualname))

    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
    return entered


def list_calls(launcher: str, *, one_launch: bool) -> list[tuple[str, Call]]:
    """Returns the name and the function of each call to measure, after a few runs of each function.

    Args:
        launcher: value of `FLEXSN_LAUNCHER`.
        one_launch: True for recurrent steps in one launch, False for all other calls.
    """
    os.environ["FLEXSN_LAUNCHER"] = launcher
    torch.manual_seed(0)
    x = torch.rand(STEPS, BATCH, FEATURES)
    leaf, grad = x.clone().requires_grad_(), torch.ones_like(x)

    def make_inference(neuron: FlexSN, inputs: torch.Tensor) -> Call:
        def call() -> object:
            with torch.no_grad():
                return neuron(inputs)

        return call

    def make_training_step(neuron: FlexSN) -> Call:
        def call() -> object:
            neuron.reset()
            return torch.autograd.grad(neuron(leaf), leaf, grad)

        return call

    def keep_states(neuron: FlexSN) -> FlexSN:
        neuron.store_state_seqs = True
        return neuron

    def count_spikes(neuron: FlexSN) -> FlexSN:
        neuron.count_spikes = True
        return neuron

    def make_norm_calls(inputs: torch.Tensor) -> tuple[Call, Call]:
        inference_layer, layer = (NormNeuron(nn.BatchNorm1d(FEATURES), LIF(backend="cpp")) for _ in range(2))
        inference_layer.eval()

        def infer() -> object:
            with torch.no_grad():
                return inference_layer(inputs)

        def train() -> object:
            functional.reset_net(layer)
            leaves = [leaf, *layer.parameters()]
            return torch.autograd.grad(layer(leaf), leaves, grad)

        return infer, train

    def make_recurrent_calls() -> tuple[Call, Call]:
        neuron = RLIF(FEATURES, backend="triton")
        leaves = [leaf, *neuron.parameters()]

        def train() -> object:
            neuron.reset()
            return torch.autograd.grad(neuron(leaf), leaves, grad)

        return make_inference(RLIF(FEATURES, backend="triton"), x), train

    def make_packed_step() -> Call:
        layer, neuron = nn.Linear(FEATURES, FEATURES, bias=False), LIF(backend="cpp")
        net = nn.Sequential(neuron, layer)

        def train() -> object:
            neuron.reset()
            with PackedSpikes(net):
                y = net(leaf)
            return torch.autograd.grad(y, [leaf, *net.parameters()], grad)

        return train

    if one_launch:
        loops = make_recurrent_calls()
        rows = [("inference, RLIF in one launch", loops[0]), ("training step, RLIF in one launch", loops[1])]
    else:
        norms = make_norm_calls(x)
        rows = [
            ("inference, LIF", make_inference(LIF(backend="cpp"), x)),
            ("inference, ALIF", make_inference(ALIF(backend="cpp"), x)),
            ("inference, LIF, states kept", make_inference(keep_states(LIF(backend="cpp")), x)),
            ("inference, LIF, counting", make_inference(count_spikes(LIF(backend="cpp")), x)),
            ("single step, LIF", make_inference(LIF(backend="cpp", step_mode="s"), x[0])),
            ("training step, LIF", make_training_step(LIF(backend="cpp"))),
            ("training step, ALIF", make_training_step(ALIF(backend="cpp"))),
            ("training step, LIF, states kept", make_training_step(keep_states(LIF(backend="cpp")))),
            ("training step, LIF, counting", make_training_step(count_spikes(LIF(backend="cpp")))),
            ("inference, norm fused", norms[0]),
            ("training step, norm fused", norms[1]),
            ("training step, spikes as bits, with a linear layer", make_packed_step()),
        ]
    for _, call in rows:
        for _ in range(WARM):
            call()
    return rows


def disable_gpu_kernels() -> None:
    """Makes the launches of GPU kernels do nothing. Otherwise, Triton's interpreter would run these kernels."""

    def skip(launch: object, *arguments: object) -> None:
        pass

    CooperativeLaunch.__call__ = skip  # type: ignore[assignment, method-assign]


def measure_least(rows: list[tuple[str, Call]]) -> list[float]:
    """Returns the shortest CPU time of a call for each row, in microseconds. The runs of the rows alternate."""
    best = [float("inf")] * len(rows)
    for _ in range(RUNS):
        for i, (_, call) in enumerate(rows):
            begun = time.process_time()
            for _ in range(CALLS):
                call()
            best[i] = min(best[i], 1e6 * (time.process_time() - begun) / CALLS)
    return best


def measure_rows(launcher: str, *, one_launch: bool, paths: bool) -> list[list[str]]:
    """Returns the rows of the table for a launcher."""
    rows = list_calls(launcher, one_launch=one_launch)
    lines = []
    for (name, call), us in zip(rows, measure_least(rows), strict=True):
        entered = trace_path(call)
        first = next(i for i, (_, function) in enumerate(entered) if function == "FlexSN.forward")
        entered = entered[first:]
        files = {file for file, _ in entered} - {_GENERATED}
        lines.append([name, launcher, str(len(entered)), str(len(files)), f"{us:.1f}"])
        if paths:
            print(
                f"\n{name}, {launcher}\n" + "\n".join(f"  {file}: {function}" for file, function in entered),
                file=sys.stderr,
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "call_path.md")
    parser.add_argument("--paths", action="store_true", help="also print the functions")
    parser.add_argument("--one-launch", action="store_true", help="only print the rows of recurrent steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one_launch:
        disable_gpu_kernels()
        print(json.dumps(measure_rows("python", one_launch=True, paths=options.paths)))
        return
    lines = []
    for launcher in ("python", "compiled"):
        lines += measure_rows(launcher, one_launch=False, paths=options.paths)
    # Without a GPU, Triton's kernels need its interpreter, which has to be enabled before Triton is imported.
    command = [sys.executable, __file__, "--one-launch", *(["--paths"] if options.paths else [])]
    process = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, check=True, stdout=subprocess.PIPE)
    lines += json.loads(process.stdout)
    head = [
        "# The path of a warm call",
        "",
        "`python benchmarks/call_path.py`: functions of the packages that a call enters, starting with",
        "`FlexSN.forward`, and the number of their files. The launcher is Python, or the compiled one. The kernels of",
        f"recurrent steps in one launch are not run. {STEPS} x {BATCH} x {FEATURES}, float32, one thread.",
        f"`us` is CPU time: the minimum of {RUNS} runs of {CALLS} calls. The runs of the rows alternate.",
        describe_machine(torch.device("cpu")),
        "",
    ]
    publish([*head, *table(["call", "launcher", "calls", "files", "us"], lines)], options.output)


if __name__ == "__main__":
    main()
