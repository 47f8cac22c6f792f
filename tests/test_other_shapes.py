"""States whose shapes differ from the shape of the step. Kernels in each language, compiled graphs and exported
programs are compared with the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shaped_cores import CORES, ON_PIECES, Core, Dendritic, InTheMiddle, Populations, Random, Statistics
from torch import Tensor, nn

from flexsn_nn import FlexSN
from flexsn_nn.random import configure, normal_like, uniform_like
from flexsn_runtime import CutSpecialization, ScanProgram

T, B = 5, 3
cores = pytest.mark.parametrize("make", CORES, ids=lambda make: make.__name__)
languages = pytest.mark.parametrize("backend", ["cpp", "triton"])


class Layer(FlexSN):
    """A layer that runs a core, with initial states of zero in the shapes that the core declares."""

    core: Core

    def __init__(self, core: Core, backend: str = "torch", **options: Any) -> None:
        super().__init__(core, 1, len(core.shapes()[1]), core.num_outputs, backend=backend, **options)

    def init_states(self, num_states: int, step_mode: str, *inputs: Tensor) -> list[Tensor]:
        batch = inputs[0].shape[1 if step_mode == "m" else 0]
        return [inputs[0].new_zeros(batch, *shape) for shape in self.core.shapes()[1]]


def make_core(make: type[Core], dtype: torch.dtype = torch.float64, *args: int) -> Core:
    return make(*args).to(dtype)


def make_sequence(core: Core, dtype: torch.dtype = torch.float64, steps: int = T, batch: int = B) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(steps, batch, *core.shapes()[0], generator=generator).to(dtype).requires_grad_()


def differentiate(call: Callable[..., Any], core: Core, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns the results, and the gradients of tensors and parameters. The loss weights the elements of the results
    differently.
    """
    results = list(call(*tensors))
    loss = torch.zeros((), dtype=torch.float64)
    for i, result in enumerate(results):
        weights = (torch.arange(result.numel()) % (5 + i) - 2).reshape(result.shape) / 4
        loss = loss + (result.double() * weights).sum()
    return [*results, *torch.autograd.grad(loss, [*tensors, *core.parameters()], allow_unused=True)]


def make_call(layer: Layer, **options: Any) -> Callable[..., list[Tensor]]:
    """Returns a function that calls a layer and returns outputs, final states and state sequences. If the function
    receives no states, the layer starts from its initial states.
    """

    def call(x: Tensor, *states: Tensor) -> list[Tensor]:
        layer.reset()
        if states:
            layer.states = list(states)
        outputs = layer(x, **options)
        return [*(outputs if isinstance(outputs, list) else [outputs]), *layer.states, *layer.state_seqs]

    return call


def assert_close(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None], tolerance: float = 1e-9) -> None:
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.long(all_but=["cpp-Dendritic", "triton-Statistics", "cpp-Populations"])
@cores
@languages
def test_results_and_gradients_equal_the_loop(make: type[Core], backend: str, interpreted: None) -> None:
    core = make_core(make)
    tensors = [make_sequence(core), *(0.1 * torch.ones(B, *shape, dtype=torch.float64) for shape in core.shapes()[1])]
    tensors = [t.detach().requires_grad_() for t in tensors]
    expected = differentiate(make_call(Layer(core, store_state_seqs=True)), core, tensors)
    layer = Layer(core, backend, store_state_seqs=True)
    for _ in range(2):
        assert_close(differentiate(make_call(layer), core, tensors), expected)
    assert layer.kernel_names()


@pytest.mark.long(all_but=["Gates"])
@pytest.mark.parametrize("make", CORES, ids=lambda make: make.__name__)
def test_states_are_carried_and_batch_sizes_change(make: type[Core], interpreted: None) -> None:
    core = make_core(make)
    layer = Layer(core, "cpp")
    expected = make_call(Layer(core))(make_sequence(core))
    parts = []
    layer.reset()
    for part in make_sequence(core).split(2):
        output = layer(part)
        parts.append(output[0] if isinstance(output, list) else output)
    assert_close([torch.cat(parts), *layer.states], [expected[0], *expected[core.num_outputs :]])
    x = make_sequence(core, batch=B + 2)
    assert_close(make_call(layer)(x), make_call(Layer(core))(x))
    single = Layer(core, "cpp", step_mode="s")
    outputs = [single(x) for x in make_sequence(core)]
    assert_close([torch.stack([o[0] if isinstance(o, list) else o for o in outputs])], [expected[0]])


@pytest.mark.long
def test_gradients_equal_finite_differences() -> None:
    core = make_core(Statistics, torch.float64, 2, 3)
    layer = Layer(core, "cpp")
    tensors = [
        make_sequence(core, steps=3, batch=2).detach().requires_grad_(),
        *(torch.rand(2, *shape, dtype=torch.float64, requires_grad=True) for shape in core.shapes()[1]),
    ]
    assert torch.autograd.gradcheck(lambda *t: tuple(make_call(layer)(*t)), tensors)


@pytest.mark.long
@pytest.mark.parametrize("make", [Dendritic, Populations], ids=lambda make: make.__name__)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision_equals_the_loop(make: type[Core], dtype: torch.dtype) -> None:
    core = make_core(make, dtype)
    x = make_sequence(core, dtype, steps=2)
    expected, actual = (differentiate(make_call(Layer(core, backend)), core, [x]) for backend in ("torch", "cpp"))
    assert_close(actual, expected, 4e-2)


class Exact(Core):
    """A core whose branches are whole numbers, so that its sums are exact."""

    def forward(self, x: Tensor, soma: Tensor, branches: Tensor) -> tuple[Tensor, ...]:
        branches = (branches / 2 + x.unsqueeze(-1) * torch.tensor([1.0, 2.0, -1.0])).round()
        soma = soma / 2 + branches.sum(-1) - branches.amax(-1)
        return (soma > 1).to(x), soma, branches


def test_exact_sums_are_bitwise_equal() -> None:
    core = make_core(Exact, torch.float32, 9, 3)
    x = (8 * make_sequence(core, torch.float32, batch=61)).round().detach()
    loop, kernels = (make_call(Layer(core, backend))(x) for backend in ("torch", "cpp"))
    for a, b in zip(kernels, loop, strict=True):
        assert torch.equal(a, b)


@pytest.mark.long(all_but=["lengths-Apart", "resets-Apart"])
@cores
@pytest.mark.parametrize("change", ["lengths", "resets", "float32", "counts"])
def test_transforms_equal_the_loop(make: type[Core], change: str) -> None:
    core = make_core(make)
    x = make_sequence(core)
    options: dict[str, Any] = {}
    if change == "lengths":
        options["lengths"] = torch.tensor([2, T, 0])
    if change == "resets":
        options["resets"] = torch.arange(T * B).reshape(T, B) % 4 == 1
    results = []
    for backend in ("torch", "cpp"):
        layer = Layer(core, backend, precision="float32" if change == "float32" else "eager")
        layer.count_spikes = change == "counts"
        results.append(differentiate(make_call(layer, **options), core, [x]))
        results[-1].append(layer.spike_counts)
    assert_close(results[1], results[0])


@pytest.mark.parametrize("seed", range(3))
def test_random_cores_equal_the_loop(seed: int, interpreted: None) -> None:
    core = make_core(Random, torch.float64, seed)
    x = make_sequence(core)
    expected = differentiate(make_call(Layer(core)), core, [x])
    assert_close(differentiate(make_call(Layer(core, "triton")), core, [x]), expected)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3, 80))
def test_more_random_cores_equal_the_loop(seed: int, interpreted: None) -> None:
    core = make_core(Random, torch.float64, seed)
    x = make_sequence(core)
    expected = differentiate(make_call(Layer(core)), core, [x])
    for backend in ("cpp", "triton"):
        assert_close(differentiate(make_call(Layer(core, backend)), core, [x]), expected)


class Network(nn.Module):
    """A layer that starts each call from its initial state, and also returns its final state."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        outputs, states = self.layer.step(x)
        return *(outputs if isinstance(outputs, list) else [outputs]), *states


@pytest.mark.long(all_but=["Apart"])
@cores
def test_compiled_graphs_launch_kernels(make: type[Core], caplog: pytest.LogCaptureFixture) -> None:
    """Checks that compiled graphs equal the loop and launch kernels. flexsn_hop would log that a graph runs a loop."""
    core = make_core(make)
    x = make_sequence(core)
    expected = differentiate(Network(Layer(core)), core, [x])
    with caplog.at_level("WARNING", "flexsn_hop"):
        compiled = torch.compile(Network(Layer(core, "auto")), fullgraph=True)
        assert_close(differentiate(compiled, core, [x]), expected)
    assert "runs as a loop" not in caplog.text


@pytest.mark.long(all_but=["Populations"])
@cores
def test_exported_programs_equal_the_loop(make: type[Core]) -> None:
    core = make_core(make)
    x = make_sequence(core).detach()
    network = Network(Layer(core, "auto"))
    with torch.no_grad():
        program = torch.export.export(network, (x,))
        assert_close(program.module()(x), Network(Layer(core))(x))


class Best(Core):
    """A core that only keeps its largest branch. If several branches are equally large, it keeps the first of them."""

    def forward(self, x: Tensor, soma: Tensor, branches: Tensor) -> tuple[Tensor, ...]:
        branches = branches / 2 + x.unsqueeze(-1) * torch.tensor([1.0, 2.0, 2.0, -1.0], dtype=x.dtype)
        largest, position = branches.max(-1)
        soma = soma / 2 + largest * (position > 1) - torch.min(branches, -1)[0]
        return torch.tanh(soma), soma, branches * F.one_hot(position, self.branches)


def test_positions_of_branches_equal_the_loop() -> None:
    core = make_core(Best)
    x = (4 * make_sequence(core)).round().detach().requires_grad_()
    expected = differentiate(Network(Layer(core)), core, [x])
    for network in (Network(Layer(core, "cpp")), torch.compile(Network(Layer(core, "auto")), fullgraph=True)):
        assert_close(differentiate(network, core, [x]), expected)


class Noisy(Core):
    """A core with noise in each branch. The noise of all branches is drawn at once, or branch by branch."""

    draws_at_once: bool = True

    def forward(self, x: Tensor, soma: Tensor, branches: Tensor) -> tuple[Tensor, ...]:
        noise = normal_like(branches) if self.draws_at_once else torch.stack([normal_like(soma) for _ in range(4)], -1)
        branches = branches / 2 + x.unsqueeze(-1) + noise
        soma = soma / 2 + branches.sum(-1)
        return soma, soma, branches


def test_random_numbers_of_branches_are_equal_on_all_backends(interpreted: None) -> None:
    """Checks that one draw for all branches returns the same random numbers as separate draws."""
    core, x = make_core(Noisy, torch.float32), torch.zeros(T, B, 5)
    results = []
    for backend, draws_at_once in (("torch", True), ("torch", False), ("cpp", True), ("triton", True)):
        vars(core)["draws_at_once"] = draws_at_once
        torch.manual_seed(0)
        results.append(make_call(Layer(core, backend))(x))
    assert all(map(torch.equal, results[0], results[1]))
    for other in results[2:]:
        assert_close(other, results[0], 1e-5)
    assert results[0][2].std() > 0.5
    assert "state 1 as 4 pieces" in Layer(core, "cpp").explain(x)


class NoisyPopulations(Populations):
    """Populations with noise in the input, and with noise in the smaller population."""

    def forward(self, x: Tensor, s: Tensor, v: Tensor, inhibitory: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        return super().forward(x + normal_like(x), s, v, inhibitory, u + uniform_like(u))


def test_random_numbers_of_populations_are_equal_on_all_backends(interpreted: None) -> None:
    core, x = make_core(NoisyPopulations, torch.float32), torch.zeros(T, B, 5)
    results = []
    for backend in ("torch", "cpp", "triton"):
        torch.manual_seed(0)
        results.append(make_call(Layer(core, backend))(x))
    assert_close(results[1], results[0], 1e-5)
    assert_close(results[2], results[0], 1e-5)


class NoisySoma(InTheMiddle):
    """A soma with noise. The input of the core has branches."""

    def forward(self, x: Tensor, branches: Tensor, soma: Tensor) -> tuple[Tensor, ...]:
        return super().forward(x, branches, soma + normal_like(soma))


@pytest.mark.long(all_but=["NoisySoma"])
@pytest.mark.parametrize("make", [NoisySoma, Noisy], ids=lambda make: make.__name__)
def test_random_numbers_in_compiled_graphs_equal_the_loop(make: type[Core]) -> None:
    core = make_core(make, torch.float32)
    x = torch.zeros(T, B, *core.shapes()[0])
    results = []
    for network in (Network(Layer(core)), Network(Layer(core, "auto"))):
        configure(network, seed=3)
        call = network if network.layer.backend == "torch" else torch.compile(network, fullgraph=True)
        results.append(list(call(x)))
    assert_close(results[1], results[0], 1e-5)
    assert results[0][-1].std() > 0.1


def test_assigned_parameters_are_read() -> None:
    core = make_core(Dendritic)
    layer, x = Layer(core, "cpp"), make_sequence(core)
    make_call(layer)(x)
    core.weight = nn.Parameter(2 * core.weight.detach())
    with torch.no_grad():
        core.bias.add_(0.25)
    assert_close(differentiate(make_call(layer), core, [x]), differentiate(make_call(Layer(core)), core, [x]))


def test_refusal_does_not_depend_on_sizes() -> None:
    """Checks that a core is refused for any number of neurons, since this number may change between calls."""
    for size in (4, 40):
        with pytest.raises(NotImplementedError, match="roll"):
            ScanProgram(lambda x, v: (x.roll(1, -1), v), 1, 1, 1).specialize_examples((torch.zeros(6, size),) * 2)


# -- refusals --------------------------------------------------------------------------------------------------------


def _sum_wide_dimension(x: Tensor, v: Tensor, d: Tensor) -> tuple[Tensor, ...]:
    return v, v + d.sum(-1), d + x.unsqueeze(-1)


def _sort(x: Tensor, v: Tensor, d: Tensor) -> tuple[Tensor, ...]:
    return v, v + x, d.sort(-1).values


def _sum_over_neurons(x: Tensor, v: Tensor, d: Tensor) -> tuple[Tensor, ...]:
    return v, v + d.sum(-1), d - d.sum(1, keepdim=True)


def _average_over_the_batch(x: Tensor, v: Tensor, d: Tensor) -> tuple[Tensor, ...]:
    return v, v + d.sum(-1), d - d.mean(0, keepdim=True)


def _multiply_over_neurons(x: Tensor, v: Tensor, d: Tensor) -> tuple[Tensor, ...]:
    return v, v + d.sum(-1), torch.einsum("bnk,nm->bmk", d, torch.eye(d.shape[1]))


@pytest.mark.parametrize(
    ("core", "branches", "words"),
    [
        (
            _sum_wide_dimension,
            17,
            "aten.sum.dim_IntList combines 17 elements of a dimension, but at most 16 are possible",
        ),
        (_sort, 4, "aten.sort"),
        (_sum_over_neurons, 4, "aten.sum.dim_IntList combines 20 elements"),
        (_average_over_the_batch, 4, "the samples of a batch"),
        (_multiply_over_neurons, 4, "aten.bmm.default combines 20 elements"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_errors_name_the_line(core: Callable[..., Any], branches: int, words: str) -> None:
    examples = (torch.zeros(6, 20), torch.zeros(6, 20), torch.zeros(6, 20, branches))
    with pytest.raises(NotImplementedError, match=words) as caught:
        ScanProgram(core, 1, 2, 1).specialize_examples(examples)
    assert "test_other_shapes.py" in str(caught.value)


def test_unconnected_populations_are_refused() -> None:
    def core(x: Tensor, v: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        return v + x, v + x, d / 2

    with pytest.raises(NotImplementedError, match="one has a dimension of 20 elements that others lack"):
        ScanProgram(core, 1, 2, 1).specialize_examples((torch.zeros(6, 20), torch.zeros(6, 20), torch.zeros(6, 30)))


@pytest.mark.parametrize("make", ON_PIECES, ids=lambda make: make.__name__)
def test_kernels_receive_pieces(make: type[Core]) -> None:
    core = make_core(make, torch.float32)
    shapes = (core.shapes()[0], *core.shapes()[1])
    step = ScanProgram(core, 1, len(shapes) - 1, 1).specialize_examples([torch.zeros(B, *shape) for shape in shapes])
    assert isinstance(step, CutSpecialization)
    assert step.program.num_states == sum(pieces.count for pieces in step.trace.pieces.states)


@pytest.mark.gpu
@pytest.mark.parametrize("make", CORES, ids=lambda make: make.__name__)
def test_results_and_gradients_equal_the_loop_on_a_gpu(make: type[Core]) -> None:
    core = make_core(make, torch.float64, 37, 4).cuda()
    x = make_sequence(core, steps=9, batch=67).detach().cuda().requires_grad_()
    actual = []
    for backend in ("torch", "triton"):
        results = make_call(Layer(core, backend))(x)
        loss = torch.stack([(result * (i + 1)).sum() for i, result in enumerate(results)]).sum()
        actual.append([*results, *torch.autograd.grad(loss, [x, *core.parameters()], allow_unused=True)])
    assert_close(actual[1], actual[0], 1e-8)


@pytest.mark.gpu
@pytest.mark.parametrize("neurons", [34, 160, 320])
def test_two_populations_run_in_one_launch_on_a_gpu(neurons: int) -> None:
    core = make_core(Populations, torch.float32, neurons).cuda()
    x = torch.randn(9, 130, neurons, generator=torch.Generator().manual_seed(3)).cuda().requires_grad_()
    actual = []
    for backend in ("torch", "triton"):
        layer = Layer(core, backend)
        results = make_call(layer)(x)
        actual.append([*results, *torch.autograd.grad(results[0].sum() + results[3].sum(), [x, *core.parameters()])])
    spikes, expected = actual[1][0], actual[0][0]
    assert (spikes != expected).double().mean() < 1e-3
    lines = [line for line in layer.explain().splitlines() if "the last " in line]
    assert len(lines) == 2
    assert all("one launch for all steps" in line for line in lines)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [Dendritic, Populations], ids=lambda make: make.__name__)
def test_compiled_graphs_equal_the_loop_on_a_gpu(make: type[Core]) -> None:
    core = make_core(make).cuda()
    x = make_sequence(core, steps=9, batch=67).detach().cuda().requires_grad_()
    actual = []
    for network in (Network(Layer(core)), torch.compile(Network(Layer(core, "auto")), fullgraph=True)):
        results = network(x)
        actual.append([*results, *torch.autograd.grad(results[0].sum() + results[-1].sum(), [x, *core.parameters()])])
    assert_close(actual[1], actual[0], 1e-8)
