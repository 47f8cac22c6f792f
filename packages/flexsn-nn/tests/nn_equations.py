"""The equation of each neuron, written separately, and a plain loop over it. The tests use both as their reference.

This file imports nothing from flexsn_nn except the constructors under test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

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
    QIF,
    RALIF,
    RLIF,
    AdEx,
    Alpha,
    GatedLIF,
    Izhikevich,
    Lapicque,
    Leaky,
    Recurrent,
    RefractoryLIF,
    RLeaky,
    RSynaptic,
    StochasticLIF,
    Synaptic,
    TernaryIF,
    TernaryLIF,
)
from flexsn_nn.neuron import Neuron

Params = Mapping[str, Tensor]
Step = Callable[[Params, Tensor, Sequence[Tensor]], tuple[Tensor, ...]]


def with_gradient(hard: Tensor, x: Tensor, slope: Tensor) -> Tensor:
    """Returns `hard`, with the derivative `slope` with respect to `x`."""
    return hard.detach() + (x - x.detach()) * slope.detach()


def sigmoid_spike(x: Tensor, *, strict: bool = False) -> Tensor:
    """A step function whose derivative is that of `sigmoid(4 x)`, written with cosh: `1 / cosh²(2 x)`."""
    hard = torch.where(x > 0 if strict else x >= 0, 1.0, 0.0).to(x.dtype)
    return with_gradient(hard, x, torch.cosh(2 * x).square().reciprocal())


def atan_spike(x: Tensor) -> Tensor:
    """A step function at `x > 0`, with the derivative of `atan(pi x) / pi`."""
    return with_gradient(torch.where(x > 0, 1.0, 0.0).to(x.dtype), x, 1 / (1 + (math.pi * x) ** 2))


def rect_spike(x: Tensor) -> Tensor:
    """A step function whose derivative is 1 where `|x| < 0.5`, and 0 elsewhere."""
    inside = torch.where((x < 0.5) & (x > -0.5), 1.0, 0.0).to(x.dtype)
    return with_gradient(torch.where(x >= 0, 1.0, 0.0).to(x.dtype), x, inside)


def reset(h: Tensor, s: Tensor, v_reset: float | None, v_th: float | Tensor, *, detach: bool = False) -> Tensor:
    """Returns the membrane potential after a reset in the same step."""
    s = s.detach() if detach else s
    return h - s * v_th if v_reset is None else s * v_reset + (1 - s) * h


@dataclass(frozen=True)
class Case:
    """A neuron, its equation, and the initial values of its states.

    Attributes:
        make: function that creates the neuron. Its arguments are options of the constructor, such as `backend`.
        step: `(parameters, x, states) -> (output, *new_states)`.
        starts: initial value of each state.
        scale, shift: factor and offset of the input. With them, some neurons fire and other neurons do not.
        fires: True if the neuron can fire.
        smooth: options that give the neuron a smooth spike function, for gradcheck. `None`: no such options exist.
    """

    name: str
    make: Callable[..., Neuron]
    step: Step
    starts: Sequence[float]
    scale: float = 1.0
    shift: float = 0.4
    fires: bool = True
    smooth: Mapping[str, Any] | None = field(default_factory=lambda: {"surrogate_function": smooth_spike})


def smooth_spike(x: Tensor) -> Tensor:
    """A smooth function in place of spikes."""
    return torch.sigmoid(2 * x)


def _make(kind: type[Neuron], **fixed: Any) -> Callable[..., Neuron]:
    def make(**options: Any) -> Neuron:
        torch.manual_seed(5)  # The constructor of GatedLIF draws random gates.
        return kind(**{**fixed, **options}).double()

    return make


def _if(p: Params, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (v,) = states
    h = v + x
    s = sigmoid_spike(h - 0.8)
    return s, reset(h, s, 0.0, 0.8)


def _lif(tau: float, decay_input: bool, v_reset: float | None, *, detach: bool = False, strict: bool = False) -> Step:
    rest = v_reset or 0.0

    def step(p: Params, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        (v,) = states
        h = v + (x - (v - rest)) / tau if decay_input else v - (v - rest) / tau + x
        s = sigmoid_spike(h - 1.0, strict=strict)
        return s, reset(h, s, v_reset, 1.0, detach=detach)

    return step


def _plif(p: Params, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (v,) = states
    h = v + (x - (v - 0.1)) / (1 + torch.exp(-p["w"]))
    s = sigmoid_spike(h - p["v_threshold"])
    return s, reset(h, s, 0.1, p["v_threshold"])


def _plif_no_decay(p: Params, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (v,) = states
    h = v - v / (1 + torch.exp(-p["w"])) + x
    s = sigmoid_spike(h - 1.0)
    return s, reset(h, s, None, 1.0)


def _qif(p: Params, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (v,) = states
    h = v + (x + 1.2 * (v - 0.05) * (v - 0.7)) / 3.0
    s = sigmoid_spike(h - 0.9)
    return s, reset(h, s, -0.1, 0.9)


def _eif(p: Params, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (v,) = states
    h = v + (x + 0.05 - v + 0.7 * torch.exp((v - 0.6) / 0.7)) / 3.0
    s = sigmoid_spike(h - 1.0)
    return s, reset(h, s, -0.1, 1.0)


def _adex(p: Params, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    v, w = states
    h = v + (x + 0.05 - v + 0.7 * torch.exp((v - 0.6) / 0.7) - w) / p["tau"]
    s = sigmoid_spike(h - 1.0)
    return s, reset(h, s, -0.1, 1.0), w + (0.2 * (v - 0.05) - w) / 4.0 + 0.3 * s


def _izhikevich(p: Params, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    v, w = states
    h = v + (x + 1.2 * (v + 0.1) * (v - 0.8) - w) / 2.0
    s = sigmoid_spike(h - 1.0)
    return s, reset(h, s, 0.0, 1.0, detach=True), w + (0.2 * (h + 0.1) - w) / 3.0 + 0.4 * s


def _cubalif(p: Params, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    i, v = states
    new_i = 0.5 * i + x
    h = 0.75 * v + new_i
    s = rect_spike(h - 0.5)
    return s, new_i, reset(h, s, 0.0, 0.5)


def _klif(*, scale_reset: bool, v_reset: float | None) -> Step:
    def step(p: Params, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        (v,) = states
        h = torch.clamp(p["k"] * (v + (x - v) / 2.0), min=0)
        s = sigmoid_spike(h - 1.0)
        if not scale_reset:
            return s, reset(h, s, v_reset, 1.0)
        return s, reset(h / p["k"], s, v_reset, 1.0 / p["k"])

    return step


def _liaf(p: Params, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (v,) = states
    h = v + (x - v) / 2.0
    s = sigmoid_spike(h - 0.7)
    return torch.tanh(h - 0.7), reset(h, s, None, 0.7)


def _alif(*, v_reset: float | None) -> Step:
    rho = math.exp(-1 / 5.0)

    def step(p: Params, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        v, a = states
        beta = p.get("beta", 1.8)
        threshold = 0.6 + beta * a
        h = v + (x - v) / 2.0
        s = sigmoid_spike(h - threshold)
        return s, reset(h, s, v_reset, threshold), rho * a + s

    return step


def _ilif(p: Params, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (v,) = states
    h = v - v / (4 / 3) + x
    u = h / 0.8
    inside = torch.where((u >= 0) & (u <= 3), 1.0, 0.0).to(u.dtype)
    # Python's round also rounds halves to even.
    counts = [round(min(max(value, 0.0), 3.0)) for value in u.detach().flatten().tolist()]
    s = with_gradient(torch.tensor(counts, dtype=u.dtype).reshape(u.shape), u, inside)
    return s, h - 0.8 * s


def _li(p: Params, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (v,) = states
    h = v + (x - v) / p["tau"]
    return h, h


def _li_no_decay(p: Params, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (v,) = states
    h = v * (1 - 1 / 3.0) + x
    return h, h


def _gated_lif(p: Params, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    v, s = states
    g = {name: 1 / (1 + torch.exp(-value)) for name, value in p.items()}
    keep = 1 - g["alpha"] * (1 - g["tau"])
    h = (
        keep * v
        - (1 - g["alpha"]) * g["leak"]
        + x * (1 - g["beta"] * (1 - g["conduct"]))
        - keep * v * g["gamma"] * s
        - (1 - g["gamma"]) * g["v_sub"] * s
    )
    spike = sigmoid_spike(h - g["v_threshold"])
    return spike, h, spike


def _clif(p: Params, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    v, m = states
    h = (1 - 1 / 1.6) * v + x
    s = rect_spike(h - 0.9)
    m = m / (1 + torch.exp(-h / 1.6)) + s
    return s, h - s * (0.9 + 1 / (1 + torch.exp(-m))), m


def _ternary(charge: Callable[[Tensor, Tensor], Tensor], v_reset: float | None, *, detach: bool) -> Step:
    def step(p: Params, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        (v,) = states
        h = charge(x, v)
        up, down = sigmoid_spike(h - 0.7), sigmoid_spike(-0.7 - h)
        s = up - down
        fired = (s if v_reset is None else up + down).detach() if detach else s if v_reset is None else up + down
        return s, h - 0.7 * fired if v_reset is None else v_reset * fired + (1 - fired) * h

    return step


def _refractory(absolute: float, relative: float, rise: float, v_reset: float | None) -> Step:
    def step(p: Params, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        v, r = states
        silent = r > relative
        threshold = 0.6 + (rise * r / relative if rise else 0.0)
        h = torch.where(silent, v, v + (x - v) / 2.0)
        s = torch.where(silent, 0.0, sigmoid_spike(h - threshold))
        remaining = torch.where(s > 0, absolute + relative, torch.where(r > 1, r - 1, 0.0))
        return s, reset(h, s, v_reset, threshold), remaining

    return step


def steady_noise(like: Tensor) -> Tensor:
    """Returns noise that is equal at every step."""
    return torch.linspace(-1, 1, like.shape[-1], dtype=like.dtype, device=like.device).expand_as(like)


def _stochastic(p: Params, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (v,) = states
    h = v + (x - v) / 2.5
    s = sigmoid_spike(h - 0.7 + p["scale"] * steady_noise(x))
    return s, reset(h, s, 0.0, 0.7)


def _make_stochastic(**options: Any) -> Neuron:
    neuron = StochasticLIF(
        **{"scale": torch.nn.Parameter(torch.tensor(0.4)), "tau": 2.5, "v_threshold": 0.7, **options}
    )
    # Each call receives this noise as its second input.
    neuron._check_inputs = partial(_with_noise, neuron._check_inputs)  # type: ignore[method-assign]
    neuron._list_completing_transforms = _complete  # type: ignore[method-assign]
    return neuron.double()


def _with_noise(checked: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Any:
    return checked((inputs[0], steady_noise(inputs[0])) if len(inputs) == 1 else inputs)


def _complete(inputs: tuple[Tensor, ...]) -> tuple[()]:
    return ()


def _wrap(kind: type[Neuron], **fixed: Any) -> Callable[..., Neuron]:
    """Returns a function that makes a `Recurrent` around a neuron, with a matrix for 35 neurons."""

    def make(**options: Any) -> Neuron:
        torch.manual_seed(5)
        return Recurrent(kind(**{**fixed, **options}), 35).double()

    return make


def _leaky(mechanism: str) -> Step:
    def step(p: Params, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        (v,) = states
        beta, threshold = p["beta"], p["threshold"]
        r = torch.where(v > threshold, 1.0, 0.0).to(v.dtype)
        h = {
            "subtract": beta * v + x - r * threshold,
            "zero": beta * v * (1 - r) + x,
            "none": beta * v + x,
        }[mechanism]
        return atan_spike(h - threshold), h

    return step


def _synaptic(mechanism: str) -> Step:
    def step(p: Params, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        i, v = states
        r = torch.where(v > 0.9, 1.0, 0.0).to(v.dtype)
        new_i = p["alpha"] * i + x
        h = p["beta"] * v + new_i
        h = {"subtract": h - r * 0.9, "zero": h * (1 - r), "none": h}[mechanism]
        return atan_spike(h - 0.9), new_i, h

    return step


def _alpha(mechanism: str) -> Step:
    def step(p: Params, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        e, i, v = states
        alpha, beta = p.get("alpha", torch.tensor(0.8, dtype=v.dtype)), torch.tensor(0.6, dtype=v.dtype)
        r = torch.where(v > 0.5, 1.0, 0.0).to(v.dtype)
        new_e, new_i = alpha * e + x, beta * i - x
        h = (alpha.log() / (beta / alpha).log() + 1) * (new_e + new_i)
        if mechanism == "zero":
            new_e, new_i, h = new_e * (1 - r), new_i * (1 - r), h * (1 - r)
        elif mechanism == "subtract":
            new_e, new_i, h = new_e - 0.5 * r, new_i * (1 - r), h + r * i
        return atan_spike(h - 0.5), new_e, new_i, h

    return step


def _lapicque(mechanism: str) -> Step:
    def step(p: Params, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        (v,) = states
        # With dt = 1 and R = 2, beta determines C: dt / (R C) = -ln(beta).
        inverse_rc = -p["beta"].log() if "beta" in p else torch.tensor(1 / (2 * 3), dtype=v.dtype)
        r = torch.where(v > 0.6, 1.0, 0.0).to(v.dtype)
        h = (1 - inverse_rc) * v + 2 * inverse_rc * x
        h = {"subtract": h - r * 0.6, "zero": h * (1 - r), "none": h}[mechanism]
        return atan_spike(h - 0.6), h

    return step


def _compute_feedback(p: Params, s: Tensor) -> Tensor:
    """Computes the feedback of the previous step's spikes, by an explicit sum."""
    if "recurrent.V" in p:
        return p["recurrent.V"] * s
    feedback = (s.unsqueeze(-2) * p["recurrent.weight"]).sum(-1)
    return feedback + p["recurrent.bias"] if "recurrent.bias" in p else feedback


def _add_feedback(step: Step, name: str = "neuron.") -> Step:
    """Returns a step whose input also contains the feedback of the previous output."""

    def fed(p: Params, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        s, *rest = states
        neuron_params = {key.removeprefix(name): value for key, value in p.items()}
        output, *new_states = step(neuron_params, x + _compute_feedback(p, s), rest)
        return output, output, *new_states

    return fed


def _rleaky(mechanism: str, *, delay: bool) -> Step:
    def step(p: Params, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        s, v = states
        r = torch.where(v > 0.9, 1.0, 0.0).to(v.dtype)
        h = p["beta"] * v + x + _compute_feedback(p, s)
        h = {"subtract": h - r * 0.9, "zero": h * (1 - r), "none": h}[mechanism]
        spike = atan_spike(h - 0.9)
        if delay:
            return spike, spike, h
        late = spike - r
        return spike, spike, {"subtract": h - late * 0.9, "zero": h * (1 - late), "none": h}[mechanism]

    return step


def _rsynaptic(mechanism: str) -> Step:
    def step(p: Params, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        s, i, v = states
        spike, *new_states = _synaptic(mechanism)(p, x + _compute_feedback(p, s), [i, v])
        return spike, spike, *new_states

    return step


_SMOOTH = {"surrogate_function": smooth_spike}
_DELAYED = {"spike_grad": smooth_spike, "strict": None}
# One value per channel of a step [2, 35].
_CHANNELS = torch.linspace(0.3, 0.8, 35)


def _cases() -> list[Case]:
    w = torch.nn.Parameter
    synaptic = {"learn_alpha": True, "learn_beta": True}
    cases = [
        Case("if", _make(IF, v_threshold=0.8), _if, [0]),
        Case("lif", _make(LIF, tau=2.5), _lif(2.5, True, 0.0), [0], shift=1.0),
        Case("lif_soft", _make(LIF, tau=2.5, v_reset=None), _lif(2.5, True, None), [0], shift=1.0),
        Case("lif_raw", _make(LIF, tau=2.5, decay_input=False), _lif(2.5, False, 0.0), [0]),
        Case(
            "lif_detached",
            _make(LIF, tau=2.5, v_reset=-0.2, detach_reset=True, strict=True),
            _lif(2.5, True, -0.2, detach=True, strict=True),
            [-0.2],
            shift=1.0,
            smooth=None,
        ),
        Case(
            "lif_soft_detached",
            _make(LIF, tau=2.5, v_reset=None, detach_reset=True, decay_input=False),
            _lif(2.5, False, None, detach=True),
            [0],
            smooth=None,
        ),
        Case(
            "plif",
            _make(PLIF, init_tau=1 + _CHANNELS, v_reset=0.1, v_threshold=w(torch.tensor(0.9))),
            _plif,
            [0.1],
        ),
        Case("plif_raw", _make(PLIF, init_tau=1.7, decay_input=False, v_reset=None), _plif_no_decay, [0]),
        Case("qif", _make(QIF, tau=3.0, v_c=0.7, a0=1.2, v_rest=0.05, v_threshold=0.9), _qif, [-0.1], 2.0),
        Case("eif", _make(EIF, tau=3.0, delta_T=0.7, theta_rh=0.6, v_rest=0.05), _eif, [-0.1], 2.0),
        Case(
            "adex",
            _make(
                AdEx,
                tau=w(torch.tensor(3.0)),
                delta_T=0.7,
                theta_rh=0.6,
                v_rest=0.05,
                tau_w=4.0,
                a=0.2,
                b=0.3,
            ),
            _adex,
            [-0.1, 0],
            2.0,
        ),
        Case(
            "izhikevich",
            _make(Izhikevich, a0=1.2, tau_w=3.0, a=0.2, b=0.4, detach_reset=True),
            _izhikevich,
            [0, 0],
            2.0,
            smooth=None,
        ),
        Case("cubalif", _make(CUBALIF), _cubalif, [0, 0], 0.5, 0.1),
        Case(
            "klif",
            _make(KLIF, init_k=1.3),
            _klif(scale_reset=False, v_reset=0.0),
            [0],
            shift=1.0,
            smooth=None,  # relu is not differentiable at zero
        ),
        Case(
            "klif_scaled",
            _make(KLIF, init_k=1 + _CHANNELS, scale_reset=True, v_reset=None),
            _klif(scale_reset=True, v_reset=None),
            [0],
            shift=1.0,
            smooth=None,
        ),
        Case(
            "liaf",
            _make(LIAF, act=torch.tanh, threshold_related=True, v_threshold=0.7, v_reset=None),
            _liaf,
            [0],
        ),
        Case("alif", _make(ALIF, tau_a=5.0, v_threshold=0.6), _alif(v_reset=0.0), [0, 0]),
        Case(
            "alif_soft",
            _make(ALIF, tau_a=5.0, v_threshold=0.6, v_reset=None, beta=w(_CHANNELS.clone())),
            _alif(v_reset=None),
            [0, 0],
        ),
        Case("ilif", _make(ILIF, D=3, v_threshold=0.8), _ilif, [0], 2.0, smooth=None),
        Case("li", _make(LI, tau=w(2 + _CHANNELS)), _li, [0], fires=False, smooth={}),
        Case("li_raw", _make(LI, tau=3.0, decay_input=False), _li_no_decay, [0], fires=False, smooth={}),
        Case("gated_lif", _make(GatedLIF, init_linear_decay=0.05), _gated_lif, [0, 0], smooth=_SMOOTH),
        Case("clif", _make(CLIF, tau=1.6, v_threshold=0.9), _clif, [0, 0]),
        Case("ternary_if", _make(TernaryIF, v_threshold=0.7), _ternary(lambda x, v: v + x, 0.0, detach=False), [0]),
        Case(
            "ternary_lif_soft",
            _make(TernaryLIF, tau=2.5, v_threshold=0.7, v_reset=None),
            _ternary(lambda x, v: v + (x - v) / 2.5, None, detach=False),
            [0],
        ),
        Case(
            "ternary_lif_detached",
            _make(TernaryLIF, tau=2.5, v_threshold=0.7, decay_input=False, v_reset=-0.1, detach_reset=True),
            _ternary(lambda x, v: v - (v + 0.1) / 2.5 + x, -0.1, detach=True),
            [-0.1],
            smooth=None,
        ),
        Case("refractory", _make(RefractoryLIF, v_threshold=0.6), _refractory(2, 0, 0, 0.0), [0, 0], shift=1.0),
        Case(
            "refractory_relative",
            _make(RefractoryLIF, absolute=1, relative=3.0, rise=0.5, v_threshold=0.6, v_reset=None),
            _refractory(1, 3, 0.5, None),
            [0, 0],
            shift=1.0,
            smooth=None,  # the remaining refractory time is not differentiable everywhere
        ),
        Case("stochastic", _make_stochastic, _stochastic, [0]),
        Case(
            "lapicque_rc",
            _make(Lapicque, R=2.0, C=3.0, threshold=0.6),
            _lapicque("subtract"),
            [0],
            2.0,
            smooth=None,
        ),
    ]
    cases += [
        Case(
            "rlif",
            _make(RLIF, features=35, tau=2.5, decay_input=True),
            _add_feedback(_lif(2.5, True, 0.0)),
            [0, 0],
            1.0,
            1.0,
        ),
        Case(
            "rlif_one_to_one",
            _make(RLIF, features=35, tau=2.5, decay_input=True, all_to_all=False, V=-0.6, v_reset=-0.2),
            _add_feedback(_lif(2.5, True, -0.2)),
            [0, -0.2],
            shift=1.0,
        ),
        Case(
            "ralif",
            _make(RALIF, features=35, tau_a=5.0, beta=1.8, decay_input=True, v_threshold=0.6, bias=True),
            _add_feedback(_alif(v_reset=0.0)),
            [0, 0, 0],
        ),
        Case("recurrent_lif", _wrap(LIF, tau=2.5), _add_feedback(_lif(2.5, True, 0.0)), [0, 0], 1.0, 1.0),
        Case(
            "recurrent_plif",
            _wrap(PLIF, init_tau=1.7, decay_input=False, v_reset=None),
            _add_feedback(_plif_no_decay),
            [0, 0],
        ),
        Case(
            "recurrent_adex",
            _wrap(AdEx, tau=w(torch.tensor(3.0)), delta_T=0.7, theta_rh=0.6, v_rest=0.05, tau_w=4.0, a=0.2, b=0.3),
            _add_feedback(_adex),
            [0, -0.1, 0],
            2.0,
        ),
        Case(
            "recurrent_gated_lif",
            _wrap(GatedLIF, init_linear_decay=0.05),
            _add_feedback(_gated_lif),
            [0, 0, 0],
        ),
        Case(
            "recurrent_li",
            _wrap(LI, tau=3.0, decay_input=False),
            _add_feedback(_li_no_decay),
            [0, 0],
            0.3,
            fires=False,
            smooth={},
        ),
        Case(
            "recurrent_leaky",
            _wrap(Leaky, beta=_CHANNELS, threshold=0.9, learn_beta=True, learn_threshold=True, reset_mechanism="zero"),
            _add_feedback(_leaky("zero")),
            [0, 0],
            smooth=None,
        ),
    ]
    for mechanism in ("subtract", "zero", "none"):
        reset_option = {"reset_mechanism": mechanism}
        # The condition of a reset has no gradient, and a threshold is not smooth.
        smooth = _DELAYED if mechanism == "none" else None
        learned = {"learn_beta": True, "threshold": 0.9}
        cases += [
            Case(
                f"rleaky_{mechanism}",
                _make(RLeaky, beta=_CHANNELS, linear_features=35, **learned, **reset_option),
                _rleaky(mechanism, delay=True),
                [0, 0],
                smooth=smooth,
            ),
            Case(
                f"rleaky_at_once_{mechanism}",
                _make(RLeaky, beta=0.7, all_to_all=False, V=-0.4, reset_delay=False, **learned, **reset_option),
                _rleaky(mechanism, delay=False),
                [0, 0],
                smooth=smooth,
            ),
            Case(
                f"rsynaptic_{mechanism}",
                _make(
                    RSynaptic, alpha=_CHANNELS, beta=0.7, threshold=0.9, linear_features=35, **synaptic, **reset_option
                ),
                _rsynaptic(mechanism),
                [0, 0, 0],
                0.5,
                0.1,
                smooth=smooth,
            ),
            Case(
                f"leaky_{mechanism}",
                _make(Leaky, beta=_CHANNELS, threshold=0.9, learn_beta=True, learn_threshold=True, **reset_option),
                _leaky(mechanism),
                [0],
                smooth=smooth,
            ),
            Case(
                f"synaptic_{mechanism}",
                _make(Synaptic, alpha=_CHANNELS, beta=0.7, threshold=0.9, **synaptic, **reset_option),
                _synaptic(mechanism),
                [0, 0],
                smooth=smooth,
            ),
            Case(
                f"alpha_{mechanism}",
                _make(Alpha, alpha=0.8, beta=0.6, threshold=0.5, learn_alpha=True, **reset_option),
                _alpha(mechanism),
                [0, 0, 0],
                smooth=smooth,
            ),
            Case(
                f"lapicque_{mechanism}",
                _make(Lapicque, beta=0.7, R=2.0, threshold=0.6, learn_beta=True, **reset_option),
                _lapicque(mechanism),
                [0],
                2.0,
                smooth=smooth,
            ),
        ]
    return cases


CASES = _cases()


@dataclass(frozen=True)
class Result:
    """The results of a run.

    Attributes:
        outputs, states: outputs `[T, *step]`, and the final states.
        gradients: gradients by name. The names are `x`, `state 0`, ..., and those of parameters.
    """

    outputs: Tensor
    states: list[Tensor]
    gradients: dict[str, Tensor]


def draw_input(case: Case, steps: int, shape: Sequence[int], seed: int = 0) -> Tensor:
    """Draws an input sequence that makes some neurons fire."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn((steps, *shape), generator=generator, dtype=torch.float64)
    return case.scale * values + case.shift


def draw_states(case: Case, shape: Sequence[int]) -> list[Tensor]:
    """Draws random values for the states, as they could be in the middle of a run."""
    generator = torch.Generator().manual_seed(3)
    return [0.3 * torch.randn(tuple(shape), generator=generator, dtype=torch.float64) for _ in case.starts]


def run_oracle(case: Case, neuron: Neuron, x: Tensor, states: Sequence[Tensor] | None = None) -> Result:
    """Runs the equation in a loop, with copies of the neuron's parameters. `states=None`: from the initial states."""
    params = {name: p.detach().clone().requires_grad_() for name, p in neuron.named_parameters()}
    leaf = x.detach().clone().requires_grad_()
    if states is None:
        states = [torch.full(x.shape[1:], start, dtype=x.dtype) for start in case.starts]
    starts = [state.detach().clone().requires_grad_() for state in states]
    carried, outputs = list(starts), []
    for t in range(len(x)):
        output, *carried = case.step(params, leaf[t], carried)
        outputs.append(output)
    return _differentiate(torch.stack(outputs), carried, leaf, starts, params)


def run_neuron(neuron: Neuron, x: Tensor, states: Sequence[Tensor] | None = None) -> Result:
    """Runs the neuron under test. `states=None`: from the neuron's own initial states."""
    neuron.reset()
    leaf = x.detach().clone().requires_grad_()
    starts: list[Tensor] = []
    if states is not None:
        starts = [state.detach().clone().requires_grad_() for state in states]
        neuron.states = list(starts)
    outputs = neuron(leaf)
    result = _differentiate(outputs, neuron.states, leaf, starts, dict(neuron.named_parameters()))
    neuron.reset()
    return result


def _differentiate(
    outputs: Tensor, states: Sequence[Tensor], x: Tensor, starts: Sequence[Tensor], params: Params
) -> Result:
    generator = torch.Generator().manual_seed(1)
    loss = torch.zeros((), dtype=torch.float64)
    for result in (outputs, *states):
        weights = torch.randn(result.shape, generator=generator, dtype=torch.float64)
        loss = loss + (result.double() * weights).sum()
    leaves = {"x": x, **{f"state {i}": s for i, s in enumerate(starts)}, **params}
    gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return Result(outputs.detach(), [s.detach() for s in states], dict(zip(leaves, gradients, strict=True)))


def assert_same(result: Result, expected: Result, *, rtol: float = 1e-9, atol: float = 1e-10) -> None:
    """Compares the outputs, the final states, and the gradients of `result` with `expected`."""
    torch.testing.assert_close(result.outputs, expected.outputs, rtol=rtol, atol=atol)
    for state, other in zip(result.states, expected.states, strict=True):
        torch.testing.assert_close(state, other, rtol=rtol, atol=atol)
    for name, gradient in result.gradients.items():
        torch.testing.assert_close(
            gradient, expected.gradients[name], rtol=rtol, atol=atol, msg=f"the gradient of {name} differs"
        )
