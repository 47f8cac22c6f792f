"""Draws random numbers in a step, one for each element."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flexsn_nn.errors import DrawError, InputDtypeError
from flexsn_nn.noise._current import Step, current
from flexsn_nn.noise._shapes import ShapeRule, find_shape_rule

# Numbers of bits of uniform random numbers in half precision. Each dtype represents numbers of its length exactly, so
# no number is rounded to 1.
_BITS = {torch.float16: 11, torch.bfloat16: 8}


def draw_normal(x: Tensor) -> Tensor:
    """Implements `random.normal_like`."""
    _check(x, "normal_like")
    if torch.compiler.is_dynamo_compiling():
        return torch.ops.flexsn_nn.draw(x.detach(), 0)  # type: ignore[no-any-return]
    step = _get_step("normal_like")
    if step.places is None:
        return torch.zeros_like(x)
    return _draw(x, step, "normal_like", torch.ops.flexsn_graph.normal_number).to(x.dtype)


def draw_uniform(x: Tensor, *, below: float | Tensor | None = None) -> Tensor:
    """Implements `random.uniform_like`. With the probability `below`, implements `random.bernoulli_like`."""
    name = "uniform_like" if below is None else "bernoulli_like"
    _check(x, name)
    bits = 24 if below is not None else _BITS.get(x.dtype, 24)
    if torch.compiler.is_dynamo_compiling():
        number = torch.ops.flexsn_nn.draw(x.detach(), bits)
        if below is not None:
            p = below.detach().float() if isinstance(below, Tensor) else torch.full_like(number, below)
            number = torch.ops.flexsn_nn.below(number, p.expand_as(number))
        return number.to(x.dtype)  # type: ignore[no-any-return]
    step = _get_step(name)
    if step.places is None:
        mean = 0.5 if below is None else below
        return torch.zeros_like(x) + (mean.detach().to(x.dtype) if isinstance(mean, Tensor) else mean)
    number = _draw(x, step, name, torch.ops.flexsn_graph.uniform_number, bits=bits)
    if below is not None:
        number = number < (below.detach().float() if isinstance(below, Tensor) else below)
    return number.to(x.dtype)


def _check(x: Tensor, name: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} takes a tensor of the step, but got a {type(x).__name__}.")
    if not x.is_floating_point():
        raise InputDtypeError(f"{name} draws floating-point numbers, but got a tensor of {x.dtype}: convert it first.")


def _get_step(name: str) -> Step:
    step = current.step
    if step is None:
        raise DrawError(
            f"{name} is called outside of a step: it draws numbers only inside of a core that flexsn_nn.FlexSN runs. "
            "Elsewhere, use torch.randn_like, torch.rand_like or torch.bernoulli."
        )
    return step


def _draw(x: Tensor, step: Step, name: str, number: Callable[..., Tensor], **options: int) -> Tensor:
    """Draws numbers with the shape of `x`. Does not read the number of rows if `x` has the step's shape.

    Raises:
        DrawError: the step has no numbers for this shape.
    """
    places = step.places
    assert places is not None
    word = places.first
    sizes = [word.size(d) for d in range(1, word.dim())]
    sizes_of_x = [x.size(d) for d in range(1, x.dim())]
    rule = (
        find_shape_rule([0, *sizes_of_x], [0, *sizes])
        if x.dim() and word.dim()
        else ShapeRule()
        if x.dim() == word.dim()
        else None
    )
    if rule is None or (rule.function is not None and x.size(0) != word.size(0)):
        of_step = ["rows", *map(str, sizes)] if word.dim() else []
        raise DrawError(
            f"{name} draws numbers for tensors of the step's shape, [{', '.join(of_step)}], or with one dimension more "
            f"or less, or with fewer neurons, but got a tensor of shape {list(x.shape)}: expand it to the step's shape."
        )
    draws = [number(*places, stream=step.draws + i, **options) for i in range(rule.num_draws)]
    step.draws += rule.num_draws
    result: Tensor = rule.derive(draws, lambda function, arguments: function(*arguments))
    return result
