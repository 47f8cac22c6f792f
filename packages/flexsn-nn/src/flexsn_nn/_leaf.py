"""Modules that `torch.fx` treats as one node and `torch.jit` does not support."""

from __future__ import annotations

from typing import NoReturn

from torch import nn

from flexsn_nn._torch_private import LEAF_NAMESPACE
from flexsn_nn.errors import ExportError


class Leaf(nn.Module):
    """A layer that is one `call_module` node of a graph, like PyTorch's own layers.

    Its calls depend on a state or on Python values, which are invisible to a recorder of operations.
    """

    def __init__(self) -> None:
        super().__init__()
        # With this attribute, torch.fx also treats subclasses that users define as one node. Their code, and hooks on
        # the layer, then run when the graph runs, and not when the graph is recorded.
        self.__dict__["__module__"] = LEAF_NAMESPACE

    def __prepare_scriptable__(self) -> NoReturn:
        raise ExportError(
            f"torch.jit.script cannot compile {type(self).__name__}: its step is a Python function that is traced. Use "
            "torch.export.export (docs/deployment.md), or torch.compile."
        )


def refuse_proxies(name: str) -> ExportError:
    """Returns the error for a `torch.fx` recorder that calls a layer with proxies instead of tensors.

    Args:
        name: class of the layer.
    """
    return ExportError(
        f"torch.fx records the operations inside of {name}, which has a state and a loop over time. In a network, "
        "symbolic_trace records a call neuron(x) as one call_module node. To trace only a neuron, put it into "
        "nn.Sequential(neuron). Put a call of neuron.step(...) into the forward of your own module. To record such a "
        "module as one node, define in your own Tracer: def is_leaf_module(self, m, name): return isinstance(m, "
        "(FlexSN, ...)) or super().is_leaf_module(m, name)."
    )
