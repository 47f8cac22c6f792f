"""The lock that serializes traces. A trace patches globals of Python and of torch."""

from __future__ import annotations

import threading

TRACE_LOCK = threading.RLock()
"""Each trace holds this lock. A caller that holds the lock can publish its trace before another thread traces."""
