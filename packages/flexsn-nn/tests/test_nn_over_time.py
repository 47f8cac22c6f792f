"""`OverTime`: layers without a state, applied to all steps of a sequence."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from flexsn_nn import LIF, InputShapeError, OverTime, StepModeError, UnknownNameError, functional


def test_a_sequence_equals_separate_steps() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    x = torch.randn(5, 4, 2, 8, 8)
    output = OverTime(*layers)(x)
    assert output.shape == (5, 4, 27)
    torch.testing.assert_close(output, torch.stack([layers(step) for step in x]))


def test_no_steps_return_an_empty_output() -> None:
    assert OverTime(nn.Conv1d(2, 3, 3))(torch.zeros(0, 4, 2, 8)).shape == (0, 4, 3, 6)


LAYERS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.Conv2d(4, 4, 3, padding=1), (3, 4, 4, 4)),
    (lambda: nn.Conv2d(4, 2, 3), (1, 4, 5, 6)),
    # Because of its equal sizes, folded input would be accepted, but normalised wrongly.
    (lambda: nn.GroupNorm(2, 4), (3, 4, 4, 4)),
    (lambda: nn.GroupNorm(2, 4), (4, 4, 4)),
    (lambda: nn.InstanceNorm2d(4, affine=True), (4, 4, 4, 4)),
    (lambda: nn.BatchNorm2d(4).eval(), (4, 4, 4, 4)),
    (lambda: nn.Conv1d(4, 4, 3), (4, 4, 4)),
    (lambda: nn.AvgPool2d(2), (2, 2, 4, 4)),
    (lambda: nn.Linear(4, 4), (4, 4)),
    (lambda: nn.LayerNorm(4), (4, 4, 4)),
]


@pytest.mark.long(
    all_but=[
        "<lambda>-shape0",
        "<lambda>-shape2",
        "<lambda>-shape5",
        "<lambda>-shape8",
        "<lambda>-shape9",
    ]
)
@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize(("make", "shape"), LAYERS)
def test_single_steps_are_not_folded(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer, x = make(), torch.randn(5, *shape)
    net = nn.Sequential(OverTime(layer), LIF())
    expected = net(x)
    functional.set_step_mode(net, "s")
    functional.reset_net(net)
    assert torch.equal(net[0](x[0]), layer(x[0]))
    torch.testing.assert_close(torch.stack([net(step) for step in x]), expected)
    functional.set_step_mode(net, "m")
    functional.reset_net(net)
    assert torch.equal(net(x), expected)


def test_set_step_mode_includes_over_time() -> None:
    net = OverTime(nn.Conv2d(1, 2, 3), nn.ReLU(), step_mode="s")
    for layer in (net, copy.deepcopy(net), net[:1]):
        assert layer.step_mode == "s"
        assert layer(torch.ones(2, 1, 4, 4)).shape == (2, 2, 2, 2)
    assert isinstance(net[0], nn.Conv2d)
    assert "step_mode='s'" in repr(net)
    net.step_mode = "m"
    assert net(torch.ones(3, 2, 1, 4, 4)).shape == (3, 2, 2, 2, 2)
    with pytest.raises(UnknownNameError, match="unknown step_mode 'multi'"):
        net.step_mode = "multi"
    with pytest.raises(StepModeError, match="needs step_mode"):
        functional.set_step_mode(nn.Sequential(net, LIF(backend="triton")), "s")
    assert net.step_mode == "m"  # The failed call changed nothing.


def test_wrong_layers_and_inputs_are_refused() -> None:
    with pytest.raises(StepModeError, match=r"layer 1 is a neuron \(LIF\).*after OverTime"):
        OverTime(nn.Conv2d(1, 1, 3), LIF())
    with pytest.raises(InputShapeError, match=r"shape \[4\]; in step mode 'm' it takes sequences \[T, B, \.\.\.\]"):
        OverTime(nn.ReLU())(torch.zeros(4))
