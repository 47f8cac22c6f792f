"""Random numbers inside of a step: the same ones in loops and in kernels, in a forward and in its backward.

A number is a function of a key, of the draw (the first, second, … one of a step), of the time step, of the row (the
step's first dimension) and of the place in the row, and of nothing else: neither of the device, the backend, the memory
format, nor the other rows of the batch. Nothing of the size of the data is stored.

A neuron draws its key from PyTorch's generator whenever it begins at the initial state, so that `torch.manual_seed`
reproduces it. As long as the state is carried, the time steps count on: a sequence in two calls has the numbers of the
whole.

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
    """Draws numbers of mean 0 and variance 1, one for each element of the step, in a core.

    Args:
        x: a floating-point tensor of the step's shape, which is that of its first input; its values do not matter. A
            state with one dimension more has a draw for each element of that dimension, as of
            `torch.stack([normal_like(soma) for _ in range(branches)], -1)`; one with a dimension less, or with fewer
            neurons (and more than one), has the first numbers of a draw.

    Returns:
        A tensor of the shape, dtype and device of `x`, without a gradient. The numbers are computed in float32 and
        converted; they are between -6.6 and 6.6, and equal to the bit on all backends.

    Raises:
        DrawError: outside of a core of `FlexSN`; or `x` has another shape.
        InputDtypeError: an integer tensor.

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
    """Draws numbers in [0, 1), one for each element of the step, in a core.

    Args:
        x: as of `normal_like`.

    Returns:
        As of `normal_like`: multiples of 2^-24; in float16 of 2^-11, in bfloat16 of 2^-8.

    Raises:
        The errors of `normal_like`.
    """
    return draw_uniform(x)


def bernoulli_like(x: Tensor, p: float | Tensor = 0.5) -> Tensor:
    """Draws 1 with probability `p` and else 0, for each element of the step, in a core.

    Args:
        x: as of `normal_like`.
        p: a number in [0, 1], or a tensor that broadcasts to `x`, of whose values no gradient is known.

    Returns:
        As of `normal_like`.

    Raises:
        ParameterError: a number that is no probability.
        The errors of `normal_like`.
    """
    if not isinstance(p, Tensor):
        check_number("p", p, at_least=0, at_most=1)
    return draw_uniform(x, below=p)


def configure(
    net: nn.Module, *, seed: int | None = None, first_row: int | None = None, in_evaluation: bool | None = None
) -> None:
    """Sets where the numbers of a network's neurons, and of `SharedDropout`, come from; `None` changes nothing.

    Args:
        net: a neuron, or a module with neurons. Those that draw nothing ignore it.
        seed: makes the keys, one for each neuron, in place of PyTorch's generator: every sequence that begins at the
            initial state then has the same numbers. Negative: the generator's keys again.
        first_row: the number of the first row of a batch: of a process that has rows `n` to `2 n` of a batch, `n`.
        in_evaluation: whether numbers are drawn while `neuron.training` is false, too (as at first); if not, each is
            its mean: 0, 0.5, and `p`.

    Raises:
        ParameterError: a seed or a row that is no whole number.

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
    for number, numbers in enumerate(numbers_of(net)):
        numbers.configure(seed, number, first_row, in_evaluation)
