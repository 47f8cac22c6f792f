from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hop_cores import CASES, SPIKES, Case, Core, if_core, smooth_spike, value_and_gradients
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flexsn_hop import OutputTemplateSpec, eager_scan, eager_scan_final_state

STEPS = [1, 2, 7]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def run_by_hand(core: Core, case: Case, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Computes a scan by its definition, without the package."""
    inputs = arguments[: case.num_inputs]
    states = list(arguments[case.num_inputs : case.num_inputs + case.num_states])
    lifted = arguments[case.num_inputs + case.num_states :]
    columns: list[list[torch.Tensor]] = [[] for _ in range(case.num_outputs + case.num_states)]
    for t in range(inputs[0].shape[0]):
        values = core(*[sequence[t] for sequence in inputs], *states, *lifted)
        states = list(values[case.num_outputs :])
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    return [torch.stack(column) for column in columns]


@cases
@pytest.mark.parametrize("spike", SPIKES)
@pytest.mark.parametrize("steps", STEPS)
def test_eager_scan_equals_its_definition(case: Case, spike: str, steps: int) -> None:
    core = case.make(SPIKES[spike])
    arguments = case.arguments(steps)
    expected = value_and_gradients(lambda *flat: run_by_hand(core, case, flat), arguments)
    actual = value_and_gradients(lambda *flat: eager_scan(core, *case.counts, *flat), arguments)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@cases
def test_final_state_is_the_last_state_of_the_sequence(case: Case) -> None:
    core = case.make(SPIKES["function"])
    arguments = case.arguments(7)

    def last_of_sequence(*flat: torch.Tensor) -> list[torch.Tensor]:
        results = eager_scan(core, *case.counts, *flat)
        states = results[case.num_outputs :]
        return [*results[: case.num_outputs], *(sequence[-1] for sequence in states)]

    expected = value_and_gradients(last_of_sequence, arguments)
    actual = value_and_gradients(lambda *flat: eager_scan_final_state(core, *case.counts, *flat), arguments)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


# Detached resets are excluded, because their gradient intentionally differs from the derivative.
@pytest.mark.parametrize("case", [c for c in CASES if not c.name.endswith("detached")], ids=lambda case: case.name)
def test_gradients_pass_gradcheck(case: Case) -> None:
    core = case.make(smooth_spike)
    arguments = case.arguments(3, (2, 3), torch.float64)
    for run in (eager_scan, eager_scan_final_state):
        assert torch.autograd.gradcheck(functools.partial(run, core, *case.counts), arguments)


def test_all_forms_of_surrogates_have_equal_gradients() -> None:
    case = CASES[1]
    arguments = case.arguments(7, dtype=torch.float64)
    results = [
        value_and_gradients(functools.partial(eager_scan, case.make(spike), *case.counts), arguments)
        for spike in SPIKES.values()
    ]
    torch.testing.assert_close(results[0], results[1])
    spikes = results[1][0][0]
    assert set(spikes.flatten().tolist()) == {0.0, 1.0}


def test_leaky_integrator_equals_its_closed_form() -> None:
    # v[t] = a v[t-1] + x[t], so v[T] = a^T v0 + sum a^(T-t) x[t]. The gradients follow from this.
    decay = 0.5
    x = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64, requires_grad=True)
    v0 = torch.tensor(8.0, dtype=torch.float64, requires_grad=True)
    a = torch.tensor(decay, dtype=torch.float64, requires_grad=True)

    def core(x: torch.Tensor, v: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        new = a * v + x
        return new, new

    output, last = eager_scan_final_state(core, 1, 1, 1, x, v0, a)
    assert output.tolist() == [5.0, 4.5, 6.25]
    assert last.item() == 6.25
    grads = torch.autograd.grad(last, [x, v0, a])
    assert grads[0].tolist() == [0.25, 0.5, 1.0]
    assert grads[1].item() == 0.125
    assert grads[2].item() == pytest.approx(3 * decay**2 * 8 + 2 * decay * 1 + 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_dtypes_are_kept(dtype: torch.dtype) -> None:
    x = torch.ones(3, 2, dtype=dtype)
    outputs, states = eager_scan(lambda x, v: (x + v, x * v), 1, 1, 1, x, torch.ones(2, dtype=dtype))
    assert outputs.dtype == states.dtype == dtype


def test_integer_and_boolean_values_are_allowed() -> None:
    x = torch.arange(6).reshape(3, 2)
    fired, count = eager_scan(lambda x, n: (x > 2, n + x), 1, 1, 1, x, torch.zeros(2, dtype=torch.int64))
    assert fired.tolist() == [[False, False], [False, True], [True, True]]
    assert count.tolist() == [[0, 1], [2, 4], [6, 9]]


def test_core_may_have_no_states_or_no_outputs() -> None:
    x = torch.randn(4, 2)
    (doubled,) = eager_scan(lambda x: 2 * x, 1, 0, 1, x)
    torch.testing.assert_close(doubled, 2 * x, rtol=0, atol=0)
    (total,) = eager_scan_final_state(lambda x, v: v + x, 1, 1, 0, x, torch.zeros(2))
    torch.testing.assert_close(total, x.sum(0))


def test_inputs_may_have_different_shapes() -> None:
    x, gain = torch.randn(4, 2, 3), torch.randn(4, 1, 3)
    (product,) = eager_scan(lambda x, g: x * g, 2, 0, 1, x, gain)
    torch.testing.assert_close(product, x * gain, rtol=0, atol=0)


@pytest.mark.parametrize("steps", [0, 3])
def test_final_states_share_no_memory(steps: int) -> None:
    x, v, w = torch.randn(steps, 2), torch.randn(2), torch.randn(2)
    _, first, second, third = eager_scan_final_state(
        lambda x, v, w, u: (x, v, w, w),
        1, 3, 1, x, v, w, w.clone(),
        output_template_specs=[((2,), torch.float32)],
    )  # fmt: skip
    pointers = {t.untyped_storage().data_ptr() for t in (x, v, w, first, second, third) if t.numel()}
    assert len(pointers) == (5 if steps == 0 else 6)


def test_closures_and_parameters_have_gradients() -> None:
    class Decay(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([0.3, -0.2]))

        def forward(self, x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = v + (x - v) * torch.sigmoid(self.weight)
            return h, h

    module = Decay()
    x, v = torch.randn(5, 2), torch.zeros(2)
    loss = eager_scan(module, 1, 1, 1, x, v)[0].sum()
    (through_module,) = torch.autograd.grad(loss, [module.weight])
    weight = module.weight.detach().clone().requires_grad_()

    def lifted(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = v + (x - v) * torch.sigmoid(w)
        return h, h

    loss = eager_scan(lifted, 1, 1, 1, x, v, weight)[0].sum()
    (expected,) = torch.autograd.grad(loss, [weight])
    torch.testing.assert_close(through_module, expected, rtol=0, atol=0)
    assert expected.abs().min() > 0


@pytest.mark.parametrize("run", [eager_scan, eager_scan_final_state])
def test_empty_scan_returns_initial_states_and_empty_outputs(run: Core) -> None:
    def never(x: torch.Tensor, v: torch.Tensor) -> None:
        raise AssertionError("the core of an empty scan is not called")

    x = torch.zeros(0, 2, dtype=torch.float64)
    v = torch.randn(2, 3, requires_grad=True)
    specs = [((2, 5), torch.float16), ((), torch.bool, torch.device("cpu"))]
    first, second, state = run(never, 1, 1, 2, x, v, output_template_specs=specs)
    assert (first.shape, first.dtype, first.device) == ((0, 2, 5), torch.float16, x.device)
    assert (second.shape, second.dtype) == ((0,), torch.bool)
    assert state.dtype == v.dtype
    if run is eager_scan:
        assert state.shape == (0, 2, 3)
    else:
        torch.testing.assert_close(state, v, rtol=0, atol=0)
        assert state.untyped_storage().data_ptr() != v.untyped_storage().data_ptr()
        (gradient,) = torch.autograd.grad(state.sum(), [v])
        assert gradient.tolist() == torch.ones(2, 3).tolist()


def test_empty_scan_without_outputs_needs_no_specs() -> None:
    (states,) = eager_scan(lambda x, v: v, 1, 1, 0, torch.zeros(0, 2), torch.zeros(2))
    assert states.shape == (0, 2)


def test_template_may_name_a_device() -> None:
    x = torch.zeros(0, 2, device="meta")
    specs: list[OutputTemplateSpec] = [((2,), torch.float32), ((2,), torch.float32, "cpu")]
    first, second = eager_scan(lambda x: (x, x), 1, 0, 2, x, output_template_specs=specs)
    assert first.device.type == "meta"
    assert second.device.type == "cpu"


class Work(TorchDispatchMode):
    """Counts the elements that ops write."""

    written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.written += sum(t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor))
        return result


def count_written_elements(run: Callable[..., Sequence[torch.Tensor]], steps: int) -> int:
    x = torch.randn(steps, 8, requires_grad=True)
    with Work() as work:  # type: ignore[no-untyped-call]
        torch.autograd.grad(run(if_core(smooth_spike), 1, 1, 1, x, torch.zeros(8))[0].sum(), [x])
    count: int = work.written
    return count


def test_backward_is_linear_in_steps() -> None:
    def by_index(core: Core, *arguments: Any) -> Sequence[torch.Tensor]:
        return run_by_hand(core, CASES[0], arguments[3:])

    assert CASES[0].counts == (1, 1, 1)
    assert count_written_elements(eager_scan, 256) < 20 * count_written_elements(eager_scan, 16)
    # In contrast, the backward of each x[t] writes a gradient that is as large as x.
    assert count_written_elements(by_index, 256) > 100 * count_written_elements(by_index, 16)
