"""Delays, shared dropout, batch norms that depend on the threshold, and residual blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flexsn_nn import (
    IF,
    LIF,
    OverTime,
    ParameterError,
    SlidingPSN,
    StateError,
    StochasticLIF,
    UnknownNameError,
    functional,
)
from flexsn_nn.layer import (
    Delay,
    MSBlock,
    SEWBlock,
    SharedDropout,
    ThresholdDependentBatchNorm1d,
    ThresholdDependentBatchNorm2d,
    ThresholdDependentBatchNorm3d,
)

pytestmark = pytest.mark.usefixtures("loops")


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def delay_by_hand(x: Tensor, delays: Tensor) -> Tensor:
    """Computes the delayed sequence by its definition, element by element."""
    y = torch.zeros_like(x)
    flat, out, delay_by_element = x.flatten(1), y.view(len(x), -1), delays.expand(x.shape[1:]).flatten()
    for e in range(flat.shape[1]):
        n = int(delay_by_element[e].floor())
        f = float(delay_by_element[e]) - n
        for t in range(len(x)):
            earlier = flat[t - n, e] if t >= n else 0.0
            previous = flat[t - n - 1, e] if t >= n + 1 else 0.0
            out[t, e] = (1 - f) * earlier + f * previous
    return y


@pytest.mark.parametrize("delay", [0, 1, 2.0, 2.25, 0.5, 7.0, 9.5])
def test_delays_of_a_scalar_equal_their_definition(delay: float) -> None:
    x = draw(7, 2, 3)
    torch.testing.assert_close(Delay(delay)(x), delay_by_hand(x, torch.tensor(float(delay))))
    if delay == int(delay):
        assert torch.equal(Delay(delay)(x), delay_by_hand(x, torch.tensor(float(delay))))


@pytest.mark.parametrize(
    "delay",
    [torch.tensor(2.0), torch.tensor([0.0, 1.5, 3.0]), torch.tensor([[0.0], [2.75]]), torch.rand(2, 3) * 4],
    ids=lambda delay: str(tuple(delay.shape)),
)
@pytest.mark.parametrize("learn", [False, True])
def test_delays_of_a_tensor_equal_their_definition(delay: Tensor, learn: bool) -> None:
    x = draw(7, 2, 3)
    layer = Delay(delay.double(), learn=learn)
    torch.testing.assert_close(layer(x), delay_by_hand(x, delay.double()))
    assert list(layer.state_dict()) == ["delay"]
    assert len(list(layer.parameters())) == int(learn)


def test_learned_delays_have_gradients() -> None:
    delay = torch.tensor([0.3, 1.6, 2.5], dtype=torch.float64)
    layer = Delay(delay, max_delay=4, learn=True)
    x = draw(6, 2, 3).requires_grad_()

    def run(x: Tensor, delay: Tensor) -> Tensor:
        layer.reset()
        out = torch.func.functional_call(layer, {"delay": delay}, (x,))
        assert isinstance(out, Tensor)
        return out

    assert torch.autograd.gradcheck(run, (x, delay.clone().requires_grad_()))
    # At a whole delay, the gradient is the slope towards the longer delay.
    parameter = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    Delay(parameter, max_delay=3)(x)[4, 0, 0].backward()
    assert parameter.grad is not None
    torch.testing.assert_close(parameter.grad, (x[2] - x[3])[0, 0].detach())


@pytest.mark.filterwarnings("ignore::flexsn_nn.errors.RangeWarning")
def test_learned_delays_remain_in_their_range() -> None:
    layer = Delay(torch.tensor([1.0, 1.0]), max_delay=3, learn=True)
    assert isinstance(layer.delay, nn.Parameter)
    layer.delay.data = torch.tensor([-1.0, 9.0])
    x = draw(5, 2).float()
    assert torch.equal(layer(x), delay_by_hand(x, torch.tensor([0.0, 3.0])))


@pytest.mark.parametrize("interpolation", ["triangle", "gaussian"])
def test_wide_delays_equal_their_formulas(interpolation: str) -> None:
    """Compares outputs in training with the formulas. In evaluation, delays are rounded to whole steps."""
    delay = torch.tensor([0.3, 1.6, 3.7], dtype=torch.float64)
    layer = Delay(delay, max_delay=4, learn=True, interpolation=interpolation, width=1.5)
    x = draw(9, 2, 3)
    steps = torch.arange(5, dtype=torch.float64).unsqueeze(1) - delay
    if interpolation == "triangle":
        weights = (1.5 - steps.abs()).clamp(min=0) / 1.5**2
    else:
        weights = torch.softmax(-(steps**2) / (2 * 1.5**2), 0)
    padded = torch.cat([x.new_zeros(4, 2, 3), x])
    expected = torch.stack([(padded[t : t + 5].flip(0) * weights.unsqueeze(1)).sum(0) for t in range(9)])
    torch.testing.assert_close(layer(x), expected)
    layer.reset()
    sequence = layer(x)
    layer.reset()
    assert torch.equal(torch.cat([layer(part) for part in x.split(2)]), sequence)
    layer.reset()
    assert torch.equal(layer.eval()(x), delay_by_hand(x, delay.round()))
    layer.train()

    def run(x: Tensor, delay: Tensor) -> Tensor:
        layer.reset()
        out = torch.func.functional_call(layer, {"delay": delay}, (x,))
        assert isinstance(out, Tensor)
        return out

    assert torch.autograd.gradcheck(run, (x.requires_grad_(), delay.clone().requires_grad_()))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Delay(2),
        lambda: Delay(1.5),
        lambda: Delay(torch.tensor([0.5, 1.0, 2.0]), max_delay=3, learn=True),
        lambda: Delay(torch.tensor([0.5, 1.0, 2.0]), interpolation="gaussian"),
    ],
    ids=["whole", "fraction", "learned", "gaussian"],
)
# The last inputs are stored for the next call.
@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")
def test_delays_are_exported_for_any_number_of_steps(make: Callable[[], Delay]) -> None:
    layer, x = make(), draw(12, 2, 3).float()
    program = torch.export.export(layer, (x[:7],), dynamic_shapes=({0: torch.export.Dim("T", min=2)},)).module()
    for steps in (3, 7, 12):
        layer.reset()
        assert torch.equal(program(x[:steps]), layer(x[:steps]))


def test_a_learned_delay_converges_to_the_target() -> None:
    """Trains on the outputs of a delay of 2.4 until the learned delay is close to 2.4."""
    x = torch.sin(torch.linspace(0, 12, 60, dtype=torch.float64)).unsqueeze(1)
    target = Delay(2.4)(x)
    layer = Delay(torch.tensor(1.0, dtype=torch.float64), max_delay=5, learn=True)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    for _ in range(150):
        layer.reset()
        optimizer.zero_grad()
        (layer(x) - target).square().mean().backward()
        optimizer.step()
    assert float(torch.as_tensor(layer.delay).detach()) == pytest.approx(2.4, abs=0.02)


@pytest.mark.parametrize("make", [lambda: Delay(3), lambda: Delay(1.5), lambda: Delay(torch.tensor([0.5, 2.0, 3.0]))])
def test_delays_continue_from_call_to_call(make: Callable[[], Delay]) -> None:
    layer, x = make(), draw(7, 2, 3).float()
    expected = layer(x)
    layer.reset()
    assert torch.equal(torch.cat([layer(part) for part in x.split(2)]), expected)
    functional.reset_net(layer)
    functional.set_step_mode(layer, "s")
    assert torch.equal(torch.stack([layer(step) for step in x]), expected)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x[0]), layer(x[0]))
    with pytest.raises(StateError, match=r"Call reset\(\) between batches"):
        layer(x[0, :1])


def test_delays_out_of_range_are_refused() -> None:
    with pytest.raises(ParameterError, match="delay is -1"):
        Delay(-1)
    with pytest.raises(ParameterError, match="delay is 4, above max_delay=3"):
        Delay(torch.tensor([1.0, 4.0]), max_delay=3)


def test_states_of_layers_are_states_of_the_network() -> None:
    net = nn.Sequential(Delay(2), nn.Linear(3, 3), IF(), SharedDropout(0.5))
    x = draw(4, 2, 3).float()
    net(x)
    states = functional.get_states(net)
    assert {name: len(values) for name, values in states.items()} == {"0": 1, "2": 1, "3": 1}
    expected = net(x)
    functional.set_states(net, states)
    assert torch.equal(net(x), expected)
    functional.detach_net(net)
    functional.reset_net(net)
    assert all(not values for values in functional.get_states(net).values())


@pytest.mark.parametrize("channels", [False, True])
def test_dropout_drops_equal_elements_at_every_step(channels: bool) -> None:
    torch.manual_seed(0)
    layer = SharedDropout(0.4, channels=channels)
    x = torch.ones(5, 8, 20, 4, 4)
    first = layer(x)
    assert torch.equal(first, first[:1].expand_as(first))
    assert first.unique().tolist() == pytest.approx([0.0, 1 / 0.6])
    assert (first == 0).float().mean().item() == pytest.approx(0.4, abs=0.2 if channels else 0.05)
    if channels:
        assert torch.equal(first, first[..., :1, :1].expand_as(first))
    assert torch.equal(layer(x), first)
    layer.step_mode = "s"
    assert torch.equal(layer(x[0]), first[0])
    layer.step_mode = "m"
    with pytest.raises(StateError, match="the mask has shape"):
        layer(x[:, :1])
    layer.reset()
    assert not torch.equal(layer(x), first)
    layer.eval()
    assert layer(x) is x
    with pytest.raises(ParameterError, match="p is 1"):
        SharedDropout(1.0)


@pytest.mark.long(all_but=["<lambda>0", "<lambda>3", "<lambda>4"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Delay(1.5),
        lambda: Delay(torch.tensor([0.5, 1.0, 2.0]), learn=True),
        lambda: SharedDropout(0.3),
        lambda: SlidingPSN(3),
        lambda: StochasticLIF(),
    ],
)
def test_compiled_layers_equal_eager_layers(make: Callable[[], nn.Module]) -> None:
    layer, x = make(), draw(5, 2, 3).float()
    torch.manual_seed(0)
    expected = layer(x)
    functional.reset_net(layer)
    torch.manual_seed(0)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)


NORMS = [
    (ThresholdDependentBatchNorm1d, nn.BatchNorm1d, (6, 5, 3)),
    (ThresholdDependentBatchNorm1d, nn.BatchNorm1d, (6, 5, 3, 4)),
    (ThresholdDependentBatchNorm2d, nn.BatchNorm2d, (6, 5, 3, 4, 2)),
    (ThresholdDependentBatchNorm3d, nn.BatchNorm3d, (6, 5, 3, 4, 2, 2)),
]


@pytest.mark.parametrize(("kind", "plain", "shape"), NORMS)
def test_tdbn_scales_its_input_to_the_threshold(
    kind: Callable[..., OverTime], plain: Callable[..., nn.Module], shape: tuple[int, ...]
) -> None:
    layer = kind(3, alpha=0.5, v_threshold=0.8, momentum=0.3).double()
    x = 7 * draw(*shape) + 3
    y = layer(x)
    dims = [d for d in range(len(shape)) if d != 2]
    torch.testing.assert_close(y.mean(dims), torch.zeros(3).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(y.std(dims, unbiased=False), torch.full((3,), 0.4).double(), atol=1e-3, rtol=0)
    reference = plain(3, momentum=0.3).double()
    torch.testing.assert_close(y, 0.4 * reference(x.flatten(0, 1)).view(x.shape))
    layer.eval()
    reference.eval()
    torch.testing.assert_close(layer(x), 0.4 * reference(x.flatten(0, 1)).view(x.shape))
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(layer)
    assert isinstance(synced[0], nn.SyncBatchNorm)
    assert synced[0].weight.tolist() == pytest.approx([0.4] * 3)
    with pytest.raises(ParameterError, match="v_threshold is 0"):
        kind(3, v_threshold=0.0)


@pytest.mark.long(all_but=["and", "iand"])
@pytest.mark.parametrize("connect", ["add", "and", "iand"])
def test_sew_blocks_connect_spikes(connect: str) -> None:
    torch.manual_seed(0)
    block = SEWBlock(4, 4, IF, connect=connect)
    x = (draw(5, 2, 4, 6, 6) > 0).float()
    branch = block.branch(x)
    functional.reset_net(block)
    expected = {"add": branch + x, "and": branch * x, "iand": (1 - branch) * x}[connect]
    assert torch.equal(block(x), expected)
    assert 0.01 < branch.mean() < 0.99
    with pytest.raises(UnknownNameError, match="connect"):
        SEWBlock(4, 4, IF, connect="or")


def test_a_sew_block_with_a_silent_branch_is_the_identity() -> None:
    for connect in ("add", "iand"):
        block = SEWBlock(3, 3, lambda: IF(v_threshold=1e6), connect=connect)
        x = (draw(4, 2, 3, 5, 5) > 0).float()
        assert torch.equal(block(x), x)


@pytest.mark.long(all_but=["MSBlock"])
@pytest.mark.parametrize("kind", [SEWBlock, MSBlock])
def test_blocks_change_shapes_and_have_gradients(kind: type[SEWBlock] | type[MSBlock]) -> None:
    block = kind(3, 8, lambda: LIF(v_threshold=0.1), stride=2)
    x = draw(4, 2, 3, 9, 9).float().requires_grad_()
    y = block(x)
    assert y.shape == (4, 2, 8, 5, 5)
    y.sum().backward()
    assert x.grad is not None
    assert all(p.grad is not None for p in block.parameters())
    neurons = [m for m in block.modules() if isinstance(m, LIF)]
    assert len(neurons) == (3 if kind is SEWBlock else 2)


def test_ms_blocks_add_the_branch_to_membranes() -> None:
    torch.manual_seed(0)
    block = MSBlock(3, 3, IF)
    x = draw(4, 2, 3, 5, 5).float()
    branch = block.branch(x)
    functional.reset_net(block)
    assert torch.equal(block(x), branch + x)
    convolved: list[Tensor] = []
    for module in block.branch.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(lambda module, inputs: convolved.append(inputs[0]))
    functional.reset_net(block)
    block(3 * x)
    assert len(convolved) == 2
    assert all(set(inputs_of_layer.unique().tolist()) <= {0.0, 1.0} for inputs_of_layer in convolved)
