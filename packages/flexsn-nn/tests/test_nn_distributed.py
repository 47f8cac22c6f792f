"""Two processes that share the work of one: their results equal those of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import distributed_work as work
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flexsn_nn.functional import reset_net

pytestmark = [
    pytest.mark.skipif(not dist.is_available() or sys.platform == "win32", reason="torch without gloo"),
    pytest.mark.xdist_group("distributed"),
]


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, two_gpus])])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device of the two processes, and of the reference process."""
    kind: str = request.param
    torch.set_default_device(kind)
    yield kind
    torch.set_default_device(None)  # With "cpu", a device mode would remain active, and compilers would trace it.


def run_in_two_processes(folder: Path, device: str, scenarios: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    """Returns the results of each process, with the names of scenarios as keys."""
    names = [scenario.__name__ for scenario in scenarios]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with ExitStack() as stack:
        logs = [stack.enter_context((folder / f"{rank}.txt").open("w+")) for rank in range(2)]
        processes = [
            subprocess.Popen(
                [sys.executable, work.__file__, str(rank), str(folder), device, *names], env=environment, stderr=file
            )
            for rank, file in enumerate(logs)
        ]
        for process in processes:  # An error in one process ends both, because each waits for the other.
            stack.callback(process.wait)
            stack.callback(process.kill)
        for process, file in zip(processes, logs, strict=True):
            assert process.wait() == 0, Path(file.name).read_text()
    return [torch.load(folder / f"{rank}.pt", map_location=device) for rank in range(2)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, device: str) -> list[dict[str, Any]]:
    return run_in_two_processes(tmp_path_factory.mktemp(f"distributed_{device}"), device, work.SCENARIOS)


def assert_close(results: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(results) == len(expected) > 0
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_data_parallel_training_equals_one_process(results: list[dict[str, Any]]) -> None:
    expected = work.train(work.network(), work.make_batch())
    assert all(not torch.equal(a, b) for a, b in zip(expected, work.parameters(work.network()), strict=True))
    for rank_results in results:
        assert_close(rank_results["ddp"], expected)


def test_random_values_of_rows_do_not_depend_on_the_process(results: list[dict[str, Any]]) -> None:
    """Checks the parameters after training with random neurons against those of one process."""
    expected = work.train(work.make_noisy_network(0), work.make_batch())
    for rank_results in results:
        assert_close(rank_results["noise_of_rows"], expected)


def test_norms_over_processes_equal_one_norm(results: list[dict[str, Any]]) -> None:
    net = work.make_normalised(torch.nn.BatchNorm1d)
    x = work.random(3, 5, 8, 6, 2).requires_grad_()
    output = net(x)
    (gradient,) = torch.autograd.grad(output.square().sum(), x)
    outputs, gradients, buffers = zip(*(rank_results["norms"] for rank_results in results), strict=True)
    assert gradient.abs().max() > 0
    assert_close([torch.cat(outputs, 1), torch.cat(gradients, 1)], [output, gradient])
    for rank_buffers in buffers:
        assert_close(rank_buffers, list(net.buffers()))


def test_fully_sharded_training_equals_one_process(results: list[dict[str, Any]]) -> None:
    expected = work.train(work.network(), work.make_batch())
    for rank_results in results:
        trained, loaded = rank_results["fsdp"]
        assert_close(trained, expected)
        assert_close(loaded, expected)


def test_an_old_checkpoint_loads_before_and_after_sharding(results: list[dict[str, Any]]) -> None:
    for rank_results in results:
        before, after, expected = rank_results["fsdp_from_an_old_checkpoint"]
        assert_close(before, expected)
        assert_close(after, expected)


def test_a_neuron_between_tensor_parallel_layers_equals_one_process(results: list[dict[str, Any]]) -> None:
    net = work.network()
    out = net(work.make_batch())
    out.sum((0, 2)).mean().backward()
    for rank_results in results:
        spikes, gradients = rank_results["tensor_parallel"]
        assert torch.equal(spikes, out)
        assert_close(gradients, work.gradients(net))


@pytest.mark.long
def test_compiled_distributed_training_equals_one_process(tmp_path: Path, device: str) -> None:
    """Checks data-parallel, fully sharded, and tensor-parallel networks."""
    trained = work.train(work.network(), work.make_batch())
    spikes, gradients = work.run_once(work.network())
    assert spikes.sum() > 0
    for rank_results in run_in_two_processes(tmp_path, device, work.COMPILED):
        assert_close(rank_results["compiled_ddp"], trained)
        assert_close(rank_results["compiled_fsdp"], trained)
        assert torch.equal(rank_results["compiled_tensor_parallel"][0], spikes)
        assert_close(rank_results["compiled_tensor_parallel"][1], gradients)


def test_a_sharded_step_equals_one_process(results: list[dict[str, Any]]) -> None:
    neuron = work.make_adaptive()
    inputs = [work.random(i, 4, 3, 6, 5).requires_grad_() for i in range(2)]
    outputs = [neuron(x) for x in inputs]
    loss = sum((out * (i + 1)).sum() for i, out in enumerate(outputs)) + neuron.states[1].square().sum()
    loss.backward()
    expected = [*outputs, *neuron.states, *(x.grad for x in inputs), *work.gradients(neuron)]
    assert outputs[0].sum() > 0
    for rank_results in results:
        assert len(rank_results["sharded"]) == 10
        for results_of_case in rank_results["sharded"]:
            assert_close(results_of_case, expected)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("time", "TimeShards"),
        ("partial", "not linear"),
        ("mixed", "Make all of them DTensors"),
        ("differently", "along different dimensions of the step"),
        ("one_replicated", "input 1 has the placements"),
        ("not_by_element", "only if it works element by element"),
        ("captured", "shape [1] that requires grad"),
        ("state", "state 0 is a plain tensor"),
    ],
)
def test_steps_that_mix_elements_of_several_processes_are_refused(
    results: list[dict[str, Any]], call: str, words: str
) -> None:
    for rank_results in results:
        assert rank_results["refused"][call].startswith("PlacementError: ")
        assert words in rank_results["refused"][call]


def test_parts_of_the_time_equal_one_sequence(results: list[dict[str, Any]]) -> None:
    net, x = work.network(), work.make_batch(7).requires_grad_()
    out = net(x)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    exact, truncated, without = zip(*(rank_results["time_shards"] for rank_results in results), strict=True)
    for parts in (exact, truncated):
        assert torch.equal(torch.cat([part[0] for part in parts]), out)
    assert torch.equal(torch.cat(without), out)
    assert x.grad is not None
    torch.testing.assert_close(torch.cat([part[1] for part in exact]), x.grad)
    assert_close([a + b for a, b in zip(exact[0][2], exact[1][2], strict=True)], work.gradients(net))
    # The last part has the full gradient of its own steps. The first part receives no gradient from later steps.
    assert torch.equal(truncated[1][1], exact[1][1])
    assert not torch.equal(truncated[0][1], exact[0][1])


def test_layers_with_a_state_continue_in_the_next_part(results: list[dict[str, Any]]) -> None:
    net, x = work.Layers(), work.make_batch(7).requires_grad_()
    out = net(x)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    exact, truncated = zip(*(rank_results["time_shards_of_layers"] for rank_results in results), strict=True)
    for parts in (exact, truncated):
        assert_close([torch.cat([part[0] for part in parts])], [out])
    assert x.grad is not None
    assert_close([torch.cat([part[1] for part in exact])], [x.grad])
    assert_close([a + b for a, b in zip(exact[0][2], exact[1][2], strict=True)], work.gradients(net))
    assert_close([truncated[1][1]], [exact[1][1]])
    assert not torch.equal(truncated[0][1], exact[0][1])


def test_a_state_without_a_gradient_does_not_block_a_process(results: list[dict[str, Any]]) -> None:
    assert all(len(rank_results["time_shards_without_a_way_back"]) == 2 for rank_results in results)


def test_micro_batches_are_independent(results: list[dict[str, Any]]) -> None:
    net = work.network()
    reset_net(net)
    out = net(work.make_batch()).transpose(0, 1)
    loss = (out * torch.linspace(-1, 1, 8 * 5 * 3).view(8, 5, 3)).sum()
    loss.backward()
    first_gradients, (last_gradients, last_loss) = (result["pipeline"] for result in results)
    torch.testing.assert_close(last_loss, loss.detach())
    # The schedule averages over the four micro-batches.
    assert_close([4 * gradient for gradient in (*first_gradients, *last_gradients)], work.gradients(net))
