"""A compiled kernel and its calling convention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flexsn_graph import Port


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A kernel, its calling convention, and the compiler options for it.

    Attributes:
        function: object that the language's compiler returned.
        params: ports of the tensors that the kernel takes.
        sizes: names of the kernel's integer arguments.
        options: options of the compiler.
        launched_by: function that takes the kernel, sizes, a configuration and a device, and returns a launch; `None`
            if `launch` is not used for the kernel.
    """

    function: Any
    params: tuple[Port, ...]
    sizes: tuple[str, ...]
    options: Mapping[str, bool]
    launched_by: Callable[..., Any] | None = None
