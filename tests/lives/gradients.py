"""Acts that differentiate the graphs of earlier calls, and acts that train."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from lives.acts import act, seed, which, yes_or_no
from lives.calls import forward, lengths
from lives.hooks import negate
from lives.life import LAYOUTS, Graph, Life
from lives.networks import to_grid

# Bit mask that selects the results that the loss uses.
some = st.integers(1, 63)


@act(
    weight=8,
    steps=lengths,
    seed=seed,
    layout=st.sampled_from(LAYOUTS),
    fresh=yes_or_no,
    some=some,
)
def forward_and_backward(life: Life, steps: int, seed: int, layout: str, fresh: bool, some: int) -> dict[str, Any]:
    """Calls the network and differentiates it, as a training loop does."""
    results = forward(life, steps, seed, layout, None, fresh, True)
    return {**results, **(backward(life, -1, some, seed, False) if torch.is_grad_enabled() else {})}


@act(weight=8, when=lambda life: bool(life.graphs), which=st.integers(-2, -1), some=some, seed=seed, keep=yes_or_no)
def backward(life: Life, which: int, some: int, seed: int, keep: bool) -> dict[str, Any]:
    """Runs the backward of a loss that uses some results of a kept graph. If `keep` is True, the graph stays usable."""
    graph = _find_graph(life, which)
    loss = None if graph is None else _compute_loss(graph, some, seed)
    if graph is None or loss is None:
        return {}
    if not keep:
        life.graphs.remove(graph)
    for leaf in graph.leaves:
        leaf.grad = None
    loss.backward(retain_graph=keep)
    return _list_gradients(graph)


@act(when=lambda life: bool(life.graphs), which=st.integers(-2, -1), some=some, seed=seed)
def grad_of_inputs(life: Life, which: int, some: int, seed: int) -> dict[str, Any]:
    """Calls `torch.autograd.grad` for only the inputs, and keeps the graph."""
    graph = _find_graph(life, which)
    loss = None if graph is None else _compute_loss(graph, some, seed)
    if graph is None or loss is None or not graph.leaves:
        return {}
    input_gradients = torch.autograd.grad(loss, graph.leaves, retain_graph=True, allow_unused=True)
    return {"gradients": list(input_gradients)}


@act(when=lambda life: bool(life.graphs), which=st.integers(-2, -1), some=some, seed=seed)
def differentiate_twice(life: Life, which: int, some: int, seed: int) -> dict[str, Any]:
    """Computes the gradient of the square of a gradient."""
    graph = _find_graph(life, which)
    loss = None if graph is None else _compute_loss(graph, some, seed)
    if graph is None or loss is None or not graph.leaves:
        return {}
    (first,) = torch.autograd.grad(loss, graph.leaves[:1], create_graph=True, allow_unused=True)
    if first is None or not first.requires_grad:
        return {"gradient": None if first is None else first.detach()}
    leaves = [*graph.leaves, *(p for p in life.net.parameters() if p.requires_grad)]
    second = torch.autograd.grad(first.square().sum(), leaves, retain_graph=True, allow_unused=True)
    return {"gradient": first.detach(), "second gradients": list(second)}


@act(when=lambda life: bool(life.graphs), which=st.integers(-2, -1), result=which)
def hook_a_result(life: Life, which: int, result: int) -> dict[str, Any]:
    """Adds a hook that negates the gradient of a result of a kept graph."""
    graph = _find_graph(life, which)
    if graph is not None:
        candidates = [value for value in graph.results.values() if value.requires_grad]
        if candidates:
            candidates[result % len(candidates)].register_hook(negate)
    return {}


@act(when=lambda life: bool(life.graphs), which=st.integers(-2, -1))
def keep_gradients_of_results(life: Life, which: int) -> dict[str, Any]:
    """Calls `retain_grad` on all results of a graph, except on the outputs of neurons that count their spikes.

    In the loop, counts are sums of outputs, so the gradient of the counts also flows through the outputs. Kernels count
    separately.
    """
    graph = _find_graph(life, which)
    if graph is not None:
        counts = any(name.endswith("counts") and value.requires_grad for name, value in graph.results.items())
        for name, value in graph.results.items():
            if value.requires_grad and not (counts and name[0] in "yz"):
                value.retain_grad()
    return {}


@act(when=lambda life: bool(life.graphs))
def drop_graphs(life: Life) -> dict[str, Any]:
    """Drops all graphs without running a backward."""
    life.drop_graphs()
    return {}


@act(to_none=yes_or_no)
def zero_grad(life: Life, to_none: bool) -> dict[str, Any]:
    """Clears gradients."""
    life.net.zero_grad(set_to_none=to_none)
    return {}


@act(kind=st.sampled_from(["sgd", "adam"]), weight=3)
def train(life: Life, kind: str) -> dict[str, Any]:
    """Makes one step of an optimizer, and then rounds the weights to their grid. If there is no optimizer for the
    current parameters, the optimizer is created first.
    """
    parameters = list(life.net.parameters())
    if not parameters:
        return {}
    ids = set(map(id, parameters))
    optimizer = life.optimizer
    if optimizer is None or {id(p) for group in optimizer.param_groups for p in group["params"]} != ids:
        life.optimizer = (
            torch.optim.SGD(parameters, lr=0.25, momentum=0.5)
            if kind == "sgd"
            else torch.optim.Adam(parameters, lr=0.125)
        )
    assert life.optimizer is not None
    life.optimizer.step()
    to_grid(life.net)
    return {}


def _find_graph(life: Life, which: int) -> Graph | None:
    return life.graphs[which] if len(life.graphs) >= -which else None


def _compute_loss(graph: Graph, some: int, seed: int) -> Tensor | None:
    """Makes a weighted sum of the results that the bit mask `some` selects, among those that require a gradient. If the
    mask selects none of them, sums all of them. Returns `None` if no result requires a gradient.
    """
    candidates = [value for value in graph.results.values() if value.requires_grad]
    chosen = [value for i, value in enumerate(candidates) if some >> (i % 6) & 1] or candidates
    if not chosen:
        return None
    total = None
    for value in chosen:
        generator = torch.Generator().manual_seed(seed)
        weights = torch.randint(-4, 5, value.shape, generator=generator).to(value.device, torch.float32) / 4
        term = (value.float() * weights if value.dtype != torch.float64 else value * weights).sum()
        total = term if total is None else total + term
    return total


def _list_gradients(graph: Graph) -> dict[str, Any]:
    retained = {name: value.grad for name, value in graph.results.items() if value.requires_grad and value.retains_grad}
    return {"gradients": [leaf.grad for leaf in graph.leaves], "gradients of results": retained}
