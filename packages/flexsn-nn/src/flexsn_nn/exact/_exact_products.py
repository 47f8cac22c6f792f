"""Replaces the products with spikes in the layers of a network by exact products, in place."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flexsn_nn._checks import check_name
from flexsn_nn._flexsn import FlexSN
from flexsn_nn._replaced_forwards import ReplacementReport
from flexsn_nn.exact._edges import Edges
from flexsn_nn.exact._exchange import ATTRIBUTE, SpikeExchange, can_exchange
from flexsn_nn.exact._layer import CONVOLUTIONS, PRECISIONS, ExactForward, why_no_product
from flexsn_nn.exact._sources import known_inputs
from flexsn_nn.memory._ranges import mark

_LAYERS: tuple[type[nn.Module], ...] = (nn.Linear, *CONVOLUTIONS)


@dataclass(frozen=True, slots=True)
class LayerProduct:
    """Outcome of a layer's last call in eager mode.

    Attributes:
        layer: name of the layer, as in `named_modules()`.
        exact: True if an exact product ran.
        account: description of the product that ran. For torch's product, the reason why it ran.
    """

    layer: str
    exact: bool
    account: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.account}"


class ExactProducts(ReplacementReport):
    """Report from `exact_products` about the layers of a network. `print` shows the product of each layer.

    Args:
        net: the network.
        left: reasons why layers always use torch's product, by name of the layer.
    """

    _forward = ExactForward
    _did = "multiplied spikes exactly"
    _others = "by torch's product"

    @property
    def layers(self) -> tuple[LayerProduct, ...]:
        """Linear layers and convolutions, in the order of `named_modules()`.

        Reading this property waits for the last calls of the layers on a GPU.
        """
        return tuple(LayerProduct(*account) for account in self._describe_layers())

    def undo(self) -> None:
        """Restores torch's products in the layers, like `plain_products(net)`."""
        self._undo(plain_products)


def exact_products(
    net: nn.Module,
    precision: str | None = None,
    *,
    also: Collection[str] = (),
    skip: Collection[str] = (),
) -> ExactProducts:
    """Makes linear layers multiply spikes exactly on tensor cores, forward and backward, in place.

    One bfloat16 number can represent a spike exactly, and the sum of three bfloat16 numbers a float32 weight. A float32
    product with spikes can therefore be replaced by three bfloat16 products, without rounding the operands.
    Instead of spikes, the input may also consist of small whole numbers, such as the sums of residual blocks. A layer
    computes the exact product in each call whose input is known to consist of spikes or small whole numbers. Such
    inputs are outputs of neurons with a `spike_range`, and results of views, sums, pooling and similar operations on
    these outputs. The kernel also checks the input. If the input contains a number that is not whole, the product is
    computed again in float32. Modules, parameters and `state_dict()` do not change.

    Exact products run in `nn.Linear`, and in convolutions of size 1 with channels-last input, in float32 on a GPU.
    Torch's product still runs under autocast, on other devices, and for products that are so small that launches of
    kernels would take longer than the product.

    Args:
        net: trained or new network, in any mode, on any device. Call this function before `torch.compile`, and before
            using a wrapper such as `DistributedDataParallel`.
        precision: precision of weights and gradients. `"highest"` is float32, in three parts. `"high"` is 16 bits, in
            two parts. `"medium"` is 8 bits, in one part. `None` follows `torch.get_float32_matmul_precision()` in each
            call. Weights from `on_grid` are never rounded. With `"exact"`, exact products run only in layers whose
            weight is on a grid.
        also: names of other layers whose input consists of spikes, such as the first layer if the data are spikes.
        skip: names of layers to leave unchanged.

    Returns:
        A report about the product of each layer, to print after a call.

    Raises:
        UnknownNameError: `net` has no layer of a given name, or the precision is unknown.

    Example:
        >>> from flexsn_nn import LIF
        >>> net = nn.Sequential(nn.Linear(8, 64), LIF(), nn.Linear(64, 5))
        >>> products = exact_products(net)
        >>> y = net(torch.rand(4, 2, 8))
        >>> [product.layer for product in products.layers]  # print(products) shows kernels and reasons
        ['0', '2']
    """
    if precision is not None:
        check_name("precision", precision, PRECISIONS)
    modules = dict(net.named_modules())
    for name in (*also, *skip):
        check_name("layer", name, modules)
    plain_products(net)
    neuron_modules = {part for module in modules.values() if isinstance(module, FlexSN) for part in module.modules()}
    edges = Edges(net, _LAYERS)
    ranges_by_mode = {mode: known_inputs(net, _LAYERS, training=mode) for mode in (False, True)}
    reasons: dict[str, str] = {}
    linked_neurons: set[str] = set()
    for name, module in modules.items():
        if not isinstance(module, _LAYERS):
            continue
        reason = "part of a neuron's step" if module in neuron_modules else why_no_product(module)
        if name in skip:
            reason = "it is in skip"
        if reason is not None:
            reasons[name] = reason
            continue
        ranges = (ranges_by_mode[False].get(name), ranges_by_mode[True].get(name))
        enclosing = _list_enclosing(name, modules)
        neuron = edges.links.get(name)
        module.forward = ExactForward(
            module,
            precision,
            ranges,
            is_declared=name in also,
            reads=enclosing if name in edges.readers else None,
            links=enclosing if neuron is not None else None,
        )
        if neuron is not None:
            linked_neurons.add(neuron)
    for name, module in modules.items():
        if not isinstance(module, FlexSN):
            continue
        if module.spike_range is not None:
            module.register_forward_hook(_mark_spikes, prepend=True)
        writes, takes = name in edges.writers, name in linked_neurons
        if (writes or takes) and can_exchange(module):
            vars(module)[ATTRIBUTE] = SpikeExchange(writes, takes, _list_enclosing(name, modules))
    return ExactProducts(net, reasons)


def plain_products(net: nn.Module) -> None:
    """Restores torch's products in the layers of a network after `exact_products`."""
    for module in net.modules():
        if isinstance(vars(module).get("forward"), ExactForward):
            del module.forward
        vars(module).pop(ATTRIBUTE, None)
        hooks = module._forward_hooks
        for hook_id in [hook_id for hook_id, hook in hooks.items() if hook is _mark_spikes]:
            del hooks[hook_id]


def _list_enclosing(name: str, modules: dict[str, nn.Module]) -> tuple[nn.Module, ...]:
    """Returns a module and the modules that contain it, except the whole network."""
    path = name.split(".")
    return tuple(modules[".".join(path[:i])] for i in range(len(path), 0, -1) if ".".join(path[:i]) in modules)


def _mark_spikes(neuron: Any, inputs: Any, output: Any) -> None:
    """Marks the first output of a neuron as whole numbers. This function is a forward hook."""
    if torch.compiler.is_compiling() or neuron.spike_range is None:
        return
    first: Tensor = output if isinstance(output, Tensor) else output[0]
    mark(first, *neuron.spike_range)


__all__ = ["ExactProducts", "LayerProduct", "exact_products", "plain_products"]
