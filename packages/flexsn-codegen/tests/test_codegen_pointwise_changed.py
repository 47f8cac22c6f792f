"""Values that a pointwise function reads, apart from its arguments, may change between calls. The results of compiled
code then equal those of eager mode."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from flexsn_codegen import AutogradError, pointwise

scale = 2.0


def by_global(x: Tensor) -> Tensor:
    return x * scale


def set_global(value: float) -> None:
    global scale
    scale = value


class Gain(nn.Module):
    """A module that reads its own numbers, flag, buffer and parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((3,), 2.0))
        self.shift: Tensor
        self.register_buffer("shift", torch.zeros(3))
        self.factor = 1.5

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.gain * self.factor + self.shift
        return y if self.training else y * 10


class Widened(torch.autograd.Function):
    """A function that reads a number only in its backward."""

    width = 2.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * Widened.width


def twice(x: Tensor) -> Tensor:
    return x * 2


def thrice(x: Tensor) -> Tensor:
    return x * 3


Changes = list[Callable[[], Any]]


def _closure() -> tuple[Any, Changes]:
    factor, weight, helper = 2.0, torch.full((3,), 2.0), twice

    def function(x: Tensor) -> Any:
        return helper(x) * factor + weight

    def other_number() -> None:
        nonlocal factor
        factor = 3.0

    def other_tensor() -> None:
        nonlocal weight
        weight = torch.full((3,), 5.0)

    def other_function() -> None:
        nonlocal helper
        helper = thrice

    return function, [other_number, other_tensor, other_function, lambda: weight.mul_(2)]


def _globals() -> tuple[Any, Changes]:
    set_global(2.0)
    return by_global, [lambda: set_global(3.0), lambda: set_global(2.0)]


def _objects() -> tuple[Any, Changes]:
    owner = SimpleNamespace(inner=SimpleNamespace(value=2.0), several=[1.0, 2.0], named={"a": 3.0})

    def function(x: Tensor) -> Any:
        return x * owner.inner.value + owner.several[1] * x.sin() + owner.named["a"]

    return function, [
        lambda: setattr(owner.inner, "value", 3.0),
        lambda: setattr(owner, "inner", SimpleNamespace(value=4.0)),
        lambda: owner.several.__setitem__(1, 5.0),
        lambda: owner.named.update(a=6.0),
    ]


def _module() -> tuple[Any, Changes]:
    module = Gain()
    return module, [
        lambda: setattr(module, "factor", 2.5),
        lambda: setattr(module, "gain", nn.Parameter(torch.full((3,), 7.0))),
        lambda: module.load_state_dict({"gain": torch.full((3,), 4.0), "shift": torch.ones(3)}, assign=True),
        module.eval,
        lambda: module.gain.data.mul_(2),
    ]


def _pieces() -> tuple[Any, Changes]:
    owner = SimpleNamespace(value=2.0, weight=torch.full((3,), 2.0))

    def function(x: Tensor) -> Any:
        gate, value = torch.cat([x, x], -1).chunk(2, -1)
        return torch.sigmoid(gate) * value * owner.value + owner.weight

    return function, [
        lambda: setattr(owner, "value", 3.0),
        lambda: setattr(owner, "weight", torch.full((3,), 5.0)),
        lambda: setattr(owner, "value", 2.0),
    ]


def _backward() -> tuple[Any, Changes]:
    Widened.width = 2.0
    return Widened.apply, [lambda: setattr(Widened, "width", 3.0)]


def _branches() -> tuple[Any, Changes]:
    owner = SimpleNamespace(low=2.0, high=4.0)

    def function(x: Tensor, number: float = 0.75) -> Any:
        return x * owner.high if number > 0.5 else x * owner.low

    def both(x: Tensor) -> Any:
        return function(x, 0.25) + function(x)

    return both, [lambda: setattr(owner, "low", 3.0), lambda: setattr(owner, "high", 5.0)]


FAMILY = {f.__name__.strip("_"): f for f in (_closure, _globals, _objects, _module, _pieces, _backward, _branches)}


def compute_results(function: Callable[..., Tensor], x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = function(x) + 1
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x])]


MODES = [
    ("eager", ""),
    *[(mode, backend) for mode in ("static", "dynamic", "broken") for backend in ("aot_eager", "inductor")],
]


@pytest.mark.long(all_but=["closure-eager-", "backward-eager-", "module-static-aot_eager", "pieces-broken-aot_eager"])
@pytest.mark.parametrize(("mode", "backend"), MODES)
@pytest.mark.parametrize("name", FAMILY)
def test_changes_of_values_that_are_read_are_noticed(name: str, mode: str, backend: str) -> None:
    function, changes = FAMILY[name]()
    fused = pointwise(function, autograd=True)

    def called(x: Tensor) -> Any:
        if mode == "broken":
            torch._dynamo.graph_break()
        return fused(x)

    compiled: Any = called
    if mode != "eager":
        torch.compiler.reset()
        compiled = torch.compile(
            called, backend=backend, fullgraph=mode != "broken", dynamic={"dynamic": True}.get(mode)
        )
    x = torch.linspace(-1.0, 2.0, 15).reshape(5, 3)
    for change in (lambda: None, *changes):
        change()
        for a, e in zip(compute_results(compiled, x), compute_results(function, x), strict=True):
            torch.testing.assert_close(a, e)


def test_graph_of_an_earlier_value_is_used_again() -> None:
    owner = SimpleNamespace(value=2.0)
    fused = pointwise(lambda x: x * owner.value)
    counter = CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    compiled = torch.compile(lambda x: fused(x), backend=counter, fullgraph=True)
    x = torch.rand(7)
    for value in (2.0, 3.0, 2.0, 3.0):
        owner.value = value
        assert torch.equal(compiled(x), x * value)
    assert counter.frame_count == 2


def test_replaced_tensor_needs_no_other_graph() -> None:
    module = Gain()
    fused = pointwise(module, autograd=True)
    counter = CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    compiled = torch.compile(lambda x: fused(x), backend=counter, fullgraph=True)
    x = torch.rand(5, 3)
    for value in (1.0, 2.0, 3.0):
        module.gain = nn.Parameter(torch.full((3,), value))
        y = compiled(x)
        torch.testing.assert_close(y, module(x))
        y.sum().backward()
        assert module.gain.grad is not None
        torch.testing.assert_close(module.gain.grad, x.sum(0) * 1.5)
    assert counter.frame_count == 1


class Updates:
    """An optimizer whose steps change its numbers before or after the kernel reads them."""

    def __init__(self) -> None:
        self.rate, self.steps = 0.5, 0
        self.rates, self.named = [0.5], {"a": 0.5}
        self.fused = pointwise(self.update)

    def update(self, p: Tensor, gradient: Tensor) -> None:
        p.sub_(gradient * self.rate * self.rates[0] * self.named["a"] * scale)

    def after(self, p: Tensor, gradient: Tensor) -> None:
        self.steps += 1
        self.fused.foreach([p, p.view(-1)[:0]], [gradient, gradient.view(-1)[:0]])
        self.rate *= 0.5

    def before(self, p: Tensor, gradient: Tensor) -> None:
        self.rate *= 0.5
        self.fused(p, gradient)

    def before_in_a_list(self, p: Tensor, gradient: Tensor) -> None:
        self.rates[0] *= 0.5
        self.fused.foreach([p], [gradient])

    def before_in_a_dict(self, p: Tensor, gradient: Tensor) -> None:
        self.named["a"] *= 0.5
        self.fused(p, gradient)

    def before_in_a_global(self, p: Tensor, gradient: Tensor) -> None:
        global scale
        scale *= 0.5
        self.fused(p, gradient)


METHODS = ["after", "before", "before_in_a_list", "before_in_a_dict", "before_in_a_global"]


def run_steps(method: str, compiled: Callable[[Any], Any]) -> Tensor:
    set_global(2.0)
    p, gradient = torch.ones(3, 5), torch.linspace(0.0, 1.0, 15).reshape(3, 5)
    step = compiled(getattr(Updates(), method))
    for _ in range(3):
        step(p, gradient)
    return p


@pytest.mark.long(all_but=["after"])
@pytest.mark.parametrize("method", METHODS)
def test_values_that_compiled_code_changes_are_followed_or_refused(method: str) -> None:
    torch.compiler.reset()
    expected = run_steps(method, lambda step: step)
    torch.testing.assert_close(run_steps(method, torch.compile(backend="aot_eager")), expected)
    torch.compiler.reset()
    compile_in_one_graph = torch.compile(backend="aot_eager", fullgraph=True)
    if method == "after":
        torch.testing.assert_close(run_steps(method, compile_in_one_graph), expected)
    else:
        with pytest.raises(Exception, match="changed before it calls update") as caught:
            run_steps(method, compile_in_one_graph)
        assert __file__ in str(caught.value)


def test_change_between_a_forward_and_its_backward_is_refused() -> None:
    owner = SimpleNamespace(value=2.0)
    fused = pointwise(lambda x: x.square() * owner.value, autograd=True)
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    y = fused(x)
    owner.value = 3.0
    with pytest.raises(AutogradError, match="closure variable owner, which has changed"):
        y.sum().backward()
    fused(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 6 * x.detach())
    y = fused(x)
    owner.value = 4.0  # has no effect on the gradient, which uses the kernel of the forward
    torch.testing.assert_close(torch.autograd.grad(y.sum(), [x])[0], 6 * x.detach())
