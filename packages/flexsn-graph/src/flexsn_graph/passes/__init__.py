"""Properties of step graphs, and passes that remove arguments from them."""

from __future__ import annotations
