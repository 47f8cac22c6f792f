"""Reports, on machines without a GPU, cores that compiled kernels will reject on a GPU."""

from __future__ import annotations

import os
from typing import Literal, cast

from flexsn_hop.callers import warn
from flexsn_nn._checks import check_name
from flexsn_nn.errors import PortabilityError, PortabilityWarning

Portability = Literal["warn", "error", "ignore"]

PORTABILITIES: tuple[Portability, ...] = ("warn", "error", "ignore")
_VARIABLE = "FLEXSN_PORTABILITY"


def set_portability(reaction: str) -> None:
    """Sets the reaction to cores that run as a loop here, although compiled kernels will reject them on a GPU.

    A neuron with `backend="auto"` is checked after its first call in inference and after its first call in training.
    The setting is global; the environment variable `FLEXSN_PORTABILITY` gives its initial value.

    Args:
        reaction: `"warn"` (default) for a `PortabilityWarning`, which names the operation and the line; `"error"` for a
            `PortabilityError`, for tests on a machine without a GPU; `"ignore"` for no check.

    Raises:
        UnknownNameError: the reaction is unknown.

    Example:
        >>> import torch
        >>> from flexsn_nn import FlexSN
        >>> set_portability("error")
        >>> noisy = FlexSN(lambda x, v: (x, v + torch.randn_like(x)), 1, 1, 1)
        >>> try:
        ...     noisy(torch.zeros(4, 2))  # on the CPU
        ... except NotImplementedError as error:
        ...     print("randn_like" in str(error))
        True
        >>> set_portability("warn")
    """
    global _reaction
    _reaction = _check(reaction)


def portability() -> Portability:
    """Returns the current reaction."""
    return _reaction


def report(refusal: str) -> None:
    """Reports that compiled kernels reject a core: by a warning or an error, as set by `set_portability`."""
    message = (
        "backend='auto' ran this core as a loop. On a GPU it chooses compiled kernels, "
        f"and they refuse the core: {refusal}\n"
        "Change the core, or set backend='torch', which is the loop on every device."
    )
    if _reaction == "error":
        raise PortabilityError(message)
    warn(message, PortabilityWarning)


def _check(reaction: str, source: str = "portability") -> Portability:
    check_name(source, reaction, PORTABILITIES)
    return cast(Portability, reaction)


_reaction: Portability = _check(os.environ.get(_VARIABLE) or "warn", _VARIABLE)
