"""Runs the graph of another tracer, such as Dynamo, as part of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from flexsn_graph._location import located, location_of


def run_graph(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function. The operators of an `fx.GraphModule` are located at the lines that its nodes record.

    The code of a graph module is generated, so its own lines mean nothing to a user. In a trace of a step that calls
    the function through `run_graph`, refusals and `location_of` name the user's lines instead.

    Args:
        function: a graph module, or another function, which is called as it is.
        args: the arguments of the function.

    Returns:
        The result of the function.
    """
    return _LocatedRun(function).run(*args) if isinstance(function, fx.GraphModule) else function(*args)


class _LocatedRun(fx.Interpreter):
    """A run of a graph module in which each operator has the location of its node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False  # if True, FX changes the text of errors, which already name the location

    def run_node(self, n: fx.Node) -> Any:
        with located(location_of(n)):
            return super().run_node(n)
