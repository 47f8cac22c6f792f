"""Makes Inductor lower calls of an operator whose first arguments are graphs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexsn_hop.versions import expect, needed

_NO_KERNELS = "a compiled `flex_sn_scan` runs as a loop, without kernels"
_NO_LOWERING = "Inductor cannot compile `flex_sn_scan`"

# These names are looked up when code is compiled, because importing Inductor is slow.
for _module, _names, _without in (
    ("torch._inductor.config", ["triton_kernel_default_layout_constraint"], "compiled kernels are compiled twice"),
    ("torch._inductor.decomposition", ["select_decomp_table"], _NO_KERNELS),
    ("torch._inductor.graph", ["_inductor_lowering_function"], _NO_LOWERING),
    ("torch._inductor.ir", ["BaseView", "ComputedBuffer", "ExternKernel.realize_input", "TensorBox"], _NO_KERNELS),
    ("torch._inductor.lowering", ["process_subgraph_nodes"], _NO_KERNELS),
    ("torch._inductor.lowering", ["fallback_handler.add_to_fallback_set"], _NO_LOWERING),
    ("torch._inductor.virtualized", ["V"], _NO_LOWERING),
    ("torch._higher_order_ops.triton_kernel_wrap", ["triton_kernel_wrapper_mutation"], _NO_KERNELS),
):
    expect(_module, _names, _without)


@dataclass(frozen=True, slots=True)
class InductorCall:
    """A call of an operator that Inductor lowers.

    Attributes:
        graphs: The operator's first arguments, which are ATen graphs.
        args: The arguments after the graphs, as values of Inductor. Some arguments may be sizes.
        examples: The arguments after the graphs, as fake tensors and sizes.
        results: Fake tensors with the shapes, dtypes and devices of the results.
    """

    graphs: tuple[torch.fx.GraphModule, ...]
    args: tuple[Any, ...]
    examples: tuple[Any, ...]
    results: tuple[torch.Tensor, ...]

    def without(self, count: int) -> InductorCall:
        """Returns the call without the first ``count`` arguments after the graphs."""
        return InductorCall(self.graphs, self.args[count:], self.examples[count:], self.results)

    @property
    def is_ahead_of_time(self) -> bool:
        """True if the call becomes part of a C++ program that runs without Python."""
        V = needed("torch._inductor.virtualized", "V", _NO_LOWERING)
        return bool(V.graph.aot_mode)

    def inline(self, function: Callable[..., Any], description: str, unread: Collection[int] = ()) -> Sequence[Any]:
        """Adds the operations of ``function(*args)`` to Inductor's graph.

        Error messages call the function ``description``. The function may only use the shapes and dtypes of the
        arguments at the positions ``unread``, because Inductor may never write these arguments to memory.

        Raises:
            ValueError: The function created a constant tensor, which Inductor would not find in its graph.
        """
        config = needed("torch._inductor", "config", _NO_KERNELS)
        select_decomp_table = needed("torch._inductor.decomposition", "select_decomp_table", _NO_KERNELS)
        process_subgraph_nodes = needed("torch._inductor.lowering", "process_subgraph_nodes", _NO_KERNELS)
        V = needed("torch._inductor.virtualized", "V", _NO_LOWERING)
        make_fx = needed("torch.fx.experimental.proxy_tensor", "make_fx", _NO_KERNELS)

        read = [i for i in range(len(self.args)) if i not in unread]
        settled = [_fix_layout(self.args[i], self.examples[i]) for i in read]

        def run(*values: Any) -> Any:
            args = list(self.examples)
            for i, value in zip(read, values, strict=True):
                args[i] = value
            return function(*args)

        with V.fake_mode:
            traced = make_fx(run, decomposition_table=select_decomp_table())(
                *(strided_example for _, strided_example in settled)
            )
        if traced.graph.find_nodes(op="get_attr"):
            raise ValueError(
                f"{description} created a constant tensor, perhaps with torch.tensor: use torch.full instead"
            )
        # Without this setting, Inductor compiles each kernel a second time, to find the memory that the kernel writes.
        settings = {"triton_kernel_default_layout_constraint": "flexible_layout"}
        patch = settings if hasattr(config, next(iter(settings))) and _layouts_are_settled(traced.graph) else {}
        with config.patch(patch):
            return process_subgraph_nodes(traced, [value for value, _ in settled])  # type: ignore[no-any-return]

    def fall_back_to(self, op: Any, *args: Any) -> Sequence[Any]:
        """Replaces the call by a call of ``op``, an operator for which Inductor has no lowering."""
        handler = needed("torch._inductor.lowering", "fallback_handler", _NO_LOWERING, takes=["add_to_fallback_set"])
        return handler(op, add_to_fallback_set=False)(*args)  # type: ignore[no-any-return]


def _fix_layout(value: Any, example: Any) -> tuple[Any, Any]:
    """Fixes the layout of a value of Inductor. Returns the value, and an example with the strides of this layout.

    The strides of Inductor's examples are the strides in eager mode. Until a layout is fixed, Inductor may choose other
    strides.
    """
    ir = needed("torch._inductor", "ir", _NO_KERNELS)
    V = needed("torch._inductor.virtualized", "V", _NO_LOWERING)
    if not isinstance(value, ir.TensorBox):
        return value, example
    value.realize()
    base: Any = value.data.unwrap_view() if isinstance(value.data, ir.BaseView) else value.data
    if isinstance(base.data, ir.ComputedBuffer):
        base.data.decide_layout()  # derives the order of dimensions from the reads, without a copy or a transposition
    realized: Any = ir.ExternKernel.realize_input(value)
    realized.freeze_layout()
    shapes = V.graph.sizevars.shape_env
    strides = [
        int(stride) if getattr(stride, "is_number", True) else shapes.create_symintnode(stride, hint=None)
        for stride in realized.get_layout().stride
    ]
    with V.fake_mode:
        strided_example = torch.empty_strided(example.shape, strides, dtype=example.dtype, device=example.device)
    return ir.TensorBox(realized), strided_example


def _layouts_are_settled(graph: torch.fx.Graph) -> bool:
    """True if all tensors that Triton kernels take have the traced strides when the graph runs.

    This is certain for arguments, for new memory, and for permutations of arguments or new memory.
    """
    mutation = needed("torch._higher_order_ops.triton_kernel_wrap", "triton_kernel_wrapper_mutation", _NO_KERNELS)
    aten = torch.ops.aten

    def is_settled(value: Any) -> bool:
        if not isinstance(value, torch.fx.Node) or not isinstance(value.meta["val"], torch.Tensor):
            return True
        if value.target is aten.permute.default:
            return is_settled(value.args[0])
        return value.op == "placeholder" or value.target is aten.empty_strided.default

    launches: Any = graph.find_nodes(op="call_function", target=mutation)
    return all(is_settled(value) for launch in launches for value in launch.kwargs["kwargs"].values())


class LowersItself:
    """Base class of an operator that lowers itself when Inductor calls it with values of Inductor.

    If the target of a node has the attribute ``_inductor_lowering_function``, Inductor calls the target and does not
    look for a registered lowering. Inductor does not change the fake tensors of the node. The lowering chooses the
    layouts of the results. If a node that uses a result relies on the strides in eager mode, Inductor copies the
    result.
    """

    _inductor_lowering_function = True

    def redispatch(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """Calls the implementation for the next dispatch key."""
        raise NotImplementedError

    def _inductor_lowering_output_metadata_fn(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """Returns fake results for fake arguments.

        From torch 2.15 on, Inductor recomputes the metadata of a node after a pass has changed the arguments of the
        node. Inductor then rejects a target that lowers itself, unless the target has this function.
        """
        return self.redispatch(*args, **kwargs)

    @staticmethod
    def inductor_call(graphs: Sequence[Any], args: Sequence[Any]) -> InductorCall | None:
        """Returns the call if Inductor is the caller, otherwise None."""
        if type(graphs[0]).__module__ != "torch._inductor.ir":
            return None
        V = needed("torch._inductor.virtualized", "V", _NO_LOWERING)
        call = V.graph.current_node
        nodes = call.args[len(graphs) :]
        examples = tuple(node.meta["val"] if isinstance(node, torch.fx.Node) else node for node in nodes)
        modules = tuple(subgraph.graph_module for subgraph in graphs)
        return InductorCall(modules, tuple(args), examples, tuple(call.meta["val"]))
