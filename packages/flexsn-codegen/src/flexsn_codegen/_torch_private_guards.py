"""Guards of the graph that Dynamo records: the conditions under which the graph is valid for another call.

While Dynamo records, it runs functions that are marked as constant. These functions see the state of the caller's
objects before the recorded code, and Dynamo does not record what the functions read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from flexsn_graph.reads import Place
from flexsn_graph.versions import expect, needed

_STALE = "a compiled graph would miss changes of values that a pointwise function reads"
expect("torch._guards", ["TracingContext", "TracingContext.get", "Guard"], _STALE)
expect("torch._dynamo.source", ["GlobalStateSource"], _STALE)
expect("torch._dynamo.symbolic_convert", ["InstructionTranslator", "InstructionTranslator.current_tx"], _STALE)
expect("torch._dynamo.side_effects", ["SideEffects.id_to_variable", "SideEffects.is_modified"], _STALE)
expect("torch._dynamo.exc", ["Unsupported"], _STALE)


def records_a_graph() -> bool:
    """True while Dynamo records a graph. This includes the time in which Dynamo runs functions marked by `constant`."""
    return "torch._dynamo.symbolic_convert" in sys.modules and _get_translator() is not None


def _get_translator() -> Any:
    try:
        return needed("torch._dynamo.symbolic_convert", "InstructionTranslator", _STALE).current_tx()
    except AttributeError:  # the translator is a thread-local variable, which only exists during a recording
        return None


def recompile_unless(holds: Callable[[], bool], condition: str) -> None:
    """Restricts the graph that is being recorded to calls for which `holds()` returns True.

    Args:
        holds: a function that is called before each call of the graph. The graph keeps this function alive.
        condition: a description of the condition for the logs of recompilations.
    """

    def create(builder: Any, guard: Any) -> None:
        builder.guard_manager.root.add_lambda_guard(lambda _: holds(), [condition], guard.user_stack)

    source = needed("torch._dynamo.source", "GlobalStateSource", _STALE)()
    guard = needed("torch._guards", "Guard", _STALE)(source, create)
    needed("torch._guards", "TracingContext", _STALE).get().guards_context.dynamo_guards.add(guard)


def written_before(places: Iterable[Place]) -> list[str]:
    """Names of the places to which the recorded code has written before the call that is being recorded.

    Dynamo performs these writes after the graph has run, so the caller's objects do not have the new values yet.
    """
    effects = _get_translator().output.side_effects
    written: dict[int, set[str] | None] = {}
    variables: set[str] = set()
    for identity, variable in list(effects.id_to_variable.items()):
        if not effects.is_modified(variable):
            continue
        names = effects.store_attr_mutations.get(variable)
        if type(variable).__name__ == "NewGlobalVariable":
            variables.update(names or ())
            continue
        owner = getattr(variable, "value", None)
        holders = [owner, *(getattr(owner, d, None) for d in ("__dict__", "_parameters", "_buffers", "_modules"))]
        for key in (identity, *(id(holder) for holder in holders if holder is not None)):
            before = written.get(key, set())
            written[key] = None if names is None or before is None else before | set(names)
    results = []
    for place in places:
        owner, name = place.owner
        names = written.get(id(owner), set())
        is_global = isinstance(owner, dict) and "__name__" in owner and name in variables
        if names is None or is_global or (names and (name is None or name in names)):
            results.append(place.name)
    return results


def leave_graph(reason: str) -> None:
    """Ends the recorded graph, so that the call runs outside of the graph. With `fullgraph=True`, this is an error."""
    raise needed("torch._dynamo.exc", "Unsupported", _STALE)(reason, "A pointwise function reads a changed value")
