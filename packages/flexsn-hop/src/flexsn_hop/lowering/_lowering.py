"""Registers the lowerings of other packages, and selects the lowerings for a compiled scan."""

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
"""The name of flexsn-runtime's lowering and of its package.

In any order of imports, this lowering is tried first, unless another lowering is registered before it.
"""

NO_KERNELS = "flexsn-runtime, which has kernels, is not installed"

CODE_VERSION = 9
"""A version number, which must be increased whenever this package generates other code for a scan or its gradient.

The number is part of the operator's arguments. Inductor's keys for compiled code on disk thus contain the number. The
keys do not contain the lowering itself.
"""


class ScanLowering(Protocol):
    """Interface of an object with which a package replaces compiled scans by launches of its kernels.

    Inductor traces ``forward`` and ``backward`` with fake tensors when it lowers the operator. Their tensor operations,
    and Triton launches through ``torch.library.wrap_triton``, become part of Inductor's graph. These methods must not
    depend on the values of tensors. The number of steps may be symbolic, so the methods must not require an int. The
    strides of the fake tensors are the strides of the tensors when the graph runs. If ``layout.zero_states`` is True
    for an initial state, the methods may only use its shape and dtype, because the memory of this state is not written.
    A method raises ``NotImplementedError`` if no kernels exist for this core. In that case, the next lowering is tried.
    If no lowering remains, the scan becomes the loop with a warning that lists all reasons, or an error is raised if
    ``"kernel"`` or the name of a registered lowering is requested.

    Inductor lowers the forward operator and the backward operator separately. A backward may therefore receive
    checkpoints at the interval of another lowering, which was tried first and rejected the core.
    """

    @property
    def name(self) -> str:
        """The name of the lowering, such as ``"flexsn_runtime"``."""
        ...

    @property
    def version(self) -> str:
        """The version of the generated code.

        The version must change whenever this code changes, because the version is part of the keys of caches on disk.
        """
        ...

    def checkpoint_interval(self, core: torch.fx.GraphModule, primals: Sequence[Any]) -> int:
        """Returns the interval K of the checkpoints that a training forward saves, at least 1. See :class:`ScanLayout`.

        ``core`` is the captured graph of one step. ``primals`` contains the input sequences and states, which may be
        fake.
        """
        ...

    def why_unavailable(self, flat_args: Sequence[Any]) -> str | None:
        """Returns the reason why the lowering cannot lower a scan of arguments like ``flat_args``, otherwise None.

        ``flat_args`` may be fake.
        """
        ...

    def forward(
        self, core: torch.fx.GraphModule, layout: ScanLayout, flat_args: Sequence[Any]
    ) -> Sequence[torch.Tensor]:
        """Computes the forward operator. ``core`` is the ATen graph of one step.

        ``layout`` defines the results. The results must have the memory formats of the results of :func:`eager_scan`,
        and must not share memory. Rows of checkpoints are adjacent, and each row has the format of the state.
        """
        ...

    def backward(
        self,
        core: torch.fx.GraphModule,
        vjp: torch.fx.GraphModule,
        layout: BackwardLayout,
        args: Sequence[Any],
    ) -> Sequence[torch.Tensor]:
        """Computes the backward operator. ``vjp`` is the ATen graph of the step's VJP.

        ``vjp`` takes the arguments of one step (inputs, states, lifted), the present output gradients, and the
        cotangents of the active new states, and returns the gradients of the inputs that need a gradient, of the active
        states, and of the lifted tensors that need a gradient.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Registration:
    lowering: ScanLowering
    before: str | None


@functools.cache
def _installed_kernels() -> ScanLowering | None:
    """Imports the lowering of flexsn-runtime. Returns None if the package is not installed or cannot be imported."""
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
"""Registrations in order. None stands for the lowering of flexsn-runtime, if it is installed."""


def _list_registrations() -> list[_Registration]:
    """Returns the registered lowerings, and the installed kernels unless a lowering with their name is registered."""
    results = [entry for entry in _registered if entry is not None]
    if None in _registered and all(entry.lowering.name != KERNELS for entry in results):
        kernels = _installed_kernels()
        if kernels is not None:
            results.append(_Registration(kernels, None))
    return results


def register_scan_lowering(lowering: ScanLowering, *, before: str | None = None) -> Callable[[], None]:
    """Registers a lowering for compiled scans, after the existing lowerings.

    The first lowering that can lower a scan is used. The order of lowerings does not depend on imports. If
    flexsn-runtime is installed, the first lowering is ``"flexsn_runtime"``, which launches its kernels. The other
    lowerings follow in the order of registration. A lowering that is registered with ``before`` precedes the lowering
    of that name. :func:`scan_lowerings` lists the order, and the reasons why lowerings cannot lower a scan.

    Args:
        lowering: The lowering. Its name must be unique.
        before: The name of a lowering, registered now or later, that ``lowering`` precedes.

    Returns:
        A function without arguments that removes the lowering.

    Raises:
        LoweringError: Another lowering has this name, or the name is ``"flexsn_runtime"`` and ``lowering`` does not
            belong to flexsn-runtime (a ``ValueError``).
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
            f"the name {lowering.name!r} belongs to another lowering: choose another name, or undo the registration of "
            "that lowering"
        )
    if lowering.name == KERNELS and not _is_of_package(lowering, KERNELS):
        raise LoweringError(
            f"{KERNELS!r} is the name of the kernels of that package: give your lowering another name, and register it "
            f"with before={KERNELS!r} if it should be tried first"
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
    """Returns the registered lowerings in the order in which they are tried, with reasons why they cannot lower a scan.

    Args:
        *flat_args: Arguments of the scan: ``[*input_seqs, *init_states, *lifted]``. Without arguments, all
            reasons are None.

    Returns:
        A dictionary from the name of each lowering to the reason why the lowering cannot lower a scan of tensors like
        ``flat_args``. The reason is None if the lowering accepts such tensors, although it may still reject the core.

    Example:
        >>> from flexsn_hop import scan_lowerings
        >>> isinstance(scan_lowerings(), dict)
        True
    """
    return {
        lowering.name: _why_unavailable(lowering, flat_args) if flat_args else None for lowering in _sort_lowerings()
    }


def _why_unavailable(lowering: ScanLowering, flat_args: Sequence[Any]) -> str | None:
    with naming(lowering, "why_unavailable"):
        return lowering.why_unavailable(flat_args)


def checkpoint_interval(lowering: ScanLowering, core: torch.fx.GraphModule, primals: Sequence[Any]) -> int:
    """Returns the interval between checkpoints that a lowering chooses.

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
def naming(lowering: ScanLowering, method: str) -> Iterator[None]:
    """Returns a context that converts errors of a lowering to a `LoweringError` with the lowering's name.

    A ``NotImplementedError``, by which a lowering rejects a core, is not converted.

    Raises:
        LoweringError: The lowering raised another error.
    """
    try:
        yield
    except (NotImplementedError, LoweringError):
        raise
    except Exception as error:
        raise LoweringError(
            f"{method} of the lowering {lowering.name!r} failed with {type(error).__name__}: {error}; "
            f"lowering='loop', or {LOWERING_VARIABLE}=loop, avoids the lowering"
        ) from error


def _sort_lowerings() -> list[ScanLowering]:
    """Returns the registered lowerings in the order in which they are tried."""
    registrations = _list_registrations()
    order = [entry.lowering for entry in registrations if entry.before is None]
    order.sort(key=lambda lowering: lowering.name != KERNELS)  # stable
    waiting = [entry for entry in registrations if entry.before is not None]
    while waiting:
        names = [lowering.name for lowering in order]
        entry = next((entry for entry in waiting if entry.before in names), waiting[0])
        waiting.remove(entry)
        position = names.index(entry.before) if entry.before in names else len(order)
        order.insert(position, entry.lowering)
    return order


def requested_lowering(argument: str | None) -> str:
    """Returns the requested lowering: ``argument``, otherwise ``FLEXSN_HOP_LOWERING``, otherwise ``"auto"``.

    Raises:
        LoweringError: No lowering has this name.
    """
    origin = "the argument lowering" if argument else f"the environment's {LOWERING_VARIABLE}"
    name = argument or os.environ.get(LOWERING_VARIABLE) or "auto"
    if name in LOWERINGS:
        return name
    names = (*LOWERINGS, *(lowering.name for lowering in _sort_lowerings()))
    if name not in names:
        raise LoweringError(f"{origin} is {name!r}; it must be one of {', '.join(names)}")
    return name


@dataclass(frozen=True, slots=True)
class Candidates:
    """The registered lowerings that can lower a scan, in order, and the reasons why the other lowerings cannot.

    Attributes:
        requested: The requested lowering: ``"auto"``, ``"kernel"``, ``"compiled_loop"``, ``"loop"`` or a registered
            name.
        lowerings: The lowerings that can lower the scan. The list is empty only if the scan may become the loop.
        refused: The reasons why other lowerings cannot lower the scan, by name of the lowering.
    """

    requested: str
    lowerings: Sequence[ScanLowering]
    refused: dict[str, str]

    @property
    def may_be_the_loop(self) -> bool:
        """True if the loop may replace the requested lowering."""
        return self.requested in ("auto", "compiled_loop", "loop")


def reasons(refused: dict[str, str]) -> str:
    """Joins the reasons why lowerings cannot lower a scan. Omits the name of a lowering that is the only one."""
    if len(refused) == 1:
        return next(iter(refused.values()))
    return "; ".join(f"{name}: {reason}" for name, reason in refused.items())


def find_lowerings(name: str, flat_args: Sequence[Any]) -> Candidates:
    """Finds the registered lowerings that are tried if ``name`` is requested.

    Raises:
        LoweringError: The request requires kernels, and no lowering accepts arguments like these, or ``name`` is a
            lowering that only Dynamo can apply.
    """
    if name in ("scan", "while_loop"):
        raise LoweringError(
            f"the lowering {name!r} replaces flex_sn_scan when Dynamo captures it; a graph "
            "that already contains the operator, and `scan`, accept auto, kernel and loop"
        )
    available, refused = [], {}
    for lowering in _sort_lowerings():
        if name not in ("auto", "kernel", lowering.name):
            continue
        reason = _why_unavailable(lowering, flat_args)
        if reason is None:
            available.append(lowering)
        else:
            refused[lowering.name] = reason
    result = Candidates(name, available, refused)
    if not available and not result.may_be_the_loop:
        reason = reasons(refused) or f"no lowering is registered, and {NO_KERNELS}"
        raise LoweringError(f"the lowering {name!r} is not available: {reason}. Use 'auto' or 'loop' instead")
    return result


def code_version() -> str:
    """Returns the versions on which the code that is generated for a scan depends, in addition to its graph."""
    return "+".join([str(CODE_VERSION), *(f"{lowering.name}:{lowering.version}" for lowering in _sort_lowerings())])
