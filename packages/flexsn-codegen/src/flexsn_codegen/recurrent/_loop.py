"""The work of a kernel at each step: the parts of a `StagedStep` in the loop over time, for blocks of columns."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from flexsn_codegen.recurrent._early import split_early
from flexsn_codegen.recurrent._gather import Gather, split_gathers
from flexsn_codegen.source._dtypes import HALF_DTYPES
from flexsn_graph import Phase, Port, Product, Role, Stage, StagedStep, View

_aten = torch.ops.aten
_prims = torch.ops.prims
# Products whose right factor is a matrix, each with the position of the addend among the arguments, or `None`.
_OPS: dict[Any, int | None] = {_aten.mm.default: None, _aten.addmm.default: 0}
_DTYPES = HALF_DTYPES | {torch.float32}
# With more values, registers are spilled. 32 values would spill some kilobytes per thread.
_MOST_CARRIED = 16
# If more values are carried, registers only keep this number of the values that only stages read. The rest of these
# values pass from step to step in memory.
_MOST_BESIDE_RING = 4
# The source has separate lines for each of these values. With more values, compilation takes minutes.
_MOST_IN_RING = 128
# Reductions that return one of the reduced values, the dtypes that other reductions accept, and the dtypes that these
# reductions accept.
EXACT_REDUCTIONS = frozenset({_prims.amax.default, _prims.amin.default})
REDUCED = frozenset({torch.float32, torch.float64, torch.int64})
REDUCED_EXACTLY = HALF_DTYPES | {torch.float32, torch.float64}
# bfloat16 can represent all integers up to this number.
_MOST_EXACT = 256


class NotOneLaunchError(Exception):
    """Raised for steps that cannot run in one launch. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Some columns of a value of one step. The value is treated as rows and columns.

    Attributes:
        port: the value.
        first, width: the first column, and the number of columns.
    """

    port: Port
    first: int
    width: int


@dataclass(frozen=True, slots=True)
class StageCall:
    """A pointwise stage.

    Attributes:
        reads: for each input, columns that the program has computed or received, a view of a value in memory, or a load
            of one of several steps.
        writes: for each output, the columns of a value that the stage computes, or `None` if the program does not need
            these columns later.
        stored: for each output, its destination in memory at every step, or `None`.
        early: `None` if the stage is computed at its regular position. `0` or `1` if the stage only reads values of
            earlier steps, and is computed while the program waits for a product: `0` for this step, `1` for the next
            step. `-1` if the stage reads no values of steps, and is computed before all steps.
    """

    stage: Stage
    width: int
    reads: tuple[Columns | View | Gather, ...]
    writes: tuple[Columns | None, ...]
    stored: tuple[View | None, ...]
    early: int | None = None


@dataclass(frozen=True, slots=True)
class Multiply:
    """A product with a matrix.

    Attributes:
        operand: the left factor.
        matrix: index of the captured matrix that is the right factor.
        added: index of the captured row that is added, or `None`.
        alpha, beta: the factors of the product and of the added row.
        pieces: the computed columns of the result, as pairs of first column and width.
        stored: the destination of the result in memory at every step, or `None`.
        port: the result.
    """

    product: Product
    operand: Columns
    matrix: int
    added: int | None
    alpha: float
    beta: float
    pieces: tuple[tuple[int, int], ...]
    stored: View | None
    port: Port


@dataclass(frozen=True, slots=True)
class Reduce:
    """A reduction of each row to one number.

    Attributes:
        operand: the reduced value.
        port: the result, one number for each row.
        stored: the destination of the result in memory at every step, with a last dimension of 1, or `None`.
    """

    product: Product
    operand: Columns
    port: Port
    stored: View | None

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """The only column of the result."""
        return ((0, 1),)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A value that programs exchange. It is the operand of products.

    Attributes:
        port, width, dtype: port, width and dtype of the value.
        carried: True if the products multiply the value that the previous step has written.
        exact: True if bfloat16 can represent every number that a step writes.
    """

    port: Port
    width: int
    dtype: torch.dtype
    carried: bool
    exact: bool

    def parts(self, *, from_zero: bool) -> int:
        """The number of 16-bit numbers into which a product splits each element of the value: one or three.

        Any float32 number is the sum of three such numbers. For other dtypes, and for float32 values that bfloat16 can
        represent exactly, one number is enough.

        Args:
            from_zero: True if carried values are zero before the first step.
        """
        return 3 if self.dtype == torch.float32 and not (self.exact and (from_zero or not self.carried)) else 1


@dataclass(frozen=True, slots=True)
class Loop:
    """The loop of a kernel over time: the parts of a step, and the values that pass between parts and steps.

    Attributes:
        width: the number of columns of a step.
        num_rows: the number of rows of a step, which is the product of all sizes except for the last one.
        parts: the parts, in order.
        carried: the values that pass from step to step, with their width and dtype.
        ring: the carried values that pass in memory, not in registers. Each program only accesses its own elements of
            these values.
        exchanges: operands of products, in the order of the products.
        reduced: operands of reductions, with their width and dtype.
        lasting: the values that are stored for every step, because they are read after the loop.
        absent: carried values that are zero before the first step.
        shifted: values that are already in memory as the value of another step: a state that is an earlier value of
            another state, or a product of a later step. A stage loads such a value from this memory.
    """

    width: int
    num_rows: int
    parts: tuple[StageCall | Multiply | Reduce, ...]
    carried: Mapping[Port, tuple[int, torch.dtype]]
    exchanges: tuple[Exchange, ...]
    lasting: frozenset[Port]
    absent: frozenset[Port]
    shifted: frozenset[Port]
    ring: frozenset[Port] = frozenset()
    reduced: Mapping[Port, tuple[int, torch.dtype]] = field(default_factory=dict)

    @property
    def exchanged(self) -> frozenset[Port]:
        """The values that programs exchange if several programs share a row."""
        return frozenset({*(exchange.port for exchange in self.exchanges), *self.reduced})

    @property
    def has_products(self) -> bool:
        """True if the loop has products with matrices."""
        return any(isinstance(part, Multiply) for part in self.parts)


def loop_of(staged: StagedStep, lasting: Collection[Port]) -> Loop:
    """The loop that computes all steps in one launch.

    Args:
        lasting: the values that are stored for every step, because they are read after the loop, such as outputs and
            gradients of inputs.

    Raises:
        NotOneLaunchError: kernels cannot compute a part of the step in one launch.
    """
    return _Analysis(staged, frozenset(lasting)).run()


class _Analysis:
    def __init__(self, staged: StagedStep, lasting: frozenset[Port]) -> None:
        self._staged, self._lasting = staged, lasting
        self._parts = [part for part in staged.parts if part.phase is Phase.LOOP]
        products = [part for part in self._parts if isinstance(part, Product)]
        if not self._parts:
            raise NotOneLaunchError("the loop over time is empty")
        if any(product.is_convolution for product in products):
            raise NotOneLaunchError("convolutions are computed by a library")
        self._rows: int | None = None
        self._operands: set[Columns] = set()  # columns that stages and products have written so far
        self._reduced_rows: set[Port] = {part.result.source for part in products if part.is_reduction}
        writes = [v for p in self._parts for v in (p.writes if isinstance(p, Stage) else (p.result,))]
        self._written = {view.source for view in writes}
        roles = {port.role for port in self._written}
        role = Role.GRAD_STATE if Role.GRAD_STATE in roles else Role.STATE
        self._carried = {port for port in self._written if port.role is role}
        self._role = role

    def run(self) -> Loop:
        parts: list[StageCall | Multiply | Reduce] = []
        for part in self._parts:
            if isinstance(part, Stage):
                parts.append(self._convert_stage(part))
            else:
                parts.append(self._convert_reduction(part) if part.is_reduction else self._convert_product(part))
        carried = {port: self._describe_columns(port) for port in sorted(self._carried, key=lambda p: p.index)}
        ring = self._select_ring(parts) if len(carried) > _MOST_CARRIED else frozenset()
        if len(ring) > _MOST_IN_RING:
            raise NotOneLaunchError(
                f"{len(ring)} values go from step to step in memory, but a kernel can have at most {_MOST_IN_RING} of "
                "them"
            )
        if len(carried) - len(ring) > _MOST_CARRIED:
            raise NotOneLaunchError(
                f"{len(carried) - len(ring)} values go from step to step in registers, which hold at most "
                f"{_MOST_CARRIED} of them"
            )
        for part in self._staged.parts:
            if part.phase is not Phase.LOOP:
                for view in part.writes if isinstance(part, Stage) else (part.result,):
                    if view.source in self._carried:
                        raise NotOneLaunchError(f"{view.source.name} is written in the loop and after it")
        exchanges = self._list_exchanges(parts)
        assert self._rows is not None
        reduced = {
            part.operand.port: self._describe(part.operand.port)[1:] for part in parts if isinstance(part, Reduce)
        }
        widths = [w for w, _ in carried.values()] or [exchange.width for exchange in exchanges]
        width = max(widths or [part.width for part in parts if isinstance(part, StageCall)])
        shifted = frozenset((*self._staged.shifts, *self._staged.later))
        return Loop(
            width,
            self._rows,
            tuple(_group_products(self._split_early_stages(parts, exchanges, shifted), frozenset(carried))),
            carried,
            exchanges,
            self._lasting,
            self._staged.absent,
            shifted,
            ring,
            reduced,
        )

    def _split_early_stages(
        self,
        parts: Sequence[StageCall | Multiply | Reduce],
        exchanges: Sequence[Exchange],
        shifted: frozenset[Port],
    ) -> list[StageCall | Multiply | Reduce]:
        """Splits the stages that read many values of earlier steps, and returns all parts in their new order.

        The first half of a split stage is computed while the program waits for a product. If the stage precedes the
        first product, this half is computed one step earlier, when all values except for the newest one are in memory.
        """
        first = next((i for i, part in enumerate(parts) if isinstance(part, Multiply)), None)
        if first is None or any(isinstance(part, Reduce) for part in parts) or any(e.carried for e in exchanges):
            return [*parts]
        remaining: list[StageCall | Multiply | Reduce] = []
        early: list[StageCall | Multiply | Reduce] = []
        steps = {**self._staged.shifts, **self._staged.later}
        count = 0
        for i, part in enumerate(parts):
            pieces = split_early(part.stage, shifted, count) if isinstance(part, StageCall) else None
            if pieces is None or not isinstance(part, StageCall):
                remaining.append(part)
                continue
            before, after = pieces
            columns = _list_columns(before, part.width)
            count += len(columns)
            read_by_view = {id(view): read for view, read in zip(part.stage.reads, part.reads, strict=True)}
            reads = tuple(columns[v.source] if v.source in columns else read_by_view[id(v)] for v in after.reads)
            remaining.append(replace(part, stage=after, reads=reads))
            early_reads: list[Columns | View | Gather] = [*before.reads]
            gathering = split_gathers(before, steps, back=lambda port: port.role is Role.STATE, first=count)
            if gathering is not None:
                numbers, before, gathers = gathering
                of_numbers = _list_columns(numbers, part.width)
                count += len(of_numbers)
                early_reads = [*of_numbers.values(), *gathers]
                not_stored = (None,) * len(of_numbers)
                early.append(StageCall(numbers, part.width, (), tuple(of_numbers.values()), not_stored, -1))
            time, not_stored = 1 if i < first else 0, (None,) * len(columns)
            early.append(StageCall(before, part.width, tuple(early_reads), tuple(columns.values()), not_stored, time))
        position = next(i for i, part in enumerate(remaining) if isinstance(part, Multiply))
        return [*remaining[:position], *early, *remaining[position:]]

    def _select_ring(self, parts: Sequence[StageCall | Multiply | Reduce]) -> frozenset[Port]:
        """Carried values that pass in memory: those that only stages read, except for the few that are read first."""
        operands = {part.operand.port for part in parts if not isinstance(part, StageCall)}
        first = {port: len(parts) for port in self._carried - operands}
        for i, part in reversed(list(enumerate(parts))):
            if isinstance(part, StageCall):
                first |= {read.port: i for read in part.reads if isinstance(read, Columns) and read.port in first}
        in_order = sorted(first, key=lambda port: (first[port], -port.index))
        return frozenset(in_order[_MOST_BESIDE_RING:])

    # -- values --------------------------------------------------------------------------------------------

    def _describe(self, port: Port) -> tuple[int, int, torch.dtype]:
        """Rows, columns and dtype of a value."""
        shape, dtype = self._staged.values[port]
        return math.prod(shape[:-1]), shape[-1] if shape else 1, dtype

    def _describe_columns(self, port: Port) -> tuple[int, torch.dtype]:
        rows, width, dtype = self._describe(port)
        self._check_rows(rows, port.name)
        return width, dtype

    def _check_rows(self, rows: int, name: str) -> None:
        if self._rows is None:
            self._rows = rows
        if rows != self._rows:
            raise NotOneLaunchError(f"{name} has {rows} rows, other values have {self._rows}")

    def _find_columns(self, view: View) -> Columns:
        """The columns of a view that has all rows and a range of adjacent columns of a value."""
        rows, width, _ = self._describe(view.source)
        self._check_rows(rows, view.source.name)
        if not view.calls:
            return Columns(view.source, 0, width)
        shape = self._staged.values[view.source][0]
        numbers = torch.arange(rows * width).reshape(shape)
        viewed = view(numbers)
        count = viewed.shape[-1] if viewed.dim() else 1
        flat = numbers.reshape(rows, width)
        if viewed.numel() == rows * count:
            first = int(viewed.reshape(-1)[0])
            if first + count <= width and torch.equal(viewed.reshape(rows, count), flat[:, first : first + count]):
                return Columns(view.source, first, count)
        raise NotOneLaunchError(f"a view of {view.source.name} is not a range of its columns")

    # -- parts -----------------------------------------------------------------------------------------------

    def _convert_stage(self, stage: Stage) -> StageCall:
        width = stage.shape[-1] if stage.shape else 1
        self._check_rows(math.prod(stage.shape[:-1]), "a stage")
        reads: list[Columns | View] = []
        for view in stage.reads:
            port = view.source
            if port in self._reduced_rows:
                self._check_row_values(view, stage.shape)
                reads.append(Columns(port, 0, 1))
                continue
            if port in self._carried or (port.role in (Role.OPERAND, Role.PRODUCT) and port in self._written):
                columns = self._find_columns(view)
                is_whole = port.role is Role.PRODUCT or (columns.first, columns.width) == (0, self._describe(port)[1])
                if columns.width != width or not is_whole:
                    raise NotOneLaunchError(f"a stage of {width} columns reads a part of {port.name}")
                if port.role is Role.OPERAND and columns not in self._operands:
                    raise NotOneLaunchError(f"a stage reads {port.name}, which other parts write in pieces")
                reads.append(columns)
            else:
                reads.append(view)
        writes: list[Columns | None] = []
        stored: list[View | None] = []
        for view in stage.writes:
            port = view.source
            if port in self._carried or port.role is Role.OPERAND:
                columns = self._find_columns(view)
                if columns.width != width or (port in self._carried and columns.width != self._describe(port)[1]):
                    raise NotOneLaunchError(f"a stage writes a part of {port.name}")
                self._operands.add(columns)
                writes.append(columns)
                stored.append(view if port in self._lasting else None)
            else:
                writes.append(None)
                stored.append(view)
        return StageCall(stage, width, tuple(reads), tuple(writes), tuple(stored))

    def _check_row_values(self, view: View, shape: tuple[int, ...]) -> None:
        """Rejects a view of a reduction unless all columns of each row contain the number of this row."""
        reduced_shape, _ = self._staged.values[view.source]
        numbers = torch.arange(math.prod(reduced_shape))
        viewed = view(numbers.reshape(reduced_shape)).expand(shape).reshape(math.prod(shape[:-1]), -1)
        if not torch.equal(viewed, numbers[:, None].expand_as(viewed)):
            raise NotOneLaunchError(f"{view.source.name} does not have one number per row in a stage of {list(shape)}")

    def _convert_reduction(self, product: Product) -> Reduce:
        value, dims, *_ = product.args
        port, name = product.result.source, product.name
        if dims != [-1] or port.role is not Role.PRODUCT:
            raise NotOneLaunchError(f"{name} does not reduce rows to one number that only the step uses")
        if value.dtype not in (REDUCED_EXACTLY if product.op in EXACT_REDUCTIONS else REDUCED):
            raise NotOneLaunchError(f"{name} has the dtype {value.dtype}")
        if value.source not in self._written or value.source in self._reduced_rows:
            raise NotOneLaunchError(f"{name} reduces {value.source.name}, which is not computed in the loop")
        operand = self._find_columns(value)
        all_columns = Columns(value.source, 0, self._describe(value.source)[1])
        if operand not in self._operands and (operand != all_columns or value.source not in self._carried):
            raise NotOneLaunchError(f"{name} reduces {value.source.name}, which other parts write in pieces")
        shape = self._staged.values[port][0]
        last = View(port, ((_aten.unsqueeze.default, (-1,), {}),), (*shape, 1), product.dtype)
        return Reduce(product, operand, port, last if port in self._lasting else None)

    def _convert_product(self, product: Product) -> Multiply:
        if product.op not in _OPS:
            raise NotOneLaunchError(f"{product.name} is not a product of rows with one matrix")
        addend_position = _OPS[product.op]
        arguments = list(product.args)
        added = None if addend_position is None else arguments.pop(addend_position)
        left, right = arguments[:2]
        if not isinstance(left, View) or left.source.role is Role.MATRIX:
            raise NotOneLaunchError(f"{product.name} has its matrix on the left")
        if not isinstance(right, View) or right.source.role is not Role.MATRIX or right.calls:
            raise NotOneLaunchError(f"{product.name} multiplies by a value that is not a matrix of captured tensors")
        if left.source not in self._written:
            raise NotOneLaunchError(f"{product.name} multiplies {left.source.name}, which is not computed in the loop")
        if product.dtype not in _DTYPES or left.dtype != product.dtype or right.dtype != product.dtype:
            raise NotOneLaunchError(f"{product.name} has the dtype {product.dtype}")
        if added is not None and not (
            isinstance(added, View) and added.source.role is Role.MATRIX and not added.calls and len(added.shape) == 1
        ):
            raise NotOneLaunchError(f"{product.name} adds a value that is not a row of captured numbers")
        operand = self._find_columns(left)
        port, width = product.result.source, product.shape[-1]
        all_columns = self._find_columns(product.result)
        if (all_columns.first, all_columns.width) != (0, width):
            raise NotOneLaunchError(f"{product.name} writes a part of {port.name}")
        pieces = self._find_pieces(port, width, needs_all=port.role is not Role.PRODUCT or port in self._lasting)
        self._operands |= {Columns(port, first, count) for first, count in pieces}
        stored = product.result
        in_memory = port in self._lasting or (port.role is not Role.PRODUCT and port not in self._carried)
        return Multiply(
            product,
            operand,
            right.source.index,
            added.source.index if added is not None else None,
            float(product.kwargs.get("alpha", 1)),
            float(product.kwargs.get("beta", 1)),
            pieces,
            stored if in_memory else None,
            port,
        )

    def _find_pieces(self, port: Port, width: int, *, needs_all: bool) -> tuple[tuple[int, int], ...]:
        pieces: set[tuple[int, int]] = set()
        for part in self._parts:
            if isinstance(part, Product):
                needs_all |= any(view.source == port for view in part.reads)
            elif port not in self._carried:
                read_columns = [self._find_columns(view) for view in part.reads if view.source == port]
                pieces |= {(columns.first, columns.width) for columns in read_columns}
        if port in self._carried:
            return ((0, width),)
        if needs_all:
            end = 0
            for first, count in sorted(pieces):
                if first > end:
                    pieces.add((end, first - end))
                end = max(end, first + count)
            if end < width:
                pieces.add((end, width - end))
        return tuple(sorted(pieces))

    # -- exchanges -------------------------------------------------------------------------------------------

    def _list_exchanges(self, parts: Sequence[StageCall | Multiply | Reduce]) -> tuple[Exchange, ...]:
        exchanges: dict[Port, Exchange] = {}
        exact = exact_values(self._staged)
        for part in parts:
            if isinstance(part, Multiply) and part.operand.port not in exchanges:
                port = part.operand.port
                _, width, dtype = self._describe(port)
                if port.role is Role.OPERAND and port in self._staged.assembled:
                    pieces = [w for p in parts if isinstance(p, StageCall) for w in p.writes if w and w.port == port]
                    if sum(piece.width for piece in pieces) != width:
                        raise NotOneLaunchError(f"{port.name} has columns that no stage writes")
                exchanges[port] = Exchange(port, width, dtype, port in self._carried, port in exact)
        return tuple(exchanges.values())


def _list_columns(stage: Stage, width: int) -> dict[Port, Columns]:
    """The values that a stage passes to other stages of its program."""
    return {view.source: Columns(view.source, 0, width) for view in stage.writes}


def _group_products(
    parts: Sequence[StageCall | Multiply | Reduce], carried: frozenset[Port]
) -> list[StageCall | Multiply | Reduce]:
    """Reorders parts so that products with the same operand are adjacent, unless their results are operands."""
    ordered: list[StageCall | Multiply | Reduce] = []
    used = {part.operand.port for part in parts if not isinstance(part, StageCall)}
    for part in parts:
        position = len(ordered)
        if isinstance(part, Multiply) and part.port not in used | carried:
            for i, other in enumerate(ordered):
                if isinstance(other, Multiply) and other.operand == part.operand and other.port not in used:
                    position = i + 1
        ordered.insert(position, part)
    return ordered


def exact_values(staged: StagedStep) -> frozenset[Port]:
    """Values for which a step only writes whole numbers of a few bits, which bfloat16 can represent exactly.

    A step may write the value of the previous step again, for example after the end of a sequence. The value before the
    first step is assumed to be 0. Other initial values are not necessarily exact.
    """
    first = _bound_values(staged, {})
    repeated = _bound_values(staged, first)
    return frozenset(port for port, bound in first.items() if bound <= _MOST_EXACT and repeated.get(port) == bound)


def _bound_values(staged: StagedStep, before: Mapping[Port, float]) -> dict[Port, float]:
    """The largest absolute value of each value that contains only integers.

    Args:
        before: the largest absolute values at the previous step. A value that is missing here is 0.
    """
    bounds: dict[Port, float | None] = {}
    for part in staged.parts:
        if not isinstance(part, Stage):
            bounds[part.result.source] = None
            continue
        for node, view in zip(part.graph.entries, part.writes, strict=True):
            inputs = [port for port in part.graph.arguments if port.role is Role.INPUT]
            repeated = [port for port in inputs if part.reads[port.index].source == view.source]
            input_bounds = {part.graph.placeholders[port]: before.get(view.source, 0.0) for port in repeated}
            bound, earlier_bound = _bound_node(node, input_bounds), bounds.get(view.source, 0.0)
            bounds[view.source] = None if bound is None or earlier_bound is None else max(bound, earlier_bound)
    return {port: bound for port, bound in bounds.items() if bound is not None}


def _bound_node(node: Any, bounds: Mapping[fx.Node, float]) -> float | None:
    """The largest absolute value of a node that contains only integers. `None` if it may contain other numbers.

    Args:
        bounds: the largest absolute values of some arguments.
    """
    if isinstance(node, bool | int | float):
        return abs(node) if float(node).is_integer() else None
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return bounds.get(node)
    value = node.meta.get("val")
    if getattr(value, "dtype", None) == torch.bool:
        return 1
    target = node.target
    if target is _prims.convert_element_type.default or target is _prims.neg.default:
        return _bound_node(node.args[0], bounds)
    if target in (_prims.add.default, _prims.sub.default, _prims.mul.default):
        left, right = (_bound_node(a, bounds) for a in node.args[:2])
        if left is None or right is None:
            return None
        return left * right if target is _prims.mul.default else left + right
    if target is _prims.where.default:
        left, right = (_bound_node(a, bounds) for a in node.args[1:3])
        return None if left is None or right is None else max(left, right)
    return None
