"""The scan over time as one PyTorch operator, and the plain loop that defines it."""

from __future__ import annotations

from . import _autograd as _autograd  # gives the operator its gradient
from ._arguments import OutputTemplateSpec, StepFunction
from ._dynamo import dynamo_hop_available, why_dynamo_hop_unavailable
from ._eager import eager_scan, eager_scan_final_state
from ._layout import BackwardLayout, ScanLayout
from ._lowerable import (
    lowerable_scan,
    lowerable_scan_available,
    lowerable_scan_final_state,
    lowerable_while_loop_available,
    lowerable_while_loop_scan,
    lowerable_while_loop_scan_final_state,
)
from ._lowering import ScanLowering, register_scan_lowering, scan_lowerings
from ._operator import FlexSNScan, flex_sn_scan, flex_sn_scan_final_state
from ._scan import scan

__all__ = [
    "BackwardLayout",
    "FlexSNScan",
    "OutputTemplateSpec",
    "ScanLayout",
    "ScanLowering",
    "StepFunction",
    "__version__",
    "dynamo_hop_available",
    "eager_scan",
    "eager_scan_final_state",
    "flex_sn_scan",
    "flex_sn_scan_final_state",
    "lowerable_scan",
    "lowerable_scan_available",
    "lowerable_scan_final_state",
    "lowerable_while_loop_available",
    "lowerable_while_loop_scan",
    "lowerable_while_loop_scan_final_state",
    "register_scan_lowering",
    "scan",
    "scan_lowerings",
    "why_dynamo_hop_unavailable",
]

__version__ = "0.1.0"
