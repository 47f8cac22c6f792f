"""Names kept for other projects; this one does without them."""

from __future__ import annotations
