"""What a core reads in Python is recorded by name, left as it was, and compared; what cannot be is refused."""

from __future__ import annotations

import gc
import itertools
import logging
import random
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from flexsn_graph import CaptureError, StepTrace, trace_step

EXAMPLES = (torch.zeros(3), torch.zeros(3))
Core = Callable[[Tensor, Tensor], Any]


def trace(core: Core) -> StepTrace:
    return trace_step(core, 1, 1, 1, EXAMPLES)


class Neuron(nn.Module):
    threshold = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.tau = 2.0
        self.config = {"gain": [0.5, 0.25]}
        self.w = nn.Parameter(torch.ones(3))
        self.calls = 0
        self.log: list[Any] = []

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        self.log.append(x.shape)
        h = v + (x * self.w - v) / self.tau
        return (h > self.threshold).to(h.dtype) * self.config["gain"][1], h


COLLECTED = 1.5


def test_a_collection_of_garbage_is_no_part_of_the_core() -> None:
    def collected(phase: str, info: dict[str, int]) -> None:
        assert COLLECTED > 1.0

    before = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(10)
    try:
        reads = trace(Neuron()).reads
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(collected)
    assert gc.isenabled()
    assert "self.tau" in reads.constants()
    assert "COLLECTED" not in reads.constants()


def test_what_is_read_has_a_name() -> None:
    offset = 0.125
    neuron = Neuron()
    reads = trace(lambda x, v: (neuron(x, v)[0], v + offset)).reads
    constants = reads.constants()
    expected = {
        "closure variable offset": 0.125,
        "closure variable neuron.tau": 2.0,
        "closure variable neuron.threshold": 1.0,
    }
    assert expected.items() <= constants.items()
    assert {"closure variable neuron.w"} == reads.names().keys()
    assert trace(neuron).reads.constants()["self.tau"] == 2.0


def test_what_the_core_changes_itself_is_named_and_not_compared() -> None:
    neuron = Neuron()
    reads = trace(neuron).reads
    assert set(reads.changed_by_core) == {"self.calls", "what is in self.log"}
    neuron.calls = 100
    assert reads.fetch() is not None
    neuron.tau = 3.0
    assert reads.fetch() is None
    assert [place.name for place in reads.changed()] == ["self.tau"]


def test_an_equal_object_is_no_change() -> None:
    neuron = Neuron()
    reads = trace(neuron).reads
    neuron.tau = float("2.0")
    neuron.config["gain"][1] = float("0.25")
    assert reads.fetch() is not None
    for other in (2, True, 2.0000000000000004, torch.tensor(2.0), numpy.float64(2.0)):
        neuron.tau = other  # type: ignore[assignment]
        assert reads.fetch() is None
    neuron.tau = 2.0
    assert reads.fetch() is not None


ALIKE = [(0.0, -0.0), (1, True), (1.0, 1), (float("nan"), 0.0), ("a", b"a"), (1j, 1.0)]


@pytest.mark.parametrize(("first", "second"), ALIKE)
def test_values_that_python_takes_for_equal(first: Any, second: Any) -> None:
    value = first

    def core(x: Tensor, v: Tensor) -> Any:
        return (x if isinstance(value, str) else x * 2.0), v

    reads = trace(core).reads
    value = float("nan") if first != first else first
    assert reads.fetch() is not None
    value = second
    assert reads.fetch() is None


def test_what_is_never_read_is_not_compared() -> None:
    neuron = Neuron()
    reads = trace(neuron).reads
    neuron.other = 3  # type: ignore[assignment]
    neuron.register_buffer("unused", torch.zeros(3))
    assert reads.fetch() is not None


def test_everything_is_left_as_it_was() -> None:
    class Slow(logging.Logger):
        pass

    logger = Slow("slow")
    neuron = Neuron()
    before = {cls: dict(vars(cls)) for cls in (Neuron, nn.Module, Slow)}
    module = sys.modules[__name__]
    profile = sys.getprofile()

    def core(x: Tensor, v: Tensor) -> Any:
        logger.debug("called")
        return neuron(x, v)

    trace(core)
    assert {cls: dict(vars(cls)) for cls in before} == before
    assert type(module).__name__ == "module"
    assert sys.getprofile() is profile
    with pytest.raises(ZeroDivisionError):
        trace(lambda x, v: neuron(x, v * (1 // 0)))
    assert {cls: dict(vars(cls)) for cls in before} == before
    assert sys.getprofile() is profile


def test_other_threads_read_on() -> None:
    neuron, errors, stop = Neuron(), [], threading.Event()

    def read() -> None:
        while not stop.is_set():
            if neuron.tau != 2.0:
                errors.append(neuron.tau)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        reads = trace(neuron).reads
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert reads.fetch() is not None


GENERATOR = random.Random(0)
LOCAL = threading.local()
LOCAL.tau = 2.0
TARGET = Neuron()


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (random.Random(0), "a random generator"),
        (numpy.random.default_rng(0), "a random generator"),
        (LOCAL, "a threading.local"),
        (weakref.proxy(TARGET), "a weak proxy"),
        (itertools.cycle([1.0]), "an iterator"),
        (iter([1.0, 2.0]), "an iterator"),
        ((i for i in range(3)), "an iterator"),
    ],
)
def test_what_cannot_be_seen_is_refused(value: Any, what: str) -> None:
    holder = Neuron()
    holder.source = value

    def core(x: Tensor, v: Tensor) -> Any:
        return holder.source and x, v

    with pytest.raises(CaptureError, match=rf"reads closure variable holder\.source, {what} \("):
        trace(core)


@pytest.mark.parametrize("value", [[0.5] * 20_000, numpy.zeros(100_000), dict.fromkeys(range(20_000))], ids=type)
def test_what_is_too_large_is_refused(value: Any) -> None:
    holder = Neuron()
    holder.table = value
    with pytest.raises(CaptureError, match=r"holder\.table has \d+ (elements|bytes).*Make it a tensor"):
        trace(lambda x, v: (x * len(holder.table), v))  # type: ignore[arg-type]


def test_default_dtype() -> None:
    reads = trace(lambda x, v: (x * 2.0, v)).reads
    torch.set_default_dtype(torch.float64)
    try:
        assert reads.fetch() is None
    finally:
        torch.set_default_dtype(torch.float32)
    assert reads.fetch() is not None


def test_a_tensor_under_two_names() -> None:
    shared = torch.ones(3)

    class Tied(nn.Module):
        u: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(shared)
            self.register_buffer("u", self.w.data)

        def forward(self, x: Tensor, v: Tensor) -> Any:
            return x * self.w, v * self.u

    core = Tied()
    step = trace(core)
    assert step.reads.fetch() == (core.w, core.u)
    assert step.aliases == ((0, core.u),)
    core.u = torch.full((3,), 2.0)
    fetched = step.reads.fetch()
    assert fetched is not None
    assert fetched[1] is core.u


def test_a_tensor_of_which_only_the_shape_is_read() -> None:
    w = torch.ones(3)
    reads = trace(lambda x, v: (x * w.shape[0], v)).reads
    assert reads.fetch() == ()
    w.resize_(5)
    assert reads.fetch() is None
