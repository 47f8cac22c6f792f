"""All kinds of callables that can be cores."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_cores import PLIF, detach_spike, lif_core, op_spike, spike
from graph_eval import check_step
from torch import Tensor, nn

from flexsn_graph import StatefulCoreError, UnsupportedCoreError, trace_step


def draw_arguments() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, v = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator)
    return x, v


def make_parameter() -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, 4, dtype=torch.float64))


class Neuron(nn.Module):
    """A neuron with a parameter, a buffer, and a submodule with a parameter. Its length is 0, so it is falsy."""

    def __init__(self) -> None:
        super().__init__()
        self.w = make_parameter()
        self.register_buffer("b", torch.ones(4, dtype=torch.float64))
        self.activation = nn.PReLU(dtype=torch.float64)

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v * self.w + self.activation(x) - self.b
        return spike(h), h

    def step(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.forward(x, v)

    def __len__(self) -> int:
        return 0


class Callable2:
    def __init__(self) -> None:
        self.w = make_parameter()

    def __call__(self, x: Tensor, v: Tensor) -> list[Tensor]:
        return [x * self.w, v]


class ScriptedNeuron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = make_parameter()

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sigmoid(x * self.w), v + x


def with_weight(w: Tensor, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return x * w, v


def scripted(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = v + (x - v) / 2.0
    return torch.sigmoid(h), h


def hooked() -> nn.Module:
    module = Neuron()
    module.register_forward_hook(lambda module, arguments, results: (results[0] * 2.0, results[1]))
    return module


def compile_core(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled_function: Callable[..., Any] = torch.compile(function, backend="eager")
    return compiled_function


CORES: dict[str, tuple[Callable[[], Callable[..., Any]], int]] = {
    "lambda": (lambda: lambda x, v: (x * 2.0, v), 0),
    "closure": (lambda: (lambda w: lambda x, v: (x * w, v))(make_parameter()), 1),
    "partial": (lambda: functools.partial(with_weight, make_parameter()), 1),
    "partial_keyword": (lambda: functools.partial(lambda x, v, w: (x * w, v), w=make_parameter()), 1),
    "bound_method": (lambda: Neuron().step, 3),
    "callable_object": (lambda: Callable2(), 1),
    "module": (lambda: Neuron(), 3),
    "module_forward": (lambda: Neuron().forward, 3),
    "module_with_a_hook": (lambda: hooked(), 3),
    "compiled_function": (lambda: compile_core(lif_core()), 0),
    "compiled_module": (lambda: compile_core(Neuron()), 3),
    "calls_a_compiled_function": (lambda: (lambda f: lambda x, v: f(x, v))(compile_core(lif_core())), 0),
    "partial_of_a_compiled_function": (lambda: functools.partial(compile_core(with_weight), make_parameter()), 1),
}


@pytest.mark.parametrize("name", CORES)
def test_each_callable_is_traced(name: str) -> None:
    make, captured = CORES[name]
    trace = check_step(make(), draw_arguments(), (1, 1, 1))
    assert len(trace.lifted) == captured


def test_compiled_functions_are_not_compiled_while_tracing() -> None:
    def backend(module: object, inputs: object) -> Any:
        raise AssertionError("compiled")

    core = torch.compile(lif_core(), backend=backend)
    assert len(trace_step(lambda x, v: core(x, v), 1, 1, 1, draw_arguments()).forward.graph.nodes) > 5


# The warning's category depends on torch's version, and its text on Python's version.
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_and_jit_traced_cores_are_traced() -> None:
    cores: list[Any] = [
        torch.jit.script(scripted),
        torch.jit.script(ScriptedNeuron()),
        torch.jit.trace(ScriptedNeuron(), draw_arguments()),
    ]
    for core in cores:
        check_step(core, draw_arguments(), (1, 1, 1))
        check_step(lambda x, v, core=core: core(x, v), draw_arguments(), (1, 1, 1))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_refusal_inside_scripted_code_keeps_its_class() -> None:
    def flipped(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return torch.rand_like(x), v

    with pytest.raises(UnsupportedCoreError, match=r"aten.rand_like"):
        trace_step(torch.jit.script(flipped), 1, 1, 1, draw_arguments())


@pytest.mark.parametrize("surrogate", [spike, op_spike, detach_spike])
def test_surrogates_become_prims(surrogate: Callable[[Tensor], Tensor]) -> None:
    """Checks that the op of a `torch.library.custom_op` is replaced by the operations of its function."""
    trace = check_step(lif_core(surrogate=surrogate), draw_arguments(), (1, 1, 1))
    namespaces = {n.target.namespace for n in trace.forward.graph.nodes if n.op == "call_function"}
    assert namespaces == {"prims"}


def test_surrogate_that_receives_a_captured_parameter_has_its_gradient() -> None:
    class Surrogate(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, alpha: Tensor) -> Tensor:
            ctx.save_for_backward(x, alpha)
            return (x >= 0).to(x)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
            x, alpha = ctx.saved_tensors
            soft = torch.sigmoid(alpha * x)
            shared = grads[0] * soft * (1.0 - soft)
            return shared * alpha, (shared * x).sum_to_size(alpha.shape)

    for alpha in (nn.Parameter(torch.tensor(2.0, dtype=torch.float64)), make_parameter()):

        def core(x: Tensor, v: Tensor, alpha: Tensor = alpha) -> tuple[Tensor, Tensor]:
            h = v + x
            s = Surrogate.apply(h - 1.0, alpha)
            return s, h * (1.0 - s)

        trace = check_step(core, draw_arguments(), (1, 1, 1))
        assert trace.lifted == (alpha,)


@pytest.mark.filterwarnings("ignore:flexsn_graph_tests_opaque..twice. an autograd kernel was not registered")
def test_op_of_another_library_is_unchanged() -> None:
    """Checks an op without a Python body, for which a kernel rule may exist."""
    library: Any = torch.library.Library("flexsn_graph_tests_opaque", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2.0, "CPU")
    library.impl("twice", torch.empty_like, "Meta")
    op = torch.ops.flexsn_graph_tests_opaque.twice
    trace = trace_step(lambda x: op(x) + 1.0, 1, 0, 1, (torch.zeros(3),))
    assert op.default in [n.target for n in trace.forward.graph.nodes]


def test_in_place_ops_on_local_values_are_allowed() -> None:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v.clone()
        h += x
        h.mul_(0.5).clamp_(-2.0, 2.0)
        s = (h > 0.1).to(h)
        h[s.bool()] = 0.25
        h.masked_fill_(h < -0.5, -0.5)
        h.view(-1).add_(0.125)
        h[:] = h * 2.0
        out = torch.empty_like(h).copy_(s)
        out -= torch.zeros_like(out).fill_(0.5)
        return out, h

    check_step(core, draw_arguments(), (1, 1, 1))


def test_grad_mode_inside_the_core_is_honoured() -> None:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            s = torch.sigmoid(v)
        return s, v * (1.0 - s) + x

    # Torch's sigmoid and its decomposition into prims differ in the last bit for one number in forty.
    check_step(core, draw_arguments(), (1, 1, 1), rtol=1e-15)


def test_elements_that_are_moved_and_moved_back_are_accepted() -> None:
    w = make_parameter()
    x, v = torch.randn(2, 2, 4, 3, 5, dtype=torch.float64)

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        last = x.permute(0, 2, 3, 1) * w
        return last.permute(0, 3, 1, 2), v.flatten(1).tanh().view(v.shape)

    check_step(core, (x, v), (1, 1, 1), rtol=1e-15)


class Counter:
    def __init__(self) -> None:
        self.calls = 0
        self.stored: Tensor | None = None
        self.tensors = (torch.ones(4), torch.zeros(4))

    def counts(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return x * self.calls, v

    def counts_in_a_tensor(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return x * torch.tensor(self.calls), v

    def alternates(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return x * self.tensors[self.calls % 2], v

    def keeps(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        previous, self.stored = self.stored, x
        return (x if previous is None else previous + x), v

    def keeps_quietly(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        previous, self.stored = self.stored, x + 0.0
        return x + (v if previous is None else previous), v


@pytest.mark.parametrize("method", ["counts", "counts_in_a_tensor", "alternates", "keeps", "keeps_quietly"])
def test_cores_with_state_between_calls_are_refused(method: str) -> None:
    with pytest.raises(StatefulCoreError, match=r"differently in each call|keeps a tensor|from an earlier call"):
        trace_step(getattr(Counter(), method), 1, 1, 1, draw_arguments())


def test_parameters_of_two_submodules_are_captured() -> None:
    first, second = PLIF(torch.zeros(4, dtype=torch.float64)), PLIF(torch.ones(4, dtype=torch.float64))

    def core(x: Tensor, v: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s, v = first(x, v)
        s, u = second(s, u)
        return s, v, u

    x, v = draw_arguments()
    trace = check_step(core, (x, v, v), (1, 2, 1), rtol=1e-15)
    assert trace.lifted == (first.w, second.w)
