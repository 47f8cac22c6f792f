"""Plots of spikes and membranes. Plots require matplotlib: `pip install flexsn-nn[plot]`.

Each function draws into `ax`, or into a new figure, and returns the axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from flexsn_nn.errors import MissingExtraError, ParameterError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["firing_rates", "heatmap", "raster", "trace"]


def raster(spikes: Tensor, ax: Axes | None = None) -> Axes:
    """Draws a mark for each spike. Steps are on the horizontal axis, neurons on the vertical axis.

    Args:
        spikes: `[T, *step]`. The step's elements are numbered in row-major order.
        ax: axes to draw into; `None` for a new figure.
    """
    ax = _get_axes(ax)
    fired = spikes.detach().flatten(1) != 0
    steps, neurons = fired.nonzero().cpu().unbind(1)
    ax.scatter(steps.numpy(), neurons.numpy(), s=4, marker="|" if len(spikes) <= 200 else ".", color="black")
    ax.set(xlabel="step", ylabel="neuron", xlim=(-0.5, len(fired) - 0.5), ylim=(-0.5, fired.shape[1] - 0.5))
    return ax


def trace(
    v: Tensor,
    spikes: Tensor | None = None,
    threshold: float | Tensor | None = None,
    ax: Axes | None = None,
    *,
    label: str = "membrane",
) -> Axes:
    """Draws the membrane or another state of one neuron over time, with the neuron's threshold and spikes.

    Args:
        v: `[T]`, the state.
        spikes: `[T]`, the spikes of the neuron; `None` to draw no spikes.
        threshold: number, drawn as a horizontal line; or `[T]`, a threshold that changes over time, such as `1.0 + 1.8
            * a` for an `ALIF`; `None` to draw no threshold.
        ax: axes to draw into; `None` for a new figure.
        label: name of `v` in the legend and on the axis.

    Raises:
        ParameterError: `v` does not have the shape `[T]`, or the tensors differ in length.
    """
    threshold_sequence = threshold if isinstance(threshold, Tensor) and threshold.dim() else None
    tensors = [tensor for tensor in (v, spikes, threshold_sequence) if tensor is not None]
    if v.dim() != 1 or any(tensor.shape != v.shape for tensor in tensors):
        shapes = [list(tensor.shape) for tensor in tensors]
        raise ParameterError(f"got shapes {shapes}; expected [T] of one neuron, such as v[:, 0, 3].")
    ax = _get_axes(ax)
    values = v.detach().float().cpu()
    ax.plot(values.numpy(), label=label)
    top = float(values.max()) if len(values) else 0.0
    if threshold_sequence is not None:
        limits = threshold_sequence.detach().float().cpu()
        ax.plot(limits.numpy(), linestyle="--", color="gray", label="threshold")
        top = max(top, float(limits.max())) if len(limits) else top
    elif threshold is not None:
        ax.axhline(float(threshold), linestyle="--", color="gray", label="threshold")
        top = max(top, float(threshold))
    if spikes is not None:
        times = spikes.detach().nonzero().flatten().cpu()
        ax.scatter(times.numpy(), [top] * len(times), marker="v", color="black", label="spike")
    ax.set(xlabel="step", ylabel=label)
    ax.legend()
    return ax


def heatmap(v: Tensor, ax: Axes | None = None, *, label: str = "membrane") -> Axes:
    """Draws membranes or another state as colours. Steps are on the horizontal axis, neurons on the vertical axis.

    Args:
        v: `[T, *step]`. The step's elements are numbered in row-major order.
        ax: axes to draw into; `None` for a new figure.
        label: name of `v` on the colour bar.
    """
    ax = _get_axes(ax)
    values = v.detach().flatten(1).T.float().cpu()
    image = ax.imshow(values.numpy(), aspect="auto", origin="lower", interpolation="nearest")
    ax.figure.colorbar(image, ax=ax, label=label)
    ax.set(xlabel="step", ylabel="neuron")
    return ax


def firing_rates(rates: Mapping[str, float], ax: Axes | None = None) -> Axes:
    """Draws the firing rate of each layer as a bar.

    Args:
        rates: spikes per neuron and step, as `RateMonitor.rates()` returns them.
        ax: axes to draw into; `None` for a new figure.
    """
    ax = _get_axes(ax)
    bars = ax.bar(list(rates), list(rates.values()))
    ax.bar_label(bars, fmt="%.3f")
    ax.margins(y=0.1)  # leaves room for labels
    ax.set(ylabel="spikes per neuron and step")
    return ax


def _get_axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingExtraError("plots need matplotlib: pip install 'flexsn-nn[plot]'") from error
    return pyplot.subplots()[1]
