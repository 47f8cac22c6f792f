"""Random step functions and their calls. Each step function is source text, and computes with captured tensors.

The random choices include:

- in-place operations on values that are computed from captured tensors, and views of these values;
- custom `autograd.Function`s, and blocks under `no_grad`;
- parameters that are frozen or unfrozen between calls, and captured tensors that are computed from other tensors;
- results that the loss does not use;
- short and empty sequences;
- a value that changes between calls, in a place from `changing_cores.py`.

`compare` compares the values, dtypes and gradients of the compiled scan with those of the loop.
"""

from __future__ import annotations

import linecache
import random
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import changing_cores
import torch
from changing_cores import PLACES
from torch import Tensor

from flexsn_graph import TorchError, UnsupportedOpError
from flexsn_hop import eager_scan, eager_scan_final_state
from flexsn_runtime import ScanProgram, TargetName, prepare, scan

STEP = (3, 4)
FULL = "full"
# Shapes by name. All shapes except `rows` broadcast to the shape of the step.
SHAPES: dict[str, tuple[int, ...]] = {"one": (), "row": (4,), "column": (3, 1), FULL: STEP, "rows": (2, 4)}


class Rounded(torch.autograd.Function):
    """A function that rounds. Its gradient is straight-through."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return torch.round(w * 4.0) / 4.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Scaled(torch.autograd.Function):
    """The identity function. Its gradient is multiplied by the argument `scale`."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return w.view_as(w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.scale, None


class Passed(torch.autograd.Function):
    """A function that returns its argument itself, without a copy. Its gradient is multiplied by -2."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -2.0 * grads[0]


class Quantised(torch.autograd.Function):
    """A function that quantises with a scale that depends on all elements. It is written with `setup_context`."""

    @staticmethod
    def forward(w: Tensor, levels: int) -> Tensor:
        scale = w.abs().max() / levels + 0.01
        return torch.round(w / scale) * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (w,) = ctx.saved_tensors
        return torch.where(w.abs() <= 1.0, grads[0], 0.25 * grads[0]), None


class SumAndDifference(torch.autograd.Function):
    """A function with two arguments, two results, and custom gradients for all of them."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(a, b)
        return a + b, a - b

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return 2.0 * grads[0] + grads[1] * b, grads[0] * a - 3.0 * grads[1]


class WithSign(torch.autograd.Function):
    """A function whose second result is marked as not differentiable."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> tuple[Tensor, Tensor]:
        sign = torch.sign(w)
        ctx.mark_non_differentiable(sign)
        ctx.save_for_backward(sign)
        return w.abs(), sign

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (sign,) = ctx.saved_tensors
        gradient: Tensor = 3.0 * grads[0] * sign
        return gradient


class Doubled(torch.autograd.Function):
    """A function that writes to its argument and marks it as dirty."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        w.mul_(2.0)
        ctx.mark_dirty(w)
        return w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 5.0 * grads[0]


class Nested(torch.autograd.Function):
    """A function that calls other functions in its forward."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        h: Tensor = Rounded.apply(w).clone()
        h += 0.25 * w
        return h

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 1.5 * grads[0]


class Centred(torch.autograd.Function):
    """A function whose gradient mixes the elements of its argument."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w * 1.5

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] - 0.5 * grads[0].mean()


class Signed(torch.autograd.Function):
    """A function whose gradient is not linear in the incoming gradient."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].sign()


class Pulled(torch.autograd.Function):
    """A function whose gradient has a constant term, such as the gradient of a penalty."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        result = w * 1.5
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        gradient: Tensor = 1.5 * grads[0] + 0.1 * result
        return gradient


class Steady(torch.autograd.Function):
    """A function whose gradient does not depend on the incoming gradient."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return w * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (w,) = ctx.saved_tensors
        return torch.full_like(w, 0.3)


class Spike(torch.autograd.Function):
    """A function that is 1 where `h >= threshold`, and 0 elsewhere. Both arguments have a surrogate gradient."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, threshold: Tensor) -> Tensor:
        ctx.save_for_backward(h, threshold)
        spike: Tensor = (h >= threshold).to(h.dtype)
        return spike

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        h, threshold = ctx.saved_tensors
        slope = 1.0 / (1.0 + (h - threshold).abs()) ** 2
        gradient = grads[0] * slope
        threshold_gradient = -gradient
        while threshold_gradient.dim() > threshold.dim():
            threshold_gradient = threshold_gradient.sum(0)
        for d, size in enumerate(threshold.shape):
            if size == 1:
                threshold_gradient = threshold_gradient.sum(d, keepdim=True)
        return gradient, threshold_gradient


FUNCTIONS = {
    f.__name__: f
    for f in (
        *(Rounded, Scaled, Passed, Quantised, SumAndDifference, WithSign),
        *(Doubled, Nested, Centred, Signed, Pulled, Steady, Spike),
    )
}

UNARY = (
    "{0} * 2.0",
    "{0} + 0.5",
    "torch.tanh({0})",
    "{0}.sigmoid()",
    "torch.exp(-{0}.abs())",
    "{0}.abs()",
    "-{0}",
    "torch.sqrt({0}.abs() + 0.1)",
    "{0}.clamp(-0.5, 0.75)",
    "torch.nn.functional.hardswish({0})",
    "{0} * {0}",
    "{0}.detach() * {0}",
    "{0}.data * {0}",
    "torch.where({0} > 0, {0}, 0.1 * {0})",
    "{0} * k0",
    "{0} * k0 + {0}.tanh()",
)
BINARY = (
    "{0} + {1}",
    "{0} * {1}",
    "{0} - 0.5 * {1}",
    "torch.maximum({0}, {1})",
    "{0} / (1.0 + {1}.abs())",
    "torch.where({1} > 0.1, {0}, {1})",
)
# Operations that mix the elements of a tensor. They are only applied to values computed from captured tensors.
MIXING = (
    "{0}.softmax(0)",
    "{0}.flip(0)",
    "{0}.cumsum(0)",
    "{0} - {0}.mean()",
    "{0} / (1.0 + {0}.abs().sum())",
    "torch.nn.functional.normalize({0}, dim=0)",
    "{0}.max() * {0}",
    "torch.roll({0}, 1, 0)",
)
REDUCING = ("{0}.sum()", "{0}.mean()", "{0}.max()", "{0}.norm()", "({0} * {0}).sum().sqrt()")
APPLIED = (
    "Rounded.apply({0})",
    "Scaled.apply({0}, 0.5)",
    "Scaled.apply({0}, 2.0)",
    "Passed.apply({0})",
    "Quantised.apply({0}, 3)",
    "SumAndDifference.apply({0}, {1})[0]",
    "SumAndDifference.apply({0}, {1})[1]",
    "WithSign.apply({0})[0]",
    "WithSign.apply({0})[1]",
    "Nested.apply({0})",
    "Centred.apply({0})",
    "Signed.apply({0})",
)
COPIES = (
    "{0}.clone()",
    "{0} * 1.0",
    "torch.zeros_like({0})",
    "torch.empty_like({0}).copy_({0})",
    "torch.full_like({0}, 0.5)",
    "{0}.new_zeros({0}.shape)",
    "0.5 * {0}",
)
VIEWS = ("{0}.view({0}.shape)", "{0}[...]", "{0}.detach()", "{0}.view(-1).view({0}.shape)")
IN_PLACE = (
    "{0} *= 3.0",
    "{0} += {1}",
    "{0}.add_({1})",
    "{0}.mul_(torch.tanh({1}))",
    "{0}.clamp_(-1.0, 1.0)",
    "{0}.relu_()",
    "{0}.neg_()",
    "{0}.copy_({1})",
    "{0}.fill_(0.5)",
    "{0}.zero_()",
    "{0}.masked_fill_({1} > 0, 0.3)",
    "{0}.exp_()",
    "{0}.tanh_()",
    "{0}.sub_({1}, alpha=0.5)",
    "{0}.addcmul_({1}, {1})",
    "{0}.lerp_({1}, 0.25)",
    "torch.nn.functional.relu({0}, inplace=True)",
    "{0}.view({0}.shape).mul_(2.0)",
    "{0}.sub_({0}.mean())",
    "{0}[{0} > 0] = 0.5",
    "{0}.data.mul_(2.0)",
    "{0}[...] = {1}",
    "{0}.detach_()",
    "torch.add({1}, 1.0, out={0})",
    "{0} = Doubled.apply({0})",
    "Doubled.apply({0})",
    "{0}.requires_grad_()",
    "torch._foreach_mul_([{0}], 2.0)",
    "{0}.mul_({1}.sum())",
    "{0}.add_({1}.softmax(0))",
    "{0}.set_({0}.clone())",
    "{0}.data = {0} * 2.0",
)
# In-place operations on a slice of a value, which must have at least one dimension.
IN_PLACE_PARTS = (
    "{0}[0] = 0.5",
    "{0}[0] += 1.0",
    "{0}[0].mul_(2.0)",
    "{0}[1:] = 0.25",
    "{0}[0] = {1}[0]",
    "{0}[:1].add_(0.5)",
    "{0}.index_add_(0, torch.tensor([0], device={0}.device), {1}[:1].expand_as({0}[:1]))",
    "{0}.select(0, 0).fill_(0.1)",
    "{0}.index_put_((torch.tensor([0], device={0}.device),), {1}[:1].expand_as({0}[:1]))",
)
VARYING = (
    "torch.tanh({0})",
    "{0} * 0.75",
    "{0}.detach() + {0}",
    "{0}.abs()",
    "torch.sqrt({0}.relu())",
    "{0} * {0}",
    "torch.where({0} > 0, torch.sqrt({0}.abs()), {0})",
    "torch.where({0} > 0.25, {0}, 0.0 * {0})",
    "Rounded.apply({0})",
    "Scaled.apply({0}, 0.5)",
    "{0}.clamp(-1.0, 1.0)",
    "1.0 / (1.0 + {0}.abs())",
    "torch.log1p({0}.abs())",
)
VARYING_IN_PLACE = (
    "{0} = {0} * 1.0; {0}.mul_({1})",
    "{0} = {0} + 0.0; {0} += {1}",
    "{0} = {0}.clone(); {0}[{0} > 1.0] = 0.5",
    "{0} = {0} * 1.0; {0}.masked_fill_({0} < {1}, 0.25)",
    "{0} = 1.0 * {0}; {0}.sub_({1}).tanh_()",
)


@dataclass
class Call:
    """One call of the scan.

    Attributes:
        trains: for each parameter, True if it requires a gradient.
        leaves: for each input and state, True if it requires a gradient.
        in_loss: for each output and each new state, True if the loss uses it.
        mode: `"grad"`, `"no_grad"` or `"inference"`.
        number: value of the global variable `k0` during the call.
        replaced: for each parameter, True if a new tensor replaces it before this call.
        assigned: new value for `Core.place`, assigned before this call; `None` if the value does not change.
    """

    steps: int
    trains: tuple[bool, ...]
    leaves: tuple[bool, ...]
    in_loss: tuple[bool, ...]
    state_seqs: bool
    mode: str
    number: float = 0.75
    replaced: tuple[bool, ...] = ()
    assigned: float | None = None


@dataclass
class Core:
    """A step function as text, the values that it captures, and calls of the step function.

    If `place` is set, the first input passes through the step function `PLACES[place]` of `changing_cores.py` before
    this step function receives it.
    """

    source: str
    counts: tuple[int, int, int]
    parameters: dict[str, str]  # key of `SHAPES` for each parameter, by name
    derived: dict[str, str]  # captured tensors that are computed from parameters: expression by name
    calls: list[Call] = field(default_factory=list)
    place: str | None = None


class _Writer:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines: list[str] = []
        self.fixed: dict[str, str] = {}  # values computed from captured tensors: key of `SHAPES` by name
        self.captured: list[str] = []
        self.owned: set[str] = set()  # names of values that the step may write to
        self.varying: list[str] = []
        self.count = 0

    def make_name(self) -> str:
        self.count += 1
        return f"t{self.count}"

    def pick(self, choices: Sequence[str]) -> str:
        return self.random.choice(list(choices))

    def pick_other(self, shape: str) -> str:
        """Returns a value computed from captured tensors. It broadcasts to `shape` if there is such a value."""
        fitting = [n for n, s in self.fixed.items() if s in (shape, "one") or (shape == FULL and s != "rows")]
        return self.pick(fitting) if fitting else self.pick([n for n, s in self.fixed.items()])

    def define(self, expression: str, shape: str, *, owned: bool = False) -> str:
        name = self.make_name()
        if self.random.random() < 0.1:
            self.lines += ["with torch.no_grad():", f"    {name} = {expression}"]
        else:
            self.lines.append(f"{name} = {expression}")
        self.fixed[name] = shape
        if owned:
            self.owned.add(name)
        return name

    def add_fixed_line(self) -> None:
        r = self.random.random()
        a = self.pick(list(self.fixed))
        shape = self.fixed[a]
        b = self.pick_other(shape)
        has_elements = shape != "one"
        if r < 0.18:
            self.define(self.pick(UNARY).format(a), shape)
        elif r < 0.28:
            self.define(self.pick(BINARY).format(a, b), shape)
        elif r < 0.36 and has_elements:
            self.define(self.pick(MIXING).format(a), shape)
        elif r < 0.42:
            self.define(self.pick(REDUCING).format(a), "one")
        elif r < 0.54:
            other = self.pick([n for n, s in self.fixed.items() if s == shape])
            self.define(self.pick(APPLIED).format(a, other), shape)
        elif r < 0.64:
            self.define(self.pick(COPIES).format(a), shape, owned=True)
        elif r < 0.70 and shape in ("rows", FULL):
            self.define(f"{a}[{self.random.choice([0, 1, -1])}]", "row", owned=a in self.owned)
        elif r < 0.74:
            self.define(self.pick(VIEWS).format(a), shape, owned=a in self.owned)
        elif self.owned:
            a = self.pick(sorted(self.owned))
            shape = self.fixed[a]
            choices = IN_PLACE + (IN_PLACE_PARTS if shape != "one" else ())
            self.lines.append(self.pick(choices).format(a, self.pick_other(shape)))

    def pick_mixable(self) -> str:
        fitting = [n for n, s in self.fixed.items() if s != "rows"]
        # The last four values are chosen more often.
        return self.random.choice(fitting[-4:] + fitting) if fitting else "x0"

    def add_varying_line(self) -> None:
        r = self.random.random()
        a = self.pick(self.varying)
        name = self.make_name()
        if r < 0.3:
            self.lines.append(f"{name} = {self.pick(VARYING).format(a)}")
        elif r < 0.6:
            other = self.pick((self.pick_mixable(), self.pick(self.varying)))
            self.lines.append(f"{name} = {self.pick(BINARY).format(a, other)}")
        elif r < 0.7:
            self.lines.append(f"{name} = Spike.apply({a}, {self.pick_mixable()})")
        elif r < 0.8:
            self.lines.append(f"{name} = {a}")
            self.lines.append(self.pick(VARYING_IN_PLACE).format(name, self.pick_mixable()))
        elif r < 0.9:
            index = self.random.randint(0, 1)
            self.lines.append(f"{name} = SumAndDifference.apply({a}, {self.pick(self.varying)})[{index}]")
        else:
            owned = [n for n in self.owned if self.fixed[n] == FULL]
            if owned:
                target = self.pick(sorted(owned))
                template = self.pick(("{0}.add_({1})", "{0}.mul_({1})", "{0}.copy_({1})", "{0} += {1}"))
                self.lines.append(template.format(target, a))
                self.lines.append(f"{name} = {target} * 0.5")
            else:
                self.lines.append(f"{name} = {a} + {self.pick_mixable()}")
        self.varying.append(name)


def random_core(seed: int) -> Core:
    """Makes a core and its calls. Equal seeds give equal cores."""
    w = _Writer(seed)
    rng = w.random
    num_inputs, num_states = rng.choice([(1, 1), (1, 1), (1, 2), (2, 1), (2, 2)])
    num_outputs = rng.choice([1, 1, 2])
    parameters = {f"w{i}": rng.choice(list(SHAPES)) for i in range(rng.randint(1, 3))}
    derived: dict[str, str] = {}
    for i, (name, shape) in enumerate(list(parameters.items())):
        if rng.random() < 0.25:
            template = rng.choice(["{0} * 1.5", "{0}.abs().sqrt()", "{0}.view(-1).view({0}.shape)", "{0}.data"])
            derived[f"d{i}"] = template.format(name)
            w.fixed[f"d{i}"] = shape
    w.fixed |= parameters
    w.captured = list(w.fixed)
    inputs = [f"x{i}" for i in range(num_inputs)]
    states = [f"v{i}" for i in range(num_states)]
    w.varying = [*inputs, *states]
    for _ in range(rng.randint(2, 8)):
        w.add_fixed_line()
    charge_line = f"h = {' + '.join(inputs)} + " + " + ".join(f"0.5 * {s}" for s in states)
    w.lines.append(charge_line)
    w.varying.append("h")
    w.lines.append(f"g = h * {w.pick_mixable()}")
    w.varying.append("g")
    for _ in range(rng.randint(1, 6)):
        (w.add_varying_line if rng.random() < 0.7 else w.add_fixed_line)()
    late_values = w.varying[num_inputs:]
    returned = [rng.choice(late_values[-3:] + late_values) for _ in range(num_outputs + num_states)]
    bounded = [n if n in states and rng.random() < 0.5 else f"{n} / (1.0 + {n}.abs())" for n in returned]
    if rng.random() < 0.15:
        bounded[-1] = f"({bounded[-1]}).detach()"
    body = "\n    ".join([*w.lines, f"return {', '.join(bounded)},"])
    source = f"def core({', '.join([*inputs, *states])}):\n    {body}\n"
    core = Core(source, (num_inputs, num_states, num_outputs), parameters, derived)
    trains = tuple(rng.random() < 0.7 for _ in parameters)
    for i in range(rng.randint(2, 4)):
        if i and rng.random() < 0.7:
            trains = tuple(rng.random() < 0.6 for _ in parameters)
        core.calls.append(
            Call(
                steps=rng.choice([0, 1, 2, 3, 7, 8, 9, 11]),
                trains=trains,
                leaves=tuple(rng.random() < 0.7 for _ in range(num_inputs + num_states)),
                in_loss=tuple(rng.random() < 0.6 for _ in range(num_outputs + num_states)),
                state_seqs=rng.random() < 0.4,
                mode=rng.choice(["grad"] * 8 + ["no_grad", "inference"]),
                number=rng.choice([0.75, 0.75, 1.25, -0.5]),
                replaced=tuple(i > 0 and rng.random() < 0.15 for _ in parameters),
            )
        )
    # A separate generator chooses the place, so that the other choices do not depend on the number of places.
    places = random.Random(f"place {seed}")
    if places.random() < 0.5:
        core.place = places.choice(list(PLACES))
        for call in core.calls[1:]:
            call.assigned = places.choice([None, 0.75, 1.25, -0.5])
    return core


def draw(shape: Sequence[int], seed: int, dtype: torch.dtype, device: str) -> Tensor:
    """Draws random values. About a tenth of them are 0, because some functions have an infinite derivative at 0."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    zeros = torch.rand(tuple(shape), generator=generator) < 0.1
    return torch.where(zeros, 0.0, values).to(device=device, dtype=dtype)


@dataclass
class Built:
    """A core that can be called.

    Attributes:
        namespace: global variables of the core, including its parameters.
        assign: function that assigns a new value to `Core.place`.
    """

    function: Callable[..., Any]
    namespace: dict[str, Any]
    parameters: dict[str, Tensor]
    assign: Callable[[Any], object]


def build(core: Core, dtype: torch.dtype, device: str) -> Built:
    """Builds the function of a core and its parameters."""
    namespace: dict[str, Any] = {"torch": torch, "k0": 0.75, **FUNCTIONS}
    parameters = {
        name: draw(SHAPES[shape], 40 + i, dtype, device).requires_grad_()
        for i, (name, shape) in enumerate(core.parameters.items())
    }
    namespace |= parameters
    file = f"<core {id(core)}>"
    linecache.cache[file] = (len(core.source), None, core.source.splitlines(keepends=True), file)
    exec(compile(core.source, file, "exec"), namespace)
    core_function = namespace["core"]
    if core.place is None:
        return Built(core_function, namespace, parameters, lambda new: None)
    place_core, assign = PLACES[core.place](0.25)
    num_inputs = core.counts[0]

    def function(*arguments: Tensor) -> Any:
        charged, _ = place_core(arguments[0], arguments[num_inputs])
        return core_function(charged / (1.0 + charged.abs()), *arguments[1:])

    return Built(function, namespace, parameters, assign)


@contextmanager
def _restoring_globals() -> Iterator[None]:
    """Removes the global variables and hooks of a place when the block ends."""
    hooks = dict(torch.nn.modules.module._global_forward_hooks)
    try:
        yield
    finally:
        torch.nn.modules.module._global_forward_hooks.clear()
        torch.nn.modules.module._global_forward_hooks.update(hooks)
        vars(changing_cores).pop("max", None)


@dataclass
class Outcome:
    """Outcomes of the calls of a core. Each call is counted once.

    Attributes:
        refused: calls that FlexSN refuses with an error that names the line of the core.
        different: calls that differ in values, dtypes or gradients.
        broken: calls that failed with any other error.
        same: number of calls whose results and gradients equal those of the loop.
        no_core: number of calls that fail in the loop itself, so that they cannot be compared.
    """

    refused: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    same: int = 0
    no_core: int = 0


def compare(
    core: Core,
    *,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    residuals: str = "auto",
    on_cpu: TargetName = "triton",
) -> Outcome:
    """Makes the calls with the loop and with compiled kernels, and compares the results."""
    with _restoring_globals():
        return _compare(core, dtype, device, residuals, on_cpu)


def _compare(core: Core, dtype: torch.dtype, device: str, residuals: str, on_cpu: TargetName) -> Outcome:
    outcome = Outcome()
    built = build(core, dtype, device)
    function, parameters, namespace = built.function, built.parameters, built.namespace
    program = ScanProgram(function, *core.counts, residuals=residuals, on_cpu=on_cpu)
    for number, call in enumerate(core.calls):
        namespace["k0"] = call.number
        if call.assigned is not None:
            built.assign(call.assigned)
        for name, replaced in zip(parameters, call.replaced, strict=False):
            if replaced:
                namespace[name] = parameters[name] = (parameters[name].detach() * 0.5 + 0.25).clone()
        for parameter, trains in zip(parameters.values(), call.trains, strict=True):
            parameter.requires_grad_(trains)
        for name, expression in core.derived.items():
            namespace[name] = eval(expression, namespace)
        expected = _run(core, call, function, parameters, None, dtype, device)
        if isinstance(expected, Exception):
            outcome.no_core += 1
            continue
        actual = _run(core, call, function, parameters, program, dtype, device)
        is_named = isinstance(actual, UnsupportedOpError) and actual.location is not None
        # In a sequence without steps, the loop does not reach the operations that torch refuses in every step.
        if is_named or (isinstance(actual, TorchError) and call.steps == 0 and " at <core" in str(actual)):
            outcome.refused.append(f"call {number}: {type(actual).__name__}: {actual}")
        elif isinstance(actual, Exception):
            outcome.broken.append(f"call {number}: {type(actual).__name__}: {actual}")
        else:
            differences = list(_find_differences(actual, expected, dtype))
            if differences:
                outcome.different.append(f"call {number} {call}: {'; '.join(differences)}")
            outcome.same += not differences
    return outcome


Values = tuple[list[Tensor], dict[str, "Tensor | None"]]


def _run(
    core: Core,
    call: Call,
    function: Callable[..., Any],
    parameters: dict[str, Tensor],
    program: ScanProgram | None,
    dtype: torch.dtype,
    device: str,
) -> Values | Exception:
    num_inputs, num_states, num_outputs = core.counts
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shapes = [(call.steps, *STEP)] * num_inputs + [STEP] * num_states
        leaf_arguments = [draw(s, i, dtype, device) for i, s in enumerate(shapes)]
        for t, requires_grad in zip(leaf_arguments, call.leaves, strict=True):
            t.requires_grad_(requires_grad)
        # The computation before the scan has an infinite derivative at 0.
        arguments = [t.relu().sqrt() + t.clamp(max=0.0) if i == 0 else t * 1.0 for i, t in enumerate(leaf_arguments)]
        leaves = {f"argument {i}": t for i, t in enumerate(leaf_arguments)} | parameters
        modes = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
        try:
            with modes[call.mode]():
                if program is None:
                    run = eager_scan if call.state_seqs else eager_scan_final_state
                    specs = [(STEP, dtype)] * num_outputs
                    results = run(function, *core.counts, *arguments, output_template_specs=specs)
                else:
                    results = scan(*prepare(program, arguments), state_seqs=call.state_seqs)
            required = {name: t for name, t in leaves.items() if t.requires_grad}
            in_loss = [i for i, is_used in enumerate(call.in_loss) if is_used and results[i].requires_grad]
            roots = [results[i] for i in in_loss]
            grads: dict[str, Tensor | None] = dict.fromkeys(required)
            if roots and required:
                weights = [draw(results[i].shape, 70 + i, dtype, device) for i in in_loss]
                gradients = torch.autograd.grad(
                    roots, list(required.values()), weights, allow_unused=True, retain_graph=True
                )
                grads = dict(zip(required, gradients, strict=True))
            return [r.detach() for r in results], grads
        except Exception as error:
            return error


def _find_differences(actual: Values, expected: Values, dtype: torch.dtype) -> Iterator[str]:
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}[dtype]
    for i, (a, b) in enumerate(zip(actual[0], expected[0], strict=True)):
        if a.dtype != b.dtype or a.shape != b.shape:
            yield f"result {i} is {a.dtype} {list(a.shape)}, in the loop {b.dtype} {list(b.shape)}"
        elif not torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
            yield f"result {i} is off by {float((a - b).abs().max())}"
    for name, expected_gradient in expected[1].items():
        gradient = actual[1][name]
        if gradient is None and expected_gradient is None:
            continue
        if gradient is None or expected_gradient is None:
            present = gradient if expected_gradient is None else expected_gradient
            assert present is not None
            if bool((present != 0).any()):
                yield f"the gradient of {name} is None {'in kernels' if gradient is None else 'in the loop'} only"
            continue
        # Kernels multiply by an infinite derivative of a parameter before the sum over elements, and the loop
        # multiplies after the sum. So a gradient that is infinite in the loop may be NaN in kernels. Where gradients
        # are not finite, their values are not compared.
        is_finite = expected_gradient.isfinite()
        scale = tolerance * max(1.0, float(expected_gradient[is_finite].abs().max()) if is_finite.any() else 1.0)
        are_equal = torch.equal(gradient.isfinite(), is_finite) and torch.allclose(
            gradient[is_finite], expected_gradient[is_finite], rtol=tolerance, atol=scale
        )
        if gradient.dtype != expected_gradient.dtype or not are_equal:
            texts = [t.flatten()[:6].tolist() for t in (gradient, expected_gradient)]
            yield f"the gradient of {name} is {texts[0]}, in the loop {texts[1]}"


def one_call(lines: str) -> Core:
    """Makes a core with these lines as its body, and with one call. The parameter `w0` has the shape of one row, `w1`
    the shape of two rows, and `w2` the shape of the step.
    """
    body = textwrap.indent("\n".join(line.strip() for line in lines.split(";")), "    ")
    call = Call(3, (True,) * 3, (True,) * 2, (True,) * 2, state_seqs=False, mode="grad")
    return Core(f"def core(x0, v0):\n{body}\n", (1, 1, 1), {"w0": "row", "w1": "rows", "w2": "full"}, {}, [call])


# Lines in which a number that torch stores in a CPU tensor is combined with tensors of any device.
NUMBERS = {
    "assigned to a part": "h = w0 * 1.0; h[1:] = 0.25; return x0 * h, v0 + x0",
    "assigned to an element": "h = w1 * 1.0; h[0] = 0.5; return x0 * h[0], v0 + x0 * h[1]",
    "filled": "h = w0 * 1.0; h.fill_(torch.tensor(0.25)); return x0 * h * w0, v0 + x0",
    "in the step": "h = x0 * 1.0; h.fill_(torch.tensor(0.25)); return x0 * h, v0 + x0",
    "copied": "h = x0 * 1.0; h.copy_(torch.tensor(0.25)); return x0 * h, v0 + x0",
    "by a mask": "h = x0.masked_fill(x0 > 0, torch.tensor(0.25, dtype=x0.dtype)); return x0 * h, v0 + x0",
    "by a mask, in place": "h = x0 * 1.0; h[h > 0] = 0.5; return x0 * h, v0 + x0",
    "multiplied": "return x0 * torch.tensor(0.5), v0 + x0 * torch.tensor(2.0)",
}
