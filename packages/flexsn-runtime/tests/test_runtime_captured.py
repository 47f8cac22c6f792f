"""Captured objects are read at each call, so they may be updated, moved, assigned again, replaced or deleted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from runtime_cores import DEVICE, STEP, Core, assert_like_the_loop, compiled, loop, random
from torch import Tensor, nn

from flexsn_runtime import CapturedTensorError, PointwiseProgram, Specialization, prepare

X, V = random(3, *STEP), random(*STEP, seed=1)


class Decay(nn.Module):
    """Computes `h = decay v + x`, with a parameter, a buffer, a number and a flag."""

    decay: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(random(STEP[1], seed=2))
        self.register_buffer("decay", random(STEP[1], seed=3))
        self.offset: Any = 0.25
        self.act: nn.Module = nn.ReLU()

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = self.decay * v + x * self.gain + self.offset
        return (self.act(h) if self.training else h), h


def assert_follows(program: PointwiseProgram, core: Core) -> None:
    """Checks that the program computes the current values of the core."""
    actual, expected = compiled(program, 1, [X], [V]), loop(core, 1, [X], [V])
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def find_specialization(program: PointwiseProgram) -> Specialization:
    return prepare(program, (X, V))[0]


def test_updates_of_a_module_are_used() -> None:
    core = Decay().to(DEVICE)
    program = PointwiseProgram(core, 1, 1, 1)
    assert_follows(program, core)
    traced = find_specialization(program)
    with torch.no_grad():
        core.gain.mul_(-2.0)
    assert_follows(program, core)
    core.gain.data = random(STEP[1], seed=5)
    assert_follows(program, core)
    core.decay = random(STEP[1], seed=6)
    assert_follows(program, core)
    core.gain = nn.Parameter(random(STEP[1], seed=7))
    assert_follows(program, core)
    assert find_specialization(program) is traced, "same shapes and dtypes: the same trace"


def test_changes_of_a_module_that_need_another_trace_are_used() -> None:
    core = Decay().to(DEVICE)
    program = PointwiseProgram(core, 1, 1, 1)
    changes: list[tuple[str, Any]] = [
        ("offset", 0.5),
        ("training", False),
        ("training", True),
        ("act", nn.Tanh()),
        ("act", nn.ReLU()),
        ("decay", random(STEP[0], 1, seed=6)),
        ("decay", random(1, seed=8)[0]),
        ("decay", torch.tensor(0.5)),  # a CPU scalar, for inputs on any device
        ("offset", random(STEP[1], seed=9)),
        ("offset", None),
    ]
    assert_follows(program, core)
    for name, value in changes[:-1]:
        setattr(core, name, value)
        if isinstance(core.act, nn.Tanh):
            torch.testing.assert_close(compiled(program, 1, [X], [V]), loop(core, 1, [X], [V]))
        else:
            assert_follows(program, core)
    core.offset = None
    with pytest.raises(TypeError, match="unsupported operand"):
        compiled(program, 1, [X], [V])


def test_to_dtype_replaces_parameters_and_buffers() -> None:
    core = Decay().to(DEVICE)
    program = PointwiseProgram(core, 1, 1, 1)
    assert_follows(program, core)
    core.to(torch.float64)
    x, v = X.double(), V.double()
    for a, b in zip(compiled(program, 1, [x], [v]), loop(core, 1, [x], [v]), strict=True):
        assert a.dtype == torch.float64
        assert torch.equal(a, b)
    core.to(torch.float32)
    assert_follows(program, core)


def test_gradients_reach_the_current_captured_tensors() -> None:
    core = Decay().to(DEVICE)
    program = PointwiseProgram(core, 1, 1, 1)
    compiled(program, 1, [X], [V])
    old, core.gain = core.gain, nn.Parameter(random(STEP[1], seed=7))
    compiled(program, 1, [X], [V])[0].sum().backward()
    gradient, core.gain.grad = core.gain.grad, None
    loop(core, 1, [X], [V])[0].sum().backward()
    assert old.grad is None
    assert gradient is not None
    assert core.gain.grad is not None
    torch.testing.assert_close(gradient, core.gain.grad)


def test_change_between_forward_and_backward_is_refused() -> None:
    core = Decay().to(DEVICE)
    program = PointwiseProgram(core, 1, 1, 1, residuals="recompute")
    _, state = compiled(program, 1, [X], [V])
    core.offset = 7.0
    with pytest.raises(CapturedTensorError, match=r"has changed since the forward.*Call backward\(\) before"):
        state.sum().backward()
    _, state = compiled(program, 1, [X], [V])
    state.sum().backward()
    _, state = compiled(program, 1, [X], [V])
    core.offset = 8.0
    state.sum().backward()  # the gradient is traced already, so the backward uses values of its forward


def test_changed_dtype_between_forward_and_backward_is_refused() -> None:
    core = Decay().to(DEVICE)
    program = PointwiseProgram(core, 1, 1, 1, residuals="recompute")
    _, state = compiled(program, 1, [X], [V])
    core.gain.data = core.gain.data.bfloat16()  # like `core.to(torch.bfloat16)` for parameters
    with pytest.raises(CapturedTensorError, match=r"was \[.*\] torch.float32 .* torch.bfloat16 now. Call backward\(\)"):
        state.sum().backward()


def test_backward_uses_values_of_its_forward() -> None:
    core = Decay().to(DEVICE)
    output, _ = compiled(PointwiseProgram(core, 1, 1, 1, residuals="save"), 1, [X], [V])
    expected, _ = loop(core, 1, [X], [V])
    core.offset = 7.0
    (gradient,) = torch.autograd.grad(output.sum(), [core.gain])
    (reference,) = torch.autograd.grad(expected.sum(), [core.gain])
    torch.testing.assert_close(gradient, reference)


def test_changed_closure_variables_are_used() -> None:
    tau: Any = random(STEP[1], seed=2)

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v * tau + x
        return h, h

    program = PointwiseProgram(core, 1, 1, 1)
    for value in (tau, random(STEP[1], seed=3), random(*STEP, seed=4), 0.5, 0.75, 1, 1.0, True, random(1)):
        tau = value
        assert_follows(program, core)


def test_deleted_attribute_raises_in_the_core() -> None:
    core = Decay().to(DEVICE)
    program = PointwiseProgram(core, 1, 1, 1)
    assert_follows(program, core)
    del core.decay
    with pytest.raises(AttributeError, match="'Decay' object has no attribute 'decay'"):
        compiled(program, 1, [X], [V])
    core.decay = nn.Parameter(random(STEP[1], seed=3))  # before, the attribute was a buffer
    assert_follows(program, core)


def test_two_names_of_one_tensor_may_become_two_tensors() -> None:
    a = random(STEP[1], seed=2)
    b = a

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v * a + x * b
        return h, h

    program = PointwiseProgram(core, 1, 1, 1)
    assert_follows(program, core)
    b = random(STEP[1], seed=3)
    assert_follows(program, core)
    a = b
    assert_follows(program, core)


def test_changes_in_containers_partials_methods_and_slots_are_used() -> None:
    @dataclass(slots=True)
    class Config:
        tau: Tensor

    class Neuron:
        def __init__(self) -> None:
            self.config = Config(random(STEP[1], seed=2))
            self.table: dict[str, list[Any]] = {"gain": [random(STEP[1], seed=3), 0.5]}

        def charge(self, x: Tensor, v: Tensor) -> Tensor:
            gain, bias = self.table["gain"]
            charged: Tensor = v * self.config.tau + x * gain + bias
            return charged

        def step(self, bias: Any, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            h = self.charge(x, v) + bias
            return h, h

    neuron = Neuron()
    core = partial(neuron.step, random(STEP[1], seed=4))
    program = PointwiseProgram(core, 1, 1, 1)
    assert_follows(program, core)
    neuron.config.tau = random(STEP[1], seed=5)
    assert_follows(program, core)
    neuron.config = Config(random(STEP[1], seed=6))
    assert_follows(program, core)
    neuron.table["gain"][0] = random(STEP[1], seed=7)
    assert_follows(program, core)
    neuron.table["gain"][1] = 0.125
    assert_follows(program, core)
    neuron.table = {"gain": [random(1, seed=8), 2.0]}
    assert_follows(program, core)


class Scale(torch.autograd.Function):
    slope = 2.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * Scale.slope


def scaled(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h: Tensor = Scale.apply(v * 0.5 + x)
    return h, h


def test_constant_that_only_the_backward_reads_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    program = PointwiseProgram(scaled, 1, 1, 1)
    for slope in (2.0, 3.0):
        monkeypatch.setattr(Scale, "slope", slope)
        grads = []
        for results in (compiled(program, 1, [x := X.clone().requires_grad_()], [V]), None):
            output = (results or loop(scaled, 1, [x], [V]))[0]
            grads.append(torch.autograd.grad(output.sum(), x)[0])
        torch.testing.assert_close(*grads)
        assert grads[0][-1, 0, 0].item() == slope


@pytest.mark.parametrize("residuals", ["recompute", "save"])
def test_constant_that_changes_before_the_backward_is_refused(monkeypatch: pytest.MonkeyPatch, residuals: str) -> None:
    program = PointwiseProgram(scaled, 1, 1, 1, residuals=residuals)
    x = X.clone().requires_grad_()
    for _ in range(2):  # with a new trace, then with an old one
        monkeypatch.setattr(Scale, "slope", 2.0)
        output, _ = compiled(program, 1, [x], [V])
        monkeypatch.setattr(Scale, "slope", 3.0)
        with pytest.raises(CapturedTensorError, match=r"Scale\.slope.*Call backward\(\) before"):
            output.sum().backward()
        monkeypatch.setattr(Scale, "slope", 2.0)
        output.sum().backward()


def helper(h: Tensor) -> Tensor:
    return h * 2.0


def uses_helper(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = v * 0.5 + x
    return helper(h), h


def test_global_function_may_be_defined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    program = PointwiseProgram(uses_helper, 1, 1, 1)
    assert_follows(program, uses_helper)
    traced = find_specialization(program)
    assert find_specialization(program) is traced
    monkeypatch.setitem(globals(), "helper", lambda h: h - 1.0)
    assert_follows(program, uses_helper)


def test_unread_attributes_have_no_effect() -> None:
    core = Decay().to(DEVICE)
    program = PointwiseProgram(core, 1, 1, 1)
    assert_follows(program, core)
    traced = find_specialization(program)
    core.calls = 3  # type: ignore[assignment]
    core.register_load_state_dict_post_hook(lambda *args: None)  # type: ignore[no-untyped-call]
    assert find_specialization(program) is traced


def test_replaced_data_of_a_parameter_are_used() -> None:
    w = nn.Parameter(random(STEP[1], seed=2))

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v * w.data + x
        return h, h

    program = PointwiseProgram(core, 1, 1, 1)
    assert_follows(program, core)
    w.data = random(STEP[1], seed=3)
    assert_follows(program, core)
    with torch.no_grad():
        w.mul_(2.0)
    assert_follows(program, core)
    compiled(program, 1, [X], [V.clone().requires_grad_()])[0].sum().backward()
    assert w.grad is None or not w.grad.any()


def test_each_dtype_has_separate_captured_tensors() -> None:
    single, double = random(STEP[1], seed=2), random(STEP[1], seed=3)

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v * (double.to(v.dtype) if x.dtype == torch.float64 else single) + x
        return h, h

    program = PointwiseProgram(core, 1, 1, 1)
    for dtype in (torch.float32, torch.float64, torch.float32, torch.float64):
        x, v = X.to(dtype), V.to(dtype)
        actual, expected = compiled(program, 1, [x], [v]), loop(core, 1, [x], [v])
        assert torch.equal(actual[0], expected[0])


@pytest.mark.parametrize("view", ["row", "strided", "offset", "expanded", "slice_of_matrix", "scalar_of_matrix"])
def test_captured_views_equal_the_loop(view: str) -> None:
    rows, columns = STEP
    square, wide = random(columns, columns, seed=2), random(rows, 2 * columns, seed=3)
    reads: dict[str, Callable[[], Tensor]] = {
        "row": lambda: square[3],
        "strided": lambda: wide[:, ::2],
        "offset": lambda: wide[:, columns:],
        "expanded": lambda: square[:1].expand(rows, columns),
        "slice_of_matrix": lambda: wide[5:6, 2 : 2 + columns],
        "scalar_of_matrix": lambda: square[0][7],
    }
    read = reads[view]

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v * 0.5 + x * read()
        return h * h, h

    assert_like_the_loop(core, 1, [X], [V])


@pytest.mark.parametrize("view", ["transposed", "column", "expanded", "scalar", "matrix", "one_element"])
def test_captured_tensors_have_the_gradients_of_the_loop(view: str) -> None:
    rows, columns = STEP
    reads: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
        "transposed": ((columns, rows), lambda w: w.t()),
        "column": ((rows,), lambda w: w.unsqueeze(-1)),
        "expanded": ((1, columns), lambda w: w.expand(rows, columns)),
        "scalar": ((), lambda w: w),
        "matrix": (STEP, lambda w: w),
        "one_element": ((1, 1), lambda w: w),
    }
    shape, read = reads[view]
    leaf = random(*shape, seed=2) if shape else random(1, seed=2)[0]
    leaf.requires_grad_()

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v * 0.5 + x * read(leaf)
        return h * h, h

    assert_like_the_loop(core, 1, [X.clone().requires_grad_()], [V.clone().requires_grad_()], [leaf])


def test_parameter_that_is_not_contiguous_equals_the_loop() -> None:
    w = random(STEP[1], STEP[0], seed=2).t().requires_grad_()
    assert not w.is_contiguous()

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v * 0.5 + x * w
        return h * h, h

    assert_like_the_loop(core, 1, [X], [V], [w])


def test_bias_that_only_affects_recomputed_states_is_right() -> None:
    """Tests the VJP of `v w + x + b`, which does not read `b`, although its states depend on `b`."""
    w, b = (random(STEP[1], seed=seed).requires_grad_() for seed in (2, 3))

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v * w + x + b
        return h, h

    x = random(6, *STEP).requires_grad_()
    assert_like_the_loop(core, 1, [x], [V.clone().requires_grad_()], [w, b])


def test_captured_tensor_may_be_the_initial_state() -> None:
    v0 = V.clone().requires_grad_()

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v * 0.5 + x + v0
        return h * h, h

    assert_like_the_loop(core, 1, [X], [v0])
    assert_like_the_loop(core, 1, [v0.expand(3, *STEP)], [v0])


@pytest.mark.parametrize("step", [(0, 41, 37), (3, 41, 0)], ids=str)
@pytest.mark.parametrize("shape", [(41, 1), (1,), ()], ids=str)
def test_captured_tensors_have_zero_gradients_if_a_step_has_no_elements(
    step: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    """Tests a step such as that of an empty last batch: gradients are zeros, as in a loop."""
    gain = torch.ones(shape, device=DEVICE, requires_grad=True)

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v * 0.5 + x * torch.sigmoid(gain)
        return h * h, h

    leaves = [random(4, *step).requires_grad_(), random(*step).requires_grad_(), gain]
    for run in (compiled, loop):
        outputs, states = run(core, 1, leaves[:1], leaves[1:2])
        gradients = torch.autograd.grad(outputs.sum() + states.sum(), leaves)
        assert all(torch.equal(g, torch.zeros_like(leaf)) for g, leaf in zip(gradients, leaves, strict=True))
