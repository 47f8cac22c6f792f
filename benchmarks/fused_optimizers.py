"""Optimizer steps over all parameters of a model on a GPU: `pointwise(...).foreach` compared with torch's optimizers.

    python benchmarks/fused_optimizers.py [--output FILE]

The model is a GPT-2 with 124 million parameters. The copy floor is the time of a copy of the number of bytes that a
step has to move. AdamW reads four tensors and writes three, and Lion reads three and writes two. "GPU" is the time of
the kernels in a profile, and "call" is the time from one call to the next, including Python.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import torch
from measure import copy_floor, describe_machine, issue_time, kernel_time, milliseconds, publish, table
from torch import Tensor

from flexsn_codegen import pointwise

WIDTH, LAYERS, WORDS, CONTEXT = 768, 12, 50257, 1024
LAYER = [(3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (4 * WIDTH,), (WIDTH, 4 * WIDTH)]
LAYER += [(WIDTH,)] * 6
SIZES: list[tuple[int, ...]] = [(WORDS, WIDTH), (CONTEXT, WIDTH), *LAYER * LAYERS, (WIDTH,), (WIDTH,)]


def adamw(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int, lr: float, betas: tuple[float, float], eps: float, wd: float
) -> None:
    """Computes AdamW: Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2."""
    p.mul_(1 - lr * wd)
    m.mul_(betas[0]).add_(g, alpha=1 - betas[0])
    v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
    p.addcdiv_(m, (v.sqrt() / math.sqrt(1 - betas[1] ** step)).add_(eps), value=-lr / (1 - betas[0] ** step))


def lion(p: Tensor, g: Tensor, m: Tensor, lr: float, betas: tuple[float, float], wd: float) -> None:
    """Computes Lion: Chen et al., Symbolic Discovery of Optimization Algorithms, algorithm 2."""
    p.mul_(1 - lr * wd).sub_(torch.sign(m * betas[0] + g * (1 - betas[0])), alpha=lr)
    m.mul_(betas[1]).add_(g, alpha=1 - betas[1])


def make_zeros(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(t) for t in tensors]


def make_optimizer(leaves: list[Tensor], *, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(leaves, lr=1e-3, fused=fused, foreach=not fused)


def make_steps(device: torch.device) -> dict[str, tuple[Callable[[], object], int]]:
    """Returns the optimizer steps. With each step comes the number of tensors, each as large as all parameters
    together, that the step reads or writes.
    """
    params = [torch.randn(size, device=device) for size in SIZES]
    grads = [torch.randn(size, device=device) for size in SIZES]
    m, v = make_zeros(params), make_zeros(params)
    ours, ours_lion = pointwise(adamw), pointwise(lion)
    count = iter(range(1, 1 << 30))
    results: dict[str, tuple[Callable[[], object], int]] = {
        "AdamW, pointwise": (
            lambda: ours.foreach(params, grads, m, v, next(count), 1e-3, (0.9, 0.999), 1e-8, 0.01),
            7,
        ),
        "Lion, pointwise": (lambda: ours_lion.foreach(params, grads, m, 1e-4, (0.9, 0.99), 0.01), 5),
    }
    for name in ("fused", "foreach"):
        leaves = [p.clone().requires_grad_() for p in params]
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad
        results[f"AdamW, torch.optim, {name}"] = make_optimizer(leaves, fused=name == "fused").step, 7
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/fused_optimizers.md"))
    options = parser.parse_args()
    device = torch.device("cuda")
    elements = sum(math.prod(size) for size in SIZES)
    floors = {streams: copy_floor(elements, streams, device) for streams in (5, 7)}
    rows = []
    for name, (step, streams) in make_steps(device).items():
        step()
        gpu, kernels = kernel_time(step, 20)
        call, issued = milliseconds(step, device), issue_time(step, device)
        figures = [gpu / 1e3, floors[streams], gpu / 1e3 / floors[streams], call, issued]
        rows.append([name, *(f"{number:.3f}" for number in figures), f"{kernels:.0f}"])
    header = ["step", "GPU, ms", "copy floor, ms", "GPU / floor", "call, ms", "issued in, ms", "kernels"]
    about = f"{len(SIZES)} tensors, {elements:,} elements, float32. {describe_machine(device)}"
    publish(["# Fused optimizers", "", about, "", *table(header, rows)], options.output)


if __name__ == "__main__":
    main()
