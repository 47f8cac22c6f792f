"""Products of a layer in the compiled launcher equal torch's, in any order of calls."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from flexsn_codegen.targets._entry import Entry, unwatched
from flexsn_runtime import Linked, RepeatedProducts
from flexsn_runtime.launches._written_kernels import PreparedKernel

pytestmark = pytest.mark.usefixtures("interpreted", "compiler")


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records names of launched kernels. The launcher calls addresses of functions that run the interpreter."""
    names: list[str] = []
    entries: dict[PreparedKernel, Entry] = {}
    run = PreparedKernel.__call__

    def run_and_add_entry(kernel: PreparedKernel, tensors: Sequence[Tensor]) -> None:
        run(kernel, tensors)
        dtypes = [tensor.dtype for tensor in tensors]

        def by_address(arguments: Any) -> None:
            names.append(kernel._function.fn.__name__)
            address = (ctypes.c_char * 8).from_address
            run(kernel, [torch.frombuffer(address(arguments[i]), dtype=dtype)[:1] for i, dtype in enumerate(dtypes)])

        function = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_int64))(by_address)
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None
        entries.setdefault(kernel, Entry(address, (), 1, 1, 0, function, unwatched))

    monkeypatch.setenv("FLEXSN_LAUNCHER", "compiled")
    monkeypatch.setattr(PreparedKernel, "__call__", run_and_add_entry)
    monkeypatch.setattr(PreparedKernel, "entry", lambda kernel: entries.get(kernel))
    return names


Leaves = tuple[Tensor, Tensor, Tensor | None]
FORWARD = ["narrow_kernel", "split_kernel", "outputs_kernel", "repair_outputs_kernel"]


def draw_leaves(steps: int = 3, features: int = 40, outputs: int = 48, *, bias: bool = True) -> Leaves:
    generator = torch.Generator().manual_seed(0)
    s = (torch.rand(steps, 14, features, generator=generator) < 0.4).float().requires_grad_()
    weight = torch.randn(outputs, features, generator=generator).requires_grad_()
    return s, weight, torch.randn(outputs, generator=generator).requires_grad_() if bias else None


def multiply(
    products: RepeatedProducts, operands: Leaves, *, links: bool, written: bool = False, scale: float = 1.0
) -> Linked:
    s = operands[0] * scale
    return products.run(
        s, operands[0].detach().bfloat16() if written else None, *operands[1:], (3, 3), links=links, scale=scale
    )


def differentiate(linked: Linked, operands: Leaves, grad: Tensor) -> tuple[Tensor, ...]:
    inputs = [tensor for tensor in operands if tensor is not None]
    if linked.links is None:
        return torch.autograd.grad(linked.y, inputs, grad)
    parts, remainder = [], grad
    for _ in linked.links.parts:
        parts.append(remainder.bfloat16())
        remainder = remainder - parts[-1].float()
    total = linked.links.total
    sums = [] if total is None else [(total, grad.sum(0))]
    results = [*zip(linked.links.parts, parts, strict=True), *sums]
    return torch.autograd.grad([tensor for tensor, _ in results], inputs, [tensor for _, tensor in results])


def assert_equals_torch(linked: Linked, operands: Leaves, scale: float = 1.0) -> None:
    grad = torch.randn(linked.y.shape, generator=torch.Generator().manual_seed(1))
    expected = F.linear(operands[0] * scale, *operands[1:])
    torch.testing.assert_close(linked.y, expected, rtol=0, atol=2e-5)
    inputs = [tensor for tensor in operands if tensor is not None]
    for gradient, reference in zip(
        differentiate(linked, operands, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-4)


@pytest.mark.long(all_but=["False-False-True-1.25", "True-True-False-1.0"])
@pytest.mark.parametrize(
    ("links", "written", "bias", "scale"),
    [(True, False, True, 1.0), (True, True, False, 1.0), (False, True, True, 1.0), (False, False, True, 1.25)],
)
def test_repeated_calls_need_no_python(
    launched: list[str], links: bool, written: bool, bias: bool, scale: float
) -> None:
    products, operands = RepeatedProducts(), draw_leaves(bias=bias)
    for _ in range(2):
        assert_equals_torch(multiply(products, operands, links=links, written=written, scale=scale), operands, scale)
    assert not written or "narrow_kernel" not in launched
    launched.clear()
    assert_equals_torch(multiply(products, operands, links=links, written=written, scale=scale), operands, scale)
    backward = [] if links else ["split_kernel"]
    backward += ["inputs_kernel", "weights_kernel"]
    backward += [] if scale == 1.0 and "shares_kernel" not in launched else ["shares_kernel"]
    backward += [] if written else ["repair_weights_kernel"]
    assert launched == [*(FORWARD[1:3] if written else FORWARD), *backward]


def test_rows_of_fractions_are_detected(launched: list[str]) -> None:
    products, operands = RepeatedProducts(), draw_leaves()
    for value in (0.0, 0.3, 0.0):
        with torch.no_grad():
            operands[0][2, 3, 5] = value
        linked = multiply(products, operands, links=True)
        assert_equals_torch(linked, operands)
        assert linked.record is not None
        assert bool(linked.record.any()) == (value == 0.3)
    assert launched.count("repair_outputs_kernel") == 2


def test_layouts_and_modes_may_alternate(launched: list[str]) -> None:
    """Tests calls that differ in sizes, required gradients, the grad mode and memory formats."""
    products = RepeatedProducts()
    short, long = draw_leaves(), draw_leaves(4)
    fixed_operands = (short[0].detach(), *short[1:])
    for _ in range(3):
        for operands in (short, long):
            assert_equals_torch(multiply(products, operands, links=True), operands)
        linked = multiply(products, (fixed_operands[0], fixed_operands[1], fixed_operands[2]), links=True)
        assert linked.links is not None
        (grad,) = torch.autograd.grad(linked.y, [fixed_operands[1]], torch.ones_like(linked.y))
        torch.testing.assert_close(grad, fixed_operands[0].sum((0, 1)).expand_as(grad), rtol=0, atol=1e-4)
        with torch.no_grad():
            detached = multiply(products, short, links=True)
        assert detached.links is None
        assert not detached.y.requires_grad
        crosswise = short[0].detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
        assert_equals_torch(multiply(products, (crosswise, *short[1:]), links=False), (crosswise, *short[1:]))
    assert launched.count("outputs_kernel") == 2 * 4


def test_second_derivatives_equal_those_of_torch(launched: list[str]) -> None:
    products, operands = RepeatedProducts(), draw_leaves()
    multiply(products, operands, links=False)

    def second(y: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(y.square().sum(), [operands[0]], create_graph=True)
        return torch.autograd.grad(first.square().sum(), [operands[1]])[0]

    actual = second(multiply(products, operands, links=False).y)
    assert launched == FORWARD
    torch.testing.assert_close(actual, second(F.linear(*operands)), rtol=1e-4, atol=1e-3)


def test_gradients_from_several_paths_add_up() -> None:
    """Tests a gradient of the output together with parts, a single part, and parts at odd addresses."""
    products, operands = RepeatedProducts(), draw_leaves()
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        linked = multiply(products, operands, links=True)
        assert linked.links is not None
        grad = torch.randn(linked.y.shape, generator=generator)
        part, odd = grad.bfloat16(), torch.zeros(grad.numel() + 1, dtype=torch.bfloat16)[1:].view(grad.shape)
        nothing = torch.zeros_like(part)
        cases: list[tuple[list[Tensor], list[Tensor]]] = [
            ([linked.y, *linked.links.parts], [grad, part, nothing, nothing]),
            ([linked.links.parts[0]], [part]),
            ([*linked.links.parts], [part, odd, odd]),
        ]
        for results, grads in cases:
            total = torch.stack([gradient.float() for gradient in grads]).sum(0)
            actual = torch.autograd.grad(results, operands[:2], grads, retain_graph=True)
            for gradient, reference in zip(
                actual, torch.autograd.grad(F.linear(*operands), operands[:2], total), strict=True
            ):
                torch.testing.assert_close(gradient, reference, rtol=0, atol=2e-4)


def test_late_hook_is_refused() -> None:
    products, operands = RepeatedProducts(), draw_leaves()
    for _ in range(2):
        linked = multiply(products, operands, links=True)
        linked.y.retain_grad()
        with pytest.raises(RuntimeError, match="after the neuron had read the output"):
            differentiate(linked, operands, torch.ones_like(linked.y))


def test_freed_graph_raises() -> None:
    products, operands = RepeatedProducts(), draw_leaves()
    multiply(products, operands, links=False)
    linked = multiply(products, operands, links=False)
    grad = torch.ones_like(linked.y)
    differentiate(linked, operands, grad)
    with pytest.raises(RuntimeError, match="second time"):
        differentiate(linked, operands, grad)
    linked = multiply(products, operands, links=False)
    with torch.no_grad():
        operands[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        differentiate(linked, operands, grad)


def test_several_gradients_are_computed_at_once() -> None:
    products, operands = RepeatedProducts(), draw_leaves()
    multiply(products, operands, links=False)
    linked = multiply(products, operands, links=False)
    grads = torch.randn(3, *linked.y.shape)
    actual = torch.autograd.grad(linked.y, [operands[1]], grads, is_grads_batched=True)[0]
    expected = torch.autograd.grad(F.linear(*operands), [operands[1]], grads, is_grads_batched=True)[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def test_layers_are_freed() -> None:
    products, operands = RepeatedProducts(), draw_leaves()
    for _ in range(3):
        assert_equals_torch(multiply(products, operands, links=True), operands)
    (cached,) = products._calls
    reference = weakref.ref(cached.native)
    del products, cached
    gc.collect()
    assert reference() is None
