"""The lock that serializes traces. A trace patches globals of Python and of torch."""

from __future__ import annotations

import threading

TRACE_LOCK = threading.RLock()
"""Held during each trace. A caller that holds it can also publish the result before another thread makes its own."""
