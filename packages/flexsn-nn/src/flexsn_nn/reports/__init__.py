"""Reports on networks: what runs and where time goes; parameters, shapes, rates and synaptic operations."""

from __future__ import annotations

from flexsn_nn.reports._explain_net import LayerReport, NetworkReport
from flexsn_nn.reports._summary import LayerSummary, NetworkSummary

__all__ = ["LayerReport", "LayerSummary", "NetworkReport", "NetworkSummary"]
