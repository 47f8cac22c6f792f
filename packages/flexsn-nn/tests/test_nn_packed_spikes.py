"""Spikes as bits for the backward: gradients are bitwise equal, and fewer bytes are stored."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsn_nn import (
    IF,
    ILIF,
    LI,
    LIAF,
    LIF,
    PSN,
    FlexSN,
    GatedLIF,
    Leaky,
    OverTime,
    ParameterError,
    StochasticLIF,
    TernaryLIF,
    functional,
)
from flexsn_nn.fusion import fuse_norms
from flexsn_nn.layer import SEWBlock
from flexsn_nn.memory import PackedSpikes
from flexsn_nn.memory._bits import Bits, bits_for
from flexsn_runtime.native import compiled_launcher


@pytest.mark.long(all_but=["0-1-1-*", "-7-8-4-*", "-99-*"])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 1000])
@pytest.mark.parametrize(
    ("low", "high", "bits"), [(0, 1, 1), (-1, 1, 2), (0, 3, 2), (0, 4, 4), (-7, 8, 4), (-99, 99, 8)]
)
def test_integers_are_packed_into_bits(low: int, high: int, bits: int, count: int) -> None:
    assert bits_for(low, high) == bits
    narrow = [torch.float8_e4m3fn] if bits < 8 else []  # Packing into 8 bits saves nothing for float8.
    for dtype in (torch.float32, torch.bfloat16, torch.float64, *narrow):
        integers = torch.randint(low, high + 1, (count,), generator=torch.Generator().manual_seed(count)).to(dtype)
        packed = Bits.of(integers, low, bits)
        assert packed.packed.nbytes == -(-count * bits // 8)
        assert torch.equal(packed.numbers(dtype).double(), integers.double())
        assert packed.numbers(dtype).dtype == dtype
    assert bits_for(0, 256) is None


@pytest.fixture(params=["python", "compiled"])
def launcher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces saved tensors in Python, or in the compiled launcher."""
    monkeypatch.setenv("FLEXSN_LAUNCHER", request.param)
    if request.param == "compiled":
        request.getfixturevalue("compiler")
        compiled_launcher(torch.device("cpu"), 1)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the device of Triton's kernels


class SavedBytes:
    """Counts the bytes that autograd stores for a network. Memory that several tensors share counts once."""

    def __init__(self, net: nn.Module) -> None:
        self._parameter_addresses = {p.untyped_storage().data_ptr() for p in net.parameters()}

    def __call__(self, output: Tensor) -> int:
        """Counts the bytes that the graph of a tensor stores."""
        visited, bytes_of = set(), {}
        waiting = [output.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            waiting += [source for source, _ in node.next_functions]
            for name in dir(node):
                if not name.startswith("_raw_saved") and name != "_raw_saved_tensors":
                    continue
                saved = getattr(node, name)
                for entry in saved if isinstance(saved, tuple | list) else [saved]:
                    tensor = entry.data if hasattr(entry, "data") else None
                    # Some entries store the tensor together with its version.
                    tensor = getattr(tensor, "tensor", tensor)
                    memory = (
                        tensor if isinstance(tensor, Tensor) else getattr(getattr(tensor, "bits", None), "packed", None)
                    )
                    if memory is not None:
                        storage = memory.untyped_storage()
                        bytes_of[storage.data_ptr()] = storage.nbytes()
        return sum(count for pointer, count in bytes_of.items() if pointer not in self._parameter_addresses)


def make_convolutional() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        OverTime(nn.Conv2d(2, 8, 3, padding=1)),
        LIF(v_threshold=0.1),
        OverTime(nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)),
        IF(v_threshold=0.5),
        SEWBlock(8, 8, lambda: LIF(v_threshold=0.3)),
        SEWBlock(8, 16, lambda: TernaryLIF(v_threshold=0.3), stride=2),
        nn.Flatten(2),
        nn.Linear(16 * 16, 10),
        Leaky(0.9, threshold=0.1),
        nn.Linear(10, 3),
    )


def compute_gradients(net: nn.Module, x: Tensor, packing: PackedSpikes | None) -> list[Tensor]:
    functional.reset_net(net)
    if packing is None:
        output = net(x)
    else:
        with packing:
            output = net(x)
    output.square().sum().backward()
    gradients = [output.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]
    net.zero_grad()
    return gradients


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.long(all_but=["True-memory_format0-*"])
def test_packing_changes_no_bit(autocast: bool, memory_format: torch.memory_format, device: str) -> None:
    net = make_convolutional().to(device).to(memory_format=memory_format)
    fuse_norms(net)
    x = torch.rand(4, 3, 2, 16, 16, device=device)
    packing = PackedSpikes(net)
    deterministic = torch.backends.cudnn.flags(deterministic=True)
    with deterministic, torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
        twin = copy.deepcopy(net)
        expected = compute_gradients(twin, x, None)
        results = compute_gradients(net, x, packing)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert any(gradient.abs().max() > 0 for gradient in results[1:3])
    assert packing.bytes_packed * 7 < packing.bytes_whole
    assert not packing.kept_whole


def test_packing_stores_fewer_bytes() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 512), LIF(), nn.Linear(512, 512), LIF(), nn.Linear(512, 4))
    x = torch.rand(8, 32, 16)
    counted = SavedBytes(net)
    num_unpacked = counted(net(x))
    functional.reset_net(net)
    packing = PackedSpikes(net)
    with packing:
        output = net(x)
    sequence = 8 * 32 * 512 * 4
    assert packing.bytes_whole == 2 * sequence
    assert packing.bytes_packed == 2 * sequence // 32
    assert counted(output) == num_unpacked - packing.bytes_whole + packing.bytes_packed


@pytest.mark.usefixtures("launcher")
def test_several_readers_of_a_tensor_share_its_bits() -> None:
    torch.manual_seed(0)
    neuron = LIF()
    layers = nn.ModuleList([nn.Linear(64, 8) for _ in range(3)])
    net = nn.ModuleList([neuron, layers])
    with PackedSpikes(net) as packing:
        spikes = neuron(4 * torch.randn(5, 4, 64, requires_grad=True))
        total = sum(layer(spikes).sum() for layer in layers)
    assert packing.bytes_whole == spikes.nbytes
    assert isinstance(total, Tensor)
    total.backward()


@pytest.mark.parametrize("backend", ["triton", "cpp"])
@pytest.mark.long(all_but=["triton"])
def test_kernels_write_bits(backend: str) -> None:
    torch.manual_seed(0)
    device = DEVICE if backend == "triton" else "cpu"
    layers = [nn.Linear(6, 45), LIF(v_threshold=0.1, backend=backend), nn.Linear(45, 64), nn.LayerNorm(64)]
    last = IF(v_threshold=0.3, backend=backend, store_state_seqs=True)
    last.count_spikes = True
    net = nn.Sequential(*layers, last, nn.Linear(64, 3)).to(device)
    x = torch.rand(5, 3, 6, device=device)
    expected = compute_gradients(net, x, None)
    for _ in range(2):  # The second call equals the first call.
        outer, packing = PackedSpikes(net), PackedSpikes(net)
        with outer:
            results = compute_gradients(net, x, packing)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
        assert packing.bytes_by_kernels == packing.bytes_packed == 5 * (4 * -(-3 * 45 // 32) + 3 * 64 // 8)
        assert packing.bytes_whole == 5 * 3 * (45 + 64) * 4
        assert last.spike_counts is not None
        assert [states.shape for states in last.state_seqs] == [(5, 3, 64)]
    packing = PackedSpikes(net, by_kernels=False)
    assert all(torch.equal(a, b) for a, b in zip(compute_gradients(net, x, packing), expected, strict=True))
    assert packing.bytes_by_kernels == 0
    assert not last._bits.num_users
    assert last._bits._written is None


@pytest.mark.usefixtures("launcher")
def test_bits_belong_to_the_saved_memory() -> None:
    neurons = nn.ModuleList([IF(v_threshold=0.3, backend="triton")])
    weight = torch.randn(64, 4, device=DEVICE, requires_grad=True)
    for make, by_kernels in ((Tensor.clone, False), (lambda a: a[1:], False), (lambda a: a.view(2, -1, 64), True)):
        functional.reset_net(neurons)
        with PackedSpikes(neurons) as packing:
            spikes = make(neurons[0](torch.randn(4, 6, 64, device=DEVICE, requires_grad=True)))
            (spikes @ weight).sum().backward()
        assert torch.equal(weight.grad, spikes.detach().flatten(0, 1).sum(0)[:, None].expand(64, 4))  # type: ignore[arg-type]
        assert packing.bytes_packed == spikes.numel() // 8
        assert packing.bytes_by_kernels == (packing.bytes_packed if by_kernels else 0)
        weight.grad = None


@pytest.mark.usefixtures("launcher")
def test_bits_belong_to_the_output_that_a_call_returns() -> None:
    class Silences(IF):
        def forward(self, *inputs: Tensor, **options: Any) -> Tensor:
            return 1 - super().forward(*inputs, **options)

    class Clears(IF):
        def forward(self, *inputs: Tensor, **options: Any) -> Tensor:
            return super().forward(*inputs, **options).mul_(0)

    weight = torch.randn(64, 4, device=DEVICE, requires_grad=True)
    x = torch.randn(4, 6, 64, device=DEVICE, requires_grad=True)
    for neuron in (Silences(v_threshold=0.3, backend="triton"), Clears(v_threshold=0.3, backend="triton")):
        assert neuron.spike_range is None  # Calls may return any values.
        neuron.spike_range = (0, 1)
        for batch in (x, x.transpose(0, 1)):
            neuron.reset()
            with PackedSpikes(neuron) as packing:
                IF.forward(neuron, batch)  # The bits of a direct call of `forward` are not used.
                neuron.reset()
                spikes = neuron(batch)
                (spikes.contiguous() @ weight).sum().backward()
            expected = spikes.detach().flatten(0, 1).sum(0)[:, None].expand(64, 4)
            assert torch.equal(weight.grad, expected)  # type: ignore[arg-type]
            assert packing.bytes_by_kernels == 0
            weight.grad = None


def test_outputs_without_bits_from_kernels_are_packed_afterwards() -> None:
    def step(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return torch.round(torch.sigmoid(x + v)), v

    neuron = FlexSN(step, 1, 1, 1, backend="triton")
    neuron.spike_range = (0, 1)
    weight = torch.randn(64, 4, device=DEVICE, requires_grad=True)
    with PackedSpikes(neuron) as packing:
        spikes = neuron(torch.randn(4, 6, 64, device=DEVICE, requires_grad=True))
        (spikes @ weight).sum().backward()
    assert torch.equal(weight.grad, spikes.detach().flatten(0, 1).sum(0)[:, None].expand(64, 4))  # type: ignore[arg-type]
    assert (packing.bytes_packed, packing.bytes_by_kernels) == (4 * 6 * 8, 0)
    assert "packed after the kernel: output 0 is not known to be 0 or 1" in neuron.explain()
    assert "in step: return torch.round" in neuron.explain()


@pytest.mark.usefixtures("launcher")
def test_bits_are_freed_with_the_graph() -> None:
    net = nn.Sequential(nn.Linear(4, 67), LIF(), nn.Linear(67, 4))
    with PackedSpikes(net):
        output = net(torch.rand(4, 8, 4))
    instances = [instance for instance in gc.get_objects() if type(instance) is Bits]
    (bits,) = [weakref.ref(instance) for instance in instances if instance.count == 4 * 8 * 67]
    del instances
    assert bits() is not None
    del output
    functional.reset_net(net)
    gc.collect()
    assert bits() is None


Combine = Callable[[Tensor, Tensor], Tensor]
COMBINATIONS: dict[str, tuple[Combine, int | None]] = {
    "spikes": (lambda a, b: a, 1),
    "a view": (lambda a, b: a.flatten(0, 1).unsqueeze(0), 1),
    "a copy": (lambda a, b: a.transpose(0, 1).contiguous(), 1),
    "another dtype": (lambda a, b: a.double(), 1),
    "a sum": (lambda a, b: a + b, 2),
    "a sum in place": (lambda a, b: a.clone().add_(b), 2),
    "a sum of many": (lambda a, b: a + b + a + b + a, 4),
    "a difference": (lambda a, b: a - b, 2),
    "a product": (lambda a, b: a * b, 1),
    "the larger": (lambda a, b: torch.maximum(a, b), 1),
    "side by side": (lambda a, b: torch.cat([a, b + b], 1), 2),
    "parts": (lambda a, b: a[1:, :, ::2].contiguous(), 1),
    "pooled": (lambda a, b: nn.functional.max_pool1d(a, 2), 1),
    "larger": (lambda a, b: nn.functional.interpolate(a, scale_factor=2), 1),
    "a mean": (lambda a, b: nn.functional.avg_pool1d(a, 2), None),
    "scaled": (lambda a, b: 0.5 * a, None),
    "shifted": (lambda a, b: a + 0.1, None),
    "shifted by a tensor": (lambda a, b: a + torch.full_like(a, 0.1), None),
    "with alpha": (lambda a, b: torch.add(a, b, alpha=0.5), None),
    "dropped out": (lambda a, b: nn.functional.dropout(a, 0.3), None),
    "a function": (lambda a, b: torch.sigmoid(a), None),
    "with holes": (lambda a, b: a[:, :, ::2], None),
}


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_ranges_of_values_that_are_computed_from_spikes(combination: str) -> None:
    combine, bits = COMBINATIONS[combination]
    neurons = nn.ModuleList([LIF(v_threshold=0.3, backend="torch"), IF(v_threshold=0.3, backend="torch")])
    x = 2 * torch.randn(4, 6, 8, 16, generator=torch.Generator().manual_seed(0))[:, 0].requires_grad_()

    def run() -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        functional.reset_net(neurons)
        value = combine(neurons[0](x), neurons[1](x))
        weight = torch.randn(value.shape, dtype=value.dtype, requires_grad=True)
        return value.detach().clone(), *torch.autograd.grad((value * weight).sum(), [x, weight])

    expected = run()
    with PackedSpikes(neurons) as packing:
        results = run()
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    if bits is None:
        assert packing.kept_whole, str(packing)
        assert results[1].abs().max() > 0
    else:
        assert not packing.kept_whole, str(packing)
        assert packing.bytes_packed * 8 * results[0].element_size() <= bits * packing.bytes_whole
        assert packing.bytes_whole >= results[0].nbytes


@pytest.mark.usefixtures("launcher")
def test_values_changed_in_place_without_a_graph_are_stored_unpacked() -> None:
    neurons = nn.ModuleList([LIF(v_threshold=0.3)])
    x = 2 * torch.randn(4, 8, 16)
    weight = torch.randn(16, 4, requires_grad=True)
    with PackedSpikes(neurons) as packing:
        spikes = neurons[0](x.requires_grad_())
        with torch.no_grad():
            spikes.view(-1)[::3] = 0.25
        (spikes @ weight).sum().backward()
    assert torch.allclose(weight.grad, spikes.detach().flatten(0, 1).sum(0)[:, None].expand(16, 4))  # type: ignore[arg-type]
    assert packing.kept_whole[0].reason == "a change in place"
    assert packing.bytes_whole == 0


RANGES: list[tuple[nn.Module, tuple[int, int] | None]] = [
    (LIF(), (0, 1)),
    (Leaky(0.9), (0, 1)),
    (GatedLIF(T=4), (0, 1)),
    (StochasticLIF(), (0, 1)),
    (TernaryLIF(), (-1, 1)),
    (ILIF(D=6), (0, 6)),
    (PSN(4), (0, 1)),
    (LI(), None),
    (LIAF(torch.relu, False), None),
    (LIF(surrogate_function=torch.sigmoid), None),
    (FlexSN(lambda x, v: (x + v, v), 1, 1, 1), None),
]


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize(("neuron", "spike_range"), RANGES)
def test_outputs_of_neurons_are_in_their_spike_range(neuron: nn.Module, spike_range: tuple[int, int] | None) -> None:
    assert neuron.spike_range == spike_range
    if spike_range is not None:
        output = neuron(3 * torch.randn(4, 50, 20))
        assert set(output.unique().tolist()) <= set(range(spike_range[0], spike_range[1] + 1))
        assert output.max() > 0


def test_a_custom_step_needs_a_spike_range() -> None:
    class Doubled(LIF):
        def fire(self, h: Tensor, threshold: float | Tensor | None = None) -> Tensor:
            return 2.5 * super().fire(h, threshold)

    assert Doubled().spike_range is None
    neuron = FlexSN(lambda x, v: ((x > v).to(x.dtype) + x - x.detach(), v), 1, 1, 1)
    with pytest.raises(ParameterError, match=r"set neuron\.spike_range"):
        PackedSpikes(neuron)
    neuron.spike_range = (0, 1)
    assert neuron.spike_range == (0, 1)
    with pytest.raises(ParameterError, match="at least 2"):
        neuron.spike_range = (1, 1)
    packing = PackedSpikes(neuron)
    with packing, pytest.raises(RuntimeError, match="is already active"):
        packing.__enter__()


@pytest.mark.long(all_but=["(300,)", "(300, 1, 1)", "(41, 1, 9)"])
@pytest.mark.parametrize("shape", [(300,), (300, 1), (300, 1, 1), (300, 2), (41, 1, 9)], ids=str)
def test_bits_of_small_steps_fill_whole_words(shape: tuple[int, ...]) -> None:
    """Checks steps whose bits do not fill a word. The remaining bits of the word do not matter."""
    torch.manual_seed(0)
    neuron = LIF(backend="triton")
    x = (3 * torch.rand(shape, device=DEVICE)).requires_grad_()
    weight = torch.rand(shape, device=DEVICE, requires_grad=True)
    with PackedSpikes(neuron) as packing:
        spikes = neuron(x)
        loss = (spikes * weight).sum()
    (gradient,) = torch.autograd.grad(loss, weight)
    assert packing.bytes_by_kernels
    assert 0 < spikes.sum() < spikes.numel()
    assert torch.equal(gradient, spikes)


def test_a_change_between_forward_and_backward_is_refused(loops: None) -> None:
    """Checks changes that torch cannot detect here, because saved tensors have hooks."""
    net = nn.Sequential(nn.Linear(16, 16), LIF(), nn.Linear(16, 16), LIF())
    x = torch.rand(4, 8, 16)

    def run() -> tuple[Tensor, Tensor]:
        functional.reset_net(net)
        with PackedSpikes(net):
            spikes = net[:2](x)
            return spikes, net[2:](spikes).sum()

    spikes, total = run()
    total.backward()
    weight = net[2].get_parameter("weight")
    assert weight.grad is not None
    expected = weight.grad.clone()
    spikes, total = run()
    with torch.no_grad():
        spikes.mul_(2)  # This does not change the bits.
    net.zero_grad()
    total.backward()
    assert torch.equal(weight.grad, expected)
    _, total = run()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"\[16, 16\].*changed in place"):
        total.backward()
