"""Errors of neurons and their messages; parameters that are scalars, tensors or learned."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch

from flexsn_nn import (
    ALIF,
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
    AdEx,
    Alpha,
    FlexSN,
    GatedLIF,
    InputDtypeError,
    Izhikevich,
    Lapicque,
    Leaky,
    MaskedPSN,
    ParameterError,
    SlidingPSN,
    StateError,
    StepModeError,
    Synaptic,
    UnknownNameError,
)
from flexsn_nn.layer import Delay
from flexsn_nn.neuron import Neuron

# Kernels run on CPU tensors in this file.
pytestmark = pytest.mark.usefixtures("interpreted")

nan = float("nan")
TINY, EPS = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IF(v_threshold=nan), "v_threshold is not finite"),
        (lambda: IF(v_threshold=torch.tensor([1, 2])), "v_threshold is a tensor of torch.int64"),
        (lambda: IF(v_threshold=cast(float, "1")), "v_threshold is '1', a str; give a number or a tensor"),
        (lambda: IF(v_reset=float("inf")), "v_reset is not finite"),
        (lambda: LIF(tau=0.0), "tau is 0; it must be at least 1. Time constants are counted in steps"),
        (lambda: LIF(tau=-2.0), "tau is -2"),
        (lambda: LIF(tau=torch.tensor([2.0, 0.5])), "tau is from 0.5 to 2; it must be at least 1"),
        (lambda: LIF(tau=torch.tensor([2.0, nan])), "tau is not finite"),
        (lambda: LIF(tau=True), "tau is True, a bool"),
        (lambda: PLIF(init_tau=1.0), "init_tau is 1; it must be above 1"),
        (lambda: KLIF(tau=0.5), "tau is 0.5"),
        (lambda: KLIF(init_k=0.0), "init_k is 0"),
        (lambda: LIAF(torch.relu, False, tau=0.0), "tau is 0"),
        (lambda: ALIF(tau_a=0.0), "tau_a is 0; it must be above 0"),
        (lambda: ALIF(beta=-1.0), "beta is -1; it must be at least 0"),
        (lambda: LI(tau=0.9), "tau is 0.9"),
        (lambda: ILIF(tau=0.0), "tau is 0"),
        (lambda: ILIF(D=0), "D is 0; it must be a whole number of at least 1"),
        (lambda: ILIF(D=cast(int, 2.5)), "D is 2.5; it must be a whole number"),
        (lambda: ILIF(v_threshold=0.0), "v_threshold is 0"),
        (lambda: QIF(tau=0.0), "tau is 0; it must be above 0"),
        (lambda: QIF(a0=0.0), "a0 is 0"),
        (lambda: EIF(delta_T=0.0), "delta_T is 0"),
        (lambda: EIF(tau=-1.0), "tau is -1"),
        (lambda: AdEx(tau_w=0.0), "tau_w is 0"),
        (lambda: AdEx(b=nan), "b is not finite"),
        (lambda: Izhikevich(tau=0.0), "tau is 0"),
        (lambda: Izhikevich(v_c=nan), "v_c is not finite"),
        (lambda: CUBALIF(c_decay=1.1), "c_decay is 1.1; it must be at most 1"),
        (lambda: CUBALIF(v_decay=-0.1), "v_decay is -0.1"),
        (lambda: GatedLIF(T=4, init_tau=1.0), "tau is 1; it must be below 1"),
        (lambda: GatedLIF(T=0), "T is 0"),
        (lambda: GatedLIF(), "give init_linear_decay, or T"),
        (lambda: Leaky(1.2), "beta is 1.2; it must be at most 1"),
        (lambda: Leaky(torch.tensor([0.5, -0.5])), "beta is from -0.5 to 0.5; it must be at least 0"),
        (lambda: Leaky(0.5, threshold=nan), "threshold is not finite"),
        (lambda: Synaptic(1.2, 0.5), "alpha is 1.2"),
        (lambda: Synaptic(0.5, -1.0), "beta is -1"),
        (lambda: Alpha(0.5, 0.8), "alpha must be larger than beta"),
        (lambda: Alpha(1.0, 0.8), "alpha is 1; it must be below 1"),
        (lambda: Lapicque(), "give beta, or both R and C"),
        (lambda: Lapicque(R=1.0), "give beta, or both R and C"),
        (lambda: Lapicque(0.5, 1.0, 1.0), "at most two of them"),
        (lambda: Lapicque(1.0), "beta is 1; it must be below 1"),
        (lambda: Lapicque(R=0.0, C=1.0), "R is 0"),
        (lambda: Lapicque(0.5, time_step=0.0), "time_step is 0"),
        (lambda: IF(surrogate_function=torch.sigmoid, strict=True), "compares by itself: pass strict=None"),
        (lambda: Leaky(0.5, spike_grad=torch.sigmoid), "spike_grad is .*pass strict=None"),
    ],
)
def test_a_parameter_out_of_range_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        make()


def test_errors_suggest_the_nearest_known_name() -> None:
    with pytest.raises(UnknownNameError, match=r"reset_mechanism 'substract'.*Did you mean 'subtract'"):
        Leaky(0.5, reset_mechanism="substract")
    with pytest.raises(UnknownNameError, match=r"backend 'tritron'.*Did you mean 'triton'"):
        LIF(backend="tritron")
    with pytest.raises(UnknownNameError, match=r"state 'vv'; known: 'v'.*Did you mean 'v'"):
        LIF().state("vv")
    with pytest.raises(StepModeError, match="T gives each step its own conduct"):
        GatedLIF(T=4, step_mode="s")


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_integer_input_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(InputDtypeError, match=rf"the input is {dtype}; .*x\.float\(\)"):
        LIF()(torch.ones(2, 3, dtype=dtype))


def test_scalars_are_constants_tensors_are_buffers_and_parameters_are_learned() -> None:
    shapes: list[tuple[Any, list[str], list[str]]] = [
        (2.0, [], []),
        (torch.tensor([2.0, 3.0]), [], ["tau"]),
        (torch.nn.Parameter(torch.tensor([2.0, 3.0])), ["tau"], []),
    ]
    for tau, parameters, buffers in shapes:
        neuron = LIF(tau=tau)
        assert [name for name, _ in neuron.named_parameters()] == parameters
        assert [name for name, _ in neuron.named_buffers()] == buffers
    learned = Leaky(0.5, learn_beta=True)
    assert isinstance(learned.beta, torch.nn.Parameter)
    parameter = torch.nn.Parameter(torch.tensor(0.5))
    assert Leaky(parameter, learn_beta=True).beta is parameter


WITH_LEARNED_SCALARS: list[Callable[[], torch.nn.Module]] = [
    PLIF,
    KLIF,
    partial(GatedLIF, 4),
    partial(Leaky, 0.5, learn_beta=True, learn_threshold=True),
    partial(Synaptic, 0.5, 0.5, learn_alpha=True, learn_beta=True, learn_threshold=True),
    partial(Alpha, 0.5, 0.25, learn_alpha=True, learn_beta=True, learn_threshold=True),
    partial(Lapicque, 0.5, learn_beta=True, learn_threshold=True),
    partial(PSN, 4),
    partial(MaskedPSN, 2, 4),
    partial(SlidingPSN, 2),
    partial(Delay, 1.5, learn=True),
]


@pytest.mark.parametrize("make", WITH_LEARNED_SCALARS)
def test_learned_scalars_have_a_dimension(make: Callable[[], torch.nn.Module]) -> None:
    """Checks that learned scalars have a dimension, as `fully_shard` requires, and that older checkpoints load."""
    net = make()
    parameters = dict(net.named_parameters())
    assert parameters
    assert all(parameter.dim() for parameter in parameters.values())
    saved = {name: p.detach() + 0.125 for name, p in net.state_dict().items()}
    net.load_state_dict({name: p.squeeze() if p.shape == (1,) else p for name, p in saved.items()})
    for name, parameter in parameters.items():
        assert torch.equal(parameter, saved[name])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_each_channel_may_have_its_own_tau(backend: str) -> None:
    """Compares each channel of the output with the output of a neuron that has this channel's `tau` as a number."""
    tau = torch.tensor([1.5, 2.0, 4.0])
    x = torch.randn(4, 2, 3, 5, 4, generator=torch.Generator().manual_seed(0)) + 1
    output = LIF(tau=tau.view(3, 1, 1), backend=backend)(x)
    for channel, value in enumerate(tau.tolist()):
        assert torch.equal(output[:, :, channel], LIF(tau=value, backend="torch")(x[:, :, channel]))


@pytest.mark.parametrize("backend", ["torch", "hop", "triton"])
def test_parameters_and_states_that_do_not_fit_the_input_are_refused(backend: str) -> None:
    """Checks that the error names the parameter or state that does not fit, and the remedy."""
    x = torch.ones(5, 2, 3, 4)
    for tau in (torch.full((3,), 2.0), torch.full((2, 2, 3, 4), 2.0)):
        with pytest.raises(ParameterError, match=r"tau has shape .* step of \[2, 3, 4\].*\[C, 1, 1\]"):
            LIF(tau=tau, backend=backend)(x)
    neuron = LIF(backend=backend)
    neuron(x.half())
    with pytest.raises(StateError, match=r"state v is torch.float16 and the input torch.float32\. Call reset\(\)"):
        neuron(x)
    neuron.reset()
    assert neuron(x).dtype == torch.float32
    states: Any = x[0]
    with pytest.raises(TypeError, match="states is a tensor; give a list of num_states=1 tensors"):
        neuron.step(x, states)
    with pytest.raises(TypeError, match="state 0 is a float"):
        neuron.step(x, cast(Any, [1.0]))


@pytest.mark.filterwarnings("ignore::flexsn_nn.errors.RangeWarning")
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_learned_decay_beyond_its_range_acts_as_the_limit(backend: str) -> None:
    """Checks that a learned beta outside of [0, 1] acts as the nearest limit, as in snnTorch."""
    neuron = Leaky(0.5, learn_beta=True, backend=backend)
    assert isinstance(neuron.beta, torch.nn.Parameter)
    neuron.beta.data.fill_(1.5)
    x = torch.full((3, 1), 0.25)
    neuron(x)
    assert neuron.states[0].item() == 0.75


# A neuron, its learned parameter, a first value, a value beyond the range, and the value that the neuron then uses.
BEYOND_RANGE: list[tuple[Callable[..., Neuron], str, float, float, float]] = [
    (LIF, "tau", 2.0, -47.0, 1.0),
    (LI, "tau", 2.0, 0.3, 1.0),
    (ILIF, "tau", 2.0, -1.0, 1.0),
    (partial(ALIF, tau_a=3.0), "tau", 2.0, 0.0, 1.0),
    (ALIF, "tau_a", 3.0, -2.0, TINY),
    (ALIF, "beta", 1.0, -2.0, 0.0),
    (partial(KLIF, v_threshold=0.5), "tau", 2.0, -3.0, 1.0),
    (CUBALIF, "c_decay", 0.5, 1.5, 1.0),
    (CUBALIF, "v_decay", 0.5, -1.5, 0.0),
    (partial(Synaptic, beta=0.5), "alpha", 0.5, 1.25, 1.0),
    (partial(Synaptic, alpha=0.5), "beta", 0.5, -0.25, 0.0),
    (Leaky, "beta", 0.5, 1.25, 1.0),
    (QIF, "a0", 1.0, -1.0, TINY),
    (partial(Lapicque, R=1.0), "beta", 0.5, 1.5, 1.0 - EPS / 2),
    (partial(Lapicque, beta=0.5), "R", 0.5, -1.5, TINY),
]
beyond_range = pytest.mark.parametrize(
    ("make", "name", "start", "beyond", "acts_as"),
    BEYOND_RANGE,
    ids=[f"{getattr(make, 'func', make).__name__}.{name}" for make, name, *_ in BEYOND_RANGE],
)


@pytest.mark.long(
    all_but=[
        "torch-LI.tau",
        "torch-ILIF.tau",
        "torch-CUBALIF.v_decay",
        "torch-QIF.a0",
        "torch-ALIF.beta",
        "torch-KLIF.tau",
        "torch-CUBALIF.c_decay",
        "torch-Synaptic.alpha",
        "torch-Synaptic.beta",
        "torch-LIF.tau",
        "torch-ALIF.tau",
        "torch-Lapicque.beta",
        "torch-Lapicque.R",
        "torch-ALIF.tau_a",
        "torch-Leaky.beta",
        "triton-Lapicque.R",
    ]
)
@beyond_range
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_learned_parameter_beyond_its_range_acts_as_the_limit(
    make: Callable[..., Neuron], name: str, start: float, beyond: float, acts_as: float, backend: str
) -> None:
    x = torch.linspace(-1.0, 3.0, 20).reshape(5, 4)
    neuron = make(**{name: torch.nn.Parameter(torch.tensor(start))}, backend=backend)
    neuron(x)
    assert "has left its range" not in neuron.explain()
    neuron.reset()
    parameter: Any = getattr(neuron, name)
    parameter.data.fill_(beyond)
    output = neuron(x)
    assert re.search(rf"has left its range, .*: {name} is {beyond:g}; it must be ", neuron.explain())
    within = make(**{name: torch.nn.Parameter(torch.tensor(start))}, backend=backend)
    getattr(within, name).data.fill_(acts_as)
    torch.testing.assert_close(output, within(x), rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore::flexsn_nn.errors.RangeWarning")
@pytest.mark.parametrize("make", [LIF, LI, ILIF, QIF, EIF, AdEx, Izhikevich, ALIF, KLIF])
def test_an_optimizer_that_only_decreases_tau_does_not_break_the_neuron(make: Callable[..., Neuron]) -> None:
    neuron = make(tau=torch.nn.Parameter(torch.tensor(1.5)), backend="torch")
    parameter: Any = neuron.tau
    optimizer = torch.optim.SGD([parameter], lr=0.25)
    x = torch.full((4, 3), 0.9)
    for _ in range(40):
        neuron.reset()
        optimizer.zero_grad()
        (neuron(x).sum() * 0.0 + parameter).backward()  # The gradient decreases tau in each step.
        neuron.reset()
        optimizer.step()
        assert neuron(x).isfinite().all()
    assert parameter.item() < -8  # The optimizer moved tau far beyond its range.
    assert "tau has left" not in neuron.explain()
    assert "tau is -8.5; it must be" in neuron.explain()


def test_assigned_values_are_checked() -> None:
    neuron = LIF(tau=2.0)
    with pytest.raises(ParameterError, match=r"tau is 0\.5; it must be at least 1"):
        neuron.tau = 0.5
    neuron.tau = 4.0
    assert neuron.tau == 4.0
    alpha = Alpha(0.9, torch.nn.Parameter(torch.tensor(0.8)))
    cast(Any, alpha.beta).data.fill_(0.95)
    assert alpha(torch.ones(4, 2)).isfinite().all()


def test_repr_shows_parameters() -> None:
    text = repr(LIF(tau=torch.nn.Parameter(torch.tensor(2.0)), v_threshold=torch.ones(3)))
    for part in ("tau=2 (Parameter)", "v_threshold=Tensor[3]", "v_reset=0.0", "backend='auto'"):
        assert part in text


def test_neurons_are_flexsn_modules_with_named_parameters() -> None:
    neuron = PLIF()
    assert isinstance(neuron, Neuron)
    assert isinstance(neuron, FlexSN)
    assert [name for name, _ in neuron.named_parameters()] == ["w"]
