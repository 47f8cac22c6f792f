"""Tracks the origins of the tensors of one run of a core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from flexsn_graph._location import SourceLocation, user_location
from flexsn_graph._torch_private import FakeTensor, TorchDispatchMode
from flexsn_graph._torch_private_ops import pytree
from flexsn_graph.reads import Origin
from flexsn_graph.tracing._refusals import storage_of


class Origins:
    """Records which memory in one run depends on the step's arguments, and which line of the core allocated it.

    Args:
        arguments: arguments of the step, or incoming gradients.
    """

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        self._of_step = {storage_of(t) for t in arguments}
        self._computed_at: dict[int, SourceLocation | None] = {}
        self._owners: list[Any] = []  # memory kept alive, so that no other memory gets its id in the meantime

    def follow(self, arguments: Sequence[Any], results: Any, location: SourceLocation | None) -> None:
        """Records an operation.

        Args:
            arguments: tensors and numbers that are arguments of the operation, flattened.
            results: results of the operation, not flattened.
        """
        of_step = any(isinstance(a, Tensor) and storage_of(a) in self._of_step for a in arguments)
        for result in pytree.tree_leaves(results):
            if isinstance(result, FakeTensor):
                storage = storage_of(result)
                self._owners.append(result.untyped_storage())
                self._computed_at.setdefault(storage, location)
                if of_step:
                    self._of_step.add(storage)

    def origin(self, is_traced: Callable[[Tensor], bool], is_captured: Callable[[Tensor], bool]) -> Origin:
        """Functions that tell where a tensor of this run comes from. For the arguments, see `Origin`."""
        return Origin(
            is_traced,
            is_derived=lambda t: storage_of(t) not in self._of_step,
            is_captured=is_captured,
            location=lambda t: self._computed_at.get(storage_of(t)),
        )


class Following(TorchDispatchMode):
    """A dispatch mode that records all operations in `origins`."""

    def __init__(self, origins: Origins) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._origins = origins

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        self._origins.follow(pytree.tree_leaves((args, kwargs)), results, user_location())
        return results
