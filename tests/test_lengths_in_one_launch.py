"""Lengths and resets of recurrent layers. All steps run in one launch, and the results equal the loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexsn_codegen.recurrent import Loop, NotOneLaunchError
from flexsn_codegen.targets.cuda import Cluster
from flexsn_nn import RLIF, FlexSN, Recurrent
from flexsn_nn.neuron import ALIF
from flexsn_runtime import RecurrentSpecialization
from flexsn_runtime.recurrent import _one_launch, _staged
from flexsn_runtime.recurrent._one_launch import Loops, Memory
from flexsn_runtime.recurrent._over_time import OverTime

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that records, for each loop over time, `"one launch"` or the reason why there is no single
    launch.
    """
    descriptions: list[str] = []
    original = _one_launch.run_in_one_launch

    def record(step: RecurrentSpecialization, over: OverTime) -> str:
        try:
            description = original(step, over)
        except NotOneLaunchError as error:
            descriptions.append(str(error))
            raise
        descriptions.append("one launch")
        return description

    monkeypatch.setattr(_staged, "run_in_one_launch", record)
    return descriptions


def make_rlif() -> FlexSN:
    return RLIF(20, tau=2.0)


def make_adaptive() -> FlexSN:
    """Returns a neuron with initial states other than zero."""
    return Recurrent(ALIF(v_reset=-0.25), 20)


@pytest.mark.long(all_but=["make_rlif"])
@pytest.mark.parametrize("make", [make_rlif, make_adaptive])
def test_lengths_and_resets_equal_the_loop(make: Any, launches: list[str]) -> None:
    torch.manual_seed(0)
    neuron = make().to(DEVICE)
    with torch.no_grad():
        neuron.V.copy_(
            torch.randint(-4, 5, neuron.V.shape) / 8
        )  # multiples of 1/8, so that sums are exact in any order
    x = (3 * torch.rand(5, 17, 20)).to(DEVICE)
    lengths = torch.randint(0, 6, (17,))
    resets = (torch.rand(5, 17) > 0.7).to(DEVICE)
    actual = []
    for backend in ("torch", "triton"):
        neuron.backend = backend
        neuron.reset()
        leaf = x.clone().requires_grad_()
        output = neuron(leaf, lengths=lengths, resets=resets)
        results: list[Tensor] = [output, *neuron.states]
        gradients = torch.autograd.grad(output.square().sum() + neuron.states[1].sum(), [leaf, *neuron.parameters()])
        actual.append([*[r.detach() for r in results], *gradients])
    for a, b in zip(*actual, strict=True):
        torch.testing.assert_close(a, b)
    assert all(torch.equal(a, b) for a, b in zip(actual[0][:2], actual[1][:2], strict=True))
    assert launches == ["one launch"] * 2
    assert not actual[1][0][lengths[0] :, 0].any()


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool, bool]]:
    """Returns a list that records three booleans for each loop over time: the values that programs exchange are exact;
    these values are sent as bits; the loop depends on lengths.
    """
    loops: list[tuple[bool, bool, bool]] = []
    original = Loops.kernel

    def kernel(self: Loops, step: Any, over: OverTime, loop: Loop, memory: Memory, tiles: Any) -> Any:
        source = self.cluster_kernel(step, over, loop, memory, Cluster(2, 1, 1))[0].source.source
        loops.append((loop.exchanges[0].exact, "__ballot_sync" in source, "- int(step)" in source))
        return original(self, step, over, loop, memory, tiles)

    monkeypatch.setattr(Loops, "kernel", kernel)
    monkeypatch.setattr(_one_launch, "ClusterLaunch", lambda *a, **options: None)
    return loops


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("has_lengths", [False, True], ids=["full", "lengths"])
def test_spikes_are_sent_as_bits(has_lengths: bool, loops: list[tuple[bool, bool, bool]]) -> None:
    """Checks spikes that are sent with and without lengths. After the end of a sequence, its state remains a spike."""
    lengths = {"lengths": torch.tensor([5, 3, 0])} if has_lengths else {}
    RLIF(20, tau=2.0, backend="triton")(torch.rand(5, 3, 20), **lengths)
    assert loops == [(True, True, has_lengths)]


@pytest.mark.usefixtures("interpreted")
def test_counts_are_not_sent_as_bits(loops: list[tuple[bool, bool, bool]]) -> None:
    FlexSN(Counter(), num_inputs=1, num_states=1, num_outputs=1, backend="triton")(torch.rand(5, 3, 20))
    assert loops == [(False, False, False)]


class Counter(torch.nn.Module):
    """A core that multiplies a matrix by counts of spikes. Counts are integers without an upper bound."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(20, 20))

    def forward(self, x: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        spike = (x + count @ self.weight > 0.5).to(x.dtype)
        return spike, count + spike
