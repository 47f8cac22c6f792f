"""Networks that were written for SpikingJelly or snnTorch, with these neurons in the places of theirs.

Neither library is needed, or imported, here: their modules are known by their names.
"""

from __future__ import annotations

from flexsn_nn.convert._convert import convert
from flexsn_nn.convert._report import Conversion, Converted, Left, Loaded, Moved

__all__ = ["Conversion", "Converted", "Left", "Loaded", "Moved", "convert"]
