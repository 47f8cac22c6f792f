"""Surrogate gradients: the exact step function in the forward, and a chosen derivative in the backward.

Most surrogates exist as a class and as a function. Instances of the class are functions of `x = membrane - threshold`
with fixed parameters. The function takes `x` and the parameters. A function with the name of a factory in snnTorch also
works as a factory: `fast_sigmoid(slope=25)` returns a surrogate that fires if `x > 0`.
"""

from __future__ import annotations

from flexsn_nn.surrogate._base import Surrogate
from flexsn_nn.surrogate._bell import ATan, Erf, Sigmoid, Tanh, erf, tanh
from flexsn_nn.surrogate._endless import (
    SquarewaveFourierSeries,
    StraightThrough,
    squarewave_fourier_series,
    straight_through,
)
from flexsn_nn.surrogate._exponential import PiecewiseExp, SpikeRateEscape, piecewise_exp
from flexsn_nn.surrogate._one_sided import (
    S2NN,
    LeakyKReLU,
    LogTailedReLU,
    leaky_k_relu,
    log_tailed_relu,
    s2nn,
)
from flexsn_nn.surrogate._power import (
    FakeNumericalGradient,
    FastSigmoid,
    NonzeroSignLogAbs,
    QPseudoSpike,
    SoftSign,
    SparseFastSigmoid,
    SuperSpike,
    fake_numerical_gradient,
    nonzero_sign_log_abs,
    q_pseudo_spike,
    soft_sign,
    super_spike,
)
from flexsn_nn.surrogate._snntorch import LSO, SFS, custom_surrogate, heaviside, straight_through_estimator
from flexsn_nn.surrogate._two_ways import atan, fast_sigmoid, sigmoid, spike_rate_escape, triangular
from flexsn_nn.surrogate._window import (
    PiecewiseLeakyReLU,
    PiecewiseQuadratic,
    Rect,
    Tent,
    Triangular,
    piecewise_leaky_relu,
    piecewise_quadratic,
    rect,
)

__all__ = [
    "LSO",
    "S2NN",
    "SFS",
    "ATan",
    "Erf",
    "FakeNumericalGradient",
    "FastSigmoid",
    "LeakyKReLU",
    "LogTailedReLU",
    "NonzeroSignLogAbs",
    "PiecewiseExp",
    "PiecewiseLeakyReLU",
    "PiecewiseQuadratic",
    "QPseudoSpike",
    "Rect",
    "Sigmoid",
    "SoftSign",
    "SparseFastSigmoid",
    "SpikeRateEscape",
    "SquarewaveFourierSeries",
    "StraightThrough",
    "SuperSpike",
    "Surrogate",
    "Tanh",
    "Tent",
    "Triangular",
    "atan",
    "custom_surrogate",
    "erf",
    "fake_numerical_gradient",
    "fast_sigmoid",
    "heaviside",
    "leaky_k_relu",
    "log_tailed_relu",
    "nonzero_sign_log_abs",
    "piecewise_exp",
    "piecewise_leaky_relu",
    "piecewise_quadratic",
    "q_pseudo_spike",
    "rect",
    "s2nn",
    "sigmoid",
    "soft_sign",
    "spike_rate_escape",
    "squarewave_fourier_series",
    "straight_through",
    "straight_through_estimator",
    "super_spike",
    "tanh",
    "triangular",
]
