"""Times of training steps of all neurons on a GPU, compared with the copy floor.

    python benchmarks/neurons.py [--output benchmarks/results/neurons.md] [--shape 32x1600000] [NEURON ...]

A call is one forward and one backward of the module, as a user would call it, from a reset state. The floor of every
neuron is five streams, where a stream is one `T x NCL` float32 tensor that is read or written once. The forward reads x
and writes s. The backward reads grad_s, reads x again and writes grad_x. A neuron also moves some bytes that the floor
does not contain: a checkpoint of each state every few steps, and a partial sum per element for each learned parameter.
The table names them for slow neurons. Several processes compile the kernels before the measurement.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from measure import (
    capture_graph,
    copy_floor,
    describe_machine,
    issue_time,
    milliseconds,
    publish,
    run_in_processes,
    table,
)
from triton.compiler import CompiledKernel

from flexsn_graph import generate_forward_and_backward_graph
from flexsn_nn import neuron
from flexsn_nn.neuron import Neuron

FLOOR_STREAMS = 5
LIMIT = 1.3
TRANSCENDENTAL = ("exp", "log", "sigmoid", "tanh", "pow", "sin", "cos")

# The arguments are chosen so that no term of a neuron's equation is zero.
NEURONS: dict[str, Callable[[], Neuron]] = {
    "IF": neuron.IF,
    "LIF": neuron.LIF,
    "LIF, soft reset": lambda: neuron.LIF(v_reset=None),
    "LIF, decay_input=False": lambda: neuron.LIF(decay_input=False),
    "PLIF": neuron.PLIF,
    "KLIF": neuron.KLIF,
    "LIAF": lambda: neuron.LIAF(torch.relu, threshold_related=True),
    "ALIF": neuron.ALIF,
    "ILIF": neuron.ILIF,
    "LI": neuron.LI,
    "CUBALIF": neuron.CUBALIF,
    "QIF": neuron.QIF,
    "EIF": neuron.EIF,
    "AdEx": lambda: neuron.AdEx(a=0.2, b=0.3),
    "Izhikevich": lambda: neuron.Izhikevich(a=0.2, b=0.3),
    "GatedLIF": lambda: neuron.GatedLIF(init_linear_decay=0.05),
    "Leaky": lambda: neuron.Leaky(beta=0.9),
    "Leaky, learned": lambda: neuron.Leaky(beta=0.9, learn_beta=True, learn_threshold=True),
    "Synaptic": lambda: neuron.Synaptic(alpha=0.9, beta=0.8),
    "Alpha": lambda: neuron.Alpha(alpha=0.9, beta=0.8),
    "Lapicque": lambda: neuron.Lapicque(R=2.0, C=3.0),
}


@dataclass(frozen=True)
class Row:
    """Measurements of one neuron: times in ms, ops per element and step, and resource use of its kernels."""

    name: str
    compiled: float
    graph: float
    issued: float
    loop: float
    forward_ops: int
    backward_ops: int
    transcendental: int
    learned: int
    states: int
    kernels: list[CompiledKernel]

    def cells(self, floor: float, steps: int) -> list[str]:
        ratio = self.compiled / floor
        registers = " + ".join(f"{k.n_regs}" for k in self.kernels)
        return [
            self.name,
            f"{floor:.4f}",
            f"{self.compiled:.4f}",
            f"{self.graph:.4f}",
            f"{ratio:.2f}",
            f"{self.graph / floor:.2f}",
            f"{self.loop / self.compiled:.1f}",
            f"{self.forward_ops} + {self.backward_ops}",
            registers,
            self._reason(floor, steps) if ratio > LIMIT else "",
        ]

    def _reason(self, floor: float, steps: int) -> str:
        """Returns the reason why the neuron is slow, or facts that may explain its time."""
        if self.graph <= LIMIT * floor:
            return f"the CPU, which needs {self.issued:.3f} ms to issue a step"
        facts = [
            f"the {'backward' if 'backward' in k.name else 'forward'} spills {k.n_spills} registers"
            for k in self.kernels
            if k.n_spills
        ]
        if self.transcendental:
            facts.append(f"{self.transcendental} exp, log and similar ops per element and step")
        if self.learned:
            facts.append(f"{self.learned} learned parameters: {self.learned / steps:.2f} more streams, and their sums")
        facts.append(f"{self.states} states: checkpoints every few steps, written and read")
        return "; ".join(facts)


def make_training_step(name: str, steps: int, ncl: int, device: torch.device, backend: str) -> Callable[[], object]:
    torch.manual_seed(0)
    module = NEURONS[name]().to(device)
    module.backend = backend
    x = (torch.randn(steps, ncl, device=device) + 0.5).requires_grad_()
    grad = torch.randn(steps, ncl, device=device)
    leaves = [x, *module.parameters()]

    def run() -> object:
        module.reset()
        spikes = module(x)
        # While a graph is captured, no autograd node of an earlier step may exist.
        module.reset()
        return torch.autograd.grad(spikes, leaves, grad)

    return run


def count_ops(name: str) -> tuple[int, int, int]:
    """Returns the number of ops of the step, the number of ops of its VJP, and the number of transcendental ops in
    both. The backward runs all of these ops.
    """
    module = NEURONS[name]()
    examples = (torch.zeros(2),) * (module.num_inputs + module.num_states)
    graphs = generate_forward_and_backward_graph(module.core, examples)
    calls = [[n for n in graph.nodes if n.op == "call_function"] for graph in graphs]
    transcendental = [n for nodes in calls for n in nodes if any(word in str(n.target) for word in TRANSCENDENTAL)]
    return len(calls[0]), len(calls[1]), len(transcendental)


def compile_one(name: str, steps: int, ncl: int, device: str) -> None:
    """Compiles the kernels into Triton's cache. Runs in a separate process."""
    make_training_step(name, steps, ncl, torch.device(device), "triton")()


def compile_all(names: list[str], steps: int, ncl: int, device: torch.device) -> None:
    run_in_processes(partial(compile_one, steps=steps, ncl=ncl, device=str(device)), names)


def find_loaded_kernels() -> list[CompiledKernel]:
    """Returns all kernels that this process has loaded. Triton keeps no list of loaded kernels."""
    return [value for value in gc.get_objects() if type(value) is CompiledKernel]


def measure(name: str, steps: int, ncl: int, device: torch.device) -> Row:
    before = find_loaded_kernels()
    compiled = make_training_step(name, steps, ncl, device, "triton")
    compiled()
    kernels = [kernel for kernel in find_loaded_kernels() if kernel not in before]
    module = NEURONS[name]()
    loop = make_training_step(name, steps, ncl, device, "torch")
    return Row(
        name,
        milliseconds(compiled, device),
        milliseconds(capture_graph(compiled) if device.type == "cuda" else compiled, device),
        issue_time(compiled, device),
        milliseconds(loop, device, warmup=1, rep=30),
        *count_ops(name),
        sum(1 for _ in module.parameters()),
        module.num_states,
        sorted(kernels, key=lambda kernel: "backward" in kernel.name),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("neurons", nargs="*", metavar="NEURON", help=f"some of {', '.join(NEURONS)} (default: all)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "neurons.md")
    parser.add_argument("--shape", default="32x1600000", help="T x NCL")
    parser.add_argument("--device", default="cuda", help="cpu: Triton's interpreter, to test this script")
    options = parser.parse_args()
    names = options.neurons or list(NEURONS)
    steps, ncl = map(int, options.shape.split("x"))
    device = torch.device(options.device)
    if device.type == "cuda":
        compile_all(names, steps, ncl, device)
    rows = [measure(name, steps, ncl, device) for name in names]
    floor = copy_floor(steps * ncl, FLOOR_STREAMS, device)
    header = ["neuron", "copy 5", "call", "graph", "call / copy", "graph / copy", "loop / call", "ops", "registers"]
    header += ["reasons"]
    lines = [
        f"# Training step of every neuron, {steps} x {ncl}, float32",
        "",
        "`python benchmarks/neurons.py`: one forward and one backward of the module, medians in ms, in one run.",
        "`copy 5` moves as many bytes as five streams. `graph` is a replay of the call in a CUDA graph. `loop` is",
        '`backend="torch"`. Ops are counted per element and step, for the step and its VJP. Registers are per thread,',
        f"for forward and backward. Reasons are given for calls above {LIMIT}.",
        describe_machine(device),
        "",
        *table(header, [row.cells(floor, steps) for row in rows]),
    ]
    publish(lines, options.output)


if __name__ == "__main__":
    main()
