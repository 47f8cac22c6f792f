"""Tests `convert` with snnTorch installed: a loop over time returns equal bits before and after the conversion."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsn_nn import ConversionError, FlexSN, functional
from flexsn_nn.convert import Conversion, convert

snn: Any = pytest.importorskip("snntorch")
T, B, N = 9, 3, 6
Run = Callable[[nn.Module, Tensor], list[Tensor]]


class Loop(nn.Module):
    """A network whose `forward` loops over time and passes the states of its neurons from step to step."""

    def __init__(self, *neurons: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(N, N) for _ in neurons)
        self.neurons = nn.ModuleList(neurons)

    def forward(self, x: Tensor) -> list[Tensor]:
        neurons: list[Any] = list(self.neurons)
        states: list[Any] = [neuron.reset_mem() for neuron in neurons]
        recorded: list[list[Tensor]] = []
        for step in x:
            row: list[Tensor] = []
            for i, (layer, neuron) in enumerate(zip(self.layers, neurons, strict=True)):
                arguments = states[i] if isinstance(states[i], tuple) else (states[i],)
                step, *new_states = neuron(2 * layer(step), *arguments)
                states[i] = tuple(new_states)
                row += [step, *new_states]
            recorded.append(row)
        return [torch.stack(column) for column in zip(*recorded, strict=True)]


def run_steps(net: nn.Module, x: Tensor) -> list[Tensor]:
    """Calls, once for each step, a network that stores its states."""
    outputs = [net(step) for step in x]
    if isinstance(outputs[0], tuple):
        return [torch.stack(column) for column in zip(*outputs, strict=True)]
    return [torch.stack(outputs)]


def run_sequence(net: nn.Module, x: Tensor) -> list[Tensor]:
    outputs = net(x)
    return list(outputs) if isinstance(outputs, list | tuple) else [outputs]


class Amplify(nn.Module):
    """A layer that amplifies its input, so that the next neuron fires."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * x


def make_hidden(make: Callable[..., nn.Module], **last: Any) -> nn.Module:
    return nn.Sequential(
        nn.Linear(N, N), Amplify(), make(init_hidden=True), nn.Linear(N, N), Amplify(), make(init_hidden=True, **last)
    )


def make_convolutional() -> nn.Module:
    beta = torch.linspace(0.2, 0.9, 2).reshape(2, 1, 1)
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 2, 3, padding=1),
        nn.BatchNorm2d(2),
        snn.Leaky(beta=beta, init_hidden=True, reset_mechanism="zero", learn_beta=True),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.Flatten(),
        nn.Linear(4, N),
        Amplify(),
        snn.Leaky(beta=0.5, threshold=1, init_hidden=True, output=True),
    )


def clip_gradient(x: Tensor, grad: Tensor, spikes: Tensor) -> Tensor:
    return grad / (5 * x.abs() + 1) ** 2


surrogates: Any = snn.surrogate
MODELS: dict[str, tuple[Callable[[], nn.Module], Run]] = {
    "leaky_hidden": (lambda: make_hidden(lambda **o: snn.Leaky(0.9, **o)), run_steps),
    "leaky_output": (
        lambda: make_hidden(lambda **o: snn.Leaky(0.7, spike_grad=surrogates.sigmoid(slope=5), **o), output=True),
        run_steps,
    ),
    "leaky_learned": (
        lambda: Loop(
            snn.Leaky(0.6, learn_beta=True, learn_threshold=True),
            snn.Leaky(torch.rand(N), threshold=torch.rand(N) + 0.5, learn_beta=True, reset_mechanism="zero"),
        ),
        run_sequence,
    ),
    "leaky_out_of_range": (lambda: Loop(snn.Leaky(1.3, learn_beta=True), snn.Leaky(-0.1)), run_sequence),
    "leaky_without_reset": (
        lambda: Loop(
            snn.Leaky(0.3, reset_mechanism="none", spike_grad=surrogates.fast_sigmoid(10)),
            snn.Leaky(0.5, spike_grad=surrogates.custom_surrogate(clip_gradient)),
        ),
        run_sequence,
    ),
    "leaky_graded": (
        lambda: Loop(
            snn.Leaky(0.5, graded_spikes_factor=0.7, learn_graded_spikes_factor=True),
            snn.Leaky(0.5, graded_spikes_factor=1.5, reset_delay=False),
        ),
        run_sequence,
    ),
    "leaky_at_once": (
        lambda: Loop(
            snn.Leaky(0.8, reset_delay=False, learn_threshold=True),
            snn.Leaky(0.8, reset_delay=False, reset_mechanism="zero", spike_grad=surrogates.SFS(5, -1)),
        ),
        run_sequence,
    ),
    "synaptic": (
        lambda: Loop(
            snn.Synaptic(0.5, 0.8, learn_alpha=True, learn_beta=True),
            snn.Synaptic(torch.rand(N), 0.6, reset_mechanism="zero", reset_delay=False),
        ),
        run_sequence,
    ),
    "synaptic_hidden": (
        lambda: make_hidden(lambda **o: snn.Synaptic(0.3, 0.6, reset_mechanism="none", **o), output=True),
        run_steps,
    ),
    "rleaky": (
        lambda: Loop(
            snn.RLeaky(0.7, linear_features=N, learn_beta=True, learn_threshold=True),
            snn.RLeaky(torch.rand(N), all_to_all=False, V=torch.rand(N) - 0.5, reset_mechanism="zero"),
        ),
        run_sequence,
    ),
    "rleaky_hidden": (
        lambda: make_hidden(lambda **o: snn.RLeaky(0.6, V=-0.5, all_to_all=False, reset_delay=False, **o), output=True),
        run_steps,
    ),
    "rsynaptic": (
        lambda: Loop(
            snn.RSynaptic(0.4, 0.7, linear_features=N, learn_alpha=True),
            snn.RSynaptic(torch.rand(N), 0.6, all_to_all=False, V=0.3, learn_recurrent=False, reset_mechanism="none"),
        ),
        run_sequence,
    ),
    "rsynaptic_hidden": (
        lambda: make_hidden(
            lambda **o: snn.RSynaptic(0.5, 0.8, linear_features=N, threshold=0.4, reset_mechanism="zero", **o)
        ),
        run_steps,
    ),
    "alpha": (
        lambda: Loop(
            snn.Alpha(0.9, 0.7, threshold=0.3),
            snn.Alpha(0.8, 0.5, threshold=0.2, reset_mechanism="subtract", learn_threshold=True),
        ),
        run_sequence,
    ),
    "alpha_hidden": (lambda: make_hidden(lambda **o: snn.Alpha(0.8, 0.6, threshold=0.2, **o), output=True), run_steps),
    "lapicque": (
        lambda: Loop(snn.Lapicque(R=2.0, C=1.5), snn.Lapicque(beta=0.6, reset_mechanism="zero")),
        run_sequence,
    ),
    "lapicque_hidden": (
        lambda: make_hidden(lambda **o: snn.Lapicque(beta=0.7, C=0.8, threshold=0.5, reset_mechanism="none", **o)),
        run_steps,
    ),
    "conv": (make_convolutional, run_steps),
    "without_gradient": (lambda: make_hidden(lambda **o: snn.Leaky(0.9, surrogate_disable=True, **o)), run_steps),
}
EACH = pytest.mark.parametrize("name", MODELS)


def build(name: str) -> tuple[nn.Module, Conversion, Run]:
    """Returns the original network, its converted copy, and the function that runs both."""
    torch.manual_seed(3)
    make, run = MODELS[name]
    original = make()
    conversion = convert(copy.deepcopy(original), backend="torch")  # Kernels compute exp differently.
    assert conversion.left == []
    assert len(conversion.converted) == 2
    return original, conversion, run


def draw(seed: int = 0) -> Tensor:
    return torch.randn(T, B, N, generator=torch.Generator().manual_seed(seed)) + 0.3


def reset(original: nn.Module, converted: nn.Module) -> None:
    for module in original.modules():
        if isinstance(module, snn.SpikingNeuron):
            module.reset_mem()
            module.detach(*(b for b in module.buffers() if b.requires_grad))
    functional.reset_net(converted)


def compute_gradients(net: nn.Module, outputs: list[Tensor], x: Tensor) -> dict[str, Tensor]:
    loss = torch.zeros(())
    for out in outputs:
        loss = loss + (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum()
    leaves = {"x": x, **{name: p for name, p in net.named_parameters() if p.requires_grad}}
    if not loss.requires_grad:  # The spikes have no gradient with surrogate_disable=True.
        return {}
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True))


@pytest.mark.long(
    all_but=[
        "True-without_gradient",
        "False-leaky_output",
        "True-leaky_hidden",
        "True-lapicque_hidden",
        "False-leaky_out_of_range",
        "True-leaky_graded",
        "True-rleaky_hidden",
        "True-leaky_without_reset",
        "True-rsynaptic_hidden",
        "False-rsynaptic",
        "False-leaky_learned",
        "True-rleaky",
        "False-leaky_at_once",
        "True-synaptic_hidden",
        "True-alpha_hidden",
        "True-alpha",
        "True-lapicque",
        "True-conv",
        "True-synaptic",
    ]
)
@pytest.mark.filterwarnings("ignore::flexsn_nn.errors.RangeWarning")
@EACH
@pytest.mark.parametrize("training", [True, False])
def test_outputs_and_gradients_equal_those_of_snntorch(name: str, training: bool) -> None:
    original, conversion, run = build(name)
    converted = conversion.model
    original.train(training)
    converted.train(training)
    for seed in (0, 1):
        results = []
        for net in (original, converted):
            x = draw(seed).requires_grad_()
            outputs_of_net = run(net, x)
            results.append((outputs_of_net, compute_gradients(net, outputs_of_net, x)))
        (expected, expected_gradients), (outputs, gradients) = results
        assert 0.02 < (expected[0] > 0).float().mean() < 0.98, "some neurons should fire and some should not"
        for a, b in zip(outputs, expected, strict=True):
            assert torch.equal(a, b.to(a.dtype))
        for key, gradient in expected_gradients.items():
            converted_key = conversion.moved[key].key if key in conversion.moved else key
            converted_gradient = gradients[converted_key]
            if name == "leaky_out_of_range" and key.endswith("beta"):
                assert not gradient.any(), (
                    "snnTorch clamps beta without a gradient; the converted neuron gives beta a gradient"
                )
                assert converted_gradient.any()
                continue
            torch.testing.assert_close(
                converted_gradient, gradient.reshape(converted_gradient.shape), rtol=1e-4, atol=1e-4
            )
        reset(original, converted)


@pytest.mark.filterwarnings("ignore::flexsn_nn.errors.RangeWarning")
@EACH
def test_checkpoints_of_snntorch_load(name: str) -> None:
    """Checks a checkpoint of the original network after its weights and constants have changed."""
    original, conversion, run = build(name)
    generator = torch.Generator().manual_seed(7)
    changed = {
        key: value if not value.is_floating_point() else value + 0.1 * torch.rand(value.shape, generator=generator)
        for key, value in original.state_dict().items()
    }
    original.load_state_dict(changed)
    loaded = conversion.load_state_dict(changed)
    assert loaded.missing == loaded.unexpected == ()
    assert set(loaded.dropped) == {key for key in changed if key.endswith("reset_mechanism_val")}
    original.eval()
    conversion.model.eval()
    with torch.no_grad():
        for a, b in zip(run(conversion.model, draw()), run(original, draw()), strict=True):
            assert torch.equal(a, b)


@EACH
def test_a_sequence_equals_the_loop(name: str) -> None:
    """Checks step mode "m", which returns the spikes of all steps, and also the states if the neuron returns states."""
    original, conversion, run = build(name)
    if run is run_sequence or name == "conv":
        return  # A `Loop` loops in `forward`, and a convolution would need OverTime.
    expected = run(original, draw())
    functional.set_step_mode(conversion.model, "m")
    outputs = run_sequence(conversion.model, draw())
    assert len(outputs) == len(expected)
    for a, b in zip(outputs, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["leaky_hidden", "synaptic", "alpha", "lapicque_hidden", "leaky_graded"])
def test_copies_and_pickles_return_equal_outputs(name: str) -> None:
    _, conversion, run = build(name)
    expected = run(conversion.model, draw())
    functional.reset_net(conversion.model)
    for twin in (copy.deepcopy(conversion.model), pickle.loads(pickle.dumps(conversion.model))):
        for a, b in zip(run(twin, draw()), expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.long(all_but=["synaptic"])
@pytest.mark.parametrize("name", ["leaky_graded", "synaptic", "alpha", "lapicque", "leaky_at_once"])
def test_kernels_equal_the_loop(name: str, interpreted: None) -> None:
    """Checks kernels over the whole sequence against snnTorch's loop."""
    original, conversion, _ = build(name)
    assert isinstance(original, Loop)
    assert isinstance(conversion.model, Loop)
    x = draw()
    pairs: list[tuple[Any, Any]] = list(zip(original.neurons, conversion.model.neurons, strict=True))
    for theirs, ours in pairs:
        assert isinstance(ours, FlexSN)
        ours.step_mode = "m"
        ours.backend = "triton"
        states = theirs.reset_mem()
        states = states if isinstance(states, tuple) else (states,)
        rows = []
        for step in x:
            row = theirs(step, *states)
            states = row[1:]
            rows.append(row)
        for a, column in zip(ours(x), zip(*rows, strict=True), strict=True):
            torch.testing.assert_close(a, torch.stack(column), rtol=1e-6, atol=1e-6)


def test_recurrent_neurons_equal_those_of_snntorch() -> None:
    """Checks a convolution, states as keyword arguments, attributes, and a `reset_delay` that snnTorch ignores."""
    torch.manual_seed(0)
    theirs = snn.RLeaky(0.5, conv2d_channels=2, kernel_size=3)
    ours: Any = convert(copy.deepcopy(theirs), backend="torch").model
    x = torch.randn(4, 1, 2, 5, 5) + 0.3
    (spk, mem), (spk_ours, mem_ours) = theirs.reset_mem(), ours.reset_mem()
    for step in x:
        spk, mem = theirs(step, spk, mem)
        spk_ours, mem_ours = ours(step, spk=spk_ours, mem=mem_ours)
        assert torch.equal(spk_ours, spk)
        assert torch.equal(mem_ours, mem)
    assert torch.equal(ours.spk, theirs.spk)
    assert ours.recurrent.weight.shape == (2, 2, 3, 3)
    conversion = convert(snn.RSynaptic(0.5, 0.8, linear_features=N, reset_delay=False))
    assert "reset_delay=False is ignored" in str(conversion)
    learned = snn.RLeaky(0.5, linear_features=N)
    weight = learned.recurrent.weight
    assert convert(learned).model.V is weight


@pytest.mark.usefixtures("loops")
def test_states_are_passed_by_name_or_omitted() -> None:
    theirs = snn.Synaptic(0.5, 0.8)
    ours: Any = convert(snn.Synaptic(0.5, 0.8)).model
    x = draw()[0]
    syn, mem = torch.rand(B, N), torch.rand(B, N)
    calls: list[Callable[[Any], tuple[Tensor, ...]]] = [
        lambda neuron: neuron(x, syn, mem),
        lambda neuron: neuron(x, syn=syn, mem=mem),
        lambda neuron: neuron(x, mem=mem),
        lambda neuron: neuron(x),
        # The shape differs from that of the stored states, so the states start at zero.
        lambda neuron: neuron(x[:2]),
        lambda neuron: neuron(x, torch.zeros(0), mem),
    ]
    for call in calls:
        for a, b in zip(call(ours), call(theirs), strict=True):
            assert torch.equal(a, b)
    assert torch.equal(ours.mem, theirs.mem)
    assert torch.equal(ours.syn, theirs.syn)
    with pytest.raises(TypeError, match="unexpected argument 'volt'; the states are syn, mem"):
        ours(x, volt=mem)
    with pytest.raises(ValueError, match="got 3 states"):
        ours(x, syn, mem, mem)
    hidden: Any = convert(snn.Leaky(0.5, init_hidden=True)).model
    with pytest.raises(TypeError, match="with init_hidden=True, the neuron stores its states"):
        hidden(x, mem)
    assert hidden.mem.numel() == 0


@pytest.mark.usefixtures("loops")
def test_parameters_remain_the_objects_of_an_optimizer() -> None:
    net = Loop(snn.Leaky(0.6, learn_beta=True))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = {name: id(p) for name, p in net.named_parameters()}
    convert(net)
    assert {name: id(p) for name, p in net.named_parameters()} == before
    sum(net(draw())[1].flatten(), torch.zeros(())).backward()
    beta = net.get_parameter("neurons.0.beta").item()
    optimizer.step()
    assert net.get_parameter("neurons.0.beta").item() != beta


def make_derived(**options: Any) -> nn.Module:
    class Derived(snn.Leaky):  # type: ignore[misc]
        pass

    return Derived(0.5, **options)


@pytest.mark.filterwarnings("ignore:Inhibition is an unstable feature")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: snn.SLSTM(N, N), "a recurrent layer with internal weights"),
        (lambda: snn.SConv2dLSTM(1, 1, 3), "a recurrent layer with internal weights"),
        (lambda: snn.Leaky(0.5, inhibition=True), "only one neuron of a layer fire"),
        (lambda: snn.Leaky(0.5, state_quant=lambda x: x), "a function of the whole state"),
        (lambda: snn.Leaky(0.5, spike_grad=surrogates.SSO()), "draws random numbers"),
        (lambda: snn.DeltaLeaky(beta=0.5, init_hidden=True), "fires when its membrane changes"),
        (lambda: snn.LeakyParallel(N, N), "an nn.RNN with a mask"),
        (lambda: snn.StateLeaky(0.5, N), "a convolution over time"),
        (lambda: snn.LinearLeaky(0.5, N, N), "a convolution over time"),
        (make_derived, "derived from Leaky"),
    ],
)
def test_unconverted_modules_have_a_reason(make: Callable[[], nn.Module], reason: str) -> None:
    unconverted = make()
    net = nn.Sequential(snn.Leaky(0.5), unconverted)
    with pytest.raises(ConversionError, match="nothing was"):
        convert(net, strict=True)
    assert type(net[0]) is snn.Leaky
    conversion = convert(net)
    assert net[1] is unconverted
    assert [entry.name for entry in conversion.converted] == ["0"]
    (entry,) = conversion.left
    assert entry.name == "1"
    assert reason in entry.reason
    assert entry.reason in str(conversion)


def test_a_custom_spike_function_is_traced_unchanged() -> None:
    class Spike(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return (x > 0).to(x.dtype)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 0.5

    spike: Any = Spike.apply
    original = snn.Leaky(0.5, spike_grad=spike, init_hidden=True)
    conversion = convert(copy.deepcopy(original), backend="torch")
    assert any("traced unchanged" in difference for difference in conversion.converted[0].differences)
    x = draw()
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    for net, leaf in zip((original, conversion.model), leaves, strict=True):
        run_steps(net, leaf)[0].sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)


def test_a_learned_scalar_becomes_a_vector_and_remains_the_same_object() -> None:
    """Checks that learned scalars have a dimension, as `fully_shard` requires.

    Optimizers continue to work, and checkpoints load in both directions.
    """
    net = nn.Sequential(nn.Linear(N, N), snn.Leaky(beta=0.9, learn_beta=True, learn_threshold=True, init_hidden=True))
    original = copy.deepcopy(net)
    scalars = {name: scalar for name, scalar in net.named_parameters() if scalar.dim() == 0}
    assert set(scalars) == {"1.beta", "1.threshold"}
    for scalar in scalars.values():
        scalar.grad = torch.ones(())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    conversion = convert(net)
    optimizer.step()
    parameters = dict(conversion.model.named_parameters())
    for name, scalar in scalars.items():
        assert parameters[name] is scalar
        assert scalar.shape == (1,)
        assert conversion.moved[name].shape == (1,)
        assert scalar.item() != original.get_parameter(name).item()
    conversion.load_state_dict(original.state_dict())
    # The model itself also loads the checkpoint, without the report `conversion`.
    conversion.model.load_state_dict(original.state_dict(), strict=False)
    for name, scalar in scalars.items():
        assert scalar.item() == original.get_parameter(name).item()
        assert scalar.shape == (1,)
    optimizer.step()
    original.load_state_dict({name: conversion.model.state_dict()[name] for name in scalars}, strict=False)
    for name, scalar in scalars.items():
        assert original.get_parameter(name).shape == ()
        assert scalar.item() == original.get_parameter(name).item()


def test_a_refused_conversion_changes_no_shape() -> None:
    net = nn.Sequential(nn.Linear(N, N), snn.Leaky(beta=0.9, learn_beta=True), snn.SLSTM(N, N))
    with pytest.raises(ConversionError):
        convert(net, strict=True)
    assert [p.shape for name, p in net.named_parameters() if name.endswith(("1.beta", "1.w"))] == [()]
