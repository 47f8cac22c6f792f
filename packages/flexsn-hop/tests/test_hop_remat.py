"""`scan(..., remat=K)` saves every K-th carry, and has bitwise equal gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hop_alone import no_kernels  # noqa: F401  a fixture
from scan_steps import RECURRENCES, loss, parameters_of, recurrence
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from flexsn_hop import scan
from flexsn_hop.errors import RematError

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def average(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    h = h + (x - h) * 0.1
    return h, h.square()


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def train(run: Callable[..., Any], step: Any, init: Any, xs: Any, options: dict[str, Any]) -> Any:
    init, xs = tree_map(lambda t: t.detach().requires_grad_(t.is_floating_point()) if t is not None else t, (init, xs))
    leaves = [t for t in tree_leaves((init, xs)) if t is not None and t.requires_grad] + parameters_of(step)
    results = run(step, init, xs, **options)
    gradients = torch.autograd.grad(loss(results), leaves, allow_unused=True)
    return *tree_leaves(results), *gradients, [g.stride() for g in gradients if g is not None]


def assert_equal_bits(run: Callable[..., Any], name: str, remat: int) -> None:
    case = recurrence(name, 11)
    expected = train(run, case.step, case.init, case.xs, case.options)
    actual = train(run, case.step, case.init, case.xs, {**case.options, "remat": remat})
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, Tensor) else ours == theirs


@pytest.mark.parametrize("remat", [1, 3, 4, 11, 50])
@pytest.mark.parametrize("name", RECURRENCES)
def test_eager_gradients_are_equal_to_the_bit(name: str, remat: int) -> None:
    assert_equal_bits(scan, name, remat)


@pytest.mark.long(all_but=["minimal_gru-4-loop-aot_eager", "moving_average-4-compiled_loop-inductor"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("lowering", ["loop", "compiled_loop"])
@pytest.mark.parametrize("remat", [3, 4, 50])
@pytest.mark.parametrize("name", RECURRENCES)
def test_compiled_gradients_are_equal_to_the_bit(
    name: str, remat: int, lowering: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXSN_HOP_LOWERING", lowering)

    def compiled(step: Any, init: Any, xs: Any, **options: Any) -> Any:
        return torch.compile(lambda init, xs: scan(step, init, xs, **options), fullgraph=True, backend=backend)(
            init, xs
        )

    assert_equal_bits(compiled, name, remat)


def count_saved_bytes(run: Callable[[], Tensor]) -> int:
    """Returns the number of bytes that autograd saves for a backward. Shared memory is counted once."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(storages.values())


def test_compiled_scan_saves_every_kth_carry() -> None:
    steps, interval, size = 100, 10, 32
    xs = torch.randn(steps, 1, requires_grad=True)
    init = torch.zeros(size)

    def run(remat: int | None) -> Tensor:
        carry, _ = scan(lambda h, x: (h.sin() + x, None), init, xs, remat=remat)
        return carry.sum()

    for remat, carries in ((None, steps - 1), (interval, steps // interval - 1)):
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        num_bytes = count_saved_bytes(lambda compiled=compiled, remat=remat: compiled(remat))  # type: ignore[misc]
        inputs = 4 * (steps + size)
        assert 4 * size * carries <= num_bytes <= 4 * size * (carries + 1) + inputs


def test_eager_mode_recomputes_segments() -> None:
    calls = 0

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        nonlocal calls
        calls += 1
        return h.sin() + x, None

    xs = torch.randn(12, 3, requires_grad=True)
    carry, _ = scan(step, torch.zeros(3), xs, remat=4)
    assert calls == 12
    carry.sum().backward()
    assert calls == 24
    with torch.no_grad():
        scan(step, torch.zeros(3), xs, remat=4)
    assert calls == 36


def test_dropout_draws_equal_numbers_in_the_recomputation() -> None:
    xs = torch.ones(12, 50, requires_grad=True)
    carry, ys = scan(lambda h, x: (h * 0.5 + torch.dropout(x, 0.5, True), h), torch.zeros(50), xs, remat=5)
    carry.sum().backward()
    assert xs.grad is not None
    torch.testing.assert_close(xs.grad[-1], carry.detach() - 0.5 * ys[-1].detach())


def test_gradients_pass_gradgradcheck() -> None:
    xs = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)
    init = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def run(init: Tensor, xs: Tensor) -> Any:
        return scan(lambda h, x: (h.sin() * x, h * x), init, xs, remat=3)

    assert torch.autograd.gradcheck(run, (init, xs))
    assert torch.autograd.gradgradcheck(run, (init, xs))


def test_exported_scan_is_one_node() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return scan(average, x[0], x, remat=4)[1]

    x = torch.randn(10, 3)
    program = torch.export.export(Net(), (x,), dynamic_shapes=({0: torch.export.Dim("length", min=2)},))
    assert [str(node.target) for node in program.graph.nodes].count("flex_sn_scan") == 1
    longer = torch.randn(23, 3)
    torch.testing.assert_close(program.module()(longer), Net()(longer))


@pytest.mark.parametrize("remat", [0, -3])
@pytest.mark.parametrize("compiled", [False, True])
def test_intervals_below_one_are_refused(remat: int, compiled: bool) -> None:
    def run(x: Tensor) -> Tensor:
        return scan(average, x[0], x, remat=remat)[0]

    with pytest.raises(RematError, match=f"remat is {remat}; it must be at least 1"):
        (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(torch.ones(4, 2))


@pytest.mark.parametrize("remat", [2.0, True, "4"])
def test_intervals_that_are_no_integer_are_refused(remat: Any) -> None:
    with pytest.raises(TypeError, match=r"remat is .*; it must be an int"):
        scan(average, torch.ones(2), torch.ones(4, 2), remat=remat)


def test_transforms_are_refused() -> None:
    def run(x: Tensor) -> Tensor:
        return scan(average, x[0], x, remat=2)[0].sum()

    with pytest.raises(RematError, match="remat has no effect inside of a transform"):
        torch.func.grad(run)(torch.ones(4, 2))
