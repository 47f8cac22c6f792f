"""NVIDIA's runtime compiler, which compiles CUDA C++ to cubins without a toolkit. PyTorch's CUDA builds include it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

from flexsn_codegen.errors import CompilationError
from flexsn_codegen.source._cache import find_kept, keep

_HEADERS = Path(__file__).parent
# The headers that kernels may include. Kernels in C++ include the last header, too.
_HEADER_PATHS = (_HEADERS / "device.cuh", _HEADERS / "cluster.cuh", _HEADERS.parent / "cpp" / "device" / "numbers.h")
_NAMES = tuple(place.name for place in _HEADER_PATHS)
_MOST_OF_A_LOG = 4000


@functools.cache
def _load_library() -> ctypes.CDLL | None:
    """The compiler's library, from the CUDA wheels that PyTorch requires or from the system, or `None`."""
    for name in (*map(str, _find_in_wheels()), "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _find_in_wheels() -> Iterator[Path]:
    package = importlib.util.find_spec("nvidia")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        yield from sorted(Path(folder).glob("**/lib/libnvrtc.so.*"))


def why_no_nvrtc() -> str | None:
    """The reason why CUDA C++ cannot be compiled, or `None` if there is a compiler."""
    return None if _load_library() is not None else "there is no libnvrtc, which is part of the CUDA builds of PyTorch"


def cubin(source: str, capability: tuple[int, int], *, fast_math: bool = False) -> bytes:
    """Compiles a source for a GPU, or reads the cubin from the cache folder.

    Args:
        source: source of kernels that are declared `extern "C"`. The source may include the headers `_NAMES`.
        capability: compute capability of the GPU, for example `(9, 0)`.
        fast_math: True if a product and a sum may be fused into one instruction, which rounds once.

    Raises:
        CompilationError: there is no compiler, or the compiler rejects the source.
        CacheFolderError: see `flexsn_codegen.cache_folder`.
    """
    library = _load_library()
    if library is None:
        raise CompilationError(f"{why_no_nvrtc()}.")
    options = (
        f"--gpu-architecture=sm_{capability[0]}{capability[1]}",
        "--std=c++17",
        "-default-device",
        f"--fmad={'true' if fast_math else 'false'}",
    )
    headers = _read_headers()
    digest = hashlib.sha256("\n".join([source, *headers, *options, _read_version(library)]).encode()).hexdigest()[:32]
    name = f"{digest}.cubin"
    path = find_kept(name)
    if path is not None:
        return path.read_bytes()
    compiled = _compile(library, source, headers, options)
    keep(name, compiled)
    return compiled


@functools.cache
def _read_headers() -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8") for path in _HEADER_PATHS)


def _read_version(library: ctypes.CDLL) -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def _compile(library: ctypes.CDLL, source: str, headers: Sequence[str], options: Sequence[str]) -> bytes:
    program = ctypes.c_void_p()
    texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers))
    names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in _NAMES))
    code = library.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"generated.cu", len(headers), texts, names
    )
    if code:
        raise CompilationError(f"NVRTC cannot create a program: error {code}.")
    try:
        flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), flags):
            log = _read_result(library, program, "ProgramLog").decode(errors="replace")
            raise CompilationError(f"NVRTC rejects a generated kernel:\n{log[:_MOST_OF_A_LOG]}")
        return _read_result(library, program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _read_result(library: ctypes.CDLL, program: ctypes.c_void_p, kind: str) -> bytes:
    size = ctypes.c_size_t()
    library[f"nvrtcGet{kind}Size"](program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    library[f"nvrtcGet{kind}"](program, text)
    return text.raw
