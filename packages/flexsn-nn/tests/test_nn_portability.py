"""Reports of `backend="auto"` without a GPU: each refusal on a GPU is reported once, with operation and line."""

from __future__ import annotations

import copy
import importlib
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsn_nn import (
    LIF,
    FlexSN,
    PortabilityError,
    PortabilityWarning,
    UnknownNameError,
    _portability,
    _refusals,
    functional,
    neuron,
    set_portability,
    surrogate,
)
from flexsn_nn.neuron import ImmediateReset

HAS_GPU = torch.cuda.is_available()
X = torch.linspace(-1.0, 1.0, 24).reshape(3, 2, 4)  # These values are on the CPU, also on machines with a GPU.

Pair = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def reaction() -> Iterator[None]:
    set_portability("warn")
    yield
    set_portability("warn")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor, v: Tensor) -> Pair:
        h = v + x + v @ (self.w + v.mean())
        return h, h


def draws(x: Tensor, v: Tensor) -> Pair:
    return x + torch.randn_like(x), v


def drops(x: Tensor, v: Tensor) -> Pair:
    return nn.functional.dropout(x, 0.5), v


def branches(x: Tensor, v: Tensor) -> Pair:
    return (x, v) if x.sum() > 0 else (-x, v)


def inhibits(x: Tensor, v: Tensor) -> Pair:
    return x - x.mean(0, keepdim=True), v


def shifts(x: Tensor, v: Tensor) -> Pair:
    return x.roll(1, -1), v


def counts(x: Tensor, v: Tensor) -> Pair:
    return x * float(v.numel() + x.detach().abs().max()), v


def sorts(x: Tensor, v: Tensor) -> Pair:
    return x.sort(-1).values, v


def writes(x: Tensor, v: Tensor) -> Pair:
    v.add_(x)
    return v, v.clone()


def has_no_rule(x: Tensor, v: Tensor) -> Pair:
    return torch.special.airy_ai(x), v


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].flip(-1)


def backward_mixes(x: Tensor, v: Tensor) -> Pair:
    y: Tensor = Backward.apply(x)
    return y, v


REFUSED: list[tuple[Callable[..., Any], str]] = [
    (Recurrent(), r"NonPointwiseError: aten\.mean.*h = v \+ x \+ v @ \(self\.w"),
    (draws, r"RandomOpError: .*aten\.randn_like.*return x \+ torch\.randn_like"),
    (drops, r"RandomOpError: .*dropout\(x, 0\.5\)"),
    (branches, r"DataDependentError: .*if x\.sum\(\) > 0"),
    (inhibits, r"NonPointwiseError: aten\.mean.*x\.mean\(0, keepdim=True\)"),
    (shifts, r"NonPointwiseError: .*x\.roll"),
    (counts, r"DataDependentError: .*float\("),
    (sorts, r"NonPointwiseError: .*x\.sort"),
    (writes, r"MutationError: .*v\.add_\(x\)"),
    (has_no_rule, r"UnsupportedCoreError: .*airy_ai"),
]
refused = pytest.mark.parametrize(
    ("core", "words"), REFUSED, ids=[getattr(core, "__name__", type(core).__name__) for core, _ in REFUSED]
)


def make_neuron(core: Callable[..., Any], **options: Any) -> FlexSN:
    return FlexSN(core, 1, 1, 1, **options)


def call_without_warnings(layer: nn.Module, x: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return layer(x.clone())


@refused
@pytest.mark.long(all_but=["shifts", "Recurrent"])
def test_the_first_call_warns_once(core: Callable[..., Any], words: str) -> None:
    layer = make_neuron(core)
    with torch.no_grad():
        with pytest.warns(PortabilityWarning, match=f"(?s){words}.*backend='torch'") as caught:
            layer(X.clone())
        assert len(caught) == 1
        assert caught[0].filename == __file__
        call_without_warnings(layer, X)
        layer.reset()
        call_without_warnings(layer, X[:2])
    assert f"on a GPU, compiled kernels refuse the core: {words.split(':')[0]}" in layer.explain()


@refused
@pytest.mark.long(all_but=["shifts", "sorts", "has_no_rule"])
def test_every_call_raises_after_set_portability_error(core: Callable[..., Any], words: str) -> None:
    set_portability("error")
    layer = make_neuron(core)
    for _ in range(2):
        with pytest.raises(PortabilityError, match=f"(?s){words}"), torch.no_grad():
            layer(X.clone())
        assert layer.states == []


@refused
@pytest.mark.parametrize("backend", ["torch", "hop"])
def test_a_requested_loop_runs(core: Callable[..., Any], words: str, backend: str) -> None:
    set_portability("error")
    with torch.no_grad():
        call_without_warnings(make_neuron(core, backend=backend), X)


@refused
def test_no_call_warns_after_set_portability_ignore(core: Callable[..., Any], words: str, compiler: None) -> None:
    set_portability("ignore")
    layer = make_neuron(core)
    with torch.no_grad():
        call_without_warnings(layer, X)
    assert "the loop ran instead" in layer.explain()


def test_the_results_are_those_of_the_loop_with_warnings_too() -> None:
    """Compares results with random values, which shows that the check draws none."""
    results = []
    for options in ({}, {"backend": "torch"}):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PortabilityWarning)
            layer = make_neuron(draws, **options)
            results.append([layer(X), layer(X), layer.states[0]])
    for result, expected in zip(*results, strict=True):
        assert torch.equal(result, expected)


def test_refusals_of_training_are_reported_in_the_first_training_call() -> None:
    layer = make_neuron(backward_mixes)
    call_without_warnings(layer, X)
    x = X.clone().requires_grad_()
    with pytest.warns(PortabilityWarning, match=r"(?s)flip.*return grads\[0\]\.flip"):
        layer(x)
    call_without_warnings(layer, x)


def test_other_dtypes_and_numbers_of_dimensions_are_checked_again() -> None:
    def sum_vectors(x: Tensor, v: Tensor) -> Pair:
        return (x if x.dim() == 2 else x.cumsum(0)), v

    layer = make_neuron(sum_vectors)
    call_without_warnings(layer, X)
    layer.reset()
    with pytest.warns(PortabilityWarning, match="cumsum"):
        layer(X[:, 0])


def test_accepted_cores_cause_no_warning() -> None:
    set_portability("error")
    for layer in (
        LIF(),
        make_neuron(lambda x, v: (x * 2.0, v + x)),
        neuron.PLIF(),
        LIF(tau=nn.Parameter(torch.tensor(2.0))),
    ):
        call_without_warnings(layer, X)
        call_without_warnings(layer, X.clone().requires_grad_())


def test_ready_made_neurons_are_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_called(*arguments: object, **options: object) -> str | None:
        raise AssertionError("traced")

    monkeypatch.setattr("flexsn_nn._refusals.why_refused", not_called)
    for layer in (LIF(), neuron.Leaky(0.9), neuron.KLIF(), LIF(surrogate_function=surrogate.ATan())):
        call_without_warnings(layer, X)


def test_custom_surrogates_and_subclasses_are_checked() -> None:
    def noisy(x: Tensor) -> Tensor:
        return (x > torch.rand_like(x)).to(x.dtype)

    with pytest.warns(PortabilityWarning, match="rand_like"):
        LIF(surrogate_function=noisy)(X)

    class Custom(ImmediateReset):
        def dynamics(self, x: Tensor, v: Tensor) -> Pair:
            return self.fire(v), v + x.mean()

    with pytest.warns(PortabilityWarning, match=r"x\.mean\(\)"):
        Custom(1.0, 0.0, surrogate.Sigmoid(), False)(X)


@pytest.mark.parametrize("precision", ["eager", "float32"])
def test_half_precision_is_checked(precision: str) -> None:
    set_portability("error")
    call_without_warnings(make_neuron(lambda x, v: (x * 2.0, v + x), precision=precision), X.bfloat16())
    with pytest.raises(PortabilityError, match="cumsum"):
        make_neuron(lambda x, v: (x.cumsum(-1), v), precision=precision)(X.bfloat16())


def test_single_steps_are_not_checked() -> None:
    set_portability("error")
    layer = make_neuron(inhibits, step_mode="s")
    call_without_warnings(layer, X[0])


def test_transforms_and_tracers_are_not_checked() -> None:
    set_portability("error")
    layer = make_neuron(lambda x, v: (x * 2.0, v + x))
    torch.vmap(lambda x: layer.step(x)[0])(X[None].expand(2, -1, -1, -1).clone())
    torch.func.grad(lambda x: layer.step(x)[0].sum())(X)  # type: ignore[union-attr]


def test_calls_without_steps_are_not_checked() -> None:
    set_portability("error")
    layer = make_neuron(inhibits, example_outputs=(X[0],))
    call_without_warnings(layer, X[:0])


def test_the_record_of_refusals_is_small_and_without_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_refusals, "_MOST", 3)
    layer = make_neuron(inhibits)
    with pytest.warns(PortabilityWarning):
        layer(X)
    assert all(isinstance(reason, str) for reason in layer._refusals._reasons.values())
    assert pickle.loads(pickle.dumps(make_neuron(inhibits))).explain()
    twin = copy.deepcopy(layer)
    call_without_warnings(twin, X)
    for dimension in range(1, 7):
        layer.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PortabilityWarning)
            layer(torch.zeros(1, *[1] * dimension))
    assert len(layer._refusals._reasons) <= 3


def test_each_neuron_of_a_network_is_checked() -> None:
    set_portability("error")
    net = nn.Sequential(nn.Linear(4, 4), LIF(), make_neuron(Recurrent()))
    with pytest.raises(PortabilityError, match="mean"):
        net(X)
    functional.set_backend(net, "torch")
    functional.reset_net(net)
    call_without_warnings(net, X)


def test_unknown_reactions_are_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown portability 'warning'.*Did you mean 'warn'"):
        set_portability("warning")
    assert issubclass(PortabilityError, NotImplementedError)
    assert issubclass(PortabilityWarning, UserWarning)


def reload_with(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the environment variable and reloads the module, as at the start of a process."""
    with monkeypatch.context() as environment:
        environment.setenv("FLEXSN_PORTABILITY", setting)
        importlib.reload(_portability)


def test_the_environment_sets_the_reaction(monkeypatch: pytest.MonkeyPatch) -> None:
    reload_with("error", monkeypatch)
    with pytest.raises(PortabilityError):
        make_neuron(shifts)(X)
    reload_with("", monkeypatch)
    with pytest.warns(PortabilityWarning):
        make_neuron(shifts)(X)
    with pytest.raises(UnknownNameError, match="FLEXSN_PORTABILITY"):
        reload_with("errr", monkeypatch)
