"""For tests of this package alone, whatever else the process has imported."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lowering is registered but by the test itself."""
    monkeypatch.setattr("flexsn_hop.lowering._lowering._registered", [])
