"""`examples/truncated_bptt.py`: memory only grows with the length of a chunk, gradients inside a chunk are exact, and
the network learns.
"""

from __future__ import annotations

import pytest
import torch
from scripts import load, one_thread

tbptt = load("examples/truncated_bptt.py")
CPU = torch.device("cpu")
CHUNK = 16


def make_task(steps: int, backend: str = "auto") -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    signal = tbptt.signal(steps + 4, CPU)
    return tbptt.network(backend, CPU), signal[:steps], signal[4:]


@one_thread()
def test_network_learns_along_the_sequence() -> None:
    net, x, y = make_task(256)
    losses, _ = tbptt.train(net, x, y, chunk=CHUNK, passes=6)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.long(all_but=["torch"])
@one_thread()
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_chunks_bound_the_memory(backend: str, interpreted: None) -> None:
    bytes_of_chunks, bytes_of_sequences = [], []
    for steps in (4 * CHUNK, 8 * CHUNK):
        net, x, y = make_task(steps, backend)
        bytes_of_chunks.append(tbptt.train(net, x, y, CHUNK, passes=1)[1])
        bytes_of_sequences.append(tbptt.kept_by_all(net, x, y))
    assert bytes_of_chunks[0] == bytes_of_chunks[1]
    assert bytes_of_sequences[1] > 1.8 * bytes_of_sequences[0] > 1.8 * 3 * bytes_of_chunks[0]


@pytest.mark.parametrize("backend", ["torch", "hop"])
def test_gradient_inside_a_chunk_is_exact(backend: str) -> None:
    net, x, y = make_task(4 * CHUNK, backend)
    truncated_gradient, exact_gradient = (
        tbptt.gradient_of_last(net, x, y, CHUNK, truncated) for truncated in (True, False)
    )
    assert torch.equal(truncated_gradient, exact_gradient)
    assert exact_gradient.abs().max() > 0
