"""Everything visible of a life, as plain values, and the comparison of two lives."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from flexsn_nn import FlexSN
from flexsn_nn.functional import get_states
from lives.hooks import Recording
from lives.life import Life

Seen = dict[str, Any]
# Attributes in which the loop and the kernels may differ, such as programs, choices, and their traces.
_OWN = {"_programs", "_choices", "_refusals", "_repeats", "_bits", "_ready_made", "_backend", "_shapes_for"}
# Largest errors from the order of a sum, relative to the largest number of a gradient.
_NOISE = {torch.float64: 1e-10, torch.float32: 5e-5, torch.bfloat16: 0.1, torch.float16: 0.02}
# A gradient smaller than this fraction of the largest gradient, such as the gradient of a bias before a norm, may
# consist of rounding errors only.
_CANCELLED = 0.1
# The gradient of a single number is a sum of hundreds of numbers around 1, which may cancel. So its noise is at least
# the noise of such a sum. In half dtypes, the loop rounds each of these numbers.
_SUMMED, _SUMMED_IN_HALF = 0.1, 1.0
# Largest difference relative to the largest count. If outputs are not whole numbers, their sum depends on the order.
_COUNTED = 1e-6


class Noise(NamedTuple):
    """Largest allowed difference between gradients of equal lives.

    Attributes:
        scale: largest number in all gradients. The noise of a gradient that cancels to 0 is relative to this scale.
        rounded: True if autocast rounds values, so that a gradient is a sum of bfloat16 numbers.
    """

    scale: float
    rounded: bool

    def of(self, gradient: Tensor) -> float:
        largest = float(gradient.abs().nan_to_num().max())
        dtype = torch.bfloat16 if self.rounded else gradient.dtype
        summed = _SUMMED_IN_HALF if dtype in (torch.bfloat16, torch.float16) else _SUMMED
        return _NOISE.get(dtype, 0.0) * max(largest, _CANCELLED * self.scale, summed)


def observe(life: Life) -> Seen:
    """Collects modules, parameters, gradients, states, records and attributes of a life."""
    values: Seen = {}
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
            if isinstance(value, Recording):
                values[f"{name}.hook"] = list(value.log)
        attributes = ((key, value) for key, value in vars(module).items() if key not in _OWN)
        values[f"{name}: left behind by traces"] = [at for key, value in attributes for at in traces_in(value, key)]
    values["states"] = {name: list(states) for name, states in get_states(life.net).items()}
    values["keys"] = list(life.net.state_dict())
    for i, monitor in enumerate(life.monitors):
        values[f"monitor {i}"] = {name: list(records) for name, records in monitor._recorded.items()}
    return values


def traces_in(value: object, place: str, depth: int = 5) -> Iterator[str]:
    """Yields the places in a value where a trace has left symbols, or tensors without data."""
    if isinstance(value, FakeTensor | torch.fx.Proxy | torch.SymInt | torch.SymFloat | torch.SymBool):
        yield place
    elif isinstance(value, Tensor):
        if torch._is_functional_tensor(value):
            yield place
        elif value.grad_fn is None and value.grad is not None:
            yield from traces_in(value.grad, f"{place}.grad", depth - 1)
    elif depth and isinstance(value, list | tuple | set):
        for i, part in enumerate(value):
            yield from traces_in(part, f"{place}[{i}]", depth - 1)
    elif depth and isinstance(value, Mapping):
        for key, part in value.items():
            if not isinstance(part, nn.Module):
                yield from traces_in(part, f"{place}[{key!r}]", depth - 1)
    elif depth and isinstance(value, types.MethodType):
        yield from traces_in(value.__func__, place, depth - 1)
    elif depth and isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # the variable is not assigned yet
                continue
            yield from traces_in(content, f"{place} closure {name}", depth - 1)


def difference(
    loop: Any, compiled: Any, place: str = "", noise: Noise | None = None, *, rounded: bool = False
) -> str | None:
    """Describes the first difference between two observations; `None` if they are equal.

    Tensors are equal if their bits, dtypes, shapes and strides are equal, and if both or neither have a graph.
    Gradients and counts are recognised by name; they may differ as far as the order of sums explains.

    Args:
        place: description of the place of the values.
        noise: noise of all gradients; `None` to compute it from the values.
        rounded: attribute `rounded` of `Noise`.
    """
    if noise is None:
        noise = Noise(max(_gradients_in(loop, place), default=0.0), rounded)
    if isinstance(loop, Mapping) and isinstance(compiled, Mapping):
        if list(loop) != list(compiled):
            return f"{place}: the loop has {list(loop)}, the compiled one {list(compiled)}"
        parts = ((key, loop[key], compiled[key]) for key in loop)
        return _first(((a, b, f"{place} {key}".strip()) for key, a, b in parts), noise)
    if isinstance(loop, list | tuple) and isinstance(compiled, list | tuple):
        if len(loop) != len(compiled):
            return f"{place}: the loop has {len(loop)}, the compiled one {len(compiled)} of them"
        pairs = enumerate(zip(loop, compiled, strict=True))
        return _first(((a, b, f"{place}[{i}]") for i, (a, b) in pairs), noise)
    if isinstance(loop, Tensor) and isinstance(compiled, Tensor):
        return _tensors_differ(loop, compiled, place, noise)
    if loop is compiled or (type(loop) is type(compiled) and loop == compiled):
        return None
    return f"{place}: the loop has {_short(loop)}, the compiled one {_short(compiled)}"


def _gradients_in(values: Any, place: str) -> Iterator[float]:
    """Yields the largest number of each gradient."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from _gradients_in(value, f"{place} {key}")
    elif "gradient" in place and isinstance(values, list | tuple):
        for value in values:
            yield from _gradients_in(value, place)
    elif "gradient" in place and isinstance(values, Tensor) and values.numel():
        yield float(values.detach().abs().nan_to_num().max())


def _first(parts: Iterator[tuple[Any, Any, str]], noise: Noise) -> str | None:
    for a, b, place in parts:
        text = difference(a, b, place, noise)
        if text is not None:
            return text
    return None


def _tensors_differ(loop: Tensor, compiled: Tensor, place: str, noise: Noise) -> str | None:
    for what, a, b in (
        ("type", type(loop).__name__, type(compiled).__name__),
        ("dtype", loop.dtype, compiled.dtype),
        ("shape", tuple(loop.shape), tuple(compiled.shape)),
        ("requires_grad", loop.requires_grad, compiled.requires_grad),
        ("is_leaf", loop.is_leaf, compiled.is_leaf),
        ("is_inference", loop.is_inference(), compiled.is_inference()),
        ("strides", _strides(loop), _strides(compiled)),
    ):
        if a != b:
            return f"{place}: {what} is {a} in the loop, {b} in the compiled one"
    one, other = loop.detach(), compiled.detach()
    if torch.equal(one, other):
        return None
    apart = 0.0
    if "gradient" in place:
        apart = noise.of(one)
        # A sum that overflows is infinite or NaN, depending on the order of its terms.
        finite = one.isfinite() | other.isfinite()
        one, other = one.where(finite, 0), other.where(finite, 0)
    elif place.endswith("counts"):
        apart = _COUNTED * float(one.abs().max())
    if torch.allclose(one, other, rtol=0, atol=apart, equal_nan=True):
        return None
    return f"{place}: {one.flatten()[:12].tolist()} in the loop, {other.flatten()[:12].tolist()} in the compiled one"


def _strides(tensor: Tensor) -> tuple[int, ...] | None:
    """Returns the strides of the dimensions with several elements, or `None` for a tensor without elements."""
    if not tensor.numel():
        return None
    return tuple(s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)


def _short(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) < 200 else f"{text[:200]}..."
