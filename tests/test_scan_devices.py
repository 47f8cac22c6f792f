"""Launches under different conditions: streams, devices, graphs, alignment, autocast, and earlier launches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from gradient_cores import NUMBERS, compare, one_call
from scan_cores import CASES, hard_spike, problem
from torch import Tensor, nn

from flexsn_nn import FlexSN, FlexSNKernel
from flexsn_nn.neuron import LIF, ParametricLIF

pytestmark = pytest.mark.gpu

STEPS, STEP = 33, (41, 37)
several_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def make_data(seed: int = 0, device: str = "cuda", *, steps: int = STEPS, step: Sequence[int] = STEP) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(steps, *step, generator=generator) + 0.6).to(device)


def train(neuron: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """Returns the spikes, and the gradients of the input and the parameters."""
    x = x.detach().requires_grad_()
    neuron.reset()  # type: ignore[operator]
    spikes = neuron(x)
    return spikes.detach(), *torch.autograd.grad(spikes, [x, *neuron.parameters()], spikes.detach() + 0.5)


def train_in_loop(neuron: FlexSN, x: Tensor) -> tuple[Tensor, ...]:
    backend, neuron.backend = neuron.backend, "torch"
    results = train(neuron, x)
    neuron.backend = backend
    return results


def assert_close(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert torch.equal(actual[0], expected[0])
    for a, b in zip(actual[1:], expected[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * max(1.0, float(b.abs().max())))


def make_per_channel(device: str = "cuda") -> FlexSN:
    return ParametricLIF(init_tau=torch.linspace(1.5, 6.0, STEP[-1]), backend="triton").to(device)


# -- CUDA graphs ---------------------------------------------------------------------------------------


def warm_up(run: Callable[[], object]) -> None:
    """Runs a function once on a side stream, as torch's documentation of CUDA graphs requires.

    The autograd node of a leaf belongs to the stream on which the node was created. The node exists as long as an
    autograd graph contains it, such as the graph of a state. A node of the default stream cannot be part of a capture.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


@pytest.mark.parametrize("make", [lambda: LIF(backend="triton").cuda(), make_per_channel])
def test_captured_training_steps_equal_eager_mode(make: Callable[[], FlexSN]) -> None:
    neuron, static = make(), make_data()
    warm_up(lambda: train(neuron, static))
    neuron.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = train(neuron, static)
    for seed in (1, 2):
        static.copy_(make_data(seed))
        graph.replay()
        for actual, expected in zip(results, train(neuron, make_data(seed)), strict=True):
            assert torch.equal(actual, expected)


def test_captured_inference_carries_the_state() -> None:
    kernel = FlexSNKernel(CASES[1].make(hard_spike, []), 1, 1, 1)
    x, v = make_data(), torch.zeros(STEP, device="cuda")
    kernel(x, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        spikes, states = kernel(x, v)
        v.copy_(states[-1])
    v.zero_()
    results = []
    for seed in (1, 2):
        x.copy_(make_data(seed))
        graph.replay()
        results.append(spikes.clone())
    expected = kernel(torch.cat([make_data(1), make_data(2)]), torch.zeros(STEP, device="cuda"))[0]
    assert torch.equal(torch.cat(results), expected)


# While torch captures the callable, the outputs of torch's warm-up on another stream still exist.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
def test_graphed_callables_equal_eager_mode() -> None:
    """Checks `torch.cuda.make_graphed_callables`, which captures the forward and the backward separately."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(STEP[-1], STEP[-1])
            self.neuron = LIF(backend="triton")

        def forward(self, x: Tensor) -> Tensor:
            self.neuron.reset()
            spikes: Tensor = self.neuron(3.0 * self.linear(x))
            return spikes

    torch.manual_seed(0)
    layer = Layer().cuda()
    x = make_data().requires_grad_()
    expected = torch.autograd.grad(layer(x).square().sum(), [x, layer.linear.weight])
    graphed: Any = torch.cuda.make_graphed_callables(layer, (make_data(3).requires_grad_(),))
    x = make_data().requires_grad_()
    for actual, reference in zip(
        torch.autograd.grad(graphed(x).square().sum(), [x, layer.linear.weight]), expected, strict=True
    ):
        torch.testing.assert_close(actual, reference)


# -- streams and threads -------------------------------------------------------------------------------


def test_streams_are_independent() -> None:
    """Checks that a scan only waits for earlier work on its own stream."""
    neuron = make_per_channel()
    expected = [train(neuron, 2.0 * make_data(seed)) for seed in range(4)]
    torch.cuda.synchronize()
    results: list[tuple[Tensor, ...]] = []
    for seed in range(4):
        x = make_data(seed)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(20_000_000)  # kernels are launched before the input is ready
            results.append(train(neuron, x * 2.0))
    torch.cuda.synchronize()
    for actual, expected_results in zip(results, expected, strict=True):
        for a, b in zip(actual, expected_results, strict=True):
            assert torch.equal(a, b)


def test_threads_may_use_separate_streams() -> None:
    kernel = FlexSNKernel(CASES[1].make(hard_spike, []), 1, 1, 1)
    v = torch.zeros(STEP, device="cuda")

    def gradient(seed: int) -> Tensor:
        x = make_data(seed).requires_grad_()
        (grad,) = torch.autograd.grad(kernel(x, v)[0].square().sum(), x)
        return grad

    expected = [gradient(seed) for seed in range(4)]
    torch.cuda.synchronize()
    failures: list[object] = []

    def check_gradients(seed: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    grad = gradient(seed)
                    torch.cuda.current_stream().synchronize()
                    if not torch.equal(grad, expected[seed]):
                        failures.append(seed)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=check_gradients, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# -- devices -------------------------------------------------------------------------------------------


@several_devices
def test_devices_may_alternate() -> None:
    """Checks one program on two devices, each of which is the current device once."""
    kernel = FlexSNKernel(CASES[1].make(hard_spike, []), 1, 1, 1)
    for current in (0, 1):
        for device in ("cuda:0", "cuda:1", "cuda:0"):
            with torch.cuda.device(current):
                x = make_data(device=device).requires_grad_()
                spikes = kernel(x, torch.zeros(STEP, device=device))[0]
                (grad,) = torch.autograd.grad(spikes.square().sum(), x)
            assert spikes.device == grad.device == torch.device(device)
            loop = FlexSN(CASES[1].make(hard_spike, []), 1, 1, 1, backend="torch")
            y = make_data(device=device).requires_grad_()
            expected = loop(y)
            assert torch.equal(spikes, expected)
            torch.testing.assert_close(grad, torch.autograd.grad(expected.square().sum(), y)[0])


@several_devices
def test_modules_may_move_to_another_device() -> None:
    neuron = make_per_channel("cuda:0")
    assert_close(train(neuron, make_data(device="cuda:0")), train_in_loop(neuron, make_data(device="cuda:0")))
    neuron.to("cuda:1")
    assert_close(train(neuron, make_data(device="cuda:1")), train_in_loop(neuron, make_data(device="cuda:1")))


# -- other calls with equal shapes -----------------------------------------------------------------------


def misalign(tensor: Tensor) -> Tensor:
    """Returns a copy whose memory starts one element after a multiple of 16 bytes."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    view = memory[1:].view(tensor.shape)
    view.copy_(tensor)
    assert view.data_ptr() % 16
    return view


@pytest.mark.parametrize("step", [(64, 64), (1024, 1024)], ids=str)
def test_misaligned_memory_may_follow_aligned_memory(step: tuple[int, int]) -> None:
    """Checks that misaligned pointers are not passed to kernels that were compiled for aligned pointers."""
    kernel = FlexSNKernel(CASES[1].make(hard_spike, []), 1, 1, 1)
    x, v, grad = (make_data(seed, steps=8, step=step) for seed in range(3))
    v = v[0]

    def run(x: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        x, v = x.detach().requires_grad_(), v.detach().requires_grad_()
        spikes, states = kernel(x, v)
        return spikes.detach(), states.detach(), *torch.autograd.grad(spikes, [x, v], grad)

    expected = run(x, v, grad)
    for arguments in (
        (misalign(x), v, grad),
        (x, misalign(v), grad),
        (x, v, misalign(grad)),
        (misalign(x), misalign(v), misalign(grad)),
        (x, v, grad),
    ):
        for actual, expected_tensor in zip(run(*arguments), expected, strict=True):
            assert torch.equal(actual, expected_tensor)


def test_parameters_may_be_misaligned() -> None:
    case = CASES[7]  # a case with one parameter per neuron
    p = problem(case, 6, (64, 64), device="cuda")
    (w,) = p.parameters
    holder = [w]

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v + (x - v) * holder[0]
        s = hard_spike(h - 1.0)
        return s, h * (1.0 - s)

    kernel = FlexSNKernel(core, 1, 1, 1)
    for parameter in (w.detach(), misalign(w.detach()), w.detach()):
        holder[0] = parameter.requires_grad_()
        results = kernel(p.inputs[0], p.states[0])
        results_and_gradients = [results[0], *torch.autograd.grad(results[0].square().sum(), [p.inputs[0], parameter])]
        if parameter.data_ptr() == w.data_ptr():
            expected = results_and_gradients
        for actual, expected_tensor in zip(results_and_gradients, expected, strict=True):
            assert torch.equal(actual, expected_tensor)


def test_required_gradients_may_change_between_calls() -> None:
    """Checks calls between which the required gradients and the incoming gradients change."""
    kernel = FlexSNKernel(CASES[1].make(hard_spike, []), 1, 1, 1)
    loop = FlexSN(CASES[1].make(hard_spike, []), 1, 1, 1, backend="torch", store_state_seqs=True)
    for of_input, of_state, use_spikes, use_states in (
        (True, False, True, False),
        (True, True, True, True),
        (False, True, False, True),
        (True, False, False, True),
        (True, False, True, False),
    ):
        results = []
        for run in (kernel, loop):
            x, v = make_data().requires_grad_(of_input), make_data(5)[0].requires_grad_(of_state)
            if run is loop:
                loop.states = [v]
                spikes, states = loop(x), loop.state_seqs[0]
            else:
                spikes, states = kernel(x, v)
            loss = use_spikes * spikes.square().sum() + use_states * states.sin().sum()
            results.append(torch.autograd.grad(loss, [t for t in (x, v) if t.requires_grad]))
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_autocast_applies_inside_the_core() -> None:
    """Checks `exp` of half-precision values without autocast, with autocast, and without autocast again. With autocast,
    a GPU computes `exp` in float32.
    """

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        exponential = torch.exp(x - 1.0)
        return exponential, (v * 0.5 + exponential).to(v.dtype)

    x = make_data().bfloat16()
    neurons = [FlexSN(core, 1, 1, 1, backend=backend) for backend in ("triton", "torch")]
    for enabled in (False, True, False):
        results = []
        for neuron in neurons:
            neuron.reset()
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=enabled):
                results.append(neuron(x))
        assert results[0].dtype == results[1].dtype == (torch.float32 if enabled else torch.bfloat16)
        assert torch.equal(*results)


# -- scalars on the CPU --------------------------------------------------------------------------------


@pytest.mark.parametrize("lines", NUMBERS.values(), ids=NUMBERS)
def test_scalars_on_the_cpu_combine_with_gpu_tensors(lines: str) -> None:
    outcome = compare(one_call(lines), device="cuda")
    assert (outcome.same, outcome.different, outcome.refused, outcome.broken) == (1, [], [], [])
