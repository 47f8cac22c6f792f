"""Functions for programs of one launch that compute one step together: matrix products, and exchanges of values.

A program publishes its part of a value and arrives at a counter. A program that reads the complete value waits until
all programs have arrived. The counter only grows. A wait is limited to a fixed number of reads of the counter, which
take seconds. After this time, the missing programs will never arrive. The waiting program then marks the counter, so
that all programs that share the counter give up.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from flexsn_codegen.targets.triton.device._base import INTERPRETED, load, round_bfloat16, round_float16, store

# The mark of a counter whose programs gave up. It exceeds any number of arrivals.
_GAVE_UP = tl.constexpr(1 << 30)

if INTERPRETED:
    # The interpreter runs programs one after the other. Each program computes all columns of its rows, and only reads
    # values that it has stored itself.
    from flexsn_codegen.targets.triton.device._interpreted import _of_type, _to_torch

    def fetch(pointers: Any, mask: Any) -> Any:
        return load(pointers, mask)

    def publish(pointers: Any, value: Any, mask: Any) -> None:
        store(pointers, value, mask)

    as_bfloat16, as_float16 = round_bfloat16, round_float16  # half values are float32 in the interpreter

    def first_part(x: Any) -> Any:
        bits = _to_torch(x).view(torch.int32) & -65536
        return _of_type(x, bits.view(torch.float32), tl.float32)

    def last_part(x: Any) -> Any:
        return _of_type(x, _to_torch(x).to(torch.bfloat16).to(torch.float32), tl.float32)

    def rest(x: Any) -> Any:
        value = _to_torch(x)
        first = (value.view(torch.int32) & -65536).view(torch.float32)
        return _of_type(x, torch.where(first == value, 0.0, value - first), tl.float32)

    def dot(x: Any, y: Any, total: Any) -> Any:
        return tl.dot(x.to(tl.float32), y.to(tl.float32), total, input_precision="ieee")

    def hold(matrix: Any, rows: Any) -> Any:
        return matrix

    dot_held = dot

    def in_registers(matrix: Any) -> Any:
        return matrix

    def arrive(counter: Any) -> None:
        pass

    def meet() -> None:
        pass

    def wait(counter: Any, goal: Any) -> None:
        pass

    def gave_up(counter: Any) -> bool:
        return False

else:

    @triton.jit
    def fetch(pointers, mask):
        # The load bypasses the L1 cache, which does not contain the values that other programs write.
        return tl.load(pointers, mask=mask, other=0, cache_modifier=".cg")

    @triton.jit
    def publish(pointers, value, mask):
        tl.store(pointers, value.to(pointers.dtype.element_ty), mask=mask)

    @triton.jit
    def as_bfloat16(x):
        return x.to(tl.bfloat16)

    @triton.jit
    def as_float16(x):
        return x.to(tl.float16)

    @triton.jit
    def _truncated(x):
        return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)

    @triton.jit
    def first_part(x):
        """The first 8 bits of a float32's significand, as a bfloat16. The sum of three such parts is the float32.

        The other bits are cut off, because rounding could overflow.
        """
        return _truncated(x).to(tl.bfloat16)

    @triton.jit
    def last_part(x):
        """The bfloat16 that is nearest to `x`, the rest that all other parts leave."""
        return x.to(tl.bfloat16)

    @triton.jit
    def rest(x):
        first = _truncated(x)
        return tl.where(first == x, 0.0, x - first)

    @triton.jit
    def dot(x, y, total):
        return tl.dot(x, y, total)

    @triton.jit
    def hold(matrix, rows: tl.constexpr):
        """Keeps a matrix in registers during a loop that multiplies `rows` rows by it.

        If only one product uses the matrix, Triton moves the load from shared memory into the loop, next to that
        product. Therefore, this function computes another product, with zeros. Inline assembly prevents the compiler
        from removing the additional product. If a factor is loaded from memory and not changed, Triton loads the factor
        again for each product. Therefore, the matrix first passes through inline assembly.
        """
        matrix = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [matrix], dtype=matrix.dtype, is_pure=True, pack=2
        )
        nothing = tl.zeros([rows, matrix.shape[0]], matrix.dtype)
        total = dot_held(nothing, matrix, tl.zeros([rows, matrix.shape[1]], tl.float32))
        tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [total], dtype=tl.int32, is_pure=False, pack=1)
        return matrix

    @triton.jit
    def in_registers(matrix):
        """Keeps the first factor of several products in registers, so that it is read from shared memory only once.

        The elements of the factor have 16 bits.
        """
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [matrix], dtype=matrix.dtype, is_pure=True, pack=2)

    @triton.jit
    def dot_held(x, y, total):
        """`total + x y`, where `y` is a matrix from `hold`.

        The transpose of the result is computed, because matrix units accept 8 columns, but not 8 rows.
        """
        return tl.trans(tl.dot(tl.trans(y), tl.trans(x), tl.trans(total)))

    @triton.jit
    def _look(counter):
        # Every thread reads the counter. Later reads of the thread then return published values without a barrier.
        return tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", [counter.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )

    @triton.jit
    def arrive(counter):
        tl.debug_barrier()
        tl.atomic_add(counter, 1, sem="release")

    @triton.jit
    def meet():
        """Synchronizes the threads of a program, which can then read values that other threads have stored."""
        tl.debug_barrier()

    @triton.jit
    def wait(counter, goal):
        seen = _look(counter)
        looks = 0
        while (seen < goal) & (looks < 4194304):
            seen = _look(counter)
            looks += 1
        if seen < goal:
            # The condition may differ between threads, so each thread marks the counter itself.
            tl.inline_asm_elementwise(
                "red.release.gpu.global.or.b32 [$1], 0x40000000; mov.u32 $0, 0;",
                "=r,l",
                [counter.to(tl.int64)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )

    @triton.jit
    def gave_up(counter):
        return tl.atomic_add(counter, 0, sem="acquire") >= _GAVE_UP
