"""Fixtures for tests of this package alone, independent of the other imports of the process."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes all registered lowerings, except for those of the test itself."""
    monkeypatch.setattr("flexsn_hop.lowering._lowering._registered", [])
