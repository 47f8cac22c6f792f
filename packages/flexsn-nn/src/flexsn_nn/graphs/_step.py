"""A training step without a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flexsn_nn.errors import ParameterError
from flexsn_nn.functional import detach_net, reset_net, with_state
from flexsn_nn.graphs._arguments import put_together, take_apart

# Results, other than states, that a call stores on a neuron.
_RESULTS = ("state_seqs", "spike_counts")


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """Forward, loss, backward, and the optimizer's step.

    Attributes:
        net, loss, optimizer, scaler, carry, autocast, max_norm, before_update: arguments of `capture`.
    """

    net: nn.Module
    loss: Callable[..., Any]
    optimizer: torch.optim.Optimizer | None
    scaler: torch.amp.GradScaler | None
    carry: bool
    autocast: torch.dtype | None
    max_norm: float | None
    before_update: Callable[[], object] | None

    def run(self, inputs: Any, others: Sequence[Any]) -> Any:
        """Runs the whole step. Returns the detached result of the loss function."""
        result = self.gradients(inputs, others)
        self.update()
        return result

    def gradients(self, inputs: Any, others: Sequence[Any], net: nn.Module | None = None) -> Any:
        """Runs forward, loss and backward. Returns the detached result of the loss function.

        Args:
            inputs: input of the network: a tensor, or a tuple of positional arguments.
            others: other arguments of the loss function.
            net: module to run instead of the attribute `net`.
        """
        if self.carry:
            detach_net(self.net)
        else:
            reset_net(self.net)
        if self.optimizer is not None:
            for parameter in self.parameters():
                parameter.grad = None
        with self._create_autocast():
            output = (net or self.net)(*(inputs if isinstance(inputs, tuple) else (inputs,)))
            result = self.loss(output, *others)
        value = _find_loss(result)
        (value if self.scaler is None else self.scaler.scale(value)).backward()
        # Autograd's graph of the step must not outlive the step, because the nodes of this graph belong to the stream
        # on which they were created.
        del output, value
        detach_net(self.net)
        if not self.carry:
            _forget_states(self.net)
        tensors, form = take_apart(result)
        return put_together(form, iter([tensor.detach() for tensor in tensors]))

    def update(self) -> None:
        """Clips gradients, and calls `before_update` and the optimizer's step. Does nothing without an optimizer."""
        optimizer, scaler = self.optimizer, self.scaler
        if optimizer is None:
            return
        if scaler is not None and (self.max_norm is not None or self.before_update is not None):
            scaler.unscale_(optimizer)
        if self.max_norm is not None:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            nn.utils.clip_grad_norm_(parameters, self.max_norm)
        if self.before_update is not None:
            self.before_update()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    def parameters(self) -> list[nn.Parameter]:
        """Lists the parameters of the network, of the loss and of the optimizer."""
        return list(dict.fromkeys(self._walk_parameters()))

    def _walk_parameters(self) -> Iterator[nn.Parameter]:
        yield from self.net.parameters()
        if isinstance(self.loss, nn.Module):
            yield from self.loss.parameters()
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                yield from group["params"]

    def _create_autocast(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        device = next(self.net.parameters()).device.type
        return torch.autocast(device, dtype=self.autocast)


def _find_loss(result: Any) -> Tensor:
    """Finds the loss in the result of the loss function: the result itself, its first item, or its item `"loss"`."""
    value = result[0] if isinstance(result, tuple | list) and result else result
    if isinstance(result, dict) and "loss" in result:
        value = result["loss"]
    if not isinstance(value, Tensor):
        raise ParameterError(
            f"the loss function returned a {type(value).__name__}; expected a tensor, a tuple that begins with the "
            "loss, or a dict with the key 'loss'."
        )
    return value


def _forget_states(net: nn.Module) -> None:
    """Frees the states, but keeps counts and sequences, which the user may read after the step."""
    for _, module in with_state(net):
        attributes = module.__dict__
        results: dict[str, Any] = {name: attributes[name] for name in _RESULTS if name in attributes}
        module.reset()
        attributes.update(results)
