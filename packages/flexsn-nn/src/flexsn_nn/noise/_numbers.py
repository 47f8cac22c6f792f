"""The key of a neuron's random numbers, and the places of the random numbers in a call."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flexsn_nn.noise._current import Elements, Places
from flexsn_runtime import words_of_elements


class Numbers:
    """Key of a neuron's random numbers, and the number of steps since the neuron began with its initial state.

    Attributes:
        words: key that is derived from a seed; `None` if keys are drawn from PyTorch's generator.
        first_row: index that the first row of a batch gets, for a neuron that receives only some rows of the whole
            batch.
        in_evaluation: True if numbers are also drawn in evaluation mode.
        key: key of the last call that kept the state, `[2]`, int32; `None` before such a call, and after a new seed.
        steps: indices of the time steps in the last call that kept the state, int32; `None` before such a call.
    """

    def __init__(self) -> None:
        self.words: tuple[int, int] | None = None
        self.first_row = 0
        self.in_evaluation = True
        self.key: Tensor | None = None
        self.steps: Tensor | None = None
        self._columns: dict[tuple[Any, ...], Tensor] = {}

    def configure(self, seed: int | None, neuron: int, first_row: int | None, in_evaluation: bool | None) -> None:
        """Applies `random.configure` to the neuron with this index."""
        if seed is not None:
            self.words, self.key = (None if seed < 0 else _derive_words(seed, neuron)), None
        if first_row is not None:
            self.first_row = first_row
        if in_evaluation is not None:
            self.in_evaluation = in_evaluation

    def places(
        self, shape: Sequence[int], steps: int | None, device: torch.device, *, begins: bool, keep: bool
    ) -> tuple[Elements, Tensor]:
        """Returns the tensors that identify a call's elements, and the indices of its time steps.

        The indices are `[T, 1, ...]`, or `[1, ...]` for a single step.

        Args:
            shape: shape of the step.
            steps: number of steps; `None` for a single step without a time dimension.
            begins: True if the call begins with the initial state, and therefore gets a new key.
            keep: True if the next call continues from the end of this call.
        """
        key, before = self.key, self.steps
        if key is None or begins or key.device != device:
            key, before = self._draw_key(device), None
        elif not torch.compiler.is_compiling() and key.is_inference() and not torch.is_inference_mode_enabled():
            key = key.clone()
        indices = torch.arange(1 if steps is None else steps, dtype=torch.int32, device=device)
        if before is not None:
            indices = indices + (before[-1] + 1)
        if keep:
            self.key = key
            has_steps = steps is None or torch.compiler.is_compiling() or steps > 0
            self.steps = indices if has_steps else before
        ones = [1] * len(shape)
        if len(shape):
            row = torch.arange(self.first_row, self.first_row + shape[0], dtype=torch.int32, device=device)
            row = row.view(-1, *ones[1:])
        else:
            row = torch.full((), self.first_row, dtype=torch.int32, device=device)
        elements = Elements(key[0].view(ones), key[1].view(ones), row, self._find_columns(shape, device))
        return elements, indices.view(ones if steps is None else [-1, *ones])

    def _find_columns(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Returns the index of each element in its row, `[1, *shape[1:]]`."""
        rest = shape[1:]
        if torch.compiler.is_compiling():
            return _create_columns(rest, device, len(shape))
        kind = (*rest, device, len(shape))
        if kind not in self._columns:
            if len(self._columns) >= _MOST:
                self._columns.clear()
            with torch.inference_mode(False):
                self._columns[kind] = _create_columns(rest, device, len(shape))
        return self._columns[kind]

    def _draw_key(self, device: torch.device) -> Tensor:
        if self.words is None:
            return torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=device)
        return torch.stack([torch.full((), word, dtype=torch.int32, device=device) for word in self.words])

    def apply(self, move: Callable[[Tensor], Tensor]) -> None:
        """Moves the stored tensors, as `nn.Module.to` moves parameters."""
        self.key = None if self.key is None else move(self.key)
        self.steps = None if self.steps is None else move(self.steps)


def draw_all(
    numbers: Numbers, shape: Sequence[int], steps: int | None, device: torch.device, *, bits: int | None
) -> Tensor:
    """Draws float32 numbers for all elements and steps, with a new key. The numbers equal each step's first draw.

    Args:
        shape, steps, device: arguments of `Numbers.places`.
        bits: number of bits of uniform numbers; `None` for normal numbers.
    """
    elements, step = numbers.places(shape, steps, device, begins=True, keep=False)
    places = Places(*words_of_elements(*elements), step)
    number: Tensor
    if bits is None:
        number = torch.ops.flexsn_graph.normal_number(*places, stream=0)
    else:
        number = torch.ops.flexsn_graph.uniform_number(*places, stream=0, bits=bits)
    return number


def numbers_of(net: nn.Module) -> list[Numbers]:
    """Collects the `Numbers` objects of a network's layers, in the order of `net.modules()`."""
    attributes = (module.__dict__.get("_numbers") for module in net.modules())
    return [numbers for numbers in attributes if isinstance(numbers, Numbers)]


_MOST = 16


def _create_columns(rest: Sequence[int], device: torch.device, dims: int) -> Tensor:
    size = 1
    for length in rest:
        size = size * length
    table = torch.arange(size, dtype=torch.int32, device=device)
    return table.view(1, *rest) if dims else table.view(())


def _derive_words(seed: int, neuron: int) -> tuple[int, int]:
    """Derives a key from a seed and the index of a neuron, as two signed words of 32 bits."""
    digest = hashlib.sha256(f"{seed} {neuron}".encode()).digest()
    low, high = (int.from_bytes(digest[i : i + 4], "little", signed=True) for i in (0, 4))
    return low, high
