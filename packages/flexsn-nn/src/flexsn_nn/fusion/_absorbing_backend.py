"""A backend of `torch.compile` that moves functions before neurons into the neurons' steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from flexsn_nn._torch_private import compiler_of
from flexsn_nn.fusion._absorb import absorb_producers
from flexsn_nn.fusion._report import Absorbed, LeftProducer


class AbsorbingBackend:
    """A backend of `torch.compile` that makes a neuron's step compute the functions that produce the neuron's input.

    Elementwise functions before a neuron (a bias, a scale, a residual addition, an activation, a change of dtype) and
    the affine part of `batch_norm` become part of the step. The sequence between the function and the neuron is then
    neither written, read nor stored. The graph is changed before AOTAutograd, so gradients are those of the new step. A
    function is not moved if the move would save nothing, because another node also reads its result, or if the move
    would change the result. `print` shows the functions that were moved, and the reasons why other functions were not
    moved.

    Results equal those of the unchanged network, except for `batch_norm`. A norm is computed as `(x - mean) * scale +
    shift`, as after `fuse_norms`.

    Args:
        backend: backend that compiles the changed graph: a name, or a function of a graph and examples of its inputs,
            such as a `PackingBackend`.

    Attributes:
        absorbed: functions that were moved into steps, in all graphs compiled so far. There is one entry for each
            input that a step computes.
        left: functions before neurons that were not moved, with the reasons.

    Example:
        >>> import torch
        >>> from flexsn_nn import LIF
        >>> neuron, backend = LIF(), AbsorbingBackend("eager")
        >>> torch.compile(lambda x: neuron(2 * x + 0.1), backend=backend)(torch.rand(4, 3)).shape
        torch.Size([4, 3])
        >>> [len(entry.producers) for entry in backend.absorbed]
        [2]
    """

    def __init__(self, backend: str | Callable[..., Any] = "inductor") -> None:
        self._backend = backend
        self.absorbed: list[Absorbed] = []
        self.left: list[LeftProducer] = []

    def __call__(self, graph: fx.GraphModule, examples: Sequence[Any], **options: Any) -> Any:
        absorbed, left = absorb_producers(graph)
        self.absorbed += absorbed
        self.left += left
        return compiler_of(self._backend)(graph, examples, **options)

    def __str__(self) -> str:
        lines = [f"neurons compute {len(self.absorbed)} of their inputs", *(f"  {entry}" for entry in self.absorbed)]
        if self.left:
            lines += ["not moved into a step:", *(f"  {entry}" for entry in self.left)]
        return "\n".join(lines)
