"""The site: Sphinx reads the pages in their places, and the reference from the docstrings.

    hatch run site:build        into build/site; a warning is an error
    hatch run site:check        checks the built site, in a browser if there is one

The pages are the repository's own Markdown files, so that a link between two of them works both on the site and in the
repository. The build adds the parts that only a site needs: the order of the pages, a page of reference for each public
module, and the tutorials, which are scripts that run.
"""

from __future__ import annotations

import os
import re
import shutil
import site
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), *(str(path) for path in sorted(ROOT.glob("packages/*/src")))]
if find_spec("torch") is None:
    # Docstrings come from the imported packages, which import torch: the default environment already has it.
    for folder in sorted(ROOT.glob(f".venv/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages")):
        site.addsitedir(str(folder))
    if find_spec("torch") is None:
        raise RuntimeError("there is no torch for this Python: run `hatch env create` first, with the same Python")

from reference import MODULES, errors_of, write_reference  # noqa: E402
from tutorials import write_tutorials  # noqa: E402

import flexsn_nn  # noqa: E402

project = "FlexSN"
html_title = f"FlexSN {flexsn_nn.__version__}"
language = "en"
# Two classes have attributes of one name: a short word in a docstring may mean either, and links to neither.
suppress_warnings = ["ref.python"]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]

root_doc = "README"
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/tutorials/*.md",
    "docs/site/reference/*.rst",
    "packages/*/README.md",
    "packages/*/CHANGELOG.md",
    "benchmarks/results/*.md",
    "release/*.md",
]
exclude_patterns = ["build", ".venv", "**/tests"]

myst_heading_anchors = 4
# Without a language, a fence is a terminal's output or pseudocode.
highlight_language = "none"
smartquotes_action = "D"  # dashes, between a parameter and its meaning; quotation marks stay as typed

# In docstrings, as in Markdown, single backticks are code; if they name a public object, they also link to it.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 96
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
add_module_names = False

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_show_sphinx = False
html_theme_options: dict[str, object] = {"navigation_with_keys": True}
repository = tomllib.loads((ROOT / "release" / "identity.toml").read_text(encoding="utf-8"))["urls"]["Repository"]
if repository != "UNDECIDED":  # links "edit this page"; without a repository, only "view this page"
    html_theme_options |= {"source_repository": repository, "source_branch": "main", "source_directory": ""}
# A prompt is not part of the copied text.
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

# Joins names that share a description while docstrings are parsed: "x, y" would be a type and a name.
JOINED = "\N{ZERO WIDTH SPACE}"
FIELDS = re.compile(r"(\s*)(?:Args|Attributes):")
NAMES = re.compile(r"\s*\w+(?:, \w+)+(?=: )")
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s:]+)\)")


def toctree(entries: list[str], *options: str) -> str:
    """Returns a list of pages for the sidebar, which the page itself does not show."""
    return "\n".join(["", "```{toctree}", ":hidden:", *options, "", *entries, "```", ""])


def guides() -> dict[str, list[str]]:
    """Returns the pages by the headings of the index, in its order; a tutorial's page has the name of its script."""
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    _, *parts = re.split(r"^## (.*)$", index, flags=re.MULTILINE)
    found = {
        heading: [f"/docs/{name}" for name in re.findall(r"\]\(((?:tutorials/)?[\w-]+)\.(?:md|py)\)", text)]
        for heading, text in zip(parts[::2], parts[1::2], strict=True)
    }
    return {heading: list(dict.fromkeys(pages)) for heading, pages in found.items() if pages}


def what_follows(page: str) -> str:
    """Returns the pages below `page` in the sidebar."""
    if page == "README":
        packages = [f"/packages/{path.parent.name}/README" for path in sorted(ROOT.glob("packages/*/README.md"))]
        others = [f"/{path.stem}" for path in sorted(ROOT.glob("*.md")) if path.stem != "README"]
        return (
            toctree(["Overview </docs/README>"])
            + "".join(toctree(pages, f":caption: {heading}") for heading, pages in guides().items())
            + toctree([f"/docs/site/reference/{module}" for module in MODULES], ":caption: Reference")
            + toctree(packages, ":caption: Packages")
            + toctree(others, ":caption: Project")
        )
    if page == "RELEASING" and any(ROOT.glob("release/*.md")):
        return toctree(["/release/*"], ":glob:")
    if page == "docs/performance":
        return toctree(["/benchmarks/results/*"], ":glob:")
    if page.startswith("packages/") and page.endswith("README"):
        return toctree([f"/{page.removesuffix('README')}CHANGELOG"])
    return ""


def link_to_a_page(page: str, text: str, target: str) -> str:
    """Returns a link for the site: a link to a folder leads to its page, and is plain text if there is none.

    A link to the script of a tutorial leads to its page, except from that page.
    """
    folder = ROOT / Path(page).parent / target
    if folder.suffix == ".py" and folder.parent.name == "tutorials" and not page.startswith("docs/tutorials/"):
        return f"[{text.removesuffix('.py')}]({target.removesuffix('.py')}.md)"
    if not folder.is_dir():
        return f"[{text}]({target})"
    return f"[{text}]({target.rstrip('/')}/README.md)" if (folder / "README.md").is_file() else text


def prepare_page(app: Sphinx, page: str, source: list[str]) -> None:
    """Adapts a file to the needs of a site."""
    if page == root_doc:
        app.env.note_dependency(ROOT / "docs" / "README.md")  # sets the order: a change of it needs this page again
    if not page.startswith("docs/site/"):
        source[0] = LINK.sub(lambda match: link_to_a_page(page, *match.groups()), source[0]) + what_follows(page)


def plurals(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Separates plurals: "`nn.Parameter`s" is fine in Markdown, but reStructuredText needs a mark after the code."""
    lines[:] = [re.sub(r"(?<=\w`)(?=s\b)", r"\\ ", line) for line in lines]


def names_of_one_description(
    app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    """Joins names that share a description: "`mean, scale, shift: of one shape`" describes three."""
    within: int | None = None  # the indentation of a heading, "Args:"
    for number, line in enumerate(lines):
        if within is not None and line.strip() and len(line) - len(line.lstrip()) <= within:
            within = None
        if found := FIELDS.fullmatch(line):
            within = len(found[1])
        elif within is not None:
            lines[number] = NAMES.sub(lambda match: match[0].replace(", ", JOINED), line)


def words_of_fields(app: Sphinx, doctree: nodes.document) -> None:
    """Writes joined names with a comma and a space, and calls attributes of a class so, not variables."""
    for text in list(doctree.findall(nodes.Text)):
        if JOINED in text:
            text.parent.replace(text, nodes.Text(text.replace(JOINED, ", ")))
        elif text == "Variables" and isinstance(text.parent, nodes.field_name):
            text.parent.replace(text, nodes.Text("Attributes"))


def readable_signature(
    app: Sphinx, what: str, name: str, value: object, options: object, signature: str | None, returns: str | None
) -> tuple[str, str | None] | None:
    """Removes `<factory>` of dataclasses, `<class 'a.B'>` and `~typing.~P`, which make signatures unreadable."""
    if signature is None:
        return None
    signature = re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", signature)
    return signature.replace("<factory>", "...").replace("~typing.~", ""), returns


def skip_fields(app: Sphinx, what: str, name: str, value: object, skip: bool, options: object) -> bool | None:
    """Skips fields of a named tuple, whose docstring describes them; each one is an "Alias for field number 0"."""
    return True if (getattr(value, "__doc__", None) or "").startswith("Alias for field number") else None


def name_errors_in_full(app: Sphinx, doctree: nodes.document) -> None:
    """Links names of errors to the docstring's own package, because two packages have errors of one name."""
    for reference in doctree.findall(pending_xref):
        package = str(reference.get("py:module", "")).partition(".")[0]
        if package in sys.modules and reference["reftarget"] in errors_of(sys.modules[package]):
            place = package if hasattr(sys.modules[package], reference["reftarget"]) else f"{package}.errors"
            reference["reftarget"] = f"{place}.{reference['reftarget']}"


def front_page(app: Sphinx, exception: Exception | None) -> None:
    """Writes `index.html`, which a server returns for the folder."""
    if exception is None and app.builder.format == "html":
        shutil.copyfile(Path(app.outdir) / "README.html", Path(app.outdir) / "index.html")


BACK = re.compile(r'<a class="viewcode-back" href="([^"#]+)#([^"]+)">\[docs\]</a>')
LISTED = re.compile(r'<li><a href="([^"#:]+)">[^<]*</a></li>')


def drop_dead_links_back(app: Sphinx, exception: Exception | None) -> None:
    """Removes links from sources back to names that no page describes, and modules without a source from their list."""
    if exception is not None or app.builder.format != "html":
        return
    places: dict[Path, set[str]] = {}
    for page in Path(app.outdir).glob("_modules/**/*.html"):

        def kept(match: re.Match[str], folder: Path = page.parent) -> str:
            target = (folder / match[1]).resolve()
            if target not in places:
                text = target.read_text(encoding="utf-8") if target.is_file() else ""
                places[target] = set(re.findall(r'\bid="([^"]+)"', text))
            return match[0] if match[2] in places[target] else ""

        def listed(match: re.Match[str], folder: Path = page.parent) -> str:
            return match[0] if (folder / match[1]).is_file() else ""

        text = BACK.sub(kept, page.read_text(encoding="utf-8"))
        if page.parent.name == "_modules" and page.name == "index.html":
            text = LISTED.sub(listed, text)
        page.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Connects the functions above; Sphinx calls this before it looks for pages."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    write_reference(Path(app.confdir) / "reference")
    write_tutorials(ROOT / "docs" / "tutorials")
    app.connect("source-read", prepare_page)
    app.connect("autodoc-process-docstring", plurals)
    app.connect("autodoc-process-docstring", names_of_one_description, priority=400)  # before napoleon, whose is 500
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("autodoc-process-signature", readable_signature)
    app.connect("doctree-read", words_of_fields)
    app.connect("doctree-read", name_errors_in_full)
    app.connect("build-finished", front_page)
    app.connect("build-finished", drop_dead_links_back)
