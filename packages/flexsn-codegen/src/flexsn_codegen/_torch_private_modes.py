"""Private parts of torch: active modes and transforms, export, symbols. The import checks that each name exists."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.autograd import forward_ad

from flexsn_graph.versions import UnsupportedVersionError, expect, needed, private

_BLIND = "pointwise kernels would not see a transform of torch.func, and give wrong gradients"
_NOT_DIRECT = "pointwise kernels in compiled code are launched by an operator, not directly"

_are_transforms_active = private("torch._C", "_are_functorch_transforms_active", _BLIND)
_number_of_modes = private("torch._C", "_len_torch_dispatch_stack", _BLIND)
is_batched_by_autograd = private(
    "torch._C",
    "_functorch.is_legacy_batchedtensor",
    "torch.autograd.grad(is_grads_batched=True) is rejected with another message",
    default=lambda tensor: False,
)
_EXPORT, _IS_EXPORTING = "torch.export._trace", "custom_triton_ops_decomposition_disabled"
expect(_EXPORT, [_IS_EXPORTING], _NOT_DIRECT)
if TYPE_CHECKING:
    from torch._subclasses.functional_tensor import FunctionalTensorMode as FunctionalTensorMode
else:
    FunctionalTensorMode = private("torch._subclasses.functional_tensor", "FunctionalTensorMode", _NOT_DIRECT)

_Function = TypeVar("_Function", bound=Callable[..., Any])
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))


def is_plain(tensors: list[torch.Tensor]) -> bool:
    """True if only autograd observes operations on the tensors: no transform, mode or tensor subclass is active."""
    if _are_transforms_active() or _number_of_modes():
        return False
    return _PLAIN.issuperset(map(type, tensors))


def is_forward_mode() -> bool:
    """True if forward-mode derivatives are being computed, by `torch.func.jvp` or `torch.autograd.forward_ad`."""
    # In a version of torch without this name, torch itself rejects forward mode, with another message.
    return bool(getattr(forward_ad, "_current_level", -1) >= 0)


def is_exporting() -> bool:
    """True while `torch.export` records a program for other processes."""
    if _EXPORT not in sys.modules:  # an export imports `torch.export._trace`, whose import is slow
        return False
    try:
        return bool(needed(_EXPORT, _IS_EXPORTING, _NOT_DIRECT)())
    except UnsupportedVersionError:  # the import of this module has reported the missing name
        return True


def hint_of(number: torch.SymInt | torch.SymFloat) -> int | float:
    """Value of a compiler's symbol in the call for which the graph is compiled. Adds no guard to the graph.

    If the value is unknown because the graph computes the number, the result is 0.5 or 3.
    """
    is_float = isinstance(number, torch.SymFloat)
    value = getattr(getattr(number, "node", None), "_hint", None)  # `None` if the graph computes the number
    if not isinstance(value, int | float):
        return 0.5 if is_float else 3
    return float(value) if is_float else int(value)


_rules = torch.library.Library("flexsn_codegen", "IMPL")


def before_transforms(operator: str, rule: Callable[..., Any]) -> None:
    """Registers a function that is called instead of an operator inside of a transform of `torch.func`.

    The function is called before the transform processes the operator. This also applies to graphs that compilers
    record from transforms.

    Args:
        operator: name of the operator, without "flexsn_codegen::".
        rule: the function, which receives the operator's arguments.
    """
    _rules.impl(operator, rule, "FuncTorchDynamicLayerFrontMode")


def constant(function: _Function) -> _Function:
    """Marks a function of constants. The compiler calls it during compilation, and uses its result as a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
