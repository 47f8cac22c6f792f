"""Common readouts, losses and inputs of neurons, compiled by Inductor and compared with eager mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flexsn_nn import ALIF, LI, LIF, RLIF, FlexSN
from flexsn_nn.data import readout
from flexsn_nn.neuron import Neuron

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    # Inductor raises this warning on a GPU
    pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled:UserWarning"),
]

STEPS, BATCH, WIDTH = 6, 2, 4


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=False):
        yield
    torch._dynamo.reset()


class Gated(nn.Module):
    """A cell with matrices whose output is its state."""

    def __init__(self) -> None:
        super().__init__()
        self.candidate, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        gate = torch.sigmoid(self.gate(h) + x)
        h = gate * h + (1 - gate) * torch.tanh(self.candidate(h) - x)
        return h, h


NEURONS: dict[str, Callable[[], FlexSN]] = {
    "lif": LIF,
    "li": LI,
    "alif": ALIF,
    "rlif": lambda: RLIF(WIDTH),
    "gated": lambda: FlexSN(Gated(), 1, 1, 1),
}

Read = Callable[[Tensor, list[Tensor]], Tensor]


def _embed(y: Tensor) -> Tensor:
    return F.embedding(torch.tensor([[0, 2], [1, 1]], device=y.device), y.flatten(0, 1))


READOUTS: dict[str, Read] = {
    "last": lambda y, _: y[-1],
    "tail": lambda y, _: y[2:],
    "every second": lambda y, _: y[::2],
    "channels": lambda y, _: y[..., 1:3],
    "mean": lambda y, _: y.mean(0),
    "sum": lambda y, _: y.sum(0),
    "maximum": lambda y, _: y.max(0).values,
    "cumulative": lambda y, _: y.cumsum(0),
    "lengths": lambda y, _: readout(y, torch.tensor([STEPS, 3])),
    "gather": lambda y, _: y.gather(0, torch.tensor([[[0, 1, 2, 3], [5, 4, 3, 2]]], device=y.device)),
    "softmax": lambda y, _: y.softmax(-1),
    "over time": lambda y, _: y.log_softmax(0),
    "scatter": lambda y, _: torch.zeros_like(y).scatter_add(0, torch.ones_like(y, dtype=torch.int64), y),
    "embedding": lambda y, _: _embed(y),
    "index": lambda y, _: y[torch.tensor([0, 0, 4], device=y.device)],
    "flip": lambda y, _: y.flip(0),
    "roll": lambda y, _: torch.roll(y, 1, 0),
    "stack": lambda y, _: torch.stack(list(y.unbind(0)), dim=1),
    "pad": lambda y, _: F.pad(y, (0, 0, 0, 0, 2, 0))[:-2],
    "convolution": lambda y, _: F.conv1d(y.permute(1, 2, 0), torch.ones(1, WIDTH, 3, device=y.device)),
    "differences": lambda y, _: y[1:] - y[:-1],
    "assigned": lambda y, _: _delay(y),
    "windows": lambda y, _: y.unfold(0, 3, 2),
    "state": lambda _, states: states[0],
    "states": lambda y, states: torch.stack([y[-1], *states]),
}
LOSSES: dict[str, Read] = {
    "cross entropy": lambda y, _: F.cross_entropy(y.mean(0), torch.tensor([0, 3], device=y.device)),
    "of the last state": lambda _, states: F.cross_entropy(states[0], torch.tensor([1, 2], device=states[0].device)),
    "over time": lambda y, _: F.cross_entropy(y.permute(1, 2, 0), torch.ones(BATCH, len(y), device=y.device).long()),
    "squares": lambda y, _: F.mse_loss(y, torch.ones_like(y)),
    "rate": lambda y, _: (y.mean() - 0.1).square(),
    "rates": lambda y, _: (y.mean((0, 1)) - 0.1).square().sum(),
    "one hot": lambda y, _: F.mse_loss(y.mean(0), F.one_hot(torch.tensor([0, 3], device=y.device), WIDTH).float()),
    "binary": lambda y, _: F.binary_cross_entropy_with_logits(y[-1], torch.ones_like(y[-1])),
}


def _delay(x: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    result[1:] = x[:-1]
    return result


def _expand_to_images(x: Tensor) -> Tensor:
    """Expands `[T, B, C]` to images of 2 by 2 pixels in channels-last format, `[T, B, C, 2, 2]`."""
    images = x.flatten(0, 1)[:, :, None, None].expand(-1, -1, 2, 2)
    result: Tensor = images.contiguous(memory_format=torch.channels_last).unflatten(0, x.shape[:2])
    return result


INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "assigned": _delay,
    "filled": lambda x: torch.zeros_like(x).index_fill_(0, torch.tensor([1], device=x.device), 0.5).add_(x),
    "slice": lambda x: x[1:],
    "strided": lambda x: x[::2],
    "reversed": lambda x: x.flip(0),
    "permuted": lambda x: x.permute(1, 0, 2).contiguous().permute(1, 0, 2),
    "expanded": lambda x: x[:1].expand(5, -1, -1),
    "columns": lambda x: torch.cat([x, x], -1)[..., ::2],
    "embedded": lambda x: F.embedding(torch.tensor([[0, 1], [2, 0], [1, 3]], device=x.device), x[:4, 0]),
    "one hot": lambda x: F.one_hot(torch.tensor([[0, 1], [2, 0], [1, 3]], device=x.device), WIDTH).float() + x[:3],
}


def compute_results(
    function: Callable[[Tensor], Sequence[Tensor]], x: Tensor, parameters: Sequence[Tensor], *, training: bool
) -> list[Any]:
    """Returns the results of a call and, in training, the gradients of a weighted sum of these results."""
    if not training:
        with torch.no_grad():
            return list(function(x))
    leaf = x.clone().requires_grad_()
    results = list(function(leaf))
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(r.shape, generator=generator).to(r.device) for r in results]
    loss = torch.stack([(r.float() * w).sum() for r, w in zip(results, weights, strict=True)]).sum()
    gradients = torch.autograd.grad(loss, [leaf, *parameters], allow_unused=True)
    return [*(r.detach() for r in results), *gradients]


def compare(
    function: Callable[[Tensor], Sequence[Tensor]],
    module: nn.Module,
    *,
    device: str = "cpu",
    training: bool = True,
    dynamic: bool = False,
    lengths: Sequence[int] = (STEPS,),
    tolerance: float = 1e-5,
) -> None:
    """Compares a compiled function with the same function in eager mode.

    Raises:
        AssertionError: results or gradients differ.
    """
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    parameters = list(module.parameters())
    for steps in lengths:
        x = 2 * torch.randn(steps, BATCH, WIDTH, generator=torch.Generator().manual_seed(steps)).to(device)
        expected = compute_results(function, x, parameters, training=training)
        actual = compute_results(compiled, x, parameters, training=training)
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
        sample = expected[-1 - len(parameters)] if training else expected[0]
        assert sample is not None
        assert sample.abs().sum() > 0


def make_network(neuron: str, device: str) -> tuple[nn.Module, Callable[[Tensor], tuple[Tensor, list[Tensor]]]]:
    """Makes a linear layer followed by neurons, and a function that returns their outputs and last states."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), NEURONS[neuron]()).to(device)
    layer, neurons = module

    def forward(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        assert isinstance(neurons, FlexSN)
        y, states = neurons.step(layer(x))
        assert isinstance(y, Tensor)
        return y, states

    return module, forward


def make_readouts(
    neuron: str, device: str, reads: Sequence[Read]
) -> tuple[nn.Module, Callable[[Tensor], list[Tensor]]]:
    """Makes a network, and a function that returns these readouts of the network."""
    module, forward = make_network(neuron, device)
    return module, lambda x: [read(*forward(x)) for read in reads]


def select_readouts(*names: str) -> list[Read]:
    return [READOUTS[name] for name in names]


# -- a short selection -----------------------------------------------------------------------------------------------


def test_slices_after_neurons_equal_eager_mode() -> None:
    module, forward = make_network("lif", "cpu")

    def readouts(x: Tensor) -> list[Tensor]:
        y, states = forward(_delay(x))
        return [read(y, states) for read in select_readouts("last", "tail", "scatter", "embedding", "assigned")]

    compare(readouts, module)


def test_last_state_of_an_integrator_equals_eager_mode() -> None:
    module, readouts = make_readouts("li", "cpu", select_readouts("state"))
    compare(readouts, module)


def test_assigned_inputs_in_inference_equal_eager_mode() -> None:
    module, forward = make_network("lif", "cpu")
    compare(lambda x: [forward(_delay(x))[0]], module, training=False)


# -- all readouts and inputs -----------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("neuron", NEURONS)
def test_all_readouts_of_one_run_equal_eager_mode(neuron: str, dynamic: bool) -> None:
    module, forward = make_network(neuron, "cpu")

    def readouts(x: Tensor) -> list[Tensor]:
        y, states = forward(x)
        return [read(y, states) for read in (*READOUTS.values(), *LOSSES.values())]

    compare(readouts, module, dynamic=dynamic, lengths=(STEPS, 9) if dynamic else (STEPS,))


@pytest.mark.long
@pytest.mark.parametrize("neuron", ["lif", "gated"])
@pytest.mark.parametrize("name", [*READOUTS, *(f"loss {name}" for name in LOSSES)])
def test_each_readout_equals_eager_mode(name: str, neuron: str) -> None:
    read = LOSSES[name.removeprefix("loss ")] if name.startswith("loss ") else READOUTS[name]
    module, readouts = make_readouts(neuron, "cpu", [read])
    compare(readouts, module)


@pytest.mark.long
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("neuron", ["lif", "rlif"])
def test_all_inputs_equal_eager_mode(neuron: str, dynamic: bool, training: bool) -> None:
    module, forward = make_network(neuron, "cpu")

    def outputs(x: Tensor) -> list[Tensor]:
        return [result for make in INPUTS.values() for y, states in [forward(make(x))] for result in (y, *states)]

    lengths = (STEPS, 9) if dynamic else (STEPS,)
    compare(outputs, module, training=training, dynamic=dynamic, lengths=lengths)


@pytest.mark.long
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_images_in_channels_last_equal_eager_mode(training: bool) -> None:
    torch.manual_seed(0)
    convolution, neurons = nn.Conv2d(WIDTH, 3, 1), LIF()
    module = nn.ModuleList([convolution, neurons]).to(memory_format=torch.channels_last)

    def readouts(x: Tensor) -> list[Tensor]:
        images = _expand_to_images(x)
        currents = convolution(images.flatten(0, 1)).unflatten(0, images.shape[:2])
        y, (state,) = neurons.step(currents)
        assert isinstance(y, Tensor)
        return [y[-1], y.mean((0, 3, 4)), state]

    compare(readouts, module, training=training, tolerance=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("neuron", ["lif", "li", "gated"])
def test_readouts_under_autocast_equal_eager_mode(neuron: str) -> None:
    module, forward = make_network(neuron, "cpu")

    def readouts(x: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, states = forward(x)
            return [read(y, states) for read in select_readouts("last", "tail", "mean", "states")]

    # Inductor keeps more digits between operations than eager mode.
    compare(readouts, module, tolerance=5e-2)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_readouts_in_half_precision_equal_eager_mode(dtype: torch.dtype) -> None:
    neurons: Neuron = LI()

    def readouts(x: Tensor) -> list[Tensor]:
        y, (state,) = neurons.step(x.to(dtype))
        assert isinstance(y, Tensor)
        return [y[-1], y[2:], state]

    compare(readouts, neurons, tolerance=2e-2)


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_networks_with_parts_under_no_grad_equal_eager_mode(dynamic: bool) -> None:
    torch.manual_seed(0)
    first, second, recurrent, integrator, gated = LIF(), ALIF(), RLIF(WIDTH), LI(), FlexSN(Gated(), 1, 1, 1)
    module = nn.ModuleList([first, second, recurrent, integrator, gated])

    def run_step(neurons: FlexSN, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        y, states = neurons.step(x)
        assert isinstance(y, Tensor)
        return y, states

    def readouts(x: Tensor) -> list[Tensor]:
        y, _ = run_step(first, x)
        with torch.no_grad():
            teacher, _ = run_step(second, y + x)
            _, constant_states = run_step(recurrent, x)
        z, states = run_step(recurrent, y.detach() + teacher)
        h, (last,) = run_step(gated, z + x.detach())
        v, (w,) = run_step(integrator, h * teacher)
        return [v[-1], last, w.detach(), states[0], *(f * y[-1] for f in constant_states)]

    compare(readouts, module, dynamic=dynamic)


@pytest.mark.gpu
@pytest.mark.parametrize(("neuron", "dynamic"), [("li", False), ("rlif", False), ("gated", True)])
def test_all_readouts_on_a_gpu_equal_eager_mode(neuron: str, dynamic: bool) -> None:
    module, forward = make_network(neuron, "cuda")

    def readouts(x: Tensor) -> list[Tensor]:
        y, states = forward(x)
        return [read(y, states) for read in (*READOUTS.values(), *LOSSES.values())]

    compare(readouts, module, device="cuda", dynamic=dynamic, lengths=(STEPS, 9) if dynamic else (STEPS,))


@pytest.mark.gpu
@pytest.mark.parametrize("neuron", ["lif", "rlif"])
def test_all_inputs_on_a_gpu_equal_eager_mode(neuron: str) -> None:
    module, forward = make_network(neuron, "cuda")

    def outputs(x: Tensor) -> list[Tensor]:
        return [result for make in INPUTS.values() for y, states in [forward(make(x))] for result in (y, *states)]

    compare(outputs, module, device="cuda")
