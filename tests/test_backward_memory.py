"""Gradients whose memory a backward cannot read raise a clear error. Gradients of zeros without memory are accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from flexsn_nn import LIF, PLIF, RLIF
from flexsn_nn.functional import reset_net
from flexsn_nn.layer import NormNeuron
from flexsn_runtime.errors import LayoutError, TransformError

SHAPE = (5, 30, 37)
NEURONS: dict[str, Callable[[], nn.Module]] = {
    "lif": lambda: LIF(backend="cpp"),
    "plif": lambda: PLIF(backend="cpp"),
    "rlif": lambda: RLIF(SHAPE[-1], backend="cpp"),
    "norm": lambda: NormNeuron(nn.BatchNorm1d(SHAPE[-1]), LIF(backend="cpp")),
}


@pytest.fixture(params=["python", "compiled"])
def _launcher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXSN_LAUNCHER", request.param)


@pytest.fixture(params=NEURONS)
def spikes(request: pytest.FixtureRequest, _launcher: None) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Returns the output of a repeated training step, and the tensors whose gradients the step computes."""
    torch.manual_seed(0)
    neuron = NEURONS[request.param]()
    x = (3 * torch.rand(SHAPE)).requires_grad_()
    learned = [x, *neuron.parameters()]
    for _ in range(2):
        reset_net(neuron)
        output = neuron(x)
        torch.autograd.grad(output, learned, torch.ones_like(output))
    reset_net(neuron)
    yield neuron(x), learned
    reset_net(neuron)  # otherwise, the state keeps the graph alive


def test_zero_gradients_need_no_memory(spikes: tuple[Tensor, list[Tensor]]) -> None:
    output, learned = spikes
    gradients = torch.autograd.grad(output, learned, torch._efficientzerotensor(output.shape))
    assert all(torch.equal(g, torch.zeros_like(t)) for g, t in zip(gradients, learned, strict=True))


def test_freed_gradient_is_refused(spikes: tuple[Tensor, list[Tensor]]) -> None:
    output, learned = spikes
    gradient = torch.ones_like(output)
    gradient.untyped_storage().resize_(0)
    with pytest.raises(LayoutError, match="gradient 0 of a backward is a tensor whose memory was freed"):
        torch.autograd.grad(output, learned, gradient)


def test_parameter_freed_before_the_backward_is_refused(spikes: tuple[Tensor, list[Tensor]]) -> None:
    """Frees the memory of the last parameter, which the backward reads, as sharding does."""
    output, learned = spikes
    learned[-1].detach().untyped_storage().resize_(0)
    with pytest.raises(LayoutError, match=r"(argument|captured tensor) \d of a backward is a tensor whose memory was"):
        torch.autograd.grad(output, learned, torch.ones_like(output))


def test_sparse_gradient_is_refused(spikes: tuple[Tensor, list[Tensor]]) -> None:
    output, learned = spikes
    with pytest.raises(LayoutError, match=r"gradient 0 of a backward is a torch\.sparse_coo tensor"):
        torch.autograd.grad(output, learned, torch.ones_like(output).to_sparse())


def test_fake_gradient_is_refused(spikes: tuple[Tensor, list[Tensor]]) -> None:
    output, learned = spikes
    with FakeTensorMode():
        gradient = torch.ones(output.shape)
    with pytest.raises(LayoutError, match="gradient 0 of a backward is a FakeTensor"):
        torch.autograd.grad(output, learned, gradient)


def test_backward_inside_fake_tensor_mode_is_refused(spikes: tuple[Tensor, list[Tensor]]) -> None:
    output, learned = spikes
    gradient = torch.ones_like(output)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises((TransformError, RuntimeError), match="FakeTensorMode"),
    ):
        torch.autograd.grad(output, learned, gradient)
