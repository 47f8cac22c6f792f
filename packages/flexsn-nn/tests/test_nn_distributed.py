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


def found_by_two(folder: Path, device: str, scenarios: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    """Returns the results of each process, with the names of scenarios as keys."""
    names = [scenario.__name__ for scenario in scenarios]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with ExitStack() as stack:
        said = [stack.enter_context((folder / f"{rank}.txt").open("w+")) for rank in range(2)]
        processes = [
            subprocess.Popen(
                [sys.executable, work.__file__, str(rank), str(folder), device, *names], env=environment, stderr=file
            )
            for rank, file in enumerate(said)
        ]
        for process in processes:  # An error in one process ends both, because each waits for the other.
            stack.callback(process.wait)
            stack.callback(process.kill)
        for process, file in zip(processes, said, strict=True):
            assert process.wait() == 0, Path(file.name).read_text()
    return [torch.load(folder / f"{rank}.pt", map_location=device) for rank in range(2)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, device: str) -> list[dict[str, Any]]:
    return found_by_two(tmp_path_factory.mktemp(f"distributed_{device}"), device, work.SCENARIOS)


def assert_close(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    assert len(got) == len(wanted) > 0
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_data_parallel(results: list[dict[str, Any]]) -> None:
    wanted = work.train(work.network(), work.batch())
    assert all(not torch.equal(a, b) for a, b in zip(wanted, work.parameters(work.network()), strict=True))
    for found in results:
        assert_close(found["ddp"], wanted)


def test_random_numbers_of_rows(results: list[dict[str, Any]]) -> None:
    """Checks the parameters after training with random neurons against those of one process."""
    wanted = work.train(work.noisy_network(0), work.batch())
    for found in results:
        assert_close(found["noise_of_rows"], wanted)


def test_norms_over_processes(results: list[dict[str, Any]]) -> None:
    net = work.normalised(torch.nn.BatchNorm1d)
    x = work.random(3, 5, 8, 6, 2).requires_grad_()
    output = net(x)
    (gradient,) = torch.autograd.grad(output.square().sum(), x)
    outputs, gradients, buffers = zip(*(found["norms"] for found in results), strict=True)
    assert gradient.abs().max() > 0
    assert_close([torch.cat(outputs, 1), torch.cat(gradients, 1)], [output, gradient])
    for found in buffers:
        assert_close(found, list(net.buffers()))


def test_fully_sharded(results: list[dict[str, Any]]) -> None:
    wanted = work.train(work.network(), work.batch())
    for found in results:
        trained, loaded = found["fsdp"]
        assert_close(trained, wanted)
        assert_close(loaded, wanted)


def test_an_old_checkpoint_before_and_after_sharding(results: list[dict[str, Any]]) -> None:
    for found in results:
        before, after, wanted = found["fsdp_from_an_old_checkpoint"]
        assert_close(before, wanted)
        assert_close(after, wanted)


def test_between_tensor_parallel_layers(results: list[dict[str, Any]]) -> None:
    net = work.network()
    out = net(work.batch())
    out.sum((0, 2)).mean().backward()
    for found in results:
        spikes, gradients = found["tensor_parallel"]
        assert torch.equal(spikes, out)
        assert_close(gradients, work.gradients(net))


@pytest.mark.long
def test_under_torch_compile(tmp_path: Path, device: str) -> None:
    """Checks data-parallel, fully sharded, and tensor-parallel networks."""
    trained = work.train(work.network(), work.batch())
    spikes, gradients = work.run_once(work.network())
    assert spikes.sum() > 0
    for found in found_by_two(tmp_path, device, work.COMPILED):
        assert_close(found["compiled_ddp"], trained)
        assert_close(found["compiled_fsdp"], trained)
        assert torch.equal(found["compiled_tensor_parallel"][0], spikes)
        assert_close(found["compiled_tensor_parallel"][1], gradients)


def test_a_sharded_step(results: list[dict[str, Any]]) -> None:
    neuron = work.adaptive()
    inputs = [work.random(i, 4, 3, 6, 5).requires_grad_() for i in range(2)]
    outputs = [neuron(x) for x in inputs]
    loss = sum((out * (i + 1)).sum() for i, out in enumerate(outputs)) + neuron.states[1].square().sum()
    loss.backward()
    wanted = [*outputs, *neuron.states, *(x.grad for x in inputs), *work.gradients(neuron)]
    assert outputs[0].sum() > 0
    for found in results:
        assert len(found["sharded"]) == 10
        for got in found["sharded"]:
            assert_close(got, wanted)


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
    for found in results:
        assert found["refused"][call].startswith("PlacementError: ")
        assert words in found["refused"][call]


def test_parts_of_the_time_equal_one_sequence(results: list[dict[str, Any]]) -> None:
    net, x = work.network(), work.batch(7).requires_grad_()
    out = net(x)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    exact, truncated, without = zip(*(found["time_shards"] for found in results), strict=True)
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
    net, x = work.Layers(), work.batch(7).requires_grad_()
    out = net(x)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    exact, truncated = zip(*(found["time_shards_of_layers"] for found in results), strict=True)
    for parts in (exact, truncated):
        assert_close([torch.cat([part[0] for part in parts])], [out])
    assert x.grad is not None
    assert_close([torch.cat([part[1] for part in exact])], [x.grad])
    assert_close([a + b for a, b in zip(exact[0][2], exact[1][2], strict=True)], work.gradients(net))
    assert_close([truncated[1][1]], [exact[1][1]])
    assert not torch.equal(truncated[0][1], exact[0][1])


def test_a_state_without_a_gradient_does_not_block_a_process(results: list[dict[str, Any]]) -> None:
    assert all(len(found["time_shards_without_a_way_back"]) == 2 for found in results)


def test_micro_batches_are_independent(results: list[dict[str, Any]]) -> None:
    net = work.network()
    reset_net(net)
    out = net(work.batch()).transpose(0, 1)
    loss = (out * torch.linspace(-1, 1, 8 * 5 * 3).view(8, 5, 3)).sum()
    loss.backward()
    first, (last, found) = (result["pipeline"] for result in results)
    torch.testing.assert_close(found, loss.detach())
    # The schedule averages over the four micro-batches.
    assert_close([4 * gradient for gradient in (*first, *last)], work.gradients(net))
