from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flexsn_hop import eager_scan, eager_scan_final_state, errors

X = torch.zeros(3, 2)
V = torch.zeros(2)


def core(x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x, v


runs = pytest.mark.parametrize("run", [eager_scan, eager_scan_final_state])
Run = Callable[..., tuple[torch.Tensor, ...]]


def check(error: type[Exception], kind: type[Exception], numbers: list[str], call: Callable[[], Any]) -> None:
    assert issubclass(error, kind)
    with pytest.raises(error) as caught:
        call()
    for number in numbers:
        assert number in str(caught.value), str(caught.value)


@runs
def test_too_few_tensors_are_refused(run: Run) -> None:
    check(errors.TooFewTensorsError, ValueError, ["1 tensors", "is 2"], lambda: run(core, 1, 1, 1, X))


@runs
@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((0, 1, 1), ["num_inputs is 0", "at least 1"]),
        ((1, -1, 1), ["num_states is -1"]),
        ((1, 1, -2), ["num_outputs is -2"]),
        ((1.0, 1, 1), ["num_inputs is 1.0", "an int"]),
        ((1, "one", 1), ["num_states is 'one'", "an int"]),
    ],
)
def test_wrong_counts_are_refused(run: Run, counts: tuple[Any, ...], words: list[str]) -> None:
    check(errors.ScanCountError, ValueError, words, lambda: run(core, *counts, X, V))


@runs
def test_unequal_lengths_are_refused(run: Run) -> None:
    def call() -> None:
        run(lambda a, b: a, 2, 0, 1, X, torch.zeros(5, 2))

    check(errors.SequenceLengthError, ValueError, ["input 0 has 3", "input 1 has 5"], call)


@runs
def test_input_without_a_time_dimension_is_refused(run: Run) -> None:
    def call() -> None:
        run(lambda a: a, 1, 0, 1, torch.tensor(1.0))

    check(errors.SequenceLengthError, ValueError, ["input 0 has 0 dimensions", "at least 1"], call)


class Module(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x


@runs
@pytest.mark.parametrize(
    ("wrong", "takes"),
    [
        (lambda x: x, "takes 1"),
        (lambda x, v, w: x, "takes 3"),
        (lambda x, v, w, u=None: x, "takes 3 to 4"),
        (lambda x, v, w, *rest: x, "takes 3 to any number"),
        (Module(), "takes 1"),
        (Module().method, "takes 1"),
        (functools.partial(core, X), "takes 1"),
    ],
    ids=["too few", "too many", "default", "star", "module", "method", "partial"],
)
def test_wrong_arity_is_refused(run: Run, wrong: Callable[..., torch.Tensor], takes: str) -> None:
    words = [takes, "called with 2", "1 inputs + 1 states + 0 lifted"]
    check(errors.CoreArityError, ValueError, words, lambda: run(wrong, 1, 1, 1, X, V))


@runs
def test_required_keyword_only_parameter_is_refused(run: Run) -> None:
    def wrong(x: torch.Tensor, v: torch.Tensor, *, tau: float) -> torch.Tensor:
        return x

    check(
        errors.CoreArityError,
        ValueError,
        ["tau", "called with 2"],
        lambda: run(wrong, 1, 1, 1, X, V),
    )


@runs
def test_wrong_arity_is_refused_in_an_empty_scan(run: Run) -> None:
    def call() -> None:
        run(lambda x: x, 1, 1, 0, torch.zeros(0, 2), V)

    check(errors.CoreArityError, ValueError, ["takes 1", "called with 2"], call)


@runs
def test_core_with_an_unknown_signature_is_called(run: Run) -> None:
    with pytest.raises(ValueError, match="no signature found"):
        inspect.signature(torch.add)
    (total,) = run(torch.add, 2, 0, 1, X + 1, X + 2)
    assert total.tolist() == (2 * X + 3).tolist()


@runs
def test_core_that_is_not_callable_is_refused(run: Run) -> None:
    check(TypeError, TypeError, ["int", "callable"], lambda: run(3, 1, 1, 1, X, V))


@runs
@pytest.mark.parametrize(
    ("wrong", "returned"),
    [
        (lambda x, v: (x, v, v), "returned 3"),
        (lambda x, v: x, "returned 1"),
        (lambda x, v: (), "returned 0"),
    ],
)
def test_wrong_number_of_results_is_refused(run: Run, wrong: Callable[..., Any], returned: str) -> None:
    check(
        errors.CoreReturnCountError,
        ValueError,
        [returned, "is 2", "1 + 1"],
        lambda: run(wrong, 1, 1, 1, X, V),
    )


@runs
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda x, v: None, ["a NoneType"]),
        (lambda x, v: (1.0, v), ["a float", "output 0"]),
        (lambda x, v: (x, [v]), ["a list", "new state 0"]),
    ],
)
def test_result_that_is_no_tensor_is_refused(run: Run, wrong: Callable[..., Any], words: list[str]) -> None:
    check(errors.NotATensorError, TypeError, words, lambda: run(wrong, 1, 1, 1, X, V))


@runs
@pytest.mark.parametrize("index", [0, 1, 2])
def test_argument_that_is_no_tensor_is_refused(run: Run, index: int) -> None:
    arguments: list[Any] = [X, V, V]
    arguments[index] = 1.5
    check(
        errors.NotATensorError,
        TypeError,
        [f"argument {index}", "float"],
        lambda: run(core, 1, 1, 1, *arguments),
    )


@runs
@pytest.mark.parametrize(
    ("state", "words"),
    [
        (torch.zeros(1), ["state 0", "[1]", "[2]"]),
        (torch.zeros(2, dtype=torch.float64), ["state 0", "torch.float64", "torch.float32"]),
    ],
)
def test_state_that_differs_from_the_initial_state_is_refused(run: Run, state: torch.Tensor, words: list[str]) -> None:
    def cast(x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, (v + x).float()

    check(
        errors.StateChangedError,
        ValueError,
        [*words, "step 0"],
        lambda: run(cast, 1, 1, 1, X, state),
    )


@runs
def test_state_that_changes_in_a_later_step_is_refused(run: Run) -> None:
    calls = []

    def grow(x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(x)
        return x, v if len(calls) < 3 else torch.cat([v, v])

    words = ["state 0", "step 2", "[2]", "[4]"]
    check(errors.StateChangedError, ValueError, words, lambda: run(grow, 1, 1, 1, X, V))


@runs
def test_output_that_changes_in_a_later_step_is_refused(run: Run) -> None:
    calls = []

    def narrow(x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(x)
        return x if len(calls) < 2 else x.half(), v

    words = ["output 0", "step 1", "torch.float32", "torch.float16"]
    check(errors.OutputChangedError, ValueError, words, lambda: run(narrow, 1, 1, 1, X, V))


@runs
@pytest.mark.parametrize(
    ("specs", "words"),
    [
        (None, ["num_outputs is 2", "no output_template_specs"]),
        ([((2,), torch.float32)], ["num_outputs is 2", "1 output_template_specs"]),
        ([((2,), torch.float32)] * 3, ["num_outputs is 2", "3 output_template_specs"]),
        ([((2,), torch.float32), ((2,),)], ["output_template_specs[1]"]),
        ([((2,), torch.float32), (torch.float32, (2,))], ["output_template_specs[1]"]),
        ([(2, torch.float32), ((2,), torch.float32)], ["output_template_specs[0]", "(shape, dtype)"]),
        ([torch.float32, torch.float32], ["output_template_specs[0]", "(shape, dtype)"]),
    ],
)
def test_empty_scan_needs_a_spec_for_each_output(run: Run, specs: Any, words: list[str]) -> None:
    def call() -> None:
        run(lambda x, v: (x, x, v), 1, 1, 2, torch.zeros(0, 2), V, output_template_specs=specs)

    check(errors.EmptyScanError, ValueError, words, call)
