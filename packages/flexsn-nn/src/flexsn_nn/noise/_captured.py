"""Random numbers of captured steps. A captured step is a Dynamo graph of a step.

A step must not change objects while Dynamo captures it. Instead, it calls operators that mark its draws and the places
of its random numbers in the graph. `number_draws` later replaces these calls.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, fx

from flexsn_hop import complete_captured
from flexsn_nn.errors import DrawError
from flexsn_nn.noise._shapes import ShapeRule, find_shape_rule

_library = torch.library.Library("flexsn_nn", "DEF")
_library.define("places(Tensor first, Tensor second, Tensor third, Tensor step) -> ()")
_library.define("means() -> ()")
_library.define("draw(Tensor x, int bits) -> Tensor")
_library.define("below(Tensor number, Tensor p) -> Tensor")


def _draw_nothing(*arguments: Any) -> Tensor:
    raise DrawError(
        "the core draws random numbers, which this form of a scan in torch.compile does not support: use backend="
        "'auto', without your own lowering, and outside of torch.func's transforms."
    )


def _mark_graph(*arguments: Any) -> None:
    """Implements an operator that only puts a mark into the graph for `number_draws`."""


for _name in ("places", "means"):
    _library.impl(_name, _mark_graph, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flexsn_nn::{_name}", _mark_graph, lib=_library)
for _name, _dtype in (("draw", torch.float32), ("below", torch.bool)):
    _library.impl(_name, _draw_nothing, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"flexsn_nn::{_name}", lambda x, _, dtype=_dtype: torch.empty_like(x, dtype=dtype), lib=_library
    )


def number_draws(module: fx.GraphModule) -> None:
    """Replaces the draws in a captured step's graph by operators that compute the same numbers as the uncompiled step.

    If the graph contains a call of `means`, replaces the draws by their means.
    """
    ops, graph = torch.ops.flexsn_nn, module.graph
    sources = _list_calls(graph, ops.places) + _list_calls(graph, ops.means)
    if not sources:
        return
    source, draws = sources[0], _list_calls(graph, ops.draw)
    means = not source.args
    stream = 0
    for node in draws:
        x, bits = cast(tuple[fx.Node, int], node.args)
        with graph.inserting_before(node):
            if means:
                mean = 0.5 if bits else 0.0
                number = graph.call_function(torch.full_like, (x, mean), {"dtype": torch.float32})
            else:
                rule = _find_rule(x, cast(fx.Node, source.args[0]))
                numbers = [_add_number(graph, source, bits, stream + i) for i in range(rule.num_draws)]
                number = rule.derive(numbers, graph.call_function)
                stream += rule.num_draws
        _replace(node, number, node)
    for node in _list_calls(graph, ops.below):
        compared, p = node.args
        if means:
            _replace(node, p, p)
            continue
        with graph.inserting_before(node):
            flag = graph.call_function(torch.lt, (compared, p))
        _replace(node, flag, node)
    for node in sources:
        graph.erase_node(node)
    module.recompile()


def _find_rule(x: fx.Node, word: fx.Node) -> ShapeRule:
    """Returns the rule that derives numbers with the shape of `x` from draws with the step's shape, that of `word`.

    Raises:
        DrawError: the step has no numbers for this shape.
    """
    shape, step = (
        list(node.meta["example_value" if "example_value" in node.meta else "val"].shape) for node in (x, word)
    )
    rule = find_shape_rule(shape, step)
    if rule is None:
        raise DrawError(
            f"random numbers are drawn for tensors of the step's shape, {step}, or with one dimension more or less, or "
            f"with fewer neurons, but not for a tensor of shape {shape}: expand it to the step's shape."
        )
    return rule


def _add_number(graph: fx.Graph, source: fx.Node, bits: int, stream: int) -> fx.Node:
    ops = torch.ops.flexsn_graph
    if bits:
        return graph.call_function(ops.uniform_number.default, source.args, {"stream": stream, "bits": bits})
    return graph.call_function(ops.normal_number.default, source.args, {"stream": stream})


def _list_calls(graph: fx.Graph, op: Any) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target in (op, op.default)]


def _replace(node: fx.Node, other: Any, like: Any) -> None:
    other.meta = dict(like.meta)
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


complete_captured(number_draws)
