"""`precision` and `fast_math` affect the instructions of kernels, their compilation, and their rounding."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from runtime_cores import DEVICE, STEP, compiled, loop, random, soft_lif
from torch import Tensor

from flexsn_codegen import TRITON, KernelSource, PrecisionError, compile_options, compile_triton_code_str
from flexsn_codegen.targets.triton import _launcher
from flexsn_runtime import LaunchConfig, ScanProgram
from flexsn_runtime.kernels import _backward, _forward
from flexsn_runtime.launches import _launch
from flexsn_runtime.launches._kernel import CompiledKernel
from flexsn_runtime.launches._launch import Launch
from flexsn_runtime.launches._launches import launch


def divided(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = v * 0.5 + torch.tanh(x) / (1.0 + v * v)
    return h * h, h


@pytest.mark.parametrize("fast_math", [False, True])
def test_fast_math_reaches_every_kernel_its_name_and_the_compiler(
    fast_math: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources: dict[str, str] = {}
    launched: list[CompiledKernel] = []

    def compile_source(kernel: KernelSource) -> Any:
        sources[kernel.name] = kernel.source
        return compile_triton_code_str(kernel.source, kernel.name)

    def record_launch(kernel: CompiledKernel, *rest: Any) -> Any:
        launched.append(kernel)
        return launch(kernel, *rest)

    monkeypatch.setattr(TRITON, "compile", compile_source)
    monkeypatch.setattr(_forward, "launch", record_launch)
    monkeypatch.setattr(_backward, "launch", record_launch)
    x, v = random(5, *STEP).requires_grad_(), random(*STEP, seed=1).requires_grad_()
    output = compiled(ScanProgram(divided, 1, 1, 1, fast_math=fast_math), 1, [x], [v])[0]
    expected = loop(divided, 1, [x], [v])[0]
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    (gradient,), (reference,) = torch.autograd.grad(output.sum(), x), torch.autograd.grad(expected.sum(), x)
    torch.testing.assert_close(gradient, reference, rtol=1e-3, atol=1e-4)

    forward, backward = sources
    assert ("_fast_forward_" in forward, "_fast_backward_" in backward) == (fast_math, fast_math)
    for source in sources.values():
        assert ("dev.fast_tanh(" in source) == fast_math
    assert [kernel.function.__name__ for kernel in launched] == [forward, backward]
    for kernel in launched:
        assert kernel.options == compile_options("hip" if torch.version.hip else "cuda", fast_math=fast_math)


def test_fast_math_in_cpp_fuses_products_and_sums(compiler: None) -> None:
    """Tests the low part of a product, which only a fused instruction keeps."""

    def low_part(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return x * x - v, v

    x = torch.full((3, 5), 1.0 + 2.0**-12)
    v = x[0] * x[0]
    exact, fast = (
        compiled(ScanProgram(low_part, 1, 1, 1, fast_math=fast_math, on_cpu="cpp"), 1, [x], [v])[0]
        for fast_math in (False, True)
    )
    assert torch.equal(exact, torch.zeros(3, 5))
    if "AVX" in torch.backends.cpu.get_cpu_capability():  # CPUs with AVX have fused instructions
        assert torch.equal(fast, torch.full((3, 5), 2.0**-24))


def test_launch_compiles_with_the_kernels_options(monkeypatch: pytest.MonkeyPatch) -> None:
    passed_options: list[dict[str, Any]] = []

    class Function:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **options: passed_options.append(options)

    monkeypatch.setattr(_launch, "triton_interpreted", lambda: False)
    monkeypatch.setattr(_launcher, "_single_device", lambda: True)
    options = compile_options("cuda", fast_math=True)
    config = LaunchConfig(chunk=1, block=32, num_warps=1)
    Launch(CompiledKernel(Function(), (), ("T", "NCL"), options), {"T": 1, "NCL": 5}, config, DEVICE)([])
    assert passed_options == [{"BLOCK": 32, "num_warps": 1, **options}]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float32_precision_rounds_once_in_each_step(dtype: torch.dtype) -> None:
    x, v = random(6, *STEP).to(dtype), random(*STEP, seed=1).to(dtype)

    def rounded(x: Tensor, v: Tensor) -> Sequence[Tensor]:
        return [t.to(dtype) for t in soft_lif(x.float(), v.float())]

    actual = compiled(ScanProgram(soft_lif, 1, 1, 1, precision="float32"), 1, [x], [v])
    for a, b in zip(actual, loop(rounded, 1, [x], [v]), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(actual[0], compiled(soft_lif, 1, [x], [v])[0])


def test_copies_of_a_program_keep_its_settings() -> None:
    program = ScanProgram(soft_lif, 1, 1, 1, (True, False), precision="float32", fast_math=True)
    for copied in (copy.deepcopy(program), pickle.loads(pickle.dumps(program))):
        assert copied.numerics == program.numerics
        assert copied.requires_grad == (True, False)


def test_unknown_precision_is_refused() -> None:
    unknown: Any = "double"
    with pytest.raises(PrecisionError, match="no precision 'double'"):
        ScanProgram(soft_lif, 1, 1, 1, precision=unknown)
