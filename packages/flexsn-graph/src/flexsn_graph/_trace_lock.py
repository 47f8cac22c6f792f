"""Serializes traces: they patch globals of Python and of torch."""

from __future__ import annotations

import threading

TRACE_LOCK = threading.RLock()
"""Held during each trace. Hold it around a trace to publish the result before another thread makes its own."""
