"""PyTorch's own control-flow operators, where this version has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

builtin_scan: Callable[..., Any] | None
builtin_while_loop: Callable[..., Any] | None
try:
    from torch._higher_order_ops.scan import scan as builtin_scan
except ImportError:
    builtin_scan = None
try:
    from torch._higher_order_ops.while_loop import while_loop as builtin_while_loop
except ImportError:
    builtin_while_loop = None
