"""Properties of step graphs, and graphs with fewer arguments."""

from __future__ import annotations
