# Made by: PYTHONPATH=tests hatch run python tests/test_scan_goldens.py
import triton
import triton.language as tl

from flexsn_codegen.targets.triton import device as dev


@triton.jit
def core_fast_step_7e1c6d08974d(input_0, state_0, state_1, lifted_0, lifted_1):
    sub = input_0 - state_0  # scan_cores.py: h = v + (x - v) / 2.0
    div = dev.div_by_constant(sub, tl.full([], 2.0, tl.float32), tl.full([], 0.5, tl.float32))  # scan_cores.py: h = v + (x - v) / 2.0
    add = state_0 + div  # scan_cores.py: h = v + (x - v) / 2.0
    mul = lifted_0 * state_1  # scan_cores.py: s = spike(h - (1.0 + beta * a))
    add_1 = mul + tl.full([], 1.0, tl.float32)  # scan_cores.py: s = spike(h - (1.0 + beta * a))
    sub_1 = add - add_1  # scan_cores.py: s = spike(h - (1.0 + beta * a))
    ge = sub_1 >= tl.full([], 0.0, tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type = ge.to(tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    sub_2 = tl.full([], 1.0, tl.float32) - convert_element_type  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    mul_1 = add * sub_2  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    abs_1 = tl.abs(lifted_1)  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    reciprocal = dev.fast_div(tl.full([], 1.0, tl.float32), abs_1)  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    mul_2 = reciprocal * tl.full([], -1.0, tl.float32)  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    exp = dev.fast_exp(mul_2)  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    mul_3 = exp * state_1  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    add_2 = mul_3 + convert_element_type  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    return convert_element_type, mul_1, add_2


@triton.jit(do_not_specialize=["T"])
def core_fast_forward_9f13227ee192(
    input_0_ptr,
    lifted_0_ptr,
    lifted_1_ptr,
    output_0_ptr,
    final_state_0_ptr,
    final_state_1_ptr,
    T,
    NCL,
    lifted_0_inner0,
    lifted_0_size0,
    lifted_0_stride0,
    lifted_1_inner0,
    lifted_1_size0,
    lifted_1_stride0,
    BLOCK: tl.constexpr,
):
    """Forward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    lifted_0_off = (off // lifted_0_inner0) % lifted_0_size0 * lifted_0_stride0
    lifted_1_off = (off // lifted_1_inner0) % lifted_1_size0 * lifted_1_stride0
    state_0 = tl.zeros([BLOCK], tl.float32)
    state_1 = tl.zeros([BLOCK], tl.float32)
    lifted_0 = dev.load(lifted_0_ptr + lifted_0_off, mask)
    lifted_1 = dev.load(lifted_1_ptr + lifted_1_off, mask)
    input_0_at = input_0_ptr
    output_0_at = output_0_ptr
    chunks = T // 2
    for c in range(0, chunks):
        input_0_0 = dev.load(input_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        output_0, state_0, state_1 = core_fast_step_7e1c6d08974d(input_0_0, state_0, state_1, lifted_0, lifted_1)
        dev.store(output_0_at + off, output_0, mask)
        output_0, state_0, state_1 = core_fast_step_7e1c6d08974d(input_0_1, state_0, state_1, lifted_0, lifted_1)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        input_0_at += 2 * step
        output_0_at += 2 * step
    dev.store(final_state_0_ptr + off, state_0, mask)
    dev.store(final_state_1_ptr + off, state_1, mask)


@triton.jit(do_not_specialize=["T"])
def core_fast_forward_b920124a02b1(
    input_0_ptr,
    lifted_0_ptr,
    lifted_1_ptr,
    state_0_ptr,
    state_1_ptr,
    output_0_ptr,
    state_seq_0_ptr,
    state_seq_1_ptr,
    T,
    NCL,
    lifted_0_inner0,
    lifted_0_size0,
    lifted_0_stride0,
    lifted_1_inner0,
    lifted_1_size0,
    lifted_1_stride0,
    BLOCK: tl.constexpr,
):
    """Forward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    lifted_0_off = (off // lifted_0_inner0) % lifted_0_size0 * lifted_0_stride0
    lifted_1_off = (off // lifted_1_inner0) % lifted_1_size0 * lifted_1_stride0
    state_0 = dev.load(state_0_ptr + off, mask)
    state_1 = dev.load(state_1_ptr + off, mask)
    lifted_0 = dev.load(lifted_0_ptr + lifted_0_off, mask)
    lifted_1 = dev.load(lifted_1_ptr + lifted_1_off, mask)
    input_0_at = input_0_ptr
    output_0_at = output_0_ptr
    state_seq_0_at = state_seq_0_ptr
    state_seq_1_at = state_seq_1_ptr
    chunks = T // 2
    for c in range(0, chunks):
        input_0_0 = dev.load(input_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        output_0, state_0, state_1 = core_fast_step_7e1c6d08974d(input_0_0, state_0, state_1, lifted_0, lifted_1)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(state_seq_0_at + off, state_0, mask)
        dev.store(state_seq_1_at + off, state_1, mask)
        output_0, state_0, state_1 = core_fast_step_7e1c6d08974d(input_0_1, state_0, state_1, lifted_0, lifted_1)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        dev.store(state_seq_0_at + 1 * step + off, state_0, mask)
        dev.store(state_seq_1_at + 1 * step + off, state_1, mask)
        input_0_at += 2 * step
        output_0_at += 2 * step
        state_seq_0_at += 2 * step
        state_seq_1_at += 2 * step


@triton.jit
def core_fast_vjp_604b8aa3192d(input_0, state_0, state_1, lifted_0, lifted_1, grad_output_0, grad_state_0, grad_state_1):
    sub = input_0 - state_0  # scan_cores.py: h = v + (x - v) / 2.0
    div = dev.div_by_constant(sub, tl.full([], 2.0, tl.float32), tl.full([], 0.5, tl.float32))  # scan_cores.py: h = v + (x - v) / 2.0
    add = state_0 + div  # scan_cores.py: h = v + (x - v) / 2.0
    mul = lifted_0 * state_1  # scan_cores.py: s = spike(h - (1.0 + beta * a))
    add_1 = mul + tl.full([], 1.0, tl.float32)  # scan_cores.py: s = spike(h - (1.0 + beta * a))
    sub_1 = add - add_1  # scan_cores.py: s = spike(h - (1.0 + beta * a))
    ge = sub_1 >= tl.full([], 0.0, tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type = ge.to(tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    sub_2 = tl.full([], 1.0, tl.float32) - convert_element_type  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    abs_1 = tl.abs(lifted_1)  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    reciprocal = dev.fast_div(tl.full([], 1.0, tl.float32), abs_1)  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    mul_2 = reciprocal * tl.full([], -1.0, tl.float32)  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    exp = dev.fast_exp(mul_2)  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    add_3 = grad_output_0 + grad_state_1  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    mul_4 = grad_state_1 * exp  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    mul_5 = grad_state_1 * state_1  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    mul_6 = mul_5 * exp  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    mul_7 = mul_6 * tl.full([], -1.0, tl.float32)  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    mul_8 = reciprocal * reciprocal  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    neg = mul_7 * tl.full([], -1.0, tl.float32)  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    mul_9 = neg * mul_8  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    sign = tl.where(lifted_1 > tl.full([], 0.0, tl.float32), tl.full([], 1.0, tl.float32), tl.where(lifted_1 < tl.full([], 0.0, tl.float32), tl.full([], -1.0, tl.float32), tl.full([], 0.0, tl.float32)))  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    mul_10 = mul_9 * sign  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    mul_11 = grad_state_0 * add  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    mul_12 = grad_state_0 * sub_2  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    neg_1 = mul_11 * tl.full([], -1.0, tl.float32)  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    add_4 = add_3 + neg_1  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    mul_13 = sub_1 * tl.full([], 4.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    neg_2 = mul_13 * tl.full([], -1.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    exp_1 = dev.fast_exp(neg_2)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    add_5 = tl.full([], 1.0, tl.float32) + exp_1  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    div_1 = dev.fast_div(tl.full([], 1.0, tl.float32), add_5)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    mul_14 = add_4 * tl.full([], 4.0, tl.float32)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_15 = mul_14 * div_1  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    sub_3 = tl.full([], 1.0, tl.float32) - div_1  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_16 = mul_15 * sub_3  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    neg_3 = mul_16 * tl.full([], -1.0, tl.float32)  # scan_cores.py: s = spike(h - (1.0 + beta * a))
    add_6 = mul_12 + mul_16  # scan_cores.py: s = spike(h - (1.0 + beta * a))
    mul_17 = neg_3 * lifted_0  # scan_cores.py: s = spike(h - (1.0 + beta * a))
    mul_18 = neg_3 * state_1  # scan_cores.py: s = spike(h - (1.0 + beta * a))
    add_7 = mul_4 + mul_17  # scan_cores.py: s = spike(h - (1.0 + beta * a))
    div_2 = dev.div_by_constant(add_6, tl.full([], 2.0, tl.float32), tl.full([], 0.5, tl.float32))  # scan_cores.py: h = v + (x - v) / 2.0
    neg_4 = div_2 * tl.full([], -1.0, tl.float32)  # scan_cores.py: h = v + (x - v) / 2.0
    add_8 = add_6 + neg_4  # scan_cores.py: h = v + (x - v) / 2.0
    return div_2, add_8, add_7, mul_18, mul_10


@triton.jit(do_not_specialize=["T"])
def core_fast_backward_8ef665fcc67c(
    input_0_ptr,
    lifted_0_ptr,
    lifted_1_ptr,
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
    grad_lifted_0_ptr,
    grad_lifted_1_ptr,
    T,
    NCL,
    lifted_0_inner0,
    lifted_0_size0,
    lifted_0_stride0,
    lifted_1_inner0,
    lifted_1_size0,
    lifted_1_stride0,
    BLOCK: tl.constexpr,
):
    """Backward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    lifted_0_off = (off // lifted_0_inner0) % lifted_0_size0 * lifted_0_stride0
    lifted_1_off = (off // lifted_1_inner0) % lifted_1_size0 * lifted_1_stride0
    lifted_0 = dev.load(lifted_0_ptr + lifted_0_off, mask)
    lifted_1 = dev.load(lifted_1_ptr + lifted_1_off, mask)
    initial_0 = dev.load(state_0_ptr + off, mask)
    initial_1 = dev.load(state_1_ptr + off, mask)
    grad_state_0 = dev.load(grad_final_state_0_ptr + off, mask)
    grad_state_1 = dev.load(grad_final_state_1_ptr + off, mask)
    grad_lifted_0 = tl.zeros([BLOCK], tl.float32)
    grad_lifted_1 = tl.zeros([BLOCK], tl.float32)
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
        unused_0, state_0_1, state_1_1 = core_fast_step_7e1c6d08974d(input_0_0, state_0_0, state_1_0, lifted_0, lifted_1)
        result_0, result_1, result_2, result_3, result_4 = core_fast_vjp_604b8aa3192d(input_0_1, state_0_1, state_1_1, lifted_0, lifted_1, grad_output_0_1, grad_state_0, grad_state_1)
        dev.store(grad_input_0_at + 1 * step + off, result_0, mask)
        grad_state_0 = result_1
        grad_state_1 = result_2
        grad_lifted_0 += result_3.to(tl.float32)
        grad_lifted_1 += result_4.to(tl.float32)
        result_0, result_1, result_2, result_3, result_4 = core_fast_vjp_604b8aa3192d(input_0_0, state_0_0, state_1_0, lifted_0, lifted_1, grad_output_0_0, grad_state_0, grad_state_1)
        dev.store(grad_input_0_at + off, result_0, mask)
        grad_state_0 = result_1
        grad_state_1 = result_2
        grad_lifted_0 += result_3.to(tl.float32)
        grad_lifted_1 += result_4.to(tl.float32)
    dev.store(grad_state_0_ptr + off, grad_state_0, mask)
    dev.store(grad_state_1_ptr + off, grad_state_1, mask)
    dev.store(grad_lifted_0_ptr + off, grad_lifted_0, mask)
    dev.store(grad_lifted_1_ptr + off, grad_lifted_1, mask)


@triton.jit(do_not_specialize=["T"])
def core_fast_forward_04357c0bd5d7(
    input_0_ptr,
    lifted_0_ptr,
    lifted_1_ptr,
    state_0_ptr,
    state_1_ptr,
    output_0_ptr,
    final_state_0_ptr,
    final_state_1_ptr,
    checkpoint_0_ptr,
    checkpoint_1_ptr,
    T,
    NCL,
    lifted_0_inner0,
    lifted_0_size0,
    lifted_0_stride0,
    lifted_1_inner0,
    lifted_1_size0,
    lifted_1_stride0,
    BLOCK: tl.constexpr,
):
    """Forward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    lifted_0_off = (off // lifted_0_inner0) % lifted_0_size0 * lifted_0_stride0
    lifted_1_off = (off // lifted_1_inner0) % lifted_1_size0 * lifted_1_stride0
    state_0 = dev.load(state_0_ptr + off, mask)
    state_1 = dev.load(state_1_ptr + off, mask)
    lifted_0 = dev.load(lifted_0_ptr + lifted_0_off, mask)
    lifted_1 = dev.load(lifted_1_ptr + lifted_1_off, mask)
    input_0_at = input_0_ptr
    output_0_at = output_0_ptr
    chunks = T // 2
    for c in range(0, chunks):
        input_0_0 = dev.load(input_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        dev.store(checkpoint_0_ptr + tl.cast(c * 0 + -1, tl.int64) * step + off, state_0, mask & (c > 0))
        dev.store(checkpoint_1_ptr + tl.cast(c * 0 + -1, tl.int64) * step + off, state_1, mask & (c > 0))
        output_0, state_0, state_1 = core_fast_step_7e1c6d08974d(input_0_0, state_0, state_1, lifted_0, lifted_1)
        dev.store(output_0_at + off, output_0, mask)
        output_0, state_0, state_1 = core_fast_step_7e1c6d08974d(input_0_1, state_0, state_1, lifted_0, lifted_1)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        input_0_at += 2 * step
        output_0_at += 2 * step
    dev.store(final_state_0_ptr + off, state_0, mask)
    dev.store(final_state_1_ptr + off, state_1, mask)


@triton.jit
def core_fast_vjp_2405bae11ea5(lifted_0, lifted_1, saved_0, saved_1, grad_output_0, grad_state_0, grad_state_1):
    mul = lifted_0 * saved_0  # scan_cores.py: s = spike(h - (1.0 + beta * a))
    add_1 = mul + tl.full([], 1.0, tl.float32)  # scan_cores.py: s = spike(h - (1.0 + beta * a))
    sub_1 = saved_1 - add_1  # scan_cores.py: s = spike(h - (1.0 + beta * a))
    ge = sub_1 >= tl.full([], 0.0, tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type = ge.to(tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    sub_2 = tl.full([], 1.0, tl.float32) - convert_element_type  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    abs_1 = tl.abs(lifted_1)  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    reciprocal = dev.fast_div(tl.full([], 1.0, tl.float32), abs_1)  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    mul_2 = reciprocal * tl.full([], -1.0, tl.float32)  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    exp = dev.fast_exp(mul_2)  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    add_3 = grad_output_0 + grad_state_1  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    mul_4 = grad_state_1 * exp  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    mul_5 = grad_state_1 * saved_0  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    mul_6 = mul_5 * exp  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    mul_7 = mul_6 * tl.full([], -1.0, tl.float32)  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    mul_8 = reciprocal * reciprocal  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    neg = mul_7 * tl.full([], -1.0, tl.float32)  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    mul_9 = neg * mul_8  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    sign = tl.where(lifted_1 > tl.full([], 0.0, tl.float32), tl.full([], 1.0, tl.float32), tl.where(lifted_1 < tl.full([], 0.0, tl.float32), tl.full([], -1.0, tl.float32), tl.full([], 0.0, tl.float32)))  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    mul_10 = mul_9 * sign  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    mul_11 = grad_state_0 * saved_1  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    mul_12 = grad_state_0 * sub_2  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    neg_1 = mul_11 * tl.full([], -1.0, tl.float32)  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    add_4 = add_3 + neg_1  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    mul_13 = sub_1 * tl.full([], 4.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    neg_2 = mul_13 * tl.full([], -1.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    exp_1 = dev.fast_exp(neg_2)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    add_5 = tl.full([], 1.0, tl.float32) + exp_1  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    div_1 = dev.fast_div(tl.full([], 1.0, tl.float32), add_5)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    mul_14 = add_4 * tl.full([], 4.0, tl.float32)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_15 = mul_14 * div_1  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    sub_3 = tl.full([], 1.0, tl.float32) - div_1  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_16 = mul_15 * sub_3  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    neg_3 = mul_16 * tl.full([], -1.0, tl.float32)  # scan_cores.py: s = spike(h - (1.0 + beta * a))
    add_6 = mul_12 + mul_16  # scan_cores.py: s = spike(h - (1.0 + beta * a))
    mul_17 = neg_3 * lifted_0  # scan_cores.py: s = spike(h - (1.0 + beta * a))
    mul_18 = neg_3 * saved_0  # scan_cores.py: s = spike(h - (1.0 + beta * a))
    add_7 = mul_4 + mul_17  # scan_cores.py: s = spike(h - (1.0 + beta * a))
    div_2 = dev.div_by_constant(add_6, tl.full([], 2.0, tl.float32), tl.full([], 0.5, tl.float32))  # scan_cores.py: h = v + (x - v) / 2.0
    neg_4 = div_2 * tl.full([], -1.0, tl.float32)  # scan_cores.py: h = v + (x - v) / 2.0
    add_8 = add_6 + neg_4  # scan_cores.py: h = v + (x - v) / 2.0
    return div_2, add_8, add_7, mul_18, mul_10


@triton.jit(do_not_specialize=["T"])
def core_fast_backward_6421642e14d0(
    lifted_0_ptr,
    lifted_1_ptr,
    saved_0_ptr,
    saved_1_ptr,
    grad_output_0_ptr,
    grad_final_state_0_ptr,
    grad_final_state_1_ptr,
    grad_input_0_ptr,
    grad_state_0_ptr,
    grad_state_1_ptr,
    grad_lifted_0_ptr,
    grad_lifted_1_ptr,
    T,
    NCL,
    lifted_0_inner0,
    lifted_0_size0,
    lifted_0_stride0,
    lifted_1_inner0,
    lifted_1_size0,
    lifted_1_stride0,
    BLOCK: tl.constexpr,
):
    """Backward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    lifted_0_off = (off // lifted_0_inner0) % lifted_0_size0 * lifted_0_stride0
    lifted_1_off = (off // lifted_1_inner0) % lifted_1_size0 * lifted_1_stride0
    lifted_0 = dev.load(lifted_0_ptr + lifted_0_off, mask)
    lifted_1 = dev.load(lifted_1_ptr + lifted_1_off, mask)
    grad_state_0 = dev.load(grad_final_state_0_ptr + off, mask)
    grad_state_1 = dev.load(grad_final_state_1_ptr + off, mask)
    grad_lifted_0 = tl.zeros([BLOCK], tl.float32)
    grad_lifted_1 = tl.zeros([BLOCK], tl.float32)
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
        result_0, result_1, result_2, result_3, result_4 = core_fast_vjp_2405bae11ea5(lifted_0, lifted_1, saved_0_1, saved_1_1, grad_output_0_1, grad_state_0, grad_state_1)
        dev.store(grad_input_0_at + 1 * step + off, result_0, mask)
        grad_state_0 = result_1
        grad_state_1 = result_2
        grad_lifted_0 += result_3.to(tl.float32)
        grad_lifted_1 += result_4.to(tl.float32)
        result_0, result_1, result_2, result_3, result_4 = core_fast_vjp_2405bae11ea5(lifted_0, lifted_1, saved_0_0, saved_1_0, grad_output_0_0, grad_state_0, grad_state_1)
        dev.store(grad_input_0_at + off, result_0, mask)
        grad_state_0 = result_1
        grad_state_1 = result_2
        grad_lifted_0 += result_3.to(tl.float32)
        grad_lifted_1 += result_4.to(tl.float32)
    dev.store(grad_state_0_ptr + off, grad_state_0, mask)
    dev.store(grad_state_1_ptr + off, grad_state_1, mask)
    dev.store(grad_lifted_0_ptr + off, grad_lifted_0, mask)
    dev.store(grad_lifted_1_ptr + off, grad_lifted_1, mask)


@triton.jit
def core_fast_step_d4a79eeccf07(input_0, state_0, state_1, lifted_0, lifted_1):
    sub = input_0 - state_0  # scan_cores.py: h = v + (x - v) / 2.0
    div = dev.div_by_constant(sub, tl.full([], 2.0, tl.float32), tl.full([], 0.5, tl.float32))  # scan_cores.py: h = v + (x - v) / 2.0
    add = state_0 + div  # scan_cores.py: h = v + (x - v) / 2.0
    mul = lifted_0 * state_1  # scan_cores.py: s = spike(h - (1.0 + beta * a))
    add_1 = mul + tl.full([], 1.0, tl.float32)  # scan_cores.py: s = spike(h - (1.0 + beta * a))
    sub_1 = add - add_1  # scan_cores.py: s = spike(h - (1.0 + beta * a))
    ge = sub_1 >= tl.full([], 0.0, tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type = ge.to(tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    sub_2 = tl.full([], 1.0, tl.float32) - convert_element_type  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    mul_1 = add * sub_2  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    abs_1 = tl.abs(lifted_1)  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    reciprocal = dev.fast_div(tl.full([], 1.0, tl.float32), abs_1)  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    mul_2 = reciprocal * tl.full([], -1.0, tl.float32)  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    exp = dev.fast_exp(mul_2)  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    mul_3 = exp * state_1  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    add_2 = mul_3 + convert_element_type  # scan_cores.py: return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s
    return convert_element_type, mul_1, add_2, state_1, add


@triton.jit(do_not_specialize=["T"])
def core_fast_forward_0244b3f17577(
    input_0_ptr,
    lifted_0_ptr,
    lifted_1_ptr,
    state_0_ptr,
    state_1_ptr,
    output_0_ptr,
    saved_0_ptr,
    saved_1_ptr,
    final_state_0_ptr,
    final_state_1_ptr,
    T,
    NCL,
    lifted_0_inner0,
    lifted_0_size0,
    lifted_0_stride0,
    lifted_1_inner0,
    lifted_1_size0,
    lifted_1_stride0,
    BLOCK: tl.constexpr,
):
    """Forward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    lifted_0_off = (off // lifted_0_inner0) % lifted_0_size0 * lifted_0_stride0
    lifted_1_off = (off // lifted_1_inner0) % lifted_1_size0 * lifted_1_stride0
    state_0 = dev.load(state_0_ptr + off, mask)
    state_1 = dev.load(state_1_ptr + off, mask)
    lifted_0 = dev.load(lifted_0_ptr + lifted_0_off, mask)
    lifted_1 = dev.load(lifted_1_ptr + lifted_1_off, mask)
    input_0_at = input_0_ptr
    output_0_at = output_0_ptr
    saved_0_at = saved_0_ptr
    saved_1_at = saved_1_ptr
    chunks = T // 2
    for c in range(0, chunks):
        input_0_0 = dev.load(input_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        output_0, state_0, state_1, saved_0, saved_1 = core_fast_step_d4a79eeccf07(input_0_0, state_0, state_1, lifted_0, lifted_1)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(saved_0_at + off, saved_0, mask)
        dev.store(saved_1_at + off, saved_1, mask)
        output_0, state_0, state_1, saved_0, saved_1 = core_fast_step_d4a79eeccf07(input_0_1, state_0, state_1, lifted_0, lifted_1)
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
def core_fast_backward_5622115564b9(
    input_0_ptr,
    lifted_0_ptr,
    lifted_1_ptr,
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
    grad_lifted_0_ptr,
    grad_lifted_1_ptr,
    T,
    NCL,
    lifted_0_inner0,
    lifted_0_size0,
    lifted_0_stride0,
    lifted_1_inner0,
    lifted_1_size0,
    lifted_1_stride0,
    BLOCK: tl.constexpr,
):
    """Backward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    lifted_0_off = (off // lifted_0_inner0) % lifted_0_size0 * lifted_0_stride0
    lifted_1_off = (off // lifted_1_inner0) % lifted_1_size0 * lifted_1_stride0
    lifted_0 = dev.load(lifted_0_ptr + lifted_0_off, mask)
    lifted_1 = dev.load(lifted_1_ptr + lifted_1_off, mask)
    initial_0 = dev.load(state_0_ptr + off, mask)
    initial_1 = dev.load(state_1_ptr + off, mask)
    grad_state_0 = tl.zeros([BLOCK], tl.float32)
    grad_state_1 = tl.zeros([BLOCK], tl.float32)
    grad_lifted_0 = tl.zeros([BLOCK], tl.float32)
    grad_lifted_1 = tl.zeros([BLOCK], tl.float32)
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
        unused_0, state_0_1, state_1_1 = core_fast_step_7e1c6d08974d(input_0_0, state_0_0, state_1_0, lifted_0, lifted_1)
        grad_state_0 += grad_state_seq_0_1
        grad_state_1 += grad_state_seq_1_1
        result_0, result_1, result_2, result_3, result_4 = core_fast_vjp_604b8aa3192d(input_0_1, state_0_1, state_1_1, lifted_0, lifted_1, grad_output_0_1, grad_state_0, grad_state_1)
        dev.store(grad_input_0_at + 1 * step + off, result_0, mask)
        grad_state_0 = result_1
        grad_state_1 = result_2
        grad_lifted_0 += result_3.to(tl.float32)
        grad_lifted_1 += result_4.to(tl.float32)
        grad_state_0 += grad_state_seq_0_0
        grad_state_1 += grad_state_seq_1_0
        result_0, result_1, result_2, result_3, result_4 = core_fast_vjp_604b8aa3192d(input_0_0, state_0_0, state_1_0, lifted_0, lifted_1, grad_output_0_0, grad_state_0, grad_state_1)
        dev.store(grad_input_0_at + off, result_0, mask)
        grad_state_0 = result_1
        grad_state_1 = result_2
        grad_lifted_0 += result_3.to(tl.float32)
        grad_lifted_1 += result_4.to(tl.float32)
    dev.store(grad_state_0_ptr + off, grad_state_0, mask)
    dev.store(grad_state_1_ptr + off, grad_state_1, mask)
    dev.store(grad_lifted_0_ptr + off, grad_lifted_0, mask)
    dev.store(grad_lifted_1_ptr + off, grad_lifted_1, mask)


@triton.jit(do_not_specialize=["T"])
def core_fast_forward_7a6be922549a(
    input_0_ptr,
    lifted_0_ptr,
    lifted_1_ptr,
    state_0_ptr,
    state_1_ptr,
    output_0_ptr,
    state_seq_0_ptr,
    state_seq_1_ptr,
    checkpoint_0_ptr,
    checkpoint_1_ptr,
    T,
    NCL,
    lifted_0_inner0,
    lifted_0_size0,
    lifted_0_stride0,
    lifted_1_inner0,
    lifted_1_size0,
    lifted_1_stride0,
    BLOCK: tl.constexpr,
):
    """Forward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    lifted_0_off = (off // lifted_0_inner0) % lifted_0_size0 * lifted_0_stride0
    lifted_1_off = (off // lifted_1_inner0) % lifted_1_size0 * lifted_1_stride0
    state_0 = dev.load(state_0_ptr + off, mask)
    state_1 = dev.load(state_1_ptr + off, mask)
    lifted_0 = dev.load(lifted_0_ptr + lifted_0_off, mask)
    lifted_1 = dev.load(lifted_1_ptr + lifted_1_off, mask)
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
        output_0, state_0, state_1 = core_fast_step_7e1c6d08974d(input_0_0, state_0, state_1, lifted_0, lifted_1)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(state_seq_0_at + off, state_0, mask)
        dev.store(state_seq_1_at + off, state_1, mask)
        output_0, state_0, state_1 = core_fast_step_7e1c6d08974d(input_0_1, state_0, state_1, lifted_0, lifted_1)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        dev.store(state_seq_0_at + 1 * step + off, state_0, mask)
        dev.store(state_seq_1_at + 1 * step + off, state_1, mask)
        input_0_at += 2 * step
        output_0_at += 2 * step
        state_seq_0_at += 2 * step
        state_seq_1_at += 2 * step


