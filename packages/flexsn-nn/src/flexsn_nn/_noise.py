"""Random numbers of a neuron: which numbers a step draws, and the inputs by which they reach it."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from flexsn_hop import complete_captured
from flexsn_nn.errors import DrawError, InputDtypeError

NUM_PLACES = 4
"""Inputs that a step which draws has besides its own: the key's two words, the time step, the row."""

# Uniform numbers of narrower dtypes have as many bits as they hold below 1, so that none is rounded to 1.
_BITS = {torch.float16: 11, torch.bfloat16: 8}


class _Places(NamedTuple):
    """Arguments of the numbers of one step, which broadcast to its shape, int32 each."""

    low: Tensor
    high: Tensor
    step: Tensor
    row: Tensor
    column: Tensor


class _Step:
    """One run of a core: its numbers' places, and the draws so far; `places` is `None` where means are drawn."""

    def __init__(self, places: _Places | None) -> None:
        self.places = places
        self.draws = 0


class _Current(threading.local):
    """The step that this thread runs."""

    step: _Step | None = None


_current = _Current()


class Drawing:
    """`core` with `NUM_PLACES` more inputs after its own, from which its random numbers are computed.

    Args:
        core: the step.
        num_inputs: its inputs.

    Attributes:
        column: the place of each element in its row, `[1, *step[1:]]`, int32: a captured tensor.
    """

    def __init__(self, core: Callable[..., Any], num_inputs: int) -> None:
        self.core = core
        self.num_inputs = num_inputs
        self.column: Tensor | None = None
        self.__name__: str = getattr(core, "__name__", type(core).__name__)

    def __call__(self, *values: Tensor) -> Any:
        first, last = self.num_inputs, self.num_inputs + NUM_PLACES
        assert self.column is not None
        low, high, step, row = values[first:last]
        places = _Places(low, high, step, row, self.column)
        arguments = *values[:first], *values[last:]
        if torch.compiler.is_dynamo_compiling():  # a captured step may not change an object: `number_draws`
            torch.ops.flexsn_nn.places(*places)
            return self.core(*arguments)
        before, _current.step = _current.step, _Step(places)
        try:
            return self.core(*arguments)
        finally:
            _current.step = before


class Means:
    """`core` with the mean of each number that it draws.

    Args:
        core: the step.
    """

    def __init__(self, core: Callable[..., Any]) -> None:
        self.core = core
        self.__name__: str = getattr(core, "__name__", type(core).__name__)

    def __call__(self, *values: Tensor) -> Any:
        if torch.compiler.is_dynamo_compiling():
            torch.ops.flexsn_nn.means()
            return self.core(*values)
        before, _current.step = _current.step, _Step(None)
        try:
            return self.core(*values)
        finally:
            _current.step = before


# -- captured steps ------------------------------------------------------------------------------------------

# Dynamo captures a step as a graph and lets it change no object. So a step calls operators that say that it draws, and
# where its numbers are; `number_draws` replaces them.
_library = torch.library.Library("flexsn_nn", "DEF")
_library.define("places(Tensor low, Tensor high, Tensor step, Tensor row, Tensor column) -> ()")
_library.define("means() -> ()")
_library.define("draw(Tensor x, int bits) -> Tensor")
_library.define("below(Tensor number, Tensor p) -> Tensor")


def _draw_nothing(*arguments: Any) -> Tensor:
    raise DrawError(
        "the core draws random numbers, which this form of a scan in torch.compile does not: use backend='auto', "
        "without a lowering of your own and outside of torch.func's transforms."
    )


def _no_result(*arguments: Any) -> None:
    """Of an operator that is there to be found."""


for _name in ("places", "means"):
    _library.impl(_name, _no_result, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flexsn_nn::{_name}", _no_result, lib=_library)
for _name, _dtype in (("draw", torch.float32), ("below", torch.bool)):
    _library.impl(_name, _draw_nothing, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"flexsn_nn::{_name}", lambda x, _, dtype=_dtype: torch.empty_like(x, dtype=dtype), lib=_library
    )


def number_draws(module: fx.GraphModule) -> None:
    """Replaces the draws in the graph of a captured step by the numbers that they have in the step itself."""
    ops, graph = torch.ops.flexsn_nn, module.graph
    sources = _calls(graph, ops.places) + _calls(graph, ops.means)
    if not sources:
        return
    source, draws = sources[0], _calls(graph, ops.draw)
    means = not source.args
    for stream, node in enumerate(draws):
        x, bits = node.args
        with graph.inserting_before(node):
            if means:
                mean = 0.5 if bits else 0.0
                number = graph.call_function(torch.full_like, (x, mean), {"dtype": torch.float32})
            elif bits:
                options: dict[str, Any] = {"stream": stream, "bits": bits}
                number = graph.call_function(torch.ops.flexsn_graph.uniform_number.default, source.args, options)
            else:
                number = graph.call_function(
                    torch.ops.flexsn_graph.normal_number.default, source.args, {"stream": stream}
                )
        _replace(node, number, node)
    for node in _calls(graph, ops.below):
        compared, p = node.args
        if means:
            _replace(node, p, p)
            continue
        with graph.inserting_before(node):
            flag = graph.call_function(torch.lt, (compared, p))
        _replace(node, flag, node)
    for node in sources:
        graph.erase_node(node)
    module.recompile()


def _calls(graph: fx.Graph, op: Any) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target in (op, op.default)]


def _replace(node: fx.Node, other: Any, like: Any) -> None:
    other.meta = dict(like.meta)
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


complete_captured(number_draws)


# -- draws -------------------------------------------------------------------------------------------------


def draw_normal(x: Tensor) -> Tensor:
    """As `random.normal_like`."""
    _check(x, "normal_like")
    if torch.compiler.is_dynamo_compiling():
        return torch.ops.flexsn_nn.draw(x.detach(), 0)  # type: ignore[no-any-return]
    step = _begin_draw("normal_like")
    if step.places is None:
        return torch.zeros_like(x)
    _check_shape(x, step.places, "normal_like")
    return torch.ops.flexsn_graph.normal_number(*step.places, stream=step.draws - 1).to(x.dtype)  # type: ignore[no-any-return]


def draw_uniform(x: Tensor, *, below: float | Tensor | None = None) -> Tensor:
    """As `random.uniform_like`; with `below`, as `random.bernoulli_like` of this probability."""
    name = "uniform_like" if below is None else "bernoulli_like"
    _check(x, name)
    bits = 24 if below is not None else _BITS.get(x.dtype, 24)
    if torch.compiler.is_dynamo_compiling():
        number = torch.ops.flexsn_nn.draw(x.detach(), bits)
        if below is not None:
            p = below.detach().float() if isinstance(below, Tensor) else torch.full_like(number, below)
            number = torch.ops.flexsn_nn.below(number, p.expand_as(number))
        return number.to(x.dtype)  # type: ignore[no-any-return]
    step = _begin_draw(name)
    if step.places is None:
        mean = 0.5 if below is None else below
        return torch.zeros_like(x) + (mean.detach().to(x.dtype) if isinstance(mean, Tensor) else mean)
    _check_shape(x, step.places, name)
    number = torch.ops.flexsn_graph.uniform_number(*step.places, stream=step.draws - 1, bits=bits)
    if below is not None:
        number = number < (below.detach().float() if isinstance(below, Tensor) else below)
    return number.to(x.dtype)  # type: ignore[no-any-return]


def _check(x: Tensor, name: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} takes a tensor of the step, and got a {type(x).__name__}.")
    if not x.is_floating_point():
        raise InputDtypeError(f"{name} draws floating-point numbers, and got a tensor of {x.dtype}: convert it first.")


def _begin_draw(name: str) -> _Step:
    step = _current.step
    if step is None:
        raise DrawError(
            f"{name} is called outside of a step whose numbers are known: it draws inside of a core that "
            "flexsn_nn.FlexSN runs. Elsewhere, use torch.randn_like, torch.rand_like or torch.bernoulli."
        )
    step.draws += 1
    return step


def _check_shape(x: Tensor, places: _Places, name: str) -> None:
    """Refuses a tensor of another shape than the step's. (The number of rows is read by no step.)"""
    column = places.column
    sizes = [column.size(d) for d in range(1, column.dim())]
    found = [x.size(d) for d in range(1, x.dim())]
    if x.dim() != places.row.dim() or (column.dim() and found != sizes):
        step = ["rows", *map(str, sizes)] if places.row.dim() else []
        raise DrawError(
            f"{name} draws a number for each element of the step, [{', '.join(step)}], and got a tensor of shape "
            f"{list(x.shape)}: expand it to the step's shape."
        )


# -- numbers of a neuron -----------------------------------------------------------------------------------


class Numbers:
    """The key of a neuron's numbers, and how many steps it has made since its state began.

    Attributes:
        words: the key that a seed makes; `None`: PyTorch's generator draws keys.
        first_row: the number of a batch's first row.
        in_evaluation: whether numbers are drawn in evaluation mode, too.
        key: `[2]`, int32; `None` before the first call.
        steps: numbers of the last call's time steps, int32.
    """

    def __init__(self) -> None:
        self.words: tuple[int, int] | None = None
        self.first_row = 0
        self.in_evaluation = True
        self.key: Tensor | None = None
        self.steps: Tensor | None = None
        self._columns: dict[tuple[Any, ...], Tensor] = {}

    def configure(self, seed: int | None, neuron: int, first_row: int | None, in_evaluation: bool | None) -> None:
        """As `random.configure`, of the neuron of this number."""
        if seed is not None:
            self.words, self.key = (None if seed < 0 else _words(seed, neuron)), None
        if first_row is not None:
            self.first_row = first_row
        if in_evaluation is not None:
            self.in_evaluation = in_evaluation

    def places(
        self, shape: Sequence[int], steps: int | None, device: torch.device, *, begins: bool, keep: bool
    ) -> tuple[Tensor, ...]:
        """The inputs of a call of `Drawing`.

        Args:
            shape: of the step.
            steps: their number; `None` for a single step without a dimension of time.
            begins: whether the call begins at the initial state: with a new key.
            keep: whether the next call goes on where this one ends.
        """
        key, before = self.key, self.steps
        if key is None or begins or key.device != device:
            key, before = self._new_key(device), None
        elif not torch.compiler.is_compiling() and key.is_inference() and not torch.is_inference_mode_enabled():
            key = key.clone()
        numbers = torch.arange(1 if steps is None else steps, dtype=torch.int32, device=device)
        if before is not None:
            numbers = numbers + (before[-1] + 1)
        if keep:
            self.key = key
            made = steps is None or torch.compiler.is_compiling() or steps > 0
            self.steps = numbers if made else before
        ones = [1] * len(shape)
        if len(shape):
            row = torch.arange(self.first_row, self.first_row + shape[0], dtype=torch.int32, device=device)
            row = row.view(-1, *ones[1:])
        else:
            row = torch.full((), self.first_row, dtype=torch.int32, device=device)
        low, high = key[0].view(ones), key[1].view(ones)
        if steps is None:
            return low, high, numbers.view(ones), row
        return (
            low.expand(steps, *low.shape),
            high.expand(steps, *low.shape),
            numbers.view(-1, *ones),
            row.expand(steps, *row.shape),
        )

    def columns(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """The place of each element in its row, `[1, *shape[1:]]`."""
        rest = shape[1:]
        if torch.compiler.is_compiling():
            return _columns(rest, device, len(shape))
        kind = (*rest, device, len(shape))
        if kind not in self._columns:
            if len(self._columns) >= _MOST:
                self._columns.clear()
            with torch.inference_mode(False):
                self._columns[kind] = _columns(rest, device, len(shape))
        return self._columns[kind]

    def _new_key(self, device: torch.device) -> Tensor:
        if self.words is None:
            return torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=device)
        return torch.stack([torch.full((), word, dtype=torch.int32, device=device) for word in self.words])

    def apply(self, move: Callable[[Tensor], Tensor]) -> None:
        """Moves what is kept, as `nn.Module.to` moves parameters."""
        self.key = None if self.key is None else move(self.key)
        self.steps = None if self.steps is None else move(self.steps)


def draw_all(
    numbers: Numbers, shape: Sequence[int], steps: int | None, device: torch.device, *, bits: int | None
) -> Tensor:
    """The numbers of a first draw of all steps, of a new key, in float32.

    Args:
        shape, steps, device: as of `Numbers.places`.
        bits: of uniform numbers; `None`: normal ones.
    """
    places = (*numbers.places(shape, steps, device, begins=True, keep=False), numbers.columns(shape, device))
    number: Tensor
    if bits is None:
        number = torch.ops.flexsn_graph.normal_number(*places, stream=0)
    else:
        number = torch.ops.flexsn_graph.uniform_number(*places, stream=0, bits=bits)
    return number


def numbers_of(net: nn.Module) -> list[Numbers]:
    """Numbers of the layers of a network, in the order of its modules."""
    found = (module.__dict__.get("_numbers") for module in net.modules())
    return [numbers for numbers in found if isinstance(numbers, Numbers)]


def example_places(shape: Sequence[int], steps: int | None, device: torch.device) -> tuple[Tensor, ...]:
    """As `Numbers.places`, of some key that is drawn by no generator."""
    numbers = Numbers()
    numbers.configure(0, 0, None, None)
    return numbers.places(shape, steps, device, begins=True, keep=False)


_MOST = 16


def _columns(rest: Sequence[int], device: torch.device, dims: int) -> Tensor:
    size = 1
    for length in rest:
        size = size * length
    table = torch.arange(size, dtype=torch.int32, device=device)
    return table.view(1, *rest) if dims else table.view(())


def _words(seed: int, neuron: int) -> tuple[int, int]:
    """A key of a seed and of the number of a neuron, as two words of 32 bits with a sign."""
    digest = hashlib.sha256(f"{seed} {neuron}".encode()).digest()
    low, high = (int.from_bytes(digest[i : i + 4], "little", signed=True) for i in (0, 4))
    return low, high
