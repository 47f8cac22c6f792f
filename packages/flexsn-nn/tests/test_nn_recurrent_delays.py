"""Delays in recurrent layers: comparison with one product per delay, gradients, and other features of the layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsn_nn import ALIF, LI, LIF, ParameterError, Recurrent, UnknownNameError, functional
from flexsn_nn.errors import RangeWarning
from flexsn_nn.layer import Delay

# A step has 15 elements, which is not a multiple of a block of the smallest kernels.
T, B, N = 12, 3, 5
X = torch.randn(T, B, N, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
MIXED = torch.tensor([0.0, 1.0, 2.75, 3.0, 1.5], dtype=torch.float64)
# These delays are not whole steps, because linear interpolation has kinks at whole steps.
LEARNED = torch.tensor([0.1, 1.2, 2.75, 3.1, 1.5], dtype=torch.float64)
DELAYS: dict[str, Callable[[], Any]] = {
    "a number": lambda: 2,
    "a fraction": lambda: 1.5,
    "a tensor": lambda: MIXED,
    "linear": lambda: Delay(LEARNED, max_delay=4, learn=True),
    "triangle": lambda: Delay(LEARNED, max_delay=4, learn=True, interpolation="triangle", width=2.5),
    "gaussian": lambda: Delay(LEARNED, max_delay=4, learn=True, interpolation="gaussian", width=0.8),
}
each = pytest.mark.parametrize("name", DELAYS)
BACKENDS = ["torch", "hop", "cpp"]


def make_layer(name: str, neuron: Any = None, **options: Any) -> Recurrent:
    torch.manual_seed(0)
    return Recurrent(neuron or LIF(), N, delay=DELAYS[name](), **options).double()


def compute_taps(delay: Delay) -> Tensor:
    """Returns the weights `[N, L]` of the outputs from `1 + l` steps ago."""
    d = torch.as_tensor(delay.delay, dtype=torch.float64).expand(N).unsqueeze(1)
    steps = torch.arange(delay.max_delay + 1, dtype=torch.float64)
    if delay.interpolation == "gaussian":
        weights = torch.exp(-((steps - d) ** 2) / (2 * delay.width**2))
        return weights / weights.sum(1, keepdim=True)
    width = delay.width if delay.interpolation == "triangle" else 1.0
    return (width - (steps - d).abs()).clamp(min=0) / width**2


def run_with_buffers(layer: Recurrent, x: Tensor) -> Tensor:
    """Computes the published form, in which each step adds one product per delay to the currents of later steps."""
    assert layer.delay is not None
    weights = compute_taps(layer.delay)
    currents = [torch.zeros(B, N, dtype=x.dtype)] * weights.shape[1]
    states = layer.neuron.init_states(layer.neuron.num_states, "m", x)
    outputs = []
    for step in x:
        output, *states = layer.neuron.core(step + currents[0], *states)
        currents = [*currents[1:], torch.zeros_like(currents[0])]
        currents = [current + (output * w) @ layer.V.T for current, w in zip(currents, weights.T, strict=True)]
        outputs.append(output)
    return torch.stack(outputs)


def compute_gradients(layer: Recurrent, output: Tensor) -> list[Tensor]:
    weights = torch.arange(output.numel(), dtype=output.dtype, device=output.device).cos().view(output.shape)
    leaves = [p for p in layer.parameters() if p.requires_grad]
    return list(torch.autograd.grad((output * weights).sum(), leaves))


@pytest.mark.parametrize("backend", BACKENDS)
@each
@pytest.mark.long(all_but=["*-torch", "linear-hop", "linear-cpp"])
def test_one_product_equals_one_product_for_each_delay(name: str, backend: str) -> None:
    layer = make_layer(name, backend=backend)
    output, expected = layer(X), run_with_buffers(layer, X)
    assert 0.05 < expected.mean() < 0.95
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
    for ours, theirs in zip(compute_gradients(layer, output), compute_gradients(layer, expected), strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["linear", "triangle", "gaussian"])
@pytest.mark.long(all_but=["*-torch"])
def test_gradients_of_delays_pass_gradcheck(name: str, backend: str) -> None:
    layer = make_layer(name, LI(tau=3.0), backend=backend)
    assert layer.delay is not None
    parameters = {key: value.detach().clone().requires_grad_() for key, value in layer.named_parameters()}

    def run(x: Tensor, *values: Tensor) -> Any:
        layer.reset()
        return torch.func.functional_call(layer, dict(zip(parameters, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (X[:5, :2].clone().requires_grad_(), *parameters.values()))


def test_a_layer_without_a_delay_is_unchanged() -> None:
    plain = Recurrent(LIF(), N, backend="torch").double()
    zero = Recurrent(LIF(), N, delay=0, backend="torch").double()
    zero.recurrent.load_state_dict(plain.recurrent.state_dict())
    assert torch.equal(zero(X), plain(X))
    assert zero.state_names == ("s", "v")


@pytest.mark.parametrize("kind", ["triangle", "gaussian"])
@pytest.mark.parametrize("backend", ["torch", "cpp"])
@pytest.mark.long(all_but=["torch-*"])
def test_delays_in_evaluation_are_rounded(kind: str, backend: str) -> None:
    layer = make_layer(kind, backend=backend)
    rounded = Recurrent(LIF(), N, delay=LEARNED.round(), backend=backend).double()
    rounded.recurrent.load_state_dict(layer.recurrent.state_dict())
    training = layer(X)
    layer.reset()
    assert torch.equal(layer.eval()(X), rounded(X))
    layer.reset()
    assert torch.equal(layer.train()(X), training)


@pytest.mark.parametrize("backend", ["torch", "cpp"])
@pytest.mark.long(all_but=["torch"])
def test_an_assigned_width_is_used_by_the_next_call(backend: str) -> None:
    layer = make_layer("gaussian", LI(tau=3.0), backend=backend)
    assert layer.delay is not None
    wide_output = layer(X)
    layer.delay.width = 0.01  # type: ignore[assignment]  # the buffer receives the value
    layer.reset()
    narrow_output = layer(X)
    assert not torch.equal(wide_output, narrow_output)
    unambiguous = LEARNED.frac() != 0.5  # Exactly between two steps, the rounding decides which of them has the weight.
    torch.testing.assert_close(
        compute_taps(layer.delay)[unambiguous].sum(1), torch.ones(int(unambiguous.sum()), dtype=torch.float64)
    )
    assert narrow_output.isfinite().all()


@each
def test_sequences_steps_and_chunks_have_equal_results(name: str) -> None:
    layer = make_layer(name, store_state_seqs=True, backend="torch")
    expected = layer(X)
    assert layer.delay is not None
    count = 1 + layer.delay.max_delay
    assert layer.state_names[:count] == ("s", *[f"s_{i}" for i in range(1, count)])
    for i in range(count):
        assert torch.equal(layer.states[i], expected[T - 1 - i])
    layer.reset()
    assert torch.equal(torch.cat([layer(part) for part in X.split(4)]), expected)
    functional.reset_net(layer)
    assert layer.states == []
    functional.set_step_mode(layer, "s")
    assert torch.equal(torch.stack([layer(x) for x in X]), expected)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(X[0]), layer(X[0]))
    assert functional.get_states(nn.Sequential(layer)).keys() == {"0"}


@pytest.mark.parametrize("backend", ["torch", "cpp"])
@pytest.mark.long(all_but=["torch"])
def test_lengths_and_resets_apply_to_delayed_outputs(backend: str) -> None:
    net = nn.Sequential(make_layer("linear", backend=backend))
    lengths = torch.tensor([12, 5, 0])
    output = functional.run(net, X, lengths=lengths)
    for b, end in enumerate(lengths.tolist()):
        functional.reset_net(net)
        assert torch.equal(output[:end, b], net(X[:end])[:, b] if end else output[:0, b])
        assert not output[end:, b].any()
    functional.reset_net(net)
    resets = torch.zeros(T, B, dtype=torch.bool)
    resets[5] = True
    output_with_resets = functional.run(net, X, resets=resets)
    functional.reset_net(net)
    first = net(X[:5])
    functional.reset_net(net)
    assert torch.equal(output_with_resets, torch.cat([first, net(X[5:])]))


def test_delays_apply_to_other_neurons_and_custom_weights() -> None:
    layer = Recurrent(ALIF(tau_a=4.0), N, all_to_all=False, V=-0.5, delay=3, backend="torch").double()
    assert layer.state_names == ("s", "s_1", "s_2", "s_3", "v", "a")
    torch.testing.assert_close(layer(X)[:4], ALIF(tau_a=4.0, backend="torch")(X)[:4])
    low_rank = nn.Sequential(nn.Linear(N, 2), nn.Linear(2, N)).double()
    assert Recurrent(LIF(), recurrent=low_rank, delay=1.5, backend="torch").double()(X).shape == X.shape


def test_checkpoints_contain_delays_and_width() -> None:
    layer = make_layer("gaussian", backend="torch")
    assert set(layer.state_dict()) == {"recurrent.weight", "delay.delay", "delay.width"}
    assert layer.delay is not None
    layer.delay.width = 0.25  # type: ignore[assignment]  # the buffer receives the value
    twin = make_layer("gaussian", backend="torch")
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(layer(X), twin(X))


def test_delays_out_of_range_cause_a_warning() -> None:
    layer = make_layer("linear", backend="torch")
    assert layer.delay is not None
    with torch.no_grad():
        layer.delay.delay.add_(9.0)  # type: ignore[union-attr]
    with pytest.warns(RangeWarning, match=r"Delay has left its range.*at most 4"):
        layer(X)
    assert "left its range" in layer.explain()


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ParameterError, match="delay is -1; it must be at least 0"):
        Recurrent(LIF(), N, delay=-1)
    with pytest.raises(UnknownNameError, match="Did you mean 'gaussian'"):
        Delay(1, interpolation="gauss")
    with pytest.raises(ParameterError, match="'linear', which has no width"):
        Delay(1, width=2.0)
    with pytest.raises(ParameterError, match="width is 0; it must be above 0"):
        Delay(1, interpolation="gaussian", width=0)
    layer = Delay(1)
    with pytest.raises(ParameterError, match="'linear', which has no width"):
        layer.width = 2.0  # type: ignore[assignment]  # the line under test


MANY = [0.1, 14.2, 2.75, 18.1, 9.5]


def make_long_delays(kind: str, device: str = "cpu") -> tuple[Recurrent, Recurrent, Tensor]:
    """Returns two equal layers with 20 past steps, one in Triton and one as a loop, and an input."""
    options: dict[str, Any] = {} if kind == "linear" else {"interpolation": kind, "width": 2.5}
    torch.manual_seed(0)
    layer = Recurrent(LIF(), N, delay=Delay(torch.tensor(MANY), max_delay=19, learn=True, **options), backend="triton")
    with torch.no_grad():  # Sums of few multiples of a quarter are exact in any order.
        layer.recurrent.weight.copy_((8 * layer.V).round() / 4)  # type: ignore[operator]
    loop = copy.deepcopy(layer)
    loop.backend = "torch"
    x = torch.randn(24, B, N, generator=torch.Generator().manual_seed(1)) + 0.5
    return layer.to(device), loop.to(device), x.to(device)


def check_one_launch(kind: str, device: str) -> None:
    layer, loop, x = make_long_delays(kind, device)
    output, expected = layer(x), loop(x)
    assert torch.equal(output, expected)
    for ours, theirs in zip(compute_gradients(layer, output), compute_gradients(loop, expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    lines = [line for line in layer.explain().splitlines() if "the last" in line]
    assert [line.split(": ")[1].split(",")[0] for line in lines] == ["one launch for all steps"] * 2


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kind", ["linear", "triangle"])
@pytest.mark.long(all_but=["linear"])
def test_layers_with_many_delays_run_in_one_launch(kind: str) -> None:
    check_one_launch(kind, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["linear", "triangle"])
def test_layers_with_many_delays_run_in_one_launch_on_a_gpu(kind: str) -> None:
    check_one_launch(kind, "cuda")


@pytest.mark.gpu
@each
def test_delays_on_a_gpu_equal_the_loop(name: str) -> None:
    layer = make_layer(name, backend="triton").float().cuda()
    loop = copy.deepcopy(layer)
    loop.backend = "torch"
    x = X.float().cuda()
    with torch.no_grad():  # Sums of few multiples of a quarter are exact in any order.
        for module in (layer, loop):
            module.recurrent.weight.copy_((8 * make_layer(name).V).round() / 4)  # type: ignore[operator]
    output, expected = layer(x), loop(x)
    if layer.delay is not None and layer.delay.interpolation != "gaussian":
        assert torch.equal(output, expected)
    for ours, theirs in zip(compute_gradients(layer, output), compute_gradients(loop, expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
