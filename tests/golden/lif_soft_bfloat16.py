# Made by: PYTHONPATH=tests hatch run python tests/test_scan_goldens.py
import triton
import triton.language as tl

from flexsn_codegen.targets.triton import device as dev


@triton.jit
def core_step_05ee53277273(input_0, state_0):
    convert_element_type = input_0  # scan_cores.py: h = v + (x - v) / 2.0
    convert_element_type_1 = state_0  # scan_cores.py: h = v + (x - v) / 2.0
    sub = convert_element_type - convert_element_type_1  # scan_cores.py: h = v + (x - v) / 2.0
    convert_element_type_2 = dev.round_bfloat16(sub)  # scan_cores.py: h = v + (x - v) / 2.0
    convert_element_type_3 = convert_element_type_2  # scan_cores.py: h = v + (x - v) / 2.0
    div = dev.div_by_constant(convert_element_type_3, tl.full([], 2.0, tl.float32), tl.full([], 0.5, tl.float32))  # scan_cores.py: h = v + (x - v) / 2.0
    convert_element_type_4 = dev.round_bfloat16(div)  # scan_cores.py: h = v + (x - v) / 2.0
    convert_element_type_5 = convert_element_type_4  # scan_cores.py: h = v + (x - v) / 2.0
    add = convert_element_type_1 + convert_element_type_5  # scan_cores.py: h = v + (x - v) / 2.0
    convert_element_type_6 = dev.round_bfloat16(add)  # scan_cores.py: h = v + (x - v) / 2.0
    convert_element_type_7 = convert_element_type_6  # scan_cores.py: s = spike(h - 1.0)
    sub_1 = convert_element_type_7 - tl.full([], 1.0, tl.float32)  # scan_cores.py: s = spike(h - 1.0)
    convert_element_type_8 = dev.round_bfloat16(sub_1)  # scan_cores.py: s = spike(h - 1.0)
    convert_element_type_9 = convert_element_type_8  # scan_cores.py: return (x >= 0).to(x.dtype)
    ge = convert_element_type_9 >= tl.full([], 0.0, tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type_10 = dev.round_bfloat16(ge.to(tl.float32))  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type_11 = convert_element_type_10  # scan_cores.py: return s, h - reset if soft else h * (1.0 - reset)
    sub_2 = convert_element_type_7 - convert_element_type_11  # scan_cores.py: return s, h - reset if soft else h * (1.0 - reset)
    convert_element_type_12 = dev.round_bfloat16(sub_2)  # scan_cores.py: return s, h - reset if soft else h * (1.0 - reset)
    return convert_element_type_10, convert_element_type_12


@triton.jit(do_not_specialize=["T"])
def core_forward_7ee4fc93c0e4(
    input_0_ptr,
    output_0_ptr,
    final_state_0_ptr,
    T,
    NCL,
    BLOCK: tl.constexpr,
):
    """Forward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    state_0 = tl.zeros([BLOCK], tl.float32)
    input_0_at = input_0_ptr
    output_0_at = output_0_ptr
    chunks = T // 2
    for c in range(0, chunks):
        input_0_0 = dev.load(input_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        output_0, state_0 = core_step_05ee53277273(input_0_0, state_0)
        dev.store(output_0_at + off, output_0, mask)
        output_0, state_0 = core_step_05ee53277273(input_0_1, state_0)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        input_0_at += 2 * step
        output_0_at += 2 * step
    dev.store(final_state_0_ptr + off, state_0, mask)


@triton.jit(do_not_specialize=["T"])
def core_forward_235d66c9bb20(
    input_0_ptr,
    state_0_ptr,
    output_0_ptr,
    state_seq_0_ptr,
    T,
    NCL,
    BLOCK: tl.constexpr,
):
    """Forward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    state_0 = dev.load(state_0_ptr + off, mask)
    input_0_at = input_0_ptr
    output_0_at = output_0_ptr
    state_seq_0_at = state_seq_0_ptr
    chunks = T // 2
    for c in range(0, chunks):
        input_0_0 = dev.load(input_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        output_0, state_0 = core_step_05ee53277273(input_0_0, state_0)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(state_seq_0_at + off, state_0, mask)
        output_0, state_0 = core_step_05ee53277273(input_0_1, state_0)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        dev.store(state_seq_0_at + 1 * step + off, state_0, mask)
        input_0_at += 2 * step
        output_0_at += 2 * step
        state_seq_0_at += 2 * step


@triton.jit
def core_vjp_8f52489017d5(input_0, state_0, grad_output_0, grad_state_0):
    convert_element_type = input_0  # scan_cores.py: h = v + (x - v) / 2.0
    convert_element_type_1 = state_0  # scan_cores.py: h = v + (x - v) / 2.0
    sub = convert_element_type - convert_element_type_1  # scan_cores.py: h = v + (x - v) / 2.0
    convert_element_type_2 = dev.round_bfloat16(sub)  # scan_cores.py: h = v + (x - v) / 2.0
    convert_element_type_3 = convert_element_type_2  # scan_cores.py: h = v + (x - v) / 2.0
    div = dev.div_by_constant(convert_element_type_3, tl.full([], 2.0, tl.float32), tl.full([], 0.5, tl.float32))  # scan_cores.py: h = v + (x - v) / 2.0
    convert_element_type_4 = dev.round_bfloat16(div)  # scan_cores.py: h = v + (x - v) / 2.0
    convert_element_type_5 = convert_element_type_4  # scan_cores.py: h = v + (x - v) / 2.0
    add = convert_element_type_1 + convert_element_type_5  # scan_cores.py: h = v + (x - v) / 2.0
    convert_element_type_6 = dev.round_bfloat16(add)  # scan_cores.py: h = v + (x - v) / 2.0
    convert_element_type_7 = convert_element_type_6  # scan_cores.py: s = spike(h - 1.0)
    sub_1 = convert_element_type_7 - tl.full([], 1.0, tl.float32)  # scan_cores.py: s = spike(h - 1.0)
    convert_element_type_8 = dev.round_bfloat16(sub_1)  # scan_cores.py: s = spike(h - 1.0)
    convert_element_type_9 = convert_element_type_8  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type_13 = grad_state_0  # scan_cores.py: return s, h - reset if soft else h * (1.0 - reset)
    neg = convert_element_type_13 * tl.full([], -1.0, tl.float32)  # scan_cores.py: return s, h - reset if soft else h * (1.0 - reset)
    convert_element_type_14 = dev.round_bfloat16(neg)  # scan_cores.py: return s, h - reset if soft else h * (1.0 - reset)
    convert_element_type_15 = grad_output_0  # scan_cores.py: return s, h - reset if soft else h * (1.0 - reset)
    convert_element_type_16 = convert_element_type_14  # scan_cores.py: return s, h - reset if soft else h * (1.0 - reset)
    add_1 = convert_element_type_15 + convert_element_type_16  # scan_cores.py: return s, h - reset if soft else h * (1.0 - reset)
    convert_element_type_17 = dev.round_bfloat16(add_1)  # scan_cores.py: return s, h - reset if soft else h * (1.0 - reset)
    mul = convert_element_type_9 * tl.full([], 4.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    convert_element_type_18 = dev.round_bfloat16(mul)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    convert_element_type_19 = convert_element_type_18  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    neg_1 = convert_element_type_19 * tl.full([], -1.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    exp = dev.exp(neg_1)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    add_2 = tl.full([], 1.0, tl.float32) + exp  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    div_1 = dev.fast_div(tl.full([], 1.0, tl.float32), add_2)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    convert_element_type_20 = dev.round_bfloat16(div_1)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    convert_element_type_21 = convert_element_type_17  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_1 = convert_element_type_21 * tl.full([], 4.0, tl.float32)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_22 = dev.round_bfloat16(mul_1)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_23 = convert_element_type_22  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_24 = convert_element_type_20  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_2 = convert_element_type_23 * convert_element_type_24  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_25 = dev.round_bfloat16(mul_2)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    sub_3 = tl.full([], 1.0, tl.float32) - convert_element_type_24  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_26 = dev.round_bfloat16(sub_3)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_27 = convert_element_type_25  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_28 = convert_element_type_26  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_3 = convert_element_type_27 * convert_element_type_28  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_29 = dev.round_bfloat16(mul_3)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_30 = convert_element_type_29  # scan_cores.py: s = spike(h - 1.0)
    add_3 = convert_element_type_13 + convert_element_type_30  # scan_cores.py: s = spike(h - 1.0)
    convert_element_type_31 = dev.round_bfloat16(add_3)  # scan_cores.py: s = spike(h - 1.0)
    convert_element_type_32 = convert_element_type_31  # scan_cores.py: h = v + (x - v) / 2.0
    div_2 = dev.div_by_constant(convert_element_type_32, tl.full([], 2.0, tl.float32), tl.full([], 0.5, tl.float32))  # scan_cores.py: h = v + (x - v) / 2.0
    convert_element_type_33 = dev.round_bfloat16(div_2)  # scan_cores.py: h = v + (x - v) / 2.0
    convert_element_type_34 = convert_element_type_33  # scan_cores.py: h = v + (x - v) / 2.0
    neg_2 = convert_element_type_34 * tl.full([], -1.0, tl.float32)  # scan_cores.py: h = v + (x - v) / 2.0
    convert_element_type_35 = dev.round_bfloat16(neg_2)  # scan_cores.py: h = v + (x - v) / 2.0
    convert_element_type_36 = convert_element_type_35  # scan_cores.py: h = v + (x - v) / 2.0
    add_4 = convert_element_type_32 + convert_element_type_36  # scan_cores.py: h = v + (x - v) / 2.0
    convert_element_type_37 = dev.round_bfloat16(add_4)  # scan_cores.py: h = v + (x - v) / 2.0
    return convert_element_type_33, convert_element_type_37


@triton.jit(do_not_specialize=["T"])
def core_backward_88c3756c7e12(
    input_0_ptr,
    state_0_ptr,
    checkpoint_0_ptr,
    grad_output_0_ptr,
    grad_final_state_0_ptr,
    grad_input_0_ptr,
    grad_state_0_ptr,
    T,
    NCL,
    BLOCK: tl.constexpr,
):
    """Backward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    initial_0 = dev.load(state_0_ptr + off, mask)
    grad_state_0 = dev.load(grad_final_state_0_ptr + off, mask)
    chunks = T // 2
    input_0_at = input_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    grad_output_0_at = grad_output_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    grad_input_0_at = grad_input_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    for i in range(0, chunks):
        input_0_at -= 2 * step
        grad_output_0_at -= 2 * step
        grad_input_0_at -= 2 * step
        c = chunks - 1 - i
        state_0_0 = dev.load(checkpoint_0_ptr + (tl.cast(c, tl.int64) - 1) * step + off, mask & (c > 0))
        state_0_0 = tl.where(c > 0, state_0_0, initial_0)
        input_0_0 = dev.load(input_0_at + off, mask)
        grad_output_0_0 = dev.load(grad_output_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        grad_output_0_1 = dev.load(grad_output_0_at + 1 * step + off, mask)
        unused_0, state_0_1 = core_step_05ee53277273(input_0_0, state_0_0)
        result_0, result_1 = core_vjp_8f52489017d5(input_0_1, state_0_1, grad_output_0_1, grad_state_0)
        dev.store(grad_input_0_at + 1 * step + off, result_0, mask)
        grad_state_0 = result_1
        result_0, result_1 = core_vjp_8f52489017d5(input_0_0, state_0_0, grad_output_0_0, grad_state_0)
        dev.store(grad_input_0_at + off, result_0, mask)
        grad_state_0 = result_1
    dev.store(grad_state_0_ptr + off, grad_state_0, mask)


@triton.jit(do_not_specialize=["T"])
def core_forward_27ace8d0a144(
    input_0_ptr,
    state_0_ptr,
    output_0_ptr,
    final_state_0_ptr,
    checkpoint_0_ptr,
    T,
    NCL,
    BLOCK: tl.constexpr,
):
    """Forward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    state_0 = dev.load(state_0_ptr + off, mask)
    input_0_at = input_0_ptr
    output_0_at = output_0_ptr
    chunks = T // 2
    for c in range(0, chunks):
        input_0_0 = dev.load(input_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        dev.store(checkpoint_0_ptr + tl.cast(c * 0 + -1, tl.int64) * step + off, state_0, mask & (c > 0))
        output_0, state_0 = core_step_05ee53277273(input_0_0, state_0)
        dev.store(output_0_at + off, output_0, mask)
        output_0, state_0 = core_step_05ee53277273(input_0_1, state_0)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        input_0_at += 2 * step
        output_0_at += 2 * step
    dev.store(final_state_0_ptr + off, state_0, mask)


@triton.jit
def core_vjp_5388c393dc99(saved_0, grad_output_0, grad_state_0):
    convert_element_type_13 = grad_state_0  # scan_cores.py: return s, h - reset if soft else h * (1.0 - reset)
    neg = convert_element_type_13 * tl.full([], -1.0, tl.float32)  # scan_cores.py: return s, h - reset if soft else h * (1.0 - reset)
    convert_element_type_14 = dev.round_bfloat16(neg)  # scan_cores.py: return s, h - reset if soft else h * (1.0 - reset)
    convert_element_type_15 = grad_output_0  # scan_cores.py: return s, h - reset if soft else h * (1.0 - reset)
    convert_element_type_16 = convert_element_type_14  # scan_cores.py: return s, h - reset if soft else h * (1.0 - reset)
    add_1 = convert_element_type_15 + convert_element_type_16  # scan_cores.py: return s, h - reset if soft else h * (1.0 - reset)
    convert_element_type_17 = dev.round_bfloat16(add_1)  # scan_cores.py: return s, h - reset if soft else h * (1.0 - reset)
    convert_element_type_21 = convert_element_type_17  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_1 = convert_element_type_21 * tl.full([], 4.0, tl.float32)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_22 = dev.round_bfloat16(mul_1)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_23 = convert_element_type_22  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_24 = saved_0  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_2 = convert_element_type_23 * convert_element_type_24  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_25 = dev.round_bfloat16(mul_2)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    sub_3 = tl.full([], 1.0, tl.float32) - convert_element_type_24  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_26 = dev.round_bfloat16(sub_3)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_27 = convert_element_type_25  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_28 = convert_element_type_26  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_3 = convert_element_type_27 * convert_element_type_28  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_29 = dev.round_bfloat16(mul_3)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_30 = convert_element_type_29  # scan_cores.py: s = spike(h - 1.0)
    add_3 = convert_element_type_13 + convert_element_type_30  # scan_cores.py: s = spike(h - 1.0)
    convert_element_type_31 = dev.round_bfloat16(add_3)  # scan_cores.py: s = spike(h - 1.0)
    convert_element_type_32 = convert_element_type_31  # scan_cores.py: h = v + (x - v) / 2.0
    div_2 = dev.div_by_constant(convert_element_type_32, tl.full([], 2.0, tl.float32), tl.full([], 0.5, tl.float32))  # scan_cores.py: h = v + (x - v) / 2.0
    convert_element_type_33 = dev.round_bfloat16(div_2)  # scan_cores.py: h = v + (x - v) / 2.0
    convert_element_type_34 = convert_element_type_33  # scan_cores.py: h = v + (x - v) / 2.0
    neg_2 = convert_element_type_34 * tl.full([], -1.0, tl.float32)  # scan_cores.py: h = v + (x - v) / 2.0
    convert_element_type_35 = dev.round_bfloat16(neg_2)  # scan_cores.py: h = v + (x - v) / 2.0
    convert_element_type_36 = convert_element_type_35  # scan_cores.py: h = v + (x - v) / 2.0
    add_4 = convert_element_type_32 + convert_element_type_36  # scan_cores.py: h = v + (x - v) / 2.0
    convert_element_type_37 = dev.round_bfloat16(add_4)  # scan_cores.py: h = v + (x - v) / 2.0
    return convert_element_type_33, convert_element_type_37


@triton.jit(do_not_specialize=["T"])
def core_backward_87aa22a5f94a(
    saved_0_ptr,
    grad_output_0_ptr,
    grad_final_state_0_ptr,
    grad_input_0_ptr,
    grad_state_0_ptr,
    T,
    NCL,
    BLOCK: tl.constexpr,
):
    """Backward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    grad_state_0 = dev.load(grad_final_state_0_ptr + off, mask)
    chunks = T // 2
    saved_0_at = saved_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    grad_output_0_at = grad_output_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    grad_input_0_at = grad_input_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    for i in range(0, chunks):
        saved_0_at -= 2 * step
        grad_output_0_at -= 2 * step
        grad_input_0_at -= 2 * step
        c = chunks - 1 - i
        saved_0_0 = dev.load(saved_0_at + off, mask)
        grad_output_0_0 = dev.load(grad_output_0_at + off, mask)
        saved_0_1 = dev.load(saved_0_at + 1 * step + off, mask)
        grad_output_0_1 = dev.load(grad_output_0_at + 1 * step + off, mask)
        result_0, result_1 = core_vjp_5388c393dc99(saved_0_1, grad_output_0_1, grad_state_0)
        dev.store(grad_input_0_at + 1 * step + off, result_0, mask)
        grad_state_0 = result_1
        result_0, result_1 = core_vjp_5388c393dc99(saved_0_0, grad_output_0_0, grad_state_0)
        dev.store(grad_input_0_at + off, result_0, mask)
        grad_state_0 = result_1
    dev.store(grad_state_0_ptr + off, grad_state_0, mask)


@triton.jit
def core_step_5d059f6455e6(input_0, state_0):
    convert_element_type = input_0  # scan_cores.py: h = v + (x - v) / 2.0
    convert_element_type_1 = state_0  # scan_cores.py: h = v + (x - v) / 2.0
    sub = convert_element_type - convert_element_type_1  # scan_cores.py: h = v + (x - v) / 2.0
    convert_element_type_2 = dev.round_bfloat16(sub)  # scan_cores.py: h = v + (x - v) / 2.0
    convert_element_type_3 = convert_element_type_2  # scan_cores.py: h = v + (x - v) / 2.0
    div = dev.div_by_constant(convert_element_type_3, tl.full([], 2.0, tl.float32), tl.full([], 0.5, tl.float32))  # scan_cores.py: h = v + (x - v) / 2.0
    convert_element_type_4 = dev.round_bfloat16(div)  # scan_cores.py: h = v + (x - v) / 2.0
    convert_element_type_5 = convert_element_type_4  # scan_cores.py: h = v + (x - v) / 2.0
    add = convert_element_type_1 + convert_element_type_5  # scan_cores.py: h = v + (x - v) / 2.0
    convert_element_type_6 = dev.round_bfloat16(add)  # scan_cores.py: h = v + (x - v) / 2.0
    convert_element_type_7 = convert_element_type_6  # scan_cores.py: s = spike(h - 1.0)
    sub_1 = convert_element_type_7 - tl.full([], 1.0, tl.float32)  # scan_cores.py: s = spike(h - 1.0)
    convert_element_type_8 = dev.round_bfloat16(sub_1)  # scan_cores.py: s = spike(h - 1.0)
    convert_element_type_9 = convert_element_type_8  # scan_cores.py: return (x >= 0).to(x.dtype)
    ge = convert_element_type_9 >= tl.full([], 0.0, tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type_10 = dev.round_bfloat16(ge.to(tl.float32))  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type_11 = convert_element_type_10  # scan_cores.py: return s, h - reset if soft else h * (1.0 - reset)
    sub_2 = convert_element_type_7 - convert_element_type_11  # scan_cores.py: return s, h - reset if soft else h * (1.0 - reset)
    convert_element_type_12 = dev.round_bfloat16(sub_2)  # scan_cores.py: return s, h - reset if soft else h * (1.0 - reset)
    mul = convert_element_type_9 * tl.full([], 4.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    convert_element_type_18 = dev.round_bfloat16(mul)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    convert_element_type_19 = convert_element_type_18  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    neg_1 = convert_element_type_19 * tl.full([], -1.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    exp = dev.exp(neg_1)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    add_2 = tl.full([], 1.0, tl.float32) + exp  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    div_1 = dev.div(tl.full([], 1.0, tl.float32), add_2)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    convert_element_type_20 = dev.round_bfloat16(div_1)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    return convert_element_type_10, convert_element_type_12, convert_element_type_20


@triton.jit(do_not_specialize=["T"])
def core_forward_09390da07be4(
    input_0_ptr,
    state_0_ptr,
    output_0_ptr,
    saved_0_ptr,
    final_state_0_ptr,
    T,
    NCL,
    BLOCK: tl.constexpr,
):
    """Forward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    state_0 = dev.load(state_0_ptr + off, mask)
    input_0_at = input_0_ptr
    output_0_at = output_0_ptr
    saved_0_at = saved_0_ptr
    chunks = T // 2
    for c in range(0, chunks):
        input_0_0 = dev.load(input_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        output_0, state_0, saved_0 = core_step_5d059f6455e6(input_0_0, state_0)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(saved_0_at + off, saved_0, mask)
        output_0, state_0, saved_0 = core_step_5d059f6455e6(input_0_1, state_0)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        dev.store(saved_0_at + 1 * step + off, saved_0, mask)
        input_0_at += 2 * step
        output_0_at += 2 * step
        saved_0_at += 2 * step
    dev.store(final_state_0_ptr + off, state_0, mask)


@triton.jit(do_not_specialize=["T"])
def core_backward_ec918e48eb9b(
    input_0_ptr,
    state_0_ptr,
    checkpoint_0_ptr,
    grad_output_0_ptr,
    grad_state_seq_0_ptr,
    grad_input_0_ptr,
    grad_state_0_ptr,
    T,
    NCL,
    BLOCK: tl.constexpr,
):
    """Backward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    initial_0 = dev.load(state_0_ptr + off, mask)
    grad_state_0 = tl.zeros([BLOCK], tl.float32)
    chunks = T // 2
    input_0_at = input_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    grad_output_0_at = grad_output_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    grad_state_seq_0_at = grad_state_seq_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    grad_input_0_at = grad_input_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    for i in range(0, chunks):
        input_0_at -= 2 * step
        grad_output_0_at -= 2 * step
        grad_state_seq_0_at -= 2 * step
        grad_input_0_at -= 2 * step
        c = chunks - 1 - i
        state_0_0 = dev.load(checkpoint_0_ptr + (tl.cast(c, tl.int64) - 1) * step + off, mask & (c > 0))
        state_0_0 = tl.where(c > 0, state_0_0, initial_0)
        input_0_0 = dev.load(input_0_at + off, mask)
        grad_output_0_0 = dev.load(grad_output_0_at + off, mask)
        grad_state_seq_0_0 = dev.load(grad_state_seq_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        grad_output_0_1 = dev.load(grad_output_0_at + 1 * step + off, mask)
        grad_state_seq_0_1 = dev.load(grad_state_seq_0_at + 1 * step + off, mask)
        unused_0, state_0_1 = core_step_05ee53277273(input_0_0, state_0_0)
        grad_state_0 += grad_state_seq_0_1
        result_0, result_1 = core_vjp_8f52489017d5(input_0_1, state_0_1, grad_output_0_1, grad_state_0)
        dev.store(grad_input_0_at + 1 * step + off, result_0, mask)
        grad_state_0 = result_1
        grad_state_0 += grad_state_seq_0_0
        result_0, result_1 = core_vjp_8f52489017d5(input_0_0, state_0_0, grad_output_0_0, grad_state_0)
        dev.store(grad_input_0_at + off, result_0, mask)
        grad_state_0 = result_1
    dev.store(grad_state_0_ptr + off, grad_state_0, mask)


@triton.jit(do_not_specialize=["T"])
def core_forward_8e98c91eb084(
    input_0_ptr,
    state_0_ptr,
    output_0_ptr,
    state_seq_0_ptr,
    checkpoint_0_ptr,
    T,
    NCL,
    BLOCK: tl.constexpr,
):
    """Forward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    state_0 = dev.load(state_0_ptr + off, mask)
    input_0_at = input_0_ptr
    output_0_at = output_0_ptr
    state_seq_0_at = state_seq_0_ptr
    chunks = T // 2
    for c in range(0, chunks):
        input_0_0 = dev.load(input_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        dev.store(checkpoint_0_ptr + tl.cast(c * 0 + -1, tl.int64) * step + off, state_0, mask & (c > 0))
        output_0, state_0 = core_step_05ee53277273(input_0_0, state_0)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(state_seq_0_at + off, state_0, mask)
        output_0, state_0 = core_step_05ee53277273(input_0_1, state_0)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        dev.store(state_seq_0_at + 1 * step + off, state_0, mask)
        input_0_at += 2 * step
        output_0_at += 2 * step
        state_seq_0_at += 2 * step


