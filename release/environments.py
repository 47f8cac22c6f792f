"""Environments that contain only the declared requirements of a distribution, and are created without a download.

The declared packages are already installed in the running environment, and the new environment contains links to them.
Packages that are not declared are missing in the new environment, even if the running environment contains them.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def needed(requirements: Iterable[Requirement], extras: Iterable[str] = ()) -> Iterator[Requirement]:
    """Yields the requirements that apply to this machine and, if they belong to an extra, to one of `extras`."""
    for requirement in requirements:
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def third_party(requirements: Iterable[Requirement]) -> set[str]:
    """Returns the names of the installed distributions that `requirements` need, directly or indirectly.

    Raises:
        RuntimeError: a distribution is not installed, or its version does not satisfy the requirement.
    """
    visited: set[tuple[str, frozenset[str]]] = set()
    pending = list(requirements)
    while pending:
        requirement = pending.pop()
        try:
            installed = distribution(requirement.name)
        except PackageNotFoundError:
            raise RuntimeError(f"{requirement} is required, but is not installed") from None
        if not requirement.specifier.contains(installed.version, prereleases=True):
            raise RuntimeError(f"{requirement} is required, but version {installed.version} is installed")
        key = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if key not in visited:
            visited.add(key)
            pending += needed(map(Requirement, installed.requires or []), requirement.extras)
    return {name for name, _ in visited}


def link_distributions(names: Iterable[str], folder: Path) -> None:
    """Fills `folder` with links to the installed files of the distributions `names`."""
    for name in names:
        installed = distribution(name)
        if installed.files is None:
            raise RuntimeError(f"{name} has no record of its files")
        for top in {file.parts[0] for file in installed.files}:
            source, link = Path(str(installed.locate_file(top))), folder / top
            # Scripts lie outside of the folder ("..") and are not imported. Several packages may share a folder, so
            # its link may already exist.
            if top not in {"..", "__pycache__"} and not top.endswith(".pth") and not link.exists():
                link.symlink_to(source)


class Environment:
    """A virtual environment with links to installed distributions, into which packages can also be installed.

    Args:
        folder: folder of the environment.
        requirements: requirements whose distributions are linked, together with everything that they require.
        alone: names of installed distributions that are linked without their requirements.
    """

    def __init__(self, folder: Path, requirements: Iterable[Requirement], alone: Iterable[str] = ()) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        paths = {"base": str(folder), "platbase": str(folder)}
        self.site_packages = Path(sysconfig.get_path("purelib", "venv", vars=paths))
        links = folder / "third_party"
        links.mkdir()
        # pip is also linked, because it installs packages into the environment. pip itself is not tested.
        link_distributions({*third_party([*requirements, Requirement("pip")]), *alone}, links)
        (self.site_packages / "third_party.pth").write_text(f"{links}\n", encoding="utf-8")

    def run(
        self, *command: str | Path, cwd: Path, variables: dict[str, str] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command with the `python` and `pip` of the environment, without outside settings of Python or pip.

        Raises:
            RuntimeError: the command failed, and `check` is True. The message contains the output of the command.
        """
        hidden = {"PYTHONPATH", "PYTHONHOME", "TRITON_INTERPRET"}
        environment = {n: value for n, value in os.environ.items() if n not in hidden and not n.startswith("PIP_")}
        # Even with --no-index, pip reads the settings of the machine. They may name folders of wheels, which may
        # contain another torch.
        environment["PIP_CONFIG_FILE"] = os.devnull
        environment["PATH"] = os.pathsep.join([str(self.python.parent), environment.get("PATH", os.defpath)])
        environment["VIRTUAL_ENV"] = str(self.python.parent.parent)
        result = subprocess.run(
            [str(part) for part in command],
            cwd=cwd,
            env=environment | (variables or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if check and result.returncode != 0:
            raise RuntimeError(f"{' '.join(map(str, command))} ended with {result.returncode}:\n{result.stdout}")
        return result

    def install(self, *arguments: str | Path, cwd: Path) -> None:
        """Runs `pip install` with these arguments, without an index. Linked packages count as installed.

        Raises:
            RuntimeError: pip refused, for example because a required distribution is missing.
        """
        offline = ("--quiet", "--no-index", "--no-build-isolation")
        self.run(self.python, "-m", "pip", "install", *offline, *arguments, cwd=cwd)


def is_here(environment: Environment, module: str) -> bool | None:
    """Returns True if `module` is installed in the environment, and False if Python finds it in another folder.

    Returns `None` if Python does not find the module.
    """
    code = f"import importlib.util as u; spec = u.find_spec({module!r}); print(spec.origin if spec else '')"
    origin = environment.run(environment.python, "-c", code, cwd=environment.site_packages.parent).stdout.strip()
    return Path(origin).is_relative_to(environment.site_packages) if origin else None
