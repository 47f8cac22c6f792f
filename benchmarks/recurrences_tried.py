"""Outcomes of other projects' recurrences in `flexsn_hop.scan`, compiled without other packages and with
flexsn-runtime.

    python benchmarks/recurrences_tried.py [--output FILE] [--only TEXT ...]

Inductor compiles each recurrence and its gradient twice: with the lowering `compiled_loop`, which needs no other
package, and with the installed packages. Both versions are compared with the eager scan. The table shows how the
forward and the backward run, and the reasons for missing kernels. The exit status is 1 if a result differs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import describe_machine, publish, table
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from flexsn_hop import scan
from flexsn_runtime import KernelLowering

HEADER = ["recurrence", "alone", "with flexsn-runtime", "why no kernel", "differs by"]
Step = Callable[[Any, Any], tuple[Any, Any]]


@dataclass(frozen=True)
class Recurrence:
    """A recurrence: `step` runs over the sequences `xs`, starting from `init`. Tensors that require gradients count."""

    step: Step
    init: Any
    xs: Any


def make_leaf(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).requires_grad_()


def ema(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    h = h + 0.1 * (x - h)
    return h, h * 2


def min_gru(h: Tensor, x: Any) -> tuple[Tensor, Tensor]:
    h = torch.lerp(h, x["new"], x["gate"].sigmoid())
    return h, h + 1


def ssm(h: Tensor, x: Any) -> tuple[Tensor, Tensor]:
    """Computes a step of a diagonal state space model, as in Mamba, whose output is a sum over the last dimension."""
    h = h * torch.exp(-functional.softplus(x["delta"])[..., None]) + x["u"][..., None] * x["b"][:, None, :]
    return h, (h * x["c"][:, None, :]).sum(-1)


def wkv(carry: Any, x: Any) -> tuple[Any, Tensor]:
    """Computes a step of the recurrence of RWKV in a numerically stable form."""
    top, bottom, largest = carry
    shift = torch.maximum(largest, x["k"])
    y = (top * torch.exp(largest - shift) + x["v"] * torch.exp(x["k"] - shift)) / (
        bottom * torch.exp(largest - shift) + torch.exp(x["k"] - shift)
    )
    decayed = torch.maximum(largest - 0.5, x["k"])
    old, new = torch.exp(largest - 0.5 - decayed), torch.exp(x["k"] - decayed)
    return (top * old + x["v"] * new, bottom * old + new, decayed), y


def slstm(carry: Any, x: Any) -> tuple[Any, Tensor]:
    """Computes a step of the scalar memory of xLSTM."""
    c, n, m = carry
    largest = torch.maximum(x[2] + m, x[1])
    i, f = torch.exp(x[1] - largest), torch.exp(x[2] + m - largest)
    c, n = f * c + i * torch.tanh(x[0]), f * n + i
    return (c, n, largest), torch.sigmoid(x[3]) * c / n


def delta_net(memory: Tensor, x: Any) -> tuple[Tensor, Tensor]:
    old = torch.einsum("bvk,bk->bv", memory, x["k"])
    memory = memory + torch.einsum("bv,bk->bvk", x["beta"] * (x["v"] - old), x["k"])
    return memory, torch.einsum("bvk,bk->bv", memory, x["q"])


def complex_pairs(h: Any, x: Tensor) -> tuple[Any, Tensor]:
    """Rotates and shrinks a complex state whose real and imaginary parts are two tensors."""
    real, imaginary = 0.9 * h[0] - 0.3 * h[1] + x, 0.3 * h[0] + 0.9 * h[1]
    return (real, imaginary), real.square() + imaginary.square()


W = torch.randn(8, 8) * 0.3
RATES = torch.tensor([0.5, 0.25, 0.125])
PERMUTED = torch.tensor([3, 1, 0, 2, 7, 6, 5, 4])


def rnn(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(x + h @ W)
    return h, h * 1.0


def hmm(alpha: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    alpha = (alpha.unsqueeze(-1) + W.log_softmax(-1)).logsumexp(-2) + x
    return alpha, alpha.logsumexp(-1)


def kalman(belief: Any, x: Tensor) -> tuple[Any, Tensor]:
    mean, variance = belief
    variance = variance + 0.1
    gain = variance / (variance + 1)
    return (mean + gain * (x - mean), (1 - gain) * variance), (x - mean).square()


def adam_step(carry: Any, x: Tensor) -> tuple[Any, Tensor]:
    """Computes Adam's first moment, with a step count in a 0-d tensor."""
    count, m = carry
    count = count + 1
    m = 0.9 * m + 0.1 * x
    return (count, m), m / (1 - 0.9**count)


def indexed(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Reads elements of a captured tensor by their indices."""
    h = h * RATES[0] + x * RATES[1]
    return h, h - RATES[2]


def permuted(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(h[:, PERMUTED] + x)
    return h, h * 1.0


def with_cond(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.cond(h.sum() > 0, lambda h, x: 0.5 * h + x, lambda h, x: h - 0.5 * x, (h, x))
    return h, h * 1.0


def with_scan(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    h = scan(lambda a, b: (torch.tanh(a + b), None), h, x[None].expand(3, *x.shape))[0]
    return h, h * 1.0


def with_while(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    start = torch.tensor(0), h.detach()
    halved = torch._higher_order_ops.while_loop(lambda n, _: n < 3, lambda n, v: (n + 1, v / 2), start)[1]
    h = 0.5 * h + x + halved
    return h, h * 1.0


def normed(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    h = functional.layer_norm(h + x, (8,))
    return h, h * 1.0


def sorted_values(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    h = 0.5 * h + torch.sort(x, -1).values
    return h, h * 1.0


def oscillator(state: Any, x: Tensor) -> tuple[Any, Tensor]:
    position, speed = state
    speed = speed + 0.01 * (x - torch.sin(position) - 0.1 * speed)
    position = position + 0.01 * speed
    return (position, speed), position


def make_recurrences(steps: int = 6) -> dict[str, Recurrence]:
    torch.manual_seed(0)
    b, n = 4, 8

    def make_sequence(*shape: int, scale: float = 1.0) -> Tensor:
        return make_leaf(steps, *shape, scale=scale)

    return {
        "moving average": Recurrence(ema, make_leaf(b, n), make_sequence(b, n)),
        "minimal GRU": Recurrence(min_gru, make_leaf(b, n), {"new": make_sequence(b, n), "gate": make_sequence(b, n)}),
        "diagonal state space (Mamba)": Recurrence(
            ssm,
            make_leaf(b, n, 4),
            {
                "delta": make_sequence(b, n),
                "u": make_sequence(b, n),
                "b": make_sequence(b, 4),
                "c": make_sequence(b, 4),
            },
        ),
        "WKV (RWKV)": Recurrence(
            wkv,
            (make_leaf(b, n), torch.rand(b, n).add(1).requires_grad_(), make_leaf(b, n)),
            {"k": make_sequence(b, n), "v": make_sequence(b, n)},
        ),
        "sLSTM (xLSTM)": Recurrence(
            slstm,
            (make_leaf(b, n), torch.ones(b, n).requires_grad_(), make_leaf(b, n)),
            [make_sequence(b, n) for _ in range(4)],
        ),
        "DeltaNet": Recurrence(
            delta_net,
            make_leaf(b, n, n),
            {
                "q": make_sequence(b, n),
                "k": make_sequence(b, n, scale=0.3),
                "v": make_sequence(b, n),
                "beta": make_sequence(b, 1),
            },
        ),
        "complex numbers as pairs": Recurrence(complex_pairs, (make_leaf(b, n), make_leaf(b, n)), make_sequence(b, n)),
        "Elman RNN": Recurrence(rnn, make_leaf(b, n), make_sequence(b, n)),
        "hidden Markov model": Recurrence(hmm, make_leaf(b, n), make_sequence(b, n)),
        "scalar Kalman filters": Recurrence(
            kalman, (make_leaf(b, n), torch.ones(b, n).requires_grad_()), make_sequence(b, n)
        ),
        "a count without dimensions": Recurrence(adam_step, (torch.zeros(()), make_leaf(b, n)), make_sequence(b, n)),
        "an integer count": Recurrence(
            adam_step, (torch.zeros((), dtype=torch.int64), make_leaf(b, n)), make_sequence(b, n)
        ),
        "entries of a captured tensor": Recurrence(indexed, make_leaf(b, n), make_sequence(b, n)),
        "a permuted state": Recurrence(permuted, make_leaf(b, n), make_sequence(b, n)),
        "a norm in the step": Recurrence(normed, make_leaf(b, n), make_sequence(b, n)),
        "an oscillator": Recurrence(oscillator, (make_leaf(b, n), make_leaf(b, n)), make_sequence(b, n)),
        "`torch.cond` in the step": Recurrence(with_cond, make_leaf(b, n), make_sequence(b, n)),
        "a scan in the step": Recurrence(with_scan, make_leaf(b, n), make_sequence(b, n)),
        "`while_loop` in the step": Recurrence(with_while, make_leaf(b, n), make_sequence(b, n)),
        "a sort in the step": Recurrence(sorted_values, make_leaf(b, n), make_sequence(b, n)),
    }


def compute_gradients(run: Callable[[Any, Any], Any], tried: Recurrence) -> list[Tensor]:
    """Returns the results, and the gradients of a weighted mean of their squares."""
    results = [r for r in tree_leaves(run(tried.init, tried.xs)) if r is not None]
    # The elements need different weights, because the squares of the results of a norm have a constant sum.
    weights = [torch.linspace(0.5, 1.5, r.numel()).view(r.shape) for r in results]
    loss = sum((w * r).square().mean() for w, r in zip(weights, results, strict=True) if r.is_floating_point())
    leaves = [t for t in tree_leaves((tried.init, tried.xs)) if t.requires_grad]
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [*(r.detach() for r in results), *(torch.zeros(()) if g is None else g for g in grads)]


@contextlib.contextmanager
def record_kernels() -> Iterator[list[str]]:
    """Yields a list to which `"forward"` or `"backward"` is added when a kernel for this pass is made."""
    passes: list[str] = []
    originals = {name: getattr(KernelLowering, name) for name in ("forward", "backward")}

    def record(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            lowering = originals[name](*args, **kwargs)
            passes.append(name)
            return lowering

        return call

    for name in originals:
        setattr(KernelLowering, name, record(name))
    try:
        yield passes
    finally:
        for name, original in originals.items():
            setattr(KernelLowering, name, original)


def run_compiled(tried: Recurrence, lowering: str) -> tuple[str, str, list[Tensor] | None]:
    """Runs the compiled scan. Returns a description of how it runs, the reason for a missing kernel, and the results.
    The description is empty if no kernel is made.
    """
    torch._dynamo.reset()
    os.environ["FLEXSN_HOP_LOWERING"] = lowering
    with record_kernels() as kernels, warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        try:
            compiled = torch.compile(lambda init, xs: scan(tried.step, init, xs), fullgraph=True)
            results = compute_gradients(compiled, tried)
        except Exception as error:
            if lowering == "compiled_loop" and type(error).__name__ == "StepCodeError":
                return "operators, one by one", "", run_compiled(tried, "loop")[2]
            return f"refused: {type(error).__name__}", _cut_first_line(str(error)), None
    reasons = [str(w.message) for w in caught_warnings if "without kernels" in str(w.message)]
    reason = _cut_first_line(reasons[0].partition("without kernels: ")[2]) if reasons else ""
    if lowering == "compiled_loop":
        return "a compiled step", "", results
    description = "kernels" if set(kernels) == {"forward", "backward"} else "a kernel forward" if kernels else ""
    return description, reason, results


def _cut_first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0][:160].replace("|", "/") if lines else ""


def make_row(name: str, tried: Recurrence) -> list[str]:
    expected = compute_gradients(lambda init, xs: scan(tried.step, init, xs), tried)
    alone, _, ours = run_compiled(tried, "compiled_loop")
    with_runtime, reason, kernels = run_compiled(tried, "auto")
    with_runtime = with_runtime or alone
    difference = max(
        (
            (
                (value.double() - expected_value.double()).abs().max()
                / expected_value.double().abs().max().clamp(min=1e-6)
            ).item()
            for results in (ours, kernels)
            if results is not None
            for value, expected_value in zip(results, expected, strict=True)
        ),
        default=float("inf"),
    )
    return [name, alone, with_runtime, reason, f"{difference:.1e}"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "recurrences_tried.md")
    parser.add_argument("--only", nargs="+", default=[""])
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch._inductor.config.force_disable_caches = True  # a kernel from a cache would not be counted
    rows = []
    for name, tried in make_recurrences().items():
        if any(text in name for text in options.only):
            rows.append(make_row(name, tried))
            print(" | ".join(rows[-1]), flush=True)
    lines = [
        "# Recurrences of other projects",
        "",
        "`python benchmarks/recurrences_tried.py`: how `flexsn_hop.scan` runs under `torch.compile`, without other",
        "packages and with flexsn-runtime installed. `differs by`: the largest difference of a result or a gradient",
        "from the eager scan, relative to the largest element.",
        describe_machine(torch.device("cpu")),
        "",
        *table(HEADER, rows),
    ]
    publish(lines, options.output)
    if any(float(row[-1]) > 1e-3 for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
