"""Gradients of cores that compute with captured tensors: in place, in custom functions, and with frozen tensors.

The values, dtypes and gradients of each compiled core are compared with the loop. If a core cannot be compiled, an
error names the line that is not supported.
"""

from __future__ import annotations

import pytest
import torch
from gradient_cores import NUMBERS, STEP, Call, Core, build, compare, one_call, random_core

from flexsn_graph import UnsupportedCoreError
from flexsn_nn import FlexSN

pytestmark = pytest.mark.usefixtures("interpreted")

# `w0` has the shape of one row, `w1` has two rows, and `w2` has the shape of the step. `x0` is the input, and `v0` is
# the state.
IN_PLACE = {
    "multiplied": "thr = 2.0 * w0; thr *= 3.0; return x0 * thr, v0 + x0",
    "added to a copy": "h = w0.clone(); h.add_(w0); return x0 * h, v0 + x0",
    "added to zeros": "h = torch.zeros_like(w0); h.add_(w0); return x0 * h, v0 + x0",
    "by a function of the original": "h = w0 * 1.0; h.mul_(torch.tanh(w0)); return x0 * h, v0 + x0",
    "in an expression": "return x0 * torch.zeros_like(w0).add_(w0), v0 + x0",
    "copied and filled": "h = w0 * 2.0; k = h * 3.0; k.copy_(h); h.fill_(2.0); return x0 * h, v0 + x0 * k",
    "masked": "h = w0 * 2.0; h.masked_fill_(h > 0, 0.5); h.clamp_(-1, 1); return x0 * h.sum(), v0 + x0 * h",
    "by a mask as index": "h = w0 * 2.0; h[h > 0] = 0.5; return x0 * h, v0 + x0",
    "by elements": "h = torch.zeros_like(w1); h[0] = w1[1]; h[1] = w1[0] * 2.0; return x0 * h[0] + v0 * h[1], v0 + x0",
    "by indices": "h = torch.zeros_like(w0); h.index_put_((torch.tensor([1]),), w0[:1]); return x0 * h, v0 + x0",
    "rows of the step": "h = torch.zeros_like(w2); h[0] = w0; return x0 * h, v0 + x0",
    "through views": "h = w2.clone(); h[0].mul_(2.0); h[1] += 0.5; return x0 * h, v0 + x0 * h.sum()",
    "into new memory": "h = torch.zeros(2, 4, dtype=x0.dtype); h[0] = w0; return x0 * h.sum(0), v0 + x0",
    "foreach": "h = w0 * 2.0; torch._foreach_mul_([h], 2.0); return x0 * h.sum(), v0 + x0",
    "detached": "h = w0 * 2.0; k = h.sum(); h.detach_(); return x0 * h * w0 + k, v0 + x0 * h.sum()",
    "relu": "h = w0 * 2.0; torch.nn.functional.relu(h, inplace=True); return x0 * h.mean(), v0 + x0 * h",
    "a copy, multiplied by the input": "h = w2 * 1.0; h.mul_(x0); return h, v0 + h * w2.sum()",
    "a tensor from before the loop, multiplied by the input": "h = w2.flip(0); h.mul_(x0); return h, v0 + x0",
    "data": "return x0 * (w0.data * w0).sum() + (w0 * w0).sum() * v0, v0 + x0",
}
FUNCTIONS = {
    "row": "return x0 * Rounded.apply(w1)[1], v0 + x0",
    "sum": "return x0 * Rounded.apply(w1).sum(), v0 + x0",
    "softmax": "return x0 * Rounded.apply(w0).softmax(0), v0 + x0",
    "hardswish": "return x0 * torch.nn.functional.hardswish(Rounded.apply(w0)), v0 + x0",
    "argument returned": "return x0 * Passed.apply(w0).softmax(0), v0 + x0 * Passed.apply(w0)",
    "twice, with numbers": "return x0 * Scaled.apply(w0, 0.5).sum() + x0 * Scaled.apply(w0, 3.0).sum(), v0 + x0",
    "setup_context": "return x0 * Quantised.apply(w1, 3)[0], v0 + x0 * Quantised.apply(w0, 2)",
    "two results": "a, b = SumAndDifference.apply(w0, w0 * 2); return x0 * a.sum(), v0 + x0 * b.sum()",
    "a result without a gradient": "a, b = WithSign.apply(w0); return x0 * a.sum(), v0 + x0 * b.sum()",
    "nested": "return x0 * Nested.apply(w0).sum(), v0 + x0",
    "gradient that mixes elements": "return x0 * Centred.apply(w1)[0], v0 + x0",
    "as a threshold": "return Spike.apply(x0 + v0, Rounded.apply(w0).sum()), v0 + x0",
    "returned": "return Rounded.apply(w2), v0 + x0",
    "also of the input": "h = w2 * 2.0; a, b = SumAndDifference.apply(x0, h); return a, v0 + b * h.sum()",
    "gradient that mixes a whole step": "return x0 * Centred.apply(w0), v0 + x0",
    "gradient with a constant, step": "return Pulled.apply(x0) + Pulled.apply(w2) * v0, v0 + x0 + Pulled.apply(w2)",
    "a part as a threshold": "return Spike.apply(x0 + v0, Rounded.apply(w1)[0]), v0 + x0",
}
REFUSED = {
    "a hook": "h = w0 * 2.0; h.register_hook(lambda g: g * 2); return x0 * h, v0 + x0",
    "a gradient that is not linear": "return x0 * Signed.apply(w1)[0], v0 + x0",
    "a gradient with a constant": "return x0 * Pulled.apply(w0), v0 + x0",
    "a gradient with a constant, as a state": "return x0, 0.5 * v0 + Pulled.apply(w0)",
    "a constant gradient": "return x0 * Steady.apply(w0), v0 + x0",
    "a constant gradient of the whole step": "return x0 * Steady.apply(w2), v0 + x0",
    "a part, multiplied by the input": "h = w2.flip(0); h[0].mul_(x0[0]); return x0 * h, v0 + x0",
    "out=": "h = w0 * 2.0; torch.add(w0, 1.0, out=h); return x0 * h, v0 + x0",
    "out= of the input": "h = x0 * 2.0; torch.add(x0, 1.0, out=h); return x0 * h, v0 + x0",
}


@pytest.mark.long(
    all_but=[
        "in an expression",
        "by elements",
        "into new memory",
        "detached",
        "data",
        "twice, with numbers",
        "also of the input",
        "gradient with a constant, step",
    ]
)
@pytest.mark.parametrize("lines", [*IN_PLACE.values(), *FUNCTIONS.values()], ids=[*IN_PLACE, *FUNCTIONS])
def test_values_and_gradients_equal_the_loop(lines: str) -> None:
    outcome = compare(one_call(lines))
    assert (outcome.same, outcome.different, outcome.refused, outcome.broken) == (1, [], [], [])


# Cores for which autograd raises an error in the loop if a gradient is required.
NO_GRADIENT = {
    "overwritten": "h = 0.5 * w0; h.exp_(); h.sub_(h.mean()); return x0 * h, v0 + x0",
    "overwritten in the step": "h = torch.exp(x0); k = h * 1.0; h.mul_(2.0); return k * h, v0 + x0.detach()",
    "set": "h = w0.clone(); h.set_(h.clone()); return x0 * h, v0 + x0",
    "a view of a leaf": "h = w0.detach().clone(); h.requires_grad_(); h[:1].add_(0.5); return x0 * h, v0 + x0",
}

# For each case: an expression, and the lines of a core. `d0` is the value of the expression, computed before the call.
# The core captures `d0` and the tensors of the expression, and all of these tensors require gradients.
HISTORIES = {
    "scaled": ("w0 * 1.5", "return x0 * d0 * w0, v0 + x0 * d0"),
    "with saved tensors": ("w0.abs().sqrt()", "return x0 * d0 + w0, v0 + x0 * d0"),
    "a view": ("w0.view(-1).view(w0.shape)", "return x0 * d0 + w0.detach(), v0 + x0 * w0"),
    "a part": ("w1[0]", "return x0 * d0 * w1[0], v0 + x0 * w1[1]"),
    "in place": ("w0 * 1.5", "h = d0.clone(); h.mul_(w0); h += d0; return x0 * h, v0 + x0"),
    "before the loop": ("w1.abs().sqrt()", "return x0 * d0[0] * w1[1], v0 + x0 * (d0 * w1).sum()"),
    "returned": ("w2 * 1.5", "return d0, v0 + x0 * w2"),
    "transposed": ("w1.exp()", "return x0 * d0.T[0, 1] * w1[0], v0 + x0 * d0.data[0]"),
    "in a function with the input": ("w0.exp()", "return Spike.apply(x0 + v0, d0 * 1.0), v0 + x0 * w0"),
    "in a function of a copy": ("w0.exp()", "return x0 * Scaled.apply(d0.clone(), 0.5), v0 + x0 * w0"),
    "in a function and in an operation": ("w0.exp()", "return x0 * Scaled.apply(d0, 0.5), v0 + x0 * d0.softmax(0)"),
    "in a function before the loop": ("w1.exp()", "return x0 * Rounded.apply(d0)[1], v0 + x0 * d0[0]"),
}


@pytest.mark.long(
    all_but=[
        "a hook",
        "a gradient that is not linear",
        "a gradient with a constant",
        "a constant gradient",
        "a part, multiplied by the input",
        "out=*",
    ]
)
@pytest.mark.parametrize("lines", REFUSED.values(), ids=REFUSED)
def test_errors_name_unsupported_lines(lines: str) -> None:
    outcome = compare(one_call(lines))
    assert len(outcome.refused) + outcome.no_core == 1
    # `out=` also fails in the loop, with an error of torch.
    if outcome.no_core == 0:
        assert "<core" in outcome.refused[0] or "gradient_cores.py" in outcome.refused[0]


def test_out_argument_is_refused_without_gradients() -> None:
    core = one_call(REFUSED["out="])
    core.calls[0].mode = "no_grad"
    (refused,) = compare(core).refused
    assert "with out=" in refused
    assert "torch.add(w0, 1.0, out=h)" in refused


@pytest.mark.long(all_but=["overwritten*", "a view of a leaf"])
@pytest.mark.parametrize("name", NO_GRADIENT)
def test_missing_gradient_is_refused(name: str) -> None:
    built = build(one_call(NO_GRADIENT[name]), torch.float64, "cpu")
    x = torch.linspace(-1, 1, 3 * 12, dtype=torch.float64).view(3, *STEP).requires_grad_()
    neuron = FlexSN(built.function, 1, 1, 1, backend="triton")
    with pytest.raises(UnsupportedCoreError, match=r"at <core \d+>:\d+, in core: "):
        torch.autograd.grad(neuron(x).sum(), [x, built.parameters["w0"]], allow_unused=True)


@pytest.mark.long(all_but=["set", "overwritten in the step"])
@pytest.mark.parametrize("name", ["overwritten", "overwritten in the step", "set"])
def test_missing_gradient_is_accepted_if_not_required(name: str) -> None:
    core = one_call(NO_GRADIENT[name])
    core.calls[:] = [
        Call(3, (False,) * 3, (False, False), (True, True), state_seqs=False, mode="grad"),
        Call(3, (True,) * 3, (True, True), (False, True), state_seqs=False, mode="grad"),
    ]
    outcome = compare(core)
    assert (outcome.same, outcome.different, outcome.refused, outcome.broken) == (2, [], [], [])


@pytest.mark.long(all_but=["a view", "in place", "in a function and in an operation", "in a function before the loop"])
@pytest.mark.parametrize(("expression", "lines"), HISTORIES.values(), ids=HISTORIES)
def test_captured_tensors_may_depend_on_each_other(expression: str, lines: str) -> None:
    core = one_call(lines)
    core.derived["d0"] = expression
    core.calls.append(Call(2, (False, True, True), (True,) * 2, (True,) * 2, state_seqs=True, mode="grad"))
    core.calls.append(Call(9, (True, True, True), (True, False), (True,) * 2, state_seqs=False, mode="grad"))
    outcome = compare(core)
    assert (outcome.same, outcome.different, outcome.refused, outcome.broken) == (3, [], [], [])


def test_function_of_a_computed_tensor_is_refused() -> None:
    core = one_call("h = Scaled.apply(d0, 0.5); return x0 * h, v0 + x0 * w0")
    core.derived["d0"] = "w0.exp()"
    (refused,) = compare(core).refused
    assert "computed from another captured tensor" in refused
    assert "h = Scaled.apply(d0, 0.5)" in refused or "gradient_cores.py" in refused


@pytest.mark.parametrize("lines", NUMBERS.values(), ids=NUMBERS)
def test_scalars_on_the_cpu_equal_the_loop(lines: str) -> None:
    outcome = compare(one_call(lines))
    assert (outcome.same, outcome.different, outcome.refused, outcome.broken) == (1, [], [], [])


# Half of the random cores read a value that changes between the calls. Core 964 replaces the memory of a tensor, so a
# later tensor may have the old address.
@pytest.mark.long(all_but=["964", "0"])
@pytest.mark.parametrize("seed", [*range(12), 964])
def test_random_cores_equal_the_loop_in_random_calls(seed: int) -> None:
    outcome = compare(random_core(seed))
    assert outcome.different + outcome.broken == []


def test_random_cores_read_values_in_many_places() -> None:
    cores = [random_core(seed) for seed in range(200)]
    assert len({core.place for core in cores}) > 50
    changed = sum(any(call.assigned is not None for call in core.calls) for core in cores)
    assert changed > 50


# Steps with a state that the loss does not read. The derivative of the last step may be infinite.
ABSENT = {
    "a root": "return x0 + v0, torch.sqrt(v0.abs())",
    "a root of the input": "return x0 * w0, v0.abs().sqrt() + x0.relu().sqrt()",
    "masked": "return x0 + v0, torch.where(x0 > 0, torch.sqrt(x0), 0.0 * x0)",
    "of a parameter": "return x0 + 0.5 * v0, v0 * torch.log(w0)",
    "used without a gradient": "return x0.detach() + v0, v0 * 0.5 + (x0 > 0)",
    "a neuron": "s = Spike.apply(v0 + x0, w0); return s, (v0 + x0) * (1.0 - s)",
}


@pytest.mark.long(
    all_but=[
        "a neuron-recompute",
        "a root of the input-recompute",
        "masked-recompute",
        "used without a gradient-recompute",
    ]
)
@pytest.mark.parametrize("residuals", ["recompute", "save"])
@pytest.mark.parametrize("lines", ABSENT.values(), ids=ABSENT)
def test_absent_gradient_is_not_zero(lines: str, residuals: str) -> None:
    core = one_call(lines)
    losses = ((True, False), (True, True), (False, True))
    core.calls[:] = [
        Call(steps, (True,) * 3, (True, True), in_loss, state_seqs=False, mode="grad")
        for steps in (1, 2, 9)
        for in_loss in losses
    ]
    outcome = compare(core, residuals=residuals)
    assert (outcome.same, outcome.different, outcome.refused, outcome.broken) == (9, [], [], [])


def test_gradients_pass_between_states() -> None:
    body = "return x0 + v0, torch.sqrt(v1.abs()), torch.sqrt(x0.abs()) + v0"
    core = Core(f"def core(x0, v0, v1):\n    {body}\n", (1, 2, 1), {}, {})
    core.calls += [
        Call(steps, (), (True,) * 3, in_loss, state_seqs=False, mode="grad")
        for steps in (1, 2, 3, 10)
        for in_loss in ((True, False, False), (False, True, False), (False, False, True))
    ]
    outcome = compare(core)
    assert (outcome.same, outcome.different) == (12, [])


def test_parameters_may_be_frozen_and_unfrozen() -> None:
    w = torch.linspace(0.5, 1.5, 4).requires_grad_()
    x = torch.linspace(-1, 1, 3 * 12).view(3, *STEP).requires_grad_()
    neurons = [
        FlexSN(lambda x, v: (x * w.softmax(0) + v * w, 0.5 * v + x), 1, 1, 1, backend=backend)
        for backend in ("triton", "torch")
    ]
    for requires_grad in (False, True, False, True, True):
        w.requires_grad_(requires_grad)
        results = []
        for neuron in neurons:
            neuron.reset()
            output = neuron(x)
            results.append(torch.autograd.grad(output.sum(), [x, *([w] if requires_grad else [])]))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
    assert len(neurons[0]._get_program().specializations) == 2, (
        "one specialization for the frozen parameter, and one for the trained parameter"
    )


@pytest.mark.parametrize("backend", ["torch", "triton", "hop"])
def test_no_steps_return_the_initial_state(backend: str) -> None:
    core = lambda x, v: ((x + v > 0).to(x.dtype), (x > v).to(x.dtype))  # noqa: E731
    neuron = FlexSN(core, 1, 1, 1, backend=backend, example_outputs=[torch.zeros(4)])
    state = torch.ones(4, requires_grad=True)
    _, (final,) = neuron.step(torch.zeros(0, 4), [state])
    (gradient,) = torch.autograd.grad(final.sum(), state)
    assert gradient.tolist() == [1.0] * 4
