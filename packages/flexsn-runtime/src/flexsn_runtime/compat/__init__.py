"""Functions and classes whose names other projects use. FlexSN itself does not use them."""

from __future__ import annotations
