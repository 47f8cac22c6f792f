# Made by: PYTHONPATH=tests hatch run python tests/test_scan_goldens.py
import triton
import triton.language as tl

from flexsn_codegen.targets.triton import device as dev


@triton.jit
def core_step_58eabcb70ba8(input_0, state_0, state_1):
    add = state_0 + tl.full([], 0.1, tl.float32)  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    sub = state_0 - tl.full([], 0.8, tl.float32)  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    mul = add * sub  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add_1 = input_0 + mul  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    sub_1 = add_1 - state_1  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    div = dev.div_by_constant(sub_1, tl.full([], 2.0, tl.float32), tl.full([], 0.5, tl.float32))  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add_2 = state_0 + div  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add_3 = add_2 + tl.full([], 0.1, tl.float32)  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    mul_1 = add_3 * tl.full([], 0.3, tl.float32)  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    sub_2 = mul_1 - state_1  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    div_1 = dev.div_by_constant(sub_2, tl.full([], 2.0, tl.float32), tl.full([], 0.5, tl.float32))  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    add_4 = state_1 + div_1  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    sub_3 = add_2 - tl.full([], 1.0, tl.float32)  # scan_cores.py: s = spike(h - 1.0)
    ge = sub_3 >= tl.full([], 0.0, tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type = ge.to(tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    mul_2 = convert_element_type * tl.full([], -0.1, tl.float32)  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    sub_4 = tl.full([], 1.0, tl.float32) - convert_element_type  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    mul_3 = sub_4 * add_2  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    add_5 = mul_2 + mul_3  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    mul_4 = convert_element_type * tl.full([], 0.2, tl.float32)  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    add_6 = add_4 + mul_4  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    return convert_element_type, add_5, add_6


@triton.jit(do_not_specialize=["T"])
def core_forward_ae11bf167ea9(
    input_0_ptr,
    output_0_ptr,
    final_state_0_ptr,
    final_state_1_ptr,
    T,
    NCL,
    BLOCK: tl.constexpr,
):
    """Forward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    state_0 = tl.zeros([BLOCK], tl.float32)
    state_1 = tl.zeros([BLOCK], tl.float32)
    input_0_at = input_0_ptr
    output_0_at = output_0_ptr
    chunks = T // 2
    for c in range(0, chunks):
        input_0_0 = dev.load(input_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        output_0, state_0, state_1 = core_step_58eabcb70ba8(input_0_0, state_0, state_1)
        dev.store(output_0_at + off, output_0, mask)
        output_0, state_0, state_1 = core_step_58eabcb70ba8(input_0_1, state_0, state_1)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        input_0_at += 2 * step
        output_0_at += 2 * step
    dev.store(final_state_0_ptr + off, state_0, mask)
    dev.store(final_state_1_ptr + off, state_1, mask)


@triton.jit(do_not_specialize=["T"])
def core_forward_cfe1e10e67e7(
    input_0_ptr,
    state_0_ptr,
    state_1_ptr,
    output_0_ptr,
    state_seq_0_ptr,
    state_seq_1_ptr,
    T,
    NCL,
    BLOCK: tl.constexpr,
):
    """Forward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    state_0 = dev.load(state_0_ptr + off, mask)
    state_1 = dev.load(state_1_ptr + off, mask)
    input_0_at = input_0_ptr
    output_0_at = output_0_ptr
    state_seq_0_at = state_seq_0_ptr
    state_seq_1_at = state_seq_1_ptr
    chunks = T // 2
    for c in range(0, chunks):
        input_0_0 = dev.load(input_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        output_0, state_0, state_1 = core_step_58eabcb70ba8(input_0_0, state_0, state_1)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(state_seq_0_at + off, state_0, mask)
        dev.store(state_seq_1_at + off, state_1, mask)
        output_0, state_0, state_1 = core_step_58eabcb70ba8(input_0_1, state_0, state_1)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        dev.store(state_seq_0_at + 1 * step + off, state_0, mask)
        dev.store(state_seq_1_at + 1 * step + off, state_1, mask)
        input_0_at += 2 * step
        output_0_at += 2 * step
        state_seq_0_at += 2 * step
        state_seq_1_at += 2 * step


@triton.jit
def core_vjp_e1c7bfb2caed(input_0, state_0, state_1, grad_output_0, grad_state_0, grad_state_1):
    add = state_0 + tl.full([], 0.1, tl.float32)  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    sub = state_0 - tl.full([], 0.8, tl.float32)  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    mul = add * sub  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add_1 = input_0 + mul  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    sub_1 = add_1 - state_1  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    div = dev.div_by_constant(sub_1, tl.full([], 2.0, tl.float32), tl.full([], 0.5, tl.float32))  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add_2 = state_0 + div  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    sub_3 = add_2 - tl.full([], 1.0, tl.float32)  # scan_cores.py: s = spike(h - 1.0)
    ge = sub_3 >= tl.full([], 0.0, tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type = ge.to(tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    sub_4 = tl.full([], 1.0, tl.float32) - convert_element_type  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    mul_5 = grad_state_1 * tl.full([], 0.2, tl.float32)  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    add_7 = grad_output_0 + mul_5  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    mul_6 = grad_state_0 * sub_4  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    mul_7 = grad_state_0 * add_2  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    neg = mul_7 * tl.full([], -1.0, tl.float32)  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    add_8 = add_7 + neg  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    mul_8 = grad_state_0 * tl.full([], -0.1, tl.float32)  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    add_9 = add_8 + mul_8  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    mul_9 = sub_3 * tl.full([], 4.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    neg_1 = mul_9 * tl.full([], -1.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    exp = dev.exp(neg_1)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    add_10 = tl.full([], 1.0, tl.float32) + exp  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    div_2 = dev.fast_div(tl.full([], 1.0, tl.float32), add_10)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    mul_10 = add_9 * tl.full([], 4.0, tl.float32)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_11 = mul_10 * div_2  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    sub_5 = tl.full([], 1.0, tl.float32) - div_2  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_12 = mul_11 * sub_5  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    add_11 = mul_6 + mul_12  # scan_cores.py: s = spike(h - 1.0)
    div_3 = dev.div_by_constant(grad_state_1, tl.full([], 2.0, tl.float32), tl.full([], 0.5, tl.float32))  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    neg_2 = div_3 * tl.full([], -1.0, tl.float32)  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    add_12 = grad_state_1 + neg_2  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    mul_13 = div_3 * tl.full([], 0.3, tl.float32)  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    add_13 = add_11 + mul_13  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    div_4 = dev.div_by_constant(add_13, tl.full([], 2.0, tl.float32), tl.full([], 0.5, tl.float32))  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    neg_3 = div_4 * tl.full([], -1.0, tl.float32)  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add_14 = add_12 + neg_3  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    mul_14 = div_4 * add  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    mul_15 = div_4 * sub  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add_15 = add_13 + mul_14  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add_16 = add_15 + mul_15  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    return div_4, add_16, add_14


@triton.jit(do_not_specialize=["T"])
def core_backward_7676ba15c873(
    input_0_ptr,
    state_0_ptr,
    state_1_ptr,
    checkpoint_0_ptr,
    checkpoint_1_ptr,
    grad_output_0_ptr,
    grad_final_state_0_ptr,
    grad_final_state_1_ptr,
    grad_input_0_ptr,
    grad_state_0_ptr,
    grad_state_1_ptr,
    T,
    NCL,
    BLOCK: tl.constexpr,
):
    """Backward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    initial_0 = dev.load(state_0_ptr + off, mask)
    initial_1 = dev.load(state_1_ptr + off, mask)
    grad_state_0 = dev.load(grad_final_state_0_ptr + off, mask)
    grad_state_1 = dev.load(grad_final_state_1_ptr + off, mask)
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
        state_1_0 = dev.load(checkpoint_1_ptr + (tl.cast(c, tl.int64) - 1) * step + off, mask & (c > 0))
        state_1_0 = tl.where(c > 0, state_1_0, initial_1)
        input_0_0 = dev.load(input_0_at + off, mask)
        grad_output_0_0 = dev.load(grad_output_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        grad_output_0_1 = dev.load(grad_output_0_at + 1 * step + off, mask)
        unused_0, state_0_1, state_1_1 = core_step_58eabcb70ba8(input_0_0, state_0_0, state_1_0)
        result_0, result_1, result_2 = core_vjp_e1c7bfb2caed(input_0_1, state_0_1, state_1_1, grad_output_0_1, grad_state_0, grad_state_1)
        dev.store(grad_input_0_at + 1 * step + off, result_0, mask)
        grad_state_0 = result_1
        grad_state_1 = result_2
        result_0, result_1, result_2 = core_vjp_e1c7bfb2caed(input_0_0, state_0_0, state_1_0, grad_output_0_0, grad_state_0, grad_state_1)
        dev.store(grad_input_0_at + off, result_0, mask)
        grad_state_0 = result_1
        grad_state_1 = result_2
    dev.store(grad_state_0_ptr + off, grad_state_0, mask)
    dev.store(grad_state_1_ptr + off, grad_state_1, mask)


@triton.jit(do_not_specialize=["T"])
def core_forward_882fe915a81c(
    input_0_ptr,
    state_0_ptr,
    state_1_ptr,
    output_0_ptr,
    final_state_0_ptr,
    final_state_1_ptr,
    checkpoint_0_ptr,
    checkpoint_1_ptr,
    T,
    NCL,
    BLOCK: tl.constexpr,
):
    """Forward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    state_0 = dev.load(state_0_ptr + off, mask)
    state_1 = dev.load(state_1_ptr + off, mask)
    input_0_at = input_0_ptr
    output_0_at = output_0_ptr
    chunks = T // 2
    for c in range(0, chunks):
        input_0_0 = dev.load(input_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        dev.store(checkpoint_0_ptr + tl.cast(c * 0 + -1, tl.int64) * step + off, state_0, mask & (c > 0))
        dev.store(checkpoint_1_ptr + tl.cast(c * 0 + -1, tl.int64) * step + off, state_1, mask & (c > 0))
        output_0, state_0, state_1 = core_step_58eabcb70ba8(input_0_0, state_0, state_1)
        dev.store(output_0_at + off, output_0, mask)
        output_0, state_0, state_1 = core_step_58eabcb70ba8(input_0_1, state_0, state_1)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        input_0_at += 2 * step
        output_0_at += 2 * step
    dev.store(final_state_0_ptr + off, state_0, mask)
    dev.store(final_state_1_ptr + off, state_1, mask)


@triton.jit
def core_vjp_2c21c76f9afc(saved_0, saved_1, grad_output_0, grad_state_0, grad_state_1):
    add = saved_0 + tl.full([], 0.1, tl.float32)  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    sub = saved_0 - tl.full([], 0.8, tl.float32)  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    sub_3 = saved_1 - tl.full([], 1.0, tl.float32)  # scan_cores.py: s = spike(h - 1.0)
    ge = sub_3 >= tl.full([], 0.0, tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type = ge.to(tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    sub_4 = tl.full([], 1.0, tl.float32) - convert_element_type  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    mul_5 = grad_state_1 * tl.full([], 0.2, tl.float32)  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    add_7 = grad_output_0 + mul_5  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    mul_6 = grad_state_0 * sub_4  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    mul_7 = grad_state_0 * saved_1  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    neg = mul_7 * tl.full([], -1.0, tl.float32)  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    add_8 = add_7 + neg  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    mul_8 = grad_state_0 * tl.full([], -0.1, tl.float32)  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    add_9 = add_8 + mul_8  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    mul_9 = sub_3 * tl.full([], 4.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    neg_1 = mul_9 * tl.full([], -1.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    exp = dev.exp(neg_1)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    add_10 = tl.full([], 1.0, tl.float32) + exp  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    div_2 = dev.fast_div(tl.full([], 1.0, tl.float32), add_10)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    mul_10 = add_9 * tl.full([], 4.0, tl.float32)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_11 = mul_10 * div_2  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    sub_5 = tl.full([], 1.0, tl.float32) - div_2  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_12 = mul_11 * sub_5  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    add_11 = mul_6 + mul_12  # scan_cores.py: s = spike(h - 1.0)
    div_3 = dev.div_by_constant(grad_state_1, tl.full([], 2.0, tl.float32), tl.full([], 0.5, tl.float32))  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    neg_2 = div_3 * tl.full([], -1.0, tl.float32)  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    add_12 = grad_state_1 + neg_2  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    mul_13 = div_3 * tl.full([], 0.3, tl.float32)  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    add_13 = add_11 + mul_13  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    div_4 = dev.div_by_constant(add_13, tl.full([], 2.0, tl.float32), tl.full([], 0.5, tl.float32))  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    neg_3 = div_4 * tl.full([], -1.0, tl.float32)  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add_14 = add_12 + neg_3  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    mul_14 = div_4 * add  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    mul_15 = div_4 * sub  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add_15 = add_13 + mul_14  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add_16 = add_15 + mul_15  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    return div_4, add_16, add_14


@triton.jit(do_not_specialize=["T"])
def core_backward_d95d30238118(
    saved_0_ptr,
    saved_1_ptr,
    grad_output_0_ptr,
    grad_final_state_0_ptr,
    grad_final_state_1_ptr,
    grad_input_0_ptr,
    grad_state_0_ptr,
    grad_state_1_ptr,
    T,
    NCL,
    BLOCK: tl.constexpr,
):
    """Backward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    grad_state_0 = dev.load(grad_final_state_0_ptr + off, mask)
    grad_state_1 = dev.load(grad_final_state_1_ptr + off, mask)
    chunks = T // 2
    saved_0_at = saved_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    saved_1_at = saved_1_ptr + tl.cast(chunks, tl.int64) * 2 * step
    grad_output_0_at = grad_output_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    grad_input_0_at = grad_input_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    for i in range(0, chunks):
        saved_0_at -= 2 * step
        saved_1_at -= 2 * step
        grad_output_0_at -= 2 * step
        grad_input_0_at -= 2 * step
        c = chunks - 1 - i
        saved_0_0 = dev.load(saved_0_at + off, mask)
        saved_1_0 = dev.load(saved_1_at + off, mask)
        grad_output_0_0 = dev.load(grad_output_0_at + off, mask)
        saved_0_1 = dev.load(saved_0_at + 1 * step + off, mask)
        saved_1_1 = dev.load(saved_1_at + 1 * step + off, mask)
        grad_output_0_1 = dev.load(grad_output_0_at + 1 * step + off, mask)
        result_0, result_1, result_2 = core_vjp_2c21c76f9afc(saved_0_1, saved_1_1, grad_output_0_1, grad_state_0, grad_state_1)
        dev.store(grad_input_0_at + 1 * step + off, result_0, mask)
        grad_state_0 = result_1
        grad_state_1 = result_2
        result_0, result_1, result_2 = core_vjp_2c21c76f9afc(saved_0_0, saved_1_0, grad_output_0_0, grad_state_0, grad_state_1)
        dev.store(grad_input_0_at + off, result_0, mask)
        grad_state_0 = result_1
        grad_state_1 = result_2
    dev.store(grad_state_0_ptr + off, grad_state_0, mask)
    dev.store(grad_state_1_ptr + off, grad_state_1, mask)


@triton.jit
def core_step_de52d6a5c9cf(input_0, state_0, state_1):
    add = state_0 + tl.full([], 0.1, tl.float32)  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    sub = state_0 - tl.full([], 0.8, tl.float32)  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    mul = add * sub  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add_1 = input_0 + mul  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    sub_1 = add_1 - state_1  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    div = dev.div_by_constant(sub_1, tl.full([], 2.0, tl.float32), tl.full([], 0.5, tl.float32))  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add_2 = state_0 + div  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add_3 = add_2 + tl.full([], 0.1, tl.float32)  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    mul_1 = add_3 * tl.full([], 0.3, tl.float32)  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    sub_2 = mul_1 - state_1  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    div_1 = dev.div_by_constant(sub_2, tl.full([], 2.0, tl.float32), tl.full([], 0.5, tl.float32))  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    add_4 = state_1 + div_1  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    sub_3 = add_2 - tl.full([], 1.0, tl.float32)  # scan_cores.py: s = spike(h - 1.0)
    ge = sub_3 >= tl.full([], 0.0, tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type = ge.to(tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    mul_2 = convert_element_type * tl.full([], -0.1, tl.float32)  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    sub_4 = tl.full([], 1.0, tl.float32) - convert_element_type  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    mul_3 = sub_4 * add_2  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    add_5 = mul_2 + mul_3  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    mul_4 = convert_element_type * tl.full([], 0.2, tl.float32)  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    add_6 = add_4 + mul_4  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    return convert_element_type, add_5, add_6, state_0, add_2


@triton.jit(do_not_specialize=["T"])
def core_forward_97ee0b1facef(
    input_0_ptr,
    state_0_ptr,
    state_1_ptr,
    output_0_ptr,
    saved_0_ptr,
    saved_1_ptr,
    final_state_0_ptr,
    final_state_1_ptr,
    T,
    NCL,
    BLOCK: tl.constexpr,
):
    """Forward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    state_0 = dev.load(state_0_ptr + off, mask)
    state_1 = dev.load(state_1_ptr + off, mask)
    input_0_at = input_0_ptr
    output_0_at = output_0_ptr
    saved_0_at = saved_0_ptr
    saved_1_at = saved_1_ptr
    chunks = T // 2
    for c in range(0, chunks):
        input_0_0 = dev.load(input_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        output_0, state_0, state_1, saved_0, saved_1 = core_step_de52d6a5c9cf(input_0_0, state_0, state_1)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(saved_0_at + off, saved_0, mask)
        dev.store(saved_1_at + off, saved_1, mask)
        output_0, state_0, state_1, saved_0, saved_1 = core_step_de52d6a5c9cf(input_0_1, state_0, state_1)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        dev.store(saved_0_at + 1 * step + off, saved_0, mask)
        dev.store(saved_1_at + 1 * step + off, saved_1, mask)
        input_0_at += 2 * step
        output_0_at += 2 * step
        saved_0_at += 2 * step
        saved_1_at += 2 * step
    dev.store(final_state_0_ptr + off, state_0, mask)
    dev.store(final_state_1_ptr + off, state_1, mask)


@triton.jit(do_not_specialize=["T"])
def core_backward_f1ed11f142b0(
    input_0_ptr,
    state_0_ptr,
    state_1_ptr,
    checkpoint_0_ptr,
    checkpoint_1_ptr,
    grad_output_0_ptr,
    grad_state_seq_0_ptr,
    grad_state_seq_1_ptr,
    grad_input_0_ptr,
    grad_state_0_ptr,
    grad_state_1_ptr,
    T,
    NCL,
    BLOCK: tl.constexpr,
):
    """Backward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    initial_0 = dev.load(state_0_ptr + off, mask)
    initial_1 = dev.load(state_1_ptr + off, mask)
    grad_state_0 = tl.zeros([BLOCK], tl.float32)
    grad_state_1 = tl.zeros([BLOCK], tl.float32)
    chunks = T // 2
    input_0_at = input_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    grad_output_0_at = grad_output_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    grad_state_seq_0_at = grad_state_seq_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    grad_state_seq_1_at = grad_state_seq_1_ptr + tl.cast(chunks, tl.int64) * 2 * step
    grad_input_0_at = grad_input_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    for i in range(0, chunks):
        input_0_at -= 2 * step
        grad_output_0_at -= 2 * step
        grad_state_seq_0_at -= 2 * step
        grad_state_seq_1_at -= 2 * step
        grad_input_0_at -= 2 * step
        c = chunks - 1 - i
        state_0_0 = dev.load(checkpoint_0_ptr + (tl.cast(c, tl.int64) - 1) * step + off, mask & (c > 0))
        state_0_0 = tl.where(c > 0, state_0_0, initial_0)
        state_1_0 = dev.load(checkpoint_1_ptr + (tl.cast(c, tl.int64) - 1) * step + off, mask & (c > 0))
        state_1_0 = tl.where(c > 0, state_1_0, initial_1)
        input_0_0 = dev.load(input_0_at + off, mask)
        grad_output_0_0 = dev.load(grad_output_0_at + off, mask)
        grad_state_seq_0_0 = dev.load(grad_state_seq_0_at + off, mask)
        grad_state_seq_1_0 = dev.load(grad_state_seq_1_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        grad_output_0_1 = dev.load(grad_output_0_at + 1 * step + off, mask)
        grad_state_seq_0_1 = dev.load(grad_state_seq_0_at + 1 * step + off, mask)
        grad_state_seq_1_1 = dev.load(grad_state_seq_1_at + 1 * step + off, mask)
        unused_0, state_0_1, state_1_1 = core_step_58eabcb70ba8(input_0_0, state_0_0, state_1_0)
        grad_state_0 += grad_state_seq_0_1
        grad_state_1 += grad_state_seq_1_1
        result_0, result_1, result_2 = core_vjp_e1c7bfb2caed(input_0_1, state_0_1, state_1_1, grad_output_0_1, grad_state_0, grad_state_1)
        dev.store(grad_input_0_at + 1 * step + off, result_0, mask)
        grad_state_0 = result_1
        grad_state_1 = result_2
        grad_state_0 += grad_state_seq_0_0
        grad_state_1 += grad_state_seq_1_0
        result_0, result_1, result_2 = core_vjp_e1c7bfb2caed(input_0_0, state_0_0, state_1_0, grad_output_0_0, grad_state_0, grad_state_1)
        dev.store(grad_input_0_at + off, result_0, mask)
        grad_state_0 = result_1
        grad_state_1 = result_2
    dev.store(grad_state_0_ptr + off, grad_state_0, mask)
    dev.store(grad_state_1_ptr + off, grad_state_1, mask)


@triton.jit(do_not_specialize=["T"])
def core_forward_274788ce6efc(
    input_0_ptr,
    state_0_ptr,
    state_1_ptr,
    output_0_ptr,
    state_seq_0_ptr,
    state_seq_1_ptr,
    checkpoint_0_ptr,
    checkpoint_1_ptr,
    T,
    NCL,
    BLOCK: tl.constexpr,
):
    """Forward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    state_0 = dev.load(state_0_ptr + off, mask)
    state_1 = dev.load(state_1_ptr + off, mask)
    input_0_at = input_0_ptr
    output_0_at = output_0_ptr
    state_seq_0_at = state_seq_0_ptr
    state_seq_1_at = state_seq_1_ptr
    chunks = T // 2
    for c in range(0, chunks):
        input_0_0 = dev.load(input_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        dev.store(checkpoint_0_ptr + tl.cast(c * 0 + -1, tl.int64) * step + off, state_0, mask & (c > 0))
        dev.store(checkpoint_1_ptr + tl.cast(c * 0 + -1, tl.int64) * step + off, state_1, mask & (c > 0))
        output_0, state_0, state_1 = core_step_58eabcb70ba8(input_0_0, state_0, state_1)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(state_seq_0_at + off, state_0, mask)
        dev.store(state_seq_1_at + off, state_1, mask)
        output_0, state_0, state_1 = core_step_58eabcb70ba8(input_0_1, state_0, state_1)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        dev.store(state_seq_0_at + 1 * step + off, state_0, mask)
        dev.store(state_seq_1_at + 1 * step + off, state_1, mask)
        input_0_at += 2 * step
        output_0_at += 2 * step
        state_seq_0_at += 2 * step
        state_seq_1_at += 2 * step


