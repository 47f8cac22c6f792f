"""Numbers and 0-d tensors on the CPU can be combined with tensors on another device, which are meta tensors here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexsn_graph import _torch_private, trace_step
from flexsn_graph.tracing import _captures, _tracer

STEP = (3, 4)

IN_STEP = {
    "assigned": "h = x * 1.0; h[h > 0] = c",
    "filled": "h = x * 1.0; h.fill_(c)",
    "copied": "h = x * 1.0; h.copy_(c)",
    "masked": "h = x.masked_fill(x > 0, c)",
    "masked in place": "h = x * 1.0; h.masked_fill_(x > 0, c)",
    "chosen": "h = torch.where(x > 0, c, x)",
    "compared": "h = torch.where(x > c, x, 0.0)",
    "multiplied": "h = x * c",
    "with a sign": "h = torch.copysign(x, c)",
    "clamped": "h = x.clamp(min=c)",
    "between": "h = x.lerp(2 * x, c)",
    "divided": "h = torch.addcdiv(x, x, c)",
}
BEFORE = {
    "a part assigned": "h = w * 1.0; h[1:] = c; h = h * x",
    "a part filled": "h = w * 1.0; h[1:].fill_(c); h = h * x",
    "mixed": "h = w.softmax(0) * c * x",
    "by a mask": "h = w * 1.0; h[h > 0] = c; h = h * x",
}


@pytest.fixture
def another_device(monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns the meta device. With this fixture, traces accept it, and do not create stand-ins on the CPU."""

    def fake_like(mode: Any, tensor: Tensor) -> Tensor:
        mode.allow_meta = True
        with _torch_private._disable_current_modes(), mode, torch.no_grad():
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    for module in (_torch_private, _tracer, _captures):
        monkeypatch.setattr(module, "fake_like", fake_like)
    return "meta"


CASES = [
    (lines, number)
    for lines in (*IN_STEP.values(), *BEFORE.values())
    for number in ("torch.tensor(0.25)", "k")
    if (lines, number) != (IN_STEP["assigned"], "k")  # torch rejects this on every device
]


@pytest.mark.long(
    all_but=[
        "h = x.masked_fill(x > 0, c)-k",
        "h = torch.where(x > 0, c, x)-k",
        "h = x ? c-k",
        "h = torch.addcdiv(x, x, c)-k",
        "h = w ? 1.0; h?1:?.fill_(c); h = h ? x-k",
        "h = w ? 1.0; h?h > 0? = c; h = h ? x-k",
    ]
)
@pytest.mark.parametrize(("lines", "number"), CASES)
def test_number_on_the_cpu_works_with_tensors_on_another_device(lines: str, number: str, another_device: str) -> None:
    graphs = []
    for device in ("cpu", another_device):
        namespace: dict[str, Any] = {
            "torch": torch,
            "w": torch.ones(4, device=device).requires_grad_(),
            "k": torch.tensor(0.25),
        }
        body = "; ".join([f"c = {number}", lines, "return h, v + x"]).replace("; ", "\n    ")
        exec(f"def core(x, v):\n    {body}\n", namespace)
        step = trace_step(namespace["core"], 1, 1, 1, [torch.ones(STEP, device=device)] * 2)
        vjp = step.vjp(step.differentiable, [v.dtype.is_floating_point for v in step._list_primal_values()])
        graphs.append((str(step.forward.graph), str(vjp.graph), len(step.captured)))
    assert graphs[0] == graphs[1]
