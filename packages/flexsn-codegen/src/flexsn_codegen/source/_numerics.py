"""The exactness of a kernel: the rounding of float16 and bfloat16 values, and the use of approximate functions."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal, get_args

from flexsn_codegen.errors import PrecisionError

Precision = Literal["eager", "float32"]


@dataclass(frozen=True, slots=True)
class Numerics:
    """The settings that change the results of a kernel.

    Attributes:
        precision: ``"eager"`` rounds float16 and bfloat16 values after each op, as eager mode does;
            ``"float32"`` keeps these values in float32 inside the core, and rounds only the core's results.
        fast_math: True to use approximate divisions and functions (in Triton, `targets.triton._functions.FAST`) and
            fused multiply-add. Denormals may be treated as zero. Results are the same on every run, but may not be
            bitwise equal to those of eager mode.
    """

    precision: Precision = "eager"
    fast_math: bool = False

    def __post_init__(self) -> None:
        precisions = get_args(Precision)
        if self.precision not in precisions:
            closest = difflib.get_close_matches(str(self.precision), precisions, n=1, cutoff=0.0)[0]
            raise PrecisionError(
                f"there is no precision {self.precision!r}; did you mean {closest!r}? The precisions are "
                f"{' and '.join(map(repr, precisions))}."
            )


def compile_options(backend: str, *, fast_math: bool = False) -> dict[str, bool]:
    """Options for Triton's compiler. With the default options, a kernel computes exactly what its source specifies.

    Args:
        backend: Triton's name of the backend, ``"cuda"`` or ``"hip"``.
        fast_math: True to allow less exact results: fused multiply-add and, on NVIDIA GPUs, denormals treated as zero.

    Returns:
        Keyword arguments for the launch of a kernel, which are also valid as `options` of `triton.compile`.

    Example:
        >>> compile_options("hip")
        {'enable_fp_fusion': False}
    """
    options = {"enable_fp_fusion": fast_math}
    if backend == "cuda":
        options["enable_reflect_ftz"] = fast_math
    return options
