"""Functions that run a scan with PyTorch's operators ``scan`` and ``while_loop``, also in eager mode."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexsn_hop._layout import ScanLayout
from flexsn_hop._torch_private import builtin_scan, builtin_while_loop
from flexsn_hop.loop._arguments import OutputTemplateSpec, ScanCall, StepFunction
from flexsn_hop.lowering._builtin import through_scan, through_while_loop

__all__ = [
    "lowerable_scan",
    "lowerable_scan_available",
    "lowerable_scan_final_state",
    "lowerable_while_loop_available",
    "lowerable_while_loop_scan",
    "lowerable_while_loop_scan_final_state",
]


def lowerable_scan_available() -> bool:
    """True if this torch has the ``scan`` operator, which :func:`lowerable_scan` calls."""
    return builtin_scan is not None


def lowerable_while_loop_available() -> bool:
    """True if this torch has the ``while_loop`` operator, which :func:`lowerable_while_loop_scan` calls."""
    return builtin_while_loop is not None


def lowerable_scan(
    core_fn: StepFunction,
    num_inputs: int,
    num_states: int,
    num_outputs: int,
    *flat_args: torch.Tensor,
    output_template_specs: Sequence[OutputTemplateSpec] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Runs :func:`eager_scan` with PyTorch's ``scan`` operator.

    Arguments, results and errors are those of :func:`eager_scan`.

    Restrictions:
        In training, every floating-point state must require grad, even if its gradient is ignored. If an
        initial state does not require grad, ``scan`` computes wrong gradients for captured tensors (observed on 2.11).

    Raises:
        LoweringGradientError: A gradient is required, but it might be wrong (a ``RuntimeError``).
        LoweringError: This torch has no ``scan`` (a ``ValueError``).
    """
    layout = ScanLayout(num_inputs, num_states, num_outputs)
    return through_scan(ScanCall(core_fn, layout, flat_args, output_template_specs))


def lowerable_scan_final_state(
    core_fn: StepFunction,
    num_inputs: int,
    num_states: int,
    num_outputs: int,
    *flat_args: torch.Tensor,
    output_template_specs: Sequence[OutputTemplateSpec] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Runs :func:`eager_scan_final_state` with the ``scan`` operator. See :func:`lowerable_scan`."""
    layout = ScanLayout(num_inputs, num_states, num_outputs, final_state=True)
    return through_scan(ScanCall(core_fn, layout, flat_args, output_template_specs))


def lowerable_while_loop_scan(
    core_fn: StepFunction,
    num_inputs: int,
    num_states: int,
    num_outputs: int,
    *flat_args: torch.Tensor,
    output_template_specs: Sequence[OutputTemplateSpec] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Runs :func:`eager_scan` with PyTorch's ``while_loop`` operator, without gradients.

    Arguments, results and errors are those of :func:`eager_scan`. The first step runs before the
    loop, because the results of this step determine the shapes of the loop's results.

    Restrictions:
        Works only without gradients. ``while_loop`` silently computes wrong gradients unless every
        floating-point value that it carries requires grad (observed on 2.11 and 2.13).

    Raises:
        LoweringGradientError: A result would require grad (a ``RuntimeError``).
        LoweringError: This torch has no ``while_loop`` (a ``ValueError``).
    """
    layout = ScanLayout(num_inputs, num_states, num_outputs)
    return through_while_loop(ScanCall(core_fn, layout, flat_args, output_template_specs))


def lowerable_while_loop_scan_final_state(
    core_fn: StepFunction,
    num_inputs: int,
    num_states: int,
    num_outputs: int,
    *flat_args: torch.Tensor,
    output_template_specs: Sequence[OutputTemplateSpec] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Runs :func:`eager_scan_final_state` with the ``while_loop`` operator.

    See :func:`lowerable_while_loop_scan`.
    """
    layout = ScanLayout(num_inputs, num_states, num_outputs, final_state=True)
    return through_while_loop(ScanCall(core_fn, layout, flat_args, output_template_specs))
