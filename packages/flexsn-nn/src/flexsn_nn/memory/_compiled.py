"""Stores spikes as bits in the graphs of `torch.compile`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from flexsn_nn._dynamo_graphs import example, is_scan, is_written
from flexsn_nn._torch_private import compiler_of

_aten = torch.ops.aten
Compiler = Callable[..., Any]


class PackingBackend:
    """A backend of `torch.compile` whose graphs store spikes for the backward as bits, in 1/32 of float32's memory.

    Linear layers and convolutions that read a neuron's output store the bits of this output, and unpack them in the
    backward. The operations of the neuron's step must show that the output consists of zeros and ones. There may be
    views and copies between the neuron and the layer. Other tensors are stored unchanged.

    Args:
        backend: backend that compiles the changed graph: a name, or a function of a graph and examples of its inputs.

    Attributes:
        layers: number of layers that store bits, in the graphs that were compiled so far.

    Example:
        >>> net = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 5))
        >>> backend = PackingBackend("eager")
        >>> torch.compile(net, backend=backend)(torch.rand(2, 8)).shape, backend.layers
        (torch.Size([2, 5]), 0)
    """

    def __init__(self, backend: str | Compiler = "inductor") -> None:
        self._backend = backend
        self.layers = 0

    def __call__(self, graph: fx.GraphModule, examples: Sequence[Any], **options: Any) -> Any:
        self.layers += pack_layers(graph)
        return compiler_of(self._backend)(graph, examples, **options)


def pack_layers(graph: fx.GraphModule) -> int:
    """Replaces layers of a Dynamo graph that read spikes by layers that store bits. Returns the number of layers."""
    count = 0
    for node in list(graph.graph.nodes):
        layer = _LAYERS.get(node.target) if node.op == "call_function" else None
        if layer is None or not node.args or not _is_spikes(graph, node.args[0]):
            continue
        arguments = layer(node)
        if arguments is None:
            continue
        function, operands = arguments
        with graph.graph.inserting_before(node):
            new = graph.graph.call_function(function, operands)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.graph.erase_node(node)
        count += 1
    if count:
        graph.recompile()
    return count


# -- which values are spikes ---------------------------------------------------------------------------------

_MOVES = frozenset(
    {
        "clone",
        "contiguous",
        "flatten",
        "movedim",
        "permute",
        "reshape",
        "squeeze",
        "transpose",
        "unflatten",
        "unsqueeze",
        "view",
    }
)
_CASTS = frozenset({"to", "float", "double", "half", "bfloat16", "type_as", "clone", "detach"})
_COMPARED = frozenset({"ge", "gt", "le", "lt", "eq", "ne"})
_COMPARISONS = frozenset(getattr(module, name) for module in (operator, torch) for name in _COMPARED)


def _is_spikes(graph: fx.GraphModule, value: Any) -> bool:
    """True if a value contains only elements of one output of a scan, and this output consists of zeros and ones."""
    dtype = _find_unwritten_dtype(value)
    while isinstance(value, fx.Node) and _is_move(value):
        value = value.args[0]
        if _find_unwritten_dtype(value) is not dtype:
            return False  # also excludes views as another dtype
    if dtype is None or not isinstance(value, fx.Node) or value.target is not operator.getitem:
        return False
    scan, index = value.args
    if not isinstance(scan, fx.Node) or not is_scan(scan):
        return False
    core, _, _, num_outputs = scan.args[:4]
    if not isinstance(index, int) or not isinstance(num_outputs, int) or index >= num_outputs:
        return False
    step = getattr(graph, str(core.target), None) if isinstance(core, fx.Node) and core.op == "get_attr" else None
    return isinstance(step, fx.GraphModule) and _is_zero_one(step, _find_result(step, [index]))


def _find_unwritten_dtype(value: Any) -> torch.dtype | None:
    """Returns the dtype of a tensor that the graph never changes; `None` if the tensor may change, or is unknown."""
    tensor = example(value)
    return None if tensor is None or is_written(value) else tensor.dtype


def _is_move(node: fx.Node) -> bool:
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    return name in _MOVES and bool(node.args)


def _find_result(graph: fx.GraphModule, path: Sequence[int]) -> Any:
    """Returns the result of a graph at the indices `path`. If this result is nested, returns its first element."""
    value = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    for index in path:
        value = value[index] if isinstance(value, tuple | list) else value
    while isinstance(value, tuple | list) and value:
        value = value[0]
    return value


def _is_zero_one(graph: fx.GraphModule, value: Any) -> bool:
    """True if a value of a step is 0 or 1, because it is the converted result of a comparison.

    The comparison may also be inside of an `autograd.Function`.
    """
    while isinstance(value, fx.Node):
        if example(value) is not None and is_written(value):
            return False
        if value.target in _COMPARISONS or (value.op == "call_method" and value.target in _COMPARED):
            return True
        if value.op == "call_method" and value.target in _CASTS:
            value = value.args[0]
            continue
        index = 0
        if value.target is operator.getitem:
            value, index = value.args  # type: ignore[assignment]
        name = getattr(value.target, "__name__", "") if isinstance(value, fx.Node) else ""
        if name != "autograd_function_apply" or index != 0:
            return False
        body = getattr(graph, str(value.args[0].target), None)
        return isinstance(body, fx.GraphModule) and _is_zero_one(body, _find_result(body, [0]))
    return False


# -- layers that store bits ----------------------------------------------------------------------------------

Replacement = tuple[Callable[..., Tensor], tuple[Any, ...]]


def _replace_linear(node: fx.Node) -> Replacement | None:
    x, weight, bias = _list_arguments(node, ("input", "weight", "bias"), (None, None, None))
    return linear_of_spikes, (x, weight, bias)


def _replace_convolution(node: fx.Node) -> Replacement | None:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    x, weight, bias, *sizes, groups = _list_arguments(node, names, (None, None, None, 1, 0, 1, 1))
    dims = _DIMS[node.target]
    tensor = example(x)
    if any(isinstance(size, str) for size in sizes) or tensor is None or tensor.dim() != dims + 2:
        return None
    lists = [[size] * dims if isinstance(size, int) else list(size) * (dims // len(size)) for size in sizes]
    return convolution_of_spikes, (x, weight, bias, *lists, groups)


def _list_arguments(node: fx.Node, names: Sequence[str], defaults: Sequence[Any]) -> list[Any]:
    arguments = dict(zip(names, node.args, strict=False)) | node.kwargs
    return [arguments.get(name, default) for name, default in zip(names, defaults, strict=True)]


_DIMS: dict[Any, int] = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}
_LAYERS: dict[Any, Callable[[fx.Node], Replacement | None]] = {
    nn.functional.linear: _replace_linear,
    **dict.fromkeys(_DIMS, _replace_convolution),
}


def linear_of_spikes(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes `nn.functional.linear` of zeros and ones, and stores their bits for the backward."""
    result: Tensor = _Linear.apply(x, weight, bias)
    return result


def convolution_of_spikes(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    """Computes a convolution of zeros and ones in 1 to 3 dimensions, and stores their bits for the backward.

    Args:
        settings: stride, padding and dilation, each as a list, followed by groups.
    """
    result: Tensor = _Convolution.apply(x, weight, bias, *settings)
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        _save(ctx, x, weight, bias)
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        bits, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2) if grad.dim() > 1 else grad.unsqueeze(0)
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = (grad @ weight.to(grad.dtype)).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            spikes = _unpack(bits, ctx.shape, ctx.order, grad.dtype)
            spikes = spikes.flatten(0, -2) if spikes.dim() > 1 else spikes.unsqueeze(0)
            of_weight = (rows.t() @ spikes).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0).to(ctx.bias.dtype)
        return of_x, of_weight, of_bias


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
        _save(ctx, x, weight, bias)
        ctx.settings = settings
        function = next(function for function, dims in _DIMS.items() if dims == x.dim() - 2)
        result: Tensor = function(x, weight, bias, *settings)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        bits, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.settings
        spikes = _unpack(bits, ctx.shape, ctx.order, grad.dtype)
        gradients = _aten.convolution_backward(
            grad,
            spikes,
            weight.to(grad.dtype),
            None if ctx.bias is None else list(ctx.bias.shape),
            stride,
            padding,
            dilation,
            False,
            [0] * len(stride),
            groups,
            [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2]],
        )
        dtypes = (ctx.dtype, weight.dtype, None if ctx.bias is None else ctx.bias.dtype)
        gradients_and_needs = zip(gradients, dtypes, ctx.needs_input_grad, strict=False)
        return *(g.to(dtype) if is_needed else None for g, dtype, is_needed in gradients_and_needs), *(
            None for _ in ctx.settings
        )


def _save(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Saves the bits of the input, in the order of `_find_memory_order`, and the weight for the backward."""
    ctx.shape, ctx.dtype, ctx.bias = x.shape, x.dtype, bias
    ctx.order = _find_memory_order(x)
    ctx.save_for_backward(_pack(x, ctx.order), weight)


def _find_memory_order(x: Tensor) -> list[int]:
    """Returns the dimensions in the order in which the elements are packed.

    For a dense tensor in channels-last format, this is the order in memory. For other tensors, the dimensions keep
    their order.
    """
    dims = list(range(x.dim()))
    last = [0, *dims[2:], 1]
    if x.dim() in (4, 5) and not x.is_contiguous() and x.permute(last).is_contiguous():
        return last
    return dims


def _pack(x: Tensor, order: Sequence[int]) -> Tensor:
    flat = x.permute(*order).reshape(-1)
    flags = nn.functional.pad(flat != 0, (0, -flat.numel() % 8)).view(-1, 8)
    return (flags.to(torch.int32) << torch.arange(8, dtype=torch.int32, device=x.device)).sum(1).to(torch.uint8)


def _unpack(bits: Tensor, shape: Sequence[int], order: Sequence[int], dtype: torch.dtype) -> Tensor:
    places = torch.arange(8, dtype=torch.int32, device=bits.device)
    flags = (bits.to(torch.int32).unsqueeze(1) >> places) & 1
    sizes = [shape[d] for d in order]
    count = 1
    for size in sizes:
        count = count * size
    return flags.to(dtype).view(-1)[:count].view(sizes).permute([order.index(d) for d in range(len(order))])
