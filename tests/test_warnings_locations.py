"""Locations of warnings. A warning names the line of the user's code in eager mode, modules, threads and compiled
code.
"""

from __future__ import annotations

import ast
import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsn_codegen import pointwise
from flexsn_codegen.functions import _kernel
from flexsn_graph.callers import warn
from flexsn_nn import FlexSN

ROOT = Path(__file__).resolve().parents[1]
# Files that warn about the installation at import.
IMPORT_FILES = {"versions.py", "_triton_private.py", "callers.py"}


@pytest.fixture(autouse=True)
def few_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowers the number of variants from which a warning is raised, because each variant is traced and compiled."""
    monkeypatch.setattr(_kernel, "_MAX_VARIANTS", 3)


def list_files(call: Callable[[], object]) -> list[str]:
    """Returns the files that the warnings of this project name during a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    messages = ("compiled 3 times", "no module and no optimizer", "runs as a loop", "a warning")
    return [w.filename for w in caught if any(part in str(w.message) for part in messages)]


def compile_for_many_numbers() -> Callable[[], object]:
    fused = pointwise(lambda x, n: x * int(n))

    def call() -> None:
        for n in range(5):
            fused(torch.ones(3), float(n))

    return call


def capture_unregistered_parameter() -> Callable[[], object]:
    weight = nn.Parameter(torch.ones(3))

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return x * weight, v + x

    return lambda: FlexSN(core, 1, 1, 1)(torch.ones(4, 3))


def call_in_a_module(call: Callable[[], object]) -> Callable[[], object]:
    class Calls(nn.Module):
        def forward(self) -> object:
            return call()

    return nn.Sequential(Calls())[0]


def call_in_a_thread(call: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    return run


def call_directly(call: Callable[[], object]) -> Callable[[], object]:
    return call


@pytest.mark.parametrize("around", [call_directly, call_in_a_module, call_in_a_thread])
@pytest.mark.parametrize("source", [compile_for_many_numbers, capture_unregistered_parameter])
def test_warnings_name_the_users_file(source: Callable[[], Any], around: Callable[[Any], Callable[[], object]]) -> None:
    locations = list_files(around(source()))
    assert locations
    assert set(locations) == {__file__}


def test_warnings_name_the_function_without_user_code_on_the_stack() -> None:
    fused = pointwise(lambda x, n: x * int(n))
    for n in range(3):
        fused(torch.ones(3), float(n))
    # The first frame of the thread belongs to the kernel, so the warning names the line of the function.
    assert list_files(call_in_a_bare_thread(fused)) == [__file__]


def call_in_a_bare_thread(fused: Any) -> Callable[[], object]:
    def run() -> None:
        thread = threading.Thread(target=fused, args=(torch.ones(3), 4.0))
        thread.start()
        thread.join()

    return run


def test_warnings_during_compilation_name_the_users_file() -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        namespace = {"__name__": "torch.somewhere", "warn": warn}
        exec(compile("def lower():\n    warn('a warning')\n", "<eval_with_key>.7", "exec"), namespace)
        namespace["lower"]()  # type: ignore[operator]
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(lambda x: x + 1, backend=backend)
    assert list_files(lambda: compiled(torch.ones(3))) == [__file__]


@pytest.mark.parametrize("has_product", [False, True], ids=["elementwise", "with a product"])
def test_warnings_of_compiled_scans_name_the_users_line(has_product: bool) -> None:
    matrix = torch.rand(7, 7)

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v @ matrix + x if has_product else v + x
        h = h.sort(-1)[0]  # the refused line
        return h, h * 0.5

    line = core.__code__.co_firstlineno + 2
    torch.compiler.reset()
    compiled = torch.compile(FlexSN(core, 1, 1, 1, backend="hop"))
    with pytest.warns(UserWarning, match=rf"sort.*\n  at {re.escape(__file__)}:{line}, in core: h = h\.sort"):
        compiled(torch.ones(4, 3, 7))


def test_all_warnings_use_the_helper() -> None:
    uses = []
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        if path.name not in IMPORT_FILES:
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            calls = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
            uses += [(path.name, call) for call in calls if call.startswith("warnings.warn")]
    assert not uses
