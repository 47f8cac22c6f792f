"""Recorders of graphs, which record the operations of a step once and repeat them without Python."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from flexsn_nn._torch_private import end_allocation_to_pool
from flexsn_nn.graphs._lines import Names, line_of_call

_Result = TypeVar("_Result")

_SYNCHRONIZES = "called a synchronizing CUDA operation"


class GraphRecorder(Protocol):
    """A recorder of graphs for one device."""

    def rehearse(self, function: Callable[[], _Result], names: Names) -> tuple[_Result, list[str]]:
        """Calls a function that is to be recorded. Returns the result, and descriptions of obstacles to a recording.

        Args:
            names: names of modules, for the descriptions.
        """

    def record(self, function: Callable[[], _Result]) -> tuple[Callable[[], None], _Result]:
        """Records the operations of a function without executing them.

        Returns:
            A function that repeats the operations, and the result, whose tensors every repetition overwrites.

        Raises:
            Exception: the function or the device failed. In that case, nothing is recorded.
        """


class CudaRecorder:
    """A recorder of CUDA graphs. The graphs share one pool of memory, so only one graph may replay at a time.

    Args:
        device: device of all computations.
        generators: generators of random numbers, other than torch's default generator.
    """

    def __init__(self, device: torch.device, generators: Sequence[torch.Generator] = ()) -> None:
        self._device = device
        self._generators = generators
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def _enter_stream(self) -> Iterator[None]:
        """Enters the stream of all captures.

        All captures use one stream, because autograd accumulates a parameter's gradient on the stream on which it
        created the node for this parameter.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def rehearse(self, function: Callable[[], _Result], names: Names) -> tuple[_Result, list[str]]:
        """Calls a function on the stream of the captures, and notes each operation that waits for the device."""
        notes: dict[str, None] = {}
        before = torch.cuda.get_sync_debug_mode()
        with self._enter_stream(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            warnings.filterwarnings("always", message=f".*{_SYNCHRONIZES}")
            show_other, thread = warnings.showwarning, threading.get_ident()

            def note(message: Warning | str, *details: Any, **more: Any) -> None:
                if _SYNCHRONIZES not in str(message):
                    show_other(message, *details, **more)
                elif threading.get_ident() == thread:  # other threads' operations are not part of the step
                    notes[f"{line_of_call(names)} waits for the device"] = None

            warnings.showwarning = note
            torch.cuda.set_sync_debug_mode("warn")
            try:
                result = function()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        return result, list(notes)

    def record(self, function: Callable[[], _Result]) -> tuple[Callable[[], None], _Result]:
        """Captures a function in a graph that uses the pool."""
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()
        index = self._device.index if self._device.index is not None else torch.cuda.current_device()
        generators = [torch.cuda.default_generators[index], *self._generators]
        states = [generator.clone_state() for generator in generators]
        collects_garbage = gc.isenabled()
        gc.disable()  # collecting an old graph would disturb the capture
        try:
            with self._enter_stream():
                # During the capture, other threads may prepare batches, with calls that are forbidden in this thread.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = function()
                except BaseException:
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
        except BaseException:
            # After a failed capture, the allocator still waits for the end of the capture, and generators still count
            # their draws for the capture.
            end_allocation_to_pool(index, self._pool)
            self._pool = torch.cuda.graph_pool_handle()
            for generator, state in zip(generators, states, strict=True):
                if not _can_draw(generator):
                    generator.graphsafe_set_state(state)
                    _NUM_REPLACED[0] += 1
            raise
        finally:
            if collects_garbage:
                gc.enable()
        return graph.replay, result


# Number of generator states that were replaced. Older graphs draw from states that no longer belong to a generator.
_NUM_REPLACED = [0]


def replaced_states() -> int:
    """Returns the number of replaced generator states. If this number has increased, older graphs are not valid."""
    return _NUM_REPLACED[0]


def _can_draw(generator: torch.Generator) -> bool:
    """True if a generator can draw numbers as usual. The check does not change the generator's state."""
    try:
        before = generator.get_state()
        torch.rand(1, device=generator.device, generator=generator)
        generator.set_state(before)
    except RuntimeError:
        return False
    return True


def recorder_for(net: nn.Module, generators: Sequence[torch.Generator]) -> tuple[GraphRecorder | None, str]:
    """Returns a recorder for a network's graphs, or `None` and the reason."""
    devices = dict.fromkeys(tensor.device for tensor in (*net.parameters(), *net.buffers()))
    if not devices:
        return None, "the network has no parameters, which would determine the graph's device"
    on_gpu = [device for device in devices if device.type == "cuda"]
    if not on_gpu:
        return None, f"the network is on {next(iter(devices))}, where steps are plain calls"
    if len(devices) > 1:
        other = next(device for device in devices if device != on_gpu[0])
        named = (*net.named_parameters(), *net.named_buffers())
        name = next(name for name, tensor in named if tensor.device == other)
        return None, f"{name} is on {other}, other tensors on {on_gpu[0]}: a graph runs on one device"
    return CudaRecorder(on_gpu[0], generators), ""
