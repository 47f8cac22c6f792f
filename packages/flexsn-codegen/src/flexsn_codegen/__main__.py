"""`flexsn-codegen` or `python -m flexsn_codegen`: shows and compiles kernels without a GPU, and manages the cache."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from flexsn_codegen._alone import standalone
from flexsn_codegen._shown import ShownKernel, UsageError, kernels, load
from flexsn_codegen.errors import PrecisionError
from flexsn_codegen.functions._launch import CPP_BLOCK
from flexsn_codegen.source._cache import cache_folder, prune_cache
from flexsn_codegen.source._numerics import Numerics
from flexsn_codegen.targets import Target
from flexsn_codegen.targets._register import supported_ops
from flexsn_codegen.targets.cpp import CPP, CppKernel, library_of
from flexsn_codegen.targets.triton import TRITON, OfflineJob, compile_offline
from flexsn_graph import OpFacts, facts_of, known_ops

_OURS = os.path.dirname(__file__)
_GPU = re.compile(r"sm_\d+a?|gfx\w+")
_TARGETS: dict[str, Target] = {"triton": TRITON, "cpp": CPP}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit status: 0 for success, 1 for a failure, 2 for an invalid command line."""
    options = _create_parser().parse_args(arguments)
    try:
        if options.command == "prune":
            print(f"deleted {prune_cache(options.days)} files from {cache_folder()}")
        elif options.command == "ops":
            print("\n".join(_list_ops(options.text)))
        else:
            _check_targets(options.target)
            (_compile if options.command == "compile" else _show)(options)
    except (UsageError, PrecisionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        print(f"error: {type(error).__name__}: {error}{_locate(error)}", file=sys.stderr)
        return 1
    return 0


def _create_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flexsn-codegen", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="prints a function's graph, its kernel and the GPU resources of the kernel")
    compile_ = commands.add_parser("compile", help="compiles a function for targets and writes files")
    for command in (show, compile_):
        command.add_argument("function", metavar="module:function")
        command.add_argument(
            "--arguments",
            nargs="+",
            metavar="DTYPE[:SHAPE]",
            help="dtype and shape of each argument, such as float32:3x8, or float32:0 for an argument without "
            "dimensions (default: float32 for all arguments). Shapes matter if the function cuts a dimension into "
            "pieces.",
        )
        command.add_argument("--gradient", action="store_true", help="also show or compile the kernel of the gradient")
        command.add_argument(
            "--precision", default="eager", help="where half values are rounded: eager (default) or float32"
        )
        command.add_argument(
            "--fast-math", action="store_true", help="use approximate functions and fused multiply-add"
        )
        command.add_argument(
            "--target", nargs="*", default=["sm_90"], help="sm_80, sm_90, gfx942, …, or cpp (default: sm_90)"
        )
    show.add_argument(
        "--standalone",
        action="store_true",
        help="prints one file with the kernels, their launches and the gradient. The file needs no FlexSN package. It "
        "is in Triton, or with --target cpp in C++",
    )
    compile_.add_argument("--output", type=Path, default=Path(), help="the folder (default: the working directory)")
    ops = commands.add_parser("ops", help="lists the ops with their properties and the targets that have a rule")
    ops.add_argument("text", nargs="?", default="", help="list only ops whose names contain this text")
    prune = commands.add_parser("prune", help="deletes generated sources that have not been used for a while")
    prune.add_argument("--days", type=float, default=30.0)
    return parser


def _locate(error: Exception) -> str:
    """The line that raised an error, as text. Empty for a line of this package, whose messages name the user's line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return "" if last.filename.startswith(_OURS) else f"\n  at {last.filename}:{last.lineno}: {last.line}"


def _make_kernels(options: argparse.Namespace, target: Target) -> tuple[list[ShownKernel], list[ShownKernel]]:
    numerics = Numerics(options.precision, options.fast_math)
    return kernels(options.function, options.arguments, numerics, target, gradient=options.gradient)


def _list_jobs(kernel: ShownKernel, targets: Sequence[str], *, fast_math: bool) -> list[OfflineJob]:
    return [OfflineJob(kernel.source, target, kernel.dtypes, fast_math=fast_math) for target in targets]


def _write_standalone(options: argparse.Namespace) -> str:
    """The text of a standalone file, in C++ if the CPU is the only target, otherwise in Triton."""
    language = "cpp" if options.target == ["cpp"] else "triton"
    numerics = Numerics(options.precision, options.fast_math)
    loaded = load(options.function, options.arguments, numerics, _TARGETS[language], gradient=options.gradient)
    command = ["python", "-m", "flexsn_codegen", "show", "--standalone", options.function]
    command += ["--arguments", *options.arguments] if options.arguments is not None else []
    command += ["--gradient"] if options.gradient else []
    command += ["--precision", options.precision] if options.precision != "eager" else []
    command += ["--fast-math"] if options.fast_math else []
    command += ["--target", "cpp"] if language == "cpp" else []
    return standalone(loaded, language, shlex.join(command), _find_version())


def _find_version() -> str:
    from flexsn_codegen import __version__

    return __version__


def _show(options: argparse.Namespace) -> None:
    if options.standalone:
        print(_write_standalone(options), end="")
        return
    gpus = [target for target in options.target if target != "cpp"]
    languages = ["triton"] * bool(gpus or "cpp" not in options.target) + ["cpp"] * ("cpp" in options.target)
    for language in languages:
        shown, gradients = _make_kernels(options, _TARGETS[language])
        for title, result in (("", shown), ("\n# --- the gradient ---\n", gradients)):
            if title and result:
                print(title)
            for kernel in result:
                print(f"# graph\n{kernel.graph}\n\n# source\n{kernel.source.source}")
                for use in compile_offline(
                    _list_jobs(kernel, gpus if language == "triton" else [], fast_math=options.fast_math)
                ):
                    print(f"# {use}")


def _compile(options: argparse.Namespace) -> None:
    """Writes the source, the assembly and the binary of each kernel.

    For GPUs, the source is `NAME.py`. For each NVIDIA GPU, the other files are `NAME.TARGET.ptx` and
    `NAME.TARGET.cubin`, and for each AMD GPU, `NAME.TARGET.amdgcn` and `NAME.TARGET.hsaco`. For the CPU, the files are
    `NAME.cpp` and `NAME.so`.
    """
    if not options.target:
        raise UsageError("there is no target: pass --target sm_90, gfx942, cpp, …")
    # Everything is compiled before any file is written, so that a failure leaves no files.
    files: dict[str, bytes] = {}
    uses = []
    gpus = [target for target in options.target if target != "cpp"]
    for kernel in itertools.chain(*_make_kernels(options, TRITON)) if gpus else ():
        files[f"{kernel.source.name}.py"] = kernel.source.source.encode()
        for use in compile_offline(_list_jobs(kernel, gpus, fast_math=options.fast_math)):
            amd = use.target.startswith("gfx")
            stem = f"{kernel.source.name}.{use.target}"
            files[f"{stem}.{'amdgcn' if amd else 'ptx'}"] = use.assembly.encode()
            files[f"{stem}.{'hsaco' if amd else 'cubin'}"] = use.binary
            uses.append(use)
    for kernel in itertools.chain(*_make_kernels(options, CPP)) if "cpp" in options.target else ():
        text = CppKernel(kernel.source).text(kernel.dtypes, CPP_BLOCK)
        files[f"{kernel.source.name}.cpp"] = text.encode()
        files[f"{kernel.source.name}.so"] = library_of(text)
    options.output.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (options.output / name).write_bytes(content)
        print(options.output / name)
    print("".join(f"# {use}\n" for use in uses), end="")


def _check_targets(targets: Sequence[str]) -> None:
    """Raises `UsageError` for a target that does not exist."""
    for target in targets:
        if target != "cpp" and not _GPU.fullmatch(target):
            raise UsageError(
                f"there is no target {target!r}. Targets are cpp for the CPU; sm_80, sm_86, sm_89, sm_90, sm_100, "
                "sm_120 and similar ones for NVIDIA GPUs; gfx90a, gfx942, gfx950, gfx1100 and similar ones for AMD "
                "GPUs."
            )


def _list_ops(text: str) -> list[str]:
    """One line for each op whose name contains `text`: its name, its facts, and the targets that have a rule for it."""
    rules = {name: set(supported_ops(target)) for name, target in _TARGETS.items()}
    lines = []
    for op in known_ops():
        if text in str(op):
            facts = facts_of(op)
            assert facts is not None
            targets = ", ".join(name for name, supported in rules.items() if op in supported) or "no rule"
            lines.append(f"{op}: {'; '.join([*_describe_facts(facts), targets])}")
    if not lines:
        raise UsageError(f"there is no op with {text!r} in its name")
    return lines


def _describe_facts(facts: OpFacts) -> list[str]:
    results = []
    if facts.linear:
        results.append("linear in " + " or ".join(_join_positions(together) for together in facts.linear))
    if facts.continuous:
        results.append(f"continuous in {_join_positions(facts.continuous)}")
    return [*results, "exact"] if facts.exact else results


def _join_positions(positions: frozenset[int]) -> str:
    return " and ".join(str(position) for position in sorted(positions))


if __name__ == "__main__":
    sys.exit(main())
