"""Random numbers in a step. They are equal on every backend and in every order of computation."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from flexsn_graph import ELEMENT_WORD, NORMAL_NUMBER, UNIFORM_NUMBER, RandomOpError
from flexsn_graph.ir._random import philox_2x32, philox_4x32, words_of_steps
from flexsn_nn import FlexSN, Recurrent, StochasticLIF, surrogate
from flexsn_nn.errors import DrawError, InputDtypeError, ParameterError
from flexsn_nn.layer import SharedDropout
from flexsn_nn.random import bernoulli_like, configure, normal_like, uniform_like

KERNELS = ["cpp", "triton"]
BACKENDS = [*KERNELS, "hop"]
spike = surrogate.Sigmoid()


def _int32(*values: int) -> list[Tensor]:
    return [torch.tensor([v - 2**32 if v >= 2**31 else v], dtype=torch.int32) for v in values]


def draw_all(x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Returns a draw of each distribution, a second draw of normal numbers, and a state."""
    return normal_like(v), uniform_like(v), bernoulli_like(v, 0.8), normal_like(v), v + x


def noisy(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    v = (0.5 * v + x + 0.3 * normal_like(v)) * bernoulli_like(v, 0.8)
    s = spike(v - 1.0 + 0.1 * uniform_like(v))
    return s, v * (1.0 - s)


class Cell(nn.Module):
    """A recurrent step with noise."""

    def __init__(self, features: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(features, features, generator=generator) / features**0.5)

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        v = 0.5 * v + x + functional.linear(s, self.w) + 0.3 * normal_like(v)
        s = spike(v - 1.0 + 0.1 * uniform_like(v))
        return s, s, v * (1.0 - s)


def draw_numbers(
    shape: tuple[int, ...], backend: str, seed: int = 1, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    torch.manual_seed(seed)
    outputs = FlexSN(draw_all, 1, 1, 4, backend=backend)(torch.rand(0, dtype=dtype).new_ones(shape))
    assert isinstance(outputs, list)
    return outputs


# -- words and distributions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
        ((0, 0), (0,), (0x257A3673, 0xCD26BE2A)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF,), (0xAB302C4D, 0x3DC9D239)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E,), (0xBEDBBE6B, 0xE4C770B3)),
    ],
)
def test_philox_returns_the_published_words(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """Compares words with the published test vectors of Random123, the library of Philox's authors. `philox_4x32` has
    10 rounds, and `philox_2x32` has 7 rounds.
    """
    words, keys = ([torch.tensor([word]) for word in values] for values in (counter, key))
    actual = philox_2x32(words[0], words[1], keys[0]) if len(words) == 2 else philox_4x32(tuple(words), tuple(keys))  # type: ignore[arg-type]
    assert [int(word) for word in actual] == list(expected)


def _make_words(key: tuple[int, int], rows: int, columns: int) -> list[Tensor]:
    row, column = torch.arange(rows, dtype=torch.int32)[:, None], torch.arange(columns, dtype=torch.int32)
    return [ELEMENT_WORD(*_int32(*key), row, column, index=i) for i in range(3)]


@pytest.mark.parametrize("axis", ["steps", "columns"])
def test_numbers_have_the_moments_of_their_distribution(axis: str) -> None:
    """Checks the moments, the correlations of neighbours and the distribution of 2^20 random numbers. Most tolerances
    are 5 standard deviations.
    """
    n = 1 << 20
    if axis == "columns":
        words, step = _make_words((11, 0xFFFF0001), 4, n // 4), _int32(6)[0]
    else:
        words, step = [word.view(4, 1) for word in _make_words((11, 0xFFFF0001), 2, 2)], torch.arange(n // 4).int()
    z = NORMAL_NUMBER(*words, step, stream=0).double()
    u = UNIFORM_NUMBER(*words, step, stream=1, bits=24).double()
    assert z.mean().abs() < 5 / n**0.5
    assert (z.square().mean() - 1).abs() < 5 * (2 / n) ** 0.5
    assert z.pow(3).mean().abs() < 5 * (15 / n) ** 0.5
    assert (z.pow(4).mean() - 3).abs() < 5 * (96 / n) ** 0.5
    for distance in (1, 2, 3, 4):
        assert (z[:, distance:] * z[:, :-distance]).mean().abs() < 5.5 / n**0.5
        products = (z[:, distance:].square() - 1) * (z[:, :-distance].square() - 1)
        assert products.mean().abs() < 5.5 * 2 / n**0.5
    assert (z[0] * z[1]).mean().abs() < 5 / (n / 4) ** 0.5
    assert (u.mean() - 0.5).abs() < 5 * (1 / 12 / n) ** 0.5
    for values in (u.flatten(), torch.special.ndtr(z.flatten())):
        distances = (values.sort().values - torch.arange(n) / n).abs().max()
        assert distances < 2.2 / n**0.5  # Kolmogorov-Smirnov test at level 1e-4
    assert u.min() >= 0
    assert u.max() < 1


@pytest.mark.parametrize("step", [6, 7])
def test_normal_numbers_match_the_formula(step: int) -> None:
    words, time = _make_words((5, 6), 1, 1 << 16), _int32(step)[0]
    z = NORMAL_NUMBER(*words, time, stream=3).double()
    a, b = (word.double() for word in words_of_steps(*words, time, 3))  # type: ignore[arg-type,call-arg]
    radius = (-2.0 * torch.log((a + 0.5) * 2.0**-32)).sqrt()
    angle = b * (2.0 * math.pi * 2.0**-32)
    exact = radius * (angle.sin() if step % 2 else angle.cos())
    assert (z - exact).abs().max() < 2e-5  # at small radii, the rounding of the logarithm's argument matters
    large_radius = radius > 0.1
    assert ((z - exact).abs() / radius)[large_radius].max() < 1e-5


# -- equal numbers on all backends -------------------------------------------------------------------------


@pytest.mark.long(all_but=["cpp-torch.float32", "triton-torch.bfloat16", "hop-torch.float16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_are_bitwise_equal_on_all_backends(backend: str, dtype: torch.dtype) -> None:
    for shape in ((3, 5, 37), (2, 3, 2, 3, 5)):
        expected, actual = (draw_numbers(shape, name, dtype=dtype) for name in ("torch", backend))
        assert all(value.dtype == dtype for value in actual)
        assert all(map(torch.equal, expected, actual))
        assert 0 <= expected[1].min() <= expected[1].max() < 1


@pytest.mark.long(all_but=["cpp-*"])
@pytest.mark.parametrize("shape", [(6,), (4, 7), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("backend", KERNELS)
def test_steps_with_few_dimensions_have_equal_numbers(backend: str, shape: tuple[int, ...]) -> None:
    assert all(map(torch.equal, draw_numbers(shape, "torch"), draw_numbers(shape, backend)))


@pytest.mark.long(all_but=["cpp"])
@pytest.mark.parametrize("backend", ["torch", *KERNELS])
def test_memory_format_does_not_change_numbers(backend: str) -> None:
    x = torch.ones(4 * 3, 6, 5, 7)
    expected = draw_numbers((4, 3, 6, 5, 7), "torch")
    torch.manual_seed(1)
    last = x.to(memory_format=torch.channels_last).unflatten(0, (4, 3))
    actual = FlexSN(draw_all, 1, 1, 4, backend=backend)(last)
    assert all(map(torch.equal, expected, actual))


def train(
    core: Callable[..., Any], states: int, x: Tensor, backend: str, *, chunks: int = 0, single: bool = False
) -> Any:
    torch.manual_seed(2)
    neuron = FlexSN(core, 1, states, 1, backend=backend, step_mode="s" if single else "m")
    x = x.clone().requires_grad_()
    parts = x.split(chunks) if chunks else [x]
    y = torch.stack([neuron(step) for step in x]) if single else torch.cat([neuron(part) for part in parts])
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    weights = [p.grad for p in neuron.parameters()]
    return y.detach(), [state.detach() for state in neuron.states], [x.grad, *weights]


@pytest.mark.long(all_but=["cpp-chunks", "triton-whole", "torch-steps"])
@pytest.mark.parametrize(
    "options",
    [{}, {"chunks": 5}, {"single": True}],
    ids=["whole", "chunks", "steps"],
)
@pytest.mark.parametrize("backend", [*KERNELS, "torch"])
def test_training_in_chunks_equals_the_loop(backend: str, options: dict[str, Any]) -> None:
    """Checks that the backward draws the same numbers as the forward, and that the count of steps continues with a
    carried state.
    """
    if backend == "triton" and options.get("single"):
        pytest.skip("Triton runs no single steps by name")
    x = torch.rand(13, 5, 37, generator=torch.Generator().manual_seed(0)) * 1.5
    expected, actual = train(noisy, 1, x, "torch"), train(noisy, 1, x, backend, **options)
    assert torch.equal(expected[0], actual[0])
    assert 0.05 < expected[0].mean() < 0.95
    torch.testing.assert_close(actual[1:], expected[1:], rtol=1e-5, atol=1e-6)


@pytest.mark.long(all_but=["cpp-3"])
@pytest.mark.parametrize("chunks", [0, 3])
@pytest.mark.parametrize("backend", KERNELS)
def test_recurrent_training_equals_the_loop(backend: str, chunks: int) -> None:
    x = torch.rand(7, 5, 32, generator=torch.Generator().manual_seed(0)) * 1.5
    core = Cell(32)
    expected = train(copy.deepcopy(core), 2, x, "torch")
    actual = train(copy.deepcopy(core), 2, x, backend, chunks=chunks)
    assert torch.equal(expected[0], actual[0])
    torch.testing.assert_close(actual[1:], expected[1:], rtol=1e-4, atol=1e-5)


@pytest.mark.long(all_but=["torch"])
@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_drawn_numbers_have_no_gradient(backend: str) -> None:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        v = torch.tanh(v * uniform_like(v) + x * normal_like(x)) * bernoulli_like(x, 0.7)
        return v * normal_like(v), v

    neuron = FlexSN(core, 1, 1, 1, backend=backend)
    configure(neuron, seed=4)
    x = torch.rand(6, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: neuron.step(x)[0], (x,))


# -- dependence on the draw, step, row and neuron ----------------------------------------------------------


@pytest.mark.long(all_but=["cpp"])
@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_numbers_differ_by_draw_step_row_and_neuron(backend: str) -> None:
    first = draw_numbers((6, 3, 50), backend)
    z, second_draw = first[0], first[3]
    assert not torch.equal(z, second_draw)
    assert len({tuple(row.tolist()) for row in z.flatten(0, 1)}) == 18
    assert all(map(torch.equal, first, draw_numbers((6, 3, 50), backend)))
    assert not torch.equal(z, draw_numbers((6, 3, 50), backend, seed=2)[0])
    first_neuron, second_neuron = (FlexSN(draw_all, 1, 1, 4, backend=backend) for _ in range(2))
    net = nn.ModuleList([first_neuron, second_neuron])
    configure(net, seed=1)
    x = torch.ones(2, 3, 50)
    assert not torch.equal(first_neuron(x)[0], second_neuron(x)[0])


@pytest.mark.long(all_but=["cpp"])
@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_reset_draws_a_new_key(backend: str) -> None:
    neuron, x = FlexSN(draw_all, 1, 1, 4, backend=backend), torch.ones(2, 3, 50)
    first = neuron(x)[0]
    carried = neuron(x)[0]
    neuron.reset()
    assert not torch.equal(first, carried)
    assert not torch.equal(neuron(x)[0], first)
    configure(neuron, seed=7)
    neuron.reset()
    seeded = neuron(x)[0]
    neuron.reset()
    assert torch.equal(neuron(x)[0], seeded)
    configure(neuron, seed=-1)
    neuron.reset()
    assert not torch.equal(neuron(x)[0], seeded)


@pytest.mark.long(all_but=["cpp"])
@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_parts_of_a_batch_have_its_numbers(backend: str) -> None:
    """Checks that numbers depend on the index of a row in the whole batch. `first_row=3` is for a process whose first
    row has the index 3.
    """
    x = torch.rand(4, 7, 11)
    neuron = FlexSN(noisy, 1, 1, 1, backend=backend)
    configure(neuron, seed=0)
    full_output = neuron(x)
    for start, end in ((0, 3), (3, 7)):
        neuron.reset()
        configure(neuron, first_row=start)
        assert torch.equal(neuron(x[:, start:end]), full_output[:, start:end])


@pytest.mark.long(all_but=["cpp"])
@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_evaluation_can_use_means(backend: str) -> None:
    neuron, x = FlexSN(draw_all, 1, 1, 4, backend=backend), torch.ones(2, 3, 5)
    neuron.eval()
    assert neuron(x)[0].std() > 0.1
    configure(neuron, in_evaluation=False)
    neuron.reset()
    z, u, b, _ = neuron(x)
    assert all(bool((values == mean).all()) for values, mean in ((z, 0.0), (u, 0.5), (b, 0.8)))
    neuron.train()
    neuron.reset()
    assert neuron(x)[0].std() > 0.1


def test_empty_calls_and_copies_continue_the_numbers() -> None:
    for backend in ("torch", "cpp"):
        neuron = FlexSN(noisy, 1, 1, 1, backend=backend, example_outputs=(torch.empty(3, 5),))
        configure(neuron, seed=1)
        full_output = neuron(torch.ones(4, 3, 5))
        neuron.reset()
        parts = [neuron(torch.ones(n, 3, 5)) for n in (0, 1, 0, 2)]
        parts.append(pickle.loads(pickle.dumps(copy.deepcopy(neuron)))(torch.ones(1, 3, 5)))
        assert torch.equal(torch.cat(parts), full_output)


# -- compilers, checkpoints, wrappers ----------------------------------------------------------------------


@pytest.mark.long(all_but=["draw_all"])
@pytest.mark.parametrize("core", [noisy, draw_all], ids=["noisy", "draw_all"])
def test_compiled_calls_have_the_same_numbers(core: Callable[..., Any]) -> None:
    neuron = FlexSN(core, 1, 1, 4 if core is draw_all else 1)
    configure(neuron, seed=3)
    x = torch.rand(9, 5, 37) * 1.5
    expected = [neuron(x), neuron(x)]
    neuron.reset()
    compiled = torch.compile(neuron, fullgraph=True, backend="aot_eager")
    results = [compiled(x), compiled(x)]
    torch.testing.assert_close(results, expected, rtol=0, atol=0)


@pytest.mark.long
def test_compiled_evaluation_uses_means() -> None:
    neuron = FlexSN(draw_all, 1, 1, 4).eval()
    configure(neuron, in_evaluation=False)
    z, u, b, _ = torch.compile(neuron, fullgraph=True, backend="aot_eager")(torch.ones(3, 2, 5))
    assert all(bool((values == mean).all()) for values, mean in ((z, 0.0), (u, 0.5), (b, 0.8)))


@pytest.mark.long
def test_compiled_training_equals_eager_mode() -> None:
    x = torch.rand(9, 5, 37) * 1.5
    gradients = []
    for compiler in (None, "aot_eager"):
        torch.compiler.reset()
        neuron = FlexSN(noisy, 1, 1, 1)
        configure(neuron, seed=3)
        run = neuron if compiler is None else torch.compile(neuron, fullgraph=True, backend=compiler)
        leaf = x.clone().requires_grad_()
        (run(leaf) * torch.linspace(0, 1, x.numel()).view_as(x)).sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_compiled_calls_draw_keys() -> None:
    neuron, x = FlexSN(draw_all, 1, 1, 4), torch.ones(3, 2, 5)
    compiled = torch.compile(neuron, fullgraph=True, backend="aot_eager")

    def call(seed: int) -> Tensor:
        torch.manual_seed(seed)
        neuron.reset()
        output: Tensor = compiled(x)[0]
        return output

    assert torch.equal(call(0), call(0))
    assert not torch.equal(call(0), call(1))


def test_exported_programs_draw_new_numbers() -> None:
    neuron = FlexSN(draw_all, 1, 1, 4)
    x = torch.ones(3, 2, 5)
    program = torch.export.export(neuron, (x,)).module()
    torch.manual_seed(0)
    first = program(x)[0]
    torch.manual_seed(0)
    assert torch.equal(program(x)[0], first)
    assert not torch.equal(program(x)[0], first)


@pytest.mark.long(all_but=["cpp"])
@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_checkpoints_recompute_the_same_numbers(backend: str) -> None:
    neuron = FlexSN(noisy, 1, 1, 1, backend=backend)

    def run(x: Tensor) -> Tensor:
        output = neuron.step(x)[0]
        assert isinstance(output, Tensor)
        return output

    x = torch.rand(9, 5, 11) * 1.5
    gradients = []
    for call in (run, partial(checkpoint, run, use_reentrant=False)):
        leaf = x.clone().requires_grad_()
        torch.manual_seed(5)
        (call(leaf) * torch.linspace(0, 1, x.numel()).view_as(x)).sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)  # type: ignore[arg-type]


@pytest.mark.long(all_but=["gaussian"])
@pytest.mark.parametrize("noise", ["logistic", "gaussian"])
def test_noise_of_stochastic_lif_is_drawn_in_the_step(noise: str) -> None:
    x = torch.rand(12, 4, 33) * 2
    results = []
    for backend in ("torch", *BACKENDS):
        torch.manual_seed(0)
        results.append(StochasticLIF(noise=noise, backend=backend)(x))
    assert all(torch.equal(results[0], other) for other in results[1:])
    layer = Recurrent(StochasticLIF(noise=noise), 33, init=nn.init.zeros_)
    torch.manual_seed(0)
    assert torch.equal(layer(x), results[0])


def test_shared_dropout_follows_the_seed() -> None:
    layer, x = SharedDropout(0.25), torch.ones(3, 64, 100)
    configure(layer, seed=1)
    full_output = layer(x)
    assert torch.equal(full_output.unique(), torch.tensor([0.0, 1 / 0.75]))
    assert abs(float((full_output == 0).float().mean()) - 0.25) < 0.03
    layer.reset()
    configure(layer, first_row=8)
    assert torch.equal(layer(x[:, 8:]), full_output[:, 8:])


# -- refusals ----------------------------------------------------------------------------------------------


def test_draw_outside_of_a_step_is_refused() -> None:
    with pytest.raises(DrawError, match="normal_like is called outside of a step"):
        normal_like(torch.ones(3))


@pytest.mark.parametrize("shape", [(1, 1), (5,), (2, 4), (2, 5, 4), (3, 6)], ids=str)
def test_draw_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    w = torch.ones(shape)
    for backend in ("torch", "cpp"):
        with pytest.raises(DrawError, match=r"\[rows, 5\], .*, but got a tensor of shape") as caught:
            FlexSN(lambda x, v: (x + uniform_like(w).sum(), v), 1, 1, 1, backend=backend)(torch.ones(2, 3, 5))
        assert str(list(shape)) in str(caught.value)


def test_wrong_arguments_are_refused() -> None:
    x = torch.ones(2, 3, 5)
    with pytest.raises(InputDtypeError, match=r"torch\.int64"):
        FlexSN(lambda x, v: (normal_like(x.long()), v), 1, 1, 1, backend="torch")(x)
    with pytest.raises(ParameterError, match="p is 2"):
        FlexSN(lambda x, v: (bernoulli_like(x, 2), v), 1, 1, 1, backend="torch")(x)
    with pytest.raises(ParameterError, match="seed"):
        configure(StochasticLIF(), seed=0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "draw",
    [torch.randn_like, torch.rand_like, torch.bernoulli, partial(functional.dropout, training=True)],
    ids=["randn_like", "rand_like", "bernoulli", "dropout"],
)
def test_errors_for_torch_random_functions_name_replacements(draw: Callable[[Tensor], Tensor]) -> None:
    example = torch.full((2, 3), 0.5)
    with pytest.raises(RandomOpError, match=r"normal_like, uniform_like or bernoulli_like of flexsn_nn\.random"):
        FlexSN(lambda x, v: (x + draw(x), v), 1, 1, 1, example_inputs=(example, example))


def test_draws_may_be_called_indirectly() -> None:
    functions = {"draw": normal_like}
    for backend in ("torch", "cpp", "auto"):
        neuron = FlexSN(lambda x, v: (v + functions["draw"](v), v + x), 1, 1, 1, backend=backend)
        assert neuron(torch.ones(3, 2, 5)).std() > 0.1
