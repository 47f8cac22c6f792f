"""`scan` follows the rules of autograd for aliases, modified tensors, required gradients, modes and threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
from runtime_cores import STEP, assert_like_the_loop, compiled, hard_lif, loop, random, soft_lif
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from flexsn_runtime import DoubleBackwardError, ScanProgram
from flexsn_runtime.kernels import _forward as forward_module

Results = Callable[..., tuple[Tensor, ...]]


def draw_leaves(steps: int = 6) -> tuple[Tensor, Tensor]:
    return random(steps, *STEP).requires_grad_(), random(*STEP, seed=1).requires_grad_()


def product(x: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = v * 0.5 + x * y
    return h * h, h


@pytest.mark.long(all_but=["1", "4", "9"])
@pytest.mark.parametrize("steps", [1, 2, 4, 5, 9])
def test_initial_states_have_the_gradients_of_the_loop(steps: int) -> None:
    x, v = draw_leaves(steps)
    assert_like_the_loop(soft_lif, 1, [x], [v])


def test_inputs_may_be_one_tensor_or_overlap() -> None:
    x, v = draw_leaves()
    assert_like_the_loop(product, 1, [x, x], [v])
    sequence = random(7, *STEP).requires_grad_()
    assert_like_the_loop(product, 1, [sequence[1:], sequence[:-1]], [sequence[3]])


def test_one_tensor_may_be_input_and_state() -> None:
    x = random(37, 37).requires_grad_()  # sequences [T, 37], with a state of [37]
    assert_like_the_loop(soft_lif, 1, [x], [x[0]])
    v = random(*STEP).requires_grad_()
    assert_like_the_loop(soft_lif, 1, [v.expand(5, *STEP)], [v])


def test_trace_leaves_no_autograd_graph() -> None:
    """Checks that the graph that a trace records is freed.

    Such a graph would keep the parameter's autograd node alive. A CUDA graph could then only be captured on the stream
    of this node.
    """
    weight = torch.tensor(0.3, requires_grad=True)

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v + x * torch.sigmoid(weight)
        return torch.sigmoid(h), h

    def find_traced_tensors() -> list[Tensor]:
        gc.collect()
        return [t for t in gc.get_objects() if type(t) is FakeTensor and t.grad_fn is not None]

    x, v = draw_leaves()
    old_tensors = {id(t): t for t in find_traced_tensors()}  # compilers may also keep such tensors
    torch.autograd.grad(compiled(core, 1, [x], [v])[0].sum(), [x, weight])
    assert not [t for t in find_traced_tensors() if id(t) not in old_tensors]


@pytest.mark.parametrize("which", ["input", "state", "parameter"])
def test_modifying_saved_tensors_raises(which: str) -> None:
    x, v = (t.detach().clone() for t in draw_leaves())
    w = random(STEP[1], seed=4).requires_grad_()

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v * 0.5 + x * w
        return h * h, h

    output = compiled(core, 1, [x], [v])[0]
    with torch.no_grad():
        {"input": x, "state": v, "parameter": w}[which].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_results_share_no_memory_with_arguments_or_each_other() -> None:
    def passes(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, x, v

    x, v = (t.detach() for t in draw_leaves())
    for state_seqs in (False, True):
        results = compiled(ScanProgram(passes, 1, 1, 2), 2, [x], [v], state_seqs=state_seqs)
        pointers = [t.data_ptr() for t in (x, v, *results)]
        assert len(set(pointers)) == len(pointers)
        assert torch.equal(results[0], x)


def test_only_requested_gradients_are_computed() -> None:
    x, v = draw_leaves()
    output, state = compiled(soft_lif, 1, [x.detach()], [v])
    (grad,) = torch.autograd.grad(state[-1].sum(), [v])
    (expected,) = torch.autograd.grad(loop(soft_lif, 1, [x.detach()], [v])[1][-1].sum(), [v])
    torch.testing.assert_close(grad, expected)
    assert output.requires_grad


def test_outputs_may_be_not_differentiable() -> None:
    x, v = draw_leaves()
    output, state = compiled(hard_lif, 1, [x], [v])
    assert not output.requires_grad
    assert state.requires_grad

    def spikes_only(x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)

    assert not compiled(spikes_only, 1, [x], [])[0].requires_grad


def test_requires_grad_mask_detaches_inputs() -> None:
    x, v = draw_leaves()
    program = ScanProgram(soft_lif, 1, 1, 1, requires_grad=(False, True))
    compiled(program, 1, [x], [v])[0].sum().backward()
    assert x.grad is None
    assert v.grad is not None


def test_no_checkpoints_are_written_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    checkpoint_rows = forward_module.checkpoint_rows

    def record_rows(num_steps: int, chunk: int) -> int:
        rows.append(checkpoint_rows(num_steps, chunk))
        return rows[-1]

    monkeypatch.setattr(forward_module, "checkpoint_rows", record_rows)
    x, v = draw_leaves()
    expected = loop(soft_lif, 1, [x], [v])[0]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            output = compiled(soft_lif, 1, [x], [v])[0]
        assert torch.equal(output, expected)
        assert not output.requires_grad
    assert not rows
    compiled(soft_lif, 1, [x], [v])
    assert rows


def test_tracing_in_inference_mode_serves_training() -> None:
    program = ScanProgram(soft_lif, 1, 1, 1)
    x, v = draw_leaves()
    with torch.inference_mode():
        compiled(program, 1, [x.detach()], [v.detach()])
    compiled(program, 1, [x], [v])[0].sum().backward()
    y, w = draw_leaves()
    loop(soft_lif, 1, [y], [w])[0].sum().backward()
    for a, b in ((x, y), (v, w)):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad, b.grad)


def test_retained_graph_allows_a_second_backward() -> None:
    x, v = draw_leaves()
    output = compiled(soft_lif, 1, [x], [v])[0]
    (first,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(output.sum(), x)
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(output.sum(), x)


@pytest.mark.long(all_but=["not"])
@pytest.mark.parametrize("loss", [torch.sum, lambda output: output.square().sum()], ids=["constant", "not"])
def test_double_backward_is_refused_for_any_incoming_gradient(
    loss: Callable[[Tensor], Tensor],
) -> None:
    x, v = draw_leaves()
    output = compiled(soft_lif, 1, [x], [v])[0]
    (grad,) = torch.autograd.grad(loss(output), x, create_graph=True)
    with pytest.raises(DoubleBackwardError, match="no gradient itself"):
        (grad.square().sum() + x.sum()).backward()


def test_create_graph_without_a_second_backward_raises_no_error() -> None:
    x, v = draw_leaves()
    output = compiled(soft_lif, 1, [x], [v])[0]
    (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(loop(soft_lif, 1, [x], [v])[0].sum(), x)
    torch.testing.assert_close(grad.detach(), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_the_scan(reentrant: bool) -> None:
    x, v = draw_leaves()
    w = random(STEP[1], seed=4).requires_grad_()
    program = ScanProgram(lambda x, v: (v * w + x.square(), v * 0.5 + x * w), 1, 1, 1)

    def run(x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        runs.append(torch.is_grad_enabled())
        return compiled(program, 1, [x], [v])

    def gradients(results: tuple[Tensor, ...]) -> list[Tensor | None]:
        for leaf in (x, v, w):
            leaf.grad = None
        # This calls `backward`, because reentrant checkpointing does not support `autograd.grad`.
        (results[0].sum() + results[1].sin().sum()).backward()
        return [x.grad, v.grad, w.grad]

    runs: list[bool] = []
    expected = gradients(run(x, v))
    actual = gradients(torch.utils.checkpoint.checkpoint(run, x, v, use_reentrant=reentrant))
    assert runs == [True, not reentrant, True]
    for gradient, reference in zip(actual, expected, strict=True):
        assert gradient is not None
        assert reference is not None
        assert torch.equal(gradient, reference)


def test_gradients_of_two_runs_are_bitwise_equal() -> None:
    w = random(STEP[1], seed=4).requires_grad_()

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v * 0.5 + x * w
        return h * h, h

    x, v = draw_leaves()
    first, second = (torch.autograd.grad(compiled(core, 1, [x], [v])[0].sum(), [x, v, w]) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_threads_share_a_program() -> None:
    """Runs new shapes in several threads at once, and checks that all results are right."""
    program = ScanProgram(soft_lif, 1, 1, 1)
    problems = [(random(5, 600 + 7 * i, seed=i), random(600 + 7 * i, seed=9)) for i in range(4)]
    expected = [loop(soft_lif, 1, [x], [v]) for x, v in problems]
    errors: list[BaseException] = []
    start = threading.Barrier(8)

    def work(i: int) -> None:
        try:
            start.wait()
            for _ in range(2):
                x, v = problems[i]
                results = compiled(program, 1, [x.clone().requires_grad_()], [v])
                results[0].sum().backward()
                for a, b in zip(results, expected[i], strict=True):
                    assert torch.equal(a, b)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i % 4,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
