"""A kernel packs numbers with few bits into bytes, and reads them from the bytes."""

from __future__ import annotations

import pytest
import torch

from flexsn_runtime import pack_numbers, unpack_numbers

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def unpack_by_hand(packed: torch.Tensor, bits: int, low: int, dtype: torch.dtype) -> torch.Tensor:
    shifts = torch.arange(0, 8, bits, device=packed.device)
    return (((packed.view(-1, 1) >> shifts) & ((1 << bits) - 1)) + low).to(dtype).view(-1)


def check(dtype: torch.dtype, bits: int, low: int, device: str) -> None:
    packed = torch.arange(5003, device=device).to(torch.uint8).view(1, 5003)  # all bytes, in several blocks
    numbers = unpack_numbers(packed, bits, low, dtype)
    assert numbers is not None
    assert numbers.dtype == dtype
    assert torch.equal(numbers, unpack_by_hand(packed, bits, low, dtype))
    repacked = pack_numbers(numbers, bits, low)
    assert repacked is not None
    assert torch.equal(repacked, packed.view(-1))
    for count in (1, 8 // bits, 8 // bits * 300 + 1, len(numbers) - 1):
        last = pack_numbers(numbers[:count], bits, low)
        assert last is not None
        assert last.shape == (-(-count * bits // 8),)
        assert torch.equal(unpack_by_hand(last, bits, low, dtype)[:count], numbers[:count])
        assert not torch.any(unpack_by_hand(last, bits, 0, dtype)[count:])  # unused bits are zeros


@pytest.mark.long(all_but=["torch.float32-1", "torch.bfloat16-2", "torch.float16-4"])
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_numbers_are_read_from_all_bytes(dtype: torch.dtype, bits: int) -> None:
    check(dtype, bits, low=-1, device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("low", [0, -1])
@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_numbers_are_read_from_all_bytes_on_a_gpu(dtype: torch.dtype, bits: int, low: int) -> None:
    check(dtype, bits, low, "cuda")


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.int32], ids=str)
def test_dtypes_without_a_kernel_return_none(dtype: torch.dtype) -> None:
    assert unpack_numbers(torch.zeros(4, dtype=torch.uint8), 1, 0, dtype) is None
    assert pack_numbers(torch.zeros(4, dtype=dtype), 1, 0) is None
