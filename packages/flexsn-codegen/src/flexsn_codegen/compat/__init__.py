"""Names that other projects use. FlexSN itself does not use them."""

from __future__ import annotations
