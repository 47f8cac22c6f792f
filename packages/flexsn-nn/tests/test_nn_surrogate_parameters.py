"""Parameters of surrogates must be numbers, and forward mode uses the derivative of the backward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsn_nn import ILIF, LIF, FlexSN, surrogate
from flexsn_nn.errors import ParameterError
from flexsn_nn.surrogate import Surrogate
from flexsn_runtime import TransformError

FACTORIES = ["LSO", "SFS"]


def list_parameters() -> Iterator[tuple[str, str]]:
    """Yields `(name, parameter)` for each numeric parameter of classes, functions and factories."""
    for name in surrogate.__all__:
        surrogate_or_function = getattr(surrogate, name)
        if isinstance(surrogate_or_function, type) and surrogate_or_function is not Surrogate:
            yield from ((name, field.name) for field in fields(surrogate_or_function) if field.name != "strict")
        elif not isinstance(surrogate_or_function, type):
            skipped = {"x", "strict", "custom_surrogate_function"}
            yield from ((name, p) for p in inspect.signature(surrogate_or_function).parameters if p not in skipped)


CASES = sorted(set(list_parameters()))
TENSORS: list[Callable[[], Tensor]] = [
    lambda: nn.Parameter(torch.tensor(2.0)),
    lambda: torch.tensor(2.0),
    lambda: torch.tensor([2.0, 3.0]),
    lambda: torch.tensor(2),
]


def test_many_parameters_are_listed() -> None:
    assert len(CASES) > 50
    assert {("ATan", "alpha"), ("fast_sigmoid", "slope"), ("LSO", "slope"), ("triangular", "threshold")} <= set(CASES)


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize(("name", "parameter"), CASES)
def test_a_tensor_is_refused_with_the_name_of_the_parameter(
    name: str, parameter: str, tensor: Callable[[], Tensor]
) -> None:
    surrogate_or_function = getattr(surrogate, name)
    arguments: list[Any] = []
    if not isinstance(surrogate_or_function, type) and name not in FACTORIES and parameter not in ("threshold",):
        arguments = [torch.zeros(3)]
    if (name, parameter) == ("sigmoid", "slope"):
        arguments = []
    expected_name = "leak" if name == "LSO" else parameter
    expected_name = {"triangular.threshold": "height", "sigmoid.slope": "alpha"}.get(
        f"{name}.{parameter}", expected_name
    )
    with pytest.raises(ParameterError, match=rf"^{expected_name} "):
        surrogate_or_function(*arguments, **{parameter: tensor()})


@pytest.mark.filterwarnings("ignore:the core captures parameters:UserWarning")
def test_a_tensor_is_refused_by_custom_classes_and_inside_of_steps() -> None:
    @dataclass(frozen=True)
    class Gauss(Surrogate):
        width: Any = 0.5

        def gradient(self, x: Tensor) -> Tensor:
            return torch.exp(-((x / self.width) ** 2))

    with pytest.raises(ParameterError, match=r"width of a surrogate is a tensor of shape \[1\].*docs/surrogates.md"):
        Gauss(width=nn.Parameter(torch.ones(1)))
    slope = nn.Parameter(torch.tensor(25.0))

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return surrogate.fast_sigmoid(x + v - 1.0, slope=slope), v  # type: ignore[call-overload]

    for backend in ("torch", "cpp"):
        with pytest.raises(ParameterError, match="slope of a surrogate is a tensor"):
            FlexSN(core, 1, 1, 1, backend=backend)(torch.rand(3, 4))


CLASSES = [
    *(surrogate.Sigmoid, surrogate.ATan, surrogate.FastSigmoid, surrogate.Triangular, surrogate.S2NN),
    *(surrogate.LeakyKReLU, surrogate.SquarewaveFourierSeries, surrogate.StraightThrough, surrogate.Tent),
]


# torch itself uses this function.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:FutureWarning")
@pytest.mark.parametrize("cls", CLASSES)
def test_forward_mode_is_the_transpose_of_the_backward(cls: type[Surrogate]) -> None:
    spikes = cls()
    x, tangent = torch.linspace(-2, 2, 9, dtype=torch.float64), torch.rand(9, dtype=torch.float64)
    value, output_tangent = torch.func.jvp(spikes, (x,), (tangent,))[:2]
    assert torch.equal(value, spikes(x))
    torch.testing.assert_close(output_tangent, tangent * spikes.gradient(x))
    with torch.autograd.forward_ad.dual_level():
        dual = spikes(torch.autograd.forward_ad.make_dual(x, tangent))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, output_tangent)
    jacobian = torch.func.jacfwd(spikes)(x)
    torch.testing.assert_close(jacobian, torch.func.jacrev(spikes)(x))


# torch itself uses this function.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:FutureWarning")
@pytest.mark.parametrize("make", [LIF, ILIF])
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_forward_mode_through_a_neuron_equals_the_jacobian(make: Callable[..., FlexSN], backend: str) -> None:
    neuron = make(backend=backend).double()
    x = torch.rand(6, 4, dtype=torch.float64) * 3
    tangent = torch.rand(6, 4, dtype=torch.float64)

    def run(x: Tensor) -> Tensor:
        out = neuron.step(x)[0]
        assert isinstance(out, Tensor)
        return out

    output_tangent = torch.func.jvp(run, (x,), (tangent,))[1]
    jacobian = torch.func.jacrev(run)(x).reshape(24, 24)
    torch.testing.assert_close(output_tangent.flatten(), jacobian @ tangent.flatten())


def test_kernels_refuse_forward_mode() -> None:
    neuron = LIF(backend="cpp")
    with pytest.raises(TransformError, match=r"torch\.func"):
        torch.func.jvp(lambda x: neuron.step(x)[0], (torch.rand(6, 4),), (torch.rand(6, 4),))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(TransformError, match="forward_ad"):
        neuron.step(torch.autograd.forward_ad.make_dual(torch.rand(6, 4), torch.rand(6, 4)))
