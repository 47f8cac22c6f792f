"""Runs the Python blocks of a README, which can only import from the given folders.

    python -I -S run_readme_alone.py README FOLDER...

`-I` hides PYTHONPATH and the current folder. `-S` hides site-packages and its `.pth` files, and thus the packages that
are installed from their folders. The script prints the number of blocks and the imported siblings.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

SIBLINGS = ("flexsn_graph", "flexsn_codegen", "flexsn_runtime", "flexsn_nn")


def main() -> None:
    readme, *folders = sys.argv[1:]
    sys.path += folders
    # Siblings that are installed as wheels are in the folder site-packages, so their import must be blocked.
    for name in SIBLINGS:
        sys.modules[name] = None  # type: ignore[assignment]
    imported = []
    for name in SIBLINGS:
        try:
            importlib.import_module(name)
            imported.append(name)
        except ImportError:
            pass
    module = ModuleType("readme")
    sys.modules["readme"] = module
    blocks = re.findall(r"^```python\n(.*?)^```", Path(readme).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for block in blocks:
        exec(compile(block, readme, "exec", dont_inherit=True), module.__dict__)
    print(len(blocks), imported)


if __name__ == "__main__":
    main()
