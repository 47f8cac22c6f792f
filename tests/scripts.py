"""Imports of scripts outside of the packages, such as examples and scripts that draw figures for the documentation."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

ROOT = Path(__file__).resolve().parents[1]


def load(path: str) -> ModuleType:
    """Imports the script at `path`, relative to the root of the repository, as a module. Does not run its `main`."""
    name = "script_" + path.removesuffix(".py").replace("/", "_")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # so that Python finds the classes of the script by name
        spec.loader.exec_module(module)
    return sys.modules[name]


@contextmanager
def one_thread() -> Iterator[None]:
    """Uses one thread. With small networks and many steps, threads would spend most of the time waiting."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
