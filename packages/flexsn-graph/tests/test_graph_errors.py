"""Mistakes in the arguments and results of a core lead to clear messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_cores import lif_core
from torch import nn

from flexsn_graph import (
    CoreArityError,
    CoreReturnError,
    ExampleError,
    RequiresGradError,
    StateMismatchError,
    TraceError,
    generate_forward_and_backward_graph,
    generate_inference_graph,
    trace_step,
)

X = torch.zeros(3, 3)

CASES: dict[str, tuple[type[Exception], str, Callable[..., Any]]] = {
    "too_few_parameters": (CoreArityError, r"core\(x\) cannot take 2 positional", lambda x: (x, x)),
    "too_many_parameters": (CoreArityError, "missing a required argument: 'w'", lambda x, v, w: (x, v)),
    "keyword_only": (CoreArityError, "missing a required argument: 'k'", lambda x, v, *, k: (x, v)),
    "module": (CoreArityError, "cannot take 2", nn.ReLU()),
    "none": (CoreReturnError, "result 0 .* is a NoneType", lambda x, v: None),
    "dict": (CoreReturnError, "result 0 .* is a dict", lambda x, v: {"x": x}),
    "number": (CoreReturnError, "result 1 .* is a float", lambda x, v: (x, 1.0)),
    "nested": (CoreReturnError, "result 1 .* is a tuple", lambda x, v: (x, (v,))),
    "one_too_few": (CoreArityError, r"returned 1 values; .* 1 \+ 1 = 2", lambda x, v: x),
    "one_too_many": (CoreArityError, r"returned 3 values; .* 1 \+ 1 = 2", lambda x, v: (x, v, v)),
    "state_dtype": (
        StateMismatchError,
        r"state 0 goes in as \[3, 3\] float32 and comes out as \[3, 3\] float64",
        lambda x, v: (x, v.double()),
    ),
    "state_shape": (
        StateMismatchError,
        r"state 0 goes in as \[3, 3\] float32 and comes out as \[2, 3, 3\] float32",
        lambda x, v: (x, v.expand(2, 3, 3)),
    ),
    "output_shape": (
        CoreReturnError,
        r"returned shapes \[1\], \[3, 3\]",
        lambda x, v: (torch.ones(1), v),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_wrong_core_is_refused_with_its_cause(name: str) -> None:
    error, message, core = CASES[name]
    with pytest.raises(error, match=message) as caught:
        trace_step(core, 1, 1, 1, (X, X))
    assert isinstance(caught.value, TraceError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("counts", [(1, 1, 1), (3, 0, 1)])
def test_wrong_number_of_examples_is_refused(counts: tuple[int, int, int]) -> None:
    with pytest.raises(CoreArityError, match=f"{4 - counts[0]} example tensors for {counts[0]} inputs"):
        trace_step(lambda *a: a[0], *counts, (X,) * (4 - counts[0]))


@pytest.mark.parametrize("counts", [(-1, 2, 1), (2, -1, 1), (1, 0, 0), (1, 1, -1)])
def test_wrong_counts_are_refused(counts: tuple[int, int, int]) -> None:
    with pytest.raises(CoreArityError, match="at least one output or state"):
        trace_step(lif_core(), *counts, (X,))


def test_wrong_examples_are_refused() -> None:
    with pytest.raises(ExampleError, match="example 1 is a float: pass a tensor") as caught:
        trace_step(lif_core(), 1, 1, 1, (X, 1.0))  # type: ignore[arg-type]
    assert isinstance(caught.value, TypeError)
    with pytest.raises(ExampleError, match=r"example 0 has the layout torch.sparse_coo"):
        trace_step(lif_core(), 1, 1, 1, (X.to_sparse(), X))


@pytest.mark.parametrize("requires_grad", [(True,), (True, False, True)])
def test_wrong_length_of_requires_grad_is_refused(requires_grad: tuple[bool, ...]) -> None:
    with pytest.raises(RequiresGradError, match=f"{len(requires_grad)} entries for 2 example inputs"):
        generate_forward_and_backward_graph(lif_core(), (X, X), requires_grad)


def test_generators_refuse_functions_that_return_no_tensors() -> None:
    for function in (lambda x: None, lambda x: {"x": x}, lambda x: [x, 1]):
        with pytest.raises(ValueError, match="must return a tensor or a flat list or tuple"):
            generate_inference_graph(function, (X,))
        with pytest.raises(ValueError, match="must return a tensor or a flat list or tuple"):
            generate_forward_and_backward_graph(function, (X,))


def test_function_without_differentiable_results_is_refused() -> None:
    for function, examples in (
        (lambda x: x > 0, (X,)),
        (lambda n: n + 1, (torch.arange(3),)),
        (lambda x: x.detach(), (X,)),
    ):
        with pytest.raises(RequiresGradError, match="no result of the function is differentiable"):
            generate_forward_and_backward_graph(function, examples)
    with pytest.raises(RequiresGradError, match="no result of the function is differentiable"):
        generate_forward_and_backward_graph(lif_core(), (X, X), (False, False))


def test_results_that_do_not_broadcast_are_refused() -> None:
    with pytest.raises(CoreReturnError, match=r"shapes \[3, 3\], \[4\], which do not broadcast"):
        generate_inference_graph(lambda x, y: (x + 1, y + 1), (X, torch.zeros(4)))


def test_errors_of_the_core_itself_pass_through() -> None:
    def core(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trace_step(core, 1, 0, 1, (X,))
