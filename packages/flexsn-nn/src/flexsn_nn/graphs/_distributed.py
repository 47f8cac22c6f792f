"""Communication of `DistributedDataParallel`, which a graph does not contain: copies buffers, averages gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flexsn_nn.graphs._arguments import copy_all


def local(net: nn.Module) -> nn.Module:
    """Returns the network in this process, without its wrapper."""
    return net.module if isinstance(net, nn.parallel.DistributedDataParallel) else net


def share_buffers(net: nn.Module) -> None:
    """Copies the buffers of the first process to all processes, if `net` is set to do so before a forward."""
    if not isinstance(net, nn.parallel.DistributedDataParallel):
        return
    if net.broadcast_buffers and net.require_forward_param_sync:
        group = net.process_group
        for buffer in net.module.buffers():
            dist.broadcast(buffer, dist.get_global_rank(group, 0), group=group)


def average_gradients(net: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Averages gradients over processes, one message per dtype, if `net` is set to do so after a backward."""
    if not isinstance(net, nn.parallel.DistributedDataParallel) or not net.require_backward_grad_sync:
        return
    net_parameters = set(net.parameters())
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if parameter in net_parameters and parameter.grad is not None:
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for gradients in by_dtype.values():
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        flat /= dist.get_world_size(net.process_group)
        dist.all_reduce(flat, group=net.process_group)
        parts = flat.split([gradient.numel() for gradient in gradients])
        copy_all(gradients, [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)])
