"""Compiles kernels for GPUs that this machine may lack, and reports the resources that the kernels use.

If Triton's interpreter is on, as in most tests, the compiler is not available in the same process. The compilation then
runs in a separate process. That process runs this module, which reads jobs from its standard input and writes results.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flexsn_codegen.errors import OfflineCompileError
from flexsn_codegen.source._cache import compile_triton_code_str
from flexsn_codegen.source._numerics import compile_options
from flexsn_codegen.source._source import KernelSource

_POINTERS = {
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.uint16: "*u16",
    torch.uint32: "*u32",
    torch.uint64: "*u64",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}
# These sizes are usually multiples of 16, so kernels are compiled for multiples of 16.
_ALIGNED = {"N", "NCL", "ROW"}


@dataclass(frozen=True, slots=True)
class OfflineJob:
    """A kernel to compile.

    Attributes:
        kernel: result of `forward_source`, `backward_source` or `Pointwise.source`.
        target: name of a GPU's architecture, such as ``"sm_80"``, ``"sm_90"`` or ``"gfx942"``.
        dtypes: dtypes of the kernel's tensors, in the order of `kernel.params`, or one dtype for all tensors.
        block: number of elements per program.
        num_warps: number of warps per program.
        fast_math: True to compile with the options for fast math (`compile_options`).
    """

    kernel: KernelSource
    target: str
    dtypes: Sequence[torch.dtype] = (torch.float32,)
    block: int = 1024
    num_warps: int = 4
    fast_math: bool = False


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """Resources that a compiled kernel uses.

    Attributes:
        target: the target for which the kernel was compiled.
        registers: registers per thread. On an AMD GPU, vector registers per thread.
        spilled_bytes: bytes per thread of values that do not fit into registers.
        local_bytes: bytes of local memory per thread. Local memory contains spilled values, and tables of slow code
            paths, such as the path of `sin` for huge arguments.
        shared_bytes: bytes of shared memory per program.
        seconds: compilation time.
        assembly: PTX, or AMD's assembly.
        binary: the cubin or hsaco.
    """

    target: str
    registers: int
    spilled_bytes: int
    local_bytes: int
    shared_bytes: int
    seconds: float
    assembly: str = field(repr=False)
    binary: bytes = field(repr=False)

    def __str__(self) -> str:
        return (
            f"{self.target}: {self.registers} registers, {self.spilled_bytes} bytes spilled, "
            f"{self.local_bytes} bytes of local memory, {self.shared_bytes} bytes of shared memory, "
            f"binary of {len(self.binary)} bytes, compiled in {self.seconds:.2f} s"
        )


def compile_offline(jobs: Sequence[OfflineJob]) -> list[ResourceUse]:
    """Compiles kernels to binaries, without a GPU and without Triton's cache.

    Raises:
        OfflineCompileError: the target is unknown, or the compiler fails.

    Example:
        >>> kernel = pointwise(torch.nn.functional.silu).source(torch.empty(8, device="meta"))
        >>> print(*compile_offline([OfflineJob(kernel, "sm_90")]))
    """
    for job in jobs:
        _parse_target(job.target)
        if len(job.dtypes) not in (1, len(job.kernel.params)):
            raise OfflineCompileError(
                f"{job.kernel.name} has {len(job.kernel.params)} tensors, but {len(job.dtypes)} dtypes were given."
            )
    tasks = [_describe_task(job) for job in jobs]
    interpreted = os.environ.get("TRITON_INTERPRET", "0") != "0"
    results = _compile_in_process(tasks) if tasks and interpreted else [_compile(task) for task in tasks]
    return [ResourceUse(**{**result, "binary": base64.b64decode(result["binary"])}) for result in results]


def _parse_target(name: str) -> tuple[str, int | str, int]:
    """Triton's backend, architecture and warp size for a target."""
    if match := re.fullmatch(r"sm_(\d+)a?", name):
        return "cuda", int(match[1]), 32
    if re.fullmatch(r"gfx9\w+", name):
        return "hip", name, 64
    if re.fullmatch(r"gfx\w+", name):
        return "hip", name, 32
    raise OfflineCompileError(f"{name!r} is not a target; sm_80, sm_90 and gfx942 are examples.")


def _describe_task(job: OfflineJob) -> dict[str, Any]:
    dtypes = list(job.dtypes) * (len(job.kernel.params) if len(job.dtypes) == 1 else 1)
    pointers = {f"{p.name}_ptr": _POINTERS[d] for p, d in zip(job.kernel.params, dtypes, strict=True)}
    signature = {**pointers, **dict.fromkeys(job.kernel.sizes, "i32"), "BLOCK": "constexpr"}
    return {
        "name": job.kernel.name,
        "source": job.kernel.source,
        "signature": signature,
        "target": job.target,
        "block": job.block,
        "num_warps": job.num_warps,
        "fast_math": job.fast_math,
    }


def _compile_in_process(tasks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    process = subprocess.run(
        [sys.executable, "-m", "flexsn_codegen.targets.triton._offline"],
        input=json.dumps(tasks),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode != 0:
        raise OfflineCompileError(f"the compiler's process failed:\n{process.stderr[-4000:]}")
    output: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    if "error" in output:
        raise OfflineCompileError(output["error"])
    results: list[dict[str, Any]] = output["results"]
    return results


def _compile(task: dict[str, Any]) -> dict[str, Any]:
    kernel = compile_triton_code_str(task["source"], task["name"])
    import triton

    from flexsn_codegen.targets.triton._triton_private import ASTSource, GPUTarget

    backend, arch, warp_size = _parse_target(task["target"])
    signature: dict[str, str] = task["signature"]
    names = list(signature)
    aligned = [n for n in names if n.endswith("_ptr") or n in _ALIGNED]
    options = {"num_warps": task["num_warps"], **compile_options(backend, fast_math=task["fast_math"])}
    source = ASTSource(
        kernel,
        signature,
        {(names.index("BLOCK"),): task["block"]},
        {(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    log = io.StringIO()
    start = time.perf_counter()
    try:
        with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
            # The kernel is compiled even if it is in Triton's cache, because only the assembler reports the resources.
            triton.knobs.compilation.always_compile = True
            triton.knobs.nvidia.dump_ptxas_log = True
            compiled = triton.compile(source, target=GPUTarget(backend, arch, warp_size), options=options)
    except Exception as error:
        raise OfflineCompileError(f"{task['name']} for {task['target']}: {error}") from error
    seconds = time.perf_counter() - start
    nvidia = backend == "cuda"
    assembly = compiled.asm["ptx" if nvidia else "amdgcn"]
    usage = _parse_nvidia_log(log.getvalue()) if nvidia else _parse_amd_metadata(assembly)
    return {
        "target": task["target"],
        **usage,
        "shared_bytes": compiled.metadata.shared,
        "seconds": seconds,
        "assembly": assembly,
        "binary": base64.b64encode(compiled.asm["cubin" if nvidia else "hsaco"]).decode(),
    }


def _parse_nvidia_log(log: str) -> dict[str, int]:
    """Resources from the log of ptxas, which lists the kernel and the functions that were not inlined."""
    return {
        "registers": max(int(n) for n in re.findall(r"Used (\d+) registers", log)),
        "spilled_bytes": sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", log)),
        "local_bytes": sum(int(n) for n in re.findall(r"(\d+) bytes stack frame", log)),
    }


def _parse_amd_metadata(assembly: str) -> dict[str, int]:
    """Resources from the metadata at the end of the assembly."""
    numbers = dict(re.findall(r"\.(\w+):\s+(\d+)", assembly))
    return {
        "registers": int(numbers["vgpr_count"]),
        "spilled_bytes": 4 * int(numbers["vgpr_spill_count"]),
        "local_bytes": int(numbers["private_segment_fixed_size"]),
    }


def _main() -> None:
    try:
        output: dict[str, Any] = {"results": [_compile(task) for task in json.load(sys.stdin)]}
    except OfflineCompileError as error:
        output = {"error": str(error)}
    print(json.dumps(output))


if __name__ == "__main__":
    _main()
