"""Sources of kernels with all functions that the kernels call, for compilers that copy kernels into generated code.

Inductor copies a kernel, and the `@triton.jit` functions that the kernel calls by a plain name, into the module that it
generates. It does not find functions of modules, such as `dev.exp`, and it compiles with fused multiply-add. Therefore,
the functions are copied under new names into the kernel's source, and products are rounded before a sum uses them.
"""

from __future__ import annotations

import ast
import types
from typing import Any

import triton

from flexsn_codegen.source._cache import compile_triton_code_str
from flexsn_codegen.targets.triton._triton_private import launches_on_nvidia

HEADER = """import triton
import triton.language as tl
from triton.language.extra import libdevice
"""
# libdevice.mul_rn is not used for float32, because subnormal products become zero when Inductor compiles it.
_ROUNDED_PRODUCT = """@triton.jit
def rounded_product(x, y):
    if x.dtype == tl.float32:
        return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, True, 1)
    elif x.dtype == tl.float64:
        return libdevice.mul_rn(x, y)
    else:
        return x * y
"""
# Inductor's generated modules also define these names.
_SHARED_NAMES = frozenset({"triton", "tl", "libdevice"})


def standalone(kernel: Any) -> Any:
    """Rewrites a kernel, a `triton.JITFunction`, so that its module contains all functions that it calls."""
    # For AMD GPUs, products are not rounded, because `rounded_product` is written in PTX. Products and sums may then
    # be fused.
    linker = _Linker(kernel, rounds=launches_on_nvidia())
    return compile_triton_code_str(linker.source(), kernel.fn.__name__)


def linked(kernel: Any) -> dict[str, str]:
    """Sources of a kernel and of the functions that it calls, by name, for launches without fused multiply-add."""
    return _Linker(kernel, rounds=False).written


class _Linker:
    def __init__(self, kernel: Any, *, rounds: bool) -> None:
        self._kernel = kernel
        self._rounds = rounds
        self.written: dict[str, str] = {}
        self._add(kernel)

    def source(self) -> str:
        # The kernel is the last entry, after the functions that it calls.
        rounded_product = [_ROUNDED_PRODUCT] if self._rounds else []
        return "\n\n".join([HEADER, *rounded_product, *self.written.values()]) + "\n"

    def _add(self, function: Any) -> str:
        name = self._name(function)
        if name in self.written:
            return name
        tree = ast.parse(function.src)
        rounds = self._rounds and function is not self._kernel  # the kernel itself only multiplies sizes
        linked = _Linked(function.fn.__globals__, self._add, rounds=rounds).visit(tree)
        linked.body[0].name = name
        self.written[name] = f"@triton.jit{self._list_options(function)}\n{ast.unparse(linked)}"
        return name

    def _name(self, function: Any) -> str:
        same_module = function.fn.__module__ == self._kernel.fn.__module__
        return str(function.fn.__name__) if same_module else f"dev_{function.fn.__name__}"

    def _list_options(self, function: Any) -> str:
        return '(do_not_specialize=["T"])' if function is self._kernel else ""


class _Linked(ast.NodeTransformer):
    """Replaces references to functions by the names that `add` returns."""

    def __init__(self, names: dict[str, Any], add: Any, *, rounds: bool) -> None:
        self._names = names
        self._add = add
        self._rounds = rounds

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id not in _SHARED_NAMES:
            module = self._names.get(node.value.id)
            if isinstance(module, types.ModuleType):
                return self._reference(getattr(module, node.attr))
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        value = self._names.get(node.id)
        return self._reference(value) if isinstance(value, triton.JITFunction) else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        # Products with constants remain unchanged, because constants have no dtype.
        numbers = any(isinstance(side, ast.Constant) for side in (node.left, node.right))
        if not self._rounds or not isinstance(node.op, ast.Mult) or numbers:
            return node
        return ast.Call(ast.Name("rounded_product"), [node.left, node.right], [])

    def _reference(self, function: Any) -> ast.Name:
        assert isinstance(function, triton.JITFunction), f"{function} is not a function that kernels can call"
        return ast.Name(self._add(function))
