"""Rewords the messages of errors in traces for `pointwise`, which has no core, step or state."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

# Longer phrases come first. Text after the first line break of a message is a location in the caller's code, and stays.
_PHRASES = (
    (r"Return it as a state instead", "Return it, and pass it to the next call"),
    (r"where the next step would find it", "where the next call would find it"),
    (
        r"Kernels only pass states from one step to the next: make it a state of the step, an argument of the core "
        "whose new value the core returns",
        "Pass it as an argument, and return its new value",
    ),
    (
        r"normal_like, uniform_like or bernoulli_like of flexsn_nn\.random, whose numbers are the same each time",
        "normal or uniform of flexsn_codegen.random, whose numbers are the same each time",
    ),
    (r"an input, a state, a captured tensor", "an argument, a captured tensor"),
    (r"in-place ops on values that the core made in the step", "in-place ops on values that {name} made"),
    (r"and pass them as an input", "and pass them as an argument"),
    (r"a step function must work on each element of the step by itself", "a kernel works on each element by itself"),
    (r"it cannot be part of a step function", "it cannot be part of a kernel"),
    (r", or before the loop, with `StepTrace\.lift`", ""),
    (r"which has to be done before the loop", "which has to be done before the call"),
    (r"the values that the loop would save", "the values that eager mode would save"),
    (r"recomputes the step", "recomputes the results"),
    (r"the step's", "the arguments'"),
    (r"in one step", "in one call"),
    (r"Return changing values as states", "Pass changing values as arguments"),
    (r"in every step", "in every call"),
    (r"outside of the core", "outside of {name}"),
    (r"[Tt]he core", "{name}"),
    (r"input sequences?", "argument"),
    (r"from step to step", "from call to call"),
    (r"of the step\b", "of the arguments"),
    (r"in the step\b", "in the call"),
)


@contextmanager
def in_words_of(name: str) -> Iterator[None]:
    """Context manager that rewords the messages of errors in the trace of a function.

    Args:
        name: the function's name.
    """
    try:
        yield
    except Exception as error:
        if error.args and isinstance(error.args[0], str) and type(error).__module__.startswith("flexsn_graph"):
            error.args = (_reword(error.args[0], name), *error.args[1:])
        raise


def _reword(message: str, name: str) -> str:
    head, line_break, location = message.partition("\n")
    for phrase, replacement in _PHRASES:
        head = re.sub(phrase, lambda _, replacement=replacement: replacement.format(name=name), head)  # type: ignore[misc]
    return head + line_break + location
