"""Runs a neuron with `DTensor` inputs. If parts of its step are independent, each process runs one part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from flexsn_nn.errors import PlacementError
from flexsn_runtime import CutSpecialization, RecurrentSpecialization, ScanProgram, TraceError, UnsupportedCoreError


class _Waited(torch.autograd.Function):
    """Function that waits for the result of a collective operation, and returns a plain tensor for kernels."""

    @staticmethod
    def forward(ctx: Any, part: Any) -> Tensor:
        memory: Tensor = part.wait()
        return memory.view_as(memory)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


@dataclass(frozen=True, slots=True)
class StepShards:
    """The distribution of a call's step over processes.

    Attributes:
        mesh: mesh of the processes.
        shape: shape of the whole step.
        dims: for each dimension of the mesh, the dimension of the step that is divided over its processes; `None` if
            the step is not divided over them.
    """

    mesh: DeviceMesh
    shape: tuple[int, ...]
    dims: tuple[int | None, ...]

    @classmethod
    def of(cls, inputs: Sequence[Tensor], lead: int) -> StepShards:
        """Determines the distribution of a step from the inputs of a call.

        Args:
            inputs: `DTensor`s.
            lead: number of dimensions before the step: 1 for sequences.

        Raises:
            PlacementError: only some of the inputs are `DTensor`s, the inputs have different meshes or placements, or a
                process could not run its part independently.
        """
        tensors = [x for x in inputs if isinstance(x, DTensor)]
        if len(tensors) != len(inputs):
            raise PlacementError(
                "some inputs are DTensors and others plain tensors. Make all of them DTensors "
                "(torch.distributed.tensor.distribute_tensor), or pass their local parts: x.to_local()."
            )
        first = tensors[0]
        if any(x.device_mesh != first.device_mesh for x in tensors):
            raise PlacementError("the inputs are DTensors on different meshes: redistribute them to one mesh.")
        shape = tuple(torch.broadcast_shapes(*(x.shape[lead:] for x in tensors)))
        dims_by_input = [
            [_find_step_dim(i, p, x, len(shape), lead) for p in x.placements] for i, x in enumerate(tensors)
        ]
        dims: list[int | None] = []
        for along in zip(*dims_by_input, strict=True):
            divided_dims = {dim for dim in along if dim is not None}
            if len(divided_dims) > 1:
                raise PlacementError(
                    f"the inputs are sharded along different dimensions of the step, {sorted(divided_dims)}: "
                    "redistribute them to one placement."
                )
            dims.append(next(iter(divided_dims), None))
        shards = cls(first.device_mesh, shape, tuple(dims))
        for i, x in enumerate(tensors):
            if shards.placements(x.shape[lead:], lead) != x.placements:
                raise PlacementError(
                    f"input {i} has the placements {x.placements} where another input is sharded: redistribute it to "
                    f"{shards.placements(x.shape[lead:], lead)}."
                )
        return shards

    @property
    def is_cut(self) -> bool:
        """True if each process has only a part of the step."""
        return any(dim is not None for dim in self.dims)

    def placements(self, shape: Sequence[int], lead: int = 0) -> tuple[Placement, ...]:
        """Returns the placements that a tensor needs if it broadcasts to the step.

        Args:
            shape: shape of the tensor, without its first `lead` dimensions.
        """
        missing = len(self.shape) - len(shape)
        return tuple(
            Shard(dim - missing + lead)
            if dim is not None and dim >= missing and shape[dim - missing] != 1
            else Replicate()
            for dim in self.dims
        )

    def local(self, tensor: Tensor) -> Tensor:
        """Returns this process's part of a tensor. The gradient of the tensor covers the whole step.

        If several parts of the step share the tensor, its gradient is the sum over these parts.
        """
        assert isinstance(tensor, DTensor)
        gradients = [
            Partial() if dim is not None and not isinstance(placement, Shard) else placement
            for dim, placement in zip(self.dims, tensor.placements, strict=True)
        ]
        part = tensor.to_local(grad_placements=gradients)
        assert isinstance(part, Tensor)
        if hasattr(part, "wait"):  # as documented by `to_local`, a collective operation may still run
            part = _Waited.apply(part)
            assert isinstance(part, Tensor)
        return part

    def whole(self, part: Tensor, lead: int) -> DTensor:
        """Returns the `DTensor` `[*lead, *step]` of which `part` is this process's part."""
        shape = torch.Size((*part.shape[:lead], *self.shape))
        strides = _compute_contiguous_strides(shape)
        placements = self.placements(self.shape, lead)
        return DTensor.from_local(part, self.mesh, placements, run_check=False, shape=shape, stride=strides)

    def state(self, state: Tensor, index: int) -> Tensor:
        """Returns this process's part of a state `[*step]`.

        Raises:
            PlacementError: the state is not a `DTensor`.
        """
        if not isinstance(state, DTensor):
            raise PlacementError(
                f"state {index} is a plain tensor and the input a DTensor. Call reset() between them, or pass states "
                "with the placements of the input."
            )
        return self.local(state.redistribute(self.mesh, self.placements(self.shape)))

    @contextmanager
    def local_parameters(self, module: nn.Module) -> Iterator[list[Tensor]]:
        """Context in which this process's parts replace the parameters and buffers of `module`.

        A plain tensor is assumed to be equal on all processes, as `DTensor` also assumes. Its gradient is summed over
        the processes that have a part of the step.

        Yields:
            The parts: for each module, first those of its parameters, and then those of its buffers.
        """
        replaced = [
            (tensors, name, tensor)
            for part in module.modules()
            for tensors in (part._parameters, part._buffers)
            for name, tensor in tensors.items()
            if tensor is not None and (self.is_cut or isinstance(tensor, DTensor))
        ]
        try:
            local = [self._localize_parameter(name, tensor) for _, name, tensor in replaced]
            for (tensors, name, _), part in zip(replaced, local, strict=True):
                tensors[name] = part  # type: ignore[assignment]
            yield local
        finally:
            for tensors, name, tensor in replaced:
                tensors[name] = tensor  # type: ignore[assignment]

    def _localize_parameter(self, name: str, tensor: Tensor) -> Tensor:
        everywhere: tuple[Placement, ...] = (Replicate(),) * len(self.dims)
        placements = self.placements(tensor.shape) if _can_broadcast(tensor.shape, self.shape) else everywhere
        if not isinstance(tensor, DTensor):
            tensor = DTensor.from_local(tensor, self.mesh, everywhere, run_check=False)
        if tensor.device_mesh != self.mesh:
            raise PlacementError(f"{name} is a DTensor on another mesh than the input: distribute both on one mesh.")
        return self.local(tensor.redistribute(self.mesh, placements))


def check_parts(
    program: ScanProgram, sequences: Sequence[Tensor], states: Sequence[Tensor], local: Sequence[Tensor]
) -> None:
    """Raises an error unless each process can compute its elements of the step from its own tensors.

    Args:
        sequences: this process's parts of the inputs, `[T, *step]` each.
        states: this process's parts of the initial states, `[*step]` each.
        local: this process's parts of the parameters and buffers.

    Raises:
        PlacementError: the step mixes elements, or captures a tensor that is neither a parameter nor a buffer of the
            module.
    """
    try:
        step, _ = program.specialize(sequences, states)
    except (TraceError, UnsupportedCoreError) as error:
        raise PlacementError(f"a step can be divided only if it works element by element: {error}") from error
    if isinstance(step, RecurrentSpecialization | CutSpecialization):
        raise PlacementError(
            "a step can be divided only if it works element by element, and this step multiplies its values by a "
            "matrix, or combines its elements. Gather the inputs first."
        )
    local_ids = {id(tensor) for tensor in local}
    foreign = [t for t in step.captured_now() or () if t.requires_grad and id(t) not in local_ids]
    if foreign:
        raise PlacementError(
            f"the core captures a tensor of shape {list(foreign[0].shape)} that requires grad and is not a "
            "parameter or buffer of this module: each process would get only the gradient of its own part. Make the "
            "core an nn.Module that owns it."
        )


def _find_step_dim(index: int, placement: Placement, x: DTensor, step_dims: int, lead: int) -> int | None:
    """Returns the dimension of the step along which an input is divided; `None` if it is not divided."""
    if isinstance(placement, Replicate):
        return None
    if type(placement) is not Shard:
        raise PlacementError(
            f"input {index} has the placement {placement}: a neuron is not linear, and needs the values themselves. "
            "Redistribute it to Replicate() or Shard(dim) first."
        )
    dim = placement.dim if placement.dim >= 0 else placement.dim + x.dim()
    if dim < lead:
        raise PlacementError(
            f"input {index} is sharded along time, where each step needs the state of the step before. Shard another "
            "dimension, or pass the state from process to process: flexsn_nn.distributed.TimeShards."
        )
    return dim - lead + step_dims - (x.dim() - lead)


def _can_broadcast(shape: Sequence[int], to: Sequence[int]) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))


def _compute_contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor."""
    return torch.empty(tuple(shape), device="meta").stride()
