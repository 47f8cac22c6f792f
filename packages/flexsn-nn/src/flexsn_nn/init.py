"""Where recurrent weights start.

`torch.nn.init` has most of what the field uses, for `init=` of a recurrent neuron:

- ``nn.init.orthogonal_``: every direction keeps its length; also scaled, with `gain`;
- ``None``: uniform in ``±1 / sqrt(features)``, as in `nn.Linear`;
- ``partial(nn.init.normal_, std=g / features**0.5)``: random, with a spectral radius near `g` (Sompolinsky et al.,
  "Chaos in random neural networks", 1988);
- ``nn.init.zeros_``: as without recurrence, at first;
- ``partial(spectral_radius_, rho=0.9)``: as it is, scaled: a reservoir.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexsn_nn._checks import check_number, check_tensor
from flexsn_nn.errors import ParameterError

__all__ = ["spectral_radius", "spectral_radius_"]


def spectral_radius(weight: Tensor) -> float:
    """The largest absolute value of an eigenvalue: by how much a linear recurrence grows in a step, in the long run.

    Args:
        weight: a matrix `[N, N]`; or `[N]`, the diagonal of one. Computed in float64 on the CPU, in `O(N³)`.

    Raises:
        ParameterError: another shape, or values that are not finite.

    Example:
        >>> spectral_radius(torch.tensor([[0.0, 2.0], [0.5, 0.0]]))
        1.0
    """
    check_tensor("weight", weight)
    if weight.dim() not in (1, 2) or weight.shape[0] != weight.shape[-1]:
        raise ParameterError(f"weight has shape {list(weight.shape)}; a spectral radius is of a square matrix [N, N].")
    values = weight.detach().double().cpu()
    if not bool(values.isfinite().all()):
        raise ParameterError("weight has values that are not finite.")
    if weight.numel() == 0:
        return 0.0
    eigenvalues = values if values.dim() == 1 else torch.linalg.eigvals(values)
    return float(eigenvalues.abs().max())


def spectral_radius_(weight: Tensor, rho: float) -> Tensor:
    """Scales `weight`, in place, so that its spectral radius is `rho`; returns it.

    Below 1, a linear recurrence forgets; a spiking one has a threshold and a leak besides: 1 is no border there.

    Args:
        weight: a matrix `[N, N]`, or `[N]`, the diagonal of one; a parameter, too.
        rho: at least 0.

    Raises:
        ParameterError: another shape, a negative `rho`, or a matrix whose spectral radius is 0, which no factor scales.

    Source: Jaeger, "The echo state approach to analysing and training recurrent neural networks", GMD report 148, 2001.

    Example:
        >>> from flexsn_nn import RLIF
        >>> layer = RLIF(100)
        >>> _ = spectral_radius_(layer.recurrent.weight, 0.9)
        >>> round(spectral_radius(layer.recurrent.weight), 4)
        0.9
    """
    check_number("rho", rho, at_least=0)
    found = spectral_radius(weight)
    # Rounding of the eigenvalues of a nilpotent matrix.
    if found <= torch.finfo(torch.float64).eps * float(weight.detach().double().abs().sum()):
        raise ParameterError("the spectral radius of weight is 0: no factor gives it another one.")
    with torch.no_grad():
        return weight.mul_(rho / found)
