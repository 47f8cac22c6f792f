"""Prints facts about Inductor's code for compiled scans. This is a separate program because it needs Triton without its
interpreter.

    python tests/compiled_launches.py

No GPU is needed: networks are compiled for the CPU, with a lowering that treats the CPU as a GPU. Launches are
recorded and not executed. The program prints a JSON object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar
from unittest import mock

import torch
import triton
from scan_cores import CASES, hard_spike, problem
from torch import Tensor, nn
from torch._dynamo.device_interface import CpuInterface
from torch._dynamo.testing import CompileCounterWithBackend
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.runtime import triton_compat
from torch._inductor.utils import run_and_get_code
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import flexsn_codegen.targets.triton._launcher
from flexsn_codegen import ForwardSpec, InputLayout
from flexsn_codegen.targets.triton._standalone import standalone
from flexsn_hop import flex_sn_scan_final_state, register_scan_lowering
from flexsn_runtime import KernelLowering, PointwiseProgram

TARGET = GPUTarget("cuda", 90, 32)
AMD = GPUTarget("hip", "gfx942", 64)


class Driver:
    """A driver of Triton that needs no GPU."""

    def get_current_target(self) -> GPUTarget:
        return TARGET


class TritonOnCpu(KernelLowering):
    """A lowering that launches Triton kernels for tensors on the CPU."""

    name = "triton_on_cpu"

    def why_unavailable(self, flat_args: Sequence[Any]) -> str | None:
        return None


class Launch:
    """A stand-in for a compiled kernel that records its launch."""

    launches: ClassVar[list[tuple[str, list[Any]]]] = []

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, *arguments: Any, stream: int) -> None:
        descriptions = [list(a.stride()) if isinstance(a, Tensor) else a for a in arguments]
        Launch.launches.append((self.name.rsplit("_", 1)[0], descriptions))


def train(run: Callable[..., Any], leaves: Sequence[Tensor], *arguments: Tensor) -> list[str]:
    """Compiles a function and trains with it. Returns the generated code of the forward and of the backward."""

    def step() -> object:
        return torch.autograd.grad(sum(result.sum() for result in run(*arguments)), leaves)

    return run_and_get_code(step)[1]


def run_network(p: Any, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
    spikes, *last = flex_sn_scan_final_state(p.core, *p.counts, 2.0 * torch.relu(x), *states)
    return (0.5 * spikes, *last)


def report_direct_launches() -> dict[str, Any]:
    """Compiles a network with layers around its neurons, for static shapes. Counts launches, loops and warnings."""
    p = problem(CASES[8], 20, (4, 6))
    run = torch.compile(partial(run_network, p), fullgraph=True, dynamic=False)
    # torch warns if it cannot determine which arguments a kernel writes to. It then assumes that the kernel writes to
    # all of them.
    analyse = triton_kernel_wrap.generate_ttir
    with (
        mock.patch.object(triton_kernel_wrap.log, "warning") as warning,
        mock.patch.object(triton_kernel_wrap, "generate_ttir", wraps=analyse) as analysis,
    ):
        codes = train(run, p.leaves, *p.inputs, *p.states)
    return {
        "rests": find_rests(codes),
        "launches": [len(re.findall(r"scan_\w+\.run\(", code)) for code in codes],
        "loops": sum("run_scan" in code for code in codes),
        "warnings": warning.call_count,
        "analyses": analysis.call_count,
    }


def count_graphs() -> list[int]:
    """Runs a compiled scan for several lengths and batch sizes. Counts the compiled graphs after each run."""
    counts = []
    counter = CompileCounterWithBackend("inductor")
    first = problem(CASES[10], 16, (5, 6))
    run = torch.compile(
        lambda *flat: flex_sn_scan_final_state(first.core, *first.counts, *flat),
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    for steps, batch in ((16, 5), (4, 4), (9, 7), (2, 3), (100, 300)):
        p = problem(CASES[10], steps, (batch, 6))
        torch.autograd.grad(run(*p.inputs, *p.states)[0].sum(), p.inputs[:1])
        counts.append(counter.frame_count)
    return counts


def find_rests_of_lengths(*lengths: int) -> list[bool]:
    """Compiles one network with scans of these lengths. Returns, for the forward and for the backward, True if a kernel
    handles steps after the last full chunk.
    """
    problems = [problem(CASES[1], steps, (4, 6)) for steps in lengths]
    arguments = [(*p.inputs, *p.states) for p in problems]

    def run_all(*flat: Tensor) -> list[Tensor]:
        tensors = iter(flat)
        results_by_scan = (
            run_network(p, *(next(tensors) for _ in values)) for p, values in zip(problems, arguments, strict=True)
        )
        return [result for results in results_by_scan for result in results]

    run = torch.compile(run_all, fullgraph=True, dynamic=False)
    return find_rests(
        train(run, [leaf for p in problems for leaf in p.leaves], *(t for values in arguments for t in values))
    )


def find_rests(codes: Sequence[str]) -> list[bool]:
    """Returns True for each code that handles steps after the last full chunk."""
    return ["left > 0" in code or "chunks * 8, T" in code for code in codes]


def list_launches_of_rows() -> list[tuple[str, list[Any]]]:
    """Returns the launches for a step that is so large that each instance of a kernel processes several rows."""
    p = problem(next(case for case in CASES if case.name == "plif_channel"), 2, (16384, 64))
    previous_count = len(Launch.launches)
    train(torch.compile(partial(run_network, p), fullgraph=True, dynamic=False), p.leaves, *p.inputs, *p.states)
    return Launch.launches[previous_count:]


def report_channels_last() -> dict[str, Any]:
    """Compiles a network: a convolution, a norm, LIF neurons, another convolution, and other LIF neurons. Returns the
    launches, which contain the strides of the scans' tensors, and the copies that only change a layout.
    """
    core = CASES[1].make(hard_spike, [])
    layers = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)])
    for weight in (layers[0].weight, layers[2].weight):
        assert isinstance(weight, Tensor)
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)

    def lif(currents: Tensor, x: Tensor) -> Tensor:
        sequence = currents.unflatten(0, x.shape[:2])
        zeros = torch.zeros(()).expand(sequence.shape[1:])
        return flex_sn_scan_final_state(core, 1, 1, 1, sequence, zeros, zero_states=[True])[0]

    def block(x: Tensor) -> tuple[Tensor]:
        first = lif(layers[1](layers[0](x.flatten(0, 1))), x)
        return (lif(layers[2](first.flatten(0, 1)), x),)

    run = torch.compile(block, fullgraph=True, dynamic=False)
    previous_count = len(Launch.launches)
    x = torch.randn(10, 3, 6, 8).contiguous(memory_format=torch.channels_last).unflatten(0, (5, 2))
    codes = train(run, list(layers.parameters()), x)
    # Names of copies that change a layout, including copies that are fused with other operations.
    copies = [re.findall(r"cpp_fused_\w*(?:clone|contiguous)\w*(?= =)", code) for code in codes]
    return {"launches": Launch.launches[previous_count:], "copies": copies}


def count_inexact_instructions() -> dict[str, int]:
    """Builds a kernel with different options. Counts, for each build, the instructions that fuse a product and a sum,
    or that flush subnormal numbers to zero.

    The instructions for AMD are not counted. For AMD, the kernel only has to compile.
    """
    p = problem(CASES[9], 5, (3, 4))
    step, _ = PointwiseProgram(p.core, *p.counts).specialize(p.inputs, p.states)
    spec = ForwardSpec(
        inputs=(InputLayout(),),
        states=(-1, -1),
        state_dtypes=(torch.float32,) * 2,
        lifted=(),
        outputs=(True,),
        state_seqs=(False,) * 2,
        final_states=(True,) * 2,
    )
    kernel = step.forward_kernel(spec).function

    def assemble(function: Any, target: GPUTarget, fusion: bool) -> Any:
        types = {name: "*fp32" if name.endswith("_ptr") else "i32" for name in function.arg_names}
        source = ASTSource(function, {**types, "BLOCK": "constexpr"}, {"BLOCK": 512})
        return triton.compile(source, target=target, options={"num_warps": 4, "enable_fp_fusion": fusion}).asm

    def count(function: Any, fusion: bool) -> int:
        return len(re.findall(r"\bfma\.|\.ftz\b", assemble(function, TARGET, fusion)["ptx"]))

    with mock.patch.object(Driver, "get_current_target", return_value=AMD):
        assert "s_endpgm" in assemble(standalone(kernel), AMD, True)["amdgcn"]
    return {"fused": count(kernel, True), "strict": count(kernel, False), "standalone": count(standalone(kernel), True)}


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    register_scan_lowering(TritonOnCpu(on_cpu="triton"), before=KernelLowering.name)
    with (
        mock.patch.object(AsyncCompile, "triton", lambda self, name, source, device_str: Launch(name)),
        mock.patch.object(flexsn_codegen.targets.triton._launcher, "_single_device", return_value=True),
        # torch 2.15 reads the Triton options of the tensors' device. This device is the CPU, for which Triton has no
        # backend.
        mock.patch.object(CpuInterface, "raise_if_triton_unavailable", return_value=None),
        mock.patch.object(triton_compat, "GPUTarget", return_value=TARGET),
        torch._inductor.config.patch(fx_graph_cache=False, compile_threads=1),
    ):
        report = {
            "direct": report_direct_launches(),
            "dynamic": count_graphs(),
            "rests": find_rests_of_lengths(4, 16),
            "rows": list_launches_of_rows(),
            "channels_last": report_channels_last(),
            "inexact": count_inexact_instructions(),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
