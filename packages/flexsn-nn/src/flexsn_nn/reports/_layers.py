"""Functions that reports share: the layers of a network, a context that restores the network, and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from flexsn_nn._flexsn import FlexSN
from flexsn_nn._over_time import OverTime
from flexsn_nn._stateful import Stateful
from flexsn_nn.functional import with_state
from flexsn_nn.graphs._graph import LeftTensors


def layers_of(net: nn.Module) -> dict[str, nn.Module]:
    """Returns the layers for reports, by name: neurons, other layers with a state, and modules without children.

    An `OverTime` whose norm is computed by the next neuron is one layer, because hooks on the norm would prevent the
    fusion.
    """
    layers: dict[str, nn.Module] = {}
    neuron_prefixes: list[str] = []
    for name, module in net.named_modules():
        if any(name.startswith(prefix) for prefix in neuron_prefixes):
            continue
        is_fused = isinstance(module, OverTime) and module._handover is not None
        is_one_layer = isinstance(module, FlexSN | Stateful) or is_fused
        if is_one_layer or not any(True for _ in module.children()):
            layers[name or type(module).__name__] = module
            neuron_prefixes += [f"{name}."] if name else [""]
            if not name:
                break
    return layers


@contextmanager
def unchanged(net: nn.Module) -> Iterator[None]:
    """Restores states, buffers, gradients and random generators at the end of the block."""
    results = LeftTensors(net)
    buffers = [(buffer, buffer.detach().clone()) for buffer in net.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in net.parameters()]
    devices = {tensor.device.index for tensor in (*net.parameters(), *net.buffers()) if tensor.is_cuda}
    try:
        with torch.random.fork_rng(devices=[index for index in devices if index is not None]):
            yield
    finally:
        results.put()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def forget(net: nn.Module) -> None:
    """Resets all layers to their initial states."""
    for _, module in with_state(net):
        module.reset()


def first_tensor(value: object) -> Tensor | None:
    """Returns the first tensor in the result of a layer; `None` if the result contains no tensor."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return next((tensor for tensor in map(first_tensor, value) if tensor is not None), None)
    return None


def human_bytes(count: float) -> str:
    """Formats a number of bytes, for example `1.2 MB`."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Formats rows as lines. Columns of numbers are aligned to the right, and all other columns to the left."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    numbers = [all(_is_number(line[i]) for line in rows) for i in range(len(header))]
    return [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(line, widths, numbers, strict=True)
        ).rstrip()
        for line in lines
    ]


def _is_number(cell: str) -> bool:
    return not cell or cell[0].isdigit() or cell == "-"
