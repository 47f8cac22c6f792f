"""Recurrent neurons: comparison with values by hand and with the inner neuron; torch's cells as step functions."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flexsn_nn import (
    ALIF,
    CLIF,
    CUBALIF,
    EIF,
    IF,
    ILIF,
    KLIF,
    LI,
    LIAF,
    LIF,
    PLIF,
    PSN,
    QIF,
    RALIF,
    RLIF,
    AdEx,
    Alpha,
    FlexSN,
    GatedLIF,
    InputShapeError,
    Izhikevich,
    Lapicque,
    Leaky,
    NonSpikingLIF,
    ParameterError,
    Recurrent,
    RefractoryLIF,
    RLeaky,
    RSynaptic,
    StochasticLIF,
    Synaptic,
    TernaryIF,
    TernaryLIF,
    functional,
    init,
)
from flexsn_nn.monitor import RateMonitor, SynapseMonitor
from flexsn_nn.neuron import Neuron

H = 6
X = torch.randn(9, 3, H, generator=torch.Generator().manual_seed(1)) + 0.6
LAYERS: dict[str, Callable[..., Neuron]] = {
    "Recurrent": lambda **o: Recurrent(LIF(), H, **o),
    "RLIF": lambda **o: RLIF(H, **o),
    "RALIF": lambda **o: RALIF(H, tau_a=5.0, all_to_all=False, V=-0.5, **o),
    "RLeaky": lambda **o: RLeaky(0.5, linear_features=H, **o),
    "RSynaptic": lambda **o: RSynaptic(0.5, 0.7, linear_features=H, **o),
}
each = pytest.mark.parametrize("name", LAYERS)


def make_layer(name: str, **options: Any) -> Neuron:
    torch.manual_seed(0)
    return LAYERS[name](backend="torch", **options)


def round_to_quarters(weight: Tensor) -> Tensor:
    """Rounds to multiples of a quarter. Sums of few of them are exact in any order."""
    return weight.copy_((8 * weight).round() / 4)


def test_the_feedback_is_the_product_of_the_previous_spikes() -> None:
    """Compares with values computed by hand: the second neuron only fires because the first one fired before."""
    layer = RLIF(2, tau=1.0, init=lambda w: w.copy_(torch.tensor([[0.0, 0.0], [1.5, 0.0]])), backend="torch")
    x = torch.zeros(4, 1, 2)
    x[0, 0, 0] = 1.0
    assert layer(x)[:, 0].tolist() == [[1, 0], [0, 1], [0, 0], [0, 0]]
    assert layer.V is layer.recurrent.weight


@pytest.mark.parametrize("all_to_all", [True, False])
def test_named_recurrent_neurons_equal_recurrent_around_the_neuron(all_to_all: bool) -> None:
    pairs: list[tuple[Neuron, Neuron]] = [
        (RLIF(H, tau=3.0, all_to_all=all_to_all, backend="torch"), LIF(tau=3.0, decay_input=False, backend="torch")),
        (
            RALIF(H, tau_a=4.0, beta=1.8, decay_input=True, all_to_all=all_to_all, backend="torch"),
            ALIF(tau_a=4.0, backend="torch"),
        ),
    ]
    for named, inner in pairs:
        around = Recurrent(inner, H, all_to_all)
        with torch.no_grad():
            round_to_quarters(named.V)
        around.recurrent.load_state_dict(named.recurrent.state_dict())
        assert torch.equal(named(X), around(X))
        assert named.state_names == around.state_names
        assert all(torch.equal(a, b) for a, b in zip(named.states, around.states, strict=True))


@each
def test_sequences_steps_and_chunks_have_equal_results(name: str) -> None:
    layer = make_layer(name, store_state_seqs=True)
    expected = layer(X)
    assert 0.02 < expected.mean() < 0.98
    states = [state.clone() for state in layer.states]
    assert torch.equal(layer.states[0], expected[-1]), "the state s is the last output"
    assert torch.equal(layer.state_seqs[0], expected)
    layer.reset()
    assert torch.equal(torch.cat([layer(part) for part in X.split(4)]), expected)
    output, explicit = layer.step(X)
    assert torch.equal(output, expected)
    assert all(torch.equal(a, b) for a, b in zip(explicit, states, strict=True))
    layer.reset()
    functional.set_step_mode(layer, "s")
    assert torch.equal(torch.stack([layer(x) for x in X]), expected)


@each
def test_gradients_reach_the_weights_in_truncated_backpropagation(name: str) -> None:
    layer = make_layer(name)
    for part in X.split(3):
        layer(part).sum().backward()
        functional.detach_net(layer)
        assert not any(state.requires_grad for state in layer.states)
    assert layer.V.grad is not None
    assert layer.V.grad.abs().sum() > 0


@each
def test_copies_pickles_and_checkpoints_return_equal_outputs(name: str) -> None:
    layer = make_layer(name)
    expected = layer(X).detach()
    fresh = LAYERS[name](backend="torch")
    fresh.load_state_dict(layer.state_dict())
    layer.reset()
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), fresh):
        assert torch.equal(twin(X), expected)
        twin.V.data.zero_()
        assert torch.equal(layer(X), expected)
        layer.reset()


@each
def test_the_operator_equals_the_loop_and_states_have_the_dtype_of_the_precision(name: str) -> None:
    layer = make_layer(name)
    expected = layer(X)
    layer.reset()
    layer.backend = "hop"
    assert torch.equal(layer(X), expected)
    layer.backend = "torch"
    for precision in ("eager", "float32"):
        half_layer = make_layer(name, precision=precision)
        output = half_layer(X.bfloat16())
        state_dtype = torch.bfloat16 if precision == "eager" else torch.float32
        assert output.dtype == torch.bfloat16
        assert {state.dtype for state in half_layer.states} == {state_dtype}


@pytest.mark.long(all_but=["RLIF"])
@pytest.mark.parametrize("name", ["Recurrent", "RLIF", "RLeaky"])
def test_a_compiled_layer_is_one_graph(name: str) -> None:
    layer, x = make_layer(name), X
    layer.backend = "hop"
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    output = compiled(x)
    (gradient,) = torch.autograd.grad(output.sum(), [layer.V])
    layer.reset()
    expected = layer(x)
    assert torch.equal(output, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), [layer.V])[0])


def test_a_refusal_by_kernels_is_reported_and_the_loop_runs() -> None:
    """Checks a convolution, which kernels refuse. Users of the layer cannot replace it."""
    layer = RLeaky(0.5, conv2d_channels=2, kernel_size=3)
    x = torch.rand(3, 1, 2, 4, 5)
    assert layer(x).shape == x.shape
    assert "convolution" in layer.explain() or "cannot run" in layer.explain()


def test_a_recurrent_layer_counts_as_one_neuron() -> None:
    net = nn.Sequential(nn.Linear(4, H), Recurrent(LIF(backend="torch"), H), nn.Linear(H, 2))
    assert [name for name, _ in functional.neurons(net)] == ["1"]
    x = torch.rand(5, 2, 4)
    with RateMonitor(net) as rates, SynapseMonitor(net) as synapses:
        net(x)
    assert list(functional.get_states(net)) == ["1"]
    layer = net[1]
    assert isinstance(layer, Recurrent)
    spikes = int(layer.step(net[0](x))[0].sum())
    assert list(rates.rates()) == ["1"]
    assert list(synapses.operations()) == ["0", "1.recurrent", "2"]
    assert synapses.operations()["1.recurrent"].accumulates == spikes * H
    functional.reset_net(net)
    assert layer.states == []


def test_recurrent_neurons_accept_several_inputs() -> None:
    """Checks that a stochastic neuron draws its noise once per call, as it does without recurrence."""
    layer = Recurrent(StochasticLIF(scale=0.3, backend="torch"), H, init=nn.init.zeros_)
    torch.manual_seed(3)
    spikes = layer(X)
    torch.manual_seed(3)
    assert torch.equal(spikes, StochasticLIF(scale=0.3, backend="torch")(X))
    layer.reset()
    assert layer(X, torch.zeros_like(X)).shape == X.shape


def make_distinct(value: float, *shape: int) -> nn.Parameter:
    """Makes a learned parameter whose values differ between neurons."""
    return nn.Parameter(value + torch.arange(torch.Size(shape).numel()).reshape(shape) / 16)


AROUND: dict[str, Callable[[], Neuron]] = {
    "gated": lambda: GatedLIF(5),
    "gated_same_conduct": lambda: GatedLIF(init_linear_decay=0.05),
    "stochastic": lambda: StochasticLIF(scale=nn.Parameter(torch.tensor(0.3))),
    "lif_learned": lambda: LIF(tau=make_distinct(2.0, H)),
    "lif_of_rows": lambda: LIF(tau=make_distinct(2.0, 3, 1)),
    "lif_of_one": lambda: LIF(tau=make_distinct(2.0, 1)),
    "if": IF,
    "lif_soft": lambda: LIF(v_reset=None, detach_reset=True),
    "plif": PLIF,
    "qif": QIF,
    "eif": EIF,
    "adex": AdEx,
    "izhikevich": Izhikevich,
    "cubalif": CUBALIF,
    "klif": KLIF,
    "liaf": lambda: LIAF(F.relu, threshold_related=False),
    "alif": lambda: ALIF(tau_a=5.0),
    "ilif": ILIF,
    "li": lambda: LI(tau=make_distinct(2.0, H)),
    "clif": CLIF,
    "ternary_if": TernaryIF,
    "ternary_lif": TernaryLIF,
    "refractory": RefractoryLIF,
    "leaky": lambda: Leaky(0.5),
    "synaptic": lambda: Synaptic(0.5, 0.7),
    "alpha": lambda: Alpha(0.9, 0.8),
    "lapicque": lambda: Lapicque(0.5),
}


@pytest.mark.long(all_but=["lif_of_rows"])
@pytest.mark.parametrize("name", AROUND)
def test_kernels_train_a_matrix_around_any_neuron(name: str) -> None:
    torch.manual_seed(0)
    layer = Recurrent(AROUND[name](), H)
    with torch.no_grad():
        round_to_quarters(layer.V)
    results = []
    for backend in ("auto", "torch"):
        layer.backend = backend
        layer.reset()
        torch.manual_seed(1)  # Each backend draws equal noise.
        x = ((8 * X[:5]).round() / 4).requires_grad_()
        output = layer(x)
        leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
        results.append((output, *torch.autograd.grad(output.square().sum(), leaves, materialize_grads=True)))
        if backend == "auto":
            account = layer.explain(x)
            assert "loop" not in account.splitlines()[0], account
            assert "the loop ran" not in account, account
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", [pytest.param("RLIF", marks=pytest.mark.long), "RLeaky"])
def test_the_backend_auto_equals_the_loop(name: str) -> None:
    """Compares the results of kernels, or of the loop if kernels refuse the step, with those of the loop."""
    torch.manual_seed(0)
    layer = RLIF(H) if name == "RLIF" else RLeaky(0.5, linear_features=H)
    with torch.no_grad():
        round_to_quarters(layer.V)
    results = []
    for backend in ("auto", "torch"):
        layer.backend = backend
        layer.reset()
        x = ((8 * X[:5]).round() / 4).requires_grad_()
        output = layer(x)
        results.append((output, *torch.autograd.grad(output.square().sum(), [x, layer.V])))
    assert torch.equal(results[0][0], results[1][0])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_recurrent_accepts_a_custom_neuron() -> None:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = 0.5 * v + x
        return torch.tanh(h), h

    neuron = FlexSN(core, 1, 1, 1, backend="torch", requires_grad=[True, False])
    layer = Recurrent(neuron, H, bias=True)
    s, v, expected = torch.zeros(3, H), torch.zeros(3, H), []
    for x in X:
        s, v = core(x + F.linear(s, layer.recurrent.weight, layer.recurrent.bias), v)  # type: ignore[arg-type]
        expected.append(s)
    assert torch.equal(layer(X), torch.stack(expected))
    assert layer.requires_grad == [True, True, False]
    assert layer.state_names == ("s", "state 0")


class Masked(nn.Module):
    """Weights in which no neuron is connected to itself."""

    mask: Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, features))
        self.register_buffer("mask", 1 - torch.eye(features))

    def forward(self, s: Tensor) -> Tensor:
        return F.linear(s, self.weight * self.mask)


def test_custom_weights_are_trained() -> None:
    low_rank = nn.Sequential(nn.Linear(H, 2, bias=False), nn.Linear(2, H, bias=False))
    for weights in (low_rank, Masked(H)):
        layer = Recurrent(LIF(backend="torch"), recurrent=weights)
        layer(X).sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())
    gradient = next(weights.parameters()).grad
    assert gradient is not None
    assert gradient.diagonal().tolist() == [0.0] * H


def test_gradients_of_weights_pass_gradcheck() -> None:
    def smooth(x: Tensor) -> Tensor:
        return torch.sigmoid(2 * x)

    for layer in (
        RLIF(3, surrogate_function=smooth, backend="torch"),
        RLeaky(0.5, linear_features=3, spike_grad=smooth, strict=None, reset_mechanism="none", backend="torch"),
    ):
        layer = layer.double()
        names = [name for name, _ in layer.named_parameters()]

        def run(x: Tensor, *values: Tensor, layer: Neuron = layer, names: list[str] = names) -> Tensor:
            layer.reset()
            output: Tensor = torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))
            return output

        x = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(run, (x, *layer.parameters()))


def test_weights_are_learned_or_fixed_and_have_the_given_initial_values() -> None:
    layer = RLIF(H, learn_recurrent=False, bias=True, init=nn.init.orthogonal_)
    assert [p.requires_grad for p in layer.parameters()] == [False, False]
    torch.testing.assert_close(layer.V @ layer.V.T, torch.eye(H))
    assert RLIF(all_to_all=False, V=0.3).V.shape == (1,)
    assert RLIF(H, all_to_all=False, V=0.3).V.tolist() == pytest.approx([0.3] * H)
    parameter = nn.Parameter(torch.rand(H))
    assert RLIF(all_to_all=False, V=parameter).V is parameter
    torch.manual_seed(2)
    uniform = RLIF(H).V
    torch.manual_seed(2)
    assert torch.equal(uniform, nn.Linear(H, H, bias=False).weight)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: RLIF(), "features is missing"),
        (lambda: RLIF(0), "features"),
        (lambda: RLIF(3, V=0.5), "all_to_all=False"),
        (lambda: RLIF(3, all_to_all=False, bias=True), "bias"),
        (
            lambda: Recurrent(LIF, 3),  # type: ignore[arg-type]
            "give an instance",
        ),
        (lambda: Recurrent(PSN(4), 3), "FlexSN"),  # type: ignore[arg-type]
        (lambda: Recurrent(FlexSN(lambda x, v: (x, v, v), 1, 1, 2), 3), "num_outputs=2"),
        (lambda: Recurrent(LIF(), 3, recurrent=nn.Linear(3, 3)), "leave out"),
        (lambda: Recurrent(LIF(), recurrent=nn.Linear), "class Linear"),  # type: ignore[arg-type]
        (lambda: RLeaky(0.5), "linear_features"),
        (lambda: RLeaky(0.5, conv2d_channels=2), "kernel_size"),
        (lambda: RLeaky(0.5, conv2d_channels=2, kernel_size=2), "odd"),
        (lambda: RSynaptic(0.5, 0.5, linear_features=3, conv2d_channels=2, kernel_size=3), "no linear_features"),
        (lambda: init.spectral_radius_(torch.zeros(2, 2), 1.0), "radius of weight is 0"),
        (lambda: init.spectral_radius_(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), 1.0), "radius of weight is 0"),
        (lambda: init.spectral_radius_(torch.zeros(2, 3), 1.0), "square"),
        (lambda: init.spectral_radius_(torch.eye(2), -1.0), "rho"),
        (lambda: init.spectral_radius(torch.tensor([[torch.nan]])), "not finite"),
    ],
)
def test_wrong_arguments_are_refused(make: Callable[[], object], match: str) -> None:
    with pytest.raises(ParameterError, match=match):
        make()


def test_another_number_of_neurons_is_refused() -> None:
    for layer in (RLIF(H), RLIF(H, all_to_all=False), RLeaky(0.5, conv2d_channels=2, kernel_size=3)):
        with pytest.raises(InputShapeError, match=r"the step has shape \[3, 5\]"):
            layer(torch.zeros(2, 3, 5))


def test_weights_are_scaled_to_a_spectral_radius() -> None:
    turn = torch.tensor([[0.0, -3.0], [3.0, 0.0]])
    assert init.spectral_radius(turn) == pytest.approx(3.0)
    assert init.spectral_radius(torch.tensor([0.5, -2.0])) == 2.0
    weight = nn.Parameter(torch.randn(40, 40, dtype=torch.float64))
    original = weight.detach().clone()
    assert init.spectral_radius_(weight, 0.7) is weight
    assert torch.linalg.eigvals(weight.detach()).abs().max().item() == pytest.approx(0.7)
    assert (weight.detach() / original).std() < 1e-12
    layer = RLIF(H, init=partial(init.spectral_radius_, rho=1.25))
    assert init.spectral_radius(layer.V) == pytest.approx(1.25, rel=1e-5)


# -- cells that are not neurons, as users write them --------------------------------------------------------


class GRUCell(nn.Module):
    """A GRU in the form of cuDNN, in which the reset gate acts on the product."""

    def __init__(self, V: Tensor, b: Tensor) -> None:
        super().__init__()
        self.V, self.b = V, b

    def forward(self, r_in: Tensor, z_in: Tensor, n_in: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        V_r, V_z, V_n = self.V.chunk(3)
        b_r, b_z, b_n = self.b.chunk(3)
        r = torch.sigmoid(r_in + F.linear(h, V_r, b_r))
        z = torch.sigmoid(z_in + F.linear(h, V_z, b_z))
        n = torch.tanh(n_in + r * F.linear(h, V_n, b_n))
        h = (1 - z) * n + z * h
        return h, h


class LSTMCell(nn.Module):
    def __init__(self, V: Tensor, b: Tensor) -> None:
        super().__init__()
        self.V, self.b = V, b

    def forward(self, i: Tensor, f: Tensor, g: Tensor, o: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        products = [F.linear(h, V, b) for V, b in zip(self.V.chunk(4), self.b.chunk(4), strict=True)]
        i, f, g, o = (x + product for x, product in zip((i, f, g, o), products, strict=True))
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return h, h, c


@pytest.mark.parametrize("backend", ["torch", "hop"])
def test_a_gru_and_an_lstm_equal_those_of_torch(backend: str) -> None:
    torch.manual_seed(0)
    cells: list[tuple[Any, Any, int, int]] = [(nn.GRU, GRUCell, 3, 1), (nn.LSTM, LSTMCell, 4, 2)]
    for kind, cell, gates, num_states in cells:
        theirs = kind(5, H).double()
        x = torch.randn(7, 3, 5, dtype=torch.float64, requires_grad=True)
        layer = FlexSN(cell(theirs.weight_hh_l0, theirs.bias_hh_l0), gates, num_states, 1, backend=backend)
        ours = layer(*F.linear(x, theirs.weight_ih_l0, theirs.bias_ih_l0).chunk(gates, -1))
        expected, _ = theirs(x)
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
        weights = torch.randn_like(expected)
        leaves = [x, *theirs.parameters()]
        gradients = [torch.autograd.grad((y * weights).sum(), leaves) for y in (ours, expected)]
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_an_integrator_with_feedback_equals_an_rnn() -> None:
    """Compares a layer without spikes with a loop: `h = h + (x + V y - h) / tau`."""
    layer = Recurrent(NonSpikingLIF(tau=4.0, backend="torch"), H)
    h, expected = torch.zeros(3, H), []
    for x in X:
        h = h + (x + F.linear(h, layer.V) - h) / 4.0
        expected.append(h)
    torch.testing.assert_close(layer(X), torch.stack(expected))


def test_an_immediate_reset_subtracts_the_threshold_before_the_leak() -> None:
    """Compares the neurons of snnTorch, with and without `reset_delay`, with values computed by hand."""
    x = torch.full((6, 1), 0.75)
    delayed, immediate = (Leaky(0.5, reset_delay=delay, backend="torch") for delay in (True, False))
    assert delayed(x).flatten().tolist() == [0, 1, 0, 0, 1, 0]  # 0.75, 1.125, 0.3125, 0.90625, 1.203125
    assert immediate(x).flatten().tolist() == [0, 1, 0, 1, 0, 1]  # 0.75, 0.125, 0.8125, 0.15625, 0.828125
    assert immediate.states[0].item() == 0.5 * 0.828125 + 0.75 - 1
