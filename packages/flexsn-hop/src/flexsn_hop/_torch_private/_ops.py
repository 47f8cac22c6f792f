"""Torch's classes of operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexsn_hop.versions import private

if TYPE_CHECKING:
    from torch._ops import HigherOrderOperator as HigherOrderOperator
    from torch._ops import OpOverload as OpOverload
else:
    HigherOrderOperator = private("torch._ops", "HigherOrderOperator", "there is no `flex_sn_scan`")
    OpOverload = private("torch._ops", "OpOverload", "cores are not checked before they are compiled")
