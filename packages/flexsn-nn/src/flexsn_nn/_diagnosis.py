"""Finds the cause of a failed call, if the error of the failed operation does not name the cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from flexsn_hop.errors import StateChangedError
from flexsn_nn._checks import are_apart
from flexsn_nn._unregistered import captured_by
from flexsn_nn.errors import StateError
from flexsn_runtime import DeviceError


def explain_devices(inputs: Sequence[Tensor], module: nn.Module, core: object, error: Exception) -> None:
    """Raises `DeviceError` if the tensors of a failed call are on different devices.

    Args:
        inputs: inputs of the call.
        module: neuron whose parameters and buffers the step reads.
        core: step function. The devices of its captured tensors are compared, too.
        error: error that the call raised. If it is an error of this project, the tensors are not compared, because
            such an error already names its cause.
    """
    if type(error).__module__.startswith("flexsn_"):
        return
    device = inputs[0].device
    for name, tensor in _list_tensors(inputs, module, core):
        if are_apart(tensor, device):
            raise DeviceError(
                f"{name} is on {tensor.device} and input 0 on {device}: move both to one device, with "
                f"neuron.to({str(device)!r}) or x.to({str(tensor.device)!r})."
            ) from error


def explain_dtypes(inputs: Sequence[Tensor], error: Exception) -> None:
    """Raises `StateError` if `error` reports a state that a step has changed, and the inputs differ in dtype."""
    if not isinstance(error, StateChangedError):
        return
    for i, x in enumerate(inputs):
        if x.dtype != inputs[0].dtype:
            raise StateError(
                f"input {i} is {x.dtype} and input 0 {inputs[0].dtype}, which is the dtype of the initial states. "
                f"Convert an input: x.to({inputs[0].dtype}). {error}"
            ) from error


def _list_tensors(inputs: Sequence[Tensor], module: nn.Module, core: object) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that a step reads, with their names."""
    yield from ((f"input {i}", x) for i, x in enumerate(inputs))
    yield from ((f"the parameter {name}", value) for name, value in module.named_parameters())
    yield from ((f"the buffer {name}", value) for name, value in module.named_buffers())
    yield from (
        (f"{name}, which the core captures,", value) for name, value in captured_by(core) if isinstance(value, Tensor)
    )
