"""Checks the types, layouts and dtypes of a call's tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.nn.utils.rnn import PackedSequence

from flexsn_nn._leaf import refuse_proxies
from flexsn_nn._packed import packed_sequence
from flexsn_nn._torch_private import MKLDNN
from flexsn_nn.errors import InputDtypeError, InputLayoutError, InputShapeError

# `None` since torch 2.15, which has no named tensors.
_has_names = getattr(Tensor, "has_names", None)


def check_input(name: str, value: object, owner: str, *, has_time: bool) -> None:
    """Raises an error unless a core accepts `value` as a sequence or as one step.

    Args:
        name: name of the argument, for example `input 0`.
        owner: class of the layer.
        has_time: True if `value` is a sequence.

    Raises:
        TypeError: `value` is not a tensor.
        ExportError: `value` is a proxy of `torch.fx`.
        InputLayoutError: `value` is a nested, quantised, named or MKL-DNN tensor.
        InputShapeError: `value` is a sequence without dimensions.
    """
    if not isinstance(value, Tensor):
        raise _make_error(name, value, owner)
    if value.is_nested:
        raise InputLayoutError(
            f"{name} is a nested tensor; all steps of a sequence [T, *step] have one shape. functional.run(net, x) "
            "accepts a jagged tensor [B, lengths, *step]. Or pad the sequences with data.pad_sequences, and pass their "
            "lengths to data.readout and data.mask_padding."
        )
    if value.is_quantized:
        raise InputLayoutError(f"{name} is {value.dtype}, quantised; a step computes with numbers: x.dequantize().")
    if value.layout is MKLDNN:  # `is_mkldnn` would add a node to Dynamo's graphs
        raise InputLayoutError(f"{name} has MKL-DNN's layout, which cannot be divided into steps: x.to_dense().")
    if has_time and value.dim() == 0:
        raise InputShapeError(
            f"{name} has no dimensions; in step mode 'm' it is a sequence [T, *step]. For single steps, use "
            "step_mode='s'."
        )
    if _has_names is not None and not torch.compiler.is_compiling() and _has_names(value):
        raise InputLayoutError(
            f"{name} has named dimensions, which most operations of a step do not support: x.rename(None), and name "
            "the output afterwards."
        )


def check_real(name: str, value: Tensor) -> None:
    """Raises an error unless a membrane can sum the values of `value`.

    Raises:
        InputLayoutError: `value` is sparse.
        InputDtypeError: the elements are integers, booleans, complex numbers, or floating-point numbers of 8 bits.
    """
    if value.layout is not torch.strided:
        raise InputLayoutError(f"{name} is a {value.layout} tensor; a membrane is dense: x.to_dense().")
    dtype = value.dtype
    if dtype.is_complex:
        raise InputDtypeError(f"{name} is {dtype}; a membrane is real: use x.real or x.abs().")
    if not dtype.is_floating_point:
        raise InputDtypeError(f"{name} is {dtype}; a membrane needs floating-point input: x.float().")
    if dtype.itemsize == 1:
        raise InputDtypeError(f"{name} is {dtype}, which can store numbers but not add them: x.to(torch.bfloat16).")


def _make_error(name: str, value: object, owner: str) -> Exception:
    if isinstance(value, Proxy):
        return refuse_proxies(owner)
    if isinstance(value, PackedSequence):
        return packed_sequence(name)
    if isinstance(value, list | tuple) and value and all(isinstance(item, Tensor) for item in value):
        return TypeError(f"{name} is a {type(value).__name__} of tensors; a neuron takes one tensor: torch.stack(x).")
    hint = "" if value is None else ": torch.as_tensor(x)"
    return TypeError(f"{name} is a {type(value).__name__}; a neuron takes tensors{hint}.")
