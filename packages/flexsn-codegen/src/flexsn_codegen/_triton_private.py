"""Everything here is private to Triton."""

from __future__ import annotations

from typing import Any

import triton.language as tl


def array_of(x: Any) -> Any:
    """The numpy array that stands for a value in Triton's interpreter."""
    return x.handle.data


def value_of(like: Any, data: Any, kind: Any) -> Any:
    """A value of the interpreter that holds `data`, of the shape of `like` and the dtype `kind`."""
    # Here, because Triton's interpreter needs numpy, which nothing else here does.
    from triton.runtime.interpreter import TensorHandle

    shape = tl.block_type(kind, like.type.shape) if like.type.is_block() else kind
    return tl.tensor(TensorHandle(data.reshape(array_of(like).shape), kind), shape)


def as_flags(mask: Any) -> Any:
    """A mask whose array holds flags, as loads and stores of Triton 3.9 want it.

    The interpreter gives a comparison the dtype of what was compared: one number, compared and broadcast to a block,
    is an array of int32.
    """
    return value_of(mask, array_of(mask).astype(bool), tl.int1) if isinstance(mask, tl.tensor) else mask
