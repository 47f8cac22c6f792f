"""Reasons why compiled kernels reject a core that a loop can run. Each reason is found once and reported once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from torch import Tensor, nn

from flexsn_nn._portability import portability, report
from flexsn_runtime import ScanProgram, why_refused


class Refusals:
    """Reasons why kernels reject the core of one neuron.

    A reason is stored for each combination of dtypes, numbers of dimensions, modules, transforms, and training.
    """

    def __init__(self) -> None:
        self._reasons: dict[tuple[Hashable, ...], str | None] = {}
        self._reported: set[str] = set()

    def find_reason(
        self,
        program: Callable[[], ScanProgram],
        inputs: Sequence[Tensor],
        states: Sequence[Tensor],
        *,
        single: bool,
        training: bool,
        modules: Iterable[nn.Module] = (),
        changes: Hashable = None,
    ) -> str | None:
        """Returns the reason why kernels reject the core; `None` if they accept it.

        The reason is determined once for each combination that the class describes, unless it was dropped.

        Args:
            program: function that returns the program from which the kernels would be built.
            inputs: `[T, *step]` each, or `[*step]` if `single`.
            states: `[*step]` each; empty for the initial states.
            single: True for a single step.
            training: True if gradients are needed.
            modules: modules of the core. Their results depend on training mode, parametrisations and hooks.
            changes: key of the transforms.
        """
        key = (kinds_of(modules), training, changes, *((t.dtype, t.dim()) for t in (*inputs, *states)))
        if key not in self._reasons:
            sequences = [x.unsqueeze(0) for x in inputs] if single else inputs
            reason = why_refused(program(), sequences, states or None, training=training)
            if len(self._reasons) >= _MOST:
                self._reasons.clear()
            self._reasons[key] = reason
        return self._reasons[key]

    def forget(self) -> None:
        """Drops the reasons, because the core has changed."""
        self._reasons.clear()

    def report_once(self, reason: str | None) -> None:
        """Reports that kernels on a GPU will reject a core that has run as a loop.

        Warns once for each reason, but raises an error in every call.

        Raises:
            PortabilityError: `set_portability("error")` is set.
        """
        if reason is not None and (reason not in self._reported or portability() == "error"):
            self._reported.add(reason)
            report(reason)

    def reasons(self, kinds: Hashable) -> list[str]:
        """Lists the distinct reasons for the core with modules of these kinds."""
        reasons = (reason for key, reason in self._reasons.items() if key[0] == kinds)
        return list(dict.fromkeys(reason for reason in reasons if reason is not None))


def kinds_of(modules: Iterable[nn.Module]) -> Hashable:
    """Returns the properties of modules that affect their results. For example, a parametrisation changes the class."""
    return tuple((type(m), m.training, len(m._forward_pre_hooks), len(m._forward_hooks)) for m in modules)


# Maximum number of stored reasons. Without a maximum, the number would grow with each new combination.
_MOST = 16
