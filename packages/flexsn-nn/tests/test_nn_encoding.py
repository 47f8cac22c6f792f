"""Encoders: spikes equal counts and times that are computed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flexsn_nn import InputDtypeError, ParameterError, UnknownNameError, encoding


def test_rate_draws_spikes_with_the_given_probability() -> None:
    x = torch.tensor([-0.5, 0.0, 0.25, 0.9, 1.0, 2.0]).expand(50, -1)
    spikes = encoding.rate(x, 400, generator=torch.Generator().manual_seed(0))
    assert spikes.shape == (400, 50, 6)
    assert set(spikes.flatten().tolist()) == {0.0, 1.0}
    counts = spikes.sum((0, 1)) / (400 * 50)
    assert counts[[0, 1]].tolist() == [0.0, 0.0]
    assert counts[[4, 5]].tolist() == [1.0, 1.0]
    # The tolerance is four standard deviations of 20,000 draws.
    for i, p in ((2, 0.25), (3, 0.9)):
        assert abs(counts[i].item() - p) < 4 * math.sqrt(p * (1 - p) / 20_000)


def test_the_smallest_random_value_is_no_spike_of_probability_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.zeros(shape))
    assert encoding.rate(torch.tensor([0.0, 1e-9]), 2).tolist() == [[0.0, 1.0], [0.0, 1.0]]


def test_rate_uses_the_generator() -> None:
    x = torch.full((100,), 0.5)

    def draw(seed: int) -> Tensor:
        return encoding.rate(x, 5, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    half = encoding.rate(x.half(), 5, generator=torch.Generator().manual_seed(1))
    assert half.dtype == torch.float16
    assert torch.equal(half.float(), draw(1))


@pytest.mark.parametrize(
    ("curve", "times"),
    [
        # The values of 4 (1 - x), with halves rounded to even.
        ("linear", [4, 4, 3, 2, 1, 0, 0]),
        # The values of 4 - ln((e⁴ - 1) x + 1), rounded.
        ("log", [4, 4, 1, 1, 0, 0, 0]),
    ],
)
def test_latency_equals_times_computed_by_hand(curve: str, times: list[int]) -> None:
    values = [-1.0, 0.0, 0.25, 0.5, 0.75, 1.0, 3.0]
    if curve == "log":
        alpha = math.exp(4) - 1
        inside = [min(max(x, 0.0), 1.0) for x in values]
        assert times == [round(4 - math.log(alpha * x + 1)) for x in inside]
    spikes = encoding.latency(torch.tensor(values), 5, curve=curve)
    assert spikes.argmax(0).tolist() == times
    assert spikes.sum(0).tolist() == [1.0] * len(values)


@pytest.mark.parametrize("curve", ["linear", "log"])
def test_latency_accepts_very_long_and_very_short_trains(curve: str) -> None:
    """Checks trains so long that exp(T - 1) overflows, and trains of one step."""
    x = torch.tensor([0.0, 1.0])
    assert encoding.latency(x, 1000, curve=curve).argmax(0).tolist() == [999, 0]
    assert encoding.latency(x, 1, curve=curve).tolist() == [[1.0, 1.0]]


def test_direct_repeats_the_input_without_a_copy() -> None:
    x = torch.rand(3, 2, requires_grad=True)
    sequence = encoding.direct(x, 7)
    assert sequence.shape == (7, 3, 2)
    assert sequence.data_ptr() == x.data_ptr()
    (gradient,) = torch.autograd.grad(sequence.sum(), x)
    assert gradient.tolist() == [[7.0, 7.0]] * 3


@pytest.mark.parametrize("encoder", [encoding.rate, encoding.latency, encoding.direct])
def test_invalid_arguments_are_refused(encoder: Callable[[Tensor, int], Tensor]) -> None:
    with pytest.raises(InputDtypeError, match=r"torch\.uint8.*x\.float\(\) / 255"):
        encoder(torch.zeros(3, dtype=torch.uint8), 4)
    with pytest.raises(ParameterError, match="num_steps is 0; it must be a whole number of at least 1"):
        encoder(torch.zeros(3), 0)


def test_an_unknown_curve_is_refused() -> None:
    options: dict[str, Any] = {"curve": "lin"}
    with pytest.raises(UnknownNameError, match="Did you mean 'linear'"):
        encoding.latency(torch.zeros(3), 4, **options)
