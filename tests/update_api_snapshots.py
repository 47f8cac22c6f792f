"""Writes the public API of each package to a file. A test then detects each added, removed or changed name.

    hatch run python tests/update_api_snapshots.py

The files are `tests/api/<import name>.json`. `tests/test_public_api.py` compares these files with the packages. Run
this script after an intended change of a public name or signature, and read the diff, because the change affects users.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SNAPSHOTS = ROOT / "tests" / "api"
PACKAGES = [path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")]
# Prefix of the modules whose classes are parts of one public class.
PARTS = "flexsn_nn.flexsn."
MODULES = sorted(name.replace("-", "_") for name in PACKAGES)

Description = dict[str, Any]


def read_signature(obj: Any) -> str | None:
    try:
        text = str(inspect.signature(obj))
    except (TypeError, ValueError):  # a class or builtin without a signature
        return None
    return re.sub(r" at 0x[0-9a-f]+", "", text)  # the address of a default differs between runs


def describe_member(obj: Any) -> Description:
    if isinstance(obj, staticmethod | classmethod):
        return {"kind": type(obj).__name__, "signature": read_signature(obj.__func__)}
    if isinstance(obj, property):
        return {"kind": "property"}
    if inspect.isfunction(obj):
        return {"kind": "method", "signature": read_signature(obj)}
    return {"kind": "attribute"}


def describe_class(cls: type) -> Description:
    """Describes a class by its bases, its constructor, and the public members of the class and of its parts."""
    parts = [base for base in cls.__mro__[1:] if base.__module__.startswith(PARTS)] if cls.__bases__ else []
    parts = parts if parts and cls.__bases__[0] is parts[0] else []
    defined = {name: member for base in (*reversed(parts), cls) for name, member in vars(base).items()}
    bases = parts[-1].__bases__ if parts else cls.__bases__
    return {
        "kind": "class",
        "bases": [f"{base.__module__}.{base.__qualname__}" for base in bases],
        # Python defines the constructor of enumerations, and it differs between versions of Python.
        "signature": None if issubclass(cls, enum.Enum) else read_signature(cls),
        "members": {
            name: describe_member(member) for name, member in sorted(defined.items()) if not name.startswith("_")
        },
    }


def describe(obj: Any) -> Description:
    """Describes a public object by its kind and its signature, and a class or a module by its members as well."""
    if inspect.ismodule(obj):
        return {"kind": "module", "names": describe_module(obj)}
    if inspect.isclass(obj):
        return describe_class(obj)
    if inspect.isroutine(obj):
        return {"kind": "function", "signature": read_signature(obj)}
    description: Description = {"kind": f"instance of {type(obj).__qualname__}"}
    if callable(obj):
        description["signature"] = read_signature(obj)
    return description


def describe_module(module: ModuleType) -> Description:
    return {name: describe(getattr(module, name)) for name in sorted(module.__all__)}


def format_snapshot(module_name: str) -> str:
    """Returns the snapshot of a package as the text of its file."""
    description = describe_module(importlib.import_module(module_name))
    return json.dumps(description, indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    SNAPSHOTS.mkdir(exist_ok=True)
    for stale in SNAPSHOTS.glob("*.json"):
        if stale.stem not in MODULES:
            stale.unlink()
    for name in MODULES:
        (SNAPSHOTS / f"{name}.json").write_text(format_snapshot(name), encoding="utf-8")
        print(f"wrote tests/api/{name}.json")


if __name__ == "__main__":
    main()
