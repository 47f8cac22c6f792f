"""Plans of a layer's product: one for its forward and one for its gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from flexsn_runtime.calls._plan import Plan
from flexsn_runtime.products import _kernels
from flexsn_runtime.products._builder import PlanBuilder
from flexsn_runtime.products._kernels import padded_units, padding
from flexsn_runtime.products._tiles import seen_size, shares_of, tile_for

_plans = functools.lru_cache(maxsize=256)


class ForwardKind(NamedTuple):
    """Key of a forward's plan over dense operands.

    Attributes:
        shape: shape of the spikes, `[..., K]`.
        outputs: number N of output features.
        parts: number of parts of the weight.
        links: number of links that receive parts of the gradient (see `Linked`); 0 without links.
        sums: True if another link receives the sum of the gradient.
        scale: scale of the spikes.
        written: True if the spikes exist in bfloat16.
        aligned: for each of the spikes, the weight and the bias, True if its address is a multiple of 16 bytes; `None`
            without a bias.
    """

    shape: tuple[int, ...]
    outputs: int
    parts: int
    links: int
    sums: bool
    scale: float
    written: bool
    aligned: tuple[bool, bool, bool | None]
    device: torch.device


class Forward(NamedTuple):
    """A forward's plan over `[s, written, weight, bias]`. `written` and `bias` may be absent.

    Attributes:
        results: number of leading results that the caller receives: `y` and the links. If there is a record of rows
            that bfloat16 cannot represent, it is the next result.
        spikes, pieces: places of the spikes and of the weight's parts in memory.
        seen: place of the record; `None` if there is none.
    """

    plan: Plan
    results: int
    spikes: int
    pieces: int
    seen: int | None


_S, _WRITTEN, _WEIGHT, _BIAS = range(4)
OPERANDS = 4


@_plans
def forward_plan(kind: ForwardKind) -> Forward:
    *lead, K = kind.shape
    M, N, device = torch.Size(lead).numel(), kind.outputs, kind.device
    of_s, of_weight, of_bias = kind.aligned
    has_bias = of_bias is not None
    make = PlanBuilder(device, OPERANDS)
    y = make.allocate((*lead, N), torch.float32)
    for _ in range(kind.links):
        make.allocate((*lead, N), torch.bfloat16, (0,) * (len(lead) + 1))
    if kind.sums:
        make.allocate((*lead[1:], N), torch.float32, (0,) * len(lead))
    results = 1 + kind.links + kind.sums
    width = padded_units(K) * padding()
    row, spikes, seen = K, _WRITTEN, None
    if not kind.written:
        seen = make.allocate((seen_size(M),), torch.int32)
        row, spikes = width, make.allocate((M, width), torch.bfloat16)
        make.launch(_kernels.narrowing(M, K, K, kind.scale, (of_s,), device), _S, spikes, seen)
    pieces = make.allocate((kind.parts, N, width), torch.bfloat16)
    make.launch(_kernels.splitting(N, K, K, kind.parts, (of_weight,), device), _WEIGHT, pieces)
    bias_or_output = _BIAS if has_bias else y
    tile = tile_for("outputs", M, N, K, kind.parts, device)
    aligned = True, of_bias is not False
    units = padded_units(K)
    kernel = _kernels.multiplying(M, N, row, units, kind.parts, has_bias, kind.scale, tile, aligned, device)
    make.launch(kernel, spikes, pieces, bias_or_output, y)
    if seen is not None:
        kernel = _kernels.repairing_outputs(M, N, K, K, has_bias, (of_s, of_weight, of_bias is not False), device)
        make.launch(kernel, _S, _WEIGHT, bias_or_output, y, seen)
    return Forward(make.plan(), results, spikes, pieces, seen)


class BackwardKind(NamedTuple):
    """Key of the plan of gradients over dense operands.

    Attributes:
        shape: shape of the spikes, `[..., K]`.
        outputs: number N of output features.
        parts: number of parts of the weight, and number of parts of gradients.
        scale: scale of the spikes.
        spikes: row length of the spikes in bfloat16; 0 if the plan converts them.
        pieces: True if the weight is already split into parts; False if the plan splits it.
        seen: True if there is a record of rows that bfloat16 cannot represent.
        links, sums: same as for `ForwardKind`.
        arrived: True if the gradient arrives in parts, False if it arrives as a whole.
        needs_grad: for each of the spikes, the weight and the bias, True if its gradient is needed.
        aligned: for the spikes and the weight, True if the address is a multiple of 16 bytes. Gradients are always
            aligned.
    """

    shape: tuple[int, ...]
    outputs: int
    parts: tuple[int, int]
    scale: float
    spikes: int
    pieces: bool
    seen: bool
    links: int
    sums: bool
    arrived: bool
    needs_grad: tuple[bool, bool, bool]
    aligned: tuple[bool, bool]
    device: torch.device


SAVED = 5
_SPIKES, _WEIGHTS, _PIECES, _SEEN, _WHOLE = range(1, 6)


@_plans
def backward_plan(kind: BackwardKind) -> Plan:
    """Returns a plan over `[s, spikes, weight, pieces, seen, *gradients]`, with gradients of the forward's results.

    The leading results of the plan are the gradients of the forward's operands; `None` for each gradient that is not
    needed.
    """
    *lead, K = kind.shape
    M, N, device = torch.Size(lead).numel(), kind.outputs, kind.device
    w_parts, g_parts = kind.parts
    of_s, of_weight = kind.aligned
    for_s, for_weight, for_bias = kind.needs_grad
    make = PlanBuilder(device, _WHOLE + 1 + kind.links + kind.sums)
    result_s = make.allocate(kind.shape, torch.float32) if for_s else make.reserve()
    make.reserve()
    result_weight = make.allocate((N, K), torch.float32) if for_weight else make.reserve()
    result_bias = make.reserve()
    if for_bias:
        make.sum_rows(_WHOLE + 1 + g_parts if kind.arrived else _WHOLE, result_bias)
    width_k, width_n = padded_units(K) * padding(), padded_units(N) * padding()
    # All tensors must be allocated before `grad_parts` is unbound.
    splits_grad = not kind.arrived and (for_s or for_weight)
    grad_parts = make.allocate((g_parts, M, width_n), torch.bfloat16) if splits_grad else 0
    tile = tile_for("weights", N, K, M, g_parts, device)
    shares = shares_of(tile, N, K, M, device)
    adds_shares = for_weight and (shares > 1 or kind.scale != 1.0)
    share_sums = make.allocate((shares, N, K), torch.float32) if adds_shares else result_weight
    pieces, splits_weight = _PIECES, for_s and not kind.pieces
    if splits_weight:
        pieces = make.allocate((w_parts, N, width_k), torch.bfloat16)
    seen = _SEEN if kind.seen else 0
    spikes, row, converts_spikes = _SPIKES, kind.spikes, for_weight and kind.spikes == 0
    if converts_spikes:
        spikes, row = make.allocate((M, width_k), torch.bfloat16), width_k
        record = make.allocate((seen_size(M),), torch.int32)
        make.launch(_kernels.narrowing(M, K, K, kind.scale, (of_s,), device), _S, spikes, record)
        seen = seen or record
    if splits_weight:
        make.launch(_kernels.splitting(N, K, K, w_parts, (of_weight,), device), _WEIGHTS, pieces)
    grads: Sequence[int] = range(_WHOLE + 1, _WHOLE + 1 + g_parts)
    g_row = N
    if splits_grad:
        make.launch(_kernels.splitting(M, N, N, g_parts, (True,), device), _WHOLE, grad_parts)
        grads, g_row = make.unbind(grad_parts, g_parts), width_n
    three = grads[0], grads[min(1, g_parts - 1)], grads[g_parts - 1]
    if for_s:
        inputs_tile = tile_for("inputs", M, K, N, max(w_parts, g_parts), device)
        units = padded_units(K)
        kernel = _kernels.leading_back(M, N, K, g_row, units, g_parts, w_parts, inputs_tile, (True,), device)
        make.launch(kernel, *three, pieces, result_s)
    if for_weight:
        aligned = True, True
        kernel = _kernels.summing_rows(M, N, K, g_row, row, g_parts, tile, shares, aligned, device)
        make.launch(kernel, *three, spikes, share_sums)
        if adds_shares:
            make.launch(_kernels.adding_shares(N * K, shares, kind.scale, device), share_sums, result_weight)
        if seen:
            # Uses the most exact available form of the gradient.
            whole_grads = (_WHOLE,) * 3 if splits_grad else three
            gradient_form = (1, N, torch.float32) if splits_grad else (g_parts, g_row, torch.bfloat16)
            kernel = _kernels.repairing_weights(
                M, N, K, gradient_form[1], K, gradient_form[0], gradient_form[2], seen_size(M), (True, of_s), device
            )
            make.launch(kernel, *whole_grads, _S, result_weight, seen)
    return make.plan()
