"""Weights on a grid: sums are exact in any order, so recurrent layers return equal spikes in all backends."""

from __future__ import annotations

import copy
import hashlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from flexsn_nn import LIF, RLIF, Recurrent, functional, on_grid
from flexsn_nn.errors import ParameterError
from flexsn_nn.exact import is_on_grid, whole_numbers


def find_integers(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Returns the rows as integers, with their exponents. Fails if a row is not on a grid or its sums are not exact."""
    rows = weight.detach().flatten(1).double()
    exponents = torch.zeros(len(rows), dtype=torch.float64)
    for i, row in enumerate(rows):
        for e in range(-60, 100):
            integers = row * 2.0**e
            if torch.equal(integers, integers.round()):
                exponents[i] = e
                break
        else:
            raise AssertionError(f"row {i} is not on a grid")
    integers = rows * 2.0 ** exponents[:, None]
    assert float(integers.abs().max()) < 2 ** (bits - 1)
    assert float(integers.abs().sum(1).max()) < 2**24
    return integers, exponents


@pytest.mark.parametrize("bits", [8, 12, 16])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("features", [1, 7, 4096])
def test_rows_are_integers_whose_sums_are_exact(bits: int, scale: float, features: int) -> None:
    torch.manual_seed(0)
    layer: Any = nn.Linear(features, 9)
    with torch.no_grad():
        layer.weight.mul_(scale * 10.0 ** torch.arange(-4, 5)[:, None])
        layer.bias.mul_(scale)
        layer.weight[3] = 0
    original = layer.weight.detach().clone()
    weight, bias = on_grid(layer, bits=bits)
    integers, exponents = find_integers(layer.weight, bits)
    unit = 2.0**-exponents
    shifted = layer.bias.detach().double() / unit
    assert bool((torch.nn.functional.pad(integers.abs(), (0, 1)).sum(1) + shifted.abs() < 2**24).all())
    change = (layer.weight.detach() - original).abs()
    assert weight.largest_change == float(change.max())
    # The tolerance is half a unit of the coarsest grid that may be necessary. The bits or the sum with the bias
    # determine it.
    total = original.double().abs().sum(1) + layer.parametrizations.bias.original.detach().double().abs()
    coarse = torch.maximum(original.double().abs().amax(1) * 2.0 ** (2 - bits), total * 2.0**-22)
    assert bool((change.double() <= coarse[:, None]).all())
    assert weight.bits == bias.bits == bits
    assert f"{bits} bits" in str(weight)


@pytest.mark.parametrize("value", [1.0, 2.0**-3, 1 - 2.0**-24, 1 + 2.0**-23, 2.0**15, 3.0])
def test_rows_at_powers_of_two_are_on_a_grid(value: float) -> None:
    for features in (1, 2, 512, 1023, 1024):
        layer: Any = nn.Linear(features, 1, bias=False)
        nn.init.constant_(layer.weight, value)
        (report,) = on_grid(layer)
        find_integers(layer.weight, 16)
        assert report.relative_change <= 2.0**-15
        assert is_on_grid(layer.weight)


def test_the_gradient_passes_through_and_torch_removes_the_grid() -> None:
    torch.manual_seed(0)
    layer: Any = nn.Linear(30, 20)
    x = (torch.rand(5, 30) < 0.5).float()
    weight = layer.weight.detach().clone()
    on_grid(layer)
    grid = layer.weight.detach().clone()
    layer(x).sum().backward()
    assert torch.equal(layer.parametrizations.weight.original.grad, x.sum(0).expand(20, 30))
    assert torch.equal(layer.parametrizations.weight.original, weight)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.parametrizations.weight.original.mul_(2)
    assert torch.equal(twin.weight, layer.weight * 2)  # The copy has the grid of its own weight.
    assert torch.equal(layer.weight, grid)
    for name in ("weight", "bias"):
        parametrize.remove_parametrizations(layer, name)
    assert type(layer) is nn.Linear
    assert torch.equal(layer.weight, grid)
    assert is_on_grid(layer.weight)
    assert not is_on_grid(weight)


def test_checkpoints_of_a_layer_on_a_grid_are_loaded() -> None:
    layer, other = nn.Linear(30, 20), nn.Linear(30, 20)
    for module in (layer, other):
        on_grid(module)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer.weight, other.weight)


def test_sums_of_larger_inputs_are_exact() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(1000, 50, bias=False)
    on_grid(layer, largest_input=40)
    integers, _ = find_integers(layer.weight, 16)
    assert float(integers.abs().sum(1).max()) * 40 < 2**24
    s = torch.randint(0, 41, (64, 1000)).float()
    expected = s.double() @ layer.weight.detach().double().t()
    for order in (torch.arange(1000), torch.randperm(1000)):
        assert torch.equal(s[:, order] @ layer.weight[:, order].t(), expected.float())


def test_tensors_without_a_grid_are_refused() -> None:
    layer = nn.Linear(3, 4)
    for bits in (7, 17):
        with pytest.raises(ParameterError, match="bits"):
            on_grid(layer, bits=bits)
    with pytest.raises(ParameterError, match="no parameter or buffer 'V'"):
        on_grid(layer, "V")
    with pytest.raises(ParameterError, match=r"bias is \[4\]"):
        on_grid(layer, "bias")
    with pytest.raises(ParameterError, match="float64"):
        on_grid(nn.Linear(3, 4, dtype=torch.float64))
    with pytest.raises(ParameterError, match="first dimension"):
        on_grid(nn.ConvTranspose2d(3, 4, 3))
    with pytest.raises(ParameterError, match="largest_input"):
        on_grid(layer, largest_input=0)
    on_grid(layer)
    with pytest.raises(ParameterError, match="remove_parametrizations"):
        on_grid(layer)


# -- equal spikes ------------------------------------------------------------------------------------------------------


def make_recurrent(features: int, backend: str, *, bias: bool = False, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    layer: Any = Recurrent(LIF(), features, bias=bias, backend=backend)
    with torch.no_grad():
        layer.recurrent.weight.copy_(torch.randn(features, features) * 2 / math.sqrt(features))
    on_grid(layer.recurrent)
    return layer


def run(layer: nn.Module, x: Tensor) -> Tensor:
    functional.reset_net(layer)
    with torch.no_grad():
        spikes: Tensor = layer(x)
    return spikes


@pytest.mark.parametrize("backend", ["cpp", "torch"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.long(all_but=["False-cpp"])
def test_a_recurrent_layer_has_the_spikes_of_the_loop(backend: str, bias: bool, compiler: None) -> None:
    torch.manual_seed(1)
    x = torch.randn(9, 16, 96) + 0.5
    expected = run(make_recurrent(96, "torch", bias=bias), x)
    layer = make_recurrent(96, backend, bias=bias)
    assert torch.equal(run(layer, x), expected)
    halves = [run(layer, part) for part in x.split(8, 1)]
    assert torch.equal(torch.cat(halves, 1), expected)
    order = torch.randperm(96)
    with torch.no_grad():
        permuted = make_recurrent(96, backend, bias=bias)
        for name, index in (("weight", (order[:, None], order)), ("bias", order)):
            if bias or name == "weight":
                original = permuted.recurrent.parametrizations[name].original
                original.copy_(original[index])
    assert torch.equal(run(permuted, x[..., order]), expected[..., order])
    assert 0.05 < float(expected.mean()) < 0.95


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("one_launch", ["1", "0"])
@pytest.mark.long(all_but=["1"])
def test_kernels_in_triton_have_the_spikes_of_the_loop(one_launch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXSN_ONE_LAUNCH", one_launch)
    torch.manual_seed(1)
    x = torch.randn(7, 9, 48) + 0.5
    assert torch.equal(run(make_recurrent(48, "triton", bias=True), x), run(make_recurrent(48, "torch", bias=True), x))


def test_several_layers_have_equal_spikes_in_any_batch(compiler: None) -> None:
    torch.manual_seed(0)
    layers: list[Any] = [nn.Linear(40, 96), LIF(), nn.Linear(96, 64), LIF(), nn.Linear(64, 32), RLIF(32)]
    for layer in layers[::2]:
        nn.init.normal_(layer.weight, std=0.4)
        on_grid(layer)
    on_grid(layers[5].recurrent)
    net = nn.Sequential(*layers)
    loop = copy.deepcopy(net)
    functional.set_backend(loop, "torch")
    x = (torch.rand(20, 12, 40) < 0.3).float()
    expected = run(loop, x)
    assert torch.equal(run(net, x), expected)
    assert torch.equal(torch.cat([run(net, part) for part in x.split(6, 1)], 1), expected)
    assert 0.02 < float(expected.mean()) < 0.98


def test_a_convolution_on_a_grid_is_exact() -> None:
    torch.manual_seed(0)
    layer: Any = nn.Conv2d(8, 6, 3)
    on_grid(layer)
    s = (torch.rand(3, 8, 9, 9) < 0.3).float()
    expected = nn.functional.conv2d(s.double(), layer.weight.double(), layer.bias.double())
    assert torch.equal(layer(s), expected.float())
    assert torch.equal(layer(s.contiguous(memory_format=torch.channels_last)), expected.float())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_spikes_equal_those_of_other_versions_and_machines(device: str, compiler: None) -> None:
    """Runs weights and inputs that a formula defines. The digest was equal with torch 2.11 and torch 2.15."""
    torch.set_float32_matmul_precision("highest")
    layer: Any = Recurrent(LIF(), 96, bias=False)
    indices = torch.arange(96)
    with torch.no_grad():
        integers = (indices[:, None] * 7919 + indices * 104729 + indices[:, None] * indices * 31) % 1009
        layer.recurrent.weight.copy_((integers - 504) / 1999)
    on_grid(layer.recurrent)
    steps, rows = torch.arange(400)[:, None, None], torch.arange(7)[:, None]
    x = ((steps * 131 + rows * 17 + indices * 977 + steps * indices) % 97).float() / 64
    spikes = run(layer.to(device), x.to(device)).cpu()
    assert 0.05 < float(spikes.mean()) < 0.95
    digest = hashlib.sha256(spikes.to(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    assert digest == "dcde0f2322e62bc8"


@pytest.mark.gpu
@pytest.mark.parametrize("features", [64, 128, 256, 300, 512])
def test_a_gpu_has_the_spikes_of_the_loop_on_a_cpu(features: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_float32_matmul_precision("highest")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(100, 33, features, generator=generator) + 0.5
    expected = run(make_recurrent(features, "torch", bias=True), x)
    layer = make_recurrent(features, "auto", bias=True).cuda()
    assert torch.equal(run(layer, x.cuda()).cpu(), expected)
    assert torch.equal(torch.cat([run(layer, part) for part in x.cuda().split(10, 1)], 1).cpu(), expected)
    monkeypatch.setenv("FLEXSN_ONE_LAUNCH", "0")
    layer = make_recurrent(features, "auto", bias=True).cuda()
    assert torch.equal(run(layer, x.cuda()).cpu(), expected)


@pytest.mark.parametrize("bits", [8, 9, 16])
def test_a_weight_equals_its_integers_times_its_scales(bits: int) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 5, 3)
    with pytest.raises(ParameterError, match=f"not on a grid of {bits} bits"):
        whole_numbers(layer.weight, bits)
    on_grid(layer, bits=bits)
    integers, scales = whole_numbers(layer.weight, bits)
    assert integers.dtype == (torch.int8 if bits == 8 else torch.int16)
    assert torch.equal(integers * scales.view(-1, 1, 1, 1), layer.weight)
    assert torch.equal(scales, torch.exp2(scales.log2().round()))
