"""Draws the response of every ready-made neuron of `flexsn_nn.neuron` to an input that is switched on and off.

python docs/plot_neurons.py [--out docs/images/neurons.svg]
"""

from __future__ import annotations

import argparse
import inspect
import math
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from torch import Tensor

from flexsn_nn import neuron
from flexsn_nn.neuron import DelayedReset, Feedback, ImmediateReset, Neuron, Recurrent

mpl.use("Agg")
from matplotlib import pyplot as plt

COLUMNS = 3
STEPS = 60
ON, OFF = 5, 45
# Parameters and an input for each neuron, which show its characteristic behaviour within `STEPS` steps. Neurons without
# an entry use `DEFAULT`.
SHOWN: dict[str, tuple[dict[str, Any], float]] = {
    "IF": ({}, 0.15),
    "LIF": ({"tau": 8.0}, 1.3),
    "PLIF": ({"init_tau": 8.0}, 1.3),
    "KLIF": ({"tau": 8.0}, 1.3),
    "QIF": ({"tau": 4.0}, 0.3),
    "EIF": ({"tau": 4.0}, 0.5),
    "AdEx": ({"tau": 4.0}, 0.8),
    "Izhikevich": ({"tau": 4.0}, 0.6),
    "CUBALIF": ({}, 0.1),
    "ALIF": ({"tau": 4.0, "tau_a": 20.0, "beta": 0.3}, 2.5),
    "RefractoryLIF": ({"tau": 8.0}, 2.0),
    "CLIF": ({"tau": 8.0}, 0.3),
    "TernaryLIF": ({"tau": 8.0}, 1.3),
    "StochasticLIF": ({"tau": 8.0}, 1.3),
    "TernaryIF": ({}, -0.15),
    "LIAF": ({"act": torch.relu, "threshold_related": False, "tau": 8.0}, 1.3),
    "ILIF": ({}, 1.4),
    "GatedLIF": ({"T": STEPS}, 0.6),
    "LI": ({"tau": 8.0}, 1.0),
    "RLIF": ({"tau": 8.0, "all_to_all": False, "V": 4.0}, 1.3),
    "RALIF": ({"tau": 4.0, "tau_a": 20.0, "beta": 0.3, "all_to_all": False, "V": 2.0}, 2.5),
    "RLeaky": ({"beta": 0.9, "all_to_all": False, "V": -0.6}, 0.2),
    "RSynaptic": ({"alpha": 0.8, "beta": 0.9, "all_to_all": False, "V": -0.3}, 0.05),
    "Leaky": ({"beta": 0.9}, 0.2),
    "Synaptic": ({"alpha": 0.8, "beta": 0.9}, 0.05),
    "Alpha": ({"alpha": 0.9, "beta": 0.8}, 0.5),
    "Lapicque": ({"beta": 0.9}, 1.6),
}
DEFAULT: tuple[dict[str, Any], float] = ({}, 1.3)


def neurons() -> list[type[Neuron]]:
    """Returns the ready-made classes, in the order of `neuron.__all__`, without aliases."""
    exported = [getattr(neuron, name) for name in neuron.__all__]
    bases = {Neuron, ImmediateReset, DelayedReset, Feedback, Recurrent}  # `Recurrent` wraps another neuron
    classes = [c for c in exported if inspect.isclass(c) and issubclass(c, Neuron) and c not in bases]
    return list(dict.fromkeys(classes))


def title(kind: type[Neuron]) -> str:
    """Returns the name of the class with the parameters that differ from the defaults, such as `LIF(tau=8)`."""
    values = {
        name: value.__name__ if callable(value) else value
        for name, value in SHOWN.get(kind.__name__, DEFAULT)[0].items()
    }
    numbers = {name: f"{value:g}" if isinstance(value, float) else value for name, value in values.items()}
    return f"{kind.__name__}({', '.join(f'{name}={value}' for name, value in numbers.items())})"


def response(kind: type[Neuron]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the input, the membrane potential and the output of one neuron, each `[STEPS]`."""
    parameters, high = SHOWN.get(kind.__name__, DEFAULT)
    x = torch.zeros(STEPS, 1)
    x[ON:OFF] = high
    torch.manual_seed(0)  # because one of the neurons draws noise
    module = kind(**parameters, store_state_seqs=True, backend="torch")
    with torch.no_grad():
        output = module(x)
    membrane = module.state_seqs[module.state_names.index("v")]
    return x[:, 0], membrane.flatten(), output.flatten()


def draw(path: Path) -> list[str]:
    """Writes the figure, and returns the titles in it."""
    drawn = neurons()
    # Text is stored as text, and the file does not depend on the time or the machine, so equal figures are equal files.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "flexsn", "font.size": 8}):
        rows = math.ceil(len(drawn) / COLUMNS)
        figure, grid = plt.subplots(rows, COLUMNS, figsize=(10, 1.9 * rows), sharex=True, layout="constrained")
        for axes in grid.flat:
            axes.set_visible(False)
        for kind, axes in zip(drawn, grid.flat, strict=False):
            axes.set_visible(True)
            _, membrane, output = response(kind)
            axes.axvspan(ON, OFF, color="0.93", linewidth=0)
            axes.plot(membrane.numpy(), linewidth=1.2)
            low, high = axes.get_ylim()
            # leaves space for the input and the spikes
            axes.set_ylim(low - 0.15 * (high - low), high + 0.25 * (high - low))
            if bool((output == output.round()).all()) and bool(output.any()):
                bottom, unit = high + 0.03 * (high - low), 0.15 * (high - low) / float(output.abs().max())
                for sign, color in ((1, "C3"), (-1, "C2")):
                    when = (sign * output > 0).nonzero().flatten()
                    tops = bottom + unit * output[when].abs()
                    axes.vlines(when.numpy(), bottom, tops.numpy(), color=color, linewidth=1.0)
            elif not torch.equal(output, membrane):
                axes.plot(output.numpy(), color="C3", linewidth=1.0)
            axes.set_title(title(kind), fontsize=8)
            axes.annotate(
                f"x = {SHOWN.get(kind.__name__, DEFAULT)[1]:g}",
                ((ON + OFF) / 2, axes.get_ylim()[0]),
                (0, 2),
                textcoords="offset points",
                ha="center",
                color="0.35",
            )
        figure.supxlabel("time step")
        figure.supylabel("membrane v after the step")
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        plt.close(figure)
    return [title(kind) for kind in drawn]


def main(arguments: list[str]) -> int:
    """Draws the neurons, and prints a summary."""
    parser = argparse.ArgumentParser(prog="plot_neurons", description="Draws the response of every ready-made neuron.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images" / "neurons.svg")
    chosen = parser.parse_args(arguments)
    print(f"{len(draw(chosen.out))} neurons in {chosen.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
