"""The four names of SpikingJelly's torch2triton generate functions that custom kernels can call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor, fx

from flexsn_codegen import (
    compile_triton_code_str,
    generate_forward_and_backward_graph,
    generate_inference_graph,
    generate_triton_code_str,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The tests run on the CPU or on a GPU.
pytestmark: list[pytest.MarkDecorator] = [] if DEVICE == "cpu" else [pytest.mark.gpu]
BLOCK = 256


def charge(x: Tensor, v: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """Computes two results whose gradients need saved values."""
    h = v + (x - v) * torch.sigmoid(decay)
    return torch.tanh(h) * h, torch.where(h > 0, h, 0.1 * h)


def make_kernel(graph: fx.Graph, name: str) -> tuple[Any, str]:
    """Returns the function of a graph, and the name by which a kernel can call it."""
    code, core_name = generate_triton_code_str(graph, name)
    return compile_triton_code_str(code, core_name), core_name


def run_on_tensors(graph: fx.Graph, name: str, tensors: list[Tensor], dtypes: list[torch.dtype]) -> list[Tensor]:
    """Runs the function of a graph in a kernel whose text calls the function by its name."""
    core, core_name = make_kernel(graph, name)
    arguments = [f"a{i}" for i in range(len(tensors))]
    results = [f"r{i}" for i in range(len(dtypes))]
    # Half values are float32 in the function.
    lines = [f"{a} = tl.load({a}_ptr + at, at < n)" for a in arguments]
    lines += [f"{', '.join(results)} = {core_name}({', '.join(arguments)})"]
    lines += [f"tl.store({r}_ptr + at, {r}, at < n)" for r in results]
    code = "\n".join(
        [
            "import triton",
            "import triton.language as tl",
            "",
            "@triton.jit",
            f"def around({', '.join(f'{p}_ptr' for p in arguments + results)}, n, BLOCK: tl.constexpr):",
            "    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
            *(f"    {line}" for line in lines),
        ]
    )
    around = compile_triton_code_str(code, "around", name_space={core_name: core})
    actual = [torch.empty_like(tensors[0], dtype=dtype) for dtype in dtypes]
    n = tensors[0].numel()
    around[(triton.cdiv(n, BLOCK),)](*tensors, *actual, n, BLOCK=BLOCK)
    return actual


def list_dtypes(graph: fx.Graph) -> list[torch.dtype]:
    (output,) = graph.find_nodes(op="output")
    return [node.meta["val"].dtype for node in output.args[0]]


def test_inference_equals_eager_mode() -> None:
    tensors = [torch.randn(1000, device=DEVICE) for _ in range(3)]
    graph = generate_inference_graph(charge, tuple(tensors))
    result = run_on_tensors(graph, "charge", tensors, [torch.float32] * 2)
    for actual, expected in zip(result, charge(*tensors), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_forward_and_backward_equal_autograd() -> None:
    tensors = [torch.randn(1000, device=DEVICE, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    forward, backward = generate_forward_and_backward_graph(charge, tuple(t.detach() for t in tensors))
    detached = [t.detach() for t in tensors]
    first, second, *saved = run_on_tensors(forward, "charge_forward", detached, list_dtypes(forward))
    expected = charge(*tensors)
    weights = [torch.randn_like(e) for e in expected]
    for actual, reference in zip((first, second), expected, strict=True):
        torch.testing.assert_close(actual, reference)
    # The arguments are the saved values, followed by the gradients of the results.
    result = run_on_tensors(backward, "charge_backward", [*saved, *weights], list_dtypes(backward))
    for actual, reference in zip(result, torch.autograd.grad(expected, tensors, weights), strict=True):
        torch.testing.assert_close(actual, reference)


def test_requires_grad_excludes_gradients() -> None:
    examples = tuple(torch.randn(4) for _ in range(3))
    _, backward = generate_forward_and_backward_graph(charge, examples, requires_grad=(True, False, True))
    (output,) = backward.find_nodes(op="output")
    assert [entry is None for entry in output.args[0]] == [False, True, False]


# Triton 3.6 only understands annotations of its own types, so this kernel has no other annotations.
@triton.jit  # type: ignore[untyped-decorator]
def around(x_ptr, y_ptr, n, function: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A kernel in a file that receives the function as an argument."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, function(tl.load(x_ptr + at, at < n)), at < n)


def test_kernel_in_a_file_receives_the_function_as_a_constant(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(1000, device=DEVICE)
    graph = generate_inference_graph(torch.nn.functional.mish, (x,))
    code, name = generate_triton_code_str(graph, "mish", verbose=True)
    assert code in capsys.readouterr().out
    mish = compile_triton_code_str(code, name, verbose=True)
    assert name in capsys.readouterr().out
    y = torch.empty_like(x)
    around[(triton.cdiv(1000, BLOCK),)](x, y, 1000, mish, BLOCK=BLOCK)
    torch.testing.assert_close(y, torch.nn.functional.mish(x), rtol=1e-6, atol=1e-6)
