"""Repeated calls of recurrent steps in one launch. The second call is recorded, and later calls run the recording."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from call_path import trace_path

from flexsn_codegen.targets._entry import Entry, unwatched
from flexsn_nn import LIF, RLIF, FlexSN, Recurrent
from flexsn_runtime.calls._recorded import Recording, recorded
from flexsn_runtime.launches._cooperative_launch import CooperativeLaunch
from flexsn_runtime.recurrent import _calls

STEPS, BATCH, SIZE = 3, 3, 6


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns a list that collects the recording of each call, or the reason why the call was not recorded."""
    recordings: list[Any] = []

    def record(call: Callable[[Any], Sequence[Any]], tensors: Sequence[Tensor | None]) -> tuple[Sequence[Any], Any]:
        results, repeat = recorded(call, tensors)
        recordings.append(repeat)
        return results, repeat

    monkeypatch.setattr(_calls, "recorded", record)
    return recordings


def make_pair(make: Callable[[str], FlexSN]) -> tuple[FlexSN, FlexSN]:
    torch.manual_seed(0)
    kernels, loop = make("triton"), make("torch")
    loop.load_state_dict(kernels.state_dict())
    return kernels, loop


def differentiate_call(neuron: FlexSN, x: Tensor, weight: Tensor, gradients_of: str = "all") -> list[Tensor]:
    leaf = x.clone().requires_grad_(gradients_of != "matrix")
    y = neuron(leaf)
    learned = list(neuron.parameters())
    leaves: list[Tensor] = [
        *([leaf] if gradients_of != "matrix" else []),
        *(learned if gradients_of != "input" else []),
    ]
    gradients = torch.autograd.grad(y, leaves, weight)
    return [y.detach(), *[s.detach() for s in (*neuron.states, *neuron.state_seqs)], *gradients]


def compare(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    torch.testing.assert_close(list(actual), list(expected), rtol=1e-4, atol=1e-5)


NEURONS: dict[str, Callable[[str], FlexSN]] = {
    "rlif": lambda backend: RLIF(SIZE, backend=backend),
    "states kept": lambda backend: RLIF(SIZE, backend=backend, store_state_seqs=True),
    "recurrent": lambda backend: Recurrent(LIF(backend=backend), features=SIZE),
}


@pytest.fixture
def address_launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list with one entry for each launch by the compiled launcher.

    The launcher receives the addresses of functions that run the kernels in the interpreter.
    """
    launches: list[str] = []
    entries: dict[tuple[CooperativeLaunch, int], Entry] = {}
    run = CooperativeLaunch.__call__

    def call(launch: CooperativeLaunch, tensors: Sequence[Tensor], programs: int) -> None:
        run(launch, tensors, programs)
        layouts = [(t.dtype, t.shape, t.stride(), t.untyped_storage().nbytes()) for t in tensors]

        def launch_by(arguments: Any) -> None:
            launches.append("loop")
            arguments_of_launch = []
            for i, (dtype, shape, strides, _) in enumerate(layouts):
                size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
                memory = (ctypes.c_char * (size * dtype.itemsize)).from_address(arguments[i])
                arguments_of_launch.append(torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides))
            run(launch, arguments_of_launch, programs)

        function = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_int64))(launch_by)
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None
        entries.setdefault((launch, programs), Entry(address, (), 1, 1, 0, function, unwatched))

    monkeypatch.setenv("FLEXSN_LAUNCHER", "compiled")
    monkeypatch.setattr(CooperativeLaunch, "__call__", call)
    monkeypatch.setattr(CooperativeLaunch, "entry", lambda launch, programs: entries.get((launch, programs)))
    return launches


@pytest.mark.usefixtures("interpreted", "compiler")
@pytest.mark.long(all_but=["rlif"])
@pytest.mark.parametrize("name", NEURONS)
def test_compiled_launcher_makes_repeated_calls(name: str, address_launches: list[str]) -> None:
    """Checks that calls with changed data, with and without a state, equal the loop, and that the compiled launcher
    makes the repeated calls.
    """
    kernels, loop = make_pair(NEURONS[name])
    generator = torch.Generator().manual_seed(1)
    launches = []
    for call in range(7):
        x = 1.5 * torch.rand(STEPS, BATCH, SIZE, generator=generator)
        weight = torch.randn(STEPS, BATCH, SIZE, generator=generator)
        with pytest.MonkeyPatch.context() as patch:
            if call == 5:
                patch.setenv("FLEXSN_ONE_LAUNCH", "0")
            results = []
            for neuron in (kernels, loop):
                if call != 4:
                    neuron.reset()
                else:
                    neuron.states = [state.detach() for state in neuron.states]
                before = len(address_launches)
                results.append(differentiate_call(neuron, x, weight))
                if neuron is kernels:
                    launches.append(len(address_launches) - before)
            compare(*results)
            with torch.no_grad():
                compare(*([neuron(x), *neuron.states] for neuron in (kernels, loop)))
    assert launches == [0, 0, 2, 2, 0, 0, 2]
    assert len(address_launches) == 6 + 4  # 4 in inference: all calls except the first two and the step-by-step call


@pytest.mark.usefixtures("interpreted")
@pytest.mark.long(all_but=["rlif"])
@pytest.mark.parametrize("name", NEURONS)
def test_repeated_calls_equal_the_loop(name: str, repeats: list[Any]) -> None:
    """Checks calls with changed data, matrices and required gradients, with and without a state."""
    kernels, loop = make_pair(NEURONS[name])
    generator = torch.Generator().manual_seed(1)
    for call, gradients_of in enumerate(
        ("all", "all", "all", "input", "matrix", "input", "matrix", "input", "matrix", "all")
    ):
        x = 1.5 * torch.rand(STEPS, BATCH, SIZE, generator=generator)
        weight = torch.randn(STEPS, BATCH, SIZE, generator=generator)
        if call == 6:
            for parameter, loop_parameter in zip(kernels.parameters(), loop.parameters(), strict=True):
                parameter.data = loop_parameter.data = 2 * parameter.detach()
        results = []
        for neuron in (kernels, loop):
            if call != 7:
                neuron.reset()
            else:
                neuron.states = [state.detach() for state in neuron.states]
            results.append(differentiate_call(neuron, x, weight, gradients_of))
        compare(*results)
        with torch.no_grad():
            compare(*([neuron(x), *neuron.states] for neuron in (kernels, loop)))
    assert len(repeats) >= 5
    assert all(isinstance(recording, Recording) for recording in repeats), repeats


@pytest.mark.usefixtures("interpreted")
def test_each_call_checks_the_environment(repeats: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks calls between which the environment, autocast, or the strides of gradients change."""
    kernels, loop = make_pair(NEURONS["rlif"])
    x, weight = torch.rand(STEPS, BATCH, SIZE), torch.randn(STEPS, BATCH, SIZE)
    permuted_weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    launches = mock.Mock(side_effect=CooperativeLaunch.__call__)
    monkeypatch.setattr(CooperativeLaunch, "__call__", lambda *arguments: launches(*arguments))

    def compare_both(weight: Tensor) -> int:
        before = launches.call_count
        compare(*(differentiate_call(neuron, x, weight) for neuron in (kernels, loop)))
        for neuron in (kernels, loop):
            neuron.reset()
        return launches.call_count - before

    for _ in range(3):
        assert compare_both(weight) == 2
    assert len(repeats) == 2
    monkeypatch.setenv("FLEXSN_ONE_LAUNCH", "0")
    for _ in range(3):
        assert compare_both(weight) == 0
    assert repeats[2:] == ["it launches step by step"] * 2
    monkeypatch.delenv("FLEXSN_ONE_LAUNCH")
    assert (
        compare_both(permuted_weight)
        == compare_both(weight)
        == compare_both(permuted_weight)
        == compare_both(permuted_weight)
        == 2
    )
    assert len(repeats) == 5
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            compare(*(differentiate_call(neuron, x, weight) for neuron in (kernels, loop)))
        for neuron in (kernels, loop):
            neuron.reset()
    assert compare_both(weight) == 2


@pytest.mark.usefixtures("interpreted")
def test_autograd_graphs_are_freed_without_garbage_collection(repeats: list[Any]) -> None:
    """Checks that autograd graphs do not remain in reference cycles.

    The capture of a CUDA graph would wait for the stream of such an old autograd graph.
    """
    layer = Recurrent(LIF(), SIZE, backend="triton")
    x, weight = torch.rand(STEPS, BATCH, SIZE, requires_grad=True), torch.rand(STEPS, BATCH, SIZE)
    gc.collect()
    gc.disable()
    try:
        references = []
        for _ in range(3):  # the first call is traced, the second is recorded, and the third repeats the recording
            layer.reset()
            y: Tensor = layer(x)
            torch.autograd.grad(y, [x, *layer.parameters()], weight)
            references.append(weakref.ref(y.grad_fn))
            del y
        layer.reset()
        assert [reference() for reference in references] == [None] * 3
    finally:
        gc.enable()
    assert repeats
    assert all(isinstance(recording, Recording) for recording in repeats)


def test_repeated_call_enters_few_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernels do not run, because their interpreter calls many Python functions.
    monkeypatch.setattr(CooperativeLaunch, "__call__", lambda *arguments: None)
    neuron, x, weight = RLIF(SIZE, backend="triton"), torch.rand(STEPS, BATCH, SIZE), torch.ones(STEPS, BATCH, SIZE)

    def train() -> object:
        neuron.reset()
        return differentiate_call(neuron, x, weight)

    def infer() -> object:
        with torch.no_grad():
            return neuron(x)

    for call, limit in ((infer, 25), (train, 50)):
        for _ in range(4):
            call()
        functions = trace_path(call)
        assert 10 < len(functions) <= limit, functions


@pytest.mark.usefixtures("interpreted")
def test_repeated_backward_raises_the_same_errors(repeats: list[Any]) -> None:
    neuron, x = RLIF(SIZE, backend="triton"), torch.rand(STEPS, BATCH, SIZE)
    for _ in range(3):
        neuron.reset()
        differentiate_call(neuron, x, torch.ones_like(x))
    assert len(repeats) == 2
    neuron.reset()
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(neuron(leaf), leaf, torch.ones_like(x), create_graph=True)
    with pytest.raises(RuntimeError, match="create_graph"):
        first.sum().backward()
    neuron.reset()
    y = neuron(leaf)
    with torch.no_grad():
        next(iter(neuron.parameters())).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    neuron.reset()
    y = neuron(leaf).sum()
    y.backward()
    with pytest.raises(RuntimeError, match=r"freed|second time"):
        y.backward()


@pytest.mark.gpu
@pytest.mark.parametrize("launcher", ["python", "compiled"])
def test_calls_may_alternate_and_be_captured_on_a_gpu(
    launcher: str, repeats: list[Any], native_runs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXSN_LAUNCHER", launcher)
    torch.manual_seed(0)
    layer: nn.Module = RLIF(128).cuda()
    assert isinstance(layer, FlexSN)
    loop = RLIF(128, backend="torch").cuda()
    loop.load_state_dict(layer.state_dict())
    for call in range(5):
        for batch in (64, 33):
            x = torch.rand(50, batch, 128, device="cuda") * (1 + call)
            results = []
            for neuron in (layer, loop):
                neuron.reset()
                results.append(differentiate_call(neuron, x, torch.ones_like(x)))
            assert float((results[0][0] != results[1][0]).double().mean()) < 1e-3
            assert len(results[0]) == len(results[1])
    assert len(repeats) == 4
    assert all(isinstance(recording, Recording) for recording in repeats)
    x = torch.rand(50, 64, 128, device="cuda")
    layer.reset()
    expected = differentiate_call(layer, x, torch.ones_like(x))
    layer.reset()  # frees the autograd graph, which was recorded on another stream than the stream of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.reset()
        actual = differentiate_call(layer, x, torch.ones_like(x))
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, actual, expected))
    assert bool(native_runs) == (launcher == "compiled")
