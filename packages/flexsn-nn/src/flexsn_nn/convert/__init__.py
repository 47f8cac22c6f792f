"""Converts networks that were written for SpikingJelly or snnTorch to the neurons of this package.

Neither library is imported or needed here, because their modules are recognised by name.
"""

from __future__ import annotations

from flexsn_nn.convert._convert import convert
from flexsn_nn.convert._report import Conversion, Converted, Left, Loaded, Moved

__all__ = ["Conversion", "Converted", "Left", "Loaded", "Moved", "convert"]
