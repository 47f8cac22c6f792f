"""The operator with torch.func, activation checkpointing, autocast and caches on disk."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hop_alone import no_kernels  # noqa: F401  a fixture
from hop_cores import CASES, detach_spike, function_spike, plif_core, smooth_spike, value_and_gradients
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from flexsn_hop import eager_scan, errors, flex_sn_scan

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]

Run = Callable[..., Any]
SPIKING = plif_core(detach_spike)
SMOOTH = plif_core(smooth_spike)
X, V, W = CASES[5].arguments(4, requires_grad=False)
BATCH = torch.randn(5, *X.shape)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def compute_loss(scan: Run, x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return scan(SMOOTH, 1, 1, 1, x, v, w)[0].square().sum()  # type: ignore[no-any-return]


def captured(scan: Run, x: torch.Tensor, w: torch.Tensor) -> Any:
    return scan(lambda x, v: SPIKING(x, v, w), 1, 1, 1, x, V)


TRANSFORMS: dict[str, tuple[Callable[[Run], Run], tuple[torch.Tensor, ...]]] = {
    "vmap of the input": (
        lambda scan: vmap(lambda *flat: scan(SPIKING, 1, 1, 1, *flat), in_dims=(0, None, None)),
        (BATCH, V, W),
    ),
    "vmap of a lifted tensor": (
        lambda scan: vmap(lambda *flat: scan(SPIKING, 1, 1, 1, *flat), in_dims=(None, None, 0)),
        (X, V, torch.randn(5, 3)),
    ),
    "vmap of a captured tensor": (
        lambda scan: vmap(functools.partial(captured, scan), in_dims=(1, 0)),
        (BATCH.transpose(0, 1), torch.randn(5, 3)),
    ),
    "grad": (lambda scan: grad(functools.partial(compute_loss, scan), argnums=(0, 1, 2)), (X, V, W)),
    "vmap of grad": (
        lambda scan: vmap(grad(functools.partial(compute_loss, scan), argnums=2), in_dims=(0, None, None)),
        (BATCH, V, W),
    ),
    "jvp": (
        lambda scan: lambda x: jvp(lambda x: compute_loss(scan, x, V, W), (x,), (torch.ones_like(x),)),
        (X,),
    ),
    "jacrev": (
        lambda scan: jacrev(lambda w: scan(SMOOTH, 1, 1, 1, X, V, w)[0].sum(0)),
        (W,),
    ),
}


# Torch's forward mode scripts its own formulas.
@pytest.mark.long(all_but=["vmap of the input", "vmap of a captured tensor", "vmap of grad", "jvp"])
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_equal_the_eager_scan(name: str) -> None:
    transform, arguments = TRANSFORMS[name]
    expected = transform(eager_scan)(*arguments)
    torch.testing.assert_close(transform(flex_sn_scan)(*arguments), expected)
    run = torch.compile(transform(flex_sn_scan), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(*arguments), expected)


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3))

    def forward(self, scan: Run, x: torch.Tensor) -> torch.Tensor:
        return scan(lambda x, v: SPIKING(x, v, self.weight), 1, 1, 1, x, V)[0]  # type: ignore[no-any-return]


def test_functional_call_has_gradients_per_sample() -> None:
    network = Network()

    def per_sample(scan: Run, parameters: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
        def sample_loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return functional_call(network, parameters, (scan, x)).square().sum()  # type: ignore[no-any-return]

        return vmap(grad(sample_loss), in_dims=(None, 0))(parameters, x)

    parameters = {name: 2 * value.detach() for name, value in network.named_parameters()}
    expected = per_sample(eager_scan, parameters, BATCH)
    assert expected["weight"].abs().max() > 0
    torch.testing.assert_close(per_sample(flex_sn_scan, parameters, BATCH), expected)


def keep_sines(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op is torch.ops.aten.sin.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.long(all_but=["False-False", "False-True", "True-False"])
@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_activation_checkpointing_equals_the_eager_scan(selective: bool, compiled: bool) -> None:
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, keep_sines)

    def block(scan: Run) -> Run:
        return lambda x, v, w: scan(plif_core(function_spike), 1, 1, 1, 2 * x, v, w)[0].sin()

    def run(*arguments: torch.Tensor) -> Any:
        return [checkpoint(block(flex_sn_scan), *arguments, **options)]

    arguments = CASES[5].arguments(4)
    actual = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    expected = value_and_gradients(lambda *flat: [block(eager_scan)(*flat)], arguments)
    torch.testing.assert_close(value_and_gradients(actual, arguments), expected)


@pytest.mark.long(all_but=["True"])
@pytest.mark.parametrize("final_state", [False, True])
def test_autocast_applies_as_in_the_eager_scan(final_state: bool) -> None:
    weight = torch.randn(3, 3)

    def network(scan: Run, **options: Any) -> Run:
        def core(x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = x @ weight + v  # the product is bfloat16 under autocast
            return smooth_spike(h), h

        def run(x: torch.Tensor) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                v = torch.zeros(2, 3, dtype=torch.bfloat16)
                outputs, states = scan(core, 1, 1, 1, x, v, **options)
                return outputs, states if final_state else states[-1]

        return run

    (x, *_) = CASES[5].arguments(4)
    options = {"final_state": True} if final_state else {}
    backend = AotEagerAndRecordGraphs()
    run = torch.compile(network(flex_sn_scan, **options), fullgraph=True, backend=backend)
    expected_states = network(eager_scan)(x)[1]
    expected = value_and_gradients(
        lambda x: [
            value if index == 0 or not final_state else value[-1] for index, value in enumerate(network(eager_scan)(x))
        ],
        [x],
    )
    actual = value_and_gradients(run, [x])
    assert actual[0][0].dtype == torch.bfloat16
    assert expected_states.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected)
    # The backward recomputes the step in bfloat16, like the forward.
    products = [
        node
        for graph in backend.bw_graphs[0].children()
        if isinstance(graph, torch.fx.GraphModule)
        for node in graph.graph.nodes
        if node.target is torch.ops.aten.mm.default
    ]
    assert products
    assert {node.meta["val"].dtype for node in products} == {torch.bfloat16}


def test_no_autocast_applies_without_autocast() -> None:
    """Checks that the backward recomputes the products of the forward in float32, and not in bfloat16."""
    weight = torch.randn(3, 3).requires_grad_()

    def run(scan: Run) -> torch.Tensor:
        return scan(lambda x, v: (torch.tanh(x + v @ weight),) * 2, 1, 1, 1, X, V)[0].square().sum()  # type: ignore[no-any-return]

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, weight)[0]

    expected = gradient(run(eager_scan))
    compiled = torch.compile(functools.partial(run, flex_sn_scan), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradient(compiled()), expected, rtol=1e-6, atol=1e-6)
    graph = make_fx(lambda: gradient(run(flex_sn_scan)))()
    torch.testing.assert_close(graph(), expected, rtol=1e-6, atol=1e-6)


CACHED = """
import torch
from torch._dynamo.utils import counters
from flexsn_hop import flex_sn_scan
from flexsn_hop.lowering import _lowering

_lowering.CODE_VERSION = {version}

def core(x, v):
    h = v + (x - v) / 2
    s = (h >= 1).to(h).detach() + (torch.sigmoid(h) - torch.sigmoid(h).detach())
    return s, h - s

run = torch.compile(lambda x, v: flex_sn_scan(core, 1, 1, 1, x, v)[0], fullgraph=True)
x = torch.ones(4, 3, requires_grad=True)
run(x, torch.zeros(3)).sum().backward()
hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
missed = counters["inductor"]["fxgraph_cache_miss"]
print(hits, missed)
"""


@pytest.mark.long
def test_compiled_code_is_cached_by_version(tmp_path: Path) -> None:
    def run(version: int) -> list[int]:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        result = subprocess.run(
            [sys.executable, "-c", CACHED.format(version=version)],
            capture_output=True,
            text=True,
            env=environment,
            check=True,
        )
        hits, missed = result.stdout.split()[-2:]
        return [int(hits), int(missed)]

    first, second, other_version = run(1), run(1), run(2)
    assert first[0] == 0
    assert first[1] > 0
    assert second[0] > 0
    assert second[1] == 0
    assert other_version[0] == 0


def test_second_derivatives_are_computed_or_refused() -> None:
    """Tests the loop, which has second derivatives, and the operator of a graph, which refuses them."""

    def twice(scan: Run, others: float = 0.0) -> Run:
        def call(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> Any:
            output, _ = scan(SMOOTH, 1, 1, 1, x, v, w)
            (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
            loss = gradient.square().sum() + others * (x.sum() + w.sum())
            return torch.autograd.grad(loss, [x, w], allow_unused=True)

        return call

    leaves = [value.detach().clone().requires_grad_() for value in (X, V, W)]
    torch.testing.assert_close(twice(flex_sn_scan)(*leaves), twice(eager_scan)(*leaves))
    for others in (0.0, 1.0):
        with pytest.raises(errors.DoubleBackwardError, match="use eager_scan"):
            make_fx(twice(flex_sn_scan, others))(*leaves)
