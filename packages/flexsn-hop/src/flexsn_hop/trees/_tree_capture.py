"""Makes ``torch.compile`` capture ``scan`` as one node of ``flex_sn_scan``. Trees are converted outside of the node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flexsn_hop._torch_private import (
    CapturedTreeCall,
    DynamoStep,
    TreeCaptureHooks,
    TreeParts,
    is_transforming,
    register_with_dynamo,
    tree_flatten,
    tree_unflatten,
)
from flexsn_hop.operator._dynamo import node_options
from flexsn_hop.operator._inspect import inspect_step
from flexsn_hop.operator._operator import flex_sn_scan
from flexsn_hop.trees._tree_loop import as_given, clock, in_order, run_trees
from flexsn_hop.trees._trees import Tree, TreeCall, TreeSteps, check_sequence_dims, check_tree_call, fill

__all__ = ["offer_trees_to_dynamo"]


def offer_trees_to_dynamo(name: str) -> None:
    """Registers the operator ``name`` with Dynamo if Dynamo is loaded. Repeated calls take little time."""
    parts = TreeParts(_flatten, _open, _close)
    register_with_dynamo(name, TreeCaptureHooks(_check_captured_call, _check_captured_step, parts, flex_sn_scan))


# Dynamo traces the next functions like the user's code. The functions check nothing, because the hooks check the call.


def _flatten(init: Any, xs: Any) -> Any:
    return (*tree_flatten(init), *tree_flatten(xs))


def _open(
    step: Callable[..., Any],
    carry_leaves: Sequence[Any],
    carry_spec: Any,
    x_leaves: Sequence[Any],
    x_spec: Any,
    length: Any,
    reverse: bool,
    dim: int,
    remat: int | None,
) -> Any:
    """Returns the core, the input sequences and the states with which the operator is called."""
    in_carry = [leaf is not None for leaf in carry_leaves]
    in_x = [leaf is not None for leaf in x_leaves]
    states = [leaf for leaf in carry_leaves if leaf is not None]
    inputs = [in_order(leaf, reverse, dim) for leaf in x_leaves if leaf is not None]
    num_x = len(inputs)
    if num_x == 0:
        inputs = [clock(states, length)]
    num_inputs = len(inputs)

    def core(*values: Any) -> Any:
        return step(fill(carry_spec, in_carry, values[num_inputs:]), fill(x_spec, in_x, values[:num_x]))

    return core, inputs, states


def _close(
    results: Sequence[torch.Tensor],
    carry_leaves: Sequence[Any],
    carry_spec: Any,
    result_indices: Sequence[int | None],
    spec: Any,
    num_outputs: int,
    reverse: bool,
    dim: int,
    remat: int | None,
) -> Any:
    """Builds the result of ``scan``: the operator's results in the trees of ``init`` and of a step's result.

    The carry in the step's result also receives tensors, because its containers may check their contents.
    """
    leaves = [
        None if index is None else results[index] if index >= num_outputs else as_given(results[index], reverse, dim)
        for index in result_indices
    ]
    _, ys = tree_unflatten(leaves, spec)
    return fill(carry_spec, [leaf is not None for leaf in carry_leaves], results[num_outputs:]), ys


def _run_plain_loop(step: Callable[..., Any], init: Any, xs: Any, *options: Any) -> Any:
    return run_trees(TreeCall.of(step, init, xs, *options))


def _scan_no_steps(
    step: Callable[..., Any], init: Any, xs: Any, length: Any, reverse: bool, dim: int, remat: int | None
) -> Any:
    """Returns the results for ``T == 0``. A scan of one step, whose values are discarded, determines the shapes."""

    def on_copies(carry: Any, x: Any) -> Any:
        return step(_copy_tree(carry), _copy_tree(x))  # copies, because a step in a loop may write to its arguments

    leaves, spec = tree_flatten(xs)
    ticks = [None if leaf is None else leaf.new_zeros(_replace_size(leaf, dim, 1)) for leaf in leaves]
    with torch.no_grad():
        _, y = torch.ops.higher_order.flexsn_scan(
            on_copies, init, tree_unflatten(ticks, spec), None if length is None else 1, reverse, dim, None
        )
    y_leaves, y_spec = tree_flatten(y)
    ys = [
        None if leaf is None else torch.empty(_replace_size(leaf, dim, 0), dtype=leaf.dtype, device=leaf.device)
        for leaf in y_leaves
    ]
    return _copy_tree(init), tree_unflatten(ys, y_spec)


def _copy_tree(tree: Any) -> Any:
    leaves, spec = tree_flatten(tree)
    return tree_unflatten([None if leaf is None else leaf.clone() for leaf in leaves], spec)


def _replace_size(leaf: torch.Tensor, dim: int, size: int) -> list[int]:
    shape = list(leaf.shape)
    shape[dim] = size
    return shape


# The following functions run on fake tensors while Dynamo traces.


def _make_tree_call(call: CapturedTreeCall) -> TreeCall:
    carry, x = Tree.of(call.carry_leaves, call.carry_spec), Tree.of(call.x_leaves, call.x_spec)
    states = [leaf for leaf in call.carry_leaves if leaf is not None]
    inputs = [leaf for leaf in call.x_leaves if leaf is not None]
    return TreeCall(call.step, carry, states, x, inputs, call.length, call.reverse, call.dim, call.remat)


def _check_captured_call(captured: CapturedTreeCall) -> dict[str, Any] | Callable[..., Any]:
    call = _make_tree_call(captured)
    check_tree_call(call)
    if call.steps == 0:
        return _scan_no_steps
    if is_transforming():
        return _run_plain_loop  # Dynamo cannot capture a transformed step
    remat = 0 if call.remat is None else int(call.remat)
    return node_options([*call.inputs, *call.states], final_state=True, remat=remat)


def _check_captured_step(captured: CapturedTreeCall, step: DynamoStep) -> tuple[list[int], list[int | None], int]:
    """Checks the results of one step.

    Returns three values: the positions of a core's results among the results of the step's graph; for each leaf of the
    step's return value, the index of the core's result (None for a leaf that is None); and the number of outputs.
    """
    call = _make_tree_call(captured)
    take_step = TreeSteps(call)
    num_inputs = max(1, len(call.inputs))
    states = step.samples[num_inputs : num_inputs + len(call.states)]
    outputs, new_states = take_step.check(step.returned, states, 0)
    assert take_step.y is not None
    sequences = [output.expand(call.steps, *output.shape) for output in outputs]
    check_sequence_dims(take_step.y, "ys", sequences, call.dim)
    inspect_step(step.graph, step.samples)
    position = {id(result): index for index, result in enumerate(step.results)}
    state_positions = [position[id(state)] for state in new_states]
    # A core returns its outputs first, but a step returns its carry first.
    in_carry = tree_flatten(step.returned[0])[0]
    result_indices: list[int | None] = [
        None if leaf is None else len(outputs) + state_positions.index(position[id(leaf)]) for leaf in in_carry
    ]
    numbers = iter(range(len(outputs)))
    result_indices += [next(numbers) if is_present else None for is_present in take_step.y.present]
    return [*(position[id(output)] for output in outputs), *state_positions], result_indices, len(outputs)
