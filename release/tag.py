"""Checks that the repository is ready for a tag, and writes the text for the page of the release.

    hatch run release:tag flexsn-graph-v0.1.0 [--notes FILE]

A tag names a distribution and its version. The script writes the text to FILE, and prints `name=...` for the workflow
that the tag starts.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import identity
from distributions import Distribution, distributions

TAG = re.compile(r"(?P<name>flexsn-[a-z]+)-v(?P<version>\d\S*)")


def tag_of(distribution: Distribution) -> str:
    """Returns the tag of the current version of a distribution."""
    return f"{distribution.name}-v{distribution.version}"


def named_by(tag: str) -> Distribution:
    """Returns the distribution that a tag names.

    Raises:
        ValueError: the tag does not have the form NAME-vVERSION with the name of a distribution, or its version differs
            from the version in the source.
    """
    match = TAG.fullmatch(tag)
    named = [distribution for distribution in distributions() if match and distribution.name == match["name"]]
    if not named:
        raise ValueError(f"{tag} is no tag of a release: those would be now {', '.join(map(tag_of, distributions()))}")
    if tag != tag_of(named[0]):
        raise ValueError(f"{tag}: but the version in the source is {named[0].version}")
    return named[0]


def notes(changelog: str, version: str) -> str:
    """Returns the section about a version in a changelog.

    Raises:
        ValueError: the section is missing, or its heading has no date, as in `## 0.1.0 (2027-01-31)`.
    """
    heading = re.search(
        rf"^## {re.escape(version)}(?: \(([^)\n]*)\))?$\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL
    )
    if heading is None or not heading[2].strip():
        raise ValueError(f"the changelog has no section for {version}")
    try:
        date.fromisoformat(heading[1] or "")
    except ValueError:
        raise ValueError(f"the changelog has no date for {version}, as in `## {version} (2027-01-31)`") from None
    return heading[2].strip() + "\n"


def main(arguments: Sequence[str]) -> int:
    """Checks the repository, and prints the first problem that prevents a release."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="tag", description=__doc__.splitlines()[0])
    parser.add_argument("tag")
    parser.add_argument("--notes", type=Path, help="file for the text of the changelog about this version")
    chosen = parser.parse_args(arguments)
    try:
        distribution = named_by(chosen.tag)
        text = notes((distribution.folder / "CHANGELOG.md").read_text(encoding="utf-8"), str(distribution.version))
        if undecided := identity.read().undecided:
            raise ValueError(f"{identity.SOURCE.name} has {', '.join(undecided)} undecided")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if chosen.notes is not None:
        chosen.notes.write_text(text, encoding="utf-8")
    print(f"name={distribution.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
