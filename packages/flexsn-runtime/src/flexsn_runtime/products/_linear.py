"""`s W^T + b` for spikes `s`, and its gradients: an autograd function, and operators for compilers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn import functional as F

from flexsn_runtime._saved import saved_of
from flexsn_runtime._torch_private import SingleLevelFunction, has_saved_tensors_hooks, is_batched, transform_at_work
from flexsn_runtime.backend import why_unavailable
from flexsn_runtime.calls._plan import Plan
from flexsn_runtime.errors import DeviceError, DtypeError, ShapeError
from flexsn_runtime.products._kernels import is_aligned, takes_as_written
from flexsn_runtime.products._plans import OPERANDS, BackwardKind, Forward, ForwardKind, backward_plan, forward_plan
from flexsn_runtime.products._tiles import seen_size

MOST_PARTS = 3


def spike_linear(
    s: Tensor, weight: Tensor, bias: Tensor | None, weight_parts: int = 3, grad_parts: int = 3
) -> tuple[Tensor, Tensor | None]:
    """Computes `torch.nn.functional.linear` of float32 tensors, fast if `s` consists of spikes or small integers.

    Each element of `s` is converted to one bfloat16 value. Each element of `weight` is split into `weight_parts`
    bfloat16 values, and each element of the output's gradient into `grad_parts` bfloat16 values. Three values represent
    a float32, two values represent the first 16 bits of its significand, and one value represents the first 8 bits. The
    kernel checks `s`. If bfloat16 cannot represent an element, the row of this element is computed again in float32,
    and so is the gradient of the weight. Torch's product runs if kernels cannot run, and inside of transforms of
    `torch.func`. Infinite numbers may lead to NaN.

    Args:
        s: `[..., K]` float32.
        weight: `[N, K]` float32.
        bias: `[N]` float32.
        weight_parts, grad_parts: 1 to 3.

    Returns:
        `[..., N]` float32, and an int32 record, whose entries are not 0 for rows that were computed again. If torch's
            product ran, the record is `None`. Second derivatives are those of torch's product.

    Raises:
        DtypeError: a tensor is not float32.
        ShapeError: the shapes do not match.
        DeviceError: the tensors are on several devices.
        ValueError: the number of parts is not 1 to 3.
    """
    _check_operands(s, weight, bias, weight_parts, grad_parts)
    if torch.compiler.is_compiling():
        compiled: tuple[Tensor, Tensor] = spike_linear_op(s, weight, bias, weight_parts, grad_parts)
        return compiled
    if not _are_plain(s, weight, bias) or transform_at_work() is not None or why_unavailable(s.device) is not None:
        return F.linear(s, weight, bias), None
    return linked_linear(s, None, weight, bias, (weight_parts, grad_parts), links=False)[:2]


class Linked(NamedTuple):
    """The result of a product that exchanges values in bfloat16 with adjacent layers.

    Attributes:
        y: `[..., N]` float32.
        record: same as for `spike_linear`; `None` if no values had to be checked.
        links: tensors through which the next layer can pass the gradient of `y` in another form; `None` without links.
            Bfloat16 tensors shaped like `y` receive the parts of this gradient. If the bias needs a gradient, a
            float32 tensor receives the sum of the gradient of `y` over the first dimension.
    """

    y: Tensor
    record: Tensor | None
    links: Links | None


class Links(NamedTuple):
    """The links of a product; see `Linked`. Only the gradients of these tensors have a meaning."""

    parts: tuple[Tensor, ...]
    total: Tensor | None


def linked_linear(
    s: Tensor,
    written: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    parts: tuple[int, int],
    *,
    links: bool,
    scale: float = 1.0,
) -> Linked:
    """Computes `spike_linear` in eager mode, for checked operands on a device with kernels.

    Args:
        s: `[..., K]` float32.
        written: the elements of `s` in bfloat16, dense in memory, if bfloat16 can represent all of them; `None` to let
            the product convert `s`.
        parts: numbers of parts of the weight and of gradients.
        links: True to create links for the layer that reads `y`, if kernels can receive gradients through them.
        scale: scale of the spikes: `s / scale` are integers up to rounding.
    """
    with_links = links_of(s, weight, parts, links) > 0
    record: list[Tensor | None] = []
    if written is not None and not takes_as_written(written):
        written = None
    results = _SpikeLinear.apply(s, written, weight, bias, parts, with_links, record, scale)
    if not with_links:
        return Linked(results, record[0], None)
    y, *link_tensors = results
    if not y.requires_grad:
        return Linked(y, record[0], None)
    num_parts = parts[1]
    y.grad_fn.y = weakref.ref(y)
    return Linked(
        y,
        record[0],
        Links(tuple(link_tensors[:num_parts]), link_tensors[num_parts] if len(link_tensors) > num_parts else None),
    )


def links_of(s: Tensor, weight: Tensor, parts: tuple[int, int], needs_grad: bool) -> int:
    """Returns the number of links for the parts of the result's gradient; 0 without links."""
    has_links = needs_grad and torch.is_grad_enabled() and s.dim() > 2 and weight.shape[0] % 8 == 0 and s.numel() > 0
    return parts[1] if has_links else 0


def _are_plain(*tensors: Tensor | None) -> bool:
    """True for tensors that own memory. A `DTensor` owns none."""
    return all(tensor is None or type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)


def _check_operands(s: Tensor, weight: Tensor, bias: Tensor | None, weight_parts: int, grad_parts: int) -> None:
    for name, tensor in (("s", s), ("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != torch.float32:
            raise DtypeError(f"{name} is {tensor.dtype}; products with spikes take float32 tensors.")
    if s.dim() < 1 or weight.dim() != 2 or s.shape[-1] != weight.shape[1]:
        raise ShapeError(f"s is {list(s.shape)} and weight {list(weight.shape)}; expected [..., K] and [N, K].")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"bias is {list(bias.shape)}; weight {list(weight.shape)} needs [{weight.shape[0]}].")
    if weight.device != s.device or (bias is not None and bias.device != s.device):
        raise DeviceError(f"s is on {s.device}, weight on {weight.device}: all tensors must be on one device.")
    for parts in (weight_parts, grad_parts):
        if not 1 <= parts <= MOST_PARTS:
            raise ValueError(f"{parts} parts; a float32 can be split into 1 to {MOST_PARTS}.")


# -- launches ----------------------------------------------------------------------------------------------------------


def _can_run(s: Tensor, weight: Tensor) -> bool:
    """True if kernels can run and their results are not empty."""
    return why_unavailable(s.device) is None and s.numel() > 0 and weight.shape[0] > 0


def forward(s: Tensor, weight: Tensor, bias: Tensor | None, weight_parts: int) -> tuple[Tensor, Tensor]:
    if not _can_run(s, weight):
        size = seen_size(s.shape[:-1].numel())
        return F.linear(s, weight, bias).contiguous(), torch.zeros(size, dtype=torch.int32, device=s.device)
    operands = _make_dense(s), None, _make_dense(weight), None if bias is None else _make_dense(bias)
    y, seen, *_ = plan_of(operands, weight_parts).plan.run(operands)
    assert y is not None
    assert seen is not None
    return y, seen


Operands = tuple[Tensor, Tensor | None, Tensor, Tensor | None]
"""Spikes, spikes in bfloat16, the weight and the bias."""


def plan_of(
    operands: Operands,
    parts: int,
    *,
    links: int = 0,
    sums: bool = False,
    scale: float = 1.0,
) -> Forward:
    """Returns the plan of a forward over dense `[s, written, weight, bias]`; see `ForwardKind`."""
    s, written, weight, bias = operands
    are_aligned = is_aligned(s), is_aligned(weight), None if bias is None else is_aligned(bias)
    shape, outputs = tuple(s.shape), weight.shape[0]
    return forward_plan(
        ForwardKind(shape, outputs, parts, links, sums, scale, written is not None, are_aligned, s.device)
    )


def _make_dense(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.contiguous()


def _make_dense_and_aligned(x: Tensor) -> Tensor:
    x = _make_dense(x)
    return x if is_aligned(x) else x.clone()


def _compute_gradients(
    grad: Tensor,
    s: Tensor,
    weight: Tensor,
    seen: Tensor,
    parts: tuple[int, int],
    needs_grad: Sequence[bool],
) -> list[Tensor | None]:
    if not _can_run(s, weight):
        return _compute_plain_gradients(grad, s, weight, needs_grad)
    saved = s, None, weight, None, seen
    of_operands = gradients(saved, (grad,), parts, 1.0, (needs_grad[0], needs_grad[1], needs_grad[2]))
    return [of_operands[0], of_operands[2], of_operands[3]]


Saved = tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]
"""`s`, the spikes in bfloat16, the weight, its parts, and the record of rows that bfloat16 cannot represent."""


def gradients(
    saved: Saved,
    grads: Sequence[Tensor | None],
    parts: tuple[int, int],
    scale: float,
    needs_grad: tuple[bool, bool, bool],
) -> list[Tensor | None]:
    """Computes gradients of `[s, written, weight, bias]` with kernels.

    Args:
        grads: gradients of the forward's results, `[y, *links]`. The gradients of the links are read only
            if the gradient of `y` is `None`.
        needs_grad: True for each of the spikes, the weight and the bias if its gradient is needed.
    """
    s, spikes, weight, pieces, seen = saved
    operands = _make_dense(s), spikes, _make_dense(weight), pieces, seen
    grads = [None if grad is None else _make_dense_and_aligned(grad) for grad in grads]
    return backward_plan(backward_kind(operands, grads, parts, scale, needs_grad)).run((*operands, *grads))[:OPERANDS]


def arrives_in_one_form(grad: Tensor | None, parts: Sequence[Tensor | None]) -> bool:
    """True if the gradient arrives only as a whole, or only as all of its parts."""
    return len({part is None for part in parts}) == 1 and (grad is None or parts[0] is None)


def backward_kind(
    saved: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    parts: tuple[int, int],
    scale: float,
    needs_grad: tuple[bool, bool, bool],
) -> BackwardKind:
    """Returns the kind of a backward over dense tensors. The arguments are those of `gradients`."""
    s, spikes, weight, pieces, seen = saved
    grad = grads[0]
    assert s is not None
    assert weight is not None
    sums = len(grads) > 1 + parts[1]
    if sums and grad is None and grads[-1] is None:
        needs_grad = *needs_grad[:2], False
    return BackwardKind(
        tuple(s.shape),
        weight.shape[0],
        parts,
        scale,
        0 if spikes is None else spikes.shape[-1],
        pieces is not None,
        seen is not None,
        parts[1] if len(grads) > 1 else 0,
        sums,
        grad is None,
        needs_grad,
        (is_aligned(s), is_aligned(weight)),
        s.device,
    )


def product_with_spikes(grads: Tensor, s: Tensor) -> Tensor:
    """Computes `grads^T s`, `[N, K]` float32, for `grads [M, N]` and `s [M, K]`, without autograd.

    Args:
        s: values that bfloat16 can represent. With any other value, the whole product is computed again in float32,
            which is slow.
    """
    plan, arguments = _plan_over_rows(grads, s)
    total = plan.run(arguments)[2]
    assert total is not None
    return total


def compilations_with_spikes(grads: Tensor, s: Tensor) -> list[Callable[[], object]]:
    """Returns functions that compile `product_with_spikes` for tensors like these."""
    plan, arguments = _plan_over_rows(grads, s)
    return plan.compilations(arguments)


def _plan_over_rows(grads: Tensor, s: Tensor) -> tuple[Plan, tuple[Tensor | None, ...]]:
    s, grads = _make_dense(s), _make_dense_and_aligned(grads)
    outputs, are_aligned = grads.shape[1], (is_aligned(s), True)
    parts, needs_grad = (MOST_PARTS, MOST_PARTS), (False, True, False)
    kind = BackwardKind(
        tuple(s.shape), outputs, parts, 1.0, 0, False, False, 0, False, False, needs_grad, are_aligned, s.device
    )
    return backward_plan(kind), (s, None, None, None, None, grads)


def _compute_plain_gradients(
    grad: Tensor, s: Tensor, weight: Tensor, needs_grad: Sequence[bool]
) -> list[Tensor | None]:
    rows, grads = _flatten_rows(s), _flatten_rows(grad)
    return [
        grad @ weight if needs_grad[0] else None,
        grads.t() @ rows if needs_grad[1] else None,
        grads.sum(0) if needs_grad[2] else None,
    ]


def _flatten_rows(x: Tensor) -> Tensor:
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


# -- eager mode --------------------------------------------------------------------------------------------------------


class _SpikeLinear(SingleLevelFunction):
    """One autograd node for a product, and for the links to the layer that reads the product."""

    @staticmethod
    def forward(
        ctx: Any,
        s: Tensor,
        written: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        parts: tuple[int, int],
        links: bool,
        record: list[Tensor | None],
        scale: float,
    ) -> Any:
        ctx.parts, ctx.scale = parts, scale
        ctx.set_materialize_grads(False)
        ctx.is_plain = s.numel() == 0 or weight.shape[0] == 0
        if ctx.is_plain:
            record.append(torch.zeros(seen_size(s.shape[:-1].numel()), dtype=torch.int32, device=s.device))
            ctx.save_for_backward(s, None, weight, None, None)
            return F.linear(s, weight, bias)
        needs_s, _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        operands = _make_dense(s), written, _make_dense(weight), None if bias is None else _make_dense(bias)
        forward = plan_of(operands, parts[0], links=parts[1] if links else 0, sums=links and needs_bias, scale=scale)
        results = forward.plan.run(operands)
        memory = (*operands, *results)
        seen = None if forward.seen is None else memory[forward.seen]
        record.append(seen)
        # Hooks may store `s` in fewer bits than its copy in bfloat16 takes.
        keeps_spikes = needs_weight and (seen is None or not has_saved_tensors_hooks())
        spikes, pieces = memory[forward.spikes] if keeps_spikes else None, memory[forward.pieces] if needs_s else None
        ctx.save_for_backward(s, spikes, weight, pieces, seen)
        return results[0] if forward.results == 1 else tuple(results[: forward.results])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if any(grad is not None for grad in grads[1:]):
            y = ctx.y()
            if y is not None and (y._backward_hooks or y.retains_grad):
                raise RuntimeError(LATE)
        needs = ctx.needs_input_grad
        needs_grad = needs[0], needs[2], needs[3]
        return *flowing(saved_of(ctx), grads, ctx.parts, ctx.scale, needs_grad, plain=ctx.is_plain), *(None,) * 4


def flowing(
    saved: Any,
    grads: Sequence[Tensor | None],
    parts: tuple[int, int],
    scale: float,
    needs_grad: tuple[bool, bool, bool],
    *,
    plain: bool = False,
) -> Sequence[Tensor | None]:
    """Computes gradients of `[s, written, weight, bias]` in a backward. The arguments are those of `gradients`.

    Args:
        plain: True to use torch's products.
    """
    grad, grad_parts = grads[0], grads[1 : 1 + parts[1]]
    first = grad if grad is not None or not grad_parts else grad_parts[0]
    if first is None:
        return (None,) * OPERANDS
    if plain or torch.is_grad_enabled() or transform_at_work() is not None or is_batched(first):
        of_operands = _compute_plain_gradients(_add_parts(grad, grad_parts), saved[0], saved[2], needs_grad)
        return of_operands[0], None, of_operands[1], of_operands[2]
    if grad_parts and not arrives_in_one_form(grad, grad_parts):
        grads = _add_parts(grad, grad_parts), *(None,) * (len(grads) - 1)
    return gradients(saved, grads, parts, scale, needs_grad)


LATE = (
    "a hook or retain_grad() on the output of a layer with exact products was registered after the neuron had read the "
    "output, so its gradient goes to the layer in parts. Register the hook earlier, or leave the layer out: "
    "exact_products(net, skip=[name])."
)


def _add_parts(grad: Tensor | None, parts: Sequence[Tensor | None]) -> Tensor:
    """Adds a gradient and the parts of another gradient, in float32."""
    total = grad
    for part in reversed(parts):
        if part is not None:
            total = part.float() if total is None else total + part.float()
    assert total is not None
    return total


# -- for compilers -----------------------------------------------------------------------------------------------------


# `Optional`, because torch reads the annotation at run time to make the schema.
@torch.library.custom_op("flexsn::spike_linear", mutates_args=())
def spike_linear_op(
    s: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],  # noqa: UP045
    weight_parts: int,
    grad_parts: int,
) -> tuple[Tensor, Tensor]:
    """Returns the result of `spike_linear` and, for the backward, the record of rows that bfloat16 cannot represent."""
    return forward(s, weight, bias, weight_parts)


@spike_linear_op.register_fake
def _(s: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    y = s.new_empty((*s.shape[:-1], weight.shape[0]))
    return y, s.new_empty((seen_size(s.shape[:-1].numel()),), dtype=torch.int32)


@torch.library.custom_op("flexsn::spike_linear_backward", mutates_args=())
def spike_linear_backward_op(
    grad: Tensor,
    s: Tensor,
    weight: Tensor,
    seen: Tensor,
    weight_parts: int,
    grad_parts: int,
    needs_grad: Sequence[bool],
) -> list[Tensor]:
    """Computes the gradients of those of `s`, `weight` and `bias` whose entry in `needs_grad` is True."""
    gradients_of_operands = _compute_gradients(grad, s, weight, seen, (weight_parts, grad_parts), needs_grad)
    return [gradient for gradient in gradients_of_operands if gradient is not None]


@spike_linear_backward_op.register_fake
def _(grad: Tensor, s: Tensor, weight: Tensor, *rest: Any) -> list[Tensor]:
    shapes = (s.shape, weight.shape, weight.shape[:1])
    return [s.new_empty(shape) for shape, is_needed in zip(shapes, rest[-1], strict=True) if is_needed]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    s, weight, _, *ctx.parts = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(s, weight, output[1])


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> Any:
    s, weight, seen = ctx.saved_tensors
    needs_grad = [bool(is_needed) and grad is not None for is_needed in ctx.needs_input_grad[:3]]
    if grad is None or not any(needs_grad):
        return None, None, None, None, None
    if torch.is_grad_enabled():  # `create_graph`
        return *_compute_plain_gradients(grad, s, weight, needs_grad), None, None
    gradients_needed = iter(spike_linear_backward_op(grad, s, weight, seen, *ctx.parts, needs_grad))
    return *(next(gradients_needed) if is_needed else None for is_needed in needs_grad), None, None


spike_linear_op.register_autograd(_backward, setup_context=_setup)
