"""`explain()`: backends and their reasons, refusals, memory traffic, compiled kernels."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsn_nn import LIF, BackendUnavailableError, FlexSN, GatedLIF, _backends
from flexsn_nn.flexsn import _choice, _running

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")


def accumulate(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = v + x
    return h * 2.0, h


def make_neuron(backend: str = "auto", **options: str) -> FlexSN:
    return FlexSN(accumulate, 1, 1, 1, backend=backend, **options)  # type: ignore[arg-type]


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, device=DEVICE)


def test_an_explanation_before_the_first_call_reports_no_run() -> None:
    assert make_neuron().explain() == "backend='auto': nothing has run yet."


@pytest.mark.parametrize(
    ("backend", "runs"), [("hop", "hop"), ("torch", "torch"), ("triton", "triton"), ("inductor", "triton")]
)
def test_an_explanation_names_the_requested_backend(backend: str, runs: str) -> None:
    layer = make_neuron(backend)
    layer(ones(2, 3))
    assert layer.explain().splitlines()[0] == f"{runs}: requested by backend={backend!r}"


def test_an_explanation_names_the_choice_of_auto(compiler: None) -> None:
    layer = make_neuron()
    layer(ones(2, 3))
    expected = (
        ["triton: the tensors are on 'cuda', where compiled kernels run"]
        if HAS_GPU
        else ["cpp: the tensors are on 'cpu', where compiled kernels run"]
    )
    assert layer.explain().splitlines()[: len(expected)] == expected
    layer.step_mode = "s"
    layer.reset()
    layer(ones(3))
    assert layer.explain().splitlines()[0] == expected[0]


@pytest.mark.skipif(HAS_GPU, reason="on a GPU, kernels need no compiler on the path")
def test_without_a_compiler_auto_chooses_the_loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Checks sequences, gradients, single steps, and a compiled graph, on a machine without a compiler."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    ours, loop = LIF(), LIF(backend="torch")
    x = (torch.rand(5, 3, 4) * 3).requires_grad_()
    results = []
    for layer in (ours, loop):
        spikes = layer(x)
        results += [spikes, *torch.autograd.grad(spikes.sum(), x)]
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])
    account = ours.explain()
    reason = (
        "torch: compiled kernels cannot run: there is no C++ compiler (g++, clang++, c++) on the path. Install one: "
    )
    assert account.startswith(reason)
    single_steps = LIF(step_mode="s")
    assert torch.equal(torch.stack([single_steps(frame) for frame in x]), results[0])
    assert single_steps.explain().startswith(reason)
    torch._dynamo.reset()
    network = nn.Sequential(LIF())
    assert torch.equal(torch.compile(network, backend="aot_eager", fullgraph=True)(x), results[0])
    with pytest.raises(BackendUnavailableError, match=r"backend='cpp' cannot run: there is no C\+\+"):
        LIF(backend="cpp")(x)


def test_single_steps_run_in_kernels_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backends, "why_unavailable", lambda device, target: None)
    for device in ("cpu", "cuda"):
        runs = {"cpu": "cpp", "cuda": "triton"}[device]
        assert _backends.choose("auto", "s", torch.device(device), False).backend == runs
        choice = _backends.choose("auto", "s", torch.device(device), True)
        assert choice.backend == "torch"
        assert choice.reason == "a compiler fuses a single step with the operations around it"


def test_single_steps_run_in_kernels_of_tritons_interpreter(monkeypatch: pytest.MonkeyPatch, interpreted: None) -> None:
    """Checks that steps run in kernels, and that a core that kernels refuse runs as a loop, as on the CPU."""
    monkeypatch.setattr(_choice, "choose", lambda *args: _backends.Choice("triton", "as on a GPU", {}))
    monkeypatch.setattr(_choice, "written_in", lambda backend: "triton")
    single_steps, loop = LIF(step_mode="s"), LIF(step_mode="s", backend="torch")
    refused = FlexSN(lambda x, v: (x - x.mean(), v + x), 1, 1, 1, step_mode="s")
    for _ in range(3):
        x = torch.rand(3, 5) * 3
        assert torch.equal(single_steps(x), loop(x))
        assert torch.equal(refused(x), x - x.mean())
    assert "LIF" in single_steps.explain() or "dynamics_forward" in single_steps.explain(), "kernels ran"
    assert "mean" in refused.explain()


@pytest.mark.skipif(HAS_GPU, reason="on a GPU, kernels are also chosen inside of torch.compile")
def test_an_explanation_names_the_choice_of_auto_inside_torch_compile(compiler: None) -> None:
    torch._dynamo.reset()
    neurons = [LIF(), LIF(), LIF()]
    layers = nn.Sequential(*neurons)
    x = torch.rand(4, 3) * 2
    compiled = torch.compile(layers, backend="aot_eager", fullgraph=True)
    result = compiled(x)
    account = neurons[1].explain().splitlines()
    assert account[0].startswith("hop inside torch.compile: the tensors are on 'cpu', where compiled kernels run")
    for layer in neurons:
        layer.reset()
    assert torch.equal(result, layers(x))
    assert len([line for line in neurons[1].explain().splitlines() if line.startswith(("cpp:", "hop"))]) == 2


def test_the_choice_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    choices: list[tuple[Any, ...]] = []
    choose = _backends.choose

    def count(*args: Any) -> Any:
        choices.append(args)
        return choose(*args)

    monkeypatch.setattr(_choice, "choose", count)
    layer = make_neuron()
    for _ in range(3):
        layer(ones(2, 3))
    assert len(choices) == 1
    layer.backend = "hop"
    for _ in range(3):
        layer(ones(2, 3))
    assert [args[0] for args in choices] == ["auto", "hop"]


def test_an_explanation_lists_the_kernels_built_so_far() -> None:
    layer = make_neuron("triton", residuals="recompute")
    x = ones(11, 2, 3)  # One chunk would need no checkpoints, so the sequence is longer.
    layer(x)
    pattern = re.compile(r"^kernels for steps of \[2, 3\] float32: (.*)$", re.MULTILINE)
    match = pattern.search(layer.explain())
    assert match is not None
    assert match[1] == "accumulate_forward"
    layer.reset()
    layer(x.clone().requires_grad_()).sum().backward()
    match = pattern.search(layer.explain())
    assert match is not None
    # Kernels of inference, of a forward with checkpoints, and of the backward.
    assert match[1] == "accumulate_forward (2 kernels), accumulate_backward"


@pytest.mark.parametrize("keep", [False, True])
def test_an_explanation_counts_the_bytes_moved_by_a_call(keep: bool) -> None:
    layer = make_neuron("triton", residuals="recompute")
    layer.store_state_seqs = keep
    account = layer.explain(ones(50, 20, 10))
    # A sequence has 50 * 200 elements of 4 bytes.
    assert "over 50 steps of 200 elements (a stream, which is one sequence: 40 kB)" in account
    final = "state sequence 0 (40 kB): 120 kB, 3.00 streams" if keep else "final state 0 (800 B): 80.8 kB, 2.02 streams"
    assert f"forward reads input 0 (40 kB); writes output 0 (40 kB), {final}" in account
    # The backward reads grad_output and the input, and writes grad_input. Checkpoints of 800 bytes are written and
    # read.
    match = re.search(r"every (\d+) steps \((.*?)\).*: (\d+) kB, (\d\.\d\d) streams more", account)
    assert match is not None
    checkpoints = 800 * (-(-50 // int(match[1])) - 1)
    assert float(match[4]) == pytest.approx((3 * 40e3 + 2 * checkpoints) / 40e3, abs=0.006)
    assert layer.states == [], "nothing has run"


def test_an_explanation_lists_tensors_saved_for_the_backward() -> None:
    account = make_neuron("triton").explain(ones(50, 20, 10))
    written = "training writes the values that the backward needs (nothing at every step)"
    assert f"{written}, and backward reads them and" in account
    assert "80 kB, 2.00 streams more" in account
    layer = FlexSN(lambda x, v: (torch.relu(v + x), v + x), 1, 1, 1, backend="triton", residuals="save")
    account = layer.explain(ones(50, 20, 10))
    assert "training writes the values that the backward needs (bool at every step)" in account
    assert "100 kB, 2.50 streams more" in account


def test_an_explanation_lists_copies_that_a_layout_causes() -> None:
    strided, dense = ones(5, 4, 6).transpose(1, 2), ones(5, 6, 4)
    for x, words in (
        (dense, "outputs and states are contiguous\n"),
        (strided, "outputs and states have the dimensions T, step[1], step[0] in memory, the outermost first\n"),
        (dense.transpose(0, 1), "the dimensions step[0], T, step[1] in memory"),
        (
            ones(10, 6, 4)[::2],
            "outputs and states are contiguous; input 0, in another memory format, read with strides",
        ),
    ):
        assert words in make_neuron().explain(x)
        assert "copies for layout: none" in make_neuron().explain(x)
    two_inputs = FlexSN(lambda x, y, v: (x + y + v, v), 2, 1, 1)
    assert "input 1, in another memory format, read with strides" in two_inputs.explain(strided, dense)
    negated = torch.complex(dense, dense).conj().imag
    assert "copies for layout: input 0, which is negated lazily (480 B)" in make_neuron().explain(negated)
    weight = ones(4, 6).t()
    captured = FlexSN(lambda x, v: (x * weight + v, v), 1, 1, 1)
    assert "copies for layout: captured [6, 4] (96 B)" in captured.explain(dense)
    expanded = ones(1, 20, 10).expand(50, 20, 10)
    assert "reads input 0 (800 B)" in make_neuron().explain(expanded)


def test_an_explanation_lists_initial_states_and_captured_tensors() -> None:
    """Checks initial states that are not zero, captured tensors, and single steps, which count as T = 1."""
    x = ones(4, 2, 3)
    assert "reads input 0 (96 B), state 0 (24 B); writes" in LIF(v_reset=-1.0).explain(x)
    assert "state 0 (24 B)" in LIF(precision="float32").explain(x.half())
    assert "captured [3] float32 (12 B)" in LIF(tau=torch.full((3,), 2.0, device=DEVICE)).explain(x)
    gated = GatedLIF(init_linear_decay=0.1).to(DEVICE)
    assert "input 0 (96 B), input 1 (4 B), captured" in gated.explain(x)
    assert "over 1 steps of 6 elements" in LIF(step_mode="s").explain(x[0])


def test_an_explanation_names_the_operation_that_kernels_refuse() -> None:
    layer = FlexSN(lambda x, v: (x.cumsum(0), v + x), 1, 1, 1, backend="torch")
    x = ones(3, 2)
    layer(x)
    lines = layer.explain(x).splitlines()
    assert lines[0] == "torch: requested by backend='torch'"
    assert lines[1].startswith("not in kernels: ")
    assert "cumsum" in layer.explain(x)


def test_an_explanation_lists_values_read_once(interpreted: None) -> None:
    neuron = FlexSN(lambda x, v: (x * (2.0 if torch.is_grad_enabled() else 3.0), v), 1, 1, 1, backend="triton")
    neuron(torch.ones(2, 3))
    account = neuron.explain()
    assert "read once, when the step was traced, and not followed:\n  torch.is_grad_enabled(), " in account
    assert f"{__file__}:" in account
    assert "read as constants" not in account


# -- explain() reports what ran -----------------------------------------------------------------------------


class Tagged(Tensor):
    pass


def subtract_mean(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return x - x.mean(0, keepdim=True), v + x


def draw_noise(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return x + 0 * torch.rand_like(x), v + x


X = torch.arange(24.0).reshape(3, 2, 4)  # These values are on the CPU, also on machines with a GPU.
OUTSIDE: dict[str, tuple[Any, Any, str]] = {
    "an operation": (subtract_mean, lambda layer: layer(X), "compiled kernels refuse the core: NonPointwiseError"),
    "random numbers": (draw_noise, lambda layer: layer(X), "compiled kernels refuse the core: RandomOpError"),
    "a subclass": (accumulate, lambda layer: layer(X.as_subclass(Tagged)), "in calls with Tagged"),
    "no steps": (accumulate, lambda layer: layer(X[:0]), "in calls without steps (T == 0)"),
    "a transform": (accumulate, lambda layer: torch.func.vmap(layer, 1, 1)(X), "inside of a transform of torch.func"),
    "a mode": (accumulate, lambda layer: call_in_a_mode(layer), "in calls"),
}


def call_in_a_mode(layer: FlexSN) -> Any:
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        return layer(torch.empty(3, 2, 4))


def record_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list, to which each call appends the backend that runs it."""
    backends: list[str] = []
    for owner, name in (
        (_running, "run_kernels"),
        (_running, "single_step"),
        (FlexSN, "_repeat"),
        (FlexSN, "_run_again"),
    ):
        original = getattr(owner, name)

        def run_and_append(*args: Any, original: Any = original, **options: Any) -> Any:
            result = original(*args, **options)
            if (result[0] if original.__name__ == "_repeat" else result) is not None:
                backends.append("cpp")
            return result

        monkeypatch.setattr(owner, name, run_and_append)
    run_core = FlexSN._run_core

    def append_and_run(self: FlexSN, backend: str, *args: Any, **options: Any) -> Any:
        backends.append(backend)
        return run_core(self, backend, *args, **options)

    monkeypatch.setattr(FlexSN, "_run_core", append_and_run)
    return backends


def list_backends(account: str) -> list[str]:
    return [line.split(":")[0] for line in account.splitlines() if line.startswith(("cpp:", "torch:", "hop:"))]


@pytest.mark.filterwarnings("ignore::flexsn_nn.PortabilityWarning")
@pytest.mark.parametrize("reason", OUTSIDE)
@pytest.mark.parametrize("mode", ["m", "s"])
def test_an_explanation_names_each_reason_for_the_loop(
    reason: str, mode: str, compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks `explain` before and after calls as a loop and in kernels, and after changes of core and backend."""
    core, call, words = OUTSIDE[reason]
    if mode == "s" and reason in ("no steps", "a transform"):
        pytest.skip("only for sequences")
    backends = record_runs(monkeypatch)
    layer = FlexSN(core, 1, 1, 1, step_mode=mode, example_outputs=(X[0],) if mode == "m" else None)
    assert layer.explain() == "backend='auto': nothing has run yet."
    call(layer)
    assert backends == ["torch"]
    assert list_backends(layer.explain()) == ["torch"]
    assert words in layer.explain()
    assert "where compiled kernels run" not in layer.explain()
    call(layer)
    assert list_backends(layer.explain()) == ["torch"]
    layer.reset()
    if core is accumulate:
        layer(X)
        layer(X)
        assert backends == ["torch", "torch", "cpp", "cpp"]
        assert list_backends(layer.explain()) == ["torch", "cpp"]
    del backends[:]
    layer.reset()
    layer.core = accumulate
    assert layer.explain().startswith("backend='auto': nothing has run yet.")
    layer(X)
    assert backends == ["cpp"]
    assert list_backends(layer.explain()) == ["cpp"]
    assert "refuse" not in layer.explain()
    layer.core = subtract_mean
    layer.reset()
    layer(X)
    assert backends == ["cpp", "torch"]
    assert list_backends(layer.explain()) == ["torch"]
    assert "NonPointwiseError" in layer.explain()
    layer.backend = "torch"
    assert layer.explain().startswith("backend='torch': nothing has run yet.")
    layer(X)
    assert layer.explain().splitlines()[0] == "torch: requested by backend='torch'"
    assert "refuse" not in layer.explain()


@pytest.mark.filterwarnings("ignore::flexsn_nn.PortabilityWarning")
def test_an_explanation_names_inputs_that_kernels_refuse(compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks a core that runs in kernels for some calls and as a loop for others. `explain` lists both reasons."""
    backends = record_runs(monkeypatch)
    layer = FlexSN(lambda x, v: (x.cumsum(0) if x.dim() > 2 else x + v, v + x), 1, 1, 1)
    layer(X)
    layer.reset()
    layer(X.unsqueeze(-1))
    assert backends == ["cpp", "torch"]
    assert list_backends(layer.explain()) == ["cpp", "torch"]
    assert "cumsum" in layer.explain()


@pytest.mark.filterwarnings("ignore::flexsn_nn.PortabilityWarning")
def test_an_explanation_follows_settings_of_modules(compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks a core whose behaviour depends on `training` and on a flag."""

    class Noisy(nn.Module):
        noisy = False

        def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            h = v + (draw_noise(x, v)[0] if self.training or self.noisy else x)
            return h, h

    backends = record_runs(monkeypatch)
    core = Noisy()
    layer = FlexSN(core, 1, 1, 1)
    for change, runs in (
        (lambda: None, "torch"),
        (layer.eval, "cpp"),
        (lambda: setattr(core, "noisy", True), "torch"),
        (layer.train, "torch"),
    ):
        change()
        layer.reset()
        layer(X)
        assert backends[-1] == runs
        assert list_backends(layer.explain()) == [runs]
    layer.eval()
    core.noisy = False
    layer.reset()
    layer(X)


@pytest.mark.skipif(HAS_GPU, reason="the sequences of this test run on the CPU")
def test_an_explanation_counts_several_backends(compiler: None) -> None:
    layer = LIF()
    layer(ones(2, 3))
    assert layer.explain().splitlines()[0].startswith("cpp: ")
    layer.reset()
    torch.func.vmap(layer)(ones(4, 2, 3))
    assert layer.explain().splitlines()[0] == "calls ran in 2 ways: cpp, torch"


def test_the_first_line_names_the_backend_that_would_run(compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(4, 3)
    lines = LIF().explain(x).splitlines()
    assert lines[0].startswith("backend='auto': nothing has run yet. These inputs would run on cpp: the tensors are on")
    loop = FlexSN(lambda x, v: (x.flip(0), v + x), 1, 1, 1)
    assert (
        loop.explain(x)
        .splitlines()[0]
        .startswith("backend='auto': nothing has run yet. These inputs would run on torch: the loop ran instead")
    )
    monkeypatch.setattr(_backends, "why_unavailable", lambda device, target: "there is no GPU")
    assert "would raise: backend='triton' cannot run: there is no GPU" in LIF(backend="triton").explain(x)
