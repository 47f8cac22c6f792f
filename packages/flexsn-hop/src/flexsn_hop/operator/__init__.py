"""The higher-order operator, and its implementations for eager mode, autograd and Dynamo."""

from __future__ import annotations
