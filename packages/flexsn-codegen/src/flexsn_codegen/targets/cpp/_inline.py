"""C++ programs as part of another source, such as the source of a model that is compiled ahead of time."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

_HEADERS = Path(__file__).parent
_INCLUDE = re.compile(r'^#include "([^"]+)"\n', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Inlined:
    """A program's source that needs no header of this package. A file may contain several, even equal, sources.

    Attributes:
        name: name of the program's function, which takes an array of the arguments that `CppKernel.compiled` describes.
            Equal programs have equal names.
        declaration: declaration of this function.
        source: definition of this function. The source includes system headers, and torch's headers if the function
            uses special functions.
    """

    name: str
    declaration: str
    source: str


def inlined(text: str) -> Inlined:
    """Makes a program's source independent of this package's headers.

    Args:
        text: result of `CppKernel.text`.
    """
    name = f"flexsn_{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    declaration = f'extern "C" void {name}(const int64_t* arguments)'
    headers: dict[str, str] = {}
    for header in _INCLUDE.findall(text):
        _add(headers, header, _HEADERS)
    # The file that contains the source is compiled with other flags than the kernels need (see `_compiler.py`). For
    # example, Inductor writes vector code itself and turns GCC's vectorization off, which makes the kernels twenty
    # times slower. Therefore, pragmas set the flags for GCC. Clang has no such pragma. By default, Clang vectorizes
    # loops and assumes that there are no traps, and another pragma turns fused operations off. Two flags cannot be set:
    # errno prevents vector code for square roots, and overflow of signed integers is undefined.
    source = f"""
#ifndef {name.upper()}
#define {name.upper()}
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off,no-math-errno,no-trapping-math,tree-loop-vectorize,wrapv")
#elif defined(__clang__)
#pragma clang fp contract(off)
#endif
{"".join(headers.values())}
#undef DEV_ENTRY
#define DEV_ENTRY(number) {declaration}
namespace {name}_ {{
{_INCLUDE.sub("", text)}}}
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif
#endif
"""
    return Inlined(name, f"{declaration};", source)


def _add(headers: dict[str, str], name: str, folder: Path) -> None:
    """Adds a header after the headers that it includes.

    Each header gets a guard, because several sources in one file may contain the same header.
    """
    path = next(path for path in (folder / name, _HEADERS / name) if path.exists())
    key = path.relative_to(_HEADERS).as_posix()
    if key in headers:
        return
    text = path.read_text(encoding="utf-8")
    for other in _INCLUDE.findall(text):
        _add(headers, other, path.parent)
    guard = "FLEXSN_" + re.sub(r"\W", "_", key).upper()
    body = _INCLUDE.sub("", text.replace("#pragma once\n", ""))
    headers[key] = f"#ifndef {guard}\n#define {guard}\n{body}#endif\n"
