"""Private names of torch and Triton. A missing name is reported once, at import. Only the modules that look up private
names may use private names.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from flexsn_graph.versions import TESTED, UnsupportedVersionError, lacking, needed, private

ROOT = Path(__file__).resolve().parents[1]
COPIES = {name: sorted(ROOT.glob(f"packages/*/src/*/{name}.py")) for name in ("versions", "callers")}
SOURCES = sorted(path for path in ROOT.glob("packages/*/src/**/*.py") if "_private" not in str(path))


def run_process(code: str, *options: str) -> tuple[str, str]:
    """Returns the output and the warnings of a new process that runs `code`."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *options, "-c", code]
    process = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout, process.stderr


def test_readme_has_the_table_of_versions() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    displayed = readme.split("<!-- what release/torch_versions.py wrote -->\n")[1].split("<!-- until here -->")[0]
    table = (ROOT / "benchmarks" / "results" / "torch_versions.md").read_text(encoding="utf-8")
    assert displayed.splitlines() == [line for line in table.splitlines() if line.startswith("|")]
    assert len(displayed.splitlines()) > 2


def test_declared_bounds_are_the_oldest_tested_versions() -> None:
    bounds = {}
    for path in ROOT.glob("packages/*/pyproject.toml"):
        for line in tomllib.loads(path.read_text(encoding="utf-8"))["project"]["dependencies"]:
            requirement = Requirement(line)
            if requirement.name in TESTED:
                bounds[path.parent.name, requirement.name] = str(requirement.specifier)
    assert bounds == {key: f">={TESTED[key[1]][0]}" for key in bounds}
    assert len(bounds) >= 7


def test_environment_has_the_newest_tested_versions() -> None:
    lines = tomllib.loads((ROOT / "hatch.toml").read_text(encoding="utf-8"))["envs"]["default"]["dependencies"]
    pins = {Requirement(line).name: str(Requirement(line).specifier) for line in lines}
    assert {name: pins[name] for name in TESTED} == {name: f"=={versions[-1]}.*" for name, versions in TESTED.items()}


def test_copied_modules_are_equal() -> None:
    for paths in COPIES.values():
        assert len(paths) >= 2
        assert len({path.read_text(encoding="utf-8") for path in paths}) == 1


def list_private_names(source: str) -> list[str]:
    """Returns the names in `source` that belong to torch and begin with an underscore, or that belong to undocumented
    modules of Triton.
    """
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    private_pattern = re.compile(r"torch\.(?!ops\.)(?:\w+\.)*_(?!_)\w+|triton\.(?:runtime|compiler|backends)\b")
    return sorted(name for name in names if private_pattern.match(name))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_only_private_modules_use_private_names(path: Path) -> None:
    assert list_private_names(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source", ["import torch._dynamo", "torch._C.x()", "from torch.fx import _pytree", "from triton.compiler import X"]
)
def test_private_names_are_detected(source: str) -> None:
    assert list_private_names(source) != []


# Each case contains a module, a name that is deleted from the module before FlexSN is imported, words of the warning, a
# call, and the outcome of the call. torch itself works without the name.
CALL = "LIF(backend='triton')(torch.ones(4, 3))"
COMPILED = "torch.compile(LIF(backend='hop'), backend='eager')(torch.ones(4, 3))"
VJP = "flexsn_graph.generate_forward_and_backward_graph(lambda x: x * 2, (torch.ones(3, requires_grad=True),))"
MISSING_NAMES = [
    ("torch.autograd.graph", "_engine_run_backward", "gradients cannot be traced", VJP, "UnsupportedVersionError"),
    ("torch.autograd.forward_ad", "_current_level", "would not see a transform", CALL, "UnsupportedVersionError"),
    ("torch._C", "_current_graph_task_id", "a call from a recomputation", CALL, "UnsupportedVersionError"),
    ("torch._dynamo.variables.higher_order_ops", "make_attr", "breaks its graph", COMPILED, "ran"),
    ("torch._functorch.partitioners", "min_cut_rematerialization_partition", "cannot split", CALL, "ran"),
    ("torch._inductor.lowering", "process_subgraph_nodes", "without kernels", CALL, "ran"),
    ("torch._higher_order_ops.while_loop", "while_loop", "the lowering 'while_loop'", CALL, "ran"),
    ("triton.compiler.compiler", "CompiledKernel", "take longer", CALL, "ran"),
]


@pytest.mark.long(all_but=["CompiledKernel"])
@pytest.mark.parametrize(
    ("module", "name", "consequence", "call", "outcome"), MISSING_NAMES, ids=[case[1] for case in MISSING_NAMES]
)
def test_missing_names_are_reported_and_raised(
    module: str, name: str, consequence: str, call: str, outcome: str
) -> None:
    code = f"""
import importlib, torch
delattr(importlib.import_module({module!r}), {name!r})
import flexsn_graph
from flexsn_nn import LIF
import flexsn_nn, flexsn_hop, flexsn_runtime
try:
    {call}
    print("ran")
except Exception as error:
    print(type(error).__name__, error)
"""
    output, warnings = run_process(code)
    library = module.partition(".")[0]
    messages = re.findall(
        rf"UnsupportedVersionWarning: ({library} [\w.+]+ has no {re.escape(module)}\.{name}: .*)", warnings
    )
    # several modules may need the same name, and each warns of another consequence
    messages = [line for line in messages if consequence in line]
    assert len(messages) == 1, warnings
    assert TESTED[library][-1] in messages[0]
    assert output.startswith(outcome), output
    if outcome != "ran":
        assert messages[0] in output


@pytest.mark.long(all_but=["triton"])
@pytest.mark.parametrize("library", sorted(TESTED))
def test_newer_versions_cause_one_warning(library: str) -> None:
    code = f"""
import importlib.metadata, torch
version = importlib.metadata.version
importlib.metadata.version = lambda name: "99.1.0" if name == {library!r} else version(name)
if {library!r} == "torch":
    torch.__version__ = "99.1.0+cpu"
from flexsn_nn import LIF
print(tuple(LIF(backend="triton")(torch.ones(4, 3)).shape))
"""
    output, warnings = run_process(code)
    assert output.strip() == "(4, 3)"
    first, last = TESTED[library][0], TESTED[library][-1]
    assert warnings.count(f"FlexSN was tested with {library} {first} to {last}; this is 99.1.0") == 1, warnings


def test_current_version_has_all_names() -> None:
    names = ["reenter_make_fx", "unique_graph_id.prefix", "torch", "unwritten_name"]
    assert lacking("torch._higher_order_ops.utils", names) == ["unwritten_name"]
    code = """
import sys, torch
from flexsn_graph.versions import lacking
print(lacking("torch._inductor.lowering", ["fallback_handler.add_to_fallback_set", "unwritten_name"]))
print("torch._inductor.lowering" in sys.modules)
import flexsn_nn
"""
    output, warnings = run_process(code, "-W", "always")
    assert output.splitlines() == ["['unwritten_name']", "False"]
    assert "UnsupportedVersionWarning" not in warnings


def test_probes_report_missing_names() -> None:
    with pytest.warns(UserWarning, match=r"has no torch\.nn\.Foo: nothing works"):
        stand_in = private("torch", "nn.Foo", "nothing works")
    assert not isinstance(3, stand_in)
    for use in (stand_in, lambda: stand_in.attribute, type("Derived", (stand_in,), {})):
        with pytest.raises(UnsupportedVersionError, match="nothing works"):
            use()
    with pytest.warns(UserWarning, match=r"\.relu\(steps=\.\.\.\)"):
        private("torch.nn.functional", "relu", "nothing works", takes=["input", "steps"], default=None)
    with pytest.raises(UnsupportedVersionError, match=r"has no torch\.nowhere\.x"):
        needed("torch.nowhere", "x", "nothing works")
