"""Repeated launches of kernels take the fastest path."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flexsn_codegen import pointwise
from flexsn_codegen.targets.triton import _launcher, launcher, prepare_compiler


class Compiled:
    """Replaces a compiled Triton kernel, and records its launches."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        self.launches.append(arguments)

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments, stream: self.launches.append(("with hooks", grid, stream, *arguments))


def test_launch_uses_the_current_stream_of_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launcher, "_single_device", lambda: True)
    driver = pytest.importorskip("triton.runtime.driver").driver
    knobs = pytest.importorskip("triton").knobs.runtime
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_stream=lambda index: f"stream of {index}"))
    compiled = Compiled()
    launch = launcher(compiled, (7, 1, 1), (5, 6), torch.device("cuda", 3))
    launch("x")  # type: ignore[arg-type]
    assert compiled.launches == [(7, 1, 1, "stream of 3", "function", "metadata", None, None, None, "x", 5, 6)]

    def hook(metadata: object) -> None: ...

    for chain in (knobs.launch_enter_hook, knobs.launch_exit_hook):
        chain.add(hook)
        launch("y")  # type: ignore[arg-type]
        chain.remove(hook)
        assert compiled.launches.pop() == ("with hooks", (7, 1, 1), "stream of 3", "y", 5, 6)


@pytest.mark.parametrize("current", [0, 3])
def test_launch_switches_to_the_tensors_device_if_there_are_several(
    current: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = pytest.importorskip("triton.runtime.driver").driver
    devices = [current]

    @contextmanager
    def device_of(device: torch.device) -> Iterator[None]:
        devices.append(device.index)
        yield
        devices.pop()

    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_stream=lambda index: devices[-1]))
    monkeypatch.setattr(_launcher, "_single_device", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: devices[-1])
    monkeypatch.setattr(torch.cuda, "device", device_of)
    compiled = Compiled()
    launcher(compiled, (7, 1, 1), (5,), torch.device("cuda", 3))("x")  # type: ignore[arg-type]
    assert compiled.launches == [(7, 1, 1, 3, "function", "metadata", None, None, None, "x", 5)]
    assert devices == [current]


@pytest.mark.gpu
def test_binary_is_launched_only_for_its_numbers_and_alignments() -> None:
    """Tests arguments for which Triton has special binaries: 1, multiples of 16, and addresses at multiples of 16."""
    calls = []

    @pointwise
    def scaled(x: Tensor, factor: int) -> Tensor:
        return x * factor

    memory = torch.randn(40_003, device="cuda")
    for _ in range(3):
        for begin in (0, 1, 4):
            for factor in (1, 16, 7, 2**40):
                x = memory[begin : begin + 30_001]
                calls.append((scaled(x, factor), x * factor))
    for actual, expected in calls:
        assert torch.equal(actual, expected)


def test_threads_that_compile_at_once_prepare_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that one thread prepares the process, and that all threads compile after this preparation."""
    private = pytest.importorskip("flexsn_codegen.targets.triton._triton_private")
    starts, ends = list[int](), list[int]()

    def prepare() -> None:
        starts.append(threading.get_ident())
        time.sleep(0.05)  # the other threads arrive in this time
        ends.append(threading.get_ident())

    def compile_one() -> int:
        prepare_compiler()
        return len(ends)

    monkeypatch.setattr(private, "load_driver", lambda: None)
    monkeypatch.setattr(private, "read_compiler", prepare)
    monkeypatch.setattr(_launcher, "_load_driver", functools.cache(_launcher._load_driver.__wrapped__))
    monkeypatch.setattr(_launcher, "_read_compiler", functools.cache(_launcher._read_compiler.__wrapped__))
    with ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(compile_one) for _ in range(4)]
    assert [future.result() for future in futures] == [1] * 4
    assert len(starts) == 1
