"""PyTorch's tools on networks with neurons: results equal the loop, or an error names a remedy."""

from __future__ import annotations

import cProfile
import io
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from flexsn_nn import (
    LIF,
    RLIF,
    ExportError,
    FlexSN,
    InputShapeError,
    OverTime,
    StateError,
    Synaptic,
    functional,
    fusion,
    layer,
    neuron,
    surrogate,
)
from flexsn_runtime import DoubleBackwardError, TransformError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*"),  # deprecated, but still in use
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization.*"),
    pytest.mark.filterwarnings("ignore:.*reduce_range.*"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions.*"),
]

# These values move the state far away from the initial state.
X = (torch.arange(5 * 3 * 8) * 0.37 % 3).reshape(5, 3, 8)
backends = pytest.mark.parametrize("backend", ["torch", "auto", "hop"])


def make_network(backend: str, **options: Any) -> Any:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(8, 6), LIF(backend=backend, **options), nn.Linear(6, 4), LIF(backend=backend))
    with torch.no_grad():
        for weight in (net[0].weight, net[2].weight):
            weight.abs_().mul_(1.5)  # Larger weights make both neurons spike.
    return net


def run_loop(net: nn.Module, x: Tensor = X) -> Tensor:
    """Returns the output of a copy whose neurons run as loops, from their initial states."""
    loop = make_network("torch")
    loop.load_state_dict(net.state_dict())
    return cast(Tensor, loop(x))


# -- torch.fx ----------------------------------------------------------------------------------------------


class Doubling(LIF):
    """A user's class that overrides `forward`."""

    def forward(self, *inputs: Tensor, **options: Any) -> Tensor:
        return super().forward(2 * inputs[0], **options)


LEAVES: dict[str, Callable[[str], nn.Module]] = {
    "ready-made": lambda backend: LIF(backend=backend),
    "with products": lambda backend: RLIF(8, backend=backend),
    "several states": lambda backend: Synaptic(0.9, 0.8, backend=backend),
    "a step": lambda backend: FlexSN(lambda x, v: (torch.tanh(v + x), v + x), 1, 1, 1, backend=backend),
    "a subclass": lambda backend: Doubling(backend=backend),
    "a norm in the step": lambda backend: layer.NormNeuron(nn.BatchNorm1d(8), LIF(backend=backend)),
    "Delay": lambda backend: layer.Delay(1),
    "SharedDropout": lambda backend: layer.SharedDropout(0.5).eval(),
    "SlidingPSN": lambda backend: neuron.SlidingPSN(3),
    "PSN": lambda backend: neuron.PSN(5),
}


@pytest.mark.long(all_but=["*-torch", "ready-made-auto", "a step-auto", "a norm in the step-auto"])
@backends
@pytest.mark.parametrize("kind", LEAVES)
def test_symbolic_trace_has_a_node_for_each_layer(kind: str, backend: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), LEAVES[kind](backend), nn.Linear(8, 2)).eval()
    traced = torch.fx.symbolic_trace(net)
    assert [node.op for node in traced.graph.nodes] == ["placeholder", *["call_module"] * 3, "output"]
    output = traced(X)
    functional.reset_net(net)
    assert torch.equal(output, net(X))
    functional.reset_net(net)
    retraced = torch.fx.symbolic_trace(traced)  # This call traces the traced graph.
    assert torch.equal(retraced(X), output)


@backends
@pytest.mark.parametrize("fused", [False, True])
def test_symbolic_trace_enters_layers_without_a_state(fused: bool, backend: str) -> None:
    """Checks that convolutions and norms are nodes, also if a neuron's step computes the norm."""
    torch.manual_seed(0)
    block = layer.SEWBlock(2, 2, lambda: LIF(backend=backend))
    net = nn.Sequential(block, layer.MSBlock(2, 2, lambda: LIF(backend=backend)), OverTime(nn.Flatten()))
    x = (torch.arange(4 * 2 * 2 * 5 * 5) * 0.37 % 3).reshape(4, 2, 2, 5, 5)
    net.train()(x)
    functional.reset_net(net)
    expected = net.eval()(x)
    functional.reset_net(net)
    if fused:
        assert len(fusion.fuse_norms(net).fused) > 0
    traced = torch.fx.symbolic_trace(net)
    nodes = [type(net.get_submodule(node.target)) for node in traced.graph.nodes if node.op == "call_module"]
    assert nodes.count(nn.Conv2d) == 4
    assert nodes.count(nn.BatchNorm2d) == 4
    assert nodes.count(LIF) == 4
    torch.testing.assert_close(traced(x), expected)
    with pytest.raises(InputShapeError, match="OverTime got an input of shape"):
        torch.fx.symbolic_trace(OverTime(nn.Flatten()))(x[0, 0, 0, 0])


def test_hooks_receive_no_proxies() -> None:
    types: list[type] = []
    net = make_network("auto")
    net[1].register_forward_hook(lambda module, args, output: types.append(type(output)))
    traced = torch.fx.symbolic_trace(net)
    assert types == []
    traced(X)
    assert types == [Tensor]


def test_symbolic_trace_of_a_single_neuron_is_refused() -> None:
    for single in (LIF(), FlexSN(lambda x, v: (x, v), 1, 1, 1)):
        with pytest.raises(ExportError, match=r"(?s)symbolic_trace.*nn\.Sequential"):
            torch.fx.symbolic_trace(single)


def test_symbolic_trace_of_step_is_refused() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.neuron = LIF()

        def forward(self, x: Tensor, v: Tensor) -> Any:
            return self.neuron.step(x, [v])

    with pytest.raises(ExportError, match=r"(?s)torch\.fx.*is_leaf_module"):
        torch.fx.symbolic_trace(Network())


def test_a_tracer_that_enters_all_modules_is_refused() -> None:
    class Entering(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return False

    with pytest.raises(ExportError, match=r"(?s)torch\.fx.*is_leaf_module.*isinstance"):
        Entering().trace(nn.Sequential(LIF()))


@pytest.mark.long(all_but=["*-auto"])
@backends
@pytest.mark.parametrize("prepare", ["prepare_fx", "prepare_qat_fx"])
def test_networks_are_quantised_by_graphs(prepare: str, backend: str) -> None:
    quantize_fx = pytest.importorskip("torch.ao.quantization.quantize_fx")
    from torch.ao import quantization

    net = make_network(backend)
    if prepare == "prepare_fx":
        prepared = quantize_fx.prepare_fx(net.eval(), quantization.get_default_qconfig_mapping(), (X,))
    else:
        prepared = quantize_fx.prepare_qat_fx(net.train(), quantization.get_default_qat_qconfig_mapping(), (X,))
    names = [node.target for node in prepared.graph.nodes if node.op == "call_module"]
    assert {"0", "1", "2", "3"} <= set(names)
    output = prepared(X)
    assert output.shape == (5, 3, 4)
    if prepare == "prepare_fx":  # Observers do not change results.
        assert torch.equal(output, run_loop(net))
    else:
        output.sum().backward()
        functional.reset_net(prepared)
    quantised = quantize_fx.convert_fx(prepared.eval())
    functional.reset_net(quantised)
    assert quantised(X).shape == (5, 3, 4)


@backends
def test_quantize_dynamic_equals_the_loop(backend: str) -> None:
    quantization = pytest.importorskip("torch.ao.quantization")
    nets = [
        quantization.quantize_dynamic(make_network(kind), {nn.Linear}, dtype=torch.qint8) for kind in (backend, "torch")
    ]
    assert "Dynamic" in repr(nets[0][0])
    assert torch.equal(nets[0](X), nets[1](X))


# -- torch.jit ---------------------------------------------------------------------------------------------


@backends
@pytest.mark.parametrize("inner", [False, True])
def test_jit_script_is_refused(inner: bool, backend: str) -> None:
    single = FlexSN(lambda x, v: (x, v), 1, 1, 1, backend=backend)
    for net in (make_network(backend) if inner else LIF(backend=backend), nn.Sequential(single) if inner else single):
        with pytest.raises(ExportError, match=r"torch\.jit\.script.*torch\.export\.export"):
            torch.jit.script(net)


@pytest.mark.parametrize("kind", ["Delay", "SharedDropout", "SlidingPSN"])
def test_jit_script_of_layers_with_a_state_is_refused(kind: str) -> None:
    with pytest.raises(ExportError, match=r"torch\.jit\.script.*torch\.export\.export"):
        torch.jit.script(nn.Sequential(LEAVES[kind]("auto")))


@backends
def test_jit_trace_and_the_old_onnx_exporter_are_refused(backend: str) -> None:
    with pytest.raises(ExportError, match=r"torch\.jit\.trace.*torch\.onnx\.export\(dynamo=True\)"):
        torch.jit.trace(make_network(backend), (X,), check_trace=False)


# -- ONNX --------------------------------------------------------------------------------------------------


class OneStep(nn.Module):
    def __init__(self, backend: str) -> None:
        super().__init__()
        self.neuron = LIF(step_mode="s", backend=backend)

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        output, (v,) = self.neuron.step(x, [v])
        return output, v


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_programs_for_onnx_contain_only_operations(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a program has no operators of this project, with backend "auto" as with "torch"."""
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    v = torch.zeros(3, 8)
    for net, args in ((make_network(backend).eval(), (X,)), (OneStep(backend), (X[0], v))):
        exported = torch.export.export(net, args)
        operators = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
        assert operators
        assert not any("flex" in operator for operator in operators)
    assert torch.equal(torch.export.export(make_network(backend), (X,)).module()(X), make_network("torch")(X))


@pytest.mark.parametrize("backend", ["hop", "cpp", "triton", "inductor"])
def test_the_onnx_exporter_refuses_kernels_requested_by_name(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    with pytest.raises(ExportError, match=rf"backend='{backend}' has no ONNX.*set_backend\(net, 'torch'\)"):
        torch.export.export(make_network(backend), (X,))


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_onnx_files_return_the_results_of_the_network(backend: str) -> None:
    pytest.importorskip("onnxscript", reason="the exporter needs it")
    runtime = pytest.importorskip("onnxruntime")
    v = torch.zeros(3, 8)
    batch = torch.export.Dim("B")
    for net, args, shapes, smaller in (
        (make_network(backend).eval(), (X,), ({1: batch},), (X[:, :2],)),
        (OneStep(backend), (X[0], v), ({0: batch}, {0: batch}), (X[0, :2], v[:2])),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program: Any = torch.onnx.export(net, args, dynamo=True, verbose=False, dynamic_shapes=shapes)
        session = runtime.InferenceSession(program.model_proto.SerializeToString())
        names = [value.name for value in session.get_inputs()]
        for arguments in (args, smaller):
            functional.reset_net(net)
            expected = net(*arguments)
            functional.reset_net(net)
            results = session.run(None, {name: x.numpy() for name, x in zip(names, arguments, strict=True)})
            for ours, theirs in zip(results, expected if isinstance(expected, tuple) else (expected,), strict=True):
                torch.testing.assert_close(torch.from_numpy(ours), theirs.detach())


# -- the meta device ---------------------------------------------------------------------------------------


@backends
@pytest.mark.parametrize("kind", ["ready-made", "with products", "several states", "a step"])
def test_networks_run_on_the_meta_device_and_are_loaded_from_it(kind: str, backend: str) -> None:
    real = LEAVES[kind](backend)
    with torch.device("meta"):
        net = LEAVES[kind](backend)
    x = X.to("meta").requires_grad_()
    output = net(x)
    assert output.device.type == "meta"
    assert output.shape == X.shape
    output.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == X.shape
    net = net.to_empty(device="cpu")
    net.load_state_dict(real.state_dict())
    functional.reset_net(net)
    assert torch.equal(net(X), real(X))


# -- wrappers and converters of modules --------------------------------------------------------------------


@pytest.mark.long(all_but=["dtype0-*", "dtype1-auto"])
@backends
@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16, torch.double])
def test_dtypes_change_and_change_back(dtype: torch.dtype, backend: str) -> None:
    net = make_network(backend)
    expected = net(X)
    changed = net.to(dtype)
    functional.reset_net(net)
    output = changed(X.to(dtype))
    assert output.dtype == dtype
    assert torch.equal(output, make_network("torch").to(dtype)(X.to(dtype)))
    net.float()
    assert [state.dtype for state in net[1].states] == [torch.float32]
    functional.reset_net(net)
    net.load_state_dict(make_network("torch").state_dict())
    assert torch.equal(net(X), expected)


@backends
def test_data_parallel_and_shared_memory_equal_the_loop(backend: str) -> None:
    net = make_network(backend)
    assert torch.equal(nn.DataParallel(net)(X), run_loop(net))
    net.share_memory()
    assert all(tensor.is_shared() for tensor in (*net.parameters(), *net[1].states))
    functional.reset_net(net)
    assert torch.equal(net(X), run_loop(net))


@backends
def test_distributed_data_parallel_equals_the_loop(backend: str, tmp_path: Path) -> None:
    distributed = torch.distributed
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        net, loop = make_network(backend), make_network("torch")
        wrapped = nn.parallel.DistributedDataParallel(net)
        for _ in range(2):
            output, expected = wrapped(X), loop(X)
            assert torch.equal(output, expected)
            output.square().sum().backward()
            expected.square().sum().backward()
            functional.reset_net(wrapped)
            functional.reset_net(loop)
        for ours, theirs in zip(net.parameters(), loop.parameters(), strict=True):
            assert theirs.grad is not None
            torch.testing.assert_close(ours.grad, theirs.grad)
    finally:
        distributed.destroy_process_group()


@backends
def test_a_network_is_saved_as_a_module(backend: str) -> None:
    net = make_network(backend)
    expected = net(X)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    with pytest.raises(Exception, match="Weights only load failed"):
        torch.load(file, weights_only=True)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded[1].states[0], net[1].states[0])
    functional.reset_net(loaded)
    assert torch.equal(loaded(X), expected)


@pytest.mark.long(all_but=["auto"])
@backends
def test_parametrised_layers_and_neurons_equal_the_loop(backend: str) -> None:
    class OnePlusAbs(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return 1 + value.abs()

    gradients = []
    for kind in (backend, "torch"):
        net = make_network(kind, tau=nn.Parameter(torch.tensor([2.0])))
        nn.utils.parametrizations.weight_norm(net[0])
        nn.utils.parametrizations.orthogonal(net[2])
        nn.utils.parametrize.register_parametrization(net[1], "tau", OnePlusAbs())
        net(X).square().sum().backward()
        gradients.append([parameter.grad for parameter in net.parameters()])
    assert len(gradients[0]) == 6
    for ours, theirs in zip(*gradients, strict=True):
        assert ours.abs().sum() > 0
        torch.testing.assert_close(ours, theirs)


# -- modes, profilers, subclasses --------------------------------------------------------------------------


class PassFunctions(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class PassOperators(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def make_profiler() -> Any:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True, acc_events=True)


MODES: dict[str, Callable[[], Any]] = {
    "flops": lambda: FlopCounterMode(display=False),
    "profiler": make_profiler,
    "cProfile": cProfile.Profile,
    "functions": PassFunctions,
    "operators": PassOperators,
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True, check_nan=True),
    "deterministic": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
}


@backends
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_modes_around_a_first_call_do_not_change_results(mode: str, backend: str) -> None:
    net = make_network(backend)
    with warnings.catch_warnings(record=True) as caught, MODES[mode]() as tool:
        warnings.simplefilter("always")
        output = net(X)
        output.sum().backward()
    caught = [warning for warning in caught if "Anomaly" not in str(warning.message)]
    if mode == "profiler" and caught:
        assert all("Call the network once before you profile it" in str(warning.message) for warning in caught)
        assert {warning.filename for warning in caught} == {__file__}
    else:
        assert caught == []
    assert torch.equal(output, run_loop(net))
    if mode == "flops":
        assert tool.get_total_flops() == 5040  # This is the number of operations of the two linear layers.
    if mode == "profiler":
        names = {event.name for event in tool.events()}
        assert {"aten::addmm", "aten::mm"} & names, "the profiler also records layers after the first neuron"
        assert sum(event.name == "aten::linear" for event in tool.events()) == 2
        assert sys.getprofile() is None


@backends
def test_a_subclass_of_tensors_is_returned(backend: str) -> None:
    class Tagged(Tensor):
        pass

    output = LIF(backend=backend)(X.as_subclass(Tagged))
    assert type(output) is Tagged
    assert torch.equal(output.as_subclass(Tensor), LIF(backend="torch")(X))


@pytest.mark.long(all_but=["reduce-overhead"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_network_equals_the_loop(mode: str, compiler: None) -> None:
    torch._dynamo.reset()
    net = make_network("auto")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled: Any = torch.compile(net, mode=mode)
        assert torch.equal(compiled(X), run_loop(net))


# -- derivatives -------------------------------------------------------------------------------------------


def tanh_step(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(0.5 * v + x)
    return h, h


DIFFERENTIATED: dict[str, Callable[[str], nn.Module]] = {
    "spikes": lambda backend: LIF(backend=backend),
    "a step": lambda backend: FlexSN(tanh_step, 1, 1, 1, backend=backend),
    "a step that saves": lambda backend: FlexSN(tanh_step, 1, 1, 1, backend=backend, residuals="save"),
    "with products": lambda backend: RLIF(8, backend=backend, surrogate_function=surrogate.Sigmoid()),
    "a norm in the step": lambda backend: layer.NormNeuron(nn.BatchNorm1d(8), LIF(backend=backend)),
}

Function = Callable[[Tensor], Tensor]


def differentiate_penalty(f: Function, x: Tensor) -> Tensor:
    """Computes the gradient of the squared gradient of `f` with respect to the incoming gradient."""
    incoming = torch.ones_like(x).requires_grad_()
    (gradient,) = torch.autograd.grad(f(x), x, incoming, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), incoming, allow_unused=True)[0]


def make_squared(f: Function) -> Function:
    return lambda x: f(x).square().sum()


DERIVATIVES: dict[str, Callable[[Function, Tensor], Any]] = {
    "vjp": lambda f, x: torch.autograd.functional.vjp(f, x, torch.ones_like(x))[1],
    "jvp": lambda f, x: torch.autograd.functional.jvp(f, x, torch.ones_like(x))[1],
    "hvp": lambda f, x: torch.autograd.functional.hvp(make_squared(f), x, torch.ones_like(x))[1],
    "vhp": lambda f, x: torch.autograd.functional.vhp(make_squared(f), x, torch.ones_like(x))[1],
    "jacobian": lambda f, x: torch.autograd.functional.jacobian(f, x[:2, :1]),
    "hessian": lambda f, x: torch.autograd.functional.hessian(make_squared(f), x[:2, :1]),
    "penalty": differentiate_penalty,
    "func.grad": lambda f, x: torch.func.grad(make_squared(f))(x),
    "func.vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones_like(x))[0],
    "func.jacrev": lambda f, x: torch.func.jacrev(f)(x[:2, :1]),
    "func.grad of grad": lambda f, x: torch.func.grad(lambda z: torch.func.grad(make_squared(f))(z).square().sum())(x),
    "func.vmap": lambda f, x: torch.func.vmap(f, in_dims=1, out_dims=1)(x),
}
TWICE = {"jvp", "hvp", "vhp", "hessian", "penalty"}
# Transforms that change a norm's statistics, or under which torch does not allow a norm to write running statistics.
WITHOUT_NORM = {"func.vmap", "func.grad", "func.vjp", "func.jacrev", "func.grad of grad"}


@pytest.mark.long(
    all_but=[
        "a step-*-cpp",
        "spikes-jvp-auto",
        "with products-jvp-cpp",
        "a norm in the step-penalty-cpp",
        "spikes-func.vmap-auto",
    ]
)
@pytest.mark.parametrize("backend", ["hop", "cpp", "auto"])
@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("kind", DIFFERENTIATED)
def test_derivatives_equal_those_of_the_loop_or_are_refused(kind: str, derivative: str, backend: str) -> None:
    """Checks that derivatives equal those of the loop, or that an error suggests the loop."""
    if kind == "a norm in the step" and derivative in WITHOUT_NORM:
        pytest.skip("torch's norm does not support this transform")

    def differentiate(backend_of_net: str) -> Tensor:
        torch.manual_seed(0)
        net: Any = DIFFERENTIATED[kind](backend_of_net)
        return cast(Tensor, DERIVATIVES[derivative](lambda x: net.step(x)[0], X.clone().requires_grad_()))

    expected = differentiate("torch")
    assert expected.abs().sum() > 0
    if (backend != "hop" and derivative in TWICE) or (backend == "cpp" and "func." in derivative):
        with pytest.raises((DoubleBackwardError, TransformError), match="backend='torch'"):
            differentiate(backend)
    else:
        torch.testing.assert_close(differentiate(backend), expected)


@backends
def test_a_call_after_a_transform_continues_from_a_plain_state(backend: str) -> None:
    """Checks that the next call continues from the value of the state, inside or outside of another transform."""
    net, loop = make_network(backend), make_network("torch")

    def loss(values: Any) -> Tensor:
        return torch.func.functional_call(net, values, (X,)).square().sum()  # type: ignore[no-any-return]

    for _ in range(2):
        gradients = torch.func.grad(loss)({name: value.detach() for name, value in net.named_parameters()})
        loop.zero_grad()
        loop(X).square().sum().backward()
        functional.detach_net(loop)
        for name, parameter in loop.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad)
    functional.detach_net(net)
    assert torch.equal(net(X), loop(X))
    functional.reset_net(net)
    torch.func.vmap(net, in_dims=1, out_dims=1)(X)
    with pytest.raises(StateError, match=r"torch\.func.*reset"):
        net(X)
    functional.reset_net(net)
    assert torch.equal(net(X), run_loop(net))


@backends
def test_a_state_from_before_a_transform_is_a_constant(backend: str) -> None:
    """Checks that the transformed function has no gradient for such a state."""
    net, loop = make_network(backend), make_network("torch")
    gradients = []
    for module in (net, loop):
        module(X)
        functional.detach_net(module)
        gradients.append(torch.func.grad(lambda x: module(x).square().sum())(X))  # noqa: B023
    torch.testing.assert_close(gradients[0], gradients[1])
    functional.reset_net(net)


@backends
def test_gradients_for_each_sample_equal_those_of_separate_calls(backend: str) -> None:
    net = make_network(backend)

    def loss(values: Any, x: Tensor) -> Tensor:
        functional.reset_net(net)
        return torch.func.functional_call(net, values, (x,)).square().sum()  # type: ignore[no-any-return]

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 1))(dict(net.named_parameters()), X)
    for i in range(3):
        separate = make_network("torch")
        separate(X[:, i]).square().sum().backward()
        for name, parameter in separate.named_parameters():
            torch.testing.assert_close(gradients[name][i], parameter.grad)
