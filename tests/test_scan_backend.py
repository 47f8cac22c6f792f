"""A backend that is defined outside of the packages. It runs scans, their gradients and compiled graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy_target import NUMPY
from scan_cores import CASES, problem
from torch import Tensor

from flexsn_hop import eager_scan_final_state, flex_sn_scan_final_state, register_scan_lowering
from flexsn_runtime import (
    KernelLowering,
    LaunchConfig,
    LaunchPlan,
    ScanProgram,
    TargetName,
    prepare,
    scan,
    scan_again,
    why_unavailable,
)
from flexsn_runtime.backend import BACKENDS, Backend, register_backend
from flexsn_runtime.launches._kernel import CompiledKernel

STEPS, STEP = 11, (3, 5)
ON_CPU = cast(TargetName, "numpy")
CONFIG = LaunchConfig(chunk=4, block=15, num_warps=1)
SELECTED = [case for case in CASES if case.name in {"lif_soft", "plif_channel", "izhikevich"}]

# Functions by name, because compiled graphs contain the names of kernels.
_functions: dict[str, Callable[..., None]] = {}


def run(function: Callable[..., None], tensors: Sequence[Tensor], sizes: Sequence[int]) -> None:
    with np.errstate(invalid="ignore", over="ignore"):
        function(*(_view_array(tensor) for tensor in tensors), *sizes)


def _view_array(tensor: Tensor) -> Any:
    """Returns the memory of a tensor as an array that begins with the tensor's first element."""
    size = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    return torch.as_strided(tensor.detach(), (size,), (1,)).numpy()


@torch.library.custom_op("flexsn_tests::launch_numpy", mutates_args=("tensors",), device_types="cpu")
def launch_numpy(tensors: Sequence[Tensor], sizes: Sequence[int], name: str) -> None:
    run(_functions[name], tensors, sizes)


@launch_numpy.register_fake
def _(tensors: Sequence[Tensor], sizes: Sequence[int], name: str) -> None:
    pass


class NumPyLaunch:
    """A launch of a NumPy function. `call` runs the function directly, or by an operator that a graph can contain."""

    is_compiled = True

    def __init__(self, call: Callable[[Sequence[Tensor]], object]) -> None:
        self._call = call

    def allocator(
        self, shape: Sequence[int], strides: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> Callable[[], Tensor]:
        return partial(torch.empty_strided, tuple(shape), tuple(strides), dtype=dtype, device=device)

    def entry(self) -> None:
        pass

    def compile(self, tensors: Sequence[Tensor]) -> None:
        pass

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        self._call(tensors)


class NumPyBackend(Backend):
    name = "numpy"
    target = NUMPY

    def why_unavailable(self, device: torch.device) -> str | None:
        return None if device.type == "cpu" else "arrays are on the CPU."

    def size_class(self, ncl: int) -> int:
        return 2**62

    def plan(self, ncl: int, cost: object, carried: int) -> LaunchPlan:
        return LaunchPlan(CONFIG, CONFIG, CONFIG)

    def launch(
        self, kernel: CompiledKernel, sizes: Mapping[str, int], config: LaunchConfig, device: torch.device
    ) -> NumPyLaunch:
        values = [sizes[name] for name in kernel.sizes]
        return NumPyLaunch(lambda tensors: run(kernel.function, tensors, values))

    def recorded(
        self, kernel: CompiledKernel, sizes: Mapping[str, int], config: LaunchConfig, device: torch.device
    ) -> NumPyLaunch:
        values, name = [sizes[name] for name in kernel.sizes], kernel.function.__name__
        _functions[name] = kernel.function
        return NumPyLaunch(lambda tensors: launch_numpy(list(tensors), values, name))


@pytest.fixture(autouse=True)
def backend() -> Iterator[None]:
    register_backend(NumPyBackend())
    try:
        yield
    finally:
        del BACKENDS["numpy"]


def test_backend_names_are_unique() -> None:
    with pytest.raises(ValueError, match="a backend with the name 'numpy' is already registered"):
        register_backend(NumPyBackend())


@pytest.mark.parametrize("case", SELECTED, ids=lambda case: case.name)
def test_scan_and_its_gradient_equal_the_loop(case: Any) -> None:
    p = problem(case, STEPS, STEP, dtype=torch.float64)
    program = ScanProgram(p.core, *p.counts, on_cpu=ON_CPU)
    expected = eager_scan_final_state(p.core, *p.counts, *p.inputs, *p.states)
    weights = [torch.randn_like(result) for result in expected]
    expected_gradients = torch.autograd.grad(expected, p.leaves, weights)
    for call in (partial(_run_prepared, program), partial(scan_again, program), partial(scan_again, program)):
        results = call(p.inputs, p.states)
        torch.testing.assert_close(list(results), list(expected))
        gradients = torch.autograd.grad(results, p.leaves, weights)
        torch.testing.assert_close(gradients, expected_gradients)


def _run_prepared(program: ScanProgram, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    step, arguments = prepare(program, (*inputs, *states))
    return scan(step, arguments, state_seqs=False)


def test_steps_with_products_equal_the_loop() -> None:
    weight = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = 0.5 * v + x + torch.nn.functional.linear(v, weight)
        return h * h, h

    x = torch.randn(STEPS, *STEP, dtype=torch.float64, requires_grad=True)
    v = torch.randn(STEP, dtype=torch.float64)
    expected = eager_scan_final_state(core, 1, 1, 1, x, v)
    actual = _run_prepared(ScanProgram(core, 1, 1, 1, on_cpu=ON_CPU), (x,), (v,))
    torch.testing.assert_close(list(actual), list(expected))
    gradients = [torch.autograd.grad(_sum_results(results), (x, weight)) for results in (actual, expected)]
    torch.testing.assert_close(gradients[0], gradients[1])


def test_compiled_graph_launches_the_backend() -> None:
    case = next(case for case in SELECTED if case.name == "lif_soft")
    p = problem(case, STEPS, STEP, dtype=torch.float64)
    unregister = register_scan_lowering(KernelLowering(on_cpu=ON_CPU))

    def run_scan(*tensors: Tensor) -> tuple[Tensor, ...]:
        results = flex_sn_scan_final_state(p.core, *p.counts, *tensors, lowering="kernel")
        return tuple(results)

    try:
        _functions.clear()
        torch._dynamo.reset()
        # Caches are off, because a graph of another process may name a function that does not exist in this process.
        without_autograd_cache = torch._functorch.config.patch(enable_autograd_cache=False)
        with torch._inductor.config.patch(fx_graph_cache=False), without_autograd_cache:
            actual = torch.compile(run_scan, fullgraph=True)(*p.inputs, *p.states)
            gradients = torch.autograd.grad(_sum_results(actual), p.leaves)
    finally:
        unregister()
    expected = eager_scan_final_state(p.core, *p.counts, *p.inputs, *p.states)
    expected_gradients = torch.autograd.grad(_sum_results(expected), p.leaves)
    torch.testing.assert_close(list(actual), list(expected))
    torch.testing.assert_close(gradients, expected_gradients)
    assert {"forward", "backward"} == {name.split("_")[1] for name in _functions}


def _sum_results(results: Sequence[Tensor]) -> Tensor:
    return torch.stack([result.sum() for result in results]).sum()


def test_backend_reports_unavailable_devices() -> None:
    assert why_unavailable(torch.device("cuda"), ON_CPU) == "arrays are on the CPU."
