"""Reports about networks: backends and times; parameters, shapes, firing rates and synaptic operations."""

from __future__ import annotations

from flexsn_nn.reports._explain_net import LayerReport, NetworkReport
from flexsn_nn.reports._summary import LayerSummary, NetworkSummary

__all__ = ["LayerReport", "LayerSummary", "NetworkReport", "NetworkSummary"]
