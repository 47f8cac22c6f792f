"""Kernels compute the right offsets, so strided and broadcast inputs have the results of the loop."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from runtime_cores import DEVICE, STEP, assert_like_the_loop, compiled, loop, random, soft_lif
from torch import Tensor

from flexsn_codegen import DENSE
from flexsn_runtime import ShapeError
from flexsn_runtime.operands._layout import Terms, broadcast_shape, broadcast_strides, step_terms


def compute_offsets_by_terms(terms: Terms, numel: int) -> list[int]:
    """Returns the offset that the kernel computes for each element."""
    if terms.layout == DENSE:
        return list(range(numel))
    triples = list(zip(*[iter(terms.numbers)] * 3, strict=True))
    assert len(triples) == terms.layout
    return [sum(off // inner % size * stride for inner, size, stride in triples) for off in range(numel)]


def compute_offsets_by_indexing(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    indices = itertools.product(*(range(size) for size in shape))
    return [sum(i * stride for i, stride in zip(index, strides, strict=True)) for index in indices]


SHAPES = ((), (1,), (5,), (3, 4), (1, 4), (3, 1), (1, 1), (2, 3, 4), (2, 1, 4), (2, 3, 1, 2))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_terms_compute_the_offsets_of_permuted_and_broadcast_tensors(shape: tuple[int, ...]) -> None:
    count = 0
    for order in itertools.permutations(range(len(shape))):
        permuted = torch.empty([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])
        for spread in itertools.product((False, True), repeat=len(shape)):
            strides = [0 if s else stride for s, stride in zip(spread, permuted.stride(), strict=True)]
            terms = step_terms(shape, strides)
            assert compute_offsets_by_terms(terms, permuted.numel()) == compute_offsets_by_indexing(shape, strides)
            count += 1
    assert count >= 2 ** len(shape)


@pytest.mark.parametrize(
    ("shape", "strides", "layout"),
    [
        ((3, 4), (4, 1), DENSE),
        ((1, 3, 1, 4), (77, 4, 99, 1), DENSE),  # the stride of a dimension of size 1 is irrelevant
        ((3, 4), (0, 0), 0),
        ((3, 4), (0, 1), 1),
        ((3, 4), (1, 0), 1),
        ((3, 4), (8, 2), 1),  # every second element is read, so the distances are equal
        ((3, 4), (1, 3), 2),
        ((2, 3, 4), (12, 1, 3), 3),
        ((1,), (5,), DENSE),
    ],
)
def test_offsets_have_the_fewest_terms(shape: tuple[int, ...], strides: tuple[int, ...], layout: int) -> None:
    assert step_terms(shape, strides).layout == layout


@pytest.mark.parametrize("shape", [(4,), (1, 4), (3, 1), (1, 1), (2, 1, 4), ()], ids=str)
def test_broadcast_strides_equal_those_of_expand(shape: tuple[int, ...]) -> None:
    step, tensor = (2, 3, 4), torch.empty(shape)
    strides = broadcast_strides(shape, tensor.stride(), step)
    expanded = tensor.expand(step).stride()
    assert [s for s, n in zip(strides, step, strict=True) if n > 1] == list(expanded)


def test_shapes_that_do_not_broadcast_are_named() -> None:
    assert broadcast_shape([(3, 1), (4,)]) == (3, 4)
    with pytest.raises(ShapeError, match=r"\[3\], \[4\].*do not broadcast.*give all of them"):
        broadcast_shape([(3,), (4,)])


def make_strided_inputs(steps: int) -> dict[str, Tensor]:
    rows, columns = STEP
    dense = random(steps, *STEP, seed=1)
    return {
        "transposed": random(steps, columns, rows, seed=2).transpose(1, 2),
        "time_last": random(*STEP, steps, seed=3).movedim(-1, 0),
        "every_other_step": random(2 * steps, *STEP, seed=4)[::2],
        "every_other_column": random(steps, rows, 2 * columns, seed=5)[..., ::2],
        "reversed_by_flip": dense.flip(0),
        "offset_view": random(steps + 3, *STEP, seed=6)[3:],
        "part_of_columns": random(steps, rows, columns + 7, seed=7)[..., 3:-4],
        "constant_over_time": random(1, *STEP, seed=8).expand(steps, *STEP),
        "one_row": random(steps, 1, columns, seed=9),
        "one_column": random(steps, rows, 1, seed=10),
        "one_value_per_step": random(steps, 1, 1, seed=11),
        "no_leading_dimension": random(steps, columns, seed=12),
        "one_value": random(1, 1, 1, seed=13).expand(steps, 1, 1),
        "overlapping_windows": random(steps + 4, *STEP, seed=14).as_strided((steps, *STEP), (1, columns, 1)),
        "lazily_negated": torch.complex(dense, dense).conj().imag,
    }


@pytest.mark.long(all_but=["one_row", "part_of_columns", "transposed", "lazily_negated", "one_value_per_step"])
@pytest.mark.parametrize("name", list(make_strided_inputs(1)))
def test_strided_and_broadcast_inputs_equal_the_loop(name: str) -> None:
    x = make_strided_inputs(6)[name].detach().requires_grad_()
    v = random(*STEP, seed=20).requires_grad_()
    assert_like_the_loop(soft_lif, 1, [x], [v])


def test_channels_last_inputs_equal_the_loop() -> None:
    x = random(5, 3, 11, 7, 9).flatten(0, 1)[: 5 * 3].unflatten(0, (5, 3))
    x = torch.stack([t.to(memory_format=torch.channels_last) for t in x]).movedim(2, -1).movedim(-1, 2)
    x = x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    assert x[0].is_contiguous(memory_format=torch.channels_last)
    v = random(3, 11, 7, 9).to(memory_format=torch.channels_last)
    assert_like_the_loop(soft_lif, 1, [x.requires_grad_()], [v.requires_grad_()])


@pytest.mark.long(all_but=["expanded", "sliced"])
@pytest.mark.parametrize("name", ["transposed", "expanded", "sliced"])
def test_strided_states_equal_the_loop(name: str) -> None:
    rows, columns = STEP
    states = {
        "transposed": random(columns, rows).t(),
        "expanded": random(1, columns).expand(STEP),
        "sliced": random(rows, 2 * columns)[:, ::2],
    }
    v = states[name].detach().requires_grad_()
    assert_like_the_loop(soft_lif, 1, [random(5, *STEP).requires_grad_()], [v])


def test_inputs_that_broadcast_to_each_other_equal_the_loop() -> None:
    def core(x: Tensor, y: Tensor, z: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v * 0.5 + x * y - z
        return h * 2.0, h

    rows, columns = STEP
    inputs = [random(5, rows, 1), random(5, columns, seed=1), random(5, 1, 1, seed=2)]
    leaves = [x.requires_grad_() for x in inputs]
    assert_like_the_loop(core, 1, leaves, [random(*STEP, seed=3).requires_grad_()])


def test_step_without_dimensions_equals_the_loop() -> None:
    for x in (random(9), random(18)[::2], random(1).expand(9)):
        v = random(1, seed=1)[0]
        assert_like_the_loop(soft_lif, 1, [x.detach().requires_grad_()], [v.requires_grad_()])


@pytest.mark.long(all_but=["(1,)", "(512,)", "(513,)"])
@pytest.mark.parametrize("step", [(1,), (1, 1), (512,), (513,), (1, 1000)], ids=str)
def test_sizes_around_a_block_equal_the_loop(step: tuple[int, ...]) -> None:
    x, v = random(5, *step).requires_grad_(), random(*step, seed=1).requires_grad_()
    assert_like_the_loop(soft_lif, 1, [x], [v])


@pytest.mark.long(all_but=["(3, 0)"])
@pytest.mark.parametrize("step", [(0,), (3, 0), (0, 2)], ids=str)
def test_step_without_elements_has_empty_gradients(step: tuple[int, ...]) -> None:
    x = random(4, *step).requires_grad_()
    v = random(*step).requires_grad_()
    for state_seqs, shape in ((True, (4, *step)), (False, step)):
        output, state = compiled(soft_lif, 1, [x], [v], state_seqs=state_seqs)
        assert output.shape == (4, *step)
        assert state.shape == shape
        grads = torch.autograd.grad([output, state], [x, v], [output, state])
        assert [g.shape for g in grads] == [x.shape, v.shape]


@pytest.mark.long(all_but=["expanded", "negated"])
@pytest.mark.parametrize("layout", ["expanded", "transposed", "sliced", "negated"])
def test_strided_incoming_gradients_equal_the_loop(layout: str) -> None:
    x, v = random(6, *STEP).requires_grad_(), random(*STEP, seed=1).requires_grad_()
    weights = {
        "expanded": torch.ones((), device=DEVICE).expand(6, *STEP),
        "transposed": random(6, *STEP[::-1], seed=2).transpose(1, 2),
        "sliced": random(12, *STEP, seed=3)[::2],
        "negated": torch.complex(random(6, *STEP), random(6, *STEP, seed=4)).conj().imag,
    }[layout]
    results = [compiled(soft_lif, 1, [x], [v]), loop(soft_lif, 1, [x], [v])]
    actual, expected = (torch.autograd.grad(r, [x, v], [weights, weights]) for r in results)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_sum_over_a_slice_of_the_output_has_the_gradient_of_the_loop() -> None:
    x, v = random(6, *STEP).requires_grad_(), random(*STEP, seed=1).requires_grad_()
    for results in (compiled, loop):
        s, h = results(soft_lif, 1, [x], [v])
        (s[2, :, ::3].sum() + h[-1].sum() + s[4:].mean()).backward()
    assert x.grad is not None
    total, x.grad = x.grad, None
    s, h = loop(soft_lif, 1, [x], [v])
    (s[2, :, ::3].sum() + h[-1].sum() + s[4:].mean()).backward()
    assert x.grad is not None
    torch.testing.assert_close(total, 2.0 * x.grad)
