"""Names that other projects use. FlexSN itself does not."""

from __future__ import annotations
