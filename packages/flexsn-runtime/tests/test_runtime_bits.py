"""Kernels can also write outputs as bits. The bits equal the spikes, and no other result changes."""

from __future__ import annotations

import copy

import pytest
import torch
from runtime_cores import DEVICE
from torch import Tensor

from flexsn_runtime import ScanProgram, SpikeBitsError, TargetName, TensorCountError, prepare, scan


def fire(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = v + x
    spike = (h >= 1.0).to(h.dtype)
    return spike, h - spike.detach()


def two(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x + v, torch.where(x > 0.5, (v < 1).to(x.dtype), 1 - (x > 0.2).to(x.dtype)), v + x


def unpack(bits: Tensor, count: int) -> Tensor:
    """Returns the bits of each row as numbers, after checking that the unused bits of the row are zeros."""
    numbers = (bits.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=bits.device) & 1).flatten(1)
    assert not numbers[:, count:].any()
    return numbers[:, :count]


TARGETS = ["cpp", "triton"]


def find_device(target: TargetName) -> torch.device:
    return DEVICE if target == "triton" else torch.device("cpu")


SHAPES = [(3, 5, 7), (2, 700), (3, 1), (2, 64), (0, 4), (3, 0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.long(all_but=["triton-bfloat16", "cpp-float32"])
def test_bits_equal_the_spikes(target: TargetName, dtype: torch.dtype) -> None:
    program = ScanProgram(fire, 1, 1, 1, on_cpu=target, bits=[True])
    plain = ScanProgram(fire, 1, 1, 1, on_cpu=target)
    for shape in SHAPES:
        x = torch.rand(shape, generator=torch.Generator().manual_seed(0)).mul(1.5)
        x = x.to(find_device(target), dtype).requires_grad_()
        spikes, final, bits = scan(*prepare(program, (x,)), state_seqs=False)
        reference = scan(*prepare(plain, (x,)), state_seqs=False)
        count = x[:1].numel() if shape[0] else x.shape[1]
        assert bits.dtype == torch.uint8
        assert bits.shape == (shape[0], -(-count // 32) * 4)
        assert torch.equal(unpack(bits, count).to(dtype), spikes.reshape(shape[0], count))
        assert torch.equal(spikes, reference[0])
        assert torch.equal(final, reference[1])
        assert not bits.requires_grad
        if not x.numel():
            continue
        (gradient,) = torch.autograd.grad(spikes.sum() + final.square().sum(), [x])
        assert torch.equal(gradient, torch.autograd.grad(reference[0].sum() + reference[1].square().sum(), [x])[0])


@pytest.mark.parametrize("target", TARGETS)
def test_bits_have_the_order_of_memory(target: TargetName) -> None:
    program = copy.deepcopy(ScanProgram(fire, 1, 1, 1, on_cpu=target, bits=[True]))
    device = find_device(target)
    images = torch.rand(6, 5, 4, 4, device=device).mul(2).contiguous(memory_format=torch.channels_last)
    images = images.unflatten(0, (3, 2))
    spikes, _, bits = scan(*prepare(program, (images,)), state_seqs=False)
    assert spikes.stride() == images.stride()
    assert torch.equal(unpack(bits, 2 * 5 * 4 * 4).float().flatten(), spikes.permute(0, 1, 3, 4, 2).flatten())
    # The steps are not consecutive in this memory, so no bits are written.
    for x in (torch.rand(4, 6, 3).transpose(0, 1), torch.rand(2, 3, 4, 5)[..., :3].permute(1, 3, 0, 2)):
        spikes, _, bits = scan(*prepare(program, (x.to(device),)), state_seqs=False)
        if bits.numel():
            flat = spikes.as_strided((spikes.numel(),), (1,))
            assert torch.equal(unpack(bits, x[0].numel()).float().flatten(), flat)
        else:
            assert bits.shape[0] == 0
            assert spikes.stride(0) != x[0].numel()


def test_bits_of_one_of_several_outputs_are_written() -> None:
    program = ScanProgram(two, 1, 1, 2, bits=[False, True])
    x = torch.rand(4, 3, 11, device=DEVICE)
    for state_seqs in (False, True):
        first, second, states, bits = scan(*prepare(program, (x,)), state_seqs=state_seqs)
        assert states.shape == (x.shape if state_seqs else x.shape[1:])
        assert first.shape == second.shape == x.shape
        assert torch.equal(unpack(bits, 33).float(), second.flatten(1))
        assert 0 < second.mean() < 1


def test_invalid_arguments_are_refused() -> None:
    x = torch.rand(4, 3, 3, device=DEVICE)

    def doubled(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * (x > v).to(x.dtype), v

    with pytest.raises(SpikeBitsError, match=r"output 0 is not known to be 0 or 1.*mul.*in doubled: return 2 \*"):
        prepare(ScanProgram(doubled, 1, 1, 1, bits=[True]), (x,))
    with pytest.raises(SpikeBitsError, match="part of it is an argument"):
        prepare(ScanProgram(lambda x, v: (torch.maximum(x, (x > v).to(x.dtype)), v), 1, 1, 1, bits=[True]), (x,))
    with pytest.raises(SpikeBitsError, match="output 0 is not known"):
        prepare(ScanProgram(two, 1, 1, 2, bits=[True, True]), (x,))
    weight = torch.rand(3, 3, device=DEVICE)
    recurrent = ScanProgram(lambda x, v: (((x + v @ weight) > 1).to(x.dtype), x), 1, 1, 1, bits=[True])
    with pytest.raises(SpikeBitsError, match="matrix products"):
        prepare(recurrent, (x,))
    with pytest.raises(TensorCountError, match="bits has 1 entries for 2 outputs"):
        ScanProgram(two, 1, 1, 2, bits=[True])
