"""Trees of tensors, which are the arguments and results of ``scan`` and its step, and checks of these trees."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexsn_hop._torch_private import (
    TreeSpec,
    is_transforming,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)
from flexsn_hop.errors import (
    CarryStructureError,
    CoreArityError,
    CoreReturnCountError,
    NotATensorError,
    OutputChangedError,
    RematError,
    ScanDimError,
    ScanLengthError,
    SequenceLengthError,
    StateChangedError,
)
from flexsn_hop.loop._arguments import positional_range
from flexsn_hop.loop._eager import Tensors, alike, are_plain_and_of, describe, kinds

__all__ = ["Tree", "TreeCall", "TreeSteps", "check_remat", "check_sequence_dims", "check_tree_call", "fill"]


def fill(spec: TreeSpec, present: Sequence[bool], tensors: Sequence[Any]) -> Any:
    """Builds a tree with the structure ``spec``: a tensor for each True in ``present``, and None for each False."""
    leaves = []
    num_used = 0
    for is_present in present:
        leaves.append(tensors[num_used] if is_present else None)
        num_used += is_present
    return tree_unflatten(leaves, spec)


@dataclass(frozen=True, slots=True)
class Tree:
    """The structure of a tree whose leaves are tensors or None.

    Attributes:
        spec: PyTorch's description of the tree. In this description, None is a leaf.
        present: For each leaf, True if it is a tensor.
    """

    spec: TreeSpec
    present: tuple[bool, ...]

    @classmethod
    def of(cls, leaves: Sequence[Any], spec: TreeSpec) -> Tree:
        return cls(spec, tuple(leaf is not None for leaf in leaves))

    def fill(self, tensors: Sequence[Any]) -> Any:
        """Builds a tree with this structure whose leaves are ``tensors``."""
        return fill(self.spec, self.present, tensors)

    def leaves_of(self, tree: Any) -> list[Any] | None:
        """Returns the leaves of ``tree`` that are not None, in the order of this structure.

        Returns None if ``tree`` has another structure. The keys of a dict may be in another order than in this
        structure.
        """
        try:
            leaves = self.spec.flatten_up_to(tree)
        except ValueError:
            return None
        fits = all(
            (leaf is not None) == is_present and tree_flatten(leaf)[1].is_leaf()
            for leaf, is_present in zip(leaves, self.present, strict=True)
        )
        return [leaf for leaf in leaves if leaf is not None] if fits else None

    def name(self, root: str, tensors: Sequence[Any], index: int) -> str:
        """Returns the user's expression for the tensor ``index``, such as ``"carry['h'][0]"``, for messages.

        ``root`` is the name of the tree. ``tensors`` are the leaves that are not None: some containers check their
        leaves.
        """
        position = [leaf for leaf, is_present in enumerate(self.present) if is_present][index]
        try:
            paths, _ = tree_flatten_with_path(self.fill(tensors))
            return f"{root}{keystr(paths[position][0])}"
        except ValueError:  # a container that was registered without names for its elements
            return f"leaf {position} of {root}"

    def __str__(self) -> str:
        try:
            return repr(self.fill([_Star()] * sum(self.present)))
        except Exception:  # a container that accepts only tensors
            return " ".join(str(self.spec).split())


class _Star:
    def __repr__(self) -> str:
        return "*"


@dataclass(frozen=True, slots=True)
class TreeCall:
    """A call of ``scan`` with flattened trees.

    Attributes:
        step: The user's step, or None if a compiler cannot represent it as a callable.
        carry, x: The structures of ``init`` and ``xs``.
        states, inputs: The leaves of ``init`` and ``xs`` that are not None.
        length, reverse, dim, remat: The arguments of ``scan``.
    """

    step: Callable[..., Any] | None
    carry: Tree
    states: Sequence[Any]
    x: Tree
    inputs: Sequence[Any]
    length: Any
    reverse: bool
    dim: int
    remat: int | None

    @classmethod
    def of(cls, step: Callable[..., Any] | None, init: Any, xs: Any, *options: Any) -> TreeCall:
        """Flattens the trees. ``options`` are length, reverse, dim and remat."""
        carry_leaves, carry_spec = tree_flatten(init)
        x_leaves, x_spec = tree_flatten(xs)
        carry, x = Tree.of(carry_leaves, carry_spec), Tree.of(x_leaves, x_spec)
        states = [leaf for leaf in carry_leaves if leaf is not None]
        inputs = [leaf for leaf in x_leaves if leaf is not None]
        return cls(step, carry, states, x, inputs, *options)

    @property
    def steps(self) -> Any:
        """T, which may be symbolic."""
        return self.inputs[0].shape[self.dim] if self.inputs else self.length


def check_tree_call(call: TreeCall) -> None:
    """Checks the arguments of a call, as far as possible without calling the step.

    Raises:
        TypeError, CoreArityError, NotATensorError, ScanDimError, SequenceLengthError, ScanLengthError, RematError.
    """
    _check_step_arity(call.step)
    if not isinstance(call.reverse, bool):
        raise TypeError(f"reverse is {call.reverse!r}; it must be True or False")
    if not isinstance(call.dim, int) or isinstance(call.dim, bool):
        raise TypeError(f"dim is {call.dim!r}; it must be an int")
    check_remat(call.remat)
    _check_leaves(call.carry, "init", call.states)
    _check_leaves(call.x, "xs", call.inputs)
    check_sequence_dims(call.x, "xs", call.inputs, call.dim)
    for index, sequence in enumerate(call.inputs):
        if sequence.shape[call.dim] != call.steps:
            first, current = (call.x.name("xs", call.inputs, position) for position in (0, index))
            raise SequenceLengthError(
                f"{first} has {call.steps} steps in dimension {call.dim} and {current} has {sequence.shape[call.dim]}: "
                "all sequences in xs must have the same number of steps"
            )
    _check_length(call)


def check_remat(remat: Any) -> None:
    """Raises an error if ``remat`` is not a number of steps, or would have no effect.

    Raises:
        TypeError, RematError.
    """
    if remat is None:
        return
    if not isinstance(remat, (int, torch.SymInt)) or isinstance(remat, bool):
        raise TypeError(f"remat is {remat!r}; it must be an int, the number of steps between carries that are kept")
    if remat < 1:
        raise RematError(f"remat is {remat}; it must be at least 1, the number of steps between carries that are kept")
    if is_transforming():
        raise RematError(
            "remat has no effect inside of a transform of torch.func (vmap, grad, jvp): leave it out there, or use "
            "torch.autograd"
        )


def _check_step_arity(step: Any) -> None:
    if step is None:
        return
    if not callable(step):
        raise TypeError(f"step is a {type(step).__name__}; it must be callable: step(carry, x) -> (new_carry, y)")
    accepted = positional_range(step)
    if accepted is None:
        return
    fewest, most, keywords = accepted
    if keywords:
        raise CoreArityError(
            f"step has required keyword-only parameters ({', '.join(keywords)}), but it is called with 2 "
            "positional arguments, step(carry, x): bind them with functools.partial"
        )
    if fewest > 2 or (most is not None and most < 2):
        takes = f"{fewest}" if most == fewest else f"{fewest} to {'any number' if most is None else most}"
        raise CoreArityError(
            f"step takes {takes} positional arguments; it is called with 2, step(carry, x), where x is None for a "
            "scan without inputs"
        )


def _check_leaves(tree: Tree, root: str, leaves: Sequence[Any]) -> None:
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            raise NotATensorError(
                f"{tree.name(root, leaves, index)} is a {type(leaf).__name__}; it must be a torch.Tensor or None"
                f"{_find_remedy(leaf)}"
            )
        if leaf.is_nested:
            raise NotATensorError(
                f"{tree.name(root, leaves, index)} is a nested tensor, whose steps may differ; it must be a plain "
                "torch.Tensor: torch.nested.to_padded_tensor returns one"
            )


def _find_remedy(leaf: object) -> str:
    """Returns advice for a leaf that is not a tensor, as the end of a message."""
    if isinstance(leaf, (bool, int, float, complex)):
        return f": write torch.tensor({leaf!r})"
    if hasattr(leaf, "__array__"):
        return ": write torch.as_tensor"
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return ", or a registered container: torch.export.register_dataclass"
    return ""


def check_sequence_dims(tree: Tree, root: str, sequences: Sequence[torch.Tensor], dim: int) -> None:
    """Raises an error if a tensor in ``sequences``, the leaves of ``tree``, has no dimension ``dim``.

    Raises:
        ScanDimError.
    """
    for index, sequence in enumerate(sequences):
        if not -sequence.dim() <= dim < sequence.dim():
            raise ScanDimError(
                f"dim is {dim}, and {tree.name(root, sequences, index)} has {sequence.dim()} dimensions, "
                f"{list(sequence.shape)}: dim is the dimension of time, in every sequence of xs and ys"
            )


def _check_length(call: TreeCall) -> None:
    length = call.length
    if length is None:
        if not call.inputs:
            raise ScanLengthError("xs has no tensor and length is None: pass length, the number of steps")
        return
    if not isinstance(length, (int, torch.SymInt)) or isinstance(length, bool):
        raise TypeError(f"length is {length!r}; it must be an int, the number of steps")
    if length < 0:
        raise ScanLengthError(f"length is {length}; it must be at least 0")
    if call.inputs and length != call.steps:
        raise ScanLengthError(
            f"length is {length} and {call.x.name('xs', call.inputs, 0)} has {call.steps} steps in dimension "
            f"{call.dim}: leave length out, or make them equal"
        )


def _split_returned(returned: object, carry: Tree, step: int) -> tuple[list[Any], Any]:
    """Splits the return value of a step into the leaves of the new carry, in the order of ``carry``, and y.

    Raises:
        CoreReturnCountError: The return value is not a pair.
        CarryStructureError: The new carry has another structure than ``carry``.
    """
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        received = f"{len(returned)} values" if isinstance(returned, (tuple, list)) else f"a {_name_type(returned)}"
        raise CoreReturnCountError(f"step returned {received}; it must return 2, (new_carry, y), and y may be None")
    new_carry, y = returned
    leaves = carry.leaves_of(new_carry)
    if leaves is None:
        current = Tree.of(*tree_flatten(new_carry))
        raise CarryStructureError(
            f"the carry was {carry} before step {step} and {current} after it, {sum(carry.present)} tensors and "
            f"{sum(current.present)}: a carry keeps its structure"
        )
    return leaves, y


def _name_type(value: object) -> str:
    return "tensor" if isinstance(value, torch.Tensor) else type(value).__name__


def _make_filler(tree: Tree, tensors: Sequence[Any]) -> Callable[[Sequence[Any]], Any]:
    """Returns ``tree.fill``, or a faster function for one tensor or a flat tuple, list or dict of tensors."""
    if tree.spec.is_leaf() and all(tree.present):
        return operator.itemgetter(0)
    kind, keys = _find_plain_type(tree, tensors)
    if kind is dict:
        return lambda tensors: dict(zip(keys, tensors, strict=True))
    return tree.fill if kind is None else kind


def _make_reader(tree: Tree, tensors: Sequence[Any]) -> Callable[[Any], Sequence[Any]]:
    """Returns a fast function that takes a value with the structure of ``tree``, and returns its leaves.

    The function returns ``(None,)`` if it cannot read the value. The caller checks the leaves, which may be of any
    type.
    """
    if tree.spec.is_leaf() and all(tree.present):
        return lambda value: (value,)
    if tree.spec.is_leaf():
        return lambda value: () if value is None else _UNREAD
    kind, keys = _find_plain_type(tree, tensors)

    def read(value: Any) -> Sequence[Any]:
        if kind is None or type(value) is not kind:
            return _UNREAD
        leaves: Any = value
        if kind is dict:
            return [leaves[key] for key in keys] if leaves.keys() == keys.keys() else _UNREAD
        return leaves  # type: ignore[no-any-return]

    return read


_UNREAD: Sequence[Any] = (None,)


def _find_plain_type(tree: Tree, tensors: Sequence[Any]) -> tuple[type | None, dict[Any, None]]:
    """Returns the type of a flat tuple, list or dict of tensors, and the keys of the dict.

    The type is None for any other tree.
    """
    if not all(tree.present) or not tensors:
        return None, {}
    value = tree.fill(tensors)
    if type(value) is dict:
        are_same = [a is b for a, b in zip(value.values(), tensors, strict=False)]
        return (dict, dict.fromkeys(value)) if len(value) == len(tensors) and all(are_same) else (None, {})
    if type(value) in (tuple, list) and len(value) == len(tensors):
        return (type(value), {}) if all(a is b for a, b in zip(value, tensors, strict=True)) else (None, {})
    return None, {}


class TreeSteps:
    """Calls the user's step for each time step, and checks the results of the call.

    Attributes:
        y: The structure of the output, or None before the first step.
    """

    def __init__(self, call: TreeCall) -> None:
        self.y: Tree | None = None
        self._call = call
        self._first: Tensors = ()
        self._num_inputs = len(call.inputs)
        self._fill_x = _make_filler(call.x, call.inputs)
        self._fill_carry = _make_filler(call.carry, call.states)
        self._read_carry = _make_reader(call.carry, call.states)
        self._read_y: Callable[[Any], Sequence[Any]] | None = None
        self._carry_kinds = kinds(call.states) if all(isinstance(s, torch.Tensor) for s in call.states) else []
        self._y_kinds: list[Any] = []

    def __call__(self, slices: Sequence[Any], states: Sequence[Any], step: int) -> tuple[Tensors, Tensors]:
        """Calls the step with ``slices`` and ``states``, and returns its outputs and new states."""
        call = self._call
        assert call.step is not None
        returned = call.step(self._fill_carry(states), self._fill_x(slices[: self._num_inputs]))
        if self._read_y is not None and type(returned) is tuple and len(returned) == 2:
            new_states, outputs = self._read_carry(returned[0]), self._read_y(returned[1])
            if are_plain_and_of(new_states, self._carry_kinds) and are_plain_and_of(outputs, self._y_kinds):
                return tuple(outputs), tuple(new_states)
        return self.check(returned, states, step)

    def check(self, returned: object, states: Sequence[Any], step: int) -> tuple[Tensors, Tensors]:
        """Checks the return value of the step that took ``states``, and returns its outputs and new states."""
        carry = self._call.carry
        new_states, y = _split_returned(returned, carry, step)
        _check_leaves(carry, "carry", new_states)
        for index, (old, new) in enumerate(zip(states, new_states, strict=True)):
            if not alike(old, new):
                raise StateChangedError(
                    f"{carry.name('carry', states, index)} was {describe(old)} before step {step} and "
                    f"{describe(new)} after it; a carry keeps its shapes, dtypes and devices: expand or cast the "
                    "one in init or the result of step"
                )
        if self.y is None:
            leaves, spec = tree_flatten(y)
            self.y = Tree.of(leaves, spec)
            outputs = self._first = tuple(leaf for leaf in leaves if leaf is not None)
            if all(isinstance(output, torch.Tensor) and not output.is_nested for output in outputs):
                self._read_y, self._y_kinds = _make_reader(self.y, outputs), kinds(outputs)
        else:
            result = self.y.leaves_of(y)
            if result is None:
                current = Tree.of(*tree_flatten(y))
                raise OutputChangedError(
                    f"y was {self.y} at step 0 and {current} at step {step}; y keeps its structure"
                )
            outputs = tuple(result)
        _check_leaves(self.y, "y", outputs)
        for index, (first, value) in enumerate(zip(self._first, outputs, strict=True)):
            if not alike(first, value):
                raise OutputChangedError(
                    f"{self.y.name('y', outputs, index)} was {describe(first)} at step 0 and {describe(value)} at "
                    f"step {step}; y keeps its shapes, dtypes and devices"
                )
        return outputs, tuple(new_states)
