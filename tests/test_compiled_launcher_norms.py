"""Norms in the step of a neuron: launches without Python, and gradients that a kernel completes after the backward."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flexsn_nn import LIF, PLIF, FlexSN, OverTime, _batch_affine
from flexsn_nn.layer import NormNeuron
from flexsn_nn.memory import PackedSpikes
from flexsn_runtime import batch_moments
from flexsn_runtime.native import NativeScan

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPE = (5, 6, 3, 11, 13)


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXSN_LAUNCHER", "compiled")
    # On the CPU, torch computes statistics: launches of Triton's interpreter have no address.
    monkeypatch.setattr(_batch_affine, "batch_moments", lambda x, *more: batch_moments(x, *more) if x.is_cuda else None)
    torch.manual_seed(0)


def _make_layer(device: str, neuron: type[FlexSN] = LIF, norm: Callable[..., nn.Module] = nn.BatchNorm2d) -> NormNeuron:
    norm_module = norm(SHAPE[2])
    for tensor in norm_module.parameters():
        nn.init.uniform_(tensor, 0.5, 1.5)
    kernels: Any = {"backend": "triton" if device == "cuda" else "cpp"}
    return NormNeuron(norm_module, neuron(**kernels)).to(device)


def _get_norm(layer: NormNeuron) -> nn.BatchNorm2d:
    assert isinstance(layer.norm, nn.BatchNorm2d)
    return layer.norm


def _make_input(device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return (3 * torch.randn(SHAPE)).to(device, dtype).requires_grad_()


def _train(layer: NormNeuron, x: Tensor, weight: Tensor, leaves: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Returns outputs, statistics and gradients of a training step after a reset."""
    layer.neuron.reset()
    y = layer(x)
    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)] if leaves is None else leaves
    return [y.detach(), *layer.buffers(), *torch.autograd.grad(y, leaves, weight)]


def _train_in_python(layer: NormNeuron, x: Tensor, weights: Sequence[Tensor], select: Any = None) -> list[list[Tensor]]:
    twin = copy.deepcopy(layer)
    leaves = None if select is None else select(twin, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEXSN_LAUNCHER", "python")
        return [[t.clone() for t in _train(twin, x, weight, leaves)] for weight in weights]


@pytest.mark.long(all_but=["cpu-torch.float32-contiguous-plif", "cpu-torch.bfloat16-last-lif"])
@pytest.mark.parametrize("neuron", [LIF, PLIF], ids=["lif", "plif"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_launcher_is_bitwise_equal_to_python(
    device: str,
    dtype: torch.dtype,
    memory_format: torch.memory_format,
    neuron: type[FlexSN],
    native_runs: list[NativeScan],
    python_gradients: list[tuple[bool, ...]],
) -> None:
    layer, x = _make_layer(device, neuron), _make_input(device, dtype).detach()
    x = x.flatten(0, 1).contiguous(memory_format=memory_format).unflatten(0, SHAPE[:2]).requires_grad_()
    weights = [torch.randn_like(x) for _ in range(5)]
    expected = _train_in_python(layer, x, weights)
    assert not native_runs
    python_gradients.clear()
    for weight, expected_results in zip(weights, expected, strict=True):
        assert all(map(torch.equal, _train(layer, x, weight), expected_results))
    assert len(native_runs) == 4
    assert len({id(scan) for scan in native_runs}) == 1
    assert len(python_gradients) == 1


def test_layer_is_one_autograd_node(native_runs: list[NativeScan]) -> None:
    layer, x = _make_layer("cpu"), _make_input("cpu")
    for _ in range(3):
        _train(layer, x, torch.ones(SHAPE))
    layer.neuron.reset()
    y = layer(x)
    sources = {source for source, _ in y.grad_fn.next_functions if source is not None}
    assert {source.variable for source in sources} == {x, *layer.parameters()}


def test_layer_passes_gradcheck(native_runs: list[NativeScan]) -> None:
    def smooth(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v + (x - v) / 2.0
        return torch.sigmoid(3.0 * (h - 0.5)), torch.tanh(h)

    layer = NormNeuron(nn.BatchNorm1d(3), FlexSN(smooth, 1, 1, 1, backend="cpp")).double()
    x = torch.randn(4, 3, 3, 5, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        layer.neuron.reset()
        return layer(x)

    learned = tuple(layer.norm.parameters())
    for _ in range(3):
        run(x, *learned).sum().backward()
    native_runs.clear()
    assert torch.autograd.gradcheck(run, (x, *learned))
    assert native_runs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "select",
    [lambda layer, x: [x], lambda layer, x: [layer.norm.weight], lambda layer, x: [x, layer.norm.bias]],
    ids=["input", "weight", "input and bias"],
)
def test_gradients_of_some_inputs_equal_python(
    device: str, select: Any, native_runs: list[NativeScan], python_gradients: list[tuple[bool, ...]]
) -> None:
    layer, x = _make_layer(device), _make_input(device)
    weights = [torch.randn_like(x) for _ in range(5)]
    (*_, expected) = _train_in_python(layer, x, weights, select)
    for weight in weights[:3]:
        _train(layer, x, weight)
    python_gradients.clear()
    _train(layer, x, weights[3], select(layer, x))
    assert len(python_gradients) == 1  # Python runs the first backward, and the launcher runs later ones
    assert all(map(torch.equal, _train(layer, x, weights[4], select(layer, x)), expected))
    assert len(python_gradients) == 1
    assert native_runs


@pytest.mark.parametrize("norm", [lambda n: nn.BatchNorm2d(n, affine=False), nn.BatchNorm2d], ids=["none", "frozen"])
def test_norm_without_learned_weights_equals_python(
    norm: Callable[..., nn.Module], native_runs: list[NativeScan]
) -> None:
    layer, x = _make_layer("cpu", norm=norm).requires_grad_(requires_grad=False), _make_input("cpu")
    weights = [torch.randn(SHAPE) for _ in range(4)]
    for weight, expected in zip(weights, _train_in_python(layer, x, weights), strict=True):
        assert all(map(torch.equal, _train(layer, x, weight), expected))
    assert len(native_runs) == 3


@pytest.mark.long(all_but=["compiled"])
@pytest.mark.parametrize("choice", ["python", "compiled"])
def test_checkpoint_saves_the_same_tensors_in_each_call(
    choice: str, native_runs: list[NativeScan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXSN_LAUNCHER", choice)
    layer, twin = _make_layer("cpu"), _make_layer("cpu")
    twin.load_state_dict(layer.state_dict())

    def run(layer: NormNeuron, x: Tensor) -> Any:
        layer.neuron.reset()
        return layer(x)

    for batch in (6, 6, 6, 6, 4, 4, 4, 4, 6):
        x = _make_input("cpu").detach()[:, :batch].clone().requires_grad_()
        weight = torch.randn_like(x)
        y = checkpoint(run, layer, x, use_reentrant=False)
        (actual,) = torch.autograd.grad(y, x, weight)
        (expected,) = torch.autograd.grad(run(twin, x), x, weight)
        assert torch.equal(actual, expected)
    assert bool(native_runs) == (choice == "compiled")


def test_saved_tensors_belong_to_one_node(native_runs: list[NativeScan]) -> None:
    layer, x = _make_layer("cpu"), _make_input("cpu")
    saved_by_call = []
    for batch in (6, 6, 6, 6, 4, 4):
        saved: list[tuple[torch.Size, torch.dtype]] = []

        def pack(tensor: Tensor, saved: list[Any] = saved) -> Tensor:
            saved.append((tensor.shape[2:], tensor.dtype))
            return tensor

        layer.neuron.reset()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = layer(x[:, :batch])
        y.sum().backward()
        saved_by_call.append(saved)
    assert all(saved_in_call == saved_by_call[0] for saved_in_call in saved_by_call)
    assert native_runs


def test_graph_outlives_its_layer(native_runs: list[NativeScan]) -> None:
    layer, x, weight = _make_layer("cpu"), _make_input("cpu"), torch.randn(SHAPE)
    (expected,) = _train_in_python(layer, x, [weight], lambda layer, x: [x])
    for _ in range(4):
        _train(layer, x, weight, [x])
    layer.neuron.reset()
    y = layer(x)
    del layer
    gc.collect()
    assert torch.equal(torch.autograd.grad(y, x, weight)[0], expected[-1])
    assert native_runs


def test_input_without_a_gradient_equals_python(native_runs: list[NativeScan]) -> None:
    layer, x = _make_layer("cpu"), _make_input("cpu").detach()
    weights = [torch.randn(SHAPE) for _ in range(4)]
    learned = lambda layer, x: [*layer.parameters()]  # noqa: E731
    for weight, expected in zip(weights, _train_in_python(layer, x, weights, learned), strict=True):
        assert all(map(torch.equal, _train(layer, x, weight, [*layer.parameters()]), expected))
    assert native_runs  # the launcher runs only the scan


def test_alternating_batch_sizes_equal_python(
    native_runs: list[NativeScan], python_gradients: list[tuple[bool, ...]]
) -> None:
    layer, largest = _make_layer("cpu"), _make_input("cpu").detach()
    batches = [largest[:, :size].clone().requires_grad_() for size in (6, 4, 1)]
    weights = [torch.randn_like(x) for x in batches]
    twin = copy.deepcopy(layer)
    for repetition in range(4):
        python_gradients.clear()
        for x, weight in zip(batches, weights, strict=True):
            (expected,) = _train_in_python(twin, x, [weight])
            python_gradients.clear() if repetition < 3 else None
            assert all(map(torch.equal, _train(layer, x, weight)[-3:], expected[-3:]))
    assert len(native_runs) >= 6


def test_changed_eps_takes_effect(native_runs: list[NativeScan]) -> None:
    layer, x, weight = _make_layer("cpu"), _make_input("cpu"), torch.randn(SHAPE)
    for eps in (1e-5, 0.3, 1e-5):
        _get_norm(layer).eps = eps
        (expected,) = _train_in_python(layer, x, [weight])
        for _ in range(4):
            results = _train(layer, x, weight)
        assert all(map(torch.equal, results[-3:], expected[-3:]))
    assert native_runs


def test_weight_and_bias_can_be_one_tensor() -> None:
    layer, x, weight = _make_layer("cpu"), _make_input("cpu"), torch.randn(SHAPE)
    _get_norm(layer).bias = _get_norm(layer).weight
    (expected,) = _train_in_python(layer, x, [weight])
    for _ in range(5):
        assert all(map(torch.equal, _train(layer, x, weight)[-2:], expected[-2:]))


def test_second_derivative_is_refused(native_runs: list[NativeScan]) -> None:
    layer, x, weight = _make_layer("cpu"), _make_input("cpu"), torch.randn(SHAPE)
    for _ in range(3):
        _train(layer, x, weight)
    layer.neuron.reset()
    (first,) = torch.autograd.grad(layer(x), x, weight, create_graph=True)
    assert native_runs
    (expected,) = _train_in_python(layer, x, [weight])
    torch.testing.assert_close(first, expected[-3])
    with pytest.raises(RuntimeError, match="create_graph"):
        first.sum().backward()


def test_backward_refuses_a_changed_weight_but_not_changed_statistics(native_runs: list[NativeScan]) -> None:
    layer, x, weight = _make_layer("cpu"), _make_input("cpu"), torch.randn(SHAPE)
    for _ in range(3):
        _train(layer, x, weight)
    (expected,) = _train_in_python(layer, x, [weight])
    layer.neuron.reset()
    y = layer(x)
    layer.neuron.reset()
    layer(2 * x)  # updates the running statistics
    torch.testing.assert_close(torch.autograd.grad(y, x, weight)[0], expected[-3], rtol=0, atol=0)
    layer.neuron.reset()
    y = layer(x)
    with torch.no_grad():
        _get_norm(layer).weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, x, weight)


@pytest.mark.parametrize("device", DEVICES)
def test_packed_spikes_equal_python(device: str, native_runs: list[NativeScan]) -> None:
    def network() -> nn.Module:
        torch.manual_seed(1)
        convolutions = [OverTime(nn.Conv2d(SHAPE[2], SHAPE[2], 1, bias=False)).to(device) for _ in range(2)]
        return nn.Sequential(convolutions[0], _make_layer(device), convolutions[1], _make_layer(device))

    x, results = _make_input(device), []
    for choice in ("python", "compiled"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FLEXSN_LAUNCHER", choice)
            net = network()
            for _ in range(4):
                for module in net.modules():
                    if isinstance(module, FlexSN):
                        module.reset()
                with PackedSpikes(net) as packing:
                    y = net(x)
                gradients = torch.autograd.grad(y.sum(), [x, *net.parameters()])
            assert packing.bytes_by_kernels
            results.append([y, *gradients])
    assert all(map(torch.equal, *results))
    assert native_runs


def test_tensors_are_freed(native_runs: list[NativeScan]) -> None:
    layer, x = _make_layer("cpu"), _make_input("cpu")
    for _ in range(4):
        _train(layer, x, torch.ones(SHAPE))
    references: list[weakref.ref[Any]] = [weakref.ref(native_runs[-1]), weakref.ref(layer.neuron)]
    native_runs.clear()
    del layer
    gc.collect()
    assert [reference() for reference in references] == [None, None]


@pytest.mark.gpu
def test_norms_run_in_a_cuda_graph(native_runs: list[NativeScan]) -> None:
    layer, x = _make_layer("cuda"), _make_input("cuda")
    weight = torch.randn_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            expected = _train(layer, x, weight)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = _train(layer, x, weight)
    for gradient in results[-3:]:
        gradient.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, results[-3:], expected[-3:]))
    assert native_runs
