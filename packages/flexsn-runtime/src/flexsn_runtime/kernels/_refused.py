"""Errors for calls that a compiled backward does not support."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flexsn_graph import CoreTrace
from flexsn_hop.double_backward import refuse_double_backward as undifferentiable
from flexsn_runtime._torch_private import transform_at_work
from flexsn_runtime.errors import TransformError
from flexsn_runtime.operands._memory import check_tensor


def check_readable(trace: CoreTrace, tensors: Sequence[Tensor | None]) -> None:
    """Raises an error unless kernels can read the arguments of a backward and write to newly allocated memory.

    Memory of the forward, such as the memory of a sharded parameter, may have been freed since the forward.

    Args:
        tensors: `[*inputs, *states, *lifted, *checkpoints or *residuals, *grad_outputs, *grad_states]`.

    Raises:
        TransformError: the call is inside of `FakeTensorMode`, `make_fx` or a similar mode.
        LayoutError: a tensor is sparse, fake or similar, or its memory was freed.
    """
    transform = transform_at_work()
    if transform is not None:
        raise TransformError(
            f"the backward of a compiled scan cannot run inside of {transform}. Use backend='torch' there, or "
            "backend='hop'."
        )
    first_lifted = trace.num_inputs + trace.num_states
    first_kept = first_lifted + len(trace.lifted_values)
    first_grad = len(tensors) - trace.num_outputs - trace.num_states
    parts = [("argument", 0), ("captured tensor", first_lifted), ("kept tensor", first_kept), ("gradient", first_grad)]
    for (kind, first), end in zip(parts, [first for _, first in parts[1:]] + [len(tensors)], strict=True):
        for i, tensor in enumerate(tensors[first:end]):
            # Autograd's zeros without memory are copied, so they are allowed.
            if tensor is not None and not (first == first_grad and tensor._is_zerotensor()):
                check_tensor(tensor, f"{kind} {i} of a backward")


def batched_gradients_error() -> TransformError:
    """Returns the error for a backward that receives batched gradients."""
    return TransformError(
        "the backward of a compiled scan takes one gradient at a time, but received a batch of gradients "
        "(is_grads_batched=True, jacobian(vectorize=True), torch.func). Compute the gradients one by "
        "one, with vectorize=False, or use backend='torch'."
    )


def refuse_double_backward(gradients: list[Tensor | None], tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Calls `flexsn_hop.double_backward.refuse_double_backward` with a message about scans."""
    return undifferentiable(
        gradients,
        tensors,
        "the gradient of a compiled scan has no gradient itself (double backward, create_graph=True, "
        "torch.autograd.functional.jvp and hessian). Use backend='torch', or leave create_graph out.",
    )
