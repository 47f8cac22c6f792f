"""The forward and the backward of a pointwise scan, with one kernel each: plans, launches and autograd function."""

from __future__ import annotations
