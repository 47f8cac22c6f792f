"""Reports about networks: their rows and values are correct, and the network does not change."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsn_nn import IF, LI, LIF, RLIF, OverTime, ParameterError
from flexsn_nn.functional import explain, get_states, summary
from flexsn_nn.fusion import fuse_norms
from flexsn_nn.monitor import RateMonitor, SynapseMonitor
from flexsn_nn.reports import LayerReport

X = (torch.rand(4, 2, 2, 6, 6, generator=torch.Generator().manual_seed(0)) > 0.5).float()


def make_network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        OverTime(nn.Conv2d(2, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)),
        LIF(),
        OverTime(nn.AvgPool2d(2)),
        nn.Flatten(2),
        nn.Dropout(0.1),
        nn.Linear(72, 5),
        RLIF(5),
        LI(),
    )


NAMES = ["0.0", "0.1", "1", "2.0", "3", "4", "5", "6", "7"]


@pytest.mark.parametrize("report", [explain, summary])
def test_a_report_does_not_change_the_network(report: object) -> None:
    net = make_network()
    net(X).sum().backward()
    state_dict = copy.deepcopy(net.state_dict())
    gradients = [parameter.grad.clone() for parameter in net.parameters()]
    states = {name: [state.clone() for state in layer_states] for name, layer_states in get_states(net).items()}
    draws = torch.get_rng_state()
    report(net, X)  # type: ignore[operator]
    assert torch.equal(torch.get_rng_state(), draws)
    for name, value in net.state_dict().items():
        assert torch.equal(value, state_dict[name]), name
    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
    for name, layer_states in get_states(net).items():
        assert all(torch.equal(a, b) for a, b in zip(layer_states, states[name], strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_neurons_that_ran_earlier_are_rows(compiler: None) -> None:
    """Checks a call that repeats an earlier call, and therefore records no choice of a backend."""
    net = nn.Sequential(LIF(), LI())
    for _ in range(2):
        net(X)
    report = explain(net, X)
    assert [layer.backend for layer in report.layers] == ["cpp", "cpp", "torch"]
    assert report.verdict.startswith("compiled kernels run all 2 neurons")


def test_a_network_without_inputs_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"functional\.explain\(net, x\)"):
        explain(make_network())


def test_an_explanation_has_a_row_per_layer(compiler: None) -> None:
    report = explain(make_network(), X)
    assert [layer.name for layer in report.layers] == [*NAMES, "the rest"]
    rows = {layer.name: layer for layer in report.layers}
    assert {name for name, row in rows.items() if row.backend == "cpp"} == {"1", "6", "7"}
    assert rows["1"].kernels == ("dynamics_forward", "dynamics_backward")
    assert rows["1"].reason == "the tensors are on 'cpu', where compiled kernels run"
    # The neuron and the linear layer store their inputs. The convolution stores the whole input.
    assert rows["0.0"].bytes_kept == X.numel() * 4
    assert rows["1"].bytes_kept >= 4 * 2 * 8 * 36 * 4
    assert rows["5"].bytes_kept == 4 * 2 * 72 * 4
    assert sum(row.share for row in report.layers) == pytest.approx(1)
    assert sum(row.seconds for row in report.layers) == pytest.approx(report.seconds)
    assert report.bytes_kept == sum(row.bytes_kept for row in report.layers)
    lines = str(report).splitlines()
    assert lines[0] == report.verdict
    assert report.verdict.startswith("compiled kernels run all 3 neurons; forward and backward take ")
    assert lines[1].split() == ["layer", "kind", "backend", "kept", "time", "share"]


def test_the_verdict_names_a_loop() -> None:
    net = make_network()
    net[6].backend = "torch"
    report = explain(net, X)
    assert report.verdict.startswith("1 of 3 neurons run without compiled kernels, first 6 (RLIF: torch)")
    assert "6: torch: requested by backend='torch'" in str(report).splitlines()


def test_time_belongs_to_the_layer_that_runs() -> None:
    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(400):
                x = x * 1.0
            return x

    net = nn.Sequential(nn.Linear(4, 4), Slow(), nn.Linear(4, 2))
    longest = max(explain(net, torch.rand(3, 4)).layers, key=lambda row: row.seconds)
    assert (longest.name, longest.kind) == ("1", "Slow")


def test_a_fused_norm_and_its_layer_are_one_row(compiler: None) -> None:
    net = make_network()
    fuse_norms(net)
    report = explain(net, X)
    assert [layer.name for layer in report.layers][:2] == ["0", "1"]
    assert report.layers[0].kind == "OverTime"
    assert report.bytes_kept < explain(make_network(), X).bytes_kept


def test_a_loss_is_passed_or_required() -> None:
    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x > 0.5).sum()

    with pytest.raises(ParameterError, match="give loss"):
        explain(Counting(), torch.rand(3))
    shapes: list[torch.Size] = []

    def loss(output: Tensor) -> Tensor:
        shapes.append(output.shape)
        return output.sum()

    assert isinstance(explain(IF(), torch.rand(3, 4), loss=loss).layers[0], LayerReport)
    assert set(shapes) == {torch.Size([3, 4])}


def test_a_summary_has_a_row_per_layer() -> None:
    net = make_network()
    report = summary(net, X)
    rows = {layer.name: layer for layer in report.layers}
    assert list(rows) == NAMES
    assert report.parameters == sum(parameter.numel() for parameter in net.parameters())
    assert rows["5"].parameters == 72 * 5 + 5
    assert rows["1"].output_shape == (4, 2, 8, 6, 6)
    assert (rows["1"].neurons, rows["6"].neurons, rows["7"].neurons, report.neurons) == (288, 5, 5, 298)
    assert rows["7"].rate is None, "the mean of a membrane is no rate"
    with RateMonitor(net) as rates, SynapseMonitor(net) as synapses, torch.no_grad():
        torch.manual_seed(1)
        net(X)
    assert rows["1"].rate == pytest.approx(rates.rates()["1"])
    assert rows["0.0"].operations == synapses.operations()["0.0"]
    assert report.operations.accumulates >= rows["0.0"].operations.accumulates > 0
    assert str(report).splitlines()[0].startswith(f"{report.parameters:,} parameters; 298 neurons that fire ")


def test_shared_parameters_count_once() -> None:
    linear = nn.Linear(4, 4)
    sharing = nn.Linear(4, 4)
    sharing.weight = linear.weight
    report = summary(nn.Sequential(linear, IF(), sharing), torch.rand(3, 2, 4))
    assert [layer.parameters for layer in report.layers] == [20, 0, 4]
    assert report.parameters == 24
