"""Captured steps on a GPU. Their results are bitwise equal to those of steps without a graph. Steps that cannot be
captured run as usual.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsn_nn import LIF, PLIF, RLIF, CaptureWarning, OverTime, graphs
from flexsn_nn.functional import explain, neurons, reset_net
from flexsn_nn.fusion import fuse_norms
from flexsn_nn.graphs import CapturedStep
from flexsn_nn.memory import PackedSpikes

pytestmark = pytest.mark.gpu


def compute_loss(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.mean(0).float(), labels)


def feed_forward() -> nn.Module:
    return nn.Sequential(nn.Linear(37, 128), LIF(), nn.Dropout(0.1), nn.Linear(128, 128), PLIF(), nn.Linear(128, 10))


def recurrent() -> nn.Module:
    return nn.Sequential(nn.Linear(37, 64), RLIF(64), nn.Linear(64, 10))


def normed() -> nn.Module:
    net = nn.Sequential(
        nn.Unflatten(2, (1, 37)), OverTime(nn.Conv1d(1, 24, 3), nn.BatchNorm1d(24)), LIF(), nn.Flatten(2),
        nn.Linear(24 * 35, 10),
    )  # fmt: skip
    fuse_norms(net)
    return net


def make_data(seed: int, batch: int = 48, steps: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(steps, batch, 37, generator=generator)
    return x.cuda(), torch.randint(10, (batch,), generator=generator).cuda()


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=torch.tensor(0.05, device="cuda"), momentum=0.9, fused=True)


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    lr = torch.tensor(2e-3, device="cuda")
    return torch.optim.AdamW(net.parameters(), lr=lr, capturable=True, fused=True)


def make_both(net: nn.Module, make: Callable[[nn.Module], CapturedStep]) -> tuple[CapturedStep, CapturedStep]:
    return make(net), make(copy.deepcopy(net))


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def assert_equal_training(
    captured: CapturedStep,
    plain: CapturedStep,
    batches: list[tuple[Tensor, Tensor]],
    finish_step: Callable[[CapturedStep], object] = lambda step: None,
) -> None:
    """Trains with both steps, one after the other, from equal random states."""
    results = []
    for step in (captured, plain):
        torch.manual_seed(3)
        losses: list[Tensor] = []
        for x, y in batches:
            losses.append(captured(x, y) if step is captured else plain.step.run(x, (y,)))
            finish_step(step)
        results.append(torch.stack(losses))
        results.append(torch.rand(3, device="cuda"))  # both generators have to end at the same position
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])
    for a, b in zip(
        (*captured.step.net.parameters(), *captured.step.net.buffers()),
        (*plain.step.net.parameters(), *plain.step.net.buffers()),
        strict=True,
    ):
        assert torch.equal(a, b)


def count_graphs(captured: CapturedStep) -> int:
    return captured.explain().count(": a graph")


@pytest.mark.parametrize("make", [feed_forward, recurrent, normed])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("states", graphs.STATES)
def test_hundred_steps_equal_steps_without_a_graph(make: Callable[[], nn.Module], optimizer: Any, states: str) -> None:
    torch.manual_seed(0)
    captured, plain = make_both(
        make().cuda(), lambda n: graphs.capture(n, compute_loss, optimizer(n), states=states, max_norm=1.0)
    )
    assert_equal_training(captured, plain, [make_data(i) for i in range(100)])
    # With "carry", only the first call starts without states, and this call is not captured.
    assert count_graphs(captured) == 1
    if states == "carry":
        for (_, a), (_, b) in zip(neurons(captured.step.net), neurons(plain.step.net), strict=True):
            assert all(torch.equal(s, t) for s, t in zip(a.states, b.states, strict=True))


def test_autocast_scaler_and_scheduler_equal_steps_without_a_graph() -> None:
    def make(net: nn.Module) -> CapturedStep:
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**18, growth_interval=7)
        return graphs.capture(net, compute_loss, sgd(net), autocast=torch.float16, scaler=scaler, max_norm=1.0)

    torch.manual_seed(0)
    captured, plain = make_both(feed_forward().cuda(), make)
    schedulers = {
        id(step): torch.optim.lr_scheduler.ExponentialLR(step.step.optimizer, 0.95)  # type: ignore[arg-type]
        for step in (captured, plain)
    }
    assert_equal_training(captured, plain, [make_data(i) for i in range(40)], lambda step: schedulers[id(step)].step())
    assert count_graphs(captured) == 1
    assert captured.step.scaler is not None
    assert plain.step.scaler is not None
    assert captured.step.scaler.get_scale() == plain.step.scaler.get_scale()


@pytest.mark.parametrize("packing", [False, True])
def test_smaller_batches_and_other_lengths_equal_steps_without_a_graph(packing: bool) -> None:
    torch.manual_seed(0)
    captured, plain = make_both(feed_forward().cuda(), lambda n: graphs.capture(n, compute_loss, adamw(n)))
    batches = [make_data(i, 13 if i % 5 == 4 else 48, 4 if i % 7 == 6 else 6) for i in range(40)]
    context: AbstractContextManager[Any] = PackedSpikes(captured.step.net) if packing else nullcontext()
    with context:
        assert_equal_training(captured, plain, batches)
    assert count_graphs(captured) >= 3


def test_graphs_share_memory() -> None:
    net = feed_forward().cuda()
    captured = graphs.capture(net, compute_loss, sgd(net))
    for _ in range(3):
        captured(*make_data(0, 4096))
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    for _ in range(2):
        captured(*make_data(0, 4000))
    torch.cuda.synchronize()
    assert count_graphs(captured) == 2
    # The two graphs share the memory for activations. The second graph only allocates inputs and gradients.
    assert torch.cuda.memory_reserved() - before < 40 * 2**20


def test_gradients_without_an_optimizer_accumulate() -> None:
    torch.manual_seed(0)
    captured, plain = make_both(feed_forward().cuda(), lambda n: graphs.capture(n, compute_loss))
    num_calls = [0]

    def update(step: CapturedStep) -> None:
        num_calls[0] += 1
        if num_calls[0] % 2 == 0:
            with torch.no_grad():
                for parameter in step.step.net.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(0.05 * parameter.grad)
                    parameter.grad = None

    assert_equal_training(captured, plain, [make_data(i) for i in range(20)], update)
    assert count_graphs(captured) == 2


def test_validation_between_steps_has_no_effect() -> None:
    torch.manual_seed(0)
    captured, plain = make_both(normed().cuda(), lambda n: graphs.capture(n, compute_loss, sgd(n)))

    def validate(step: CapturedStep) -> None:
        net = step.step.net
        net.eval()
        with torch.no_grad():
            net(make_data(99)[0])
        reset_net(net)
        net.train()

    assert_equal_training(captured, plain, [make_data(i) for i in range(20)], validate)
    assert count_graphs(captured) == 1


class Reading(nn.Module):
    """A layer that waits for the GPU."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.amax().item()


class Synchronizing(nn.Module):
    """A layer that waits for the GPU in a way that a rehearsal does not detect."""

    def forward(self, x: Tensor) -> Tensor:
        torch.cuda.synchronize()
        return x + torch.rand_like(x)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            Reading,
            r"1 \(Reading\), test_captured_steps.py:\d+, `return x \* x.amax\(\).item\(\)`, waits for the device",
        ),
        (
            Synchronizing,
            r"1 \(Synchronizing\), test_captured_steps.py:\d+, `torch.cuda.synchronize\(\)`, cannot be rec",
        ),
    ],
)
def test_uncapturable_steps_run_in_python(module: Callable[[], nn.Module], message: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(37, 32), module(), LIF(), nn.Linear(32, 10)).cuda()
    captured, plain = make_both(net, lambda n: graphs.capture(n, compute_loss, sgd(n)))
    with pytest.warns(CaptureWarning, match=message):
        assert_equal_training(captured, plain, [make_data(i) for i in range(8)])
    assert count_graphs(captured) == 0
    # A failed capture has no lasting effects: the next capture works, and the generator can be used.
    torch.manual_seed(0)
    captured, plain = make_both(feed_forward().cuda(), lambda n: graphs.capture(n, compute_loss, sgd(n)))
    assert_equal_training(captured, plain, [make_data(i) for i in range(8)])
    assert count_graphs(captured) == 1


def test_network_can_move_to_the_gpu_later() -> None:
    net = feed_forward()
    captured = graphs.capture(net, compute_loss, torch.optim.SGD(net.parameters(), lr=0.1))
    x, y = make_data(0)
    captured(x.cpu(), y.cpu())
    net.cuda()
    captured.step.optimizer.state.clear()  # type: ignore[union-attr]
    for i in range(5):
        captured(*make_data(i))
    assert count_graphs(captured) == 1


def test_explain_reports_kernels_on_a_gpu() -> None:
    report = explain(feed_forward().cuda(), make_data(0)[0])
    assert report.verdict.startswith("compiled kernels run all 2 neurons")
    assert report.seconds > 0
    assert {layer.backend for layer in report.layers if layer.kind in ("LIF", "PLIF")} == {"triton"}
    assert report.bytes_kept > 6 * 48 * 128 * 4
