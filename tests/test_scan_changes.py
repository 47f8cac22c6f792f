"""Values that a step function reads and that change between calls. Compiled neurons equal the loop in all calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import changing_cores
import pytest
import torch
from changing_cores import NUMBERS_ONLY, PLACES
from torch import Tensor

from flexsn_nn import FlexSN

T, STEP = 3, (2, 3)


def draw_tensor(seed: int) -> Tensor:
    return torch.rand(STEP, generator=torch.Generator().manual_seed(seed))


def double(x: Tensor) -> Tensor:
    return x * 2.0


def shift(x: Tensor) -> Tensor:
    return x + 0.125


CHANGES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "number": lambda: (0.25, 0.75),
    "tensor": lambda: (draw_tensor(1), draw_tensor(2)),
    "number to tensor": lambda: (0.25, draw_tensor(2)),
    "tensor to number": lambda: (draw_tensor(1), 0.75),
    "function": lambda: (double, shift),
}


@pytest.fixture(autouse=True)
def restore_globals() -> Iterator[None]:
    """Removes global hooks and global variables after each test."""
    hooks = dict(torch.nn.modules.module._global_forward_hooks)
    yield
    torch.nn.modules.module._global_forward_hooks.clear()
    torch.nn.modules.module._global_forward_hooks.update(hooks)
    vars(changing_cores).pop("max", None)


def compute_results(neuron: FlexSN, device: str) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-2, 2, T * 6, device=device).reshape(T, *STEP).requires_grad_()
    neuron.reset()
    output = neuron(x)
    assert isinstance(output, Tensor)
    (gradient,) = torch.autograd.grad(output.sum(), x)
    return output, gradient


def assert_alike(core: Any, compiled: FlexSN, device: str = "cpu") -> tuple[Tensor, Tensor]:
    expected = compute_results(FlexSN(core, 1, 1, 1, backend="torch"), device)
    actual = compute_results(compiled, device)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    return expected


# A number is read from these places in the same way as from other tested places, so their tests need `--long`.
REDUNDANT = {
    "attribute_by_default_of_getattr",
    "attribute_by_vars",
    "attribute_by_object_getattribute",
    "private_slot",
    "field_of_a_frozen_dataclass",
    "attribute_of_a_base_class",
    "arguments",
    "static_method",
    "added_special_method",
    "closure_variable_of_a_helper",
    "global_variable_by_globals",
    "constant_of_a_module_by_vars",
    "constant_by_import_module",
    "default_of_a_helper",
    "argument_of_a_partial",
    "bound_method_of_an_object",
    "last_element_of_a_list",
    "list_inside_a_tuple",
    "ordered_dictionary",
    "default_dictionary",
    "values_of_a_dictionary",
    "number_in_bytes",
    "module_appended_to_a_list",
    "forward_of_a_class",
    "method_by_super",
    "attribute_of_an_element",
    "replaced_property",
    "user_dictionary",
    "constant_of_a_module_by_getattr",
    "keyword_default",
    "number_in_an_array",
    "custom_list",
    "closure_variable_of_an_inner_function",
    "attribute_over_a_class_default",
    "method_added_to_a_class",
    "forward_pre_hook",
    "growing_list",
    "value_of_a_dictionary",
    "element_of_a_module_list",
}
OTHER_CHANGES = {
    ("attribute_of_module", "tensor"),
    ("closure_variable", "tensor"),
    ("nested_dictionary", "function"),
}


def list_cases() -> list[Any]:
    """Returns up to two test cases for each place: a change from a number to a number, and a change of another kind.
    Most changes of another kind need `--long`.
    """
    other_changes = [name for name in CHANGES if name != "number"]
    places = [name for name in PLACES if name not in NUMBERS_ONLY]
    cases = {(name, "number"): name not in REDUNDANT for name in PLACES}
    for i, name in enumerate(places):
        change = other_changes[i % len(other_changes)]
        cases[name, change] = (name, change) in OTHER_CHANGES
    assert PLACES.keys() >= REDUNDANT
    assert cases.keys() >= OTHER_CHANGES
    return [pytest.param(*key, marks=() if is_short else pytest.mark.long) for key, is_short in cases.items()]


# Places that a backward reads. On a GPU, autograd runs the backward in another thread.
IN_BACKWARD = [name for name in PLACES if "backward" in name or "context_hides" in name or "autograd" in name]


def check_change(name: str, change: str, device: str) -> None:
    first, second = CHANGES[change]()
    core, assign = PLACES[name](first)
    compiled = FlexSN(core, 1, 1, 1, backend="triton")
    before = assert_alike(core, compiled, device)
    assign(second)
    after = assert_alike(core, compiled, device)
    assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "the change does nothing"


@pytest.mark.parametrize(("name", "change"), list_cases())
def test_changed_value_takes_effect(name: str, change: str, interpreted: None) -> None:
    check_change(name, change, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", IN_BACKWARD)
def test_changed_value_takes_effect_in_the_backward_on_the_gpu(name: str) -> None:
    check_change(name, "number", "cuda")
