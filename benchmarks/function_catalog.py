"""Functions of kinds that are often fused, written as in real projects.

A row consists of a function and a description of its arguments. The row also lists the arguments that the function
writes to, so that these arguments can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Shapes that fill several blocks of a kernel. Their sizes are not multiples of a block.
ROWS, WIDTH = 37, 24


@dataclass(frozen=True, slots=True)
class Values:
    """A tensor argument: values from `low` to `high`, in the requested dtype.

    Attributes:
        whole: True if the values are integers.
        dtype: dtype that is used instead of the requested dtype.
        requires_grad: True if the gradient of the argument is compared.
    """

    low: float = -3.0
    high: float = 3.0
    shape: tuple[int, ...] = (ROWS, WIDTH)
    whole: bool = False
    dtype: torch.dtype | None = None
    requires_grad: bool = True

    def make(self, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        values = torch.rand(self.shape, generator=generator, dtype=torch.float64)
        values = values * (self.high - self.low) + self.low
        return (values.floor() if self.whole else values).to(self.dtype or dtype)


def signal(*shape: int) -> Values:
    """Returns values from -3 to 3."""
    return Values(shape=shape or (ROWS, WIDTH))


def positive(*shape: int) -> Values:
    return Values(0.1, 3.0, shape or (ROWS, WIDTH))


def share(*shape: int) -> Values:
    """Returns values between 0 and 1."""
    return Values(0.02, 0.98, shape or (ROWS, WIDTH))


def data(low: float = -3.0, high: float = 3.0, *shape: int) -> Values:
    """Returns values that require no gradient."""
    return Values(low, high, shape or (ROWS, WIDTH), requires_grad=False)


def labels(count: int = 2, *shape: int) -> Values:
    """Returns 0, 1, … `count - 1`, as floating-point numbers."""
    return Values(0, count, shape or (ROWS, WIDTH), whole=True, requires_grad=False)


def integers(low: int, high: int, dtype: torch.dtype = torch.int64, *shape: int) -> Values:
    return Values(low, high, shape or (ROWS, WIDTH), whole=True, dtype=dtype, requires_grad=False)


@dataclass(frozen=True, slots=True)
class Row:
    """One function.

    Attributes:
        name: name of the function.
        kind: purpose of the function.
        call: the function.
        arguments: `Values`, and numbers that are passed unchanged.
        writes: positions of the arguments that the function writes to.
        gradient: True if the function has a gradient.
    """

    name: str
    kind: str
    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    writes: tuple[int, ...] = ()
    gradient: bool = True


ROWS_BY_NAME: dict[str, Row] = {}


class _Kind:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(
        self, *arguments: Any, writes: Sequence[int] = (), gradient: bool = True
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def decorate(call: Callable[..., Any]) -> Callable[..., Any]:
            row = Row(call.__name__, self.name, call, arguments, tuple(writes), gradient and not writes)
            assert row.name not in ROWS_BY_NAME
            ROWS_BY_NAME[row.name] = row
            return call

        return decorate


# -- activations -----------------------------------------------------------------------------------------------

activation = _Kind("activation")


@activation(signal())
def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


@activation(signal())
def gelu_erf(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


@activation(signal())
def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


@activation(signal())
def swish(x: Tensor) -> Tensor:
    return x * x.sigmoid()


@activation(signal(), Values(0.5, 2.0, (WIDTH,)))
def learnable_swish(x: Tensor, beta: Tensor) -> Tensor:
    return x * torch.sigmoid(beta * x)


@activation(signal())
def mish(x: Tensor) -> Tensor:
    return x * torch.tanh(functional.softplus(x))


@activation(signal())
def hard_swish(x: Tensor) -> Tensor:
    return x * functional.relu6(x + 3.0) / 6.0


@activation(signal())
def hard_mish(x: Tensor) -> Tensor:
    return 0.5 * x * (x + 2.0).clamp(min=0.0, max=2.0)


@activation(signal())
def squared_relu(x: Tensor) -> Tensor:
    return torch.square(functional.relu(x))


@activation(signal(), signal(1, WIDTH), signal(1, WIDTH))
def snake(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    alpha, beta = torch.exp(alpha), torch.exp(beta)
    return x + (1.0 / (beta + 1e-9)) * torch.pow(torch.sin(x * alpha), 2)


@activation(signal())
def selu(x: Tensor) -> Tensor:
    scale, alpha = 1.0507009873554805, 1.6732632423543772
    return scale * torch.where(x >= 0.0, x, alpha * (torch.exp(x) - 1.0))


@activation(signal())
def star_relu(x: Tensor) -> Tensor:
    return 0.8944 * functional.relu(x) ** 2 - 0.4472


@activation(signal())
def serf(x: Tensor) -> Tensor:
    return x * torch.erf(torch.log1p(torch.exp(x)))


@activation(signal())
def tanh_exp(x: Tensor) -> Tensor:
    return torch.where(x > 20.0, x, x * torch.tanh(torch.exp(x.clamp(max=20.0))))


@activation(signal())
def logit_softcap(x: Tensor) -> Tensor:
    return 30.0 * torch.tanh(x / 30.0)


@activation(signal(), positive(1))
def telu_with_gate(x: Tensor, gate: Tensor) -> Tensor:
    return x * torch.tanh(torch.exp(x)) * gate


@activation(signal(), signal(WIDTH), signal(WIDTH), Values(0.2, 1.0, (1,)))
def dynamic_tanh(x: Tensor, weight: Tensor, bias: Tensor, alpha: Tensor) -> Tensor:
    return torch.tanh(alpha * x) * weight + bias


# -- slices of a dimension --------------------------------------------------------------------------------------

gated = _Kind("gated, cells")


@gated(signal(ROWS, 2 * WIDTH))
def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


@gated(signal(ROWS, 2 * WIDTH))
def geglu(x: Tensor) -> Tensor:
    x, gate = torch.chunk(x, 2, -1)
    return x * functional.gelu(gate)


@gated(signal(ROWS, 2 * WIDTH))
def glu(x: Tensor) -> Tensor:
    return functional.glu(x, dim=-1)


@gated(signal(ROWS, 2 * WIDTH))
def clamped_swiglu(x: Tensor) -> Tensor:
    gate, linear = x[..., ::2], x[..., 1::2]
    gate = gate.clamp(max=7.0)
    linear = linear.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (linear + 1.0)


@gated(signal(3, 2 * 8, 5, 7))
def simple_gate_of_channels(x: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, dim=1)
    return x1 * x2


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


@gated(signal(2, 3, 7, 16), data(-1, 1, 7, 16), data(-1, 1, 7, 16))
def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos) + (rotate_half(x) * sin)


@gated(signal(2, 3, 7, 16), signal(2, 1, 7, 16), data(-1, 1, 7, 16), data(-1, 1, 7, 16))
def rotary_of_queries_and_keys(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


@gated(signal(2, 7, 3, 16), data(-1, 1, 7, 1, 8), data(-1, 1, 7, 1, 8))
def rotary_of_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.float().chunk(2, -1) if x.dtype != torch.float64 else x.chunk(2, -1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).type_as(x)


@gated(signal(2, 7, 3, 16), data(-1, 1, 7, 1, 8), data(-1, 1, 7, 1, 8))
def rotary_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


@gated(signal(2, 7, 24), data(-1, 1, 7, 16), data(-1, 1, 7, 16))
def rotary_of_a_part(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated, rest = x[..., :16], x[..., 16:]
    return torch.cat((rotated * cos + rotate_half(rotated) * sin, rest), dim=-1)


@gated(signal(ROWS, 4 * WIDTH), signal(4 * WIDTH), signal(ROWS, WIDTH))
def lstm_cell(gates: Tensor, bias: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = (gates + bias).chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


@gated(signal(ROWS, 3 * WIDTH), signal(ROWS, 3 * WIDTH), signal(ROWS, WIDTH))
def gru_cell(gi: Tensor, gh: Tensor, h: Tensor) -> Tensor:
    i_r, i_z, i_n = gi.chunk(3, 1)
    h_r, h_z, h_n = gh.chunk(3, 1)
    reset = torch.sigmoid(i_r + h_r)
    update = torch.sigmoid(i_z + h_z)
    new = torch.tanh(i_n + reset * h_n)
    return new + update * (h - new)


@gated(signal(), signal(), signal())
def minimal_gru_cell(x: Tensor, z: Tensor, h: Tensor) -> Tensor:
    forget = torch.sigmoid(z)
    return (1.0 - forget) * h + forget * torch.tanh(x)


@gated(signal(ROWS, 4), signal(ROWS, 4))
def quaternion_product(p: Tensor, q: Tensor) -> Tensor:
    a, b, c, d = p.unbind(-1)
    e, f, g, h = q.unbind(-1)
    return torch.stack(
        (
            a * e - b * f - c * g - d * h,
            a * f + b * e + c * h - d * g,
            a * g - b * h + c * e + d * f,
            a * h + b * g - c * f + d * e,
        ),
        dim=-1,
    )


@gated(share(ROWS, 4), share(ROWS, 4))
def box_iou_of_pairs(a: Tensor, b: Tensor) -> Tensor:
    ax1, ay1, aw, ah = a[:, 0], a[:, 1], a[:, 2], a[:, 3]
    bx1, by1, bw, bh = b[:, 0], b[:, 1], b[:, 2], b[:, 3]
    left, right = torch.maximum(ax1, bx1), torch.minimum(ax1 + aw, bx1 + bw)
    top, bottom = torch.maximum(ay1, by1), torch.minimum(ay1 + ah, by1 + bh)
    overlap = (right - left).clamp(min=0) * (bottom - top).clamp(min=0)
    return overlap / (aw * ah + bw * bh - overlap + 1e-6)


# -- losses ----------------------------------------------------------------------------------------------------

loss = _Kind("loss")


@loss(signal(), labels())
def sigmoid_focal_loss(logits: Tensor, target: Tensor) -> Tensor:
    p = torch.sigmoid(logits)
    ce = functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
    p_t = p * target + (1 - p) * (1 - target)
    alpha_t = 0.25 * target + 0.75 * (1 - target)
    return alpha_t * ce * (1 - p_t) ** 2.0


@loss(signal(), data())
def charbonnier(x: Tensor, y: Tensor) -> Tensor:
    return torch.sqrt((x - y) ** 2 + 1e-6)


@loss(signal(), data())
def log_cosh(x: Tensor, y: Tensor) -> Tensor:
    difference = x - y
    return difference + functional.softplus(-2.0 * difference) - math.log(2.0)


@loss(signal(), data())
def huber(x: Tensor, y: Tensor) -> Tensor:
    error = (x - y).abs()
    quadratic = error.clamp(max=1.0)
    return 0.5 * quadratic**2 + (error - quadratic)


@loss(signal(), data())
def wing_loss(x: Tensor, y: Tensor) -> Tensor:
    width, curvature = 10.0, 2.0
    error = (x - y).abs()
    offset = width - width * math.log(1.0 + width / curvature)
    return torch.where(error < width, width * torch.log(1.0 + error / curvature), error - offset)


@loss(signal(), data())
def quantile_loss(x: Tensor, y: Tensor) -> Tensor:
    error = y - x
    return torch.max(0.9 * error, (0.9 - 1.0) * error)


@loss(signal(), data(), positive())
def gaussian_nll(mean: Tensor, target: Tensor, variance: Tensor) -> Tensor:
    return functional.gaussian_nll_loss(mean, target, variance, full=True, reduction="none")


@loss(signal(), data(), signal())
def gaussian_nll_by_hand(mean: Tensor, target: Tensor, log_variance: Tensor) -> Tensor:
    return 0.5 * (log_variance + (target - mean) ** 2 * torch.exp(-log_variance) + math.log(2 * math.pi))


@loss(signal(), signal())
def kl_to_standard_normal(mean: Tensor, log_variance: Tensor) -> Tensor:
    return -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp())


@loss(signal(), labels(8))
def poisson_nll(log_rate: Tensor, count: Tensor) -> Tensor:
    return functional.poisson_nll_loss(log_rate, count, full=True, reduction="none")


@loss(signal(), signal(), labels(9))
def negative_binomial_nll(mu: Tensor, dispersion: Tensor, count: Tensor) -> Tensor:
    mu, r = torch.exp(mu), torch.exp(dispersion)
    log_p = torch.lgamma(count + r) - torch.lgamma(r) - torch.lgamma(count + 1)
    return -(log_p + r * torch.log(r / (r + mu)) + count * torch.log(mu / (r + mu)))


@loss(signal(), signal(), signal(), data())
def student_t_nll(df: Tensor, loc: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    df, scale = 2.0 + functional.softplus(df), functional.softplus(scale)
    y = (x - loc) / scale
    constant = torch.lgamma(0.5 * df) + 0.5 * torch.log(df * math.pi) + torch.log(scale)
    return 0.5 * (df + 1.0) * torch.log1p(y**2 / df) + constant - torch.lgamma(0.5 * (df + 1.0))


@loss(share(), labels())
def binary_cross_entropy(p: Tensor, target: Tensor) -> Tensor:
    return functional.binary_cross_entropy(p, target, reduction="none")


@loss(signal(), labels())
def hinge_squared(score: Tensor, target: Tensor) -> Tensor:
    return functional.relu(1.0 - (2.0 * target - 1.0) * score) ** 2


@loss(share(), share())
def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    m = 0.5 * (p + q)
    return 0.5 * (torch.xlogy(p, p / m) + torch.xlogy(q, q / m))


@loss(signal(), signal(), data(), 0.2)
def clipped_policy_loss(new: Tensor, old: Tensor, advantage: Tensor, epsilon: float) -> Tensor:
    ratio = torch.exp(new - old.detach())
    clipped = torch.clamp(ratio, 1.0 - epsilon, 1.0 + epsilon)
    return -torch.min(ratio * advantage, clipped * advantage)


@loss(signal(), data())
def dpo(chosen: Tensor, rejected: Tensor) -> Tensor:
    return -functional.logsigmoid(0.1 * (chosen - rejected))


@loss(signal(), data())
def barron_robust(x: Tensor, y: Tensor) -> Tensor:
    squared = ((x - y) / 0.5) ** 2
    return torch.expm1(0.25 * torch.log1p(squared))


# -- optimizer steps -------------------------------------------------------------------------------------------

step = _Kind("optimizer step")


@step(signal(), data(), data(-1, 1), data(0, 1), 1e-3, 0.9, 0.999, 1e-8, 0.01, 3, writes=(0, 2, 3))
def adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    param.mul_(1 - lr * weight_decay)
    exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    bias_correction1 = 1 - beta1**step
    bias_correction2 = 1 - beta2**step
    denominator = (exp_avg_sq.sqrt() / math.sqrt(bias_correction2)).add_(eps)
    param.addcdiv_(exp_avg, denominator, value=-lr / bias_correction1)


@step(signal(), data(), data(-1, 1), data(0, 1), writes=(0, 2, 3))
def adam(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    exp_avg.lerp_(grad, 0.1)
    exp_avg_sq.mul_(0.999).addcmul_(grad, grad.conj(), value=0.001)
    param.addcdiv_(exp_avg, exp_avg_sq.sqrt().add_(1e-8), value=-1e-3)


@step(signal(), data(), data(-1, 1), 1e-3, 0.9, 0.99, 0.01, writes=(0, 2))
def lion(p: Tensor, grad: Tensor, exp_avg: Tensor, lr: float, beta1: float, beta2: float, wd: float) -> None:
    p.mul_(1 - lr * wd)
    update = exp_avg.clone().mul_(beta1).add(grad, alpha=1 - beta1).sign_()
    p.add_(update, alpha=-lr)
    exp_avg.mul_(beta2).add_(grad, alpha=1 - beta2)


@step(signal(), data(), data(-1, 1), 0.1, 0.9, writes=(0, 2))
def sgd_nesterov(param: Tensor, grad: Tensor, buffer: Tensor, lr: float, momentum: float) -> None:
    grad = grad.add(param, alpha=1e-4)
    buffer.mul_(momentum).add_(grad)
    grad = grad.add(buffer, alpha=momentum)
    param.add_(grad, alpha=-lr)


@step(signal(), data(), data(0, 1), data(-1, 1), 0.01, writes=(0, 2, 3))
def rmsprop(param: Tensor, grad: Tensor, square_avg: Tensor, buffer: Tensor, lr: float) -> None:
    square_avg.mul_(0.99).addcmul_(grad, grad, value=1 - 0.99)
    buffer.mul_(0.9).addcdiv_(grad, square_avg.sqrt().add_(1e-8))
    param.add_(buffer, alpha=-lr)


@step(signal(), data(), data(0, 1), 0.1, writes=(0, 2))
def adagrad(param: Tensor, grad: Tensor, state_sum: Tensor, clr: float) -> None:
    state_sum.addcmul_(grad, grad, value=1)
    param.addcdiv_(grad, state_sum.sqrt().add_(1e-10), value=-clr)


@step(signal(), data(), data(0, 1), data(0, 1), writes=(0, 2, 3))
def adadelta(param: Tensor, grad: Tensor, square_avg: Tensor, acc_delta: Tensor) -> None:
    square_avg.mul_(0.9).addcmul_(grad, grad, value=0.1)
    std = square_avg.add(1e-6).sqrt_()
    delta = acc_delta.add(1e-6).sqrt_().div_(std).mul_(grad)
    acc_delta.mul_(0.9).addcmul_(delta, delta, value=0.1)
    param.add_(delta, alpha=-1.0)


@step(signal(), data(), data(-1, 1), data(0.01, 1), writes=(0, 2, 3))
def adamax(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_inf: Tensor) -> None:
    exp_avg.lerp_(grad, 1 - 0.9)
    torch.maximum(exp_inf.mul_(0.999), grad.abs().add_(1e-8), out=exp_inf)
    param.addcdiv_(exp_avg, exp_inf, value=-2e-3)


@step(signal(), data(), data(-1, 1), data(0.01, 0.1), writes=(0, 2, 3))
def rprop(param: Tensor, grad: Tensor, previous: Tensor, step_size: Tensor) -> None:
    sign = grad.mul(previous).sign()
    factor = torch.where(sign.gt(0), 1.2, torch.where(sign.lt(0), 0.5, 1.0))
    step_size.mul_(factor).clamp_(1e-6, 50)
    grad = torch.where(sign.eq(-1), 0.0, grad)
    param.addcmul_(grad.sign(), step_size, value=-1)
    previous.copy_(grad)


@step(signal(), data(), 0.999, writes=(0,))
def ema(average: Tensor, param: Tensor, decay: float) -> None:
    average.sub_((1.0 - decay) * (average - param))


@step(signal(), data(), data(-1, 1), data(0, 1), writes=(0, 2, 3))
def adan_like(param: Tensor, grad: Tensor, previous: Tensor, second: Tensor) -> None:
    difference = grad - previous
    second.lerp_((grad + 0.92 * difference).square(), 0.01)
    param.sub_(1e-3 * (grad + 0.92 * difference) / (second.sqrt() + 1e-8))
    previous.copy_(grad)


# -- quantisers ------------------------------------------------------------------------------------------------

quantiser = _Kind("quantiser")


@quantiser(signal())
def fake_quantize(x: Tensor) -> Tensor:
    return torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127)


@quantiser(signal(), positive(1))
def straight_through_round(x: Tensor, scale: Tensor) -> Tensor:
    y = x / scale
    return (y + (torch.round(y) - y).detach()) * scale


@quantiser(signal(), positive(1))
def learned_step_size(x: Tensor, scale: Tensor) -> Tensor:
    clipped = (x / scale).clamp(-8, 7)
    return (clipped + (clipped.round() - clipped).detach()) * scale


@quantiser(signal(), positive(ROWS, 1))
def int8_of_rows(x: Tensor, scale: Tensor) -> Tensor:
    return torch.clamp(torch.round(x / scale * 127.0), -128, 127).to(torch.int8)


@quantiser(integers(-128, 128, torch.int8), positive(ROWS, 1), gradient=False)
def dequantize_int8(q: Tensor, scale: Tensor) -> Tensor:
    return q.to(scale.dtype) * scale


@quantiser(signal(), gradient=False)
def ternary(x: Tensor) -> Tensor:
    return torch.where(x > 0.7, 1.0, torch.where(x < -0.7, -1.0, 0.0)).to(x.dtype)


@quantiser(signal(), Values(0.5, 2.5, (1,)))
def pact(x: Tensor, alpha: Tensor) -> Tensor:
    clipped = 0.5 * (x.abs() - (x - alpha).abs() + alpha)
    scale = 15.0 / alpha.detach()
    return clipped + ((clipped * scale).round() / scale - clipped).detach()


@quantiser(Values(-1.0, 1.0), gradient=False)
def mu_law(x: Tensor) -> Tensor:
    magnitude = torch.log1p(255.0 * torch.abs(x)) / math.log1p(255.0)
    return ((torch.sign(x) * magnitude + 1) / 2 * 255.0 + 0.5).to(torch.int64)


@quantiser(Values(-1.0, 1.0))
def mu_law_expand(x: Tensor) -> Tensor:
    return torch.sign(x) * (torch.exp(torch.abs(x) * math.log1p(255.0)) - 1.0) / 255.0


@quantiser(signal(), positive(1), gradient=False)
def float8_round_trip(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).to(x.dtype) * scale


@quantiser(signal(), gradient=False)
def float8_e5m2(x: Tensor) -> Tensor:
    return x.to(torch.float8_e5m2)


@quantiser(integers(0, 16), data(-1, 1, 16), positive(ROWS, 1))
def four_bit_table(index: Tensor, table: Tensor, scale: Tensor) -> Tensor:
    return table[index] * scale


@quantiser(integers(0, 256, torch.uint8), data(-1, 1, 16), gradient=False)
def unpack_two_nibbles(packed: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return table[(packed >> 4).long()], table[(packed & 15).long()]


@quantiser(signal(), data(-1, 1), gradient=False)
def stochastic_rounding(x: Tensor, noise: Tensor) -> Tensor:
    return torch.floor(x * 16.0 + 0.5 * (noise + 1.0)) / 16.0


@quantiser(Values(-1.0, 1.0), gradient=False)
def nearest_of_a_codebook(x: Tensor) -> Tensor:
    boundaries = torch.tensor([-0.75, -0.25, 0.25, 0.75], dtype=x.dtype, device=x.device)
    return torch.bucketize(x, boundaries)


@quantiser(Values(-1.0, 1.0), gradient=False)
def binarize(x: Tensor) -> Tensor:
    return torch.sign(x).masked_fill(x == 0, 1.0)


# -- tone curves and colours ----------------------------------------------------------------------------------

tone = _Kind("tone curve")


@tone(share())
def srgb_to_linear(x: Tensor) -> Tensor:
    return torch.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4)


@tone(share())
def linear_to_srgb(x: Tensor) -> Tensor:
    return torch.where(x <= 0.0031308, 12.92 * x, 1.055 * torch.pow(x.clamp(min=0.0031308), 1 / 2.4) - 0.055)


@tone(positive())
def filmic(x: Tensor) -> Tensor:
    return ((x * (2.51 * x + 0.03)) / (x * (2.43 * x + 0.59) + 0.14)).clamp(0.0, 1.0)


@tone(positive())
def reinhard(x: Tensor) -> Tensor:
    return x * (1.0 + x / 16.0) / (1.0 + x)


@tone(share())
def perceptual_quantizer(x: Tensor) -> Tensor:
    m1, m2, c1, c2, c3 = 0.1593017578125, 78.84375, 0.8359375, 18.8515625, 18.6875
    y = x.pow(m1)
    return ((c1 + c2 * y) / (1 + c3 * y)) ** m2


@tone(share())
def hybrid_log_gamma(x: Tensor) -> Tensor:
    a, b, c = 0.17883277, 0.28466892, 0.55991073
    return torch.where(x <= 1.0 / 12.0, torch.sqrt(3.0 * x), a * torch.log((12.0 * x - b).clamp(min=1e-3)) + c)


@tone(share(), positive(1))
def gamma_correction(x: Tensor, gamma: Tensor) -> Tensor:
    return x.clamp(1e-6, 1.0).pow(1.0 / gamma)


@tone(share(), signal(1), signal(1))
def contrast_and_brightness(x: Tensor, contrast: Tensor, brightness: Tensor) -> Tensor:
    return ((x - 0.5) * torch.exp(contrast) + 0.5 + 0.1 * brightness).clamp(0, 1)


@tone(share(3, 9, 11))
def luminance(image: Tensor) -> Tensor:
    r, g, b = image.unbind(0)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@tone(share(2, 3, 9, 11))
def rgb_to_ycbcr(image: Tensor) -> Tensor:
    r, g, b = image[:, 0], image[:, 1], image[:, 2]
    y = 0.299 * r + 0.587 * g + 0.114 * b
    return torch.stack((y, (b - y) * 0.564 + 0.5, (r - y) * 0.713 + 0.5), 1)


@tone(integers(0, 256, torch.uint8, 3, 9, 11), data(0, 1, 3, 1, 1), data(0.1, 1, 3, 1, 1), gradient=False)
def normalize_bytes(image: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return (image.to(mean.dtype) / 255.0 - mean) / std


@tone(share())
def smoothstep(x: Tensor) -> Tensor:
    t = ((x - 0.2) / 0.6).clamp(0.0, 1.0)
    return t * t * (3.0 - 2.0 * t)


# -- right-hand sides of differential equations ---------------------------------------------------------------

ode = _Kind("ODE")


@ode(signal(), signal(), signal())
def lorenz(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return 10.0 * (y - x), x * (28.0 - z) - y, x * y - 8.0 / 3.0 * z


@ode(signal(ROWS, 3))
def lorenz_of_vectors(state: Tensor) -> Tensor:
    x, y, z = state[..., 0], state[..., 1], state[..., 2]
    return torch.stack([10.0 * (y - x), x * (28.0 - z) - y, x * y - 8.0 / 3.0 * z], dim=-1)


@ode(signal(), signal(), positive(1))
def van_der_pol(x: Tensor, v: Tensor, mu: Tensor) -> tuple[Tensor, Tensor]:
    return v, mu * (1 - x**2) * v - x


@ode(positive(), positive())
def lotka_volterra(prey: Tensor, predator: Tensor) -> tuple[Tensor, Tensor]:
    return prey * (1.5 - predator), predator * (prey - 3.0)


@ode(signal(), signal())
def fitzhugh_nagumo(v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return v - v**3 / 3.0 - w + 0.5, 0.08 * (v + 0.7 - 0.8 * w)


@ode(Values(-80, 40), share(), share(), share())
def hodgkin_huxley(v: Tensor, m: Tensor, h: Tensor, n: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    am = 0.1 * (v + 40.0) / (1.0 - torch.exp(-(v + 40.0) / 10.0))
    bm = 4.0 * torch.exp(-(v + 65.0) / 18.0)
    ah = 0.07 * torch.exp(-(v + 65.0) / 20.0)
    bh = 1.0 / (1.0 + torch.exp(-(v + 35.0) / 10.0))
    an = 0.01 * (v + 55.0) / (1.0 - torch.exp(-(v + 55.0) / 10.0))
    bn = 0.125 * torch.exp(-(v + 65.0) / 80.0)
    current = 120.0 * m**3 * h * (v - 50.0) + 36.0 * n**4 * (v + 77.0) + 0.3 * (v + 54.4)
    return 10.0 - current, am * (1 - m) - bm * m, ah * (1 - h) - bh * h, an * (1 - n) - bn * n


@ode(signal(), signal(), 0.05)
def pendulum_midpoint(angle: Tensor, speed: Tensor, dt: float) -> tuple[Tensor, Tensor]:
    middle = angle + 0.5 * dt * speed
    new = speed - dt * 9.81 * torch.sin(middle)
    return middle + 0.5 * dt * new, new


@ode(signal(), signal(1))
def logistic_runge_kutta(x: Tensor, rate: Tensor) -> Tensor:
    def f(y: Tensor) -> Tensor:
        return rate * y * (1.0 - y / 4.0)

    k1 = f(x)
    k2 = f(x + 0.05 * k1)
    k3 = f(x + 0.05 * k2)
    k4 = f(x + 0.1 * k3)
    return x + 0.1 / 6.0 * (k1 + 2 * k2 + 2 * k3 + k4)


@ode(signal(), signal(), signal(), positive())
def kalman_update(mean: Tensor, measurement: Tensor, log_noise: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    gain = variance / (variance + torch.exp(log_noise))
    return mean + gain * (measurement - mean), (1.0 - gain) * variance


@ode(positive(), positive())
def michaelis_menten(substrate: Tensor, product: Tensor) -> tuple[Tensor, Tensor]:
    rate = 2.0 * substrate / (0.5 + substrate)
    return -rate + 0.1 * product, rate - 0.1 * product


# -- functions of statistics and physics -----------------------------------------------------------------------

science = _Kind("statistics")


@science(signal())
def normal_cdf(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


@science(share())
def normal_quantile(p: Tensor) -> Tensor:
    z: Tensor = torch.special.ndtri(p)
    return z


@science(positive(), positive(), positive(), positive(), gradient=False)
def black_scholes(spot: Tensor, strike: Tensor, years: Tensor, volatility: Tensor) -> Tensor:
    root = volatility * years.sqrt()
    d1 = (torch.log(spot / strike) + (0.02 + 0.5 * volatility**2) * years) / root
    price: Tensor = spot * torch.special.ndtr(d1) - strike * torch.exp(-0.02 * years) * torch.special.ndtr(d1 - root)
    return price


@science(positive(), positive(), gradient=False)
def gamma_cdf(a: Tensor, x: Tensor) -> Tensor:
    return torch.igamma(a, x)


@science(data(0.1, 3), positive())
def gamma_survival(a: Tensor, x: Tensor) -> Tensor:
    upper: Tensor = torch.special.gammaincc(a, x)
    return upper


@science(positive(), positive(), share())
def beta_log_density(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    norm = torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)
    return torch.xlogy(a - 1, x) + (b - 1) * torch.log1p(-x) - norm


@science(signal(), positive())
def von_mises_log_density(angle: Tensor, kappa: Tensor) -> Tensor:
    density: Tensor = kappa * torch.cos(angle) - math.log(2 * math.pi) - torch.log(torch.special.i0e(kappa)) - kappa
    return density


@science(signal(ROWS, WIDTH, 2), data(-1, 1, WIDTH, 2))
def complex_rotation(x: Tensor, rotation: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(rotation))


@science(positive())
def lennard_jones(r: Tensor) -> Tensor:
    sixth = (1.0 / (r + 0.5)) ** 6
    return 4.0 * (sixth**2 - sixth)


@science(signal(), signal())
def great_circle(latitude: Tensor, longitude: Tensor) -> Tensor:
    a = torch.sin(latitude / 2) ** 2 + torch.cos(latitude) * torch.sin(longitude / 2) ** 2
    return 2 * torch.atan2(torch.sqrt(a + 1e-4), torch.sqrt((1 - a).clamp(min=1e-4)))


def rows() -> tuple[Row, ...]:
    """Returns all functions."""
    return tuple(ROWS_BY_NAME.values())
