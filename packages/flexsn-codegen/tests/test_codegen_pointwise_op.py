"""Kernels under compilers and transforms: operators in one graph, with fake tensors, gradients and vmap."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from flexsn_codegen import AutogradError, KernelGoneError, pointwise
from flexsn_codegen.functions._pointwise_op import pointwise_in_place_op, pointwise_op


@pytest.fixture(autouse=True)
def in_cpp(monkeypatch: pytest.MonkeyPatch, compiler: None) -> None:
    """Sets up kernels in C++, as in a process without TRITON_INTERPRET."""
    from flexsn_codegen.targets.triton import device

    monkeypatch.setattr(device, "INTERPRETED", False)
    torch.compiler.reset()


def gated(x: Tensor, gate: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return x * functional.silu(gate) * scale, x > gate


fused: Any = pointwise(gated, autograd=True)


def draw_arguments(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(shape, dtype=dtype, requires_grad=True), torch.randn(shape[-1], dtype=dtype, requires_grad=True)


def differentiate(function: Any, *tensors: Tensor) -> list[Tensor]:
    for tensor in tensors:
        tensor.grad = None
    result = function(*tensors)
    result.sum().backward()
    return [result.detach(), *(t.grad for t in tensors if t.grad is not None)]


@pytest.mark.long(all_but=["inductor"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_training_is_one_graph_with_dynamic_shapes(backend: str) -> None:
    counter = CompileCounterWithBackend(backend)

    def layer(x: Tensor, gate: Tensor, kernel: Any) -> Tensor:
        y, mask = kernel(x * 2, gate, scale=0.5)
        return torch.where(mask, y, y.relu() + 1)

    compiled = torch.compile(lambda x, g: layer(x, g, fused), backend=counter, fullgraph=True, dynamic=True)
    for shape in ((5, 7), (64, 33), (300, 40)):
        tensors = draw_arguments(*shape)
        for a, e in zip(
            differentiate(compiled, *tensors), differentiate(lambda x, g: layer(x, g, gated), *tensors), strict=True
        ):
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1


def test_compiled_graphs_contain_launches_of_the_kernels() -> None:
    launched: list[str] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        def look(module: torch.fx.GraphModule, inputs: Any) -> Any:
            launched.extend(str(node.args[0] if node.args else "") + str(node.target) for node in module.graph.nodes)
            return module

        from torch._dynamo.backends.common import aot_autograd

        return aot_autograd(fw_compiler=look)(module, inputs)

    torch.compile(lambda *a: fused(*a, 0.5)[0], backend=backend, fullgraph=True)(*draw_arguments(4, 3))
    assert any("launch_cpp" in name for name in launched)
    assert not any("flexsn_codegen.pointwise" in name for name in launched)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(7))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight)


def test_modules_are_trained_in_compiled_code() -> None:
    module = Scaled()
    kernel = pointwise(module, autograd=True)
    compiled = torch.compile(lambda x: kernel(x) + 1, backend="aot_eager", fullgraph=True)
    x = torch.rand(5, 7)
    for a, e in zip(
        *([f(x), torch.autograd.grad(f(x).sum(), module.weight)[0]] for f in (compiled, lambda x: module(x) + 1)),
        strict=True,
    ):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_writes_in_compiled_code_equal_eager_mode(backend: str) -> None:
    def step(p: Tensor, g: Tensor, m: Tensor, lr: float) -> Tensor:
        m.mul_(0.9).add_(g, alpha=0.1)
        return p.sub_(m, alpha=lr)

    kernel = pointwise(step)
    runs = []
    compiled = torch.compile(lambda *a: kernel(*a) * 2, backend=backend, fullgraph=True)
    for function in (compiled, lambda *a: step(*a) * 2):
        torch.manual_seed(0)
        p, m = torch.randn(70), torch.randn(70)
        results = [function(p, torch.randn(70), m, 0.1).clone() for _ in range(2)]
        runs.append([p, m, *results])
    for a, e in zip(*runs, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-6)


def test_errors_in_compiled_code_equal_those_of_eager_mode() -> None:
    plain: Any = pointwise(gated, autograd=False)
    compiled = torch.compile(lambda *a: plain(*a, 1.0), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="autograd=False"):
        compiled(*draw_arguments(3, 4))
    with pytest.raises(AutogradError, match="autograd=False"):
        plain(*draw_arguments(3, 4), 1.0)


def find_key(kernel: Any) -> str:
    entry, *_ = kernel._kernels.all()
    return str(entry.key)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck copies tensors
def test_operator_passes_opcheck() -> None:
    x, gate = draw_arguments(5, 3)
    kernel = pointwise(gated, autograd=True)
    kernel(x, gate, 0.5)
    torch.library.opcheck(pointwise_op, ([x, gate], [0.5], [False, False], find_key(kernel)))
    scale = pointwise(lambda x, s: x * s, autograd=True)
    s = torch.tensor(2.0, requires_grad=True)
    scale(x, s)
    torch.library.opcheck(pointwise_op, ([x, s], [], [False, True], find_key(scale)))
    add = pointwise(lambda x, y, a: (x.add_(y, alpha=a), x * 2)[1])
    p, q = torch.rand(5, 3), torch.rand(3)
    add(p, q, 0.5)
    torch.library.opcheck(pointwise_in_place_op, ([q], [p], [0.5], find_key(add)))


def test_kernels_accept_fake_tensors_and_make_fx() -> None:
    x, gate = (t.detach() for t in draw_arguments(5, 3))
    with FakeTensorMode() as mode:
        y, mask = fused(mode.from_tensor(x), mode.from_tensor(gate), 0.5)
    assert (y.shape, y.dtype, mask.dtype) == ((5, 3), torch.float32, torch.bool)
    for tracing in ("fake", "symbolic"):
        graph = make_fx(lambda x, g: fused(x, g, 0.5)[0], tracing_mode=tracing)(x, gate)
        torch.testing.assert_close(graph(x, gate), gated(x, gate, 0.5)[0])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # torch's vmap of silu issues this warning
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # the same warning in torch 2.11
def test_transforms_of_torch_func_equal_eager_mode() -> None:
    x, gate = (t.detach() for t in draw_arguments(5, 3, dtype=torch.float64))

    def total(f: Any) -> Any:
        return lambda x, g: f(x, g, 0.5)[0].sum()

    def second(f: Any) -> Any:
        return lambda x, g: (torch.func.grad(total(f))(x, g) * x).sum()

    cases: tuple[Any, ...] = (
        lambda f: torch.func.grad(total(f), argnums=(0, 1))(x, gate),
        lambda f: torch.func.grad(second(f), argnums=(0, 1))(x, gate),
        lambda f: torch.func.vmap(lambda g: f(x, g, 0.5)[0])(gate.expand(4, 3)),
        lambda f: torch.func.vmap(lambda x, g: f(x, g, 0.5)[0], in_dims=(1, None), out_dims=1)(x, gate[:1]),
        lambda f: torch.func.vmap(torch.func.grad(total(f)), in_dims=(0, None))(x, gate),
        lambda f: torch.func.jacrev(total(f))(x, gate),
        lambda f: torch.func.jvp(lambda x: f(x, gate, 0.5)[0], (x,), (x + 1,)),
    )
    for make in cases:
        for a, e in zip(*(list_leaves(make(f)) for f in (fused, gated)), strict=True):
            torch.testing.assert_close(a, e)


def list_leaves(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def test_vmap_keeps_the_promotion_of_tensors_without_dimensions() -> None:
    scale = pointwise(lambda x, s: x * s)
    x, s = torch.rand(5, dtype=torch.bfloat16), torch.rand(3)
    result = torch.func.vmap(scale, in_dims=(None, 0))(x, s)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result, torch.stack([x * factor for factor in s]))


def test_vmap_of_writes_equals_eager_mode() -> None:
    add = pointwise(lambda x, y: x.add_(y))
    x, y = torch.rand(4, 3), torch.rand(4)
    expected = x + y[:, None]
    torch.func.vmap(add)(x, y)
    assert torch.equal(x, expected)


class Gated(nn.Module):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y, _ = fused(x, gate, 0.5)
        return y  # type: ignore[no-any-return]


# Torch 2.11 issues a warning about its own export.
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")
def test_exported_programs_run_in_other_processes(tmp_path: Path) -> None:
    x, gate = (t.detach() for t in draw_arguments(5, 3))
    batch = torch.export.Dim("batch", min=2, max=100)
    program = torch.export.export(Gated(), (x, gate), dynamic_shapes=({0: batch}, None))
    torch.testing.assert_close(program.module()(x, gate), gated(x, gate, 0.5)[0])
    file = tmp_path / "program.pt2"
    torch.export.save(program.run_decompositions(), file)
    script = f"""
import torch, flexsn_codegen
program = torch.export.load({str(file)!r})
x, gate = torch.linspace(-1, 1, 21).reshape(7, 3), torch.rand(3)
expected = x * torch.nn.functional.silu(gate) * 0.5
torch.testing.assert_close(program.module()(x, gate), expected)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_error_names_the_deleted_kernel() -> None:
    x, gate = (t.detach() for t in draw_arguments(5, 3))
    kernels = [pointwise(gated)]
    graph = make_fx(lambda x, g: kernels[0](x, g, 0.5)[0])(x, gate)
    graph(x, gate)
    kernels.clear()
    gc.collect()
    with pytest.raises(KernelGoneError, match="'gated'"):
        graph(x, gate)


def test_saved_tensors_follow_the_rules_of_autograd() -> None:
    """Checks that a checkpointed region recomputes its values, and that a later change of a tensor is detected."""
    x, gate = draw_arguments(5, 3)
    y = torch.utils.checkpoint.checkpoint(lambda x, g: fused(x, g, 0.5)[0], x, gate, use_reentrant=False)
    y.sum().backward()
    z = fused(x * 1, gate, 0.5)[0]
    with torch.no_grad():
        gate.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()
