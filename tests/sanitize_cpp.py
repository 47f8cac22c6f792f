"""Runs generated C++ code with the compiler's sanitizers for addresses and undefined behaviour.

    python tests/sanitize_cpp.py [pytest's arguments ...]

By default, the script runs the tests of rules, functions and kernels (the zoo, random cores, parity, gradcheck). It
needs g++ and the libraries of the sanitizers. Its exit status is that of pytest. The first error that a sanitizer finds
ends the process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = [f"packages/flexsn-codegen/tests/test_codegen_cpp_{name}.py" for name in ("rules", "functions")]
KERNELS = ("scan_parity", "scan_random_cores", "scan_gradcheck", "steps_with_surrogates")
TESTS += [*(f"tests/test_{name}.py" for name in KERNELS), "--long", "-k", "cpp"]
FLAGS = "-O1 -g -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all"


def main(arguments: Sequence[str], cache: str) -> int:
    """Runs pytest and returns the exit status.

    Args:
        cache: folder for the kernels.
    """
    process = subprocess.run(["g++", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True)
    environment = {
        **os.environ,
        "FLEXSN_TEST_CPP_FLAGS": FLAGS,
        "CXX": f"g++ {FLAGS}",  # so that kernels cached without these flags are not used
        "FLEXSN_CACHE_DIR": cache,
        # Only a process that starts with this library can load such kernels. Leaks are not detected, because Python
        # never frees all of its memory.
        "LD_PRELOAD": process.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    command = [sys.executable, "-m", "pytest", "-q", *(arguments or TESTS)]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(main(sys.argv[1:], folder))
