"""Recurrent layers in one launch: a program ends with its longest sequence, and results do not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flexsn_nn import RLIF, FlexSN, Recurrent
from flexsn_nn.layer import Delay
from flexsn_nn.neuron import LIF
from flexsn_runtime.recurrent import _one_launch


def make_delayed(width: int) -> Recurrent:
    delay = 4 * torch.rand(width, generator=torch.Generator().manual_seed(2))
    return Recurrent(LIF(), width, delay=Delay(delay, max_delay=4, learn=True))


def inhibit(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = v / 2 + x
    h = h - 0.1 * h.mean(-1, keepdim=True)
    s = torch.sigmoid(4 * (h - 1))
    return s, h * (1 - s)


SUMS = "sums over a row"
LAYERS: dict[str, Callable[[int], FlexSN]] = {
    "recurrent": lambda width: Recurrent(LIF(), width),
    "with delays": make_delayed,
    "RLIF": lambda width: RLIF(width),
    SUMS: lambda width: FlexSN(inhibit, 1, 1, 1),
}


def run(layer: FlexSN, x: Tensor, lengths: Tensor) -> list[Tensor]:
    layer.reset()
    leaf = x.clone().requires_grad_()
    output: Any = layer(leaf, lengths=lengths)
    weights = torch.arange(output.numel(), device=x.device).cos().view(output.shape)
    loss = (output * weights).sum() + sum((state * state).sum() for state in layer.states)
    gradients = torch.autograd.grad(loss, [leaf, *layer.parameters()])
    return [output.detach(), *(state.detach() for state in (*layer.states, *layer.state_seqs)), *gradients]


def check_ends(
    name: str, device: str, shape: tuple[int, int, int], keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    num_steps, batch, width = shape
    make = LAYERS[name]
    layers = [make(width).to(device) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    lengths = torch.randint(0, num_steps, (batch,)).sort(descending=True).values
    lengths[0], lengths[-1] = num_steps, 0
    x = 2 * torch.rand(shape, device=device)
    for b, end in enumerate(lengths.tolist()):
        x[end:, b] = torch.nan
    for layer in layers:
        layer.backend, layer.store_state_seqs = "triton", keep
    counts: list[object] = []
    steps: list[Any] = []
    find_counts = _one_launch._find_counts

    def note(step: Any, over: Any) -> Any:
        counts.append(find_counts(step, over))
        steps.append(step)
        return counts[-1]

    monkeypatch.setattr(_one_launch, "_find_counts", note)
    shortened = run(layers[0], x, lengths)
    assert counts
    assert None not in counts
    descriptions = steps[0].loops.descriptions
    if not keep:  # Gradients of state sequences are added step by step.
        assert [line[:10] for line in descriptions.values()] == ["one launch"] * 2, descriptions
    monkeypatch.setattr(_one_launch, "_find_counts", lambda step, over: None)
    full = run(layers[1], x, lengths)
    rtol = 1e-5 if name == SUMS else 0.0  # The compiler chooses the order of a sum in each kernel.
    for ours, theirs in zip(shortened, full, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol)
    layers[1].backend = "torch"
    for ours, theirs in zip(shortened, run(layers[1], x, lengths), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.long(all_but=["with delays-False"])
def test_a_launch_ends_with_its_longest_sequence(name: str, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    check_ends(name, "cpu", (6, 19, 20), keep, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("shape", "clusters"), [((20, 100, 48), "0"), ((33, 70, 200), "0"), ((33, 70, 200), "1")])
@pytest.mark.parametrize("name", LAYERS)
def test_a_launch_on_a_gpu_ends_with_its_longest_sequence(
    name: str, shape: tuple[int, int, int], clusters: str, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXSN_CLUSTERS", clusters)
    check_ends(name, "cuda", shape, keep, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("with_lengths", [False, True])
def test_a_layer_with_many_rows_is_captured(with_lengths: bool) -> None:
    """Captures a layer with more rows than simultaneous programs. Its results need memory that is not reserved yet."""
    shape = (250, 4096, 64)
    torch.manual_seed(0)
    layer = Recurrent(LIF(), shape[-1]).to("cuda")
    x = (2 * torch.rand(shape, device="cuda")).requires_grad_()
    weights = torch.randn(shape, device="cuda")
    lengths = torch.randint(0, shape[0] + 1, shape[1:2], device="cuda").sort(descending=True).values

    def step() -> list[Tensor]:
        layer.reset()
        output = layer(x, lengths=lengths) if with_lengths else layer(x)
        return [output.detach(), *torch.autograd.grad(output, [x, *layer.parameters()], weights)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    graph.replay()
    for ours, theirs in zip(results, expected, strict=True):
        assert torch.equal(ours, theirs)
