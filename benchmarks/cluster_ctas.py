"""Triton's `num_ctas` for a recurrent layer: counts of the instructions with which the blocks of a cluster cooperate,
compiled for an H100.

    python benchmarks/cluster_ctas.py [--output FILE]

One program is a cluster of `num_ctas` blocks, and Triton divides the tensors of the program among the blocks. The
columns count PTX instructions: address computations for the shared memory of another block (`mapa`), loads and stores
in this memory, and barriers of the whole cluster. If the compiler refuses a kernel, the row shows its error. The script
needs no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import triton
import triton.language as tl
from measure import publish, table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
SHAPES = ((16, 128), (16, 256), (64, 128), (64, 256))
COUNTED = {"mapa": "mapa", "remote": r"(?:ld|st)\.(?:async\.\S*)?shared::cluster", "barrier": r"barrier\.cluster\.wait"}


@triton.jit  # type: ignore[untyped-decorator]
def layer(x_ptr, v_ptr, s_ptr, T, B, H: tl.constexpr, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """Runs steps of LIF neurons whose spikes are multiplied by a matrix."""
    rows, columns = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, H)
    matrix = tl.load(v_ptr + columns[:, None] * H + columns[None, :])
    s = tl.zeros((R, H), dtype=tl.bfloat16)
    v = tl.zeros((R, H), dtype=tl.float32)
    for t in range(T):
        offsets = (t * B + rows[:, None]) * H + columns[None, :]
        h = v + (tl.load(x_ptr + offsets) + tl.dot(s, matrix) - v) * 0.5
        fired = h >= 1.0
        s = tl.where(fired, 1.0, 0.0).to(tl.bfloat16)
        v = tl.where(fired, 0.0, h)
        tl.store(s_ptr + offsets, s)


@contextlib.contextmanager
def collect_errors() -> Iterator[Path]:
    """Yields a file that receives the standard error output, including the output of C++ code."""
    with tempfile.TemporaryDirectory() as folder:
        path, before = Path(folder) / "errors", os.dup(2)
        with path.open("w") as file:
            sys.stderr.flush()
            os.dup2(file.fileno(), 2)
            try:
                yield path
            finally:
                os.dup2(before, 2)
                os.close(before)


def compile_layer(rows: int, width: int, blocks: int) -> list[str]:
    """Returns the bytes of shared memory and the counts of instructions, or the error if the compiler refuses."""
    types = {"x_ptr": "*fp32", "v_ptr": "*bf16", "s_ptr": "*bf16", "T": "i32", "B": "i32"}
    names = {"H": width, "R": rows}
    source = ASTSource(layer, {**types, **dict.fromkeys(names, "constexpr")}, names)
    with collect_errors() as log:
        try:
            kernel = triton.compile(source, target=HOPPER, options={"num_ctas": blocks, "num_warps": 8})
        except RuntimeError as error:
            messages = re.findall(r"error: (.*)", log.read_text()) or [str(error)]
            return ["", *[""] * len(COUNTED), f"refused: {messages[0][:80]}"]
    text = kernel.asm["ptx"]
    return [str(kernel.metadata.shared), *(str(len(re.findall(pattern, text))) for pattern in COUNTED.values()), ""]


def main(path: Path) -> None:
    rows = [
        [str(r), str(width), str(blocks), *compile_layer(r, width, blocks)]
        for r, width in SHAPES
        for blocks in (1, 2, 4, 8)
    ]
    header = ["rows", "neurons", "num_ctas", "shared memory, bytes", *COUNTED, ""]
    lines = [
        "# Triton's `num_ctas` for a recurrent layer",
        "",
        f"`python benchmarks/cluster_ctas.py`, compiled for sm_90 by Triton {triton.__version__}.",
        "",
        *table(header, rows),
    ]
    publish(lines, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "cluster_ctas.md")
    main(parser.parse_args().output)
