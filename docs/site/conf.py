"""Configuration of the site. Sphinx reads the pages from their folders, and the reference from the docstrings.

    hatch run site:build        builds into build/site; warnings are errors
    hatch run site:check        checks the built site, in a browser if there is one

The pages are the Markdown files of the repository, so that a link between two pages works both on the site and in the
repository. The build adds what only a site needs: the order of the pages, a reference page for each public module, and
the tutorials, which are made by running scripts.
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
    # Docstrings are read from the imported packages, which import torch. The default environment already contains
    # torch.
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
# Two classes have attributes with the same name. A short name in a docstring could mean either, so it links to neither.
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
# A code fence without a language contains terminal output or pseudocode.
highlight_language = "none"
# only dashes, such as that between a parameter and its description; quotation marks stay as typed
smartquotes_action = "D"

# In docstrings, as in Markdown, single backticks mean code. If the code names a public object, it also links to this
# object.
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
if repository != "UNDECIDED":  # shows the link "edit this page"; without a repository, only "view this page"
    html_theme_options |= {"source_repository": repository, "source_branch": "main", "source_directory": ""}
# The prompt is not copied with the text.
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

# The character that joins names with one description while docstrings are parsed. Otherwise, "x, y" would be read as a
# type and a name.
JOINED = "\N{ZERO WIDTH SPACE}"
FIELDS = re.compile(r"(\s*)(?:Args|Attributes):")
NAMES = re.compile(r"\s*\w+(?:, \w+)+(?=: )")
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s:]+)\)")


def toctree(entries: list[str], *options: str) -> str:
    """Returns a list of pages for the sidebar. The page itself does not show this list."""
    return "\n".join(["", "```{toctree}", ":hidden:", *options, "", *entries, "```", ""])


def list_guides() -> dict[str, list[str]]:
    """Returns the pages by the headings of the index, in the order of the index. The page of a tutorial has the name of
    its script.
    """
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    _, *parts = re.split(r"^## (.*)$", index, flags=re.MULTILINE)
    pages_by_heading = {
        heading: [f"/docs/{name}" for name in re.findall(r"\]\(((?:tutorials/)?[\w-]+)\.(?:md|py)\)", text)]
        for heading, text in zip(parts[::2], parts[1::2], strict=True)
    }
    return {heading: list(dict.fromkeys(pages)) for heading, pages in pages_by_heading.items() if pages}


def list_lower_pages(page: str) -> str:
    """Returns the pages below `page` in the sidebar."""
    if page == "README":
        packages = [f"/packages/{path.parent.name}/README" for path in sorted(ROOT.glob("packages/*/README.md"))]
        others = [f"/{path.stem}" for path in sorted(ROOT.glob("*.md")) if path.stem != "README"]
        return (
            toctree(["Overview </docs/README>"])
            + "".join(toctree(pages, f":caption: {heading}") for heading, pages in list_guides().items())
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
    """Returns a link for the site. A link to a folder becomes a link to the page of the folder, or plain text if it has
    no page.

    A link to the script of a tutorial becomes a link to the tutorial's page, except on that page itself.
    """
    folder = ROOT / Path(page).parent / target
    if folder.suffix == ".py" and folder.parent.name == "tutorials" and not page.startswith("docs/tutorials/"):
        return f"[{text.removesuffix('.py')}]({target.removesuffix('.py')}.md)"
    if not folder.is_dir():
        return f"[{text}]({target})"
    return f"[{text}]({target.rstrip('/')}/README.md)" if (folder / "README.md").is_file() else text


def prepare_page(app: Sphinx, page: str, source: list[str]) -> None:
    """Adapts a Markdown file to the site."""
    if page == root_doc:
        # the index sets the order, so this page must be read again when the index changes
        app.env.note_dependency(ROOT / "docs" / "README.md")
    if not page.startswith("docs/site/"):
        source[0] = LINK.sub(lambda match: link_to_a_page(page, *match.groups()), source[0]) + list_lower_pages(page)


def separate_plurals(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Separates plural endings from code: "`nn.Parameter`s" works in Markdown, but reStructuredText needs a mark after
    the code.
    """
    lines[:] = [re.sub(r"(?<=\w`)(?=s\b)", r"\\ ", line) for line in lines]


def join_names(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Joins names that share a description. For example, "`mean, scale, shift: of one shape`" describes three
    arguments.
    """
    indent: int | None = None  # the indentation of the current heading, such as "Args:"; None outside of sections
    for number, line in enumerate(lines):
        if indent is not None and line.strip() and len(line) - len(line.lstrip()) <= indent:
            indent = None
        if section := FIELDS.fullmatch(line):
            indent = len(section[1])
        elif indent is not None:
            lines[number] = NAMES.sub(lambda match: match[0].replace(", ", JOINED), line)


def write_field_words(app: Sphinx, doctree: nodes.document) -> None:
    """Writes a comma and a space between joined names, and calls the attributes of a class attributes instead of
    variables.
    """
    for text in list(doctree.findall(nodes.Text)):
        if JOINED in text:
            text.parent.replace(text, nodes.Text(text.replace(JOINED, ", ")))
        elif text == "Variables" and isinstance(text.parent, nodes.field_name):
            text.parent.replace(text, nodes.Text("Attributes"))


def simplify_signature(
    app: Sphinx, what: str, name: str, value: object, options: object, signature: str | None, returns: str | None
) -> tuple[str, str | None] | None:
    """Removes `<factory>` of dataclasses, `<class 'a.B'>` and `~typing.~P`, which make signatures hard to read."""
    if signature is None:
        return None
    signature = re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", signature)
    return signature.replace("<factory>", "...").replace("~typing.~", ""), returns


def skip_fields(app: Sphinx, what: str, name: str, value: object, skip: bool, options: object) -> bool | None:
    """Skips the fields of a named tuple, because its docstring describes them and their own text is only "Alias for
    field number 0".
    """
    return True if (getattr(value, "__doc__", None) or "").startswith("Alias for field number") else None


def qualify_errors(app: Sphinx, doctree: nodes.document) -> None:
    """Links the names of errors to the package of the docstring, because two packages have errors with the same
    name.
    """
    for reference in doctree.findall(pending_xref):
        package = str(reference.get("py:module", "")).partition(".")[0]
        if package in sys.modules and reference["reftarget"] in errors_of(sys.modules[package]):
            place = package if hasattr(sys.modules[package], reference["reftarget"]) else f"{package}.errors"
            reference["reftarget"] = f"{place}.{reference['reftarget']}"


def write_front_page(app: Sphinx, exception: Exception | None) -> None:
    """Writes `index.html`, which a server returns for the folder."""
    if exception is None and app.builder.format == "html":
        shutil.copyfile(Path(app.outdir) / "README.html", Path(app.outdir) / "index.html")


BACK = re.compile(r'<a class="viewcode-back" href="([^"#]+)#([^"]+)">\[docs\]</a>')
LISTED = re.compile(r'<li><a href="([^"#:]+)">[^<]*</a></li>')


def drop_dead_links_back(app: Sphinx, exception: Exception | None) -> None:
    """Removes links from source pages to names that no page describes, and removes modules without a source page from
    the list.
    """
    if exception is not None or app.builder.format != "html":
        return
    places: dict[Path, set[str]] = {}
    for page in Path(app.outdir).glob("_modules/**/*.html"):

        def keep_live_link(match: re.Match[str], folder: Path = page.parent) -> str:
            target = (folder / match[1]).resolve()
            if target not in places:
                text = target.read_text(encoding="utf-8") if target.is_file() else ""
                places[target] = set(re.findall(r'\bid="([^"]+)"', text))
            return match[0] if match[2] in places[target] else ""

        def keep_existing_module(match: re.Match[str], folder: Path = page.parent) -> str:
            return match[0] if (folder / match[1]).is_file() else ""

        text = BACK.sub(keep_live_link, page.read_text(encoding="utf-8"))
        if page.parent.name == "_modules" and page.name == "index.html":
            text = LISTED.sub(keep_existing_module, text)
        page.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Connects the functions above. Sphinx calls this before it looks for pages."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    write_reference(Path(app.confdir) / "reference")
    write_tutorials(ROOT / "docs" / "tutorials")
    app.connect("source-read", prepare_page)
    app.connect("autodoc-process-docstring", separate_plurals)
    # must run before napoleon, which has priority 500
    app.connect("autodoc-process-docstring", join_names, priority=400)
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("autodoc-process-signature", simplify_signature)
    app.connect("doctree-read", write_field_words)
    app.connect("doctree-read", qualify_errors)
    app.connect("build-finished", write_front_page)
    app.connect("build-finished", drop_dead_links_back)
