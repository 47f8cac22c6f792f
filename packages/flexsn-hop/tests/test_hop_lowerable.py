"""The scan through PyTorch's operators is either correct or refused.

The cases were observed with torch 2.11.0 and 2.13.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hop_cores import CASES, SPIKES, Case, function_spike, lif_core, plif_core, value_and_gradients

from flexsn_hop import (
    eager_scan,
    eager_scan_final_state,
    errors,
    flex_sn_scan,
    lowerable_scan,
    lowerable_scan_available,
    lowerable_scan_final_state,
    lowerable_while_loop_available,
    lowerable_while_loop_scan,
    lowerable_while_loop_scan_final_state,
)

# Dynamo and Inductor use functions that torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")

Run = Callable[..., Any]
SCAN = [(lowerable_scan, eager_scan), (lowerable_scan_final_state, eager_scan_final_state)]
WHILE_LOOP = [
    (lowerable_while_loop_scan, eager_scan),
    (lowerable_while_loop_scan_final_state, eager_scan_final_state),
]
all_operators = pytest.mark.parametrize(("scan", "reference"), SCAN + WHILE_LOOP)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def test_both_operators_are_available() -> None:
    assert lowerable_scan_available() is True
    assert lowerable_while_loop_available() is True


@pytest.mark.long(all_but=["lowerable_scan-*", "lowerable_while_loop_scan_final_state-*-two_by_two"])
@pytest.mark.parametrize("case", [CASES[1], *CASES[-2:]], ids=lambda case: case.name)
@all_operators
def test_inference_equals_the_eager_scan(case: Case, scan: Run, reference: Run) -> None:
    core = case.make(function_spike)
    arguments = case.arguments(5, requires_grad=False)
    expected = reference(core, *case.counts, *arguments)
    torch.testing.assert_close(scan(core, *case.counts, *arguments), expected, rtol=0, atol=0)


@pytest.mark.long(all_but=["lowerable_scan-*"])
@all_operators
def test_compiled_inference_equals_the_eager_scan(scan: Run, reference: Run) -> None:
    case = CASES[-1]
    core = case.make(function_spike)
    run = torch.compile(functools.partial(scan, core, *case.counts), fullgraph=True, backend="aot_eager")
    for steps in (1, 5):
        arguments = case.arguments(steps)
        with torch.no_grad():
            expected = reference(core, *case.counts, *arguments)
            torch.testing.assert_close(run(*arguments), expected, rtol=0, atol=0)


@pytest.mark.long(all_but=["alif-function"])
@pytest.mark.parametrize(
    ("case", "spike"),
    [*((case, "function") for case in CASES[2:]), (CASES[1], "detach")],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_scan_trains_if_every_state_requires_grad(case: Case, spike: str) -> None:
    core = case.make(SPIKES[spike])
    arguments = case.arguments(5)
    for scan, reference in SCAN:
        values, gradients = value_and_gradients(functools.partial(scan, core, *case.counts), arguments)
        wanted_values, expected = value_and_gradients(functools.partial(reference, core, *case.counts), arguments)
        torch.testing.assert_close(values, wanted_values, rtol=0, atol=0)
        torch.testing.assert_close(gradients, expected)


def test_compiled_scan_trains() -> None:
    case = CASES[5]
    core = case.make(function_spike)
    arguments = case.arguments(5)
    run = functools.partial(lowerable_scan, core, *case.counts)
    actual = value_and_gradients(torch.compile(run, fullgraph=True, backend="aot_eager"), arguments)
    expected = value_and_gradients(functools.partial(eager_scan, core, *case.counts), arguments)
    torch.testing.assert_close(actual, expected)


@pytest.mark.long(
    all_but=[
        "lowerable_while_loop_scan_final_state-eager_scan_final_state-differentiated1",
        "lowerable_scan-eager_scan-differentiated0",
        "lowerable_while_loop_scan_final_state-eager_scan_final_state-captured",
    ]
)
@pytest.mark.parametrize("differentiated", [[0], [2], "captured"])
@all_operators
def test_gradients_that_could_be_wrong_are_refused(scan: Run, reference: Run, differentiated: Any) -> None:
    x, v, w = CASES[5].arguments(4, requires_grad=False)
    core: Run = plif_core(function_spike)
    arguments = [x, v, w]
    if differentiated == "captured":
        parameter = w.clone().requires_grad_()
        core = lambda x, v: plif_core(function_spike)(x, v, parameter)  # noqa: E731
        arguments = [x, v]
    else:
        for index in differentiated:
            arguments[index].requires_grad_()
    with pytest.raises(errors.LoweringGradientError, match="wrong gradients"):
        scan(core, 1, 1, 1, *arguments)
    with torch.no_grad():
        torch.testing.assert_close(scan(core, 1, 1, 1, *arguments), reference(core, 1, 1, 1, *arguments))


@pytest.mark.parametrize(("scan", "reference"), WHILE_LOOP)
def test_while_loop_refuses_every_gradient(scan: Run, reference: Run) -> None:
    with pytest.raises(errors.LoweringGradientError, match="no_grad"):
        scan(plif_core(function_spike), 1, 1, 1, *CASES[5].arguments(4))


@all_operators
def test_gradients_that_could_be_wrong_are_refused_in_compiled_code(scan: Run, reference: Run) -> None:
    core = plif_core(function_spike)
    x, v, w = CASES[5].arguments(4, requires_grad=False)
    run = torch.compile(functools.partial(scan, core, 1, 1, 1), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="wrong gradients"):
        run(x, v, w.requires_grad_())


@pytest.mark.long(
    all_but=[
        "lowerable_scan-eager_scan-passthrough",
        "lowerable_while_loop_scan_final_state-eager_scan_final_state-same",
        "lowerable_scan-eager_scan-swapped",
    ]
)
@pytest.mark.parametrize(
    "core",
    [lambda x, v: (x, v), lambda x, v: (v, x), lambda x, v: (x + v,) * 2],
    ids=["passthrough", "swapped", "same"],
)
@all_operators
def test_aliased_results_equal_the_eager_scan(core: Run, scan: Run, reference: Run) -> None:
    arguments = [torch.randn(4, 3), torch.randn(3)]
    expected = reference(core, 1, 1, 1, *arguments)
    torch.testing.assert_close(scan(core, 1, 1, 1, *arguments), expected, rtol=0, atol=0)


@all_operators
def test_core_may_have_no_states(scan: Run, reference: Run) -> None:
    x = torch.randn(4, 3)
    torch.testing.assert_close(scan(lambda x: 2 * x, 1, 0, 1, x)[0], 2 * x)


@all_operators
def test_empty_scan_equals_the_eager_scan(scan: Run, reference: Run) -> None:
    specs = [((2,), torch.float16)]
    arguments = (torch.zeros(0, 2), torch.randn(2))
    core = lambda x, v: (x, v)  # noqa: E731
    results = scan(core, 1, 1, 1, *arguments, output_template_specs=specs)
    expected = reference(core, 1, 1, 1, *arguments, output_template_specs=specs)
    torch.testing.assert_close(results, expected, rtol=0, atol=0)


@all_operators
def test_errors_equal_those_of_the_eager_scan(scan: Run, reference: Run) -> None:
    x, v = torch.zeros(3, 2), torch.zeros(2)
    with pytest.raises(errors.TooFewTensorsError, match=r"1 tensors.* is 2"):
        scan(lambda x, v: (x, v), 1, 1, 1, x)
    with pytest.raises(errors.CoreArityError, match="takes 1"):
        scan(lambda x: x, 1, 1, 1, x, v)
    with pytest.raises(errors.SequenceLengthError, match="3 steps"):
        scan(lambda x, v: (x, v), 2, 0, 1, x, torch.zeros(5, 2))
    with pytest.raises(errors.EmptyScanError, match="num_outputs is 1"):
        scan(lambda x, v: (x, v), 1, 1, 1, x[:0], v)


@pytest.mark.long(all_but=["environment-scan", "argument-while_loop"])
@pytest.mark.parametrize("name", ["scan", "while_loop"])
@pytest.mark.parametrize("setting", ["argument", "environment"])
def test_operators_can_be_the_lowering_of_a_scan(name: str, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.testing import EagerAndRecordGraphs

    core = plif_core(function_spike)
    arguments = CASES[5].arguments(4)
    options: dict[str, Any] = {"lowering": name} if setting == "argument" else {}
    if setting == "environment":
        monkeypatch.setenv("FLEXSN_HOP_LOWERING", name)
    backend = EagerAndRecordGraphs()
    run = torch.compile(functools.partial(flex_sn_scan, core, 1, 1, 1, **options), fullgraph=True, backend=backend)
    with torch.no_grad():
        torch.testing.assert_close(run(*arguments), eager_scan(core, 1, 1, 1, *arguments))
    targets = [str(node.target) for node in backend.graphs[0].graph.nodes]
    assert name in targets
    assert "flex_sn_scan" not in targets


class SmallVGG(torch.nn.Module):
    def __init__(self, lowering: str | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolutions = torch.nn.ModuleList([torch.nn.Conv2d(1, 4, 3), torch.nn.Conv2d(4, 8, 3)])
        self.first, self.last = torch.nn.Linear(8, 6), torch.nn.Linear(6, 2)
        self.lowering = lowering

    def spikes(self, x: torch.Tensor) -> torch.Tensor:
        core = lif_core(function_spike, hard_reset=True, detach_reset=True)
        v = torch.zeros(x.shape[1:])
        return flex_sn_scan(core, 1, 1, 1, x, v, lowering=self.lowering)[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps, batch = x.shape[:2]

        def folded(x: torch.Tensor) -> torch.Tensor:
            return x.reshape(steps, batch, *x.shape[1:])

        for convolution in self.convolutions:
            x = folded(convolution(x.flatten(0, 1)))
            x = self.spikes(x)
            x = folded(torch.nn.functional.max_pool2d(x.flatten(0, 1), 2))
        return self.last(self.spikes(self.first(x.flatten(2)))).mean(0)  # type: ignore[no-any-return]


@pytest.mark.long(all_but=["scan"])
@pytest.mark.parametrize("name", ["scan", "while_loop", "loop"])
def test_small_spiking_vgg_equals_the_loop_without_gradients(name: str) -> None:
    x = 3 * torch.randn(4, 2, 1, 10, 10)
    with torch.no_grad():
        expected = SmallVGG(None)(x)
        run = torch.compile(SmallVGG(name), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(run(x), expected)
    assert expected.std() > 0
