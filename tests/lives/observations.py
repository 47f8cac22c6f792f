"""Everything visible in a life, as plain values, and the comparison of two lives."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from flexsn_nn import FlexSN
from flexsn_nn.functional import get_states
from lives.hooks import LoggingHook
from lives.life import Life

Observation = dict[str, Any]
# Attributes in which the loop and the kernels may differ, such as programs, choices, and their traces.
_NOT_COMPARED = {"_programs", "_choices", "_refusals", "_repeats", "_bits", "_ready_made", "_backend", "_shapes_for"}
# Largest errors that the order of a sum causes, relative to the largest element of a gradient.
_NOISE = {torch.float64: 1e-10, torch.float32: 5e-5, torch.bfloat16: 0.1, torch.float16: 0.02}
# A gradient smaller than this fraction of the largest gradient, such as the gradient of a bias before a norm, may
# consist of rounding errors only.
_CANCELLED = 0.1
# The gradient of a parameter with one element is a sum of hundreds of terms around 1, which may cancel. So the noise of
# such a gradient is at least the noise of these terms. In half dtypes, the loop rounds each term.
_SUMMED, _SUMMED_IN_HALF = 0.1, 1.0
# Largest difference of counts, relative to the largest count. A count is a sum of outputs. If the outputs are not whole
# numbers, the sum depends on the order of its terms.
_COUNTED = 1e-6


class Noise(NamedTuple):
    """Largest allowed difference between gradients of equal lives.

    Attributes:
        scale: largest element of all gradients. The noise of a gradient that cancels to 0 is relative to this scale.
        rounded: True if autocast rounds values, so that a gradient is a sum of bfloat16 values.
    """

    scale: float
    rounded: bool

    def of(self, gradient: Tensor) -> float:
        """Returns the largest allowed difference for one gradient."""
        largest = float(gradient.abs().nan_to_num().max())
        dtype = torch.bfloat16 if self.rounded else gradient.dtype
        summed = _SUMMED_IN_HALF if dtype in (torch.bfloat16, torch.float16) else _SUMMED
        return _NOISE.get(dtype, 0.0) * max(largest, _CANCELLED * self.scale, summed)


def observe(life: Life) -> Observation:
    """Collects modules, parameters, gradients, states, records and attributes of a life."""
    values: Observation = {}
    for name, module in life.net.named_modules():
        values[f"{name}.type"] = type(module).__name__
        values[f"{name}.attributes"] = sorted(vars(module))
        values[f"{name}.training"] = module.training
        for kind, tensors in (("parameters", module._parameters), ("buffers", module._buffers)):
            values[f"{name}.{kind}"] = list(tensors)
            for key, value in tensors.items():
                values[f"{name}.{key}"] = value
                if isinstance(value, Tensor):
                    values[f"gradient of {name}.{key}"] = value.grad
                    values[f"version of {name}.{key}"] = None if value.is_inference() else value._version
        if isinstance(module, FlexSN):
            values[f"{name}.state_seqs"] = list(module.state_seqs)
            values[f"{name}.spike_counts"] = module.spike_counts
            values[f"{name}.settings"] = module.step_mode, module.store_state_seqs, module.count_spikes
        for value in module._forward_hooks.values():
            if isinstance(value, LoggingHook):
                values[f"{name}.hook"] = list(value.log)
        attributes = ((key, value) for key, value in vars(module).items() if key not in _NOT_COMPARED)
        values[f"{name}: remains of traces"] = [place for key, value in attributes for place in find_traces(value, key)]
    values["states"] = {name: list(states) for name, states in get_states(life.net).items()}
    values["keys"] = list(life.net.state_dict())
    for i, monitor in enumerate(life.monitors):
        values[f"monitor {i}"] = {name: list(records) for name, records in monitor._recorded.items()}
    return values


def find_traces(value: object, place: str, depth: int = 5) -> Iterator[str]:
    """Yields the places in a value where a trace has left symbols, or tensors without data."""
    if isinstance(value, FakeTensor | torch.fx.Proxy | torch.SymInt | torch.SymFloat | torch.SymBool):
        yield place
    elif isinstance(value, Tensor):
        if torch._is_functional_tensor(value):
            yield place
        elif value.grad_fn is None and value.grad is not None:
            yield from find_traces(value.grad, f"{place}.grad", depth - 1)
    elif depth and isinstance(value, list | tuple | set):
        for i, part in enumerate(value):
            yield from find_traces(part, f"{place}[{i}]", depth - 1)
    elif depth and isinstance(value, Mapping):
        for key, part in value.items():
            if not isinstance(part, nn.Module):
                yield from find_traces(part, f"{place}[{key!r}]", depth - 1)
    elif depth and isinstance(value, types.MethodType):
        yield from find_traces(value.__func__, place, depth - 1)
    elif depth and isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # the variable is not assigned yet
                continue
            yield from find_traces(content, f"{place} closure {name}", depth - 1)


def difference(
    loop: Any, compiled: Any, place: str = "", noise: Noise | None = None, *, rounded: bool = False
) -> str | None:
    """Describes the first difference between two observations. Returns `None` if the observations are equal.

    Tensors are equal if their bits, dtypes, shapes and strides are equal, and if both or neither have a graph.
    Gradients and counts, which are recognised by their names, may differ by as much as the order of a sum can change.

    Args:
        place: name of the values in the observations.
        noise: noise of all gradients; `None` to compute it from the values.
        rounded: attribute `rounded` of `Noise`.
    """
    if noise is None:
        noise = Noise(max(_list_largest_elements(loop, place), default=0.0), rounded)
    if isinstance(loop, Mapping) and isinstance(compiled, Mapping):
        if list(loop) != list(compiled):
            return f"{place}: the loop has {list(loop)}, the compiled twin has {list(compiled)}"
        parts = ((key, loop[key], compiled[key]) for key in loop)
        return _find_first_difference(((a, b, f"{place} {key}".strip()) for key, a, b in parts), noise)
    if isinstance(loop, list | tuple) and isinstance(compiled, list | tuple):
        if len(loop) != len(compiled):
            return f"{place}: the loop has {len(loop)} values, the compiled twin has {len(compiled)}"
        pairs = enumerate(zip(loop, compiled, strict=True))
        return _find_first_difference(((a, b, f"{place}[{i}]") for i, (a, b) in pairs), noise)
    if isinstance(loop, Tensor) and isinstance(compiled, Tensor):
        return _describe_tensor_difference(loop, compiled, place, noise)
    if loop is compiled or (type(loop) is type(compiled) and loop == compiled):
        return None
    return f"{place}: the loop has {_shorten(loop)}, the compiled twin has {_shorten(compiled)}"


def _list_largest_elements(values: Any, place: str) -> Iterator[float]:
    """Yields the largest absolute value of each gradient."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from _list_largest_elements(value, f"{place} {key}")
    elif "gradient" in place and isinstance(values, list | tuple):
        for value in values:
            yield from _list_largest_elements(value, place)
    elif "gradient" in place and isinstance(values, Tensor) and values.numel():
        yield float(values.detach().abs().nan_to_num().max())


def _find_first_difference(parts: Iterator[tuple[Any, Any, str]], noise: Noise) -> str | None:
    for a, b, place in parts:
        text = difference(a, b, place, noise)
        if text is not None:
            return text
    return None


def _describe_tensor_difference(loop: Tensor, compiled: Tensor, place: str, noise: Noise) -> str | None:
    for attribute, a, b in (
        ("type", type(loop).__name__, type(compiled).__name__),
        ("dtype", loop.dtype, compiled.dtype),
        ("shape", tuple(loop.shape), tuple(compiled.shape)),
        ("requires_grad", loop.requires_grad, compiled.requires_grad),
        ("is_leaf", loop.is_leaf, compiled.is_leaf),
        ("is_inference", loop.is_inference(), compiled.is_inference()),
        ("strides", _list_strides(loop), _list_strides(compiled)),
    ):
        if a != b:
            return f"{place}: {attribute} is {a} in the loop, {b} in the compiled twin"
    expected, actual = loop.detach(), compiled.detach()
    if torch.equal(expected, actual):
        return None
    tolerance = 0.0
    if "gradient" in place:
        tolerance = noise.of(expected)
        # A sum that overflows is infinite or NaN, depending on the order of its terms.
        finite = expected.isfinite() | actual.isfinite()
        expected, actual = expected.where(finite, 0), actual.where(finite, 0)
    elif place.endswith("counts"):
        tolerance = _COUNTED * float(expected.abs().max())
    if torch.allclose(expected, actual, rtol=0, atol=tolerance, equal_nan=True):
        return None
    texts = [tensor.flatten()[:12].tolist() for tensor in (expected, actual)]
    return f"{place}: {texts[0]} in the loop, {texts[1]} in the compiled twin"


def _list_strides(tensor: Tensor) -> tuple[int, ...] | None:
    """Returns the strides of the dimensions with several elements, or `None` for a tensor without elements."""
    if not tensor.numel():
        return None
    return tuple(s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)


def _shorten(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) < 200 else f"{text[:200]}..."
