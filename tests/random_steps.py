"""Random steps for `flexsn_hop.scan`, written as source code, and a comparison of each lowering with a plain loop."""

from __future__ import annotations

import linecache
import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from flexsn_hop import scan

LOWERINGS = ("eager", "aot_eager", "loop", "kernels")
"""Ways to run a scan: in Python, with the operator's own loop, with Inductor's call of this loop, and with kernel
launches.
"""

CALLS = 3
"""Number of calls of each compiled function. Later calls run in the state that earlier calls leave."""

SIZE = 3
SHAPES: tuple[tuple[int, ...], ...] = ((), (SIZE,), (2, SIZE), (1, SIZE), (SIZE, SIZE))
LARGEST = 60

# Expressions of values `a` and `b`, an index `i` in range(SIZE), a table `W` [SIZE, SIZE] and a shape `s`.
EXPRESSIONS = (
    "torch.tanh({a})",
    "torch.sin({a}) * {b}",
    "torch.sigmoid({a} - {b})",
    "{a} + {b}",
    "{a} * {b}",
    "{a} / (2.0 + {b}.cos())",
    "torch.lerp({a}, {b}, 0.3)",
    "torch.where({a} > 0.1, {b}, {a})",
    "{a}.masked_fill({b} > 0.0, 0.5)",
    "{a}.clamp(-0.7, 0.9)",
    "{a}.detach() * {b}",
    "{a}.sum(0)",
    "{a}.mean(-1, keepdim=True)",
    "{a}.amax(-1)",
    "{a}.cumsum(-1)",
    "{a}.softmax(-1)",
    "{a}.logsumexp(0)",
    "{a}.sort(-1).values",
    "{a}.topk(2, -1).values",
    "{a} @ W",
    "F.linear({a}, W, {b})",
    "{a} @ {b}",
    "torch.outer({a}, {b})",
    "torch.einsum('...i,ij->...j', {a}, W)",
    "{a}[{i}]",
    "{a}[..., {i}]",
    "{a}[:, {i}]",
    "W[{i}] * {a}",
    "{a}[1:]",
    "{a}[..., ::2]",
    "{a}[..., None] * {b}",
    "{a}[-1]",
    "{a}.index_select(0, {i})",
    "{a}.index_select(-1, {i})",
    "{a}.take({i})",
    "{a}.gather(-1, {i}.expand({a}.shape[:-1] + {i}.shape))",
    "torch.take_along_dim({a}, {i}, 0)",
    "F.embedding({i}, W)",
    "{a}.flip(0)",
    "{a}.roll(1, -1)",
    "{a}.unfold(-1, 2, 1).sum(-1)",
    "F.pad({a}, (1, 0))",
    "{a}.diagonal()",
    "{a}.tril()",
    "{a}.t()",
    "{a}.expand(2, *{a}.shape)",
    "torch.stack([{a}, {b}])",
    "torch.cat([{a}, {b}])",
    "{a}.chunk(2, -1)[0]",
    "F.one_hot({i}, 3).to({a}.dtype) @ {a}",
    "torch.einsum('...,...->', {a}, {b}) * 0.1",
    "{a}.index_add(0, {i}, {b})",
    "{a}.index_copy(0, torch.tensor([0, 2]), {b}[:2])",
    "{a}.index_fill(0, {i}[:1], 0.25)",
    "{a}.index_put(({i},), {b}, accumulate=True)",
    "{a}.scatter_add(-1, {i}.expand_as({b}), {b})",
    "{a}.scatter_reduce(0, {i}.expand_as({b}), {b}, 'sum')",
    "{a}.masked_scatter({a} > 0.0, {b})",
    "{a}.select_scatter({b}, 0, 1)",
    "{a}.diagonal_scatter({b})",
)
FRESH = (
    "torch.zeros({s}, dtype=torch.float64)",
    "torch.ones({s}, dtype=torch.float64)",
    "torch.full({s}, 0.5, dtype=torch.float64)",
    "torch.empty({s}, dtype=torch.float64).fill_(0.25)",
    "torch.arange({n}, dtype=torch.float64).reshape({s})",
    "torch.linspace(-1, 1, {n}, dtype=torch.float64).reshape({s})",
    "torch.tensor({values}, dtype=torch.float64).reshape({s})",
    "torch.scalar_tensor(0.5, dtype=torch.float64).repeat({s})",
    "torch.eye(3, dtype=torch.float64)",
    "{a}.new_zeros({s})",
    "{a}.new_ones({s})",
    "{a}.new_full({s}, -0.5)",
    "torch.zeros_like({a})",
    "torch.full_like({a}, 0.75)",
    "{a}.clone()",
    "{a} * 1.0",
)
# Writes to a new tensor `v`.
WRITES = (
    "{v}[0] = {a}",
    "{v}[{i}] = {a}",
    "{v}[..., {i}] = {a}",
    "{v}[{i}] += {a}",
    "{v}[1:] *= {a}",
    "{v}[..., ::2] -= {a}",
    "{v}[...] = {a}",
    "{v}[{v} > 0.1] = 0.3",
    "{v}.add_({a})",
    "{v}.mul_({a})",
    "{v}.copy_({a})",
    "{v}.sub_({a}, alpha=0.5)",
    "{v}.select(0, 1).add_({a})",
    "{v}.diagonal().mul_({a})",
    "{v}.t().add_({a})",
    "{v}.view(-1)[0] = {a}.sum()",
    "{v}.index_add_(0, {i}, {a})",
    "{v}.index_copy_(0, torch.tensor([2, 0]), {a}[:2])",
    "{v}.index_put_(({i},), {a}, accumulate=True)",
    "{v}.scatter_(-1, {i}.expand_as({a}), {a})",
    "{v}.scatter_add_(0, {i}.expand_as({a}), {a})",
    "{v}.put_({i}, {a}.flatten()[:{i}.numel()], accumulate=True)",
    "{v}.masked_fill_({a} > 0.0, 0.4)",
    "{v}.index_fill_(0, {i}, 0.2)",
    "{v}.tanh_()",
    "{v}.zero_()",
    "{v}.fill_(0.6)",
    "{v}.clamp_(-0.5, 0.5)",
)


@dataclass
class Program:
    """A call of `scan`: a step as source code, and the arguments of the call.

    Attributes:
        source: source code of `step(carry, x)`.
        captured: tensors that the step captures, by name.
        init, xs: the two trees of the call; the leaves of `xs` are sequences.
        options: options of the call.
        weighed: for each tensor of the results, True if the loss uses the tensor.
    """

    source: str
    captured: dict[str, Tensor]
    init: Any
    xs: Any
    options: dict[str, Any]
    weighed: list[bool]
    file: str = "<random scan>"

    def step(self) -> Callable[[Any, Any], Any]:
        """Makes a new step function. Compilers can read its source as if it were in a file."""
        linecache.cache[self.file] = (len(self.source), None, self.source.splitlines(keepends=True), self.file)
        namespace: dict[str, Any] = {"torch": torch, "F": F, **self.captured}
        exec(compile(self.source, self.file, "exec"), namespace)
        step: Callable[[Any, Any], Any] = namespace["step"]
        return step

    def tensors(self) -> list[Tensor]:
        return [t for t in tree_leaves((self.init, self.xs, self.captured)) if isinstance(t, Tensor)]


class _Writer:
    """Writes a step line by line, and runs each line immediately on values."""

    def __init__(self, rng: random.Random, names: dict[str, Tensor], captured: dict[str, Tensor]) -> None:
        self.rng = rng
        self.values = names
        self.captured = captured
        self.lines: list[str] = []

    def list_floats(self) -> list[str]:
        return [name for name, value in self.values.items() if value.is_floating_point()]

    def fill(self, template: str, **more: str) -> str:
        # Later values are chosen more often, so that the step becomes deep.
        names = self.list_floats()
        late_names = names[-4:]
        indices = [name for name, value in {**self.values, **self.captured}.items() if not value.is_floating_point()]
        shape = self.rng.choice([shape for shape in SHAPES if shape])
        count = torch.Size(shape).numel()
        return template.format(
            a=self.rng.choice(late_names if self.rng.random() < 0.7 else names),
            b=self.rng.choice(names),
            i=self.rng.choice(indices),
            s=shape,
            n=count,
            values=[self.rng.randrange(-4, 5) / 4 for _ in range(count)],
            **more,
        )

    def attempt(self, lines: Sequence[str], name: str) -> bool:
        """Adds lines that define a value, if they run without an error and the value is not too large."""
        namespace: dict[str, Any] = {"torch": torch, "F": F, **self.captured, **self.values}
        try:
            exec("\n".join(lines), namespace)
        except (RuntimeError, IndexError, TypeError, ValueError):
            return False
        value = namespace[name]
        if not isinstance(value, Tensor) or not 0 < value.numel() <= LARGEST or value.dim() > 3:
            return False
        if not value.isfinite().all() or value.abs().max() > 50:
            return False
        self.lines += lines
        self.values[name] = value.clone()
        return True

    def add_value(self, number: int) -> None:
        """Adds a value: an expression, or a new tensor and up to twelve writes to this tensor."""
        name = f"v{number}"
        for _ in range(200):
            if self.rng.random() < 0.6:
                if self.attempt([f"{name} = {self.fill(self.rng.choice(EXPRESSIONS))}"], name):
                    return
                continue
            if not self.attempt([f"{name} = {self.fill(self.rng.choice(FRESH))}"], name):
                continue
            for _ in range(12):
                if self.rng.random() < 0.35:
                    break
                self.attempt([self.fill(self.rng.choice(WRITES), v=name)], name)
            return

    def add_leaf(self, leaf: str, number: int) -> str:
        """Adds a line that computes the next value of a leaf of the carry, and returns the name of this value."""
        shape = self.values[leaf].shape
        others = [name for name in self.list_floats() if name.startswith("v")]
        fitting = [name for name in others if self.values[name].shape == shape]
        other = self.rng.choice(others)
        name = f"new{number}"
        if fitting and self.rng.random() < 0.8:
            self.lines.append(f"{name} = torch.tanh({self.rng.choice(fitting)}) + 0.3 * {leaf}")
        else:
            self.lines.append(f"{name} = 0.7 * {leaf} + torch.tanh({other}.mean())")
        return name


def random_program(seed: int) -> Program:
    """Makes the program of a seed. A seed gives the same program on all machines."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def indices(*shape: int) -> Tensor:
        return torch.randint(SIZE, shape, generator=generator)

    order = range(rng.randrange(1, 5))
    dim = rng.choice((0, 0, 0, 1, -1))
    carried = {f"c{n}": draw(*rng.choice(SHAPES)) for n in range(rng.randrange(1, 4))}
    # If the time is not the first dimension of sequences, their steps must have dimensions.
    slices = {f"x{n}": draw(*rng.choice(SHAPES if dim == 0 else SHAPES[1:])) for n in range(rng.randrange(3))}
    if rng.random() < 0.6:
        slices["t"] = torch.full((SIZE,), SIZE - 1)  # the largest index
    captured = {"W": 0.5 * draw(SIZE, SIZE), "p": draw(SIZE), "q": indices(SIZE), "r": torch.tensor([2, 0, 1])}
    writer = _Writer(rng, {**carried, **slices, "p": captured["p"]}, captured)
    for number in range(rng.randrange(2, 8)):
        writer.add_value(number)
    if not any(name.startswith("v") for name in writer.values):
        assert writer.attempt(["v0 = torch.tanh(c0)"], "v0")
    new_leaves = [writer.add_leaf(leaf, number) for number, leaf in enumerate(carried)]
    defined = [name for name in writer.values if name.startswith("v")]
    returned = rng.sample(defined, min(len(defined), rng.randrange(3)))
    if dim != 0:
        returned = [name for name in returned if writer.values[name].dim() > 0]
    # The results are distinct values. Another test covers a step that returns one value twice.
    carry_out = ", ".join(f"'{leaf}': {name}" for leaf, name in zip(carried, new_leaves, strict=True))
    y = ", ".join(f"({name} + 0.0, None)" for name in returned)
    unpacked = [f"{leaf} = carry['{leaf}']" for leaf in carried] + [f"{leaf} = x['{leaf}']" for leaf in slices]
    body = [*unpacked, *writer.lines, f"return {{{carry_out}}}, [{y}]"]
    source = "\n    ".join(["def step(carry, x):", *body]) + "\n"
    for name in ("W", "p", *(name for name in carried if rng.random() < 0.8)):
        {**captured, **carried}[name].requires_grad_()

    def sequence(value: Tensor) -> Tensor:
        values_of_steps = [
            value + 0.3 * draw(*value.shape) if value.is_floating_point() else indices(SIZE) for _ in order
        ]
        values = torch.stack(values_of_steps, dim)
        return values.requires_grad_(value.is_floating_point() and rng.random() < 0.8)

    xs = {name: sequence(value) for name, value in slices.items()} or None
    options: dict[str, Any] = {"reverse": rng.random() < 0.3, "dim": dim}
    if xs is None:
        options["length"] = len(order)
    count = len(new_leaves) + len(returned)
    weighed = [rng.random() < 0.8 for _ in range(count)]
    weighed[rng.randrange(count)] = True
    return Program(source, captured, carried, xs, options, weighed, f"<random scan {seed}>")


def run_loop(step: Callable[[Any, Any], Any], init: Any, xs: Any, *, reverse: bool, dim: int, length: int = 0) -> Any:
    """Computes `scan` as users would write it by hand. There must be at least one step."""
    steps = length if xs is None else next(iter(xs.values())).shape[dim]
    order = range(steps)
    carry, ys = init, []
    for t in reversed(order) if reverse else order:
        carry, y = step(carry, None if xs is None else tree_map(lambda leaf, t=t: leaf.select(dim, t), xs))
        ys.append(y)
    if reverse:
        ys.reverse()
    by_leaf = [[leaf for leaf in tree_leaves(y) if leaf is not None] for y in ys]
    stacked = iter([torch.stack(leaves, dim) for leaves in zip(*by_leaf, strict=True)])
    return carry, tree_map(lambda leaf: None if leaf is None else next(stacked), ys[0])


@dataclass
class Outcome:
    """Outcome of a program.

    Attributes:
        equal: lowerings with correct results.
        different: for each lowering, differences from the loop in results, gradients or changed arguments.
        failed: errors.
        no_loop: error of the loop itself, if the loop fails. Then nothing can be compared.
    """

    equal: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    no_loop: str = ""


def _results_and_gradients(run: Callable[..., Any], program: Program) -> tuple[list[Tensor], list[Tensor]]:
    leaves = [leaf for leaf in tree_leaves(run(program.init, program.xs)) if leaf is not None]
    total = torch.zeros((), dtype=torch.float64)
    for leaf, is_weighed in zip(leaves, program.weighed, strict=True):
        if is_weighed:
            weight = torch.arange(1, leaf.numel() + 1, dtype=torch.float64, device="cpu").cos().reshape(leaf.shape)
            total = total + (leaf * weight.to(leaf.device)).sum().cpu()
    trained = [tensor for tensor in program.tensors() if tensor.requires_grad]
    gradients = torch.autograd.grad(total, trained, allow_unused=True, materialize_grads=True)
    return [leaf.detach() for leaf in leaves], list(gradients)


@contextmanager
def _lowering_to(name: str) -> Iterator[None]:
    """Sets the environment so that scans are compiled with this lowering."""
    before = os.environ.get("FLEXSN_HOP_LOWERING")
    os.environ["FLEXSN_HOP_LOWERING"] = "loop" if name == "loop" else "auto"
    try:
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")  # one lowering warns that a scan becomes the loop
            yield
    finally:
        os.environ.pop("FLEXSN_HOP_LOWERING")
        if before is not None:
            os.environ["FLEXSN_HOP_LOWERING"] = before


def _compile(program: Program, lowering: str) -> Callable[..., Any]:
    step = program.step()

    def run(init: Any, xs: Any) -> Any:
        return scan(step, init, xs, **program.options)

    if lowering == "eager":
        return run
    backend = "aot_eager" if lowering == "aot_eager" else "inductor"
    compiled: Callable[..., Any] = torch.compile(run, fullgraph=True, backend=backend, dynamic=False)
    return compiled


def compare(program: Program, lowerings: Sequence[str] = LOWERINGS) -> Outcome:
    """Runs a program `CALLS` times with each lowering, and compares each run with the loop."""
    outcome = Outcome()
    step = program.step()
    try:
        expected = _results_and_gradients(lambda init, xs: run_loop(step, init, xs, **program.options), program)
    except RuntimeError as error:  # for example, a write to memory that autograd needs
        outcome.no_loop = str(error)
        return outcome
    before = [tensor.detach().clone() for tensor in program.tensors()]
    for lowering in lowerings:
        torch._dynamo.reset()
        with _lowering_to(lowering):
            try:
                run = _compile(program, lowering)
                runs = [_results_and_gradients(run, program) for _ in range(CALLS)]
            except Exception as error:
                outcome.failed.append(f"{lowering}: {type(error).__name__}: {error}")
                continue
        differences = [_describe_difference(actual, expected) for actual in runs]
        differences.append(_describe_difference(([t.detach() for t in program.tensors()], []), (before, [])))
        times = [f"call {call}" for call in range(CALLS)] + ["arguments afterwards"]
        messages = [f"{place}: {text}" for place, text in zip(times, differences, strict=True) if text]
        if messages:
            outcome.different.append(f"{lowering}: {messages[0]}")
        else:
            outcome.equal.append(lowering)
    return outcome


def _describe_difference(actual: Any, expected: Any) -> str:
    try:
        torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-9)
    except AssertionError as error:
        return " ".join(str(error).split())
    return ""
