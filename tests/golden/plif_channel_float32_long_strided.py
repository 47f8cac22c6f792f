# Made by: PYTHONPATH=tests hatch run python tests/test_scan_goldens.py
import triton
import triton.language as tl

from flexsn_codegen.targets.triton import device as dev


@triton.jit
def core_step_a0cb3adb881d(input_0, state_0, lifted_0):
    sub = input_0 - state_0  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    neg = lifted_0 * tl.full([], -1.0, tl.float32)  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    exp = dev.exp(neg)  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    add = tl.full([], 1.0, tl.float32) + exp  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    div = dev.div(tl.full([], 1.0, tl.float32), add)  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    mul = sub * div  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    add_1 = state_0 + mul  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    sub_1 = add_1 - tl.full([], 1.0, tl.float32)  # scan_cores.py: s = spike(h - 1.0)
    ge = sub_1 >= tl.full([], 0.0, tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type = ge.to(tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    sub_2 = tl.full([], 1.0, tl.float32) - convert_element_type  # scan_cores.py: return s, h * (1.0 - s)
    mul_1 = add_1 * sub_2  # scan_cores.py: return s, h * (1.0 - s)
    return convert_element_type, mul_1


@triton.jit(do_not_specialize=["T"])
def core_forward_d400ee636ac9(
    input_0_ptr,
    lifted_0_ptr,
    output_0_ptr,
    final_state_0_ptr,
    T,
    NCL,
    lifted_0_inner0,
    lifted_0_size0,
    lifted_0_stride0,
    BLOCK: tl.constexpr,
):
    """Forward scan, 4 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    lifted_0_off = (off // lifted_0_inner0) % lifted_0_size0 * lifted_0_stride0
    state_0 = tl.zeros([BLOCK], tl.float32)
    lifted_0 = dev.load(lifted_0_ptr + lifted_0_off, mask)
    input_0_at = input_0_ptr
    output_0_at = output_0_ptr
    chunks = T // 4
    for c in tl.range(0, chunks, num_stages=2):
        input_0_0 = dev.load(input_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        input_0_2 = dev.load(input_0_at + 2 * step + off, mask)
        input_0_3 = dev.load(input_0_at + 3 * step + off, mask)
        output_0, state_0 = core_step_a0cb3adb881d(input_0_0, state_0, lifted_0)
        dev.store(output_0_at + off, output_0, mask)
        output_0, state_0 = core_step_a0cb3adb881d(input_0_1, state_0, lifted_0)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        output_0, state_0 = core_step_a0cb3adb881d(input_0_2, state_0, lifted_0)
        dev.store(output_0_at + 2 * step + off, output_0, mask)
        output_0, state_0 = core_step_a0cb3adb881d(input_0_3, state_0, lifted_0)
        dev.store(output_0_at + 3 * step + off, output_0, mask)
        input_0_at += 4 * step
        output_0_at += 4 * step
    for t in tl.range(chunks * 4, T, num_stages=2):
        input_0_0 = dev.load(input_0_at + off, mask)
        output_0, state_0 = core_step_a0cb3adb881d(input_0_0, state_0, lifted_0)
        dev.store(output_0_at + off, output_0, mask)
        input_0_at += 1 * step
        output_0_at += 1 * step
    dev.store(final_state_0_ptr + off, state_0, mask)


@triton.jit(do_not_specialize=["T"])
def core_forward_7537590112c3(
    input_0_ptr,
    lifted_0_ptr,
    state_0_ptr,
    output_0_ptr,
    state_seq_0_ptr,
    T,
    NCL,
    lifted_0_inner0,
    lifted_0_size0,
    lifted_0_stride0,
    state_0_inner0,
    state_0_size0,
    state_0_stride0,
    state_0_inner1,
    state_0_size1,
    state_0_stride1,
    BLOCK: tl.constexpr,
):
    """Forward scan, 4 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    lifted_0_off = (off // lifted_0_inner0) % lifted_0_size0 * lifted_0_stride0
    state_0_off = (off // state_0_inner0) % state_0_size0 * state_0_stride0 + (off // state_0_inner1) % state_0_size1 * state_0_stride1
    state_0 = dev.load(state_0_ptr + state_0_off, mask)
    lifted_0 = dev.load(lifted_0_ptr + lifted_0_off, mask)
    input_0_at = input_0_ptr
    output_0_at = output_0_ptr
    state_seq_0_at = state_seq_0_ptr
    chunks = T // 4
    for c in tl.range(0, chunks, num_stages=2):
        input_0_0 = dev.load(input_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        input_0_2 = dev.load(input_0_at + 2 * step + off, mask)
        input_0_3 = dev.load(input_0_at + 3 * step + off, mask)
        output_0, state_0 = core_step_a0cb3adb881d(input_0_0, state_0, lifted_0)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(state_seq_0_at + off, state_0, mask)
        output_0, state_0 = core_step_a0cb3adb881d(input_0_1, state_0, lifted_0)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        dev.store(state_seq_0_at + 1 * step + off, state_0, mask)
        output_0, state_0 = core_step_a0cb3adb881d(input_0_2, state_0, lifted_0)
        dev.store(output_0_at + 2 * step + off, output_0, mask)
        dev.store(state_seq_0_at + 2 * step + off, state_0, mask)
        output_0, state_0 = core_step_a0cb3adb881d(input_0_3, state_0, lifted_0)
        dev.store(output_0_at + 3 * step + off, output_0, mask)
        dev.store(state_seq_0_at + 3 * step + off, state_0, mask)
        input_0_at += 4 * step
        output_0_at += 4 * step
        state_seq_0_at += 4 * step
    for t in tl.range(chunks * 4, T, num_stages=2):
        input_0_0 = dev.load(input_0_at + off, mask)
        output_0, state_0 = core_step_a0cb3adb881d(input_0_0, state_0, lifted_0)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(state_seq_0_at + off, state_0, mask)
        input_0_at += 1 * step
        output_0_at += 1 * step
        state_seq_0_at += 1 * step


@triton.jit
def core_vjp_30cf75733ae5(input_0, state_0, lifted_0, grad_output_0, grad_state_0):
    sub = input_0 - state_0  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    neg = lifted_0 * tl.full([], -1.0, tl.float32)  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    exp = dev.exp(neg)  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    add = tl.full([], 1.0, tl.float32) + exp  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    div = dev.div(tl.full([], 1.0, tl.float32), add)  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    mul = sub * div  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    add_1 = state_0 + mul  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    sub_1 = add_1 - tl.full([], 1.0, tl.float32)  # scan_cores.py: s = spike(h - 1.0)
    ge = sub_1 >= tl.full([], 0.0, tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type = ge.to(tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    sub_2 = tl.full([], 1.0, tl.float32) - convert_element_type  # scan_cores.py: return s, h * (1.0 - s)
    mul_2 = grad_state_0 * add_1  # scan_cores.py: return s, h * (1.0 - s)
    mul_3 = grad_state_0 * sub_2  # scan_cores.py: return s, h * (1.0 - s)
    neg_1 = mul_2 * tl.full([], -1.0, tl.float32)  # scan_cores.py: return s, h * (1.0 - s)
    add_2 = grad_output_0 + neg_1  # scan_cores.py: return s, h * (1.0 - s)
    mul_4 = sub_1 * tl.full([], 4.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    neg_2 = mul_4 * tl.full([], -1.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    exp_1 = dev.exp(neg_2)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    add_3 = tl.full([], 1.0, tl.float32) + exp_1  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    div_1 = dev.fast_div(tl.full([], 1.0, tl.float32), add_3)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    mul_5 = add_2 * tl.full([], 4.0, tl.float32)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_6 = mul_5 * div_1  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    sub_3 = tl.full([], 1.0, tl.float32) - div_1  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_7 = mul_6 * sub_3  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    add_4 = mul_3 + mul_7  # scan_cores.py: s = spike(h - 1.0)
    mul_8 = add_4 * sub  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    mul_9 = add_4 * div  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    sub_4 = tl.full([], 1.0, tl.float32) - div  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    mul_10 = div * sub_4  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    mul_11 = mul_8 * mul_10  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    neg_3 = mul_9 * tl.full([], -1.0, tl.float32)  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    add_5 = add_4 + neg_3  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    return mul_9, add_5, mul_11


@triton.jit(do_not_specialize=["T"])
def core_backward_26cc91f64e7a(
    input_0_ptr,
    lifted_0_ptr,
    state_0_ptr,
    checkpoint_0_ptr,
    grad_output_0_ptr,
    grad_final_state_0_ptr,
    grad_input_0_ptr,
    grad_state_0_ptr,
    grad_lifted_0_ptr,
    T,
    NCL,
    lifted_0_inner0,
    lifted_0_size0,
    lifted_0_stride0,
    state_0_inner0,
    state_0_size0,
    state_0_stride0,
    state_0_inner1,
    state_0_size1,
    state_0_stride1,
    grad_state_0_inner0,
    grad_state_0_size0,
    grad_state_0_stride0,
    grad_state_0_inner1,
    grad_state_0_size1,
    grad_state_0_stride1,
    BLOCK: tl.constexpr,
):
    """Backward scan, 4 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    lifted_0_off = (off // lifted_0_inner0) % lifted_0_size0 * lifted_0_stride0
    lifted_0 = dev.load(lifted_0_ptr + lifted_0_off, mask)
    state_0_off = (off // state_0_inner0) % state_0_size0 * state_0_stride0 + (off // state_0_inner1) % state_0_size1 * state_0_stride1
    initial_0 = dev.load(state_0_ptr + state_0_off, mask)
    grad_state_0 = dev.load(grad_final_state_0_ptr + off, mask)
    grad_state_0_off = (off // grad_state_0_inner0) % grad_state_0_size0 * grad_state_0_stride0 + (off // grad_state_0_inner1) % grad_state_0_size1 * grad_state_0_stride1
    grad_lifted_0 = tl.zeros([BLOCK], tl.float32)
    chunks = T // 4
    input_0_at = input_0_ptr + tl.cast(chunks, tl.int64) * 4 * step
    grad_output_0_at = grad_output_0_ptr + tl.cast(chunks, tl.int64) * 4 * step
    grad_input_0_at = grad_input_0_ptr + tl.cast(chunks, tl.int64) * 4 * step
    left = T % 4
    if left > 0:
        state_0_0 = dev.load(checkpoint_0_ptr + (tl.cast(chunks, tl.int64) - 1) * step + off, mask & (chunks > 0))
        state_0_0 = tl.where(chunks > 0, state_0_0, initial_0)
        input_0_0 = dev.load(input_0_at + off, mask & (0 < left))
        grad_output_0_0 = dev.load(grad_output_0_at + off, mask & (0 < left))
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask & (1 < left))
        grad_output_0_1 = dev.load(grad_output_0_at + 1 * step + off, mask & (1 < left))
        input_0_2 = dev.load(input_0_at + 2 * step + off, mask & (2 < left))
        grad_output_0_2 = dev.load(grad_output_0_at + 2 * step + off, mask & (2 < left))
        input_0_3 = dev.load(input_0_at + 3 * step + off, mask & (3 < left))
        grad_output_0_3 = dev.load(grad_output_0_at + 3 * step + off, mask & (3 < left))
        unused_0, state_0_1 = core_step_a0cb3adb881d(input_0_0, state_0_0, lifted_0)
        unused_0, state_0_2 = core_step_a0cb3adb881d(input_0_1, state_0_1, lifted_0)
        unused_0, state_0_3 = core_step_a0cb3adb881d(input_0_2, state_0_2, lifted_0)
        result_0, result_1, result_2 = core_vjp_30cf75733ae5(input_0_3, state_0_3, lifted_0, grad_output_0_3, grad_state_0)
        dev.store(grad_input_0_at + 3 * step + off, result_0, mask & (3 < left))
        grad_state_0 = tl.where(3 < left, result_1, grad_state_0)
        grad_lifted_0 += tl.where(3 < left, result_2.to(tl.float32), 0)
        result_0, result_1, result_2 = core_vjp_30cf75733ae5(input_0_2, state_0_2, lifted_0, grad_output_0_2, grad_state_0)
        dev.store(grad_input_0_at + 2 * step + off, result_0, mask & (2 < left))
        grad_state_0 = tl.where(2 < left, result_1, grad_state_0)
        grad_lifted_0 += tl.where(2 < left, result_2.to(tl.float32), 0)
        result_0, result_1, result_2 = core_vjp_30cf75733ae5(input_0_1, state_0_1, lifted_0, grad_output_0_1, grad_state_0)
        dev.store(grad_input_0_at + 1 * step + off, result_0, mask & (1 < left))
        grad_state_0 = tl.where(1 < left, result_1, grad_state_0)
        grad_lifted_0 += tl.where(1 < left, result_2.to(tl.float32), 0)
        result_0, result_1, result_2 = core_vjp_30cf75733ae5(input_0_0, state_0_0, lifted_0, grad_output_0_0, grad_state_0)
        dev.store(grad_input_0_at + off, result_0, mask & (0 < left))
        grad_state_0 = tl.where(0 < left, result_1, grad_state_0)
        grad_lifted_0 += tl.where(0 < left, result_2.to(tl.float32), 0)
    for i in range(0, chunks):
        input_0_at -= 4 * step
        grad_output_0_at -= 4 * step
        grad_input_0_at -= 4 * step
        c = chunks - 1 - i
        state_0_0 = dev.load(checkpoint_0_ptr + (tl.cast(c, tl.int64) - 1) * step + off, mask & (c > 0))
        state_0_0 = tl.where(c > 0, state_0_0, initial_0)
        input_0_0 = dev.load(input_0_at + off, mask)
        grad_output_0_0 = dev.load(grad_output_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        grad_output_0_1 = dev.load(grad_output_0_at + 1 * step + off, mask)
        input_0_2 = dev.load(input_0_at + 2 * step + off, mask)
        grad_output_0_2 = dev.load(grad_output_0_at + 2 * step + off, mask)
        input_0_3 = dev.load(input_0_at + 3 * step + off, mask)
        grad_output_0_3 = dev.load(grad_output_0_at + 3 * step + off, mask)
        unused_0, state_0_1 = core_step_a0cb3adb881d(input_0_0, state_0_0, lifted_0)
        unused_0, state_0_2 = core_step_a0cb3adb881d(input_0_1, state_0_1, lifted_0)
        unused_0, state_0_3 = core_step_a0cb3adb881d(input_0_2, state_0_2, lifted_0)
        result_0, result_1, result_2 = core_vjp_30cf75733ae5(input_0_3, state_0_3, lifted_0, grad_output_0_3, grad_state_0)
        dev.store(grad_input_0_at + 3 * step + off, result_0, mask)
        grad_state_0 = result_1
        grad_lifted_0 += result_2.to(tl.float32)
        result_0, result_1, result_2 = core_vjp_30cf75733ae5(input_0_2, state_0_2, lifted_0, grad_output_0_2, grad_state_0)
        dev.store(grad_input_0_at + 2 * step + off, result_0, mask)
        grad_state_0 = result_1
        grad_lifted_0 += result_2.to(tl.float32)
        result_0, result_1, result_2 = core_vjp_30cf75733ae5(input_0_1, state_0_1, lifted_0, grad_output_0_1, grad_state_0)
        dev.store(grad_input_0_at + 1 * step + off, result_0, mask)
        grad_state_0 = result_1
        grad_lifted_0 += result_2.to(tl.float32)
        result_0, result_1, result_2 = core_vjp_30cf75733ae5(input_0_0, state_0_0, lifted_0, grad_output_0_0, grad_state_0)
        dev.store(grad_input_0_at + off, result_0, mask)
        grad_state_0 = result_1
        grad_lifted_0 += result_2.to(tl.float32)
    dev.store(grad_state_0_ptr + grad_state_0_off, grad_state_0, mask)
    dev.store(grad_lifted_0_ptr + off, grad_lifted_0, mask)


@triton.jit(do_not_specialize=["T"])
def core_forward_74270be0177e(
    input_0_ptr,
    lifted_0_ptr,
    state_0_ptr,
    output_0_ptr,
    final_state_0_ptr,
    checkpoint_0_ptr,
    T,
    NCL,
    lifted_0_inner0,
    lifted_0_size0,
    lifted_0_stride0,
    state_0_inner0,
    state_0_size0,
    state_0_stride0,
    state_0_inner1,
    state_0_size1,
    state_0_stride1,
    BLOCK: tl.constexpr,
):
    """Forward scan, 8 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    lifted_0_off = (off // lifted_0_inner0) % lifted_0_size0 * lifted_0_stride0
    state_0_off = (off // state_0_inner0) % state_0_size0 * state_0_stride0 + (off // state_0_inner1) % state_0_size1 * state_0_stride1
    state_0 = dev.load(state_0_ptr + state_0_off, mask)
    lifted_0 = dev.load(lifted_0_ptr + lifted_0_off, mask)
    input_0_at = input_0_ptr
    output_0_at = output_0_ptr
    chunks = T // 8
    for c in tl.range(0, chunks, num_stages=2):
        input_0_0 = dev.load(input_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        input_0_2 = dev.load(input_0_at + 2 * step + off, mask)
        input_0_3 = dev.load(input_0_at + 3 * step + off, mask)
        input_0_4 = dev.load(input_0_at + 4 * step + off, mask)
        input_0_5 = dev.load(input_0_at + 5 * step + off, mask)
        input_0_6 = dev.load(input_0_at + 6 * step + off, mask)
        input_0_7 = dev.load(input_0_at + 7 * step + off, mask)
        dev.store(checkpoint_0_ptr + tl.cast(c * 2 + -1, tl.int64) * step + off, state_0, mask & (c > 0))
        output_0, state_0 = core_step_a0cb3adb881d(input_0_0, state_0, lifted_0)
        dev.store(output_0_at + off, output_0, mask)
        output_0, state_0 = core_step_a0cb3adb881d(input_0_1, state_0, lifted_0)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        output_0, state_0 = core_step_a0cb3adb881d(input_0_2, state_0, lifted_0)
        dev.store(output_0_at + 2 * step + off, output_0, mask)
        output_0, state_0 = core_step_a0cb3adb881d(input_0_3, state_0, lifted_0)
        dev.store(output_0_at + 3 * step + off, output_0, mask)
        dev.store(checkpoint_0_ptr + tl.cast(c * 2 + 0, tl.int64) * step + off, state_0, mask)
        output_0, state_0 = core_step_a0cb3adb881d(input_0_4, state_0, lifted_0)
        dev.store(output_0_at + 4 * step + off, output_0, mask)
        output_0, state_0 = core_step_a0cb3adb881d(input_0_5, state_0, lifted_0)
        dev.store(output_0_at + 5 * step + off, output_0, mask)
        output_0, state_0 = core_step_a0cb3adb881d(input_0_6, state_0, lifted_0)
        dev.store(output_0_at + 6 * step + off, output_0, mask)
        output_0, state_0 = core_step_a0cb3adb881d(input_0_7, state_0, lifted_0)
        dev.store(output_0_at + 7 * step + off, output_0, mask)
        input_0_at += 8 * step
        output_0_at += 8 * step
    for t in tl.range(chunks * 8, T, num_stages=2):
        input_0_0 = dev.load(input_0_at + off, mask)
        dev.store(checkpoint_0_ptr + tl.cast(t // 4 - 1, tl.int64) * step + off, state_0, mask & ((t > 0) & (t % 4 == 0)))
        output_0, state_0 = core_step_a0cb3adb881d(input_0_0, state_0, lifted_0)
        dev.store(output_0_at + off, output_0, mask)
        input_0_at += 1 * step
        output_0_at += 1 * step
    dev.store(final_state_0_ptr + off, state_0, mask)


@triton.jit
def core_vjp_715d64def23d(input_0, lifted_0, saved_0, grad_output_0, grad_state_0):
    sub = input_0 - saved_0  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    neg = lifted_0 * tl.full([], -1.0, tl.float32)  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    exp = dev.exp(neg)  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    add = tl.full([], 1.0, tl.float32) + exp  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    div = dev.div(tl.full([], 1.0, tl.float32), add)  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    mul = sub * div  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    add_1 = saved_0 + mul  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    sub_1 = add_1 - tl.full([], 1.0, tl.float32)  # scan_cores.py: s = spike(h - 1.0)
    ge = sub_1 >= tl.full([], 0.0, tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type = ge.to(tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    sub_2 = tl.full([], 1.0, tl.float32) - convert_element_type  # scan_cores.py: return s, h * (1.0 - s)
    mul_2 = grad_state_0 * add_1  # scan_cores.py: return s, h * (1.0 - s)
    mul_3 = grad_state_0 * sub_2  # scan_cores.py: return s, h * (1.0 - s)
    neg_1 = mul_2 * tl.full([], -1.0, tl.float32)  # scan_cores.py: return s, h * (1.0 - s)
    add_2 = grad_output_0 + neg_1  # scan_cores.py: return s, h * (1.0 - s)
    mul_4 = sub_1 * tl.full([], 4.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    neg_2 = mul_4 * tl.full([], -1.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    exp_1 = dev.exp(neg_2)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    add_3 = tl.full([], 1.0, tl.float32) + exp_1  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    div_1 = dev.fast_div(tl.full([], 1.0, tl.float32), add_3)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    mul_5 = add_2 * tl.full([], 4.0, tl.float32)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_6 = mul_5 * div_1  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    sub_3 = tl.full([], 1.0, tl.float32) - div_1  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_7 = mul_6 * sub_3  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    add_4 = mul_3 + mul_7  # scan_cores.py: s = spike(h - 1.0)
    mul_8 = add_4 * sub  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    mul_9 = add_4 * div  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    sub_4 = tl.full([], 1.0, tl.float32) - div  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    mul_10 = div * sub_4  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    mul_11 = mul_8 * mul_10  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    neg_3 = mul_9 * tl.full([], -1.0, tl.float32)  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    add_5 = add_4 + neg_3  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    return mul_9, add_5, mul_11


@triton.jit(do_not_specialize=["T"])
def core_backward_b8b11fc7f266(
    input_0_ptr,
    lifted_0_ptr,
    saved_0_ptr,
    grad_output_0_ptr,
    grad_final_state_0_ptr,
    grad_input_0_ptr,
    grad_state_0_ptr,
    grad_lifted_0_ptr,
    T,
    NCL,
    lifted_0_inner0,
    lifted_0_size0,
    lifted_0_stride0,
    grad_state_0_inner0,
    grad_state_0_size0,
    grad_state_0_stride0,
    grad_state_0_inner1,
    grad_state_0_size1,
    grad_state_0_stride1,
    BLOCK: tl.constexpr,
):
    """Backward scan, 4 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    lifted_0_off = (off // lifted_0_inner0) % lifted_0_size0 * lifted_0_stride0
    lifted_0 = dev.load(lifted_0_ptr + lifted_0_off, mask)
    grad_state_0 = dev.load(grad_final_state_0_ptr + off, mask)
    grad_state_0_off = (off // grad_state_0_inner0) % grad_state_0_size0 * grad_state_0_stride0 + (off // grad_state_0_inner1) % grad_state_0_size1 * grad_state_0_stride1
    grad_lifted_0 = tl.zeros([BLOCK], tl.float32)
    chunks = T // 4
    input_0_at = input_0_ptr + tl.cast(chunks, tl.int64) * 4 * step
    saved_0_at = saved_0_ptr + tl.cast(chunks, tl.int64) * 4 * step
    grad_output_0_at = grad_output_0_ptr + tl.cast(chunks, tl.int64) * 4 * step
    grad_input_0_at = grad_input_0_ptr + tl.cast(chunks, tl.int64) * 4 * step
    left = T % 4
    if left > 0:
        input_0_0 = dev.load(input_0_at + off, mask & (0 < left))
        saved_0_0 = dev.load(saved_0_at + off, mask & (0 < left))
        grad_output_0_0 = dev.load(grad_output_0_at + off, mask & (0 < left))
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask & (1 < left))
        saved_0_1 = dev.load(saved_0_at + 1 * step + off, mask & (1 < left))
        grad_output_0_1 = dev.load(grad_output_0_at + 1 * step + off, mask & (1 < left))
        input_0_2 = dev.load(input_0_at + 2 * step + off, mask & (2 < left))
        saved_0_2 = dev.load(saved_0_at + 2 * step + off, mask & (2 < left))
        grad_output_0_2 = dev.load(grad_output_0_at + 2 * step + off, mask & (2 < left))
        input_0_3 = dev.load(input_0_at + 3 * step + off, mask & (3 < left))
        saved_0_3 = dev.load(saved_0_at + 3 * step + off, mask & (3 < left))
        grad_output_0_3 = dev.load(grad_output_0_at + 3 * step + off, mask & (3 < left))
        result_0, result_1, result_2 = core_vjp_715d64def23d(input_0_3, lifted_0, saved_0_3, grad_output_0_3, grad_state_0)
        dev.store(grad_input_0_at + 3 * step + off, result_0, mask & (3 < left))
        grad_state_0 = tl.where(3 < left, result_1, grad_state_0)
        grad_lifted_0 += tl.where(3 < left, result_2.to(tl.float32), 0)
        result_0, result_1, result_2 = core_vjp_715d64def23d(input_0_2, lifted_0, saved_0_2, grad_output_0_2, grad_state_0)
        dev.store(grad_input_0_at + 2 * step + off, result_0, mask & (2 < left))
        grad_state_0 = tl.where(2 < left, result_1, grad_state_0)
        grad_lifted_0 += tl.where(2 < left, result_2.to(tl.float32), 0)
        result_0, result_1, result_2 = core_vjp_715d64def23d(input_0_1, lifted_0, saved_0_1, grad_output_0_1, grad_state_0)
        dev.store(grad_input_0_at + 1 * step + off, result_0, mask & (1 < left))
        grad_state_0 = tl.where(1 < left, result_1, grad_state_0)
        grad_lifted_0 += tl.where(1 < left, result_2.to(tl.float32), 0)
        result_0, result_1, result_2 = core_vjp_715d64def23d(input_0_0, lifted_0, saved_0_0, grad_output_0_0, grad_state_0)
        dev.store(grad_input_0_at + off, result_0, mask & (0 < left))
        grad_state_0 = tl.where(0 < left, result_1, grad_state_0)
        grad_lifted_0 += tl.where(0 < left, result_2.to(tl.float32), 0)
    for i in range(0, chunks):
        input_0_at -= 4 * step
        saved_0_at -= 4 * step
        grad_output_0_at -= 4 * step
        grad_input_0_at -= 4 * step
        c = chunks - 1 - i
        input_0_0 = dev.load(input_0_at + off, mask)
        saved_0_0 = dev.load(saved_0_at + off, mask)
        grad_output_0_0 = dev.load(grad_output_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        saved_0_1 = dev.load(saved_0_at + 1 * step + off, mask)
        grad_output_0_1 = dev.load(grad_output_0_at + 1 * step + off, mask)
        input_0_2 = dev.load(input_0_at + 2 * step + off, mask)
        saved_0_2 = dev.load(saved_0_at + 2 * step + off, mask)
        grad_output_0_2 = dev.load(grad_output_0_at + 2 * step + off, mask)
        input_0_3 = dev.load(input_0_at + 3 * step + off, mask)
        saved_0_3 = dev.load(saved_0_at + 3 * step + off, mask)
        grad_output_0_3 = dev.load(grad_output_0_at + 3 * step + off, mask)
        result_0, result_1, result_2 = core_vjp_715d64def23d(input_0_3, lifted_0, saved_0_3, grad_output_0_3, grad_state_0)
        dev.store(grad_input_0_at + 3 * step + off, result_0, mask)
        grad_state_0 = result_1
        grad_lifted_0 += result_2.to(tl.float32)
        result_0, result_1, result_2 = core_vjp_715d64def23d(input_0_2, lifted_0, saved_0_2, grad_output_0_2, grad_state_0)
        dev.store(grad_input_0_at + 2 * step + off, result_0, mask)
        grad_state_0 = result_1
        grad_lifted_0 += result_2.to(tl.float32)
        result_0, result_1, result_2 = core_vjp_715d64def23d(input_0_1, lifted_0, saved_0_1, grad_output_0_1, grad_state_0)
        dev.store(grad_input_0_at + 1 * step + off, result_0, mask)
        grad_state_0 = result_1
        grad_lifted_0 += result_2.to(tl.float32)
        result_0, result_1, result_2 = core_vjp_715d64def23d(input_0_0, lifted_0, saved_0_0, grad_output_0_0, grad_state_0)
        dev.store(grad_input_0_at + off, result_0, mask)
        grad_state_0 = result_1
        grad_lifted_0 += result_2.to(tl.float32)
    dev.store(grad_state_0_ptr + grad_state_0_off, grad_state_0, mask)
    dev.store(grad_lifted_0_ptr + off, grad_lifted_0, mask)


@triton.jit
def core_step_b97df8f20e69(input_0, state_0, lifted_0):
    sub = input_0 - state_0  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    neg = lifted_0 * tl.full([], -1.0, tl.float32)  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    exp = dev.exp(neg)  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    add = tl.full([], 1.0, tl.float32) + exp  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    div = dev.div(tl.full([], 1.0, tl.float32), add)  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    mul = sub * div  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    add_1 = state_0 + mul  # scan_cores.py: h = v + (x - v) * torch.sigmoid(w)
    sub_1 = add_1 - tl.full([], 1.0, tl.float32)  # scan_cores.py: s = spike(h - 1.0)
    ge = sub_1 >= tl.full([], 0.0, tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type = ge.to(tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    sub_2 = tl.full([], 1.0, tl.float32) - convert_element_type  # scan_cores.py: return s, h * (1.0 - s)
    mul_1 = add_1 * sub_2  # scan_cores.py: return s, h * (1.0 - s)
    return convert_element_type, mul_1, state_0


@triton.jit(do_not_specialize=["T"])
def core_forward_f619714cfb1b(
    input_0_ptr,
    lifted_0_ptr,
    state_0_ptr,
    output_0_ptr,
    saved_0_ptr,
    final_state_0_ptr,
    T,
    NCL,
    lifted_0_inner0,
    lifted_0_size0,
    lifted_0_stride0,
    state_0_inner0,
    state_0_size0,
    state_0_stride0,
    state_0_inner1,
    state_0_size1,
    state_0_stride1,
    BLOCK: tl.constexpr,
):
    """Forward scan, 8 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    lifted_0_off = (off // lifted_0_inner0) % lifted_0_size0 * lifted_0_stride0
    state_0_off = (off // state_0_inner0) % state_0_size0 * state_0_stride0 + (off // state_0_inner1) % state_0_size1 * state_0_stride1
    state_0 = dev.load(state_0_ptr + state_0_off, mask)
    lifted_0 = dev.load(lifted_0_ptr + lifted_0_off, mask)
    input_0_at = input_0_ptr
    output_0_at = output_0_ptr
    saved_0_at = saved_0_ptr
    chunks = T // 8
    for c in tl.range(0, chunks, num_stages=2):
        input_0_0 = dev.load(input_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        input_0_2 = dev.load(input_0_at + 2 * step + off, mask)
        input_0_3 = dev.load(input_0_at + 3 * step + off, mask)
        input_0_4 = dev.load(input_0_at + 4 * step + off, mask)
        input_0_5 = dev.load(input_0_at + 5 * step + off, mask)
        input_0_6 = dev.load(input_0_at + 6 * step + off, mask)
        input_0_7 = dev.load(input_0_at + 7 * step + off, mask)
        output_0, state_0, saved_0 = core_step_b97df8f20e69(input_0_0, state_0, lifted_0)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(saved_0_at + off, saved_0, mask)
        output_0, state_0, saved_0 = core_step_b97df8f20e69(input_0_1, state_0, lifted_0)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        dev.store(saved_0_at + 1 * step + off, saved_0, mask)
        output_0, state_0, saved_0 = core_step_b97df8f20e69(input_0_2, state_0, lifted_0)
        dev.store(output_0_at + 2 * step + off, output_0, mask)
        dev.store(saved_0_at + 2 * step + off, saved_0, mask)
        output_0, state_0, saved_0 = core_step_b97df8f20e69(input_0_3, state_0, lifted_0)
        dev.store(output_0_at + 3 * step + off, output_0, mask)
        dev.store(saved_0_at + 3 * step + off, saved_0, mask)
        output_0, state_0, saved_0 = core_step_b97df8f20e69(input_0_4, state_0, lifted_0)
        dev.store(output_0_at + 4 * step + off, output_0, mask)
        dev.store(saved_0_at + 4 * step + off, saved_0, mask)
        output_0, state_0, saved_0 = core_step_b97df8f20e69(input_0_5, state_0, lifted_0)
        dev.store(output_0_at + 5 * step + off, output_0, mask)
        dev.store(saved_0_at + 5 * step + off, saved_0, mask)
        output_0, state_0, saved_0 = core_step_b97df8f20e69(input_0_6, state_0, lifted_0)
        dev.store(output_0_at + 6 * step + off, output_0, mask)
        dev.store(saved_0_at + 6 * step + off, saved_0, mask)
        output_0, state_0, saved_0 = core_step_b97df8f20e69(input_0_7, state_0, lifted_0)
        dev.store(output_0_at + 7 * step + off, output_0, mask)
        dev.store(saved_0_at + 7 * step + off, saved_0, mask)
        input_0_at += 8 * step
        output_0_at += 8 * step
        saved_0_at += 8 * step
    for t in tl.range(chunks * 8, T, num_stages=2):
        input_0_0 = dev.load(input_0_at + off, mask)
        output_0, state_0, saved_0 = core_step_b97df8f20e69(input_0_0, state_0, lifted_0)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(saved_0_at + off, saved_0, mask)
        input_0_at += 1 * step
        output_0_at += 1 * step
        saved_0_at += 1 * step
    dev.store(final_state_0_ptr + off, state_0, mask)


@triton.jit(do_not_specialize=["T"])
def core_backward_e26895a631f0(
    input_0_ptr,
    lifted_0_ptr,
    state_0_ptr,
    checkpoint_0_ptr,
    grad_output_0_ptr,
    grad_state_seq_0_ptr,
    grad_input_0_ptr,
    grad_state_0_ptr,
    grad_lifted_0_ptr,
    T,
    NCL,
    lifted_0_inner0,
    lifted_0_size0,
    lifted_0_stride0,
    state_0_inner0,
    state_0_size0,
    state_0_stride0,
    state_0_inner1,
    state_0_size1,
    state_0_stride1,
    grad_state_0_inner0,
    grad_state_0_size0,
    grad_state_0_stride0,
    grad_state_0_inner1,
    grad_state_0_size1,
    grad_state_0_stride1,
    BLOCK: tl.constexpr,
):
    """Backward scan, 4 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    lifted_0_off = (off // lifted_0_inner0) % lifted_0_size0 * lifted_0_stride0
    lifted_0 = dev.load(lifted_0_ptr + lifted_0_off, mask)
    state_0_off = (off // state_0_inner0) % state_0_size0 * state_0_stride0 + (off // state_0_inner1) % state_0_size1 * state_0_stride1
    initial_0 = dev.load(state_0_ptr + state_0_off, mask)
    grad_state_0 = tl.zeros([BLOCK], tl.float32)
    grad_state_0_off = (off // grad_state_0_inner0) % grad_state_0_size0 * grad_state_0_stride0 + (off // grad_state_0_inner1) % grad_state_0_size1 * grad_state_0_stride1
    grad_lifted_0 = tl.zeros([BLOCK], tl.float32)
    chunks = T // 4
    input_0_at = input_0_ptr + tl.cast(chunks, tl.int64) * 4 * step
    grad_output_0_at = grad_output_0_ptr + tl.cast(chunks, tl.int64) * 4 * step
    grad_state_seq_0_at = grad_state_seq_0_ptr + tl.cast(chunks, tl.int64) * 4 * step
    grad_input_0_at = grad_input_0_ptr + tl.cast(chunks, tl.int64) * 4 * step
    left = T % 4
    if left > 0:
        state_0_0 = dev.load(checkpoint_0_ptr + (tl.cast(chunks, tl.int64) - 1) * step + off, mask & (chunks > 0))
        state_0_0 = tl.where(chunks > 0, state_0_0, initial_0)
        input_0_0 = dev.load(input_0_at + off, mask & (0 < left))
        grad_output_0_0 = dev.load(grad_output_0_at + off, mask & (0 < left))
        grad_state_seq_0_0 = dev.load(grad_state_seq_0_at + off, mask & (0 < left))
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask & (1 < left))
        grad_output_0_1 = dev.load(grad_output_0_at + 1 * step + off, mask & (1 < left))
        grad_state_seq_0_1 = dev.load(grad_state_seq_0_at + 1 * step + off, mask & (1 < left))
        input_0_2 = dev.load(input_0_at + 2 * step + off, mask & (2 < left))
        grad_output_0_2 = dev.load(grad_output_0_at + 2 * step + off, mask & (2 < left))
        grad_state_seq_0_2 = dev.load(grad_state_seq_0_at + 2 * step + off, mask & (2 < left))
        input_0_3 = dev.load(input_0_at + 3 * step + off, mask & (3 < left))
        grad_output_0_3 = dev.load(grad_output_0_at + 3 * step + off, mask & (3 < left))
        grad_state_seq_0_3 = dev.load(grad_state_seq_0_at + 3 * step + off, mask & (3 < left))
        unused_0, state_0_1 = core_step_a0cb3adb881d(input_0_0, state_0_0, lifted_0)
        unused_0, state_0_2 = core_step_a0cb3adb881d(input_0_1, state_0_1, lifted_0)
        unused_0, state_0_3 = core_step_a0cb3adb881d(input_0_2, state_0_2, lifted_0)
        grad_state_0 += grad_state_seq_0_3
        result_0, result_1, result_2 = core_vjp_30cf75733ae5(input_0_3, state_0_3, lifted_0, grad_output_0_3, grad_state_0)
        dev.store(grad_input_0_at + 3 * step + off, result_0, mask & (3 < left))
        grad_state_0 = tl.where(3 < left, result_1, grad_state_0)
        grad_lifted_0 += tl.where(3 < left, result_2.to(tl.float32), 0)
        grad_state_0 += grad_state_seq_0_2
        result_0, result_1, result_2 = core_vjp_30cf75733ae5(input_0_2, state_0_2, lifted_0, grad_output_0_2, grad_state_0)
        dev.store(grad_input_0_at + 2 * step + off, result_0, mask & (2 < left))
        grad_state_0 = tl.where(2 < left, result_1, grad_state_0)
        grad_lifted_0 += tl.where(2 < left, result_2.to(tl.float32), 0)
        grad_state_0 += grad_state_seq_0_1
        result_0, result_1, result_2 = core_vjp_30cf75733ae5(input_0_1, state_0_1, lifted_0, grad_output_0_1, grad_state_0)
        dev.store(grad_input_0_at + 1 * step + off, result_0, mask & (1 < left))
        grad_state_0 = tl.where(1 < left, result_1, grad_state_0)
        grad_lifted_0 += tl.where(1 < left, result_2.to(tl.float32), 0)
        grad_state_0 += grad_state_seq_0_0
        result_0, result_1, result_2 = core_vjp_30cf75733ae5(input_0_0, state_0_0, lifted_0, grad_output_0_0, grad_state_0)
        dev.store(grad_input_0_at + off, result_0, mask & (0 < left))
        grad_state_0 = tl.where(0 < left, result_1, grad_state_0)
        grad_lifted_0 += tl.where(0 < left, result_2.to(tl.float32), 0)
    for i in range(0, chunks):
        input_0_at -= 4 * step
        grad_output_0_at -= 4 * step
        grad_state_seq_0_at -= 4 * step
        grad_input_0_at -= 4 * step
        c = chunks - 1 - i
        state_0_0 = dev.load(checkpoint_0_ptr + (tl.cast(c, tl.int64) - 1) * step + off, mask & (c > 0))
        state_0_0 = tl.where(c > 0, state_0_0, initial_0)
        input_0_0 = dev.load(input_0_at + off, mask)
        grad_output_0_0 = dev.load(grad_output_0_at + off, mask)
        grad_state_seq_0_0 = dev.load(grad_state_seq_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        grad_output_0_1 = dev.load(grad_output_0_at + 1 * step + off, mask)
        grad_state_seq_0_1 = dev.load(grad_state_seq_0_at + 1 * step + off, mask)
        input_0_2 = dev.load(input_0_at + 2 * step + off, mask)
        grad_output_0_2 = dev.load(grad_output_0_at + 2 * step + off, mask)
        grad_state_seq_0_2 = dev.load(grad_state_seq_0_at + 2 * step + off, mask)
        input_0_3 = dev.load(input_0_at + 3 * step + off, mask)
        grad_output_0_3 = dev.load(grad_output_0_at + 3 * step + off, mask)
        grad_state_seq_0_3 = dev.load(grad_state_seq_0_at + 3 * step + off, mask)
        unused_0, state_0_1 = core_step_a0cb3adb881d(input_0_0, state_0_0, lifted_0)
        unused_0, state_0_2 = core_step_a0cb3adb881d(input_0_1, state_0_1, lifted_0)
        unused_0, state_0_3 = core_step_a0cb3adb881d(input_0_2, state_0_2, lifted_0)
        grad_state_0 += grad_state_seq_0_3
        result_0, result_1, result_2 = core_vjp_30cf75733ae5(input_0_3, state_0_3, lifted_0, grad_output_0_3, grad_state_0)
        dev.store(grad_input_0_at + 3 * step + off, result_0, mask)
        grad_state_0 = result_1
        grad_lifted_0 += result_2.to(tl.float32)
        grad_state_0 += grad_state_seq_0_2
        result_0, result_1, result_2 = core_vjp_30cf75733ae5(input_0_2, state_0_2, lifted_0, grad_output_0_2, grad_state_0)
        dev.store(grad_input_0_at + 2 * step + off, result_0, mask)
        grad_state_0 = result_1
        grad_lifted_0 += result_2.to(tl.float32)
        grad_state_0 += grad_state_seq_0_1
        result_0, result_1, result_2 = core_vjp_30cf75733ae5(input_0_1, state_0_1, lifted_0, grad_output_0_1, grad_state_0)
        dev.store(grad_input_0_at + 1 * step + off, result_0, mask)
        grad_state_0 = result_1
        grad_lifted_0 += result_2.to(tl.float32)
        grad_state_0 += grad_state_seq_0_0
        result_0, result_1, result_2 = core_vjp_30cf75733ae5(input_0_0, state_0_0, lifted_0, grad_output_0_0, grad_state_0)
        dev.store(grad_input_0_at + off, result_0, mask)
        grad_state_0 = result_1
        grad_lifted_0 += result_2.to(tl.float32)
    dev.store(grad_state_0_ptr + grad_state_0_off, grad_state_0, mask)
    dev.store(grad_lifted_0_ptr + off, grad_lifted_0, mask)


@triton.jit(do_not_specialize=["T"])
def core_forward_84e229e862fc(
    input_0_ptr,
    lifted_0_ptr,
    state_0_ptr,
    output_0_ptr,
    state_seq_0_ptr,
    checkpoint_0_ptr,
    T,
    NCL,
    lifted_0_inner0,
    lifted_0_size0,
    lifted_0_stride0,
    state_0_inner0,
    state_0_size0,
    state_0_stride0,
    state_0_inner1,
    state_0_size1,
    state_0_stride1,
    BLOCK: tl.constexpr,
):
    """Forward scan, 8 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    lifted_0_off = (off // lifted_0_inner0) % lifted_0_size0 * lifted_0_stride0
    state_0_off = (off // state_0_inner0) % state_0_size0 * state_0_stride0 + (off // state_0_inner1) % state_0_size1 * state_0_stride1
    state_0 = dev.load(state_0_ptr + state_0_off, mask)
    lifted_0 = dev.load(lifted_0_ptr + lifted_0_off, mask)
    input_0_at = input_0_ptr
    output_0_at = output_0_ptr
    state_seq_0_at = state_seq_0_ptr
    chunks = T // 8
    for c in tl.range(0, chunks, num_stages=2):
        input_0_0 = dev.load(input_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        input_0_2 = dev.load(input_0_at + 2 * step + off, mask)
        input_0_3 = dev.load(input_0_at + 3 * step + off, mask)
        input_0_4 = dev.load(input_0_at + 4 * step + off, mask)
        input_0_5 = dev.load(input_0_at + 5 * step + off, mask)
        input_0_6 = dev.load(input_0_at + 6 * step + off, mask)
        input_0_7 = dev.load(input_0_at + 7 * step + off, mask)
        dev.store(checkpoint_0_ptr + tl.cast(c * 2 + -1, tl.int64) * step + off, state_0, mask & (c > 0))
        output_0, state_0 = core_step_a0cb3adb881d(input_0_0, state_0, lifted_0)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(state_seq_0_at + off, state_0, mask)
        output_0, state_0 = core_step_a0cb3adb881d(input_0_1, state_0, lifted_0)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        dev.store(state_seq_0_at + 1 * step + off, state_0, mask)
        output_0, state_0 = core_step_a0cb3adb881d(input_0_2, state_0, lifted_0)
        dev.store(output_0_at + 2 * step + off, output_0, mask)
        dev.store(state_seq_0_at + 2 * step + off, state_0, mask)
        output_0, state_0 = core_step_a0cb3adb881d(input_0_3, state_0, lifted_0)
        dev.store(output_0_at + 3 * step + off, output_0, mask)
        dev.store(state_seq_0_at + 3 * step + off, state_0, mask)
        dev.store(checkpoint_0_ptr + tl.cast(c * 2 + 0, tl.int64) * step + off, state_0, mask)
        output_0, state_0 = core_step_a0cb3adb881d(input_0_4, state_0, lifted_0)
        dev.store(output_0_at + 4 * step + off, output_0, mask)
        dev.store(state_seq_0_at + 4 * step + off, state_0, mask)
        output_0, state_0 = core_step_a0cb3adb881d(input_0_5, state_0, lifted_0)
        dev.store(output_0_at + 5 * step + off, output_0, mask)
        dev.store(state_seq_0_at + 5 * step + off, state_0, mask)
        output_0, state_0 = core_step_a0cb3adb881d(input_0_6, state_0, lifted_0)
        dev.store(output_0_at + 6 * step + off, output_0, mask)
        dev.store(state_seq_0_at + 6 * step + off, state_0, mask)
        output_0, state_0 = core_step_a0cb3adb881d(input_0_7, state_0, lifted_0)
        dev.store(output_0_at + 7 * step + off, output_0, mask)
        dev.store(state_seq_0_at + 7 * step + off, state_0, mask)
        input_0_at += 8 * step
        output_0_at += 8 * step
        state_seq_0_at += 8 * step
    for t in tl.range(chunks * 8, T, num_stages=2):
        input_0_0 = dev.load(input_0_at + off, mask)
        dev.store(checkpoint_0_ptr + tl.cast(t // 4 - 1, tl.int64) * step + off, state_0, mask & ((t > 0) & (t % 4 == 0)))
        output_0, state_0 = core_step_a0cb3adb881d(input_0_0, state_0, lifted_0)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(state_seq_0_at + off, state_0, mask)
        input_0_at += 1 * step
        output_0_at += 1 * step
        state_seq_0_at += 1 * step


