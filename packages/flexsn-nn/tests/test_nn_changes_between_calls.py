"""Two calls with a change in between. The second call equals the loop, no matter what the first call prepared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsn_nn import LIF, FlexSN
from flexsn_nn.layer import NormNeuron
from flexsn_nn.memory import PackedSpikes
from flexsn_nn.neuron import RLIF, ParametricLIF
from flexsn_nn.surrogate import ATan, Sigmoid

T, STEP = 3, (2, 5)


class Core(nn.Module):
    """A step that reads parameters, a buffer, submodules, attributes, and the training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.decay = nn.Parameter(torch.full((5,), 0.5))
        self.register_buffer("gain", torch.full((5,), 1.5))
        self.spike: Any = Sigmoid()
        self.number = 1.0
        self.numbers = {"a": 1.0}

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        x = self.inner(x) * self.gain * self.number * self.numbers["a"]
        if self.training:
            x = x * 1.25
        h = self.decay * v + x
        s = self.spike(h - 1.0)
        return s, h * (1 - s)


def make_normed(backend: str) -> NormNeuron:
    norm = nn.BatchNorm1d(5)
    nn.init.constant_(norm.weight, 1.5)
    return NormNeuron(norm, LIF(backend=backend))


def make_recurrent(backend: str) -> RLIF:
    return RLIF(5, init=lambda V: nn.init.constant_(V, 0.3), backend=backend)


NEURONS: dict[str, Callable[[str], nn.Module]] = {
    "LIF": lambda backend: LIF(backend=backend),
    "core": lambda backend: FlexSN(Core(), 1, 1, 1, backend=backend),
    "ParametricLIF": lambda backend: ParametricLIF(backend=backend),
    "RLIF": make_recurrent,
    "NormNeuron": make_normed,
}


def get_neuron(layer: Any) -> Any:
    return layer.neuron if isinstance(layer, NormNeuron) else layer


# -- changes of the layer itself, and of the surroundings of its calls -------------------------------------------------


def scale_parameters(layer: nn.Module) -> None:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(0.9)


def replace_parameters(layer: nn.Module) -> None:
    for module in layer.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                setattr(module, name, nn.Parameter(parameter.detach() * 0.7))


def freeze_first_parameter(layer: nn.Module) -> None:
    for parameter in list(layer.parameters())[:1]:
        parameter.requires_grad_(False)


def scale_buffers(layer: nn.Module) -> None:
    for buffer in layer.buffers():
        if buffer.is_floating_point():
            buffer.mul_(0.5)


def scale_states(layer: nn.Module) -> None:
    get_neuron(layer).states = [state.detach() * 0.5 for state in get_neuron(layer).states]


def make_states_leaves(layer: nn.Module) -> None:
    states = get_neuron(layer).states
    states[:] = [(state.detach() * 0.25).requires_grad_() for state in states]


def start_with_ones(num_states: int, step_mode: str, *inputs: Tensor) -> list[Tensor]:
    return [torch.ones_like(inputs[0][0] if step_mode == "m" else inputs[0]) for _ in range(num_states)]


def start_at_one(layer: nn.Module) -> None:
    neuron = get_neuron(layer)
    neuron.init_states = start_with_ones
    neuron.reset()


def change_core(name: str, value: Any) -> Callable[[nn.Module], object]:
    def change(layer: nn.Module) -> None:
        if isinstance(get_neuron(layer).core, Core):
            setattr(get_neuron(layer).core, name, value)

    return change


def change_numbers(layer: nn.Module) -> None:
    if isinstance(get_neuron(layer).core, Core):
        get_neuron(layer).core.numbers["a"] = 0.8


def hook_inside(layer: nn.Module) -> None:
    if isinstance(get_neuron(layer).core, Core):
        get_neuron(layer).core.inner.register_forward_hook(lambda module, inputs, output: output * 2)


def set_neuron(name: str, value: Any) -> Callable[[nn.Module], object]:
    return lambda layer: setattr(get_neuron(layer), name, value)


def switch_modes(layer: nn.Module) -> None:
    neuron = get_neuron(layer)
    neuron.step_mode = "s" if neuron.step_mode == "m" else "m"


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda layer: None,
    "store_state_seqs": set_neuron("store_state_seqs", True),
    "count_spikes": set_neuron("count_spikes", True),
    "no requires_grad of the input": lambda layer: setattr(
        get_neuron(layer), "requires_grad", [False] + [True] * get_neuron(layer).num_states
    ),
    "step_mode": switch_modes,
    "the loop": set_neuron("backend", "torch"),
    "init_states": start_at_one,
    "reset": lambda layer: get_neuron(layer).reset(),
    "eval": lambda layer: layer.eval(),
    "states": scale_states,
    "an entry of states": make_states_leaves,
    "values of parameters": scale_parameters,
    "other parameters": replace_parameters,
    "a frozen parameter": freeze_first_parameter,
    "all frozen": lambda layer: layer.requires_grad_(False),
    "buffers": scale_buffers,
    "dtype": lambda layer: layer.double(),
    "a hook": lambda layer: layer.register_forward_hook(lambda module, inputs, output: output * 2),
    "a pre-hook": lambda layer: layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,)),
    "a hook inside": hook_inside,
    "a number": change_core("number", 0.8),
    "an entry": change_numbers,
    "the core's surrogate": change_core("spike", ATan()),
    "surrogate": set_neuron("surrogate_function", ATan()),
    "threshold": set_neuron("v_threshold", 0.6),
    "load_state_dict": lambda layer: layer.load_state_dict(
        {name: value * 0.9 if value.is_floating_point() else value for name, value in layer.state_dict().items()}
    ),
}


@contextmanager
def setting(set_to: Callable[[Any], object], inside: Any, outside: Any) -> Iterator[None]:
    set_to(inside)
    try:
        yield
    finally:
        set_to(outside)


AROUND: dict[str, Callable[[nn.Module], AbstractContextManager[Any]]] = {
    "no_grad": lambda layer: torch.no_grad(),
    "inference_mode": lambda layer: torch.inference_mode(),
    "autocast": lambda layer: torch.autocast("cpu", torch.bfloat16),
    "detect_anomaly": lambda layer: torch.autograd.set_detect_anomaly(True, check_nan=True),
    "save_on_cpu": lambda layer: torch.autograd.graph.save_on_cpu(),
    "PackedSpikes": lambda layer: PackedSpikes(layer) if get_neuron(layer).spike_range else nullcontext(),
    "deterministic": lambda layer: setting(torch.use_deterministic_algorithms, True, False),
    "threads": lambda layer: setting(torch.set_num_threads, 2, 1),
    "default dtype": lambda layer: setting(torch.set_default_dtype, torch.float64, torch.float32),
    "matmul precision": lambda layer: setting(torch.set_float32_matmul_precision, "high", "highest"),
}

# -- lives -------------------------------------------------------------------------------------------------------------


def draw_input(layer: Any, seed: int) -> Tensor:
    neuron = get_neuron(layer)
    shape = (T, *STEP) if neuron.step_mode == "m" else STEP
    x = 2 * torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    floats = [t.dtype for t in (*neuron.states, *layer.parameters()) if t.is_floating_point()]
    return x.to(floats[0] if floats else torch.float32).requires_grad_()


def call(layer: Any, seed: int) -> dict[str, Any]:
    """Returns the input, the output, and everything that a call stores on the module."""
    neuron = get_neuron(layer)
    x = draw_input(layer, seed)
    return {"x": x, "output": layer(x), **read_stored(neuron)}


def step(layer: Any, seed: int) -> dict[str, Any]:
    """Returns the input, the results of `step` from the current states, and what the call stores on the module."""
    neuron = get_neuron(layer)
    x = draw_input(layer, seed)
    output, states = layer.step(x, neuron.states or None)
    return {"x": x, "output": output, "new states": states, **read_stored(neuron)}


def read_stored(neuron: FlexSN) -> dict[str, Any]:
    return {"states": list(neuron.states), "seqs": list(neuron.state_seqs), "counts": neuron.spike_counts}


def call_with_counts(layer: Any, seed: int) -> None:
    get_neuron(layer).count_spikes = True
    call(layer, seed)
    get_neuron(layer).count_spikes = False


def call_with_stored_states(layer: Any, seed: int) -> None:
    get_neuron(layer).store_state_seqs = True
    call(layer, seed)
    get_neuron(layer).store_state_seqs = False


def call_without_gradients(layer: Any, seed: int) -> None:
    with torch.no_grad():
        call(layer, seed)


def call_in_inference_mode(layer: Any, seed: int) -> None:
    with torch.inference_mode():
        call(layer, seed)
    get_neuron(layer).reset()


def train(layer: Any, seed: int) -> None:
    """Runs enough calls and backwards for the compiled launcher to repeat whole calls."""
    for i in range(5):
        get_neuron(layer).reset()
        call(layer, seed + i)["output"].sum().backward()
    layer.zero_grad()
    assert (get_neuron(layer)._again is None) == (get_neuron(layer).backend == "torch")


ROADS: dict[str, tuple[Callable[[Any, int], Any], ...]] = {
    "calls": (call, call),
    "steps": (step, step),
    "a step and a call": (call, step),
    "counted": (call_with_counts, step),
    "stored": (call_with_stored_states, step),
    "no_grad": (call_without_gradients, call_without_gradients),
    "inference_mode": (call_in_inference_mode,),
}
TRAINED: dict[str, tuple[Callable[[Any, int], Any], ...]] = {
    "trained": (train, call),
    "trained, no_grad": (train, *(call_without_gradients,) * 4),
}


def run_life(make: Callable[[], nn.Module], road: str, step_mode: str, change: str) -> list[dict[str, Any]]:
    """Returns the results and gradients of two calls, a step and a call, after a change."""
    layer = make()
    neuron = get_neuron(layer)
    neuron.step_mode = step_mode
    for seed, act in enumerate((ROADS | TRAINED)[road]):
        act(layer, seed)
    neuron.states[:] = [state.detach() for state in neuron.states]
    CHANGES.get(change, CHANGES["nothing"])(layer)
    results = []
    with AROUND.get(change, lambda layer: nullcontext())(layer):  # type: ignore[no-untyped-call]
        for seed, act in enumerate((call, call, step, call)):
            results.append(add_gradients(layer, act(layer, 10 + seed)))
    return results


def add_gradients(layer: nn.Module, results: dict[str, Any]) -> dict[str, Any]:
    x = results.pop("x")
    flat: dict[str, Any] = {name: value for name, value in results.items() if not isinstance(value, list)}
    for name, value in results.items():
        if isinstance(value, list):
            flat.update({f"{name} {i}": tensor for i, tensor in enumerate(value)})
    reached = [t for t in flat.values() if t is not None and t.requires_grad]
    if reached:
        loss = sum((t.double() * torch.linspace(-1, 1, t.numel()).view_as(t)).sum() for t in reached)
        leaves = {"x": x, **{name: p for name, p in layer.named_parameters() if p.requires_grad}}
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, retain_graph=True)
        flat.update({f"d{name}": g for name, g in zip(leaves, gradients, strict=True)})
    flat.update({name: buffer.clone() for name, buffer in layer.named_buffers()})
    return flat


def assert_equal_to_the_loop(kind: str, backend: str, road: str, step_mode: str, change: str) -> None:
    loop = run_life(lambda: NEURONS[kind]("torch"), road, step_mode, change)
    kernels = run_life(lambda: NEURONS[kind](backend), road, step_mode, change)
    for expected, results in zip(loop, kernels, strict=True):
        assert results.keys() == expected.keys()
        for name, value in expected.items():
            if value is None:
                assert results[name] is None, name
                continue
            assert results[name] is not None, name
            assert results[name].requires_grad == value.requires_grad, name
            loose = value.dtype == torch.bfloat16 or change == "autocast"
            rtol, atol = (2e-2, 1e-2) if loose else (1e-4, 1e-5)
            torch.testing.assert_close(results[name], value, rtol=rtol, atol=atol)


ALL_CHANGES = [*CHANGES, *AROUND]
SHORT_CASES = [
    "counted-nothing-m-LIF",
    "a step and a call-store_state_seqs-m-LIF",
    "steps-count_spikes-m-LIF",
    "calls-init_states-m-LIF",
    "no_grad-PackedSpikes-m-LIF",
    "a step and a call-eval-s-core",
]


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("kind", NEURONS)
@pytest.mark.parametrize("step_mode", ["m", "s"])
@pytest.mark.parametrize("change", ALL_CHANGES)
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.long(all_but=SHORT_CASES)
def test_compiled_kernels_equal_the_loop_after_a_change(
    kind: str, step_mode: str, change: str, road: str, compiler: None
) -> None:
    assert_equal_to_the_loop(kind, "cpp", road, step_mode, change)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("kind", [kind for kind in NEURONS if kind != "RLIF"])
@pytest.mark.parametrize("change", ALL_CHANGES)
@pytest.mark.parametrize("road", TRAINED)
@pytest.mark.long(
    all_but=[
        *(f"trained-{change}-NormNeuron" for change in ("eval", "other parameters", "PackedSpikes", "buffers")),
        *(f"trained-{change}-LIF" for change in ("threshold", "autocast")),
        "trained, no_grad-no requires_grad of the input-ParametricLIF",
    ]
)
def test_the_compiled_launcher_equals_the_loop_after_a_change(
    kind: str, change: str, road: str, compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXSN_LAUNCHER", "compiled")
    # Launches of Triton's interpreter have no address.
    monkeypatch.setattr("flexsn_nn._batch_affine.batch_moments", lambda *arguments: None)
    assert_equal_to_the_loop(kind, "cpp", road, "m", change)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("kind", NEURONS)
@pytest.mark.parametrize("change", [change for change in ALL_CHANGES if change != "step_mode"])
@pytest.mark.parametrize("road", ["a step and a call", "counted"])
@pytest.mark.long(all_but=["a step and a call-store_state_seqs-LIF", "counted-nothing-LIF"])
def test_triton_kernels_equal_the_loop_after_a_change(kind: str, change: str, road: str, interpreted: None) -> None:
    """Runs sequences only, because Triton's kernels do not run single steps."""
    assert_equal_to_the_loop(kind, "triton", road, "m", change)


@pytest.mark.parametrize("change", ["nothing", "store_state_seqs", "count_spikes", "init_states"])
@pytest.mark.parametrize("kind", ["LIF", "NormNeuron"])
@pytest.mark.long(all_but=["LIF-store_state_seqs"])
def test_the_operator_equals_the_loop_after_a_change(kind: str, change: str) -> None:
    for road in ROADS:
        assert_equal_to_the_loop(kind, "hop", road, "m", change)
