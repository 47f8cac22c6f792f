"""Operations that a scan kernel cannot perform: errors contain the op's name and the user's line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsn_graph import (
    ComplexDtypeError,
    DataDependentError,
    MutationError,
    NonPointwiseError,
    RandomOpError,
    UnsupportedCoreError,
    generate_inference_graph,
    trace_step,
)

W = nn.Parameter(torch.linspace(-1, 1, 3))
SQUARE = nn.Parameter(torch.zeros(3, 3))
NORM = nn.BatchNorm1d(3)
Function = Callable[[Tensor, Tensor], Any]


def set_mask(x: Tensor, v: Tensor) -> Tensor:
    h = x.clone()
    h[h > 0] = v[h > 0]  # refused here
    return h


def set_slice(x: Tensor, v: Tensor) -> Tensor:
    h = x.clone()
    h[:1] = 1.0
    return h


CASES: dict[str, tuple[type[UnsupportedCoreError], str, Function]] = {
    "rand_like": (RandomOpError, "aten.rand_like", lambda x, v: x + torch.rand_like(x)),
    "randn": (RandomOpError, "aten.randn", lambda x, v: x + torch.randn(3, 3)),
    "bernoulli": (RandomOpError, "aten.bernoulli", lambda x, v: torch.bernoulli(x.sigmoid())),
    "dropout": (RandomOpError, "aten.bernoulli_|dropout", lambda x, v: nn.functional.dropout(x)),
    "normal_": (RandomOpError, "aten.normal_", lambda x, v: torch.empty_like(x).normal_()),
    "if": (DataDependentError, "_local_scalar_dense", lambda x, v: x if (x > 0).all() else v),
    "if_captured": (DataDependentError, "_local_scalar_dense", lambda x, v: x if W[0] > 0 else v),
    "item": (DataDependentError, "_local_scalar_dense", lambda x, v: x * W[0].item()),
    "float": (DataDependentError, "_local_scalar_dense", lambda x, v: x * float(W[0])),
    "tolist": (DataDependentError, "Tensor.tolist", lambda x, v: x * W.tolist()[0]),
    "numpy": (DataDependentError, "Tensor.numpy", lambda x, v: x * float(W.detach().numpy()[0])),
    "data_numpy": (DataDependentError, "Tensor.numpy", lambda x, v: x * float(W.data.numpy()[0])),
    "numpy_of_input": (DataDependentError, "Tensor.numpy", lambda x, v: x.numpy()),
    "equal": (DataDependentError, "aten.equal", lambda x, v: x if torch.equal(W, W) else v),
    "nonzero": (NonPointwiseError, "aten.nonzero", lambda x, v: x.nonzero()),
    "write_input": (MutationError, "aten.add_", lambda x, v: x.add_(1)),
    "write_state": (MutationError, "aten.mul_", lambda x, v: v.mul_(0.5)),
    "write_view": (MutationError, "aten.add_", lambda x, v: x.view(-1).add_(1)),
    "write_data": (MutationError, "aten.add_", lambda x, v: x.data.add_(1)),
    "write_detached": (MutationError, "aten.add_", lambda x, v: x.detach().add_(1)),
    "write_parameter": (MutationError, "aten.add_", lambda x, v: x * W.data.add_(1)),
    "write_out": (MutationError, "aten.add.out", lambda x, v: torch.add(x, v, out=v)),
    "write_list": (MutationError, "_foreach_add_", lambda x, v: torch._foreach_add_([x], 1.0)),
    "write_index": (MutationError, "aten.", lambda x, v: x.__setitem__(0, 1.0)),
    "write_buffer": (MutationError, "aten.add_", lambda x, v: NORM(x)),
    "sum": (NonPointwiseError, "aten.sum", lambda x, v: x - x.sum()),
    "sum_keepdim": (NonPointwiseError, "aten.sum", lambda x, v: x - x.sum(-1, keepdim=True)),
    "mean": (NonPointwiseError, "aten.mean", lambda x, v: x - x.mean()),
    "max": (NonPointwiseError, "aten.max|aten.amax", lambda x, v: x - x.max()),
    "norm": (NonPointwiseError, "aten.linalg_vector_norm", lambda x, v: nn.functional.normalize(x)),
    "softmax": (NonPointwiseError, "aten._softmax", lambda x, v: x.softmax(-1)),
    "layer_norm": (NonPointwiseError, "layer_norm", lambda x, v: nn.functional.layer_norm(x, (3,))),
    "matmul": (NonPointwiseError, "aten.mm", lambda x, v: x @ v),
    "linear": (NonPointwiseError, "aten.mm", lambda x, v: nn.functional.linear(x, SQUARE)),
    "cumsum": (NonPointwiseError, "aten.cumsum", lambda x, v: x.cumsum(0)),
    "cumprod": (NonPointwiseError, "aten.cumprod", lambda x, v: x.cumprod(0)),
    "sort": (NonPointwiseError, "aten.sort", lambda x, v: x.sort()[0]),
    "gather": (NonPointwiseError, "aten.gather", lambda x, v: x.gather(0, (x * 0).long())),
    "index": (NonPointwiseError, "aten.index", lambda x, v: x[torch.tensor([2, 1, 0])]),
    "mask": (NonPointwiseError, "aten.index", lambda x, v: x[x > 0]),
    "set_mask_to_other": (NonPointwiseError, "aten.index", set_mask),
    "select": (NonPointwiseError, "aten.select", lambda x, v: x + x[0]),
    "slice": (NonPointwiseError, "aten.slice", lambda x, v: x + x[:1]),
    "set_slice": (NonPointwiseError, "aten.slice", set_slice),
    "chunk": (NonPointwiseError, "aten.split", lambda x, v: x + x.chunk(3)[1]),
    "transpose": (NonPointwiseError, "aten.t", lambda x, v: x.t()),
    "transpose_added": (NonPointwiseError, "aten.permute", lambda x, v: x + x.T),
    "expand_transposed": (NonPointwiseError, "aten.unsqueeze", lambda x, v: x.diagonal()[:, None] + v),
    "flip": (NonPointwiseError, "aten.flip", lambda x, v: x.flip(0)),
    "roll": (NonPointwiseError, "aten.roll", lambda x, v: x.roll(1, 0)),
    "rot90": (NonPointwiseError, "aten.rot90", lambda x, v: x.rot90()),
    "tril": (NonPointwiseError, "aten.tril", lambda x, v: x.tril()),
    "as_strided": (NonPointwiseError, "aten.as_strided", lambda x, v: x.as_strided((3, 3), (1, 3))),
    "bits": (NonPointwiseError, "aten.view.dtype", lambda x, v: x.view(torch.int16)[:, ::2] + x),
    "cat": (NonPointwiseError, "aten.cat", lambda x, v: torch.cat([x[:1], v[1:]])),
    "uninitialised": (NonPointwiseError, "aten.empty_like", lambda x, v: x + torch.empty_like(x)),
    "complex": (ComplexDtypeError, "aten.complex", lambda x, v: torch.complex(x, v).real),
    "complex_number": (ComplexDtypeError, "aten.mul", lambda x, v: (x * 1j).imag),
    "cond": (UnsupportedCoreError, "cond", lambda x, v: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))),
}
# These functions consist of other ops, whose names the message contains.
OTHER_OP = {"expand_transposed": "aten.diagonal", "cat": "aten.(slice|cat)"}


@pytest.mark.parametrize("name", CASES)
def test_refusal_names_the_op_and_the_line(name: str) -> None:
    error, op, function = CASES[name]
    before = (W.detach().clone(), NORM.running_mean, NORM.num_batches_tracked)
    x, v = torch.ones(3, 3), torch.zeros(3, 3)
    with pytest.raises(error, match=OTHER_OP.get(name, op)) as caught:
        trace_step(lambda x, v: (function(x, v), v), 1, 1, 1, (x, v))
    assert type(caught.value) is error
    assert re.search(OTHER_OP.get(name, op), caught.value.op)
    assert isinstance(caught.value, NotImplementedError)
    location = caught.value.location
    assert location is not None
    assert location.file == __file__
    lines, start = inspect.getsourcelines(function)
    assert start <= location.line < start + len(lines)
    assert f"{location.file}:{location.line}" in str(caught.value)
    # No tensor was changed before the error.
    assert x.eq(1).all()
    assert v.eq(0).all()
    assert torch.equal(W, before[0])
    assert torch.equal(NORM.running_mean, torch.zeros(3))  # type: ignore[arg-type]


def test_location_contains_the_text_of_the_line() -> None:
    with pytest.raises(NonPointwiseError) as caught:
        generate_inference_graph(set_mask, (torch.ones(3, 3), torch.zeros(3, 3)))
    assert caught.value.location is not None
    assert caught.value.location.function == "set_mask"
    assert caught.value.location.code == "h[h > 0] = v[h > 0]  # refused here"


def test_channel_shuffle_is_refused() -> None:
    x = torch.zeros(1, 4, 2, 2)
    for function in (
        lambda x: nn.functional.channel_shuffle(x, 2),
        lambda x: torch.ops.aten.native_channel_shuffle(x, 2),
    ):
        with pytest.raises(NonPointwiseError, match="channel_shuffle"):
            trace_step(function, 1, 0, 1, (x,))


def test_complex_arguments_and_captured_tensors_are_refused() -> None:
    z = torch.zeros(3, dtype=torch.complex64)
    with pytest.raises(ComplexDtypeError, match=r"example 1 is torch.complex64"):
        trace_step(lambda x, z: (x, z), 1, 1, 1, (torch.zeros(3), z))
    with pytest.raises(ComplexDtypeError, match=r"aten.abs.default is torch.complex64"):
        trace_step(lambda x: x * z.abs(), 1, 0, 1, (torch.zeros(3),))


def test_input_whose_elements_are_moved_is_refused() -> None:
    """Tests an input `[3]` of a step `[3, 3]`. A read of the input along the first axis moves it."""
    b, x = torch.zeros(3), torch.zeros(3, 3)
    with pytest.raises(NonPointwiseError, match=r"aten.unsqueeze.default moves elements"):
        trace_step(lambda b, x: x * b[:, None], 2, 0, 1, (b, x))
    with pytest.raises(NonPointwiseError, match="moves elements"):
        trace_step(lambda b, x: b * b[:, None], 2, 0, 1, (b, x))
    with pytest.raises(NonPointwiseError, match="moves elements"):
        trace_step(lambda b, x: b.expand(3, 3).t() + 0.0, 2, 0, 1, (b, x))


def test_input_that_does_not_broadcast_to_the_step_is_refused() -> None:
    long, x = torch.zeros(6), torch.zeros(2, 3)
    with pytest.raises(NonPointwiseError, match=r"aten.view.default uses .* of shape \[6\]") as caught:
        trace_step(lambda y, x: x + y.view(2, 3), 2, 0, 1, (long, x))
    assert caught.value.location is not None
    assert trace_step(lambda y, x: x + 1.0, 2, 0, 1, (long, x)).step_shape == (2, 3)
