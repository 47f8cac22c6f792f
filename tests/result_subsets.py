"""Random steps that return some values several times, and random subsets of the results that a loss reads."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flexsn_hop import eager_scan, eager_scan_final_state, flex_sn_scan, flex_sn_scan_final_state
from flexsn_nn.surrogate import ATan

Scan = Callable[..., tuple[Tensor, ...]]

STEPS, BATCH, WIDTH = 11, 2, 4
SPIKE = ATan()


@dataclass(frozen=True)
class Combination:
    """A scan, and the results that a loss reads.

    Attributes:
        choices: `(value, is_detached)` for each result of the step. `value` is the index of a value that the step
            computes or receives.
        num_inputs, num_states, num_outputs: numbers of inputs, states and outputs.
        final: True if the scan returns final states instead of sequences.
        used: indices of the results that the loss reads.
        has_products: True if the step multiplies by matrices.
    """

    choices: tuple[tuple[int, bool], ...]
    num_inputs: int
    num_states: int
    num_outputs: int
    final: bool
    used: tuple[int, ...]
    has_products: bool

    def core(self, parameters: nn.ParameterList) -> Callable[..., tuple[Tensor, ...]]:
        """Makes the step. Some of its results may be the same tensor, views of the same tensor, or arguments."""
        decay, scale, matrix = parameters

        def step(*arguments: Tensor) -> tuple[Tensor, ...]:
            x, state = arguments[0], arguments[-1]
            drive = x + nn.functional.linear(state, matrix) if self.has_products else x + 0.5 * state
            potential = torch.tanh(decay * drive)
            spike = SPIKE(potential - 0.1)
            gated = potential * scale
            last = sum(arguments[1:], gated)
            values = [potential, spike, gated, potential - spike, last, *arguments]
            results = [values[i % len(values)] for i, _ in self.choices]
            return tuple(r.detach() if off else r for r, (_, off) in zip(results, self.choices, strict=True))

        return step

    def __call__(self, sequence: Scan, final: Scan, core: object, arguments: Sequence[Tensor]) -> list[Tensor]:
        """Runs the scan, and returns the results that the loss reads."""
        scan = final if self.final else sequence
        results = scan(core, self.num_inputs, self.num_states, self.num_outputs, *arguments)
        return [results[i] for i in self.used]

    def arguments(self, generator: torch.Generator, device: str) -> list[Tensor]:
        """Makes input sequences and initial states."""
        shapes = [(STEPS, BATCH, WIDTH)] * self.num_inputs + [(BATCH, WIDTH)] * self.num_states
        return [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]


def combination(seed: int) -> Combination:
    """Makes a random combination. Combinations with an odd seed have products."""
    rng = random.Random(seed)
    num_inputs, num_states, num_outputs = rng.randint(1, 2), rng.randint(1, 3), rng.randint(0, 3)
    count = num_outputs + num_states
    frequent = [rng.randrange(8) for _ in range(2)]  # indices that are chosen often, so that values repeat
    choices = [
        (rng.choice(frequent) if rng.random() < 0.7 else rng.randrange(8), rng.random() < 0.2) for _ in range(count)
    ]
    used = [i for i in range(count) if rng.random() < 0.5] or [rng.randrange(count)]
    return Combination(
        tuple(choices), num_inputs, num_states, num_outputs, rng.random() < 0.6, tuple(used), seed % 2 == 1
    )


# The most common cases come first: a value is both an output and a state, and the loss reads only the last state.
USUAL = [
    Combination(((0, False), (0, False)), 1, 1, 1, True, (1,), False),
    *(Combination(((1, False), (3, False), (1, False)), 1, 2, 1, True, used, True) for used in ((1,), (2,))),
    *(
        Combination(((0, False), (0, False)), 1, 1, 1, final, used, has_products)
        for final, used in ((True, (0, 1)), (True, (0,)), (False, (1,)))
        for has_products in (False, True)
    ),
    *(Combination(((1, False), (3, False), (1, False)), 1, 2, 1, True, used, True) for used in ((1, 2), (0,))),
]


def _describe(case: Combination) -> Callable[[str], str]:
    """Returns a function that adds a description of the combination to a message."""
    return lambda text: f"{case}\n{text}"


def compare(cases: Sequence[Combination], *, device: str = "cpu", dynamic: bool = False) -> None:
    """Compiles one network of all combinations, and compares its results and gradients with those of the loop.

    Raises:
        AssertionError: results or gradients differ, or only one of the compiled network and the loop returns `None` for
            a gradient.
    """
    generator = torch.Generator().manual_seed(0)
    arguments = [case.arguments(generator, device) for case in cases]
    parameters = [
        nn.ParameterList(
            nn.Parameter(torch.randn(shape, generator=generator).to(device))
            for shape in ((WIDTH,), (WIDTH,), (WIDTH, WIDTH))
        )
        for _ in cases
    ]
    cores = [case.core(learned) for case, learned in zip(cases, parameters, strict=True)]

    def network(sequence: Scan, final: Scan) -> list[list[Tensor]]:
        triples = zip(cases, cores, arguments, strict=True)
        return [case(sequence, final, core, values) for case, core, values in triples]

    compiled = torch.compile(lambda: network(flex_sn_scan, flex_sn_scan_final_state), fullgraph=True, dynamic=dynamic)
    actual, expected = compiled(), network(eager_scan, eager_scan_final_state)
    losses = []
    for results in (actual, expected):
        weights = torch.Generator().manual_seed(1)
        terms = [(r * torch.randn(r.shape, generator=weights).to(device)).sum() for scan in results for r in scan]
        losses.append(torch.stack(terms).sum())
    leaves = [leaf for values, learned in zip(arguments, parameters, strict=True) for leaf in (*values, *learned)]
    gradients = [torch.autograd.grad(loss, leaves, allow_unused=True) for loss in losses]
    position = 0
    for case, actual_results, expected_results, values in zip(cases, actual, expected, arguments, strict=True):
        torch.testing.assert_close(actual_results, expected_results, rtol=1e-4, atol=1e-5, msg=_describe(case))
        assert [r.requires_grad for r in actual_results] == [r.requires_grad for r in expected_results], case
        count = len(values) + 3
        for i in range(position, position + count):
            actual_gradient, expected_gradient = gradients[0][i], gradients[1][i]
            same_kind = (actual_gradient is None) == (expected_gradient is None)
            assert same_kind, (case, i - position, actual_gradient, expected_gradient)
            torch.testing.assert_close(actual_gradient, expected_gradient, rtol=1e-4, atol=1e-5, msg=_describe(case))
        position += count
