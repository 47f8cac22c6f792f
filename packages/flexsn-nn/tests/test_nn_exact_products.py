"""Networks whose layers multiply spikes exactly: the selected layers, and correct products."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsn_nn import ILIF, LIF, FlexSN, OverTime, TernaryLIF, exact_products, functional, on_grid, plain_products
from flexsn_nn.errors import UnknownNameError
from flexsn_nn.exact import ExactProducts, _exchange
from flexsn_nn.fusion import fuse_norms
from flexsn_nn.memory import PackedSpikes

pytestmark = pytest.mark.usefixtures("loops")


class Block(nn.Module):
    """A residual connection around a layer and a neuron."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.fc, self.lif = nn.Linear(features, features), LIF()

    def forward(self, x: Tensor) -> Tensor:
        spikes: Tensor = self.lif(self.fc(x))
        return x + spikes


def make_network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 24), LIF(), Block(24), nn.Linear(24, 12), LIF(), nn.Linear(12, 5))


def draw_input(features: int = 10, device: str = "cpu") -> Tensor:
    return torch.rand(6, 4, features, generator=torch.Generator().manual_seed(1)).mul(4).to(device)


def train_step(net: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """Returns the output, and the gradients of the input and of all parameters."""
    functional.reset_net(net)
    x = x.clone().requires_grad_()
    y = (run or net)(x)
    weights = torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y)
    tensors = [x, *net.parameters()]
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), tensors, allow_unused=True, materialize_grads=True)]


def list_exact_layers(products: ExactProducts) -> dict[str, bool]:
    return {entry.layer: entry.exact for entry in products.layers}


def assert_near(results: list[Tensor], expected: list[Tensor]) -> None:
    for result, value in zip(results, expected, strict=True):
        scale = float(value.abs().max()) + 1e-6
        torch.testing.assert_close(result, value, rtol=0, atol=3e-6 * scale)


@pytest.mark.usefixtures("interpreted")
def test_layers_after_neurons_multiply_exactly_and_no_other_layer_changes() -> None:
    net, x = make_network(), draw_input()
    keys, expected = list(net.state_dict()), train_step(make_network(), draw_input())
    products = exact_products(net)
    assert_near(train_step(net, x), expected)
    assert list_exact_layers(products) == {"0": False, "2.fc": True, "3": True, "5": True}
    assert list(net.state_dict()) == keys
    assert "3: exact products; weight in 3 parts, gradients in 3 (float32)" in str(products)
    net.eval()
    with torch.no_grad():
        net(x)
    assert list_exact_layers(products) == {"0": False, "2.fc": True, "3": True, "5": True}
    assert "0: its input is not known to consist of spikes" in str(products)


@pytest.mark.usefixtures("interpreted")
def test_undo_removes_the_replacement() -> None:
    net, x = make_network(), draw_input()
    attributes = {name: set(vars(module)) for name, module in net.named_modules()}
    expected = train_step(net, x)
    products = exact_products(net)
    exact_products(net)  # A second call has no effect.
    assert sum(len(module._forward_hooks) for module in net.modules()) == 3
    products.undo()
    assert {name: set(vars(module)) for name, module in net.named_modules()} == attributes
    assert all(not module._forward_hooks for module in net.modules())
    assert all(torch.equal(a, b) for a, b in zip(train_step(net, x), expected, strict=True))
    plain_products(net)  # Nothing is left to undo.


@pytest.mark.usefixtures("interpreted")
def test_copies_and_pickles_have_separate_products() -> None:
    net, x = make_network(), draw_input()
    exact_products(net)
    expected = train_step(net, x)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert twin[3].forward.layer is twin[3]
        assert all(torch.equal(a, b) for a, b in zip(train_step(twin, x), expected, strict=True))
        plain_products(twin)
    assert "forward" in vars(net[3])


@pytest.mark.usefixtures("interpreted")
def test_the_default_precision_is_that_of_torch() -> None:
    net, x = make_network(), draw_input()
    products = exact_products(net)
    try:
        for precision, precision_text in (
            ("highest", "3 (float32)"),
            ("high", "2 (16 bits)"),
            ("medium", "1 (8 bits)"),
        ):
            torch.set_float32_matmul_precision(precision)
            train_step(net, x)
            assert f"gradients in {precision_text}" in str(products)
    finally:
        torch.set_float32_matmul_precision("highest")
    products = exact_products(net, "high")
    train_step(net, x)
    assert "weight in 2 parts, gradients in 2 (16 bits)" in str(products)
    with pytest.raises(UnknownNameError, match="highest"):
        exact_products(net, "higher")
    with pytest.raises(UnknownNameError, match="layer"):
        exact_products(net, also=["no such"])


@pytest.mark.usefixtures("interpreted")
def test_exact_precision_applies_only_to_weights_on_a_grid() -> None:
    net, x = make_network(), draw_input()
    on_grid(net[3])
    products = exact_products(net, "exact")
    train_step(net, x)
    assert list_exact_layers(products) == {"0": False, "2.fc": False, "3": True, "5": False}
    assert "5: its weight is not on a grid: flexsn_nn.on_grid(layer)" in str(products)
    torch.nn.utils.parametrize.remove_parametrizations(net[3], "weight")
    torch.nn.utils.parametrize.remove_parametrizations(net[3], "bias")
    train_step(net, x)
    assert list_exact_layers(products)["3"]
    with torch.no_grad():
        net[3].weight.mul_(1.1)
    train_step(net, x)
    assert not list_exact_layers(products)["3"]


@pytest.mark.usefixtures("interpreted")
def test_layers_named_by_the_user_are_added_or_skipped() -> None:
    net = make_network()
    spikes = (draw_input() > 2).float()
    expected = train_step(make_network(), spikes)
    products = exact_products(net, also=["0"], skip=["5"])
    assert_near(train_step(net, spikes), expected)
    assert list_exact_layers(products) == {"0": True, "2.fc": True, "3": True, "5": False}
    # This input does not consist of spikes.
    assert_near(train_step(net, draw_input()), train_step(make_network(), draw_input()))
    assert (
        "0: exact products; weight in 3 parts, gradients in 3 (float32); its input had numbers that are not whole"
        in str(products)
    )


@pytest.mark.usefixtures("interpreted")
def test_autocast_changes_nothing() -> None:
    net, x = make_network(), draw_input()
    with torch.autocast("cpu", torch.bfloat16):
        expected = train_step(net, x)
        products = exact_products(net)
        results = train_step(net, x)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert not any(list_exact_layers(products).values())
    assert "under autocast" in str(products)


@pytest.mark.usefixtures("interpreted")
def test_compiled_graphs_contain_exact_products() -> None:
    net, x = make_network(), draw_input()
    products = exact_products(net)
    eager = train_step(net, x)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    results = train_step(net, x, compiled)
    assert_near(results, eager)
    calls: list[torch.fx.Node] = []
    torch._dynamo.reset()

    def count(graph: torch.fx.GraphModule, examples: object) -> torch.fx.GraphModule:
        calls.extend(node for node in graph.graph.nodes if "spike_linear" in str(node.target))
        return graph

    train_step(net, x, torch.compile(net, backend=count))
    assert len(calls) == 3
    products.undo()


@pytest.mark.usefixtures("interpreted")
def test_exact_products_work_with_packed_spikes_norms_and_checkpoints() -> None:
    x = draw_input()

    def make() -> Any:
        torch.manual_seed(0)
        first = OverTime(nn.Linear(10, 24, bias=False), nn.BatchNorm1d(24))
        return nn.Sequential(first, LIF(), OverTime(nn.Linear(24, 6)), LIF(), nn.Linear(6, 5))

    expected = train_step(make(), x)
    net = make()
    fuse_norms(net)
    products = exact_products(net)
    with PackedSpikes(net) as packing:
        results = train_step(net, x)
    assert_near(results, expected)
    assert list_exact_layers(products) == {"0.0": False, "2.0": True, "4": True}
    assert packing.bytes_packed < packing.bytes_whole
    layers = nn.Sequential(LIF(), nn.Linear(10, 6))
    expected_of_layers = train_step(layers, x)
    products = exact_products(layers)
    results = train_step(
        layers, x, lambda x: torch.utils.checkpoint.checkpoint(layers[1], layers[0](x), use_reentrant=False)
    )
    assert_near(results, expected_of_layers)
    assert list_exact_layers(products) == {"1": True}


@pytest.mark.usefixtures("interpreted")
def test_convolutions_of_size_1_are_exact_in_channels_last() -> None:
    x = torch.rand(3, 2, 4, 5, 5) * 3
    torch.manual_seed(0)
    net = nn.Sequential(LIF(), OverTime(nn.Conv2d(4, 6, 1)), LIF(), OverTime(nn.Conv2d(6, 3, 3)))
    expected = train_step(net, x)
    products = exact_products(net)
    assert_near(train_step(net, x), expected)
    assert list_exact_layers(products) == {"1.0": False, "3.0": False}
    assert "1.0: its input is not channels-last in memory" in str(products)
    assert "3.0: not a convolution of size 1" in str(products)
    channels_last = x.movedim(2, -1).contiguous().movedim(-1, 2)
    results = train_step(net, channels_last)
    assert_near(results, expected)
    assert list_exact_layers(products)["1.0"]


class Scaled(LIF):
    """A neuron whose output does not consist of spikes, although the neuron's class has a spike range."""

    def forward(self, *inputs: Tensor, **options: Any) -> Tensor:
        spikes = super().forward(*inputs, **options)
        assert isinstance(spikes, Tensor)
        return spikes * 0.3


class Overriding(nn.Linear):
    """A layer that overrides `forward`."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


def claim_spikes(neuron: FlexSN) -> FlexSN:
    neuron.spike_range = (0, 1)
    return neuron


class Between(nn.Module):
    """A function between a neuron and a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor], neuron: FlexSN) -> None:
        super().__init__()
        self.neuron, self.fc, self.function = neuron, nn.Linear(10, 7), function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.function(self.neuron(x)))
        return y


def sum_of_forty(x: Tensor) -> Tensor:
    return sum([x] * 39, x)


def scale_in_place(x: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(0.7)
    return x


def scale_data(x: Tensor) -> Tensor:
    x.data.mul_(0.7)
    return x


def add_ramp(x: Tensor) -> Tensor:
    return x + torch.linspace(0, 1, x.shape[-1])


# The function between neuron and layer, the neuron, and True if the product is exact.
CASES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], FlexSN], bool]] = {
    "a sum of forty spikes": (sum_of_forty, LIF, True),
    "a sum of more than 256": (lambda x: sum_of_forty(sum_of_forty(x)), LIF, False),
    "negative spikes": (lambda x: x, TernaryLIF, True),
    "counts": (lambda x: x, ILIF, True),
    "a difference": (lambda x: x - x.roll(1, -1), LIF, True),
    "a mask": (lambda x: x * x.flip(-1), TernaryLIF, True),
    "a scale": (lambda x: x * 0.3, LIF, True),
    "a scale of a sum": (lambda x: (x + x.flip(-1)).roll(1, 0) / 8, TernaryLIF, True),
    "a negative scale": (lambda x: x * -0.3, LIF, False),
    "two scales": (lambda x: x * 0.3 * 0.7, LIF, False),
    "dropout that scales": (lambda x: torch.native_dropout(x, 0.3, True)[0], LIF, True),
    "a mean of two": (lambda x: nn.functional.avg_pool1d(x, 2, 1, 1)[..., :-1], LIF, True),
    "noise": (add_ramp, LIF, False),
    "dropout": (nn.Dropout(0.3).eval(), LIF, True),
    "pooling": (lambda x: nn.functional.max_pool1d(x, 3, 1, 1), LIF, True),
    "a mean": (lambda x: nn.functional.avg_pool1d(x, 3, 1, 1), LIF, False),
    "a change in place": (scale_in_place, LIF, False),
    "a change that autograd does not record": (scale_data, LIF, True),
    "a neuron that scales its output": (lambda x: x, Scaled, False),
    "a neuron with a wrong spike range": (lambda x: x, lambda: claim_spikes(Scaled()), True),
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_a_product_is_exact_or_equals_that_of_torch(case: str, training: bool) -> None:
    function, neuron, exact = CASES[case]
    torch.manual_seed(0)
    net = Between(function, neuron())
    x = draw_input() - 1
    products: list[ExactProducts] = []
    results = []
    for _ in range(2):
        torch.manual_seed(2)
        if training:
            results.append(train_step(net, x))
        else:
            functional.reset_net(net)
            with torch.no_grad():
                results.append([net(x)])
        if not products:
            products.append(exact_products(net))
    assert_near(results[1], results[0])
    if training:
        assert list_exact_layers(products[0]) == {"fc": exact}, str(products[0])
        assert ("not whole" in str(products[0])) == (case in REPAIRED)


REPAIRED = {"a change that autograd does not record", "a neuron with a wrong spike range"}


def test_layers_that_are_never_replaced_are_reported() -> None:
    net = nn.Sequential(LIF(), Overriding(10, 10), nn.Conv1d(3, 3, 1, padding=1))
    products = exact_products(net)
    assert "1: Overriding overrides forward" in str(products)
    assert "2: not a convolution of size 1" in str(products)
    assert "forward" not in vars(net[1])


def test_float64_passes_gradcheck() -> None:
    net = nn.Sequential(nn.Linear(3, 4, dtype=torch.float64))
    exact_products(net, also=["0"])
    x = (torch.rand(5, 3) < 0.5).double().requires_grad_()
    assert torch.autograd.gradcheck(net, x)


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def make_large(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    net: Any = nn.Sequential(nn.Linear(700, 512), LIF(), nn.Linear(512, 523), LIF(), nn.Linear(523, 128)).cuda()
    with torch.no_grad():
        for layer in (net[0], net[2]):
            layer.weight.mul_(4)
    return net


def draw_large_spikes() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(50, 64, 700, generator=generator) < 0.1).float().cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("grid", [False, True], ids=["float32", "grid"])
def test_exact_products_on_a_gpu_equal_plain_products(grid: bool) -> None:
    net, x = make_large(), draw_large_spikes()
    if grid:
        for layer in (net[0], net[2], net[4]):
            on_grid(layer)
    torch.set_float32_matmul_precision("highest")
    expected = train_step(net, x)
    products = exact_products(net, also=["0"])
    results = train_step(net, x)
    assert all(list_exact_layers(products).values()), str(products)
    if grid:
        assert torch.equal(results[0], expected[0])  # With a grid, all spikes and their sums are equal.
    # Without a grid, a spike may differ if the last bit of a sum differs. The gradients of the last layer are sums over
    # many spikes.
    for result, value in zip(results, expected, strict=True):
        norm = float(value.norm())
        assert float((result - value).norm()) <= (1e-5 if grid else 2e-2) * norm + 1e-6


# Dynamo reads the gradients of tensors that are not leaves, and autograd nodes of parameters belong to another stream.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.gpu
def test_a_compiled_or_captured_network_equals_eager_mode() -> None:
    net, x = make_large(), draw_large_spikes()
    exact_products(net, also=["0"])
    eager = train_step(net, x)
    compiled = train_step(net, x, torch.compile(net))
    assert torch.equal(eager[0], compiled[0])
    assert_near(compiled, eager)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        train_step(net, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = train_step(net, x)
    graph.replay()
    torch.cuda.synchronize()
    assert_near(captured, eager)


def make_aligned() -> Any:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(704, 512), LIF(), nn.Linear(512, 520), LIF(), nn.Linear(520, 128)).cuda()
    with torch.no_grad():
        for layer in (net[0], net[2]):
            layer.weight.mul_(4)
    return net


@pytest.mark.gpu
def test_exchanged_tensors_on_a_gpu_equal_converted_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXSN_LAUNCHER", "compiled")
    monkeypatch.delenv("CXX", raising=False)  # the launcher may have to be compiled
    x = (torch.rand(50, 64, 704, generator=torch.Generator().manual_seed(0)) < 0.1).float().cuda()
    net, plain = make_aligned(), make_aligned()
    exact_products(net, also=["0"])
    exact_products(plain, also=["0"])
    for module in plain.modules():
        vars(module).pop(_exchange.ATTRIBUTE, None)
    expected = train_step(plain, x)
    first = train_step(net, x)
    assert torch.equal(first[0], expected[0])
    assert_near(first, expected)
    for _ in range(4):
        last = train_step(net, x)
    assert all(net[i].forward._products._calls for i in (0, 2, 4))  # The compiled launcher has run these products.
    assert all(torch.equal(earlier, later) for earlier, later in zip(first, last, strict=True))
