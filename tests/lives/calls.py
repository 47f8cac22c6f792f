"""Acts that call the network, or one of its neurons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from flexsn_nn import FlexSN
from flexsn_nn.functional import reset_net
from flexsn_nn.memory import PackedSpikes
from lives.acts import act, seed, which, yes_or_no
from lives.hooks import Interrupt
from lives.life import LAYOUTS, Graph, Life

lengths = st.sampled_from([8, 1, 9, 40, 0])
_GRAPHS = 2


@act(
    weight=5,
    steps=lengths,
    seed=seed,
    layout=st.sampled_from(LAYOUTS),
    batch=st.sampled_from([None, None, None, None, 1, 3]),
    fresh=yes_or_no,
    learned=yes_or_no,
)
def forward(
    life: Life, steps: int, seed: int, layout: str, batch: int | None, fresh: bool, learned: bool
) -> dict[str, Any]:
    """Calls the network, after a reset if `fresh` is True or `batch` is given. The input requires a gradient if
    `learned` is True.
    """
    _prepare(life, batch, fresh)
    x = life.sequence(steps, seed, layout).requires_grad_(learned)
    life.inputs = x
    return _call(life, life.net, x)


@act(weight=2, when=lambda life: life.inputs is not None)
def forward_again(life: Life) -> dict[str, Any]:
    """Calls the network with the input of the previous `forward`."""
    if life.inputs is None:
        return {}
    return _call(life, life.net, life.inputs)


@act(
    weight=2,
    mode=st.sampled_from(["no_grad", "inference"]),
    steps=lengths,
    seed=seed,
    fresh=yes_or_no,
)
def forward_in_mode(life: Life, mode: str, steps: int, seed: int, fresh: bool) -> dict[str, Any]:
    """Calls the network under `torch.no_grad` or in inference mode."""
    _prepare(life, None, fresh)
    with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
        return _call(life, life.net, life.sequence(steps, seed))


@act(steps=lengths, seed=seed, fresh=yes_or_no)
def forward_in_autocast(life: Life, steps: int, seed: int, fresh: bool) -> dict[str, Any]:
    """Calls the network under autocast to bfloat16."""
    _prepare(life, None, fresh)
    life.rounded = True
    with torch.autocast(life.plan.device, dtype=torch.bfloat16):
        return _call(life, life.net, life.sequence(steps, seed).requires_grad_())


@act(
    weight=2,
    wrapper="how",
    how=st.sampled_from(["functional_call", "packed", "packed afterwards"]),
    steps=st.sampled_from([8, 1, 9]),
    seed=seed,
    fresh=yes_or_no,
)
def forward_wrapped(life: Life, how: str | None, steps: int, seed: int, fresh: bool) -> dict[str, Any]:
    """Calls the network inside a wrapper that does not change results. The loop runs without the wrapper."""
    _prepare(life, None, fresh)
    return _call(life, _wrap(life.net, how), life.sequence(steps, seed).requires_grad_())


@act(
    wrapper="how",
    how=st.sampled_from(["non-reentrant", "reentrant"]),
    inside=yes_or_no,
    steps=st.sampled_from([8, 1, 9]),
    seed=seed,
)
def forward_checkpointed(life: Life, how: str | None, inside: bool, steps: int, seed: int) -> dict[str, Any]:
    """Trains the network from its initial states with activation checkpointing. The loop runs without checkpointing.

    If `inside` is True, the checkpointed function resets the states before it calls the network. Otherwise, the states
    are not reset inside the function, and neurons raise an error.

    The states are not compared, because a reentrant checkpoint first runs the function without gradients, which leaves
    states without a graph.
    """

    def run(x: Tensor) -> Tensor:
        if inside:
            reset_net(life.net)
        y: Tensor = life.net(x)
        return y

    reset_net(life.net)
    x = life.sequence(steps, seed).requires_grad_()
    has_norms = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in life.net.modules())
    call: Callable[[Tensor], Tensor] = run
    # The second run of a checkpointed function would change statistics of norms, and the records of monitors and hooks.
    if how is not None and not (has_norms or life.monitors or _has_hooks(life.net)):
        call = lambda x: checkpoint(run, x, use_reentrant=how == "reentrant")  # noqa: E731
    y = call(x) if life.step_mode == "m" else call(x[0])
    if y.requires_grad:
        (y * torch.arange(y.numel(), device=y.device).remainder(7).view_as(y)).sum().backward()
    reset_net(life.net)
    return {"y": y.detach(), "gradient": x.grad}


def _has_hooks(net: nn.Module) -> bool:
    return any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def _wrap(net: nn.Module, how: str | None) -> Callable[[Tensor], Tensor]:
    if how == "functional_call":
        values = {**dict(net.named_parameters()), **dict(net.named_buffers())}
        return lambda x: functional_call(net, values, (x,))
    if how in ("packed", "packed afterwards") and any(getattr(m, "spike_range", None) for m in net.modules()):

        def call_packed(x: Tensor) -> Tensor:
            with PackedSpikes(net, by_kernels=how == "packed"):
                y: Tensor = net(x)
            return y

        return call_packed
    return net


@act(steps=st.sampled_from([8, 1]), seed=seed, factor=st.sampled_from([0.5, 2.0]), fresh=yes_or_no)
def forward_with_other_parameters(life: Life, steps: int, seed: int, factor: float, fresh: bool) -> dict[str, Any]:
    """Calls the network with other values for its parameters, through `functional_call`."""
    _prepare(life, None, fresh)
    values = {name: (p * factor) for name, p in life.net.named_parameters()}
    x = life.sequence(steps, seed).requires_grad_()
    return _call(life, lambda x: functional_call(life.net, values, (x,)), x)


@act(steps=st.sampled_from([8, 1]), seed=seed, at=which)
def forward_interrupted(life: Life, steps: int, seed: int, at: int) -> dict[str, Any]:
    """Calls the network with a hook that raises in the middle of the call."""
    layers = list(life.net.children())
    handle = layers[at % len(layers)].register_forward_pre_hook(Interrupt())
    try:
        return _call(life, life.net, life.sequence(steps, seed))
    finally:
        handle.remove()


@act(weight=2, which=which, steps=lengths, seed=seed, initial=st.sampled_from(["none", "own", "new", "learned"]))
def step(life: Life, which: int, steps: int, seed: int, initial: str) -> dict[str, Any]:
    """Calls the method `step` of a neuron with its initial states, with its current states, or with other states."""
    neuron = life.neuron(which)
    if neuron is None:
        return {}
    x = life.sequence(steps, seed).requires_grad_()
    if life.step_mode == "s":
        x = life.sequence(1, seed)[0].requires_grad_()
    states: list[Tensor] | None = None
    if initial == "own":
        states = list(neuron.states)
    elif initial in ("new", "learned"):
        initial_states = neuron.init_states(neuron.num_states, life.step_mode, *(x,) * neuron.num_inputs)
        states = [(s.detach() + 0.25).requires_grad_(initial == "learned") for s in initial_states]
    outputs, new_states = neuron.step(x, states)
    results = dict(zip(("y", "z"), [outputs] if isinstance(outputs, Tensor) else outputs, strict=False))
    results.update({f"new {i}": s for i, s in enumerate(new_states)})
    _keep_graph(life, Graph(results, [x, *(states if states and initial == "learned" else [])]))
    return dict(results)


@act(weight=2, which=which, steps=lengths, seed=seed)
def call_neuron(life: Life, which: int, steps: int, seed: int) -> dict[str, Any]:
    """Calls one neuron without the rest of the network."""
    neuron = life.neuron(which)
    if neuron is None:
        return {}
    x = life.sequence(steps, seed).requires_grad_()
    if life.step_mode == "s":
        x = life.sequence(1, seed)[0].requires_grad_()
    output = neuron(x)
    results = dict(zip(("y", "z"), [output] if isinstance(output, Tensor) else output, strict=False))
    results.update(_list_states(neuron, ""))
    _keep_graph(life, Graph(results, [x]))
    return dict(results)


@act(weight=2, which=which, steps=lengths, seed=seed, ends=yes_or_no, begins=yes_or_no)
def call_neuron_on_sequences(life: Life, which: int, steps: int, seed: int, ends: bool, begins: bool) -> dict[str, Any]:
    """Calls one neuron, with `resets=` if `begins` is True. In step mode `"m"`, `lengths=` is also given if `ends` is
    True.
    """
    neuron = life.neuron(which)
    if neuron is None:
        return {}
    generator = torch.Generator().manual_seed(seed)
    x = life.sequence(steps, seed)
    x = (x if life.step_mode == "m" else life.sequence(1, seed)[0]).requires_grad_()
    batch = x.shape[:2] if life.step_mode == "m" else x.shape[:1]
    options: dict[str, Tensor] = {}
    if ends and life.step_mode == "m":
        options["lengths"] = torch.randint(steps + 1, batch[1:], generator=generator).to(x.device)
    if begins:
        options["resets"] = (torch.rand(batch, generator=generator) < 0.3).to(x.device)
    output = neuron(x, **options)
    results = dict(zip(("y", "z"), [output] if isinstance(output, Tensor) else output, strict=False))
    results.update(_list_states(neuron, ""))
    _keep_graph(life, Graph(results, [x]))
    return dict(results)


def _prepare(life: Life, batch: int | None, fresh: bool) -> None:
    if batch is not None:
        life.batch = batch
    if fresh or batch is not None:
        reset_net(life.net)


def _call(life: Life, call: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Any]:
    """Calls the network or a wrapper of it, and returns the outputs and the states. In step mode `"s"`, makes one call
    for each step of the sequence, and at most 9 calls.
    """
    x_before, version = x.detach().clone(), None if x.is_inference() else x._version
    steps = {f"y{t}": x[t] for t in range(min(len(x), 9))}
    results = {name: call(values) for name, values in ({"y": x} if life.step_mode == "m" else steps).items()}
    assert torch.equal(x.detach(), x_before), "a call has changed its input"
    assert version is None or x._version == version, "a call has written to its input"
    for i, neuron in enumerate(life.neurons):
        results.update(_list_states(neuron, f"neuron {i} "))
    _keep_graph(
        life, Graph({k: v for k, v in results.items() if isinstance(v, Tensor)}, [x] if x.requires_grad else [])
    )
    return dict(results)


def _list_states(neuron: FlexSN, prefix: str) -> dict[str, Tensor]:
    values = {f"{prefix}state {i}": s for i, s in enumerate(neuron.states)}
    values.update({f"{prefix}sequence {i}": s for i, s in enumerate(neuron.state_seqs)})
    if neuron.spike_counts is not None:
        values[f"{prefix}counts"] = neuron.spike_counts
    return values


def _keep_graph(life: Life, graph: Graph) -> None:
    """Keeps the graph of a call, and drops all older graphs except the previous one."""
    if torch.is_grad_enabled():
        life.graphs.append(graph)
        del life.graphs[:-_GRAPHS]
