"""The mapping from the results of a step graph to the results of its kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import fx

from flexsn_graph.errors import GraphArityError


class FlexSNInfo(NamedTuple):
    """Names and counts of a forward graph `[*inputs, *states] -> [*outputs, *new_states, *intermediates]`.

    Attributes:
        num_inputs, num_outputs, num_states: the arguments of `extract_info`.
        fwd_core_args: names of the graph's arguments, in order.
        fwd_core_returns: names of the graph's results, including duplicates.
        fwd_core_recipients: the name that receives each result, or `"_"` for a duplicate.
        fwd_kernel_returns: names of the results without duplicates.
        num_fwd_kernel_returns: number of the results without duplicates.
        c2k_return_mapping: for intermediate `i`, its position in `fwd_kernel_returns`.
    """

    num_inputs: int
    num_outputs: int
    num_states: int
    fwd_core_args: tuple[str, ...]
    fwd_core_returns: tuple[str, ...]
    fwd_core_recipients: tuple[str, ...]
    fwd_kernel_returns: tuple[str, ...]
    num_fwd_kernel_returns: int
    c2k_return_mapping: tuple[int, ...]


def extract_info(fwd_graph: fx.Graph, num_inputs: int = 1, num_states: int = 0, num_outputs: int = 1) -> FlexSNInfo:
    """Describes a forward graph for the kernel templates.

    Args:
        fwd_graph: `[*inputs, *states] -> [*outputs, *new_states, *intermediates]`. Lifted tensors may
            follow the states.

    Raises:
        GraphArityError: the graph has fewer arguments or results than `num_inputs`, `num_states` and `num_outputs`
            require, or a result that is not a node.

    Example:
        >>> import torch
        >>> from flexsn_graph import generate_inference_graph
        >>> graph = generate_inference_graph(lambda x, v: (x + v, v * 0.5), (torch.zeros(2),) * 2)
        >>> extract_info(graph, num_inputs=1, num_states=1, num_outputs=1).num_fwd_kernel_returns
        2
    """
    args = tuple(n.name for n in fwd_graph.nodes if n.op == "placeholder")
    returns = tuple(_get_name(entry) for entry in _list_results(fwd_graph))
    num_results = num_outputs + num_states
    if len(args) < num_inputs + num_states:
        raise GraphArityError(
            f"the graph takes {len(args)} arguments; num_inputs + num_states is {num_inputs} + "
            f"{num_states} = {num_inputs + num_states}."
        )
    if len(returns) < num_results:
        raise GraphArityError(
            f"the graph returns {len(returns)} values; num_outputs + num_states is {num_outputs} + "
            f"{num_states} = {num_results}."
        )
    kernel_returns = tuple(dict.fromkeys(returns))
    first = {name: returns.index(name) for name in kernel_returns}
    recipients = tuple(name if first[name] == i else "_" for i, name in enumerate(returns))
    mapping = tuple(kernel_returns.index(name) for name in returns[num_results:])
    return FlexSNInfo(
        num_inputs=num_inputs,
        num_outputs=num_outputs,
        num_states=num_states,
        fwd_core_args=args,
        fwd_core_returns=returns,
        fwd_core_recipients=recipients,
        fwd_kernel_returns=kernel_returns,
        num_fwd_kernel_returns=len(kernel_returns),
        c2k_return_mapping=mapping,
    )


def _list_results(graph: fx.Graph) -> tuple[Any, ...]:
    results = next(n for n in reversed(graph.nodes) if n.op == "output").args[0]
    return tuple(results) if isinstance(results, list | tuple) else (results,)


def _get_name(entry: Any) -> str:
    if isinstance(entry, fx.Node):
        return entry.name
    raise GraphArityError(f"the graph returns {entry!r}, which is not the result of a node.")
