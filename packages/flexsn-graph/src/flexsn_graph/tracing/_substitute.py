"""Finds the tensors that a function captures, and the arguments that the function changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flexsn_graph._torch_private import FakeTensor, FakeTensorMode, fake_like, is_stand_in, undisturbed
from flexsn_graph.reads import Reads
from flexsn_graph.tracing._checks import WITHOUT_CHECKS
from flexsn_graph.tracing._origins import Following, Origins


class Converted(TorchFunctionMode):
    """A function mode that converts the arguments of torch functions.

    Args:
        convert: maps an argument to its replacement. For a list or tuple, `convert` is called with each element.
    """

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        super().__init__()
        self._convert = convert

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = WITHOUT_CHECKS.get(func, func)
        return func(
            *self._convert_all(args), **{name: self._convert_all(value) for name, value in (kwargs or {}).items()}
        )

    def _convert_all(self, value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(self._convert_all(part) for part in value)
        return self._convert(value)


class Substituted(Converted):
    """Replaces some tensors among the arguments of torch functions with stand-ins.

    Args:
        stand_ins: stand-ins by the `id` of the replaced tensor.
        make: creates a stand-in for a captured tensor that has no stand-in. `None` to keep the tensor itself.
    """

    def __init__(self, stand_ins: Mapping[int, Tensor], make: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__(self._stand_in)
        self._stand_ins, self._make = stand_ins, make

    def _stand_in(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        stand_in = self._stand_ins.get(id(value))
        if stand_in is None and self._make is not None and not is_stand_in(value):
            return self._make(value)
        return value if stand_in is None else stand_in


@dataclass(frozen=True, slots=True)
class Effects:
    """Observations of one run of a function.

    Attributes:
        captured: the captured tensors, in order of first use.
        written: positions of the arguments that the function changes in place.
        returned: the result, which consists of fake tensors.
        arguments: the fake tensors with which the function was called.
    """

    captured: tuple[Tensor, ...]
    written: tuple[int, ...]
    returned: Any
    arguments: tuple[Tensor, ...]


def effects_of(
    fn: Callable[..., Any],
    examples: Sequence[Tensor],
    sizes: Sequence[int] | None,
    reads: Reads | None = None,
    captured: dict[int, Tensor] | None = None,
) -> Effects:
    """Runs a function once, on fake tensors.

    Args:
        fn: a function of `len(examples)` tensors.
        examples: the arguments, of which only shape, dtype and device matter.
        sizes: the shape of stand-ins for captured tensors that have dimensions. `None` for the tensors' own shapes.
        reads: records the other values that the function reads.
        captured: receives the captured tensors by id, even if the function fails later.
    """
    captured = {} if captured is None else captured
    stand_ins: dict[int, Tensor] = {}

    def make(tensor: Tensor) -> Tensor:
        captured[id(tensor)] = tensor
        like = tensor
        if sizes is not None:
            like = torch.empty((), dtype=tensor.dtype, device=tensor.device)
            like = like.expand(tuple(sizes)) if tensor.dim() else like
        stand_ins[id(tensor)] = fake_like(mode, like)
        return stand_ins[id(tensor)]

    with undisturbed():
        mode = FakeTensorMode()
        arguments = tuple(fake_like(mode, example) for example in examples)
        with torch.no_grad(), mode:
            if reads is None:
                with Substituted(stand_ins, make):
                    returned = fn(*arguments)
            else:
                origins = Origins(arguments)
                origin = origins.origin(lambda t: isinstance(t, FakeTensor), lambda t: id(t) in captured)
                contexts = reads.restored(), reads.recording(), reads.run(origin)
                with contexts[0], contexts[1], contexts[2], Following(origins), Substituted(stand_ins, make):
                    returned = fn(*arguments)
    written = tuple(i for i, argument in enumerate(arguments) if argument._version > 0)
    return Effects(tuple(captured.values()), written, returned, arguments)
