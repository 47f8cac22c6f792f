"""Monitor of firing rates."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from flexsn_nn._flexsn import FlexSN
from flexsn_nn.monitor._base import Monitor


class RateMonitor(Monitor):
    """Monitor of firing rates: spikes per neuron and step, over all calls since the last `clear()`.

    The monitor stores one sum per layer on the layer's device. Only `rates()` waits for the device. For neurons with
    `count_spikes`, the monitor sums `spike_counts`, and does not read the spikes again.

    Example:
        >>> from flexsn_nn import IF
        >>> neuron = IF()
        >>> with RateMonitor(neuron) as monitor:
        ...     _ = neuron(torch.full((4, 1), 0.5))
        >>> monitor.rates()
        {'IF': 0.5}
    """

    def __init__(self, net: nn.Module, layers: Iterable[str] | None = None) -> None:
        super().__init__(net, layers)
        self._spikes: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def record(self, name: str, neuron: FlexSN, output: Tensor) -> None:
        """Adds the spikes of one call."""
        counts = neuron.spike_counts if neuron.count_spikes else None
        if counts is None:
            spikes = output.sum(dtype=torch.promote_types(output.dtype, torch.float32))
        else:
            spikes = counts.detach().sum()
        before = self._spikes.get(name)
        self._spikes[name] = spikes if before is None else before + spikes
        self._counts[name] = self._counts.get(name, 0) + output.numel()

    def rates(self) -> dict[str, float]:
        """Returns the mean output of each layer that has run."""
        return {name: float(spikes) / max(self._counts[name], 1) for name, spikes in self._spikes.items()}

    def _build_table(self) -> tuple[list[str], list[list[str]]]:
        rows = []
        for name, rate in self.rates().items():
            neuron = self.layers[name]
            unit = "mean output" if neuron.spike_range is None else "spikes per neuron and step"
            rows.append([name, type(neuron).__name__, f"{rate:.4g}", unit])
        return ["layer", "kind", "value", "of"], rows

    def clear(self) -> None:
        """Sets all counts to zero."""
        self._spikes.clear()
        self._counts.clear()
