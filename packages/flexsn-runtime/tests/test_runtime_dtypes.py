"""Each input, state and output keeps its own dtype, and each op rounds as in the loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from runtime_cores import DEVICE, STEP, assert_like_the_loop, compiled, hard_lif, loop, program_of, random, soft_lif
from torch import Tensor

from flexsn_graph import StateMismatchError
from flexsn_runtime import DtypeError, LayoutError

HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.long(all_but=["*bfloat16"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_rounds_like_the_loop(dtype: torch.dtype) -> None:
    x, v = random(9, *STEP, dtype=dtype), random(*STEP, dtype=dtype, seed=1)
    assert_like_the_loop(hard_lif, 1, [x], [v])
    # Without a sum over a broadcast dimension, gradients round step by step, as in the loop.
    assert_like_the_loop(soft_lif, 1, [x.requires_grad_()], [v.requires_grad_()], rtol=2e-2)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_state_keeps_half_precision_over_time(dtype: torch.dtype) -> None:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v + x
        return h, h

    # Adding 2**-12 to 1 has no effect in half precision, but adds up in float32.
    x = torch.full((100, 3), 2.0**-12, dtype=dtype, device=DEVICE)
    output, _ = compiled(core, 1, [x], [torch.ones(3, dtype=dtype, device=DEVICE)])
    assert output[-1].tolist() == [1.0, 1.0, 1.0]


def test_float64_equals_the_loop() -> None:
    x, v = random(9, *STEP, dtype=torch.float64), random(*STEP, dtype=torch.float64, seed=1)
    assert_like_the_loop(soft_lif, 1, [x.requires_grad_()], [v.requires_grad_()], rtol=1e-12)


@pytest.mark.long(all_but=["torch.bool", "torch.int8"])
@pytest.mark.parametrize("spikes", [torch.bool, torch.uint8, torch.int8, torch.int64], ids=str)
def test_spikes_of_narrow_dtypes_equal_the_loop(spikes: torch.dtype) -> None:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v * 0.5 + x
        s = h >= 1.0
        return s.to(spikes), torch.where(s, 0.0, h)

    x, v = random(7, *STEP).requires_grad_(), random(*STEP, seed=1).requires_grad_()
    assert_like_the_loop(core, 1, [x], [v])
    spikes_out, state = compiled(core, 1, [x], [v])
    assert not spikes_out.requires_grad
    assert state.requires_grad


def test_integer_and_bool_states_equal_the_loop() -> None:
    def core(x: Tensor, count: Tensor, has_fired: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fired = x > 0.5
        return x * count, count + fired, has_fired | fired

    x = random(7, *STEP).requires_grad_()
    count = torch.arange(STEP[1], device=DEVICE).expand(STEP)
    assert_like_the_loop(core, 1, [x], [count, torch.zeros(STEP, dtype=torch.bool, device=DEVICE)])


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64], ids=str)
def test_integer_inputs_equal_the_loop(dtype: torch.dtype) -> None:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v * 0.5 + x
        return h, h

    x = (random(7, *STEP) > 0).to(dtype)
    assert_like_the_loop(core, 1, [x], [random(*STEP).requires_grad_()])


def test_mixed_precision_equals_the_loop() -> None:
    """Tests a half-precision input and output with a float32 state, as in a spiking network under autocast."""

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v + (x.float() - v) / 2.0
        s = (h - 0.5).clamp(0.0, 1.0)
        return s.to(x.dtype), h * (1.0 - s)

    x = random(7, *STEP, dtype=torch.bfloat16).requires_grad_()
    assert_like_the_loop(core, 1, [x], [random(*STEP, seed=1).requires_grad_()], rtol=2e-2)


@pytest.mark.long(all_but=["*bfloat16"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gradient_of_a_half_parameter_is_summed_in_float32(dtype: torch.dtype) -> None:
    w = torch.ones((), dtype=dtype, device=DEVICE).requires_grad_()

    def core(x: Tensor) -> Tensor:
        return x * w

    # In half precision, a sum of ones does not grow beyond 256 (bfloat16) or 2048 (float16).
    x = torch.ones(1000, 3, dtype=dtype, device=DEVICE)
    compiled(core, 1, [x], [])[0].sum().backward()
    assert w.grad is not None
    assert w.grad.dtype == dtype
    assert w.grad.item() == torch.tensor(3000.0, dtype=dtype).item()


@pytest.mark.parametrize(
    ("x", "v", "old_dtype", "new_dtype"),
    [
        (torch.float32, torch.float16, "float16", "float32"),
        (torch.float64, torch.float32, "float32", "float64"),
        (torch.float32, torch.int64, "int64", "float32"),
    ],
)
def test_promoted_state_is_refused_with_both_dtypes(
    x: torch.dtype, v: torch.dtype, old_dtype: str, new_dtype: str
) -> None:
    state = torch.zeros(STEP, dtype=v, device=DEVICE)
    with pytest.raises(StateMismatchError, match=rf"state 0 .*{old_dtype}.*{new_dtype}.*keeps its shape and dtype"):
        compiled(hard_lif, 1, [random(3, *STEP, dtype=x)], [state])


def test_nan_and_infinities_equal_the_loop() -> None:
    x = random(3, *STEP)
    x[1, 0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    actual, expected = (f(hard_lif, 1, [x], [random(*STEP, seed=1)]) for f in (compiled, loop))
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
        assert torch.equal(a.signbit(), b.signbit())


@pytest.mark.parametrize(
    ("convert", "kind"),
    [
        (Tensor.to_sparse, r"torch\.sparse_coo tensor.* to_dense"),
        (Tensor.to_sparse_csr, r"torch\.sparse_csr tensor.* to_dense"),
        (lambda x: torch.nested.nested_tensor(list(x)), r"nested tensor.* torch\.nested\.to_padded_tensor"),
        (lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged), "nested tensor"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "quantized tensor.* dequantize"),
    ],
    ids=["coo", "csr", "nested", "jagged", "quantized"],
)
@pytest.mark.filterwarnings("ignore")  # these tensors cause warnings about prototypes and deprecations
def test_tensors_without_dense_memory_are_named(convert: Callable[[Tensor], Tensor], kind: str) -> None:
    with pytest.raises(LayoutError, match=f"argument 0 is a {kind}"):
        compiled(hard_lif, 1, [convert(random(6, 5))], [random(5)])


def test_freed_memory_is_named() -> None:
    """Tests tensors whose memory is freed, such as sharded parameters between calls."""
    gain = random(5)

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return x * gain, v

    x, v = random(6, 5), random(5)
    program = program_of(core, [x], [v], 1)
    compiled(program, 1, [x], [v])
    for tensor, message in ((x, "argument 0 is a tensor whose memory was freed"), (gain, "captured tensor 0 is a")):
        size = tensor.untyped_storage().size()
        values = tensor.clone()
        tensor.untyped_storage().resize_(0)
        with pytest.raises(LayoutError, match=message):
            compiled(program, 1, [x], [v])
        tensor.untyped_storage().resize_(size)
        tensor.copy_(values)
        assert torch.equal(compiled(program, 1, [x], [v])[0], x * gain)


def test_dtypes_without_kernels_are_named() -> None:
    narrow = torch.float8_e4m3fnuz
    gain = random(5).to(narrow)
    with pytest.raises(DtypeError, match=r"state 0 is torch\.float8_e4m3fnuz, which kernels do not support"):
        compiled(lambda x, v: (x, v), 1, [random(6, 5)], [random(5).to(narrow)])
    with pytest.raises(DtypeError, match=r"captured tensor 0 is torch\.float8_e4m3fnuz, which kernels do not support"):
        compiled(lambda x, v: (x * gain.to(x.dtype), v), 1, [random(6, 5)], [random(5)])
    with pytest.raises(
        NotImplementedError, match=r"input_0 returns torch\.float8_e4m3fnuz, which Triton does not have"
    ):
        compiled(lambda x, v: (x.to(v.dtype), v), 1, [random(6, 5).to(narrow)], [random(5)])


def test_float8_values_are_converted() -> None:
    """Tests an unchanged state, a captured tensor and an input in float8, in which eager mode cannot compute."""
    for narrow in (torch.float8_e4m3fn, torch.float8_e5m2):
        gain = (4 * random(5)).to(narrow)

        def core(x: Tensor, v: Tensor, gain: Tensor = gain) -> tuple[Tensor, Tensor]:
            return x.to(torch.float32) * gain.to(torch.float32) + v.to(torch.float32), v

        x, v = (8 * random(11, 5)).to(narrow), random(5).to(narrow)
        for a, b in zip(compiled(core, 1, [x], [v]), loop(core, 1, [x], [v]), strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a.to(torch.float32), b.to(torch.float32))
