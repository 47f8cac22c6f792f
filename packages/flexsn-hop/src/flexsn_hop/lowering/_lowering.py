"""Which code a compiled scan becomes, and how another package offers its own."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from flexsn_hop._layout import BackwardLayout, ScanLayout
from flexsn_hop.callers import warn
from flexsn_hop.errors import LoweringError

__all__ = [
    "LOWERING_VARIABLE",
    "NO_KERNELS",
    "Candidates",
    "ScanLowering",
    "checkpoint_interval",
    "code_version",
    "find_lowerings",
    "naming",
    "reasons",
    "register_scan_lowering",
    "requested_lowering",
    "scan_lowerings",
]

LOWERING_VARIABLE = "FLEXSN_HOP_LOWERING"
LOWERINGS = ("auto", "kernel", "compiled_loop", "scan", "while_loop", "loop")

KERNELS = "flexsn_runtime"
"""The lowering that is tried first, and the package that has it: the order of imports decides nothing."""

NO_KERNELS = "flexsn-runtime, which has kernels, is not installed"

CODE_VERSION = 8
"""Raised whenever the code that this package makes of a scan, or of its gradient, changes.

It stands in the operator's arguments, and so in the key by which Inductor finds compiled code on
disk; the key does not contain the lowering itself.
"""


class ScanLowering(Protocol):
    """Interface that a package with kernels registers, so that compiled scans become its launches.

    ``forward`` and ``backward`` are not run: Inductor traces them with fake tensors when it lowers
    the operator, and the calls that they make, Triton launches through ``torch.library.wrap_triton``
    among them, become part of its graph. They must not depend on the values of tensors, nor on the
    number of steps being a plain int: it may be symbolic. Strides are those that the tensors will
    have. They may look at the shape and dtype alone of an initial state that ``layout.zero_states``
    says to be zeros: its memory is not written. A ``NotImplementedError`` says that there can be no
    kernels for this core: the next lowering is tried. If none is left, the scan becomes the loop, with
    a warning that has the reasons of all, or is refused, if ``"kernel"`` is requested.

    Inductor lowers the two one by one. So a backward may get checkpoints at the interval that another
    lowering chose, which was tried first and could not have the core.
    """

    @property
    def name(self) -> str:
        """A name for messages, such as ``"flexsn_runtime"``."""
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


@dataclass(frozen=True, slots=True)
class _Registration:
    lowering: ScanLowering
    before: str | None


@functools.cache
def _installed_kernels() -> ScanLowering | None:
    """The kernels of flexsn-runtime, where that is installed: it need not be imported."""
    if importlib.util.find_spec(KERNELS) is None:
        return None
    try:
        kernels: ScanLowering = importlib.import_module(KERNELS).KernelLowering()
    except Exception as error:
        warn(
            f"compiled scans run as loops, since {KERNELS} is installed and cannot be imported: "
            f"{type(error).__name__}: {error}"
        )
        return None
    return kernels


_registered: list[_Registration | None] = [None]
"""In the order of registration; None stands for the kernels that are installed."""


def _registrations() -> list[_Registration]:
    """The registered lowerings, and the installed kernels unless some of their name are registered."""
    found = [entry for entry in _registered if entry is not None]
    if None in _registered and all(entry.lowering.name != KERNELS for entry in found):
        kernels = _installed_kernels()
        if kernels is not None:
            found.append(_Registration(kernels, None))
    return found


def register_scan_lowering(lowering: ScanLowering, *, before: str | None = None) -> Callable[[], None]:
    """Offer a lowering for compiled scans, after those that are registered. Returns the undo.

    A scan becomes what the first lowering makes of it that can. Their order does not depend on imports:
    ``"flexsn_runtime"``, the kernels of flexsn-runtime, which is found where it is installed; then the
    others in the order of registration; and in front of one of these, those that name it as ``before``.
    :func:`scan_lowerings` gives the order, and why each cannot have a scan.

    Args:
        lowering: The lowering; its name is its own.
        before: The name of a lowering, here or yet to come, that this one goes in front of.

    Raises:
        LoweringError: There is a lowering of that name, or it is that of the kernels, and ``lowering`` is
            not theirs (a ``ValueError``).
        TypeError: ``lowering`` is no object with all that :class:`ScanLowering` has.

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
    _check_lowering(lowering)
    if lowering.name in (*LOWERINGS, *(entry.lowering.name for entry in _registered if entry is not None)):
        raise LoweringError(
            f"there is a lowering {lowering.name!r}: give yours another name, or undo the registration of the other"
        )
    if lowering.name == KERNELS and not _is_of_package(lowering, KERNELS):
        raise LoweringError(
            f"{KERNELS!r} is the name of the kernels of that package: give your lowering another name, and register it "
            f"with before={KERNELS!r} if it is to be asked first"
        )
    entry = _Registration(lowering, before)
    _registered.append(entry)

    def undo() -> None:
        if entry in _registered:
            _registered.remove(entry)

    return undo


def _check_lowering(lowering: object) -> None:
    if isinstance(lowering, type):
        raise TypeError(f"a lowering is an object, and not a class: register {lowering.__name__}()")
    wanted = ("name", "version", "checkpoint_interval", "why_unavailable", "forward", "backward")
    missing = [name for name in wanted if not hasattr(lowering, name)]
    if missing:
        raise TypeError(
            f"a {type(lowering).__name__} is no lowering: it has no {', no '.join(missing)}; see ScanLowering"
        )


def _is_of_package(lowering: object, package: str) -> bool:
    return any(base.__module__.partition(".")[0] == package for base in type(lowering).__mro__)


def scan_lowerings(*flat_args: torch.Tensor) -> dict[str, str | None]:
    """The registered lowerings in the order in which they are tried, and why each cannot have a scan.

    Args:
        *flat_args: What the scan would take: ``[*input_seqs, *init_states, *lifted]``. Without any, the
            reasons are None.

    Returns:
        For each lowering by name, why it cannot lower a scan of tensors like these; None: it can, unless
        it finds something in the core.

    Example:
        >>> from flexsn_hop import scan_lowerings
        >>> isinstance(scan_lowerings(), dict)
        True
    """
    return {lowering.name: _why_unavailable(lowering, flat_args) if flat_args else None for lowering in _in_order()}


def _why_unavailable(lowering: ScanLowering, flat_args: Sequence[Any]) -> str | None:
    with naming(lowering, "why_unavailable"):
        return lowering.why_unavailable(flat_args)


def checkpoint_interval(lowering: ScanLowering, core: torch.fx.GraphModule, primals: Sequence[Any]) -> int:
    """The interval between checkpoints that a lowering sets.

    Raises:
        LoweringError: It is no interval: without checkpoints, the gradient would be another one.
    """
    with naming(lowering, "checkpoint_interval"):
        interval = lowering.checkpoint_interval(core, primals)
    if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
        raise LoweringError(
            f"checkpoint_interval of the lowering {lowering.name!r} gave {interval!r}; it must give an int, 1 or more"
        )
    return interval


@contextlib.contextmanager
def naming(lowering: ScanLowering, what: str) -> Iterator[None]:
    """Let an error of a lowering's own say whose it is. That it cannot have a core is none.

    Raises:
        LoweringError: Anything but a ``NotImplementedError`` was raised.
    """
    try:
        yield
    except (NotImplementedError, LoweringError):
        raise
    except Exception as error:
        raise LoweringError(
            f"{what} of the lowering {lowering.name!r} failed with {type(error).__name__}: {error}; "
            f"lowering='loop', or {LOWERING_VARIABLE}=loop, does without it"
        ) from error


def _in_order() -> list[ScanLowering]:
    """The registered lowerings, in the order in which they are tried."""
    registrations = _registrations()
    order = [entry.lowering for entry in registrations if entry.before is None]
    order.sort(key=lambda lowering: lowering.name != KERNELS)  # stable
    waiting = [entry for entry in registrations if entry.before is not None]
    while waiting:
        names = [lowering.name for lowering in order]
        entry = next((entry for entry in waiting if entry.before in names), waiting[0])
        waiting.remove(entry)
        place = names.index(entry.before) if entry.before in names else len(order)
        order.insert(place, entry.lowering)
    return order


def requested_lowering(argument: str | None) -> str:
    """The lowering requested by argument, else by ``FLEXSN_HOP_LOWERING``, else ``"auto"``.

    Raises:
        LoweringError: There is no lowering of that name.
    """
    origin = "the argument lowering" if argument else f"the environment's {LOWERING_VARIABLE}"
    name = argument or os.environ.get(LOWERING_VARIABLE) or "auto"
    if name in LOWERINGS:
        return name
    known = (*LOWERINGS, *(lowering.name for lowering in _in_order()))
    if name not in known:
        raise LoweringError(f"{origin} is {name!r}; it must be one of {', '.join(known)}")
    return name


@dataclass(frozen=True, slots=True)
class Candidates:
    """The registered lowerings that can have a scan, the first one first, and why the others cannot.

    Attributes:
        asked: The requested lowering: ``"auto"``, ``"kernel"``, ``"loop"`` or a registered name.
        lowerings: Those that can; none means the loop.
        refused: Why, by name, for those that cannot.
    """

    asked: str
    lowerings: Sequence[ScanLowering]
    refused: dict[str, str]

    @property
    def may_be_the_loop(self) -> bool:
        """True if the loop may replace the requested lowering."""
        return self.asked in ("auto", "compiled_loop", "loop")


def reasons(refused: dict[str, str]) -> str:
    """Why lowerings cannot have a scan, in words; of one alone without its name."""
    if len(refused) == 1:
        return next(iter(refused.values()))
    return "; ".join(f"{name}: {why}" for name, why in refused.items())


def find_lowerings(name: str, flat_args: Sequence[Any]) -> Candidates:
    """The registered lowerings to use for ``name``.

    Raises:
        LoweringError: One is requested, and none can have arguments like these.
    """
    if name in ("scan", "while_loop"):
        raise LoweringError(
            f"the lowering {name!r} takes the place of flex_sn_scan when Dynamo captures it; a graph "
            "that already holds the operator, and `scan`, can have auto, kernel or loop"
        )
    able, refused = [], {}
    for lowering in _in_order():
        if name not in ("auto", "kernel", lowering.name):
            continue
        why = _why_unavailable(lowering, flat_args)
        if why is None:
            able.append(lowering)
        else:
            refused[lowering.name] = why
    found = Candidates(name, able, refused)
    if not able and not found.may_be_the_loop:
        why = reasons(refused) or f"none is registered, and {NO_KERNELS}"
        raise LoweringError(f"the lowering {name!r} is not available: {why}. Use 'auto' or 'loop' instead")
    return found


def code_version() -> str:
    """Versions that code generated for a scan depends on besides its graph."""
    return "+".join([str(CODE_VERSION), *(f"{lowering.name}:{lowering.version}" for lowering in _in_order())])
