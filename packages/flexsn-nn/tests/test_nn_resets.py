"""Conventions of resets and thresholds: comparison with values computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexsn_nn import (
    ALIF,
    CUBALIF,
    EIF,
    IF,
    ILIF,
    KLIF,
    LIF,
    QIF,
    Alpha,
    GatedLIF,
    Izhikevich,
    Leaky,
    ParameterError,
    Synaptic,
    surrogate,
)
from flexsn_nn._run_kernels import run_kernels
from flexsn_nn.flexsn import _running
from flexsn_nn.neuron import Neuron

# Kernels run on CPU tensors in this file.
pytestmark = pytest.mark.usefixtures("interpreted", "loops")

BACKENDS = pytest.mark.parametrize("backend", ["torch", "hop", "triton"])


def run(neuron: Neuron, *values: float) -> tuple[list[float], list[float]]:
    """Returns the output and `v` of a single neuron after each step."""
    neuron.store_state_seqs = True
    output = neuron(torch.tensor(values, dtype=torch.float64).reshape(-1, 1))
    v = neuron.state_seq("v")
    assert v is not None
    return output.flatten().tolist(), v.flatten().tolist()


@BACKENDS
@pytest.mark.parametrize(
    ("options", "spikes", "v"),
    [
        # v: 0.75, 1.5 fires, 0.75, 2.75 fires, 0.25
        ({"v_reset": 0.0}, [0, 1, 0, 1, 0], [0.75, 0, 0.75, 0, 0.25]),
        # v: 0.75, 1.5 fires, 0.5 + 0.75 fires, 0.25 + 2 fires, 1.25 + 0.25 fires
        ({"v_reset": None}, [0, 1, 1, 1, 1], [0.75, 0.5, 0.25, 1.25, 0.5]),
        # from -0.5: 0.25, 1 fires, 0.25, 2.25 fires, -0.25
        ({"v_reset": -0.5}, [0, 1, 0, 1, 0], [0.25, -0.5, 0.25, -0.5, -0.25]),
    ],
)
def test_hard_and_soft_resets_equal_values_by_hand(
    backend: str, options: dict[str, Any], spikes: list[float], v: list[float]
) -> None:
    assert run(IF(backend=backend, **options), 0.75, 0.75, 0.75, 2.0, 0.25) == (spikes, v)


@pytest.mark.long(all_but=["torch-*", "hop-*", "triton-False"])
@pytest.mark.parametrize("detach", [False, True])
@BACKENDS
def test_gradients_through_the_reset_equal_values_by_hand(backend: str, detach: bool) -> None:
    """Computes two steps of IF with g' = 1: v1 = (1 - s1) h1, s2 = step(v1 + x2 - 1)."""
    function = surrogate.StraightThrough()
    for v_reset, slope in ((0.0, (1 - 1) - 1.25), (None, 1 - 1)):
        x = torch.tensor([[1.25], [0.5]], dtype=torch.float64, requires_grad=True)
        neuron = IF(v_reset=v_reset, surrogate_function=function, detach_reset=detach, backend=backend)
        (gradient,) = torch.autograd.grad(neuron(x)[1].sum(), x)
        # d v1 / d x1 is 1 - s1 - h1 g' for the hard reset, and 1 - g' v_threshold for the soft one. A detached reset
        # has no terms with g'.
        expected = slope if not detach else (0.0 if v_reset == 0.0 else 1.0)
        assert gradient.flatten().tolist() == [expected, 1.0]


@BACKENDS
def test_a_membrane_at_the_threshold_fires_unless_strict(backend: str) -> None:
    """Checks that neurons compare by `>=`, or by `>` with `strict=True`. snnTorch's neurons use `>` by default."""
    values = (1.0, 0.0)
    assert run(IF(backend=backend), *values)[0] == [1, 0]
    assert run(IF(strict=True, backend=backend), *values)[0] == [0, 0]
    above = surrogate.ATan(strict=True)
    assert run(IF(surrogate_function=above, backend=backend), *values)[0] == [0, 0]
    assert run(IF(surrogate_function=above, strict=False, backend=backend), *values)[0] == [1, 0]
    assert run(Leaky(0.5, backend=backend), *values)[0] == [0, 0]
    assert run(Leaky(0.5, strict=False, backend=backend), *values)[0] == [1, 0]
    assert run(Leaky(0.5, spike_grad=surrogate.Sigmoid(), backend=backend), *values)[0] == [0, 0]


@BACKENDS
def test_lif_leaks_to_its_reset_value(backend: str) -> None:
    # h = v + (x - (v + 1)) / 2 from v = -1: 0 -> -1 + 0; then 6 -> -1 + 3 = 2 fires
    assert run(LIF(v_reset=-1.0, backend=backend), 0.0, 6.0, 2.0) == ([0, 1, 0], [-1, -1, 0])
    # h = v - (v + 1) / 2 + x: -1 + 0.5; -0.5 - 0.25 + 2 = 1.25 fires; -1 + 2 = 1 fires
    raw = LIF(v_reset=-1.0, decay_input=False, backend=backend)
    assert run(raw, 0.5, 2.0, 2.0) == ([0, 1, 1], [-0.5, -1, -1])
    # The soft reset leaks to 0: h = v / 2 + x / 2.
    assert run(LIF(v_reset=None, backend=backend), 3.0, 1.0, 0.0) == ([1, 0, 0], [0.5, 0.75, 0.375])


@BACKENDS
@pytest.mark.parametrize(
    ("mechanism", "spikes", "v"),
    [
        # The membrane of the step that fires is not yet reset: 1.5 fires; then 0.75 + 1.5 - 1 = 1.25 fires; then
        # 0.625 + 0.5 - 1 = 0.125.
        ("subtract", [1, 1, 0], [1.5, 1.25, 0.125]),
        # 1.5 fires; 0 + 1.5 fires; 0 + 0.5
        ("zero", [1, 1, 0], [1.5, 1.5, 0.5]),
        # 1.5; 0.75 + 1.5; 1.125 + 0.5
        ("none", [1, 1, 1], [1.5, 2.25, 1.625]),
    ],
)
def test_delayed_resets_of_leaky_equal_values_by_hand(
    backend: str, mechanism: str, spikes: list[float], v: list[float]
) -> None:
    assert run(Leaky(0.5, reset_mechanism=mechanism, backend=backend), 1.5, 1.5, 0.5) == (spikes, v)


def test_a_delayed_reset_of_synaptic_does_not_change_the_current() -> None:
    # i: 1.5, 0.75, 0.375.  v: 1.5 fires; "zero": (0.5 * 1.5 + 0.75) * 0; 0.375
    zero = Synaptic(0.5, 0.5, reset_mechanism="zero")
    assert run(zero, 1.5, 0.0, 0.0) == ([1, 0, 0], [1.5, 0, 0.375])
    # 1.5 fires; 1.5 - 1 = 0.5; 0.25 + 0.375
    assert run(Synaptic(0.5, 0.5), 1.5, 0.0, 0.0) == ([1, 0, 0], [1.5, 0.5, 0.625])


def test_the_membrane_of_alpha_rises_and_falls() -> None:
    _, v = run(Alpha(0.9, 0.5, threshold=100.0), 1.0, *[0.0] * 30)
    peak = v.index(max(v))
    assert v[0] == 0
    assert 0 < peak < 10
    assert v[1:peak] == sorted(v[1:peak])
    assert v[peak:] == sorted(v[peak:], reverse=True)


def test_ilif_rounds_and_limits_its_counts() -> None:
    # With tau = 1, h = x. Counts are rounded half to even and limited to 0 … D; the rest remains in the membrane.
    spikes, v = run(ILIF(tau=1.0, D=3), 0.5, 1.5, 2.5, -1.0, 7.0)
    assert spikes == [0, 2, 2, 0, 3]
    assert v == [0.5, -0.5, 0.5, -1.0, 4.0]


def test_the_threshold_of_alif_rises_with_spikes() -> None:
    # With tau = 1, h = x. The thresholds are 1, then 1 + a with a = 1, then with a = rho.
    neuron = ALIF(tau_a=1.0, beta=1.0, tau=1.0)
    spikes, _ = run(neuron, 1.0, 1.5, 1.5)
    assert spikes == [1, 0, 1]


def test_klif_scales_its_reset() -> None:
    # With tau = 1, h = relu(2 x) = 1.5 fires. Soft: 1.5 - 1; scaled: 1.5 / 2 - 1 / 2.
    options: dict[str, Any] = {"tau": 1.0, "v_reset": None, "init_k": 2.0}
    assert run(KLIF(**options).double(), 0.75) == ([1], [0.5])
    assert run(KLIF(scale_reset=True, **options).double(), 0.75) == ([1], [0.25])


def test_the_membrane_begins_at_the_reset_value() -> None:
    """Checks that `v` starts at `v_reset`, in any order of states and in single steps. Other states start at 0."""
    for neuron in (QIF(), EIF(), Izhikevich(v_reset=-0.1), CUBALIF(v_reset=-0.1)):
        v = neuron.state_names.index("v")
        for mode, x in (("m", torch.zeros(3, 2)), ("s", torch.zeros(2))):
            states = neuron.init_states(neuron.num_states, mode, x)
            assert [state.shape for state in states] == [(2,)] * neuron.num_states
            for i, state in enumerate(states):
                assert torch.equal(state, torch.full((2,), -0.1 if i == v else 0.0))


def test_kernels_receive_no_initial_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that states that start at zero are not passed to the kernels, while other initial states are passed."""
    counts = []

    def record(program: Any, tensors: Any, *options: Any) -> Any:
        counts.append(len(tensors))
        return run_kernels(program, tensors, *options)

    monkeypatch.setattr(_running, "run_kernels", record)

    class FromOnes(LIF):
        def init_states(self, num_states: int, step_mode: str, *inputs: torch.Tensor) -> list[torch.Tensor]:
            return [torch.ones_like(inputs[0][0])]

    x = torch.full((2, 3), 0.25, dtype=torch.float64)
    for neuron, count in (
        (LIF(backend="triton"), 1),
        (ALIF(v_reset=None, backend="triton"), 1),
        (Synaptic(0.5, 0.5, backend="triton"), 1),
        (LIF(v_reset=-0.5, backend="triton"), 2),
        (FromOnes(backend="triton"), 2),
    ):
        neuron.store_state_seqs = True
        by_kernels = neuron(x), neuron.state_seqs
        assert counts.pop() == count
        neuron.reset()
        neuron.backend = "torch"
        by_the_loop = neuron(x), neuron.state_seqs
        for result, expected in zip((by_kernels[0], *by_kernels[1]), (by_the_loop[0], *by_the_loop[1]), strict=True):
            assert torch.equal(result, expected)


def test_gated_lif_has_a_conductance_per_step() -> None:
    neuron = GatedLIF(T=3)
    assert neuron.conduct.shape == (3,)
    assert neuron.leak.sigmoid().item() == pytest.approx(0.5 / 6)
    (gradient,) = torch.autograd.grad(neuron(torch.ones(3, 2)).sum(), neuron.conduct)
    assert gradient.count_nonzero() == 3
    with pytest.raises(ParameterError, match="the input has 4 steps; the neuron was created for T=3"):
        neuron(torch.ones(4, 2))
    images = GatedLIF(T=2, inplane=5)
    assert images(torch.ones(2, 3, 5, 4, 4)).shape == (2, 3, 5, 4, 4)
    assert images.tau.shape == (5, 1, 1)
