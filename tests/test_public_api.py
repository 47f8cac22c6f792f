"""The public API of each package, compared with its snapshot."""

from __future__ import annotations

import difflib
from types import ModuleType

import pytest
from update_api_snapshots import MODULES, SNAPSHOTS, describe_module, format_snapshot

COMMAND = "hatch run python tests/update_api_snapshots.py"


def test_each_package_has_a_snapshot() -> None:
    assert sorted(path.stem for path in SNAPSHOTS.glob("*.json")) == MODULES, f"run `{COMMAND}`"


@pytest.mark.parametrize("module", MODULES)
def test_api_equals_the_snapshot(module: str) -> None:
    recorded = (SNAPSHOTS / f"{module}.json").read_text(encoding="utf-8")
    difference = difflib.unified_diff(
        recorded.splitlines(), format_snapshot(module).splitlines(), "written down", "now", lineterm=""
    )
    text = "\n".join(difference)
    assert not text, f"the public API of {module} changed; if this is intended, run `{COMMAND}`\n{text}"


def test_changes_are_detected() -> None:
    """Checks that a changed default, method, name or base class changes the description."""

    def make_module(source: str) -> ModuleType:
        module = ModuleType("module")
        exec(source, module.__dict__)
        return module

    sources = [
        "__all__ = ['f']\ndef f(x, y=1): ...",
        "__all__ = ['f']\ndef f(x, y=2): ...",
        "__all__ = ['f', 'g']\ndef f(x, y=1): ...\ng = 1",
        "__all__ = ['f']\nclass f:\n def __init__(self, x, y=1): ...",
        "__all__ = ['f']\nclass f:\n def __init__(self, x, y=1): ...\n def close(self): ...",
        "__all__ = ['f']\nclass f:\n def __init__(self, x, y=1): ...\n def close(self, now): ...",
        "__all__ = ['f']\nclass f(ValueError):\n def __init__(self, x, y=1): ...",
    ]
    descriptions = [describe_module(make_module(source)) for source in sources]
    assert all(a != b for i, a in enumerate(descriptions) for b in descriptions[:i])


def test_missing_name_is_an_error() -> None:
    module = ModuleType("module")
    module.__dict__["__all__"] = ["missing"]
    with pytest.raises(AttributeError, match="missing"):
        describe_module(module)
