"""Wrong arguments of a call: on every backend, the error names the argument and a remedy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from flexsn_nn import (
    LIF,
    FlexSN,
    InputCountError,
    InputDtypeError,
    InputLayoutError,
    InputShapeError,
    StateError,
)
from flexsn_runtime import DeviceError

X = (torch.arange(5 * 3 * 8) * 0.37 % 3).reshape(5, 3, 8)
backends = pytest.mark.parametrize("backend", ["torch", "auto", "hop"])


def integrate(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return x + v, v + x


def make_nested(layout: torch.layout) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Nested tensors are prototypes.
        return torch.nested.nested_tensor([torch.rand(5, 8), torch.rand(3, 8)], layout=layout)


def make_quantised() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Quantised tensors are deprecated.
        return torch.quantize_per_tensor(X, 0.1, 0, torch.quint8)


def make_sparse_rows() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Sparse tensors are a beta feature.
        return X[0].to_sparse_csr()


# Inputs that every core refuses, and inputs that only neurons with a membrane refuse.
REFUSED_BY_ALL: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "an array": (lambda: X.numpy(), TypeError, r"input 0 is a ndarray; .*torch\.as_tensor"),
    "numbers": (lambda: X.tolist(), TypeError, r"input 0 is a list; .*torch\.as_tensor"),
    "a number": (lambda: 1.0, TypeError, r"input 0 is a float; .*torch\.as_tensor"),
    "None": (lambda: None, TypeError, r"input 0 is a NoneType; a neuron takes tensors"),
    "tensors in a list": (lambda: list(X), TypeError, r"input 0 is a list of tensors; .*torch\.stack"),
    "jagged": (lambda: make_nested(torch.jagged), InputLayoutError, r"input 0 is a nested tensor.*pad_sequences"),
    "nested": (lambda: make_nested(torch.strided), InputLayoutError, r"input 0 is a nested tensor.*pad_sequences"),
    "quantised": (make_quantised, InputLayoutError, r"input 0 is torch\.quint8.*dequantize\(\)"),
    "MKL-DNN": (lambda: X.to_mkldnn(), InputLayoutError, r"input 0 has MKL-DNN's layout.*to_dense\(\)"),
    "no dimensions": (lambda: torch.tensor(1.0), InputShapeError, r"input 0 has no dimensions.*step_mode='s'"),
}
REFUSED_BY_MEMBRANES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "sparse": (lambda: X.to_sparse(), InputLayoutError, r"the input is a torch\.sparse_coo.*to_dense\(\)"),
    "sparse rows": (make_sparse_rows, InputLayoutError, r"the input is a torch\.sparse_csr.*to_dense\(\)"),
    "complex": (lambda: X.to(torch.complex64), InputDtypeError, r"the input is torch\.complex64.*x\.real"),
    "integers": (lambda: X.int(), InputDtypeError, r"the input is torch\.int32.*x\.float\(\)"),
    "booleans": (lambda: X > 1, InputDtypeError, r"the input is torch\.bool.*x\.float\(\)"),
    "float8": (lambda: X.to(torch.float8_e4m3fn), InputDtypeError, r"the input is torch\.float8_e4m3fn.*x\.to\("),
    "float8 of another kind": (lambda: X.to(torch.float8_e5m2), InputDtypeError, r"torch\.float8_e5m2.*x\.to\("),
}


@backends
@pytest.mark.parametrize("wrong", REFUSED_BY_ALL)
def test_inputs_that_cores_refuse(wrong: str, backend: str) -> None:
    make, kind, words = REFUSED_BY_ALL[wrong]
    for layer in (FlexSN(integrate, 1, 1, 1, backend=backend), LIF(backend=backend)):
        for call in (layer, layer.step if wrong not in ("numbers", "tensors in a list", "None", "a number") else layer):
            value = make()
            with pytest.raises(kind, match=words):
                call(value if call is layer else [value])
            assert layer.states == []


@backends
@pytest.mark.parametrize("wrong", REFUSED_BY_MEMBRANES)
def test_inputs_that_membranes_refuse(wrong: str, backend: str) -> None:
    make, kind, words = REFUSED_BY_MEMBRANES[wrong]
    layer = LIF(backend=backend)
    with pytest.raises(kind, match=words):
        layer(make())
    assert layer.states == []
    assert torch.equal(layer(X), LIF(backend="torch")(X))


@pytest.mark.skipif(not hasattr(Tensor, "refine_names"), reason="this torch has no named tensors")
@pytest.mark.filterwarnings("ignore:Named tensors")
@backends
def test_named_dimensions_are_refused(backend: str) -> None:
    with pytest.raises(InputLayoutError, match=r"input 0 has named dimensions.*rename\(None\)"):
        LIF(backend=backend)(cast(Any, X).refine_names("T", "B", "C"))


def test_checks_add_no_operations_to_graphs(loops: None) -> None:
    torch._dynamo.reset()
    targets: list[str] = []

    def compiler(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op.startswith("call"))
        return graph

    torch.compile(LIF(), backend=compiler, fullgraph=True)(X)
    assert any("flex_sn_scan" in target for target in targets)
    assert not [target for target in targets if "getattr" in target and "getitem" not in target]


def move_to_meta(value: Tensor) -> Tensor:
    return value.to("meta")


def capture(weight: Tensor) -> Callable[..., Any]:
    return lambda x, v: (x * weight + v, v + x)


def add_both(x: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return x + y + v, v + x + y


Case = tuple[Callable[[str], Any], type[Exception], str]
WRONG_ARGUMENTS: dict[str, Case] = {
    "too many": (lambda b: LIF(backend=b)(X, X), InputCountError, r"got 2 inputs; num_inputs is 1"),
    "too few": (lambda b: FlexSN(add_both, 2, 1, 1, backend=b)(X), InputCountError, r"got 1 inputs; num_inputs is 2"),
    "batches": (
        lambda b: FlexSN(add_both, 2, 1, 1, backend=b)(X, X[:, :2]),
        ValueError,
        r"\[2, 8\], \[3, 8\], which do not broadcast",
    ),
    "numbers of steps": (
        lambda b: FlexSN(add_both, 2, 1, 1, backend=b)(X, X[:2]),
        ValueError,
        r"5.*2.*leading dimension",
    ),
    "dtypes": (
        lambda b: FlexSN(add_both, 2, 1, 1, backend=b)(X, X.double()),
        StateError,
        r"input 1 is torch\.float64 and input 0 torch\.float32.*x\.to\(torch\.float32\)",
    ),
    "devices": (
        lambda b: FlexSN(add_both, 2, 1, 1, backend=b)(X, move_to_meta(X)),
        DeviceError,
        r"cpu and meta|input 1 is on meta",
    ),
    "a parameter's device": (
        lambda b: LIF(tau=move_to_meta(torch.tensor([2.0])), backend=b)(X),
        DeviceError,
        r"the buffer tau is on meta and input 0 on cpu: move .*neuron\.to\('cpu'\)",
    ),
    "a captured tensor's device": (
        lambda b: FlexSN(capture(torch.ones(8, device="meta")), 1, 1, 1, backend=b)(X),
        DeviceError,
        r"weight, which the core captures, is on meta and input 0 on cpu",
    ),
    "a state's device": (
        lambda b: LIF(backend=b).step(X, [move_to_meta(X[0])]),
        StateError,
        r"state 0 has shape \[3, 8\] on meta.*Move the neuron",
    ),
    "a state's shape": (
        lambda b: LIF(backend=b).step(X, [X[0, :2]]),
        StateError,
        r"state 0 has shape \[2, 8\].*\[3, 8\] on cpu\. Call reset\(\)",
    ),
    "a state's dtype": (
        lambda b: LIF(backend=b).step(X, [X[0].half()]),
        StateError,
        r"the state v is torch\.float16 and the input torch\.float32",
    ),
    "a state that is none": (lambda b: LIF(backend=b).step(X, [cast(Tensor, 1.0)]), TypeError, r"state 0 is a float"),
    "too many states": (lambda b: LIF(backend=b).step(X, [X[0], X[0]]), StateError, r"2 states; num_states is 1"),
}


@backends
@pytest.mark.parametrize("wrong", WRONG_ARGUMENTS)
def test_arguments_that_do_not_fit_together_are_refused(wrong: str, backend: str) -> None:
    call, kind, words = WRONG_ARGUMENTS[wrong]
    with pytest.raises(kind, match=f"(?s){words}"):
        call(backend)
