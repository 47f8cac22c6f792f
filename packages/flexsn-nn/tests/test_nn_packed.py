"""Sequences without padding, as jagged nested tensors, as inputs of networks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from flexsn_nn import LIF, RLIF, InputShapeError, OverTime, ParameterError, functional
from flexsn_nn.data import pad_sequences
from flexsn_nn.errors import InputLayoutError

LENGTHS = (5, 1, 0, 9)


def draw_sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [2 * torch.rand(length, 6, generator=generator) for length in LENGTHS]


def make_jagged(parts: list[Tensor]) -> Tensor:
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(OverTime(nn.Linear(6, 8)), LIF(backend="torch"), RLIF(8, backend="torch"))


def test_results_equal_those_of_separate_sequences() -> None:
    net, x = make_network(), make_jagged(draw_sequences())
    output = functional.run(net, x)
    assert output.is_nested
    assert torch.equal(output.offsets(), x.offsets())  # type: ignore[attr-defined]
    gradient = torch.arange(output.values().numel(), dtype=torch.float32).cos().view(output.values().shape)
    output.values().backward(gradient)
    assert x.grad is not None
    states = functional.get_states(net)
    parts, gradients = output.unbind(), gradient.split(LENGTHS)
    for b, (sequence, part) in enumerate(zip(draw_sequences(), parts, strict=True)):
        if not len(sequence):
            continue
        functional.reset_net(net)
        leaf = sequence.unsqueeze(1).requires_grad_()
        separate = net(leaf)
        torch.testing.assert_close(part, separate[:, 0])
        separate[:, 0].backward(gradients[b])
        torch.testing.assert_close(x.grad.unbind()[b], leaf.grad[:, 0])  # type: ignore[index]
        torch.testing.assert_close(states["1"][0][b], functional.get_states(net)["1"][0][0])


def test_a_jagged_call_equals_the_padded_call() -> None:
    net, parts = make_network(), [part for part in draw_sequences() if len(part)]
    output = functional.run(net, make_jagged(parts))
    functional.reset_net(net)
    padded, lengths, _ = pad_sequences([(part, 0) for part in parts])
    expected = functional.run(net, padded, lengths=lengths)
    for b, sequence in enumerate(output.unbind()):
        assert torch.equal(sequence, expected[: len(sequence), b])


def test_outputs_without_time_are_unchanged() -> None:
    class Last(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x.sum(0)

    output, last = functional.run(Last(), make_jagged(draw_sequences()))
    assert output.is_nested
    assert last.shape == (4, 6)


def test_steps_without_dimensions_are_accepted() -> None:
    x = torch.nested.nested_tensor([torch.ones(3), torch.ones(1)], layout=torch.jagged)
    assert [len(part) for part in functional.run(LIF(backend="torch"), x).unbind()] == [3, 1]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_unsupported_layouts_are_refused() -> None:
    parts = [part for part in draw_sequences() if len(part)]
    x = make_jagged(parts)
    packed = pack_sequence(parts, enforce_sorted=False)
    for call in (lambda: functional.run(LIF(), packed), lambda: LIF()(packed)):
        with pytest.raises(InputLayoutError, match=r"is a PackedSequence.*pad_packed_sequence.*torch.jagged"):
            call()  # type: ignore[no-untyped-call]
    with pytest.raises(InputLayoutError, match=r"functional.run\(net, x\) accepts a jagged tensor"):
        LIF()(x)
    with pytest.raises(InputLayoutError, match=r"of layout torch\.strided"):
        functional.run(LIF(), torch.nested.nested_tensor(parts, layout=torch.strided))
    with pytest.raises(ParameterError, match="has its own lengths"):
        functional.run(LIF(), x, lengths=torch.tensor([1, 1, 1]))
    holes = torch.nested.narrow(torch.ones(2, 5, 3), 1, torch.zeros(2).long(), torch.tensor([2, 3]), torch.jagged)
    with pytest.raises(InputLayoutError, match="with holes"):
        functional.run(LIF(), holes)
    with pytest.raises(InputLayoutError, match="some inputs are jagged"):
        functional.run(LIF(), x, torch.ones(9, 3, 6))
    with pytest.raises(InputShapeError, match="input 1 has sequences of other lengths"):
        functional.run(LIF(), x, make_jagged(parts[::-1]))
