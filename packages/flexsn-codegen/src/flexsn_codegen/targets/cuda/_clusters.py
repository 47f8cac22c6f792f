"""Kernels in CUDA C++ that compute all steps of a recurrent loop in one launch, by thread-block clusters.

A cluster computes some rows for all steps. A block of the cluster computes some columns of every value, and a warp
computes 16 of these columns.

A warp has its columns of the matrices as fragments of `mma.m16n8k16` in registers. Fragments that do not fit into
registers are in shared memory. Fragments that do not fit into shared memory are read from the matrix in every step.

The operand of a product is sent to the shared memory of each block of the cluster, by stores that a barrier of the
receiving block counts. Zeros and ones are sent as bits, and all other values as one to three 16-bit numbers. If memory
is short, float32 values are sent and stored as one number, and split when they are multiplied, so products take longer.

An operand has two slots, each with a barrier. A warp that writes to a slot again has already received the values that
all warps sent after they had read the slot. If there is only memory for one slot, a warp that has read the slot arrives
at another barrier of each block, and senders wait for this barrier.

`splits` warps share the sums over an operand's terms, for all rows. In a stage, each of these warps computes every
`splits`-th tile of 8 rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from flexsn_codegen.recurrent._gather import Gather
from flexsn_codegen.recurrent._loop import Columns, Exchange, Loop, Multiply, NotOneLaunchError, Reduce, StageCall
from flexsn_codegen.recurrent._spec import Load, LoopSpec, memory_of, two_strides
from flexsn_codegen.source._dtypes import HALF_DTYPES, register_dtype
from flexsn_codegen.source._source import KernelSource, framed
from flexsn_codegen.targets.cpp._literals import cpp_name
from flexsn_codegen.targets.cuda._target import CUDA
from flexsn_graph import Port, Role, View, not_zero_one

_COLUMNS, _ROWS, _WARP = 16, 8, 32  # columns of a fragment, rows of a fragment, and threads of a warp
_FRAGMENT_BYTES = 16  # bytes of a matrix's fragment in one thread
_STORED_AT_A_TIME = 2  # number of a matrix's fragments in shared memory that are read together
_AHEAD = 4  # number of loads in flight for fragments that are neither in registers nor in shared memory
# The number of a thread's registers for addresses and loops, and the number of values of an element that are in
# registers in addition to its states and loads. Both are derived from the registers that ptxas assigns for an H100.
_USUAL_REGISTERS, _RESULTS = 44, 2
_READ = "barriers + 8"  # if there is one slot, the barrier at which warps arrive after they have read the slot
_FEW_REGISTERS = 128  # if a matrix occupies at most this number of a thread's registers, more sums fit
_EACH = "for (int n = 0; n < own_tiles; n++)\n#pragma unroll\nfor (int j = 0; j < 4; j++)"
_EACH_SUM = _EACH.replace("own_tiles", "row_tiles")


@dataclass(frozen=True, slots=True)
class Cluster:
    """The division of a step among the blocks and warps of clusters.

    Attributes:
        blocks: number of blocks in a cluster, a power of two, at most 16.
        splits: number of warps that share the sums of a product.
        row_tiles: number of tiles of 8 rows of a cluster.
        held: number of a product's tiles of 16 terms that a warp has in registers. `None` for all tiles.
        stored: number of the remaining tiles that the warp has in shared memory. `None` for all remaining tiles.
        slots: number of slots for values that blocks send to each other: two or one.
        compact: True if float32 values are sent and stored in shared memory as one number each, and split when they are
            multiplied. False if they are split before they are sent.
    """

    blocks: int
    splits: int
    row_tiles: int
    held: int | None = None
    stored: int | None = None
    slots: int = 2
    compact: bool = False

    @property
    def rows(self) -> int:
        """The number of rows of a cluster."""
        return _ROWS * self.row_tiles

    def tiles(self, width: int) -> int:
        """For a value of this width, the number of tiles of 16 columns in one block."""
        return -(-width // (_COLUMNS * self.blocks))

    def threads(self, width: int) -> int:
        """The number of threads of one block."""
        return _WARP * self.tiles(width) * self.splits

    def held_of(self, terms: int) -> int:
        """The number of a product's tiles of terms that a warp has in registers."""
        return terms if self.held is None else min(self.held, terms)

    def stored_of(self, terms: int) -> int:
        """The number of a product's tiles of terms that a warp has in shared memory."""
        others = terms - self.held_of(terms)
        return others if self.stored is None else min(self.stored, others)


@dataclass(frozen=True, slots=True)
class ClusterKernel:
    """A kernel of a loop in clusters, and its launch parameters.

    Attributes:
        source: the kernel's source. The roles of its tensors are those of a `LoopKernel`, without slots and counters.
        threads: number of threads in a block.
        shared: bytes of shared memory for a block.
        registers: number of registers of a thread that the matrices occupy.
    """

    source: KernelSource
    threads: int
    shared: int
    registers: int


@dataclass(frozen=True, slots=True)
class ClusterNeeds:
    """The resources that a block of a cluster needs.

    Attributes:
        matrices: number of registers of a thread that the matrices occupy.
        others: estimated number of all other registers of a thread.
        registers_of_tile: number of registers that a thread needs for one more tile of 16 terms.
        terms: for the longest product, the number of tiles of 16 terms in one warp.
        shared: bytes of shared memory.
        shared_of_tile: bytes of shared memory for one more tile of 16 terms.
        away: bytes of matrices that the block reads from global memory in every step.
    """

    matrices: int
    others: int
    registers_of_tile: int
    terms: int
    shared: int
    shared_of_tile: int
    away: int


def cluster_needs(loop: Loop, cluster: Cluster, *, from_zero: bool) -> ClusterNeeds:
    """Estimates the resources that a loop's kernel needs in these clusters.

    Args:
        from_zero: True if carried values are zero before the first step.

    Raises:
        NotOneLaunchError: clusters cannot compute the loop.
    """
    return _ClusterWriter(LoopSpec(loop, (), (), (), {}, False, from_zero), cluster).needs()


def cluster_source(name: str, spec: LoopSpec, cluster: Cluster) -> ClusterKernel:
    """Writes the kernel of a loop. The kernel's name starts with `name`.

    Raises:
        NotOneLaunchError: clusters cannot compute the loop.
    """
    return _ClusterWriter(spec, cluster).write(name)


@dataclass(frozen=True, slots=True)
class _Sent:
    """A value that blocks send to each other.

    Attributes:
        number: index of the exchange.
        pieces: pieces of the value, in the order of their columns. In shared memory, each piece has the loop's width.
        parts: number of 16-bit numbers that represent one element.
        is_float32: True if an element is sent as one float32, which is the sum of its parts.
        bits: True if all elements are zeros and ones, which are sent as one bit each.
        format: name of the format of 16-bit numbers in the source.
    """

    number: int
    exchange: Exchange
    pieces: tuple[Columns, ...]
    parts: int
    is_float32: bool
    bits: bool
    format: str

    @property
    def name(self) -> str:
        return f"sent_{self.number}"


class _ClusterWriter:
    def __init__(self, spec: LoopSpec, cluster: Cluster) -> None:
        self._spec, self._loop, self._cluster = spec, spec.loop, cluster
        self._parts = [part for part in spec.loop.parts if not isinstance(part, Reduce)]
        if len(self._parts) < len(spec.loop.parts):
            raise NotOneLaunchError("clusters cannot reduce rows")
        self._width = spec.loop.width
        self._tiles = cluster.tiles(self._width) * cluster.blocks  # tiles of 16 columns of a whole value
        self._lines: list[str] = []
        self._depth = 1
        self._params: dict[Port, bool] = {}  # True if the kernel writes to the tensor
        self._sizes = ["T", "B"]
        self._carried = {port: f"state_{i}" for i, port in enumerate(self._loop.carried)}
        self._widths = {width for width, _ in self._loop.carried.values()}
        for part in self._parts:
            self._widths |= {part.width} if isinstance(part, StageCall) else {count for _, count in part.pieces}
        self._check()
        self._sent = {e.port: self._plan_sending(i, e) for i, e in enumerate(self._loop.exchanges)}

    # -- loops that clusters cannot compute ------------------------------------------------------------------------

    def _check(self) -> None:
        loop = self._loop
        if max(self._widths) > self._width:
            raise NotOneLaunchError(
                f"clusters compute values of at most {self._width} columns, the width of the states; this step has a "
                f"value of {max(self._widths)} columns"
            )
        for e in loop.exchanges:
            if e.carried:
                self._check_order(e)
        if self._cluster.slots == 1 and len(loop.exchanges) > 1:
            raise NotOneLaunchError("clusters with one slot cannot exchange several values")

    def _check_order(self, exchange: Exchange) -> None:
        """Checks that a step sends a carried value after all of its products have read the previous step's value."""
        reads = [i for i, part in self._list_products() if part.operand.port == exchange.port]
        writes = [i for i, part in enumerate(self._parts) if exchange.port in _list_written_ports(part)]
        if reads and writes and max(reads) > min(writes):
            raise NotOneLaunchError(f"{exchange.port.name} is multiplied after the part that writes its next value")

    def _plan_sending(self, number: int, exchange: Exchange) -> _Sent:
        pieces = self._list_pieces(exchange.port)
        if sum(piece.width for piece in pieces) != exchange.width:
            raise NotOneLaunchError(f"{exchange.port.name} has columns that no stage writes")
        half = exchange.dtype in HALF_DTYPES
        bits = self._is_bits(exchange)
        parts = 1 if half or bits else min(self._spec.parts, exchange.parts(from_zero=self._spec.from_zero))
        kind = "float16" if exchange.dtype == torch.float16 else "bfloat16"
        is_float32 = self._cluster.compact and parts > 1
        return _Sent(number, exchange, pieces, parts, is_float32, bits, f"dev::of_{kind}")

    def _is_bits(self, exchange: Exchange) -> bool:
        """True if every sent value is 0 or 1."""
        if exchange.carried and not self._spec.from_zero:
            return False
        is_written = False
        for part in self._parts:
            if isinstance(part, Multiply):
                if part.port == exchange.port:
                    return False
                continue
            for i, columns in enumerate(part.writes):
                if columns is not None and columns.port == exchange.port:
                    is_written = True
                    graph = part.stage.graph
                    reads = [(port, part.reads[port.index]) for port in graph.arguments if port.role is Role.INPUT]
                    # The inputs that read the value of the previous step. They are zeros at the first step. At later
                    # steps, they are zeros and ones if this check succeeds.
                    previous = [
                        port for port, read in reads if isinstance(read, Columns) and read.port == exchange.port
                    ]
                    if not_zero_one(graph, i, previous if exchange.carried else ()) is not None:
                        return False
        return is_written

    def _list_pieces(self, port: Port) -> tuple[Columns, ...]:
        if port in self._carried:
            return (Columns(port, 0, self._loop.carried[port][0]),)
        pieces: set[Columns] = set()
        for part in self._parts:
            if isinstance(part, StageCall):
                pieces |= {columns for columns in part.writes if columns is not None and columns.port == port}
            elif part.port == port:
                pieces |= {Columns(port, first, count) for first, count in part.pieces}
        return tuple(sorted(pieces, key=lambda columns: columns.first))

    # -- lines -----------------------------------------------------------------------------------------------------

    def _line(self, text: str) -> None:
        self._lines += [line if line.startswith("#") else "    " * self._depth + line for line in text.split("\n")]

    @contextmanager
    def _block(self, head: str) -> Iterator[None]:
        self._line(f"{head} {{")
        self._depth += 1
        yield
        self._depth -= 1
        self._line("}")

    @contextmanager
    def _each(self, head: str = _EACH) -> Iterator[None]:
        """A loop over the elements of a thread: `n` is a tile of the warp's rows, and `j` an element of the tile."""
        self._line("#pragma unroll")
        with self._block(head):
            yield

    def _exists(self, width: int) -> str:
        """Name of the flags that are true for the elements of a thread that exist in a value of this width."""
        return "exists" if width == self._width else f"exists_{width}"

    def _column_exists(self, width: int) -> str:
        return f"column_{self._exists(width)}"

    def _param(self, role: Role, index: int, *, written: bool = False) -> str:
        port = Port(role, index)
        self._params[port] = written
        return f"{port.name}_ptr"

    def needs(self) -> ClusterNeeds:
        """See `cluster_needs`."""
        loop, cluster = self._loop, self._cluster
        own_tiles = -(-cluster.row_tiles // cluster.splits)
        loads, _ = memory_of(loop)
        early = sum(len(p.writes) for p in self._parts if isinstance(p, StageCall) and p.early is not None)
        values = sum(load.view.source not in loop.shifted for load in loads) + len(loop.carried) + early + _RESULTS
        sums = matrices = registers_of_tile = longest = shared_of_tile = away = under_way = 0
        for _, part in self._list_products():
            chains = self._count_large_chains(part) + self._count_small_chains(part)
            sums = max(sums, 4 * cluster.row_tiles * len(part.pieces) * chains)
            parts = self._count_matrix_parts(self._sent[part.operand.port])
            terms, each = self._count_tiles(part), 4 * len(part.pieces) * parts
            matrices += cluster.held_of(terms) * each
            registers_of_tile += each
            fragments = len(part.pieces) * self._count_words(self._sent[part.operand.port])
            of_one = cluster.threads(self._width) * fragments * _FRAGMENT_BYTES
            shared_of_tile += of_one
            away += (terms - cluster.held_of(terms) - cluster.stored_of(terms)) * of_one
            if cluster.stored is not None:
                under_way = max(under_way, 4 * fragments * self._count_tiles_ahead(part))
            longest = max(longest, terms)
        others = _USUAL_REGISTERS + 4 * own_tiles * values + sums + under_way
        return ClusterNeeds(matrices, others, registers_of_tile, longest, self._shared_bytes(), shared_of_tile, away)

    # -- the kernel --------------------------------------------------------------------------------------------------

    def write(self, name: str) -> ClusterKernel:
        self._write_declarations()
        registers = self._load_matrices()
        self._load_lifted()
        self._load_states()
        for i in range(len(self._spec.loads)):
            self._declare_offset(Role.INPUT, i, self._spec.loads[i][1].row)
            self._param(Role.INPUT, i)
        for i in (*self._list_counts(), *self._list_loads_ahead()):
            self._line(f"{Port(Role.INPUT, i).name}_t load_{i}[own_tiles][4];")
        for i, (_, layout) in enumerate(self._spec.stores):
            self._declare_offset(Role.OUTPUT, i, layout.row)
            self._param(Role.OUTPUT, i, written=True)
        for part in self._list_early_stages():
            for write in part.stage.writes:
                self._line(f"{cpp_name(register_dtype(write.dtype))} {write.source.name}[own_tiles][4];")
        first, step = ("T - 1", "-1") if self._spec.backwards else ("0", "1")
        with self._block("if (split < row_tiles)"):
            self._issue_loads("0", self._list_counts())
            self._issue_loads(first, self._list_loads_ahead())
            for part in self._list_early_stages():
                if part.early != 0:
                    self._compute_early(part, first)
        with self._block("for (int64_t t = 0; t < T; t++)"):
            self._line(f"const int64_t step = {'T - 1 - t' if self._spec.backwards else 't'};")
            if self._cluster.slots == 2:
                self._line("const int odd = int(t & 1), phase = int(t >> 1 & 1);")
            else:
                self._line("const int odd = 0, phase = int(t & 1);")
            self._write_step(step)
        with self._block("if (split < row_tiles)"):
            self._store_final_states()
        self._line("dev::cluster_synchronize();  // no block ends while others send to it")
        return self._finish(name, registers)

    def _list_early_stages(self) -> list[StageCall]:
        """The stages that are computed while a warp waits for a product."""
        return [part for part in self._parts if isinstance(part, StageCall) and part.early is not None]

    def _finish(self, name: str, registers: int) -> ClusterKernel:
        cluster, threads = self._cluster, self._cluster.threads(self._width)
        # If values are shifted, a thread may load a value that it has stored through another pointer some steps
        # earlier.
        alone = "" if self._loop.shifted else "__restrict__ "
        arguments = [
            f"{'' if w or not alone else 'const '}{port.name}_t* {alone}{port.name}_ptr"
            for port, w in self._params.items()
        ]
        arguments += [f"const int64_t {size}" for size in self._sizes]
        cores = {core.name: core for core in self._spec.cores if core is not None}
        body = "\n".join(self._lines)
        content = f"({arguments})\n{body}\n{list(cores)} {cluster}"
        separator = ",\n    "

        def write(full: str) -> str:
            return (
                "// All steps of a recurrent loop. "
                f"One cluster: {cluster.rows} rows; one block: columns of each value.\n"
                f'extern "C" __global__ void __cluster_dims__({cluster.blocks}, 1, 1) __launch_bounds__({threads}, 1)\n'
                f"{full}(\n    {separator.join(arguments)}\n) {{\n{body}\n}}\n"
            )

        kernel = framed(name, CUDA, self._params, self._sizes, cores.values(), content, write)
        return ClusterKernel(kernel, threads, self._shared_bytes(), registers)

    # -- memory of a block -------------------------------------------------------------------------------------------

    def _slot_bytes(self, sent: _Sent) -> int:
        """The number of bytes of one slot of an exchange. The slot's barrier waits for these bytes."""
        tiles = self._tiles * len(sent.pieces) * self._cluster.row_tiles
        return tiles * (16 if sent.bits else 512 if sent.is_float32 else 256 * sent.parts)

    def _list_products(self) -> list[tuple[int, Multiply]]:
        return [(i, part) for i, part in enumerate(self._parts) if isinstance(part, Multiply)]

    @property
    def _sum_buffers(self) -> int:
        """The number of buffers for sums. With two buffers, a warp may be one step ahead of the other warps."""
        return self._cluster.slots

    def _sum_floats(self, part: Multiply) -> int:
        """The number of floats in shared memory in which a block's warps exchange the sums of a product."""
        of_one = self._cluster.tiles(self._width) * self._cluster.row_tiles * 4 * _WARP
        return self._sum_buffers * (self._cluster.splits - 1) * len(part.pieces) * of_one

    def _stored_fragments(self, part: Multiply) -> int:
        """The number of fragments of a matrix that a warp has in shared memory."""
        stored = self._cluster.stored_of(self._count_tiles(part))
        return len(part.pieces) * stored * self._count_words(self._sent[part.operand.port])

    def _stored_bytes(self, part: Multiply) -> int:
        """The number of bytes of a matrix in shared memory."""
        return self._cluster.threads(self._width) * self._stored_fragments(part) * _FRAGMENT_BYTES

    def _shared_bytes(self) -> int:
        slots = sum(self._cluster.slots * self._slot_bytes(sent) for sent in self._sent.values())
        return slots + sum(4 * self._sum_floats(part) + self._stored_bytes(part) for _, part in self._list_products())

    def _write_declarations(self) -> None:
        cluster = self._cluster
        self._line(
            f"constexpr int blocks = {cluster.blocks}, tiles = {cluster.tiles(self._width)}, "
            f"all_tiles = {self._tiles}, row_tiles = {cluster.row_tiles}, splits = {cluster.splits}, "
            f"own_tiles = {-(-cluster.row_tiles // cluster.splits)};"
        )
        self._line("extern __shared__ __align__(16) unsigned char shared[];")
        self._line(f"__shared__ __align__(8) uint64_t first_barrier[{2 * len(self._sent)}];")
        self._line("const uint32_t barriers = dev::kept(dev::shared_address(first_barrier));")
        offset = 0
        for sent in self._sent.values():
            self._line(f"const uint32_t {sent.name} = dev::kept(dev::shared_address(shared + {offset}));")
            offset += self._cluster.slots * self._slot_bytes(sent)
        self._line("const int lane = dev::kept(int(threadIdx.x & 31)), warp = dev::kept(int(threadIdx.x >> 5));")
        self._line("const int g = lane >> 2, q = lane & 3;")
        for i, part in self._list_products():
            if self._stored_fragments(part):
                first = f"32 * {self._stored_fragments(part)} * warp + lane"
                self._line(f"uint4* const stored_{i} = reinterpret_cast<uint4*>(shared + {offset}) + {first};")
                offset += self._stored_bytes(part)
        for i, part in self._list_products():
            if self._sum_floats(part):
                self._line(f"float* const sums_{i} = reinterpret_cast<float*>(shared + {offset});")
                offset += 4 * self._sum_floats(part)
        self._line(
            "const int split = warp / tiles, own_tile = warp % tiles, tile = dev::cluster_rank() * tiles + own_tile;"
        )
        self._line("const int64_t first_row = int64_t(blockIdx.x / blocks) * (8 * row_tiles) + 8 * split + 2 * q;")
        self._line("const int first_column = 16 * tile + g;")
        for width in sorted(self._widths):
            exists, column = self._exists(width), self._column_exists(width)
            self._line(f"bool {exists}[own_tiles][4], {column}[4];")
            self._line(
                f"#pragma unroll\nfor (int j = 0; j < 4; j++) {column}[j] = first_column + 8 * (j >> 1) < {width};"
            )
            with self._each():
                self._line(
                    f"{exists}[n][j] = splits * n + split < row_tiles && first_row + 8 * splits * n + (j & 1) < B && "
                    f"{column}[j];"
                )
        with self._block("if (threadIdx.x == 0)"):
            for sent in self._sent.values():
                for slot in range(self._cluster.slots):
                    self._line(f"dev::barrier_begin({self._barrier(sent, slot)}, 1);")
            if self._cluster.slots == 1:
                warps = self._cluster.blocks * self._cluster.threads(self._width) // _WARP
                self._line(f"dev::barrier_begin({_READ}, {warps});")
            self._line("dev::barrier_fence();")
        self._line("__syncthreads();")
        with self._block("if (threadIdx.x == 0)"):
            for sent in self._sent.values():
                for slot in range(self._cluster.slots):
                    self._line(self._expect(sent, str(slot)))

    def _expect(self, sent: _Sent, slot: str) -> str:
        return f"dev::barrier_expect({self._barrier(sent, slot)}, {self._slot_bytes(sent)});"

    def _barrier(self, sent: _Sent, slot: int | str) -> str:
        """Source text of the address of a slot's barrier."""
        return f"barriers + 8 * ({2 * sent.number} + ({slot}))"

    # -- before the steps --------------------------------------------------------------------------------------------

    def _count_matrix_parts(self, sent: _Sent) -> int:
        return self._spec.parts if sent.exchange.dtype == torch.float32 else 1

    def _count_words(self, sent: _Sent) -> int:
        """The number of 32-bit words that two elements of a matrix occupy in shared memory."""
        return min(2, self._count_matrix_parts(sent)) if self._cluster.compact else self._count_matrix_parts(sent)

    def _operand_pieces(self, part: Multiply) -> tuple[int, int]:
        """The index of the first piece of a product's operand, and the number of pieces."""
        pieces = self._sent[part.operand.port].pieces
        inside = [
            i
            for i, piece in enumerate(pieces)
            if part.operand.first <= piece.first < part.operand.first + part.operand.width
        ]
        if not inside or sum(pieces[i].width for i in inside) != part.operand.width:
            raise NotOneLaunchError(f"{part.product.name} multiplies only a part of the value that a stage writes")
        if len({pieces[i].width for i in inside}) > 1:
            raise NotOneLaunchError(f"{part.product.name} multiplies pieces of several widths")
        return inside[0], len(inside)

    def _count_tiles(self, part: Multiply) -> int:
        """The number of a product's tiles of 16 terms that one warp multiplies."""
        pieces = self._operand_pieces(part)[1]
        if pieces * self._tiles % self._cluster.splits:
            raise NotOneLaunchError(
                f"{pieces * self._tiles} tiles of terms cannot be shared by {self._cluster.splits} warps"
            )
        count = -(-part.operand.width // _COLUMNS) if pieces == 1 else pieces * self._tiles
        return -(-count // self._cluster.splits)

    def _count_loaded_words(self, sent: _Sent) -> int:
        """The number of 32-bit words that contain two elements of a matrix when they are read."""
        return min(2, self._count_matrix_parts(sent))

    def _list_ranges(self, terms: int) -> list[tuple[str, int, int]]:
        """The ranges of tiles of terms that are in registers, in shared memory, and only in global memory."""
        held, stored = self._cluster.held_of(terms), self._cluster.stored_of(terms)
        ranges = [("held", 0, held), ("stored", held, held + stored), ("away", held + stored, terms)]
        return [(where, begin, end) for where, begin, end in ranges if begin < end]

    def _stored_place(self, i: int, part: Multiply, number: int, word: int) -> str:
        """Source text of the words in shared memory that belong to the fragment of tile `k`."""
        terms, words = self._count_tiles(part), self._count_words(self._sent[part.operand.port])
        held, stored = self._cluster.held_of(terms), self._cluster.stored_of(terms)
        return f"stored_{i}[32 * (({number} * {stored} + k - {held}) * {words} + {word})]"

    def _count_tiles_ahead(self, part: Multiply) -> int:
        """The number of tiles of terms whose fragments are loaded while earlier tiles are multiplied."""
        return max(1, _AHEAD // len(part.pieces))

    def _load_fragment(self, part: Multiply, number: int, term: str, array: str) -> None:
        """Loads the words of the fragment of a tile of terms from global memory."""
        sent, (first, count) = self._sent[part.operand.port], part.pieces[number]
        pointer, (down, across) = self._param(Role.MATRIX, part.matrix), self._spec.matrix_strides[part.matrix]
        of_piece = part.operand.width // self._operand_pieces(part)[1]
        start = f"{pointer} + (({term}) / all_tiles) * {of_piece} * int64_t({down}) + {first * across}ll"
        self._line(
            f"dev::take<{sent.format}, {'true' if sent.bits else 'false'}, {self._count_loaded_words(sent)}>({array}, "
            f"{start}, {down}, {across}, 16 * (({term}) % all_tiles), {of_piece}, 16 * tile, {count});"
        )

    def _read_ahead(self, i: int, part: Multiply) -> None:
        """Starts the loads of the first tiles that are neither in registers nor in shared memory."""
        terms, ahead, sent = self._count_tiles(part), self._count_tiles_ahead(part), self._sent[part.operand.port]
        for where, begin, end in self._list_ranges(terms):
            if where == "away":
                self._line(f"uint32_t read_{i}[{ahead}][{len(part.pieces)}][{self._count_loaded_words(sent)}][4];")
                self._line("#pragma unroll")
                with self._block(f"for (int j = 0; j < {min(ahead, end - begin)}; j++)"):
                    for number in range(len(part.pieces)):
                        self._load_fragment(part, number, f"split * {terms} + {begin} + j", f"read_{i}[j][{number}]")

    def _load_matrices(self) -> int:
        """Loads the matrices into registers and shared memory. A thread only reads words that it has stored itself.

        Returns:
            The number of a thread's registers that the matrices occupy.
        """
        registers = 0
        for i, part in self._list_products():
            sent = self._sent[part.operand.port]
            parts, terms = self._count_matrix_parts(sent), self._count_tiles(part)
            held = self._cluster.held_of(terms)
            registers += len(part.pieces) * held * parts * 4
            if held:
                self._line(f"uint32_t matrix_{i}[{len(part.pieces)}][{held}][{parts}][4];")
            for where, begin, end in self._list_ranges(terms):
                if where == "away":
                    continue
                self._line("#pragma unroll" if where == "held" else "#pragma unroll 1")
                with self._block(f"for (int k = {begin}; k < {end}; k++)"):
                    self._line(f"const int term = split * {terms} + k;")
                    for number in range(len(part.pieces)):
                        taken = f"taken_{number}"
                        self._line(f"uint32_t {taken}[{self._count_loaded_words(sent)}][4];")
                        self._load_fragment(part, number, "term", taken)
                        if where == "held":
                            self._line(f"dev::take_apart(matrix_{i}[{number}][k], {taken});")
                            continue
                        if not self._cluster.compact:
                            self._line(f"uint32_t parts_{number}[{parts}][4];")
                            self._line(f"dev::take_apart(parts_{number}, {taken});")
                            taken = f"parts_{number}"
                        for word in range(self._count_words(sent)):
                            words = ", ".join(f"{taken}[{word}][{r}]" for r in range(4))
                            self._line(f"{self._stored_place(i, part, number, word)} = {{{words}}};")
            if part.added is not None:
                row = self._param(Role.MATRIX, part.added)
                (distance,) = self._spec.matrix_strides[part.added]
                for number, (first, count) in enumerate(part.pieces):
                    self._line(f"float added_{i}_{number}[4];")
                    self._line("#pragma unroll")
                    address = f"{row}[({first} + first_column + 8 * (j >> 1)) * int64_t({distance})]"
                    value = f"{self._column_exists(count)}[j] ? float(dev::load({address})) : 0.0f"
                    self._line(f"for (int j = 0; j < 4; j++) added_{i}_{number}[j] = {value};")
        return registers

    def _load_lifted(self) -> None:
        for i, (part, core) in enumerate(zip(self._parts, self._spec.cores, strict=True)):
            if not isinstance(part, StageCall) or core is None:
                continue
            for port in core.arguments:
                if port.role is Role.LIFTED:
                    pointer = self._param(Role.LIFTED, port.index)
                    down, across = two_strides(part.stage.shape, part.stage.graph.layouts[port.index].strides)
                    name, kind = f"lifted_{i}_{port.index}", f"decltype(dev::load({pointer}[0]))"
                    if down == 0:
                        self._line(f"{kind} {name}[2];")
                        self._line("#pragma unroll")
                        element = f"{pointer}[(first_column + 8 * j) * int64_t({across})]"
                        value = f"{self._column_exists(part.width)}[2 * j] ? dev::load({element}) : {kind}(0)"
                        self._line(f"for (int j = 0; j < 2; j++) {name}[j] = {value};")
                    else:
                        self._line(f"{kind} {name}[own_tiles][4];")
                        element = (
                            f"{pointer}[(first_row + 8 * splits * n + (j & 1)) * int64_t({down}) + "
                            f"(first_column + 8 * (j >> 1)) * int64_t({across})]"
                        )
                        with self._each():
                            exists = self._exists(part.width)
                            self._line(f"{name}[n][j] = {exists}[n][j] ? dev::load({element}) : {kind}(0);")

    def _load_states(self) -> None:
        for i, (port, (width, dtype)) in enumerate(self._loop.carried.items()):
            element, exists = self._state_place(width), self._exists(width)
            kind = cpp_name(register_dtype(dtype))
            self._line(f"{kind} state_{i}[own_tiles][4];")
            with self._each():
                if port in self._loop.absent:
                    self._line(f"state_{i}[n][j] = {kind}(0);")
                else:
                    pointer = self._param(Role.STATE, i)
                    self._line(f"state_{i}[n][j] = {exists}[n][j] ? dev::load({pointer}{element}) : {kind}(0);")
        self._line("dev::cluster_synchronize();  // barriers are there before anything is sent")
        with self._block("if (split < row_tiles)"):
            for port, sent in self._sent.items():
                if port in self._carried:
                    self._send(sent, 0, self._carried[port], "0")

    def _state_place(self, width: int) -> str:
        return f"[(first_row + 8 * splits * n + (j & 1)) * {width} + first_column + 8 * (j >> 1)]"

    def _store_final_states(self) -> None:
        for i, (port, (width, _)) in enumerate(self._loop.carried.items()):
            if port not in self._loop.lasting:
                pointer = self._param(Role.FINAL_STATE, i, written=True)
                with self._each():
                    element, exists = self._state_place(width), self._exists(width)
                    self._line(f"if ({exists}[n][j]) dev::store({pointer}{element}, state_{i}[n][j]);")

    # -- a step ------------------------------------------------------------------------------------------------------

    def _write_step(self, following: str) -> None:
        self._values: dict[Columns, str] = {}
        self._next_values: dict[Port, str] = {}
        self._delayed_stores: list[tuple[int, str, Columns]] = []  # stores that no warp waits for
        self._next_store = 0
        self._waited: set[Port] = set()
        self._unread = self._cluster.slots == 1
        loads = self._find_last_reads()
        for i, part in enumerate(self._parts):
            if isinstance(part, Multiply):
                self._multiply(i, part)
                if i + 1 < len(self._parts):
                    continue  # the next stage runs first, because other warps wait for its results
            elif part.early == -1:
                continue
            elif part.early is not None:
                with self._block(f"if (split < row_tiles && {'t + 1 < T' if part.early else 'true'})"):
                    self._compute_early(part, f"step + {following}" if part.early else "step")
            else:
                self._call(i, part)
            self._access_memory(loads.get(i, ()), following)
        with self._block("if (split < row_tiles)"):
            for port, value in self._next_values.items():
                with self._each():
                    self._line(f"{self._carried[port]}[n][j] = {value}[n][j];")

    def _wait_for_readers(self, *, carried: bool) -> None:
        """If there is only one slot, waits until all warps of the cluster have read it, before it is written again."""
        if self._unread:
            before = "t" if carried else "(t - 1)"
            self._line(f"{'' if carried else 'if (t > 0) '}dev::barrier_wait({_READ}, int({before} & 1));")
            self._unread = False

    def _find_last_reads(self) -> dict[int, list[int]]:
        """For each part, the indices of the loads whose values no later part uses."""
        loads = [load for load, _ in self._spec.loads]
        last: dict[int, int] = {}
        for i, part in enumerate(self._parts):
            if isinstance(part, StageCall):
                for read in part.reads:
                    if isinstance(read, View) and Load(read, part.stage.shape) in loads:
                        last[loads.index(Load(read, part.stage.shape))] = i
        last = {number: i for number, i in last.items() if number in self._list_loads_ahead()}
        loads_by_part: dict[int, list[int]] = {}
        for number, i in last.items():
            loads_by_part.setdefault(i, []).append(number)
        return loads_by_part

    def _access_memory(self, loads: Sequence[int], following: str) -> None:
        """Issues the loads for the next step whose registers are free after this part, and then the delayed stores."""
        if not self._delayed_stores and not loads:
            return
        with self._block("if (split < row_tiles)"):
            if loads:
                with self._block("if (t + 1 < T)"):
                    self._issue_loads(f"step + {following}", loads)
            for number, value, columns in self._delayed_stores:
                with self._each():
                    address = self._address(Role.OUTPUT, number, "step", columns.first)
                    self._line(f"if ({self._exists(columns.width)}[n][j]) dev::store({address}, {value}[n][j]);")
            self._delayed_stores = []

    def _call(self, i: int, part: StageCall) -> None:
        core = self._spec.cores[i]
        assert core is not None
        arguments = [self._argument(i, part, port) for port in core.arguments]
        results = [f"result_{i}_{port.index}" for port in core.results]
        for result, written in zip(results, part.stage.writes, strict=True):
            self._line(f"{cpp_name(register_dtype(written.dtype))} {result}[own_tiles][4];")
        with self._block("if (split < row_tiles)"):
            with self._each():
                self._line(f"const auto results = {core.name}({', '.join(arguments)});")
                for number, result in enumerate(results):
                    self._line(f"{result}[n][j] = dev::get<{number}>(results);")
            for result, write in zip(results, part.writes, strict=True):
                if write is not None:
                    self._record_value(write, result)
        for result, view in zip(results, part.stored, strict=True):
            if view is not None:
                self._delayed_stores.append((self._next_store, result, Columns(view.source, 0, part.width)))
                self._next_store += 1

    def _list_loads_ahead(self) -> list[int]:
        """Indices of the loads that are issued one step earlier.

        These are all loads except for those of the rows' numbers of remaining steps, and those of values that the loop
        wrote some steps ago.
        """
        others = {*self._loop.shifted, self._spec.counts}
        return [i for i, (load, _) in enumerate(self._spec.loads) if load.view.source not in others]

    def _list_counts(self) -> list[int]:
        """Indices of the loads that are issued only once: those of the rows' numbers of remaining steps."""
        return [i for i, (load, _) in enumerate(self._spec.loads) if load.view.source == self._spec.counts]

    def _compute_early(self, part: StageCall, step: str) -> None:
        """Computes a stage for the step `step`. The stage only reads values of earlier steps."""
        i = next(number for number, other in enumerate(self._parts) if other is part)
        core = self._spec.cores[i]
        assert core is not None
        arguments = [self._argument(i, part, port, step) for port in core.arguments]
        with self._each():
            self._line(f"const auto results = {core.name}({', '.join(arguments)});")
            for number, write in enumerate(part.stage.writes):
                self._line(f"{write.source.name}[n][j] = dev::get<{number}>(results);")

    def _argument(self, i: int, part: StageCall, port: Port, step: str = "step") -> str:
        if port.role is Role.LIFTED:
            down, _ = two_strides(part.stage.shape, part.stage.graph.layouts[port.index].strides)
            return f"lifted_{i}_{port.index}" + ("[j >> 1]" if down == 0 else "[n][j]")
        read = part.reads[port.index]
        if isinstance(read, Gather):
            load = [load for load, _ in self._spec.loads].index(Load(read.view, part.stage.shape))
            value = f"{read.number.name}[n][j]"
            condition = f"{value} >= {read.first} && {value} < {read.first + read.count}"
            source_step = f"{step} {'-' if read.back else '+'} (int64_t({value}) - {read.first})"
            address, kind = self._address(Role.INPUT, load, source_step), f"{Port(Role.INPUT, load).name}_t"
            return f"dev::load({self._exists(part.width)}[n][j] && {condition} ? {address} : {kind}{{}})"
        if isinstance(read, View):
            if read.source.role is Role.CAME_STATE:
                return "t > 0"
            number = [load for load, _ in self._spec.loads].index(Load(read, part.stage.shape))
            if read.source in self._loop.shifted:
                exists, kind = self._exists(part.width), f"{Port(Role.INPUT, number).name}_t"
                return f"dev::load({exists}[n][j] ? {self._address(Role.INPUT, number, step)} : {kind}{{}})"
            elapsed = f" - int({step})" if read.source == self._spec.counts else ""
            return f"dev::load(load_{number}[n][j]){elapsed}"
        if read.port.role is Role.AHEAD:
            return f"{read.port.name}[n][j]"
        return (self._carried.get(read.port) or self._values[read]) + "[n][j]"

    def _multiply(self, i: int, part: Multiply) -> None:
        sent = self._sent[part.operand.port]
        first_piece, _ = self._operand_pieces(part)
        terms, pieces = self._count_tiles(part), len(part.pieces)
        self._read_ahead(i, part)
        if part.operand.port not in self._waited:
            self._waited.add(part.operand.port)
            self._line(f"dev::barrier_wait({self._barrier(sent, 'odd')}, phase);")
            if self._sum_buffers == 1 and self._cluster.splits > 1 and len(self._waited) == 1:
                self._line("__syncthreads();  // all warps have read the sums of the step before")
            self._line(f"if (threadIdx.x == 0) {self._expect(sent, 'odd')}")
        for number in range(pieces):
            self._line(f"float product_{i}_{number}[own_tiles][4];")
        with self._block(""):
            self._write_totals(i, part, sent, first_piece, terms)
            if self._cluster.splits > 1:
                self._add_totals(i, pieces)
            self._signal_read(i)
            with self._block("if (split < row_tiles)"):
                for number in range(pieces):
                    with self._each():
                        self._line(f"product_{i}_{number}[n][j] = {self._product(i, number, part)};")
        with self._block("if (split < row_tiles)"):
            for number, (first, count) in enumerate(part.pieces):
                self._record_value(Columns(part.port, first, count), f"product_{i}_{number}")
        for number, (first, count) in enumerate(part.pieces):
            if part.stored is not None:
                columns = Columns(part.port, first, count)
                self._delayed_stores.append((self._next_store, f"product_{i}_{number}", columns))
        if part.stored is not None:
            self._next_store += 1

    def _signal_read(self, i: int) -> None:
        """After the last product, signals to each block that a warp has read the operand, if there is only one slot."""
        if self._cluster.slots == 1 and i == max(number for number, _ in self._list_products()):
            self._line(f"if (lane < blocks) dev::barrier_arrive(dev::remote({_READ}, lane));")

    def _write_totals(self, i: int, part: Multiply, sent: _Sent, first_piece: int, terms: int) -> None:
        """Computes the sums of a warp. Products of two first parts and products of smaller parts have separate sums."""
        pieces = len(part.pieces)
        small = self._count_matrix_parts(sent) > 1
        large = self._count_large_chains(part)
        chains = {"small": self._count_small_chains(part), "large": large} if small else {"large": large}
        for name, count in chains.items():
            self._line(f"float {name}[{pieces}][row_tiles][{count}][4] = {{}};")
        matrix_parts = range(self._count_matrix_parts(sent))
        pairs = [(a, b) for a in range(sent.parts) for b in matrix_parts if a + b < self._spec.parts]
        pairs.sort(key=lambda pair: -sum(pair))
        for where, begin, end in self._list_ranges(terms):
            # If all stored fragments were loaded at once, they would occupy registers that other fragments need.
            few = where == "stored" and max(chains.values()) == 1
            at_a_time = f" {_STORED_AT_A_TIME}" if few else ""
            if where != "away":
                self._line(f"#pragma unroll{at_a_time}")
                with self._block(f"for (int k = {begin}; k < {end}; k++)"):
                    self._multiply_tile(i, part, where, first_piece, chains, pairs)
                continue
            ahead = self._count_tiles_ahead(part)
            self._line("#pragma unroll 1")
            with self._block(f"for (int first = {begin}; first < {end}; first += {ahead})"):
                self._line("#pragma unroll")
                with self._block(f"for (int j = 0; j < {ahead}; j++)"):
                    self._line("const int k = first + j;")
                    with self._block(f"if (k < {end})"):
                        self._multiply_tile(i, part, where, first_piece, chains, pairs)
                        with self._block(f"if (k + {ahead} < {end})"):
                            for number in range(pieces):
                                self._load_fragment(part, number, f"term + {ahead}", f"read_{i}[j][{number}]")
        self._line(f"float total[{pieces}][row_tiles][4];")
        self._line("#pragma unroll")
        with self._block(f"for (int p = 0; p < {pieces}; p++)"), self._each(_EACH_SUM):
            sums = [" + ".join(f"{name}[p][n][{k}][j]" for k in range(count)) for name, count in chains.items()]
            self._line(f"total[p][n][j] = {' + '.join(f'({total})' for total in sums)};")

    def _multiply_tile(
        self,
        i: int,
        part: Multiply,
        where: str,
        first_piece: int,
        chains: Mapping[str, int],
        pairs: Sequence[tuple[int, int]],
    ) -> None:
        """Multiplies the terms of tile `k`.

        Args:
            where: the memory that contains the matrix: ``"held"`` for registers, ``"stored"`` for shared memory, and
                ``"away"`` for global memory.
            chains: the number of independent sums for ``"small"`` and for ``"large"`` products.
            pairs: indices of the parts of the operand and of the matrix that are multiplied.
        """
        sent, terms = self._sent[part.operand.port], self._count_tiles(part)
        num_small = sum(a + b > 0 for a, b in pairs)
        self._line(f"const int term = split * {terms} + k;")
        if where != "held":
            self._define_fragments(i, part, where)
        self._line(f"uint2 operand[row_tiles][{sent.parts}];")
        self._line("#pragma unroll")
        with self._block("for (int n = 0; n < row_tiles; n++)"):
            self._define_operand(sent, f"term + {first_piece} * all_tiles" if first_piece else "term")
        # Products that are added to the same sum wait for each other, so products for other sums are placed between
        # them.
        for pair_index, (a, b) in enumerate(pairs):
            is_small = "small" in chains and a + b > 0
            chain = f"({num_small} * k + {pair_index}) % {chains['small']}" if is_small else f"k % {chains['large']}"
            self._line("#pragma unroll")
            with self._block("for (int n = 0; n < row_tiles; n++)"):
                for number in range(len(part.pieces)):
                    sums = f"{'small' if is_small else 'large'}[{number}][n][{chain}]"
                    matrix = f"matrix_{i}[{number}][k][{b}]" if where == "held" else f"fragment_{number}[{b}]"
                    self._line(f"{sent.format}::multiply({sums}, {matrix}, operand[n][{a}].x, operand[n][{a}].y);")

    def _define_fragments(self, i: int, part: Multiply, where: str) -> None:
        """Defines the parts of tile `k`'s fragments, which are not in registers yet, as `fragment_NUMBER`."""
        sent = self._sent[part.operand.port]
        for number in range(len(part.pieces)):
            taken = f"read_{i}[j][{number}]"
            if where == "stored":
                name = f"{'taken' if self._cluster.compact else 'fragment'}_{number}"
                words = range(self._count_words(sent))
                for word in words:
                    self._line(f"const uint4 word_{number}_{word} = {self._stored_place(i, part, number, word)};")
                values = ", ".join(f"{{{', '.join(f'word_{number}_{word}.{x}' for x in 'xyzw')}}}" for word in words)
                self._line(f"const uint32_t {name}[{len(words)}][4] = {{{values}}};")
                if not self._cluster.compact:
                    continue
                taken = name
            self._line(f"uint32_t fragment_{number}[{self._count_matrix_parts(sent)}][4];")
            self._line(f"dev::take_apart(fragment_{number}, {taken});")

    def _define_operand(self, sent: _Sent, term: str) -> None:
        """Defines the parts of an operand, as `operand[n]`."""
        fragment = f"((odd * {len(sent.pieces)} * all_tiles + {term}) * row_tiles + n)"
        if sent.bits:
            self._line(f"operand[n][0] = dev::spread<{sent.format}>({sent.name} + {fragment} * 16, lane);")
        elif not sent.is_float32:
            for a in range(sent.parts):
                of_part = f"(odd * {sent.parts} + {a}) * {len(sent.pieces)} * all_tiles + {term}"
                address = f"{sent.name} + (({of_part}) * row_tiles + n) * 256 + lane * 8"
                self._line(f"operand[n][{a}] = dev::read_two({address});")
        else:
            self._line(f"const uint4 both = dev::read_four({sent.name} + {fragment} * 512 + lane * 16);")
            self._line("operand[n][0] = {both.x, both.y};")
            second, third = "operand[n][1]", f"operand[n][{sent.parts - 1}]"
            for axis, rest in (("x", "z"), ("y", "w")):
                numbers = f"both.{axis}, both.{rest}, {second}.{axis}, {third}.{axis}"
                self._line(f"dev::other_parts<{sent.parts}>({numbers});")

    def _count_small_chains(self, part: Multiply) -> int:
        """The number of independent sums of small products. They hide a product's latency of about 30 cycles."""
        held = self._cluster.held_of(self._count_tiles(part))
        registers = len(part.pieces) * held * self._count_matrix_parts(self._sent[part.operand.port]) * 4
        return max(1, (4 if registers <= _FEW_REGISTERS else 2) // self._count_independent_sums(part))

    def _count_large_chains(self, part: Multiply) -> int:
        """The number of independent sums of products of first parts."""
        return max(1, 2 // self._count_independent_sums(part))

    def _count_independent_sums(self, part: Multiply) -> int:
        """The number of sums that a warp computes for different elements, and which are therefore independent."""
        return len(part.pieces) * self._cluster.row_tiles

    def _add_totals(self, i: int, pieces: int) -> None:
        """Adds up the sums `total` of the warps that share a product.

        In the warp that computes a tile of rows, the result is `own`.
        """
        others = self._cluster.splits - 1
        row = f"(TILE * {others} + OTHER) * {pieces} + p"
        if self._sum_buffers == 2:
            row = f"((int(t & 1) * row_tiles + TILE) * {others} + OTHER) * {pieces} + p"
        element = f"sums_{i}[(({row}) * 4 + j) * (32 * tiles) + 32 * own_tile + lane]"
        self._line(f"float own[{pieces}][own_tiles][4];")
        self._line("#pragma unroll")
        with self._block(f"for (int p = 0; p < {pieces}; p++)"), self._each(_EACH_SUM):
            theirs = element.replace("TILE", "n").replace("OTHER", "(split - (split > n % splits))")
            self._line("if (split == n % splits) {")
            self._line("    own[p][n / splits][j] = total[p][n][j];")
            self._line("} else {")
            self._line(f"    {theirs} = total[p][n][j];")
            self._line("}")
        self._line("__syncthreads();")
        self._line("#pragma unroll")
        with (
            self._block(f"for (int p = 0; p < {pieces}; p++)"),
            self._each(),
            self._block("if (splits * n + split < row_tiles)"),
        ):
            for other in range(others):
                mine = element.replace("TILE", "(splits * n + split)").replace("OTHER", str(other))
                self._line(f"own[p][n][j] += {mine};")

    def _product(self, i: int, number: int, part: Multiply) -> str:
        text = f"{'own' if self._cluster.splits > 1 else 'total'}[{number}][n][j]"
        if part.alpha != 1:
            text = f"{text} * {part.alpha!r}f"
        if part.added is not None:
            added = f"added_{i}_{number}[j]"
            text = f"{text} + {added}" if part.beta == 1 else f"{text} + {added} * {part.beta!r}f"
        dtype = part.product.dtype
        return f"dev::round_{str(dtype).removeprefix('torch.')}({text})" if dtype in HALF_DTYPES else text

    def _record_value(self, columns: Columns, value: str) -> None:
        self._values[columns] = value
        if columns.port in self._carried:
            self._next_values[columns.port] = value
        sent = self._sent.get(columns.port)
        if sent is None:
            return
        piece = sent.pieces.index(columns)
        if sent.exchange.carried:
            with self._block("if (t + 1 < T)"):
                self._wait_for_readers(carried=True)
                self._send(sent, piece, value, "1 - odd" if self._cluster.slots == 2 else "0")
        else:
            self._wait_for_readers(carried=False)
            self._send(sent, piece, value, "odd")

    def _send(self, sent: _Sent, piece: int, value: str, slot: str) -> None:
        """Sends a warp's columns of a value to each block of the cluster."""
        exists = self._column_exists(sent.pieces[piece].width)
        barrier = self._barrier(sent, slot)
        tile, count = f"{piece} * all_tiles + tile", f"{len(sent.pieces)} * all_tiles"
        self._line("#pragma unroll")
        with (
            self._block("for (int n = 0; n < own_tiles; n++)"),
            self._block("if (splits * n + split < row_tiles)"),
        ):
            if sent.bits:
                words = [f"word_{j}" for j in range(4)]
                for j, word in enumerate(words):
                    self._line(f"const uint32_t {word} = __ballot_sync(~0u, {value}[n][{j}] != 0 && {exists}[{j}]);")
                address = f"{sent.name} + ((({slot}) * {count} + {tile}) * row_tiles + splits * n + split) * 16"
                with self._block("if (lane < blocks)"):
                    self._line(
                        f"dev::send(dev::remote({address}, lane), dev::remote({barrier}, lane), "
                        "word_0, word_2, word_1, word_3);"
                    )
                return
            for j in range(4):
                self._line(f"const float x_{j} = {exists}[{j}] ? float({value}[n][{j}]) : 0.0f;")
            index = f"(({{}}) * {count} + {tile}) * row_tiles + splits * n + split"  # in a slot or in a part of it
            for name, j in (("low", 0), ("high", 2)):
                if sent.parts == 1:
                    self._line(f"const uint32_t {name}_0 = {sent.format}::bits(x_{j}, x_{j + 1});")
                    continue
                self._line(f"const uint2 {name} = dev::halves(x_{j}, x_{j + 1});")
                if not sent.is_float32:
                    self._line(f"const uint32_t {name}_0 = {name}.x;")
                    self._line(f"uint32_t {name}_1, {name}_2;")
                    self._line(f"dev::other_parts<{sent.parts}>({name}.x, {name}.y, {name}_1, {name}_2);")
            if sent.is_float32:
                address = f"{sent.name} + ({index.format(slot)}) * 512 + lane * 16"
                self._send_each(address, barrier, ("low.x", "high.x", "low.y", "high.y"))
                return
            for a in range(sent.parts):
                address = f"{sent.name} + ({index.format(f'({slot}) * {sent.parts} + {a}')}) * 256 + lane * 8"
                self._send_each(address, barrier, (f"low_{a}", f"high_{a}"))

    def _send_each(self, address: str, barrier: str, words: Sequence[str]) -> None:
        """Transposes the words of the warp's threads, and sends them to each block of the cluster."""
        with self._block(""):
            names = [f"word_{k}" for k in range(len(words))]
            for name, word in zip(names, words, strict=True):
                self._line(f"const uint32_t {name} = dev::transposed({word});")
            self._line(f"const uint32_t place = {address}, barrier = {barrier};")
            self._line("#pragma unroll")
            self._line(
                "for (int block = 0; block < blocks; block++) "
                f"dev::send(dev::remote(place, block), dev::remote(barrier, block), {', '.join(names)});"
            )

    # -- memory ------------------------------------------------------------------------------------------------------

    def _declare_offset(self, role: Role, i: int, row: int | None) -> None:
        """Declares the offset of a thread's first element of a value, and the distances of steps, rows and columns."""
        name = Port(role, i).name
        if row is None:
            sizes = [f"{name}_{dimension}" for dimension in ("time", "row", "column")]
            self._sizes += sizes
            time, down, across = sizes
        else:
            time, down, across = f"B * {row}", f"int64_t({row})", "int64_t(1)"
        self._line(f"const int64_t {name}_steps = {time}, {name}_down = {down}, {name}_across = {across};")
        self._line(f"const int64_t {name}_at = first_row * {name}_down + first_column * {name}_across;")

    def _address(self, role: Role, i: int, step: str, first: int = 0) -> str:
        name = Port(role, i).name
        ahead = f" + {first} * {name}_across" if first else ""
        offset = f"{name}_at + (8 * splits * n + (j & 1)) * {name}_down + 8 * (j >> 1) * {name}_across{ahead}"
        return f"{name}_ptr[({step}) * {name}_steps + {offset}]"

    def _issue_loads(self, step: str, numbers: Iterable[int]) -> None:
        """Issues loads of inputs, without conversions, because each conversion would wait for its load."""
        for i in numbers:
            with self._each():
                shape, nothing = self._spec.loads[i][0].shape, f"{Port(Role.INPUT, i).name}_t{{}}"
                exists = self._exists(shape[-1] if shape else 1)
                self._line(f"load_{i}[n][j] = {exists}[n][j] ? {self._address(Role.INPUT, i, step)} : {nothing};")


def _list_written_ports(part: StageCall | Multiply) -> Iterable[Port]:
    if isinstance(part, Multiply):
        return (part.port,)
    return tuple(columns.port for columns in part.writes if columns is not None)
