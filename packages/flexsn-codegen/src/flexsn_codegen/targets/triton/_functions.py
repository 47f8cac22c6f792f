"""Names of the functions that generated sources call as `dev.<name>`."""

from __future__ import annotations

# Functions with an approximate variant `dev.fast_<name>`, which uses the GPU's approximate instructions for float32.
FAST = ("div", "exp", "exp2", "pow", "sqrt", "tanh")

# Functions of one floating-point argument, with their names in libdevice and in torch.
UNARY: dict[str, tuple[str, str]] = {
    "acos": ("acos", "acos"),
    "acosh": ("acosh", "acosh"),
    "asin": ("asin", "asin"),
    "asinh": ("asinh", "asinh"),
    "atan": ("atan", "atan"),
    "atanh": ("atanh", "atanh"),
    "bessel_i0": ("cyl_bessel_i0", "special.i0"),
    "bessel_i1": ("cyl_bessel_i1", "special.i1"),
    "bessel_j0": ("j0", "special.bessel_j0"),
    "bessel_j1": ("j1", "special.bessel_j1"),
    "bessel_y0": ("y0", "special.bessel_y0"),
    "bessel_y1": ("y1", "special.bessel_y1"),
    "ceil": ("ceil", "ceil"),
    "cos": ("cos", "cos"),
    "cosh": ("cosh", "cosh"),
    "erf": ("erf", "erf"),
    "erf_inv": ("erfinv", "erfinv"),
    "erfc": ("erfc", "erfc"),
    "erfcx": ("erfcx", "special.erfcx"),
    "exp": ("exp", "exp"),
    "exp2": ("exp2", "exp2"),
    "expm1": ("expm1", "expm1"),
    "floor": ("floor", "floor"),
    "lgamma": ("lgamma", "lgamma"),
    "log": ("log", "log"),
    "log10": ("log10", "log10"),
    "log1p": ("log1p", "log1p"),
    "log2": ("log2", "log2"),
    "ndtri": ("normcdfinv", "special.ndtri"),
    "round": ("nearbyint", "round"),
    "rsqrt": ("rsqrt", "rsqrt"),
    "sin": ("sin", "sin"),
    "sinh": ("sinh", "sinh"),
    "tan": ("tan", "tan"),
    "tanh": ("tanh", "tanh"),
    "trunc": ("trunc", "trunc"),
}

# Names of all other functions that both implementations of `dev` define.
_OTHERS = (
    "atan2 div div_by_constant fast_div fast_exp fast_exp2 fast_pow fast_sqrt fast_tanh fmax fmin fmod hypot "
    "inverse_power largest load maximum minimum nextafter pow power round_bfloat16 round_float16 "
    "round_float8_e4m3fn round_float8_e4m3fn_saturating round_float8_e5m2 signbit sqrt store store_bits widen "
)
EXPORTED = [*UNARY, *_OTHERS.split()]
