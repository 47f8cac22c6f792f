"""The scan programs of one neuron: one for its step without transforms, and one for each combination of transforms."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from flexsn_nn.transforms._compose import Counts, StandIns, compose, key_of
from flexsn_nn.transforms._transform import Transform
from flexsn_runtime import Completion, Late, ScanProgram, TargetName

# Maximum number of stored programs. A transform needs another program for each shape of the tensors that it captures.
_MOST = 64


class Changes(NamedTuple):
    """Arguments that a call adds for the transforms of its program.

    Attributes:
        replacements: tensors of the call, by the id of the stand-in that each of them replaces; `None` if the
            transforms capture no tensors.
        completion: formula that completes the gradient of the first input; `None` if the gradient is complete.
    """

    replacements: dict[int, Tensor] | None = None
    completion: Completion | None = None


UNCHANGED = Changes()


class StepProgram(NamedTuple):
    """A scan program of a core with transforms.

    Attributes:
        core: the core without the transforms.
        requires_grad: `FlexSN.requires_grad`, a flag for each input and state of the core, or `None`.
        scan: the program.
        key: key of the transforms.
        stand_ins: stand-ins for the tensors of the transforms; `None` if the transforms capture no tensors.
    """

    core: Callable[..., Any]
    requires_grad: Sequence[bool] | None
    scan: ScanProgram
    key: Hashable
    stand_ins: StandIns | None

    def changes(self, transforms: Sequence[Transform]) -> Changes:
        """Collects the arguments for `transforms`, which have the key of this program."""
        if self.stand_ins is None:
            return UNCHANGED
        tensors: list[Tensor] = []
        completion: Completion | None = None
        for transform in transforms:
            tensors += transform.tensors
            completion = completion or transform.completion
        return Changes(self.stand_ins.get_replacements(tensors), completion)


class Programs:
    """Programs from which the kernels of a neuron are built. Each program is created at its first use.

    Copies and pickles contain no programs, so the kernels of a copy are built again.

    Args:
        counts: numbers of inputs, states and outputs of the step.
        residuals: argument `residuals` of `FlexSN`.
    """

    def __init__(self, counts: Counts, residuals: str) -> None:
        self._counts = counts
        self._residuals = residuals
        self._program_by_key: dict[Hashable, StepProgram] = {}  # by the key of the transforms

    def __reduce__(self) -> tuple[type[Programs], tuple[Counts, str]]:
        return Programs, (self._counts, self._residuals)

    def forget(self) -> None:
        """Drops the programs. The next call of `get` creates a program, and searches the core for captured tensors."""
        self._program_by_key.clear()

    def get(
        self,
        core: Callable[..., Any],
        requires_grad: Sequence[bool] | None,
        on_cpu: TargetName,
        transforms: Sequence[Transform] = (),
    ) -> StepProgram:
        """Returns the program of a core. Creates a program if none is stored for these arguments.

        Args:
            core: current step function.
            requires_grad: current `FlexSN.requires_grad`.
            on_cpu: target of the kernels for the CPU.
            transforms: transforms, with the innermost first. The values of their tensors do not affect the program.
        """
        key = key_of(transforms)
        program = self._program_by_key.get(key)
        if (
            program is None
            or program.core is not core
            or program.requires_grad is not requires_grad
            or program.scan.on_cpu != on_cpu
        ):
            while len(self._program_by_key) >= _MOST:
                del self._program_by_key[next(iter(self._program_by_key))]
            program = self._program_by_key[key] = self._make(core, requires_grad, on_cpu, transforms, key)
        return program

    @property
    def scans(self) -> list[ScanProgram]:
        """Scan programs that exist so far."""
        return [program.scan for program in self._program_by_key.values()]

    def kernel_names(self) -> list[str]:
        """Returns the names of all kernels that were built so far."""
        steps = [step for scan in self.scans for step in scan.specializations]
        return [name for step in steps for name in step.kernel_names]

    def _make(
        self,
        core: Callable[..., Any],
        requires_grad: Sequence[bool] | None,
        on_cpu: TargetName,
        transforms: Sequence[Transform],
        key: Hashable,
    ) -> StepProgram:
        like = [tensor for transform in transforms for tensor in transform.tensors]
        learned = [flows for transform in transforms for flows in transform.learned]
        stand_ins = StandIns(like, learned) if like else None
        rest = list(() if stand_ins is None else stand_ins.stand_ins)
        tensors = []
        for transform in transforms:
            count = len(transform.tensors)
            tensors.append(tuple(rest[:count]))
            del rest[:count]
        counts = self._counts.with_all(transforms)
        requires_grad_flags: Sequence[bool] | None = None
        if requires_grad is not None:
            num_inputs, num_states, _ = self._counts
            more_inputs, more_states = counts.inputs - num_inputs, counts.states - num_states
            more = (True,) * more_inputs, (True,) * more_states
            requires_grad_flags = (*requires_grad[:num_inputs], *more[0], *requires_grad[num_inputs:], *more[1])
            if not any(more):
                requires_grad_flags = requires_grad  # this list itself, since its identity is compared
        scan = ScanProgram(
            compose(core, self._counts, transforms, tensors),
            *counts,
            requires_grad_flags,
            residuals=self._residuals,
            on_cpu=on_cpu,
            counts_down=_flag_countdowns(counts.inputs, self._counts.inputs, transforms),
            late=_find_late_inputs(counts.inputs, self._counts.inputs, transforms),
            bits=(True, *(False,) * (counts.outputs - 1)) if any(t.bits for t in transforms) else (),
        )
        return StepProgram(core, requires_grad, scan, key, stand_ins)


def _flag_countdowns(num_inputs: int, of_core: int, transforms: Sequence[Transform]) -> tuple[bool, ...]:
    """Returns, for each input, True if its values count down. Returns an empty tuple if no input counts down."""
    if not any(transform.counts_down for transform in transforms):
        return ()
    added_flags = [transform.counts_down for transform in transforms for _ in range(transform.num_inputs)]
    assert len(added_flags) == num_inputs - of_core
    return (*(False,) * of_core, *added_flags)


def _find_late_inputs(num_inputs: int, of_core: int, transforms: Sequence[Transform]) -> tuple[Late | None, ...]:
    """Returns, for each input, its delays, or `None` without delays. The tuple is empty if no input is delayed."""
    place = of_core
    for transform in transforms:
        if transform.looks_back is not None:
            return (Late(place, transform.looks_back), *(None,) * (num_inputs - 1))
        place += transform.num_inputs
    return ()
