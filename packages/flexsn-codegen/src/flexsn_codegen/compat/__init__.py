"""Names that other projects use, and FlexSN itself does not."""

from __future__ import annotations
