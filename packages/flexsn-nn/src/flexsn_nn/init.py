"""Initial weights.

`fluctuation_driven_` initializes the weights in front of a neuron with a membrane.

`torch.nn.init` has most of the usual initialisations. Common choices for `init=` of a recurrent neuron are:

- ``nn.init.orthogonal_``: keeps the length of every vector, or scales it by `gain`;
- ``None``: uniform in ``±1 / sqrt(features)``, as in `nn.Linear`;
- ``partial(nn.init.normal_, std=g / features**0.5)``: random, with a spectral radius near `g` (Sompolinsky et al.,
  "Chaos in random neural networks", 1988);
- ``nn.init.zeros_``: no recurrence initially;
- ``partial(spectral_radius_, rho=0.9)``: scales the weights to this spectral radius, for a reservoir.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexsn_nn._checks import check_count, check_number, check_tensor
from flexsn_nn.errors import ParameterError

if TYPE_CHECKING:
    from flexsn_nn._flexsn import FlexSN

__all__ = ["fluctuation_driven_", "spectral_radius", "spectral_radius_"]

# A response ends when it has fallen to the fraction `_NEGLIGIBLE` of its largest value. A response counts as endless if
# more than the fraction `_DECAYED` remains at the end of a run, or more than `_NEGLIGIBLE` after `_LONGEST` steps.
_NEGLIGIBLE, _DECAYED, _LONGEST = 1e-6, 0.99, 16384


def spectral_radius(weight: Tensor) -> float:
    """Computes the largest absolute eigenvalue: the long-term growth factor per step of a linear recurrence.

    Args:
        weight: matrix `[N, N]`, or the diagonal `[N]` of a diagonal matrix. The eigenvalues of a matrix are computed in
            float64 on the CPU, in `O(N³)`.

    Raises:
        ParameterError: the weight has another shape, or a value is not finite.

    Example:
        >>> spectral_radius(torch.tensor([[0.0, 2.0], [0.5, 0.0]]))
        1.0
    """
    check_tensor("weight", weight)
    if weight.dim() not in (1, 2) or weight.shape[0] != weight.shape[-1]:
        raise ParameterError(f"weight has shape {list(weight.shape)}; only a square matrix has a spectral radius.")
    values = weight.detach().double().cpu()
    if not bool(values.isfinite().all()):
        raise ParameterError("weight has values that are not finite.")
    if weight.numel() == 0:
        return 0.0
    eigenvalues = values if values.dim() == 1 else torch.linalg.eigvals(values)
    return float(eigenvalues.abs().max())


def spectral_radius_(weight: Tensor, rho: float) -> Tensor:
    """Scales `weight` in place so that its spectral radius is `rho`. Returns `weight`.

    With a radius below 1, a linear recurrence forgets its past. A spiking recurrence also has a threshold and a leak,
    so its radius may exceed 1.

    Args:
        weight: matrix `[N, N]`, or the diagonal `[N]` of a diagonal matrix. The weight may be a parameter.
        rho: spectral radius, at least 0.

    Raises:
        ParameterError: the weight has another shape or values that are not finite, `rho` is negative, or the current
            radius is 0 and cannot be scaled.

    Source: Jaeger, "The echo state approach to analysing and training recurrent neural networks", GMD report 148, 2001.

    Example:
        >>> from flexsn_nn import RLIF
        >>> layer = RLIF(100)
        >>> _ = spectral_radius_(layer.recurrent.weight, 0.9)
        >>> round(spectral_radius(layer.recurrent.weight), 4)
        0.9
    """
    check_number("rho", rho, at_least=0)
    radius = spectral_radius(weight)
    # The eigenvalues of a nilpotent matrix are 0 up to rounding.
    if radius <= torch.finfo(torch.float64).eps * float(weight.detach().double().abs().sum()):
        raise ParameterError("the spectral radius of weight is 0, and no factor can change it.")
    with torch.no_grad():
        return weight.mul_(rho / radius)


def fluctuation_driven_(
    weight: Tensor,
    neuron: FlexSN,
    rate: float,
    xi: float = 1.0,
    mean: float = 0.0,
    share: float = 1.0,
    num_steps: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draws the weights in front of a neuron, so that its membrane fluctuates up to the threshold. Returns the weights.

    The weights change in place. If inputs spike independently at `rate`, the membrane without resets has the mean
    `mean` and the standard deviation `(threshold - mean) / xi`. The membrane's response to one small input is measured
    on a copy of the neuron. Therefore, the result is correct for all time constants, even if the neuron divides its
    input by a time constant. Let `n` be the number of inputs, `e1` the sum of the response over time, and `e2` the sum
    of its squares. The weights are normally distributed. Their mean is `mean / (n rate e1)`. Their variance is
    `share (threshold - mean)² / (xi² n rate e2)` minus the square of their mean. Membranes are measured relative to
    their resting value.

    Args:
        weight: weight `[out, in, ...]` of a linear layer or a convolution. `n` is the number of elements of
            `weight[0]`.
        neuron: neuron after the weights: a ready-made neuron, or your own neuron with a state `v` and a threshold.
        rate: spikes per input and step, above 0 and at most 1. For inputs that are not spikes, `rate` is the mean of
            their squares.
        xi: distance from the mean to the threshold in standard deviations, above 0. The source uses 1 to 3.
        mean: mean of the membrane, below the threshold.
        share: fraction of the variance that these weights contribute, above 0 and at most 1. Recurrent weights
            contribute the rest.
        num_steps: length of the sequences. Required for a membrane that does not decay, such as the membrane of `IF`.
        generator: generator of the random numbers.

    Raises:
        ParameterError: `weight` has fewer than two dimensions, or no elements; a number is out of its range; the neuron
            has no threshold or no state `v`; the neuron's membrane does not decay, and `num_steps` is missing; or no
            weights can produce this `mean`.

    Source: Rossbroich, Gygax and Zenke, "Fluctuation-driven initialization for spiking neural network training",
    Neuromorphic Computing and Engineering 2, 2022.

    Example:
        >>> from flexsn_nn import LIF
        >>> linear = torch.nn.Linear(400, 100)
        >>> _ = fluctuation_driven_(linear.weight, LIF(tau=10.0), rate=0.05)
        >>> round(linear.weight.std().item(), 1)
        1.0
    """
    check_tensor("weight", weight)
    if weight.dim() < 2 or not weight.numel():
        raise ParameterError(f"weight has shape {list(weight.shape)}; it must be [out, in, ...], and not be empty.")
    check_number("rate", rate, above=0, at_most=1)
    check_number("xi", xi, above=0)
    check_number("mean", mean)
    check_number("share", share, above=0, at_most=1)
    if num_steps is not None:
        check_count("num_steps", num_steps)
    response, threshold = _measure_response(neuron, num_steps)
    if mean >= threshold:
        raise ParameterError(f"mean is {mean:g}; it must be below the threshold, which is {threshold:g} above rest.")
    inputs = weight[0].numel()
    first, second = float(response.sum(0).mean()), float(response.square().sum(0).mean())
    center = mean / (inputs * rate * first)
    variance = share * ((threshold - mean) / xi) ** 2 / (inputs * rate * second) - center**2
    if variance <= 0:
        raise ParameterError(
            f"no weights of {inputs} inputs produce a membrane with the mean {mean:g}: use a smaller mean or xi."
        )
    with torch.no_grad():
        return weight.normal_(center, variance**0.5, generator=generator)


def _measure_response(neuron: FlexSN, num_steps: int | None) -> tuple[Tensor, float]:
    """Computes a membrane's response `[T, *step]` per unit of input at the first step, and the threshold above rest.

    The response is that of small inputs, which do not reach the threshold.
    """
    from flexsn_nn.neuron import Feedback, Neuron, Recurrent  # that module imports this one

    inner = neuron.neuron if isinstance(neuron, Recurrent) else neuron
    limit = getattr(inner, "v_threshold", getattr(inner, "threshold", None))
    if not isinstance(inner, Neuron) or "v" not in inner.state_names or limit is None:
        raise ParameterError(f"{type(inner).__name__} has no state v with a threshold: the size of weights is unknown.")
    probe = deepcopy(inner).cpu().double().eval()
    probe.reset()
    probe.step_mode, probe.backend, probe.store_state_seqs = "m", "torch", True
    if isinstance(probe, Feedback):
        step = torch.Size((1, probe.V.shape[-1] if probe.V.dim() else 1))
    else:
        values = [*probe.parameters(), *probe.buffers()]
        step = torch.broadcast_shapes((1, 1), *(value.shape for value in values))
    length = num_steps or 256
    amplitude = 1e-6  # far below the threshold, where the step is linear
    while True:
        x = torch.zeros(length, *step, dtype=torch.float64)
        resting = _run_membrane(probe, x)
        x[0] = amplitude
        response = (_run_membrane(probe, x) - resting) / amplitude
        remaining = float(response[-1].abs().max()) / float(response.abs().max())
        if num_steps is not None or remaining <= _NEGLIGIBLE:
            break
        if length >= _LONGEST or remaining > _DECAYED:
            raise ParameterError(f"the membrane of {type(inner).__name__} does not decay: give num_steps.")
        length *= 2
    height = torch.as_tensor(limit).detach().double().cpu() - resting[-1]
    return response, float(height.mean())


def _run_membrane(probe: FlexSN, x: Tensor) -> Tensor:
    from flexsn_nn.neuron import Neuron

    assert isinstance(probe, Neuron)
    probe.reset()
    with torch.no_grad():
        probe(x)
    voltage = probe.state_seq("v")
    assert voltage is not None
    return voltage
