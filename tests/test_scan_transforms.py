"""Compiled scans in torch's transforms, tracers, activation checkpoints, autocast and compilers, and the lifetimes of
scans.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from scan_cores import hard_spike
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from flexsn_nn import FlexSN
from flexsn_nn.neuron import LIF, ParametricLIF
from flexsn_runtime import (
    LayoutError,
    TransformError,
    build_training_kernels,
    flexsn_inductor_training_final_state,
    register_flexsn_kernel_handle,
    release_flexsn_kernel_handle,
)

pytestmark = pytest.mark.usefixtures("interpreted")

STEPS, BATCH, FEATURES = 5, 7, 90  # a step has one block of 512 elements in the interpreter, and a partial block


class Leaky(nn.Module):
    """A step function with one parameter per feature."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.linspace(0.3, 0.7, FEATURES))

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v + (x - v) * self.decay
        s = hard_spike(h - 1.0)
        return s, h * (1.0 - s)


def make_neurons() -> tuple[FlexSN, FlexSN]:
    """Returns two neurons with one core. The first runs kernels, and the second runs the loop."""
    core = Leaky()
    return FlexSN(core, 1, 1, 1, backend="triton"), FlexSN(core, 1, 1, 1, backend="torch")


def make_neuron_without_parameters() -> FlexSN:
    return FlexSN(lambda x, v: (torch.clamp(v + x, 0.0, 1.0), 0.5 * (v + x)), 1, 1, 1, backend="triton")


def make_data(dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(STEPS, BATCH, FEATURES, generator=generator) + 0.6).to(dtype)


def assert_same(compiled: Callable[[], tuple[Tensor, ...]], loop: Callable[[], tuple[Tensor, ...]]) -> None:
    for actual, expected in zip(compiled(), loop(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


# -- torch.func ----------------------------------------------------------------------------------------


def test_functional_calls_may_replace_parameters() -> None:
    decay = torch.linspace(0.6, 0.2, FEATURES).requires_grad_()

    def run(neuron: FlexSN) -> tuple[Tensor, ...]:
        neuron.reset()
        x = make_data().requires_grad_()
        spikes = torch.func.functional_call(neuron, {"core.decay": decay}, (x,))
        return spikes, *torch.autograd.grad(spikes.square().sum() + spikes.sum(), (x, decay))

    compiled, loop = make_neurons()
    assert_same(lambda: run(compiled), lambda: run(loop))
    # After the functional call, the module uses its own parameters.
    compiled.reset()
    assert torch.autograd.grad(compiled(make_data()).sum(), compiled.get_parameter("core.decay"))[0].abs().sum() > 0


def transform_grad(neuron: FlexSN) -> tuple[Tensor, ...]:
    return (torch.func.grad(lambda x: neuron(x).sum())(make_data()),)


def transform_vjp(neuron: FlexSN) -> tuple[Tensor, ...]:
    spikes, pull, *_ = torch.func.vjp(neuron, make_data())
    return spikes, *pull(torch.ones_like(spikes))


def transform_vmap(neuron: FlexSN) -> tuple[Tensor, ...]:
    return (torch.func.vmap(neuron, in_dims=1, out_dims=1)(make_data()),)


def transform_jvp(neuron: FlexSN) -> tuple[Tensor, ...]:
    return torch.func.jvp(neuron, (make_data(),), (torch.ones_like(make_data()),))


def transform_forward_mode(neuron: FlexSN) -> tuple[Tensor, ...]:
    with forward_ad.dual_level():
        spikes = neuron(forward_ad.make_dual(make_data(), torch.ones_like(make_data())))
        return tuple(forward_ad.unpack_dual(spikes))


# torch's forward mode compiles its formulas with torch.jit.script.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(
    "transform", [transform_grad, transform_vjp, transform_vmap, transform_jvp, transform_forward_mode]
)
def test_errors_for_function_transforms_name_a_remedy(
    transform: Callable[[FlexSN], tuple[Tensor, ...]],
) -> None:
    neuron = make_neuron_without_parameters()
    for _ in range(2):  # before the second transform, a call stores its launches
        with pytest.raises(TransformError, match=r"(?s)inside of .*torch.*backend='torch' there, or backend='hop'"):
            transform(neuron)
        neuron(make_data())
        neuron.reset()
    neuron.backend = "torch"
    expected = transform(neuron)
    neuron.reset()
    neuron.backend = "hop"
    assert_same(lambda: transform(neuron), lambda: expected)


def test_transforms_of_parameters_are_refused() -> None:
    """Checks transforms that wrap captured tensors, but not the inputs."""
    compiled, _ = make_neurons()
    parameters = dict(compiled.named_parameters())
    with pytest.raises(TransformError, match=r"torch\.func"):
        torch.func.grad(lambda p: torch.func.functional_call(compiled, p, (make_data(),)).sum())(parameters)


# -- tracers -------------------------------------------------------------------------------------------


Run = Callable[[Tensor], Tensor]


def run_with_fake_tensors(run: Run) -> object:
    with FakeTensorMode() as mode:
        return run(mode.from_tensor(make_data()))


@pytest.mark.filterwarnings("ignore")  # torch warns about pointers of stand-ins
@pytest.mark.parametrize(
    ("name", "trace"),
    [
        ("make_fx", lambda run: make_fx(run)(make_data())),
        ("make_fx", lambda run: make_fx(run, tracing_mode="fake")(make_data())),
        ("FakeTensorMode", run_with_fake_tensors),
    ],
    ids=["real", "fake", "stand-ins"],
)
def test_tracers_are_refused(name: str, trace: Callable[[Run], object]) -> None:
    neuron = make_neuron_without_parameters()

    def run(x: Tensor) -> Tensor:
        output = neuron.step(x)[0]
        assert isinstance(output, Tensor)
        return output

    for _ in range(2):  # before the second trace, a call stores its launches
        with pytest.raises(TransformError, match=f"inside of {name}"):
            trace(run)
        run(make_data())
    neuron.backend = "torch"
    trace(run)


class Wrapped(Tensor):
    """A tensor without memory that wraps another tensor, as tensors of distributed packages do."""

    content: Tensor

    @staticmethod
    def __new__(cls, wrapped: Tensor) -> Wrapped:
        tensor: Wrapped = Tensor._make_wrapper_subclass(cls, wrapped.shape)
        tensor.content = wrapped
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*tree_map_only(Wrapped, lambda wrapped: wrapped.content, args), **(kwargs or {}))


@pytest.mark.filterwarnings("ignore")  # torch warns about pointers of stand-ins
@pytest.mark.parametrize("stand_in", [Wrapped, FakeTensorMode().from_tensor])
def test_tensors_without_memory_are_refused(stand_in: Callable[[Tensor], Tensor]) -> None:
    compiled, _ = make_neurons()
    compiled(make_data())
    compiled.reset()
    with pytest.raises(LayoutError, match=r"argument 0 is a (Wrapped|FakeTensor); kernels read dense memory"):
        compiled(stand_in(make_data()))


# -- activation checkpointing --------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints_do_not_change_results(reentrant: bool) -> None:
    first, second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 3)

    def run(neuron: FlexSN, *, recompute: bool) -> tuple[Tensor, ...]:
        x = make_data().requires_grad_()

        def block(x: Tensor) -> Tensor:
            neuron.reset()
            spikes: Tensor = neuron(first(x))
            return spikes

        spikes = checkpoint(block, x, use_reentrant=reentrant) if recompute else block(x)
        result = second(spikes)
        parameters = (x, first.weight, neuron.get_parameter("core.decay"), second.weight)
        for p in parameters:
            p.grad = None
        # Reentrant checkpointing supports `backward`, but not `autograd.grad`.
        result.square().sum().backward()
        return result, *(p.grad for p in parameters if p.grad is not None)

    compiled, loop = make_neurons()
    checkpointed = run(compiled, recompute=True)
    assert len(checkpointed) == 5
    for actual, expected in zip(checkpointed, run(compiled, recompute=False), strict=True):
        assert torch.equal(actual, expected)
    assert_same(lambda: checkpointed, lambda: run(loop, recompute=True))


# -- autocast ------------------------------------------------------------------------------------------


@pytest.mark.long(all_but=["LIF-dtype0", "<lambda>-dtype1"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [LIF, lambda: ParametricLIF(init_tau=torch.linspace(1.5, 4.0, FEATURES))])
def test_autocast_equals_the_loop(make: Callable[[], FlexSN], dtype: torch.dtype) -> None:
    """Checks that a neuron runs in half precision after a layer in half precision, although its parameters are
    float32.
    """
    torch.manual_seed(0)
    linear = nn.Linear(FEATURES, FEATURES)
    neuron = make()
    weights = torch.rand(STEPS, BATCH, FEATURES)

    def run(backend: str) -> tuple[Tensor, ...]:
        neuron.backend = backend
        neuron.reset()
        with torch.autocast("cpu", dtype=dtype):
            spikes = neuron(3.0 * linear(make_data()))
        assert isinstance(spikes, Tensor)
        assert spikes.dtype == neuron.states[0].dtype == dtype
        assert 0.02 < spikes.float().mean() < 0.98
        parameters = [*neuron.parameters(), linear.weight, linear.bias]
        return spikes, *torch.autograd.grad((spikes * weights).sum(), parameters)

    spikes, *gradients = run("triton")
    expected, *expected_gradients = run("torch")
    assert torch.equal(spikes, expected)
    for actual, other in zip(gradients, expected_gradients, strict=True):
        assert actual.dtype == other.dtype == torch.float32
        # The loop rounds the gradient of a parameter to half precision in each step. Kernels only round the sum over
        # all steps.
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(actual, other, rtol=20 * eps, atol=20 * eps * float(other.abs().max()))


# -- modes ---------------------------------------------------------------------------------------------


def test_states_from_inference_mode_can_be_continued() -> None:
    results = []
    for neuron, mode in zip(make_neurons(), (torch.inference_mode, torch.no_grad), strict=True):
        with mode():
            neuron(make_data())
        x = make_data().requires_grad_()
        out = neuron(x)
        results.append((out.detach(), *torch.autograd.grad(out.sum(), [x, *neuron.parameters()])))
    torch.testing.assert_close(*results)


# -- lifetimes -----------------------------------------------------------------------------------------


def test_backward_may_run_after_the_module_is_deleted() -> None:
    compiled, loop = make_neurons()
    x, y = make_data().requires_grad_(), make_data().requires_grad_()
    spikes, decay = compiled(x), compiled.get_parameter("core.decay")
    loop(y).sum().backward()
    expected, decay.grad = decay.grad, None
    reference = weakref.ref(compiled)
    del compiled, loop
    gc.collect()
    assert reference() is None
    spikes.sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(decay.grad, expected)


def test_deleted_modules_are_freed() -> None:
    """Checks that a deleted module frees its program, and the tensors that are saved for a backward that never runs."""
    compiled, _ = make_neurons()
    x = make_data().requires_grad_()
    spikes = compiled(x)
    program = weakref.ref(compiled._get_program())
    input_memory = weakref.ref(x)
    del compiled, spikes, x, _
    gc.collect()
    assert program() is None
    assert input_memory() is None


# -- compilers -----------------------------------------------------------------------------------------


def leaky(x: Tensor, v: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    h = v + (x - v) * decay
    s = hard_spike(h - 1.0)
    return s, h * (1.0 - s)


@pytest.fixture
def handle() -> Iterator[int]:
    """Yields the handle of a `Leaky` core. The operators receive such handles."""
    decay = torch.linspace(0.3, 0.7, FEATURES).requires_grad_()
    examples = (torch.zeros(BATCH, FEATURES),) * 2
    forward, backward, info = build_training_kernels(lambda x, v: leaky(x, v, decay), 1, 1, 1, examples)
    absent: dict[str, Any] = dict.fromkeys(
        ("inference_kernel", "inference_info", "inference_final_state_kernel", "inference_final_state_info")
    )
    handle_id = register_flexsn_kernel_handle(
        forward_kernel=forward, backward_kernel=backward, training_info=info, **absent
    )
    torch._dynamo.reset()
    yield handle_id
    torch._dynamo.reset()
    release_flexsn_kernel_handle(handle_id)


def test_compiled_training_compiles_once(handle: int) -> None:
    compilations = []

    def backend(module: Any, inputs: Any) -> Any:
        compilations.append(module)
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)

    @torch.compile(fullgraph=True, backend=backend, dynamic=True)
    def run(x: Tensor, v: Tensor, decay: Tensor) -> Tensor:
        results = flexsn_inductor_training_final_state(handle, [2.0 * x, v, decay])
        total: Tensor = results[0] + results[1]
        return total

    decay = torch.linspace(0.3, 0.7, FEATURES).requires_grad_()
    for steps, batch in ((5, 7), (3, 7), (9, 7), (5, 4), (6, 11)):
        x, v = torch.randn(steps, batch, FEATURES).requires_grad_(), torch.randn(batch, FEATURES).requires_grad_()
        result = run(x, v, decay)
        state, outputs = v, []
        for step in (2.0 * x).unbind(0):
            output, state = leaky(step, state, decay)
            outputs.append(output)
        expected = torch.stack(outputs) + state
        torch.testing.assert_close(result, expected)
        weights = torch.rand_like(result)
        gradients = torch.autograd.grad(result, (x, v, decay), weights)
        for actual, expected_gradient in zip(
            gradients, torch.autograd.grad(expected, (x, v, decay), weights), strict=True
        ):
            torch.testing.assert_close(actual, expected_gradient, rtol=1e-4, atol=1e-5)
    assert len(compilations) == 1
