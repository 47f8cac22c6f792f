"""Times of long sequences of few neurons on a GPU: kernels with default settings, compared with serial kernels and
torch.associative_scan.

    python benchmarks/long_sequences.py [--output FILE] [--cases lif alif ...] [--sweep | --shortest | --stages]

Inference is compared with a copy of the bytes of the inputs and the output. Training is compared with a copy that also
moves the gradient of the output, the gradients of the inputs, and the inputs a second time. All times are measured in
CUDA graphs and in one run. The spikes of kernels with segments and of serial kernels should be equal to the last bit,
and the table shows the number of spikes that differ. For affine steps with fast math, the results are equal up to
rounding. `--sweep` also measures other numbers of segments. `--shortest` writes another table, with sequences of 512 to
4096 steps, both in CUDA graphs and in single launches. This table shows the length above which segments are worth their
additional launches. `--stages` writes a table of serial kernels, by the number of chunks whose loads are in flight.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from measure import (
    capture_graph,
    copy_floor,
    describe_machine,
    milliseconds,
    publish,
    run_in_processes,
    synchronize,
    table,
    time_calls,
)
from torch import Tensor
from torch._higher_order_ops import associative_scan

from flexsn_nn import FlexSN
from flexsn_nn.neuron import ALIF, CUBALIF, LI, LIF, Izhikevich, ParametricLIF
from flexsn_runtime import PointwiseProgram, Specialization, launcher_in_words, prepare, scan
from flexsn_runtime.kernels._backward import BackwardScan, Cotangents
from flexsn_runtime.kernels._forward import ForwardScan
from flexsn_runtime.plans._segments import ON_GPU, SegmentRule, using_segments

HEADER = [
    *("neuron", "T x neurons", "dtype", "segments, warm-up"),
    *("inference / copy", "serial", "times", "training / copy", "serial", "times"),
    *("computed again", "spikes that differ", "gradients differ by", "at most", "associative_scan / copy"),
]
SWEEP = [replace(ON_GPU, elements=elements, steps=steps) for elements in (2**15, 2**16, 2**17) for steps in (64, 128)]
CALLS = 10  # number of calls during which a warm-up is chosen


def resonator_step(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes a step of a linear recurrent unit with one complex eigenvalue. The state `(v, w)` is a complex number,
    which is rotated by 0.1 and multiplied by 0.999.
    """
    new = 0.99401 * v - 0.09973 * w + x
    return new, new, 0.09973 * v + 0.99401 * w


def make_lru() -> PointwiseProgram:
    return PointwiseProgram(resonator_step, 1, 2, 1, fast_math=True)


def selective_step(a: Tensor, b: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Computes a step of a selective scan. The decay `a` and the input `b` differ in each step."""
    new = a * h + b
    return new, new


def make_mamba() -> PointwiseProgram:
    return PointwiseProgram(selective_step, 2, 1, 1)


def combine(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Combines two successive affine maps `h -> a h + b`."""
    return second[0] * first[0], second[0] * first[1] + second[1]


def combine_pairs(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Combines two successive affine maps of complex numbers. Each complex number is a pair of tensors."""
    (p, q, v, w), (r, s, x, y) = first, second
    return r * p - s * q, r * q + s * p, r * v - s * w + x, r * w + s * v + y


def scan_states(*maps: Tensor) -> Tensor:
    """Returns the states of the recurrence `h = a h + b`, or the real parts of the states if `a` and `b` are complex.

    The arguments are `a` and `b`, or the real and imaginary parts of `a` and then of `b`. The factors `a` are
    sequences, because the operator scans tensors of equal shapes.
    """
    together = combine if len(maps) == 2 else combine_pairs
    states: tuple[Tensor, ...] = associative_scan(together, maps, 0, combine_mode="pointwise")  # type: ignore[assignment]
    return states[1] if len(maps) == 2 else states[2]


def pass_maps(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    return a, b


def compute_li_maps(x: Tensor) -> tuple[Tensor, ...]:
    return torch.full_like(x, 0.5), 0.5 * x


def compute_lru_maps(x: Tensor) -> tuple[Tensor, ...]:
    return torch.full_like(x, 0.99401), torch.full_like(x, 0.09973), x, torch.zeros_like(x)


def make_plif() -> FlexSN:
    return ParametricLIF(init_tau=torch.linspace(1.5, 4.0, 128))


@dataclass(frozen=True, slots=True)
class Case:
    """A neuron that runs over a sequence.

    Attributes:
        scale: scale of normally distributed inputs, whose mean is 0.5.
        limit: largest acceptable training time, as a multiple of the time of the copy.
        inputs: number of inputs. If there are two inputs, the first input is a decay between 0 and 1.
        maps: function that computes the arguments of `scan_states` from the inputs; `None` if the step is not affine.
    """

    name: str
    make: Callable[[], FlexSN | PointwiseProgram]
    steps: int
    neurons: int
    dtype: torch.dtype = torch.float32
    scale: float = 0.85
    limit: float | None = None
    inputs: int = 1
    maps: Callable[..., tuple[Tensor, ...]] | None = None

    @property
    def streams(self) -> tuple[int, int]:
        """Numbers of streams of inference and of training. Training moves the inputs, the outputs, the gradients of
        both, and the inputs a second time.
        """
        return self.inputs + 1, 3 * self.inputs + 2


CASES = [
    Case("LIF, tau 2", LIF, 1024, 8192, limit=1.8),
    Case("LIF, tau 2", LIF, 1024, 8192, torch.bfloat16, limit=3.0),
    Case("LIF, tau 2", LIF, 4096, 2048, limit=2.4),
    Case("LIF, tau 2", LIF, 16384, 1024, limit=2.4),
    Case("LIF, tau 2", LIF, 65536, 256, limit=3.5),
    Case("LIF, tau 10", partial(LIF, tau=10.0), 16384, 1024, scale=1.9, limit=3.3),
    Case("LIF, tau 20", partial(LIF, tau=20.0), 16384, 1024, scale=2.7, limit=5.0),
    Case("PLIF per channel", make_plif, 16384, 1024),
    Case("ALIF, tau_a 20", partial(ALIF, tau_a=20.0), 16384, 1024),
    Case("ALIF, tau_a 200", ALIF, 16384, 1024),
    Case("Izhikevich", partial(Izhikevich, a=0.2, b=0.3), 16384, 1024),
    Case("CUBA", CUBALIF, 16384, 1024, scale=0.3),
    Case("LI", LI, 65536, 256, limit=2.5, maps=compute_li_maps),
    Case("LRU as a pair of numbers, fast math", make_lru, 65536, 256, limit=2.5, maps=compute_lru_maps),
    Case("selective scan, a and b given", make_mamba, 4096, 8 * 1024 * 16, scale=0.3, inputs=2, maps=pass_maps),
]


Rule = SegmentRule | None | Literal["usual"]
USUAL: Literal["usual"] = "usual"  # the default rule


class Work:
    """Calls of a case's neuron on random data, with one rule of segments.

    Args:
        rule: rule of segments, or `None` for serial kernels.
    """

    def __init__(self, case: Case, rule: Rule, device: torch.device) -> None:
        shape = (case.steps, max(case.neurons // 128, 1), min(case.neurons, 128))
        generator = torch.Generator(device).manual_seed(0)

        def random(scale: float, shift: float) -> Tensor:
            return (torch.randn(shape, device=device, generator=generator) * scale + shift).to(case.dtype)

        self.neuron = case.make()
        parameters: list[Tensor] = []
        if isinstance(self.neuron, FlexSN):
            self.neuron.to(device)
            self.neuron.backend = "triton"
            parameters = [*self.neuron.parameters()]
        self._rule = rule
        self.inputs = [random(case.scale, 0.5)]
        if case.inputs == 2:
            self.inputs.insert(0, random(1.0, 0.0).sigmoid_())
        for x in self.inputs:
            x.requires_grad_()
        self._grad = random(1.0, 0.0)
        self._leaves = [*self.inputs, *parameters]

    def _use_rule(self) -> AbstractContextManager[None]:
        return nullcontext() if self._rule == "usual" else using_segments(self._rule)

    def forward(self) -> Tensor:
        if isinstance(self.neuron, PointwiseProgram):
            return scan(*prepare(self.neuron, self.inputs), state_seqs=False)[0]
        self.neuron.reset()
        result: Tensor = self.neuron(*self.inputs)
        return result

    def infer(self) -> Tensor:
        with self._use_rule(), torch.no_grad():
            return self.forward()

    def train(self) -> tuple[Tensor, ...]:
        with self._use_rule():
            return torch.autograd.grad(self.forward(), self._leaves, self._grad)

    def describe_segments(self) -> tuple[str, str]:
        """Returns two texts: the number of segments with the number of warm-up steps, and the number of recomputed
        elements.
        """
        program = self.neuron if isinstance(self.neuron, PointwiseProgram) else self.neuron._get_program()
        affine = [count for step in program.specializations for count in step.affine_segments.values()]  # type: ignore[attr-defined]
        if affine:
            return f"{affine[-1]}, affine", ""
        speculations = [s for step in program.specializations for s in step.speculations.values()]  # type: ignore[attr-defined]
        for speculation in speculations:
            if not speculation.converges:
                return "serial, since trajectories do not converge", ""
            if speculation.last is not None:
                last = speculation.last
                return f"{last.segments}, {last.warm_up}", f"{last.elements} of {last.total}"
        return "serial", ""


def compile_one(task: tuple[Case, bool]) -> None:
    """Compiles kernels into Triton's cache. Runs in a separate process.

    Args:
        task: a case, and True to compile the kernels of `torch.associative_scan` instead of the neuron's kernels.
    """
    case, is_associative = task
    if is_associative:
        measure_associative_scan(case, torch.device("cuda"))
        return
    device = torch.device("cuda")
    for rule in (None, USUAL):
        calls = Work(replace(case, steps=min(case.steps, 4096 if case.inputs == 1 else 16)), rule, device)
        calls.infer()
        calls.train()


def measure_time(function: Callable[[], object], device: torch.device) -> float:
    call = capture_graph(function) if device.type == "cuda" else function
    return milliseconds(call, device, warmup=5, rep=25)


def compile_scan(case: Case) -> Callable[..., Tensor]:
    """Returns a compiled function that computes the states of a case from its inputs by `torch.associative_scan`."""
    maps = case.maps
    assert maps is not None

    def run(*inputs: Tensor) -> Tensor:
        return scan_states(*maps(*inputs))

    return torch.compile(run, dynamic=False)


def measure_associative_scan(case: Case, device: torch.device) -> str:
    """Returns the time of `torch.associative_scan`, as a multiple of the time of the copy, and the largest difference
    from the neuron's outputs. If `torch.associative_scan` fails, returns the error.
    """
    work, run = Work(case, USUAL, device), compile_scan(case)
    copy = copy_floor(case.steps * case.neurons, case.streams[0], device, case.dtype)
    try:
        with torch.no_grad():
            difference = float((run(*work.inputs) - work.infer()).abs().max())
            return f"{measure_time(lambda: run(*work.inputs), device) / copy:.2f}, differs by {difference:.1e}"
    except Exception as error:  # torch's prototype may raise any error
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:80]}".replace("|", "/")


def measure(case: Case, rules: list[Rule], device: torch.device) -> list[list[str]]:
    elements = case.steps * case.neurons
    streams = case.streams
    copies = {n: copy_floor(elements, n, device, case.dtype) for n in streams}
    serial = Work(case, None, device)
    spikes, gradients = serial.infer(), serial.train()
    serial_times = measure_time(serial.infer, device), measure_time(serial.train, device)
    rows = []
    for rule in rules:
        work = Work(case, rule, device)
        for _ in range(CALLS):
            work.infer()
            synchronize(device)
        infer, train = measure_time(work.infer, device), measure_time(work.train, device)
        results = work.infer()
        exact = isinstance(work.neuron, FlexSN)
        differ = str(int((results != spikes).sum())) if exact else f"by {float((results - spikes).abs().max()):.1e}"
        difference = max(
            float((a - b).abs().max() / b.abs().max()) for a, b in zip(work.train(), gradients, strict=True)
        )
        segments, recomputed = work.describe_segments()
        rows.append(
            [
                *(case.name, f"{case.steps} x {case.neurons}", str(case.dtype).removeprefix("torch."), segments),
                *(
                    f"{infer / copies[streams[0]]:.2f}",
                    f"{serial_times[0] / copies[streams[0]]:.2f}",
                    f"{serial_times[0] / infer:.2f}",
                ),
                *(
                    f"{train / copies[streams[1]]:.2f}",
                    f"{serial_times[1] / copies[streams[1]]:.2f}",
                    f"{serial_times[1] / train:.2f}",
                ),
                *(recomputed, differ, f"{difference:.1e}", "" if case.limit is None else str(case.limit)),
                "",
            ]
        )
        print(" | ".join(rows[-1]), flush=True)
    return rows


SHORT_HEADER = [
    *("T x neurons", "dtype", "call"),
    *("in a CUDA graph, us", "serial", "times", "launched, us", "serial", "times"),
]
SIZES = [(256, torch.float32), (1024, torch.float32), (4096, torch.float32), (8192, torch.bfloat16)]


def measure_shortest(device: torch.device) -> list[list[str]]:
    """Measures LIF on short sequences, with segments and with serial kernels."""
    rows = []
    rules: tuple[Rule, ...] = (replace(ON_GPU, shortest=1, launched=1, is_stored=False), None)
    for neurons, dtype in SIZES:
        for steps in (512, 1024, 2048, 4096):
            case = Case("LIF", LIF, steps, neurons, dtype)
            works = [Work(case, rule, device) for rule in rules]
            for call_name in ("infer", "train"):
                calls: list[Callable[[], object]] = [getattr(work, call_name) for work in works]
                in_graph = [1e3 * measure_time(call, device) for call in calls]
                launched = []
                for call in calls:
                    time_calls(call, 70, device)  # the compiled launcher takes over repeated calls
                    launched.append(min(1e6 * time_calls(call, 30, device)[0] / 30 for _ in range(8)))
                figures = [
                    text
                    for ours, serial in (in_graph, launched)
                    for text in (f"{ours:.0f}", f"{serial:.0f}", f"{serial / ours:.2f}")
                ]
                rows.append([f"{steps} x {neurons}", str(dtype).removeprefix("torch."), call_name, *figures])
                print(" | ".join(rows[-1]), flush=True)
    return rows


STAGES = (1, 2, 4, 6)


def measure_stages(device: torch.device) -> list[list[str]]:
    """Measures serial kernels over 1024 steps of 8192 LIF neurons, by the number of chunks whose loads are in flight.
    The times are multiples of the time of a copy of the same bytes.
    """
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        work = Work(Case("LIF", LIF, 1024, 8192, dtype), None, device)
        assert isinstance(work.neuron, FlexSN)
        step, arguments = prepare(work.neuron._get_program(), work.inputs)
        assert isinstance(step, Specialization)
        default_plan = step.plan(8192)
        checkpoints = ForwardScan(step, arguments, state_seqs=False, training=True)(arguments).checkpoints
        cotangents = Cotangents((work.inputs[0].detach(),), (None,), False)
        times: list[list[float]] = [[], []]
        for stages in STAGES:
            forward, backward = (
                replace(config, stages=stages) for config in (default_plan.inference, default_plan.backward)
            )
            plan = replace(default_plan, inference=forward, backward=backward)
            scans = (
                ForwardScan(step, arguments, state_seqs=False, training=False, plan=plan).plan,
                BackwardScan(step, arguments, checkpoints, cotangents, [True, False], plan=plan).plan,
            )
            operands = (arguments.all, (*arguments.all, *checkpoints, *cotangents.all))
            for times_of_pass, scan_plan, tensors in zip(times, scans, operands, strict=True):
                times_of_pass.append(measure_time(partial(scan_plan.run, tensors), device))
        for pass_name, streams, default_stages, times_of_pass in (
            ("inference", 2, default_plan.inference.stages, times[0]),
            ("backward", 3, default_plan.backward.stages, times[1]),
        ):
            copy = copy_floor(1024 * 8192, streams, device, dtype)
            figures = [f"{time / copy:.2f}" for time in times_of_pass]
            rows.append([str(dtype).removeprefix("torch."), pass_name, *figures, str(default_stages)])
            print(" | ".join(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "long_sequences.md")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="beginnings of the cases' names (default: all)")
    parser.add_argument("--sweep", action="store_true", help="also measure other numbers of segments")
    parser.add_argument("--shortest", action="store_true", help="measure short sequences of LIF instead")
    parser.add_argument("--stages", action="store_true", help="measure the effect of loads in flight instead")
    parser.add_argument("--device", default="cuda", help="cpu: short sequences in Triton's interpreter")
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.shortest:
        head = [
            "# The shortest sequences in segments of time",
            "",
            "`python benchmarks/long_sequences.py --shortest`: LIF, in segments and serially, in CUDA graphs and in",
            f"eager mode. Calls that repeat are launched by: {launcher_in_words(device)}. {describe_machine(device)}",
            "",
        ]
        publish([*head, *table(SHORT_HEADER, measure_shortest(device))], options.output.with_name("short_segments.md"))
        return
    if options.stages:
        head = [
            "# Loads in flight",
            "",
            "`python benchmarks/long_sequences.py --stages`: serial kernels over 1024 steps of 8192 LIF neurons.",
            "Times are multiples of a copy of two streams (inference) or three streams (backward), by the number of",
            "chunks of 8 steps that are loaded at a time.",
            describe_machine(device),
            "",
        ]
        header = ["dtype", "kernel", *(f"{n} in flight" for n in STAGES), "chosen"]
        publish([*head, *table(header, measure_stages(device))], options.output.with_name("loads_in_flight.md"))
        return
    names = [name.lower() for name in options.cases or [""]]
    selected_cases = [case for case in CASES if any(case.name.lower().startswith(name) for name in names)]
    rules: list[Rule] = [*SWEEP] if options.sweep else [USUAL]
    if device.type == "cuda":
        run_in_processes(
            compile_one,
            [(case, True) for case in selected_cases if case.maps] + [(case, False) for case in selected_cases],
        )
    else:
        selected_cases = [replace(case, steps=64, neurons=128) for case in selected_cases]
        rules = [SegmentRule(elements=512, largest=512, steps=8, fewest=2, warm_up=16)]
    rows = [row for case in selected_cases for row in measure(case, rules, device)]
    lines = [
        "# Long sequences of few neurons",
        "",
        "`python benchmarks/long_sequences.py`: times as multiples of a copy of the same streams, in CUDA graphs, in",
        "one run. With one input, inference has two streams and training has five. With two inputs, inference has",
        "three streams and training has eight. `serial` kernels process all steps one after another.",
        "`torch.associative_scan` is compiled, and measured in inference. Its factors are additional sequences. The",
        "decay and the input of the selective scan are arguments, with 8 x 1024 x 16 values each in every step.",
        describe_machine(device),
        "",
    ]
    publish([*lines, *table(HEADER, rows)], options.output)
    if options.sweep or device.type != "cuda":
        return
    for row, case in zip(rows, selected_cases, strict=True):
        if case.maps is not None:
            row[-1] = measure_associative_scan(case, device)
    publish([*lines, *table(HEADER, rows)], options.output)


if __name__ == "__main__":
    main()
