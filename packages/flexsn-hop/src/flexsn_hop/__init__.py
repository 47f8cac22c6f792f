"""The scan over time as one PyTorch operator, and the plain loop that defines the operator's results."""

from __future__ import annotations

from flexsn_hop._layout import BackwardLayout, ScanLayout
from flexsn_hop.compat._lowerable import (
    lowerable_scan,
    lowerable_scan_available,
    lowerable_scan_final_state,
    lowerable_while_loop_available,
    lowerable_while_loop_scan,
    lowerable_while_loop_scan_final_state,
)
from flexsn_hop.loop._arguments import OutputTemplateSpec, StepFunction
from flexsn_hop.loop._eager import eager_scan, eager_scan_final_state
from flexsn_hop.lowering._lowering import ScanLowering, register_scan_lowering, scan_lowerings
from flexsn_hop.operator import _autograd as _autograd  # registers the gradient of the operator
from flexsn_hop.operator._dynamo import complete_captured, dynamo_hop_available, why_dynamo_hop_unavailable
from flexsn_hop.operator._operator import FlexSNScan, flex_sn_scan, flex_sn_scan_final_state
from flexsn_hop.trees._scan import scan

__all__ = [
    "BackwardLayout",
    "FlexSNScan",
    "OutputTemplateSpec",
    "ScanLayout",
    "ScanLowering",
    "StepFunction",
    "__version__",
    "complete_captured",
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
