"""Imports every module of one package and prints a report as JSON. `test_packaging_wheels.py` runs this script.

    python -I -S tests/isolated_import.py MODULE FOLDER...

`-I` hides PYTHONPATH and the current folder. `-S` hides site-packages and its `.pth` files, and therefore the editable
installs. Only the standard library and the FOLDERs can be imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import pkgutil
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType

MODULES = ("flexsn_graph", "flexsn_codegen", "flexsn_runtime", "flexsn_hop", "flexsn_nn")


class TritonWatch:
    """A finder that never finds a module, but records the modules that import Triton.

    `sys.modules` is not enough, because torch itself imports Triton if Triton is installed.
    """

    def __init__(self) -> None:
        self.importers: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] == "triton":
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and "importlib" in frame.f_globals.get("__name__", ""):
                frame = frame.f_back
            self.importers.add(frame.f_globals.get("__name__", "?") if frame is not None else "?")
        return None


def import_everything(name: str) -> list[str]:
    """Imports a package and all its modules, except `__main__` modules, which run a program when they are imported."""
    package = importlib.import_module(name)
    names = [name]
    for module in pkgutil.walk_packages(package.__path__, prefix=f"{name}."):
        if not module.name.endswith(".__main__"):
            importlib.import_module(module.name)
            names.append(module.name)
    return names


def main() -> None:
    name, *folders = sys.argv[1:]
    sys.path[:0] = folders
    watch = TritonWatch()
    sys.meta_path.insert(0, watch)
    visible = {module: importlib.util.find_spec(module) for module in MODULES}
    report = {
        "visible": {module: spec.origin for module, spec in visible.items() if spec is not None},
        "imported": import_everything(name),
        "triton_imported": "triton" in sys.modules,
        "triton_importers": sorted(watch.importers),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
