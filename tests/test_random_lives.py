"""Random sequences of a user's acts. After each act, a network and its compiled twin have equal results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lives.acts import ACTS
from lives.machine import FEW_PLANS, LONG_ACTS, machine, run
from lives.networks import LAYERS, Plan, build, layers_for
from lives.twins import DifferenceError, Twins, live
from torch import Tensor
from torch._subclasses import FakeTensorMode

from flexsn_nn import FlexSN

# These layers need no compilation, so a test with planted faults is short.
PLAIN = ("lif", "alif", "two outputs", "delay", "conv")


def test_twins_are_equal_in_a_hundred_short_lives(compiler: None) -> None:
    Twins.counts.clear()
    run(machine((("auto", "auto"), ("cpp", "compiled")), without=LONG_ACTS, few=True), runs=100, rules=12)
    assert Twins.counts["lives"] >= 100


@pytest.mark.long
@pytest.mark.parametrize("backend", ["auto", "cpp", "triton"])
def test_twins_of_all_layers_are_equal(backend: str, interpreted: None, compiler: None) -> None:
    run(machine(((backend, "auto"),)), runs=20, rules=50)


@pytest.mark.long
def test_twins_with_the_compiled_launcher_are_equal(compiler: None) -> None:
    run(machine((("cpp", "compiled"),)), runs=20, rules=50)


# -- the state machine ------------------------------------------------------------------------------------------------


def _forget_sequences(neuron: FlexSN, x: Tensor, y: Any) -> Any:
    if len(x) == 9:
        neuron.state_seqs = []
    return y


def _lose_a_gradient(neuron: FlexSN, x: Tensor, y: Any) -> Any:
    if isinstance(y, Tensor) and y.requires_grad:
        y.register_hook(lambda gradient: 0.5 * gradient if gradient.shape[0] == 9 else gradient)
    return y


def _leave_a_trace(neuron: FlexSN, x: Tensor, y: Any) -> Any:
    with FakeTensorMode():
        neuron.__dict__.get("_limits", {})["left"] = torch.empty(1)
    return y


def _lose_the_layout(neuron: FlexSN, x: Tensor, y: Any) -> Any:
    return y.contiguous() if isinstance(y, Tensor) else y


def _widen_counts(neuron: FlexSN, x: Tensor, y: Any) -> Any:
    if neuron.spike_counts is not None:
        neuron.spike_counts = neuron.spike_counts.double()
    return y


def _write_to_the_input(neuron: FlexSN, x: Tensor, y: Any) -> Any:
    with torch.no_grad():
        x.detach().mul_(1)
    return y


FAULTS: dict[str, tuple[Callable[[FlexSN, Tensor, Any], Any], str]] = {
    "sequences": (_forget_sequences, "state_seqs|sequence|IndexError"),
    "a gradient": (_lose_a_gradient, "gradient"),
    "a trace": (_leave_a_trace, "remains of traces"),
    "a layout": (_lose_the_layout, "strides"),
    "a dtype": (_widen_counts, "counts.*dtype"),
    # If the input is one of several views of a tensor, autograd refuses the write.
    "an input": (_write_to_the_input, "written to its input|modified inplace"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_detected(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants a fault in neurons with the backend `hop`, and checks that the machine detects the fault and returns a
    short program that reproduces it.
    """
    forward = FlexSN.forward
    apply_fault, text = FAULTS[fault]

    def forward_with_fault(neuron: FlexSN, *inputs: Tensor, **options: Any) -> Any:
        y = forward(neuron, *inputs, **options)
        return apply_fault(neuron, inputs[0], y) if neuron.backend == "hop" else y

    monkeypatch.setattr(FlexSN, "forward", forward_with_fault)
    layers = PLAIN if fault != "a layout" else ("lif", "conv")  # only images have several layouts
    with pytest.raises(DifferenceError, match=text) as caught:
        run(machine((("hop", "auto"),), layers=layers, without=LONG_ACTS), runs=400, rules=20)
    assert len(caught.value.program) <= 4
    with pytest.raises(DifferenceError, match=text):
        live(caught.value.plan, caught.value.program)
    monkeypatch.undo()
    live(caught.value.plan, caught.value.program)


_CALL: dict[str, Any] = {"steps": 8, "seed": 0, "layout": "contiguous", "fresh": False, "batch": None, "learned": True}
_UNDER_CHECKPOINT: dict[str, Any] = {"how": "reentrant", "inside": False, "steps": 8, "seed": 0}
# These programs of the state machine once revealed faults.
EARLIER_FAULTS: dict[str, tuple[Plan, list[tuple[str, dict[str, Any]]]]] = {
    "state sequences after a single step": (
        Plan("vector", ("lif",), "cpp"),
        [
            ("store_state_seqs", {"which": 0, "on": True}),
            ("step", {"which": 0, "steps": 8, "seed": 0, "initial": "none"}),
            ("forward", _CALL),
        ],
    ),
    "a trace on a pruned matrix": (
        Plan("vector", ("rlif",), "cpp"),
        [("prune_weights", {"which": 0, "how": "prune"}), ("forward", _CALL)],
    ),
    "no steps": (Plan("vector", ("lif",), "cpp"), [("forward", _CALL), ("forward", {**_CALL, "steps": 0})]),
    "a delay under a checkpoint": (
        Plan("vector", ("delays", "linear"), "torch"),
        [("forward", _CALL), ("forward_checkpointed", _UNDER_CHECKPOINT)],
    ),
    "a window under a checkpoint": (
        Plan("vector", ("sliding", "linear"), "torch"),
        [("forward", _CALL), ("forward_checkpointed", {**_UNDER_CHECKPOINT, "how": "non-reentrant"})],
    ),
    "an optimizer's step after packed spikes": (
        Plan("image", ("conv norm", "cubalif"), "torch"),
        [
            ("forward_wrapped", {"fresh": False, "how": "packed", "seed": 3, "steps": 9}),
            ("train", {"kind": "adam"}),
            ("backward", {"keep": False, "seed": 0, "some": 48, "which": -1}),
        ],
    ),
}


@pytest.mark.parametrize("name", EARLIER_FAULTS)
def test_programs_of_earlier_faults_stay_equal(name: str, compiler: None) -> None:
    live(*EARLIER_FAULTS[name])


def test_program_is_printed_as_python() -> None:
    plan = Plan("vector", ("delay",), "hop")
    error = DifferenceError("something", plan, [("reset", {})])
    scope: dict[str, Any] = {}
    exec(str(error).split("\n\n", 1)[1], scope)
    assert scope["live"] is live


def test_run_of_equal_twins_raises_nothing(recwarn: pytest.WarningsRecorder) -> None:
    run(machine((("torch", "auto"),)), runs=6, rules=30)


@pytest.mark.parametrize("family", ["vector", "image"])
def test_each_layer_keeps_the_shape(family: str, loops: None) -> None:
    for name in layers_for(family):
        x = torch.rand(3, 2, *((4,) if family == "vector" else (4, 2, 3)))
        assert build(Plan(family, (name,), "torch"))(x).shape == x.shape, name


def test_names_in_short_runs_exist() -> None:
    assert {layer.removeprefix("+") for _, layers in FEW_PLANS for layer in layers} <= set(LAYERS)
    assert set(LONG_ACTS) <= set(ACTS)


def test_twins_continue_after_a_refusal(compiler: None) -> None:
    """Checks that both twins continue after an act is refused. torch cannot copy a pruned network after a call, so both
    twins are built again.
    """
    call: dict[str, Any] = {"steps": 8, "seed": 0, "layout": "contiguous", "fresh": True}
    forward = ("forward", {**call, "batch": None, "learned": True})
    differentiate = ("differentiate_twice", {"which": -1, "some": 1, "seed": 0})
    prune = ("prune_weights", {"which": 0, "how": "prune"})
    train = ("forward_and_backward", {**call, "some": 1})
    plan = Plan("vector", ("linear", "lif"), "cpp")
    twins = live(plan, [forward, differentiate, forward, prune, forward, differentiate, train])
    assert twins.counts["differentiate_twice: refused"] >= 2
