"""What kernels are written in, by name."""

from __future__ import annotations

from typing import Literal

import torch

from flexsn_codegen import TRITON, Target
from flexsn_codegen.targets.cpp import CPP

TargetName = Literal["triton", "cpp"]

TARGETS: dict[TargetName, Target] = {"triton": TRITON, "cpp": CPP}


def target_on(device: torch.device, on_cpu: TargetName) -> TargetName:
    """What kernels on a device are written in.

    Args:
        on_cpu: what they are written in on the CPU, where Triton runs in its interpreter.
    """
    return on_cpu if device.type == "cpu" else "triton"
