"""Measures the time and the memory of each layer in a training step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from flexsn_nn._backends import COMPILED, Choice
from flexsn_nn._flexsn import FlexSN
from flexsn_nn.errors import ParameterError
from flexsn_nn.reports._layers import first_tensor, forget, human_bytes, layers_of, table, unchanged

REST = "the rest"


@dataclass(frozen=True, slots=True)
class LayerReport:
    """Measurements of one layer in a training step.

    Attributes:
        name: name as in `named_modules()`; `"the rest"` for the operations between layers and the loss.
        kind: class of the layer.
        backend: backend that runs a neuron; `"torch"` for other layers.
        reason: for a neuron, the reason why this backend runs; empty for other layers.
        kernels: for a neuron, the names of its kernels.
        bytes_kept: bytes that autograd saves for the backward during the layer's forward, without parameters and
            buffers. Memory that several layers save counts for the first of these layers.
        seconds: time of the layer's forward and backward.
        share: fraction of the step's time, from 0 to 1.
    """

    name: str
    kind: str
    backend: str
    reason: str
    kernels: tuple[str, ...]
    bytes_kept: int
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class NetworkReport:
    """Report about a training step of a network. `print` shows it as a table.

    Attributes:
        layers: layers in the order of their calls, followed by the rest.
        seconds: time of a step's forward and backward.
        bytes_kept: bytes that all layers save for the backward.
        device: device of the network.
    """

    layers: tuple[LayerReport, ...]
    seconds: float
    bytes_kept: int
    device: str

    @property
    def verdict(self) -> str:
        """Summary in one line: the backends of the neurons, and the layer that takes the most time."""
        neurons = [layer for layer in self.layers if layer.reason]
        loops = [layer for layer in neurons if layer.backend not in COMPILED]
        if not neurons:
            words = "the network has no neurons"
        elif not loops:
            count = "the neuron" if len(neurons) == 1 else f"all {len(neurons)} neurons"
            words = f"compiled kernels run {count}"
        else:
            first = loops[0]
            words = (
                f"{len(loops)} of {len(neurons)} neurons run without compiled kernels, first {first.name} "
                f"({first.kind}: {first.backend})"
            )
        longest = max(self.layers, key=lambda layer: layer.seconds)
        of = longest.name if longest.name == REST else f"{longest.name} ({longest.kind})"
        return (
            f"{words}; forward and backward take {1e3 * self.seconds:.3g} ms on {self.device}, "
            f"{longest.share:.0%} of it in {of}, and keep {human_bytes(self.bytes_kept)}"
        )

    def __str__(self) -> str:
        header = ("layer", "kind", "backend", "kept", "time", "share")
        rows = [
            (
                layer.name,
                layer.kind,
                layer.backend,
                human_bytes(layer.bytes_kept),
                f"{1e3 * layer.seconds:.3g} ms",
                f"{layer.share:.0%}",
            )
            for layer in self.layers
        ]
        reasons: dict[str, list[LayerReport]] = {}
        for layer in self.layers:
            if layer.reason:
                reasons.setdefault(f"{layer.backend}: {layer.reason}", []).append(layer)
        lines_of_reasons = [
            f"{', '.join(layer.name for layer in layers)}: {reason}" for reason, layers in reasons.items()
        ]
        kernels = [f"{layer.name} launches {', '.join(layer.kernels)}" for layer in self.layers if layer.kernels]
        return "\n".join([self.verdict, *table(header, rows), *lines_of_reasons, *kernels])


@dataclass(slots=True)
class _Account:
    """Times and bytes of each layer in one training step.

    Attributes:
        device: device of the network.
        names: stack of the layers that are running. The innermost layer is the last item.
        bytes_kept: bytes that autograd has saved, by layer.
        saved: saved tensors by the address of their memory.
        moments: names of layers, each with a moment from which the time counts for this layer.
        order: names of the layers, in the order of their calls.
        choices: choices of backends, by name of the neuron.
    """

    device: torch.device
    names: list[str] = field(default_factory=lambda: [REST])
    bytes_kept: dict[str, int] = field(default_factory=dict)
    saved: dict[int, Tensor] = field(default_factory=dict)
    moments: list[tuple[str, Any]] = field(default_factory=list)
    order: dict[str, None] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)

    def begin(self, name: str) -> None:
        self.order[name] = None
        self.names.append(name)
        self.mark(name)

    def end(self) -> None:
        self.names.pop()
        self.mark(self.names[-1])

    def mark(self, name: str) -> None:
        """Attributes the time from this moment on to a layer."""
        moment: Any
        if self.device.type == "cuda":
            moment = torch.cuda.Event(enable_timing=True)
            moment.record(torch.cuda.current_stream(self.device))
        else:
            moment = time.perf_counter()
        self.moments.append((name, moment))

    def keep(self, tensor: Tensor, parameters: set[int]) -> Tensor:
        """Counts the memory of a tensor that autograd saves. Memory that several tensors share counts once.

        Args:
            parameters: addresses of the memory of parameters and buffers, which is not counted.
        """
        if tensor.layout is torch.strided and not tensor.is_meta:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if address and address not in self.saved and address not in parameters:
                self.saved[address] = tensor
                name = self.names[-1]
                self.bytes_kept[name] = self.bytes_kept.get(name, 0) + storage.nbytes()
        return tensor

    def seconds(self) -> dict[str, float]:
        """Returns the time of each layer: the sum of the times between each mark of the layer and the next mark."""
        seconds_by_layer: dict[str, float] = {}
        for (name, begun), (_, ended) in zip(self.moments, self.moments[1:], strict=False):
            duration = begun.elapsed_time(ended) / 1e3 if self.device.type == "cuda" else ended - begun
            seconds_by_layer[name] = seconds_by_layer.get(name, 0.0) + duration
        return seconds_by_layer


def explain_net(net: nn.Module, inputs: Sequence[Any], loss: Callable[[Any], Tensor] | None) -> NetworkReport:
    """Runs a few training steps, without an optimizer, and restores the network."""
    if not inputs:
        raise ParameterError("no input was passed: functional.explain(net, x) takes the inputs of net(x).")
    layers = layers_of(net)
    device = next((tensor.device for tensor in (*net.parameters(), *inputs) if isinstance(tensor, Tensor)), None)
    if device is None:
        raise ParameterError("the network has no parameter, and no input is a tensor: pass the network's inputs.")
    for module in net.modules():
        if isinstance(module, FlexSN):
            module._forget_repeats()  # so that the next call chooses its backend, and records this choice
    with unchanged(net):
        for _ in range(2):  # the first runs compile kernels and fill caches
            _run(net, layers, inputs, loss, _Account(device))
        counting_account = _Account(device)
        _run(net, layers, inputs, loss, counting_account, count=True)
        accounts = [_Account(device) for _ in range(3)]
        for account in accounts:
            _run(net, layers, inputs, loss, account)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    times = [account.seconds() for account in accounts]
    names = [*counting_account.order, REST]
    seconds = {name: median(seconds_by_layer.get(name, 0.0) for seconds_by_layer in times) for name in names}
    total = sum(seconds.values())
    rows = []
    for name in names:
        layer = layers.get(name)
        choice = counting_account.choices.get(name)
        rows.append(
            LayerReport(
                name,
                "" if layer is None else type(layer).__name__,
                "torch" if choice is None else choice.backend,
                "" if choice is None else choice.reason.splitlines()[0],
                layer.kernel_names() if isinstance(layer, FlexSN) else (),
                counting_account.bytes_kept.get(name, 0),
                seconds[name],
                seconds[name] / total if total else 0.0,
            )
        )
    return NetworkReport(tuple(rows), total, sum(counting_account.bytes_kept.values()), device.type)


def _run(
    net: nn.Module,
    layers: dict[str, nn.Module],
    inputs: Sequence[Any],
    loss: Callable[[Any], Tensor] | None,
    account: _Account,
    *,
    count: bool = False,
) -> None:
    """Runs one forward and backward, and records times. If `count` is True, also records bytes."""
    forget(net)
    for parameter in net.parameters():
        parameter.grad = None
    parameters = {tensor.untyped_storage().data_ptr() for tensor in (*net.parameters(), *net.buffers())}
    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.callback(layer.register_forward_pre_hook(_make_begin_hook(account, name)).remove)
            stack.callback(layer.register_forward_hook(_make_end_hook(account, name)).remove)
        if count:
            saving = torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: account.keep(tensor, parameters), lambda tensor: tensor
            )
            stack.enter_context(saving)
        account.mark(REST)
        with torch.enable_grad():
            output = net(*inputs)
            value = _compute_default_loss(output) if loss is None else loss(output)
        if value.requires_grad:
            value.backward()
        account.mark(REST)
        for name, layer in layers.items():  # inside of the block, because the choice depends on hooks
            choice = layer.latest_choice(account.device.type) if isinstance(layer, FlexSN) else None
            if choice is not None:
                account.choices[name] = choice
    forget(net)


def _make_begin_hook(account: _Account, name: str) -> Any:
    return lambda layer, inputs: account.begin(name)


def _make_end_hook(account: _Account, name: str) -> Any:
    def hook(layer: nn.Module, inputs: Any, output: Any) -> None:
        account.end()
        result = first_tensor(output)
        if result is not None and result.requires_grad:
            # This hook runs when the output's gradient is complete, directly before the layer's backward.
            result.register_hook(lambda gradient: account.mark(name))

    return hook


def _compute_default_loss(output: Any) -> Tensor:
    result = first_tensor(output)
    if result is None or not result.is_floating_point():
        raise ParameterError("the network returns no floating-point tensor: give loss, a function of its output.")
    return result.float().square().mean()
