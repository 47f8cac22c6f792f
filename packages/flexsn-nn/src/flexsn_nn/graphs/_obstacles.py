"""Reasons why a step, or its optimizer's part, runs in Python in every call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flexsn_nn.graphs._lines import line_of_function
from flexsn_nn.graphs._step import TrainingStep

# Packages whose hooks only compute with tensors, except for the hooks of monitors, which count in Python.
_CAPTURED_HOOKS = ("torch.nn.utils.", "torch.ao.", "flexsn_nn.")
_MONITORS = "flexsn_nn.monitor"
_HOOKS = {
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
    "_backward_pre_hooks": "a backward pre-hook",
    "_backward_hooks": "a backward hook",
}


def why_no_graph(step: TrainingStep) -> str | None:
    """Returns the reason why a step cannot be recorded; `None` if no such reason is known before the step runs."""
    return next(itertools.chain(_find_hooks(step), _check_distribution(step.net), _check_mode()), None)


def _find_hooks(step: TrainingStep) -> Iterator[str]:
    roots = [("", step.net), *([("loss", step.loss)] if isinstance(step.loss, nn.Module) else [])]
    for prefix, root in roots:
        for name, module in root.named_modules(prefix=prefix):
            for attribute, hook_kind in _HOOKS.items():
                for hook in getattr(module, attribute, {}).values():
                    yield from _check_hook(f"{name or 'the network'} ({type(module).__name__})", hook_kind, hook)
        for name, parameter in root.named_parameters(prefix=prefix):
            hooks: dict[int, Any] = {**(parameter._backward_hooks or {}), **_list_accumulation_hooks(parameter)}
            for hook in hooks.values():
                yield from _check_hook(f"{name} (a parameter)", "a hook", hook)
    for attribute, hook_kind in _HOOKS.items():
        for hook in getattr(torch.nn.modules.module, f"_global{attribute}", {}).values():
            yield from _check_hook("every module", hook_kind.replace("a ", "a global ", 1), hook)


def _list_accumulation_hooks(parameter: Tensor) -> dict[int, Any]:
    return getattr(parameter, "_post_accumulate_grad_hooks", None) or {}


def _check_hook(owner: str, hook_kind: str, hook: Callable[..., Any]) -> Iterator[str]:
    module = getattr(hook, "__module__", None) or type(hook).__module__
    if module.startswith(_MONITORS):
        yield (
            f"{owner} has {hook_kind} of a monitor, which counts in Python: leave its `with` block for captured steps, "
            "or set neuron.count_spikes and read neuron.spike_counts"
        )
    elif not f"{module}.".startswith(_CAPTURED_HOOKS):
        yield (
            f"{owner} has {hook_kind}, {line_of_function(hook)}: a graph would not run its Python code again. Remove "
            "the hook while steps are captured"
        )


def _check_distribution(net: nn.Module) -> Iterator[str]:
    if not isinstance(net, nn.parallel.DistributedDataParallel):
        if isinstance(net, nn.DataParallel):
            yield "the network is a DataParallel, whose threads a graph cannot contain: use DistributedDataParallel"
        return
    if net.find_unused_parameters:
        yield "DistributedDataParallel(find_unused_parameters=True) finds unused parameters in Python in each step"
    if getattr(net, "_comm_hooks", None):
        yield "DistributedDataParallel has a communication hook, which a captured step does not call"
    if getattr(net, "parameters_to_ignore", None):
        yield "DistributedDataParallel ignores some parameters, which a captured step would average"


def _check_mode() -> Iterator[str]:
    if torch.is_anomaly_enabled():
        yield "autograd's anomaly detection is on, and waits for the device"
    if not torch.is_grad_enabled():
        yield "gradients are disabled"


def why_update_eager(step: TrainingStep) -> str | None:
    """Returns the reason why the optimizer's part of a step runs in Python; `None` if this part can be recorded."""
    optimizer = step.optimizer
    assert optimizer is not None
    name = type(optimizer).__name__
    if isinstance(step.net, nn.parallel.DistributedDataParallel):
        return "gradients are averaged over processes before it"
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    if hooks:
        return f"{name} has a hook, {line_of_function(hooks[0])}"
    if "capturable" in optimizer.defaults:
        if not all(group["capturable"] for group in optimizer.param_groups):
            return f"{name} counts its steps on the CPU: give {name}(..., capturable=True)"
    elif type(optimizer) is torch.optim.SGD:
        if any(isinstance(group["lr"], Tensor) and not group["fused"] for group in optimizer.param_groups):
            return "SGD reads its learning rate, a tensor, in Python: give SGD(..., fused=True)"
    else:
        return f"a graph might not contain all of {name}: give SGD, or an optimizer of torch with capturable=True"
    scaler = step.scaler
    if scaler is not None and scaler.is_enabled() and not getattr(optimizer, "_step_supports_amp_scaling", False):
        return f"the gradient scaler waits for the device before the step of {name}: give {name}(..., fused=True)"
    return None
