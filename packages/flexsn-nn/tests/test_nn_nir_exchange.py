"""Import and export of NIR: equal spikes after a round trip, equality with NIR's equations, and clear errors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flexsn_nn import (
    ALIF,
    CUBALIF,
    IF,
    LI,
    LIF,
    PLIF,
    RALIF,
    RLIF,
    Leaky,
    MissingExtraError,
    NirError,
    OverTime,
    Recurrent,
    RLeaky,
    RSynaptic,
    Synaptic,
    functional,
    on_grid,
    surrogate,
)
from flexsn_nn.exact import whole_numbers
from flexsn_nn.layer import Delay, NormNeuron, SEWBlock, SharedDropout
from flexsn_nn.nir_exchange import Scale, from_nir, to_nir

pytestmark = pytest.mark.usefixtures("loops")

nir = pytest.importorskip("nir")
DT = 1e-3


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def assert_equal_spikes(net: nn.Module, imported: nn.Module, x: Tensor) -> None:
    functional.reset_net(net)
    functional.reset_net(imported)
    with torch.no_grad():
        expected = net(x)
        assert (expected != 0).double().mean() > 0.02, "some neurons should fire"
        assert torch.equal(imported(x), expected)


TAUS = torch.linspace(1.5, 4.0, 6)


@pytest.mark.long(all_but=["<lambda>1", "<lambda>3", "<lambda>4", "<lambda>7", "<lambda>9", "<lambda>11"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: IF(strict=True, v_threshold=0.75),
        lambda: IF(strict=True, v_reset=-0.25),
        lambda: LIF(tau=2.0, strict=True),
        lambda: LIF(tau=2.1, strict=True, v_reset=-0.1),
        lambda: LIF(tau=1.0, strict=True),
        lambda: LIF(tau=3.0, strict=True, decay_input=False),
        lambda: LIF(tau=TAUS.clone(), v_threshold=TAUS / 4, strict=True),
        lambda: LIF(tau=TAUS.clone(), decay_input=False, surrogate_function=surrogate.ATan(strict=True)),
        lambda: CUBALIF(strict=True),
        lambda: CUBALIF(c_decay=TAUS / 5, v_decay=1 - TAUS / 5, strict=True),
        lambda: LI(tau=2.5),
        lambda: LI(tau=TAUS.clone(), decay_input=False),
    ],
)
def test_neurons_are_exported_and_imported(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 6), make())
    x = 3 * draw(30, 5, 4)
    graph = to_nir(net, x, dt=DT)
    # The graph is written to a file, as for another simulator.
    nir.write(tmp_path / "net.nir", graph)
    assert_equal_spikes(net, from_nir(nir.read(tmp_path / "net.nir"), dt=DT), x)


def test_convolutional_networks_are_exported_and_imported() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        OverTime(nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2), nn.Conv2d(4, 3, (1, 2), bias=False)),
        LIF(tau=torch.tensor([1.5, 2.0, 3.0]).view(3, 1, 1), strict=True, v_threshold=0.3),
        nn.Flatten(2),
        Scale(torch.full((48,), 2.0)),
        nn.Linear(48, 5, bias=False),
        IF(strict=True, v_threshold=0.3),
    )
    x = 3 * draw(20, 2, 2, 7, 9)
    functional.reset_net(net)
    graph = to_nir(net, x, dt=DT)
    kinds = [type(node).__name__ for node in graph.nodes.values()]
    assert kinds == ["Input", "Conv2d", "Conv2d", "LIF", "Flatten", "Scale", "Linear", "IF", "Output"]
    assert functional.get_states(net) == {"1": [], "5": []}, "the call that determines shapes leaves no state"
    assert_equal_spikes(net, from_nir(graph, dt=DT), x)


def test_a_convolutional_network_is_read_from_a_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(OverTime(nn.Conv2d(2, 3, 3, padding="same")), IF(strict=True), nn.Flatten(2), LI())
    x = 3 * draw(10, 2, 2, 5, 6)
    nir.write(tmp_path / "net.nir", to_nir(net, x, dt=DT))
    assert_equal_spikes(net, from_nir(nir.read(tmp_path / "net.nir"), dt=DT), x)


def test_a_grid_and_its_scales_are_preserved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    convolution, linear = nn.Conv2d(1, 4, 3), nn.Linear(64, 6)
    layers: list[Any] = [convolution, linear]
    net = nn.Sequential(OverTime(convolution), IF(strict=True), nn.Flatten(2), linear, IF(strict=True))
    for layer in layers:
        nn.init.normal_(layer.weight, std=0.5)
        on_grid(layer, bits=8)
    x = (torch.rand(5, 3, 1, 6, 6) < 0.5).float()
    nir.write(tmp_path / "net.nir", to_nir(net, x[:1], dt=DT))
    back = from_nir(nir.read(tmp_path / "net.nir"), dt=DT)
    assert_equal_spikes(net, back, x)
    imported_layers = [m for m in back.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    for imported_layer, original in zip(imported_layers, layers, strict=True):
        integers, scales = whole_numbers(imported_layer.weight, bits=8)
        assert integers.dtype == torch.int8
        shape = (-1, *(1,) * (integers.dim() - 1))
        assert torch.equal(integers * scales.view(shape), original.weight)
        assert imported_layer.bias is not None
        assert torch.equal(imported_layer.bias, original.bias)


def test_a_convolution_in_one_dimension_is_exported_and_imported() -> None:
    net = nn.Sequential(OverTime(nn.Conv1d(2, 3, 3, padding=1)), IF(strict=True))
    x = draw(10, 2, 2, 8)
    assert_equal_spikes(net, from_nir(to_nir(net, x)), x)


def test_learned_and_delayed_neurons_are_exported_as_lif() -> None:
    x = 2 * draw(30, 5, 6)
    for net in (PLIF(init_tau=2.5, strict=True), Leaky(0.75, reset_mechanism="zero")):
        graph = to_nir(net, x, dt=DT)
        assert [type(node).__name__ for node in graph.nodes.values()] == ["Input", "LIF", "Output"]
        assert_equal_spikes(net, from_nir(graph, dt=DT), x)


def fill_arrays(*values: float) -> list[Any]:
    return [np.full((3,), value) for value in values]


def test_imported_nodes_follow_the_equations_of_nir() -> None:
    """Compares with Euler steps in NumPy of NIR's equations, with gains that this package never writes."""
    x = 2 * draw(25, 1, 3).double() + 1
    dt = 5e-3

    def scan(step: Callable[[Any, Any], tuple[Any, Any]], state: Any) -> Any:
        outputs = []
        for t in range(len(x)):
            output, state = step(x[t].numpy(), state)
            outputs.append(output)
        return np.stack(outputs)

    def lif(x: Any, v: Any) -> tuple[Any, Any]:
        v = v + dt / 20e-3 * (0.0 - v + 1.7 * x)
        z = (v > 0.9).astype(float)
        return z, np.where(z == 1, 0.0, v)

    def integrate(x: Any, v: Any) -> tuple[Any, Any]:
        v = v + dt * 40.0 * x
        z = (v > 0.9).astype(float)
        return z, np.where(z == 1, -0.5, v)

    def leak(x: Any, v: Any) -> tuple[Any, Any]:
        v = v + dt / 20e-3 * (0.0 - v + 1.7 * x)
        return v, v

    def cuba(x: Any, state: Any) -> tuple[Any, Any]:
        i, v = state
        i = i + dt / 10e-3 * (-i + 1.3 * x)
        v = v + dt / 20e-3 * (0.0 - v + 2.0 * i)
        z = (v > 0.9).astype(float)
        return z, (i, np.where(z == 1, 0.0, v))

    zeros = np.zeros((1, 3))
    cases = [
        (nir.LIF(*fill_arrays(20e-3, 1.7, 0.0, 0.9, 0.0)), scan(lif, zeros)),
        (nir.IF(*fill_arrays(40.0, 0.9, -0.5)), scan(integrate, zeros - 0.5)),
        (nir.LI(*fill_arrays(20e-3, 1.7, 0.0)), scan(leak, zeros)),
        (nir.CubaLIF(*fill_arrays(10e-3, 20e-3, 2.0, 0.0, 0.9, 0.0, 1.3)), scan(cuba, (zeros, zeros))),
    ]
    for node, expected in cases:
        net = from_nir(nir.NIRGraph.from_list(node), dt=dt).double()
        with torch.no_grad():
            result = net(x)
        assert (expected != 0).mean() > 0.05
        torch.testing.assert_close(result, torch.from_numpy(expected), rtol=1e-6, atol=1e-6)


X = torch.ones(2, 1, 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LIF(), "fires at v >= v_threshold, NIR at v > v_threshold.*strict=True"),
        (lambda: LIF(surrogate_function=torch.sigmoid), "fires at v >= v_threshold"),
        (lambda: LIF(v_reset=None, strict=True), "resets softly.*Train with v_reset=0.0"),
        (lambda: Leaky(0.5), "reset_mechanism='subtract'.*train with reset_mechanism='zero'"),
        (lambda: Leaky(0.5, strict=None, reset_mechanism="zero"), "fires at v >= v_threshold"),
        (lambda: Leaky(1.0, reset_mechanism="zero"), "beta=1: it never decays"),
        (lambda: CUBALIF(c_decay=1.0, strict=True), "c_decay=1: it never decays"),
        (lambda: CUBALIF(v_reset=-0.5, strict=True), "starts at v_reset=-0.5 and leaks to 0"),
        (lambda: LIF(tau=torch.full((2, 3), 2.0), strict=True), r"shape \[2, 3\] for neurons of shape \[3\]"),
        (lambda: ALIF(strict=True), "is a ALIF, which NIR does not have"),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU()), r"Sequential\.1 is a ReLU"),
        (lambda: nn.Flatten(), r"flattens dimensions 1 to -1.*nn\.Flatten\(2\)"),
        (
            lambda: nn.Sequential(nn.Unflatten(2, (1, 3)), nn.Linear(3, 2)),
            "Sequential.0 is a Unflatten",
        ),
        (
            lambda: OverTime(nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular")),
            "pads with 'circular'",
        ),
    ],
)
def test_layers_that_nir_cannot_express_are_refused(make: Callable[[], nn.Module], message: str) -> None:
    x = torch.ones(2, 2, 1, 3) if "pads" in message else torch.ones(2, 2, 3)
    with pytest.raises(NirError, match=message):
        to_nir(make(), x)


def test_a_linear_layer_of_inputs_with_more_dimensions_is_refused() -> None:
    with pytest.raises(NirError, match=r"nn\.Linear on \[4, 3\].*nn\.Flatten\(2\) first"):
        to_nir(nn.Linear(3, 2), torch.ones(2, 1, 4, 3))


def test_ignore_equality_exports_neurons_that_fire_at_the_threshold() -> None:
    graph = to_nir(LIF(tau=2.0), X, dt=DT, ignore_equality=True)
    assert graph.nodes["lif"].tau.tolist() == [2 * DT] * 3


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (
            lambda: nir.LIF(*fill_arrays(1e-2, 1.0, 0.5, 1.0, 0.0)),
            "v_leak other than 0. In flexsn_nn, a membrane leaks",
        ),
        (lambda: nir.LIF(*fill_arrays(1e-5, 1.0, 0.0, 1.0)), "tau of 1e-05 s; Euler steps of dt=0.001 s"),
        (
            lambda: nir.IF(*fill_arrays(1.0, 1.0), v_reset=np.array([0.0, 0.0, 0.1])),
            "several values of v_reset",
        ),
        (lambda: nir.CubaLIF(*fill_arrays(1e-2, 1e-2, 1.0, 0.1, 1.0)), "v_leak other than 0. CUBALIF"),
        (lambda: nir.CubaLIF(*fill_arrays(1e-2, 1e-2, 1.0, 0.0, 1.0, 0.1)), "v_reset other than 0"),
        (lambda: nir.LI(*fill_arrays(1e-2, 1.0, 0.1)), "v_leak other than 0. A leaky integrator"),
        (lambda: nir.I(*fill_arrays(1.0)), "i is a I, which cannot be read. Supported: Linear"),
    ],
)
def test_a_node_that_cannot_be_read_is_refused(node: Callable[[], Any], message: str) -> None:
    with pytest.raises(NirError, match=message):
        from_nir(nir.NIRGraph.from_list(node()), dt=DT)


def make_graph(edges: list[tuple[str, str]]) -> Any:
    nodes = {
        "input": nir.Input(np.array([3])),
        "a": nir.IF(*fill_arrays(1.0, 1.0)),
        "b": nir.IF(*fill_arrays(1.0, 3.0)),
        "output": nir.Output(np.array([3])),
    }
    return nir.NIRGraph(nodes, edges, type_check=False)


def test_a_graph_that_forks_and_joins_is_read() -> None:
    net = from_nir(make_graph([("input", "a"), ("input", "b"), ("a", "output"), ("b", "output"), ("a", "b")]), dt=1.0)
    x = torch.ones(4, 1, 3) * 0.75
    a = IF(strict=True)(x)
    b = IF(strict=True, v_threshold=3.0)(x + a)
    assert torch.equal(net(x), a + b)
    assert a.any()
    assert not torch.equal(a, b)


@pytest.mark.parametrize(
    ("edges", "match"),
    [
        ([("input", "a"), ("a", "b"), ("b", "a"), ("b", "output")], "leads back|loop"),
        ([("input", "a"), ("b", "output")], "nothing leads to the node 'b'"),
        ([("input", "a")], "nothing leads to the output"),
    ],
)
def test_graphs_that_cannot_run_are_refused(edges: list[tuple[str, str]], match: str) -> None:
    with pytest.raises(NirError, match=match):
        from_nir(make_graph(edges))


def test_missing_nir_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nir", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'flexsn-nn\[nir\]'"):
        to_nir(IF(), X)
    with pytest.raises(MissingExtraError, match=r"pip install 'flexsn-nn\[nir\]'"):
        from_nir(None)


def round_to_quarters(weight: Tensor) -> Tensor:
    """Rounds to multiples of a quarter. Their sums are exact in any order, with any gain that is a power of two."""
    return weight.copy_((8 * weight).round() / 4)


RECURRENT: list[Callable[[], nn.Module]] = [
    lambda: RLIF(6, tau=2.0, strict=True),
    lambda: RLIF(6, tau=3.0, strict=True, decay_input=False, bias=True, init=round_to_quarters),
    lambda: RLIF(tau=2.0, strict=True, all_to_all=False, V=-TAUS),
    lambda: Recurrent(IF(strict=True, v_threshold=0.75), 6),
    lambda: Recurrent(CUBALIF(strict=True), 6, init=round_to_quarters),
    lambda: Recurrent(LI(tau=2.0), 6, bias=True),
    lambda: RLeaky(
        0.5, linear_features=6, reset_mechanism="zero", reset_delay=False, init=round_to_quarters, bias=False
    ),
    lambda: RSynaptic(
        0.75, 0.5, linear_features=6, reset_mechanism="zero", reset_delay=False, init=round_to_quarters, bias=False
    ),
    lambda: Synaptic(0.75, 0.5, reset_mechanism="zero", reset_delay=False),
]


@pytest.mark.parametrize("make", RECURRENT)
def test_recurrent_weights_are_exported_and_imported(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), make(), nn.Linear(6, 3))
    functional.set_backend(net, "torch")
    with torch.no_grad():
        for layer in (net[0], net[2]):
            for parameter in layer.parameters():
                round_to_quarters(parameter)
    x = (3 * draw(30, 5, 4)).round() / 4
    nir.write(tmp_path / "net.nir", to_nir(net, x, dt=DT))
    imported = from_nir(nir.read(tmp_path / "net.nir"), dt=DT, backend="torch")
    assert_equal_spikes(net, imported, x)
    learned = [p for p in net[1].parameters() if p.dim() > 0]
    assert len(list(imported[1].parameters())) == len(learned)


def make_recurrent_graph(kind: str = "inside", **lif: Any) -> Any:
    """Makes a graph of two neurons, of which the first excites the second.

    The recurrent part is a subgraph, as snnTorch exports it, or with `kind="flat"` a part of the graph.
    """
    values = {"tau": 2 * DT, "r": 4.0, "v_leak": 0.0, "v_threshold": 1.0, "v_reset": 0.0, **lif}
    neuron = nir.LIF(**{name: np.full(2, value) for name, value in values.items()})
    w_rec = nir.Linear(weight=np.array([[0.0, 0.0], [0.75, 0.0]]))
    ends = {"input": nir.Input({"input": np.array([2])}), "output": nir.Output({"output": np.array([2])})}
    edges = [("input", "lif"), ("lif", "w_rec"), ("w_rec", "lif"), ("lif", "output")]
    inner = nir.NIRGraph(nodes={**ends, "lif": neuron, "w_rec": w_rec}, edges=edges, type_check=False)
    if kind == "flat":
        return inner
    outer = [("input", "hidden"), ("hidden", "output")]
    return nir.NIRGraph(nodes={**ends, "hidden": inner}, edges=outer, type_check=False)


@pytest.mark.parametrize("kind", ["inside", "flat"])
def test_a_recurrent_graph_equals_its_equation(kind: str) -> None:
    """Compares with `tau v' = -v + r (x + w_rec s)`, in which the gain differs from the time constant."""
    net = from_nir(make_recurrent_graph(kind), dt=DT, backend="torch")
    weight = torch.tensor([[0.0, 0.0], [0.75, 0.0]])
    x = draw(20, 3, 2) / 2 + 0.3
    v, s, expected = torch.zeros(3, 2), torch.zeros(3, 2), []
    for step in x:
        h = v + (4 * (step + s @ weight.T) - v) / 2
        s = (h > 1).float()
        v = (1 - s) * h
        expected.append(s)
    assert 0.05 < torch.stack(expected).mean() < 0.95
    assert torch.equal(net(x), torch.stack(expected))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: RLeaky(0.5, linear_features=6, reset_mechanism="zero"), "reset_delay=False"),
        (lambda: Synaptic(0.5, 0.5, reset_mechanism="zero"), "reset_delay=False"),
        (lambda: RLeaky(0.5, linear_features=6), "reset_mechanism"),
        (lambda: RALIF(6, strict=True), "RALIF"),
        (lambda: Recurrent(ALIF(strict=True), 6), "ALIF"),
        (lambda: Recurrent(LIF(strict=True), recurrent=nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 6))), "Sequential"),
    ],
)
def test_recurrent_layers_that_nir_cannot_express_are_refused(make: Callable[[], nn.Module], match: str) -> None:
    net = nn.Sequential(nn.Linear(4, 6), make())
    functional.set_backend(net, "torch")
    with pytest.raises(NirError, match=match):
        to_nir(net, draw(2, 1, 4), dt=DT)


def test_other_loops_in_a_graph_are_refused() -> None:
    graph = make_recurrent_graph("flat")
    graph.nodes["w_rec"] = nir.Threshold(threshold=np.ones(2))
    with pytest.raises(NirError, match="only one linear node may"):
        from_nir(graph, dt=DT)
    graph = make_recurrent_graph("flat")
    graph.nodes["w_rec"] = nir.Linear(weight=np.ones((2, 3)))
    with pytest.raises(NirError, match="only square"):
        from_nir(graph, dt=DT)


@pytest.mark.parametrize(
    "delay",
    [2, 0.5, torch.tensor([0.0, 3.0, 1.25]), Delay(torch.tensor([0.4, 2.6, 1.0]), interpolation="gaussian")],
    ids=["whole", "fraction", "each", "rounded"],
)
def test_delays_are_exported_in_whole_steps(delay: Any) -> None:
    layer = delay if isinstance(delay, Delay) else Delay(delay)
    x = torch.rand(6, 2, 3)
    net = nn.Sequential(layer).eval()
    back = from_nir(to_nir(net, x, dt=1e-3), dt=1e-3)
    functional.reset_net(net)
    assert torch.equal(back(x), net(x))


def test_delays_of_feedback_are_refused() -> None:
    layer = Recurrent(LIF(backend="torch"), 3, delay=1)
    with pytest.raises(NirError, match="has delays in its feedback"):
        to_nir(layer, torch.rand(2, 1, 3))


# -- layers between neurons, blocks, and a user's forward --------------------------------------------------------------


class Branches(nn.Module):
    """A user's forward with sums, a constant, a flatten, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 6)
        self.one, self.two, self.last = LIF(strict=True), LIF(strict=True), IF(strict=True)
        self.register_buffer("gain", torch.full((6,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(self.first(x.flatten(2)))
        inner = self.two(self.second(h)) + 2.0 * h
        output: Tensor = self.last(self.second(inner) + self.gain * inner)
        return output


def make_block(**options: Any) -> nn.Module:
    torch.manual_seed(1)
    module = SEWBlock(2, 2, lambda: LIF(strict=True, v_threshold=0.25), **options)
    with torch.no_grad():
        module(3 * draw(20, 4, 2, 6, 6))  # This call computes statistics of the norms.
    functional.reset_net(module)
    return module.eval()


def make_normed(*layers: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    net = nn.Sequential(*layers)
    for _ in range(3):
        functional.reset_net(net)
        net(3 * draw(*shape))
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.weight, 0.5, 2.0)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    return net.eval()


STRUCTURES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[str]]] = {
    "pooling": (
        lambda: nn.Sequential(
            OverTime(nn.Conv2d(2, 3, 3), nn.AvgPool2d(2)),
            IF(strict=True, v_threshold=0.3),
            OverTime(nn.AvgPool2d((2, 1), stride=1, divisor_override=1)),
        ),
        (2, 8, 6),
        ["Conv2d", "AvgPool2d", "IF", "SumPool2d"],
    ),
    "dropout": (
        lambda: nn.Sequential(
            nn.Linear(4, 6), nn.Dropout(), SharedDropout(), LIF(strict=True, v_threshold=0.3), nn.Identity()
        ).eval(),
        (4,),
        ["Affine", "LIF"],
    ),
    "folded norms": (
        lambda: make_normed(
            OverTime(nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3)),
            IF(strict=True),
            nn.Flatten(2),
            OverTime(nn.Linear(48, 5, bias=False), nn.BatchNorm1d(5)),
            IF(strict=True, v_threshold=0.5),
            shape=(10, 4, 2, 6, 6),
        ),
        (2, 6, 6),
        ["Conv2d", "IF", "Flatten", "Affine", "IF"],
    ),
    "norms alone": (
        lambda: make_normed(
            OverTime(nn.BatchNorm2d(2)),
            IF(strict=True),
            nn.Flatten(2),
            NormNeuron(nn.BatchNorm1d(32), LIF(strict=True)),
            shape=(10, 4, 2, 4, 4),
        ),
        (2, 4, 4),
        ["Conv2d", "IF", "Flatten", "Affine", "LIF"],
    ),
    "a block": (make_block, (2, 6, 6), ["Conv2d", "LIF", "Conv2d", "LIF"]),
    "a block that halves": (
        lambda: make_block(stride=2),
        (2, 6, 6),
        ["Conv2d", "LIF", "Conv2d", "LIF", "Conv2d", "LIF"],
    ),
    "a forward": (Branches, (2, 2), ["Flatten", "Affine", "LIF", "Affine", "LIF", "Scale", "Affine", "Scale", "IF"]),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_are_exported_and_imported(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, shape, kinds = STRUCTURES[name]
    net = make()
    x = 3 * draw(20, 3, *shape)
    functional.reset_net(net)
    graph = to_nir(net, x, dt=DT)
    assert [type(node).__name__ for node in graph.nodes.values()] == ["Input", *kinds, "Output"]
    assert not any(functional.get_states(net).values()), "the calls that determine shapes leave no state"
    nir.write(tmp_path / "net.nir", graph)
    imported = from_nir(nir.read(tmp_path / "net.nir", type_check=False), dt=DT)
    with torch.no_grad():
        expected, output = net(x), imported(x)
    assert expected.count_nonzero() > 0.02 * expected.numel(), "some neurons should fire"
    # A folded norm rounds differently, which changes few spikes.
    assert float((expected != output).double().mean()) <= (0.01 if "norm" in name or "block" in name else 0)


def run_first_step(net: nn.Module, x: Tensor) -> Tensor:
    """Returns the states of the first layer after one step."""
    functional.reset_net(net)
    with torch.no_grad():
        net(x[:1])
    return next(iter(functional.get_states(net).values()))[-1]


def test_a_folded_norm_equals_the_norm() -> None:
    net = make_normed(
        OverTime(nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3)),
        IF(v_threshold=1e9, strict=True),
        shape=(5, 4, 2, 6, 6),
    )
    x = draw(1, 2, 2, 6, 6)
    torch.testing.assert_close(
        run_first_step(from_nir(to_nir(net, x)), x), run_first_step(net, x), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: IF(strict=True, v_threshold=0.75, v_reset=None),
        lambda: LIF(tau=2.0, strict=True, v_reset=None),
        lambda: CUBALIF(strict=True, v_reset=None),
        lambda: RLIF(6, tau=2.0, strict=True, v_reset=None),
    ],
)
def test_soft_resets_are_exported_on_request(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), make())
    functional.set_backend(net, "torch")
    x = 3 * draw(30, 5, 4)
    with pytest.raises(NirError, match="soft_reset=True"):
        to_nir(net, x, dt=DT)
    nir.write(tmp_path / "net.nir", to_nir(net, x, dt=DT, soft_reset=True))
    imported = from_nir(nir.read(tmp_path / "net.nir"), dt=DT, backend="torch")
    assert_equal_spikes(net, imported, x)
    with pytest.raises(NirError, match="leave soft_reset=True out"):
        to_nir(LIF(strict=True), x, soft_reset=True)


class Refused(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.neuron, self.function = LIF(strict=True), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.neuron(x), x)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: nn.Sequential(OverTime(nn.MaxPool2d(2))), "MaxPool2d"),
        (lambda: nn.Sequential(OverTime(nn.AvgPool2d(2, ceil_mode=True))), "ceil_mode"),
        (lambda: nn.Sequential(OverTime(nn.AvgPool2d(2, divisor_override=3))), "divisor_override=3"),
        (lambda: nn.Sequential(OverTime(nn.BatchNorm2d(2))), "eval"),
        (lambda: nn.Sequential(nn.Dropout()), "eval"),
        (lambda: make_block(connect="and"), "multiplies two outputs"),
        (lambda: make_block(connect="iand"), "constants"),
        (lambda: Refused(lambda y, x: y.mean(0)), "mean"),
        (lambda: Refused(lambda y, x: y if x.sum() > 0 else x), "cannot be traced"),
        (lambda: Refused(lambda y, x: (y, x)), "several values"),
        (lambda: Refused(lambda y, x: y + y), "the same output"),
        (lambda: Refused(lambda y, x: torch.add(y, x, alpha=2)), "factor"),
    ],
)
def test_unsupported_graphs_of_layers_are_refused(make: Callable[[], nn.Module], match: str) -> None:
    with pytest.raises(NirError, match=match):
        to_nir(make(), 3 * draw(2, 1, 2, 6, 6))


def test_a_neuron_that_is_called_twice_is_refused() -> None:
    neuron = LIF(strict=True)
    with pytest.raises(NirError, match="called twice"):
        to_nir(nn.Sequential(neuron, neuron), draw(2, 1, 4))


def test_a_convolutional_network_runs_in_snntorch() -> None:
    pytest.importorskip("nirtorch")
    import_nir = pytest.importorskip("snntorch.import_nir")
    torch.manual_seed(0)
    net = nn.Sequential(
        OverTime(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.AvgPool2d(2)),
        LIF(tau=4.0, decay_input=False, strict=True, v_threshold=0.1),
        nn.Flatten(2),
        nn.Linear(27, 5),
        LIF(tau=4.0, decay_input=False, strict=True, v_threshold=0.1),
    ).eval()
    x = 4 * draw(12, 1, 1, 8, 8)
    graph = to_nir(net, x)
    theirs = import_nir.import_from_nir(graph)
    outputs, state = [], None
    for step in x:
        output, state = theirs(step[0], state)  # The layers of snnTorch do not support a batch.
        outputs.append(output)
    functional.reset_net(net)
    with torch.no_grad():
        expected = net(x)[:, 0]
    assert expected.any()
    assert float((torch.stack(outputs) != expected).double().mean()) <= 0.02


def make_firing(make: Callable[[], nn.Module]) -> nn.Sequential:
    """Makes a network of two layers that fire. No membrane falls far below zero, where sinabs would clamp it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), make(), nn.Linear(16, 4), make())
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.abs_()
    return net


# norse scripts its own functions, and norse and sinabs read graphs with a deprecated function of nirtorch.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated", "ignore:nirtorch.load is being deprecated")
def test_a_network_runs_in_norse() -> None:
    import_nir = pytest.importorskip("norse.torch.utils.import_nir")
    net = make_firing(lambda: LIF(tau=4.0, strict=True, v_threshold=0.5))
    x = (draw(20, 3, 8) > 0).float()
    graph = to_nir(net, x, dt=DT)
    theirs, state, outputs = import_nir.from_nir(graph, dt=DT), None, []
    for step in x:
        output, state = theirs(step, state)
        outputs.append(output)
    functional.reset_net(net)
    with torch.no_grad():
        expected = net(x)
    assert 0.05 < expected.mean() < 0.5
    assert torch.equal(torch.stack(outputs), expected)


@pytest.mark.filterwarnings("ignore:nirtorch.load is being deprecated")
def test_a_network_runs_in_sinabs() -> None:
    """Runs the network in sinabs, whose integrate-and-fire neurons subtract the threshold."""
    theirs_nir = pytest.importorskip("sinabs.nir")
    net = make_firing(lambda: IF(strict=True, v_threshold=2.0, v_reset=None))
    x = (draw(20, 3, 8) > 0).float()
    theirs = theirs_nir.from_nir(to_nir(net, x, dt=1.0, soft_reset=True), batch_size=3)
    functional.reset_net(net)
    with torch.no_grad():
        expected = net(x)
        outputs = theirs(x.transpose(0, 1).flatten(0, 1))  # For sinabs, batch and time are one dimension.
    outputs = outputs[0] if isinstance(outputs, tuple) else outputs
    assert 0.05 < expected.mean() < 0.8
    assert torch.equal(outputs.unflatten(0, (3, 20)).transpose(0, 1), expected)
