"""Products of a layer in the compiled launcher. They equal those in Python, in any order of calls."""

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
    """Records names of launched kernels. The launcher has addresses of functions that run the interpreter."""
    names: list[str] = []
    entries: dict[PreparedKernel, Entry] = {}
    run = PreparedKernel.__call__

    def call(kernel: PreparedKernel, tensors: Sequence[Tensor]) -> None:
        run(kernel, tensors)
        dtypes = [tensor.dtype for tensor in tensors]

        def by_address(arguments: Any) -> None:
            names.append(kernel._function.fn.__name__)
            address = (ctypes.c_char * 8).from_address
            run(kernel, [torch.frombuffer(address(arguments[i]), dtype=one)[:1] for i, one in enumerate(dtypes)])

        function = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_int64))(by_address)
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None
        entries.setdefault(kernel, Entry(address, (), 1, 1, 0, function, unwatched))

    monkeypatch.setenv("FLEXSN_LAUNCHER", "compiled")
    monkeypatch.setattr(PreparedKernel, "__call__", call)
    monkeypatch.setattr(PreparedKernel, "entry", lambda kernel: entries.get(kernel))
    return names


Leaves = tuple[Tensor, Tensor, Tensor | None]
FORWARD = ["narrow_kernel", "split_kernel", "outputs_kernel", "repair_outputs_kernel"]


def leaves(steps: int = 3, features: int = 40, outputs: int = 48, *, bias: bool = True) -> Leaves:
    generator = torch.Generator().manual_seed(0)
    s = (torch.rand(steps, 14, features, generator=generator) < 0.4).float().requires_grad_()
    weight = torch.randn(outputs, features, generator=generator).requires_grad_()
    return s, weight, torch.randn(outputs, generator=generator).requires_grad_() if bias else None


def call(products: RepeatedProducts, of: Leaves, *, links: bool, written: bool = False, scale: float = 1.0) -> Linked:
    s = of[0] * scale
    return products.run(s, of[0].detach().bfloat16() if written else None, *of[1:], (3, 3), links=links, scale=scale)


def gradients(linked: Linked, of: Leaves, grad: Tensor) -> tuple[Tensor, ...]:
    inputs = [one for one in of if one is not None]
    if linked.links is None:
        return torch.autograd.grad(linked.y, inputs, grad)
    parts, left = [], grad
    for _ in linked.links.parts:
        parts.append(left.bfloat16())
        left = left - parts[-1].float()
    total = linked.links.total
    sums = [] if total is None else [(total, grad.sum(0))]
    results = [*zip(linked.links.parts, parts, strict=True), *sums]
    return torch.autograd.grad([one for one, _ in results], inputs, [one for _, one in results])


def assert_as_wanted(linked: Linked, of: Leaves, scale: float = 1.0) -> None:
    grad = torch.randn(linked.y.shape, generator=torch.Generator().manual_seed(1))
    want = F.linear(of[0] * scale, *of[1:])
    torch.testing.assert_close(linked.y, want, rtol=0, atol=2e-5)
    inputs = [one for one in of if one is not None]
    for found, wanted in zip(gradients(linked, of, grad), torch.autograd.grad(want, inputs, grad), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.long(all_but=["False-False-True-1.25", "True-True-False-1.0"])
@pytest.mark.parametrize(
    ("links", "written", "bias", "scale"),
    [(True, False, True, 1.0), (True, True, False, 1.0), (False, True, True, 1.0), (False, False, True, 1.25)],
)
def test_calls_like_an_earlier_one_need_no_python(
    launched: list[str], links: bool, written: bool, bias: bool, scale: float
) -> None:
    products, of = RepeatedProducts(), leaves(bias=bias)
    for _ in range(2):
        assert_as_wanted(call(products, of, links=links, written=written, scale=scale), of, scale)
    assert not written or "narrow_kernel" not in launched
    launched.clear()
    assert_as_wanted(call(products, of, links=links, written=written, scale=scale), of, scale)
    backward = [] if links else ["split_kernel"]
    backward += ["inputs_kernel", "weights_kernel"]
    backward += [] if scale == 1.0 and "shares_kernel" not in launched else ["shares_kernel"]
    backward += [] if written else ["repair_weights_kernel"]
    assert launched == [*(FORWARD[1:3] if written else FORWARD), *backward]


def test_rows_that_are_not_whole_are_detected(launched: list[str]) -> None:
    products, of = RepeatedProducts(), leaves()
    for value in (0.0, 0.3, 0.0):
        with torch.no_grad():
            of[0][2, 3, 5] = value
        linked = call(products, of, links=True)
        assert_as_wanted(linked, of)
        assert linked.record is not None
        assert bool(linked.record.any()) == (value == 0.3)
    assert launched.count("repair_outputs_kernel") == 2


def test_layouts_and_modes_alternate(launched: list[str]) -> None:
    """Tests calls that differ in sizes, required gradients, the grad mode and memory formats."""
    products = RepeatedProducts()
    short, long = leaves(), leaves(4)
    fixed = (short[0].detach(), *short[1:])
    for _ in range(3):
        for of in (short, long):
            assert_as_wanted(call(products, of, links=True), of)
        linked = call(products, (fixed[0], fixed[1], fixed[2]), links=True)
        assert linked.links is not None
        (grad,) = torch.autograd.grad(linked.y, [fixed[1]], torch.ones_like(linked.y))
        torch.testing.assert_close(grad, fixed[0].sum((0, 1)).expand_as(grad), rtol=0, atol=1e-4)
        with torch.no_grad():
            plain = call(products, short, links=True)
        assert plain.links is None
        assert not plain.y.requires_grad
        crosswise = short[0].detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
        assert_as_wanted(call(products, (crosswise, *short[1:]), links=False), (crosswise, *short[1:]))
    assert launched.count("outputs_kernel") == 2 * 4


def test_second_derivatives_equal_those_of_torch(launched: list[str]) -> None:
    products, of = RepeatedProducts(), leaves()
    call(products, of, links=False)

    def second(y: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(y.square().sum(), [of[0]], create_graph=True)
        return torch.autograd.grad(first.square().sum(), [of[1]])[0]

    found = second(call(products, of, links=False).y)
    assert launched == FORWARD
    torch.testing.assert_close(found, second(F.linear(*of)), rtol=1e-4, atol=1e-3)


def test_gradients_from_several_paths_add_up() -> None:
    """Tests whole gradients together with parts, only some of the parts, and parts that begin at odd addresses."""
    products, of = RepeatedProducts(), leaves()
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        linked = call(products, of, links=True)
        assert linked.links is not None
        grad = torch.randn(linked.y.shape, generator=generator)
        part, odd = grad.bfloat16(), torch.zeros(grad.numel() + 1, dtype=torch.bfloat16)[1:].view(grad.shape)
        nothing = torch.zeros_like(part)
        ways: list[tuple[list[Tensor], list[Tensor]]] = [
            ([linked.y, *linked.links.parts], [grad, part, nothing, nothing]),
            ([linked.links.parts[0]], [part]),
            ([*linked.links.parts], [part, odd, odd]),
        ]
        for results, grads in ways:
            whole = torch.stack([one.float() for one in grads]).sum(0)
            found = torch.autograd.grad(results, of[:2], grads, retain_graph=True)
            for one, want in zip(found, torch.autograd.grad(F.linear(*of), of[:2], whole), strict=True):
                torch.testing.assert_close(one, want, rtol=0, atol=2e-4)


def test_a_late_hook_is_refused() -> None:
    products, of = RepeatedProducts(), leaves()
    for _ in range(2):
        linked = call(products, of, links=True)
        linked.y.retain_grad()
        with pytest.raises(RuntimeError, match="after the neuron had read the output"):
            gradients(linked, of, torch.ones_like(linked.y))


def test_a_freed_graph_raises() -> None:
    products, of = RepeatedProducts(), leaves()
    call(products, of, links=False)
    linked = call(products, of, links=False)
    grad = torch.ones_like(linked.y)
    gradients(linked, of, grad)
    with pytest.raises(RuntimeError, match="second time"):
        gradients(linked, of, grad)
    linked = call(products, of, links=False)
    with torch.no_grad():
        of[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(linked, of, grad)


def test_several_gradients_at_once() -> None:
    products, of = RepeatedProducts(), leaves()
    call(products, of, links=False)
    linked = call(products, of, links=False)
    grads = torch.randn(3, *linked.y.shape)
    found = torch.autograd.grad(linked.y, [of[1]], grads, is_grads_batched=True)[0]
    want = torch.autograd.grad(F.linear(*of), [of[1]], grads, is_grads_batched=True)[0]
    torch.testing.assert_close(found, want, rtol=0, atol=1e-4)


def test_layers_are_freed() -> None:
    products, of = RepeatedProducts(), leaves()
    for _ in range(3):
        assert_as_wanted(call(products, of, links=True), of)
    (known,) = products._calls
    seen = weakref.ref(known.native)
    del products, known
    gc.collect()
    assert seen() is None
