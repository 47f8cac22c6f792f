"""Functions whose names other projects use. FlexSN itself does not use these functions."""

from __future__ import annotations
