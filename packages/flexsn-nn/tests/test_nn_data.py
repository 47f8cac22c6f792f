"""Batches of sequences with different lengths: the results equal those of separate sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from flexsn_nn import LI, LIF, ParameterError, UnknownNameError, data, functional, loss, metrics

REDUCTIONS = ["mean", "sum", "max", "last"]
LENGTHS = [7, 1, 12, 5, 12]


def make_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 9), LIF(), nn.Linear(9, 4), LI()).double()


def make_samples() -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (4 * torch.rand(length, 3, generator=generator, dtype=torch.float64), number % 4)
        for number, length in enumerate(LENGTHS)
    ]


def compute_scores(net: nn.Module, batch: list[tuple[Tensor, int]], reduction: str) -> Tensor:
    functional.reset_net(net)
    x, lengths, _ = data.pad_sequences(batch)
    return data.readout(net(x), lengths, reduction)


def compute_gradients(net: nn.Module, value: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(value, list(net.parameters())))


@pytest.mark.usefixtures("loops")
@pytest.mark.long(all_but=["max", "last"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_readouts_of_a_batch_equal_readouts_of_single_sequences(reduction: str) -> None:
    net, weights = make_network(), torch.linspace(-1, 1, 4, dtype=torch.float64)
    batched = compute_scores(net, make_samples(), reduction)
    separate = [compute_scores(net, [sample], reduction) for sample in make_samples()]
    assert (batched != 0).any()
    torch.testing.assert_close(batched, torch.cat(separate))
    expected = compute_gradients(net, torch.cat(separate).mv(weights).square().sum())
    for gradient, expected_gradient in zip(
        compute_gradients(net, batched.mv(weights).square().sum()), expected, strict=True
    ):
        assert expected_gradient.abs().max() > 0
        torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_values_in_the_padding_do_not_count(reduction: str) -> None:
    lengths = torch.tensor(LENGTHS)
    x = torch.randn(12, 5, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    junk = torch.where(data.length_mask(lengths, 12)[:, :, None, None], x, 1e6).requires_grad_()
    readout = data.readout(junk, lengths, reduction)
    steps = [x[:length, number] for number, length in enumerate(LENGTHS)]
    by_hand: Callable[[Tensor], Tensor] = {
        "mean": lambda s: s.mean(0),
        "sum": lambda s: s.sum(0),
        "max": lambda s: s.amax(0),
        "last": lambda s: s[-1],
    }[reduction]
    torch.testing.assert_close(readout, torch.stack([by_hand(s) for s in steps]))
    readout.sum().backward()
    assert junk.grad is not None
    assert (junk.grad[~data.length_mask(lengths, 12)] == 0).all()
    assert torch.autograd.gradcheck(lambda s: data.readout(s, lengths, reduction), x.requires_grad_())


def test_losses_and_accuracies_of_a_masked_batch_equal_those_of_its_sequences() -> None:
    spikes = (torch.rand(12, 5, 4, generator=torch.Generator().manual_seed(3)) < 0.4).float()
    lengths, targets = torch.tensor(LENGTHS), torch.tensor([0, 1, 2, 3, 0])
    masked = data.mask_padding(spikes, lengths)
    counts = torch.stack([spikes[:length, number].sum(0) for number, length in enumerate(LENGTHS)])
    torch.testing.assert_close(loss.ce_count_loss(masked, targets), nn.functional.cross_entropy(counts, targets))
    accuracies = [metrics.accuracy(spikes[:n, i : i + 1], targets[i : i + 1]) for i, n in enumerate(LENGTHS)]
    assert metrics.accuracy(masked, targets) == torch.stack(accuracies).mean()
    assert (data.mask_padding(spikes, lengths, -2.0) == -2).sum() == 4 * (5 * 12 - sum(LENGTHS))


def test_a_data_loader_collates_arrays() -> None:
    frames = [np.full((length, 2, 3), number, dtype=np.int16) for number, length in enumerate(LENGTHS)]
    dataset: Any = list(zip(frames, "abcde", strict=True))
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=5, collate_fn=data.pad_sequences)
    x, lengths, targets = next(iter(loader))
    assert x.shape == (12, 5, 2, 3)
    assert x.dtype == torch.float32  # Integers become float32.
    assert lengths.tolist() == LENGTHS
    assert targets == list("abcde")
    assert (x.sum((0, 2, 3)) == torch.tensor([6.0 * i * n for i, n in enumerate(LENGTHS)])).all()


@pytest.mark.parametrize(
    ("dtype", "requested", "expected"),
    [
        (torch.float64, None, torch.float64),
        (torch.bfloat16, None, torch.bfloat16),
        (torch.bool, None, torch.float32),
        (torch.uint8, torch.float16, torch.float16),
        (torch.int16, torch.int16, torch.int16),
    ],
)
def test_batches_have_the_requested_or_default_dtype(
    dtype: torch.dtype, requested: torch.dtype | None, expected: torch.dtype
) -> None:
    assert data.pad_sequences([(torch.ones(2, 3).to(dtype), 0)], dtype=requested)[0].dtype == expected


def test_sums_of_half_precision_do_not_stop_at_2048() -> None:
    spikes = torch.ones(4000, 2, 1, dtype=torch.float16)
    lengths = torch.tensor([4000, 3000])
    assert data.readout(spikes, lengths, "sum").flatten().tolist() == [4000, 3000]
    assert data.readout(spikes, lengths).dtype == torch.float16


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([], "no samples"),
        ([(torch.ones(2, 3), 0), (torch.ones(0, 3), 0)], r"sequence 1 .* \[0, 3\]; expected \[T, \*step\] with T >= 1"),
        ([(torch.tensor(1.0), 0)], r"sequence 0 .* \[\]"),
        ([(torch.ones(2, 3), 0), (torch.ones(2, 4), 0)], r"sequence 1 .* \[4\] .* sequence 0 has \[3\]"),
        ([(torch.ones(2, 3), 0), (torch.ones(2, 3).int(), 0)], "torch.int32.*torch.float32"),
    ],
)
def test_invalid_batches_are_refused(batch: list[tuple[Tensor, int]], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        data.pad_sequences(batch)


@pytest.mark.parametrize(
    ("sequence", "lengths", "message"),
    [
        (torch.ones(3, 2), torch.tensor([3, 0]), "from 0 to 3; expected from 1 to 3"),
        (torch.ones(3, 2), torch.tensor([4, 1]), "from 1 to 4"),
        (torch.ones(3, 2), torch.tensor([3]), r"\[3, 2\] and lengths of shape \[1\]"),
        (torch.ones(3), torch.tensor([3]), r"expected \[T, B, \*step\]"),
        (torch.ones(0, 2), torch.tensor([1, 1]), "T >= 1"),
        (torch.ones(3, 2), torch.tensor([3.0, 1.0]), "whole numbers"),
        (torch.ones(3, 2), torch.tensor([True, True]), "whole numbers"),
        (torch.ones(3, 2, dtype=torch.int16), torch.tensor([3, 1]), r"sequence.float\(\)"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(sequence: Tensor, lengths: Tensor, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        data.readout(sequence, lengths)


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'mean'"):
        data.readout(torch.ones(3, 2), torch.tensor([3, 1]), "means")


def test_compiled_readouts_equal_eager_readouts() -> None:
    x, lengths = torch.randn(12, 5, 3), torch.tensor(LENGTHS)
    compiled = torch.compile(data.readout, fullgraph=True, backend="aot_eager")
    for reduction in REDUCTIONS:
        torch.testing.assert_close(compiled(x, lengths, reduction), data.readout(x, lengths, reduction))


@pytest.mark.gpu
def test_readouts_on_a_gpu_equal_those_on_the_cpu() -> None:
    x, lengths = torch.randn(12, 5, 3), torch.tensor(LENGTHS)
    for reduction in REDUCTIONS:
        for device in ("cpu", "cuda"):
            readout = data.readout(x.cuda(), lengths.to(device), reduction)
            torch.testing.assert_close(readout.cpu(), data.readout(x, lengths, reduction))
    # Lengths that are too large select the last step, and no assertion fails on the device.
    assert data.readout(x.cuda(), lengths.cuda() + 12, "last").equal(x[-1].cuda())
