"""The loop over time that defines the scan: the steps of its two operators, and the checks of a call."""

from __future__ import annotations
