"""Calls of pointwise functions in what others see: compilers, exporters, transforms of `torch.func`, modes."""

from __future__ import annotations

from typing import Any

import torch

from flexsn_codegen._calls import Parts, Structure, results_together
from flexsn_codegen._checks import check_gradients, wants_gradients, without_tensors, written_forward
from flexsn_codegen._kernel import kernel_of
from flexsn_codegen._kernels import Kernels, kernels_of
from flexsn_codegen._pieces import captured_for_graphs, cut_function
from flexsn_codegen._pointwise_op import Transformed, pointwise_in_place_op, pointwise_op
from flexsn_codegen._torch_private_modes import constant, is_forward_mode
from flexsn_codegen.errors import OF_A_CALL


def by_operator(kernels: Kernels, structure: Structure, parts: Parts) -> Any:
    """Calls a function where a compiler or a transform sees it."""
    tensors = parts.tensors
    dims = 0
    for tensor in tensors:
        dims = max(dims, tensor.dim())
    kinds = tuple([(t.dtype, t.dim()) for t in tensors])
    device = tensors[0].device.type if tensors else "cpu"
    key, num_captured, written, result, cuts = _prepared(kernels.handle, structure, kinds, dims, device)
    if num_captured:
        tensors = [*tensors, *kernels.captured[key]]
    if not tensors:
        raise without_tensors(kernels.name)
    if wants_gradients(tensors):
        check_gradients(kernels.name, writes=bool(written), autograd=kernels.autograd)
    if not written:
        scalars = [t.dim() == 0 for t in tensors]
        if not torch.compiler.is_dynamo_compiling() and is_forward_mode():
            results = Transformed.apply(kernel_of(key), tuple(parts.numbers), tuple(scalars), *tensors)
        else:
            results = pointwise_op(tensors, parts.numbers, scalars, key)
        if cuts:
            # It was traced with the arguments' own shapes just now.
            return results[0] if _is_single(key) else tuple(results)
        return results_together(result, results, ())
    if is_forward_mode():
        raise written_forward(kernels.name)
    read = [t for i, t in enumerate(tensors) if i not in written]
    changed = [tensors[i] for i in written]
    results = pointwise_in_place_op(read, changed, parts.numbers, key)
    return results_together(result, results, tensors)


@constant
def _prepared(
    handle: str, structure: Structure, kinds: tuple[tuple[torch.dtype, int], ...], dims: int, device: str
) -> tuple[str, int, tuple[int, ...], Structure, bool]:
    """The key of the kernel for a call; how many tensors it captures, which it writes, what it returns; if it cuts.

    Shapes may be symbols, which cannot come here: a function that cuts is traced by its operator.
    """
    kernels = kernels_of(handle)
    shapes = [(1,) * (dims if own else 0) for _, own in kinds]
    dtypes = [dtype for dtype, _ in kinds]
    pairs = zip(shapes, dtypes, strict=True)
    examples = [torch.empty(shape, dtype=dtype, device=here(device)) for shape, dtype in pairs]
    cut = kernels.cuts.get((structure, kinds))
    if cut is None:
        try:
            kernel, captured = kernels.find(structure, examples, samples(structure))
        except OF_A_CALL:
            raise
        except Exception as error:
            if not kinds:
                raise
            captured = captured_for_graphs(kernels, structure, kinds, samples(structure))
            cut = kernels.cuts[structure, kinds] = cut_function(kernels, structure, captured, error)
            kernels.captured[cut.key] = captured
        else:
            kernels.captured[kernel.key] = captured
            return kernel.key, len(captured), kernel.written, kernel.result, False
    return cut.key, len(kernels.captured[cut.key]), (), (), True


@constant
def _is_single(key: str) -> bool:
    """Whether a function that cuts returned a tensor when it was traced last, not a tuple of tensors."""
    return bool(kernel_of(key).single)


def here(device: str) -> str:
    """A device of this kind that tensors can be made on: "meta" for one that stands in for a GPU."""
    return device if device == "cpu" or (device == "cuda" and torch.cuda.is_available()) else "meta"


def samples(structure: Structure) -> list[int | float]:
    """Numbers for a first run; the kernel's traces have those of the call."""
    kind = structure[0]
    if kind == "float":
        return [0.5]
    if kind == "int":
        return [3]
    if kind == "call":
        return [n for part in structure[1] for n in samples(part)] + [n for _, p in structure[2] for n in samples(p)]
    if kind in ("tuple", "list"):
        return [n for part in structure[1] for n in samples(part)]
    if kind == "dict":
        return [n for _, part in structure[1] for n in samples(part)]
    return []
