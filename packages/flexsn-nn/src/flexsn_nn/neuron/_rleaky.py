"""snnTorch's neurons with recurrent weights."""

from __future__ import annotations

from typing import ClassVar, Unpack

from torch import Tensor, nn

from flexsn_nn.errors import ParameterError
from flexsn_nn.neuron._connections import Initialize, connection, convolution
from flexsn_nn.neuron._leaky import Leaky
from flexsn_nn.neuron._recurrent import Feedback
from flexsn_nn.neuron._reset import ATAN, ResetOptions, SpikeFunction
from flexsn_nn.neuron._synaptic import Synaptic


class RLeaky(Feedback, Leaky):
    """`h = beta v + x + V s`, minus the reset by the previous step's spike `r`; fires if `h > threshold`.

    The reset "subtract" computes `h - r threshold`, and "zero" computes `(1 - r) h`. In contrast, the reset "zero" of
    `Leaky` does not change the input. `s` are the spikes of the previous step. `V` is a matrix with a bias, or a
    convolution, or, with `all_to_all=False`, a weight from each neuron to itself.

    Args:
        beta: factor of the membrane per step, in `[0, 1]`, same as in `Leaky`.
        V: initial weights with `all_to_all=False`: one number for all neurons, or a tensor that broadcasts to the step.
        all_to_all: True if every neuron is connected to all neurons.
        linear_features: number of neurons, which is the size of the step's last dimension. The matrix is
            `recurrent.weight`.
        conv2d_channels, kernel_size: number of channels and odd size of a convolution that replaces the matrix. Steps
            are `[B, C, H, W]`. The convolution requires `backend="torch"`.
        threshold, spike_grad: same as in `DelayedReset`.
        learn_beta, learn_threshold: True to make `beta` or `threshold` an `nn.Parameter`.
        learn_recurrent: True if gradients flow to the recurrent weights.
        reset_mechanism, strict: same as in `DelayedReset`.
        bias: True if the matrix or the convolution has a bias.
        init: function that sets the weights in place, such as `torch.nn.init.orthogonal_`; `None` for PyTorch's
            default.
        options: same as in `DelayedReset`.

    Example:
        >>> RLeaky(beta=0.5, all_to_all=False, V=-1.0)(torch.full((4, 1), 1.5)).flatten().tolist()
        [1.0, 0.0, 1.0, 0.0]
    """

    state_names: ClassVar[tuple[str, ...]] = ("s", "v")

    def __init__(
        self,
        beta: float | Tensor,
        V: float | Tensor = 1.0,
        all_to_all: bool = True,
        linear_features: int | None = None,
        conv2d_channels: int | None = None,
        kernel_size: int | tuple[int, int] | None = None,
        threshold: float | Tensor = 1.0,
        spike_grad: SpikeFunction = ATAN,
        learn_beta: bool = False,
        learn_threshold: bool = False,
        learn_recurrent: bool = True,
        reset_mechanism: str = "subtract",
        strict: bool | None = True,
        bias: bool = True,
        init: Initialize | None = None,
        **options: Unpack[ResetOptions],
    ) -> None:
        super().__init__(beta, threshold, spike_grad, learn_beta, learn_threshold, reset_mechanism, strict, **options)
        sizes = (linear_features, conv2d_channels, kernel_size)
        self.recurrent = _create_connection(sizes, all_to_all, V, bias, learn_recurrent, init)

    def dynamics(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike, spike, v)`."""
        s, v = states
        r = self.spiked(v)
        h = self.after(self.bounded("beta", self.beta, v) * v + x + self.recurrent(s), r)
        spike = self.fire(h)
        return spike, spike, self.kept(h, spike, r)


class RSynaptic(Feedback, Synaptic):
    """`i' = alpha i + x + V s`; `h = beta v + i'`, minus the reset by the previous step's spike `r`.

    The neuron fires if `h > threshold`. The reset "subtract" computes `h - r threshold`, and "zero" computes `(1 - r)
    h`. The current is not reset. `s` are the spikes of the previous step. `V` is a matrix with a bias, or a
    convolution, or, with `all_to_all=False`, a weight from each neuron to itself.

    Args:
        alpha: factor of the synaptic current per step, in `[0, 1]`.
        beta: factor of the membrane per step, in `[0, 1]`.
        learn_alpha, learn_beta, learn_threshold: True to make `alpha`, `beta` or `threshold` an `nn.Parameter`.
        V, all_to_all, linear_features, conv2d_channels, kernel_size, learn_recurrent, bias, init: same as in `RLeaky`.
        threshold, spike_grad, reset_mechanism, strict, options: same as in `DelayedReset`.
    """

    state_names: ClassVar[tuple[str, ...]] = ("s", "i", "v")

    def __init__(
        self,
        alpha: float | Tensor,
        beta: float | Tensor,
        V: float | Tensor = 1.0,
        all_to_all: bool = True,
        linear_features: int | None = None,
        conv2d_channels: int | None = None,
        kernel_size: int | tuple[int, int] | None = None,
        threshold: float | Tensor = 1.0,
        spike_grad: SpikeFunction = ATAN,
        learn_alpha: bool = False,
        learn_beta: bool = False,
        learn_threshold: bool = False,
        learn_recurrent: bool = True,
        reset_mechanism: str = "subtract",
        strict: bool | None = True,
        bias: bool = True,
        init: Initialize | None = None,
        **options: Unpack[ResetOptions],
    ) -> None:
        learn_flags = (learn_alpha, learn_beta, learn_threshold)
        super().__init__(alpha, beta, threshold, spike_grad, *learn_flags, reset_mechanism, strict, **options)
        sizes = (linear_features, conv2d_channels, kernel_size)
        self.recurrent = _create_connection(sizes, all_to_all, V, bias, learn_recurrent, init)

    def dynamics(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike, spike, i, v)`."""
        s, i, v = states
        r = self.spiked(v)
        current = self.bounded("alpha", self.alpha, i) * i + x + self.recurrent(s)
        h = self.after(self.bounded("beta", self.beta, v) * v + current, r)
        spike = self.fire(h)
        return spike, spike, current, self.kept(h, spike, r)


def _create_connection(
    sizes: tuple[int | None, int | None, int | tuple[int, int] | None],
    all_to_all: bool,
    V: float | Tensor,
    bias: bool,
    learn_recurrent: bool,
    init: Initialize | None,
) -> nn.Module:
    """Creates the recurrent module from snnTorch's arguments."""
    features, channels, kernel_size = sizes
    if channels is None and kernel_size is None:
        if all_to_all and features is None:
            raise ParameterError(
                "all_to_all=True needs linear_features, the number of neurons, or conv2d_channels and kernel_size for "
                "steps [B, C, H, W]. To connect each neuron only to itself, set all_to_all=False."
            )
        return connection(features, all_to_all, V, bias and all_to_all, learn_recurrent, init)
    if channels is None or kernel_size is None or features is not None or not all_to_all:
        raise ParameterError(
            "a recurrent convolution needs conv2d_channels and kernel_size, all_to_all=True, and no linear_features."
        )
    return convolution(channels, kernel_size, bias, learn_recurrent, init)
