"""Restores the objects that a core can write to. A core that stores tensors in such objects is refused."""

from __future__ import annotations

import dis
import re
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import Tensor

from flexsn_graph._location import SourceLocation
from flexsn_graph._torch_private import FakeTensor
from flexsn_graph.errors import StatefulCoreError
from flexsn_graph.reads._code import names_of
from flexsn_graph.reads._stores import Attributes, Store, Values, stores_of
from flexsn_graph.reads._values import MISSING

# Names by which a core can write to attributes whose names are not in its code.
_INDIRECT_WRITES = frozenset(
    {"setattr", "delattr", "__setattr__", "__delattr__", "__dict__", "vars", "globals", "exec"}
)
_STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_NAME", "DELETE_ATTR")
_LAST_NAME = re.compile(r"[^\W\d]\w*(?=[^\w]*$)")


@dataclass(frozen=True, slots=True)
class Origin:
    """Properties of the tensors in one run of the core.

    Attributes:
        is_traced: True if the tensor belongs to the trace and therefore has no data.
        is_derived: True if a traced tensor was computed from captured tensors alone.
        is_captured: True if an operation has read this tensor of the user.
        location: the user's line that computed a traced tensor.
    """

    is_traced: Callable[[Tensor], bool]
    is_derived: Callable[[Tensor], bool]
    is_captured: Callable[[Tensor], bool]
    location: Callable[[Tensor], SourceLocation | None]


class Surroundings:
    """The objects that a core reaches, and their snapshots.

    An object is registered before the core can use it. After each run of the core, traced tensors are removed from all
    objects. After the whole trace, all objects except caches are restored.

    If other threads run, they may write to these objects. In that case, attributes and variables whose names are not in
    the core's own code are not restored, unless the code can write to them indirectly, as by `setattr`.

    Attributes:
        derived: names of attributes that the core sets to tensors computed from captured tensors alone, as a forward
            pre-hook of `torch.nn.utils.prune` does.
    """

    def __init__(self) -> None:
        self.derived: dict[str, None] = {}
        self._stores: dict[Hashable, Store] = {}
        self._owners: list[Any] = []  # objects kept alive, because keys contain their ids
        self._before_trace: dict[Hashable, Values] | None = None
        self._before_run: dict[Hashable, Values] | None = None
        self._read_first: set[tuple[Hashable, str]] = set()
        self._codes: dict[CodeType, None] = {}

    def register(self, value: Any, name: str) -> None:
        """Registers an object that the core is about to use."""
        if not isinstance(value, FakeTensor):
            for key, store in stores_of(value, name):
                self._add(key, store, value)

    def register_content(self, container: Any, name: str) -> None:
        """Registers a container, unless it contains the attributes of a registered object."""
        if ("attributes", id(container)) not in self._stores:
            self.register(container, name)

    def register_code(self, code: CodeType, variables: dict[str, Any]) -> None:
        """Registers a user's function that is about to run, and its global variables."""
        self._codes[code] = None
        self._add(("attributes", id(variables)), Attributes("", variables), variables)

    def add(self, key: Hashable, store: Store, owner: Any) -> None:
        """Registers a store, and keeps the object to which it belongs alive."""
        self._add(key, store, owner)

    def note_read(self, key: Hashable, name: str) -> None:
        """Registers that an attribute is about to be read.

        The read counts only if the core has not set the attribute in this run.
        """
        before = (self._before_run or {}).get(key)
        if before is not None and self._stores[key].take().get(name, MISSING) is before.get(name, MISSING):
            self._read_first.add((key, name))

    def _add(self, key: Hashable, store: Store, owner: Any) -> None:
        if key in self._stores:
            return
        self._stores[key] = store
        self._owners.append(owner)
        snapshot = store.take()
        for before in (self._before_trace, self._before_run):
            if before is not None:
                before[key] = snapshot

    @contextmanager
    def trace(self) -> Iterator[None]:
        """Context of a trace. Afterwards, all objects except caches are restored to their state before the trace."""
        if self._before_trace is not None:
            yield
            return
        self._before_trace = self._take_snapshots()
        try:
            yield
        finally:
            before, self._before_trace = self._before_trace, None
            is_chosen = self._make_filter()
            for key, values in before.items():
                if not self._stores[key].lasting:
                    self._stores[key].restore(values, is_chosen)

    def begin_run(self) -> None:
        """Takes a snapshot before the core or its backward formulas run."""
        self._before_run = self._take_snapshots()
        self._read_first.clear()

    def _take_snapshots(self) -> dict[Hashable, Values]:
        return {key: store.take() for key, store in self._stores.items()}

    def _make_filter(self) -> Callable[[Any, Any], bool]:
        names = set().union(*(names_of(code).attributes for code in self._codes))
        variables = set().union(*(names_of(code).variables for code in self._codes))
        restores_all = threading.active_count() == 1 or not _INDIRECT_WRITES.isdisjoint(names | variables)
        return lambda key, present: restores_all or not isinstance(key, str) or not key or key in names

    def end_run(self, origin: Origin) -> StatefulCoreError | None:
        """Removes traced tensors from all objects.

        Returns the error for the first stored tensor that the core must not store, or `None`.
        """
        before, self._before_run = self._before_run or {}, None
        refusal: StatefulCoreError | None = None
        for key, values in before.items():
            store = self._stores[key]
            stored_names: set[Any] = set()
            for name, present in store.take().items():
                if present is values.get(name, MISSING):
                    continue
                tensor = None if present is MISSING else store.find_tensor(name, present, origin.is_traced)
                if tensor is None:
                    continue
                stored_names.add(name)
                if self._is_derived(key, name, present, values.get(name, MISSING), origin):
                    self.derived[store.name_of(name)] = None
                elif refusal is None:
                    refusal = self._refusal(store.name_of(name), tensor, origin)
            if stored_names:
                store.restore(values, lambda name, present, stored_names=stored_names: name in stored_names)  # type: ignore[misc]
        return refusal

    def _is_derived(self, key: Hashable, name: Any, present: Any, earlier: Any, origin: Origin) -> bool:
        if not self._stores[key].watched or not isinstance(present, Tensor) or (key, name) in self._read_first:
            return False
        return origin.is_derived(present) and not (isinstance(earlier, Tensor) and origin.is_captured(earlier))

    def _refusal(self, name: str, tensor: Tensor, origin: Origin) -> StatefulCoreError:
        return StatefulCoreError(
            f"the core keeps a tensor in {name}, where the next step would find it. Kernels only pass states from one "
            "step to the next: make it a state of the step, an argument of the core whose new value the core returns.",
            "state",
            self._find_line(name) or origin.location(tensor),
        )

    def _find_line(self, name: str) -> SourceLocation | None:
        """The user's line that writes to a name. If there is none, the last line that contains the name, or `None`."""
        last = _LAST_NAME.search(name.split("[")[0])
        result: SourceLocation | None = None
        for code in self._codes if last is not None else ():
            line = code.co_firstlineno
            for instruction in dis.get_instructions(code):
                positions = instruction.positions
                line = (positions.lineno if positions is not None else None) or line
                if instruction.argval == last[0]:  # type: ignore[index]
                    location = SourceLocation(code.co_filename, line, code.co_name)
                    if instruction.opname in _STORES:
                        return location
                    result = location
        return result
