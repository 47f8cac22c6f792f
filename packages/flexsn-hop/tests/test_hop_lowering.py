"""Inductor's code for the operator contains one call of the loop, or the code of a registered lowering."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hop_alone import no_kernels  # noqa: F401  a fixture
from hop_cores import CASES, function_spike, plif_core, value_and_gradients
from torch._inductor.utils import run_and_get_code

from flexsn_hop import (
    BackwardLayout,
    ScanLayout,
    ScanLowering,
    eager_scan,
    eager_scan_final_state,
    errors,
    flex_sn_scan,
    flex_sn_scan_final_state,
    register_scan_lowering,
    scan_lowerings,
)
from flexsn_hop.loop._loop import backward_loop, forward_loop

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")

Run = Callable[..., Any]
CORE = plif_core(function_spike)
pairs = pytest.mark.parametrize(
    ("scan", "reference"),
    [(flex_sn_scan, eager_scan), (flex_sn_scan_final_state, eager_scan_final_state)],
    ids=["sequence", "final"],
)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=False):
        yield


def make_network(scan: Run, **options: Any) -> Run:
    def run(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> Any:
        outputs, states = scan(CORE, 1, 1, 1, 2 * x + 0.1, v, w, **options)
        return 0.5 * outputs, states

    return run


def assert_same(actual: Run, expected: Run, arguments: Sequence[torch.Tensor]) -> None:
    torch.testing.assert_close(value_and_gradients(actual, arguments), value_and_gradients(expected, arguments))


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [False, True])
@pairs
def test_inductor_runs_the_loop(dynamic: bool, scan: Run, reference: Run) -> None:
    run = torch.compile(make_network(scan), fullgraph=True, dynamic=dynamic)
    for steps, batch in ((5, 2), (9, 7)) if dynamic else ((5, 2),):
        assert_same(run, make_network(reference), CASES[5].arguments(steps, (batch, 3)))


def test_generated_code_has_one_call_for_each_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXSN_HOP_LOWERING", "loop")  # another package may have registered kernels

    def step(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> Any:
        results = make_network(flex_sn_scan)(x, v, w)
        return torch.autograd.grad(sum(result.sum() for result in results), [x, v, w])

    def train(*arguments: torch.Tensor) -> Any:
        results = torch.compile(make_network(flex_sn_scan), fullgraph=True, dynamic=False)(*arguments)
        return torch.autograd.grad(sum(result.sum() for result in results), arguments)

    _, codes = run_and_get_code(train, *CASES[5].arguments(6))
    assert len(codes) == 2
    for code in codes:
        assert code.count("run_scan.default(") == 1


@pytest.mark.long(all_but=["two_by_two"])
@pytest.mark.parametrize("name", ["two_by_two", "izhikevich"])
def test_inductor_runs_several_states(name: str) -> None:
    (case,) = [case for case in CASES if case.name == name]
    core = case.make(function_spike)
    run = torch.compile(functools.partial(flex_sn_scan, core, *case.counts), fullgraph=True)
    expected = functools.partial(eager_scan, core, *case.counts)
    assert_same(run, expected, case.arguments(4))


def constant_core(x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = v * torch.tensor([0.5, 0.25, 0.125]) + x
    return torch.where(h > 0, h, float("-inf")), h


def test_constant_inside_the_core_is_allowed() -> None:
    core = constant_core
    arguments = [torch.randn(4, 3), torch.randn(3)]
    with torch.no_grad():
        run = torch.compile(functools.partial(flex_sn_scan, core, 1, 1, 1), fullgraph=True)
        torch.testing.assert_close(run(*arguments), eager_scan(core, 1, 1, 1, *arguments))


def test_constant_inside_the_core_is_allowed_in_training() -> None:
    arguments = [torch.randn(4, 3, requires_grad=True), torch.randn(3, requires_grad=True)]
    core = functools.partial(flex_sn_scan, lambda x, v: (v.sin(), v * torch.tensor([0.5, 0.25, 0.125]) + x), 1, 1, 1)
    run = torch.compile(core, fullgraph=True)
    assert_same(run, functools.partial(eager_scan, *core.args), arguments)


class Unrolled:
    """A lowering that works without a GPU. It traces the loops into Inductor's graph."""

    version = "1"

    def __init__(self, interval: int = 1, reason: str | None = None, name: str = "unrolled") -> None:
        self.name = name
        self.interval = interval
        self.reason = reason
        self.traced: list[ScanLayout | BackwardLayout] = []

    def checkpoint_interval(self, core: torch.fx.GraphModule, primals: Sequence[Any]) -> int:
        return self.interval

    def why_unavailable(self, flat_args: Sequence[Any]) -> str | None:
        return self.reason

    def forward(
        self, core: torch.fx.GraphModule, layout: ScanLayout, flat_args: Sequence[Any]
    ) -> Sequence[torch.Tensor]:
        self.traced.append(layout)
        values = list(flat_args)
        for position in layout.zero_positions:  # the memory of these states is not written
            values[position] = torch.zeros(values[position].shape, dtype=values[position].dtype)
        return forward_loop(core, layout, values)

    def backward(
        self,
        core: torch.fx.GraphModule,
        vjp: torch.fx.GraphModule,
        layout: BackwardLayout,
        args: Sequence[Any],
    ) -> Sequence[torch.Tensor]:
        self.traced.append(layout)
        return backward_loop(core, vjp, layout, args)


@pytest.fixture
def register() -> Iterator[Callable[[ScanLowering], None]]:
    undo: list[Callable[[], None]] = []
    yield lambda lowering: undo.append(register_scan_lowering(lowering))
    for function in undo:
        function()


@pytest.mark.long(all_but=["sequence-1"])
@pytest.mark.parametrize("interval", [1, 2])
@pairs
def test_registered_lowering_becomes_part_of_the_graph(
    interval: int, scan: Run, reference: Run, register: Callable[[ScanLowering], None]
) -> None:
    lowering = Unrolled(interval)
    register(lowering)
    arguments = CASES[5].arguments(3)

    def train(*arguments: torch.Tensor) -> Any:
        run = torch.compile(make_network(scan), fullgraph=True, dynamic=False)
        return value_and_gradients(run, arguments)

    actual, codes = run_and_get_code(train, *arguments)
    torch.testing.assert_close(actual, value_and_gradients(make_network(reference), arguments))
    assert [type(layout) for layout in lowering.traced] == [ScanLayout, BackwardLayout]
    assert not any("run_scan" in code for code in codes)
    backward = lowering.traced[1]
    assert isinstance(backward, BackwardLayout)
    assert backward.saved_interval == interval


def from_zero(scan: Run, x: torch.Tensor, w: torch.Tensor, **options: Any) -> Any:
    """Runs a scan with two states that are equal views. The first state is zeros."""

    def core(x: torch.Tensor, u: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        u = 0.5 * u + x
        v = 0.75 * v + w * u
        return u * v, u, v

    states = [x.new_full((), value).expand(x.shape[1:]) for value in (0.0, 1.0)]
    return scan(core, 1, 2, 1, x, *states, **options)


@pytest.mark.long(all_but=["sequence-False-inductor", "final-True-aot_eager"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
@pairs
def test_state_of_zeros_is_neither_written_nor_saved(
    dynamic: bool, backend: str, scan: Run, reference: Run, register: Callable[[ScanLowering], None]
) -> None:
    lowering = Unrolled()
    register(lowering)
    arguments = [torch.randn(3, 4, 5, requires_grad=True), torch.randn(5, requires_grad=True)]
    if dynamic:  # all sizes except for time, because this lowering unrolls the loop
        torch._dynamo.mark_dynamic(arguments[0], 1)
    run = torch.compile(functools.partial(from_zero, scan, zero_states=(True, False)), fullgraph=True, backend=backend)
    assert_same(run, functools.partial(from_zero, reference), arguments)
    if backend == "inductor":
        forward, backward = lowering.traced
        assert isinstance(forward, ScanLayout)
        assert isinstance(backward, BackwardLayout)
        assert forward.zero_states == backward.scan.zero_states == (True, False)
        assert backward.num_given == 3


def test_state_declared_as_zeros_has_its_gradient() -> None:
    def train(scan: Run, x: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        return scan(lambda x, v: (x * v, 0.5 * v + x), 1, 1, 1, x, v, **options)

    arguments = [torch.randn(3, 4, requires_grad=True), torch.zeros(4, requires_grad=True)]
    run = torch.compile(functools.partial(train, flex_sn_scan, zero_states=[True]), fullgraph=True)
    assert_same(run, functools.partial(train, eager_scan), arguments)


@pytest.mark.parametrize("compiled", [False, True])
def test_zero_states_of_wrong_length_is_refused(compiled: bool) -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> Any:
        return from_zero(flex_sn_scan, x, w, zero_states=(True,))

    with pytest.raises(errors.ScanCountError, match="zero_states has 1 entries and num_states is 2"):
        (torch.compile(run, fullgraph=True) if compiled else run)(torch.randn(3, 4), torch.randn(4))


@pytest.mark.parametrize("final", [False, True])
def test_state_declared_as_zeros_must_be_zero(final: bool) -> None:
    scan: Run = flex_sn_scan_final_state if final else flex_sn_scan
    with pytest.raises(errors.NonzeroStateError, match="state 1 is not zeros") as caught:
        from_zero(scan, torch.randn(3, 4), torch.randn(4), zero_states=(True, True))
    assert isinstance(caught.value, ValueError)


def test_only_auto_falls_back_to_the_loop(
    register: Callable[[ScanLowering], None],
) -> None:
    lowering = Unrolled(reason="it is a test")
    register(lowering)
    arguments = CASES[5].arguments(3, requires_grad=False)
    run = torch.compile(make_network(flex_sn_scan), fullgraph=True)
    torch.testing.assert_close(run(*arguments), make_network(eager_scan)(*arguments))
    assert lowering.traced == []
    kernel = torch.compile(make_network(flex_sn_scan, lowering="kernel"), fullgraph=True)
    with pytest.raises(errors.LoweringError, match="'kernel' is not available: it is a test"):
        kernel(*arguments)


class Refusing(Unrolled):
    """A lowering that rejects each core, or only each backward."""

    def __init__(self, name: str, words: str, *, only_backward: bool = False) -> None:
        super().__init__(name=name)
        self.words = words
        self.only_backward = only_backward

    def forward(self, *args: Any) -> Sequence[torch.Tensor]:
        if not self.only_backward:
            raise NotImplementedError(self.words)
        return super().forward(*args)

    def backward(self, *args: Any) -> Sequence[torch.Tensor]:
        raise NotImplementedError(self.words)


def test_first_lowering_that_accepts_a_scan_compiles_it() -> None:
    away, picky, taker = Unrolled(reason="it is away", name="away"), Refusing("picky", "not this core"), Unrolled(2)
    half = Refusing("half", "no gradient", only_backward=True)
    for lowering in (away, picky, half, taker):
        register_scan_lowering(lowering)
    arguments = CASES[5].arguments(3)
    run = torch.compile(make_network(flex_sn_scan), fullgraph=True, dynamic=False)
    assert_same(run, make_network(eager_scan), arguments)
    assert [type(layout) for layout in half.traced] == [ScanLayout]
    assert [type(layout) for layout in taker.traced] == [BackwardLayout]
    assert scan_lowerings(*arguments) == {"away": "it is away", "picky": None, "half": None, "unrolled": None}


def test_error_names_the_reason_of_each_lowering() -> None:
    register_scan_lowering(Unrolled(reason="it is away", name="away"))
    register_scan_lowering(Refusing("picky", "not this core"))
    arguments = CASES[5].arguments(3, requires_grad=False)
    with pytest.warns(UserWarning, match="as a loop, without kernels: away: it is away; picky: not this core"):
        results = torch.compile(make_network(flex_sn_scan), fullgraph=True)(*arguments)
    torch.testing.assert_close(results, make_network(eager_scan)(*arguments))
    torch._dynamo.reset()
    kernel = torch.compile(make_network(flex_sn_scan, lowering="kernel"), fullgraph=True)
    with pytest.raises(Exception, match="'kernel' cannot compile this core: away: it is away; picky: not this core"):
        kernel(*arguments)
    by_name = torch.compile(make_network(flex_sn_scan, lowering="away"), fullgraph=True)
    with pytest.raises(errors.LoweringError, match="the lowering 'away' is not available: it is away"):
        by_name(*arguments)


def test_order_of_lowerings_does_not_depend_on_imports() -> None:
    """Checks that a lowering precedes the kernels only if `before` names them, directly or through another lowering."""
    successors = {"mine": None, "front": "flexsn_runtime", "yours": None, "ahead": "front", "lost": "nobody"}
    for name, before in successors.items():
        register_scan_lowering(Unrolled(name=name), before=before)
    assert list(scan_lowerings()) == ["mine", "yours", "ahead", "front", "lost"]
    with pytest.raises(errors.LoweringError, match="'flexsn_runtime' is the name of the kernels of that package"):
        register_scan_lowering(Unrolled(name="flexsn_runtime"))
    kernels = type("Kernels", (Unrolled,), {"__module__": "flexsn_runtime.graphs"})
    undo = register_scan_lowering(kernels(name="flexsn_runtime"))
    assert list(scan_lowerings()) == ["ahead", "front", "flexsn_runtime", "mine", "yours", "lost"]
    undo()
    undo()
    assert "flexsn_runtime" not in scan_lowerings()
    for taken in ("mine", "loop"):
        with pytest.raises(errors.LoweringError, match=f"the name '{taken}' belongs to another lowering"):
            register_scan_lowering(Unrolled(name=taken))


@pytest.mark.parametrize(
    ("lowering", "words"),
    [
        (Unrolled, r"a lowering is an object, and not a class: register Unrolled\(\)"),
        (object(), "a object is not a lowering: it has no name, no version, no checkpoint_interval"),
    ],
)
def test_objects_that_are_no_lowering_are_refused(lowering: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        register_scan_lowering(lowering)
    assert scan_lowerings() == {}


class Faulty(Unrolled):
    """A lowering that makes one mistake."""

    def __init__(self, fault: str) -> None:
        super().__init__(name="faulty", interval=0 if fault == "interval" else 1)
        self.fault = fault

    def why_unavailable(self, flat_args: Sequence[Any]) -> str | None:
        if self.fault == "reason":
            raise IndexError("out of range")
        return None

    def forward(self, *args: Any) -> Sequence[torch.Tensor]:
        if self.fault == "raises":
            raise KeyError("lost")
        results = list(super().forward(*args))
        wrong: dict[str, Callable[[], Any]] = {
            "shape": lambda: results[0][1:],
            "dtype": results[0].double,
            "kind": lambda: 3,
            "constant": lambda: results[0] * torch.tensor([2.0]),
        }
        results[0] = wrong.get(self.fault, lambda: results[0])()
        return results[1:] if self.fault == "count" else results

    def backward(self, *args: Any) -> Sequence[torch.Tensor]:
        results = list(super().backward(*args))
        return [result[None] for result in results] if self.fault == "gradient" else results


FAULTS = {
    "reason": "why_unavailable of the lowering 'faulty' failed with IndexError: out of range; lowering='loop'",
    "interval": "checkpoint_interval of the lowering 'faulty' returned 0; it must return an int, 1 or more",
    "raises": "forward of the lowering 'faulty' failed with KeyError: 'lost'",
    "count": "forward of the lowering 'faulty' returned . results; the layout requires",
    "shape": r"forward of the lowering 'faulty' returned torch.float\d+ \[2.* result 0; it must be torch.float\d+ \[3",
    "dtype": "forward of the lowering 'faulty' returned torch.float64 .* as result 0; it must be torch.float32",
    "kind": "forward of the lowering 'faulty' returned a int as result 0; it must be a torch.Tensor",
    "constant": "forward of the lowering 'faulty' created a constant tensor, perhaps with torch.tensor: use torch.full",
    "gradient": "backward of the lowering 'faulty' gave",
}


@pytest.mark.long(all_but=["interval", "shape"])
@pytest.mark.parametrize("fault", FAULTS)
def test_mistake_of_a_lowering_is_named(fault: str, register: Callable[[ScanLowering], None]) -> None:
    register(Faulty(fault))
    arguments = CASES[5].arguments(3)
    run = torch.compile(make_network(flex_sn_scan), fullgraph=True, dynamic=False)
    with pytest.raises(Exception, match=FAULTS[fault]):
        sum(result.sum() for result in run(*arguments)).backward()


def test_lowering_loop_ignores_registered_lowerings(
    register: Callable[[ScanLowering], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    lowering = Unrolled()
    register(lowering)
    monkeypatch.setenv("FLEXSN_HOP_LOWERING", "loop")
    arguments = CASES[5].arguments(3, requires_grad=False)
    run = torch.compile(make_network(flex_sn_scan), fullgraph=True)
    torch.testing.assert_close(run(*arguments), make_network(eager_scan)(*arguments))
    assert lowering.traced == []


def test_core_with_a_constant_runs_as_a_loop(
    register: Callable[[ScanLowering], None],
) -> None:
    lowering = Unrolled()
    register(lowering)
    arguments = [torch.randn(4, 3), torch.randn(3)]
    expected = eager_scan(constant_core, 1, 1, 1, *arguments)
    run = torch.compile(functools.partial(flex_sn_scan, constant_core, 1, 1, 1), fullgraph=True)
    torch.testing.assert_close(run(*arguments), expected)
    assert lowering.traced == []
    torch._dynamo.reset()
    kernel = functools.partial(flex_sn_scan, constant_core, 1, 1, 1, lowering="kernel")
    with pytest.raises(Exception, match="'kernel' cannot compile this core: the core creates a constant tensor"):
        torch.compile(kernel, fullgraph=True)(*arguments)


@pytest.mark.long(all_but=["sequence"])
@pairs
def test_checkpoints_may_be_several_steps_apart(
    scan: Run, reference: Run, register: Callable[[ScanLowering], None]
) -> None:
    # aot_eager runs the operators as loops, with the lowering's interval.
    register(Unrolled(interval=3))
    run = torch.compile(make_network(scan), fullgraph=True, backend="aot_eager", dynamic=False)
    for steps in (1, 2, 3, 4, 7):
        assert_same(run, make_network(reference), CASES[5].arguments(steps))
