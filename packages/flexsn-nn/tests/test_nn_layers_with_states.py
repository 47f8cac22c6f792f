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


def data(T: int = 6) -> Tensor:
    return 3 * torch.rand(T, 2, 5, generator=torch.Generator().manual_seed(0))


# -- activation checkpointing ------------------------------------------------------------------------------------------


@layers
@reentrant
@pytest.mark.parametrize("later", [False, True])
def test_a_second_run_from_another_past_is_refused(name: str, reentrant: bool, later: bool) -> None:
    layer = LAYERS[name]()
    x = data().requires_grad_()
    if later:
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

    x = data().requires_grad_()
    y: Tensor = checkpoint(run, x, use_reentrant=reentrant)
    with pytest.raises(StateError, match="checkpointing"):
        y.sum().backward()


@layers
@reentrant
@pytest.mark.parametrize("begin", ["reset", "states"])
def test_a_function_that_sets_the_state_first(name: str, reentrant: bool, begin: str) -> None:
    layer = LAYERS[name]()
    x = data().requires_grad_()
    weights = torch.arange(6.0)[:, None, None]
    torch.manual_seed(0)
    layer(x.detach())
    past = [state.detach() for state in layer.states]

    def run(x: Tensor) -> Tensor:
        if begin == "reset":
            layer.reset()
        else:
            layer.states = past
        return torch.cat([layer(chunk) for chunk in x.split(2)])

    torch.manual_seed(1)
    (wanted,) = torch.autograd.grad((run(x) * weights).sum(), x)
    torch.manual_seed(1)
    y: Tensor = checkpoint(run, x, use_reentrant=reentrant)
    layer(data())  # Calls between the two runs do not matter.
    (y * weights).sum().backward()
    torch.testing.assert_close(x.grad, wanted)


@reentrant
def test_an_assigned_state_counts_as_a_reset(reentrant: bool) -> None:
    neuron = LIF()
    x = data().requires_grad_()
    neuron(x.detach())
    past = list(neuron.states)

    def run(x: Tensor) -> Tensor:
        neuron.states = past
        output: Tensor = neuron(x)
        return output

    (wanted,) = torch.autograd.grad(run(x).sum(), x)
    y: Tensor = checkpoint(run, x, use_reentrant=reentrant)
    y.sum().backward()
    torch.testing.assert_close(x.grad, wanted)


@pytest.mark.parametrize("make", [lambda: Delay(0), lambda: SlidingPSN(1), lambda: SharedDropout(0.5).eval()])
def test_layers_without_a_past_may_run_twice(make: Callable[[], Stateful]) -> None:
    layer = make()
    x = data().requires_grad_()
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert x.grad is not None


# -- export ------------------------------------------------------------------------------------------------------------


@layers
@pytest.mark.filterwarnings("ignore:The tensor attribute", "ignore:While compiling, we found certain side effects")
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.long)])
def test_exports_begin_with_the_initial_state_or_raise(name: str, strict: bool) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]().eval()
    x = data(3)
    wanted = layer(x)
    if layer.states:
        kept = [state.clone() for state in layer.states]
        with pytest.raises(Exception, match="has a state, which an exported program cannot keep") as refusal:
            torch.export.export(layer, (x,), strict=strict)
        assert strict or isinstance(refusal.value, ExportError)
        assert all(map(torch.equal, layer.states, kept))
    layer.reset()
    program = torch.export.export(layer, (x,), strict=strict)
    torch.testing.assert_close(program.module()(x), wanted)
    torch.testing.assert_close(layer(x), wanted)
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
def test_calls_in_one_exported_program_continue(name: str) -> None:
    net = Twice(LAYERS[name]().eval())
    program = torch.export.export(net, (data(),), strict=False)
    torch.testing.assert_close(program.module()(data()), net(data()))


# -- compilers ---------------------------------------------------------------------------------------------------------


@layers
@pytest.mark.long(all_but=["Delay", "Sum"])
def test_compiled_layers_continue(name: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]()
    if name == "SharedDropout":
        layer(data())
    layer.detach()
    compiled = torch.compile(deepcopy(layer), backend="eager", fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(data()), layer(data()))


# -- helpers and copies ------------------------------------------------------------------------------------------------


@layers
def test_states_are_copied_and_reset_by_functional(name: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]()
    net = nn.Sequential(layer)
    x = data().requires_grad_()
    net(x)
    assert not any("state" in key for key in layer.state_dict())
    copies = [deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    wanted = layer.states
    kept = get_states(net)
    expected = layer(data())
    for copy in copies:
        assert not any(state.requires_grad for state in copy.states)
        torch.testing.assert_close(copy(data()), expected)
    set_states(net, kept)
    torch.testing.assert_close(layer(data()), expected)
    detach_net(net)
    assert not any(state.requires_grad for state in layer.states)
    assert wanted
    reset_net(net)
    assert layer.states == []
    loaded = LAYERS[name]()
    loaded.load_state_dict(layer.state_dict())
    set_step_mode(net, "s")
    assert layer.step_mode == "s"
    with pytest.raises(TypeError, match="states is a tensor; give a list"):
        layer.states = data()[0]  # type: ignore[assignment]
    layer.double()
    assert layer(data().double()[0]).dtype == torch.float64
    assert all(state.dtype == torch.float64 for state in layer.states)


@pytest.mark.parametrize("name", ["a learned Delay", "SlidingPSN", "Sum"])
def test_functional_call_has_gradients(name: str) -> None:
    layer = LAYERS[name]()
    values = {key: (p.detach() * 0.9).requires_grad_() for key, p in layer.named_parameters()}
    y = torch.func.functional_call(layer, values, (data(),))
    found = torch.autograd.grad(y.sum(), list(values.values()))
    layer.reset()
    with torch.no_grad():
        for key, p in layer.named_parameters():
            p.copy_(values[key])
    wanted = torch.autograd.grad(layer(data()).sum(), list(layer.parameters()))
    torch.testing.assert_close(found, wanted)


# -- inputs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize(
    "make", [lambda: SharedDropout(0.5), lambda: SlidingPSN(2), lambda: PSN(6), lambda: MaskedPSN(2, 6)]
)
def test_integers_are_refused(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    with pytest.raises(InputDtypeError, match=r"the input is torch\..* needs floating-point input: x\.float\(\)"):
        make()(data().to(dtype))


@pytest.mark.parametrize("name", ["Delay", "SlidingPSN"])
@pytest.mark.parametrize("other", [lambda x: x.double(), lambda x: x[:, :1]])
def test_another_input_than_the_past_is_refused(name: str, other: Callable[[Tensor], Tensor]) -> None:
    layer = LAYERS[name]()
    layer(data())
    with pytest.raises(StateError, match=r"earlier inputs is .*; for this input it is .*reset\(\)"):
        layer(other(data()))


def test_a_past_on_another_device_is_refused() -> None:
    layer = Delay(2)
    layer(data())
    with pytest.raises(StateError, match=r"earlier inputs is .* on cpu; for this input it is .* on meta"):
        layer(data().to("meta"))


# -- a forgotten reset -------------------------------------------------------------------------------------------------


class Filter(Stateful):
    """A layer that stores the results of its own operations."""

    def forward(self, x: Tensor) -> Tensor:
        kept = self.states[0] if self.states else torch.zeros_like(x[0])
        self.states = [kept * torch.tanh(x[-1] * 2.0) + x.mean(0).square()]
        return x * 3.0 + kept


FORGETFUL: dict[str, Callable[[], Stateful]] = {
    "Delay": lambda: Delay(2),
    "learned Delay": lambda: Delay(1.5, learn=True),
    "SlidingPSN": lambda: SlidingPSN(3),
    "Sum": Sum,
    "Filter": Filter,
}


@pytest.mark.parametrize("step_mode", ["m", "s"])
@pytest.mark.parametrize("name", list(FORGETFUL))
def test_a_forgotten_reset_is_named(name: str, step_mode: str) -> None:
    if step_mode == "s" and name in ("Sum", "Filter"):
        pytest.skip("it takes sequences alone")
    layer = FORGETFUL[name]()
    net = nn.Sequential(nn.Linear(5, 5), nn.Sigmoid(), layer)
    set_step_mode(net, step_mode)
    x = data() if step_mode == "m" else data()[0]
    net(x).sum().backward()
    with pytest.raises(FreedGraphError, match=r"reset it .*reset_net.*detach_net"):
        net(x).sum().backward()
    for between in (reset_net, detach_net):
        between(net)
        net(x).sum().backward()


@pytest.mark.parametrize("name", list(FORGETFUL))
def test_retained_graphs_may_be_traversed(name: str) -> None:
    net = nn.Sequential(nn.Linear(5, 5), nn.Sigmoid(), FORGETFUL[name]())
    net(data()).sum().backward(retain_graph=True)
    net(data()).sum().backward()
    reset_net(net)
    (net(data()).sum() + net(data()).sum()).backward()
