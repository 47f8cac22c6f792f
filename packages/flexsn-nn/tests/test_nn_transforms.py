"""Transforms that users define: they add values to a step, and kernels use the current values of their attributes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsn_nn import ALIF, LIF, RLIF, FlexSN, OverTime, ParameterError, PortabilityWarning, functional
from flexsn_nn.layer import NormNeuron
from flexsn_nn.transforms import Call, Changed, Core, Lengths, Own, Transform


class Ends(Transform):
    """A transform that implements lengths by a counter, with a further state and a tensor that the step captures."""

    num_states = 1

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths
        self.counted: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.lengths,)

    def states(self, call: Call) -> Sequence[Tensor]:
        return (torch.zeros(call.step_shape, dtype=torch.int32, device=call.inputs[0].device),)

    def step(self, core: Core, inputs: tuple[Tensor, ...], states: tuple[Tensor, ...], own: Own) -> Changed:
        (t,), (lengths,) = own.states, own.tensors
        outputs, new_states = core(inputs, states)
        alive = t < lengths
        return Changed(
            tuple(torch.where(alive, output, torch.zeros_like(output)) for output in outputs),
            tuple(torch.where(alive, new, old) for new, old in zip(new_states, states, strict=True)),
            own_states=(t + 1,),
        )

    def ended(self, outputs: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        (self.counted,) = states


class Scaled(Transform):
    """A transform that multiplies the input by a learned tensor, and adds an offset and a sequence."""

    num_inputs = num_outputs = 1

    def __init__(self, gain: Tensor, offset: float, noise: Tensor) -> None:
        self.gain, self.offset, self.noise = gain, offset, noise
        self.driven: Tensor | None = None

    @property
    def key(self) -> Hashable:
        return super().key, self.offset

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.gain,)

    def inputs(self, call: Call) -> Sequence[Tensor]:
        return (self.noise,)

    def step(self, core: Core, inputs: tuple[Tensor, ...], states: tuple[Tensor, ...], own: Own) -> Changed:
        driven = inputs[0] * own.tensors[0] + self.offset + own.inputs[0]
        return Changed(*core((driven, *inputs[1:]), states), own_outputs=(driven,))

    def ended(self, outputs: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        (self.driven,) = outputs


def draw_input(*shape: int, seed: int = 0) -> Tensor:
    return 2 * torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


LENGTHS = torch.tensor([11, 3, 7, 1, 0], dtype=torch.int32).view(5, 1)


@pytest.mark.parametrize("backend", ["torch", "cpp", pytest.param("triton", marks=pytest.mark.long)])
def test_lengths_by_a_counter_equal_lengths(backend: str, request: pytest.FixtureRequest) -> None:
    if backend == "triton":
        request.getfixturevalue("interpreted")
    neuron, reference = LIF(backend=backend), LIF(backend="torch")
    for seed in range(3):
        results = []
        lengths = LENGTHS.roll(seed, 0)
        ends = Ends(lengths)
        for layer, options in (
            (neuron, {"transforms": [ends]}),
            (reference, {"lengths": lengths.view(-1)}),
        ):
            layer.reset()
            x = draw_input(11, 5, 7, seed=seed).requires_grad_()
            output = layer(x, **options)
            (gradient,) = torch.autograd.grad((output * torch.arange(11.0).view(-1, 1, 1)).sum(), x)
            results.append((output.detach(), layer.states[0].detach(), gradient))
        assert all(torch.equal(a, b) for a, b in zip(results[0][:2], results[1][:2], strict=True))
        torch.testing.assert_close(results[0][2], results[1][2])
        assert ends.counted is not None
        assert ends.counted.tolist() == torch.full((5, 7), 11).tolist()
        assert len(neuron.states) == 1


@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_a_transform_adds_inputs_outputs_and_tensors(backend: str) -> None:
    """Checks that another tensor needs no new kernel, and that another offset in the key takes effect."""
    neuron, x, noise = ALIF(backend=backend), draw_input(9, 3, 4), draw_input(9, 1, 4, seed=1)
    for seed, offset in ((0, 0.0), (1, 0.0), (2, 0.5), (3, 0.0)):
        gain = draw_input(4, seed=seed).requires_grad_()
        scaled = Scaled(gain, offset, noise * seed)
        neuron.reset()
        output = neuron(x, transforms=[scaled])
        driven = x * gain + offset + noise * seed
        assert scaled.driven is not None
        torch.testing.assert_close(scaled.driven, driven)
        plain = ALIF(backend="torch")
        torch.testing.assert_close(output, plain(driven))
        gradients = torch.autograd.grad(output.sum() + scaled.driven.sum(), gain)
        expected = torch.autograd.grad(plain.step(driven)[0].sum() + driven.sum(), gain)
        torch.testing.assert_close(gradients, expected)
    if backend == "cpp":
        assert len(neuron._programs._program_by_key) == 3, (
            "expected one program for the step itself and one for each offset"
        )


@pytest.mark.long(all_but=["torch"])
@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_transforms_are_applied_in_order_and_with_a_norm(backend: str) -> None:
    """Checks that the last transform changes the input first, and the norm changes it last."""
    x, noise, offset = draw_input(9, 3, 4), torch.zeros(9, 1, 4), torch.tensor([1.0])
    first, second = Scaled(torch.tensor([2.0]), 0.0, noise), Scaled(offset, 1.0, noise)
    LIF(backend=backend)(x, transforms=[first, second])
    assert first.driven is not None
    torch.testing.assert_close(first.driven, 2 * (x + 1))
    norm = nn.BatchNorm1d(4).eval()
    norm.running_mean = torch.full((4,), 0.5)
    layer = NormNeuron(norm, LIF(backend=backend))
    output = layer(x, lengths=torch.tensor([9, 4, 0]))
    expected = LIF(backend="torch")(OverTime(norm)(x), lengths=torch.tensor([9, 4, 0]))
    assert torch.equal(output, expected)
    assert output.any()


def test_transforms_apply_to_recurrent_steps_and_single_steps() -> None:
    torch.manual_seed(0)
    neuron = RLIF(4)
    reference = RLIF(4, backend="torch")
    reference.load_state_dict(neuron.state_dict())
    x = draw_input(9, 5, 4)
    lengths = LENGTHS.clamp(max=9)
    for _ in range(2):
        neuron.reset()
        reference.reset()
        torch.testing.assert_close(neuron(x, transforms=[Ends(lengths)]), reference(x, lengths=lengths.view(-1)))
    neuron.reset()
    neuron.step_mode = "s"
    with torch.no_grad():
        outputs = [neuron(step, transforms=[Ends((lengths > t).int())]) for t, step in enumerate(x)]
    reference.reset()
    torch.testing.assert_close(torch.stack(outputs), reference(x, lengths=lengths.view(-1)))


def test_transforms_apply_in_a_compiled_graph(compiler: None) -> None:
    neuron, reference = LIF(), LIF(backend="torch")
    compiled = torch.compile(
        lambda x, lengths: neuron(x, transforms=[Ends(lengths)]), backend="aot_eager", fullgraph=True
    )
    for seed in range(2):
        neuron.reset()
        reference.reset()
        x, lengths = draw_input(11, 5, 7, seed=seed), LENGTHS.roll(seed, 0)
        assert torch.equal(compiled(x, lengths), reference(x, lengths=lengths.view(-1)))
        assert torch.equal(neuron.states[0], reference.states[0])


def test_transforms_apply_to_all_neurons_of_a_network() -> None:
    net = nn.Sequential(LIF(backend="torch"), OverTime(nn.Identity()), LIF(v_threshold=0.2, backend="torch"))
    x = draw_input(11, 5, 7) + 1
    output = functional.run(net, x, transforms=[Ends(LENGTHS)])
    functional.reset_net(net)
    assert torch.equal(output, functional.run(net, x, lengths=LENGTHS.view(-1)))
    functional.reset_net(net)
    assert not torch.equal(output, net(x)), "a transform applies to one call only"


class Mixes(Transform):
    def step(self, core: Core, inputs: tuple[Tensor, ...], states: tuple[Tensor, ...], own: Own) -> Changed:
        return Changed(*core((inputs[0] - inputs[0].mean(), *inputs[1:]), states))


def test_transforms_that_kernels_refuse_run_as_a_loop() -> None:
    neuron, x = LIF(), draw_input(9, 3, 4)
    with pytest.warns(PortabilityWarning, match=r"(?s)mean.*test_nn_transforms\.py"):
        output = neuron(x, transforms=[Mixes()])
    assert torch.equal(output, LIF(backend="torch")(x, transforms=[Mixes()]))
    neuron.reset()
    assert torch.equal(neuron(x), LIF(backend="torch")(x))
    with pytest.raises(NotImplementedError, match="mean"):
        LIF(backend="cpp")(x, transforms=[Mixes()])


class Wrong(Transform):
    num_states = 2

    def __init__(self, num_passed: int, num_returned: int) -> None:
        self.num_passed, self.num_returned = num_passed, num_returned

    def states(self, call: Call) -> Sequence[Tensor]:
        return [torch.zeros(call.step_shape)] * self.num_passed

    def step(self, core: Core, inputs: tuple[Tensor, ...], states: tuple[Tensor, ...], own: Own) -> Changed:
        return Changed(*core(inputs, states), own_states=own.states[: self.num_returned])


@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_wrong_counts_and_transforms_are_refused(backend: str) -> None:
    x: Any = draw_input(3, 2, 4)
    for neuron in (LIF(backend=backend), FlexSN(lambda x, v: (x, v), 1, 1, 1, backend=backend)):
        with pytest.raises(ParameterError, match=r"Wrong returned 0 inputs and 1 states; .* its num_states 2"):
            neuron(x, transforms=[Wrong(1, 2)])
        with pytest.raises(ParameterError, match=r"Wrong\.step returned 0 outputs and 1 states of its own; .* 2"):
            neuron(x, transforms=[Wrong(2, 1)])
        with pytest.raises(NotImplementedError, match="Transform has no step"):
            neuron(x, transforms=[Transform()])
        with pytest.raises(TypeError, match=r"transforms\[0\] is the class Lengths; give an instance"):
            neuron(x, transforms=[Lengths])
