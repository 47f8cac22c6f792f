"""Runs every Python block of the documents, so that no example becomes outdated.

The blocks of a document run in order, in one namespace and in an empty folder, as if a reader typed them.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from scripts import ROOT, one_thread

DOCUMENTS = [
    "README.md",
    "ARCHITECTURE.md",
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("packages/*/README.md")),
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md")),
]
# Remove a document from this list when it gets its first example.
WITHOUT_EXAMPLES = {
    "ARCHITECTURE.md",
    "docs/README.md",
    "docs/command-line.md",
}
# Documents about an optional extra. Each value is the module that the extra installs.
EXTRAS = {
    "docs/convert.md": "snntorch",
    "docs/data-audio.md": "tonic",
    "docs/data-events.md": "tonic",
    "docs/data-images.md": "torchvision",
    "docs/nir.md": "nir",
}

# The examples of these documents also run in tests in which only the package of the document is installed.
IN_PACKAGE_TESTS = ["packages/flexsn-codegen/README.md", "packages/flexsn-hop/README.md"]
# Documents whose neurons take up to half a minute to compile, although kernels are not their subject. Their examples
# run kernels only with `--long`. Without `--long`, the examples run loops.
MANY_KERNELS = [
    "docs/convert.md",
    "docs/data-audio.md",
    "docs/data-events.md",
    "docs/data-images.md",
    "docs/exact-products.md",
    "docs/helpers.md",
    "docs/metrics-and-blocks.md",
    "docs/faq.md",
    "docs/migrating.md",
    "docs/my-network-does-not-learn.md",
    "docs/nir.md",
    "docs/recurrent.md",
    "docs/reproducibility.md",
    "docs/training-loops.md",
    "docs/training.md",
    "docs/transforms.md",
    "docs/what-this-is-not.md",
    "docs/writing-a-neuron.md",
]

# Documents about the behaviour of one version of torch.
TORCH_VERSIONS = {"docs/why-not-torch-scan.md": "2.15"}

FENCE = re.compile(
    r"^(?P<indent>[ ]*)```[ ]*(?:python|python3|py)\b[^\n]*\n(?P<code>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL | re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Block:
    """The code of a fenced block without the indentation of the fence, and the number of the code's first line."""

    code: str
    line: int


def list_python_blocks(text: str) -> list[Block]:
    blocks = []
    for match in FENCE.finditer(text):
        lines = match["code"].splitlines()
        code = "\n".join(line.removeprefix(match["indent"]) for line in lines)
        blocks.append(Block(code=code, line=text.count("\n", 0, match.start("code")) + 1))
    return blocks


def run_blocks(path: Path, module: ModuleType) -> None:
    for block in list_python_blocks(path.read_text(encoding="utf-8")):
        # Empty lines before the code make line numbers equal to those of the document. So tracebacks and
        # inspect.getsource show the lines of the document.
        source = "\n" * (block.line - 1) + block.code
        exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)


# torch 2.11 warns about its own code when it loads an exported program.
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
# torch's forward mode compiles its formulas with torch.jit.script.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.long(all_but=[document for document in DOCUMENTS if document not in (*IN_PACKAGE_TESTS, *MANY_KERNELS)])
@one_thread()
@pytest.mark.parametrize("document", DOCUMENTS)
def test_examples_run(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_document(document, tmp_path, monkeypatch)


@pytest.mark.usefixtures("loops")
@one_thread()
@pytest.mark.parametrize("document", MANY_KERNELS)
def test_examples_run_without_a_compiler(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_document(document, tmp_path, monkeypatch)


def run_document(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / document
    blocks = list_python_blocks(path.read_text(encoding="utf-8"))
    if document in WITHOUT_EXAMPLES:
        assert not blocks, f"{document} has examples now: remove it from WITHOUT_EXAMPLES"
        return
    assert blocks, f"{document} has no Python block: write one, or add the document to WITHOUT_EXAMPLES"
    if document in EXTRAS:
        pytest.importorskip(EXTRAS[document])
    if not torch.__version__.startswith(TORCH_VERSIONS.get(document, "")):
        pytest.skip(f"the document describes torch {TORCH_VERSIONS[document]}")
    # Each document has its own module, so that classes of an example can be pickled and inspected.
    module = ModuleType("example_" + re.sub(r"\W", "_", document))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.chdir(tmp_path)
    run_blocks(path, module)


def test_blocks_share_a_namespace_and_keep_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.md"
    listed_block = "- in a list\n\n  ```py\n  if a:\n      b = a\n  ```\n"
    path.write_text(f"# x\n\n```python\na = 1\n```\n\n{listed_block}")
    assert list_python_blocks(path.read_text()) == [Block("a = 1", 4), Block("if a:\n    b = a", 10)]
    module = ModuleType("x")
    run_blocks(path, module)
    assert module.__dict__["b"] == 1


def test_broken_example_fails_at_its_line(tmp_path: Path) -> None:
    path = tmp_path / "x.md"
    path.write_text("```sh\nrm x\n```\n\n```python\na = 1\nassert a == 2\n```\n")
    with pytest.raises(AssertionError) as caught:
        run_blocks(path, ModuleType("x"))
    assert (str(caught.traceback[-1].path), caught.traceback[-1].lineno + 1) == (str(path), 7)
