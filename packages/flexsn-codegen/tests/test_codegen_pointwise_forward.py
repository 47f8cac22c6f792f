"""Derivatives of pointwise kernels in forward mode, and higher derivatives, equal those of eager mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from flexsn_codegen import TransformError, pointwise

# Torch scripts its formulas for forward mode.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def scaled(x: Tensor, w: Tensor, s: Tensor, a: float = 0.5) -> tuple[Tensor, Tensor, Tensor]:
    return (x * s).sin() * w * a, x > w, (x.detach() * w).exp() + s


def halves(x: Tensor, w: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return a * b.sin() * w


class Gain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.rand(3, dtype=torch.float64, device=DEVICE))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.gain).tanh()


def draw_arguments() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes: tuple[tuple[int, ...], ...] = ((4, 3), (3,), ())
    x, w, s = (torch.randn(shape, dtype=torch.float64, device=DEVICE) for shape in shapes)
    return x, w, s


def assert_agree(make: Callable[[Any], Any], kernel: Any, function: Any) -> None:
    actual, expected = (pytree.tree_leaves(make(f)) for f in (kernel, function))
    assert len(actual) == len(expected) > 0
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)


def tangents(function: Any, *tensors: Tensor) -> list[Tensor | None]:
    with forward_ad.dual_level():
        outputs = function(*[forward_ad.make_dual(t, t + 1) for t in tensors])
        results = outputs if isinstance(outputs, tuple) else (outputs,)
        return [forward_ad.unpack_dual(result).tangent for result in results]


def twice(function: Any) -> Any:
    def tangent(y: Tensor) -> Tensor:
        actual: Tensor = jvp(lambda z: function(z, w, s), (y,), (y + 1,))[1][0]
        return actual

    return jvp(tangent, (x,), (x,))


def batched(function: Any) -> Any:
    def tangent(t: Tensor) -> Any:
        return jvp(lambda y: function(x, y, s), (w,), (t,))

    return vmap(tangent)(torch.eye(3).to(w))


def total(function: Any) -> Any:
    return lambda *tensors: sum(r.sin().sum() for r in pytree.tree_leaves(function(*tensors)) if r.is_floating_point())


x, w, s = draw_arguments()
TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "jvp": lambda f: jvp(f, (x, w, s), (x + 1, w - 1, s * 2)),
    "of_one_argument": lambda f: jvp(partial(f, x, w), (s,), (s * 2,)),
    "of_numbers_alone": lambda f: jvp(f, (s, s, s), (s, s + 1, s)),
    "jacfwd": lambda f: jacfwd(lambda *a: f(*a)[0], argnums=(0, 1, 2))(x, w, s),
    "vmap_of_jvp": batched,
    "jvp_of_vmap": lambda f: jvp(vmap(f, in_dims=(0, None, None)), (x, w, s), (x + 1, w, s)),
    "jvp_of_jvp": twice,
    "hessian": lambda f: hessian(total(f), argnums=(0, 1))(x, w, s),
    "dual_tensors": lambda f: tangents(f, x, w, s),
}


@pytest.mark.long(all_but=["jvp", "vmap_of_jvp", "dual_tensors"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_forward_derivatives_equal_eager_mode(name: str) -> None:
    assert_agree(TRANSFORMS[name], pointwise(scaled, autograd=name == "hessian"), scaled)


def test_forward_derivatives_of_cutting_functions_and_modules_equal_eager_mode() -> None:
    wide = torch.cat([x, x + 1], 1)
    assert_agree(lambda f: jvp(f, (wide, w), (wide + 1, w - 1)), pointwise(halves), halves)
    assert_agree(lambda f: tangents(f, wide, w), pointwise(halves), halves)
    module = Gain()
    assert_agree(lambda f: tangents(f, x), pointwise(module, autograd=True), module)


@pytest.mark.long
def test_second_derivatives_in_all_orders_pass_gradgradcheck() -> None:
    kernel = pointwise(scaled, autograd=True)
    shapes: tuple[tuple[int, ...], ...] = ((2, 1), (2,), ())
    tensors = [torch.rand(shape, dtype=torch.float64, device=DEVICE, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(lambda *a: kernel(*a)[0], tensors, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda *a: kernel(*a)[0], tensors, check_fwd_over_rev=True)


@pytest.mark.parametrize("tracing", ["real", pytest.param("symbolic", marks=pytest.mark.long)])
def test_second_derivatives_in_graphs_equal_eager_mode(tracing: Literal["real", "symbolic"]) -> None:
    def second(function: Any) -> Any:
        def differentiate(*tensors: Tensor) -> Any:
            (first,) = torch.autograd.grad(total(function)(*tensors), tensors[1], create_graph=True)
            return torch.autograd.grad(first.square().sum(), tensors)

        return differentiate

    leaves = [t.clone().requires_grad_() for t in draw_arguments()]
    kernel = pointwise(scaled, autograd=True)
    graph = make_fx(second(kernel), tracing_mode=tracing)(*leaves)
    assert sum("flexsn_codegen" in str(node.target) for node in graph.graph.nodes) >= 3
    assert_agree(lambda f: f(*leaves), graph, second(scaled))


@pytest.mark.parametrize(
    "name", ["jvp", pytest.param("jacfwd", marks=pytest.mark.long), pytest.param("second", marks=pytest.mark.long)]
)
def test_derivatives_in_compiled_code_equal_eager_mode(name: str) -> None:
    transforms: dict[str, Callable[[Any], Any]] = {
        "jvp": lambda f: lambda x, w: jvp(lambda x: f(x, w, s)[0], (x,), (x + 1,)),
        "jacfwd": lambda f: lambda x, w: jacfwd(lambda w: f(x, w, s)[0])(w),
        "second": lambda f: lambda x, w: grad(lambda w: grad(lambda w: f(x, w, s)[0].sum())(w).square().sum())(w),
    }
    torch.compiler.reset()
    kernel = pointwise(scaled, autograd=True)
    compiled = torch.compile(transforms[name](kernel), backend="aot_eager", fullgraph=True)
    assert_agree(lambda f: f(x, w), compiled, transforms[name](scaled))


def test_writes_are_refused_in_forward_mode() -> None:
    step = pointwise(lambda p, g: p.sub_(g))
    for run in (
        lambda: tangents(lambda g: step(torch.zeros_like(g), g), x),
        lambda: tangents(lambda g: pointwise(torch.sin).into(torch.zeros_like(g), g), x),
        lambda: jvp(lambda g: step(g.clone(), g), (x,), (x,)),
    ):
        with pytest.raises(TransformError, match="no forward-mode derivative"):
            run()
