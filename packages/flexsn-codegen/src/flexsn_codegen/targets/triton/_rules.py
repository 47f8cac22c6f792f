"""The rules of Triton: for each op, an expression for blocks of values.

All operands of an op have the same dtype, because the tracer inserts all conversions. Half values are float32 in
registers. After an op on half values, the result is rounded, unless the op always returns the value of an argument.
"""

from __future__ import annotations

import math

import torch

from flexsn_codegen.source._dtypes import FLOAT8_DTYPES, HALF_DTYPES, register_dtype
from flexsn_codegen.source._numbers import WRITTEN_OUT, is_product, reciprocal
from flexsn_codegen.targets._base import Op, OpCall
from flexsn_codegen.targets._rule_table import RuleTable
from flexsn_codegen.targets.triton._functions import UNARY
from flexsn_codegen.targets.triton._literals import literal, tl_name
from flexsn_graph import ELEMENT_WORD, NORMAL_NUMBER, UNIFORM_NUMBER

_prims = torch.ops.prims


RULES = RuleTable("dev.", tl_name)
_rule, _row = RULES.rule, RULES.row


def _add_float(op: Op, function: str) -> None:
    """Adds the rule of an op that accepts any dtype and always returns a floating-point result."""
    _rule(op)(lambda call: f"dev.{function}({_convert_to_result(call, 0)})")


def _convert_to_result(call: OpCall, index: int) -> str:
    """The source text of an operand, converted to the result's dtype."""
    text = call.operands[index]
    return text if call.is_float else f"{text}.to({RULES.type_of(call.result)})"


def _add_infix(name: str, symbol: str, bools: str | None = None) -> None:
    text = f"{{0}} {symbol} {{1}}"
    _row(name, text, text, bools)


_add_infix("add", "+", bools="{0} | {1}")
_add_infix("sub", "-")
_add_infix("mul", "*", bools="{0} & {1}")

# Bools are compared as int8, because Triton's comparisons on int1 are signed.
_BOOL_AS_INT = "{{0}}.to(tl.int8) {0} {{1}}.to(tl.int8)"
for _name, _symbol in {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items():
    _add_infix(_name, _symbol, bools=_BOOL_AS_INT.format(_symbol))

for _name, _symbol in {"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}.items():
    _row(_name, None, f"{{0}} {_symbol} {{1}}", f"{{0}} {_symbol} {{1}}")

for _name in UNARY:
    if not _name.startswith("bessel_y"):
        _row(_name, f"dev.{_name}({{0}})")

# ATen ops that torch does not decompose. If operands are integers, the result is floating-point.
for _name, _function in {
    "special_bessel_y0": "bessel_y0",
    "special_bessel_y1": "bessel_y1",
    "special_modified_bessel_i0": "bessel_i0",
    "special_modified_bessel_i1": "bessel_i1",
    "special_modified_bessel_k0": "bessel_k0",
    "special_modified_bessel_k1": "bessel_k1",
    "special_scaled_modified_bessel_k0": "bessel_k0e",
    "special_scaled_modified_bessel_k1": "bessel_k1e",
}.items():
    _add_float(getattr(torch.ops.aten, _name).default, _function)


def _add_polynomial(name: str, function: str, *, shifted: bool = False) -> None:
    """Adds the rule of a polynomial. Its argument and its degree are tensors of any dtype, or numbers.

    Args:
        shifted: True for a polynomial on [0, 1] instead of [-1, 1].
    """

    def rule(call: OpCall) -> str:
        pairs = zip(call.operands, call.constants, strict=True)
        x, n = (text if number is None else literal(float(number), torch.float64) for text, number in pairs)
        if shifted:
            x = f"({x}.to(tl.float64) * 2.0 - 1.0)"
        return f"dev.{function}({x}, {n}).to({RULES.type_of(call.result)})"

    _rule(getattr(torch.ops.aten, f"special_{name}").default)(rule)


for _name in "tuvw":
    _add_polynomial(f"chebyshev_polynomial_{_name}", f"chebyshev_{_name}")
    _add_polynomial(f"shifted_chebyshev_polynomial_{_name}", f"chebyshev_{_name}", shifted=True)
for _name in ("hermite_h", "hermite_he", "laguerre_l", "legendre_p"):
    _family, _kind = _name.split("_")
    _add_polynomial(f"{_family}_polynomial_{_kind}", _name)

# These ops return integers unchanged.
for _name in ("ceil", "floor", "round", "trunc"):
    _row(_name, f"dev.{_name}({{0}})", "{0}")

for _name in ("atan2", "hypot"):
    _row(_name, f"dev.{_name}({{0}}, {{1}})")
for _name in ("bessel_i0e", "bessel_i1e", "digamma", "spherical_bessel_j0", "sqrt"):
    _row(_name, f"dev.{_name}({{0}})")
_row("zeta", "dev.zeta({0}, {1})")
_row("igamma", "dev.igamma({0}, {1})")
_row("igammac", "dev.igammac({0}, {1})")
_row("fmod", "dev.fmod({0}, {1})", "dev.int_fmod({0}, {1})")
_row("gcd", None, "dev.gcd({0}, {1})")

for _name, _bool in {"maximum": "{0} | {1}", "minimum": "{0} & {1}"}.items():
    _row(_name, f"dev.{_name}({{0}}, {{1}})", f"tl.{_name}({{0}}, {{1}})", _bool)
for _name, _int, _bool in (("fmax", "maximum", "|"), ("fmin", "minimum", "&")):
    _row(_name, f"dev.{_name}({{0}}, {{1}})", f"tl.{_int}({{0}}, {{1}})", f"{{0}} {_bool} {{1}}")

_row("abs", "tl.abs({0})", "tl.abs({0})", "{0}")
_row("conj_physical", "{0}", "{0}", "{0}")


@_rule(_prims.signbit.default)
def _signbit(call: OpCall) -> str:
    x = call.operands[0]
    return f"dev.signbit({x})" if call.is_float else f"{x} ^ {x}" if call.is_bool else f"{x} < {call.number(0)}"


@_rule(_prims.neg.default)
def _neg(call: OpCall) -> str:
    x = call.operands[0]
    if call.is_bool:
        raise call.refuse("convert to a number first.")
    # For floats, both unary minus and 0 - x lose the sign of -0.
    return f"{x} * {call.number(-1)}" if call.is_float else f"{call.number(0)} - {x}"


@_rule(_prims.sign.default)
def _sign(call: OpCall) -> str:
    x = call.operands[0]
    if call.is_bool:
        return x
    zero, one = call.number(0), call.number(1)
    negative = zero if call.is_unsigned else call.number(-1)
    return f"tl.where({x} > {zero}, {one}, tl.where({x} < {zero}, {negative}, {zero}))"


@_rule(_prims.reciprocal.default)
def _reciprocal(call: OpCall) -> str:
    if not call.is_float:
        raise call.refuse("convert to a floating-point dtype first.")
    return f"dev.div({call.number(1.0)}, {call.operands[0]})"


@_rule(_prims.div.default)
def _div(call: OpCall) -> str:
    x, y = call.operands
    if call.is_bool:
        raise call.refuse("convert to a number first.")
    if not call.is_float:
        return f"dev.int_div({x}, {y})"
    if call.is_number(1) and not call.is_number(0):
        return f"dev.div_by_constant({x}, {y}, {call.number_of(1, reciprocal)})"
    return f"dev.div({x}, {y})"


@_rule(_prims.remainder.default)
def _remainder(call: OpCall) -> str:
    x, y = call.operands
    if call.is_bool:
        raise call.refuse("convert to a number first.")
    if not call.is_float:
        return f"dev.{'int_fmod' if call.is_unsigned else 'int_remainder'}({x}, {y})"
    zero = call.number(0.0)
    mod = f"dev.fmod({x}, {y})"
    differs = f"({mod} != {zero}) & (({y} < {zero}) != ({mod} < {zero}))"
    return f"tl.where({differs}, {mod} + {y}, {mod})"


@_rule(_prims.pow.default)
def _pow(call: OpCall) -> str:
    x, y = call.operands
    if call.is_bool:
        raise call.refuse("convert to a number first.")
    if not call.is_float:
        return f"dev.int_pow({x}, {y})"
    # These powers are written out, as in eager mode, because pow rounds differently.
    written_out = {
        2.0: f"{x} * {x}",
        3.0: f"{x} * {x} * {x}",
        -1.0: f"dev.div({call.number(1.0)}, {x})",
        -2.0: f"dev.div({call.number(1.0)}, {x} * {x})",
        0.5: f"dev.sqrt({x})",
        -0.5: f"dev.rsqrt({x})",
    }
    assert written_out.keys() == WRITTEN_OUT
    exponent = call.constants[1]
    if exponent is None:
        return f"dev.pow({x}, {y})"
    if exponent not in written_out and is_product(exponent, call.dtype):
        n, name = int(abs(exponent)), "power" if exponent > 0 else "inverse_power"
        return f"dev.{name}({x}, {n}, {n.bit_length()})"
    return written_out.get(exponent, f"dev.pow({x}, {y})")


@_rule(_prims.isfinite.default)
def _isfinite(call: OpCall) -> str:
    if not call.is_float:
        return f"{call.operands[0]} == {call.operands[0]}"
    return f"tl.abs({call.operands[0]}) < {call.number(float('inf'))}"


@_rule(_prims.bitwise_not.default)
def _bitwise_not(call: OpCall) -> str:
    # The operator `~` is not used, because it overflows on unsigned integers in the interpreter.
    if call.is_float:
        raise call.refuse("bitwise operations need integers.")
    ones = True if call.is_bool else torch.iinfo(call.dtype).max if call.is_unsigned else -1
    return f"{call.operands[0]} ^ {call.number(ones)}"


@_rule(_prims.shift_left.default)
def _shift_left(call: OpCall) -> str:
    if call.is_float or call.is_bool:
        raise call.refuse("shifts need integers.")
    return f"dev.shift_left({', '.join(call.operands)}, {torch.iinfo(call.dtype).bits})"


@_rule(_prims.shift_right_arithmetic.default)
def _shift_right(call: OpCall) -> str:
    if call.is_float or call.is_bool:
        raise call.refuse("shifts need integers.")
    bits = torch.iinfo(call.dtype).bits
    if call.is_unsigned:
        # A single shift cannot shift out all bits.
        shifted = f"dev.shift_right({', '.join(call.operands)}, {bits - 1})"
        return f"tl.where({call.operands[1]} < {call.number(bits)}, {shifted}, {call.number(0)})"
    return f"dev.shift_right({', '.join(call.operands)}, {bits - 1})"


@_rule(_prims.where.default)
def _where(call: OpCall) -> str:
    condition, x, y = call.operands
    return f"tl.where({condition}, {x}, {y})"


@_rule(_prims.convert_element_type.default)
def _convert(call: OpCall) -> str:
    x = call.operands[0]
    if call.result == torch.bool:
        return x if call.is_bool else f"{x} != {call.number(0)}"
    source, target = register_dtype(call.dtype), register_dtype(call.result)
    if call.is_float and call.result in _NARROW_UNSIGNED:
        # The conversion goes through int64, as in torch, so that a negative number wraps around.
        return f"{x}.to(tl.int64).to({tl_name(target)})"
    text = x if source == target else f"{x}.to({tl_name(target)})"
    if not call.is_float and call.dtype.itemsize >= 4 and call.result in HALF_DTYPES:
        # Without this addition, the compiler merges this conversion with the following conversion to the half dtype,
        # and rounds only once.
        text += f" + {literal(0.0, call.result)}"
    return text


@_rule(torch.ops.aten.view.dtype)
def _view_as(call: OpCall) -> str:
    if call.dtype.itemsize != call.result.itemsize or (torch.bool in (call.dtype, call.result) and not call.is_bool):
        raise call.refuse(f"its bits cannot be viewed as {call.result}: a kernel views bits as a dtype of equal width")
    x, result = call.operands[0], call.result
    if result == call.dtype:
        return x
    if FLOAT8_DTYPES & {call.dtype, result}:
        raise call.refuse("a kernel does not view float8 as another dtype: pass a view of the tensor to it")
    memory = f"({x}).to({tl_name(call.dtype)})" if call.dtype in HALF_DTYPES else x
    text = f"{memory}.to({tl_name(result)}, bitcast=True)"
    return f"{text}.to(tl.float32)" if result in HALF_DTYPES else text


_NARROW_UNSIGNED = {torch.uint8, torch.uint16, torch.uint32}


@_rule(torch.ops.aten.angle.default)
def _angle(call: OpCall) -> str:
    x = call.operands[0]
    text = "tl.full([], {}, " + RULES.type_of(call.result) + ")"
    if not call.is_float:
        negative = f"{x} ^ {x}" if call.is_bool else f"{x} < {call.number(0)}"
        return f"tl.where({negative}, {text.format(math.pi)}, {text.format(0.0)})"
    zero = call.number(0.0)
    return f"tl.where({x} < {zero}, {text.format(math.pi)}, tl.where({x} != {x}, {x}, {zero}))"


@_rule(torch.ops.aten.polygamma.default)
def _polygamma(call: OpCall) -> str:
    """The derivative of digamma of order n: (-1)^(n + 1) n! zeta(n + 1, x) (DLMF 25.11.12)."""
    order = call.constants[0]
    assert isinstance(order, int)
    result = register_dtype(call.result)
    x = _convert_to_result(call, 1)
    if order < 2:
        return f"dev.{('digamma', 'trigamma')[order]}({x})"
    sign = -1.0 if order % 2 == 0 else 1.0
    factor = literal(sign * math.factorial(order), result)
    return f"{factor} * dev.zeta(tl.zeros_like({x}) + {literal(order + 1.0, result)}, {x})"


@_rule(ELEMENT_WORD)
def _element_word(call: OpCall) -> str:
    return f"dev.element_word({', '.join(call.operands)}, {call.keywords['index']})"


@_rule(UNIFORM_NUMBER)
def _uniform_number(call: OpCall) -> str:
    stream, bits = (int(str(call.keywords[name])) for name in ("stream", "bits"))
    return f"dev.uniform_number({', '.join(call.operands)}, {stream}, {bits}, {2.0**-bits!r})"


@_rule(NORMAL_NUMBER)
def _normal_number(call: OpCall) -> str:
    return f"dev.normal_number({', '.join(call.operands)}, {call.keywords['stream']})"
