"""Under ``torch.compile``, each error has the same class and the same words as in the eager scan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flexsn_hop import errors, flex_sn_scan

Run = Callable[..., Any]
X = torch.zeros(3, 2)
V = torch.zeros(2)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def core(x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x, v


class Module(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x


def assert_refused(
    error: type[Exception], words: list[str], run: Run, *arguments: torch.Tensor, eager: bool = True
) -> None:
    """Checks that compiled ``run`` raises ``error`` with ``words``, and if ``eager``, that ``run`` itself does, too."""
    runs = [torch.compile(run, fullgraph=True, backend="aot_eager")] + ([run] if eager else [])
    for attempt in runs:
        with pytest.raises(error) as caught:
            attempt(*arguments)
        for word in words:
            assert word in str(caught.value), str(caught.value)


def test_too_few_tensors_are_refused() -> None:
    run = lambda x: flex_sn_scan(core, 1, 1, 1, x)  # noqa: E731
    assert_refused(errors.TooFewTensorsError, ["1 tensors", "is 2"], run, X)


def test_wrong_counts_are_refused() -> None:
    run = lambda x, v: flex_sn_scan(core, 0, 1, 1, x, v)  # noqa: E731
    assert_refused(errors.ScanCountError, ["num_inputs is 0", "at least 1"], run, X, V)


def test_unequal_lengths_are_refused() -> None:
    run = lambda x, y: flex_sn_scan(core, 2, 0, 2, x, y)  # noqa: E731
    words = ["input 0 has 3", "input 1 has 5"]
    assert_refused(errors.SequenceLengthError, words, run, X, torch.zeros(5, 2))


@pytest.mark.parametrize(
    ("wrong", "takes"),
    [
        (lambda x: x, "takes 1"),
        (lambda x, v, w: x, "takes 3"),
        (Module(), "takes 1"),
        (Module().method, "takes 1"),
        (functools.partial(core, X), "takes 1"),
    ],
    ids=["too few", "too many", "module", "method", "partial"],
)
def test_wrong_arity_is_refused(wrong: Run, takes: str) -> None:
    run = lambda x, v: flex_sn_scan(wrong, 1, 1, 1, x, v)  # noqa: E731
    assert_refused(errors.CoreArityError, [takes, "called with 2"], run, X, V)


def test_wrong_arity_of_a_core_inside_compiled_code_is_refused() -> None:
    def run(x: torch.Tensor, v: torch.Tensor) -> Any:
        def wrong(x: torch.Tensor) -> torch.Tensor:
            return x + v

        return flex_sn_scan(wrong, 1, 1, 1, x, v)

    assert_refused(errors.CoreArityError, ["takes 1", "called with 2"], run, X, V)


@pytest.mark.parametrize(
    ("error", "wrong", "words"),
    [
        (errors.CoreReturnCountError, lambda x, v: (x, v, v), ["returned 3", "is 2"]),
        (errors.CoreReturnCountError, lambda x, v: x, ["returned 1", "is 2"]),
        (errors.NotATensorError, lambda x, v: None, ["NoneType"]),
        (errors.NotATensorError, lambda x, v: (1.0, v), ["float", "output 0"]),
        (errors.NotATensorError, lambda x, v: (x, [v]), ["list", "new state 0"]),
        (errors.StateChangedError, lambda x, v: (x, v[:1]), ["state 0", "[2]", "[1]"]),
        (errors.StateChangedError, lambda x, v: (x, v.half()), ["float32", "float16"]),
    ],
)
def test_wrong_results_of_the_core_are_refused(error: type[Exception], wrong: Run, words: list[str]) -> None:
    assert_refused(error, words, lambda x, v: flex_sn_scan(wrong, 1, 1, 1, x, v), X, V)


def test_argument_that_is_no_tensor_is_refused() -> None:
    run: Run = lambda x: flex_sn_scan(core, 1, 1, 1, x, 1.5)  # type: ignore[arg-type] # noqa: E731
    assert_refused(errors.NotATensorError, ["argument 1", "float"], run, X)


@pytest.mark.parametrize("specs", [None, [], [((2,), torch.float32)] * 2])
def test_empty_scan_needs_a_spec_for_each_output(specs: Any) -> None:
    run = lambda x, v: flex_sn_scan(core, 1, 1, 1, x, v, output_template_specs=specs)  # noqa: E731
    assert_refused(errors.EmptyScanError, ["num_outputs is 1"], run, X[:0], V)


@pytest.mark.parametrize(
    "draw",
    [torch.rand_like, torch.bernoulli, torch.nn.functional.dropout],
    ids=["rand_like", "bernoulli", "dropout"],
)
def test_random_operators_are_refused_with_their_line(draw: Run) -> None:
    def noisy(x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + draw(v), v  # the line that the message names

    run: Run = lambda x, v: flex_sn_scan(noisy, 1, 1, 1, x, v)  # noqa: E731
    words = ["random numbers", "the line that the message names", "before the scan"]
    assert_refused(errors.RandomOpError, words, run, X, V, eager=False)
    run(X, V)  # works, because the loop does not recompute anything


def test_mutation_of_an_argument_is_refused() -> None:
    def add_in_place(x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, v.add_(x)

    run = lambda x, v: flex_sn_scan(add_in_place, 1, 1, 1, x, v)  # noqa: E731
    assert_refused(RuntimeError, ["mutation"], run, X, V.clone(), eager=False)


def test_mutation_in_a_graph_from_make_fx_is_refused() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def add_in_place(x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, v.add_(x)

    graph = torch.fx.symbolic_trace(add_in_place)
    with pytest.raises(errors.MutationError, match=r"argument 1 with aten.add_"):
        make_fx(lambda x, v: flex_sn_scan(graph, 1, 1, 1, x, v))(X, V.clone())


def test_side_effects_and_printing_are_refused() -> None:
    inputs: list[torch.Tensor] = []

    def remember(x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs.append(x)
        return x, v

    def show(x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        print("step")
        return x, v

    for wrong, words in ((remember, ["side effect"]), (show, ["print"])):
        torch._dynamo.reset()
        run = functools.partial(flex_sn_scan, wrong, 1, 1, 1)
        assert_refused(RuntimeError, [*words, "flex_sn_scan"], run, X, V, eager=False)


def test_unknown_and_unavailable_lowerings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Imports of another test may have registered a lowering.
    monkeypatch.setattr("flexsn_hop.lowering._lowering._registered", [])
    run: Run = functools.partial(flex_sn_scan, core, 1, 1, 1, lowering="fast")
    words = ["the argument lowering is 'fast'", "auto, kernel, compiled_loop, scan, while_loop, loop"]
    assert_refused(errors.LoweringError, words, run, X, V)
    run = functools.partial(flex_sn_scan, core, 1, 1, 1, lowering="kernel")
    words = ["'kernel' is not available", "registered"]
    assert_refused(errors.LoweringError, words, run, X, V, eager=False)


def test_lowering_in_the_environment_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXSN_HOP_LOWERING", "fastest")
    words = ["FLEXSN_HOP_LOWERING is 'fastest'"]
    assert_refused(errors.LoweringError, words, functools.partial(flex_sn_scan, core, 1, 1, 1), X, V)
