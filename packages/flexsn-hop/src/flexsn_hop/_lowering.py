"""Which code a compiled scan becomes, and how another package offers its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ._layout import BackwardLayout, ScanLayout
from .errors import LoweringError

__all__ = [
    "LOWERING_VARIABLE",
    "ScanLowering",
    "choose_lowering",
    "code_version",
    "register_scan_lowering",
    "requested_lowering",
]

LOWERING_VARIABLE = "FLEXSN_HOP_LOWERING"
LOWERINGS = ("auto", "kernel", "scan", "while_loop", "loop")

CODE_VERSION = 3
"""Raised whenever the code that the loop lowering generates changes.

It stands in the operator's arguments, and so in the key by which Inductor finds compiled code on
disk; the key does not contain the lowering itself.
"""


class ScanLowering(Protocol):
    """What a package with kernels registers, to have compiled scans become its launches.

    ``forward`` and ``backward`` are not run: Inductor traces them with fake tensors when it lowers
    the operator, and the calls that they make, Triton launches through ``torch.library.wrap_triton``
    among them, become part of its graph. They must not depend on the values of tensors, nor on the
    number of steps being a plain int: it may be symbolic. Strides are those that the tensors will
    have. They may look at the shape and dtype alone of an initial state that ``layout.zero_states``
    says to be zeros: nobody has written it. A ``NotImplementedError`` says that there can be no
    kernels for this core: the scan then becomes the loop, with a warning, or is refused, if
    ``"kernel"`` was asked for.
    """

    @property
    def name(self) -> str:
        """A name for messages, such as ``"triton"``."""
        ...

    @property
    def version(self) -> str:
        """Changes whenever the generated code does: it is part of the key of caches on disk."""
        ...

    def checkpoint_interval(self, core: torch.fx.GraphModule, primals: Sequence[Any]) -> int:
        """K of the states that a training forward saves; see :class:`ScanLayout`. At least 1.

        ``core`` is the captured graph of one step, ``primals`` (fake) input sequences and states.
        """
        ...

    def why_unavailable(self, flat_args: Sequence[Any]) -> str | None:
        """Why it cannot lower a scan of (fake) arguments like these; None if it can."""
        ...

    def forward(
        self, core: torch.fx.GraphModule, layout: ScanLayout, flat_args: Sequence[Any]
    ) -> Sequence[torch.Tensor]:
        """The forward operator, ``core`` being the ATen graph of one step.

        Its results, given by ``layout``, lie in memory as :func:`eager_scan` says, and share it with
        nothing. Rows of checkpoints lie like the state, one after the other.
        """
        ...

    def backward(
        self,
        core: torch.fx.GraphModule,
        vjp: torch.fx.GraphModule,
        layout: BackwardLayout,
        args: Sequence[Any],
    ) -> Sequence[torch.Tensor]:
        """The backward operator, ``vjp`` being the ATen graph of the step's VJP.

        ``vjp`` takes the values of one step (inputs, states, lifted), the output gradients that
        came, and the cotangents of the active new states; it gives the gradients of the inputs
        that need one, of the active states, and of the lifted tensors that need one.
        """
        ...


_registered: list[ScanLowering] = []


def register_scan_lowering(lowering: ScanLowering) -> Callable[[], None]:
    """Offer a lowering for compiled scans; the one registered last is used. Returns the undo.

    Example:
        >>> from flexsn_hop import register_scan_lowering
        >>> class Nowhere:
        ...     name, version = "nowhere", "1"
        ...     def checkpoint_interval(self, core, primals):
        ...         return 1
        ...     def why_unavailable(self, flat_args):
        ...         return "it is an example"
        ...     def forward(self, core, layout, flat_args): ...
        ...     def backward(self, core, vjp, layout, args): ...
        >>> undo = register_scan_lowering(Nowhere())
        >>> undo()
    """
    _registered.append(lowering)

    def undo() -> None:
        if lowering in _registered:
            _registered.remove(lowering)

    return undo


def requested_lowering(argument: str | None) -> str:
    """The lowering asked for by argument, else by ``FLEXSN_HOP_LOWERING``, else ``"auto"``.

    Raises:
        LoweringError: There is no lowering of that name.
    """
    origin = "the argument lowering" if argument else f"the environment's {LOWERING_VARIABLE}"
    name = argument or os.environ.get(LOWERING_VARIABLE) or "auto"
    if name not in LOWERINGS:
        raise LoweringError(f"{origin} is {name!r}; it must be one of {', '.join(LOWERINGS)}")
    return name


def choose_lowering(name: str, flat_args: Sequence[Any]) -> ScanLowering | None:
    """The registered lowering to use for ``name`` (``auto``, ``kernel``, ``loop``); None: the loop.

    Raises:
        LoweringError: ``kernel`` was asked for and there is none for arguments like these.
    """
    if name == "loop":
        return None
    if name not in ("auto", "kernel"):
        raise LoweringError(
            f"the lowering {name!r} takes the place of the operator when Dynamo captures it; a graph "
            "that already holds the operator can have auto, kernel or loop"
        )
    lowering = _registered[-1] if _registered else None
    why = (
        "no package has registered one (flexsn_nn does, with flexsn_runtime)"
        if lowering is None
        else lowering.why_unavailable(flat_args)
    )
    if why is None:
        return lowering
    if name == "kernel":
        raise LoweringError(f"the lowering 'kernel' is not available: {why}. Use 'auto' or 'loop' instead")
    return None


def code_version() -> str:
    """What code generated for a scan depends on besides its graph."""
    version = str(CODE_VERSION)
    if _registered:
        version += f"+{_registered[-1].name}:{_registered[-1].version}"
    return version
