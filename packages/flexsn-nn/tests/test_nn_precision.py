"""`precision="float32"`: results equal those of a plain loop with a float32 membrane, on every backend."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from flexsn_nn import LIF, PLIF, FlexSN, UnknownNameError

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
backends = pytest.mark.parametrize("backend", ["torch", "hop", "triton"])
halves = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
STEP = (3, 371)


class Decay(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.linspace(0.1, 0.9, STEP[1]))

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = v * self.decay + x
        return h * h, h >= 0.5, h


def draw(steps: int, dtype: torch.dtype) -> Tensor:
    values = torch.randn((steps, *STEP), generator=torch.Generator().manual_seed(0))
    return values.to(DEVICE, dtype).requires_grad_()


@backends
@halves
def test_results_equal_a_loop_with_a_float32_membrane(backend: str, dtype: torch.dtype) -> None:
    core = Decay().to(DEVICE)
    neuron = FlexSN(core, 1, 1, 2, backend=backend, precision="float32", store_state_seqs=True)
    assert neuron.precision == "float32"
    x = draw(6, dtype)
    squares, fired = neuron(x)
    v, rows = torch.zeros(STEP, device=DEVICE), []
    for step in x:
        square, above, v = core(step.float(), v)
        rows.append((square.to(dtype), above, v))
    expected_sequences = [torch.stack(values) for values in zip(*rows, strict=True)]
    for result, value in zip((squares, fired, neuron.state_seqs[0]), expected_sequences, strict=True):
        assert result.dtype == value.dtype
        assert torch.equal(result, value)
    assert neuron.states[0].dtype == torch.float32
    weights = torch.linspace(-1, 1, x.numel(), device=DEVICE).reshape(x.shape).to(dtype)
    grads = torch.autograd.grad((squares * weights).sum(), [x, core.decay])
    expected_grads = torch.autograd.grad((expected_sequences[0] * weights).sum(), [x, core.decay])
    for grad, value in zip(grads, expected_grads, strict=True):
        assert grad.dtype == value.dtype
        torch.testing.assert_close(grad, value)


@backends
def test_results_differ_from_a_half_precision_membrane(backend: str) -> None:
    """Checks that a float32 membrane of 1000 adds 0.25, which a float16 membrane does not."""
    x = torch.full((101, 1), 0.25, dtype=torch.float16, device=DEVICE)
    x[0] = 1000.0
    for precision, final in (("eager", 1000.0), ("float32", 1025.0)):
        neuron = FlexSN(lambda x, v: (x + v, x + v), 1, 1, 1, backend=backend, precision=precision)
        assert neuron(x)[-1].item() == final


@pytest.mark.long(all_but=["dtype0-hop", "dtype1-torch", "dtype1-triton"])
@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_inputs_are_unchanged(backend: str, dtype: torch.dtype) -> None:
    neuron, plain = (LIF(backend=backend, precision=precision) for precision in ("float32", "eager"))
    x = draw(5, dtype)
    assert torch.equal(neuron(x), plain(x))
    assert neuron.states[0].dtype == dtype


@backends
def test_chunks_empty_sequences_single_steps_and_conversions_keep_float32_states(backend: str) -> None:
    neuron = PLIF(backend=backend, precision="float32", v_reset=-0.25).to(DEVICE)
    x = draw(6, torch.float16).detach()
    expected = neuron(x)
    neuron.reset()
    neuron(x[:0]) if backend == "triton" else neuron(x[:1])
    assert neuron.states[0].dtype == torch.float32
    neuron.reset()
    parts = [neuron(x[:4]), neuron(x[4:])]
    assert torch.equal(torch.cat(parts), expected)
    neuron.reset()
    neuron.backend = "torch"
    neuron.step_mode = "s"
    assert torch.equal(torch.stack([neuron(step) for step in x]), expected)
    # The module is now in half precision, but its state becomes float32 again.
    neuron.half()
    assert neuron(x[0]).dtype == torch.float16
    assert neuron.states[0].dtype == torch.float32


def test_copies_keep_the_precision() -> None:
    neuron = FlexSN(Decay(), 1, 1, 2, backend="torch", precision="float32")
    x = draw(3, torch.float16).to("cpu")
    for twin in (copy.deepcopy(neuron), pickle.loads(pickle.dumps(neuron))):
        assert twin.precision == "float32"
        assert isinstance(twin.core, Decay)
        with torch.no_grad():
            twin.core.decay.zero_()
        assert torch.equal(twin(x)[0], x.float().square().half())  # The copy has a separate parameter.
        assert list(twin.state_dict()) == ["core.decay"]


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown precision 'float23'.*Did you mean 'float32'\?"):
        LIF(precision="float23")
