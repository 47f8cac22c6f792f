"""Removes the padding that Inductor adds to matrix products."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from flexsn_hop.lowering._rewriting import rewrite_nodes

__all__ = ["without_padding"]

_aten = torch.ops.aten
# For each operator of a product, the positions of its two matrices among its arguments.
_PRODUCTS: dict[Any, tuple[int, int]] = {
    _aten.mm.default: (0, 1),
    _aten.bmm.default: (0, 1),
    _aten.addmm.default: (1, 2),
}
_ZEROS = (_aten.new_zeros.default, _aten.zeros.default, _aten.full.default)


def without_padding(module: fx.GraphModule) -> fx.GraphModule:
    """Removes the padding by which Inductor aligns the matrices of products on a GPU.

    Before any lowering is tried, Inductor measures how long a product takes with and without padding, and chooses the
    faster form. A lowering with its own products would have to treat the padding as an operation that mixes elements.
    Returns `module` itself if `module` contains no padding.

    Args:
        module: a graph of ATen operations, with examples of their results in `meta["val"]`.
    """
    if not any(_is_padding(node) for node in module.graph.nodes):
        return module
    return rewrite_nodes(module, lambda node: node.target in _PRODUCTS, _unpad)


def _unpad(graph: fx.Graph, product: fx.Node) -> None:
    left, right = _PRODUCTS[product.target]
    args = [_remove_padding(arg) for arg in product.args]
    sizes = [*_write_shape(args[left])[:-1], _write_shape(args[right])[-1]]
    last = product
    while _write_shape(last) != sizes and len(last.users) == 1 and _is_beginning(user := next(iter(last.users))):
        last = user
    if (
        args == list(product.args)
        or _write_shape(last) != sizes
        or _write_shape(args[left])[-1] != _write_shape(args[right])[-2]
    ):
        return
    for i, arg in enumerate(args[:left]):  # the addend
        if arg is not product.args[i] and _write_shape(arg) != sizes[-len(_write_shape(arg)) :]:
            return  # the trailing zeros of the addend do not belong to the padding
    with graph.inserting_before(product):
        new = graph.call_function(product.target, tuple(args), dict(product.kwargs))  # type: ignore[arg-type]
    new.meta = dict(last.meta)
    last.replace_all_uses_with(new)


def _remove_padding(value: Any) -> Any:
    """Removes zeros that pad the ends of a value's dimensions. Returns a value without padding unchanged."""
    if not isinstance(value, fx.Node) or not _is_padding(value):
        return value
    padded = value.args[0]
    return padded[0] if isinstance(padded, list | tuple) else padded


def _is_padding(node: fx.Node) -> bool:
    if node.target is _aten.constant_pad_nd.default:
        _, pads, *number = node.args
        assert isinstance(pads, list | tuple)
        return not any(pads[::2]) and not any(number)
    if node.target is not _aten.cat.default or not isinstance(node.args[0], list | tuple):
        return False
    parts = node.args[0]
    return len(parts) == 2 and isinstance(parts[1], fx.Node) and _is_zeros(parts[1])


def _is_zeros(node: fx.Node) -> bool:
    return node.target in _ZEROS and (node.target is not _aten.full.default or bool(node.args[1] == 0))


def _is_beginning(node: fx.Node) -> bool:
    """True if a node selects the first elements along a dimension."""
    start, step = (*node.args, *(None,) * 5)[2], (*node.args, *(None,) * 5)[4]
    return node.target is _aten.slice.Tensor and start in (0, None) and step in (1, None)


def _write_shape(node: Any) -> list[str]:
    """Returns the sizes as text. Comparing text adds no guard."""
    return [str(size) for size in node.meta["val"].shape]
