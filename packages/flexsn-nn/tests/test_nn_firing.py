"""Warnings about layers that never fire or always fire in training. `fluctuation_driven_` makes layers fire."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from flexsn_nn import IF, LI, LIF, RALIF, RLIF, FlexSN, Leaky, Recurrent, RLeaky, Synaptic, functional, init, monitor
from flexsn_nn.errors import FiringWarning, ParameterError

pytestmark = pytest.mark.usefixtures("loops")


def collect_warnings(net: nn.Module, x: torch.Tensor, calls: int = 80) -> list[str]:
    """Calls a network and returns the messages of the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(calls):
            functional.reset_net(net)
            net(x)
    assert all(warning.category is FiringWarning and warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


def make_silent(features: int) -> RALIF:
    """Makes a layer that never fires, because a long time constant divides its input."""
    return RALIF(features, tau=10.0, beta=1.8, decay_input=True)


def test_recurrent_layers_that_never_fire_cause_one_warning_each() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 32), make_silent(32), nn.Linear(32, 32), make_silent(32))
    messages = collect_warnings(net, torch.rand(10, 4, 20))
    assert len(messages) == 2, "expected one warning for each layer"
    for words in ("never fires", "RALIF", "[10, 4, 32]", "decay_input=False", "fluctuation_driven_", "watch_firing"):
        assert words in messages[0]
    assert collect_warnings(net, torch.rand(10, 4, 20)) == []


def test_a_layer_that_always_fires_causes_a_warning() -> None:
    (message,) = collect_warnings(LIF(), torch.full((5, 2, 3), 10.0))
    assert "fires always" in message
    assert "smaller" in message


@pytest.mark.parametrize("make", [lambda: IF(), lambda: Recurrent(LIF(), 3), lambda: Leaky(0.9)])
def test_single_steps_are_checked_from_time_to_time(make: Any) -> None:
    neuron = make()
    neuron.step_mode = "s"
    assert collect_warnings(neuron, torch.zeros(2, 3), calls=16 + 7 * 128 - 10) == []
    assert len(collect_warnings(neuron, torch.zeros(2, 3), calls=20)) == 1


def test_a_spike_restarts_the_count() -> None:
    neuron = LIF()
    silent, loud = torch.zeros(5, 2, 3), torch.full((5, 2, 3), 2.5)
    for _ in range(4):
        assert collect_warnings(neuron, silent, calls=30) == []
        assert collect_warnings(neuron, loud, calls=20) == []
    assert len(collect_warnings(neuron, silent)) == 1


@pytest.mark.parametrize("how", ["evaluation", "no gradients", "argument", "attribute", "environment", "step"])
def test_nothing_is_reported_without_training_or_if_turned_off(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "environment":
        monkeypatch.setenv("FLEXSN_WATCH_FIRING", "0")
    neuron = LIF(watch_firing=False) if how == "argument" else LIF()
    if how == "attribute":
        neuron.watch_firing = False
    neuron.train(how != "evaluation")
    with torch.set_grad_enabled(how != "no gradients"):
        if how == "step":
            for _ in range(80):
                neuron.step(torch.zeros(5, 2, 3))
        else:
            assert collect_warnings(neuron, torch.zeros(5, 2, 3)) == []
    assert neuron.watch_firing == (how not in ("argument", "attribute", "environment"))
    assert Recurrent(neuron, 3).watch_firing == neuron.watch_firing


def test_outputs_that_are_not_spikes_count_if_nonzero() -> None:
    average = FlexSN(lambda x, v: (v + x, v + x), 1, 1, 1)
    assert collect_warnings(nn.Sequential(LI(), average), torch.ones(5, 2, 3)) == []
    assert len(collect_warnings(average, torch.zeros(5, 2, 3))) == 1


def test_checks_change_no_result_and_copies_have_separate_counts() -> None:
    torch.manual_seed(0)
    neuron, unwatched = LIF(), LIF(watch_firing=False)
    x = torch.rand(6, 2, 3, requires_grad=True)
    for _ in range(40):
        assert torch.equal(neuron(x), unwatched(x))  # Both neurons continue from equal states.
        assert torch.equal(neuron.states[0], unwatched.states[0])
        functional.detach_net(neuron)
        functional.detach_net(unwatched)
    for copied in (copy.deepcopy(neuron), pickle.loads(pickle.dumps(neuron))):
        assert copied.watch_firing
        assert collect_warnings(copied, torch.zeros(6, 2, 3), calls=60) == []
        assert len(collect_warnings(copied, torch.zeros(6, 2, 3), calls=10)) == 1


def test_a_call_that_raises_leaves_the_watch_active() -> None:
    neuron = LIF()
    for _ in range(40):
        with pytest.raises(TypeError):
            neuron(torch.zeros(5, 2, 3, dtype=torch.int64))
    assert len(collect_warnings(neuron, torch.zeros(5, 2, 3))) == 1


@pytest.mark.gpu
def test_no_call_waits_for_the_gpu() -> None:
    neuron = LIF().cuda()
    x = torch.zeros(5, 2, 3, device="cuda", requires_grad=True)
    for _ in range(20):  # These calls build kernels and allocate pinned memory.
        neuron.reset()
        neuron(x)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(100):
                neuron.reset()
                neuron(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        for _ in range(40):
            neuron.reset()
            neuron(x)
            torch.cuda.synchronize()
    assert [warning.category for warning in caught if warning.category is FiringWarning] == [FiringWarning]


@pytest.mark.parametrize("make", [RLIF, RALIF])
@pytest.mark.parametrize("tau", [2.0, 10.0])
def test_recurrent_layers_learn_with_default_arguments(make: type[RLIF] | type[RALIF], tau: float) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 32), make(32, tau=tau), nn.Linear(32, 32), make(32, tau=tau), nn.Linear(32, 2))
    labels = torch.arange(32) % 2
    x = (torch.rand(20, 32, 10) < 0.05).float()
    x[:10, labels == 1, :5] = (torch.rand(10, 16, 5) < 0.4).float()
    optimizer = torch.optim.Adam(net.parameters(), 5e-3)
    for _ in range(25):
        functional.reset_net(net)
        scores = net(x).mean(0)
        optimizer.zero_grad()
        nn.functional.cross_entropy(scores, labels).backward()
        optimizer.step()
    assert (scores.argmax(1) == labels).float().mean() > 0.9, "a guess has 0.5"


# -- initial weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "mean"),
    [
        (lambda: LIF(tau=10.0), 0.0),
        (lambda: LIF(tau=10.0, decay_input=False), 0.3),
        (lambda: LIF(tau=torch.full((300,), 5.0), v_threshold=2.0, v_reset=0.5), 0.0),
        (lambda: Leaky(0.9), 0.0),
        (lambda: Synaptic(0.8, 0.9), 0.2),
        (lambda: RALIF(300, tau=10.0), 0.0),
        (lambda: Recurrent(LIF(tau=10.0), 300), 0.0),
        (lambda: RLeaky(0.9, linear_features=300), 0.0),
    ],
)
def test_membranes_fluctuate_up_to_the_threshold(make: Any, mean: float) -> None:
    torch.manual_seed(0)
    neuron: Any = make()
    linear = nn.Linear(200, 300, bias=False)
    init.fluctuation_driven_(linear.weight, neuron, rate=0.02, xi=2.0, mean=mean)
    threshold = 1.5 if getattr(neuron, "v_threshold", 0) == 2.0 else 1.0
    # With this threshold, the neuron never fires.
    inner: Any = neuron.neuron if isinstance(neuron, Recurrent) else neuron
    for name in ("v_threshold", "threshold"):
        if hasattr(inner, name):
            inner.hold(name, 1e9)
    neuron.store_state_seqs = True
    spikes = (torch.rand(400, 4, 200) < 0.02).float()
    with torch.no_grad():
        neuron(linear(spikes))
    v = neuron.state_seq("v")[100:] - (0.5 if threshold == 1.5 else 0.0)
    deviation = float(v.var(0).mean().sqrt())  # The deviation of each neuron over time.
    assert deviation == pytest.approx((threshold - mean) / 2, rel=0.08)
    assert float(v.mean()) == pytest.approx(mean, abs=0.05)


def test_dead_layers_fire_with_the_initial_weights() -> None:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(20, 32), make_silent(32), nn.Linear(32, 32), make_silent(32))
    x = (torch.rand(50, 4, 20) < 0.1).float()
    with torch.no_grad():
        assert not net(x).any()
    rate = 0.1
    for linear, neuron in ((net[0], net[1]), (net[2], net[3])):
        init.fluctuation_driven_(linear.weight, neuron, rate=rate)
        functional.reset_net(net)
        with monitor.RateMonitor(net) as rates:
            net(x)
        rate = rates.rates()[["1", "3"][neuron is net[3]]]
        assert 0.001 < rate < 0.5, "this layer's spikes drive the next layer"


def test_a_share_divides_the_variance_and_a_generator_repeats_the_draw() -> None:
    def draw(**options: Any) -> torch.Tensor:
        weight = torch.empty(100, 400)
        return init.fluctuation_driven_(weight, RLIF(100), 0.1, generator=torch.Generator().manual_seed(3), **options)

    assert torch.equal(draw(), draw())
    torch.testing.assert_close(draw(share=0.25), draw() / 2)
    torch.testing.assert_close(draw(xi=2.0), draw() / 2)


@pytest.mark.parametrize(
    ("neuron", "options", "message"),
    [
        (LI(), {}, "no state v with a threshold"),
        (FlexSN(lambda x, v: (x, v), 1, 1, 1), {}, "no state v with a threshold"),
        (IF(), {}, "does not decay"),
        (LIF(), {"rate": 0.0}, "rate"),
        (LIF(), {"xi": 0.0}, "xi"),
        (LIF(), {"mean": 1.5}, "below the threshold"),
        (LIF(), {"mean": 0.99}, "no weights"),
        (LIF(), {"share": 2.0}, "share"),
        (LIF(), {"weight": torch.zeros(3)}, "out, in"),
    ],
)
def test_wrong_arguments_are_named(neuron: FlexSN, options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"weight": torch.zeros(3, 4), "neuron": neuron, "rate": 0.1, **options}
    with pytest.raises(ParameterError, match=message):
        init.fluctuation_driven_(**arguments)


def test_weights_for_a_membrane_without_decay_depend_on_the_number_of_steps() -> None:
    weight = torch.empty(500, 200)
    init.fluctuation_driven_(weight, IF(), rate=0.1, num_steps=20)
    assert float(weight.std()) == pytest.approx((1 / (200 * 0.1 * 20)) ** 0.5, rel=0.05)
