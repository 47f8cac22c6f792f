"""Finds the tensors that a step function captures, and lifts them to arguments.

A core reaches tensors that are not among its arguments: closures, `nn.Module` parameters and buffers,
`functools.partial`, globals. While it runs on fake tensors, each real tensor that reaches the dispatcher
is one of these. `CaptureMode` puts a fake stand-in in its place, which the tracer makes an argument.

Autograd works above the dispatcher and still sees the real tensor, so `torch.autograd.grad` can be asked
for its gradient, also when it went through a `torch.autograd.Function`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from flexsn_graph._core import complex_error
from flexsn_graph._location import SourceLocation, stack_trace, user_location
from flexsn_graph._torch_private import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    TorchFunctionMode,
    constant_value,
    custom_op_body,
    fake_like,
    op_location_key,
    set_stack_trace,
)
from flexsn_graph.errors import (
    CaptureError,
    DataDependentError,
    MutationError,
    NonPointwiseError,
    RandomOpError,
    UnsupportedCoreError,
)

_aten = torch.ops.aten

# `torch.tensor(0.5)` inside a core: a constant made on the spot, not a captured tensor.
_CONSTANT_OPS = frozenset({_aten.lift_fresh.default, _aten.lift_fresh_copy.default})

_DATA_DEPENDENT_OPS = frozenset(
    {_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default}
)

# They hand a tensor's values to Python or NumPy without passing the dispatcher.
_VALUE_READS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__})


class Captures:
    """The captured tensors of one core, in order of first use, each once."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self.tensors: list[Tensor] = []
        self.stand_ins: list[FakeTensor] = []
        # Autograd sequence number to the user's line, so that a backward formula can name it.
        self.locations: dict[int, SourceLocation] = {}
        # The tensors are kept, so that an id or an address is not given to another one meanwhile.
        self._by_identity: dict[int, tuple[int, Tensor]] = {}
        self._by_memory: dict[tuple[Any, ...], int] = {}

    def is_captured(self, tensor: Tensor) -> bool:
        """Whether `tensor` is the user's: neither an argument nor computed by the core."""
        return not (isinstance(tensor, FakeTensor) and tensor.fake_mode is self._mode)

    def find(self, tensor: Tensor) -> int | None:
        """The index of `tensor`, or of one that is the same memory (`w.data` is a new object)."""
        if id(tensor) in self._by_identity:
            return self._by_identity[id(tensor)][0]
        memory = _memory_of(tensor)
        index = self._by_memory.get(memory)
        if index is None or _memory_of(self.tensors[index]) != memory:
            return None
        if tensor.requires_grad:
            if self.tensors[index].requires_grad:
                return None  # another variable, with a gradient of its own
            # `w.data` was met before `w`: it is `w` that has a gradient and can be moved.
            self.tensors[index] = tensor
        self._by_identity[id(tensor)] = (index, tensor)
        return index

    def add(self, tensor: Tensor) -> int:
        """Records a tensor that `find` does not know."""
        index = len(self.tensors)
        self.stand_ins.append(fake_like(self._mode, tensor))
        self.tensors.append(tensor)
        self._by_identity[id(tensor)] = (index, tensor)
        self._by_memory[_memory_of(tensor)] = index
        return index

    def stand_in(self, tensor: Tensor) -> Tensor:
        """The fake of a captured tensor that a core returns as it is; a fake tensor unchanged."""
        if not self.is_captured(tensor):
            return tensor
        index = self.find(tensor)
        return self.stand_ins[self.add(tensor) if index is None else index]


class ValueReads(TorchFunctionMode):
    """Refuses the ways from a tensor to its values that no dispatch mode sees."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _VALUE_READS:
            raise _reads_value(f"Tensor.{func.__name__}", user_location())
        return func(*args, **(kwargs or {}))


class CaptureMode(TorchDispatchMode):
    """Runs a core on fake tensors: swaps captured tensors, refuses what a scan cannot honour.

    Args:
        captures: what is known so far.
        may_add: whether a tensor not seen before is recorded (discovery) or refused (recording, where
            it would have no argument to stand for it).
        frozen: the core's arguments, or the incoming gradients: it must not change them in place.
    """

    supports_higher_order_operators = True  # so that they reach `__torch_dispatch__`, and are refused

    def __init__(
        self, captures: Captures, *, may_add: bool, frozen: Sequence[Tensor] = ()
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._captures = captures
        self._may_add = may_add
        # What the core called, and which captured tensors it used, to see whether it does so again.
        self.trail: list[tuple[str, ...]] = []
        self.met: set[int] = set()
        # The error raised here, which TorchScript replaces by one of its own.
        self.refusal: UnsupportedCoreError | None = None
        self._frozen = {_storage_of(t) for t in (*frozen, *captures.stand_ins)}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        try:
            return self._call(func, args, kwargs or {})
        except UnsupportedCoreError as error:
            self.refusal = error
            raise

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        location = self._locate()
        if not isinstance(func, torch._ops.OpOverload):
            raise UnsupportedCoreError(
                f"the core calls the higher-order operator {func}: it cannot be part of a step function. "
                "Use `torch.where`.",
                str(func),
                location,
            )
        if func not in _CONSTANT_OPS:
            swap: Callable[[Any], Any] = lambda value: self._swap(value, location)  # noqa: E731
            args, kwargs = pytree.tree_map(swap, (args, kwargs))
        self.trail.append((str(func), *map(self._mark, pytree.tree_leaves((args, kwargs)))))
        self._refuse(func, args, kwargs, location)
        body = custom_op_body(func)
        if body is not None:
            with self:
                return body(*args, **kwargs)
        set_stack_trace(stack_trace(location, str(func)))
        results = func(*args, **kwargs)
        _refuse_complex((args, kwargs, results), str(func), location)
        return results

    def _mark(self, value: Any) -> str:
        """What an op's argument is in each call, if the core does the same in each call."""
        if not isinstance(value, Tensor):
            return repr(value)
        # A constant made on the spot is a new tensor each time: its value counts.
        return constant_value(value) if self._captures.is_captured(value) else ""

    def _locate(self) -> SourceLocation | None:
        in_backward, number = op_location_key()
        location = user_location()
        if in_backward:
            return location or self._captures.locations.get(number)
        if location is not None:
            self._captures.locations[number] = location
        return location

    def _swap(self, value: Any, location: SourceLocation | None) -> Any:
        if not isinstance(value, Tensor) or not self._captures.is_captured(value):
            return value
        if value.layout is not torch.strided:
            raise CaptureError(
                f"the core captures a tensor of layout {value.layout}: only dense ones can be read.",
                "capture",
                location,
            )
        if value.retains_grad and not value.is_leaf:
            raise CaptureError(
                "the core captures a tensor of which `retain_grad()` was called: tracing would write its "
                "`.grad`. Capture it before that call.",
                "capture",
                location,
            )
        index = self._captures.find(value)
        if index is None:
            if not self._may_add:
                raise CaptureError(
                    "the core used a captured tensor that it did not use when it was traced before: "
                    f"{tuple(value.shape)} {value.dtype}. It must reach the same tensor objects in "
                    "every call; create constants outside of it.",
                    "capture",
                    location,
                )
            index = self._captures.add(value)
            self._frozen.add(_storage_of(self._captures.stand_ins[index]))
        self.met.add(index)
        stand_in = self._captures.stand_ins[index]
        if (value.shape, value.dtype) != (stand_in.shape, stand_in.dtype):
            raise CaptureError(
                f"a captured tensor was {list(stand_in.shape)} {stand_in.dtype} when the core was traced "
                f"and is {list(value.shape)} {value.dtype} now: trace the core again.",
                "capture",
                location,
            )
        return stand_in

    def _refuse(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        location: SourceLocation | None,
    ) -> None:
        name = str(func)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RandomOpError(
                f"the core calls {name}: random ops are not supported, because the backward pass "
                "recomputes the step. Draw the numbers outside and pass them as an input sequence.",
                name,
                location,
            )
        if func in _DATA_DEPENDENT_OPS or torch.Tag.data_dependent_output in func.tags:
            raise _reads_value(name, location)
        if torch.Tag.dynamic_output_shape in func.tags:
            raise NonPointwiseError(
                f"the core picks elements by index or mask ({name}): a step function must work on each "
                "element of the step by itself. Use `torch.where` for masks.",
                name,
                location,
            )
        for argument, value in zip(func._schema.arguments, args, strict=False):
            self._refuse_write(argument, value, name, location)
        for argument in func._schema.arguments:
            if argument.name in kwargs:
                self._refuse_write(argument, kwargs[argument.name], name, location)

    def _refuse_write(
        self,
        argument: torch._C.Argument,
        value: Any,
        name: str,
        location: SourceLocation | None,
    ) -> None:
        if argument.alias_info is None or not argument.alias_info.is_write:
            return
        for written in pytree.tree_leaves(value):  # `torch._foreach_*` write to lists
            if isinstance(written, Tensor) and _storage_of(written) in self._frozen:
                raise MutationError(
                    "the core changes an input, a state, a captured tensor or an incoming gradient in "
                    f"place ({name}). Return the new value instead; in-place ops on values that the "
                    "core made are fine.",
                    name,
                    location,
                )


def _refuse_complex(values: Any, name: str, location: SourceLocation | None) -> None:
    for value in pytree.tree_leaves(values):
        if isinstance(value, Tensor) and value.is_complex():
            raise complex_error(name, value.dtype, location)


def _reads_value(name: str, location: SourceLocation | None) -> DataDependentError:
    return DataDependentError(
        f"the core reads a tensor's value in Python ({name}): `if`, `while`, `.item()` and "
        "`float()` on a tensor cannot be compiled. Use `torch.where`.",
        name,
        location,
    )


def _storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _memory_of(tensor: Tensor) -> tuple[Any, ...]:
    return (
        _storage_of(tensor),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )
