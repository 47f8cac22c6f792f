"""Memory formats on every backend. Results have the strides of elementwise operations, and the values of the loop."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from flexsn_codegen.targets.cpp import why_no_compiler
from flexsn_hop import flex_sn_scan, flex_sn_scan_final_state
from flexsn_nn import FlexSN, FlexSNKernel

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BACKENDS = {
    "cpu": ["torch", "hop", "triton", *(["cpp"] if why_no_compiler() is None else [])],
    "cuda": ["torch", "hop", "triton"],
}
BACKENDS_AND_DEVICES = pytest.mark.parametrize(
    ("backend", "device"),
    [
        pytest.param(backend, device, marks=[pytest.mark.gpu] if device == "cuda" else [])
        for device, backends in BACKENDS.items()
        for backend in backends
    ],
)
STEP = (2, 3, 4, 5)

Layout = Callable[[int], Tensor]


def draw_values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LAYOUTS: dict[str, Layout] = {
    "contiguous": lambda t: draw_values(t, *STEP),
    "channels_last_frames": lambda t: (
        draw_values(t * 2, 3, 4, 5).contiguous(memory_format=torch.channels_last).unflatten(0, (t, 2))
    ),
    "permuted": lambda t: draw_values(t, 5, 2, 4, 3).permute(0, 2, 4, 3, 1),
    "batch_first": lambda t: draw_values(2, t, 3, 4, 5).transpose(0, 1),
    "batch_first_channels_last": lambda t: draw_values(2, t, 4, 5, 3).permute(1, 0, 4, 2, 3),
    "time_last": lambda t: draw_values(2, 3, 4, 5, t).movedim(-1, 0),
    "sliced": lambda t: draw_values(t, 2, 4, 5, 6).permute(0, 1, 4, 2, 3)[:, :, ::2],
    "expanded_over_time": lambda t: draw_values(2, 4, 5, 3).permute(0, 3, 1, 2).expand(t, *STEP),
    "expanded_over_channels": lambda t: draw_values(t, 2, 5, 4).transpose(2, 3).unsqueeze(2).expand(t, *STEP),
}


def significant_strides(tensor: Tensor) -> list[int | None]:
    """Returns the strides of dimensions with several elements, and `None` for other dimensions. Returns an empty list
    for a tensor without elements.
    """
    if not tensor.numel():
        return []
    return [stride if size > 1 else None for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]


def make_core(weight: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    def lif(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v + (x - v) * weight
        s = (h - 0.25).clamp(0.0, 1.0)
        return s, h * (1.0 - s)

    return lif


def make_weight(x: Tensor) -> Tensor:
    return torch.linspace(0.25, 0.75, 3, device=x.device).view(3, 1, 1).requires_grad_()


def run_neuron(
    backend: str, x: Tensor, v: Tensor | None, weight: Tensor, *, store_states: bool = False
) -> tuple[Tensor, ...]:
    """Returns the output, and the state sequence if `store_states` is true, or else the final state."""
    neuron = FlexSN(
        make_core(weight), 1, 1, 1, backend=backend, store_state_seqs=store_states, example_outputs=[x.new_empty(STEP)]
    )
    if v is not None:
        neuron.states = [v]
    output = neuron(x)
    assert isinstance(output, Tensor)
    return output, *(neuron.state_seqs if store_states else neuron.states)


@pytest.mark.long(all_but=["permuted-0-cpu", "channels_last_frames-5-cpu", "expanded_over_time-5-cpu"])
@pytest.mark.filterwarnings("ignore:the core captures parameters")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_results_and_gradients_have_the_format_of_the_input(name: str, steps: int, device: str) -> None:
    x = LAYOUTS[name](steps).to(device).detach()
    x = x if x.stride() == LAYOUTS[name](steps).stride() else LAYOUTS[name](steps).to(device)
    elementwise_sequence = x.neg()
    elementwise_state = x[0].neg() if steps else None
    contiguous_x = x.contiguous()
    for store_states in (False, True):
        results = []
        for backend in BACKENDS[device]:
            leaf, weight = x.detach().requires_grad_(), make_weight(x)
            output, state = run_neuron(backend, leaf, None, weight, store_states=store_states)
            assert significant_strides(output) == significant_strides(elementwise_sequence), backend
            if store_states:
                assert significant_strides(state) == significant_strides(elementwise_sequence), backend
            elif elementwise_state is not None:
                assert significant_strides(state) == significant_strides(elementwise_state), backend
            weights = draw_values(*output.shape, seed=1).to(device), draw_values(*state.shape, seed=2).to(device)
            if steps:
                gradients = torch.autograd.grad([output, state], [leaf, weight], weights)
                assert significant_strides(gradients[0]) == significant_strides(elementwise_sequence), backend
                assert significant_strides(gradients[1]) == significant_strides(weight)
            else:
                gradients = ()
            results.append((output, state, gradients))
        reference = run_neuron("torch", contiguous_x, None, make_weight(x), store_states=store_states)
        for output, state, gradients in results:
            assert torch.equal(output, reference[0])
            assert torch.equal(state, reference[1])
            for gradient, other in zip(gradients, results[0][2], strict=True):
                torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_do_not_depend_on_the_format(device: str) -> None:
    """Checks that gradients are bitwise equal for all formats. Only the gradient of a captured tensor differs by
    rounding, because it is a sum over elements, and the order of this sum depends on the format.
    """
    weights, state_weights = draw_values(5, *STEP, seed=1).to(device), draw_values(*STEP, seed=2).to(device)
    reference = None
    for name in ("contiguous", "channels_last_frames", "permuted", "batch_first"):
        example = LAYOUTS[name](5)
        x = torch.empty_strided(example.shape, example.stride(), device=device).copy_(
            draw_values(5, *STEP, seed=3).to(device)
        )
        leaf, weight = x.requires_grad_(), make_weight(x)
        v = torch.zeros_like(x[0]).requires_grad_()
        output, state = run_neuron("triton", leaf, v, weight)
        gradients = torch.autograd.grad([output, state], [leaf, v, weight], [weights, state_weights])
        reference = gradients if reference is None else reference
        assert torch.equal(gradients[0], reference[0])
        assert torch.equal(gradients[1], reference[1])
        assert significant_strides(gradients[1]) == significant_strides(v)
        torch.testing.assert_close(gradients[2], reference[2])


@pytest.mark.long(all_but=["torch-cpu-12", "hop-cpu-12", "triton-cpu-5"])
@pytest.mark.parametrize("pairs", [5, 12])
@BACKENDS_AND_DEVICES
def test_mixed_formats_follow_tensor_iterator(backend: str, device: str, pairs: int) -> None:
    """Checks that results of two inputs and a state have the format that PyTorch's `TensorIterator` chooses for these
    three tensors.
    """

    def core(x: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = 0.5 * v + x * y
        return h + 1.0, h

    rng = random.Random(1)
    names = list(LAYOUTS)
    for _ in range(pairs):
        first, second = (LAYOUTS[rng.choice(names)](4).to(device).detach() for _ in range(2))
        if rng.random() < 0.4:
            first = first[:, :, :1]
        if rng.random() < 0.4:
            second = second[:, :1, :, :1]
        step = torch.broadcast_shapes(first.shape[1:], second.shape[1:])
        v = draw_values(*reversed(step), seed=5).to(device).permute(*reversed(range(4)))
        x, y, v = (t.detach().requires_grad_() for t in (first, second, v))
        neuron = FlexSN(core, 2, 1, 1, backend=backend)
        neuron.states = [v]
        output = neuron(x, y)
        assert isinstance(output, Tensor)
        assert significant_strides(output) == significant_strides(torch.addcmul(x, y, v.expand(4, *step)))
        assert significant_strides(neuron.states[0]) == significant_strides(torch.addcmul(x[0], y[0], v))
        gradients = torch.autograd.grad(output.square().sum() + neuron.states[0].sum(), [x, y, v])
        for gradient, leaf in zip(gradients, (x, y, v), strict=True):
            assert significant_strides(gradient) == significant_strides(leaf.detach().neg())
        loop = FlexSN(core, 2, 1, 1, backend="torch")
        loop.states = [v]
        expected = loop(x, y)
        assert isinstance(expected, Tensor)
        assert torch.equal(output, expected)
        expected_gradients = torch.autograd.grad(expected.square().sum() + loop.states[0].sum(), [x, y, v])
        torch.testing.assert_close(gradients, expected_gradients, rtol=1e-5, atol=1e-4)


@pytest.mark.long(all_but=["torch-*", "hop-*", "triton-*"])
@BACKENDS_AND_DEVICES
def test_gradients_may_have_another_format_than_the_output(backend: str, device: str) -> None:
    weights = {
        name: torch.empty_strided(w.shape, w.stride(), device=device)
        for name, w in (
            (name, LAYOUTS[name](4)) for name in ("contiguous", "channels_last_frames", "batch_first", "time_last")
        )
    }
    dense = draw_values(4, *STEP, seed=7).to(device)
    x = LAYOUTS["channels_last_frames"](4).to(device).requires_grad_()
    results = []
    for cotangent in weights.values():
        output, _ = run_neuron(backend, x, None, make_weight(x))
        results.append(torch.autograd.grad(output, x, cotangent.copy_(dense))[0])
        assert results[-1].stride() == x.stride()
    assert all(torch.equal(gradient, results[0]) for gradient in results)
    # The steps of this three-dimensional gradient have the strides of images in channels-last format.
    frames = draw_values(4, 3, 4, 5).to(device).requires_grad_()
    output = FlexSN(lambda x, v: (x * x + v, x + v), 1, 1, 1, backend=backend)(frames)
    assert isinstance(output, Tensor)
    channels_last = torch.ones_like(output).contiguous(memory_format=torch.channels_last)
    assert torch.autograd.grad(output, frames, channels_last)[0].stride() == frames.stride()


def test_kernel_object_keeps_the_format() -> None:
    x = LAYOUTS["batch_first_channels_last"](4).requires_grad_()
    v = torch.zeros_like(x[0].detach()).requires_grad_()
    results = FlexSNKernel(make_core(torch.ones(())), 1, 1, 1)(x, v)
    assert all(significant_strides(result) == significant_strides(x.detach().neg()) for result in results)
    gradients = torch.autograd.grad(results[0].sum(), [x, v])
    assert significant_strides(gradients[0]) == significant_strides(x)
    assert gradients[1].stride() == v.stride()


def test_all_memory_orders_share_one_kernel() -> None:
    """Checks that inputs with permuted dimensions share one kernel, because kernels read elements in memory order."""
    neuron = FlexSN(make_core(torch.tensor(0.5)), 1, 1, 1, backend="triton")
    program = neuron._get_program()
    for name in ("contiguous", "channels_last_frames", "permuted"):
        neuron.reset()
        x = LAYOUTS[name](5).requires_grad_()
        output = neuron(x)
        assert isinstance(output, Tensor)
        output.backward(torch.ones_like(output))
        (step,) = program.specializations
        assert len(step.kernel_names) == 2, name


def test_single_steps_keep_the_format() -> None:
    x = LAYOUTS["channels_last_frames"](1)[0]
    neuron = FlexSN(make_core(torch.ones(())), 1, 1, 1, step_mode="s")
    output = neuron(x)
    assert isinstance(output, Tensor)
    assert output.stride() == neuron.states[0].stride() == x.stride()


@pytest.mark.long(all_but=["channels_last_frames-static-False", "permuted-dynamic-True"])
@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", ["channels_last_frames", "permuted", "batch_first"])
def test_fake_tensors_have_the_strides_of_results(name: str, dynamic: bool, final: bool) -> None:
    """Checks that fake tensors have the strides of the real results, in the forward and in the backward."""
    weight = make_weight(torch.empty(()))
    scan: Any = flex_sn_scan_final_state if final else flex_sn_scan
    strides: list[list[list[int]]] = []

    def record_strides(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        node = next(iter(graph.graph.find_nodes(op="output")))
        results = [value.meta["val"] for value in node.args[0] if isinstance(value, torch.fx.Node)]
        strides.append([list(map(int, value.stride())) for value in results if isinstance(value, Tensor)])
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, v: scan(make_core(weight), 1, 1, 1, x, v),
        backend=aot_autograd(fw_compiler=record_strides, bw_compiler=record_strides),
        fullgraph=True,
        dynamic=dynamic,
    )
    x = LAYOUTS[name](5).requires_grad_()
    v = torch.zeros_like(x[0].detach()).requires_grad_()
    results = compiled(x, v)
    assert significant_strides(results[0]) == significant_strides(x.detach().neg())
    assert significant_strides(results[1]) == significant_strides(v if final else x)
    gradients = torch.autograd.grad(sum(r.square().sum() for r in results), [x, v])
    assert significant_strides(gradients[0]) == significant_strides(x)
    assert gradients[1].stride() == v.stride()
    assert strides[0][:2] == [list(r.stride()) for r in results]
    assert list(x.stride()) in strides[1]


def test_exported_programs_keep_the_format() -> None:
    neuron = FlexSN(make_core(torch.tensor(0.5)), 1, 1, 1, backend="hop")
    x = LAYOUTS["channels_last_frames"](4)
    exported = torch.export.export(neuron, (x,))
    assert exported.module()(x).stride() == x.stride()
