"""A norm in a neuron's step: results equal those of the norm before the neuron, with fewer stored values."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from flexsn_codegen.targets.cpp import why_no_compiler
from flexsn_nn import LIF, PSN, Affine, FlexSN, InputShapeError, OverTime, ParameterError, functional
from flexsn_nn.layer import NormNeuron, ThresholdDependentBatchNorm2d
from flexsn_nn.monitor import RateMonitor
from flexsn_nn.neuron import RLIF, GatedLIF, Recurrent, RLeaky, StochasticLIF

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KERNELS = ["triton", *(["cpp"] if why_no_compiler() is None else [])]
BACKENDS = ["torch", *KERNELS]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def smooth(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = v + (x - v) / 2.0
    return torch.sigmoid(3.0 * (h - 0.5)), torch.tanh(h)


def make_smooth_neuron(backend: str) -> FlexSN:
    return FlexSN(smooth, 1, 1, 1, backend=backend)


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(5), (4, 3, 5)),
    "1d_long": (lambda: nn.BatchNorm1d(5), (4, 3, 5, 7)),
    "2d": (lambda: nn.BatchNorm2d(5), (4, 3, 5, 6, 7)),
    "3d": (lambda: nn.BatchNorm3d(3), (3, 2, 3, 2, 3, 4)),
    "not_affine": (lambda: nn.BatchNorm2d(5, affine=False), (4, 3, 5, 6, 7)),
    "cumulative": (lambda: nn.BatchNorm2d(5, momentum=None), (4, 3, 5, 6, 7)),
    "untracked": (lambda: nn.BatchNorm2d(5, track_running_stats=False), (4, 3, 5, 6, 7)),
    "tdbn": (lambda: ThresholdDependentBatchNorm2d(5, alpha=0.7, v_threshold=0.5), (4, 3, 5, 6, 7)),
    "sync_alone": (lambda: nn.SyncBatchNorm(5), (4, 3, 5, 6, 7)),
}


def make_pair(kind: str, neuron: Callable[[], FlexSN], **to: Any) -> tuple[nn.Sequential, NormNeuron, nn.Module]:
    """Returns a network with the norm before the neuron, an equal `NormNeuron`, and the norm of the latter."""
    norm = NORMS[kind][0]().to(**to)
    for tensor in norm.parameters():
        nn.init.uniform_(tensor, 0.2, 1.0)
    apart = nn.Sequential(norm if isinstance(norm, OverTime) else OverTime(norm), neuron())
    fused = NormNeuron(copy.deepcopy(norm), neuron())
    return apart, fused, fused.norm


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.long(
    all_but=[
        "2d-*",
        "3d-torch",
        "1d*-torch",
        "not_affine-torch",
        "cumulative-torch",
        "tdbn-torch",
        "sync_alone-torch",
    ]
)
def test_a_norm_in_the_step_equals_the_norm_before_the_neuron(kind: str, backend: str) -> None:
    apart, fused, norm = make_pair(kind, lambda: make_smooth_neuron(backend), dtype=torch.float64)
    for training in (True, True, False):
        apart.train(training)
        fused.train(training)
        functional.reset_net(apart)
        functional.reset_net(fused)
        x = (2 * torch.randn(NORMS[kind][1], dtype=torch.float64) + 0.3).requires_grad_()
        weight = torch.randn(x.shape, dtype=torch.float64)
        outputs = [net(x) for net in (apart, fused)]
        torch.testing.assert_close(outputs[1], outputs[0])
        expected, gradients = (
            torch.autograd.grad((output * weight).sum(), [x, *net.parameters()])
            for output, net in zip(outputs, (apart, fused), strict=True)
        )
        assert all(gradient.abs().max() > 0 for gradient in expected)
        torch.testing.assert_close(gradients, expected)
        for buffer, expected_buffer in zip(norm.buffers(), apart[0].buffers(), strict=True):
            torch.testing.assert_close(buffer, expected_buffer, rtol=1e-14, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.long(all_but=["memory_format1-dtype1-*"])
def test_spikes_with_a_scale_are_bitwise_equal_to_the_reference(
    dtype: torch.dtype, memory_format: torch.memory_format, device: str
) -> None:
    """Compares with the documented reference, a neuron whose input is `(x - mean) scale + shift`."""
    x = torch.randn(4 * 3, 5, 9, 17, device=device).to(dtype).contiguous(memory_format=memory_format)
    x = x.unflatten(0, (4, 3))
    channels = (torch.randn(5, 1, 1, device=device), torch.rand(5, 1, 1, device=device) + 0.5)
    affine = Affine(*channels, torch.rand(5, 1, 1, device=device))
    for backend in BACKENDS if device == "cpu" else ["torch", "triton"]:
        reference, inside = LIF(backend=backend), LIF(backend=backend)
        expected, output = reference(affine.of(x)), inside(x, affine=affine)
        assert 0.05 < expected.float().mean() < 0.95
        assert torch.equal(output, expected)
        assert torch.equal(inside.states[0], reference.states[0])
        assert output.stride() == x.stride()


@pytest.mark.parametrize("backend", BACKENDS[-2:])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.long(all_but=[f"True-{KERNELS[-1]}"])
def test_gradients_pass_gradcheck(training: bool, backend: str) -> None:
    layer = NormNeuron(
        nn.BatchNorm1d(3, dtype=torch.float64, track_running_stats=not training), make_smooth_neuron(backend)
    )
    layer.train(training)
    norm = layer.norm
    assert isinstance(norm, nn.BatchNorm1d)

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        layer.neuron.reset()
        output: Tensor = torch.func.functional_call(layer, {"norm.weight": weight, "norm.bias": bias}, (x,))
        return output

    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 4, 3), (3,), (3,))]
    assert torch.autograd.gradcheck(run, tensors)


@pytest.mark.parametrize("device", DEVICES)
def test_spikes_with_statistics_are_bitwise_equal_to_the_reference(device: str) -> None:
    """Compares with the documented reference. Here the step computes the scale from the statistics of a norm."""
    norm = nn.BatchNorm2d(5).to(device).eval()
    for tensor in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
        assert tensor is not None
        nn.init.uniform_(tensor, 0.2, 1.0)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    x = 4 * torch.randn(4, 3, 5, 9, 17, device=device)
    scale = torch.rsqrt(norm.running_var + norm.eps) * norm.weight
    affine = Affine(*(tensor.view(5, 1, 1) for tensor in (norm.running_mean, scale, norm.bias)))
    for backend in KERNELS if device == "cpu" else ["triton"]:
        reference, inside = LIF(backend=backend), LIF(backend=backend)
        expected, output = reference(affine.of(x)), NormNeuron(norm, inside)(x)
        assert isinstance(output, Tensor)
        assert 0.05 < expected.mean() < 0.95
        assert torch.equal(output, expected)
        assert torch.equal(inside.states[0], reference.states[0])


def test_second_gradients_of_the_loop_pass_gradgradcheck() -> None:
    layer = NormNeuron(nn.BatchNorm1d(3, dtype=torch.float64), make_smooth_neuron("torch"))
    x = torch.randn(3, 4, 3, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        layer.neuron.reset()
        output: Tensor = layer(x)
        return output

    assert torch.autograd.gradgradcheck(run, [x])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_norms_on_a_gpu_equal_the_unfused_network(memory_format: torch.memory_format, dtype: torch.dtype) -> None:
    """Compares outputs, gradients and running statistics with the unfused network, in both memory formats."""
    apart, fused, norm = make_pair("2d", lambda: make_smooth_neuron("triton"), device="cuda")
    for _ in range(2):
        functional.reset_net(apart)
        functional.reset_net(fused)
        x = (2 * torch.randn(4 * 6, 5, 33, 31, device="cuda") + 0.3).to(dtype).contiguous(memory_format=memory_format)
        x = x.unflatten(0, (4, 6)).requires_grad_()
        weight = torch.randn(x.shape, device="cuda").to(dtype)
        outputs = [net(x) for net in (apart, fused)]
        gradients, expected = (
            torch.autograd.grad((output * weight).sum(), [x, *net.parameters()])
            for output, net in zip(outputs[::-1], (fused, apart), strict=True)
        )
        assert outputs[1].stride() == x.stride() == gradients[0].stride()
        tolerance = 1e-3 if dtype == torch.float32 else 5e-2
        torch.testing.assert_close(outputs[1], outputs[0], rtol=tolerance, atol=tolerance)
        for mine, theirs in zip(gradients, expected, strict=True):
            assert (mine - theirs).abs().max() <= tolerance * theirs.abs().max()
        for mine, theirs in zip(norm.buffers(), apart[0].buffers(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


class SavedBytes:
    """Counts the bytes that autograd stores. Memory that several tensors share counts once."""

    def __init__(self) -> None:
        self.bytes: dict[int, int] = {}
        self._alive: list[Tensor] = []

    def pack(self, tensor: Tensor) -> Tensor:
        self._alive.append(tensor)
        storage = tensor.untyped_storage()
        self.bytes[storage.data_ptr()] = storage.nbytes()
        return tensor


def record_saved(net: nn.Module, x: Tensor) -> SavedBytes:
    saved = SavedBytes()
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        net(x).sum().backward()
    for parameter in net.parameters():
        saved.bytes.pop(parameter.untyped_storage().data_ptr(), None)
    return saved


@pytest.mark.long(all_but=["triton"])
@pytest.mark.parametrize("backend", KERNELS)
def test_few_tensors_are_stored_for_the_backward(backend: str) -> None:
    """Checks that autograd stores only the network's input, two sequences, checkpoints and values per channel."""
    steps, channels = 16, 8

    def make_net(*middle: nn.Module) -> nn.Sequential:
        return nn.Sequential(
            OverTime(nn.Conv2d(2, channels, 3, bias=False)), *middle, OverTime(nn.Conv2d(channels, 1, 1))
        )

    fused = make_net(NormNeuron(nn.BatchNorm2d(channels), LIF(backend=backend)))
    x = torch.rand(steps, 2, 2, 10, 10)
    sequence = steps * 2 * channels * 8 * 8 * 4
    sizes = record_saved(fused, x).bytes
    sequences = [count for count in sizes.values() if count == sequence]
    others = [count for count in sizes.values() if count not in (sequence, x.untyped_storage().nbytes())]
    assert len(sequences) == 2  # These are the convolution's output and the spikes.
    checkpoints = [count for count in others if count > 64 * channels]
    assert sum(checkpoints) < sequence / 2
    assert len(others) - len(checkpoints) <= 4  # These are mean, scale, shift, and 1 / std.
    apart = make_net(OverTime(nn.BatchNorm2d(channels)), LIF(backend=backend))
    assert sum(record_saved(apart, x).bytes.values()) >= sum(sizes.values()) + sequence


@pytest.mark.parametrize("backend", ["hop", "torch"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.long(all_but=["True-hop"])
def test_a_compiled_layer_equals_the_eager_layer(training: bool, backend: str) -> None:
    norm = nn.BatchNorm2d(3)
    layer = NormNeuron(norm, make_smooth_neuron(backend)).train(training)
    x = torch.randn(4, 2, 3, 5, 4, requires_grad=True)
    weight = torch.randn(x.shape)
    twin = copy.deepcopy(layer)

    def run(net: nn.Module, x: Tensor) -> Any:
        functional.reset_net(net)
        return net(x)

    results = []
    for net, function in ((layer, torch.compile(run, backend="aot_eager", fullgraph=True)), (twin, run)):
        output = function(net, x)
        gradients = torch.autograd.grad((output * weight).sum(), [x, *net.parameters()])
        results.append((output, *gradients, *net.buffers()))
    torch.testing.assert_close(results[0], results[1])


def test_the_operator_in_a_graph_computes_the_norm() -> None:
    """Checks that the operator reads the network's input, so that no normalised sequence exists."""
    layer = NormNeuron(nn.BatchNorm2d(3), make_smooth_neuron("hop"))
    graphs: list[torch.fx.GraphModule] = []

    def append_graph(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    x = torch.randn(4, 2, 3, 5, 4)
    torch.compile(layer, backend=append_graph, fullgraph=True)(x)
    nodes = graphs[0].graph.nodes
    (scan,) = [node for node in nodes if node.op == "call_function" and "flex_sn_scan" in str(node.target)]
    values = [node.meta.get("example_value") for node in scan.all_input_nodes]
    inputs = [node for node, value in zip(scan.all_input_nodes, values, strict=True) if isinstance(value, Tensor)]
    assert [node.op for node in inputs if node.meta["example_value"].shape == x.shape] == ["placeholder"]


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_torch_func_differentiates_the_layer(backend: str) -> None:
    """Checks gradients in `torch.func`, where the loop computes the norm before the step, after a plain call."""
    layer = NormNeuron(nn.BatchNorm1d(3, track_running_stats=False, dtype=torch.float64), make_smooth_neuron(backend))
    x = torch.randn(4, 5, 3, dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        layer.neuron.reset()
        output: Tensor = layer(x)
        return output.square().sum()

    for _ in range(2):
        expected = torch.autograd.grad(loss(x.requires_grad_()), x)[0]
        torch.testing.assert_close(torch.func.grad(loss)(x.detach()), expected)


@pytest.mark.parametrize("backend", BACKENDS[-2:])
@pytest.mark.parametrize("learned", ["x", "norm"])
@pytest.mark.long(all_but=["x-triton", "norm-cpp"])
def test_gradients_of_only_the_norm_or_only_the_input_are_equal(learned: str, backend: str) -> None:
    """Checks the input's gradient with a frozen norm, and the norm's gradients with an input that requires none."""
    apart, fused, _ = make_pair("2d", lambda: make_smooth_neuron(backend), dtype=torch.float64)
    for net in (apart, fused):
        for parameter in net.parameters():
            parameter.requires_grad_(learned == "norm")
    x = torch.randn(NORMS["2d"][1], dtype=torch.float64, requires_grad=learned == "x")
    weight = torch.randn(x.shape, dtype=torch.float64)
    for _ in range(2):  # The second call repeats the recorded operations of the first call.
        gradients = []
        for net in (apart, fused):
            functional.reset_net(net)
            leaves = [x] if learned == "x" else list(net.parameters())
            gradients.append(torch.autograd.grad((net(x) * weight).sum(), leaves))
        assert all(gradient.abs().max() > 0 for gradient in gradients[0])
        torch.testing.assert_close(gradients[1], gradients[0])


def test_single_steps_equal_a_sequence() -> None:
    layer = NormNeuron(nn.BatchNorm2d(3), LIF(v_threshold=0.3, step_mode="s")).eval()
    assert isinstance(layer.norm, nn.BatchNorm2d)
    assert layer.norm.running_mean is not None
    layer.norm.running_mean.copy_(torch.tensor([0.1, -0.4, 0.2]))
    x = torch.randn(6, 2, 3, 4, 4)
    one_by_one = torch.stack([layer(step) for step in x])
    functional.set_step_mode(layer, "m")
    functional.reset_net(layer)
    assert torch.equal(one_by_one, layer(x))
    output, states = layer.step(x)
    assert isinstance(output, Tensor)
    assert torch.equal(output, one_by_one)
    assert torch.equal(states[0], layer.neuron.states[0])


@pytest.mark.long(all_but=["<lambda>1"])
@pytest.mark.parametrize("make", [lambda: GatedLIF(T=4), lambda: StochasticLIF(scale=0.0), lambda: LIF(v_reset=0.2)])
def test_neurons_with_other_inputs_states_and_resets_accept_a_norm(make: Callable[[], FlexSN]) -> None:
    neuron = make()
    norm = nn.BatchNorm1d(5)
    layer = NormNeuron(norm, copy.deepcopy(neuron))
    x = 3 * torch.randn(4, 6, 5)
    with RateMonitor(layer) as monitor:
        output = layer(x)
    assert isinstance(output, Tensor)
    # The last bits of the two norms differ.
    assert (output != neuron(OverTime(nn.BatchNorm1d(5))(x))).float().mean() < 0.02
    assert monitor.rates() == {"neuron": pytest.approx(output.mean().item())}


def test_init_states_of_a_user_receives_the_normalised_input() -> None:
    class Started(FlexSN):
        def init_states(self, num_states: int, step_mode: str, *inputs: Tensor) -> list[Tensor]:
            return [inputs[0][0].clone()]

    x = 5 + torch.randn(4, 6, 5, dtype=torch.float64)
    apart, fused = Started(smooth, 1, 1, 1), Started(smooth, 1, 1, 1)
    layer = NormNeuron(nn.BatchNorm1d(5, dtype=torch.float64), fused)
    output = layer(x)
    assert isinstance(output, Tensor)
    torch.testing.assert_close(output, apart(OverTime(nn.BatchNorm1d(5, dtype=torch.float64))(x)))
    assert "init_states reads the input" in layer.explain(x)


def test_backwards_after_other_forwards_have_correct_gradients() -> None:
    """Checks that values that a call passes to the step remain valid for its backward, even after other calls."""
    apart, fused, _ = make_pair("1d", lambda: make_smooth_neuron("auto"), dtype=torch.float64)
    gradients = []
    for net in (apart, fused):
        torch.manual_seed(1)
        sequences = [torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        outputs = [net(x) for x in sequences]
        gradients.append(torch.autograd.grad(sum(o.square().sum() for o in outputs), [*sequences, *net.parameters()]))
    torch.testing.assert_close(gradients[1], gradients[0])


def test_no_memory_remains_after_the_outputs_are_deleted() -> None:
    layer = NormNeuron(nn.BatchNorm1d(5), LIF())
    x = torch.randn(4, 3, 5, requires_grad=True) * 1.0
    layer(x)
    layer.neuron.reset()
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None


def test_copies_and_checkpoints_return_equal_outputs() -> None:
    layer = NormNeuron(nn.BatchNorm1d(5), LIF(tau=nn.Parameter(torch.tensor([2.0]))))
    x = 3 * torch.randn(4, 3, 5)
    layer(x)
    twin = copy.deepcopy(layer)
    twin.load_state_dict(layer.state_dict())
    assert set(layer.state_dict()) == {
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
        "neuron.tau",
    }
    functional.reset_net(layer)
    functional.reset_net(twin)
    assert torch.equal(layer(x), twin(x))


def test_a_sequence_without_steps_returns_an_empty_output() -> None:
    layer = NormNeuron(nn.BatchNorm1d(5), LIF(backend=KERNELS[-1]))
    x = torch.zeros(0, 3, 5, requires_grad=True)
    output = layer(x)
    assert isinstance(output, Tensor)
    assert output.shape == (0, 3, 5)
    assert not output.requires_grad  # As in a loop, the output depends on no input.


def test_wrong_norms_neurons_and_inputs_are_refused() -> None:
    with pytest.raises(ParameterError, match="norm is LayerNorm"):
        NormNeuron(nn.LayerNorm(3), LIF())
    with pytest.raises(ParameterError, match="neuron is PSN"):
        NormNeuron(nn.BatchNorm1d(3), PSN(4))  # type: ignore[arg-type]
    layer = NormNeuron(nn.BatchNorm2d(3), LIF())
    with pytest.raises(InputShapeError, match="3 channels, and its input 4"):
        layer(torch.zeros(2, 2, 4, 5, 5))
    with pytest.raises(InputShapeError, match=r"takes \[T, B, C"):
        layer(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="4D"):
        layer(torch.zeros(2, 2, 3, 5))
    with pytest.raises(InputShapeError, match="more than 1 value per channel"):
        layer(torch.zeros(1, 1, 3, 1, 1))
    # A lazy norm becomes a BatchNorm1d in its first call.
    with pytest.raises(ParameterError, match="norm is LazyBatchNorm1d"):
        NormNeuron(nn.LazyBatchNorm1d(), LIF())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("training", [True, False])
def test_an_empty_batch_returns_an_empty_output(backend: str, training: bool) -> None:
    for net in make_pair("2d", lambda: make_smooth_neuron(backend))[:2]:
        x = torch.rand(4, 0, 5, 6, 7, requires_grad=True)
        output = net.train(training)(x)
        assert output.shape == x.shape
        leaves = [x, *net.parameters()]
        gradients = torch.autograd.grad(output.sum(), leaves)
        assert all(torch.equal(g, torch.zeros_like(leaf)) for g, leaf in zip(gradients, leaves, strict=True))


RECURRENT: dict[str, Callable[[], FlexSN]] = {
    "lif": lambda: Recurrent(LIF(), features=5),
    "rlif": lambda: RLIF(5),
    "leaky": lambda: RLeaky(0.8, linear_features=5),
    "each to itself": lambda: Recurrent(LIF(), features=5, all_to_all=False),
}


@pytest.mark.long(all_but=["rlif-cpp", "leaky-triton", "each to itself-cpp"])
@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_neurons_with_a_norm_equal_the_loop(name: str, backend: str) -> None:
    """Checks that values that are computed from the norm's tensors before the loop do not remain for later calls."""
    apart, fused, _ = make_pair("1d", RECURRENT[name])
    with torch.no_grad():
        for parameter, source in zip(fused.neuron.parameters(), apart[1].parameters(), strict=True):
            parameter.copy_(source)
    functional.set_backend(fused, backend)
    functional.set_backend(apart, "torch")
    for training in (True, True, True, False):
        x = 2 * torch.randn(4, 3, 5)
        results = []
        for net in (apart.train(training), fused.train(training)):
            functional.reset_net(net)
            leaf = x.clone().requires_grad_()
            output = net(leaf)
            weight = torch.linspace(-1, 1, output.numel()).view_as(output)
            results.append((output, *torch.autograd.grad((output * weight).sum(), [leaf, *net.parameters()])))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
