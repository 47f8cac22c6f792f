"""Writes the authors and the URLs of `identity.toml` into the metadata of the distributions and into `CITATION.cff`.

hatch run python release/identity.py
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from distributions import ROOT, distributions

SOURCE = Path(__file__).with_name("identity.toml")
UNDECIDED = "UNDECIDED"


@dataclass(frozen=True, slots=True)
class Identity:
    """Authors and URLs in `identity.toml`."""

    authors: tuple[str, ...]
    urls: dict[str, str]

    @property
    def undecided(self) -> list[str]:
        """Names of the undecided URLs."""
        return [name for name, url in self.urls.items() if url == UNDECIDED]

    @property
    def decided_urls(self) -> dict[str, str]:
        """Decided URLs, by name."""
        return {name: url for name, url in self.urls.items() if url != UNDECIDED}


def read() -> Identity:
    """Reads `identity.toml`."""
    content = tomllib.loads(SOURCE.read_text(encoding="utf-8"))
    return Identity(tuple(content["authors"]), content["urls"])


def replaced(text: str, pattern: str, line: str, where: Path) -> str:
    """Returns `text` after replacing the only line that matches `pattern` by `line`.

    Raises:
        LookupError: no line matches, or several lines do.
    """
    result, count = re.subn(pattern, lambda _: line, text, flags=re.MULTILINE)
    if count != 1:
        raise LookupError(f"{where} has {count} lines like {pattern}, and must have one")
    return result


def in_pyproject(text: str, identity: Identity, where: Path) -> str:
    """Returns the text of a `pyproject.toml` with the authors and URLs of `identity`."""
    authors = ", ".join(f"{{ name = {json.dumps(name)} }}" for name in identity.authors)
    urls = ", ".join(f"{name} = {json.dumps(url)}" for name, url in identity.decided_urls.items())
    text = replaced(text, r"^authors = .*$", f"authors = [{authors}]", where)
    return replaced(text, r"^urls = .*$", f"urls = {{ {urls} }}" if urls else "urls = {}", where)


def in_citation(text: str, identity: Identity, where: Path) -> str:
    """Returns the text of a `CITATION.cff` with the authors and the repository of `identity`."""
    authors = ", ".join(f"{{ name: {json.dumps(name)} }}" for name in identity.authors)
    repository = identity.decided_urls.get("Repository")
    line = f"repository-code: {json.dumps(repository)}" if repository else "# repository-code: undecided"
    text = replaced(text, r"^authors: .*$", f"authors: [{authors}]", where)
    return replaced(text, r"^(?:# )?repository-code: .*$", line, where)


def written(identity: Identity) -> dict[Path, str]:
    """Returns the new contents of all files with authors or URLs, by path."""
    files = {distribution.folder / "pyproject.toml": in_pyproject for distribution in distributions()}
    files[ROOT / "CITATION.cff"] = in_citation
    return {path: change(path.read_text(encoding="utf-8"), identity, path) for path, change in files.items()}


def main() -> int:
    """Writes the files, and prints the names of undecided URLs."""
    identity = read()
    for path, text in written(identity).items():
        path.write_text(text, encoding="utf-8")
    if identity.undecided:
        print(f"undecided, and left out: {', '.join(identity.undecided)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
