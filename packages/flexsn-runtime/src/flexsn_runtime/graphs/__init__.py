"""What a compiler's graph has of a scan: sizes that may be symbols, and launches."""

from __future__ import annotations
