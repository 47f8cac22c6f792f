"""Fuses a gated activation into one kernel, and compares it with eager mode and `torch.compile`.

    python examples/gated_activation.py [--rows 16384] [--columns 4096] [--dtype bfloat16] [--device cuda]

The example only needs flexsn-codegen. Without a GPU, it checks the values in Triton's interpreter, on a few rows. On a
GPU, it also measures the bytes per second that each version and a plain copy move. It measures the forward alone, and
the forward together with the backward.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # must be set before Triton is imported

from flexsn_codegen import pointwise

Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def gated(x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Computes the activation of a gated linear unit.

    `x` and `gate` are `[rows, columns]`, and `bias` is `[columns]`.
    """
    return x * torch.nn.functional.silu(gate + bias)


def check(fused: Function, inputs: list[torch.Tensor]) -> None:
    """Compares values and gradients with eager mode in float32."""
    wide = [t.detach().float().requires_grad_() for t in inputs]
    expected = gated(*wide)
    actual = fused(*inputs)
    weights = torch.randn_like(actual)
    actual.backward(weights)
    expected.backward(weights.float())
    tolerance = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}[actual.dtype]
    for name, a, e in [("result", actual, expected)] + [
        (f"gradient of {n}", t.grad, w.grad) for n, t, w in zip(("x", "gate", "bias"), inputs, wide, strict=True)
    ]:
        assert a is not None
        assert e is not None
        error = ((a.float() - e).norm() / e.norm()).item()
        print(f"{name:>17}: relative error {error:.1e}")
        if error > tolerance:
            raise SystemExit(f"{name} is wrong: {error:.1e} is more than {tolerance:.0e}")


def measure(functions: dict[str, Function], inputs: list[torch.Tensor]) -> None:
    """Prints the time and the bytes per second of each function, and of a copy of the same size."""
    from triton.testing import do_bench

    size = inputs[0].numel() * inputs[0].element_size()
    weights = torch.randn_like(inputs[0])

    def forward(function: Function) -> Callable[[], object]:
        return lambda: function(*(t.detach() for t in inputs))

    def training(function: Function) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(*inputs), inputs, weights)

    for title, run, streams in (("forward", forward, 3), ("training step", training, 8)):
        # A copy reads and writes each byte, so a copy of `size * streams // 2` bytes moves `size * streams` bytes.
        source = torch.empty(size * streams // 2, dtype=torch.uint8, device=inputs[0].device)
        target = torch.empty_like(source)
        print(f"{title} ({streams} streams of {size / 1e6:.0f} MB)")
        milliseconds = do_bench(lambda source=source, target=target: target.copy_(source))
        print(f"  {'copy':>14}: {milliseconds:7.3f} ms, {size * streams / milliseconds / 1e9:5.2f} TB/s")
        for name, function in functions.items():
            milliseconds = do_bench(run(function))
            print(f"  {name:>14}: {milliseconds:7.3f} ms, {size * streams / milliseconds / 1e9:5.2f} TB/s")


def main() -> int:
    """Checks the values, and measures the speed if there is a GPU."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384 if on_gpu else 64)
    parser.add_argument("--columns", type=int, default=4096 if on_gpu else 128)
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    torch.manual_seed(0)
    shapes = [(arguments.rows, arguments.columns)] * 2 + [(arguments.columns,)]
    inputs = [torch.randn(s, device=arguments.device).to(dtype).requires_grad_() for s in shapes]
    fused = pointwise(gated, autograd=True)
    check(fused, inputs)
    if arguments.device == "cpu":
        print("no GPU: nothing to measure")
        return 0
    measure({"eager": gated, "torch.compile": torch.compile(gated), "pointwise": fused}, inputs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
