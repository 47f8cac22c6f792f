"""The argument `example_outputs`: shapes and dtypes of one step's outputs, for calls with zero steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexsn_nn.errors import ExampleError

Spec = tuple[Sequence[int], torch.dtype]


def specs_of(examples: Sequence[Tensor] | None, num_outputs: int) -> list[Spec] | None:
    """Returns the shapes and dtypes of `example_outputs`; `None` without examples."""
    if examples is None:
        return None
    if isinstance(examples, Tensor):
        raise TypeError(f"example_outputs is a tensor; give a tuple of num_outputs={num_outputs}: one step's outputs.")
    if len(examples) != num_outputs:
        raise ExampleError(f"there are {len(examples)} example_outputs; num_outputs is {num_outputs}.")
    for i, example in enumerate(examples):
        if not isinstance(example, Tensor):
            raise TypeError(f"example_outputs[{i}] is a {type(example).__name__}; give a tensor.")
    return [(tuple(example.shape), example.dtype) for example in examples]


def compare_specs(example_specs: Sequence[Spec] | None, core_specs: Sequence[Spec]) -> None:
    """Raises `ExampleError` if `example_outputs` are passed and differ from the core's results in shape or dtype."""
    for i, (example, actual) in enumerate(zip(example_specs or (), core_specs, strict=False)):
        if (tuple(example[0]), example[1]) != (tuple(actual[0]), actual[1]):
            raise ExampleError(
                f"example_outputs[{i}] is {list(example[0])} {example[1]}; for these inputs the core returns "
                f"{list(actual[0])} {actual[1]}: give outputs of one step, without time, or leave them out."
            )
