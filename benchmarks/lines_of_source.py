"""Number of lines of source code in each package, room and capability, now and at an earlier commit.

    python benchmarks/lines_of_source.py [--since COMMIT] [--output benchmarks/results/lines_of_source.md]

The count covers files in packages/*/src that end in .py, .cpp, .h or .cuh, including comments and blank lines, as `wc
-l` counts them. A room is a folder of a package. The files outside of these folders are the root of the package. A
capability is a list of rooms and files, most of which were added after the earlier commit. They can be removed together
with their calls in other files, and the rest then works as before.
"""

from __future__ import annotations

import argparse
import subprocess
from collections import Counter
from pathlib import Path, PurePosixPath

from measure import publish, table

ROOT = Path(__file__).resolve().parents[1]
ENDINGS = (".py", ".cpp", ".h", ".cuh")
# Most files of the capabilities below were added after this commit.
SINCE = "8bb9126"
# Parts of paths, by capability. A file belongs to the capability if its path contains one of these parts.
CAPABILITIES: dict[str, tuple[str, ...]] = {
    "thread-block clusters, CUDA C++": ("targets/cuda/", "_clusters.py", "_cluster_launch.py"),
    "segments of time": ("/segments/", "_segments.py", "_warm_ups.py"),
    "exact products, weights on a grid": (
        "/exact/",
        "flexsn_runtime/products/",
        "flexsn_nn/_handover.py",
        "_few_bits.py",
    ),
    "float8": ("_float8.py",),
    "statistics of norms, pooling": ("/moments/", "/pooling/", "device/_moments.py", "device/_pooling.py"),
    "captured steps": ("flexsn_nn/graphs/",),
    "lengths, resets, delays": (
        *("transforms/_lengths.py", "transforms/_resets.py", "passes/_ends.py"),
        *("/delays/", "device/_delays.py", "flexsn_nn/_delay.py", "transforms/_delayed.py", "_fuse_delays.py"),
        "staging/_ends.py",
    ),
    "random numbers": ("/noise/", "random.py", "device/random.h"),
    "convolutions in recurrent steps": ("staging/_convolutions.py",),
    "pointwise: rows, cuts, several at a time, source that stands alone": (
        *("_alone.py", "_shown.py", "_row_kernel.py", "device/rows.h", "device/_rows.py"),
        *("functions/_in_turn.py", "functions/_words.py", "functions/_cutting.py"),
    ),
    "loops compiled step by step, scans as operators in graphs": (
        *("lowering/_compiled_loop.py", "lowering/_step_graphs.py", "_step_code.py"),
        *("graphs/_scan_op.py", "graphs/_graph_pieces.py", "graphs/_graph_scan.py"),
    ),
    "other libraries: NIR by a trace, leaves of torch.fx, stateless calls": (
        "_nir_trace.py",
        "_nir_graph.py",
        "_leaf.py",
        "_stateless.py",
    ),
    "other shapes: branches, populations": ("/cells/_", "_cut_step.py", "_cell_trace.py"),
    "reports and advice": (
        "/reports/",
        "_firing.py",
        "_hints.py",
        "_shared_states.py",
        "_unregistered.py",
        "_portability.py",
    ),
}


def count_lines(commit: str | None) -> dict[str, int]:
    """Returns the number of lines by path, at a commit, or in the working tree if `commit` is `None`."""
    if commit is None:
        lines_by_path = {}
        for path in sorted(ROOT.glob("packages/*/src/**/*")):
            if path.suffix in ENDINGS:
                lines_by_path[path.relative_to(ROOT).as_posix()] = path.read_text(encoding="utf-8").count("\n")
        return lines_by_path
    paths_of_commit = run_git("ls-tree", "-r", "--name-only", commit, "packages").split()
    paths = [path for path in paths_of_commit if "/src/" in path and path.endswith(ENDINGS)]
    return {path: run_git("show", f"{commit}:{path}").count("\n") for path in paths}


def run_git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def find_room(path: str) -> tuple[str, str]:
    """Returns the package and the room of a file."""
    _, distribution, _, _, *rest = PurePosixPath(path).parts
    return distribution, rest[0] if len(rest) > 1 else "(root)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", default=SINCE)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "lines_of_source.md")
    options = parser.parse_args()
    before, now = count_lines(options.since), count_lines(None)
    packages = sorted({find_room(path)[0] for path in now})
    totals, rooms = [], []
    for package in packages:
        sums = [Counter[str]() for _ in range(2)]
        for files, rows in zip((before, now), sums, strict=True):
            for path, lines in files.items():
                if find_room(path)[0] == package:
                    rows[find_room(path)[1]] += lines
        totals.append([package, *(f"{rows.total():,}" for rows in sums)])
        names = sorted({*sums[0], *sums[1]}, key=lambda name: (name != "(root)", name))
        rooms += [[package, name, *(f"{rows[name]:,}" for rows in sums)] for name in names]
    totals.append(["all", f"{sum(before.values()):,}", f"{sum(now.values()):,}"])
    capabilities, listed_paths = [], set[str]()
    for name, parts in CAPABILITIES.items():
        paths = {path for path in now if any(part in path for part in parts)} - listed_paths
        listed_paths |= paths
        lines_before = sum(lines for path, lines in before.items() if any(part in path for part in parts))
        capabilities.append([name, f"{lines_before:,}", f"{sum(now[path] for path in paths):,}"])
    rest = [sum(lines for path, lines in files.items() if not is_listed(path)) for files in (before, now)]
    capabilities.append(["the rest", *(f"{lines:,}" for lines in rest)])
    commit, date = run_git("log", "-1", "--format=%h %as", options.since).split()
    heads = (f"at {commit}", "now")
    publish(
        [
            "# Lines of source",
            "",
            f"`python benchmarks/lines_of_source.py`: packages/*/src at {commit} of {date} and on "
            f"{run_git('log', '-1', '--format=%as').strip()}, in Python, C++ and CUDA C++, with comments and blank "
            "lines.",
            "",
            *table(["package", *heads], totals),
            "",
            "Capabilities, with the lines of their files. Changes of other files for a capability count as the rest.",
            "",
            *table(["capability", *heads], capabilities),
            "",
            *table(["package", "room", *heads], rooms),
        ],
        options.output,
    )


def is_listed(path: str) -> bool:
    """Returns True if a file belongs to a capability."""
    return any(part in path for parts in CAPABILITIES.values() for part in parts)


if __name__ == "__main__":
    main()
