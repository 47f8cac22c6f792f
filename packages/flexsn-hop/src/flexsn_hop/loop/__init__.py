"""The loop over time that defines the results of a scan and of its backward, and the checks of a call."""

from __future__ import annotations
