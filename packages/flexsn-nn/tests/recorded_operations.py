"""A recorder of graphs that needs no GPU.

A dispatch mode records torch's operations, and replays write to their memory. As in a CUDA graph, Python runs once,
the recorded run leaves no results, and each replay overwrites the results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class Operations(TorchDispatchMode):
    """Records operations, and the old values of tensors that they overwrite, so that the recorded run can be undone."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, list[Tensor | None]]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._new_storages: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "_local_scalar_dense" in str(function):
            raise RuntimeError("operation not permitted when stream is capturing")
        arguments = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        # The schema of a batch norm does not declare that it writes to its running statistics.
        if function._schema.is_mutable or "batch_norm" in str(function):
            for tensor in arguments:
                address = tensor.untyped_storage().data_ptr()
                if address not in self._new_storages and address not in self._before:
                    self._before[address] = tensor, tensor.detach().clone()
        result = function(*args, **kwargs)
        results = [value for value in tree_flatten(result)[0] if isinstance(value, Tensor)]
        addresses = {tensor.untyped_storage().data_ptr() for tensor in arguments}
        fresh = [tensor for tensor in results if tensor.untyped_storage().data_ptr() not in addresses]
        self._new_storages.update(tensor.untyped_storage().data_ptr() for tensor in fresh)
        self.calls.append((function, args, kwargs, [t if any(t is f for f in fresh) else None for t in results]))
        return result

    def undo(self) -> None:
        for tensor, old_value in self._before.values():
            tensor.detach().copy_(old_value)

    def repeat(self) -> None:
        for function, args, kwargs, fresh in self.calls:
            results = [v for v in tree_flatten(function(*args, **kwargs))[0] if isinstance(v, Tensor)]
            for target, result in zip(fresh, results, strict=True):
                if target is not None:
                    target.copy_(result)


class OperationsRecorder:
    """A `Recorder` on the CPU.

    Attributes:
        recorded: number of recorded graphs.
        replayed: number of replays.
        run_by_python: number of runs in Python without a recording.
    """

    def __init__(self) -> None:
        self.recorded = self.replayed = self.run_by_python = 0

    def rehearse(self, function: Callable[[], Any], names: Any) -> tuple[Any, list[str]]:
        self.run_by_python += 1
        return function(), []

    def record(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        operations = Operations()
        draws = torch.get_rng_state()
        try:
            with operations:
                result = function()
        finally:
            with torch.no_grad():
                operations.undo()
            torch.set_rng_state(draws)
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            with torch.no_grad():
                operations.repeat()

        return replay, result
