"""The rules of C++: for each op, an expression for single elements.

All operands of an op have the same dtype, because the tracer inserts all conversions. Half values are float in
registers. After an op on half values, the result is rounded, unless the op always returns the value of an argument.

An expression has the type of the result. C++ computes with narrow integers and bools as int, so expressions of these
types contain a conversion back.
"""

from __future__ import annotations

import math

import torch

from flexsn_codegen.source._dtypes import FLOAT8_DTYPES
from flexsn_codegen.source._numbers import is_product
from flexsn_codegen.targets._base import Op, OpCall
from flexsn_codegen.targets._rule_table import RuleTable
from flexsn_codegen.targets.cpp._literals import cpp_name, literal
from flexsn_graph import ELEMENT_WORD, NORMAL_NUMBER, UNIFORM_NUMBER

_prims, _aten = torch.ops.prims, torch.ops.aten


RULES = RuleTable("dev::", cpp_name)
_rule, _row, _type = RULES.rule, RULES.row, RULES.type_of


def _convert_to_result(call: OpCall, index: int) -> str:
    """The source text of an operand, converted to the result's dtype."""
    number = call.constants[index]
    if number is not None:
        return literal(number, call.result)
    return call.operands[index] if call.is_float else f"{_type(call.result)}({call.operands[index]})"


def _add_functions(names: str, *arguments: str) -> None:
    """Adds the rules of prims on floating-point numbers, which call functions of the same names."""
    for name in names.split():
        _row(name, f"dev::{name}({', '.join(arguments)})")


_row("add", "{0} + {1}", "{t}({0} + {1})", "bool({0} | {1})")
_row("sub", "{0} - {1}", "{t}({0} - {1})")
_row("mul", "{0} * {1}", "{t}({0} * {1})", "bool({0} & {1})")

for _name, _symbol in {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items():
    _text = f"{{0}} {_symbol} {{1}}"
    _row(_name, _text, _text, _text)

for _name, _symbol in {"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}.items():
    _text = f"{{t}}({{0}} {_symbol} {{1}})"
    _row(_name, None, _text, _text)

_row("bitwise_not", None, "{t}(~{0})", "!{0}")
_row("neg", "-{0}", "{t}(-{0})")
_row("reciprocal", "{t}(1) / {0}")
_row("abs", "dev::abs({0})", "dev::abs({0})", "{0}")
_row("sign", "dev::sign({0})", "dev::sign({0})", "{0}")
_row("conj_physical", "{0}", "{0}", "{0}")
_row("where", "{0} ? {1} : {2}", "{0} ? {1} : {2}", "{0} ? {1} : {2}")

for _name, _bool in {"maximum": "|", "minimum": "&", "fmax": "|", "fmin": "&"}.items():
    _text = f"dev::{_name}({{0}}, {{1}})"
    _row(_name, _text, _text, f"bool({{0}} {_bool} {{1}})")

# These ops return integers unchanged.
for _name in ("ceil", "floor", "round", "trunc"):
    _row(_name, f"dev::{_name}({{0}})", "{0}")

_row("div", "{0} / {1}", "dev::int_div({0}, {1})")
_row("fmod", "dev::fmod({0}, {1})", "dev::int_fmod({0}, {1})")
_row("remainder", "dev::remainder({0}, {1})", "dev::int_remainder({0}, {1})")
_row("gcd", None, "dev::gcd({0}, {1})")
_row("shift_left", None, "dev::shift_left({0}, {1})")
_row("shift_right_arithmetic", None, "dev::shift_right({0}, {1})")
_row("isfinite", "dev::abs({0}) < dev::infinity<{t}>()", "true", "true")

_add_functions("acos acosh asin asinh atan atanh cos cosh sin sinh tan tanh", "{0}")
_add_functions("erf erfc exp exp2 expm1 lgamma log log10 log1p log2 rsqrt sqrt", "{0}")
_add_functions("atan2 hypot", "{0}", "{1}")


def _add_special(op: Op, function: str) -> None:
    """Adds the rule of an op that calls a function of `special.h`. The result is floating-point."""
    count = len(op._schema.arguments)

    def rule(call: OpCall) -> str:
        return f"dev::special::{function}({', '.join(_convert_to_result(call, i) for i in range(count))})"

    _rule(op)(rule)


for _name in ("bessel_i0", "bessel_i0e", "bessel_i1", "bessel_i1e", "bessel_j0", "bessel_j1", "spherical_bessel_j0"):
    _add_special(getattr(_prims, _name).default, _name)
for _name in ("digamma", "erf_inv", "erfcx", "igamma", "igammac", "ndtri", "zeta"):
    _add_special(getattr(_prims, _name).default, _name)

# ATen ops that torch does not decompose. If operands are integers, the result is floating-point.
for _name in ("bessel_y0", "bessel_y1"):
    _add_special(getattr(_aten, f"special_{_name}").default, _name)
for _name in ("modified_bessel_i0", "modified_bessel_i1", "modified_bessel_k0", "modified_bessel_k1"):
    _add_special(getattr(_aten, f"special_{_name}").default, _name)
for _name in ("scaled_modified_bessel_k0", "scaled_modified_bessel_k1"):
    _add_special(getattr(_aten, f"special_{_name}").default, _name)
for _kind in "tuvw":
    for _name in (f"chebyshev_polynomial_{_kind}", f"shifted_chebyshev_polynomial_{_kind}"):
        _add_special(getattr(_aten, f"special_{_name}").default, _name)
for _name in ("hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p"):
    _add_special(getattr(_aten, f"special_{_name}").default, _name)


@_rule(_prims.signbit.default)
def _signbit(call: OpCall) -> str:
    x = call.operands[0]
    if call.is_float:
        return f"dev::signbit({x})"
    return "false" if call.is_bool or call.is_unsigned else f"{x} < {call.number(0)}"


@_rule(_prims.pow.default)
def _pow(call: OpCall) -> str:
    x, y = call.operands
    if call.is_bool:
        raise call.refuse("convert to a number first.")
    if not call.is_float:
        return f"dev::int_pow({x}, {y})"
    # These powers are written out, as in eager mode, because pow rounds differently.
    written_out = {
        0.5: f"dev::sqrt({x})",
        2.0: f"{x} * {x}",
        3.0: f"{x} * {x} * {x}",
        -0.5: f"dev::rsqrt({x})",
        -1.0: f"{call.number(1.0)} / {x}",
        -2.0: f"{call.number(1.0)} / ({x} * {x})",
    }
    exponent = call.constants[1]
    if exponent is None:
        return f"dev::pow({x}, {y})"
    if exponent not in written_out and is_product(exponent, call.dtype):
        n, name = int(abs(exponent)), "power" if exponent > 0 else "inverse_power"
        return f"dev::{name}<{n}>({x})"
    return written_out.get(exponent, f"dev::pow({x}, {y})")


@_rule(_prims.convert_element_type.default)
def _convert(call: OpCall) -> str:
    x, target = call.operands[0], _type(call.result)
    if call.result == torch.bool:
        return x if call.is_bool else f"{x} != {call.number(0)}"
    if call.is_float and not call.result.is_floating_point:
        return f"dev::to_integer<{target}>({x})"
    if call.is_bool:  # g++ 12 cannot vectorize the conversion of a bool
        return f"{x} ? {target}(1) : {target}(0)"
    return x if target == _type(call.dtype) else f"{target}({x})"


@_rule(_aten.view.dtype)
def _view_as(call: OpCall) -> str:
    if call.dtype.itemsize != call.result.itemsize or (torch.bool in (call.dtype, call.result) and not call.is_bool):
        raise call.refuse(f"its bits cannot be viewed as {call.result}: a kernel views bits as a dtype of equal width")
    x, half = call.operands[0], {torch.float16: "float16", torch.bfloat16: "bfloat16"}
    if call.result == call.dtype:
        return x
    if FLOAT8_DTYPES & {call.dtype, call.result}:
        raise call.refuse("a kernel does not view float8 as another dtype: pass a view of the tensor to it")
    if call.dtype in half:
        x = f"uint16_t(dev::{'exact_float16' if call.dtype == torch.float16 else 'bfloat16'}_bits({x}))"
    if call.result in half:
        return f"dev::{half[call.result]}_value(uint32_t(uint16_t({x})))"
    return f"__builtin_bit_cast({_type(call.result)}, {x})"


@_rule(_aten.angle.default)
def _angle(call: OpCall) -> str:
    x = call.operands[0]
    pi, zero = (literal(value, call.result) for value in (math.pi, 0.0))
    if not call.is_float:
        return zero if call.is_bool or call.is_unsigned else f"{x} < {call.number(0)} ? {pi} : {zero}"
    return f"{x} < {zero} ? {pi} : {x} != {x} ? {x} : {zero}"


@_rule(_aten.polygamma.default)
def _polygamma(call: OpCall) -> str:
    """The derivative of digamma whose order is the first operand."""
    order = call.constants[0]
    assert isinstance(order, int)
    return f"dev::special::polygamma({order}, {_convert_to_result(call, 1)})"


@_rule(ELEMENT_WORD)
def _element_word(call: OpCall) -> str:
    return f"dev::element_word({', '.join(call.operands)}, {call.keywords['index']})"


@_rule(UNIFORM_NUMBER)
def _uniform_number(call: OpCall) -> str:
    stream, bits = (int(str(call.keywords[name])) for name in ("stream", "bits"))
    scale = literal(2.0**-bits, torch.float32)
    return f"dev::uniform_number({', '.join(call.operands)}, {stream}u, {bits}, {scale})"


@_rule(NORMAL_NUMBER)
def _normal_number(call: OpCall) -> str:
    return f"dev::normal_number({', '.join(call.operands)}, {call.keywords['stream']}u)"
