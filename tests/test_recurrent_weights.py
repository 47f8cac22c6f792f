"""Gradients of recurrent matrices. If an operand consists of spikes, the other operand is multiplied in parts."""

from __future__ import annotations

import pytest
import torch
from recurrent_cores import GRU, RLIF, Cell, Dense, Masked
from test_recurrent import DEVICE, differentiate, make_core, make_sequences
from torch import Tensor

from flexsn_runtime.recurrent import _staged, _weights

Exact = list[tuple[bool, bool]]


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Exact:
    """Returns a list that records, for each sum over time, which of its two factors are exact. Products in parts are
    chosen even if they are slower.
    """
    factors: Exact = []
    original = _weights.summed_product

    def record(left: Tensor, right: Tensor, exact: tuple[bool, bool]) -> Tensor:
        factors.append(exact)
        return original(left, right, exact)

    monkeypatch.setattr(_staged, "summed_product", record)
    monkeypatch.setattr(_weights, "_pays_off", lambda value, *sizes: value.dtype == torch.float32)
    return factors


def check(cell: type[Cell], initial: float) -> None:
    core = make_core(cell, 24, Dense())
    x, *states = make_sequences(core, 5, 70, 24)
    states = [(state.detach() * 0 + initial).requires_grad_() for state in states]
    _, expected = differentiate(core, [x, *states], None)
    _, actual = differentiate(core, [x, *states], "triton")
    for a, b in zip(actual[1 + len(states) :], expected[1 + len(states) :], strict=True):
        assert a is not None
        assert b is not None
        assert a.stride() == b.stride()
        assert (a - b).abs().max() < 1e-6 * b.abs().max()


@pytest.mark.long(all_but=["Masked-spikes", "RLIF-another initial state"])
@pytest.mark.parametrize("initial", [0.0, 0.3], ids=["spikes", "another initial state"])
@pytest.mark.parametrize("cell", [RLIF, Masked], ids=lambda cell: cell.__name__)
def test_spikes_are_exact_factors(cell: type[Cell], initial: float, exact: Exact) -> None:
    check(cell, initial)
    assert exact == [(False, True)]


@pytest.mark.parametrize("cell", [GRU], ids=lambda cell: cell.__name__)
def test_real_values_use_ordinary_products(cell: type[Cell], exact: Exact) -> None:
    check(cell, 0.5)
    assert set(exact) == {(False, False)}


@pytest.mark.skipif(DEVICE.type == "cuda", reason="needs a device without tensor cores")
def test_ordinary_products_are_used_if_faster() -> None:
    assert not _weights._pays_off(torch.zeros(3), 1 << 20, 1 << 10, 1 << 10)


@pytest.mark.gpu
def test_products_in_parts_are_used_if_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.zeros(3, device="cuda")
    assert _weights._pays_off(value, 1 << 20, 256, 256)
    assert not _weights._pays_off(value, 1 << 20, 64, 64)
    assert not _weights._pays_off(value, 1 << 4, 256, 256)
    assert not _weights._pays_off(value.double(), 1 << 20, 256, 256)
    previous_precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert not _weights._pays_off(value, 1 << 20, 256, 256)
    finally:
        torch.set_float32_matmul_precision(previous_precision)


@pytest.mark.parametrize("batch", [128, 256])
def test_choice_depends_on_the_size_of_the_whole_product(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, ...]] = []

    def record_sizes(value: Tensor, *products: int) -> bool:
        sizes.append(products)
        return False

    monkeypatch.setattr(_weights, "_pays_off", record_sizes)
    left, right = torch.empty(7, 40, batch, device="meta"), torch.empty(7, batch, 24, device="meta")
    assert _weights.compilations_of_sum(left, right, (False, True)) == []
    assert sizes == [(7 * batch, 40, 24)]
