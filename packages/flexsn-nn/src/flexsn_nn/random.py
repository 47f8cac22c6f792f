"""Random numbers inside of a step. Loops and kernels draw equal numbers, and so do a forward and its backward.

A number depends on a key, the draw (first, second, … in a step), the time step, the row (index in the step's first
dimension), and the position in the row. A number does not depend on the device, the backend, the memory format, or the
other rows of the batch. No tensor of the size of the data is stored.

A neuron draws its key from PyTorch's generator each time it begins with the initial state, so `torch.manual_seed` makes
its numbers reproducible. While the neuron keeps its state, the count of time steps continues. A sequence that is run in
two calls therefore has the same numbers as a sequence that is run in one call.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox).
"""

from __future__ import annotations

from torch import Tensor, nn

from flexsn_nn._checks import check_count, check_number
from flexsn_nn.errors import ParameterError
from flexsn_nn.noise._draw import draw_normal, draw_uniform
from flexsn_nn.noise._numbers import numbers_of

__all__ = ["bernoulli_like", "configure", "normal_like", "uniform_like"]


def normal_like(x: Tensor) -> Tensor:
    """Draws numbers with mean 0 and variance 1 in a core, one for each element of the step.

    Args:
        x: floating-point tensor with the step's shape, which is the shape of the core's first input. The values of `x`
            do not matter. A state with one more dimension gets a draw for each element of that dimension, like
            `torch.stack([normal_like(soma) for _ in range(branches)], -1)`. A state with one dimension less, or with
            fewer neurons (but more than one), gets the first numbers of a draw.

    Returns:
        A tensor with the shape, dtype and device of `x`, without a gradient. The numbers are computed in float32 and
        converted. All numbers are between -6.6 and 6.6, and are bitwise equal on all backends.

    Raises:
        DrawError: the call is outside of a core of `FlexSN`, or `x` has another shape.
        InputDtypeError: `x` is an integer tensor.

    Example:
        >>> from flexsn_nn import FlexSN
        >>> def noisy(x, v):
        ...     v = 0.5 * v + x + 0.1 * normal_like(v)
        ...     return v, v
        >>> neuron = FlexSN(noisy, 1, 1, 1)
        >>> neuron(torch.zeros(3, 2, 4)).shape
        torch.Size([3, 2, 4])
    """
    return draw_normal(x)


def uniform_like(x: Tensor) -> Tensor:
    """Draws numbers in [0, 1) in a core, one for each element of the step.

    Args:
        x: same as for `normal_like`.

    Returns:
        A tensor like that of `normal_like`. Its numbers are multiples of 2^-24. In float16, they are multiples of
        2^-11, and in bfloat16, multiples of 2^-8.

    Raises:
        The errors of `normal_like`.
    """
    return draw_uniform(x)


def bernoulli_like(x: Tensor, p: float | Tensor = 0.5) -> Tensor:
    """Draws 1 with probability `p` and 0 otherwise in a core, for each element of the step.

    Args:
        x: same as for `normal_like`.
        p: number in [0, 1], or a tensor that broadcasts to `x`, to which no gradient flows.

    Returns:
        A tensor like that of `normal_like`.

    Raises:
        ParameterError: `p` is a number that is not a probability.
        The errors of `normal_like`.
    """
    if not isinstance(p, Tensor):
        check_number("p", p, at_least=0, at_most=1)
    return draw_uniform(x, below=p)


def configure(
    net: nn.Module, *, seed: int | None = None, first_row: int | None = None, in_evaluation: bool | None = None
) -> None:
    """Sets the source of random numbers of a network's neurons and `SharedDropout` layers. `None` keeps a setting.

    Args:
        net: neuron, or module with neurons. The call does not affect neurons that draw no numbers.
        seed: seed from which the key of each neuron is derived. Keys are then not drawn from PyTorch's generator. Every
            sequence that begins with the initial state then has equal numbers. After a negative seed, keys are drawn
            from the generator again.
        first_row: index of the first row of a batch. A process whose rows begin at index `n` of the whole batch sets
            `n`.
        in_evaluation: True (the initial setting) to also draw numbers in evaluation mode. False to replace each number
            by its mean in evaluation mode: normal numbers by 0, uniform numbers by 0.5, Bernoulli numbers by `p`.

    Raises:
        ParameterError: `seed` is not an integer, or `first_row` is not an integer or is negative.

    Example:
        >>> from flexsn_nn.neuron import StochasticLIF
        >>> neuron = StochasticLIF()
        >>> configure(neuron, seed=0)
        >>> x = torch.ones(5, 2, 8)
        >>> whole = neuron(x)
        >>> neuron.reset()
        >>> configure(neuron, first_row=1)
        >>> torch.equal(neuron(x[:, 1:]), whole[:, 1:])
        True
    """
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise ParameterError(f"seed is {seed!r}; give an integer.")
    if first_row is not None:
        check_count("first_row", first_row, at_least=0)
    for index, numbers in enumerate(numbers_of(net)):
        numbers.configure(seed, index, first_row, in_evaluation)
