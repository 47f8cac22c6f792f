"""Names that are kept for other projects. FlexSN itself does not use these names."""

from __future__ import annotations
