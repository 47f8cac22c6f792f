"""The built site: it describes every public name, all links work, and a browser displays it.

    hatch run site:build && hatch run site:check

`--basetemp=FOLDER` sets the folder of the screenshots.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import threading
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NO_BROWSER = "there is no browser: none of chromium, chromium-browser and google-chrome is on the path"
# The first page that a reader sees, and one page of each kind.
MAIN_PAGES = {
    "index.html": "FlexSN",
    "docs/installing.html": "Installing",
    "docs/neurons.html": "Ready-made neurons",
    "docs/surrogates.html": "Surrogate gradients",
    "docs/performance.html": "Performance",
    "docs/tutorials/own_neuron.html": "A neuron of your own, trained",
    "docs/site/reference/flexsn_nn.html": "flexsn_nn",
    "docs/site/reference/flexsn_nn.neuron.html": "flexsn_nn.neuron",
    "docs/site/reference/flexsn_hop.html": "flexsn_hop",
    "packages/flexsn-graph/README.html": "flexsn-graph",
}


class Page(HTMLParser):
    """The links of a page, and its link targets."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Records the link and the name of a tag."""
        values = dict(attrs)
        self.links += [value for name in ("href", "src") if (value := values.get(name))]
        self.places |= {value for name in ("id", "name") if (value := values.get(name))}


@pytest.fixture(scope="module")
def pages() -> dict[Path, Page]:
    pages_by_path = {path.resolve(): Page(path) for path in SITE.rglob("*.html")}
    assert pages_by_path, "there is no site: `hatch run site:build` makes it"
    return pages_by_path


def broken_links(page: Page, pages: dict[Path, Page]) -> list[str]:
    broken = []
    for link in page.links:
        if re.match(r"[a-z]+:|//", link):
            continue  # a link to another site, which a test cannot check
        target, _, anchor = unquote(link.partition("?")[0]).partition("#")
        path = (page.path.parent / target).resolve() if target else page.path.resolve()
        if not path.is_file() or (anchor and path in pages and anchor not in pages[path].places):
            broken.append(link)
    return broken


def test_every_link_has_an_existing_target(pages: dict[Path, Page]) -> None:
    broken_by_page = {
        str(page.path.relative_to(SITE)): links for page in pages.values() if (links := broken_links(page, pages))
    }
    assert broken_by_page == {}


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    path.write_text(
        '<a id="here" href="#here"></a> <a href="#there"></a> <img src="none.png"> <a href="https://x.org">'
    )
    page = Page(path)
    assert broken_links(page, {path.resolve(): page}) == ["#there", "none.png"]


def list_described_names() -> set[str]:
    """Returns the names that the reference describes, from the inventory that Sphinx writes."""
    content = (SITE / "objects.inv").read_bytes().split(b"\n", 4)[4]
    lines = zlib.decompress(content).decode().splitlines()
    return {line.split(" ", 1)[0] for line in lines if " py:" in line}


def list_public_names(module: str, names: dict[str, Any]) -> Iterator[str]:
    for name, description in names.items():
        if description["kind"] == "module":
            yield from list_public_names(f"{module}.{name}", description["names"])
        elif name != "__version__":
            yield f"{module}.{name}"


@pytest.mark.parametrize("snapshot", sorted(ROOT.glob("tests/api/*.json")), ids=lambda path: path.stem)
def test_every_public_name_is_described(snapshot: Path) -> None:
    """Looks for a name in the module that exports it, and in the module that defines it, such as `flexsn_nn.neuron` for
    `LIF`.
    """
    described = list_described_names()
    names = list(list_public_names(snapshot.stem, json.loads(snapshot.read_text(encoding="utf-8"))))
    assert names
    short = {name.rpartition(".")[2] for name in described}
    missing = [n for n in names if n not in described and n.rpartition(".")[2] not in short]
    assert missing == []


def test_the_reference_reads_docstrings_and_signatures_correctly() -> None:
    """Checks, for example, that "`Args: x, y: what they are`" describes two arguments, and not a `y` of the type
    `x,`.
    """
    texts = [path.read_text(encoding="utf-8") for path in SITE.glob("docs/site/reference/*.html")]
    assert any(re.search(r"<strong>\w+(, \w+)+</strong>", text) for text in texts)
    misread = ("<em>,</em>)", "Alias for field number", "&lt;factory&gt;", "Variables<span", "~flexsn_", "~torch.")
    assert [sign for sign in misread for text in texts if sign in text] == []


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Yields the address of the site on a local server. On a page opened from a file, the search would not work."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Logs nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def browse(url: str, profile: Path, *options: str) -> tuple[str, list[str]]:
    """Returns the output of the browser, and the errors in the scripts and files of the page."""
    assert BROWSER is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    # A newly installed browser looks for updates, and waits for them without an internet connection.
    flags += ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    # With virtual time, the browser does not wait for scripts, and the page is complete.
    command = [BROWSER, *flags, f"--user-data-dir={profile}", "--virtual-time-budget=20000", *options, url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    complaints = re.findall(r":(?:ERROR|INFO|WARNING):CONSOLE[^\]]*\] (.*)", done.stderr)
    return done.stdout, [line for line in complaints if "rror" in line or "ailed" in line]


@pytest.mark.skipif(BROWSER is None, reason=NO_BROWSER)
@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.parametrize("page", MAIN_PAGES)
def test_a_browser_shows_the_page(page: str, width: int, server: str, tmp_path: Path) -> None:
    screenshot = tmp_path / (page.replace("/", "_").removesuffix(".html") + ".png")
    _, errors = browse(
        f"{server}/{page}", tmp_path / "profile", f"--screenshot={screenshot}", f"--window-size={width},1000"
    )
    assert errors == []
    image = screenshot.read_bytes()
    assert image.startswith(b"\x89PNG")
    assert (int.from_bytes(image[16:20]), int.from_bytes(image[20:24])) == (width, 1000)
    assert len(image) > 30_000, "a screenshot of this size shows an empty page"


@pytest.mark.skipif(BROWSER is None, reason=NO_BROWSER)
@pytest.mark.parametrize("page", MAIN_PAGES)
def test_scripts_of_the_page_leave_it_complete(page: str, server: str, tmp_path: Path) -> None:
    dom, errors = browse(f"{server}/{page}", tmp_path / "profile", "--dump-dom")
    assert errors == []
    heading = re.search(r"<h1>(.*?)<a class=\"headerlink\"", dom, re.DOTALL)
    assert heading is not None
    assert re.sub(r"<[^>]*>", "", heading[1]).strip() == MAIN_PAGES[page]
    assert 'class="sidebar-search"' in dom


@pytest.mark.skipif(BROWSER is None, reason=NO_BROWSER)
@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("surrogate", "docs/surrogates.html"),
        ("reset_net", "docs/site/reference/flexsn_nn.functional.html"),
        ("eager_scan", "docs/site/reference/flexsn_hop.html"),
    ],
)
def test_the_search_finds(query: str, page: str, server: str, tmp_path: Path) -> None:
    dom, errors = browse(f"{server}/search.html?q={query}", tmp_path / "profile", "--dump-dom")
    assert errors == []
    results = re.search(r'id="search-results".*', dom, re.DOTALL)
    assert results is not None
    assert f'href="{page}' in results[0].replace('href="./', 'href="')
