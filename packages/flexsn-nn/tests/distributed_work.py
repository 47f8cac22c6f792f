"""Scenarios that `test_nn_distributed.py` runs in two processes. Each scenario returns tensors to compare."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from flexsn_nn import ALIF, LIF, PLIF, FlexSN, OverTime, StochasticLIF, surrogate
from flexsn_nn.distributed import FromReset, TimeShards, time_shard
from flexsn_nn.functional import reset_net
from flexsn_nn.fusion import fuse_norms
from flexsn_nn.layer import Delay, NormNeuron, SharedDropout, Stateful
from flexsn_nn.neuron import SlidingPSN
from flexsn_nn.random import configure

Results = dict[str, Any]
spike = surrogate.ATan()


class Adaptive(nn.Module):
    """A step with one parameter per channel, a buffer, and a learned scalar."""

    offset: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fading = nn.Parameter(torch.linspace(-1, 2, channels)[:, None])
        self.gain = nn.Parameter(torch.tensor([0.7]))
        self.register_buffer("offset", torch.linspace(0, 0.3, channels)[:, None])

    def forward(self, x: Tensor, v: Tensor, a: Tensor) -> tuple[Tensor, ...]:
        h = v + (x * self.gain - v) / 2
        s = spike(h - 0.4 - 0.2 * a - self.offset)
        return s, h * (1 - s), torch.sigmoid(self.fading) * a + s


def make_adaptive(backend: str = "torch") -> FlexSN:
    return FlexSN(Adaptive(6), 1, 2, 1, backend=backend)


def network(backend: str = "auto") -> nn.Sequential:
    """Makes a network that has the same initial weights on all devices."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        net = _network(backend)
    return net.to(torch.get_default_device())


def _network(backend: str) -> nn.Sequential:
    neurons = (
        PLIF(v_threshold=0.3, backend=backend),
        ALIF(v_threshold=0.1, backend=backend),
        LIF(v_threshold=0.05, backend=backend),
    )
    return nn.Sequential(nn.Linear(4, 6), neurons[0], nn.Linear(6, 4), neurons[1], nn.Linear(4, 3), neurons[2])


def random(seed: int, *shape: int) -> Tensor:
    """Draws random values and moves them to the default device. The values are equal on all devices."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return numbers.to(torch.get_default_device())


def make_batch(steps: int = 5) -> Tensor:
    return 2 * random(1, steps, 8, 4)


def parameters(net: nn.Module) -> list[Tensor]:
    return [_full(p.detach()).clone() for p in net.parameters()]


def gradients(net: nn.Module) -> list[Tensor]:
    return [_full(p.grad).clone() for p in net.parameters() if p.grad is not None]


def _full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _placements(tensor: Any) -> object:
    return tensor.placements


def train(net: nn.Module, x: Tensor) -> list[Tensor]:
    """Trains for two steps and returns the parameters."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for _ in range(2):
        reset_net(net)
        optimizer.zero_grad()
        net(x).sum((0, 2)).mean().backward()
        optimizer.step()
    return parameters(net)


def take_half(x: Tensor, rank: int, dim: int = 1) -> Tensor:
    return x.chunk(2, dim)[rank]


# -- scenarios; `mesh` has two processes -----------------------------------------------------------------


def ddp(rank: int, mesh: DeviceMesh, folder: Path) -> Any:
    return train(DistributedDataParallel(network()), take_half(make_batch(), rank))


def make_noisy_network(first_row: int) -> nn.Sequential:
    """Makes a network whose random values begin at the row `first_row` of the batch."""
    net = network()
    net[1] = StochasticLIF(v_threshold=0.3)
    configure(net, seed=3, first_row=first_row)
    return net


def noise_of_rows(rank: int, mesh: DeviceMesh, folder: Path) -> Any:
    part = take_half(make_batch(), rank)
    return train(DistributedDataParallel(make_noisy_network(rank * part.shape[1])), part)


def shard_fully(mesh: DeviceMesh) -> nn.Sequential:
    net = network()
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def fsdp(rank: int, mesh: DeviceMesh, folder: Path) -> Any:
    net = shard_fully(mesh)
    trained = train(net, take_half(make_batch(), rank))
    # The processes write one checkpoint together, and a network that is not sharded reads it.
    save(get_model_state_dict(net), checkpoint_id=folder / "checkpoint")
    fresh = network().state_dict()
    load(fresh, checkpoint_id=folder / "checkpoint")
    return trained, list(fresh.values())


def fsdp_from_an_old_checkpoint(rank: int, mesh: DeviceMesh, folder: Path) -> Any:
    old = {name: value + 0.25 for name, value in network().state_dict().items()}
    old["1.w"] = old["1.w"].reshape(())  # The shape in checkpoints of earlier versions of PLIF.
    net = network()
    net.load_state_dict(old)
    fully_shard(net, mesh=mesh)
    other = network()
    fully_shard(other, mesh=mesh)
    full = {name: value.reshape(1) if value.dim() == 0 else value for name, value in old.items()}
    set_model_state_dict(other, dict(full), options=StateDictOptions(full_state_dict=True))
    return parameters(net), parameters(other), list(full.values())


def make_parallel_linears(mesh: DeviceMesh) -> nn.Sequential:
    """Makes linear layers with neurons in between. The first neuron receives a DTensor, sharded along its features."""
    net = network()
    plan = {
        "0": ColwiseParallel(use_local_output=False),
        "2": RowwiseParallel(input_layouts=Shard(-1), use_local_output=False),
        "4": ColwiseParallel(use_local_output=False, output_layouts=Replicate()),
    }
    parallelize_module(net, mesh, plan)
    return net


def run_once(net: nn.Module) -> tuple[Tensor, list[Tensor]]:
    reset_net(net)
    out = net(make_batch())
    out.sum((0, 2)).mean().backward()
    return _full(out).detach(), gradients(net)


def tensor_parallel(rank: int, mesh: DeviceMesh, folder: Path) -> Any:
    return run_once(make_parallel_linears(mesh))


def compiled_ddp(rank: int, mesh: DeviceMesh, folder: Path) -> Any:
    return train(compile_with_aot(DistributedDataParallel(network())), take_half(make_batch(), rank))


def compiled_fsdp(rank: int, mesh: DeviceMesh, folder: Path) -> Any:
    return train(compile_with_aot(shard_fully(mesh)), take_half(make_batch(), rank))


def compiled_tensor_parallel(rank: int, mesh: DeviceMesh, folder: Path) -> Any:
    return run_once(compile_with_aot(make_parallel_linears(mesh)))


def compile_with_aot(net: nn.Module) -> Any:
    torch._dynamo.reset()
    return torch.compile(net, backend="aot_eager")


def sharded(rank: int, mesh: DeviceMesh, folder: Path) -> Any:
    """Runs each placement twice, with the loop and with kernels. The last placement is gathered during the call."""
    results = []
    placements = ((Shard(1), False), (Shard(2), False), (Shard(-1), False), (Replicate(), False), (Shard(1), True))
    for (placement, gathered), backend in itertools.product(placements, ("torch", "triton")):
        neuron = make_adaptive(backend)
        inputs = [distribute_tensor(random(i, 4, 3, 6, 5), mesh, [placement]) for i in range(2)]
        for x in inputs:
            x.requires_grad_()
        arguments = [x.redistribute(mesh, [Replicate()], async_op=True) if gathered else x for x in inputs]
        outputs = [neuron(x) for x in arguments]
        assert all(isinstance(t, DTensor) for t in (*outputs, *neuron.states))
        assert _placements(outputs[0]) == _placements(arguments[0])
        loss = sum((out * (i + 1)).sum() for i, out in enumerate(outputs)) + neuron.states[1].square().sum()
        loss.backward()
        # torch 2.11 returns replicated gradients if the shards of the two processes have different sizes.
        whole = [(Replicate(),)] if torch.__version__.startswith("2.11") else []
        assert all(_placements(x.grad) in (_placements(x), *whole) for x in inputs)
        results.append(
            [*map(_full, (t.detach() for t in outputs)), *map(_full, (t.detach() for t in neuron.states))]
            + [_full(x.grad) for x in inputs]
            + gradients(neuron)
        )
    return results


def refused(rank: int, mesh: DeviceMesh, folder: Path) -> Any:
    captured = torch.ones(1, requires_grad=True)
    shard = distribute_tensor(torch.randn(4, 4, 6), mesh, [Shard(2)])
    whole = torch.randn(4, 4, 6)
    two_inputs = FlexSN(lambda x, y, v: (x * y + v, x + v), 2, 1, 1)
    calls: dict[str, Callable[[], object]] = {
        "time": lambda: LIF()(distribute_tensor(torch.randn(4, 2), mesh, [Shard(0)])),
        "partial": lambda: LIF()(DTensor.from_local(whole, mesh, [Partial()])),
        "mixed": lambda: two_inputs(shard, whole),
        "differently": lambda: two_inputs(shard, distribute_tensor(whole, mesh, [Shard(1)])),
        "one_replicated": lambda: two_inputs(shard, distribute_tensor(whole, mesh, [Replicate()])),
        "not_by_element": lambda: FlexSN(lambda x, v: (x - x.mean(-1, keepdim=True) + v, v), 1, 1, 1)(shard),
        "captured": lambda: FlexSN(lambda x, v: (x * captured + v, v), 1, 1, 1)(shard),
        "state": lambda: LIF().step(shard, [torch.zeros(4, 3)]),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
            messages[name] = "nothing"
        except Exception as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return messages


def time_shards(rank: int, mesh: DeviceMesh, folder: Path) -> Any:
    results = []
    for bptt in ("exact", "truncated"):
        net = TimeShards(network(), bptt=bptt)
        x = make_batch(7)
        part = time_shard(x).clone().requires_grad_()
        out = net(part)
        weights = time_shard(torch.linspace(-1, 1, 7 * 8 * 3).view(7, 8, 3))
        (out * weights).sum().backward()
        results.append((out.detach(), part.grad, gradients(net)))
    with torch.no_grad():
        results.append(TimeShards(network("torch"))(time_shard(make_batch(7))))
    return results


class Sum(Stateful):
    """A user's layer with a state, which returns a pair."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        before = self.states[0] if self.states else torch.zeros_like(x[0])
        y = before + x.cumsum(0)
        self.states = [y[-1]]
        return y, x


class Layers(nn.Module):
    """A network with each type of layer that has a state and is not a neuron."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.delay = Delay(torch.tensor(1.5), max_delay=3, learn=True)
        self.none = Delay(0)
        self.sum = Sum()
        self.psn = SlidingPSN(3, surrogate_function=surrogate.Sigmoid())
        self.linear = nn.Linear(4, 4)
        self.lif = LIF()
        self.dropout = SharedDropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y, same = self.sum(self.none(self.delay(x)))
        y = self.lif(self.linear(self.psn(0.1 * y + same)))
        # The other process uses the mask of the first process.
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
        dropped: Tensor = self.dropout(y + x)
        return dropped


def time_shards_of_layers(rank: int, mesh: DeviceMesh, folder: Path) -> Any:
    results = []
    for bptt in ("exact", "truncated"):
        net = TimeShards(Layers(), bptt=bptt)
        part = time_shard(make_batch(7)).clone().requires_grad_()
        out = net(part)
        weights = time_shard(torch.linspace(-1, 1, 7 * 8 * 4).view(7, 8, 4))
        (out * weights).sum().backward()
        results.append((out.detach(), part.grad, gradients(net)))
    return results


class Forgetful(nn.Module):
    """A layer whose new state has no gradient for the old state, and whose output has no gradient at all."""

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return (v + x.detach() > 0).to(x.dtype), (v.detach() + x).clamp(-1, 1)


def time_shards_without_a_way_back(rank: int, mesh: DeviceMesh, folder: Path) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(FlexSN(Forgetful(), 1, 1, 1), nn.Linear(4, 4), LIF())
    shards = TimeShards(net)
    shards(time_shard(make_batch(4))).sum().backward()
    return gradients(shards)


def pipeline(rank: int, mesh: DeviceMesh, folder: Path) -> Any:
    """Runs two stages with four micro-batches. They split the batch, which is the second dimension of a sequence."""
    net = network("torch")
    stage = FromReset(net[:3] if rank == 0 else net[3:])
    schedule = ScheduleGPipe(
        PipelineStage(stage, rank, 2, torch.get_default_device()),
        n_microbatches=4,
        loss_fn=lambda out, target: (out * target.transpose(0, 1)).sum(),
        args_chunk_spec=(TensorChunkSpec(1),),
    )
    if rank == 0:
        # In memory, the batch is the outermost dimension, because torch 2.11 requires dense micro-batches.
        schedule.step(make_batch().transpose(0, 1).contiguous().transpose(0, 1))
        return gradients(stage)
    losses: list[Tensor] = []
    target = torch.linspace(-1, 1, 8 * 5 * 3).view(8, 5, 3)  # torch splits targets along their first dimension.
    schedule.step(target=target, losses=losses)
    return gradients(stage), torch.stack(losses).sum().detach()


def make_normalised(kind: type[nn.Module]) -> nn.Sequential:
    """Makes a network with a norm in a neuron's step, and a norm that `fuse_norms` fuses into the next neuron."""
    torch.manual_seed(0)
    net = nn.Sequential(NormNeuron(kind(6), make_adaptive("auto")), OverTime(kind(6)), make_adaptive("auto"))
    assert len(fuse_norms(net).fused) == 1
    return net


def norms(rank: int, mesh: DeviceMesh, folder: Path) -> Any:
    """Returns the results of networks with norms, whose two processes have batches of different sizes."""
    net = make_normalised(nn.SyncBatchNorm)
    x = random(3, 5, 8, 6, 2)[:, slice(0, 3) if rank == 0 else slice(3, 8)].requires_grad_()
    output = net(x)
    (gradient,) = torch.autograd.grad(output.square().sum(), x)
    return output.detach(), gradient, [buffer.detach() for buffer in net.buffers()]


SCENARIOS = (
    norms,
    ddp,
    noise_of_rows,
    fsdp,
    fsdp_from_an_old_checkpoint,
    tensor_parallel,
    sharded,
    refused,
    time_shards,
    time_shards_of_layers,
    time_shards_without_a_way_back,
    pipeline,
)
COMPILED = (compiled_ddp, compiled_fsdp, compiled_tensor_parallel)


def main(rank: int, folder: Path, kind: str, names: list[str]) -> None:
    """Runs the scenarios with these names in this process, which is one of two."""
    if kind == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device(torch.device(kind, rank))
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    mesh = init_device_mesh(kind, (2,))
    scenarios = [scenario for scenario in (*SCENARIOS, *COMPILED) if scenario.__name__ in names]
    results = {scenario.__name__: scenario(rank, mesh, folder) for scenario in scenarios}
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
