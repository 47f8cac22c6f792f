"""Makes the default environment if the clone lacks it, because the site uses the torch of this environment.

This is the first step of `site:build`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def ensure(root: Path) -> bool:
    """Makes the environment if `root` has none with torch. Returns True if it made one.

    Raises:
        RuntimeError: hatch is not on the path.
        CalledProcessError: hatch failed, and printed the reason.
    """
    if any(root.glob(".venv/lib/python*/site-packages/torch")):
        return False
    hatch = shutil.which("hatch")
    if hatch is None:
        raise RuntimeError("the site uses the torch of the default environment: run `hatch env create` first")
    # Variables of the running environment would make hatch use that environment.
    variables = {name: value for name, value in os.environ.items() if name not in ("HATCH_ENV", "HATCH_ENV_ACTIVE")}
    subprocess.run([hatch, "env", "create"], cwd=root, env=variables, check=True)
    return True


if __name__ == "__main__":
    ensure(ROOT)
    sys.exit(0)
