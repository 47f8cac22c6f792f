"""Compiles kernels for GPUs that this machine may lack, and reports the resources that the kernels use.

If Triton's interpreter is on, as in most tests, the compiler is not available in the same process. The compilation then
runs in a separate process. That process runs this module, which reads requests from its standard input, and writes
results.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any

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
        seconds: compilation time in seconds.
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
        OfflineCompileError: the target of a job is unknown, the number of dtypes is wrong, or the compiler fails.

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
    results = _compiler_process.compile(tasks) if tasks and interpreted else [_compile(task) for task in tasks]
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


class _CompilerProcess:
    """A process that compiles without Triton's interpreter.

    The process starts at the first request, which takes seconds, and serves the later requests, too. It ends when its
    standard input ends, so at the latest when this process ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._log: IO[str] | None = None

    def compile(self, tasks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        request = json.dumps({"environment": environment, "path": [p for p in sys.path if p], "tasks": tasks})
        with self._lock:
            try:
                output = self._send(request, environment)
            except BaseException:  # after an interruption, too: the next request must not read the result of this one
                self._stop()
                raise
        if "error" in output:
            raise OfflineCompileError(output["error"])
        results: list[dict[str, Any]] = output["results"]
        return results

    def _send(self, request: str, environment: dict[str, str]) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            self._stop()
            self._start(environment)
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{request}\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer.endswith("\n"):
            assert self._log is not None
            self._process.wait()
            self._log.seek(0)
            raise OfflineCompileError(f"the compiler's process failed:\n{self._log.read()[-4000:]}")
        output: dict[str, Any] = json.loads(answer)
        return output

    def _start(self, environment: dict[str, str]) -> None:
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "flexsn_codegen.targets.triton._offline"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**environment, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            text=True,
            encoding="utf-8",
        )

    def _stop(self) -> None:
        """Ends the process, if it runs."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
        if self._log is not None:
            self._log.close()
            self._log = None

    def stop(self) -> None:
        """Ends the process, if it runs. The next request starts another process."""
        with self._lock:
            self._stop()

    def reset_after_fork(self) -> None:
        """Forgets the process in the child of a fork, so that parent and child do not use the same process."""
        process = self._process
        if process is not None:
            for file in (process.stdin, process.stdout, self._log):
                assert file is not None
                file.close()  # the process ends when the parent ends, even if the child still runs
            process.returncode = 0  # only the parent can wait for the process
        self._lock, self._process, self._log = threading.Lock(), None, None


_compiler_process = _CompilerProcess()
atexit.register(_compiler_process.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_compiler_process.reset_after_fork)


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
    """Answers each line of the standard input, which is a request, with a line of results or an error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # so that the output of compilers does not mix with the answers
    for line in sys.stdin:
        request = json.loads(line)
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.path[:] = request["path"]
        try:
            output: dict[str, Any] = {"results": [_compile(task) for task in request["tasks"]]}
        except OfflineCompileError as error:
            output = {"error": str(error)}
        print(json.dumps(output), file=answers, flush=True)


if __name__ == "__main__":
    _main()
