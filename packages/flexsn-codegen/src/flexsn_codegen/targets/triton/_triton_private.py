"""Private parts of Triton. Importing this module checks that each name exists."""

from __future__ import annotations

import importlib.metadata
import struct
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from flexsn_codegen.targets._entry import Entry
from flexsn_graph.versions import UnsupportedVersionWarning, expect, installed, lacking, needed, private, warn_if_newer

warn_if_newer("triton")

_NO_INTERPRETER = "kernels cannot run in Triton's interpreter"
_NO_OFFLINE = "`compile_offline` cannot compile"
_NO_LAUNCH = "compiled kernels cannot be launched"
_DRIVER = "triton.runtime.driver"
_COMPILER = "triton.compiler.compiler"
_LAUNCHER = ["CompiledKernel", "CompiledKernel.function", "CompiledKernel.packed_metadata", "CompiledKernel.run"]


def _fails_with_numpy() -> bool:
    """True for Triton 3.6 with numpy 2.4: Triton converts a one-dimensional array to a number, which numpy rejects."""
    numpy = importlib.metadata.version("numpy").split(".")[:2]
    return triton.__version__.startswith("3.6.") and [int(part) for part in numpy] >= [2, 4]


# The interpreter is only imported when it runs a kernel, because it needs numpy, which nothing else here needs.
expect("triton.runtime.interpreter", ["TensorHandle", "TensorHandle.data", "TensorHandle.dtype"], _NO_INTERPRETER)
if triton.knobs.runtime.interpret and _fails_with_numpy():
    warnings.warn(
        f"{installed('triton')}'s interpreter does not work with numpy {importlib.metadata.version('numpy')}: "
        f"{_NO_INTERPRETER}. Run `pip install 'numpy<2.4'`, or install a newer Triton.",
        UnsupportedVersionWarning,
        stacklevel=2,
    )
_block_type = private("triton.language", "block_type", _NO_INTERPRETER)
_tensor = private("triton.language", "tensor", _NO_INTERPRETER)
GPUTarget = private("triton.backends.compiler", "GPUTarget", _NO_OFFLINE)
ASTSource = private("triton.compiler", "ASTSource", _NO_OFFLINE, takes=["fn", "signature", "constexprs", "attrs"])
expect(_DRIVER, ["driver"], _NO_LAUNCH)
expect("triton", ["knobs"], _NO_LAUNCH)
expect(_COMPILER, _LAUNCHER, "calls of compiled kernels take longer")
_has_direct_launch = not lacking(_COMPILER, _LAUNCHER)
_digest_of_triton: Callable[[], object] = private(
    "triton.runtime.cache", "triton_key", "the first compilations of a process take longer", default=lambda: None
)
# Default values of launch attributes. Kernels with other values are not launched by their addresses.
_DEFAULT_ATTRIBUTES = {"launch_pdl": False, "num_ctas": 1}
# Sizes of the memory that Triton allocates for a kernel, and passes as pointers after the kernel's arguments. Kernels
# of this package need none.
_SCRATCH = {"global_scratch_size": 0, "profile_scratch_size": 0}
_INTEGERS = ("i32", "u32", "i64", "u64")
_reports_arguments = _has_direct_launch and not lacking(_COMPILER, ["CompiledKernel.metadata", "CompiledKernel.src"])


def array_of(x: Any) -> Any:
    """The numpy array that represents a value in Triton's interpreter."""
    return x.handle.data


def value_of(like: Any, data: Any, kind: Any) -> Any:
    """A value in Triton's interpreter that contains `data` and has the shape of `like` and the dtype `kind`."""
    handle = needed("triton.runtime.interpreter", "TensorHandle", _NO_INTERPRETER)
    shape = _block_type(kind, like.type.shape) if like.type.is_block() else kind
    return _tensor(handle(data.reshape(array_of(like).shape), kind), shape)


def as_flags(mask: Any) -> Any:
    """A mask as an array of bools, which loads and stores of Triton 3.9 require.

    In the interpreter, the result of a comparison has the dtype of the compared values. For example, the comparison of
    two int32 numbers, broadcast to a block, is an array of int32.
    """
    return value_of(mask, array_of(mask).astype(bool), tl.int1) if isinstance(mask, _tensor) else mask


def launches_on_nvidia() -> bool:
    """True if kernels are launched on an NVIDIA GPU."""
    driver = needed("triton.runtime.driver", "driver", "compiled graphs cannot have kernels")
    return bool(driver.active.get_current_target().backend == "cuda")


def load_driver() -> None:
    """Loads Triton's driver, which compiles C code if Triton's cache is empty."""
    _ = needed(_DRIVER, "driver", _NO_LAUNCH).active


def read_compiler() -> None:
    """Computes the digest of Triton's files, which is part of the cache key of each kernel. Triton keeps the digest."""
    _digest_of_triton()


def launcher(
    compiled: Any, grid: tuple[int, int, int], numbers: tuple[float, ...], device: torch.device
) -> Callable[[Sequence[torch.Tensor]], None]:
    """Implements `targets.triton.launcher`."""
    driver = needed(_DRIVER, "driver", _NO_LAUNCH)
    hooks = needed("triton", "knobs.runtime", _NO_LAUNCH)

    launch_with_hooks = compiled[grid]
    current_stream, index = driver.active.get_current_stream, device.index
    if not _has_direct_launch:
        return lambda tensors: launch_with_hooks(*tensors, *numbers, stream=current_stream(index))
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    x, y, z = grid

    def launch(tensors: Sequence[torch.Tensor]) -> None:
        stream = current_stream(index)
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            launch_with_hooks(*tensors, *numbers, stream=stream)
        else:
            run(x, y, z, stream, function, metadata, None, None, None, *tensors, *numbers)

    return launch


def load(compiled: Any) -> None:
    """Implements `targets.triton._launcher.load`."""
    if _has_direct_launch and compiled is not None:
        _ = compiled.run


def entry(compiled: Any, grid: tuple[int, int, int], numbers: tuple[float, ...]) -> Entry | None:
    """Implements `targets.triton.entry`."""
    if not _reports_arguments or torch.version.hip is not None or grid[2] != 1:
        return None
    run, metadata = compiled.run, compiled.metadata
    if any(getattr(run, name, None) != value for name, value in (_DEFAULT_ATTRIBUTES | _SCRATCH).items()):
        return None
    together = getattr(run, "launch_cooperative_grid", None)
    if together is None or getattr(run, "gsan_enabled", False):  # the sanitizer adds arguments to each kernel
        return None
    kinds = list(compiled.src.signature.values())
    passed = []
    for kind, number in zip(kinds[len(kinds) - len(numbers) :], numbers, strict=True):
        if kind in _INTEGERS:
            passed.append(int(number))
        elif kind == "fp32":
            passed.append(int.from_bytes(struct.pack("<f", number), "little"))
        elif kind != "constexpr":
            return None
    if any(not str(kind).startswith("*") for kind in kinds[: len(kinds) - len(numbers)]):
        return None
    hooks = needed("triton", "knobs.runtime", _NO_LAUNCH)
    return Entry(
        compiled.function,
        (*passed, *(0,) * len(_SCRATCH)),
        grid[0],
        32 * metadata.num_warps,
        metadata.shared,
        compiled,
        lambda: bool(hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls),
        beside=grid[1],
        together=bool(together),
    )
