"""Learned values at the limits of their ranges and beyond: a warning is issued, and gradients move them back."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flexsn_nn
from flexsn_nn import CUBALIF, LI, LIF, Leaky, Recurrent
from flexsn_nn.errors import ParameterError, RangeWarning
from flexsn_nn.functional import within
from flexsn_nn.layer import Delay
from flexsn_nn.neuron import Neuron

# Arguments that constructors require.
REQUIRED: dict[str, dict[str, Any]] = {
    "Alpha": {"alpha": 0.9, "beta": 0.8},
    "Lapicque": {"beta": 0.9, "R": 0.5},
    "Leaky": {"beta": 0.9},
    "Synaptic": {"alpha": 0.9, "beta": 0.8},
    "RLeaky": {"beta": 0.9, "features": 4},
    "RSynaptic": {"alpha": 0.9, "beta": 0.8, "features": 4},
    "RLIF": {"features": 4},
    "RALIF": {"features": 4},
    "RefractoryLIF.rise": {"relative": 2.0, "rise": 0.1},
}


def list_limits() -> Iterator[tuple[type[Neuron], str, float, float]]:
    """Yields `(class, name, limit, beyond)` for each closed limit of a parameter, for neurons with one input."""
    for name in sorted(flexsn_nn.__all__):
        cls = getattr(flexsn_nn, name)
        if not (isinstance(cls, type) and issubclass(cls, Neuron)) or cls is Recurrent or cls.__name__ != name:
            continue
        try:
            neuron = cls(**REQUIRED.get(name, {}))
        except (TypeError, ParameterError):
            continue
        for parameter, limits in neuron._limits.items():
            if "at_least" in limits and neuron.num_inputs == 1:
                yield cls, parameter, float(limits["at_least"]), limits["at_least"] - 0.25
            if limits.get("finite") and neuron.num_inputs == 1:
                yield cls, parameter, 0.0, -0.25
            if "at_most" in limits and neuron.num_inputs == 1:
                yield cls, parameter, float(limits["at_most"]), limits["at_most"] + 0.25


CASES = list(list_limits())
IDS = [f"{cls.__name__}.{name}-{limit:g}" for cls, name, limit, _ in CASES]


def make(cls: type[Neuron], name: str, start: float, backend: str) -> Neuron:
    torch.manual_seed(1)
    arguments = REQUIRED.get(f"{cls.__name__}.{name}", REQUIRED.get(cls.__name__, {}))
    neuron = cls(**arguments, backend=backend)
    neuron.hold(name, nn.Parameter(torch.full((4,), start)))
    return neuron


def compute_gradient(neuron: Neuron, name: str) -> Tensor:
    torch.manual_seed(2)
    x = torch.rand(9, 3, 4) * 2
    results, states = neuron.step(x)
    (sum(((t * torch.rand(t.shape)).sum() for t in states), (results * torch.rand(results.shape)).sum())).backward()
    gradient = getattr(neuron, name).grad
    assert gradient is not None
    return gradient  # type: ignore[no-any-return]


def test_many_limits_are_listed() -> None:
    assert len(CASES) > 20
    expected = {"tau", "beta", "c_decay", "v_decay", "alpha", "relative", "absolute", "rise"}
    assert expected <= {name for _, name, *_ in CASES}


@pytest.mark.filterwarnings("ignore::flexsn_nn.errors.RangeWarning")
@pytest.mark.parametrize(("cls", "name", "limit", "beyond"), CASES, ids=IDS)
def test_the_gradient_beyond_a_limit_is_that_at_the_limit(
    cls: type[Neuron], name: str, limit: float, beyond: float
) -> None:
    """Compares gradients at the limit, beyond it, and inside. `clamp` of torch 2.15 has gradient 0 at two of them."""
    if "finite" in make(cls, name, 0.5, "torch")._limits[name]:
        beyond, limit = -0.25, 0.0
    inside = limit + (1e-6 if beyond < limit else -1e-6)
    inside_gradient = compute_gradient(make(cls, name, inside, "torch"), name)
    if not inside_gradient.any():
        pytest.skip("the result does not depend on the parameter at this limit")
    at_limit = compute_gradient(make(cls, name, limit, "torch"), name)
    outside = compute_gradient(make(cls, name, beyond, "torch"), name)
    assert at_limit.any()
    assert torch.equal(outside, at_limit)


@pytest.mark.filterwarnings("ignore::flexsn_nn.errors.RangeWarning")
@pytest.mark.long(all_but=["cpp-ALIF.beta-0", "cpp-LIF.tau-1", "triton-LIF.tau-1"])
@pytest.mark.parametrize(("cls", "name", "limit", "beyond"), CASES, ids=IDS)
@pytest.mark.parametrize("backend", ["cpp", "triton"])
def test_kernels_have_the_gradients_of_the_loop(
    backend: str, cls: type[Neuron], name: str, limit: float, beyond: float
) -> None:
    for start in (limit, beyond):
        loop = compute_gradient(make(cls, name, start, "torch"), name)
        torch.testing.assert_close(compute_gradient(make(cls, name, start, backend), name), loop, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::flexsn_nn.errors.RangeWarning")
@pytest.mark.parametrize("beyond", [1.0, 1.25])
def test_kernels_on_a_gpu_have_the_gradients_of_the_loop(beyond: float) -> None:
    loop, kernels = (make(Leaky, "beta", beyond, backend).cuda() for backend in ("torch", "triton"))
    x = torch.rand(9, 3, 4, device="cuda")
    for neuron in (loop, kernels):
        neuron(x).sum().backward()
    torch.testing.assert_close(kernels.beta.grad, loop.beta.grad)
    assert loop.beta.grad.any()


@pytest.mark.gpu
def test_a_warning_on_a_gpu_does_not_block_calls() -> None:
    neuron = Leaky(0.5, learn_beta=True).cuda()
    x = torch.rand(4, 3, device="cuda")
    neuron(x)

    def train() -> None:
        for _ in range(200):
            with torch.no_grad():
                neuron.beta.sub_(0.01)  # type: ignore[union-attr]
            neuron(x)
            torch.cuda.synchronize()

    with pytest.warns(RangeWarning, match="Leaky has left its range, .*beta is -"):
        train()


@pytest.mark.filterwarnings("ignore::flexsn_nn.errors.RangeWarning")
@pytest.mark.parametrize(
    ("cls", "name", "beyond"),
    [(Leaky, "beta", -0.25), (Leaky, "beta", 1.25), (CUBALIF, "c_decay", 1.5), (LIF, "tau", 0.5)],
)
def test_an_optimizer_moves_a_value_back_into_its_range(cls: type[Neuron], name: str, beyond: float) -> None:
    neuron = make(cls, name, beyond, "cpp")
    target = make(cls, name, 0.5 if cls is not LIF else 2.5, "torch")
    optimizer = torch.optim.Adam(neuron.parameters(), lr=0.1)
    x = torch.rand(8, 16, 4) * 0.1  # The inputs cause no spikes, so the states are monotonic in the parameter.
    for _ in range(60):
        optimizer.zero_grad()
        (_, ours), (_, theirs) = neuron.step(x), target.step(x)
        sum((a - b.detach()).square().sum() for a, b in zip(ours, theirs, strict=True)).backward()  # type: ignore[union-attr]
        optimizer.step()
    assert "has left its range" not in neuron.explain()


@pytest.mark.filterwarnings("ignore::flexsn_nn.errors.RangeWarning")
@pytest.mark.parametrize(("start", "towards"), [(0.0, 1.5), (-0.75, 1.5), (3.0, 1.5), (4.5, 1.5)])
def test_a_gradient_moves_a_delay_back_into_its_range(start: float, towards: float) -> None:
    delay = Delay(0.0, max_delay=3, learn=True)
    with torch.no_grad():
        delay.delay.fill_(start)  # type: ignore[union-attr]
    x = torch.linspace(0, 1, 20).unsqueeze(1)
    target = Delay(towards, max_delay=3)(x)
    optimizer = torch.optim.Adam(delay.parameters(), lr=0.1)
    for _ in range(80):
        optimizer.zero_grad()
        delay.reset()
        (delay(x) - target).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(delay.delay.detach(), torch.tensor([towards]), atol=0.1, rtol=0)  # type: ignore[union-attr]


def test_one_warning_names_module_and_parameter() -> None:
    neuron = Leaky(0.5, learn_beta=True, backend="cpp")
    x = torch.rand(4, 3)
    neuron(x)
    with torch.no_grad():
        neuron.beta.sub_(0.75)  # type: ignore[union-attr]
    with pytest.warns(RangeWarning, match=r"parameter of Leaky has left its range, .*: beta is -0\.25") as caught:
        neuron(x)
    assert caught[0].filename == __file__
    with torch.no_grad():
        neuron.beta.sub_(0.75)  # type: ignore[union-attr]
    neuron(x)
    neuron.step(x)
    with warnings.catch_warnings(record=True) as warnings_of_copies:
        warnings.simplefilter("always")
        for copied in (copy.deepcopy(neuron), pickle.loads(pickle.dumps(neuron))):
            copied(x)
    assert [warning.category for warning in warnings_of_copies] == [RangeWarning, RangeWarning]


@pytest.mark.parametrize(
    ("module", "call"),
    [
        (lambda: Delay(1.0, learn=True), lambda m, x: m(x)),
        (lambda: LI(tau=nn.Parameter(torch.tensor(1.5))), lambda m, x: m.step(x)),
        (lambda: Recurrent(Leaky(0.5, learn_beta=True), features=3), lambda m, x: m(x)),
        (lambda: Leaky(0.5, learn_beta=True, step_mode="s"), lambda m, x: m(x[0])),
    ],
)
def test_all_modules_and_calls_warn(module: Callable[[], nn.Module], call: Callable[..., object]) -> None:
    layer, x = module(), torch.rand(4, 3)
    call(layer, x)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(-0.5)
    with pytest.warns(RangeWarning, match="has left its range"):
        call(layer, x)


# torch itself uses this function.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:FutureWarning")
def test_within_clamps_values_and_passes_gradients() -> None:
    value = torch.tensor([-0.5, 0.0, 0.25, 1.0, 1.5], dtype=torch.float64, requires_grad=True)
    limited = partial(within, at_least=0, at_most=1)
    assert limited(value).tolist() == [0.0, 0.0, 0.25, 1.0, 1.0]
    (limited(value) * torch.arange(1.0, 6.0)).sum().backward()
    assert value.grad is not None
    assert value.grad.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert within(value) is value
    assert within(torch.tensor([0.0]), above=0).item() > 0
    assert within(torch.tensor([1.0]), below=1).item() < 1
    tangent = torch.func.jvp(limited, (value.detach(),), (torch.ones(5, dtype=torch.float64),))[1]
    assert tangent.tolist() == [1.0] * 5
    assert torch.func.vmap(limited)(value.detach().unsqueeze(1)).flatten().tolist() == [0.0, 0.0, 0.25, 1.0, 1.0]
    inside = torch.rand(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(limited, (inside,))
    assert torch.autograd.gradgradcheck(lambda t: limited(t) ** 2, (inside,))
