# Made by: PYTHONPATH=tests hatch run python tests/test_scan_goldens.py
import triton
import triton.language as tl

from flexsn_codegen.targets.triton import device as dev


@triton.jit
def core_step_d48608baa060(input_0, state_0, state_1):
    convert_element_type = state_0  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add = convert_element_type + tl.full([], 0.1, tl.float32)  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_1 = add  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    sub = convert_element_type - tl.full([], 0.8, tl.float32)  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_2 = sub  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_3 = convert_element_type_1  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_4 = convert_element_type_2  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    mul = convert_element_type_3 * convert_element_type_4  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_5 = mul  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_6 = input_0  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_7 = convert_element_type_5  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add_1 = convert_element_type_6 + convert_element_type_7  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_8 = add_1  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_9 = convert_element_type_8  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_10 = state_1  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    sub_1 = convert_element_type_9 - convert_element_type_10  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_11 = sub_1  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_12 = convert_element_type_11  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    div = dev.div_by_constant(convert_element_type_12, tl.full([], 2.0, tl.float32), tl.full([], 0.5, tl.float32))  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_13 = div  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_14 = convert_element_type_13  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add_2 = convert_element_type + convert_element_type_14  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_15 = add_2  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_16 = convert_element_type_15  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    add_3 = convert_element_type_16 + tl.full([], 0.1, tl.float32)  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_17 = add_3  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_18 = convert_element_type_17  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    mul_1 = convert_element_type_18 * tl.full([], 0.3, tl.float32)  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_19 = mul_1  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_20 = convert_element_type_19  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    sub_2 = convert_element_type_20 - convert_element_type_10  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_21 = sub_2  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_22 = convert_element_type_21  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    div_1 = dev.div_by_constant(convert_element_type_22, tl.full([], 2.0, tl.float32), tl.full([], 0.5, tl.float32))  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_23 = div_1  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_24 = convert_element_type_23  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    add_4 = convert_element_type_10 + convert_element_type_24  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_25 = add_4  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    sub_3 = convert_element_type_16 - tl.full([], 1.0, tl.float32)  # scan_cores.py: s = spike(h - 1.0)
    convert_element_type_26 = sub_3  # scan_cores.py: s = spike(h - 1.0)
    convert_element_type_27 = convert_element_type_26  # scan_cores.py: return (x >= 0).to(x.dtype)
    ge = convert_element_type_27 >= tl.full([], 0.0, tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type_28 = ge.to(tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type_29 = convert_element_type_28  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    mul_2 = convert_element_type_29 * tl.full([], -0.1, tl.float32)  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_30 = mul_2  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    sub_4 = tl.full([], 1.0, tl.float32) - convert_element_type_29  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_31 = sub_4  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_32 = convert_element_type_31  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    mul_3 = convert_element_type_32 * convert_element_type_16  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_33 = mul_3  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_34 = convert_element_type_30  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_35 = convert_element_type_33  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    add_5 = convert_element_type_34 + convert_element_type_35  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_36 = add_5  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    mul_4 = convert_element_type_29 * tl.full([], 0.2, tl.float32)  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_37 = mul_4  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_38 = convert_element_type_25  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_39 = convert_element_type_37  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    add_6 = convert_element_type_38 + convert_element_type_39  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_40 = add_6  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    return dev.round_bfloat16(convert_element_type_28), dev.round_bfloat16(convert_element_type_36), dev.round_bfloat16(convert_element_type_40)


@triton.jit(do_not_specialize=["T"])
def core_forward_d73d628ab55c(
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
        output_0, state_0, state_1 = core_step_d48608baa060(input_0_0, state_0, state_1)
        dev.store(output_0_at + off, output_0, mask)
        output_0, state_0, state_1 = core_step_d48608baa060(input_0_1, state_0, state_1)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        input_0_at += 2 * step
        output_0_at += 2 * step
    dev.store(final_state_0_ptr + off, state_0, mask)
    dev.store(final_state_1_ptr + off, state_1, mask)


@triton.jit(do_not_specialize=["T"])
def core_forward_dbcb1f42d033(
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
        output_0, state_0, state_1 = core_step_d48608baa060(input_0_0, state_0, state_1)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(state_seq_0_at + off, state_0, mask)
        dev.store(state_seq_1_at + off, state_1, mask)
        output_0, state_0, state_1 = core_step_d48608baa060(input_0_1, state_0, state_1)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        dev.store(state_seq_0_at + 1 * step + off, state_0, mask)
        dev.store(state_seq_1_at + 1 * step + off, state_1, mask)
        input_0_at += 2 * step
        output_0_at += 2 * step
        state_seq_0_at += 2 * step
        state_seq_1_at += 2 * step


@triton.jit
def core_vjp_33dd5159398b(input_0, state_0, state_1, grad_output_0, grad_state_0, grad_state_1):
    convert_element_type = state_0  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add = convert_element_type + tl.full([], 0.1, tl.float32)  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_1 = add  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    sub = convert_element_type - tl.full([], 0.8, tl.float32)  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_2 = sub  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_3 = convert_element_type_1  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_4 = convert_element_type_2  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    mul = convert_element_type_3 * convert_element_type_4  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_5 = mul  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_6 = input_0  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_7 = convert_element_type_5  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add_1 = convert_element_type_6 + convert_element_type_7  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_8 = add_1  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_9 = convert_element_type_8  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_10 = state_1  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    sub_1 = convert_element_type_9 - convert_element_type_10  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_11 = sub_1  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_12 = convert_element_type_11  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    div = dev.div_by_constant(convert_element_type_12, tl.full([], 2.0, tl.float32), tl.full([], 0.5, tl.float32))  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_13 = div  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_14 = convert_element_type_13  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add_2 = convert_element_type + convert_element_type_14  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_15 = add_2  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_16 = convert_element_type_15  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    sub_3 = convert_element_type_16 - tl.full([], 1.0, tl.float32)  # scan_cores.py: s = spike(h - 1.0)
    convert_element_type_26 = sub_3  # scan_cores.py: s = spike(h - 1.0)
    convert_element_type_27 = convert_element_type_26  # scan_cores.py: return (x >= 0).to(x.dtype)
    ge = convert_element_type_27 >= tl.full([], 0.0, tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type_28 = ge.to(tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type_29 = convert_element_type_28  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    sub_4 = tl.full([], 1.0, tl.float32) - convert_element_type_29  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_31 = sub_4  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_32 = convert_element_type_31  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_41 = grad_state_1  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    mul_5 = convert_element_type_41 * tl.full([], 0.2, tl.float32)  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_42 = mul_5  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_43 = grad_output_0  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_44 = convert_element_type_42  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    add_7 = convert_element_type_43 + convert_element_type_44  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_45 = add_7  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_46 = grad_state_0  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    mul_6 = convert_element_type_46 * convert_element_type_32  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_47 = mul_6  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    mul_7 = convert_element_type_46 * convert_element_type_16  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_48 = mul_7  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_49 = convert_element_type_48  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    neg = convert_element_type_49 * tl.full([], -1.0, tl.float32)  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_50 = neg  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_51 = convert_element_type_45  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_52 = convert_element_type_50  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    add_8 = convert_element_type_51 + convert_element_type_52  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_53 = add_8  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    mul_8 = convert_element_type_46 * tl.full([], -0.1, tl.float32)  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_54 = mul_8  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_55 = convert_element_type_53  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_56 = convert_element_type_54  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    add_9 = convert_element_type_55 + convert_element_type_56  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_57 = add_9  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    mul_9 = convert_element_type_27 * tl.full([], 4.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    convert_element_type_58 = mul_9  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    convert_element_type_59 = convert_element_type_58  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    neg_1 = convert_element_type_59 * tl.full([], -1.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    exp = dev.exp(neg_1)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    add_10 = tl.full([], 1.0, tl.float32) + exp  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    div_2 = dev.fast_div(tl.full([], 1.0, tl.float32), add_10)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    convert_element_type_60 = div_2  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    convert_element_type_61 = convert_element_type_57  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_10 = convert_element_type_61 * tl.full([], 4.0, tl.float32)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_62 = mul_10  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_63 = convert_element_type_62  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_64 = convert_element_type_60  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_11 = convert_element_type_63 * convert_element_type_64  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_65 = mul_11  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    sub_5 = tl.full([], 1.0, tl.float32) - convert_element_type_64  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_66 = sub_5  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_67 = convert_element_type_65  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_68 = convert_element_type_66  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_12 = convert_element_type_67 * convert_element_type_68  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_69 = mul_12  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_70 = convert_element_type_47  # scan_cores.py: s = spike(h - 1.0)
    convert_element_type_71 = convert_element_type_69  # scan_cores.py: s = spike(h - 1.0)
    add_11 = convert_element_type_70 + convert_element_type_71  # scan_cores.py: s = spike(h - 1.0)
    convert_element_type_72 = add_11  # scan_cores.py: s = spike(h - 1.0)
    div_3 = dev.div_by_constant(convert_element_type_41, tl.full([], 2.0, tl.float32), tl.full([], 0.5, tl.float32))  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_73 = div_3  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_74 = convert_element_type_73  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    neg_2 = convert_element_type_74 * tl.full([], -1.0, tl.float32)  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_75 = neg_2  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_76 = convert_element_type_75  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    add_12 = convert_element_type_41 + convert_element_type_76  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_77 = add_12  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    mul_13 = convert_element_type_74 * tl.full([], 0.3, tl.float32)  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_78 = mul_13  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_79 = convert_element_type_72  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_80 = convert_element_type_78  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    add_13 = convert_element_type_79 + convert_element_type_80  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_81 = add_13  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_82 = convert_element_type_81  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    div_4 = dev.div_by_constant(convert_element_type_82, tl.full([], 2.0, tl.float32), tl.full([], 0.5, tl.float32))  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_83 = div_4  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_84 = convert_element_type_83  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    neg_3 = convert_element_type_84 * tl.full([], -1.0, tl.float32)  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_85 = neg_3  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_86 = convert_element_type_77  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_87 = convert_element_type_85  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add_14 = convert_element_type_86 + convert_element_type_87  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_88 = add_14  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    mul_14 = convert_element_type_84 * convert_element_type_3  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_89 = mul_14  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    mul_15 = convert_element_type_84 * convert_element_type_4  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_90 = mul_15  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_91 = convert_element_type_89  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add_15 = convert_element_type_82 + convert_element_type_91  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_92 = add_15  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_93 = convert_element_type_92  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_94 = convert_element_type_90  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add_16 = convert_element_type_93 + convert_element_type_94  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_95 = add_16  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    return dev.round_bfloat16(convert_element_type_83), dev.round_bfloat16(convert_element_type_95), dev.round_bfloat16(convert_element_type_88)


@triton.jit(do_not_specialize=["T"])
def core_backward_d876f27fdbf3(
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
        unused_0, state_0_1, state_1_1 = core_step_d48608baa060(input_0_0, state_0_0, state_1_0)
        result_0, result_1, result_2 = core_vjp_33dd5159398b(input_0_1, state_0_1, state_1_1, grad_output_0_1, grad_state_0, grad_state_1)
        dev.store(grad_input_0_at + 1 * step + off, result_0, mask)
        grad_state_0 = result_1
        grad_state_1 = result_2
        result_0, result_1, result_2 = core_vjp_33dd5159398b(input_0_0, state_0_0, state_1_0, grad_output_0_0, grad_state_0, grad_state_1)
        dev.store(grad_input_0_at + off, result_0, mask)
        grad_state_0 = result_1
        grad_state_1 = result_2
    dev.store(grad_state_0_ptr + off, grad_state_0, mask)
    dev.store(grad_state_1_ptr + off, grad_state_1, mask)


@triton.jit(do_not_specialize=["T"])
def core_forward_25ab83467232(
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
        output_0, state_0, state_1 = core_step_d48608baa060(input_0_0, state_0, state_1)
        dev.store(output_0_at + off, output_0, mask)
        output_0, state_0, state_1 = core_step_d48608baa060(input_0_1, state_0, state_1)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        input_0_at += 2 * step
        output_0_at += 2 * step
    dev.store(final_state_0_ptr + off, state_0, mask)
    dev.store(final_state_1_ptr + off, state_1, mask)


@triton.jit
def core_vjp_d65c686afa57(input_0, saved_0, saved_1, grad_output_0, grad_state_0, grad_state_1):
    convert_element_type = saved_0  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add = convert_element_type + tl.full([], 0.1, tl.float32)  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_1 = add  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    sub = convert_element_type - tl.full([], 0.8, tl.float32)  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_2 = sub  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_3 = convert_element_type_1  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_4 = convert_element_type_2  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    mul = convert_element_type_3 * convert_element_type_4  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_5 = mul  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_6 = input_0  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_7 = convert_element_type_5  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add_1 = convert_element_type_6 + convert_element_type_7  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_8 = add_1  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_9 = convert_element_type_8  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_10 = saved_1  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    sub_1 = convert_element_type_9 - convert_element_type_10  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_11 = sub_1  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_12 = convert_element_type_11  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    div = dev.div_by_constant(convert_element_type_12, tl.full([], 2.0, tl.float32), tl.full([], 0.5, tl.float32))  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_13 = div  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_14 = convert_element_type_13  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add_2 = convert_element_type + convert_element_type_14  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_15 = add_2  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_16 = convert_element_type_15  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    sub_3 = convert_element_type_16 - tl.full([], 1.0, tl.float32)  # scan_cores.py: s = spike(h - 1.0)
    convert_element_type_26 = sub_3  # scan_cores.py: s = spike(h - 1.0)
    convert_element_type_27 = convert_element_type_26  # scan_cores.py: return (x >= 0).to(x.dtype)
    ge = convert_element_type_27 >= tl.full([], 0.0, tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type_28 = ge.to(tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type_29 = convert_element_type_28  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    sub_4 = tl.full([], 1.0, tl.float32) - convert_element_type_29  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_31 = sub_4  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_32 = convert_element_type_31  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_41 = grad_state_1  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    mul_5 = convert_element_type_41 * tl.full([], 0.2, tl.float32)  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_42 = mul_5  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_43 = grad_output_0  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_44 = convert_element_type_42  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    add_7 = convert_element_type_43 + convert_element_type_44  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_45 = add_7  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_46 = grad_state_0  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    mul_6 = convert_element_type_46 * convert_element_type_32  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_47 = mul_6  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    mul_7 = convert_element_type_46 * convert_element_type_16  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_48 = mul_7  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_49 = convert_element_type_48  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    neg = convert_element_type_49 * tl.full([], -1.0, tl.float32)  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_50 = neg  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_51 = convert_element_type_45  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_52 = convert_element_type_50  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    add_8 = convert_element_type_51 + convert_element_type_52  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_53 = add_8  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    mul_8 = convert_element_type_46 * tl.full([], -0.1, tl.float32)  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_54 = mul_8  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_55 = convert_element_type_53  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_56 = convert_element_type_54  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    add_9 = convert_element_type_55 + convert_element_type_56  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_57 = add_9  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    mul_9 = convert_element_type_27 * tl.full([], 4.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    convert_element_type_58 = mul_9  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    convert_element_type_59 = convert_element_type_58  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    neg_1 = convert_element_type_59 * tl.full([], -1.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    exp = dev.exp(neg_1)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    add_10 = tl.full([], 1.0, tl.float32) + exp  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    div_2 = dev.fast_div(tl.full([], 1.0, tl.float32), add_10)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    convert_element_type_60 = div_2  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    convert_element_type_61 = convert_element_type_57  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_10 = convert_element_type_61 * tl.full([], 4.0, tl.float32)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_62 = mul_10  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_63 = convert_element_type_62  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_64 = convert_element_type_60  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_11 = convert_element_type_63 * convert_element_type_64  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_65 = mul_11  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    sub_5 = tl.full([], 1.0, tl.float32) - convert_element_type_64  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_66 = sub_5  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_67 = convert_element_type_65  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_68 = convert_element_type_66  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_12 = convert_element_type_67 * convert_element_type_68  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_69 = mul_12  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    convert_element_type_70 = convert_element_type_47  # scan_cores.py: s = spike(h - 1.0)
    convert_element_type_71 = convert_element_type_69  # scan_cores.py: s = spike(h - 1.0)
    add_11 = convert_element_type_70 + convert_element_type_71  # scan_cores.py: s = spike(h - 1.0)
    convert_element_type_72 = add_11  # scan_cores.py: s = spike(h - 1.0)
    div_3 = dev.div_by_constant(convert_element_type_41, tl.full([], 2.0, tl.float32), tl.full([], 0.5, tl.float32))  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_73 = div_3  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_74 = convert_element_type_73  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    neg_2 = convert_element_type_74 * tl.full([], -1.0, tl.float32)  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_75 = neg_2  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_76 = convert_element_type_75  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    add_12 = convert_element_type_41 + convert_element_type_76  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_77 = add_12  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    mul_13 = convert_element_type_74 * tl.full([], 0.3, tl.float32)  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_78 = mul_13  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_79 = convert_element_type_72  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_80 = convert_element_type_78  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    add_13 = convert_element_type_79 + convert_element_type_80  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_81 = add_13  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_82 = convert_element_type_81  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    div_4 = dev.div_by_constant(convert_element_type_82, tl.full([], 2.0, tl.float32), tl.full([], 0.5, tl.float32))  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_83 = div_4  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_84 = convert_element_type_83  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    neg_3 = convert_element_type_84 * tl.full([], -1.0, tl.float32)  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_85 = neg_3  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_86 = convert_element_type_77  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_87 = convert_element_type_85  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add_14 = convert_element_type_86 + convert_element_type_87  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_88 = add_14  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    mul_14 = convert_element_type_84 * convert_element_type_3  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_89 = mul_14  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    mul_15 = convert_element_type_84 * convert_element_type_4  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_90 = mul_15  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_91 = convert_element_type_89  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add_15 = convert_element_type_82 + convert_element_type_91  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_92 = add_15  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_93 = convert_element_type_92  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_94 = convert_element_type_90  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add_16 = convert_element_type_93 + convert_element_type_94  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_95 = add_16  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    return dev.round_bfloat16(convert_element_type_83), dev.round_bfloat16(convert_element_type_95), dev.round_bfloat16(convert_element_type_88)


@triton.jit(do_not_specialize=["T"])
def core_backward_e40e9960651e(
    input_0_ptr,
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
    input_0_at = input_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    saved_0_at = saved_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    saved_1_at = saved_1_ptr + tl.cast(chunks, tl.int64) * 2 * step
    grad_output_0_at = grad_output_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    grad_input_0_at = grad_input_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    for i in range(0, chunks):
        input_0_at -= 2 * step
        saved_0_at -= 2 * step
        saved_1_at -= 2 * step
        grad_output_0_at -= 2 * step
        grad_input_0_at -= 2 * step
        c = chunks - 1 - i
        input_0_0 = dev.load(input_0_at + off, mask)
        saved_0_0 = dev.load(saved_0_at + off, mask)
        saved_1_0 = dev.load(saved_1_at + off, mask)
        grad_output_0_0 = dev.load(grad_output_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        saved_0_1 = dev.load(saved_0_at + 1 * step + off, mask)
        saved_1_1 = dev.load(saved_1_at + 1 * step + off, mask)
        grad_output_0_1 = dev.load(grad_output_0_at + 1 * step + off, mask)
        result_0, result_1, result_2 = core_vjp_d65c686afa57(input_0_1, saved_0_1, saved_1_1, grad_output_0_1, grad_state_0, grad_state_1)
        dev.store(grad_input_0_at + 1 * step + off, result_0, mask)
        grad_state_0 = result_1
        grad_state_1 = result_2
        result_0, result_1, result_2 = core_vjp_d65c686afa57(input_0_0, saved_0_0, saved_1_0, grad_output_0_0, grad_state_0, grad_state_1)
        dev.store(grad_input_0_at + off, result_0, mask)
        grad_state_0 = result_1
        grad_state_1 = result_2
    dev.store(grad_state_0_ptr + off, grad_state_0, mask)
    dev.store(grad_state_1_ptr + off, grad_state_1, mask)


@triton.jit
def core_step_59bc5b75421a(input_0, state_0, state_1):
    convert_element_type = state_0  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add = convert_element_type + tl.full([], 0.1, tl.float32)  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_1 = add  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    sub = convert_element_type - tl.full([], 0.8, tl.float32)  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_2 = sub  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_3 = convert_element_type_1  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_4 = convert_element_type_2  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    mul = convert_element_type_3 * convert_element_type_4  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_5 = mul  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_6 = input_0  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_7 = convert_element_type_5  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add_1 = convert_element_type_6 + convert_element_type_7  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_8 = add_1  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_9 = convert_element_type_8  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_10 = state_1  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    sub_1 = convert_element_type_9 - convert_element_type_10  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_11 = sub_1  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_12 = convert_element_type_11  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    div = dev.div_by_constant(convert_element_type_12, tl.full([], 2.0, tl.float32), tl.full([], 0.5, tl.float32))  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_13 = div  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_14 = convert_element_type_13  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    add_2 = convert_element_type + convert_element_type_14  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_15 = add_2  # scan_cores.py: h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
    convert_element_type_16 = convert_element_type_15  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    add_3 = convert_element_type_16 + tl.full([], 0.1, tl.float32)  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_17 = add_3  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_18 = convert_element_type_17  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    mul_1 = convert_element_type_18 * tl.full([], 0.3, tl.float32)  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_19 = mul_1  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_20 = convert_element_type_19  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    sub_2 = convert_element_type_20 - convert_element_type_10  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_21 = sub_2  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_22 = convert_element_type_21  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    div_1 = dev.div_by_constant(convert_element_type_22, tl.full([], 2.0, tl.float32), tl.full([], 0.5, tl.float32))  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_23 = div_1  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_24 = convert_element_type_23  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    add_4 = convert_element_type_10 + convert_element_type_24  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    convert_element_type_25 = add_4  # scan_cores.py: u = w + (0.3 * (h + 0.1) - w) / 2.0
    sub_3 = convert_element_type_16 - tl.full([], 1.0, tl.float32)  # scan_cores.py: s = spike(h - 1.0)
    convert_element_type_26 = sub_3  # scan_cores.py: s = spike(h - 1.0)
    convert_element_type_27 = convert_element_type_26  # scan_cores.py: return (x >= 0).to(x.dtype)
    ge = convert_element_type_27 >= tl.full([], 0.0, tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type_28 = ge.to(tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type_29 = convert_element_type_28  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    mul_2 = convert_element_type_29 * tl.full([], -0.1, tl.float32)  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_30 = mul_2  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    sub_4 = tl.full([], 1.0, tl.float32) - convert_element_type_29  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_31 = sub_4  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_32 = convert_element_type_31  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    mul_3 = convert_element_type_32 * convert_element_type_16  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_33 = mul_3  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_34 = convert_element_type_30  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_35 = convert_element_type_33  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    add_5 = convert_element_type_34 + convert_element_type_35  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_36 = add_5  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    mul_4 = convert_element_type_29 * tl.full([], 0.2, tl.float32)  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_37 = mul_4  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_38 = convert_element_type_25  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_39 = convert_element_type_37  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    add_6 = convert_element_type_38 + convert_element_type_39  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    convert_element_type_40 = add_6  # scan_cores.py: return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s
    return dev.round_bfloat16(convert_element_type_28), dev.round_bfloat16(convert_element_type_36), dev.round_bfloat16(convert_element_type_40), state_0, state_1


@triton.jit(do_not_specialize=["T"])
def core_forward_6681646cae0f(
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
        output_0, state_0, state_1, saved_0, saved_1 = core_step_59bc5b75421a(input_0_0, state_0, state_1)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(saved_0_at + off, saved_0, mask)
        dev.store(saved_1_at + off, saved_1, mask)
        output_0, state_0, state_1, saved_0, saved_1 = core_step_59bc5b75421a(input_0_1, state_0, state_1)
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
def core_backward_7b0e464031a3(
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
        unused_0, state_0_1, state_1_1 = core_step_d48608baa060(input_0_0, state_0_0, state_1_0)
        grad_state_0 += grad_state_seq_0_1
        grad_state_1 += grad_state_seq_1_1
        result_0, result_1, result_2 = core_vjp_33dd5159398b(input_0_1, state_0_1, state_1_1, grad_output_0_1, grad_state_0, grad_state_1)
        dev.store(grad_input_0_at + 1 * step + off, result_0, mask)
        grad_state_0 = result_1
        grad_state_1 = result_2
        grad_state_0 += grad_state_seq_0_0
        grad_state_1 += grad_state_seq_1_0
        result_0, result_1, result_2 = core_vjp_33dd5159398b(input_0_0, state_0_0, state_1_0, grad_output_0_0, grad_state_0, grad_state_1)
        dev.store(grad_input_0_at + off, result_0, mask)
        grad_state_0 = result_1
        grad_state_1 = result_2
    dev.store(grad_state_0_ptr + off, grad_state_0, mask)
    dev.store(grad_state_1_ptr + off, grad_state_1, mask)


@triton.jit(do_not_specialize=["T"])
def core_forward_48dcd843e2ba(
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
        output_0, state_0, state_1 = core_step_d48608baa060(input_0_0, state_0, state_1)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(state_seq_0_at + off, state_0, mask)
        dev.store(state_seq_1_at + off, state_1, mask)
        output_0, state_0, state_1 = core_step_d48608baa060(input_0_1, state_0, state_1)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        dev.store(state_seq_0_at + 1 * step + off, state_0, mask)
        dev.store(state_seq_1_at + 1 * step + off, state_1, mask)
        input_0_at += 2 * step
        output_0_at += 2 * step
        state_seq_0_at += 2 * step
        state_seq_1_at += 2 * step


