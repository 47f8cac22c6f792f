"""Training steps in the compiled launcher: they have the results, gradients and errors of steps launched by Python."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import threading
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from flexsn_nn import ALIF, LIF, PLIF, FlexSN, Izhikevich, functional, surrogate
from flexsn_nn.layer import NormNeuron
from flexsn_nn.memory import PackedSpikes
from flexsn_runtime import ScanProgram
from flexsn_runtime.errors import CapturedTensorError, DoubleBackwardError, LauncherError, StepGoneError, TransformError
from flexsn_runtime.native import NativeScan, _launcher, compiled_launcher, launcher_in_words

CPU = torch.device("cpu")
_spike = surrogate.Sigmoid()


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXSN_LAUNCHER", "compiled")


def _make_lif(**options: Any) -> LIF:
    return LIF(backend="cpp", **options)


def _make_data(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (3 * torch.rand(*shape, dtype=torch.float64)).to(dtype).requires_grad_()


class TwoInTwoOut(nn.Module):
    """A step with two inputs, two outputs (one of them without a gradient), and a captured tensor with a value per
    channel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 7))

    def forward(self, x: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = v + self.gain.to(x.dtype) * x - y / 2
        s = _spike(h - 1)
        return s, (h > 0).to(h.dtype), h * (1 - s)


NEURONS: dict[str, Callable[[Any], tuple[FlexSN, int]]] = {
    "lif": lambda backend: (LIF(backend=backend), 1),
    "plif": lambda backend: (PLIF(backend=backend), 1),
    "alif": lambda backend: (ALIF(backend=backend), 1),
    "izhikevich": lambda backend: (Izhikevich(backend=backend), 1),
    "two": lambda backend: (FlexSN(TwoInTwoOut(), 2, 1, 2, backend=backend), 2),
}


def _train(neuron: FlexSN, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Returns outputs, final states and gradients of a training step after a reset."""
    neuron.reset()
    results = neuron(*inputs)
    outputs = [results] if isinstance(results, Tensor) else list(results)
    outputs += neuron.states
    learned = [*inputs, *neuron.parameters()]
    weighted_sums = [
        (o * torch.linspace(-1, 1, o.numel(), dtype=o.dtype, device=o.device).view_as(o)).sum() for o in outputs
    ]
    gradients = torch.autograd.grad(torch.stack([w for w in weighted_sums if w.requires_grad]).sum(), learned)
    return [*(o.detach() for o in outputs), *gradients]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", NEURONS)
@pytest.mark.long(all_but=["lif-torch.float32", "two-torch.float32", "plif-torch.bfloat16"])
def test_launcher_equals_python(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, native_runs: list[NativeScan]
) -> None:
    _compare(*NEURONS[name]("cpp"), CPU, dtype, monkeypatch, native_runs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NEURONS)
def test_launcher_equals_python_on_the_gpu(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, native_runs: list[NativeScan]
) -> None:
    neuron, count = NEURONS[name]("triton")
    _compare(neuron.cuda(), count, torch.device("cuda"), dtype, monkeypatch, native_runs)


def _compare(
    neuron: FlexSN,
    count: int,
    device: torch.device,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    native_runs: list[NativeScan],
) -> None:
    inputs = [_make_data(11, 30, 5, 7, dtype=dtype).detach().to(device).requires_grad_() for _ in range(count)]
    monkeypatch.setenv("FLEXSN_LAUNCHER", "python")
    twin = copy.deepcopy(neuron)
    for _ in range(2):
        expected = _train(twin, inputs)
    assert not native_runs
    monkeypatch.setenv("FLEXSN_LAUNCHER", "compiled")
    for _ in range(4):
        results = _train(neuron, inputs)
        assert all(map(torch.equal, results, expected))
    assert len(native_runs) >= 2


@pytest.mark.gpu
def test_launcher_runs_on_other_streams_and_reports_missing_memory(native_runs: list[NativeScan]) -> None:
    neuron, x = LIF(), _make_data(5, 3, 1000).detach().cuda().requires_grad_()
    weight = torch.randn(5, 3, 1000, device="cuda")
    expected = _compute_gradient(x, weight)
    side = torch.cuda.Stream()
    for stream in (torch.cuda.current_stream(), side, side, torch.cuda.current_stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                neuron.reset()
                (gradient,) = torch.autograd.grad(neuron(x), x, weight)
        torch.cuda.synchronize()
        torch.testing.assert_close(gradient, expected)
    assert native_runs
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        neuron.reset()
        (gradient,) = torch.autograd.grad(neuron(x), x, weight)
    gradient.zero_()
    graph.replay()
    torch.testing.assert_close(gradient, expected)
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + 2**20) / total))
    try:
        neuron.reset()
        with pytest.raises(torch.OutOfMemoryError):
            list(map(neuron.step, itertools.repeat(x)))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("in_caller", [False, True])
def test_launcher_runs_in_a_thread_without_a_gpu_context(in_caller: bool, native_runs: list[NativeScan]) -> None:
    neuron, x = LIF(), _make_data(5, 3, 1000).detach().cuda().requires_grad_()
    weight = torch.randn(5, 3, 1000, device="cuda")
    for _ in range(3):
        neuron.reset()
        torch.autograd.grad(neuron(x), x, weight)
    expected = _compute_gradient(x, weight)
    torch.cuda.synchronize()
    results: list[Tensor] = []

    def work() -> None:
        y, _ = neuron.step(x)
        with torch.autograd.set_multithreading_enabled(not in_caller):
            results.extend(torch.autograd.grad(y, x, weight))

    native_runs.clear()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert native_runs
    torch.testing.assert_close(results, [expected])


def test_states_are_carried(native_runs: list[NativeScan]) -> None:
    neuron, loop = _make_lif(), LIF(backend="torch")
    x = _make_data(4, 70)
    for module in (neuron, loop):
        for _ in range(3):
            module.reset()
            for _ in range(3):
                (module(x).sum() + module.states[0].sum()).backward()
                module.detach()
        if module is neuron:
            launcher_gradient, x.grad = x.grad, None
    assert native_runs
    torch.testing.assert_close(launcher_gradient, x.grad)


@pytest.fixture
def ready(native_runs: list[NativeScan]) -> tuple[LIF, Tensor]:
    """Returns a neuron that the compiled launcher already runs, and an input for it."""
    neuron, x = _make_lif(), _make_data(5, 3, 19)
    for _ in range(3):
        neuron.reset()
        neuron(x).sum().backward()
    assert native_runs
    neuron.reset()
    x.grad = None
    native_runs.clear()
    return neuron, x


def _compute_gradient(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    loop = LIF(backend="torch", **options)
    (gradient,) = torch.autograd.grad((loop(x) * weight).sum(), x)
    return gradient


def test_gradients_in_other_layouts_equal_the_loop(
    ready: tuple[LIF, Tensor], native_runs: list[NativeScan], python_gradients: list[tuple[bool, ...]]
) -> None:
    neuron, x = ready
    dense = torch.randn(5, 3, 19)
    layouts = [dense, dense.transpose(0, 2).contiguous().transpose(0, 2), torch.ones(()).expand(5, 3, 19)]
    for gradient in [*layouts, *layouts]:
        neuron.reset()
        (actual,) = torch.autograd.grad(neuron(x), x, gradient)
        torch.testing.assert_close(actual, _compute_gradient(x, gradient))
    assert len(native_runs) == 6
    assert python_gradients  # Python runs backwards whose gradients have other layouts
    python_gradients.clear()
    for _ in range(2):  # from the second call on, the kernel is launched by its address
        neuron.reset()
        torch.autograd.grad(neuron(x), x, layouts[1])
    neuron.reset()
    assert not python_gradients


def test_gradients_of_only_states_equal_the_loop(ready: tuple[LIF, Tensor]) -> None:
    neuron, x = ready
    loop = LIF(backend="torch")
    for _ in range(3):
        results = []
        for module in (neuron, loop):
            module.reset()
            module(x)
            results.append(torch.autograd.grad(module.states[0].sum(), x)[0])
        torch.testing.assert_close(*results)


class Rectangle(torch.autograd.Function):
    """A spike whose backward reads the width of its derivative from a variable."""

    width = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x >= 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() < Rectangle.width, gradients[0], 0)


def _rectangular(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = v + x
    s = Rectangle.apply(h - 1)
    return s, h * (1 - s)


def _prepare_backward(native_runs: list[NativeScan]) -> tuple[FlexSN, Tensor]:
    """Returns a neuron with `_rectangular` as its step, and outputs that the compiled launcher has computed."""
    x, neuron = _make_data(4, 33), FlexSN(_rectangular, 1, 1, 1, backend="cpp")
    for _ in range(3):
        neuron.reset()
        y = neuron(x)
        assert isinstance(y, Tensor)
        y.sum().backward()
    native_runs.clear()
    neuron.reset()
    y = neuron(x)
    assert isinstance(y, Tensor)
    assert native_runs
    native_runs.clear()
    return neuron, y


def test_backward_checks_values_read_in_the_forward(
    native_runs: list[NativeScan], monkeypatch: pytest.MonkeyPatch
) -> None:
    neuron, y = _prepare_backward(native_runs)
    monkeypatch.setattr(Rectangle, "width", 2.0)
    with pytest.raises(CapturedTensorError, match="width was replaced between the forward and the backward"):
        y.sum().backward()
    del neuron  # the neuron must exist until the backward ends


def test_in_place_changes_are_refused(ready: tuple[LIF, Tensor]) -> None:
    neuron, x = ready
    y = neuron(x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_second_derivative_is_refused(ready: tuple[LIF, Tensor]) -> None:
    neuron, x = ready
    (gradient,) = torch.autograd.grad(neuron(x).sum(), x, create_graph=True)
    torch.testing.assert_close(gradient, _compute_gradient(x, torch.ones(5, 3, 19)))
    with pytest.raises(DoubleBackwardError, match="create_graph"):
        gradient.sum().backward()


def test_batched_gradients_are_refused(ready: tuple[LIF, Tensor]) -> None:
    neuron, x = ready
    with pytest.raises(TransformError, match="is_grads_batched"):
        torch.autograd.grad(neuron(x), x, torch.randn(2, 5, 3, 19), is_grads_batched=True)


def test_graph_can_be_retained_or_is_freed(ready: tuple[LIF, Tensor]) -> None:
    neuron, x = ready
    total = neuron(x).sum()
    first = torch.autograd.grad(total, x, retain_graph=True)
    assert torch.equal(*first, *torch.autograd.grad(total, x))
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(total, x)


def test_saved_tensor_hooks_run(ready: tuple[LIF, Tensor], native_runs: list[NativeScan]) -> None:
    neuron, x = ready
    packed_tensors = []

    def pack(tensor: Tensor) -> Tensor:
        packed_tensors.append(tensor)
        return tensor.double()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.float()):
        y = neuron(x)
    assert packed_tensors
    assert native_runs
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], _compute_gradient(x, torch.ones(5, 3, 19)))


def test_errors_of_hooks_are_raised(ready: tuple[LIF, Tensor]) -> None:
    neuron, x = ready

    def fail(tensor: Tensor) -> Tensor:
        raise ZeroDivisionError("a hook of the user's")

    with (
        torch.autograd.graph.saved_tensors_hooks(fail, lambda tensor: tensor),
        pytest.raises(ZeroDivisionError, match="of the user's"),
    ):
        neuron(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, fail):
        y = neuron(x)
    with pytest.raises(ZeroDivisionError, match="of the user's"):
        y.sum().backward()


def test_launcher_runs_under_checkpointing(ready: tuple[LIF, Tensor], native_runs: list[NativeScan]) -> None:
    neuron, x = ready

    def run(x: Tensor) -> Any:
        neuron.reset()
        return neuron(x)

    y = checkpoint(run, x, use_reentrant=False)
    (actual,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(actual, _compute_gradient(x, torch.ones(5, 3, 19)))
    assert len(native_runs) == 2


def test_anomaly_mode_finds_nan(ready: tuple[LIF, Tensor]) -> None:
    neuron, x = ready
    gradient = torch.full((5, 3, 19), torch.nan)
    with torch.autograd.set_detect_anomaly(True):
        y = neuron(x)
        with (
            pytest.warns(UserWarning, match="forward call"),
            pytest.raises(RuntimeError, match="nan values"),
        ):
            y.backward(gradient)


def test_autocast_and_gradient_modes_change_no_results(ready: tuple[LIF, Tensor]) -> None:
    neuron, x = ready
    expected = neuron(x)
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16)):
        for _ in range(3):
            neuron.reset()
            with mode:
                y = neuron(x)
            assert torch.equal(y, expected)
            if y.requires_grad:
                torch.testing.assert_close(
                    torch.autograd.grad(y.sum(), x)[0], _compute_gradient(x, torch.ones(5, 3, 19))
                )


def test_graph_outlives_its_neuron(native_runs: list[NativeScan]) -> None:
    neuron, x = _make_lif(tau=3.0), _make_data(5, 41)
    for _ in range(3):
        neuron.reset()
        neuron(x).sum().backward()
    neuron.reset()
    y = neuron(x)
    reference = weakref.ref(neuron)
    del neuron  # until this line, the state of the neuron keeps the graph alive
    native_runs.clear()
    gc.collect()
    assert reference() is None
    torch.testing.assert_close(
        torch.autograd.grad(y.sum(), x, retain_graph=True)[0], _compute_gradient(x, torch.ones(5, 41), tau=3.0)
    )
    with pytest.raises(StepGoneError, match="its neuron was deleted, or has run with many other settings"):
        torch.autograd.grad(y, x, torch.rand(41, 5).T)


def test_changed_value_of_a_deleted_step_is_refused(
    native_runs: list[NativeScan], monkeypatch: pytest.MonkeyPatch
) -> None:
    neuron, y = _prepare_backward(native_runs)
    del neuron
    gc.collect()
    monkeypatch.setattr(Rectangle, "width", 2.0)
    with pytest.raises(StepGoneError):
        y.sum().backward()


def test_alternating_layouts_are_distinguished(
    ready: tuple[LIF, Tensor], python_gradients: list[tuple[bool, ...]]
) -> None:
    neuron, x = ready
    dense = torch.randn(5, 3, 19)
    layouts = [dense, dense.transpose(0, 2).contiguous().transpose(0, 2), torch.ones(()).expand(5, 3, 19)]
    for repetition in range(3):
        for gradient in layouts:
            neuron.reset()
            (actual,) = torch.autograd.grad(neuron(x), x, gradient)
            torch.testing.assert_close(actual, _compute_gradient(x, gradient))
        assert len(python_gradients) <= 2, repetition


class _Counting(TorchDispatchMode):
    """A mode that records the operations that run under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_record_the_same_operations() -> None:
    operations = []
    for choice in ("python", "compiled"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FLEXSN_LAUNCHER", choice)
            neuron, x = _make_lif(), _make_data(5, 3, 27)
            for _ in range(3):
                neuron.reset()
                y = neuron(x)
                with _Counting() as mode:
                    torch.autograd.grad(y, x, torch.ones(5, 3, 27))
                operations.append(mode.operations)
    assert operations[:3] == operations[3:]


class _Doubled(Tensor):
    """A class of tensors whose method `mul` returns twice the product."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return result * 2 if func is torch.Tensor.mul else result


@pytest.mark.parametrize("norm", [False, True], ids=["lif", "norm"])
def test_whole_calls_are_not_repeated_for_other_inputs(norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares each call with the same call of a copy, which has no earlier calls to repeat."""
    # Launches of Triton's interpreter have no address.
    monkeypatch.setattr("flexsn_nn._batch_affine.batch_moments", lambda *arguments: None)
    layer: Any = NormNeuron(nn.BatchNorm1d(7), _make_lif()) if norm else _make_lif()
    neuron, x = (layer.neuron if norm else layer), _make_data(4, 3, 7)
    for _ in range(5):
        neuron.reset()
        layer(x).sum().backward()
    repeated_call = neuron._again
    assert repeated_call is not None

    def call_after_reset(layer: Any, call: Callable[[Any], Any]) -> Any:
        (layer.neuron if norm else layer).reset()
        try:
            return call(layer)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def dual(layer: Any) -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            return layer(torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x)))  # type: ignore[no-any-return]

    calls: list[Callable[[Any], Any]] = [
        dual,
        lambda layer: layer(x.detach().as_subclass(_Doubled)),
        lambda layer: torch.func.vmap(layer)(x.detach().unsqueeze(0)),
        lambda layer: torch.func.grad(lambda x: layer(x).sum())(x.detach()),
        lambda layer: layer(x.detach().double()),
        lambda layer: layer(x.detach().transpose(0, 1).contiguous().transpose(0, 1)),
        lambda layer: layer(torch.cat([x.detach().view(-1), torch.zeros(1)])[1:].view(4, 3, 7)),
    ]
    for call in calls:
        fresh = copy.deepcopy(layer)
        actual, expected = call_after_reset(layer, call), call_after_reset(fresh, call)
        if isinstance(expected, Tensor):
            assert type(actual) is type(expected)
            assert actual.requires_grad == expected.requires_grad
            assert torch.equal(torch.as_tensor(actual.detach()), torch.as_tensor(expected.detach()))
        else:
            assert actual == expected
        for a, b in zip(layer.buffers(), fresh.buffers(), strict=True):
            assert torch.equal(a, b)
            a.copy_(b)
    neuron.reset()
    assert layer(x).requires_grad
    for buffer in layer.buffers():
        assert buffer._version > 5  # the version shows autograd that the launcher has written to the buffer


def test_graphs_and_tensors_are_freed(ready: tuple[LIF, Tensor], native_runs: list[NativeScan]) -> None:
    neuron, x = ready
    y = neuron(x)
    program, scan = neuron.__dict__["_repeats"].program.scan, weakref.ref(native_runs[-1])
    references = [weakref.ref(program), scan]
    del neuron, program, y
    native_runs.clear()
    ready[0].__dict__["_programs"] = None
    ready[0].__dict__["_repeats"] = None
    ready[0].states = []
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_threads_share_the_kernels_of_a_neuron() -> None:
    x = _make_data(5, 3, 23)
    neuron = _make_lif()
    for _ in range(3):
        neuron.reset()
        neuron(x).sum().backward()
    expected = _compute_gradient(x, torch.ones(5, 3, 23))
    wrong_gradients: list[object] = []

    def work() -> None:
        leaf = x.detach().clone().requires_grad_()
        for _ in range(50):
            y, _ = neuron.step(leaf)
            (gradient,) = torch.autograd.grad(y.sum(), leaf)
            if not torch.allclose(gradient, expected):
                wrong_gradients.append(gradient)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong_gradients


def test_copies_start_without_recordings(ready: tuple[LIF, Tensor], native_runs: list[NativeScan]) -> None:
    neuron, x = ready
    for twin in (copy.deepcopy(neuron), pickle.loads(pickle.dumps(neuron))):
        neuron.reset()
        assert torch.equal(twin(x), neuron(x))
    assert len(native_runs) == 2  # the two calls of the neuron itself


def test_norms_and_packed_spikes_equal_python(native_runs: list[NativeScan]) -> None:
    torch.manual_seed(0)

    def network(fused: bool) -> nn.Module:
        torch.manual_seed(1)
        norm = nn.BatchNorm1d(6)
        neuron = _make_lif()
        first: nn.Module = NormNeuron(norm, neuron) if fused else neuron
        return nn.Sequential(first, nn.Linear(9, 5, bias=False), _make_lif())

    x = _make_data(7, 4, 6, 9)
    for fused in (False, True):
        results = []
        for choice in ("python", "compiled"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("FLEXSN_LAUNCHER", choice)
                net = network(fused)
                native_runs.clear()
                for _ in range(4):
                    with PackedSpikes(net):
                        y = net(x)
                    gradients = torch.autograd.grad(y.sum(), [x, *net.parameters()])
                    functional.reset_net(net)
                results.append([y, *gradients])
                assert bool(native_runs) == (choice == "compiled")
        assert all(map(torch.equal, *results))


def test_watched_launches_are_made_by_python(
    ready: tuple[LIF, Tensor], native_runs: list[NativeScan], monkeypatch: pytest.MonkeyPatch
) -> None:
    neuron, x = ready
    neuron(x)
    (scan,) = native_runs
    monkeypatch.setattr(scan, "watched", lambda: True)
    neuron.reset()
    neuron(x).sum().backward()
    assert len(native_runs) == 1


def test_tensor_passed_twice_may_differ_in_the_next_call(native_runs: list[NativeScan]) -> None:
    """Tests inputs, and gradients of outputs, that are one tensor in one call and two tensors in the next call."""
    step = lambda x, y, v: (v + x - y / 2, x * y, v / 2 + x)  # noqa: E731
    neuron, loop = (FlexSN(step, 2, 1, 2, backend=backend) for backend in ("cpp", "torch"))
    tensors = [_make_data(4, 33) for _ in range(2)]
    for first, second in ((0, 0), (0, 0), (0, 0), (0, 1), (1, 0)):
        results = []
        for module in (neuron, loop):
            module.reset()
            outputs = module(tensors[first], tensors[second])
            weights = [tensors[first].detach(), tensors[second].detach()]
            results.append([*outputs, *torch.autograd.grad(outputs, [tensors[first]], weights)])
        torch.testing.assert_close(*results)
    assert len(native_runs) >= 3


def test_large_results_are_launched_by_python(native_runs: list[NativeScan]) -> None:
    neuron = _make_lif()
    x = _make_data(8, 2**16 + 3)
    for _ in range(3):
        neuron.reset()
        neuron(x).sum().backward()
    assert not native_runs


# -- compilation of the launcher -----------------------------------------------------------------------------------


class _Extension:
    """A stand-in for the compiled extension."""

    def __init__(self, *, available: bool = False, error: Exception | None = None) -> None:
        self.available, self.error = available, error
        self.builds: list[str] = []
        self.may_end = threading.Event()

    def kept(self) -> str | None:
        return "file" if self.available else None

    def build(self) -> str:
        self.builds.append("file")
        self.may_end.wait()
        if self.error is not None:
            raise self.error
        return "file"

    def load(self, path: str) -> ModuleType:
        module = ModuleType("loaded")
        module.__dict__["on_gpu"] = lambda *addresses: None
        return module


def _make_launcher(extension: _Extension) -> Any:
    launcher = _launcher._Launcher()
    launcher._extension = extension  # type: ignore[assignment]
    return launcher


def test_launcher_compiles_in_the_background_after_many_calls() -> None:
    extension = _Extension()
    launcher = _make_launcher(extension)
    assert launcher.get("auto", 63) is None
    assert not extension.builds
    assert launcher.get("auto", 64) is None
    building = launcher.building
    assert launcher.get("auto", 65) is None
    extension.may_end.set()
    building.join()
    assert launcher.get("auto", 66).__name__ == "loaded"
    assert len(extension.builds) == 1


def test_compiled_launcher_is_loaded_immediately() -> None:
    assert _make_launcher(_Extension(available=True)).get("auto", 1).__name__ == "loaded"


def test_python_launches_without_a_compiler() -> None:
    extension = _Extension(error=RuntimeError("no compiler"))
    extension.may_end.set()
    launcher = _make_launcher(extension)
    extension.may_end.clear()
    launcher.get("auto", 64)
    building = launcher.building
    extension.may_end.set()
    building.join()
    assert launcher.get("auto", 65) is None
    assert str(launcher.error) == "no compiler"
    assert len(extension.builds) == 1
    with pytest.raises(RuntimeError, match="no compiler"):
        launcher.get("compiled", 66)
    assert len(extension.builds) == 1


def test_launcher_compiles_again_after_a_change_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    extension = _Extension(error=RuntimeError("no compiler"))
    extension.may_end.set()
    launcher = _make_launcher(extension)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no compiler"):
            launcher.get("compiled", 1)
    assert len(extension.builds) == 1
    extension.error = None
    monkeypatch.setenv("CXX", "clang++")
    assert launcher.get("compiled", 2).__name__ == "loaded"
    assert launcher.error is None


def test_named_launcher_waits_for_a_running_compilation() -> None:
    extension = _Extension()
    launcher = _make_launcher(extension)
    launcher.get("auto", 64)
    threading.Timer(0.2, extension.may_end.set).start()
    assert launcher.get("compiled", 65).__name__ == "loaded"
    assert len(extension.builds) == 1


def test_environment_variable_chooses_the_launcher(ready: tuple[LIF, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    assert launcher_in_words(CPU) == "the compiled launcher"
    monkeypatch.setenv("FLEXSN_LAUNCHER", "auto")
    assert compiled_launcher(CPU, 1000) is None
    assert "FLEXSN_LAUNCHER=compiled" in launcher_in_words(CPU)
    monkeypatch.setenv("FLEXSN_LAUNCHER", "python")
    assert compiled_launcher(torch.device("cuda"), 1000) is None
    assert "as FLEXSN_LAUNCHER requests" in launcher_in_words(CPU)
    monkeypatch.setenv("FLEXSN_LAUNCHER", "fast")
    with pytest.raises(LauncherError, match="'fast'; it may be auto, compiled, python"):
        compiled_launcher(CPU, 1)


def test_explain_names_the_launcher(ready: tuple[LIF, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    neuron, _ = ready
    assert "repeated training steps are launched by: the compiled launcher" in neuron.explain()
    monkeypatch.setenv("FLEXSN_LAUNCHER", "python")
    assert "are launched by: Python, as FLEXSN_LAUNCHER requests" in neuron.explain()


def test_program_without_a_neuron_passes_gradcheck() -> None:
    from flexsn_runtime import prepare, remember, repeated_scan, scan

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return x * v, v + x

    program = ScanProgram(core, 1, 1, 1, on_cpu="cpp")
    x, v = _make_data(6, 13, dtype=torch.float64), _make_data(13, dtype=torch.float64)

    def run(x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        results = repeated_scan(program, (x,), (v,))
        if results is None:
            step, arguments = prepare(program, (x, v))
            results = scan(step, arguments, state_seqs=False)
            remember(program, (x,), (v,), step, arguments)
        return tuple(results)

    for _ in range(3):
        torch.stack([t.sum() for t in run(x, v)]).sum().backward()
    assert torch.autograd.gradcheck(run, (x, v))


@pytest.mark.parametrize("launcher", ["compiled", "python"])
def test_backward_inside_fake_tensor_mode_is_refused(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXSN_LAUNCHER", launcher)
    neuron = _make_lif()
    for _ in range(3):  # the compiled launcher runs from the second call on
        y = neuron.step(_make_data(5, 3))[0]
        y.sum().backward()
    y = neuron.step(_make_data(5, 3))[0]
    refusal = pytest.raises(TransformError, match="backward of a compiled scan cannot run inside of FakeTensorMode")
    with refusal, FakeTensorMode(allow_non_fake_inputs=True):
        y.backward(torch.ones(5, 3))
