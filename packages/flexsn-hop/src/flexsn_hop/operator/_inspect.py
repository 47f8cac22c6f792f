"""Runs one step on fake tensors, to find operations that a core must not perform inside the operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flexsn_hop._torch_private import OpOverload, outside_of_tracing, watch_operators
from flexsn_hop.errors import MutationError, RandomOpError

__all__ = ["inspect_step"]


def inspect_step(core: torch.fx.GraphModule, samples: Sequence[Any]) -> None:
    """Rejects a core that draws random numbers or writes to its arguments.

    Such a core would silently give wrong results. The backward recomputes the step, and would draw different
    random numbers. An argument of a step may be a temporary slice, so a write to the argument would be lost.

    Raises:
        RandomOpError: The core draws random numbers.
        MutationError: The core writes to one of its arguments.
    """
    with outside_of_tracing(samples) as values:
        storages = {
            value.untyped_storage()._cdata: index
            for index, value in enumerate(values)
            if isinstance(value, torch.Tensor)
        }
        interpreter = _LocatingInterpreter(core)
        rejections: list[Exception] = []

        def check(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
            if not isinstance(op, OpOverload):
                return
            if _draws(op, args, kwargs):
                rejections.append(
                    RandomOpError(
                        f"the core calls {op}, which draws random numbers{interpreter.locate()}: the "
                        "backward recomputes each step and would draw other random numbers. In a step of flexsn_nn, "
                        "draw with flexsn_nn.random.normal_like, uniform_like or bernoulli_like; or draw before "
                        "the scan and pass the numbers as an input sequence, or use eager_scan"
                    )
                )
            for argument, value in zip(op._schema.arguments, args, strict=False):
                if argument.is_write and isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in storages:
                    index = storages[value.untyped_storage()._cdata]
                    rejections.append(
                        MutationError(
                            f"the core writes into its argument {index} with {op}"
                            f"{interpreter.locate()}: return the new value instead"
                        )
                    )

        inner_graphs = [
            graph for graph in core.modules() if isinstance(graph, torch.fx.GraphModule) and graph is not core
        ]
        with watch_operators(check, inner_graphs):
            interpreter.run(*values)
    if rejections:  # not raised inside of the interpreter, which adds text to errors
        raise rejections[0]


def _draws(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """True if a call of ``op`` draws random numbers. Dropout is tagged as random, but only draws in training."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    parameters = op._schema.arguments
    values = {parameter.name: parameter.default_value for parameter in parameters if parameter.has_default_value()}
    values |= {parameter.name: value for parameter, value in zip(parameters, args, strict=False)} | kwargs
    if values.get("train") is False or values.get("training") is False:
        return False
    is_dropout = "dropout" in op._schema.name
    ratios = [values[name] for name in ("dropout", "dropout_p") if name in values]
    ratios += [values["p"]] if is_dropout and "p" in values else []
    return not any(ratio == 0 or (is_dropout and ratio == 1) for ratio in ratios)


class _LocatingInterpreter(torch.fx.Interpreter):
    """Runs a graph. ``locate`` returns the line of the user's code that created the current node."""

    _node: torch.fx.Node | None = None

    def run_node(self, n: torch.fx.Node) -> Any:
        self._node = n
        return super().run_node(n)

    def locate(self) -> str:
        trace = None if self._node is None else self._node.meta.get("stack_trace")
        if not trace:
            return ""
        lines = [line.strip() for line in trace.splitlines()]
        file = max(index for index, line in enumerate(lines) if line.startswith("File "))
        return f" ({' '.join(lines[file : file + 2])})"
