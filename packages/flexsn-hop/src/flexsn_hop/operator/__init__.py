"""The higher-order operator: eager loop, autograd, Dynamo, checks."""

from __future__ import annotations
