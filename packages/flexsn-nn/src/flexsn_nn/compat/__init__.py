"""Names that exist for other projects; this project does not use them."""

from __future__ import annotations
