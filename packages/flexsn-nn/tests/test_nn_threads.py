"""First calls of one neuron from several threads at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from flexsn_nn import LIF, PLIF, RLIF, FlexSN, Leaky

THREADS = 8


class Counting(nn.Module):
    """A step that writes to its own module."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((5,), 0.5))
        self.calls, self.seen = 0, [1.0]

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        self.seen.append(2.0)
        h = self.w * v + x
        return torch.tanh(h), h


def make_pruned(backend: str) -> RLIF:
    torch.manual_seed(5)
    neuron = RLIF(5, backend=backend)
    prune.l1_unstructured(neuron.recurrent, "weight", 0.5)
    return neuron


def run_together(works: list[Callable[[], None]]) -> list[BaseException]:
    """Runs all functions in threads at the same time, and returns their errors."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        barrier.wait()
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.long(all_but=["Counting", "pruned"])
@pytest.mark.parametrize(
    "make",
    [
        lambda backend: Leaky(0.9, learn_beta=True, backend=backend),
        lambda backend: FlexSN(Counting(), 1, 1, 1, backend=backend),
        make_pruned,
    ],
    ids=["Leaky", "Counting", "pruned"],
)
def test_first_calls_from_threads_equal_the_loop(make: Callable[[str], FlexSN]) -> None:
    loop, neuron = make("torch"), make("cpp")
    x = torch.rand(THREADS, 6, 3, 5)
    outputs: list[Tensor | None] = [None] * THREADS
    gradients: list[Tensor | None] = [None] * THREADS
    expected_outputs, expected_gradients = [], []
    for sequence in x:
        leaf = sequence.clone().requires_grad_()
        out = loop.step(leaf)[0]
        assert isinstance(out, Tensor)
        expected_outputs.append(out.detach())
        expected_gradients += torch.autograd.grad(out.square().sum(), leaf)

    def work(i: int) -> None:
        leaf = x[i].clone().requires_grad_()
        out = neuron.step(leaf)[0]
        assert isinstance(out, Tensor)
        outputs[i] = out.detach()
        (gradients[i],) = torch.autograd.grad(out.square().sum(), leaf)

    assert run_together([partial(work, i) for i in range(THREADS)]) == []
    torch.testing.assert_close(outputs, expected_outputs)
    torch.testing.assert_close(gradients, expected_gradients)


def test_one_class_is_traced_in_several_threads() -> None:
    neurons = [(LIF if i % 2 else PLIF)(backend="cpp") for i in range(THREADS)]
    x = torch.rand(6, 5) * 2
    outputs: list[Tensor | None] = [None] * THREADS

    def work(i: int) -> None:
        with torch.no_grad():
            outputs[i] = neurons[i](x)

    assert run_together([partial(work, i) for i in range(THREADS)]) == []
    torch.testing.assert_close(outputs, [type(neuron)(backend="torch")(x).detach() for neuron in neurons])
    assert all(len(neuron.states) == 1 for neuron in neurons)
    for cls in (LIF, PLIF):
        assert "__getattribute__" not in vars(cls)
