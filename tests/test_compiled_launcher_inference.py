"""Calls without gradients in the compiled launcher. They equal the loop, and Python executes no plan."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flexsn_nn import ALIF, LIF, PLIF, FlexSN
from flexsn_runtime.calls._plan import Plan
from flexsn_runtime.native import RepeatedFunction

pytestmark = pytest.mark.usefixtures("compiler")

T, STEP = 5, (3, 7)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NEURONS: dict[str, Callable[[str], FlexSN]] = {
    "lif": lambda backend: LIF(backend=backend),
    "plif": lambda backend: PLIF(backend=backend),
    "alif": lambda backend: ALIF(backend=backend),
}


@pytest.fixture(autouse=True)
def use_compiled_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXSN_LAUNCHER", "compiled")


def make_data(seed: int, device: str) -> Tensor:
    return (2 * torch.rand(T, *STEP, generator=torch.Generator().manual_seed(seed))).to(device)


def make_pair(name: str, device: str, **settings: Any) -> tuple[FlexSN, FlexSN]:
    """Makes a neuron that runs kernels, and an equal neuron that runs the loop."""
    neurons = []
    for backend in ("triton" if device == "cuda" else "cpp", "torch"):
        neuron = NEURONS[name]("auto").to(device)
        for attribute, value in settings.items():
            setattr(neuron, attribute, value)
        neuron.backend = "auto" if device == "cuda" and backend == "triton" else backend
        neurons.append(neuron)
    return neurons[0], neurons[1]


def assert_equal(neuron: FlexSN, loop: FlexSN, x: Tensor) -> None:
    torch.testing.assert_close(neuron(x), loop(x), rtol=0, atol=0)
    torch.testing.assert_close(neuron.states, loop.states, rtol=0, atol=0)
    torch.testing.assert_close(neuron.state_seqs, loop.state_seqs, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "settings", [{}, {"step_mode": "s"}, {"store_state_seqs": True}], ids=["sequence", "single step", "states kept"]
)
@pytest.mark.parametrize("name", NEURONS)
@pytest.mark.long(all_but=["lif-*-cpu", "plif-sequence-cpu", "alif-single step-cpu"])
def test_inference_equals_the_loop_without_python(
    name: str, settings: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    neuron, loop = make_pair(name, device, **settings)

    def input_of(seed: int) -> Tensor:
        return make_data(seed, device)[0] if "step_mode" in settings else make_data(seed, device)

    with torch.no_grad():
        for seed in range(4):
            assert_equal(neuron, loop, input_of(seed))
        monkeypatch.setattr(Plan, "run", None)  # the executor in Python is not called
        for seed in range(4, 7):
            assert_equal(neuron, loop, input_of(seed))


def test_results_are_inference_tensors() -> None:
    neuron, loop = make_pair("lif", "cpu")
    with torch.inference_mode():
        for seed in range(3):
            assert_equal(neuron, loop, make_data(seed, "cpu"))
        assert neuron(make_data(3, "cpu")).is_inference()
    x = make_data(4, "cpu").requires_grad_()
    neuron.reset()
    (gradient,) = torch.autograd.grad(neuron(x).sum(), x)
    assert gradient.abs().sum() > 0


def test_large_results_are_launched_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexsn_runtime.launches._large_memory.LARGE", 64)
    runs: list[object] = []
    run = Plan.run
    monkeypatch.setattr(Plan, "run", lambda plan, arguments: (runs.append(plan), run(plan, arguments))[1])  # type: ignore[func-returns-value]
    neuron, loop = make_pair("lif", "cpu")
    with torch.no_grad():
        for seed in range(4):
            assert_equal(neuron, loop, make_data(seed, "cpu"))
    assert len(runs) == 4


def test_tensors_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    references: list[weakref.ref[RepeatedFunction]] = []
    initialize = RepeatedFunction.__init__

    def record(scan: RepeatedFunction, *arguments: Any, **options: Any) -> None:
        references.append(weakref.ref(scan))
        initialize(scan, *arguments, **options)

    monkeypatch.setattr(RepeatedFunction, "__init__", record)
    neuron, _ = make_pair("lif", "cpu")
    with torch.no_grad():
        for seed in range(3):
            neuron(make_data(seed, "cpu"))
    assert [scan() is not None for scan in references].count(True) >= 1
    del neuron
    for _ in range(3):
        gc.collect()
    assert [scan() for scan in references] == [None] * len(references)
