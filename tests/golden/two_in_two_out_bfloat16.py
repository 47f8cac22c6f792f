# Made by: PYTHONPATH=tests hatch run python tests/test_scan_goldens.py
import triton
import triton.language as tl

from flexsn_codegen.targets.triton import device as dev


@triton.jit
def core_step_a0fcb38baaf6(input_0, input_1, state_0, state_1, lifted_0):
    convert_element_type = state_0  # scan_cores.py: current = 0.5 * i + x * gain
    mul = convert_element_type * tl.full([], 0.5, tl.float32)  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_1 = dev.round_bfloat16(mul)  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_2 = input_0  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_3 = lifted_0  # scan_cores.py: current = 0.5 * i + x * gain
    mul_1 = convert_element_type_2 * convert_element_type_3  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_4 = dev.round_bfloat16(mul_1)  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_5 = convert_element_type_1  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_6 = convert_element_type_4  # scan_cores.py: current = 0.5 * i + x * gain
    add = convert_element_type_5 + convert_element_type_6  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_7 = dev.round_bfloat16(add)  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_8 = state_1  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    mul_2 = convert_element_type_8 * tl.full([], 0.75, tl.float32)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_9 = dev.round_bfloat16(mul_2)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_10 = convert_element_type_9  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_11 = convert_element_type_7  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    add_1 = convert_element_type_10 + convert_element_type_11  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_12 = dev.round_bfloat16(add_1)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_13 = input_1  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    tanh = dev.tanh(convert_element_type_13)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_14 = dev.round_bfloat16(tanh)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_15 = convert_element_type_12  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_16 = convert_element_type_14  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    sub = convert_element_type_15 - convert_element_type_16  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_17 = dev.round_bfloat16(sub)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_18 = convert_element_type_17  # scan_cores.py: s = spike(h - 0.5)
    sub_1 = convert_element_type_18 - tl.full([], 0.5, tl.float32)  # scan_cores.py: s = spike(h - 0.5)
    convert_element_type_19 = dev.round_bfloat16(sub_1)  # scan_cores.py: s = spike(h - 0.5)
    convert_element_type_20 = convert_element_type_19  # scan_cores.py: return (x >= 0).to(x.dtype)
    ge = convert_element_type_20 >= tl.full([], 0.0, tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type_21 = dev.round_bfloat16(ge.to(tl.float32))  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type_22 = convert_element_type_21  # scan_cores.py: return s, h, current, h - 0.5 * s
    mul_3 = convert_element_type_22 * tl.full([], 0.5, tl.float32)  # scan_cores.py: return s, h, current, h - 0.5 * s
    convert_element_type_23 = dev.round_bfloat16(mul_3)  # scan_cores.py: return s, h, current, h - 0.5 * s
    convert_element_type_24 = convert_element_type_23  # scan_cores.py: return s, h, current, h - 0.5 * s
    sub_2 = convert_element_type_18 - convert_element_type_24  # scan_cores.py: return s, h, current, h - 0.5 * s
    convert_element_type_25 = dev.round_bfloat16(sub_2)  # scan_cores.py: return s, h, current, h - 0.5 * s
    return convert_element_type_21, convert_element_type_17, convert_element_type_7, convert_element_type_25


@triton.jit(do_not_specialize=["T"])
def core_forward_19a0ee2808bf(
    input_0_ptr,
    input_1_ptr,
    lifted_0_ptr,
    output_0_ptr,
    output_1_ptr,
    final_state_0_ptr,
    final_state_1_ptr,
    T,
    NCL,
    lifted_0_inner0,
    lifted_0_size0,
    lifted_0_stride0,
    BLOCK: tl.constexpr,
):
    """Forward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    lifted_0_off = (off // lifted_0_inner0) % lifted_0_size0 * lifted_0_stride0
    state_0 = tl.zeros([BLOCK], tl.float32)
    state_1 = tl.zeros([BLOCK], tl.float32)
    lifted_0 = dev.load(lifted_0_ptr + lifted_0_off, mask)
    input_0_at = input_0_ptr
    input_1_at = input_1_ptr
    output_0_at = output_0_ptr
    output_1_at = output_1_ptr
    chunks = T // 2
    for c in range(0, chunks):
        input_0_0 = dev.load(input_0_at + off, mask)
        input_1_0 = dev.load(input_1_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        input_1_1 = dev.load(input_1_at + 1 * step + off, mask)
        output_0, output_1, state_0, state_1 = core_step_a0fcb38baaf6(input_0_0, input_1_0, state_0, state_1, lifted_0)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(output_1_at + off, output_1, mask)
        output_0, output_1, state_0, state_1 = core_step_a0fcb38baaf6(input_0_1, input_1_1, state_0, state_1, lifted_0)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        dev.store(output_1_at + 1 * step + off, output_1, mask)
        input_0_at += 2 * step
        input_1_at += 2 * step
        output_0_at += 2 * step
        output_1_at += 2 * step
    dev.store(final_state_0_ptr + off, state_0, mask)
    dev.store(final_state_1_ptr + off, state_1, mask)


@triton.jit(do_not_specialize=["T"])
def core_forward_b3356b9b0a77(
    input_0_ptr,
    input_1_ptr,
    lifted_0_ptr,
    state_0_ptr,
    state_1_ptr,
    output_0_ptr,
    output_1_ptr,
    state_seq_0_ptr,
    state_seq_1_ptr,
    T,
    NCL,
    lifted_0_inner0,
    lifted_0_size0,
    lifted_0_stride0,
    BLOCK: tl.constexpr,
):
    """Forward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    lifted_0_off = (off // lifted_0_inner0) % lifted_0_size0 * lifted_0_stride0
    state_0 = dev.load(state_0_ptr + off, mask)
    state_1 = dev.load(state_1_ptr + off, mask)
    lifted_0 = dev.load(lifted_0_ptr + lifted_0_off, mask)
    input_0_at = input_0_ptr
    input_1_at = input_1_ptr
    output_0_at = output_0_ptr
    output_1_at = output_1_ptr
    state_seq_0_at = state_seq_0_ptr
    state_seq_1_at = state_seq_1_ptr
    chunks = T // 2
    for c in range(0, chunks):
        input_0_0 = dev.load(input_0_at + off, mask)
        input_1_0 = dev.load(input_1_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        input_1_1 = dev.load(input_1_at + 1 * step + off, mask)
        output_0, output_1, state_0, state_1 = core_step_a0fcb38baaf6(input_0_0, input_1_0, state_0, state_1, lifted_0)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(output_1_at + off, output_1, mask)
        dev.store(state_seq_0_at + off, state_0, mask)
        dev.store(state_seq_1_at + off, state_1, mask)
        output_0, output_1, state_0, state_1 = core_step_a0fcb38baaf6(input_0_1, input_1_1, state_0, state_1, lifted_0)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        dev.store(output_1_at + 1 * step + off, output_1, mask)
        dev.store(state_seq_0_at + 1 * step + off, state_0, mask)
        dev.store(state_seq_1_at + 1 * step + off, state_1, mask)
        input_0_at += 2 * step
        input_1_at += 2 * step
        output_0_at += 2 * step
        output_1_at += 2 * step
        state_seq_0_at += 2 * step
        state_seq_1_at += 2 * step


@triton.jit
def core_vjp_d21a9c47d8c2(input_0, input_1, state_0, state_1, lifted_0, grad_output_0, grad_output_1, grad_state_0, grad_state_1):
    convert_element_type = state_0  # scan_cores.py: current = 0.5 * i + x * gain
    mul = convert_element_type * tl.full([], 0.5, tl.float32)  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_1 = dev.round_bfloat16(mul)  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_2 = input_0  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_3 = lifted_0  # scan_cores.py: current = 0.5 * i + x * gain
    mul_1 = convert_element_type_2 * convert_element_type_3  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_4 = dev.round_bfloat16(mul_1)  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_5 = convert_element_type_1  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_6 = convert_element_type_4  # scan_cores.py: current = 0.5 * i + x * gain
    add = convert_element_type_5 + convert_element_type_6  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_7 = dev.round_bfloat16(add)  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_8 = state_1  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    mul_2 = convert_element_type_8 * tl.full([], 0.75, tl.float32)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_9 = dev.round_bfloat16(mul_2)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_10 = convert_element_type_9  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_11 = convert_element_type_7  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    add_1 = convert_element_type_10 + convert_element_type_11  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_12 = dev.round_bfloat16(add_1)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_13 = input_1  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    tanh = dev.tanh(convert_element_type_13)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_14 = dev.round_bfloat16(tanh)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_15 = convert_element_type_12  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_16 = convert_element_type_14  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    sub = convert_element_type_15 - convert_element_type_16  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_17 = dev.round_bfloat16(sub)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_18 = convert_element_type_17  # scan_cores.py: s = spike(h - 0.5)
    sub_1 = convert_element_type_18 - tl.full([], 0.5, tl.float32)  # scan_cores.py: s = spike(h - 0.5)
    convert_element_type_19 = dev.round_bfloat16(sub_1)  # scan_cores.py: s = spike(h - 0.5)
    convert_element_type_20 = convert_element_type_19  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type_26 = grad_state_1  # scan_cores.py: return s, h, current, h - 0.5 * s
    neg = convert_element_type_26 * tl.full([], -1.0, tl.float32)  # scan_cores.py: return s, h, current, h - 0.5 * s
    convert_element_type_27 = dev.round_bfloat16(neg)  # scan_cores.py: return s, h, current, h - 0.5 * s
    convert_element_type_28 = grad_output_1  # scan_cores.py: return s, h, current, h - 0.5 * s
    add_2 = convert_element_type_28 + convert_element_type_26  # scan_cores.py: return s, h, current, h - 0.5 * s
    convert_element_type_29 = dev.round_bfloat16(add_2)  # scan_cores.py: return s, h, current, h - 0.5 * s
    convert_element_type_30 = convert_element_type_27  # scan_cores.py: return s, h, current, h - 0.5 * s
    mul_4 = convert_element_type_30 * tl.full([], 0.5, tl.float32)  # scan_cores.py: return s, h, current, h - 0.5 * s
    convert_element_type_31 = dev.round_bfloat16(mul_4)  # scan_cores.py: return s, h, current, h - 0.5 * s
    convert_element_type_32 = grad_output_0  # scan_cores.py: return s, h, current, h - 0.5 * s
    convert_element_type_33 = convert_element_type_31  # scan_cores.py: return s, h, current, h - 0.5 * s
    add_3 = convert_element_type_32 + convert_element_type_33  # scan_cores.py: return s, h, current, h - 0.5 * s
    convert_element_type_34 = dev.round_bfloat16(add_3)  # scan_cores.py: return s, h, current, h - 0.5 * s
    mul_5 = convert_element_type_20 * tl.full([], 4.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    convert_element_type_35 = dev.round_bfloat16(mul_5)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    convert_element_type_36 = convert_element_type_35  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    neg_1 = convert_element_type_36 * tl.full([], -1.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    exp = dev.exp(neg_1)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    add_4 = tl.full([], 1.0, tl.float32) + exp  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    div = dev.fast_div(tl.full([], 1.0, tl.float32), add_4)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    convert_element_type_37 = dev.round_bfloat16(div)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    convert_element_type_38 = convert_element_type_34  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_6 = convert_element_type_38 * tl.full([], 4.0, tl.float32)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_39 = dev.round_bfloat16(mul_6)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_40 = convert_element_type_39  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_41 = convert_element_type_37  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_7 = convert_element_type_40 * convert_element_type_41  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_42 = dev.round_bfloat16(mul_7)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    sub_3 = tl.full([], 1.0, tl.float32) - convert_element_type_41  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_43 = dev.round_bfloat16(sub_3)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_44 = convert_element_type_42  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_45 = convert_element_type_43  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_8 = convert_element_type_44 * convert_element_type_45  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_46 = dev.round_bfloat16(mul_8)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_47 = convert_element_type_29  # scan_cores.py: s = spike(h - 0.5)
    convert_element_type_48 = convert_element_type_46  # scan_cores.py: s = spike(h - 0.5)
    add_5 = convert_element_type_47 + convert_element_type_48  # scan_cores.py: s = spike(h - 0.5)
    convert_element_type_49 = dev.round_bfloat16(add_5)  # scan_cores.py: s = spike(h - 0.5)
    convert_element_type_50 = convert_element_type_49  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    neg_2 = convert_element_type_50 * tl.full([], -1.0, tl.float32)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_51 = dev.round_bfloat16(neg_2)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_52 = convert_element_type_51  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    mul_9 = convert_element_type_16 * convert_element_type_16  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    sub_4 = tl.full([], 1.0, tl.float32) - mul_9  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    mul_10 = convert_element_type_52 * sub_4  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_53 = dev.round_bfloat16(mul_10)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_54 = grad_state_0  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    add_6 = convert_element_type_54 + convert_element_type_50  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_55 = dev.round_bfloat16(add_6)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    mul_11 = convert_element_type_50 * tl.full([], 0.75, tl.float32)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_56 = dev.round_bfloat16(mul_11)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_57 = convert_element_type_55  # scan_cores.py: current = 0.5 * i + x * gain
    mul_12 = convert_element_type_57 * convert_element_type_2  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_58 = dev.round_bfloat16(mul_12)  # scan_cores.py: current = 0.5 * i + x * gain
    mul_13 = convert_element_type_57 * convert_element_type_3  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_59 = dev.round_bfloat16(mul_13)  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_60 = convert_element_type_58  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_61 = dev.round_bfloat16(convert_element_type_60)  # scan_cores.py: current = 0.5 * i + x * gain
    mul_14 = convert_element_type_57 * tl.full([], 0.5, tl.float32)  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_62 = dev.round_bfloat16(mul_14)  # scan_cores.py: current = 0.5 * i + x * gain
    return convert_element_type_59, convert_element_type_53, convert_element_type_62, convert_element_type_56, convert_element_type_61


@triton.jit(do_not_specialize=["T"])
def core_backward_52cf33e1b87b(
    input_0_ptr,
    input_1_ptr,
    lifted_0_ptr,
    state_0_ptr,
    state_1_ptr,
    checkpoint_0_ptr,
    checkpoint_1_ptr,
    grad_output_0_ptr,
    grad_output_1_ptr,
    grad_final_state_0_ptr,
    grad_final_state_1_ptr,
    grad_input_0_ptr,
    grad_input_1_ptr,
    grad_state_0_ptr,
    grad_state_1_ptr,
    grad_lifted_0_ptr,
    T,
    NCL,
    lifted_0_inner0,
    lifted_0_size0,
    lifted_0_stride0,
    BLOCK: tl.constexpr,
):
    """Backward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    lifted_0_off = (off // lifted_0_inner0) % lifted_0_size0 * lifted_0_stride0
    lifted_0 = dev.load(lifted_0_ptr + lifted_0_off, mask)
    initial_0 = dev.load(state_0_ptr + off, mask)
    initial_1 = dev.load(state_1_ptr + off, mask)
    grad_state_0 = dev.load(grad_final_state_0_ptr + off, mask)
    grad_state_1 = dev.load(grad_final_state_1_ptr + off, mask)
    grad_lifted_0 = tl.zeros([BLOCK], tl.float32)
    chunks = T // 2
    input_0_at = input_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    input_1_at = input_1_ptr + tl.cast(chunks, tl.int64) * 2 * step
    grad_output_0_at = grad_output_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    grad_output_1_at = grad_output_1_ptr + tl.cast(chunks, tl.int64) * 2 * step
    grad_input_0_at = grad_input_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    grad_input_1_at = grad_input_1_ptr + tl.cast(chunks, tl.int64) * 2 * step
    for i in range(0, chunks):
        input_0_at -= 2 * step
        input_1_at -= 2 * step
        grad_output_0_at -= 2 * step
        grad_output_1_at -= 2 * step
        grad_input_0_at -= 2 * step
        grad_input_1_at -= 2 * step
        c = chunks - 1 - i
        state_0_0 = dev.load(checkpoint_0_ptr + (tl.cast(c, tl.int64) - 1) * step + off, mask & (c > 0))
        state_0_0 = tl.where(c > 0, state_0_0, initial_0)
        state_1_0 = dev.load(checkpoint_1_ptr + (tl.cast(c, tl.int64) - 1) * step + off, mask & (c > 0))
        state_1_0 = tl.where(c > 0, state_1_0, initial_1)
        input_0_0 = dev.load(input_0_at + off, mask)
        input_1_0 = dev.load(input_1_at + off, mask)
        grad_output_0_0 = dev.load(grad_output_0_at + off, mask)
        grad_output_1_0 = dev.load(grad_output_1_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        input_1_1 = dev.load(input_1_at + 1 * step + off, mask)
        grad_output_0_1 = dev.load(grad_output_0_at + 1 * step + off, mask)
        grad_output_1_1 = dev.load(grad_output_1_at + 1 * step + off, mask)
        unused_0, unused_1, state_0_1, state_1_1 = core_step_a0fcb38baaf6(input_0_0, input_1_0, state_0_0, state_1_0, lifted_0)
        result_0, result_1, result_2, result_3, result_4 = core_vjp_d21a9c47d8c2(input_0_1, input_1_1, state_0_1, state_1_1, lifted_0, grad_output_0_1, grad_output_1_1, grad_state_0, grad_state_1)
        dev.store(grad_input_0_at + 1 * step + off, result_0, mask)
        dev.store(grad_input_1_at + 1 * step + off, result_1, mask)
        grad_state_0 = result_2
        grad_state_1 = result_3
        grad_lifted_0 += result_4.to(tl.float32)
        result_0, result_1, result_2, result_3, result_4 = core_vjp_d21a9c47d8c2(input_0_0, input_1_0, state_0_0, state_1_0, lifted_0, grad_output_0_0, grad_output_1_0, grad_state_0, grad_state_1)
        dev.store(grad_input_0_at + off, result_0, mask)
        dev.store(grad_input_1_at + off, result_1, mask)
        grad_state_0 = result_2
        grad_state_1 = result_3
        grad_lifted_0 += result_4.to(tl.float32)
    dev.store(grad_state_0_ptr + off, grad_state_0, mask)
    dev.store(grad_state_1_ptr + off, grad_state_1, mask)
    dev.store(grad_lifted_0_ptr + off, grad_lifted_0, mask)


@triton.jit(do_not_specialize=["T"])
def core_forward_71eea76989c1(
    input_0_ptr,
    input_1_ptr,
    lifted_0_ptr,
    state_0_ptr,
    state_1_ptr,
    output_0_ptr,
    output_1_ptr,
    final_state_0_ptr,
    final_state_1_ptr,
    checkpoint_0_ptr,
    checkpoint_1_ptr,
    T,
    NCL,
    lifted_0_inner0,
    lifted_0_size0,
    lifted_0_stride0,
    BLOCK: tl.constexpr,
):
    """Forward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    lifted_0_off = (off // lifted_0_inner0) % lifted_0_size0 * lifted_0_stride0
    state_0 = dev.load(state_0_ptr + off, mask)
    state_1 = dev.load(state_1_ptr + off, mask)
    lifted_0 = dev.load(lifted_0_ptr + lifted_0_off, mask)
    input_0_at = input_0_ptr
    input_1_at = input_1_ptr
    output_0_at = output_0_ptr
    output_1_at = output_1_ptr
    chunks = T // 2
    for c in range(0, chunks):
        input_0_0 = dev.load(input_0_at + off, mask)
        input_1_0 = dev.load(input_1_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        input_1_1 = dev.load(input_1_at + 1 * step + off, mask)
        dev.store(checkpoint_0_ptr + tl.cast(c * 0 + -1, tl.int64) * step + off, state_0, mask & (c > 0))
        dev.store(checkpoint_1_ptr + tl.cast(c * 0 + -1, tl.int64) * step + off, state_1, mask & (c > 0))
        output_0, output_1, state_0, state_1 = core_step_a0fcb38baaf6(input_0_0, input_1_0, state_0, state_1, lifted_0)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(output_1_at + off, output_1, mask)
        output_0, output_1, state_0, state_1 = core_step_a0fcb38baaf6(input_0_1, input_1_1, state_0, state_1, lifted_0)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        dev.store(output_1_at + 1 * step + off, output_1, mask)
        input_0_at += 2 * step
        input_1_at += 2 * step
        output_0_at += 2 * step
        output_1_at += 2 * step
    dev.store(final_state_0_ptr + off, state_0, mask)
    dev.store(final_state_1_ptr + off, state_1, mask)


@triton.jit
def core_vjp_b892387397ff(input_0, input_1, lifted_0, saved_0, grad_output_0, grad_output_1, grad_state_0, grad_state_1):
    convert_element_type_2 = input_0  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_3 = lifted_0  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_13 = input_1  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    tanh = dev.tanh(convert_element_type_13)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_14 = dev.round_bfloat16(tanh)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_16 = convert_element_type_14  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_26 = grad_state_1  # scan_cores.py: return s, h, current, h - 0.5 * s
    neg = convert_element_type_26 * tl.full([], -1.0, tl.float32)  # scan_cores.py: return s, h, current, h - 0.5 * s
    convert_element_type_27 = dev.round_bfloat16(neg)  # scan_cores.py: return s, h, current, h - 0.5 * s
    convert_element_type_28 = grad_output_1  # scan_cores.py: return s, h, current, h - 0.5 * s
    add_2 = convert_element_type_28 + convert_element_type_26  # scan_cores.py: return s, h, current, h - 0.5 * s
    convert_element_type_29 = dev.round_bfloat16(add_2)  # scan_cores.py: return s, h, current, h - 0.5 * s
    convert_element_type_30 = convert_element_type_27  # scan_cores.py: return s, h, current, h - 0.5 * s
    mul_4 = convert_element_type_30 * tl.full([], 0.5, tl.float32)  # scan_cores.py: return s, h, current, h - 0.5 * s
    convert_element_type_31 = dev.round_bfloat16(mul_4)  # scan_cores.py: return s, h, current, h - 0.5 * s
    convert_element_type_32 = grad_output_0  # scan_cores.py: return s, h, current, h - 0.5 * s
    convert_element_type_33 = convert_element_type_31  # scan_cores.py: return s, h, current, h - 0.5 * s
    add_3 = convert_element_type_32 + convert_element_type_33  # scan_cores.py: return s, h, current, h - 0.5 * s
    convert_element_type_34 = dev.round_bfloat16(add_3)  # scan_cores.py: return s, h, current, h - 0.5 * s
    convert_element_type_38 = convert_element_type_34  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_6 = convert_element_type_38 * tl.full([], 4.0, tl.float32)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_39 = dev.round_bfloat16(mul_6)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_40 = convert_element_type_39  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_41 = saved_0  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_7 = convert_element_type_40 * convert_element_type_41  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_42 = dev.round_bfloat16(mul_7)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    sub_3 = tl.full([], 1.0, tl.float32) - convert_element_type_41  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_43 = dev.round_bfloat16(sub_3)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_44 = convert_element_type_42  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_45 = convert_element_type_43  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_8 = convert_element_type_44 * convert_element_type_45  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_46 = dev.round_bfloat16(mul_8)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_47 = convert_element_type_29  # scan_cores.py: s = spike(h - 0.5)
    convert_element_type_48 = convert_element_type_46  # scan_cores.py: s = spike(h - 0.5)
    add_5 = convert_element_type_47 + convert_element_type_48  # scan_cores.py: s = spike(h - 0.5)
    convert_element_type_49 = dev.round_bfloat16(add_5)  # scan_cores.py: s = spike(h - 0.5)
    convert_element_type_50 = convert_element_type_49  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    neg_2 = convert_element_type_50 * tl.full([], -1.0, tl.float32)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_51 = dev.round_bfloat16(neg_2)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_52 = convert_element_type_51  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    mul_9 = convert_element_type_16 * convert_element_type_16  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    sub_4 = tl.full([], 1.0, tl.float32) - mul_9  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    mul_10 = convert_element_type_52 * sub_4  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_53 = dev.round_bfloat16(mul_10)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_54 = grad_state_0  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    add_6 = convert_element_type_54 + convert_element_type_50  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_55 = dev.round_bfloat16(add_6)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    mul_11 = convert_element_type_50 * tl.full([], 0.75, tl.float32)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_56 = dev.round_bfloat16(mul_11)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_57 = convert_element_type_55  # scan_cores.py: current = 0.5 * i + x * gain
    mul_12 = convert_element_type_57 * convert_element_type_2  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_58 = dev.round_bfloat16(mul_12)  # scan_cores.py: current = 0.5 * i + x * gain
    mul_13 = convert_element_type_57 * convert_element_type_3  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_59 = dev.round_bfloat16(mul_13)  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_60 = convert_element_type_58  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_61 = dev.round_bfloat16(convert_element_type_60)  # scan_cores.py: current = 0.5 * i + x * gain
    mul_14 = convert_element_type_57 * tl.full([], 0.5, tl.float32)  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_62 = dev.round_bfloat16(mul_14)  # scan_cores.py: current = 0.5 * i + x * gain
    return convert_element_type_59, convert_element_type_53, convert_element_type_62, convert_element_type_56, convert_element_type_61


@triton.jit(do_not_specialize=["T"])
def core_backward_fa66f63540be(
    input_0_ptr,
    input_1_ptr,
    lifted_0_ptr,
    saved_0_ptr,
    grad_output_0_ptr,
    grad_output_1_ptr,
    grad_final_state_0_ptr,
    grad_final_state_1_ptr,
    grad_input_0_ptr,
    grad_input_1_ptr,
    grad_state_0_ptr,
    grad_state_1_ptr,
    grad_lifted_0_ptr,
    T,
    NCL,
    lifted_0_inner0,
    lifted_0_size0,
    lifted_0_stride0,
    BLOCK: tl.constexpr,
):
    """Backward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    lifted_0_off = (off // lifted_0_inner0) % lifted_0_size0 * lifted_0_stride0
    lifted_0 = dev.load(lifted_0_ptr + lifted_0_off, mask)
    grad_state_0 = dev.load(grad_final_state_0_ptr + off, mask)
    grad_state_1 = dev.load(grad_final_state_1_ptr + off, mask)
    grad_lifted_0 = tl.zeros([BLOCK], tl.float32)
    chunks = T // 2
    input_0_at = input_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    input_1_at = input_1_ptr + tl.cast(chunks, tl.int64) * 2 * step
    saved_0_at = saved_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    grad_output_0_at = grad_output_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    grad_output_1_at = grad_output_1_ptr + tl.cast(chunks, tl.int64) * 2 * step
    grad_input_0_at = grad_input_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    grad_input_1_at = grad_input_1_ptr + tl.cast(chunks, tl.int64) * 2 * step
    for i in range(0, chunks):
        input_0_at -= 2 * step
        input_1_at -= 2 * step
        saved_0_at -= 2 * step
        grad_output_0_at -= 2 * step
        grad_output_1_at -= 2 * step
        grad_input_0_at -= 2 * step
        grad_input_1_at -= 2 * step
        c = chunks - 1 - i
        input_0_0 = dev.load(input_0_at + off, mask)
        input_1_0 = dev.load(input_1_at + off, mask)
        saved_0_0 = dev.load(saved_0_at + off, mask)
        grad_output_0_0 = dev.load(grad_output_0_at + off, mask)
        grad_output_1_0 = dev.load(grad_output_1_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        input_1_1 = dev.load(input_1_at + 1 * step + off, mask)
        saved_0_1 = dev.load(saved_0_at + 1 * step + off, mask)
        grad_output_0_1 = dev.load(grad_output_0_at + 1 * step + off, mask)
        grad_output_1_1 = dev.load(grad_output_1_at + 1 * step + off, mask)
        result_0, result_1, result_2, result_3, result_4 = core_vjp_b892387397ff(input_0_1, input_1_1, lifted_0, saved_0_1, grad_output_0_1, grad_output_1_1, grad_state_0, grad_state_1)
        dev.store(grad_input_0_at + 1 * step + off, result_0, mask)
        dev.store(grad_input_1_at + 1 * step + off, result_1, mask)
        grad_state_0 = result_2
        grad_state_1 = result_3
        grad_lifted_0 += result_4.to(tl.float32)
        result_0, result_1, result_2, result_3, result_4 = core_vjp_b892387397ff(input_0_0, input_1_0, lifted_0, saved_0_0, grad_output_0_0, grad_output_1_0, grad_state_0, grad_state_1)
        dev.store(grad_input_0_at + off, result_0, mask)
        dev.store(grad_input_1_at + off, result_1, mask)
        grad_state_0 = result_2
        grad_state_1 = result_3
        grad_lifted_0 += result_4.to(tl.float32)
    dev.store(grad_state_0_ptr + off, grad_state_0, mask)
    dev.store(grad_state_1_ptr + off, grad_state_1, mask)
    dev.store(grad_lifted_0_ptr + off, grad_lifted_0, mask)


@triton.jit
def core_step_0dd231d91eaf(input_0, input_1, state_0, state_1, lifted_0):
    convert_element_type = state_0  # scan_cores.py: current = 0.5 * i + x * gain
    mul = convert_element_type * tl.full([], 0.5, tl.float32)  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_1 = dev.round_bfloat16(mul)  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_2 = input_0  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_3 = lifted_0  # scan_cores.py: current = 0.5 * i + x * gain
    mul_1 = convert_element_type_2 * convert_element_type_3  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_4 = dev.round_bfloat16(mul_1)  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_5 = convert_element_type_1  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_6 = convert_element_type_4  # scan_cores.py: current = 0.5 * i + x * gain
    add = convert_element_type_5 + convert_element_type_6  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_7 = dev.round_bfloat16(add)  # scan_cores.py: current = 0.5 * i + x * gain
    convert_element_type_8 = state_1  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    mul_2 = convert_element_type_8 * tl.full([], 0.75, tl.float32)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_9 = dev.round_bfloat16(mul_2)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_10 = convert_element_type_9  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_11 = convert_element_type_7  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    add_1 = convert_element_type_10 + convert_element_type_11  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_12 = dev.round_bfloat16(add_1)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_13 = input_1  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    tanh = dev.tanh(convert_element_type_13)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_14 = dev.round_bfloat16(tanh)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_15 = convert_element_type_12  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_16 = convert_element_type_14  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    sub = convert_element_type_15 - convert_element_type_16  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_17 = dev.round_bfloat16(sub)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    convert_element_type_18 = convert_element_type_17  # scan_cores.py: s = spike(h - 0.5)
    sub_1 = convert_element_type_18 - tl.full([], 0.5, tl.float32)  # scan_cores.py: s = spike(h - 0.5)
    convert_element_type_19 = dev.round_bfloat16(sub_1)  # scan_cores.py: s = spike(h - 0.5)
    convert_element_type_20 = convert_element_type_19  # scan_cores.py: return (x >= 0).to(x.dtype)
    ge = convert_element_type_20 >= tl.full([], 0.0, tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type_21 = dev.round_bfloat16(ge.to(tl.float32))  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type_22 = convert_element_type_21  # scan_cores.py: return s, h, current, h - 0.5 * s
    mul_3 = convert_element_type_22 * tl.full([], 0.5, tl.float32)  # scan_cores.py: return s, h, current, h - 0.5 * s
    convert_element_type_23 = dev.round_bfloat16(mul_3)  # scan_cores.py: return s, h, current, h - 0.5 * s
    convert_element_type_24 = convert_element_type_23  # scan_cores.py: return s, h, current, h - 0.5 * s
    sub_2 = convert_element_type_18 - convert_element_type_24  # scan_cores.py: return s, h, current, h - 0.5 * s
    convert_element_type_25 = dev.round_bfloat16(sub_2)  # scan_cores.py: return s, h, current, h - 0.5 * s
    mul_5 = convert_element_type_20 * tl.full([], 4.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    convert_element_type_35 = dev.round_bfloat16(mul_5)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    convert_element_type_36 = convert_element_type_35  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    neg_1 = convert_element_type_36 * tl.full([], -1.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    exp = dev.exp(neg_1)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    add_4 = tl.full([], 1.0, tl.float32) + exp  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    div = dev.div(tl.full([], 1.0, tl.float32), add_4)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    convert_element_type_37 = dev.round_bfloat16(div)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    return convert_element_type_21, convert_element_type_17, convert_element_type_7, convert_element_type_25, convert_element_type_37


@triton.jit(do_not_specialize=["T"])
def core_forward_bb17a2e6f56d(
    input_0_ptr,
    input_1_ptr,
    lifted_0_ptr,
    state_0_ptr,
    state_1_ptr,
    output_0_ptr,
    output_1_ptr,
    saved_0_ptr,
    final_state_0_ptr,
    final_state_1_ptr,
    T,
    NCL,
    lifted_0_inner0,
    lifted_0_size0,
    lifted_0_stride0,
    BLOCK: tl.constexpr,
):
    """Forward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    lifted_0_off = (off // lifted_0_inner0) % lifted_0_size0 * lifted_0_stride0
    state_0 = dev.load(state_0_ptr + off, mask)
    state_1 = dev.load(state_1_ptr + off, mask)
    lifted_0 = dev.load(lifted_0_ptr + lifted_0_off, mask)
    input_0_at = input_0_ptr
    input_1_at = input_1_ptr
    output_0_at = output_0_ptr
    output_1_at = output_1_ptr
    saved_0_at = saved_0_ptr
    chunks = T // 2
    for c in range(0, chunks):
        input_0_0 = dev.load(input_0_at + off, mask)
        input_1_0 = dev.load(input_1_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        input_1_1 = dev.load(input_1_at + 1 * step + off, mask)
        output_0, output_1, state_0, state_1, saved_0 = core_step_0dd231d91eaf(input_0_0, input_1_0, state_0, state_1, lifted_0)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(output_1_at + off, output_1, mask)
        dev.store(saved_0_at + off, saved_0, mask)
        output_0, output_1, state_0, state_1, saved_0 = core_step_0dd231d91eaf(input_0_1, input_1_1, state_0, state_1, lifted_0)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        dev.store(output_1_at + 1 * step + off, output_1, mask)
        dev.store(saved_0_at + 1 * step + off, saved_0, mask)
        input_0_at += 2 * step
        input_1_at += 2 * step
        output_0_at += 2 * step
        output_1_at += 2 * step
        saved_0_at += 2 * step
    dev.store(final_state_0_ptr + off, state_0, mask)
    dev.store(final_state_1_ptr + off, state_1, mask)


@triton.jit(do_not_specialize=["T"])
def core_backward_f9251ee7ee08(
    input_0_ptr,
    input_1_ptr,
    lifted_0_ptr,
    state_0_ptr,
    state_1_ptr,
    checkpoint_0_ptr,
    checkpoint_1_ptr,
    grad_output_0_ptr,
    grad_output_1_ptr,
    grad_state_seq_0_ptr,
    grad_state_seq_1_ptr,
    grad_input_0_ptr,
    grad_input_1_ptr,
    grad_state_0_ptr,
    grad_state_1_ptr,
    grad_lifted_0_ptr,
    T,
    NCL,
    lifted_0_inner0,
    lifted_0_size0,
    lifted_0_stride0,
    BLOCK: tl.constexpr,
):
    """Backward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    lifted_0_off = (off // lifted_0_inner0) % lifted_0_size0 * lifted_0_stride0
    lifted_0 = dev.load(lifted_0_ptr + lifted_0_off, mask)
    initial_0 = dev.load(state_0_ptr + off, mask)
    initial_1 = dev.load(state_1_ptr + off, mask)
    grad_state_0 = tl.zeros([BLOCK], tl.float32)
    grad_state_1 = tl.zeros([BLOCK], tl.float32)
    grad_lifted_0 = tl.zeros([BLOCK], tl.float32)
    chunks = T // 2
    input_0_at = input_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    input_1_at = input_1_ptr + tl.cast(chunks, tl.int64) * 2 * step
    grad_output_0_at = grad_output_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    grad_output_1_at = grad_output_1_ptr + tl.cast(chunks, tl.int64) * 2 * step
    grad_state_seq_0_at = grad_state_seq_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    grad_state_seq_1_at = grad_state_seq_1_ptr + tl.cast(chunks, tl.int64) * 2 * step
    grad_input_0_at = grad_input_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    grad_input_1_at = grad_input_1_ptr + tl.cast(chunks, tl.int64) * 2 * step
    for i in range(0, chunks):
        input_0_at -= 2 * step
        input_1_at -= 2 * step
        grad_output_0_at -= 2 * step
        grad_output_1_at -= 2 * step
        grad_state_seq_0_at -= 2 * step
        grad_state_seq_1_at -= 2 * step
        grad_input_0_at -= 2 * step
        grad_input_1_at -= 2 * step
        c = chunks - 1 - i
        state_0_0 = dev.load(checkpoint_0_ptr + (tl.cast(c, tl.int64) - 1) * step + off, mask & (c > 0))
        state_0_0 = tl.where(c > 0, state_0_0, initial_0)
        state_1_0 = dev.load(checkpoint_1_ptr + (tl.cast(c, tl.int64) - 1) * step + off, mask & (c > 0))
        state_1_0 = tl.where(c > 0, state_1_0, initial_1)
        input_0_0 = dev.load(input_0_at + off, mask)
        input_1_0 = dev.load(input_1_at + off, mask)
        grad_output_0_0 = dev.load(grad_output_0_at + off, mask)
        grad_output_1_0 = dev.load(grad_output_1_at + off, mask)
        grad_state_seq_0_0 = dev.load(grad_state_seq_0_at + off, mask)
        grad_state_seq_1_0 = dev.load(grad_state_seq_1_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        input_1_1 = dev.load(input_1_at + 1 * step + off, mask)
        grad_output_0_1 = dev.load(grad_output_0_at + 1 * step + off, mask)
        grad_output_1_1 = dev.load(grad_output_1_at + 1 * step + off, mask)
        grad_state_seq_0_1 = dev.load(grad_state_seq_0_at + 1 * step + off, mask)
        grad_state_seq_1_1 = dev.load(grad_state_seq_1_at + 1 * step + off, mask)
        unused_0, unused_1, state_0_1, state_1_1 = core_step_a0fcb38baaf6(input_0_0, input_1_0, state_0_0, state_1_0, lifted_0)
        grad_state_0 += grad_state_seq_0_1
        grad_state_1 += grad_state_seq_1_1
        result_0, result_1, result_2, result_3, result_4 = core_vjp_d21a9c47d8c2(input_0_1, input_1_1, state_0_1, state_1_1, lifted_0, grad_output_0_1, grad_output_1_1, grad_state_0, grad_state_1)
        dev.store(grad_input_0_at + 1 * step + off, result_0, mask)
        dev.store(grad_input_1_at + 1 * step + off, result_1, mask)
        grad_state_0 = result_2
        grad_state_1 = result_3
        grad_lifted_0 += result_4.to(tl.float32)
        grad_state_0 += grad_state_seq_0_0
        grad_state_1 += grad_state_seq_1_0
        result_0, result_1, result_2, result_3, result_4 = core_vjp_d21a9c47d8c2(input_0_0, input_1_0, state_0_0, state_1_0, lifted_0, grad_output_0_0, grad_output_1_0, grad_state_0, grad_state_1)
        dev.store(grad_input_0_at + off, result_0, mask)
        dev.store(grad_input_1_at + off, result_1, mask)
        grad_state_0 = result_2
        grad_state_1 = result_3
        grad_lifted_0 += result_4.to(tl.float32)
    dev.store(grad_state_0_ptr + off, grad_state_0, mask)
    dev.store(grad_state_1_ptr + off, grad_state_1, mask)
    dev.store(grad_lifted_0_ptr + off, grad_lifted_0, mask)


@triton.jit(do_not_specialize=["T"])
def core_forward_2d4a4dd4480e(
    input_0_ptr,
    input_1_ptr,
    lifted_0_ptr,
    state_0_ptr,
    state_1_ptr,
    output_0_ptr,
    output_1_ptr,
    state_seq_0_ptr,
    state_seq_1_ptr,
    checkpoint_0_ptr,
    checkpoint_1_ptr,
    T,
    NCL,
    lifted_0_inner0,
    lifted_0_size0,
    lifted_0_stride0,
    BLOCK: tl.constexpr,
):
    """Forward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    lifted_0_off = (off // lifted_0_inner0) % lifted_0_size0 * lifted_0_stride0
    state_0 = dev.load(state_0_ptr + off, mask)
    state_1 = dev.load(state_1_ptr + off, mask)
    lifted_0 = dev.load(lifted_0_ptr + lifted_0_off, mask)
    input_0_at = input_0_ptr
    input_1_at = input_1_ptr
    output_0_at = output_0_ptr
    output_1_at = output_1_ptr
    state_seq_0_at = state_seq_0_ptr
    state_seq_1_at = state_seq_1_ptr
    chunks = T // 2
    for c in range(0, chunks):
        input_0_0 = dev.load(input_0_at + off, mask)
        input_1_0 = dev.load(input_1_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        input_1_1 = dev.load(input_1_at + 1 * step + off, mask)
        dev.store(checkpoint_0_ptr + tl.cast(c * 0 + -1, tl.int64) * step + off, state_0, mask & (c > 0))
        dev.store(checkpoint_1_ptr + tl.cast(c * 0 + -1, tl.int64) * step + off, state_1, mask & (c > 0))
        output_0, output_1, state_0, state_1 = core_step_a0fcb38baaf6(input_0_0, input_1_0, state_0, state_1, lifted_0)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(output_1_at + off, output_1, mask)
        dev.store(state_seq_0_at + off, state_0, mask)
        dev.store(state_seq_1_at + off, state_1, mask)
        output_0, output_1, state_0, state_1 = core_step_a0fcb38baaf6(input_0_1, input_1_1, state_0, state_1, lifted_0)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        dev.store(output_1_at + 1 * step + off, output_1, mask)
        dev.store(state_seq_0_at + 1 * step + off, state_0, mask)
        dev.store(state_seq_1_at + 1 * step + off, state_1, mask)
        input_0_at += 2 * step
        input_1_at += 2 * step
        output_0_at += 2 * step
        output_1_at += 2 * step
        state_seq_0_at += 2 * step
        state_seq_1_at += 2 * step


