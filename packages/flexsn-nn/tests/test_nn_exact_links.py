"""Values that neurons and layers with exact products exchange: results are equal, and no outdated value is used."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsn_nn import LIF, TernaryLIF, exact_products, functional
from flexsn_nn.exact import _exchange
from flexsn_runtime import Linked, RepeatedProducts, linked_linear

pytestmark = pytest.mark.usefixtures("interpreted")


def make_network(neuron: Callable[[], nn.Module] = LIF) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 32), neuron(), nn.Linear(32, 40), neuron(), nn.Linear(40, 5))
    with torch.no_grad():
        for layer in (net[0], net[2]):
            layer.weight.mul_(4)  # type: ignore[operator]
    functional.set_backend(net, "triton")
    return net


def draw_spikes(steps: int = 6) -> Tensor:
    return (torch.rand(steps, 4, 24, generator=torch.Generator().manual_seed(1)) < 0.4).float()


def train_step(net: nn.Module, x: Tensor, reset: bool = True) -> list[Tensor]:
    if reset:
        functional.reset_net(net)
    y = net(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), list(net.parameters()))]


def assert_near(results: list[Tensor], expected: list[Tensor], tolerance: float = 3e-6) -> None:
    for result, value in zip(results, expected, strict=True):
        scale = float(value.abs().max()) + 1e-6
        torch.testing.assert_close(result, value, rtol=0, atol=tolerance * scale)


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """A list of one pair per product: whether its spikes were in bfloat16, and whether the product offered links."""
    calls = []
    run = RepeatedProducts.run

    def record(products: RepeatedProducts, s: Tensor, written: Tensor | None, *rest: Any, **options: Any) -> Linked:
        linked = run(products, s, written, *rest, **options)
        calls.append((written is not None, linked.links is not None))
        return linked

    monkeypatch.setattr(RepeatedProducts, "run", record)
    return calls


USUAL_EXCHANGES = [(False, True), (True, True), (True, False)]


def test_results_equal_those_of_a_network_without_exact_products(exchanges: list[tuple[bool, bool]]) -> None:
    expected = train_step(make_network(), draw_spikes())
    net = make_network()
    products = exact_products(net, also=["0"])
    for _ in range(3):
        assert_near(train_step(net, draw_spikes()), expected)
    assert exchanges == USUAL_EXCHANGES * 3
    assert all(entry.exact for entry in products.layers)
    # The next part of the sequence begins with the states of the first part.
    functional.detach_net(net)
    results = train_step(net, draw_spikes(), reset=False)
    plain = make_network()
    train_step(plain, draw_spikes())
    functional.detach_net(plain)
    assert_near(results, train_step(plain, draw_spikes(), reset=False))


@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.long(all_but=["high"])
def test_products_in_two_parts_and_in_one_part_equal_those_without_exchange(
    precision: str, exchanges: list[tuple[bool, bool]]
) -> None:
    net = make_network()
    exact_products(net, precision, also=["0"], skip=["2"])
    plain = make_network()
    products = exact_products(plain, precision, also=["0"], skip=["2"])
    for module in plain.modules():
        vars(module).pop(_exchange.ATTRIBUTE, None)
    # Triton's interpreter truncates the parts, instead of rounding them.
    tolerance = 1e-4 if precision == "high" else 3e-2
    assert_near(train_step(net, draw_spikes()), train_step(plain, draw_spikes()), tolerance)
    assert exchanges == [(False, True), (True, False), (False, True), (False, False)]
    assert len(products.layers) == 3


def test_results_without_gradients_equal_those_of_a_plain_network(exchanges: list[tuple[bool, bool]]) -> None:
    net = make_network()
    with torch.no_grad():
        expected = net(draw_spikes())
        exact_products(net, also=["0"])
        functional.reset_net(net)
        assert_near([net(draw_spikes())], [expected])
        assert exchanges == [(False, False), (True, False), (True, False)]
    functional.reset_net(net)
    with torch.inference_mode():
        assert_near([net(draw_spikes())], [expected])


def test_the_parts_of_a_gradient_sum_to_the_gradient() -> None:
    """Checks that the links receive the gradient that the layer's output would receive without links."""
    torch.manual_seed(0)
    s, weight, bias = draw_spikes(), torch.randn(16, 24, requires_grad=True), torch.randn(16, requires_grad=True)
    y, record, links = linked_linear(s, s.bfloat16(), weight, bias, (3, 3), links=True)
    assert record is None
    assert links is not None
    assert links.total is not None
    grad = torch.randn_like(y)
    parts, remainder = [], grad
    for _ in range(3):
        parts.append(remainder.bfloat16())
        remainder = remainder - parts[-1].float()
    for incoming, outputs in (([grad], [y]), ([*parts, grad.sum(0)], [*links.parts, links.total])):
        gradients = torch.autograd.grad(outputs, [weight, bias], incoming, retain_graph=True)
        torch.testing.assert_close(gradients[0], grad.flatten(0, 1).t() @ s.flatten(0, 1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradients[1], grad.sum((0, 1)))
    gradients = torch.autograd.grad([y, *links.parts, links.total], [weight], [grad, *parts, grad.sum(0)])
    torch.testing.assert_close(gradients[0], 2 * grad.flatten(0, 1).t() @ s.flatten(0, 1), rtol=1e-5, atol=1e-5)


# -- outdated values are not used --------------------------------------------------------------------------------------


class Between(nn.Module):
    """A function between a neuron and a layer, and another function between a layer and a neuron."""

    def __init__(self, before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.neuron, self.last = nn.Linear(24, 32), LIF(), nn.Linear(32, 8)
        self.before, self.after = before, after
        with torch.no_grad():
            self.first.weight.mul_(4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.after(self.neuron(self.before(self.first(x)))))
        return y


def return_input(x: Tensor) -> Tensor:
    return x


def scale_under_no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(0.7)
    return x


def scale_data(x: Tensor) -> Tensor:
    x.data.mul_(0.7)
    return x


def replace_data(x: Tensor) -> Tensor:
    x.data = x.data * 0.7
    return x


def double_gradient(x: Tensor) -> Tensor:
    x.register_hook(lambda g: 2 * g)
    return x


class Flag(nn.Module):
    """A user's layer that changes its argument."""

    def forward(self, x: Tensor) -> Tensor:
        x.data.add_(0.25)
        return x


CASES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], list[tuple[bool, bool]]]] = {
    "nothing": (return_input, return_input, [(False, True), (True, False)]),
    "a view": (return_input, lambda x: x.flatten(0, 1).view(6, 4, 32), [(False, True), (True, False)]),
    "a sum with itself": (lambda x: x + x, lambda x: x + x, [(False, False), (False, False)]),
    "in place": (lambda x: x.mul_(2), lambda x: x.mul_(2), [(False, False)]),
    "in place, without a graph": (scale_under_no_grad, scale_under_no_grad, [(False, False)]),
    "by data": (scale_data, scale_data, [(False, False), (False, False)]),
    "by other memory": (replace_data, replace_data, [(False, False), (False, False)]),
    "a hook": (double_gradient, double_gradient, [(False, False), (False, False)]),
    "another order": (
        return_input,
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        [(False, True), (False, False)],
    ),
    "a part": (return_input, lambda x: x[:4], [(False, True), (False, False)]),
    "a module": (Flag(), Flag(), [(False, False), (False, False)]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.long(all_but=["a view", "in place", "by data"])
def test_functions_between_layers_are_respected(case: str, exchanges: list[tuple[bool, bool]]) -> None:
    before, after, expected_exchanges = CASES[case]
    torch.manual_seed(0)
    net = Between(before, after)
    functional.set_backend(net, "triton")
    expected = train_step(net, draw_spikes())
    exact_products(net, also=["first"])
    assert_near(train_step(net, draw_spikes()), expected)
    assert exchanges[: len(expected_exchanges)] == expected_exchanges


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("kind", ["forward", "pre", "backward"])
@pytest.mark.long(all_but=["forward-1", "pre-2"])
def test_hooks_of_modules_receive_and_change_the_same_tensors(place: int, kind: str) -> None:
    def halve_tensors(net: Any) -> list[Tensor]:
        module = net[place]

        def forward(module: Any, args: Any, output: Tensor) -> None:
            output.data.mul_(0.5)

        def before(module: Any, args: Any) -> None:
            args[0].data.mul_(0.5)

        if kind == "forward":
            module.register_forward_hook(forward)
        elif kind == "pre":
            module.register_forward_pre_hook(before)
        else:
            module.register_full_backward_hook(lambda module, input_gradients, output_gradients: None)
        return train_step(net, draw_spikes())

    expected = halve_tensors(make_network())
    net = make_network()
    exact_products(net, also=["0"])
    assert_near(halve_tensors(net), expected)


def test_hooks_and_retain_grad_receive_the_gradient_of_a_layers_output() -> None:
    def watch(net: Any) -> list[Tensor]:
        gradients = []
        y = net[0](draw_spikes())
        y.retain_grad()
        y.register_hook(lambda g: gradients.append(g.clone()))
        net[4](net[3](net[2](net[1](y)))).sum().backward()
        assert y.grad is not None
        return [y.grad, *gradients]

    expected = watch(make_network())
    net = make_network()
    exact_products(net, also=["0"])
    assert_near(watch(net), expected)


def test_a_hook_after_the_call_raises() -> None:
    net = make_network()
    exact_products(net, also=["0"])
    for weight in (0, 1):
        y = net[0](draw_spikes())
        s = net[1](y)
        y.retain_grad()
        with pytest.raises(RuntimeError, match="Register the hook earlier"):
            (s.sum() + weight * y.sum()).backward()
        functional.reset_net(net)


def test_two_neurons_that_read_one_output_contribute_to_its_gradient() -> None:
    def run_both(net: Any) -> list[Tensor]:
        y = net[0](draw_spikes())
        second_neuron = copy.deepcopy(net[1])
        (net[2](net[1](y)).sum() + net[2](second_neuron(y)).square().sum()).backward()
        return [net[0].weight.grad, net[0].bias.grad]

    expected = run_both(make_network())
    net = make_network()
    exact_products(net, also=["0"])
    assert_near(run_both(net), expected)


def test_several_gradients_and_second_derivatives_equal_those_without_links() -> None:
    net = make_network()
    exact_products(net, also=["0"])
    y = net(draw_spikes())
    loss = y.square().sum()
    first = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
    differentiable = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
    assert_near([gradient.detach() for gradient in differentiable], list(first))
    plain = make_network()
    y = plain(draw_spikes())
    expected = torch.autograd.grad(y.square().sum(), list(plain.parameters()), create_graph=True)
    second = torch.autograd.grad(differentiable[-2].square().sum(), [net[4].weight])
    assert_near(list(second), list(torch.autograd.grad(expected[-2].square().sum(), [plain[4].weight])))


class Doubled(nn.Module):
    """A step whose output is not a spike."""

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v + (x - v) * 0.5
        s = (h >= 1).to(x) + (x - x.detach())
        return s * self.scale, h

    scale = 1.0


def test_only_outputs_that_are_certainly_spikes_are_written_in_bfloat16(exchanges: list[tuple[bool, bool]]) -> None:
    for neuron in (TernaryLIF, make_claimed):
        exchanges.clear()
        net = make_network(neuron)
        expected = train_step(net, draw_spikes())
        exact_products(net, also=["0"])
        assert_near(train_step(net, draw_spikes()), expected)
        assert [written for written, _ in exchanges] == [False] * 3


def make_claimed() -> nn.Module:
    from flexsn_nn import FlexSN

    neuron = FlexSN(Doubled(), 1, 1, 1)
    neuron.spike_range = (0, 1)
    return neuron


def test_sizes_that_are_not_multiples_of_a_load_are_exact() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 13), LIF(), nn.Linear(13, 9), LIF(), nn.Linear(9, 3))
    with torch.no_grad():
        net[0].weight.mul_(5)  # type: ignore[operator]
    functional.set_backend(net, "triton")
    x = (torch.rand(5, 3, 7) < 0.5).float()
    expected = train_step(net, x)
    exact_products(net, also=["0"])
    assert_near(train_step(net, x), expected)
