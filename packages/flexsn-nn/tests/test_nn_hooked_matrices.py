"""Recurrent matrices with pruning and with old and new parametrisations: kernels equal the loop."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from flexsn_nn import LIF, RLIF, FlexSN, Recurrent

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")


def prune_weight(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", 0.5)


def add_weight_norm(layer: nn.Module) -> None:
    nn.utils.weight_norm(layer)


def add_spectral_norm(layer: nn.Module) -> None:
    nn.utils.spectral_norm(layer)


def parametrise(layer: nn.Module) -> None:
    parametrizations.spectral_norm(layer)


def make_rlif(backend: str) -> RLIF:
    torch.manual_seed(3)
    return RLIF(5, tau=1.5, v_threshold=0.4, backend=backend)


def train(neuron: RLIF, x: Tensor) -> list[Tensor]:
    neuron.reset()
    neuron.zero_grad()
    x = x.clone().requires_grad_()
    output = neuron(x)
    (output * torch.linspace(0, 1, 5)).sum().backward()
    assert x.grad is not None
    gradients = [p.grad for p in neuron.parameters() if p.grad is not None]
    return [output.detach(), x.grad, *gradients, neuron.V.detach().clone()]


@pytest.mark.long(all_but=["prune_weight"])
@pytest.mark.parametrize("hook", [prune_weight, add_weight_norm])
def test_training_and_the_attribute_equal_those_of_the_loop(hook: Callable[[nn.Module], None]) -> None:
    x = torch.rand(9, 3, 5)
    neurons = [make_rlif("torch"), make_rlif("cpp")]
    optimizers = []
    for neuron in neurons:
        hook(neuron.recurrent)
        optimizers.append(torch.optim.SGD(neuron.parameters(), lr=0.1))
    for _ in range(3):
        loop, kernels = (train(neuron, x) for neuron in neurons)
        assert len(loop) == len(kernels) > 3
        torch.testing.assert_close(kernels, loop)
        for optimizer in optimizers:
            optimizer.step()
    assert type(neurons[1].V) is type(neurons[0].V)
    assert neurons[1].V.grad_fn is not None
    assert "grad_fn" in repr(neurons[1].V)


def test_repeated_pruning_equals_that_of_the_loop() -> None:
    x = torch.rand(9, 3, 5)
    loop, kernels = make_rlif("torch"), make_rlif("cpp")
    for amount in (0.3, 0.4, 0.5):
        for neuron in (loop, kernels):
            prune.l1_unstructured(neuron.recurrent, "weight", amount)
        torch.testing.assert_close(train(kernels, x), train(loop, x))
        assert torch.equal(*(dict(n.named_buffers())["recurrent.weight_mask"] for n in (kernels, loop)))
    for neuron in (loop, kernels):
        prune.remove(neuron.recurrent, "weight")
    torch.testing.assert_close(train(kernels, x), train(loop, x))


def test_single_steps_with_element_by_element_weights_equal_the_loop() -> None:
    options: dict[str, Any] = {"features": 5, "all_to_all": False, "V": 0.7, "step_mode": "s"}
    neurons = [Recurrent(LIF(), **options, backend=backend) for backend in ("torch", "cpp")]
    for neuron in neurons:
        prune.random_unstructured(neuron.recurrent, "V", 2)
    neurons[1].load_state_dict(neurons[0].state_dict())
    x = torch.rand(4, 5)
    for _ in range(4):
        assert torch.equal(neurons[1](x), neurons[0](x))
    assert torch.equal(neurons[1].V, neurons[0].V)


@pytest.mark.long(all_but=["True-parametrise"])
@pytest.mark.parametrize("hook", [add_spectral_norm, parametrise])
@pytest.mark.parametrize("is_called_before", [False, True])
def test_spectral_norm_runs_as_a_loop_in_training_and_in_kernels_in_evaluation(
    hook: Callable[[nn.Module], None], is_called_before: bool
) -> None:
    """Checks a power iteration that writes to buffers at each step in training."""
    x = torch.rand(9, 3, 5)
    loop, auto = make_rlif("torch"), make_rlif("auto")
    for neuron in (loop, auto):
        if is_called_before:
            neuron(x)
        torch.manual_seed(4)
        hook(neuron.recurrent)
    for training in (True, False, True, True, False):
        loop.train(training)
        auto.train(training)
        torch.testing.assert_close(train(auto, x), train(loop, x))
        assert ("the loop ran instead" in auto.explain(x)) is training
        for ours, theirs in zip(auto.buffers(), loop.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore::flexsn_nn.errors.PortabilityWarning")
def test_a_module_that_only_the_core_reaches_is_watched() -> None:
    torch.manual_seed(0)
    layer = parametrizations.spectral_norm(nn.Linear(5, 5)).eval()
    copied = deepcopy(layer)
    reachable = {"layer": layer}

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return x, 0.5 * v + reachable["layer"](x + v)

    neuron = FlexSN(core, 1, 1, 1, store_state_seqs=True)
    x = torch.rand(4, 2, 5)
    for training in (False, True, False):
        layer.train(training)
        copied.train(training)
        neuron.reset()
        neuron(x)
        reachable["layer"], state = copied, neuron.states[0]
        v = torch.zeros(2, 5)
        for step in x:
            _, v = core(step, v)
        reachable["layer"] = layer
        torch.testing.assert_close(state, v)
