"""Cores with equal code (twins) share a trace, unless they differ in a way that affects the trace."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from flexsn_graph import (
    RecurrentTrace,
    Stage,
    StagedStep,
    StepTrace,
    StepValue,
    is_of_any_batch,
    resized,
    trace_core,
)

Core = Callable[..., Any]
SETTINGS = {"scale": 2.0}
KNOWN: dict[Any, float] = {}


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor, alpha: float) -> Tensor:
        ctx.save_for_backward(v)
        ctx.alpha = alpha
        return (v >= 0).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (v,) = ctx.saved_tensors
        return grad / (1 + (ctx.alpha * v) ** 2), None


class Decay(nn.Module):
    def __init__(self, rate: float = 0.5) -> None:
        super().__init__()
        self.rate = rate
        self.weight = nn.Parameter(torch.linspace(0.1, 0.9, 7))

    def forward(self, v: Tensor) -> Tensor:
        return v * self.rate * self.weight


class Neuron(nn.Module):
    def __init__(self, rate: float = 0.5, alpha: float = 2.0, hard: bool = True) -> None:
        super().__init__()
        self.decay = Decay(rate)
        self.options: dict[str, Any] = {"alpha": alpha, "levels": [1.0, 2.0]}
        self.names = SimpleNamespace(hard=hard)
        self.register_buffer("bias", torch.ones(7))

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        v = self.decay(v) + x * self.options["levels"][1] * SETTINGS["scale"] + self.bias
        s = Spike.apply(v - 1.0, self.options["alpha"])
        return s, v * (1.0 - s) if self.names.hard else v - s

    def step(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        s, v = self(x, v)
        return s, v


class Recurrent(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)
        self.scale = scale

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        v = torch.tanh(x + self.linear(v) * self.scale)
        return v, v


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 21)

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        gates = self.linear(v)
        i, f = gates[:, :14].sigmoid().chunk(2, dim=-1)
        v = f * v + i * torch.tanh(gates[..., 14:] + x)
        return v, v


class Slots:
    __slots__ = ("rate", "weight")

    def __init__(self, rate: float = 0.5) -> None:
        self.rate, self.weight = rate, torch.ones(7)

    def __call__(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        v = v * self.rate + x * self.weight
        return v, v


def closure(rate: float = 0.5, weight: Tensor | None = None) -> Core:
    held = torch.ones(7) if weight is None else weight

    def half(v: Tensor) -> Tensor:
        return v * rate

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        v = half(v) + x * held
        return v, v

    return core


def scaled(config: Any, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    v = v * config.rate + x
    return v, v


def with_default(rate: float) -> Core:
    def core(x: Tensor, v: Tensor, r: float = rate) -> tuple[Tensor, Tensor]:
        return x, v * r + x

    return core


def method(**options: Any) -> Core:
    return Neuron(**options).step


TWINS: dict[str, Callable[..., Core]] = {
    "module": Neuron,
    "method": method,
    "recurrent": Recurrent,
    "slots": Slots,
    "closure": closure,
    "partial": lambda rate=0.5: partial(scaled, SimpleNamespace(rate=rate)),
    "default": lambda rate=0.5: with_default(rate),
}


def make_trace(core: Core) -> StepTrace | RecurrentTrace:
    trace = trace_core(core, 1, 1, 1, (torch.zeros(5, 7), torch.zeros(5, 7)))
    assert isinstance(trace, StepTrace | RecurrentTrace)
    return trace


def describe(trace: StepTrace | RecurrentTrace) -> str:
    if isinstance(trace, StepTrace):
        return str(trace.forward.graph)
    return "\n".join(str(stage.graph.graph) for stage in trace.forward.stages)


@pytest.mark.parametrize("name", TWINS)
def test_another_instance_shares_the_trace(name: str) -> None:
    first, second = TWINS[name](), TWINS[name]()
    trace = make_trace(first)
    twin = trace.of_twin(second)
    assert twin is not None
    assert describe(twin) == describe(make_trace(second))
    assert twin.forward is trace.forward
    expected = make_trace(second).captured
    assert len(twin.captured) == len(expected) == len(trace.captured)
    for tensor, own_tensor, first_tensor in zip(twin.captured, expected, trace.captured, strict=True):
        assert tensor is own_tensor
        assert tensor is not first_tensor
    assert twin.reads.fetch() is not None


@pytest.mark.parametrize("name", [name for name in TWINS if name not in ("recurrent", "default")])
def test_values_that_a_twin_reads_are_followed(name: str) -> None:
    first, second = TWINS[name](), TWINS[name]()
    twin = make_trace(first).of_twin(second)
    assert twin is not None
    change(first)
    assert twin.reads.fetch() is not None, "the twin depends on a number of the first instance"
    change(second)
    assert twin.reads.fetch() is None


def change(core: Any) -> None:
    """Changes the number that a core of `TWINS` reads."""
    owner = getattr(core, "__self__", core)
    if isinstance(owner, Neuron):
        owner.decay.rate = 0.25
    elif isinstance(owner, partial):
        owner.args[0].rate = 0.25
    elif isinstance(owner, Slots):
        owner.rate = 0.25
    else:
        cells = dict(zip(owner.__code__.co_freevars, owner.__closure__, strict=True))
        half = cells["half"].cell_contents
        half.__closure__[0].cell_contents = 0.25


@pytest.mark.long(all_but=["recurrent", "closure"])
@pytest.mark.parametrize("name", ["module", "closure", "recurrent"])
def test_twin_has_its_own_vjps(name: str) -> None:
    first, second = TWINS[name](), TWINS[name]()
    trace = make_trace(first)
    twin = trace.of_twin(second)
    assert twin is not None
    change(first) if name != "recurrent" else setattr(first, "scale", 3.0)
    required = [True] * (2 + len(twin.lifted_values))
    retraced = make_trace(second)
    actual, expected = twin.vjp((True, True), required), retraced.vjp((True, True), required)
    assert [str(p) for p in actual.arguments] == [str(p) for p in expected.arguments]
    assert str(getattr(actual, "graph", actual)) == str(getattr(expected, "graph", expected)) or name == "recurrent"


def test_twin_does_not_keep_the_first_instance_alive() -> None:
    first, second = Neuron(), Neuron()
    twin = make_trace(first).of_twin(second)
    assert twin is not None
    reference = weakref.ref(first)
    del first
    gc.collect()
    assert reference() is None


def altered(change: Callable[[Neuron], object]) -> Core:
    neuron = Neuron()
    change(neuron)
    return neuron


class Half(Decay):
    def forward(self, v: Tensor) -> Tensor:
        return v * 0.5


def two_places() -> tuple[Core, Core]:
    def make(a: Tensor, b: Tensor) -> Core:
        return lambda x, v: (x * a, v * b + x)

    shared = torch.ones(7)
    return make(torch.ones(7), torch.ones(7)), make(shared, shared)


def among_all() -> tuple[Core, Core]:
    class Listed(nn.Module):
        all: ClassVar[list[Any]] = []

        def __init__(self) -> None:
            super().__init__()
            self.all.append(self)

        def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return x, v + x * (1.0 if self is self.all[0] else 2.0)

    return Listed(), Listed()


OTHERS: dict[str, Callable[[], tuple[Core, Core]]] = {
    "a number": lambda: (Neuron(0.5), Neuron(0.25)),
    "a flag": lambda: (Neuron(hard=True), Neuron(hard=False)),
    "a number that only the backward reads": lambda: (Neuron(alpha=2.0), Neuron(alpha=3.0)),
    "an element": lambda: (Neuron(), altered(lambda n: n.options.update(levels=[1.0, 3.0]))),
    "a length": lambda: (Neuron(), altered(lambda n: n.options["levels"].append(1.0))),
    "the sign of zero": lambda: (closure(0.0), closure(-0.0)),
    "the type of a number": lambda: (closure(1.0), closure(1)),
    "a shape": lambda: (Neuron(), altered(lambda n: setattr(n, "bias", torch.ones(1)))),
    "a dtype": lambda: (Neuron(), altered(lambda n: n.double())),
    "a frozen parameter": lambda: (Neuron(), altered(lambda n: n.decay.weight.requires_grad_(False))),
    "strides": lambda: (closure(), closure(weight=torch.ones(14)[::2])),
    "a hook": lambda: (Neuron(), altered(lambda n: n.decay.register_forward_hook(lambda *_: None))),
    "an assigned method": lambda: (Neuron(), altered(lambda n: setattr(n.decay, "forward", lambda v: v))),
    "another class": lambda: (Neuron(), altered(lambda n: setattr(n, "decay", Half()))),
    "a default": lambda: (with_default(0.5), with_default(0.25)),
    "one tensor in two places": two_places,
    "an instance in a list": among_all,
}


@pytest.mark.parametrize("name", OTHERS)
def test_different_core_is_no_twin(name: str) -> None:
    first, second = OTHERS[name]()
    assert make_trace(first).of_twin(second) is None


def by_identity() -> tuple[Core, Core]:
    class ById(nn.Module):
        def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return x, v + KNOWN.get(id(self), 1.0) * x

    first = ById()
    KNOWN[id(first)] = 3.0
    return first, ById()


def by_hash() -> tuple[Core, Core]:
    class ByHash(nn.Module):
        def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return x, v + float(hash(self) % 7) * x

    return ByHash(), ByHash()


def by_key() -> tuple[Core, Core]:
    numbers: dict[Any, float] = {}

    class ByKey(nn.Module):
        def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return x, v + numbers[self] * x

    first, second = ByKey(), ByKey()
    numbers[first], numbers[second] = 1.0, 2.0
    return first, second


def by_clock() -> tuple[Core, Core]:
    def make() -> Core:
        return lambda x, v: (x, v + (x if time.time() > 0 else -x))

    return make(), make()


def by_cache() -> tuple[Core, Core]:
    @lru_cache(4)
    def number(owner: Any) -> float:
        return float(owner.rate)

    class ByCache(nn.Module):
        def __init__(self, rate: float) -> None:
            super().__init__()
            self.rate = rate

        def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return x, v + number(self) * x

    return ByCache(1.0), ByCache(2.0)


@pytest.mark.parametrize("make", [by_identity, by_hash, by_key, by_clock, by_cache])
def test_core_that_distinguishes_objects_has_no_twin(make: Callable[[], tuple[Core, Core]]) -> None:
    first, second = make()
    assert make_trace(first).of_twin(second) is None


class BySize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        return v * 2.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * float(grad.shape[0])


def adding(tensor: Tensor) -> Core:
    return lambda x, v: (x, v + x * tensor)


OF_ONE_SIZE: dict[str, Callable[[], Core]] = {
    "a branch": lambda: lambda x, v: (x, v + (x if x.shape[0] > 5 else -x)),
    "size()": lambda: lambda x, v: (x, v + x * x.size(0)),
    "len()": lambda: lambda x, v: (x, v + x * len(x)),
    "numel()": lambda: lambda x, v: (x, v + x / x.numel()),
    "torch.numel": lambda: lambda x, v: (x, v + x / torch.numel(x)),
    "stride": lambda: lambda x, v: (x, v + x * x.stride(0)),
    "the shape of a computed value": lambda: lambda x, v: (x, v + x * (x + v).shape[0]),
    "a view of this size": lambda: lambda x, v: (x, v + x.view(5, 7)),
    "a constant of this size": lambda: lambda x, v: (x, v + x * torch.ones(5, 1)),
    "a constant of each size": lambda: lambda x, v: (x, v + x * x.new_ones(x.size(0), 1)),
    "a captured tensor": lambda: adding(torch.linspace(0, 1, 35).reshape(5, 7)),
    "a captured column": lambda: adding(torch.linspace(0, 1, 5)[:, None]),
    "a column of a captured tensor": lambda: (lambda w: lambda x, v: (x, v + x * w[:, None]))(torch.linspace(0, 1, 5)),
    "a backward": lambda: lambda x, v: (x, BySize.apply(v) + x),
}
OF_ANY_SIZE: dict[str, Callable[[], Core]] = {
    "module": Neuron,
    "recurrent": Recurrent,
    "closure": closure,
    "like": lambda: lambda x, v: (x, torch.zeros_like(x) + v * torch.full_like(v, 0.5)),
    "gated": Gated,
    "a captured row": lambda: adding(torch.linspace(0, 1, 7)[None]),
}


def resize_batch(trace: StepTrace | RecurrentTrace, batch: int) -> StepTrace | RecurrentTrace | None:
    value = StepValue((batch, 7), torch.float32)
    return trace.of_batch([value], [value])


def require_all(trace: StepTrace | RecurrentTrace) -> list[bool]:
    return [True] * (2 + len(trace.lifted_values))


@pytest.mark.long(all_but=["recurrent", "module", "closure", "like", "a captured row"])
@pytest.mark.parametrize("name", OF_ANY_SIZE)
def test_trace_serves_other_batch_sizes(name: str) -> None:
    core = OF_ANY_SIZE[name]()
    trace = make_trace(core)
    larger = resize_batch(trace, 6)
    assert larger is not None
    retraced = trace_core(core, 1, 1, 1, (torch.zeros(6, 7), torch.zeros(6, 7)))
    assert (larger.step_shape, larger.inputs, larger.states, larger.outputs) == (
        *(retraced.step_shape, retraced.inputs, retraced.states, retraced.outputs),
    )
    assert isinstance(retraced, StepTrace | RecurrentTrace)
    assert describe(larger) == describe(retraced)
    if isinstance(larger, RecurrentTrace):
        assert isinstance(retraced, RecurrentTrace)
        assert isinstance(trace, RecurrentTrace)
        assert list_sizes(larger.forward) == list_sizes(retraced.forward)
        vjp = trace.vjp((True, True), require_all(trace))
        assert is_of_any_batch(vjp, trace.step_shape, [v.shape for v in trace.lifted_values])
        assert list_sizes(resized(vjp, 5, 6)) == list_sizes(retraced.vjp((True, True), require_all(retraced)))
        assert list_sizes(larger.vjp((True, True), require_all(larger))) == list_sizes(
            retraced.vjp((True, True), require_all(retraced))
        )


def list_sizes(staged: StagedStep) -> list[object]:
    """Returns the sizes and shapes of a staged step."""
    actual: list[object] = [dict(staged.values), staged.terms]
    for part in staged.parts:
        writes = part.writes if isinstance(part, Stage) else (part.result, part.factor_shapes)
        actual.append((part.shape, part.reads, writes))
    return actual


@pytest.mark.parametrize("name", OF_ONE_SIZE)
def test_core_that_depends_on_sizes_is_traced_for_each_size(name: str) -> None:
    trace = make_trace(OF_ONE_SIZE[name]())
    assert isinstance(trace, StepTrace)
    trace.vjp((True, True), require_all(trace))
    assert resize_batch(trace, 6) is None


@pytest.mark.parametrize("batch", [0, 1])
def test_sizes_that_broadcast_have_separate_traces(batch: int) -> None:
    assert resize_batch(make_trace(Neuron()), batch) is None


def test_broadcast_input_keeps_its_size() -> None:
    trace = trace_core(Neuron(), 1, 1, 1, (torch.zeros(7), torch.zeros(5, 7)))
    row, value = StepValue((7,), torch.float32), StepValue((6, 7), torch.float32)
    larger = trace.of_batch([row], [value])
    assert larger is not None
    assert larger.inputs == (row,)
    assert trace.of_batch([value], [value]) is None
    assert trace.of_batch([row], [StepValue((6, 8), torch.float32)]) is None
    assert trace.of_batch([row], [StepValue((6, 7), torch.float64)]) is None


def test_trace_of_a_frozen_tensor_does_not_serve_a_trained_tensor() -> None:
    core = Neuron()
    core.decay.weight.requires_grad_(False)
    trace = make_trace(core)
    core.decay.weight.requires_grad_()
    assert trace.of_twin(core) is None
    core.decay.weight.requires_grad_(False)
    assert trace.of_twin(core) is not None
