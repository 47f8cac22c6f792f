"""Random numbers of a step together with lengths, resets, transforms, random cores and GPUs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsn_codegen import UnsupportedOpError
from flexsn_codegen.core._core import emit_core
from flexsn_codegen.targets.cuda import CUDA
from flexsn_graph import NORMAL_NUMBER
from flexsn_nn import FlexSN, Recurrent, StochasticLIF, graphs, surrogate
from flexsn_nn.functional import reset_net
from flexsn_nn.random import bernoulli_like, configure, normal_like, uniform_like
from flexsn_nn.transforms import Changed, Core, Own, Transform

KERNELS = ["cpp", "triton"]
spike = surrogate.Sigmoid()


def noisy(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    v = (0.5 * v + x + 0.3 * normal_like(v)) * bernoulli_like(v, 0.8)
    s = spike(v - 1.0 + 0.1 * uniform_like(v))
    return s, v * (1.0 - s)


def draw_sequences(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 1.5


def run(neuron: FlexSN, x: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Returns the output and the gradient of the input, for the random numbers of one seed."""
    configure(neuron, seed=3)
    neuron.reset()
    leaf = x.clone().requires_grad_()
    y = neuron(leaf, **options)
    (y * torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y)).sum().backward()
    assert leaf.grad is not None
    return y.detach(), leaf.grad


def assert_alike(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(actual[0], expected[0])
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-5, atol=1e-6)


class NoisyInput(Transform):
    """A transform that adds noise to the first input."""

    def step(self, core: Core, inputs: tuple[Tensor, ...], states: tuple[Tensor, ...], own: Own) -> Changed:
        return Changed(*core((inputs[0] + 0.2 * normal_like(inputs[0]), *inputs[1:]), states))


# -- with lengths, resets and transforms -------------------------------------------------------------------


@pytest.mark.long(all_but=["step-cpp"])
@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(
    "make",
    [lambda b: FlexSN(noisy, 1, 1, 1, backend=b), lambda b: StochasticLIF(backend=b)],
    ids=["step", "neuron"],
)
def test_lengths_and_resets_do_not_change_numbers(make: Callable[[str], FlexSN], backend: str) -> None:
    """Checks that the random numbers continue after a reset, and that each sequence has the numbers of a separate
    call.
    """
    x = draw_sequences(11, 5, 19)
    lengths = torch.tensor([11, 0, 7, 3, 10])
    resets = torch.rand(11, 5, generator=torch.Generator().manual_seed(1)) < 0.2
    expected = run(make("torch"), x, lengths=lengths, resets=resets)
    assert_alike(run(make(backend), x, lengths=lengths, resets=resets), expected)
    single = make("torch")
    for row, length in enumerate(lengths.tolist()):
        if length:
            configure(single, first_row=row)
            y, _ = run(single, x[:length, row : row + 1], resets=resets[:length, row : row + 1])
            assert torch.equal(y, expected[0][:length, row : row + 1])
        assert not expected[0][length:, row].any()


@pytest.mark.long(all_but=["cpp"])
@pytest.mark.parametrize("backend", KERNELS)
def test_transforms_may_draw(backend: str) -> None:
    """Checks a transform that draws random numbers, around a core that draws none, and around a core that draws."""
    x = draw_sequences(9, 4, 21)

    def without_noise(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        v = 0.5 * v + x
        s = spike(v - 1.0)
        return s, v * (1.0 - s)

    for core in (without_noise, noisy):
        expected = run(FlexSN(core, 1, 1, 1, backend="torch"), x, transforms=[NoisyInput()])
        untransformed = run(FlexSN(core, 1, 1, 1, backend="torch"), x)
        assert not torch.equal(expected[0], untransformed[0])
        neuron = FlexSN(core, 1, 1, 1, backend=backend)
        for _ in range(3):  # later calls run the stored plan of the first call
            assert_alike(run(neuron, x, transforms=[NoisyInput()]), expected)
        assert_alike(run(neuron, x), untransformed)


def test_repeated_call_draws_a_new_key() -> None:
    neuron, x = FlexSN(noisy, 1, 1, 1, backend="cpp"), draw_sequences(6, 3, 50)
    loop = FlexSN(noisy, 1, 1, 1, backend="torch")
    results: list[Tensor] = []
    for repeated_neuron in (neuron, loop):
        torch.manual_seed(4)
        outputs = []
        for _ in range(3):
            repeated_neuron.reset()
            outputs += [repeated_neuron(x), repeated_neuron(x)]
        assert len({tuple(y.flatten().tolist()) for y in outputs}) == 6
        results.append(torch.stack(outputs))
    assert torch.equal(*results)


def test_batch_size_does_not_change_numbers() -> None:
    neuron = FlexSN(noisy, 1, 1, 1, backend="cpp")
    full_output = run(neuron, draw_sequences(4, 9, 7))[0]
    for rows in (1, 3, 8, 9):
        assert torch.equal(run(neuron, draw_sequences(4, 9, 7)[:, :rows])[0], full_output[:, :rows])


# -- random cores ------------------------------------------------------------------------------------------

_OPS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda a, b: a + 0.5 * normal_like(b),
    lambda a, b: a * uniform_like(b),
    lambda a, b: a * bernoulli_like(b, 0.7),
    lambda a, b: torch.where(uniform_like(a) < 0.3, a, b),
    lambda a, b: torch.where(normal_like(a) > b, 0.5 * a, b),
    lambda a, b: a - 0.5 * b,
    lambda a, b: torch.maximum(a, 0.5 * b),
    lambda a, b: spike(a - 0.3) * b,
)


def random_core(seed: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    generator = random.Random(seed)
    lines = [(generator.randrange(len(_OPS)), generator.random(), generator.random()) for _ in range(6)]
    lines[generator.randrange(3)] = (generator.randrange(5), 0.0, 0.9)  # one line draws random numbers

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        values = [x, v]
        for op, first, second in lines:
            values.append(_OPS[op](values[int(first * len(values))], values[int(second * len(values))]))
        return values[-1], (values[-2] + 0.5 * v).clamp(-2, 2)

    return core


@pytest.mark.long(all_but=["0"])
@pytest.mark.parametrize("first", range(8))
def test_random_cores_with_draws_equal_the_loop(first: int) -> None:
    for seed in range(2 * first, 2 * first + 2):
        generator = random.Random(seed)
        core, x = random_core(seed), draw_sequences(generator.randrange(1, 12), generator.randrange(1, 5), 13)
        expected = run(FlexSN(core, 1, 1, 1, backend="torch"), x)
        for backend in KERNELS:
            assert_alike(run(FlexSN(core, 1, 1, 1, backend=backend), x), expected)


# -- second derivatives, vmap, and clusters ----------------------------------------------------------------


def smooth(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    v = torch.tanh(0.5 * v + x * (1.0 + 0.3 * normal_like(x)))
    return v * v, v


def test_only_the_loop_has_second_derivatives() -> None:
    """Checks that the loop has second derivatives, and that kernels refuse them."""
    x = draw_sequences(4, 2, 3).double().requires_grad_()
    neuron = FlexSN(smooth, 1, 1, 1, backend="torch")
    configure(neuron, seed=1)
    assert torch.autograd.gradgradcheck(lambda x: neuron.step(x)[0], (x,))
    neuron = FlexSN(smooth, 1, 1, 1, backend="cpp")
    (gradient,) = torch.autograd.grad(neuron(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"twice|second|create_graph"):
        gradient.sum().backward()


def test_vmap_shares_one_key() -> None:
    """Checks that all samples share one key, and that a call without a configured seed raises an error."""
    x = draw_sequences(5, 4, 2, 3)
    neuron = FlexSN(smooth, 1, 1, 1)
    with pytest.raises(RuntimeError, match="random"):
        torch.vmap(lambda x: neuron.step(x)[0], in_dims=1)(x)
    configure(neuron, seed=1)
    actual = torch.vmap(lambda x: neuron.step(x)[0], in_dims=1)(x)
    for i in range(4):
        torch.testing.assert_close(actual[i], neuron.step(x[:, i])[0])


def test_clusters_refuse_draws() -> None:
    """Checks that the target for clusters refuses draws, since its CUDA C++ code has no random numbers. Other kernels
    run such layers.
    """
    graph = torch.fx.Graph()
    words = [graph.placeholder(name) for name in ("first", "second", "third", "step")]
    number = graph.call_function(NORMAL_NUMBER, tuple(words), {"stream": 0})
    for node, dtype in zip((*words, number), (*[torch.int32] * 4, torch.float32), strict=True):
        node.meta["val"] = torch.empty(4, dtype=dtype, device="meta")
    graph.output((number,))
    with pytest.raises(UnsupportedOpError, match="normal_number"):
        emit_core(graph, "step", prune=False, target=CUDA)


# -- networks, and parts of a batch ------------------------------------------------------------------------


def make_network() -> nn.Sequential:
    torch.manual_seed(0)
    layers: Sequence[nn.Module] = (nn.Linear(6, 16), StochasticLIF(noise="gaussian"), Recurrent(StochasticLIF(), 16))
    return nn.Sequential(*layers)


def test_first_row_reproduces_part_of_a_batch() -> None:
    x = draw_sequences(7, 8, 6) * 3
    net = make_network()
    configure(net, seed=5)
    full_output = net(x).sum((0, 2))
    parts = []
    for first in (0, 4):
        reset_net(net)
        configure(net, first_row=first)
        parts.append(net(x[:, first : first + 4]).sum((0, 2)))
    assert torch.equal(torch.cat(parts), full_output)
    assert len(set(full_output.tolist())) > 2


# -- on a GPU ----------------------------------------------------------------------------------------------


def draw_all(x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return normal_like(v), uniform_like(v), bernoulli_like(v, 0.8), normal_like(v), v + x


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "torch", "hop"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_gpu_numbers_equal_the_cpu(backend: str, dtype: torch.dtype) -> None:
    for shape in ((5, 7, 1000), (32, 3, 4, 9, 11), (1, 300, 513)):
        results = []
        for device, name in (("cpu", "torch"), ("cuda", backend)):
            neuron = FlexSN(draw_all, 1, 1, 4, backend=name)
            configure(neuron, seed=2)
            results.append(neuron(torch.ones(shape, dtype=dtype, device=device)))
        assert all(torch.equal(a, b.cpu()) for a, b in zip(*results, strict=True))


@pytest.mark.gpu
def test_training_on_a_gpu_equals_the_loop() -> None:
    x = draw_sequences(37, 9, 515).cuda()
    expected = run(FlexSN(noisy, 1, 1, 1, backend="torch"), x)
    actual = run(FlexSN(noisy, 1, 1, 1, backend="triton"), x)
    assert torch.equal(actual[0], expected[0])
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-5, atol=1e-6)
    last = x.view(37, 9, 5, 103, 1).contiguous(memory_format=torch.channels_last_3d)
    assert torch.equal(run(FlexSN(noisy, 1, 1, 1, backend="triton"), last)[0].reshape(x.shape), expected[0])


@pytest.mark.gpu
def test_recurrent_layer_on_a_gpu_equals_the_loop() -> None:
    x = draw_sequences(12, 6, 64).cuda() * 2
    torch.manual_seed(0)
    results = []
    for backend in ("torch", "auto"):
        layer = Recurrent(StochasticLIF(backend=backend), 64, init=nn.init.zeros_).cuda()
        results.append(run(layer, x))
    assert_alike(results[1], results[0])


@pytest.mark.gpu
def test_replays_of_a_captured_step_draw_new_numbers() -> None:
    """Compares the losses of captured training steps with the losses of eager training steps, for equal seeds."""

    def train(capture: bool) -> list[float]:
        net = nn.Sequential(nn.Linear(6, 32), StochasticLIF(noise="gaussian"), nn.Linear(32, 3))
        torch.manual_seed(0)
        for layer in (net[0], net[2]):
            layer.reset_parameters()  # type: ignore[operator]
        net.cuda()
        x = draw_sequences(8, 16, 6).cuda() * 3
        labels = torch.zeros(16, dtype=torch.int64, device="cuda")

        def loss(out: Tensor, labels: Tensor) -> Tensor:
            return nn.functional.cross_entropy(out.mean(0), labels)

        torch.manual_seed(1)
        step = graphs.capture(net, loss) if capture else None
        results = []
        for _ in range(6):
            if step is not None:
                results.append(float(step(x, labels)))
                continue
            reset_net(net)
            results.append(float(loss(net(x), labels).detach()))
        return results

    captured, eager = train(True), train(False)
    assert len(set(captured)) == 6
    assert captured == pytest.approx(eager, rel=1e-5)
