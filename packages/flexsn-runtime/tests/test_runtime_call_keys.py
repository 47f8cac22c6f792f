"""After any other kind of call, a call of a program equals a call of a fresh program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsn_runtime import ScanProgram, repeated_call, run_program, single_step

pytestmark = pytest.mark.usefixtures("compiler")

T, STEP = 4, (2, 16)


class Core(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.linspace(0.1, 0.9, 16))
        self.threshold = 1.0

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(v * self.decay) + torch.exp(x)
        s = torch.relu(h - self.threshold)
        return s, h - s


def draw_input(dtype: torch.dtype = torch.float32, steps: int = T, batch: int = 2) -> Tensor:
    return torch.rand(steps, batch, 16, generator=torch.Generator().manual_seed(0)).to(dtype)


def draw_state(batch: int = 2) -> Tensor:
    return torch.rand(batch, 16, generator=torch.Generator().manual_seed(1))


def run(program: ScanProgram, *inputs: Tensor, states: tuple[Tensor, ...] = (), **options: Any) -> Any:
    return run_program(program, inputs, states, **options)


def exchange_state(program: ScanProgram, core: Core) -> Any:
    stand_in = torch.full((16,), 0.25)
    return run_program(program, (draw_input(),), (draw_state(),), {id(core.decay): stand_in})


def call_within(context: Any) -> Callable[[ScanProgram, Core], Any]:
    def call(program: ScanProgram, core: Core) -> Any:
        with context():
            return run(program, draw_input(), states=(draw_state(),))

    return call


def change_and_restore(
    change: Callable[[Core], object], back: Callable[[Core], object]
) -> Callable[[ScanProgram, Core], Any]:
    def call(program: ScanProgram, core: Core) -> Any:
        change(core)
        try:
            return run(program, draw_input(), states=(draw_state(),))
        finally:
            back(core)

    return call


def copy_unaligned(tensor: Tensor) -> Tensor:
    """Returns a copy that begins one element after an address aligned to 16 bytes."""
    memory = tensor.new_empty(tensor.numel() + 1)
    return memory[1:].view(tensor.shape).copy_(tensor)


CALLS: dict[str, Callable[[ScanProgram, Core], Any]] = {
    "usual": lambda p, c: run(p, draw_input(), states=(draw_state(),)),
    "from zero": lambda p, c: run(p, draw_input()),
    "all states": lambda p, c: run(p, draw_input(), states=(draw_state(),), state_seqs=True),
    "all states from zero": lambda p, c: run(p, draw_input(), state_seqs=True),
    "one step": lambda p, c: tuple(single_step(p, (draw_input()[0],), (draw_state(),))),
    "one step, input alone requires grad": lambda p, c: tuple(
        single_step(p, (draw_input()[0].requires_grad_(),), (draw_state(),))
    ),
    "more steps": lambda p, c: run(p, draw_input(steps=7), states=(draw_state(),)),
    "larger batch": lambda p, c: run(p, draw_input(batch=3), states=(draw_state(3),)),
    "other strides": lambda p, c: run(
        p, draw_input().transpose(1, 2).contiguous().transpose(1, 2), states=(draw_state(),)
    ),
    "another alignment": lambda p, c: run(p, copy_unaligned(draw_input()), states=(draw_state(),)),
    "lazily negated": lambda p, c: run(
        p, torch.complex(draw_input(), -draw_input()).conj().imag, states=(draw_state(),)
    ),
    "another dtype": lambda p, c: run(p, draw_input(torch.float64), states=(draw_state().double(),)),
    "input requires grad": lambda p, c: run(p, draw_input().requires_grad_(), states=(draw_state(),)),
    "state requires grad": lambda p, c: run(p, draw_input(), states=(draw_state().requires_grad_(),)),
    "without gradients": call_within(torch.no_grad),
    "inference mode": call_within(torch.inference_mode),
    "autocast": call_within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "autocast off": call_within(lambda: torch.autocast("cpu", enabled=False)),
    "a stand-in": exchange_state,
    "another number": change_and_restore(
        lambda c: setattr(c, "threshold", 0.5), lambda c: setattr(c, "threshold", 1.0)
    ),
    "a frozen parameter": change_and_restore(
        lambda c: c.decay.requires_grad_(False), lambda c: c.decay.requires_grad_(True)
    ),
}


def describe(call: Callable[[ScanProgram, Core], Any], program: ScanProgram, core: Core) -> list[Any]:
    """Returns the results of a call with their properties, and the gradient of the core's parameter, if it has one."""
    results = call(program, core)
    properties: list[Any] = []
    for result in results:
        properties += [result.detach().clone(), result.requires_grad, result.stride(), result.is_inference()]
    differentiable = [result for result in results if result.requires_grad]
    if differentiable and core.decay.requires_grad:
        total = torch.stack([result.double().sum() for result in differentiable]).sum()
        (gradient,) = torch.autograd.grad(total, core.decay, allow_unused=True)
        properties.append(None if gradient is None else gradient)
    return properties


def assert_same(actual: list[Any], expected: list[Any]) -> None:
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        if isinstance(theirs, Tensor):
            assert torch.equal(ours, theirs)
        else:
            assert ours == theirs


def program_of(core: Core) -> ScanProgram:
    return ScanProgram(core, 1, 1, 1, on_cpu="cpp")


@functools.cache
def call_fresh_program(name: str) -> list[Any]:
    """Returns the description of a call of a fresh program."""
    core = Core()
    return describe(CALLS[name], program_of(core), core)


@pytest.fixture(scope="module")
def shared() -> tuple[ScanProgram, Core]:
    core = Core()
    return program_of(core), core


@pytest.mark.long(all_but=["usual", "all states", "without gradients"])
@pytest.mark.parametrize("first", CALLS)
def test_checks_of_a_call_are_not_reused_for_another_kind(first: str, shared: tuple[ScanProgram, Core]) -> None:
    for name in CALLS:
        for repeated in (first, name):
            assert_same(describe(CALLS[repeated], *shared), call_fresh_program(repeated))


def test_calls_of_each_kind_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests all kinds of calls, except kinds with unreadable memory or a new trace, which are prepared again."""
    prepared_again = {"lazily negated", "another number", "a frozen parameter"}
    core = Core()
    program = program_of(core)
    for name in CALLS.keys() - prepared_again:
        for _ in range(2):
            CALLS[name](program, core)
        with monkeypatch.context() as patch:
            for module in ("_repeated", "_single_step"):
                patch.setattr(f"flexsn_runtime.program.{module}.prepare", None)
            CALLS[name](program, core)
    assert repeated_call(program, (draw_input(),), (draw_state().double(),)) is None
