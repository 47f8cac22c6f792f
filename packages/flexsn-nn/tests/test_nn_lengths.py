"""Sequences of different lengths in one batch: results and gradients equal those of separate sequences."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from nn_equations import CASES, Case, draw_input
from torch import Tensor, nn

from flexsn_nn import (
    LIF,
    PSN,
    RLIF,
    FlexSN,
    Leaky,
    OverTime,
    ParameterError,
    ParametricLIF,
    StepModeError,
    StochasticLIF,
    functional,
)
from flexsn_nn.layer import Delay, NormNeuron, SharedDropout
from flexsn_nn.memory import PackedSpikes
from flexsn_nn.neuron import Feedback
from flexsn_nn.transforms import Lengths

# The 35 features of a step do not fill a whole number of blocks of any kernel.
FEATURES = 35
# All sequences of more than 8 steps run in the same kernels.
LENGTHS = torch.tensor([19, 11, 0, 9, 12])
T = 19

RunResults = tuple[Tensor, list[Tensor], list[Tensor]]


def run(neuron: FlexSN, inputs: Sequence[Tensor], states: Sequence[Tensor], **options: Any) -> RunResults:
    """Returns the output, the final states, and the gradients of inputs and initial states."""
    leaves = [tensor.clone().requires_grad_() for tensor in (*inputs, *states)]
    output, final = neuron.step(leaves[: len(inputs)], leaves[len(inputs) :], **options)
    assert isinstance(output, Tensor)
    # The weights depend on step and feature, but not on the number of steps or sequences.
    steps, rows = torch.arange(len(output)), torch.arange(FEATURES, dtype=output.dtype).cos()
    loss = (output * (1 + steps).view(-1, 1, 1) * rows).sum()
    for i, state in enumerate(final):
        loss = loss + (state * (rows + i)).sum()
    return output.detach(), [s.detach() for s in final], list(torch.autograd.grad(loss, leaves, materialize_grads=True))


def make_inputs(case: Case, neuron: FlexSN) -> list[Tensor]:
    x = draw_input(case, T, (len(LENGTHS), FEATURES))
    return [
        x,
        *[torch.randn(x.shape, generator=torch.Generator().manual_seed(7), dtype=x.dtype)]
        * (1 if isinstance(neuron, StochasticLIF) else 0),
    ]


def make_states(neuron: FlexSN) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = len(LENGTHS), FEATURES
    return [0.3 * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(neuron.num_states)]


def run_alone(neuron: FlexSN, inputs: Sequence[Tensor], states: Sequence[Tensor], b: int, end: int) -> RunResults:
    """Runs one sequence at its own length.

    Runs the whole batch at this length if results depend on the size of the batch. Matrix products depend on it, and
    in the loop, exponentials, too.
    """
    needs_whole_batch = isinstance(neuron, Feedback) or neuron.backend == "torch"
    rows, row = (slice(None), slice(b, b + 1)) if needs_whole_batch else (slice(b, b + 1), slice(None))
    output, final, gradients = run(neuron, [x[:end, rows] for x in inputs], [s[rows] for s in states])
    count = len(inputs)
    input_gradients, state_gradients = [g[:, row] for g in gradients[:count]], [g[row] for g in gradients[count:]]
    return output[:, row], [state[row] for state in final], [*input_gradients, *state_gradients]


def assert_equal_to_separate_runs(
    neuron: FlexSN, inputs: list[Tensor], states: list[Tensor], results: RunResults
) -> None:
    output, final, gradients = results
    for b, end in enumerate(LENGTHS.tolist()):
        row = slice(b, b + 1)
        assert not output[end:, row].any()
        for input_gradient in gradients[: len(inputs)]:
            assert not input_gradient[end:, row].any()
        if end == 0:
            assert all(torch.equal(a[row], s[row]) for a, s in zip(final, states, strict=True))
            continue
        expected = run_alone(neuron, inputs, states, b, end)
        assert torch.equal(output[:end, row], expected[0])
        assert all(torch.equal(a[row], s) for a, s in zip(final, expected[1], strict=True))
        for i, (gradient, expected_gradient) in enumerate(zip(gradients, expected[2], strict=True)):
            part = gradient[:end, row] if i < len(inputs) else gradient[row]
            # If more than two gradients are added, their order differs in the loop and in neurons with products.
            if neuron.backend == "torch" or isinstance(neuron, Feedback):
                torch.testing.assert_close(part, expected_gradient, rtol=1e-12, atol=1e-12)
            else:
                assert torch.equal(part, expected_gradient), f"gradient {i} of sequence {b}"


def compare_lengths(case: Case, backend: str) -> None:
    neuron = case.make(backend=backend)
    inputs, states = make_inputs(case, neuron), make_states(neuron)
    poisoned = [x.clone() for x in inputs]
    for x in poisoned:
        for b, end in enumerate(LENGTHS.tolist()):
            x[end:, b] = torch.nan
    results = run(neuron, poisoned, states, lengths=LENGTHS)
    assert_equal_to_separate_runs(neuron, inputs, states, results)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_neuron_accepts_lengths_in_the_loop(case: Case) -> None:
    compare_lengths(case, "torch")


@pytest.mark.long(all_but=["recurrent_lif"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_neuron_accepts_lengths_in_cpp(case: Case) -> None:
    compare_lengths(case, "auto")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.long(all_but=["ilif"])
@pytest.mark.parametrize("case", [c for c in CASES if c.name != "recurrent_gated_lif"], ids=lambda case: case.name)
def test_each_neuron_accepts_lengths_in_triton(case: Case) -> None:
    compare_lengths(case, "triton")


# -- networks ----------------------------------------------------------------------------------------------------


def draw_uniform(*shape: int, seed: int = 0) -> Tensor:
    return 3 * torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def make_network(backend: str) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(
        OverTime(nn.Linear(6, 5), nn.LayerNorm(5)), LIF(), nn.Linear(5, 4), RLIF(4), SharedDropout(0.0), Leaky(0.9)
    )
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.abs_().mul_(2)  # With these weights, all neurons fire.
    functional.set_backend(net, backend)
    return net


@pytest.mark.long(all_but=["torch"])
@pytest.mark.parametrize("backend", ["torch", "auto", "hop"])
def test_a_network_returns_the_results_of_separate_sequences(backend: str) -> None:
    net, lengths = make_network(backend), torch.tensor([12, 9, 0])
    for seed in range(3):  # The second and third calls have other lengths.
        x = draw_uniform(12, 3, 6, seed=seed).requires_grad_()
        functional.reset_net(net)
        output = functional.run(net, x, lengths=lengths)
        (gradient,) = torch.autograd.grad(output.square().sum(), x)
        states = functional.get_states(net)
        for b, end in enumerate(lengths.tolist()):
            assert not output[end:, b].any()
            assert not gradient[end:, b].any()
            if end:
                functional.reset_net(net)
                separate = net(x[:end])
                torch.testing.assert_close(output[:end, b], separate[:, b])
                (expected,) = torch.autograd.grad(separate[:, b].square().sum(), x)
                torch.testing.assert_close(gradient[:end, b], expected[:end, b])
                for name, separate_states in functional.get_states(net).items():
                    if name != "4":
                        for state, other in zip(separate_states, states[name], strict=True):
                            torch.testing.assert_close(other[b], state[b])
        lengths = lengths.roll(1)
    functional.reset_net(net)
    assert net(x).square().sum() > output.square().sum(), "without lengths, every sequence has all steps"


def test_layers_that_read_several_steps_are_refused() -> None:
    for layer in (Delay(1), PSN(T=3)):
        net = nn.Sequential(LIF(), layer)
        with pytest.raises(StepModeError, match=f"layer 1 \\({type(layer).__name__}\\) reads several steps"):
            functional.run(net, draw_uniform(3, 2, 4), lengths=torch.tensor([1, 2]))
        assert functional.run(net, draw_uniform(3, 2, 4)).shape == (3, 2, 4)


@pytest.mark.parametrize("backend", ["aot_eager", "between graphs", "inductor"])
@pytest.mark.long(all_but=["aot_eager"])
def test_a_compiled_network_accepts_lengths(backend: str, compiler: None) -> None:
    net, lengths = nn.Sequential(OverTime(nn.Linear(6, 5)), LIF(), nn.Linear(5, 4), RLIF(4)), torch.tensor([5, 2, 0])

    def run(x: Tensor, lengths: Tensor) -> Tensor:
        result: Tensor = functional.run(net, x, lengths=lengths)
        return result

    has_graph_breaks = backend == "between graphs"
    compiled = torch.compile(run, backend="aot_eager" if has_graph_breaks else backend, fullgraph=not has_graph_breaks)
    for seed in range(2):
        x = draw_uniform(5, 3, 6, seed=seed).requires_grad_()
        functional.reset_net(net)
        functional.set_backend(net, "torch")
        expected = functional.run(net, x, lengths=lengths)
        states = functional.get_states(net)
        functional.set_backend(net, "cpp" if has_graph_breaks else "auto")
        functional.reset_net(net)
        output = compiled(x, lengths)
        torch.testing.assert_close(output, expected)
        for name, states_of_layer in functional.get_states(net).items():
            torch.testing.assert_close(states_of_layer, states[name])
        pair = [torch.autograd.grad(y.square().sum(), x)[0] for y in (output, expected)]
        torch.testing.assert_close(*pair)
        lengths = lengths.roll(1)


def test_lengths_are_exported_with_any_number_of_steps() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.neuron = LIF()

        def forward(self, x: Tensor, lengths: Tensor, resets: Tensor) -> Tensor:
            result: Tensor = self.neuron(x, lengths=lengths, resets=resets)
            return result

    net, T = Net(), torch.export.Dim("T", min=2)
    resets = torch.zeros(6, 3, dtype=torch.bool)
    example = draw_uniform(6, 3, 4), torch.tensor([6, 2, 0]), resets
    program = torch.export.export(net, example, dynamic_shapes=({0: T}, {}, {0: T}))
    lengths, resets = torch.tensor([11, 3, 8]), torch.rand(11, 3, generator=torch.Generator().manual_seed(0)) > 0.7
    x = draw_uniform(11, 3, 4)
    assert torch.equal(program.module()(x, lengths, resets), net(x, lengths, resets))


# -- together with other options ---------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_lengths_apply_to_counts_state_sequences_bits_and_norms(backend: str) -> None:
    norm = nn.BatchNorm1d(4)
    layer, lengths = NormNeuron(norm, ParametricLIF(backend=backend)), torch.tensor([3, 9])
    plain = nn.Sequential(OverTime(deepcopy(norm)), deepcopy(layer.neuron))
    layer.neuron.count_spikes = layer.neuron.store_state_seqs = True
    x = draw_uniform(9, 2, 4)
    with PackedSpikes(layer):
        for _ in range(3):
            layer.neuron.reset()
            output = layer(x, lengths=lengths)
            assert layer.neuron.spike_counts is not None
            assert torch.equal(layer.neuron.spike_counts, output.sum((0, 1)))
            sequence = layer.neuron.state_seqs[0]
            assert torch.equal(sequence[2:, 0], sequence[2, 0].expand(7, 4))
            functional.reset_net(plain)
            torch.testing.assert_close(output, functional.run(plain, x, lengths=lengths))
            layer.neuron.store_state_seqs = False
            layer.neuron.reset()
            assert torch.equal(layer(x, lengths=lengths), output)
            layer.neuron.store_state_seqs = True


@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_half_precision_with_lengths_computes_in_float32(backend: str) -> None:
    neuron = LIF(backend=backend, precision="float32")
    x, lengths = draw_uniform(9, 2, 4).bfloat16(), torch.tensor([3, 9])
    output = neuron(x, lengths=lengths)
    assert output.dtype == torch.bfloat16
    assert neuron.states[0].dtype == torch.float32
    neuron.reset()
    assert torch.equal(output[:3, :1], neuron(x[:3, :1]))


def test_wrong_lengths_are_refused() -> None:
    neuron, x = LIF(), draw_uniform(3, 2, 4)
    wrong: list[tuple[Any, type[Exception], str]] = [
        ([1, 2], TypeError, "lengths is a list"),
        (torch.tensor([1.0, 2.0]), ParameterError, "torch.float32; give whole numbers"),
        (torch.tensor([1, 2, 3]), ParameterError, r"shape \[3\], but a step \[2, 4\].*\[2\]"),
        (torch.tensor([1, 4]), ParameterError, "from 1 to 4; the input has 3 steps"),
        (torch.tensor([-1, 2]), ParameterError, "from -1 to 2"),
    ]
    for lengths, kind, words in wrong:
        with pytest.raises(kind, match=words):
            neuron(x, lengths=lengths)
    neuron.step_mode = "s"
    with pytest.raises(StepModeError, match="leave out the sequences that have ended"):
        neuron(x[0], lengths=torch.tensor([1, 2]))


def test_lengths_that_are_written_to_are_read_again() -> None:
    neuron, x, lengths = LIF(), draw_uniform(9, 2, 4) + 2, torch.tensor([9, 9])
    transform = Lengths(lengths)
    output, _ = neuron.step(x, transforms=[transform])
    assert output[5:].any()
    lengths.fill_(5)
    output, _ = neuron.step(x, transforms=[transform])
    assert output[:5].any()
    assert not output[5:].any()


@pytest.mark.gpu
# With 35 features, some blocks contain parts of several sequences. With 128 features, no block does.
@pytest.mark.parametrize("features", [35, 128])
@pytest.mark.parametrize("num_steps", [6, 40])  # One chunk, and several chunks.
def test_results_equal_those_of_separate_sequences_on_a_gpu(num_steps: int, features: int) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, num_steps + 1, (9,), generator=generator)
    lengths[0] = num_steps
    x = torch.randn(num_steps, 9, features, generator=generator).cuda() + 0.5
    neuron = LIF(backend="triton")
    output, final, gradients = run_on_gpu(neuron, x, lengths.cuda())
    for b, end in enumerate(lengths.tolist()):
        assert not output[end:, b].any()
        assert not gradients[end:, b].any()
        if end:
            separate = run_on_gpu(neuron, x[:end, b : b + 1], None)
            assert torch.equal(output[:end, b], separate[0][:, 0])
            assert torch.equal(final[b], separate[1][0])
            assert torch.equal(gradients[:end, b], separate[2][:, 0])


def run_on_gpu(neuron: LIF, x: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the output, the final state, and the gradient of the input."""
    functional.reset_net(neuron)
    leaf = x.clone().requires_grad_()
    output = neuron(leaf) if lengths is None else neuron(leaf, lengths=lengths)
    steps = 1 + torch.arange(len(x), device=x.device).view(-1, 1, 1)
    rows = torch.arange(x.shape[2], device=x.device).cos()
    loss = (output * steps * rows).sum() + (neuron.states[0] * rows).sum()
    return output.detach(), neuron.states[0].detach(), torch.autograd.grad(loss, leaf)[0]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("num_steps", [6, 21])
def test_kernels_with_lengths_have_ends(num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that lengths count down in the kernels, and that a program stops after the last of its sequences."""
    from flexsn_codegen.scan._spec import BackwardSpec, ForwardSpec
    from flexsn_runtime.step import _pointwise_step

    specs: list[ForwardSpec | BackwardSpec] = []
    for name in ("forward_source", "backward_source"):
        write = getattr(_pointwise_step, name)

        def note(*a: Any, write: Any = write) -> Any:
            specs.append(a[-1])
            return write(*a)

        monkeypatch.setattr(_pointwise_step, name, note)
    neuron = LIF(backend="triton", tau=1.75)  # No other test has this tau, so the kernels are written here.
    x = torch.randn(num_steps, 3, FEATURES).requires_grad_()
    neuron(x, lengths=torch.tensor([num_steps, 2, 0])).sum().backward()
    assert [spec.ends for spec in specs] == [True, True]
    assert [layout.counts_down for layout in specs[0].inputs] == [False, True]
    assert x.grad is not None
    assert not x.grad[:, 2].any()
