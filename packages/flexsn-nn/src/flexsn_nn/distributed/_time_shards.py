"""Runs a network over a sequence that is divided along time. Each process sends its states to the next process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flexsn_nn._checks import check_module, check_name
from flexsn_nn._flexsn import FlexSN
from flexsn_nn._leaf import Leaf
from flexsn_nn._stateful import Stateful
from flexsn_nn.errors import StateError
from flexsn_nn.functional import reset_net, with_state

_BPTT = ("exact", "truncated")


def time_shard(sequence: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Returns this process's part of a sequence. The first process of the group has the first steps.

    Args:
        sequence: `[T, ...]`, equal on all processes. `T` does not have to be a multiple of the number of processes.
        group: process group; `None` for all processes.

    Returns:
        A view `[T', ...]`.

    Raises:
        StateError: the sequence has fewer steps than there are processes. This error is a `ValueError`.
    """
    count = dist.get_world_size(group)
    if sequence.shape[0] < count:
        raise StateError(
            f"{sequence.shape[0]} time steps cannot be divided between {count} processes: use fewer processes."
        )
    return sequence.tensor_split(count)[dist.get_rank(group)]


class TimeShards(Leaf):
    """A network that runs over a sequence that is divided along time, with one part on each process.

    Each neuron, and each layer with a state (`Delay`, `SlidingPSN`, `SharedDropout`, or a class derived from
    `Stateful`), waits for its states from the previous process, runs over this process's steps, and sends its states to
    the next process. While the next process runs this layer, this process runs the following layers. In a network with
    many layers, all processes therefore run at the same time. Each process has the whole network. Average the
    parameters' gradients as in data-parallel training: `DistributedDataParallel(TimeShards(net))` sums the gradients
    and divides the sums by the number of processes.

    Args:
        net: network of neurons, layers with a state, and layers that process each step separately. Neurons and layers
            with a state run once per call, in the same order on all processes. Every call begins with the initial
            states.
        group: the processes, in the order of time; `None` for all processes.
        bptt: with `"exact"`, gradients flow through the states to the previous processes, as if one process ran the
            whole sequence. Every process then has to call `backward` on a loss of its own outputs. With `"truncated"`,
            no gradient flows from process to process.

    Raises:
        UnknownNameError: `bptt` is unknown.
        StateError: a neuron or a layer with a state runs twice in one call.

    Example: see docs/distributed.md.
    """

    steps_apart: ClassVar[bool] = False

    def __init__(self, net: nn.Module, group: dist.ProcessGroup | None = None, bptt: str = "exact") -> None:
        super().__init__()
        check_module("net", net)
        check_name("bptt", bptt, _BPTT)
        self.net = net
        self.group = group
        self.bptt = bptt

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `net` on this process's steps, and returns its result.

        Args:
            args, kwargs: arguments of `net`. Each sequence is this process's part, from `time_shard`.
        """
        reset_net(self.net)
        chain = _Chain(self.group, exact=self.bptt == "exact")
        handles = []
        for name, layer in with_state(self.net):
            handles.append(layer.register_forward_pre_hook(partial(chain.receive, name), with_kwargs=True))
            handles.append(layer.register_forward_hook(partial(chain.send, name)))
        try:
            return self.net(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
            reset_net(self.net)


class _Chain:
    """Hooks that pass the states of one call from process to process."""

    def __init__(self, group: dist.ProcessGroup | None, *, exact: bool) -> None:
        self._exact = exact and torch.is_grad_enabled()
        self._group = group
        rank, count = dist.get_rank(group), dist.get_world_size(group)
        self._previous = None if rank == 0 else _find_peer(group, rank - 1)
        self._next = None if rank == count - 1 else _find_peer(group, rank + 1)
        self._received: dict[str, list[Tensor]] = {}

    def receive(self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Sets a layer's states to the layer's final states on the previous process, before the layer runs."""
        assert isinstance(layer, FlexSN | Stateful)
        if name in self._received:
            raise StateError(
                f"the layer {name} ({type(layer).__name__}) is called twice in one call of the network, and the "
                "second call would continue from the state of the first. Give each place in the network its own layer."
            )
        self._received[name] = []
        if self._previous is None:
            return
        x = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        if isinstance(layer, FlexSN):
            like = [s.detach() for s in layer.init_states(layer.num_states, layer.step_mode, *args)]
        else:  # the previous process describes the states, whose shapes only the layer defines
            like = _make_empty(_receive(_encode_states([], x.device), self._previous, self._group))
        if not like:
            return
        if self._exact:
            received = _Receive.apply(self._previous, self._group, _make_anchor(x), *like)
            self._received[name] = list(received)
            layer.states = list(received)
        else:
            layer.states = [_receive(state, self._previous, self._group) for state in like]

    def send(self, name: str, layer: nn.Module, args: tuple[Any, ...], outputs: Any) -> Any:
        """Sends a layer's states to the next process, after the layer has run.

        Returns the outputs. In their backward, the gradients of the states are received from the next process.
        """
        assert isinstance(layer, FlexSN | Stateful)
        outgoing = list(layer.states)
        several = isinstance(outputs, list | tuple)
        tensors = list(outputs) if several else [outputs]
        if self._next is not None and not isinstance(layer, FlexSN):
            _send([_encode_states(outgoing, tensors[0].device)], self._next, self._group)
        if not self._exact:
            if self._next is not None:
                _send(outgoing, self._next, self._group)
            return outputs
        passed_outputs = _HandOver.apply(
            self._next,
            self._group,
            len(tensors),
            len(outgoing),
            _make_anchor(tensors[0]),
            *tensors,
            *outgoing,
            *self._received[name],
        )
        return type(outputs)(passed_outputs) if several else passed_outputs[0]


class _Receive(torch.autograd.Function):
    """Function that receives states from the previous process. The backward sends their gradients to that process."""

    @staticmethod
    def forward(
        ctx: Any, peer: int, group: dist.ProcessGroup | None, anchor: Tensor, *like: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.peer, ctx.group = peer, group
        states = tuple(_receive(state, peer, group) for state in like)
        ctx.mark_non_differentiable(*(state for state in states if not state.is_floating_point()))
        return states

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        _send([grad for grad in grads if grad.is_floating_point()], ctx.peer, ctx.group)
        return (None,) * (3 + len(grads))


class _HandOver(torch.autograd.Function):
    """Function that returns outputs unchanged, and sends states to the next process.

    The backward receives the states' gradients. One process sends gradients, and another process waits for them.
    Therefore, both processes must run their backward, even if no loss depends on the states. The backward of this
    function always runs, because the anchor requires grad. The backward of `_Receive` always follows, because the
    received states are arguments of this function, even though this function passes no gradient to them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        peer: int | None,
        group: dist.ProcessGroup | None,
        num_outputs: int,
        num_states: int,
        anchor: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        outputs, states = tensors[:num_outputs], tensors[num_outputs : num_outputs + num_states]
        ctx.peer, ctx.group, ctx.num_received = peer, group, len(tensors) - num_outputs - num_states
        ctx.states = [(state.shape, state.dtype, state.device) for state in states]
        if peer is not None:
            _send(states, peer, group)
        ctx.mark_non_differentiable(*(t for t in outputs if not t.is_floating_point()))
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = []
        for shape, dtype, device in ctx.states:
            flows = ctx.peer is not None and dtype.is_floating_point
            like = torch.empty(shape, dtype=dtype, device=device) if flows else None
            gradients.append(None if like is None else _receive(like, ctx.peer, ctx.group))
        return (None, None, None, None, None, *grads, *gradients, *(None,) * ctx.num_received)


_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
# Length of the message that describes states: enough for 14 states of 7 dimensions.
_DESCRIPTION = 128


def _encode_states(states: Sequence[Tensor], device: torch.device) -> Tensor:
    """Encodes the number, dtypes and shapes of states as integers `[128]`, which are sent before the states."""
    numbers = [len(states)]
    for state in states:
        numbers += [_DTYPES.index(state.dtype), state.dim(), *state.shape]
    if len(numbers) > _DESCRIPTION:
        raise StateError(f"a layer has {len(states)} states, too many to be sent from process to process.")
    return torch.tensor(numbers + [0] * (_DESCRIPTION - len(numbers)), dtype=torch.int64, device=device)


def _make_empty(description: Tensor) -> list[Tensor]:
    """Creates uninitialised tensors with the dtypes and shapes that `_encode_states` has encoded."""
    count, *numbers = description.tolist()
    tensors = []
    for _ in range(count):
        dtype, dims, *numbers = numbers
        shape, numbers = numbers[:dims], numbers[dims:]
        tensors.append(torch.empty(shape, dtype=_DTYPES[dtype], device=description.device))
    return tensors


def _make_anchor(like: Tensor) -> Tensor:
    return torch.zeros((), device=like.device, requires_grad=True)


def _send(tensors: Sequence[Tensor], peer: int, group: dist.ProcessGroup | None) -> None:
    for tensor in tensors:
        dist.send(tensor.detach().contiguous(), peer, group)


def _receive(like: Tensor, peer: int, group: dist.ProcessGroup | None) -> Tensor:
    received = torch.empty_like(like, memory_format=torch.contiguous_format)
    dist.recv(received, peer, group)
    return received


def _find_peer(group: dist.ProcessGroup | None, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
