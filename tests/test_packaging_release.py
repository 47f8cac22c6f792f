"""Requirements of a release: equal metadata in all distributions, one file for undecided facts, and matching tags."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path

import identity
import pytest
import tag
import wheels
from distributions import ROOT, Distribution, distributions, in_order
from trove_classifiers import classifiers

WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))


def test_distributions_are_ordered_by_requirements() -> None:
    order = [distribution.name for distribution in in_order()]
    assert sorted(order) == [distribution.name for distribution in distributions()]
    for distribution in distributions():
        for sibling in distribution.siblings:
            assert order.index(sibling.name) < order.index(distribution.name)


def test_release_page_lists_distributions_in_order() -> None:
    page = " ".join((ROOT / "RELEASING.md").read_text(encoding="utf-8").split())
    assert f": {', '.join(distribution.name for distribution in in_order())}." in page


@pytest.mark.parametrize("distribution", distributions(), ids=lambda distribution: distribution.name)
def test_metadata_are_complete_and_equal(distribution: Distribution) -> None:
    project = distribution.project
    assert set(project["classifiers"]) <= classifiers, "package indexes refuse unknown classifiers"
    assert any(line.startswith("Development Status :: ") for line in project["classifiers"])
    for field in ("classifiers", "requires-python", "license", "authors", "urls"):
        assert project[field] == distributions()[0].project[field], field
    assert "pytorch" in project["keywords"]


def test_undecided_facts_are_in_one_file() -> None:
    facts = identity.read()
    for path, text in identity.written(facts).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run `hatch run python release/identity.py`"
        assert identity.UNDECIDED not in text
        assert not re.search(r"example\.(?:com|org|invalid)", text)


def test_decided_facts_are_written_everywhere() -> None:
    decided = identity.Identity(("Ada", "Bo"), {"Repository": "https://code.test/x", "Documentation": "UNDECIDED"})
    assert decided.undecided == ["Documentation"]
    files = identity.written(decided)
    assert len(files) == 6
    for text in files.values():
        assert "https://code.test/x" in text
        assert '{ name = "Ada" }, { name = "Bo" }' in text or '{ name: "Ada" }, { name: "Bo" }' in text
        assert "UNDECIDED" not in text


def test_file_without_the_line_to_replace_is_refused() -> None:
    with pytest.raises(LookupError, match="has 0 lines like"):
        identity.in_pyproject("[project]\nname = 'x'\n", identity.read(), Path("pyproject.toml"))


@pytest.mark.parametrize("name", ["flexsn-graph", "v0.1.0", "flexsn-x-v0.1.0", "flexsn-graph-v", "flexsn-graph-v99.0"])
def test_wrong_tag_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tag.main([name]) == 1
    assert name in capsys.readouterr().err


CHANGELOG = "# Log\n\n## 0.2.0 (2027-01-31)\n\n- New.\n\n## 0.1.0 (unreleased)\n\n- Old.\n\n## 0.0.1 (2026-01-01)\n"


def test_release_notes_are_a_section_of_the_changelog() -> None:
    assert tag.notes(CHANGELOG, "0.2.0") == "- New.\n"


@pytest.mark.parametrize(
    ("version", "message"), [("0.1.0", "has no date"), ("0.0.1", "has no section"), ("0.3.0", "has no section")]
)
def test_version_without_date_or_text_is_refused(version: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tag.notes(CHANGELOG, version)


@pytest.mark.parametrize("distribution", distributions(), ids=lambda distribution: distribution.name)
def test_changelog_has_the_version(distribution: Distribution) -> None:
    changelog = (distribution.folder / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (\S+) \((?:unreleased|\d{4}-\d\d-\d\d)\)$", changelog, re.MULTILINE)
    assert str(distribution.version) in headings


def test_release_needs_a_date_and_decided_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = next(distribution for distribution in distributions() if distribution.name == "flexsn-graph")
    monkeypatch.setattr(tag, "notes", lambda changelog, version: "- New.\n")
    decided = identity.Identity(("Ada",), {"Repository": "https://code.test/x"})
    monkeypatch.setattr(identity, "read", lambda: decided)
    assert tag.main([tag.tag_of(graph), "--notes", str(tmp_path / "notes.md")]) == 0
    assert capsys.readouterr().out == "name=flexsn-graph\n"
    assert (tmp_path / "notes.md").read_text() == "- New.\n"
    monkeypatch.setattr(identity, "read", lambda: identity.Identity(("Ada",), {"Repository": "UNDECIDED"}))
    assert tag.main([tag.tag_of(graph)]) == 1
    assert "undecided" in capsys.readouterr().err


def test_actions_are_pinned_to_a_commit() -> None:
    """Checks that workflows pin actions to a commit, because the owners of an action can move its tags.
    `hatch run release:lint` checks further rules.
    """
    assert WORKFLOWS
    actions = [line for path in WORKFLOWS for line in re.findall(r"uses: (.*)", path.read_text(encoding="utf-8"))]
    assert actions
    assert [line for line in actions if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", line)] == []


def test_workflows_run_existing_scripts() -> None:
    """Checks that each script exists that workflows, the CI and RELEASING.md run, by `hatch run ENVIRONMENT:SCRIPT` or
    by `python PATH`.
    """
    environments = tomllib.loads((ROOT / "hatch.toml").read_text(encoding="utf-8"))["envs"]
    texts = [path.read_text(encoding="utf-8") for path in [*WORKFLOWS, ROOT / ".ci" / "run", ROOT / "RELEASING.md"]]
    script_calls = {call for text in texts for call in re.findall(r"hatch run (\w+):(\w+)", text)}
    assert ("release", "tag") in script_calls
    assert [call for call in script_calls if call[1] not in environments[call[0]]["scripts"]] == []
    scripts = {name for text in texts for name in re.findall(r"python ([\w/]+\.py)", text)}
    assert [name for name in scripts if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("document", [*WORKFLOWS, ROOT / "RELEASING.md"], ids=lambda path: path.name)
def test_documented_wheel_commands_match_the_script(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that release/wheels.py accepts the commands in documents, and tests the named wheel or all wheels."""
    calls: list[tuple[str, list[str]]] = []

    def run_tests(distribution: Distribution, folder: Path, options: Sequence[str] = ()) -> wheels.Outcome:
        calls.append((distribution.name, list(options)))
        return wheels.Outcome(distribution, 1, 0, 0, 1.0, "")

    monkeypatch.setattr(wheels, "run_tests", run_tests)
    monkeypatch.setattr(wheels, "table", lambda *_: "")
    commands = re.findall(r"python release/wheels.py (test.*)", document.read_text(encoding="utf-8"))
    assert len(commands) == (document.name in ("release.yml", "RELEASING.md"))
    for command in commands:
        assert wheels.main(shlex.split(command.replace("$NAME", "flexsn-hop"))) == 0
        names = ["flexsn-hop"] if "$NAME" in command else [distribution.name for distribution in in_order()]
        assert calls == [(name, ["--long"]) for name in names]
