"""Plot of the figures of spiking networks, relative to the figures of the same networks with ReLU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot
from matplotlib.axes import Axes

MARKERS = "osD^vP*Xhp<>"


def draw(ratios: Mapping[str, Mapping[tuple[str, str], float]], path: Path) -> None:
    """Draws one panel per measured figure. Each pair of a network and a neuron is a point at its ratio to ReLU.

    Args:
        ratios: ratio to ReLU, by the name of the figure and by the pair (network, neuron).
        path: SVG file that is written.
    """
    mpl.rcParams["svg.hashsalt"] = "flexsn"  # makes the SVG file reproducible
    pairs = list(dict.fromkeys(pair for figure in ratios.values() for pair in figure))
    networks, neurons = (list(dict.fromkeys(names)) for names in zip(*pairs, strict=True))
    height = 1.6 + 0.42 * len(neurons) + 0.2 * len(networks)
    figure, panels = pyplot.subplots(1, len(ratios), figsize=(12, height), sharey=True, layout="constrained")
    for panel, (title, values) in zip(panels, ratios.items(), strict=True):
        for network, marker in zip(networks, MARKERS, strict=False):
            points = [(value, neurons.index(neuron)) for (name, neuron), value in values.items() if name == network]
            xs, ys = zip(*points, strict=True) if points else ((), ())
            panel.plot(xs, ys, marker, alpha=0.7, markersize=6, label=network)
        _draw_axes(panel, title, neurons)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _draw_axes(panel: Axes, title: str, neurons: Sequence[str]) -> None:
    """Draws the axes, the grid and the names of the neurons in a panel."""
    panel.axvline(1, color="black", linewidth=0.8)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter("{x:g}")
    panel.grid(axis="x", alpha=0.3)
    panel.set_yticks(range(len(neurons)), neurons)
    panel.set_ylim(len(neurons) - 0.5, -0.5)
    panel.set_title(f"{title}, ReLU = 1", fontsize="medium")
