"""Two lives of one plan. Both perform the same acts, and everything visible is compared."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pprint import pformat
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.utils import parametrize

import lives.calls
import lives.gradients
import lives.modules
import lives.parameters
import lives.settings  # noqa: F401
from flexsn_nn import ExampleError
from flexsn_nn._batch_affine import Normalisation
from flexsn_nn.functional import reset_net
from flexsn_runtime import CapturedTensorError, DoubleBackwardError, TransformError
from lives.acts import perform
from lives.life import Life
from lives.networks import Plan
from lives.observations import Observation, difference, observe

Program = list[tuple[str, dict[str, Any]]]
# Errors of kernels in acts that differentiate. Each error names an operation that only the loop supports.
REFUSALS = (CapturedTensorError, DoubleBackwardError, TransformError)
# Part of the message of the error that layers with a state raise under a checkpoint.
_CHECKPOINT_REFUSAL = "activation checkpointing"
# Parts of the messages of autograd's errors about saved tensors. Kernels save all arguments, but the loop saves only
# the tensors that its operations need.
_AUTOGRAD_REFUSALS = (
    "modified by an inplace operation",
    "changed in place since the forward",
    "backward a second time",
    "Inference tensors cannot be saved for backward",
)


class DifferenceError(AssertionError):
    """Error about a difference between the twins.

    Attributes:
        text: the difference.
        plan, program: the plan, and the acts up to the difference. The message shows both as Python code.
    """

    def __init__(self, text: str, plan: Plan, program: Program) -> None:
        super().__init__(f"{text}\n\n{program_text(plan, program)}")
        self.text, self.plan, self.program = text, plan, program


class Twins:
    """A network that runs as a loop, and its compiled twin.

    Attributes:
        counts: number of lives, and the numbers of acts that were performed, that were refused, and that raised an
            error in both twins.
    """

    counts: ClassVar[Counter[str]] = Counter()

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.program: Program = []
        self.loop, self.compiled = Life(plan, compiled=False), Life(plan, compiled=True)
        self._compare("at the start", {}, {})

    def act(self, name: str, **arguments: Any) -> None:
        """Performs an act in both lives.

        Raises:
            DifferenceError: the lives differ after the act.
        """
        self.program.append((name, arguments))
        with _launcher(self.plan.launcher):
            compiled = self._perform(name, self.compiled, arguments)
        with _documented_norms():
            loop = self._perform(name, self.loop, arguments)
        has_failed = isinstance(loop, Exception), isinstance(compiled, Exception)
        if all(has_failed):
            self.counts[f"{name}: raised"] += 1
            # A backward that stops midway leaves different gradients and graphs in the twins. A call in a reentrant
            # checkpoint leaves states without a graph in the compiled twin, and the loop runs without a checkpoint.
            may_stop_midway = _is_refusal(compiled) or name == "forward_checkpointed"
            if (may_stop_midway or isinstance(loop, ExampleError)) and self._differ():
                self._restart()
            loop, compiled = {}, {}
        elif _is_refusal(compiled) or isinstance(loop, ExampleError):
            # The loop cannot compute the result of a sequence without steps.
            self.counts[f"{name}: refused"] += 1
            self._restart()
            loop, compiled = {}, {}
        elif any(has_failed):
            raise self._difference(
                f"the loop {_describe_outcome(loop)}, the compiled twin {_describe_outcome(compiled)}", loop, compiled
            )
        else:
            self.counts[name] += 1
        assert not isinstance(loop, Exception)
        assert not isinstance(compiled, Exception)
        self._compare(f"after {name}", loop, compiled)
        self._share_gradients()
        for graph, other in zip(self.loop.graphs, self.compiled.graphs, strict=True):
            other.results = {name: value for name, value in other.results.items() if graph.results[name].requires_grad}

    def _perform(self, name: str, life: Life, arguments: dict[str, Any]) -> Observation | Exception:
        torch.manual_seed(len(self.program))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return perform(name, life, arguments)
        except AssertionError as error:
            raise self._difference(f"{life.backend}: {error}") from error
        except Exception as error:
            return error

    def _compare(self, when: str, loop: Observation, compiled: Observation) -> None:
        text = self._find_difference(loop, compiled) or self._find_difference(
            observe(self.loop), observe(self.compiled)
        )
        if text is not None:
            raise self._difference(f"{when}: {text}")

    def _find_difference(self, loop: Observation, compiled: Observation) -> str | None:
        return difference(loop, compiled, rounded=self.loop.rounded)

    def _differ(self) -> bool:
        if len(self.loop.graphs) != len(self.compiled.graphs):
            return True
        return self._find_difference(observe(self.loop), observe(self.compiled)) is not None

    def _difference(self, text: str, *causes: object) -> DifferenceError:
        error = DifferenceError(text, self.plan, list(self.program))
        for cause in causes:
            if isinstance(cause, Exception):
                error.__cause__ = cause
        return error

    @torch.no_grad()
    def _share_gradients(self) -> None:
        """Copies gradients from the loop to the compiled twin, because gradients may differ by the order of sums."""
        for a, b in zip(self.loop.net.parameters(), self.compiled.net.parameters(), strict=True):
            if a.grad is not None and b.grad is not None and not torch.equal(a.grad, b.grad):
                b.grad.copy_(a.grad)

    def _restart(self) -> None:
        """Replaces both twins by copies of the loop without graphs and records, so that they are equal after a refusal.

        torch cannot copy some networks: pruned networks after a call, and parametrised networks. Then both twins start
        again from the plan.
        """
        while self.loop.monitors:
            self.loop.monitors.pop().remove()
        reset_net(self.loop.net)
        loop, twins = self.loop, (Life(self.plan, compiled=False), Life(self.plan, compiled=True))
        try:
            # Copies of a parametrised module share its class. So the removal of one parametrisation changes the class
            # of all copies.
            has_shared_classes = any(map(parametrize.is_parametrized, loop.net.modules()))
            nets = [] if has_shared_classes else [deepcopy(loop.net) for _ in twins]
        except RuntimeError:
            nets = []
        for life, net in zip(twins, nets, strict=False):
            life.net, life.batch, life.dtype, life.step_mode = net, loop.batch, loop.dtype, loop.step_mode
            life.saved, life.rounded = loop.saved, loop.rounded
            life.set_backends(net)
        self.loop, self.compiled = twins


def live(plan: Plan, program: Sequence[tuple[str, dict[str, Any]]]) -> Twins:
    """Runs a program with new twins.

    Raises:
        DifferenceError: the twins differ.
    """
    twins = Twins(plan)
    for name, arguments in program:
        twins.act(name, **arguments)
    return twins


def program_text(plan: Plan, program: Program) -> str:
    """Formats a program as Python code."""
    return (
        "from lives.networks import Plan\n"
        "from lives.twins import live\n\n"
        f"live(\n    {plan!r},\n    {pformat(program, width=110, sort_dicts=False)},\n)"
    )


def _is_refusal(error: object) -> bool:
    if not isinstance(error, Exception):
        return False
    return isinstance(error, REFUSALS) or any(text in str(error) for text in (*_AUTOGRAD_REFUSALS, _CHECKPOINT_REFUSAL))


def _describe_outcome(outcome: object) -> str:
    if isinstance(outcome, Exception):
        return f"raised {type(outcome).__name__}: {str(outcome)[:500]}"
    return "ran"


@contextmanager
def _documented_norms() -> Iterator[None]:
    """Computes fused norms as `(x - mean) scale + shift`, as `NormNeuron` documents. PyTorch's norms use another
    formula, whose results have other rounding errors.
    """

    def of(self: Normalisation, x: Tensor) -> Tensor:
        x, affine = self.absorbed(x)
        return affine.of(x)

    with patch.object(Normalisation, "of", of):
        yield


@contextmanager
def _launcher(choice: str) -> Iterator[None]:
    previous = os.environ.get("FLEXSN_LAUNCHER")
    os.environ["FLEXSN_LAUNCHER"] = choice
    try:
        yield
    finally:
        if previous is None:
            del os.environ["FLEXSN_LAUNCHER"]
        else:
            os.environ["FLEXSN_LAUNCHER"] = previous
