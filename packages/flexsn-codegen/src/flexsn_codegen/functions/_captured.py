"""Values that a function reads in addition to its arguments, fetched at each call and recorded in each trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from flexsn_codegen.errors import AutogradError
from flexsn_graph import TRACE_LOCK
from flexsn_graph.reads import Reads


class Captured:
    """All values that a function reads in addition to its arguments.

    All traces of the function share this object. Traces for other numbers, and traces of gradients, may read more
    values.

    Args:
        fn: the function.
        name: name of the function, for messages.

    Attributes:
        reads: the values that the function reads, and the attributes, globals and closures that contain them.
        tensors: the captured tensors that the next trace uses.
        where: the file and the first line of the function, or `None` if the function is not written in Python.
    """

    def __init__(self, fn: Callable[..., Any], name: str) -> None:
        self.reads = Reads(fn)
        self.tensors: list[Tensor] = []
        self._name = name
        code = getattr(getattr(fn, "forward", fn), "__code__", None)
        self.where: tuple[str, int] | None = (code.co_filename, code.co_firstlineno) if code is not None else None

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Stores the values that the function has read, so that `fetch` can compare later values with them.

        Args:
            tensors: the captured tensors that the function's operations have used.
        """
        self.tensors[:] = tensors
        self.reads.settle()
        self.reads.keep(tensors)

    def fetch(self) -> tuple[Tensor, ...] | None:
        """The current captured tensors. `None` if any other value has changed, so that the traces are invalid."""
        result = self.reads.fetch()
        if result is not None:
            self.tensors[:] = result  # a trace for other arguments uses the current tensors
        return result

    @contextmanager
    def traced(self) -> Iterator[Reads]:
        """Context manager for a trace, which records the values that the function reads.

        Raises:
            AutogradError: a value has changed since the forward to which the trace belongs.
        """
        with TRACE_LOCK:
            if self.fetch() is None:
                names = ", ".join(sorted({place.name for place in self.reads.changed()}))
                raise AutogradError(
                    f"{self._name} reads {names}, which has changed between a forward and its backward, or while "
                    "the function was traced. The kernel of the gradient does not exist yet, and would belong to "
                    "another function. Change the value after the backward, or pass it as an argument."
                )
            yield self.reads
            self.reads.keep_more()
