"""Records the values that a core reads in addition to its arguments, and checks that they are unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from flexsn_graph._location import SourceLocation
from flexsn_graph._torch_private import FakeTensor
from flexsn_graph.reads._guard import Guard
from flexsn_graph.reads._places import Equal, NotTwinsError, Place
from flexsn_graph.reads._recorder import Recorder
from flexsn_graph.reads._surroundings import Origin
from flexsn_graph.reads._twins import Twins
from flexsn_graph.reads._values import SCALARS

_NOTE = "tensor"  # the kind of the places that `keep` adds
_WITHOUT_NUMBERS = (bool, str, bytes, NoneType, Tensor)


class Reads:
    """All tensors and other values that a core reads in addition to its arguments.

    Parameters remain the same objects when they are updated or moved. Buffers may be replaced by other objects (by
    `module.to()`), and closure variables may be assigned again. Therefore, each tensor is identified by its place.
    Numbers, functions and objects become part of a trace. They are also recorded by their places and compared.

    Args:
        core: the step function.
        follow: True to record the values and to compare them. If False, nothing is recorded, and the tensors of the
            first trace are used.

    Attributes:
        holds: a fast check of all places. It may return False although no relevant value has changed. In that case,
            `fetch` decides.
        changed_by_core: names of values that the core itself changes each time it runs, such as a counter. Such values
            are not compared.
    """

    def __init__(self, core: Callable[..., Any], *, follow: bool = True) -> None:
        self.changed_by_core: list[str] = []
        self._core = core
        self._recorder = Recorder() if follow else None
        self._values: dict[Place, Any] = {}
        self._tensors: tuple[Tensor, ...] = ()
        self._places: list[list[Place]] = []
        self._is_complete = False
        self._properties: list[tuple[Any, ...]] = []  # the properties of each tensor when it was traced
        self._guard = Guard({})
        self.holds = self._guard.holds
        self._backward_guard = self._guard

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the values that the core reads while it runs. The trace depends on these values."""
        if self._recorder is None:
            yield
            return
        with self._recorder.recording(self._core):
            yield
        num_before = len(self._values)
        for place in self._recorder.places.values():
            if place not in self._values and place.name not in self.changed_by_core:
                self._values[place] = place.read()
        self._forget_overwritten()
        if self._is_complete and len(self._values) > num_before:
            self.keep(self._tensors)

    def restored(self) -> AbstractContextManager[None]:
        """Context of a whole trace. Afterwards, every object that the core reaches is restored, except for caches."""
        return nullcontext() if self._recorder is None else self._recorder.surroundings.trace()

    def run(self, origin: Origin) -> AbstractContextManager[None]:
        """Context of one run of the core or of its backward formulas, within `restored`.

        Raises:
            StatefulCoreError: the core stores a tensor outside of itself.
        """
        return nullcontext() if self._recorder is None else self._recorder.run(origin)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Context of a run of a core that has already run without errors in the context `run`.

        Afterwards, every object that the core reaches is restored, except for caches.
        """
        with self.restored(), self.run(_CHECKED_ORIGIN):
            yield

    @property
    def derived(self) -> list[str]:
        """Names of attributes to which the core assigns tensors that it computes from captured tensors alone."""
        return [] if self._recorder is None else list(self._recorder.surroundings.derived)

    def _forget_overwritten(self) -> None:
        """Omits values from the comparison if the core itself sets them to tensors."""
        assert self._recorder is not None
        for place in [place for place in self._values if place.name in self._recorder.overwritten]:
            self.changed_by_core.append(place.name)
            del self._values[place]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the core used, as they were at the last comparison."""
        return self._tensors

    def of_twin(self, core: Callable[..., Any]) -> Reads | None:
        """The reads of another core, found without running that core. `None` if that core would read different values.

        The result is also `None` if some reads of this core have no place, such as reads of a clock or of `id(x)`.
        """
        if not self._is_complete or self._recorder is None or self.changed_by_core or self._recorder.once:
            return None
        if self._recorder.reads_identities or self._recorder.overwritten or self.derived:
            return None
        values_read = {place: value for place, value in self._values.items() if not _is_note(place)}
        try:
            twins = Twins(self._core, core)
            values = twins.values(values_read)
            tensors = [twins.counterpart(tensor) for tensor in self._tensors]
            # The trace is valid for the recorded tensors. Tensors of the first core may have changed since the trace.
            for place, before in self._values.items():
                if _is_note(place) and place.counterpart(twins).read()[1:] != before[1:]:
                    return None
        except NotTwinsError:
            return None
        if self._properties != [_list_properties(tensor) for tensor in tensors]:
            return None
        if len({_describe_memory(tensor) for tensor in tensors}) != len(
            {_describe_memory(tensor) for tensor in self._tensors}
        ):
            return None
        result = Reads(core)
        result._values = dict(values.values())
        result.keep(tensors)
        return result

    @contextmanager
    def of_backward(self) -> Iterator[None]:
        """Context in which the backward formulas run."""
        if self._recorder is None:
            yield
            return
        self._recorder.in_backward = True
        try:
            yield
        finally:
            self._recorder.in_backward = False

    def settle(self) -> None:
        """Finds the values that the core itself changes. Call this method after the core has run again.

        If a value has changed since the first run, the core itself changes it.
        """
        for place, before in list(self._values.items()):
            if not place.same(place.read(), before):
                self.changed_by_core.append(place.name)
                del self._values[place]

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Stores the tensors that the core used. From now on, all recorded values are compared.

        Args:
            tensors: the tensors that the core's operations used.
        """
        if not self._is_complete:
            self._properties = [_list_properties(tensor) for tensor in tensors]
        self._tensors, self._is_complete = tuple(tensors), True
        index_by_id = {id(t): i for i, t in enumerate(tensors)}
        index_by_memory = {_describe_memory(t): i for i, t in enumerate(tensors)}
        known_keys = {place.key for place in self._values}
        self._places = [[] for _ in tensors]
        descriptions: list[Place] = []
        for place, value in self._values.items():
            if not isinstance(value, Tensor):
                continue
            if id(value) in index_by_id:
                self._places[index_by_id[id(value)]].append(place)
                continue
            # No operation used this object itself, but the core may have read its properties.
            description = Equal(place.name, _NOTE, _describe, value)
            if description.key not in known_keys:
                known_keys.add(description.key)
                descriptions.append(description)
            if _describe_memory(value) in index_by_memory:
                self._places[index_by_memory[_describe_memory(value)]].append(place)
        self._values |= {place: place.read() for place in descriptions}
        self._create_guards()

    def keep_more(self) -> None:
        """Also compares the values that were recorded in a second trace, except for values that the core changes.

        Call this method after the second trace.
        """
        self.settle()
        self.keep(self._tensors)

    def _create_guards(self) -> None:
        self._guard = Guard(self._values)
        self.holds = self._guard.holds
        read_backward = {place: value for place, value in self._values.items() if place.in_backward}
        self._backward_guard = Guard({p: v for p, v in read_backward.items() if not isinstance(v, Tensor)})

    def fetch(self) -> tuple[Tensor, ...] | None:
        """The current tensors at the recorded places. `None` if the core has to be traced again.

        A new trace is necessary if a value that is not a tensor has changed, if a tensor is absent, or if a tensor was
        replaced at only some of its places.
        """
        if self._guard.holds():
            return self._tensors
        changed = self.changed()
        if not changed:
            return self._tensors
        tensors = list(self._tensors)
        for i, places in enumerate(self._places):
            if changed.keys().isdisjoint(places):
                continue
            values = [place.read() for place in places]
            if any(self._values[place] is not self._tensors[i] for place in places):
                return None  # one tensor under two names, such as `w` and `w.data`
            if not isinstance(values[0], Tensor) or any(other is not values[0] for other in values[1:]):
                return None
            tensors[i] = values[0]
        tensor_places = {place for places in self._places for place in places}
        if any(place not in tensor_places for place in changed):
            return None
        self._tensors = tuple(tensors)
        for place, current in changed.items():
            self._values[place] = current
            self._guard.expect(place, current)
        return self._tensors

    def changed(self) -> dict[Place, Any]:
        """Returns the current value of each place whose value differs from the recorded value."""
        return self._guard.changed()

    def places(self) -> list[Place]:
        """All places that are compared."""
        return list(self._values)

    def has_other_numbers(self) -> bool:
        """True if a changed value can contain numbers: the value is neither a flag nor a text nor a tensor."""
        return any(not isinstance(value, _WITHOUT_NUMBERS) for value in self.changed().values())

    def holds_for_backward(self) -> bool:
        """True if the values that backward formulas read are unchanged, except for tensors, which are not compared."""
        return self._backward_guard.holds()

    @property
    def reads_for_backward(self) -> bool:
        """True if backward formulas read any value that may change and is not a tensor."""
        return self._backward_guard.watches

    def changed_for_backward(self) -> list[str]:
        """Names of values that backward formulas read and that have changed, except for tensors."""
        return [] if self._backward_guard.holds() else [place.name for place in self._backward_guard.changed()]

    def constants(self) -> dict[str, Any]:
        """Numbers, flags and texts that have become part of the trace, by name."""
        results = {}
        for place, value in self._values.items():
            if isinstance(value, SCALARS) and value is not None and not place.name.startswith("__"):
                results[place.name] = value
        return results

    def once(self) -> dict[str, SourceLocation | None]:
        """Names of values that were read but are not compared, such as a clock, each with the line of the read."""
        return {} if self._recorder is None else dict(self._recorder.once)

    def note(self, name: str, location: SourceLocation | None) -> None:
        """Records the name of a value that is read but not compared."""
        if self._recorder is not None:
            self._recorder.once.setdefault(name, location)

    def names(self) -> dict[str, Tensor]:
        """The tensors that were read, by name."""
        return {place.name: value for place, value in self._values.items() if isinstance(value, Tensor)}


def _is_note(place: Place) -> bool:
    return isinstance(place, Equal) and place.kind == _NOTE


_CHECKED_ORIGIN = Origin(lambda t: isinstance(t, FakeTensor), lambda t: True, lambda t: False, lambda t: None)


def _describe_memory(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _list_properties(tensor: Tensor) -> tuple[Any, ...]:
    return (*_describe_memory(tensor)[1:], tensor.requires_grad, tensor.is_leaf)


def _describe(tensor: Tensor) -> tuple[Any, ...]:
    return (*_describe_memory(tensor), tensor.requires_grad)
