"""`without_padding` removes the padding that Inductor adds to products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import pad

from flexsn_hop.lowering._padding import without_padding

PADDED = (torch.ops.aten.constant_pad_nd.default, torch.ops.aten.cat.default, torch.ops.aten.slice.Tensor)


def lengthen(x: Tensor, dim: int, by: int) -> Tensor:
    return torch.cat([x, x.new_zeros(*x.shape[:dim], by, *x.shape[dim + 1 :])], dim)


def make_product(m: int, k: int, n: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns `a @ b` with sizes padded by `m`, `k` and `n`, as Inductor pads them."""

    def run(a: Tensor, b: Tensor) -> Tensor:
        multiply = torch.mm if a.dim() == 2 else torch.bmm
        result = multiply(pad(a, [0, k, 0, m]) if k or m else a, pad(b, [0, n, 0, k]) if k or n else b)
        result = result[..., :-m, :] if m else result
        return torch.tanh(result[..., :-n] if n else result)

    return run


def sum_and_product(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    bias = lengthen(bias, bias.dim() - 1, 3)
    return torch.addmm(bias, a, pad(b, [0, 3, 0, 0]), alpha=2)[:, :-3]


def make_graph(function: Callable[..., Tensor], *args: Tensor) -> Any:
    return make_fx(function, tracing_mode="fake")(*args)


def is_padded(graph: Any) -> bool:
    return any(node.target in PADDED for node in graph.graph.nodes)


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("sizes", [(2, 0, 0), (0, 1, 0), (0, 0, 3), (1, 2, 3), (0, 2, 3)])
def test_padding_of_products_is_removed(sizes: tuple[int, int, int], batch: tuple[int, ...]) -> None:
    a, b = torch.randn(*batch, 6, 7), torch.randn(*batch, 7, 5)
    graph = make_graph(make_product(*sizes), a, b)
    assert is_padded(graph)
    actual = without_padding(graph)
    assert not is_padded(actual)
    torch.testing.assert_close(actual(a, b), torch.tanh(a @ b))
    torch.testing.assert_close(graph(a, b), torch.tanh(a @ b))  # the original graph is unchanged


@pytest.mark.parametrize("shape", [(5,), (6, 5)])
def test_padding_of_products_with_a_bias_is_removed(shape: tuple[int, ...]) -> None:
    args = torch.randn(shape), torch.randn(6, 7), torch.randn(7, 5)
    graph = make_graph(sum_and_product, *args)
    actual = without_padding(graph)
    assert is_padded(graph)
    assert not is_padded(actual)
    torch.testing.assert_close(actual(*args), torch.addmm(*args, alpha=2))


OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "no product": lambda a, b: pad(a, [0, 1]) * 2,
    "padded with ones": lambda a, b: pad(a, [0, 0, 0, 1], value=1.0) @ b,
    "padded at the beginning": lambda a, b: pad(a, [0, 0, 1, 0]) @ b,
    "read with its padding": lambda a, b: pad(a, [0, 0, 0, 1]) @ b,
    "cut at the beginning": lambda a, b: (pad(a, [0, 0, 0, 1]) @ b)[1:],
    "two readers": lambda a, b: torch.cat([(r := pad(a, [0, 0, 0, 1]) @ b)[:-1], r]),
    "a longer tensor": lambda a, b: torch.cat([a, a]) @ b,
    "a padded bias": lambda a, b: torch.addmm(lengthen(a[0, :1], 0, 4), a, b),
    "a padded bias and a padded matrix": lambda a, b: torch.addmm(lengthen(a[0, :1], 0, 5), a, pad(b, [0, 1]))[:, :-1],
}


@pytest.mark.parametrize("case", OTHERS)
def test_padding_by_the_user_has_equal_results(case: str) -> None:
    args = torch.randn(6, 7), torch.randn(7, 5)
    graph = make_graph(OTHERS[case], *args)
    torch.testing.assert_close(without_padding(graph)(*args), OTHERS[case](*args))


def test_step_without_padding_is_unchanged() -> None:
    graph = make_graph(lambda a, b: torch.tanh(a @ b), torch.randn(6, 7), torch.randn(7, 5))
    assert without_padding(graph) is graph
