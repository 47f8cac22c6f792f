"""The README of codegen runs in an environment with only codegen and its requirements."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
# Runs the blocks without the other packages of this project, and without the variable that the tests set.
SCRIPT = r"""
import re, sys
for other in ("flexsn_runtime", "flexsn_hop", "flexsn_nn"):
    sys.modules[other] = None
text = open(sys.argv[1], encoding="utf-8").read()
module = type(sys)("__main__")
sys.modules["__main__"] = module
blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
for block in blocks:
    lines = "\n" * text.count("\n", 0, block.start(1))
    exec(compile(lines + block[1], sys.argv[1], "exec"), vars(module))
print(len(blocks), "blocks")
"""


@pytest.mark.usefixtures("compiler")
def test_readme_runs_with_this_layer_alone(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SCRIPT, str(README)]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout.split()[-2]) >= 7
