"""`scan` without a compiler equals a hand-written loop, including all derivatives, and has clear errors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_mode
from scan_steps import (
    RECURRENCES,
    Belief,
    Step,
    draw,
    float_leaves,
    kalman,
    looped,
    loss,
    moving_average,
    parameters_of,
    recurrence,
)
from torch import Tensor
from torch.func import grad, jacfwd, jvp, vmap
from torch.utils._pytree import register_dataclass, register_pytree_node, tree_leaves, tree_map

from flexsn_hop import errors, scan

Scan = Callable[..., tuple[Any, Any]]


@pytest.mark.long(all_but=["*-5", "counting-1"])
@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("name", RECURRENCES)
def test_scan_equals_the_loop(name: str, steps: int) -> None:
    case = recurrence(name, steps)
    leaves = [leaf.requires_grad_() for leaf in float_leaves((case.init, case.xs))] + parameters_of(case.step)
    results = scan(case.step, case.init, case.xs, **case.options)
    expected = looped(case.step, case.init, case.xs, **case.options)
    torch.testing.assert_close(results, expected, rtol=0, atol=0)
    gradients = torch.autograd.grad(loss(results), leaves)
    torch.testing.assert_close(gradients, torch.autograd.grad(loss(expected), leaves))


@pytest.mark.parametrize("name", ["minimal_gru", "kalman", "logsumexp"])
def test_second_derivatives_equal_the_loop(name: str) -> None:
    case = recurrence(name, 4)
    leaves = [leaf.requires_grad_() for leaf in float_leaves((case.init, case.xs))] + parameters_of(case.step)

    def twice(run: Scan) -> tuple[Tensor, ...]:
        results = run(case.step, case.init, case.xs, **case.options)
        first = torch.autograd.grad(loss(results).square(), leaves, create_graph=True)
        return torch.autograd.grad(loss(first), leaves)

    torch.testing.assert_close(twice(scan), twice(looped))


# Torch's forward mode scripts its own formulas.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("name", ["backwards", "minimal_gru", "kalman", "logsumexp"])
def test_forward_mode_equals_the_loop(name: str) -> None:
    case = recurrence(name, 4)

    def run(run_scan: Scan, init: Any, xs: Any) -> Any:
        return float_leaves(run_scan(case.step, init, xs, **case.options))

    tangents = tree_map(torch.cos, (case.init, case.xs))
    expected = jvp(functools.partial(run, looped), (case.init, case.xs), tangents)
    torch.testing.assert_close(jvp(functools.partial(run, scan), (case.init, case.xs), tangents), expected)
    with forward_mode.dual_level():
        duals = run(scan, *tree_map(forward_mode.make_dual, (case.init, case.xs), tangents))
        pairs = [forward_mode.unpack_dual(dual) for dual in duals]
    torch.testing.assert_close(([pair.primal for pair in pairs], [pair.tangent for pair in pairs]), expected)


def test_vmap_equals_the_loop() -> None:
    beliefs = Belief(draw(6, 5), draw(6, 5).square() + 1)
    xs = {"seen": draw(4, 6, 5), "noise": draw(4, 5).square() + 0.1}
    pair: Any = (0, 0)
    dims: Any = (Belief(*pair), {"seen": 1, "noise": None})

    def filter_one(run_scan: Scan, belief: Belief, xs: dict[str, Tensor]) -> Any:
        last, (means, _) = run_scan(kalman, belief, xs)  # vmap does not accept None
        return last, means

    results = vmap(functools.partial(filter_one, scan), dims)(beliefs, xs)
    torch.testing.assert_close(results, vmap(functools.partial(filter_one, looped), dims)(beliefs, xs))
    assert isinstance(results[0], Belief)

    def gradient(run_scan: Scan) -> Any:
        return vmap(grad(lambda belief, xs: loss(filter_one(run_scan, belief, xs))), dims)(beliefs, xs)

    torch.testing.assert_close(gradient(scan), gradient(looped))


def test_vmap_without_inputs_equals_the_loop() -> None:
    def powers(run_scan: Scan, base: Tensor) -> Any:
        return run_scan(lambda power, _: (power * base, power.sum()), torch.ones(3, dtype=torch.float64), length=4)

    bases = draw(6, 3)
    results, expected = (vmap(functools.partial(powers, run_scan))(bases) for run_scan in (scan, looped))
    torch.testing.assert_close(results, expected)
    jacobian = jacfwd(lambda base: powers(scan, base)[1])(bases[0])
    torch.testing.assert_close(jacobian, jacfwd(lambda base: powers(looped, base)[1])(bases[0]))


def test_captured_tensors_have_gradients() -> None:
    decay, module = draw(3).requires_grad_(), torch.nn.Linear(3, 3, dtype=torch.float64)
    leaves = [decay, *module.parameters()]

    def gradients(run_scan: Scan) -> Any:
        results = run_scan(lambda h, x: (h * decay + module(x), h.sum()), draw(3), draw(5, 3))
        return torch.autograd.grad(loss(results), leaves)

    torch.testing.assert_close(gradients(scan), gradients(looped))


@dataclass
class State:
    position: Tensor
    speed: Tensor


register_dataclass(State)


def test_structures_are_returned_unchanged() -> None:
    def fall(state: State, _: tuple[()]) -> tuple[State, tuple[Tensor, None]]:
        return State(state.position + state.speed, state.speed - 1), (state.position, None)

    state, (positions, nothing) = scan(fall, State(torch.tensor(0), torch.tensor(3)), (), length=4)
    assert state == State(torch.tensor(6), torch.tensor(-1))
    assert positions.tolist() == [0, 3, 5, 6]
    assert nothing is None
    swapped, _ = scan(lambda carry, _: ({"b": carry["b"], "a": carry["a"]}, None), {"a": V, "b": X}, length=2)
    assert [(key, value.shape) for key, value in swapped.items()] == [("a", V.shape), ("b", X.shape)]


class Pair:
    """A container that checks its elements, and is registered without names of its elements."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        assert first.dtype == second.dtype
        self.first, self.second = first, second


register_pytree_node(Pair, lambda pair: ([pair.first, pair.second], None), lambda parts, _: Pair(*parts))


@dataclass
class Span:
    """A container like `Pair` that is registered with names of its elements."""

    first: Tensor
    second: Tensor

    def __post_init__(self) -> None:
        assert self.first.shape == self.second.shape


register_dataclass(Span)


@dataclass
class Unknown:
    first: Tensor


def list_containers(kind: Any) -> Iterator[tuple[str, Step, Any, Any]]:
    """Yields (name, step, init, xs), with a container of this class in a different position each time."""
    x, v = draw(4, 3), draw(3)
    yield "xs", lambda c, x: (c + x.first, x.second * c), v, kind(x, x.cos())
    yield "carry", lambda c, x: (kind(c.second + x, c.first), c.first), kind(v, v.cos()), x
    yield "y", lambda c, x: (c + x, kind(x, c)), v, x
    both = lambda c, x: ([None, kind(c[1].first * x, c[1].second)], {"k": kind(x, x), "n": None})  # noqa: E731
    yield "several", both, [None, kind(v, v)], x


@pytest.mark.parametrize("kind", [Pair, Span])
def test_containers_that_check_their_elements_are_allowed(kind: Any) -> None:
    for name, step, init, xs in list_containers(kind):
        results = scan(step, init, xs)
        torch.testing.assert_close(tree_leaves(results), tree_leaves(looped(step, init, xs)), rtol=0, atol=0, msg=name)
    with pytest.raises(errors.StateChangedError, match=r"(leaf 0 of carry|carry.first) was torch.float64"):
        scan(lambda c, x: (kind(c.first.float(), c.second.float()), x), kind(V.double(), V.double()), X)
    with pytest.raises(errors.CarryStructureError, match=f"the carry was .*{kind.__name__}.* before step 0"):
        scan(lambda c, x: ((c.first, c.second), x), kind(V, V), X)
    words = r"(leaf 0 of xs|xs\[0\].first) has 5 .*(leaf 2 of xs|xs\[1\].first)"
    with pytest.raises(errors.SequenceLengthError, match=words):
        scan(lambda c, x: (c, x), V, [kind(X, X), kind(X[:2], X[:2])])


def test_order_of_keys_is_irrelevant() -> None:
    def step(count: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return count + 1, {"a": x[0], "b": x[1]} if count % 2 else {"b": x[1], "a": x[0]}

    x = draw(4, 2)
    _, ys = scan(step, torch.tensor(0), x)
    assert torch.equal(torch.stack([ys["a"], ys["b"]], 1), x)


SPARSE = [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("sparse", SPARSE)
def test_sparse_tensors_equal_the_loop(sparse: Callable[[Tensor], Tensor]) -> None:
    dense, matrix = draw(4, 3), sparse(torch.eye(3, dtype=torch.float64))
    last, means = scan(lambda c, x: (c + x, c), V.double(), sparse(dense))
    torch.testing.assert_close((last, means), looped(lambda c, x: (c + x, c), V.double(), dense))
    carry, _ = scan(lambda c, x: (c * 2, None), matrix, dense)
    torch.testing.assert_close(carry.to_dense(), torch.eye(3, dtype=torch.float64) * 16)
    if sparse is torch.Tensor.to_sparse:
        _, ys = scan(lambda c, x: (c, x.to_sparse()), V, dense)
        torch.testing.assert_close(ys.to_dense(), dense)


# `flip` does not support float8.
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bool, torch.uint16, torch.bfloat16])
def test_reverse_works_in_every_dtype(dtype: torch.dtype) -> None:
    x = torch.arange(4).to(dtype)
    last, ys = scan(lambda c, x: (x, c), torch.ones((), dtype=dtype), x, reverse=True)
    assert last.dtype == ys.dtype == dtype
    assert last.float() == x[0].float()
    assert ys.float().tolist() == [*x.float().tolist()[1:], 1]


def test_results_share_no_memory_with_arguments() -> None:
    carry, x = draw(3), draw(4, 3)
    last, (first, second) = scan(lambda carry, x: (carry, (x, carry)), carry, x)
    pointers = {tensor.untyped_storage().data_ptr() for tensor in (carry, x, last, first, second)}
    assert len(pointers) == 5


@pytest.mark.parametrize("name", RECURRENCES)
def test_scan_of_no_steps_returns_the_initial_carry(name: str) -> None:
    case, longer = recurrence(name, 0), recurrence(name, 3)
    carry, ys = scan(case.step, case.init, case.xs, **case.options)
    _, like = scan(longer.step, longer.init, longer.xs, **longer.options)
    torch.testing.assert_close(carry, case.init, rtol=0, atol=0)
    dim = case.options.get("dim", 0)

    def empty(leaf: Tensor | None) -> Tensor | None:
        return None if leaf is None else leaf.narrow(dim, 0, 0)

    torch.testing.assert_close(ys, tree_map(empty, like), check_stride=False)


def test_scan_of_no_steps_keeps_the_gradient_and_calls_step_without_data(caplog: Any) -> None:
    init = draw(3).requires_grad_()
    carry, _ = scan(moving_average, init, draw(0, 3))
    (gradient,) = torch.autograd.grad(carry.sum(), init)
    assert gradient.tolist() == [1, 1, 1]
    message = "called on tensors without data, to find the shapes of y, and failed: "
    with pytest.raises(errors.EmptyScanError, match=message):
        scan(lambda carry, x: (carry, x if x.sum() > 0 else carry), init, draw(0, 3))
    with pytest.raises(errors.EmptyScanError, match=f"{message}.*fails on data, too"):
        scan(lambda carry, x: (carry, x @ torch.ones(7, 7)), init, draw(0, 3))
    assert not caplog.records


X, V = torch.zeros(5, 3), torch.zeros(3)


def ragged(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return carry + 1, x[: int(carry) + 1]


def restless(carry: Tensor, x: Tensor) -> tuple[Tensor, Any]:
    return carry + 1, x if carry < 1 else (x, x)


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "structure": (
        lambda: scan(lambda c, x: ((c["h"], x), x), {"h": V, "n": None}, X),
        errors.CarryStructureError,
        r"the carry was {'h': \*, 'n': None} before step 0 and \(\*, \*\) after it, 1 tensors and 2",
    ),
    "a leaf became a tree": (
        lambda: scan(lambda c, x: ([[c[0], x]], x), [V], X),
        errors.CarryStructureError,
        r"the carry was \[\*\] before step 0 and \[\[\*, \*\]\] after it",
    ),
    "None became a tensor": (
        lambda: scan(lambda c, x: ([c[0], x], x), [V, None], X),
        errors.CarryStructureError,
        r"the carry was \[\*, None\] before step 0 and \[\*, \*\] after it",
    ),
    "shape": (
        lambda: scan(lambda c, x: ({"h": c["h"] + x}, x), {"h": torch.zeros(())}, X),
        errors.StateChangedError,
        r"carry\['h'\] was torch.float32 \[\] on cpu before step 0 and torch.float32 \[3\] on cpu after it",
    ),
    "dtype": (
        lambda: scan(lambda c, x: (c.double(), x), V, X),
        errors.StateChangedError,
        r"carry was torch.float32 \[3\] on cpu before step 0 and torch.float64 \[3\] on cpu after it",
    ),
    "a number in init": (
        lambda: scan(moving_average, {"a": [0.0]}, X),
        errors.NotATensorError,
        r"init\['a'\]\[0\] is a float; it must be a torch.Tensor or None: write torch.tensor\(0.0\)",
    ),
    "an array": (
        lambda: scan(moving_average, V, X.numpy()),  # type: ignore[arg-type]
        errors.NotATensorError,
        "xs is a ndarray; it must be a torch.Tensor or None: write torch.as_tensor",
    ),
    "a dataclass that is not registered": (
        lambda: scan(lambda c, x: (c, x), {"a": Unknown(V)}, X),
        errors.NotATensorError,
        r"init\['a'\] is a Unknown; .* registered container: torch.export.register_dataclass",
    ),
    "a nested tensor": (
        lambda: scan(lambda c, x: (c, x), V, torch.nested.nested_tensor([V, V])),
        errors.NotATensorError,
        "xs is a nested tensor, whose steps may differ; .* torch.nested.to_padded_tensor",
    ),
    "a number in y": (
        lambda: scan(lambda c, x: (c, {"loss": 1}), V, X),
        errors.NotATensorError,
        r"y\['loss'\] is a int",
    ),
    "lengths": (
        lambda: scan(lambda c, x: (c, c), V, {"a": X, "b": (X[:4],)}),
        errors.SequenceLengthError,
        r"xs\['a'\] has 5 steps in dimension 0 and xs\['b'\]\[0\] has 4",
    ),
    "no length": (
        lambda: scan(lambda c, x: (c, c), V),
        errors.ScanLengthError,
        "xs has no tensor and length is None: pass length",
    ),
    "length against xs": (
        lambda: scan(moving_average, V, X, length=4),
        errors.ScanLengthError,
        "length is 4 and xs has 5 steps in dimension 0",
    ),
    "negative length": (
        lambda: scan(lambda c, x: (c, c), V, length=-1),
        errors.ScanLengthError,
        "length is -1; it must be at least 0",
    ),
    "length of another kind": (lambda: scan(lambda c, x: (c, c), V, length=2.0), TypeError, "length is 2.0"),  # type: ignore[arg-type]
    "dim of xs": (
        lambda: scan(moving_average, V, X, dim=2),
        errors.ScanDimError,
        r"dim is 2, and xs has 2 dimensions, \[5, 3\]",
    ),
    "dim of ys": (
        lambda: scan(lambda c, x: (c, x.sum()), V, X.t(), dim=1),
        errors.ScanDimError,
        r"dim is 1, and ys has 1 dimensions, \[5\]",
    ),
    "arity": (
        lambda: scan(lambda c: (c, c), V, X),  # type: ignore[arg-type, misc]
        errors.CoreArityError,
        r"step takes 1 positional arguments; it is called with 2, step\(carry, x\)",
    ),
    "not callable": (lambda: scan(3, V, X), TypeError, "step is a int; it must be callable"),  # type: ignore[arg-type]
    "no pair": (
        lambda: scan(lambda c, x: c, V, X),
        errors.CoreReturnCountError,
        r"step returned a tensor; it must return 2, \(new_carry, y\)",
    ),
    "three": (
        lambda: scan(lambda c, x: (c, x, x), V, X),  # type: ignore[arg-type, return-value]
        errors.CoreReturnCountError,
        r"step returned 3 values; it must return 2",
    ),
    "y of another shape": (
        lambda: scan(ragged, torch.tensor(0), X),
        errors.OutputChangedError,
        r"y was torch.float32 \[1\] on cpu at step 0 and torch.float32 \[2\] on cpu at step 1",
    ),
    "y of another structure": (
        lambda: scan(restless, torch.tensor(0), X),
        errors.OutputChangedError,
        r"y was \* at step 0 and \(\*, \*\) at step 1; y keeps its structure",
    ),
    "reverse": (lambda: scan(moving_average, V, X, reverse=1), TypeError, "reverse is 1"),  # type: ignore[arg-type]
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake: str) -> None:
    call, kind, words = MISTAKES[mistake]
    with pytest.raises(kind, match=words):
        call()
