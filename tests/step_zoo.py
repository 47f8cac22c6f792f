"""Step functions of all kinds of neurons, with any surrogate, and their comparison with a loop.

In all step functions, `x` is the input, `v` the membrane potential, `h` the charged membrane potential, and `s` the
spike. `spike` is 1 where its argument is at least 0.

Numbers that are added to tensors are multiples of 1/8, which are exact in every dtype. Eager mode on the CPU rounds
such a number to the dtype of a half-precision tensor before the addition. Eager mode on CUDA and the kernels do not
round the number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from ulp_distance import ulp_distance, zero_signs_differ

from flexsn_hop import eager_scan
from flexsn_nn import surrogate
from flexsn_nn.surrogate import Surrogate
from flexsn_runtime import ScanProgram, TargetName, prepare, scan

Spike = Callable[[Tensor], Tensor]
Core = Callable[..., tuple[Tensor, ...]]
Make = Callable[..., Core]

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# More than two blocks of the interpreter, and a multiple of the CPU's vector length. Eager mode computes exp and tanh
# by one algorithm in full vectors and by another in the remaining elements of a tensor.
SHAPE = (9, 64)
STEPS = 5


@dataclass(frozen=True, slots=True)
class Step:
    """A step function with one input and one output.

    Attributes:
        make: `(spike, *parameters) -> core(x, *states) -> (output, *states)`.
        num_states: number of states of the core.
        parameters: for each captured parameter, True if it has one value per channel, or False if it has one element.
        exact_on_cpu: False if the step uses functions for which eager mode on the CPU and the interpreter give
            different bits. The interpreter composes such a function from other functions (sigmoid), or computes it for
            one element at a time.
        functions: True if the step uses functions such as exp and tanh. C++ computes them within 2 ulp of the true
            values, as eager mode does, but not with the same bits.
    """

    name: str
    make: Make
    num_states: int = 1
    parameters: tuple[bool, ...] = ()
    exact_on_cpu: bool = True
    functions: bool = False


Combination = tuple[Step, Surrogate, torch.dtype]
STEP_FUNCTIONS: list[Step] = []


def _step(
    num_states: int = 1, parameters: tuple[bool, ...] = (), exact_on_cpu: bool = True, functions: bool = False
) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        name = make.__name__.removeprefix("_")
        STEP_FUNCTIONS.append(Step(name, make, num_states, parameters, exact_on_cpu, functions))
        return make

    return register


@_step()
def _if(spike: Spike) -> Core:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        h = v + x
        s = spike(h - 1.0)
        return s, h * (1.0 - s)

    return core


@_step()
def _lif(spike: Spike) -> Core:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        h = v + (x - v) / 1.7
        s = spike(h - 1.0)
        return s, s * -0.1 + (1.0 - s) * h

    return core


@_step()
def _lif_soft_detached(spike: Spike) -> Core:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        h = v - v / 2.0 + x
        s = spike(h - 0.75)
        return s, h - s.detach() * 0.8

    return core


@_step(parameters=(True,), exact_on_cpu=False)
def _plif(spike: Spike, w: Tensor) -> Core:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        h = v + (x - v) * torch.sigmoid(w)
        s = spike(h - 1.0)
        return s, h * (1.0 - s)

    return core


@_step()
def _qif(spike: Spike) -> Core:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        h = v + (x + v * (v - 0.75)) / 1.7
        s = spike(h - 1.0)
        return s, s * -0.1 + (1.0 - s) * h

    return core


@_step(functions=True)
def _eif(spike: Spike) -> Core:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        h = v + (x - v + 0.7 * torch.exp((v - 0.75) / 0.7)) / 2.0
        s = spike(h - 1.0)
        return s, s * -0.1 + (1.0 - s) * h

    return core


@_step(num_states=2, functions=True)
def _adex(spike: Spike) -> Core:
    def core(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        h = v + (x - v + torch.exp(v - 0.75) - w) / 2.0
        s = spike(h - 1.0)
        u = w + (0.2 * (v + 0.125) - w) / 4.3 + 0.3 * s
        return s, s * -0.1 + (1.0 - s) * h, u

    return core


@_step(num_states=2)
def _izhikevich(spike: Spike) -> Core:
    def core(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        h = v + (x + (v + 0.125) * (v - 0.75) - w) / 2.0
        u = w + (0.3 * (h + 0.125) - w) / 2.3
        s = spike(h - 1.0)
        return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s

    return core


@_step(num_states=2)
def _cubalif(spike: Spike) -> Core:
    def core(x: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        current = 0.5 * i + x
        h = 0.75 * v + current
        s = spike(h - 0.5)
        return s, current, h * (1.0 - s)

    return core


@_step(parameters=(False,))
def _klif(spike: Spike, k: Tensor) -> Core:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        h = torch.relu(k * (v + (x - v) / 2.0))
        s = spike(h - 1.0)
        return s, h / k * (1.0 - s)

    return core


@_step(num_states=2, parameters=(True, True, False), exact_on_cpu=False)
def _gated_lif(spike: Spike, a: Tensor, b: Tensor, c: Tensor) -> Core:
    def core(x: Tensor, v: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        alpha, beta, gamma = torch.sigmoid(a), torch.sigmoid(b), torch.sigmoid(c)
        keep = 1.0 - alpha * 0.75
        h = keep * v + x * (1.0 - beta * 0.5) - keep * v * gamma * s - (1.0 - gamma) * 0.5 * s
        fired = spike(h - 0.5)
        return fired, h, fired

    return core


@_step()
def _ilif(spike: Spike) -> Core:
    """Emits a whole number of spikes: the number of thresholds below `h`."""

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        h = v * 0.25 + x
        s = spike(h - 0.5) + spike(h - 1.5) + spike(h - 2.5)
        return s, h - s

    return core


@_step(parameters=(True,), functions=True)
def _liaf(spike: Spike, threshold: Tensor) -> Core:
    """Returns an analog output. Only the spike resets the membrane."""

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        h = v + (x - v) / 2.0
        return torch.tanh(h - threshold), h - spike(h - threshold) * threshold

    return core


@_step(num_states=2, parameters=(True,), functions=True)
def _alif(spike: Spike, tau: Tensor) -> Core:
    def core(x: Tensor, v: Tensor, a: Tensor) -> tuple[Tensor, ...]:
        h = v + (x - v) / 2.0
        s = spike(h - (0.625 + 1.8 * a))
        return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()) * a + 0.1 * s

    return core


@_step(num_states=2, parameters=(True,))
def _lif_into_li(spike: Spike, weight: Tensor) -> Core:
    """Combines a spiking neuron with the leaky integrator that reads its spikes."""

    def core(x: Tensor, v: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        h = v + (x - v) / 2.0
        s = spike(h - 1.0)
        read = u + (weight * s - u) / 4.0
        return read, h * (1.0 - s), read

    return core


@_step(parameters=(True, False))
def _leaky(spike: Spike, beta: Tensor, threshold: Tensor) -> Core:
    """Resets by subtraction, one step after the spike."""

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        reset = spike(v - threshold).detach()
        h = beta.clamp(0.0, 1.0) * v + x - reset * threshold
        return spike(h - threshold), h

    return core


@_step(num_states=2, parameters=(True, False), exact_on_cpu=False)
def _synaptic(spike: Spike, alpha: Tensor, beta: Tensor) -> Core:
    """Resets to zero, one step after the spike."""

    def core(x: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        reset = spike(v - 0.875).detach()
        current = torch.sigmoid(alpha) * i + x
        h = (torch.sigmoid(beta) * v + current) * (1.0 - reset)
        return spike(h - 0.875), current, h

    return core


@_step(num_states=3, parameters=(True,), exact_on_cpu=False)
def _alpha(spike: Spike, alpha: Tensor) -> Core:
    """Uses a synapse with two exponential traces."""

    def core(x: Tensor, e: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        decay = torch.sigmoid(alpha)
        excite, inhibit = decay * e + x, 0.3 * i - 0.6 * x
        h = (torch.log(decay) / torch.log(decay / 0.3) + 1.0) * (excite + inhibit) + 0.5 * v
        return spike(h - 0.5), excite, inhibit, h

    return core


@_step(parameters=(False,), functions=True)
def _lapicque(spike: Spike, beta: Tensor) -> Core:
    """Uses the membrane equation with a resistance and a capacitance."""

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        rate = torch.nn.functional.softplus(beta)
        h = torch.exp(-rate) * v + 2.0 * rate * x
        s = spike(h - 0.625)
        return s, torch.where(s > 0, torch.zeros_like(h), h)

    return core


@_step(num_states=2, parameters=(True,))
def _recurrent(spike: Spike, weight: Tensor) -> Core:
    def core(x: Tensor, v: Tensor, last: Tensor) -> tuple[Tensor, ...]:
        h = 0.8 * v + x + weight * last
        s = spike(h - 1.0)
        return s, h - s, s

    return core


@_step(num_states=2, exact_on_cpu=False)
def _clif(spike: Spike) -> Core:
    """Resets to a lower potential after recent spikes."""

    def core(x: Tensor, v: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        h = v - v / 2.0 + x
        s = spike(h - 1.0)
        m = m * torch.sigmoid(h / 2.0) + s
        return s, h - s * (1.0 + torch.sigmoid(m)), m

    return core


@_step()
def _ternary(spike: Spike) -> Core:
    """Has two thresholds, and positive and negative spikes."""

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        h = v + (x - 0.75 - v) / 1.7
        up, down = spike(h - 0.5), spike(-h - 0.5)
        s = up - down
        return s, h - s * 0.5

    return core


@_step(num_states=2)
def _refractory(spike: Spike) -> Core:
    """Cannot spike in the two steps after each spike."""

    def core(x: Tensor, v: Tensor, r: Tensor) -> tuple[Tensor, ...]:
        h = v + (x - v) / 2.0
        ready = (r <= 0.0).to(h.dtype)
        s = ready * spike(h - 1.0)
        return s, h * (1.0 - s), torch.where(s > 0.0, 2.0, (r - 1.0).clamp(min=0.0))

    return core


def surrogates() -> list[Surrogate]:
    """Makes one surrogate of each class, with its defaults."""
    classes = {getattr(surrogate, name) for name in surrogate.__all__}
    kinds = [c for c in classes if isinstance(c, type) and issubclass(c, Surrogate) and c is not Surrogate]
    return [c() for c in sorted(kinds, key=lambda c: c.__name__)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Comparison of a kernel with the loop.

    Attributes:
        values: number of elements of all outputs and states of the forward.
        unequal: number of these elements whose bits differ. NaN equals NaN.
        rate: fraction of the outputs that are not 0.
        forward: largest error of an output or state, in units of eps times the largest entry of the tensor.
        gradient: largest error of a gradient of the input or a state, in units of eps times the largest gradient of the
            neuron times the peak of the surrogate. Gradients of this size are summed and may cancel.
        parameter: largest error of the gradient of a captured parameter. The gradient is a sum of n terms. The unit is
            eps times the largest entry of the tensor times the square root of n.
    """

    values: int
    unequal: int
    rate: float
    forward: float
    gradient: float
    parameter: float


def compare(
    step: Step, spike: Surrogate, dtype: torch.dtype, device: str = "cpu", on_cpu: TargetName = "triton"
) -> Outcome:
    """Runs the kernel and the eager loop on equal tensors of one dtype, forward and backward.

    The loss is a weighted sum of all outputs and states. The weights have both signs, and are so small that gradients
    rarely overflow in float16.
    """
    generator = torch.Generator().manual_seed(0)

    def leaf(shape: Sequence[int], low: float, high: float) -> Tensor:
        values = torch.rand(tuple(shape), generator=generator, dtype=torch.float64) * (high - low) + low
        return values.to(device, dtype).requires_grad_()

    parameters = [leaf(SHAPE[-1:] if wide else (), 0.3, 1.2) for wide in step.parameters]
    core = step.make(spike, *parameters)
    arguments = [leaf((STEPS, *SHAPE), -0.5, 2.5), *(leaf(SHAPE, -0.3, 0.9) for _ in range(step.num_states))]
    counts = (1, step.num_states, 1)
    actual = scan(*prepare(ScanProgram(core, *counts, on_cpu=on_cpu), tuple(arguments)), state_seqs=True)
    expected = eager_scan(core, *counts, *arguments)
    weights = [((torch.rand(t.shape, generator=generator) - 0.4) / 64).to(t) for t in expected]
    leaves = [*arguments, *parameters]
    actual_gradients = torch.autograd.grad(actual, leaves, weights)
    expected_gradients = torch.autograd.grad(expected, leaves, weights)
    pairs = list(zip(actual, expected, strict=True))
    count = len(arguments)
    return Outcome(
        values=sum(t.numel() for t in expected),
        unequal=sum(int((ulp_distance(a, b).bool() | zero_signs_differ(a, b)).sum()) for a, b in pairs),
        rate=(expected[0] != 0).double().mean().item(),
        forward=max(_error(a, b, b.double().abs().max()) for a, b in pairs),
        gradient=_gradient_error(actual_gradients[:count], expected_gradients[:count]) / _peak(spike),
        parameter=max(
            (
                _error(a, b, b.double().abs().max()) / math.sqrt(arguments[0].numel() / b.numel())
                for a, b in zip(actual_gradients[count:], expected_gradients[count:], strict=True)
            ),
            default=0.0,
        ),
    )


def _gradient_error(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Returns the error of the gradients of the input `[T, *step]` and the states `[*step]`, in units of eps times the
    largest gradient of the neuron.
    """
    sizes = [g.double().abs() for g in expected]
    largest = torch.stack([sizes[0].amax(0), *sizes[1:]]).amax(0)
    return max(_error(a, b, largest) for a, b in zip(actual, expected, strict=True))


def _error(actual: Tensor, expected: Tensor, size: Tensor) -> float:
    """Returns the largest error of the elements, in units of eps times `size`. The error of an element is infinite if
    only one of the two values is infinite or NaN, and 0 if both values are the same infinity.
    """
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    distance = (actual.double() - expected.double()).abs()
    errors = torch.where(actual == expected, 0.0, distance / (torch.finfo(expected.dtype).eps * size))
    return errors.nan_to_num(math.inf).max().item()


def _peak(spike: Surrogate) -> float:
    """Returns the largest derivative near the threshold, and at least 1."""
    return max(1.0, spike.gradient(torch.linspace(-4.0, 4.0, 801, dtype=torch.float64)).abs().max().item())


# Limit of errors in the units of `Outcome`. The gradients of kernels are rounded in each operation, and are summed in
# another order than the gradients of the loop.
MAX_ERROR = 32.0
# Limit of errors for step functions with functions that are not bitwise exact.
MAX_INEXACT = 64.0


def check(combination: Combination, outcome: Outcome, device: str) -> str:
    """Describes a wrong outcome. Returns an empty text if the outcome is right.

    An outcome is right if its results are bitwise equal to those of the loop, and the errors of its gradients are at
    most `MAX_ERROR`. On the CPU, the attributes of a step function may allow errors of results and gradients up to
    `MAX_INEXACT`.

    Args:
        device: "cuda", "cpu" for the interpreter, or "cpp".
    """
    step, _, dtype = combination
    exact = device == "cuda" or (step.exact_on_cpu and not (device == "cpp" and step.functions))
    limit = MAX_ERROR if exact else MAX_INEXACT
    problems = []
    if outcome.unequal and exact:
        problems.append(f"{outcome.unequal} of {outcome.values} results have other bits")
    if outcome.rate < 0.1:
        problems.append(f"only {outcome.rate:.0%} of the outputs are not 0")
    for name in ("forward", "gradient", "parameter"):
        error = getattr(outcome, name)
        if not error <= limit:
            problems.append(f"{name}: off by {error:.1f} times eps ({dtype})")
    return "; ".join(problems)


def combinations() -> list[Combination]:
    """Returns all combinations of step function, surrogate and dtype."""
    return [(step, spike, dtype) for dtype in DTYPES for step in STEP_FUNCTIONS for spike in surrogates()]


def covering() -> list[Combination]:
    """Returns some of the combinations: each dtype with each step function and each surrogate, in varying pairs."""
    spikes = surrogates()
    shift = len(spikes) // len(DTYPES)
    return [
        (step, spikes[(i + shift * d) % len(spikes)], dtype)
        for d, dtype in enumerate(DTYPES)
        for i, step in enumerate(STEP_FUNCTIONS)
    ]


def label(combination: Combination) -> str:
    step, spike, dtype = combination
    return f"{step.name}-{type(spike).__name__}-{str(dtype).removeprefix('torch.')}"
