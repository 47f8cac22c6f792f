"""Layers with a state that are not neurons: checkpointing, export, copies, and passed states."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flexsn_nn.errors import ExportError, InputDtypeError, StateError
from flexsn_nn.functional import detach_net, get_states, reset_net, set_states, set_step_mode
from flexsn_nn.layer import Delay, SharedDropout, Stateful
from flexsn_nn.neuron import LIF, PSN, MaskedPSN, SlidingPSN
from flexsn_nn.surrogate import Sigmoid
from flexsn_runtime import FreedGraphError


class Sum(Stateful):
    """A user's layer, which reads and assigns `states`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        steps = x if self.step_mode == "m" else x[None]
        before = self.states[0] if self.states else torch.zeros_like(steps[0])
        y = before + (steps * self.weight).cumsum(0)
        self.states = [y[-1]]
        return y if self.step_mode == "m" else y[0]


LAYERS: dict[str, Callable[[], Stateful]] = {
    "Delay": lambda: Delay(2),
    "a learned Delay": lambda: Delay(1.5, max_delay=3, learn=True),
    "SlidingPSN": lambda: SlidingPSN(3, surrogate_function=Sigmoid()),
    "SharedDropout": lambda: SharedDropout(0.4),
    "Sum": Sum,
}
layers = pytest.mark.parametrize("name", LAYERS)
reentrant = pytest.mark.parametrize("reentrant", [False, True])


def draw_input(T: int = 6) -> Tensor:
    return 3 * torch.rand(T, 2, 5, generator=torch.Generator().manual_seed(0))


# -- activation checkpointing ------------------------------------------------------------------------------------------


@layers
@reentrant
@pytest.mark.parametrize("has_state", [False, True])
def test_a_second_run_from_another_state_is_refused(name: str, reentrant: bool, has_state: bool) -> None:
    layer = LAYERS[name]()
    x = draw_input().requires_grad_()
    if has_state:
        layer(x.detach())
        layer.detach()
    y: Tensor = checkpoint(lambda x: layer(x).square(), x, use_reentrant=reentrant)
    with pytest.raises(StateError, match=rf"checkpointing runs the layer {type(layer).__name__}.*reset\(\)"):
        (y * torch.arange(6.0)[:, None, None]).sum().backward()


@layers
@reentrant
def test_a_detach_in_the_second_run_does_not_count_as_a_reset(name: str, reentrant: bool) -> None:
    layer = LAYERS[name]()

    def run(x: Tensor) -> Tensor:
        detach_net(layer)
        y: Tensor = layer(x).square()
        return y

    x = draw_input().requires_grad_()
    y: Tensor = checkpoint(run, x, use_reentrant=reentrant)
    with pytest.raises(StateError, match="checkpointing"):
        y.sum().backward()


@layers
@reentrant
@pytest.mark.parametrize("beginning", ["reset", "states"])
def test_checkpoints_of_a_function_that_sets_the_state_first_are_correct(
    name: str, reentrant: bool, beginning: str
) -> None:
    layer = LAYERS[name]()
    x = draw_input().requires_grad_()
    weights = torch.arange(6.0)[:, None, None]
    torch.manual_seed(0)
    layer(x.detach())
    states = [state.detach() for state in layer.states]

    def run(x: Tensor) -> Tensor:
        if beginning == "reset":
            layer.reset()
        else:
            layer.states = states
        return torch.cat([layer(chunk) for chunk in x.split(2)])

    torch.manual_seed(1)
    (expected,) = torch.autograd.grad((run(x) * weights).sum(), x)
    torch.manual_seed(1)
    y: Tensor = checkpoint(run, x, use_reentrant=reentrant)
    layer(draw_input())  # Calls between the two runs do not matter.
    (y * weights).sum().backward()
    torch.testing.assert_close(x.grad, expected)


@reentrant
def test_an_assigned_state_counts_as_a_reset(reentrant: bool) -> None:
    neuron = LIF()
    x = draw_input().requires_grad_()
    neuron(x.detach())
    states = list(neuron.states)

    def run(x: Tensor) -> Tensor:
        neuron.states = states
        output: Tensor = neuron(x)
        return output

    (expected,) = torch.autograd.grad(run(x).sum(), x)
    y: Tensor = checkpoint(run, x, use_reentrant=reentrant)
    y.sum().backward()
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("make", [lambda: Delay(0), lambda: SlidingPSN(1), lambda: SharedDropout(0.5).eval()])
def test_layers_without_a_state_may_run_twice(make: Callable[[], Stateful]) -> None:
    layer = make()
    x = draw_input().requires_grad_()
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert x.grad is not None


# -- export ------------------------------------------------------------------------------------------------------------


@layers
@pytest.mark.filterwarnings("ignore:The tensor attribute", "ignore:While compiling, we found certain side effects")
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.long)])
def test_exports_begin_with_the_initial_state_or_raise(name: str, strict: bool) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]().eval()
    x = draw_input(3)
    expected = layer(x)
    if layer.states:
        states = [state.clone() for state in layer.states]
        with pytest.raises(Exception, match="has a state, which an exported program cannot keep") as refusal:
            torch.export.export(layer, (x,), strict=strict)
        assert strict or isinstance(refusal.value, ExportError)
        assert all(map(torch.equal, layer.states, states))
    layer.reset()
    program = torch.export.export(layer, (x,), strict=strict)
    torch.testing.assert_close(program.module()(x), expected)
    torch.testing.assert_close(layer(x), expected)
    assert not layer.states or name != "SharedDropout"


class Twice(nn.Module):
    """A module that calls one layer twice. The second call continues from the state of the first."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.layer(part) for part in x.split(3)])


@layers
@pytest.mark.filterwarnings("ignore:The tensor attribute")
def test_calls_in_one_exported_program_continue_from_the_state(name: str) -> None:
    net = Twice(LAYERS[name]().eval())
    program = torch.export.export(net, (draw_input(),), strict=False)
    torch.testing.assert_close(program.module()(draw_input()), net(draw_input()))


# -- compilers ---------------------------------------------------------------------------------------------------------


@layers
@pytest.mark.long(all_but=["Delay", "Sum"])
def test_compiled_layers_continue_from_their_states(name: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]()
    if name == "SharedDropout":
        layer(draw_input())
    layer.detach()
    compiled = torch.compile(deepcopy(layer), backend="eager", fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(draw_input()), layer(draw_input()))


# -- helpers and copies ------------------------------------------------------------------------------------------------


@layers
def test_states_are_copied_and_reset_by_functional(name: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]()
    net = nn.Sequential(layer)
    x = draw_input().requires_grad_()
    net(x)
    assert not any("state" in key for key in layer.state_dict())
    copies = [deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    states = layer.states
    stored = get_states(net)
    expected = layer(draw_input())
    for copy in copies:
        assert not any(state.requires_grad for state in copy.states)
        torch.testing.assert_close(copy(draw_input()), expected)
    set_states(net, stored)
    torch.testing.assert_close(layer(draw_input()), expected)
    detach_net(net)
    assert not any(state.requires_grad for state in layer.states)
    assert states
    reset_net(net)
    assert layer.states == []
    loaded = LAYERS[name]()
    loaded.load_state_dict(layer.state_dict())
    set_step_mode(net, "s")
    assert layer.step_mode == "s"
    with pytest.raises(TypeError, match="states is a tensor; give a list"):
        layer.states = draw_input()[0]  # type: ignore[assignment]
    layer.double()
    assert layer(draw_input().double()[0]).dtype == torch.float64
    assert all(state.dtype == torch.float64 for state in layer.states)


@pytest.mark.parametrize("name", ["a learned Delay", "SlidingPSN", "Sum"])
def test_functional_call_has_gradients(name: str) -> None:
    layer = LAYERS[name]()
    values = {key: (p.detach() * 0.9).requires_grad_() for key, p in layer.named_parameters()}
    y = torch.func.functional_call(layer, values, (draw_input(),))
    gradients = torch.autograd.grad(y.sum(), list(values.values()))
    layer.reset()
    with torch.no_grad():
        for key, p in layer.named_parameters():
            p.copy_(values[key])
    expected = torch.autograd.grad(layer(draw_input()).sum(), list(layer.parameters()))
    torch.testing.assert_close(gradients, expected)


# -- inputs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize(
    "make", [lambda: SharedDropout(0.5), lambda: SlidingPSN(2), lambda: PSN(6), lambda: MaskedPSN(2, 6)]
)
def test_integers_are_refused(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    with pytest.raises(InputDtypeError, match=r"the input is torch\..* needs floating-point input: x\.float\(\)"):
        make()(draw_input().to(dtype))


@pytest.mark.parametrize("name", ["Delay", "SlidingPSN"])
@pytest.mark.parametrize("change", [lambda x: x.double(), lambda x: x[:, :1]])
def test_an_input_that_does_not_fit_the_stored_inputs_is_refused(name: str, change: Callable[[Tensor], Tensor]) -> None:
    layer = LAYERS[name]()
    layer(draw_input())
    with pytest.raises(StateError, match=r"earlier inputs is .*; for this input it is .*reset\(\)"):
        layer(change(draw_input()))


def test_stored_inputs_on_another_device_are_refused() -> None:
    layer = Delay(2)
    layer(draw_input())
    with pytest.raises(StateError, match=r"earlier inputs is .* on cpu; for this input it is .* on meta"):
        layer(draw_input().to("meta"))


# -- a forgotten reset -------------------------------------------------------------------------------------------------


class Filter(Stateful):
    """A layer that stores the results of its own operations."""

    def forward(self, x: Tensor) -> Tensor:
        state = self.states[0] if self.states else torch.zeros_like(x[0])
        self.states = [state * torch.tanh(x[-1] * 2.0) + x.mean(0).square()]
        return x * 3.0 + state


FORGETFUL: dict[str, Callable[[], Stateful]] = {
    "Delay": lambda: Delay(2),
    "learned Delay": lambda: Delay(1.5, learn=True),
    "SlidingPSN": lambda: SlidingPSN(3),
    "Sum": Sum,
    "Filter": Filter,
}


@pytest.mark.parametrize("step_mode", ["m", "s"])
@pytest.mark.parametrize("name", list(FORGETFUL))
def test_a_forgotten_reset_is_reported(name: str, step_mode: str) -> None:
    if step_mode == "s" and name in ("Sum", "Filter"):
        pytest.skip("the layer only accepts sequences")
    layer = FORGETFUL[name]()
    net = nn.Sequential(nn.Linear(5, 5), nn.Sigmoid(), layer)
    set_step_mode(net, step_mode)
    x = draw_input() if step_mode == "m" else draw_input()[0]
    net(x).sum().backward()
    with pytest.raises(FreedGraphError, match=r"reset it .*reset_net.*detach_net"):
        net(x).sum().backward()
    for cut_graph in (reset_net, detach_net):
        cut_graph(net)
        net(x).sum().backward()


@pytest.mark.parametrize("name", list(FORGETFUL))
def test_retained_graphs_may_be_traversed(name: str) -> None:
    net = nn.Sequential(nn.Linear(5, 5), nn.Sigmoid(), FORGETFUL[name]())
    net(draw_input()).sum().backward(retain_graph=True)
    net(draw_input()).sum().backward()
    reset_net(net)
    (net(draw_input()).sum() + net(draw_input()).sum()).backward()
