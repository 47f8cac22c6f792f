"""Sets the number of threads, and whether kernels run on a GPU, before torch and Triton are imported."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Tests run in several processes, which start more processes. Each process has one thread, because several threads would
# spin while they wait for each other, and slow down the other processes. Libraries read these variables when they are
# loaded.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
# Inductor compiles in the test process itself, because a pool of compilers for each test process would be too large.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch
from torch import Tensor

if TYPE_CHECKING:
    from flexsn_runtime.kernels._trained import TrainedScan
    from flexsn_runtime.native import NativeScan

# Pytest adds a handler to each logger that does not propagate. With a handler, torch would log all compiled graphs.
logging.getLogger("torch.__trace").propagate = True
torch.set_num_threads(1)  # has an effect if torch was imported before this file
HAS_GPU = torch.cuda.is_available()

# Imports create many objects that stay. With Python's thresholds, the garbage collector takes a fifth of the time that
# pytest needs to import the tests. Tests of objects that are freed late call `gc.collect`. On a GPU, thresholds stay:
# a CUDA graph cannot be captured while reference cycles hold autograd nodes of another stream.
if not HAS_GPU:
    gc.set_threshold(50_000, 20, 50)

# Triton reads TRITON_INTERPRET when a kernel is defined, so the variable must be set before the first import.
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


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option `--long`, which runs all tests."""
    parser.addoption("--long", action="store_true", help="run the tests marked long, too")


def matches(item: pytest.Item, pattern: str) -> bool:
    """Returns True if a pattern matches the parameters of a test. For example, `"lif-*"` matches `test_x[lif-5]`."""
    return fnmatchcase(item.nodeid.partition("[")[2].rpartition("]")[0], pattern)


def list_patterns(item: pytest.Item) -> tuple[str, ...] | None:
    """Returns `all_but` of a test marked `long`, or `None` for a test without the mark.

    A test marked `long` also runs without `--long` if one of these patterns matches its parameters.
    """
    mark = item.get_closest_marker("long")
    return None if mark is None else tuple(mark.kwargs.get("all_but", ()))


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class) -> Generator[None, Any, Any]:
    """Checks that each pattern of `all_but` matches parameters of the test."""
    items = yield
    for pattern in (list_patterns(items[0]) if isinstance(items, list) and items else None) or ():
        if not any(matches(item, pattern) for item in items):
            raise pytest.UsageError(f"{items[0].nodeid}: all_but={pattern!r} fits none of the parameters")
    return items


def leave_out_long(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Removes the long tests from `items`, except those for a GPU. Pytest counts the removed tests as deselected."""

    def is_long(item: pytest.Item) -> bool:
        exceptions = list_patterns(item)
        return exceptions is not None and not any(matches(item, pattern) for pattern in exceptions)

    long = [item for item in items if is_long(item) and item.get_closest_marker("gpu") is None]
    removed = set(long)
    items[:] = [item for item in items if item not in removed]
    config.hook.pytest_deselected(items=long)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Removes tests marked `long` unless `--long` is given, and skips tests marked `gpu` if there is no GPU."""
    if not config.getoption("--long"):
        leave_out_long(config, items)
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU, and torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Freezes existing objects, so that later garbage collections do not visit torch's objects."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Unfreezes all objects, because some libraries count the remaining objects at exit."""
    gc.unfreeze()


@pytest.fixture(autouse=HAS_GPU)
def memory_for_other_processes() -> Iterator[None]:
    """Frees unused GPU memory after each test, because several processes share one GPU."""
    yield
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def language_is_prepared_once() -> None:
    """Makes Triton's interpreter prepare its language once for each kernel.

    Otherwise, the interpreter would also prepare it at each call of a function inside of the kernel, which takes as
    long as the function itself.
    """
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    scopes = getattr(interpreter, "_LangPatchScope", None)
    if scopes is None or hasattr(scopes, "prepared"):
        return
    prepare, restore = interpreter._patch_lang, scopes.restore
    scopes.prepared, languages = set(), (interpreter.tl, interpreter.tl.core)

    def prepare_once(function: Any) -> Any:
        used = tuple(any(value is language for value in function.__globals__.values()) for language in languages)
        if used in scopes.prepared:
            return scopes()
        scope = prepare(function)
        scopes.prepared.add(used)
        return scope

    def restore_scope(scope: Any) -> None:
        scopes.prepared.clear()
        restore(scope)

    interpreter._patch_lang, scopes.restore = prepare_once, restore_scope


@pytest.fixture
def interpreted() -> None:
    """Skips tests that run kernels on CPU tensors if Triton's interpreter is off."""
    if HAS_GPU:
        pytest.skip("kernels run on this machine's GPU; the interpreter is tested without one")


# Files and folders whose tests compile kernels with vector code, as for users.
VECTORS = (
    "packages/flexsn-codegen/",
    "packages/flexsn-runtime/",
    "tests/test_random_scans.py",
    "tests/test_scan_gradients.py",
    "tests/test_scan_parity.py",
)
WITHOUT_VECTORS = Path(__file__).parent / "tests" / "without_vectors" / "g++"


@pytest.fixture(autouse=True, scope="module")
def without_vectors(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compiles kernels in C++ without vector code, except for tests in `VECTORS` or with `--long`.

    The results have equal bits, and compilation takes half of the time.
    """
    place = request.node.nodeid.startswith(VECTORS)
    if place or request.config.getoption("--long") or "CXX" in os.environ or not WITHOUT_VECTORS.exists():
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        if shutil.which("g++"):
            patch.setenv("CXX", str(WITHOUT_VECTORS))
        yield


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the C++ compiler, so that neurons run as loops in tests that do not depend on the backend."""
    monkeypatch.setenv("CXX", "no-such-compiler")


@pytest.fixture(scope="session")
def compiler() -> None:
    """Skips tests that run kernels in C++ if no compiler is found."""
    # Imported here, because the tests of a wheel may run without flexsn_codegen.
    from flexsn_codegen.targets.cpp import why_no_compiler

    reason = why_no_compiler()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def compiler_for_cpp(request: pytest.FixtureRequest) -> None:
    """Applies the fixture `compiler` to tests with `"cpp"` as a parameter."""
    call = getattr(request.node, "callspec", None)
    if call is not None and "cpp" in [value for value in call.params.values() if isinstance(value, str)]:
        request.getfixturevalue("compiler")


# -- the compiled launcher --------------------------------------------------------------------------------------------


@pytest.fixture
def native_runs(monkeypatch: pytest.MonkeyPatch) -> list[NativeScan]:
    """Returns a list to which each call of the compiled launcher appends its scan."""
    from flexsn_runtime.native import NativeScan

    runs: list[NativeScan] = []
    run = NativeScan.run

    def record_run(scan: NativeScan, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        runs.append(scan)
        return run(scan, tensors)

    def record_repeats(make: Callable[..., Any]) -> Callable[..., Any]:
        def make_recorded(scan: NativeScan, *arguments: Any) -> Any:
            again = make(scan, *arguments)

            def repeat(tensors: Sequence[Tensor | None]) -> list[Tensor] | None:
                results: list[Tensor] | None = again(tensors)
                if results is not None:
                    runs.append(scan)
                return results

            return None if again is None else repeat

        return make_recorded

    monkeypatch.setattr(NativeScan, "run", record_run)
    for name in ("again", "after"):
        monkeypatch.setattr(NativeScan, name, record_repeats(getattr(NativeScan, name)))
    return runs


@pytest.fixture
def python_gradients(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, ...]]:
    """Returns a list to which each backward that runs in Python appends its mask of required gradients."""
    from flexsn_runtime.kernels._trained import TrainedScan

    needs: list[tuple[bool, ...]] = []
    gradients = TrainedScan.gradients

    def record_needs(
        scan: TrainedScan, tensors: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        needs.append(tuple(needed))
        return gradients(scan, tensors, needed)

    monkeypatch.setattr(TrainedScan, "gradients", record_needs)
    return needs
