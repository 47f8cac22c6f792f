"""Captured steps without a GPU: kinds of calls, memory of replays, changes between steps, and runs in Python."""

from __future__ import annotations

import argparse
import copy
import inspect
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_operations import OperationsRecorder
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from flexsn_nn import (
    ALIF,
    IF,
    KLIF,
    LIF,
    PLIF,
    RLIF,
    CaptureWarning,
    Leaky,
    Recurrent,
    SlidingPSN,
    StochasticLIF,
    exact_products,
    graphs,
    spike_pooling,
)
from flexsn_nn.errors import ParameterError, RangeWarning
from flexsn_nn.exact._exchange import SpikeExchange
from flexsn_nn.functional import get_states, neurons, reset_net, set_backend
from flexsn_nn.graphs import CapturedStep, _capture, _watch
from flexsn_nn.graphs._lines import line_of_error, names_of
from flexsn_nn.graphs._obstacles import why_update_eager
from flexsn_nn.graphs._watch import StepWatch
from flexsn_nn.layer import Delay, SharedDropout
from flexsn_nn.monitor import RateMonitor

STEPS = 12


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> OperationsRecorder:
    operations = OperationsRecorder()
    monkeypatch.setattr(_capture, "recorder_for", lambda net, generators: (operations, ""))
    return operations


def make_network(neuron: Callable[[], nn.Module] = LIF, *others: nn.Module) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), *others, neuron(), nn.Linear(16, 3))
    set_backend(net, "torch")
    return net


def compute_loss(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.mean(0), labels)


def make_batch(seed: int, size: int = 5, steps: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.rand(steps, size, 6, generator=generator)
    return x, torch.randint(3, (size,), generator=generator)


def make_sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def make_adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.01), fused=True)


def copy_values(net: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[Tensor]:
    tensors = [*net.parameters(), *net.buffers()]
    if optimizer is not None:
        tensors += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return [value.detach().clone() for value in tensors]


def assert_equal(results: list[Tensor], expected: list[Tensor]) -> None:
    assert len(results) == len(expected)
    for a, b in zip(results, expected, strict=True):
        assert torch.equal(a, b)


def make_both(net: nn.Module, make: Callable[[nn.Module], CapturedStep]) -> tuple[Any, Any, Any]:
    """Returns a captured step, an equal step without a graph, and the network of the step without a graph."""
    twin = copy.deepcopy(net)
    return make(net), make(twin).step.run, twin


def compare(captured: CapturedStep, plain: Any, count: int, after: Callable[[int], object] = lambda i: None) -> None:
    """Trains with both steps and compares their losses."""
    for i in range(count):
        x, y = make_batch(i)
        assert torch.equal(captured(x, y), plain(x, (y,))), i
        after(i)


def make_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(16), nn.Unflatten(0, (4, -1)))


@pytest.mark.parametrize("make_optimizer", [make_sgd, make_adam])
@pytest.mark.parametrize("states", graphs.STATES)
def test_captured_steps_equal_steps_without_a_graph(
    recorder: OperationsRecorder, make_optimizer: Any, states: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_capture, "why_update_eager", lambda step: None)
    net = make_network(LIF, make_norm(), nn.Dropout(0.2))
    captured, plain, twin = make_both(
        net, lambda n: graphs.capture(n, compute_loss, make_optimizer(n), states=states, max_norm=1.0)
    )
    torch.manual_seed(1)
    expected = [plain(x, (y,)) for x, y in map(make_batch, range(STEPS))]
    torch.manual_seed(1)
    losses = [captured(x, y) for x, y in map(make_batch, range(STEPS))]
    assert recorder.recorded == 1
    assert recorder.replayed >= STEPS - 3
    assert_equal(losses, expected)
    assert_equal(copy_values(net), copy_values(twin))
    for (_, ours), (_, theirs) in zip(neurons(net), neurons(twin), strict=True):
        assert_equal(ours.states, theirs.states)
    assert_equal([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])


def test_each_shape_has_a_graph_and_the_least_recently_used_graph_is_dropped(recorder: OperationsRecorder) -> None:
    net = make_network()
    captured, plain, _ = make_both(net, lambda n: graphs.capture(n, compute_loss, make_sgd(n), max_graphs=2))
    sizes = [5, 5, 5, 3, 3, 5, 3, 5]
    losses = [captured(*make_batch(i, size)) for i, size in enumerate(sizes)]
    assert recorder.recorded == 2
    assert_equal(losses, [plain(x, (y,)) for x, y in (make_batch(i, size) for i, size in enumerate(sizes))])
    captured(*make_batch(0, 5, steps=2))  # The other number of steps makes a third kind of call.
    captured(*make_batch(0, 5))  # The graph of size 3 was dropped, and the graph of size 5 was not.
    assert recorder.recorded == 2
    captured(*make_batch(0, 3))
    captured(*make_batch(0, 3))
    assert recorder.recorded == 3


def test_a_replay_does_not_overwrite_earlier_results(recorder: OperationsRecorder) -> None:
    captured = graphs.capture(
        make_network(), lambda out, y: (compute_loss(out, y), {"out": out}), make_sgd(make_network())
    )
    results = [captured(*make_batch(i)) for i in range(6)]
    assert len({loss.item() for loss, _ in results}) == 6
    assert results[4][1]["out"].data_ptr() != results[5][1]["out"].data_ptr()
    assert not results[5][0].requires_grad


def test_gradients_accumulate_without_an_optimizer(recorder: OperationsRecorder) -> None:
    net = make_network()
    captured, plain, twin = make_both(net, lambda n: graphs.capture(n, compute_loss))
    for i in range(12):
        captured(*make_batch(i))
        plain(make_batch(i)[0], (make_batch(i)[1],))
        for a, b in zip(net.parameters(), twin.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
        if i % 2:
            net.zero_grad()
            twin.zero_grad()
    assert recorder.recorded == 2


def test_counts_and_state_sequences_are_those_of_the_last_step(recorder: OperationsRecorder) -> None:
    net = make_network()
    neuron = net[1]
    neuron.count_spikes = neuron.store_state_seqs = True
    captured, plain, twin = make_both(net, lambda n: graphs.capture(n, compute_loss, make_sgd(n)))
    for i in range(6):
        captured(*make_batch(i))
        plain(make_batch(i)[0], (make_batch(i)[1],))
        assert torch.equal(neuron.spike_counts, twin[1].spike_counts)
        assert torch.equal(neuron.state_seqs[0], twin[1].state_seqs[0])
    assert recorder.replayed


def test_a_replay_does_not_overwrite_states_of_earlier_steps(recorder: OperationsRecorder) -> None:
    net = make_network()
    captured, plain, twin = make_both(net, lambda n: graphs.capture(n, compute_loss, make_sgd(n), states="carry"))
    for i in range(8):
        states = list(net[1].states)
        copies = [state.clone() for state in states]
        assert torch.equal(captured(*make_batch(i)), plain(make_batch(i)[0], (make_batch(i)[1],)))
        assert_equal(states, copies)
        if i == 5:  # A new sequence begins here.
            reset_net(net)
            reset_net(twin)
    assert recorder.recorded


CHANGES: dict[str, Callable[[Any, Any], object]] = {
    "a parameter replaced": lambda net, optimizer: setattr(net[0], "bias", nn.Parameter(torch.ones(16))),
    "memory replaced": lambda net, optimizer: setattr(net[0].bias, "data", torch.ones(16)),
    "a number of a neuron": lambda net, optimizer: setattr(net[1], "tau", 3.0),
    "a rate": lambda net, optimizer: optimizer.param_groups[0].update(lr=0.5),
    "a module": lambda net, optimizer: net.__setitem__(1, IF(backend="torch")),
    "a frozen layer": lambda net, optimizer: net[0].requires_grad_(False),
    "evaluation": lambda net, optimizer: net.eval(),
    "sequences of states": lambda net, optimizer: setattr(net[1], "store_state_seqs", True),
    "the step mode": lambda net, optimizer: setattr(net[1], "detach_reset", True),
    "the optimizer's state": lambda net, optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    "a global": lambda net, optimizer: globals().update(SCALE=2.0),
    "double precision": lambda net, optimizer: net.double(),
}
SCALE = 1.0


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_causes_a_new_recording(
    recorder: OperationsRecorder, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    net = make_network(LIF, nn.Dropout(0.2))
    net[1], net[2] = net[2], net[1]  # The order is now linear layer, neuron, dropout, linear layer.
    twin = copy.deepcopy(net)

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        return SCALE * compute_loss(output, labels)

    optimizer, twin_optimizer = make_sgd(net), make_sgd(twin)
    captured, plain = graphs.capture(net, loss, optimizer), graphs.capture(twin, loss, twin_optimizer).step.run

    def train(count: int) -> None:
        for i in range(count):
            x, y = (
                t.double() if t.is_floating_point() and net[0].weight.dtype == torch.float64 else t
                for t in make_batch(i)
            )
            torch.manual_seed(i)
            expected = plain(x, (y,))
            torch.manual_seed(i)
            assert torch.equal(captured(x, y), expected), i

    train(5)
    num_recorded = recorder.recorded
    assert num_recorded == 1
    CHANGES[change](net, optimizer)
    CHANGES[change](twin, twin_optimizer)
    train(5)
    assert recorder.recorded == num_recorded + 1
    if change != "double precision":  # The arguments also become double precision.
        assert "recorded again" in captured.explain()


def hooked(net: Any) -> None:
    net[1].register_forward_hook(lambda module, inputs, output: print(output.mean()))


def parameter_hooked(net: Any) -> None:
    net[0].weight.register_hook(lambda gradient: gradient * 2)


class Counting(nn.Module):
    """A layer that assigns an attribute in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class Logging(nn.Module):
    """A layer that appends to a list in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(len(self.log))
        return x * len(self.log)


class Drawing(nn.Module):
    """A layer that draws Python's random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


class Reading(nn.Module):
    """A layer that waits for the device."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.max().item()


OBSTACLES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a counter": (Counting, r"the step itself changes net\.1\.calls"),
    "a list": (Logging, r"the step itself changes net\.1\.log"),
    "Python's random numbers": (Drawing, "the step draws from random"),
    "a number of the device": (
        Reading,
        r"1 \(Reading\), .*, cannot be recorded: RuntimeError: operation not permitted",
    ),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_obstacles_run_in_python_and_are_reported(recorder: OperationsRecorder, obstacle: str) -> None:
    make, words = OBSTACLES[obstacle]
    net = make_network(LIF, make())
    captured, plain, twin = make_both(net, lambda n: graphs.capture(n, compute_loss, make_sgd(n)))
    random.seed(0)
    expected = [plain(x, (y,)) for x, y in map(make_batch, range(6))]
    random.seed(0)
    with pytest.warns(CaptureWarning, match=words) as caught:
        losses = [captured(x, y) for x, y in map(make_batch, range(6))]
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert recorder.replayed == 0
    assert_equal(losses, expected)
    assert_equal(copy_values(net), copy_values(twin))
    assert "in Python: " in captured.explain()


@pytest.mark.parametrize("hook", [hooked, parameter_hooked])
def test_a_step_with_hooks_runs_in_python(recorder: OperationsRecorder, hook: Callable[[nn.Module], None]) -> None:
    net = make_network()
    captured, plain, twin = make_both(net, lambda n: graphs.capture(n, compute_loss, make_sgd(n)))
    compare(captured, plain, 4)
    assert recorder.recorded == 1
    hook(net)
    hook(twin)
    with pytest.warns(CaptureWarning, match=r"has a (forward )?hook, \w*ooked.<locals>.<lambda> \(test_nn_graphs.py:"):
        compare(captured, plain, 4)
    assert recorder.recorded == 1


def test_a_step_with_monitors_runs_in_python(recorder: OperationsRecorder) -> None:
    net = make_network()
    captured = graphs.capture(net, compute_loss, make_sgd(net))
    for i in range(4):
        captured(*make_batch(i))
    with RateMonitor(net) as monitor:
        with pytest.warns(CaptureWarning, match="1 .LIF. has a forward hook of a monitor"):
            captured(*make_batch(0))
        rate = monitor.rates()["1"]
        captured(make_batch(0)[0] * 0, make_batch(0)[1])
        assert monitor.rates()["1"] < rate
    replayed = recorder.replayed
    captured(*make_batch(0))
    assert recorder.replayed == replayed + 1


def test_a_learning_rate_that_changes_often_is_reported(recorder: OperationsRecorder) -> None:
    net = make_network()
    captured, plain, twin = make_both(net, lambda n: graphs.capture(n, compute_loss, make_sgd(n)))
    twin_optimizer = plain.__self__.optimizer
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (captured.step.optimizer, twin_optimizer)]

    def schedule(i: int) -> None:
        for scheduler in schedulers:
            scheduler.step()

    with pytest.warns(CaptureWarning, match=r"optimizer.param_groups\[0\]\['lr'\] changes often.*lr=torch.tensor"):
        compare(captured, plain, 12, schedule)
    assert recorder.replayed >= 5
    assert_equal(copy_values(net, captured.step.optimizer), copy_values(twin, twin_optimizer))


def test_an_optimizer_that_is_not_capturable_runs_in_python(recorder: OperationsRecorder) -> None:
    net = make_network()
    captured, plain, twin = make_both(
        net, lambda n: graphs.capture(n, compute_loss, torch.optim.AdamW(n.parameters(), 0.01))
    )
    with pytest.warns(CaptureWarning, match=r"AdamW counts its steps on the CPU: give AdamW\(.*capturable=True\)"):
        compare(captured, plain, 8)
    assert recorder.replayed >= 5
    assert_equal(copy_values(net, captured.step.optimizer), copy_values(twin, plain.__self__.optimizer))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.Adagrad(p), "a graph might not contain all of Adagrad"),
        (lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1)), r"give SGD\(\.\.\., fused=True\)"),
        (lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1), fused=True), None),
        (lambda p: torch.optim.Adam(p, capturable=True), None),
        (lambda p: torch.optim.NAdam(p, capturable=False), "NAdam counts its steps on the CPU"),
    ],
)
def test_optimizers_that_cannot_be_captured_have_a_reason(make: Any, words: str | None) -> None:
    net = make_network()
    reason = why_update_eager(graphs.capture(net, compute_loss, make(net.parameters())).step)
    if words is None:
        assert reason is None
    else:
        assert reason is not None
        assert re.search(words, reason)


def test_a_gradient_scaler_scales_captured_steps(recorder: OperationsRecorder) -> None:
    net = make_network()

    def make(n: nn.Module) -> CapturedStep:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        return graphs.capture(n, compute_loss, make_sgd(n), scaler=scaler, max_norm=0.5)

    captured, plain, twin = make_both(net, make)
    with pytest.warns(CaptureWarning, match=r"the step of SGD: give SGD\(\.\.\., fused=True\)"):
        compare(captured, plain, 9)
    assert recorder.replayed >= 6
    assert_equal(copy_values(net), copy_values(twin))
    assert captured.step.scaler.get_scale() == plain.__self__.scaler.get_scale() > 4.0


def test_averaging_and_validation_between_steps_cause_no_recording(recorder: OperationsRecorder) -> None:
    net = make_network(LIF, make_norm())
    captured, plain, twin = make_both(net, lambda n: graphs.capture(n, compute_loss, make_sgd(n)))
    averages = [torch.optim.swa_utils.AveragedModel(n, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for n in (net, twin)]

    def validate(i: int) -> None:
        for average, n in zip(averages, (net, twin), strict=True):
            average.update_parameters(n)
            if i % 3 == 0:
                n.eval()
                with torch.no_grad():
                    n(make_batch(i)[0])
                reset_net(n)
                n.train()

    compare(captured, plain, 10, validate)
    assert recorder.recorded == 1
    assert_equal(copy_values(averages[0]), copy_values(averages[1]))


def test_arguments_that_a_graph_cannot_contain_are_reported(recorder: OperationsRecorder) -> None:
    net = make_network()
    captured = graphs.capture(net, lambda out, y, scale: scale(compute_loss(out, y)), make_sgd(net))
    with pytest.warns(CaptureWarning, match="an argument is a function"):
        captured(*make_batch(0), lambda loss: 2 * loss)
    captured(*make_batch(1), lambda loss: 2 * loss)
    assert recorder.recorded == 0


def test_scalar_arguments_are_part_of_the_kind_of_a_call(recorder: OperationsRecorder) -> None:
    net = make_network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    captured = graphs.capture(net, lambda out, y, scale: scale * compute_loss(out, y), optimizer)
    losses = [captured(*make_batch(0), scale).item() for scale in (1, 1, 1, 2, 2, 2, 1)]
    assert losses[3] == pytest.approx(2 * losses[0])
    assert losses[6] == losses[0]
    assert recorder.recorded == 2


def test_steps_on_the_cpu_run_in_python() -> None:
    net = make_network()
    captured, plain, twin = make_both(net, lambda n: graphs.capture(n, compute_loss, make_sgd(n)))
    for i in range(3):
        assert torch.equal(captured(*make_batch(i)), plain(make_batch(i)[0], (make_batch(i)[1],)))
    assert_equal(copy_values(net), copy_values(twin))
    assert captured.explain() == "plain calls: the network is on cpu, where steps are plain calls"


def test_a_captured_step_equals_a_training_loop() -> None:
    net = make_network(LIF, make_norm(), nn.Dropout(0.2))
    twin = copy.deepcopy(net)
    optimizer, twin_optimizer = make_sgd(net), make_sgd(twin)
    step = graphs.capture(net, compute_loss, optimizer, max_norm=1.0)
    for i in range(4):
        x, y = make_batch(i)
        torch.manual_seed(i)
        captured_loss = step(x, y)
        torch.manual_seed(i)
        reset_net(twin)
        loss = compute_loss(twin(x), y)
        twin_optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        twin_optimizer.step()
        assert torch.equal(captured_loss, loss.detach())
    assert_equal(copy_values(net, optimizer), copy_values(twin, twin_optimizer))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"states": "carried"}, "carry"),
        ({"max_norm": 1.0}, "max_norm needs an optimizer"),
        ({"scaler": torch.amp.GradScaler("cpu")}, "scaler needs an optimizer"),
        ({"max_graphs": 0}, "max_graphs"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        graphs.capture(make_network(), compute_loss, **options)


def test_a_loss_that_is_not_a_tensor_is_refused() -> None:
    with pytest.raises(ParameterError, match="the loss function returned a float"):
        graphs.capture(make_network(), lambda out, y: 1.0)(*make_batch(0))


def test_an_error_names_the_users_line() -> None:
    net = make_network(LIF, Failing())
    with pytest.raises(ZeroDivisionError) as caught:
        graphs.capture(net, compute_loss)(*make_batch(0))
    line = line_of_error(caught.value, names_of(net))
    assert re.fullmatch(r"1 \(Failing\), test_nn_graphs.py:\d+, `return x / \(1 // 0\)`,", line)


class Failing(nn.Module):
    """A layer that raises an error in its own code."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (1 // 0)


def test_more_kinds_of_calls_than_graphs_are_reported(recorder: OperationsRecorder) -> None:
    net = make_network()
    captured = graphs.capture(net, compute_loss, make_sgd(net), max_graphs=2)

    def alternate() -> None:
        for i in range(14):
            captured(*make_batch(i, 1 + i % 5))

    with pytest.warns(CaptureWarning, match="more than max_graphs=2 kinds of calls alternate"):
        alternate()
    assert recorder.recorded == 0


def test_data_parallel_networks_are_captured(recorder: OperationsRecorder, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        net, twin = make_network(LIF, make_norm()), make_network(LIF, make_norm())
        wrapped = nn.parallel.DistributedDataParallel(net)
        captured = graphs.capture(wrapped, compute_loss, make_sgd(wrapped))
        plain = graphs.capture(twin, compute_loss, make_sgd(twin)).step.run
        with pytest.warns(CaptureWarning, match="gradients are averaged over processes"):
            compare(captured, plain, 8)
        assert recorder.recorded == 1
        assert_equal(copy_values(net), copy_values(twin))
        with wrapped.no_sync():
            compare(captured, plain, 4)
        assert recorder.recorded == 2
        unused = nn.parallel.DistributedDataParallel(make_network(), find_unused_parameters=True)
        with pytest.warns(CaptureWarning, match="find_unused_parameters=True"):
            graphs.capture(unused, compute_loss, make_sgd(unused))(*make_batch(0))
    finally:
        torch.distributed.destroy_process_group()


def test_states_of_all_layers_are_carried(recorder: OperationsRecorder) -> None:
    net = make_network(ALIF, Delay(1, max_delay=2), SharedDropout(0.3))
    captured, plain, twin = make_both(net, lambda n: graphs.capture(n, compute_loss, make_sgd(n), states="carry"))
    for i in range(8):
        torch.manual_seed(i)
        expected = plain(make_batch(i)[0], (make_batch(i)[1],))
        torch.manual_seed(i)
        assert torch.equal(captured(*make_batch(i)), expected), i
    assert recorder.replayed >= 4
    assert_equal([s for states in get_states(net).values() for s in states],
                 [s for states in get_states(twin).values() for s in states])  # fmt: skip


NEURONS: dict[str, Callable[[], nn.Module]] = {
    "ALIF": ALIF,
    "KLIF": KLIF,
    "PLIF": PLIF,
    "RLIF": lambda: RLIF(16),
    "StochasticLIF": StochasticLIF,
    "SlidingPSN": lambda: SlidingPSN(3),
    "Recurrent": lambda: Recurrent(LIF(), 16),
}


@pytest.mark.long(all_but=["StochasticLIF", "ALIF"])
@pytest.mark.parametrize("name", NEURONS)
def test_calls_of_neurons_change_no_watched_value(name: str, compiler: None) -> None:
    net: Any = nn.Sequential(nn.Linear(6, 16), NEURONS[name](), nn.Linear(16, 3))
    step = graphs.capture(net, compute_loss, make_sgd(net), states="carry").step
    step.run(make_batch(0)[0], (make_batch(0)[1],))
    watch = StepWatch({"net": net, "loss": compute_loss}, torch.device("cpu"))
    for i in range(3):
        step.run(make_batch(i)[0], (make_batch(i)[1],))
    assert watch.changes() == []
    assert watch.holds()
    net[1].step_mode = "s"
    assert not watch.holds()


def test_ranges_are_checked_between_replays(recorder: OperationsRecorder) -> None:
    net = make_network(lambda: Leaky(beta=0.5, learn_beta=True))
    captured = graphs.capture(net, compute_loss, torch.optim.SGD(net[0].parameters(), lr=0.1))
    for i in range(4):
        captured(*make_batch(i))
    net[1].beta.data.fill_(1.5)  # As in a replay, this write does not increase the tensor's version.
    with pytest.warns(RangeWarning, match="has left its range"):
        run_often(captured)
    assert recorder.recorded == 1


def run_often(captured: CapturedStep) -> None:
    for i in range(8):
        captured(*make_batch(i))


def test_attributes_of_classes_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = StepWatch({"net": nn.Sequential(Scaled())}, torch.device("cpu"))
    assert watch.holds()
    monkeypatch.setitem(globals(), "SCALE", 5.0)
    assert watch.changes() == ["SCALE"]
    monkeypatch.undo()
    assert watch.holds()
    monkeypatch.setattr(Scaled, "factor", 2.0)
    assert watch.changes() == ["Scaled.factor"]
    monkeypatch.undo()
    monkeypatch.setattr(Scaled, "forward", lambda self, x: x)
    assert watch.changes() == ["Scaled.forward"]


class Scaled(nn.Module):
    """A module that reads an attribute of its class, and a global variable in another method."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x)

    def scale(self, x: Tensor) -> Tensor:
        return x * self.factor * SCALE


def test_values_reachable_from_functions_are_watched() -> None:
    factor = [1.0]
    options = argparse.Namespace(scale=1.0)

    def inner() -> float:
        return factor[0] * float(options.scale) * SCALE

    watch = StepWatch({"loss": lambda x: x * inner()}, torch.device("cpu"))
    assert watch.holds()
    options.scale = 1.0 + 0.0  # This value is equal, but it is another object.
    assert watch.holds()
    options.scale = 2.0
    assert not watch.holds()
    assert watch.changes() == ["options.scale"]
    options.scale = 1.0
    assert watch.holds()
    factor[0] = 3.0
    assert watch.changes() == ["factor[0]"]
    factor[:] = [1.0, 2.0]
    assert watch.changes() == ["factor"]


def test_caches_of_replaced_forwards_are_not_watched() -> None:
    """Checks that a call with another size or dtype between two steps, as in evaluation, causes no new recording."""
    net = nn.Sequential(nn.MaxPool1d(2), nn.Linear(6, 6), LIF(backend="torch"), nn.Linear(6, 3))
    exact_products(net)
    spike_pooling(net)
    exchange = vars(net[2])["_exchange"] = SpikeExchange(True, True, (net[2],))
    net(torch.rand(4, 5, 12))
    watch = StepWatch({"net": net}, torch.device("cpu"))
    reset_net(net)
    with torch.no_grad():
        net(torch.rand(3, 2, 12).requires_grad_())
        net[0](torch.rand(2, 12))  # This input has two dimensions.
    exchange._zero, exchange._rejected_core = torch.zeros(()), net[2].core
    assert watch.holds()
    forward: Any = net[1].forward
    forward.precision = "high"  # Unlike a cache, the precision changes results.
    assert not watch.holds()


def test_watches_compare_values_of_variables_and_properties_of_tensors() -> None:
    weight, scale = torch.ones(2, 3), 1.0

    def loss(x: Tensor) -> Tensor:
        return x * weight * scale

    watch = StepWatch({"loss": loss}, torch.device("cpu"))
    assert watch.holds()
    scale = 2.0
    assert not watch.holds()
    assert watch.changes() == ["scale"]
    scale = 1.0
    weight.requires_grad_()
    assert not watch.holds()
    weight.requires_grad_(False)
    assert watch.holds()
    weight.t_()
    assert watch.changes() == ["weight"]
    weight.t_()
    weight.add_(1)  # A replay reads the new value.
    assert watch.holds()
    cuda_watch = StepWatch({"loss": loss}, torch.device("cuda"))
    weight.add_(1)  # The tensor is not on the watched device, so a graph would contain the old values.
    assert not cuda_watch.holds()
    assert cuda_watch.changes() == ["weight"]


def test_long_containers_are_compared_by_their_length() -> None:
    words = list(range(20_000))
    watch = StepWatch({"net": argparse.Namespace(words=words)}, torch.device("cpu"))
    words[3] = 5
    assert watch.holds()
    words.append(1)
    assert watch.changes() == ["net.words"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_symbolic_attributes_of_modules_compile() -> None:
    """Checks attributes that Dynamo makes symbolic, as in FSDP. The neurons have different numbers of states."""
    torch._dynamo.reset()
    for make in (LIF, ALIF, LIF):
        neuron, loop = make(), make(backend="torch")
        x = torch.rand(7, 3, 5, requires_grad=True)
        with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
            y = torch.compile(neuron, backend="aot_eager")(x)
        gradients = torch.autograd.grad(y.square().sum(), x)
        expected = torch.autograd.grad(loop(x).square().sum(), x)
        torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize("kind", _watch._RESULTS)
def test_attributes_that_hold_results_exist(kind: type) -> None:
    """Checks that the source of a class, or of its bases and subclasses, sets each attribute that is not watched."""
    classes = {*kind.__mro__, *kind.__subclasses__()}
    modules = {sys.modules[cls.__module__] for cls in classes if cls.__module__.startswith("flexsn_nn")}
    source = "\n".join(map(inspect.getsource, modules))
    assert not {name for name in _watch._RESULTS[kind] if not re.search(rf"\bself\.{name}\b|\"{name}\"", source)}
