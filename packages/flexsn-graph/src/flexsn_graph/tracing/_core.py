"""Checks of the arguments and results of a step function, with readable errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flexsn_graph._location import SourceLocation
from flexsn_graph.errors import ComplexDtypeError, CoreArityError, CoreReturnError, ExampleError


def check_arity(
    core: Callable[..., Any], num_inputs: int, num_states: int, num_outputs: int, num_examples: int
) -> None:
    """Raises `CoreArityError` if `core` cannot take the inputs and states, or if the number of examples is wrong."""
    expected = num_inputs + num_states
    if min(num_inputs, num_states, num_outputs) < 0 or num_outputs + num_states == 0:
        raise CoreArityError(
            f"num_inputs, num_states, num_outputs are {num_inputs}, {num_states}, {num_outputs}: a step "
            "has at least one output or state, and no count is negative."
        )
    if num_examples != expected:
        raise CoreArityError(
            f"{num_examples} example tensors for {num_inputs} inputs and {num_states} states: pass {expected}."
        )
    called = core.forward if isinstance(core, nn.Module) else core
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return  # some built-ins have no signature. The call raises an error if the number of arguments is wrong
    try:
        signature.bind(*range(expected))
    except TypeError as error:
        raise CoreArityError(
            f"the core{signature} cannot take {expected} positional arguments ({num_inputs} inputs and "
            f"{num_states} states): {error}."
        ) from None


def check_examples(examples: Sequence[Any]) -> None:
    """Raises if an example is not a dense, real tensor."""
    for i, example in enumerate(examples):
        if not isinstance(example, Tensor):
            raise ExampleError(f"example {i} is a {type(example).__name__}: pass a tensor.")
        if example.layout is not torch.strided:
            raise ExampleError(f"example {i} has the layout {example.layout}: pass a dense tensor.")
        if example.is_complex():
            raise complex_error(f"example {i}", example.dtype, None)


def complex_error(name: str, dtype: torch.dtype, location: SourceLocation | None) -> ComplexDtypeError:
    """The error for a complex tensor. `name` is the name of the argument or of the op that has this tensor."""
    return ComplexDtypeError(
        f"{name} is {dtype}: complex numbers are not supported. Carry the real and the imaginary part as two tensors.",
        name,
        location,
    )


def as_tensors(results: Any) -> tuple[Tensor, ...]:
    """A function's results as a tuple of tensors."""
    values = results if isinstance(results, tuple | list) else (results,)
    for i, value in enumerate(values):
        if not isinstance(value, Tensor):
            raise CoreReturnError(
                f"result {i} of the function is a {type(value).__name__}: it must return a tensor or a "
                "flat list or tuple of tensors."
            )
    return tuple(values)


def as_core_results(results: Any, num_outputs: int, num_states: int) -> tuple[Tensor, ...]:
    """A core's results as a tuple of `num_outputs + num_states` tensors."""
    values = as_tensors(results)
    if len(values) != num_outputs + num_states:
        raise CoreArityError(
            f"the core returned {len(values)} values; num_outputs + num_states is {num_outputs} + "
            f"{num_states} = {num_outputs + num_states}: return (*outputs, *new_states)."
        )
    return values


def unwrap_compiled(core: Callable[..., Any]) -> Callable[..., Any]:
    """The plain function or module inside `torch.compile(core)`. FlexSN itself compiles the whole core."""
    for name in ("_orig_mod", "_torchdynamo_orig_callable"):
        inner: Callable[..., Any] | None = getattr(core, name, None)
        if inner is not None:
            return unwrap_compiled(inner)
    return core
