"""Errors name the obstacle and a remedy. An error inside of a function also names its line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from flexsn_codegen import ArgumentError, TransformError, pointwise

FACTOR = torch.tensor(2.0)
HERE = "test_codegen_pointwise_errors"
SPARSE = torch.eye(4).to_sparse()
double = pointwise(lambda x: x * 2)
written = pointwise(lambda p, q: p.add_(q))


def make_data() -> Tensor:
    return torch.linspace(0.5, 2.0, 4)


def forward_in_place() -> Any:
    with forward_ad.dual_level():
        return written(forward_ad.make_dual(make_data(), make_data()), make_data())


def overlapping() -> Any:
    x = torch.zeros(6)
    return torch.compile(lambda x: written(x[:4], x[2:]), backend="aot_eager", fullgraph=True)(x)


INSIDE: dict[str, tuple[Callable[..., Any], str]] = {
    "a tensor for alpha": (
        lambda x: torch.add(x, x, alpha=torch.tensor(2.0)),  # type: ignore[call-overload]
        "`alpha=`.*multiply by the tensor",
    ),
    "a captured alpha": (lambda x: x.sub(x, alpha=FACTOR), "`alpha=`.*multiply by the tensor"),
    "torch.func.grad": (lambda x: torch.func.grad(lambda y: y.cumsum(0)[0])(x), "cumsum.*element by element"),
    "fp8": (lambda x: x.to(torch.float8_e4m3fnuz), "float8_e4m3fnuz"),
    "complex": (lambda x: (x * 1j).real, "complex numbers are not supported"),
}
CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "fp8": (lambda: double(make_data().to(torch.float8_e4m3fnuz)), "float8_e4m3fnuz.*Convert it"),
    "complex": (lambda: double(make_data() * 1j), "complex64.*real and its imaginary part"),
    "a complex number": (lambda: pointwise(lambda x, c: x * c)(make_data(), 2j), "argument 1 of <lambda> is a complex"),
    "nested": (
        lambda: double(torch.nested.nested_tensor([torch.rand(2), torch.rand(3)], layout=torch.jagged)),
        "nested tensor.*Pass its parts",
    ),
    "sparse": (lambda: double(make_data().to_sparse()), "sparse_coo.*to_dense"),
    "captured and sparse": (
        lambda: pointwise(lambda x: x * SPARSE)(make_data()),
        "sparse_coo.*to_dense",
    ),
    "meta": (lambda: double(make_data().to("meta")), "are on meta.*Move them"),
    "into None": (lambda: double.into([None], make_data()), "into is a NoneType: pass a tensor"),  # type: ignore[list-item]
    "into a number": (lambda: double.into([1.0], make_data()), "into is a float: pass a tensor"),  # type: ignore[list-item]
    "into of a function that writes": (
        lambda: written.into(make_data(), make_data(), make_data()),
        "call it without `into`",
    ),
    "a list of numbers": (
        lambda: pointwise(lambda x, n: x * n).foreach([make_data(), make_data()], [1.0, 2.0]),
        "argument 1 of <lambda>.foreach is a list.*torch.tensor",
    ),
    "forward mode in place": (forward_in_place, "no forward-mode derivative"),
    "overlapping in a graph": (overlapping, "shares memory with tensor 1.*clone"),
}


@pytest.mark.parametrize("name", INSIDE)
def test_errors_inside_of_a_function_name_its_line(name: str) -> None:
    function, message = INSIDE[name]
    with pytest.raises((NotImplementedError, TypeError, ValueError), match=f"(?s){message}.*{HERE}"):
        pointwise(function)(make_data())


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # torch's forward mode issues this warning
@pytest.mark.parametrize("name", CALLS)
def test_errors_of_a_call_name_a_remedy(name: str) -> None:
    call, message = CALLS[name]
    with pytest.raises((ArgumentError, TransformError, RuntimeError), match=f"(?s){message}"):
        call()


@pytest.mark.filterwarnings("ignore:.*quantiz:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*quantiz:UserWarning")
def test_quantized_tensors_are_refused() -> None:
    x = torch.quantize_per_tensor(make_data(), 0.1, 0, torch.quint8)
    with pytest.raises(ArgumentError, match=r"quint8.*dequantize"):
        double(x)


def test_integers_in_place_follow_the_rules_of_promotion() -> None:
    x, y = torch.arange(5), torch.arange(5) * 3
    pointwise(lambda p, q: p.sub_(q))(x, y)
    assert x.tolist() == [0, -2, -4, -6, -8]
    with pytest.raises(ValueError, match=rf"(?s)(Promotion|result type).*{HERE}"):
        pointwise(lambda p, q: p.sub_(q * 0.5))(x, y)


def test_transforms_inside_of_a_function_are_allowed() -> None:
    x = make_data()
    assert torch.equal(pointwise(lambda x: torch.vmap(lambda y: y * y)(x))(x), x * x)


def test_into_works_in_compiled_code() -> None:
    def step(x: Tensor, out: Tensor) -> Tensor:
        double.into(out, x)
        return out + 1

    torch.compiler.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    x, out = make_data(), torch.empty(4)
    assert torch.equal(compiled(x, out), x * 2 + 1)
    assert torch.equal(out, x * 2)
    with pytest.raises(Exception, match="tensor 0 of out= is"):
        compiled(x, torch.empty(4, dtype=torch.float64))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_lists_that_share_memory_equal_eager_mode(backend: str) -> None:
    """Checks that the entries of the lists are computed one after the other, as in eager mode."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        written.foreach([x[:3], x[3:], x[:3]], [x[3:], x[:3], y])
        return x * 1

    torch.compiler.reset()
    tensors = []
    for run in (torch.compile(step, backend=backend, fullgraph=True), step):
        x = torch.arange(6.0)
        y = run(x, torch.ones(3))
        tensors += [x, y]
    expected = torch.tensor([4.0, 6.0, 8.0, 6.0, 9.0, 12.0])
    for tensor in tensors:
        torch.testing.assert_close(tensor, expected)
