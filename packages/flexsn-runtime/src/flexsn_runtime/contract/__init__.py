"""What other projects call by name: handles, wrappers, builders, custom ops."""

from __future__ import annotations
