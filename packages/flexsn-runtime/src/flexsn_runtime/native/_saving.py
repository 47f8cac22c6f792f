"""Hooks for tensors that autograd saves. The compiled launcher runs the hooks, and calls Python only if necessary."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor

from flexsn_runtime.native._launcher import loaded_launcher


def saving_hooks(
    packed: Callable[[Tensor], Any | None],
    unpacked: Callable[[Any], Tensor],
    counted: Callable[[int, Any, bool], None],
    fewest_bytes: int,
    views: Collection[str],
    layers: Collection[str],
) -> Any | None:
    """Returns hooks for `torch.autograd.graph.saved_tensors_hooks`; `None` if the compiled launcher is not loaded.

    The hooks keep a tensor unchanged if it is not the result of a node, is smaller than `fewest_bytes`, has no
    floating-point dtype, is an instance of a subclass, or is the result of a node named in `layers`. They also keep a
    tensor unchanged if `packed` returns `None` for it. If such a tensor is changed in place after it was saved,
    `unpack` raises an error.

    Args:
        packed: function that maps a tensor to an object that is saved instead of the tensor.
        unpacked: function that maps this object back to the tensor.
        counted: function that is called when bits are saved for a noted tensor for the first time. It receives the
            tensor's size in bytes, the bits, and `True`.
        views, layers: names of autograd's nodes, without "Backward" and the digits after it. Nodes in `views` return
            views. The hooks also keep views of the results of nodes in `layers` unchanged.

    Returns:
        An object with the hooks `pack` and `unpack`, and with a method `note(tensor, bits, function)`. After a note,
        the hooks save `bits`, an object with an attribute `packed`, for each tensor that covers the whole memory of
        `tensor`. The note is valid as long as the values do not change and other references keep `bits` alive.
        `function` is a `RepeatedFunction.native` that computes the values from `bits.packed`, in memory order. If
        `function` is `None`, or does not run, `unpacked` computes the tensor.
    """
    module = loaded_launcher()
    return (
        None if module is None else module.SavingHooks(packed, unpacked, counted, fewest_bytes, set(views), set(layers))
    )
