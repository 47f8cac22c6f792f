"""Plots show the values of tensors. Without matplotlib, the error names the command that installs it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib import pyplot
from matplotlib.collections import PathCollection

from flexsn_nn import MissingExtraError, ParameterError, plot

SPIKES = torch.tensor([[0, 1, 0], [1, 0, 0], [0, 0, 0], [1, 0, 1]], dtype=torch.float32)


@pytest.fixture(autouse=True)
def _no_windows() -> Iterator[None]:
    mpl.use("Agg")
    yield
    pyplot.close("all")


def test_raster_has_a_dot_per_spike() -> None:
    ax = plot.raster(SPIKES.reshape(4, 1, 3))
    (dots,) = ax.collections
    assert sorted(map(tuple, np.asarray(dots.get_offsets()).tolist())) == [(0, 1), (1, 0), (3, 0), (3, 2)]
    assert (ax.get_xlim(), ax.get_ylim()) == ((-0.5, 3.5), (-0.5, 2.5))
    assert plot.raster(torch.zeros(4, 3), ax=ax) is ax


def test_trace_shows_membrane_threshold_and_spikes() -> None:
    v = torch.tensor([0.5, 0.0, 0.75, 0.0], requires_grad=True)
    ax = plot.trace(v, SPIKES[:, 0], threshold=1.0)
    membrane, threshold = ax.lines
    assert np.asarray(membrane.get_ydata()).tolist() == [0.5, 0.0, 0.75, 0.0]
    assert set(np.asarray(threshold.get_ydata()).tolist()) == {1.0}
    (dots,) = ax.collections
    assert isinstance(dots, PathCollection)
    assert np.asarray(dots.get_offsets()).tolist() == [[1, 1], [3, 1]]
    labels = ax.get_legend_handles_labels()[1]
    assert labels == ["membrane", "threshold", "spike"]
    assert len(plot.trace(v).lines) == 1
    with pytest.raises(ParameterError, match=r"got shapes \[\[4, 3\]\]; expected \[T\] of one neuron"):
        plot.trace(SPIKES)
    with pytest.raises(ParameterError, match=r"\[\[4\], \[3\]\]"):
        plot.trace(v, SPIKES[0])


def test_trace_shows_variable_thresholds_and_labels() -> None:
    v, moving = torch.tensor([0.5, 0.0, 0.75, 0.0]), torch.tensor([1.0, 1.5, 2.5, 2.0])
    ax = plot.trace(v, SPIKES[:, 0], threshold=moving, label="current")
    _, threshold = ax.lines
    assert np.asarray(threshold.get_ydata()).tolist() == moving.tolist()
    assert np.asarray(ax.collections[0].get_offsets()).tolist() == [[1, 2.5], [3, 2.5]]
    assert ax.get_legend_handles_labels()[1] == ["current", "threshold", "spike"]
    assert ax.get_ylabel() == "current"
    assert len(plot.trace(v, threshold=torch.tensor(1.0)).lines) == 2, "a tensor of one value is a line"
    with pytest.raises(ParameterError, match=r"\[\[4\], \[3\]\]"):
        plot.trace(v, threshold=moving[:3])
    bar = plot.heatmap(SPIKES, label="current").figure
    assert bar is not None
    assert bar.axes[1].get_ylabel() == "current"


def test_heatmap_has_time_on_the_horizontal_axis() -> None:
    ax = plot.heatmap(SPIKES)
    (image,) = ax.images
    assert np.asarray(image.get_array()).tolist() == SPIKES.T.tolist()
    assert ax.figure is not None
    assert len(ax.figure.axes) == 2, "expected the image and its colour bar"


def test_firing_rates_has_a_bar_per_layer() -> None:
    ax = plot.firing_rates({"first": 0.25, "second": 0.5})
    assert [bar.get_height() for bar in ax.patches] == [0.25, 0.5]  # type: ignore[attr-defined]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["first", "second"]


def test_missing_matplotlib_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    calls: list[Callable[[], object]] = [
        lambda: plot.raster(SPIKES),
        lambda: plot.trace(SPIKES[:, 0]),
        lambda: plot.heatmap(SPIKES),
        lambda: plot.firing_rates({"a": 1.0}),
    ]
    for call in calls:
        with pytest.raises(MissingExtraError, match=r"pip install 'flexsn-nn\[plot\]'"):
            call()
