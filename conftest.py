"""Decides, before torch and Triton are imported, how many threads work, and whether kernels run on a GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

# Tests run in several processes and start more: one thread each. Threads that wait for one another spin, and beside
# other work on a small machine they spin for most of the time. Their libraries read this when they are loaded.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
# Inductor compiles in this process: a pool of compilers for each test process would be a crowd.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)  # where something imported torch before this file

HAS_GPU = torch.cuda.is_available()

# Triton reads the variable when a kernel is defined, so it has to stand before the first import.
if HAS_GPU and os.environ.get("TRITON_INTERPRET", "0") != "0":
    raise pytest.UsageError(
        "TRITON_INTERPRET is set on a machine with a GPU: the tests marked gpu would pass without "
        "running on it. Unset it; to test the interpreter, hide the GPU: CUDA_VISIBLE_DEVICES=''."
    )
if not HAS_GPU:
    if "triton" in sys.modules:
        raise pytest.UsageError(
            "Triton was imported before conftest.py could turn its interpreter on: "
            "set TRITON_INTERPRET=1 before starting pytest."
        )
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` where there is no GPU."""
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU, and torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


@pytest.fixture(autouse=HAS_GPU)
def memory_for_other_processes() -> Iterator[None]:
    """Several processes test on one GPU: none keeps memory that it does not use."""
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def interpreted() -> None:
    """For tests that run kernels on CPU tensors: they need Triton's interpreter."""
    if HAS_GPU:
        pytest.skip("kernels run on this machine's GPU; the interpreter is tested without one")
