"""Makes the pooling layers of a network run kernels. Changes the layers in place."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from flexsn_nn._checks import check_module, check_name
from flexsn_nn._replaced_forwards import ReplacementReport
from flexsn_nn.pooling._layer import PoolForward, is_pooling, why_torch


@dataclass(frozen=True, slots=True)
class PooledLayer:
    """Outcome of a layer's last call in eager mode.

    Attributes:
        layer: name of the layer, same as in `named_modules()`.
        by_kernel: True if a kernel of this package ran.
        account: description of the kernel, or the reason why torch's pooling ran.
    """

    layer: str
    by_kernel: bool
    account: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.account}"


class SpikePooling(ReplacementReport):
    """Report from `spike_pooling` about the layers of a network. `print` shows how each layer pools.

    Args:
        net: the network.
        left: reasons why some layers always use torch's pooling, by name of the layer.
    """

    _forward = PoolForward
    _did = "pooled by a kernel"
    _others = "by torch"

    @property
    def layers(self) -> tuple[PooledLayer, ...]:
        """Pooling layers, in the order of `named_modules()`."""
        return tuple(PooledLayer(*account) for account in self._describe_layers())

    def undo(self) -> None:
        """Restores torch's pooling in the layers, like `plain_pooling(net)`."""
        self._undo(plain_pooling)


def spike_pooling(net: nn.Module, *, skip: Collection[str] = ()) -> SpikePooling:
    """Makes layers pool with kernels that access each element once, forward and backward. Changes the layers in place.

    For spikes, a maximum is a logical or, and its gradient flows to the first spike of a window. For the backward, a
    kernel stores the position of this spike, in 2 to 8 bits for each element of the result. In contrast, torch stores
    the input, and 64 bits for each element of the result. Average pooling stores nothing. Values, gradients (also with
    ties, padding, dilation and `ceil_mode`) and memory formats equal those of torch for any input, even if the input
    does not consist of spikes. Modules, parameters and `state_dict()` do not change.

    Kernels run in `nn.MaxPool1d`, `MaxPool2d`, `AvgPool1d` and `AvgPool2d` on a GPU, directly or in an `OverTime`. In
    all other calls, torch's pooling runs as before. In compiled graphs, torch's pooling also computes averages, because
    the compiler itself generates kernels for them.

    Args:
        net: trained or new network, in any mode, on any device. Pass the network itself, before `torch.compile` or a
            wrapper such as `DistributedDataParallel` is applied to it.
        skip: names of layers to leave unchanged.

    Returns:
        A report about the pooling of each layer, to print after a call.

    Raises:
        UnknownNameError: `net` has no layer with a name in `skip`.

    Example:
        >>> from flexsn_nn import LIF, OverTime
        >>> net = nn.Sequential(OverTime(nn.Conv2d(3, 8, 3)), LIF(), OverTime(nn.MaxPool2d(2)))
        >>> pooling = spike_pooling(net)
        >>> y = net(torch.rand(4, 2, 3, 8, 8))
        >>> [one.layer for one in pooling.layers]  # print(pooling) shows kernels and reasons
        ['2.0']
    """
    check_module("net", net)
    modules = dict(net.named_modules())
    for name in skip:
        check_name("layer", name, modules)
    plain_pooling(net)
    reasons: dict[str, str] = {}
    for name, module in modules.items():
        if not is_pooling(module):
            continue
        reason = "it is in skip" if name in skip else why_torch(module)
        if reason is None:
            module.forward = PoolForward(module)
        else:
            reasons[name] = reason
    return SpikePooling(net, reasons)


def plain_pooling(net: nn.Module) -> None:
    """Restores torch's pooling in the layers of a network after `spike_pooling`."""
    check_module("net", net)
    for module in net.modules():
        if isinstance(vars(module).get("forward"), PoolForward):
            del module.forward
