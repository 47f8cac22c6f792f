"""Times of LIF on a GPU, compared with other implementations: `torch.compile` of the loop, and SpikingJelly's neurons.

    python benchmarks/scan_peers.py [--output FILE] [--peers FOLDER] [--only NAME ...] [--shapes 8x6400000 ...]

FOLDER (default `.peers`) contains the peers that are not installed, each in a subfolder that `pip install --target` has
filled: `sj2` contains loguru and spikingjelly 2 (with Triton neurons and a FlexSN), and `sj14` contains spikingjelly
0.0.0.0.14 (with CuPy neurons, which need cupy). The table shows an error for missing peers.

Each peer runs in a separate process, which measures whole calls through autograd, of the peer and of this project's
module. A process is stopped after its time limit, but its earlier measurements stay in the table.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import describe_machine, milliseconds, publish, table
from scan_models import MODELS, Work
from step_functions import lif
from torch import Tensor

from flexsn_hop import eager_scan_final_state

SHAPES = ("8x6400000", "32x1600000", "128x524288", "512x32768", "1024x8192")
Forward = Callable[[Tensor], Tensor]
PAIR = ("ours", "peer / ours")
HEADER = ["peer", "T x NCL", "first step, s", "inference", *PAIR, "training", *PAIR, "differ"]


def run_loop(x: Tensor) -> Tensor:
    """Computes LIF as a plain loop."""
    return eager_scan_final_state(lif, 1, 1, 1, x, torch.zeros_like(x[0]))[0]


def compile_loop() -> Forward:
    compiled: Forward = torch.compile(run_loop, fullgraph=True, dynamic=False)
    return compiled


def make_spikingjelly_triton() -> Forward:
    return _make_forward(_make_lif_node())


def make_spikingjelly_flexsn() -> Forward:
    return _make_forward(_import_spikingjelly("neuron").FlexSN(lif, num_states=1))


def make_spikingjelly_cupy() -> Forward:
    importlib.import_module("cupy")  # without cupy, spikingjelly would silently use another implementation
    numpy: Any = importlib.import_module("numpy")
    if not hasattr(numpy, "int"):
        numpy.int = int  # spikingjelly 0.0.0.0.14 reads `numpy.int`
    return _make_forward(_make_lif_node(backend="cupy"))


def _make_lif_node(**options: str) -> Any:
    surrogate_function = _import_spikingjelly("surrogate").Sigmoid(alpha=4.0)
    return _import_spikingjelly("neuron").LIFNode(
        tau=2.0, surrogate_function=surrogate_function, step_mode="m", **options
    )


def _make_forward(neuron: Any) -> Forward:
    functional = _import_spikingjelly("functional")

    def start_worker(x: Tensor) -> Tensor:
        functional.reset_net(neuron)
        result = neuron(x)
        spikes: Tensor = result if isinstance(result, Tensor) else result[0]
        return spikes

    return start_worker


def _import_spikingjelly(name: str) -> Any:
    return importlib.import_module(f"spikingjelly.activation_based.{name}")


@dataclass(frozen=True)
class Peer:
    """An implementation to run.

    Attributes:
        folder: subfolder of the peer in the folder of peers, or an empty text if the peer is installed.
        seconds: time limit of the process of the peer.
        longest: largest T that is measured.
    """

    make: Callable[[], Forward]
    folder: str = ""
    seconds: int = 60
    longest: int = 10**9


PEERS = {
    "the loop": Peer(lambda: run_loop),
    "torch.compile of the loop": Peer(compile_loop, seconds=100, longest=32),
    "SpikingJelly 2 LIFNode, Triton": Peer(make_spikingjelly_triton, "sj2"),
    "SpikingJelly 2 FlexSN": Peer(make_spikingjelly_flexsn, "sj2", seconds=70),
    "SpikingJelly 0.0.0.0.14 LIFNode, CuPy": Peer(make_spikingjelly_cupy, "sj14"),
}


def measure_peer(peer: Peer, shapes: list[str], device: torch.device) -> Iterator[dict[str, Any]]:
    """Yields two records for each shape: the measurements of training, and the measurements of inference."""
    forward = peer.make()
    for shape in shapes:
        steps, ncl = map(int, shape.split("x"))
        ours = Work(MODELS["LIF"], steps, ncl, device)
        (x,) = ours.inputs
        grad = torch.randn_like(x)

        def train(x: Tensor = x, grad: Tensor = grad) -> object:
            return torch.autograd.grad(forward(x), x, grad)

        @torch.no_grad()
        def infer(x: Tensor = x) -> Tensor:
            return forward(x)

        begun = time.perf_counter()
        train()
        if device.type == "cuda":
            torch.cuda.synchronize()
        first = time.perf_counter() - begun
        times = {"peer": milliseconds(train, device), "ours": milliseconds(ours.train, device)}
        differ = int((forward(x) != ours.forward()[0]).sum())
        yield {"shape": shape, "what": "training", "first": first, "differ": differ, **times}
        times = {"peer": milliseconds(infer, device), "ours": milliseconds(ours.infer, device)}
        yield {"shape": shape, "what": "inference", **times}


def run_worker(name: str, shapes: list[str], peers: Path, device: torch.device) -> None:
    """Measures a peer, and prints a line of JSON for each record. Runs in the process of the peer."""
    peer = PEERS[name]
    if peer.folder:
        sys.path.insert(0, str(peers / peer.folder))
    try:
        for record in measure_peer(peer, shapes, device):
            print(json.dumps(record), flush=True)
    except Exception as error:  # any error of a peer becomes a line of the table
        print(json.dumps({"failure": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}))


def start_worker(name: str, shapes: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Starts the process of a peer, stops it at the time limit, and returns the records that it has printed."""
    peer = PEERS[name]
    arguments = ["--worker", name, "--peers", str(options.peers), "--device", options.device, "--shapes", *shapes]
    # Without this variable, SpikingJelly may use an implementation other than the named one.
    settings = {**os.environ, "SJ_LIF_CUDA_IMPLEMENTATION": "triton"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen([sys.executable, __file__, *arguments], stdout=output, env=settings)
        try:
            process.wait(timeout=peer.seconds)
            failures = []
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            failures = [{"failure": f"stopped after {peer.seconds} s"}]
        output.seek(0)
        lines = [line for line in output if line.startswith("{")]
    return [json.loads(line) for line in lines] + failures


def make_rows(name: str, shapes: list[str], records_of_peer: list[dict[str, Any]]) -> list[list[str]]:
    by_key = {(record["shape"], record["what"]): record for record in records_of_peer if "shape" in record}
    failure = next((record["failure"] for record in records_of_peer if "failure" in record), "")
    result = []
    for shape in shapes:
        training, inference = by_key.get((shape, "training")), by_key.get((shape, "inference"))
        first = failure if training is None else f"{training['first']:.1f}"
        differ = "" if training is None else str(training["differ"])
        result.append(
            [name, shape.replace("x", " x "), first, *_format_record(inference), *_format_record(training), differ]
        )
    return result


def _format_record(record: dict[str, Any] | None) -> list[str]:
    if record is None:
        return ["", "", ""]
    return [f"{record['peer']:.4f}", f"{record['ours']:.4f}", f"{record['peer'] / record['ours']:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "scan_peers.md")
    parser.add_argument("--peers", type=Path, default=Path(".peers"), help="folder of the peers that are not installed")
    parser.add_argument("--only", nargs="+", choices=list(PEERS), default=list(PEERS), metavar="NAME")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="TxNCL")
    parser.add_argument("--device", default="cuda", help="cpu: Triton's interpreter, to test this script")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.worker:
        run_worker(options.worker, options.shapes, options.peers, device)
        return
    lines = []
    for name in options.only:
        shapes = [shape for shape in options.shapes if int(shape.split("x")[0]) <= PEERS[name].longest]
        lines += make_rows(name, shapes, start_worker(name, shapes, options))
    publish(
        [
            "# LIF, float32: peers",
            "",
            "`python benchmarks/scan_peers.py`: medians in ms of whole calls of the modules, through autograd. A peer",
            "and this project's module are timed in one process. `differ` counts the spikes that differ.",
            describe_machine(device),
            "",
            *table(HEADER, lines),
        ],
        options.output,
    )


if __name__ == "__main__":
    main()
