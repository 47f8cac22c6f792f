"""A fixture for tests of this package alone, whatever other packages the process has imported."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the lowerings that were registered before the test."""
    monkeypatch.setattr("flexsn_hop.lowering._lowering._registered", [])
