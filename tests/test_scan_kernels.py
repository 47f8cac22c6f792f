"""Kernels of compiled scans. flexsn-runtime provides them. If it is not installed, a log message names it."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor

import flexsn_hop.lowering._inductor
import flexsn_hop.lowering._lowering as lowering
from flexsn_hop import register_scan_lowering, scan, scan_lowerings
from flexsn_runtime import KernelLowering

LIST_LOWERINGS = """
import sys
import torch
from flexsn_hop import scan_lowerings
assert "flexsn_runtime" not in sys.modules
print(list(scan_lowerings()))
"""


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def test_kernels_are_detected_without_an_import() -> None:
    process = subprocess.run(
        [sys.executable, "-c", LIST_LOWERINGS], capture_output=True, text=True, check=False, env=os.environ
    )
    assert process.stdout == "['flexsn_runtime']\n", process.stderr


@pytest.fixture
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Simulates a process that has not yet looked for installed kernels."""
    monkeypatch.setattr(lowering, "_registered", [None])
    monkeypatch.setattr(lowering, "_installed_kernels", lowering._installed_kernels.__wrapped__)
    return monkeypatch


def test_registered_lowering_replaces_kernels(fresh_process: pytest.MonkeyPatch) -> None:
    custom_lowering = KernelLowering(on_cpu="triton")
    unregister = register_scan_lowering(custom_lowering)
    assert lowering._sort_lowerings() == [custom_lowering]
    unregister()
    assert list(scan_lowerings()) == ["flexsn_runtime"]
    assert lowering._sort_lowerings() != [custom_lowering]


def test_warning_names_a_broken_installation(fresh_process: pytest.MonkeyPatch) -> None:
    fresh_process.setitem(sys.modules, "flexsn_runtime", None)
    fresh_process.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.warns(UserWarning, match="run as loops, because flexsn_runtime is installed but cannot be imported"):
        assert scan_lowerings() == {}


def test_loop_without_kernels_is_logged_once(
    fresh_process: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh_process.setattr(importlib.util, "find_spec", lambda name: None)
    flexsn_hop.lowering._inductor._log_once.cache_clear()

    def compile_scan(steps: int) -> None:
        torch._dynamo.reset()
        run = torch.compile(lambda xs: scan(lambda c, x: (c * 0.5 + x, None), torch.zeros(3), xs)[0], fullgraph=True)
        run(torch.ones(steps, 3))

    without_graph_cache = torch._inductor.config.patch(fx_graph_cache=False)
    without_autograd_cache = torch._functorch.config.patch(enable_autograd_cache=False)
    with without_graph_cache, without_autograd_cache, caplog.at_level(logging.WARNING, "flexsn_hop"):
        compile_scan(2)
        compile_scan(3)
        fresh_process.setenv("FLEXSN_HOP_LOWERING", "loop")
        flexsn_hop.lowering._inductor._log_once.cache_clear()
        compile_scan(4)
    (message,) = [record.getMessage() for record in caplog.records if record.name == "flexsn_hop"]
    assert "runs as a loop, without kernels: flexsn-runtime, which has kernels, is not installed" in message
    assert "lowering='loop'" in message


W = torch.linspace(-1, 1, 9).reshape(3, 3)


@pytest.mark.usefixtures("compiler")
def test_inputs_may_have_more_dimensions_than_the_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXSN_HOP_LOWERING", "kernel")
    xs = torch.linspace(-1, 1, 120).reshape(4, 2, 5, 3)
    init = torch.ones(3, requires_grad=True)

    def run(init: Tensor, xs: Tensor) -> tuple[Tensor, Tensor]:
        return scan(lambda c, x: (torch.tanh(c @ W) + x[0, 0], x[1, 2] * c), init, xs)

    def differentiate(run: object) -> object:
        carry, ys = run(init, xs)  # type: ignore[operator]
        return carry, ys, torch.autograd.grad(carry.sum() + ys.square().sum(), init)

    torch.testing.assert_close(differentiate(torch.compile(run, fullgraph=True)), differentiate(run))
