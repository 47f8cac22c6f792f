"""Step functions and their graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from flexsn_graph import Role, StepGraph, ports

Core = Callable[..., Any]
TABLE: Any = decomposition_table


def graph_of(core: Core, *examples: Tensor, names: tuple[str, ...] = ()) -> fx.Graph:
    """Returns the core's graph of prims. `names` are the names of its placeholders."""
    mode = FakeTensorMode()
    stand_ins = [mode.from_tensor(t) for t in examples]
    functional = torch.func.functionalize(core, remove="mutations")
    with mode:
        module = make_fx(functional, decomposition_table=TABLE)(*stand_ins)
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    for node, name in zip(placeholders, names, strict=False):
        node._rename(name)
    return module.graph


def lif(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = v + (x - v) / 2.0
    s = (h >= 1.0).to(x)
    return s, h * (1.0 - s)


def adaptive(x: Tensor, v: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h = 0.9 * v + x
    s = (h >= 1.0 + a).to(x)
    return s, h - s, 0.95 * a + 0.1 * s


def izhikevich(x: Tensor, v: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h = v + 0.5 * (0.04 * v * v + 5.0 * v + 140.0 - u + x)
    s = (h >= 30.0).to(x)
    return s, torch.where(h >= 30.0, -65.0, h), u + 0.5 * 0.02 * (0.2 * h - u) + 8.0 * s


CORES: dict[str, tuple[Core, int]] = {"lif": (lif, 1), "adaptive": (adaptive, 2), "izhikevich": (izhikevich, 2)}


def core_graph(name: str) -> tuple[StepGraph, int]:
    """Returns the graph of a core, and the count of its states."""
    core, num_states = CORES[name]
    states = ports(Role.STATE, num_states)
    arguments = (*ports(Role.INPUT, 1), *states)
    graph = graph_of(core, *torch.zeros(len(arguments), 8), names=tuple(port.name for port in arguments))
    return StepGraph(graph, arguments, (*ports(Role.OUTPUT, 1), *states), {}), num_states
