"""Launches kernels that are written by hand, of `flexsn_codegen.targets.triton.device`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from flexsn_codegen.targets.triton import interpreting, launcher, on_device
from flexsn_runtime._availability import triton_interpreted
from flexsn_runtime._recent import Recent

_again: Recent[Callable[[Sequence[Tensor]], None]] = Recent()


def run_kernel(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    constants: tuple[Any, ...],
    num_warps: int = 4,
    stages: int = 1,
    *,
    fused: bool = True,
) -> None:
    """Launches a kernel; for tensors and numbers like those of an earlier launch, without Triton's search for it.

    Args:
        kernel: a `triton.jit` function of `(*tensors, *numbers, *constants)`.
        fused: products and sums may be computed in one rounding.
    """
    device = tensors[0].device
    if triton_interpreted():
        with interpreting():
            kernel[grid](*tensors, *numbers, *constants)
        return
    like = [(t.dtype, t.data_ptr() % 16 == 0) for t in tensors]
    key = (kernel, device, grid, numbers, constants, num_warps, stages, fused, *like)
    again = _again.get(key)
    if again is not None:
        again(tensors)
        return
    with on_device(device):
        # Said, because the default changes with the version of Triton.
        options = {"num_warps": num_warps, "num_stages": stages, "enable_fp_fusion": fused}
        compiled = kernel[grid](*tensors, *numbers, *constants, **options)
    if compiled is not None:
        whole = (*grid, 1, 1)[:3]
        _again[key] = launcher(compiled, (whole[0], whole[1], whole[2]), (*numbers, *constants), device)
