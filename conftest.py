"""Sets the number of threads and the place of kernels, on a GPU or not, before torch and Triton are imported."""

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

# Tests run in several processes and start more processes: each of them has one thread. Threads that wait for each other
# spin; on a small machine with other work, they would spin most of the time. Libraries read these variables when
# loaded.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
# Inductor compiles in this process, because a pool of compilers for each test process would be too many processes.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch
from torch import Tensor

if TYPE_CHECKING:
    from flexsn_runtime.kernels._trained import TrainedScan
    from flexsn_runtime.native import NativeScan

# Pytest adds a handler to loggers that do not propagate. With a handler, torch would log all compiled graphs.
logging.getLogger("torch.__trace").propagate = True
torch.set_num_threads(1)  # if torch was imported before this file
# Imports create many objects that stay. With Python's thresholds, the garbage collector takes a fifth of the time that
# pytest needs to import the tests. Tests of objects that are freed late call `gc.collect`.
gc.set_threshold(50_000, 20, 50)

HAS_GPU = torch.cuda.is_available()

# Triton reads the variable when a kernel is defined, so it must be set before the first import.
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


def fits(item: pytest.Item, pattern: str) -> bool:
    """Returns True if a pattern matches the parameters of a test: `"lif-*"` matches those of `test_x[lif-5]`."""
    return fnmatchcase(item.nodeid.partition("[")[2].rpartition("]")[0], pattern)


def patterns(item: pytest.Item) -> tuple[str, ...] | None:
    """Returns the patterns of parameters with which a test marked `long` runs without `--long`; `None`: no mark."""
    mark = item.get_closest_marker("long")
    return None if mark is None else tuple(mark.kwargs.get("all_but", ()))


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class) -> Generator[None, Any, Any]:
    """Checks that each pattern of `all_but` matches parameters of the test."""
    items = yield
    for pattern in (patterns(items[0]) if isinstance(items, list) and items else None) or ():
        if not any(fits(item, pattern) for item in items):
            raise pytest.UsageError(f"{items[0].nodeid}: all_but={pattern!r} fits none of the parameters")
    return items


def leave_out_long(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Removes the long tests from `items`, except those for a GPU; pytest counts them as deselected."""

    def is_long(item: pytest.Item) -> bool:
        kept = patterns(item)
        return kept is not None and not any(fits(item, pattern) for pattern in kept)

    long = [item for item in items if is_long(item) and item.get_closest_marker("gpu") is None]
    left = set(long)
    items[:] = [item for item in items if item not in left]
    config.hook.pytest_deselected(items=long)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Removes tests marked `long` without `--long`, and skips tests marked `gpu` without a GPU."""
    if not config.getoption("--long"):
        leave_out_long(config, items)
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU, and torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Freezes existing objects, so that the collector does not visit torch's objects again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Unfreezes all objects, because libraries count leftovers at the end."""
    gc.unfreeze()


@pytest.fixture(autouse=HAS_GPU)
def memory_for_other_processes() -> Iterator[None]:
    """Frees unused GPU memory, because several processes test on one GPU."""
    yield
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def language_is_prepared_once() -> None:
    """Have Triton's interpreter prepare its language once for each kernel, and not again at each call of a function
    within, which takes as long as the function.
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

    def restored(scope: Any) -> None:
        scopes.prepared.clear()
        restore(scope)

    interpreter._patch_lang, scopes.restore = prepare_once, restored


@pytest.fixture
def interpreted() -> None:
    """Skips tests that run kernels on CPU tensors unless Triton's interpreter is on."""
    if HAS_GPU:
        pytest.skip("kernels run on this machine's GPU; the interpreter is tested without one")


# Tests of the kernels themselves, which are compiled as for users.
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

    Their bits are equal, and compiling takes half of the time.
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
    """Runs neurons as loops, as without a compiler, in tests that do not depend on the backend."""
    monkeypatch.setenv("CXX", "no-such-compiler")


@pytest.fixture(scope="session")
def compiler() -> None:
    """Skips tests that run kernels in C++ unless a compiler is on the path."""
    from flexsn_codegen.targets.cpp import why_no_compiler  # imported here, since a wheel's tests may run without it

    why = why_no_compiler()
    if why is not None:
        pytest.skip(why)


@pytest.fixture(autouse=True)
def compiler_for_cpp(request: pytest.FixtureRequest) -> None:
    """Applies `compiler` to tests with `"cpp"` as a parameter."""
    call = getattr(request.node, "callspec", None)
    if call is not None and "cpp" in [value for value in call.params.values() if isinstance(value, str)]:
        request.getfixturevalue("compiler")


# -- the compiled launcher --------------------------------------------------------------------------------------------


@pytest.fixture
def native_runs(monkeypatch: pytest.MonkeyPatch) -> list[NativeScan]:
    """Records each call of the compiled launcher."""
    from flexsn_runtime.native import NativeScan

    runs: list[NativeScan] = []
    run = NativeScan.run

    def noted(scan: NativeScan, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        runs.append(scan)
        return run(scan, tensors)

    def noted_again(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(scan: NativeScan, *given: Any) -> Any:
            again = make(scan, *given)

            def repeat(tensors: Sequence[Tensor | None]) -> list[Tensor] | None:
                results: list[Tensor] | None = again(tensors)
                if results is not None:
                    runs.append(scan)
                return results

            return None if again is None else repeat

        return made

    monkeypatch.setattr(NativeScan, "run", noted)
    for name in ("again", "after"):
        monkeypatch.setattr(NativeScan, name, noted_again(getattr(NativeScan, name)))
    return runs


@pytest.fixture
def python_gradients(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, ...]]:
    """Records the requested gradients of each backward that runs in Python."""
    from flexsn_runtime.kernels._trained import TrainedScan

    needs: list[tuple[bool, ...]] = []
    gradients = TrainedScan.gradients

    def noted(scan: TrainedScan, tensors: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
        needs.append(tuple(needed))
        return gradients(scan, tensors, needed)

    monkeypatch.setattr(TrainedScan, "gradients", noted)
    return needs
