"""Selection of the code for a compiled scan, and registration of lowerings by other packages."""

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
"""The lowering that is tried first, and the name of its package. The order of imports does not matter."""

NO_KERNELS = "flexsn-runtime, which has kernels, is not installed"

CODE_VERSION = 9
"""A version number, increased whenever the code that this package generates for a scan or its gradient changes.

The number is among the operator's arguments, and thus in the key by which Inductor finds compiled code on
disk. This key does not contain the lowering itself.
"""


class ScanLowering(Protocol):
    """Interface that a package with kernels registers, so that compiled scans become its launches.

    ``forward`` and ``backward`` are not run. Inductor traces them with fake tensors when it lowers
    the operator, and all of their calls, even Triton launches through ``torch.library.wrap_triton``,
    become part of its graph. The two methods must not depend on the values of tensors. The number of steps may be
    symbolic, so the methods must not rely on a plain int. Strides are the strides that the tensors will
    have. For an initial state for which ``layout.zero_states`` is True, the methods may use only the shape and
    the dtype, because the memory of this state is not written. A ``NotImplementedError`` means that there are no
    kernels for this core. In that case, the next lowering is tried. If no lowering is left, the scan becomes the loop
    with a warning that lists all reasons, or is rejected if ``"kernel"`` is requested.

    Inductor lowers the two operators one by one. Therefore, a backward may receive checkpoints at the interval of
    another lowering, which was tried before and rejected the core.
    """

    @property
    def name(self) -> str:
        """A name for messages, such as ``"flexsn_runtime"``."""
        ...

    @property
    def version(self) -> str:
        """Version of the generated code.

        It changes whenever this code changes, and is part of the keys of caches on disk.
        """
        ...

    def checkpoint_interval(self, core: torch.fx.GraphModule, primals: Sequence[Any]) -> int:
        """K of the states that a training forward saves, at least 1. See :class:`ScanLayout`.

        ``core`` is the captured graph of one step. ``primals`` are (fake) input sequences and states.
        """
        ...

    def why_unavailable(self, flat_args: Sequence[Any]) -> str | None:
        """The reason why the lowering cannot lower a scan of (fake) arguments like ``flat_args``, otherwise None."""
        ...

    def forward(
        self, core: torch.fx.GraphModule, layout: ScanLayout, flat_args: Sequence[Any]
    ) -> Sequence[torch.Tensor]:
        """The forward operator. ``core`` is the ATen graph of one step.

        ``layout`` defines the results, which have the memory format of :func:`eager_scan` and do not share memory.
        Rows of checkpoints are adjacent, and each row has the format of the state.
        """
        ...

    def backward(
        self,
        core: torch.fx.GraphModule,
        vjp: torch.fx.GraphModule,
        layout: BackwardLayout,
        args: Sequence[Any],
    ) -> Sequence[torch.Tensor]:
        """The backward operator. ``vjp`` is the ATen graph of the step's VJP.

        ``vjp`` takes the values of one step (inputs, states, lifted), the output gradients that are
        present, and the cotangents of the active new states. It returns the gradients of the inputs
        that need a gradient, of the active states, and of the lifted tensors that need a gradient.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Registration:
    lowering: ScanLowering
    before: str | None


@functools.cache
def _installed_kernels() -> ScanLowering | None:
    """The kernels of flexsn-runtime, if this package is installed. The package need not be imported."""
    if importlib.util.find_spec(KERNELS) is None:
        return None
    try:
        kernels: ScanLowering = importlib.import_module(KERNELS).KernelLowering()
    except Exception as error:
        warn(
            f"compiled scans run as loops, because {KERNELS} is installed but cannot be imported: "
            f"{type(error).__name__}: {error}"
        )
        return None
    return kernels


_registered: list[_Registration | None] = [None]
"""Registrations in order. None represents the installed kernels."""


def _registrations() -> list[_Registration]:
    """The registered lowerings, and the installed kernels unless a lowering of the same name is registered."""
    results = [entry for entry in _registered if entry is not None]
    if None in _registered and all(entry.lowering.name != KERNELS for entry in results):
        kernels = _installed_kernels()
        if kernels is not None:
            results.append(_Registration(kernels, None))
    return results


def register_scan_lowering(lowering: ScanLowering, *, before: str | None = None) -> Callable[[], None]:
    """Registers a lowering for compiled scans after the existing lowerings. Returns a function that removes it again.

    A scan is lowered by the first lowering that can lower it. The order of lowerings does not depend on imports. The
    first lowering is ``"flexsn_runtime"``, the kernels of flexsn-runtime, which are used if they are installed. All
    others follow in the order of registration. A lowering with ``before`` precedes the lowering of this name.
    :func:`scan_lowerings` lists the order, and the reasons why lowerings cannot lower a scan.

    Args:
        lowering: The lowering. Its name must be unique.
        before: The name of a lowering, registered now or later, that ``lowering`` precedes.

    Raises:
        LoweringError: There is already a lowering of this name, or the name is that of the kernels and ``lowering``
            does not belong to them (a ``ValueError``).
        TypeError: ``lowering`` is not an object with all attributes of :class:`ScanLowering`.

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
            f"with before={KERNELS!r} if it is to be tried first"
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
    requested = ("name", "version", "checkpoint_interval", "why_unavailable", "forward", "backward")
    missing = [name for name in requested if not hasattr(lowering, name)]
    if missing:
        raise TypeError(
            f"a {type(lowering).__name__} is not a lowering: it has no {', no '.join(missing)}; see ScanLowering"
        )


def _is_of_package(lowering: object, package: str) -> bool:
    return any(base.__module__.partition(".")[0] == package for base in type(lowering).__mro__)


def scan_lowerings(*flat_args: torch.Tensor) -> dict[str, str | None]:
    """The registered lowerings in the order in which they are tried, each with the reason why it cannot lower a scan.

    Args:
        *flat_args: Arguments of the scan: ``[*input_seqs, *init_states, *lifted]``. Without arguments, all
            reasons are None.

    Returns:
        For each name of a lowering, the reason why the lowering cannot lower a scan of tensors like ``flat_args``. None
        means that it can lower such a scan, unless it rejects the core.

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
    """The interval between checkpoints that a lowering specifies.

    Raises:
        LoweringError: The interval is invalid. Without checkpoints, the gradient would be wrong.
    """
    with naming(lowering, "checkpoint_interval"):
        interval = lowering.checkpoint_interval(core, primals)
    if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
        raise LoweringError(
            f"checkpoint_interval of the lowering {lowering.name!r} returned {interval!r}; it must return an int, 1 "
            "or more"
        )
    return interval


@contextlib.contextmanager
def naming(lowering: ScanLowering, what: str) -> Iterator[None]:
    """Adds the lowering's name to its errors, except for a ``NotImplementedError``, which rejects a core.

    Raises:
        LoweringError: The lowering raised any other error.
    """
    try:
        yield
    except (NotImplementedError, LoweringError):
        raise
    except Exception as error:
        raise LoweringError(
            f"{what} of the lowering {lowering.name!r} failed with {type(error).__name__}: {error}; "
            f"lowering='loop', or {LOWERING_VARIABLE}=loop, avoids it"
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
    """The lowering that the argument or else ``FLEXSN_HOP_LOWERING`` requests, or ``"auto"``.

    Raises:
        LoweringError: There is no lowering of this name.
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
    """The registered lowerings that can lower a scan, in order, and the reasons why other lowerings cannot.

    Attributes:
        asked: The requested lowering: ``"auto"``, ``"kernel"``, ``"loop"`` or a registered name.
        lowerings: The lowerings that can lower the scan. If empty, the scan becomes the loop.
        refused: The reasons why other lowerings cannot lower the scan, by name of the lowering.
    """

    asked: str
    lowerings: Sequence[ScanLowering]
    refused: dict[str, str]

    @property
    def may_be_the_loop(self) -> bool:
        """True if the loop may replace the requested lowering."""
        return self.asked in ("auto", "compiled_loop", "loop")


def reasons(refused: dict[str, str]) -> str:
    """The reasons why lowerings cannot lower a scan, as text. A single reason has no name."""
    if len(refused) == 1:
        return next(iter(refused.values()))
    return "; ".join(f"{name}: {why}" for name, why in refused.items())


def find_lowerings(name: str, flat_args: Sequence[Any]) -> Candidates:
    """The registered lowerings to use for ``name``.

    Raises:
        LoweringError: A lowering is requested, and none accepts arguments like these.
    """
    if name in ("scan", "while_loop"):
        raise LoweringError(
            f"the lowering {name!r} replaces flex_sn_scan when Dynamo captures it; a graph "
            "that already contains the operator, and `scan`, accept auto, kernel and loop"
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
    result = Candidates(name, able, refused)
    if not able and not result.may_be_the_loop:
        why = reasons(refused) or f"none is registered, and {NO_KERNELS}"
        raise LoweringError(f"the lowering {name!r} is not available: {why}. Use 'auto' or 'loop' instead")
    return result


def code_version() -> str:
    """The versions on which code generated for a scan depends, in addition to its graph."""
    return "+".join([str(CODE_VERSION), *(f"{lowering.name}:{lowering.version}" for lowering in _in_order())])
