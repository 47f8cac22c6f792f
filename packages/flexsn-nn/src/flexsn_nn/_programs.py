"""The scan programs of one neuron: its step alone, behind a norm's affine part, counting, or writing bits."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from flexsn_nn._affine import Absorbed, Behind
from flexsn_nn._counts import Counting
from flexsn_nn._noise import NUM_PLACES, Drawing
from flexsn_runtime import ScanProgram, TargetName


class Programs:
    """What the kernels of a neuron are made from, made when it is first asked for.

    Copies and pickles are empty: kernels are built again.

    Args:
        num_inputs, num_states, num_outputs: of the step.
        residuals: as of `FlexSN`.
    """

    def __init__(self, num_inputs: int, num_states: int, num_outputs: int, residuals: str) -> None:
        self._counts = num_inputs, num_states, num_outputs
        self._residuals = residuals
        self._plain: ScanProgram | None = None
        # By what the step does beside its core, and by the kind of what it does before.
        self._variants: dict[Hashable, ScanProgram] = {}

    def __reduce__(self) -> tuple[type[Programs], tuple[int, int, int, str]]:
        return Programs, (*self._counts, self._residuals)

    def forget(self) -> None:
        """Makes them again, from a core whose tensors are to be looked for anew."""
        self._plain = None
        self._variants.clear()

    def get(
        self,
        core: Callable[..., Any],
        requires_grad: Sequence[bool] | None,
        on_cpu: TargetName,
        affine: Absorbed | None = None,
        *,
        counting: bool = False,
        packing: bool = False,
    ) -> ScanProgram:
        """The program of a core; another one if this is no longer the core of the one that is there.

        Args:
            core: the step as it is now.
            requires_grad: of `FlexSN`, as it is now.
            on_cpu: the target of kernels for the CPU.
            affine: of the first input, if the step computes it; its values do not matter.
            counting: whether there is one more state, `Counting`'s.
            packing: whether the first output is also written as bits.
        """
        program = self._plain
        key: Hashable = (counting, packing) if counting or packing else None
        if affine is not None:
            key = counting, packing, affine.kind
        if key is not None:
            program = self._variants.get(key)
        if program is not None and torch.compiler.is_compiling():
            return program
        known = None if program is None else program.core
        if isinstance(known, Behind):
            known = known.core
        if isinstance(known, Counting):
            known = known.core
        num_inputs, num_states, num_outputs = self._counts
        draws = isinstance(core, Drawing)
        if (counting or draws) and requires_grad is not None:
            of_places = (False,) * NUM_PLACES * draws
            requires_grad = (*requires_grad[:num_inputs], *of_places, *requires_grad[num_inputs:], *(True,) * counting)
            if program is not None and program.requires_grad == requires_grad:
                requires_grad = program.requires_grad
        if (
            program is None
            or known is not core
            or program.requires_grad is not requires_grad
            or program.on_cpu != on_cpu
        ):
            step = Counting(core) if counting else core
            program = ScanProgram(
                step if affine is None else Behind(step, affine),
                num_inputs + NUM_PLACES * draws,
                num_states + counting,
                num_outputs,
                requires_grad,
                residuals=self._residuals,
                on_cpu=on_cpu,
                bits=(True, *(False,) * (num_outputs - 1)) if packing else (),
            )
            if key is None:
                self._plain = program
            else:
                self._variants[key] = program
        return program
