"""Names that other projects use. FlexSN itself does not use these names."""

from __future__ import annotations
