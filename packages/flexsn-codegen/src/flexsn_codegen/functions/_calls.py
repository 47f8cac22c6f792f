"""Splits the arguments of a call into tensors, numbers, and a structure that many calls share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen.errors import ArgumentError, SignatureError

# Structures are tuples of texts and constants, so they are hashable, and compilers can treat them as constants.
# ("tensor",), ("float",) and ("int",) stand for the tensors and numbers of a call, in order. Other structures are
# ("constant", value), ("tuple" or "list", structures), ("named", structures, type of the named tuple),
# ("dict", pairs of key and structure), and ("call", structures of positional arguments, pairs of name and structure).
Structure = tuple[Any, ...]


@dataclass(slots=True)
class Parts:
    """The tensors and numbers of a call, which may differ between calls of one structure."""

    tensors: list[Tensor]
    numbers: list[Any]


def take_apart(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Structure, Parts]:
    """Splits a call into its structure, and its tensors and numbers.

    Raises:
        ArgumentError: an argument is neither a tensor nor a number, and a kernel cannot contain it as a constant.
    """
    parts = Parts([], [])
    positional = tuple([_take_value(name, f"argument {i}", value, parts) for i, value in enumerate(args)])
    named = tuple([(key, _take_value(name, f"argument {key!r}", value, parts)) for key, value in kwargs.items()])
    return ("call", positional, named), parts


def _take_value(name: str, where: str, value: Any, parts: Parts) -> Structure:
    if isinstance(value, Tensor):
        parts.tensors.append(value)
        return ("tensor",)
    if value is None or isinstance(value, bool):
        return ("constant", value)
    if isinstance(value, float | torch.SymFloat):
        parts.numbers.append(value)
        return ("float",)
    if isinstance(value, int | torch.SymInt):
        parts.numbers.append(value)
        return ("int",)
    if isinstance(value, str | torch.dtype | torch.device | torch.memory_format | torch.layout):
        return ("constant", value)
    if type(value) is tuple or type(value) is list:
        inner = tuple([_take_value(name, f"{where}[{i}]", part, parts) for i, part in enumerate(value)])
        return ("tuple" if type(value) is tuple else "list", inner)
    if type(value) is dict:
        return (
            "dict",
            tuple([(key, _take_value(name, f"{where}[{key!r}]", part, parts)) for key, part in value.items()]),
        )
    if isinstance(value, tuple) and hasattr(type(value), "_make"):  # a named tuple
        inner = tuple([_take_value(name, f"{where}[{i}]", part, parts) for i, part in enumerate(value)])
        return ("named", inner, type(value))
    raise ArgumentError(
        f"{where} of {name} is a {type(value).__name__}. A kernel takes tensors and Python numbers; flags, texts, "
        "dtypes and None become part of it. Lists, tuples and dicts may contain all of these. Convert other "
        "numbers to int or float."
    )


@dataclass(frozen=True, slots=True)
class Lists:
    """The arguments of a call over lists, which makes one call of the function for each place (index) of the lists.

    Attributes:
        structure: structure of each call.
        columns: for each tensor that a call takes, the tensors of all calls, or the one tensor that all calls share.
        common: for each column, True if all calls share one tensor.
        numbers: the numbers, which all calls share.
        count: the number of calls, which is the length of the lists.
        tensors: all tensors, column after column.
    """

    structure: Structure
    columns: list[Sequence[Tensor]]
    common: list[bool]
    numbers: list[Any]
    count: int
    tensors: list[Tensor]

    def positions(self, place: int) -> list[int]:
        """The positions of one call's tensors in `tensors`."""
        result, start = [], 0
        for column, common in zip(self.columns, self.common, strict=True):
            result.append(start if common else start + place)
            start += len(column)
        return result

    def parts(self, place: int) -> Parts:
        """The tensors and numbers of one call."""
        pairs = zip(self.columns, self.common, strict=True)
        return Parts([column[0 if common else place] for column, common in pairs], list(self.numbers))


def take_lists_apart(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Lists:
    """Splits a call over lists. Wherever the function takes a tensor, the call may pass a list or tuple of tensors.

    Raises:
        ArgumentError: the lists have different lengths, or there are no lists. See also `take_apart`.
    """
    columns: list[Sequence[Tensor]] = []
    common: list[bool] = []
    parts = Parts([], [])

    def take(where: str, value: Any) -> Structure:
        if _is_list(value):
            columns.append(value)
            common.append(False)
            return ("tensor",)
        before = len(parts.tensors)
        structure = _take_value(name, where, value, parts)
        columns.extend([tensor] for tensor in parts.tensors[before:])
        common.extend([True] * (len(parts.tensors) - before))
        return structure

    positional = tuple([take(f"argument {i}", value) for i, value in enumerate(args)])
    named = tuple([(key, take(f"argument {key!r}", value)) for key, value in kwargs.items()])
    lengths = sorted({len(column) for column, is_common in zip(columns, common, strict=True) if not is_common})
    if len(lengths) != 1:
        raise ArgumentError(
            f"{name}.foreach takes lists of tensors of equal length, but the lengths of the lists are {lengths}."
            if lengths
            else f"{name}.foreach takes lists of tensors, but no argument is such a list."
        )
    return Lists(("call", positional, named), columns, common, parts.numbers, lengths[0], list(chain(*columns)))


def _is_list(value: Any) -> bool:
    if type(value) not in (list, tuple) or not value:
        return False
    if torch.compiler.is_dynamo_compiling():
        return all([isinstance(entry, Tensor) for entry in value])  # noqa: C419 - compilers follow a list
    return all(issubclass(kind, Tensor) for kind in set(map(type, value)))


def put_together(
    structure: Structure, tensors: Sequence[Any], numbers: Sequence[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Rebuilds the positional and the named arguments that `take_apart` has split."""
    next_tensors, next_numbers = iter(tensors), iter(numbers)

    def rebuild(part: Structure) -> Any:
        kind = part[0]
        if kind == "tensor":
            return next(next_tensors)
        if kind in ("float", "int"):
            return next(next_numbers)
        if kind == "constant":
            return part[1]
        if kind == "dict":
            return {key: rebuild(inner) for key, inner in part[1]}
        inner = [rebuild(entry) for entry in part[1]]
        if kind == "named":
            return part[2]._make(inner)
        return tuple(inner) if kind == "tuple" else inner

    _, positional, named = structure
    return [rebuild(part) for part in positional], {key: rebuild(part) for key, part in named}


def check_signature(fn: Callable[..., Any], name: str, structure: Structure) -> None:
    """Raises `SignatureError` if the function does not accept arguments of this structure."""
    try:
        signature = inspect.signature(getattr(fn, "forward", fn))
    except (TypeError, ValueError):
        return  # a built-in function without a signature: the call itself raises any error
    try:
        signature.bind(*structure[1], **dict(structure[2]))
    except TypeError as error:
        raise SignatureError(f"{name}{signature} cannot be called like this: {error}.") from None


def results_apart(returned: Any, find_argument: Callable[[Tensor], int | None], results: list[Tensor]) -> Structure:
    """Splits a function's return value into its structure and its tensors.

    Args:
        find_argument: maps a written argument to its index, and any other tensor to `None`.
        results: receives the tensors that are not written arguments.

    Returns:
        A structure like that of an argument. In addition, ``("argument", i)`` is a written argument, and ``("other",
        name of the type)`` is an object that cannot be returned.
    """
    if isinstance(returned, Tensor):
        argument = find_argument(returned)
        if argument is not None:
            return ("argument", argument)
        results.append(returned)
        return ("tensor",)
    if returned is None:
        return ("constant", None)
    if type(returned) in (tuple, list):
        parts = tuple([results_apart(part, find_argument, results) for part in returned])
        return ("tuple" if type(returned) is tuple else "list", parts)
    if type(returned) is dict:
        return ("dict", tuple([(key, results_apart(part, find_argument, results)) for key, part in returned.items()]))
    if isinstance(returned, tuple):  # a named tuple of the user or of torch.return_types
        return ("named", tuple([results_apart(part, find_argument, results) for part in returned]), type(returned))
    return ("other", type(returned).__name__)


def new_results(structure: Structure, returned: Any) -> list[Tensor]:
    """The tensors in a return value, except for written arguments. Inverts `results_together`."""
    kind = structure[0]
    if kind == "tensor":
        return [returned]
    if kind == "dict":
        return [t for key, part in structure[1] for t in new_results(part, returned[key])]
    if kind in ("tuple", "list", "named"):
        return [t for part, entry in zip(structure[1], returned, strict=True) for t in new_results(part, entry)]
    return []


def results_together(structure: Structure, results: Sequence[Tensor], written: Sequence[Tensor]) -> Any:
    """Rebuilds a function's return value from a kernel's results and the arguments that the kernel wrote."""
    next_results = iter(results)
    return _rebuild_result(structure, next_results.__next__, written)


def _rebuild_result(part: Structure, next_tensor: Callable[[], Tensor], written: Sequence[Tensor]) -> Any:
    kind = part[0]
    if kind == "tensor":
        return next_tensor()
    if kind == "argument":
        return written[part[1]]
    if kind == "constant":
        return part[1]
    if kind == "dict":
        return {key: _rebuild_result(inner, next_tensor, written) for key, inner in part[1]}
    inner = [_rebuild_result(entry, next_tensor, written) for entry in part[1]]
    if kind == "named":
        return part[2]._make(inner) if hasattr(part[2], "_make") else part[2](inner)
    return tuple(inner) if kind == "tuple" else inner
