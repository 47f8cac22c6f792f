"""PyTorch's own operators `scan` and `while_loop`. Each is None if this version of torch lacks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flexsn_hop.versions import private

builtin_scan: Callable[..., Any] | None = private(
    "torch._higher_order_ops.scan", "scan", "`lowerable_scan` and the lowering 'scan' are missing", default=None
)
builtin_while_loop: Callable[..., Any] | None = private(
    "torch._higher_order_ops.while_loop",
    "while_loop",
    "`lowerable_while_loop_scan` and the lowering 'while_loop' are missing",
    default=None,
)
