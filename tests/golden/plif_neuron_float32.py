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
def core_forward_f0addb21d135(
    input_0_ptr,
    lifted_0_ptr,
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
    lifted_0 = dev.load(lifted_0_ptr + off, mask)
    input_0_at = input_0_ptr
    output_0_at = output_0_ptr
    chunks = T // 2
    for c in range(0, chunks):
        input_0_0 = dev.load(input_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        output_0, state_0 = core_step_a0cb3adb881d(input_0_0, state_0, lifted_0)
        dev.store(output_0_at + off, output_0, mask)
        output_0, state_0 = core_step_a0cb3adb881d(input_0_1, state_0, lifted_0)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        input_0_at += 2 * step
        output_0_at += 2 * step
    dev.store(final_state_0_ptr + off, state_0, mask)


@triton.jit(do_not_specialize=["T"])
def core_forward_d02f0ac47ffa(
    input_0_ptr,
    lifted_0_ptr,
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
    lifted_0 = dev.load(lifted_0_ptr + off, mask)
    input_0_at = input_0_ptr
    output_0_at = output_0_ptr
    state_seq_0_at = state_seq_0_ptr
    chunks = T // 2
    for c in range(0, chunks):
        input_0_0 = dev.load(input_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        output_0, state_0 = core_step_a0cb3adb881d(input_0_0, state_0, lifted_0)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(state_seq_0_at + off, state_0, mask)
        output_0, state_0 = core_step_a0cb3adb881d(input_0_1, state_0, lifted_0)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        dev.store(state_seq_0_at + 1 * step + off, state_0, mask)
        input_0_at += 2 * step
        output_0_at += 2 * step
        state_seq_0_at += 2 * step


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
def core_backward_0e9bdbe14750(
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
    BLOCK: tl.constexpr,
):
    """Backward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    lifted_0 = dev.load(lifted_0_ptr + off, mask)
    initial_0 = dev.load(state_0_ptr + off, mask)
    grad_state_0 = dev.load(grad_final_state_0_ptr + off, mask)
    grad_lifted_0 = tl.zeros([BLOCK], tl.float32)
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
        unused_0, state_0_1 = core_step_a0cb3adb881d(input_0_0, state_0_0, lifted_0)
        result_0, result_1, result_2 = core_vjp_30cf75733ae5(input_0_1, state_0_1, lifted_0, grad_output_0_1, grad_state_0)
        dev.store(grad_input_0_at + 1 * step + off, result_0, mask)
        grad_state_0 = result_1
        grad_lifted_0 += result_2.to(tl.float32)
        result_0, result_1, result_2 = core_vjp_30cf75733ae5(input_0_0, state_0_0, lifted_0, grad_output_0_0, grad_state_0)
        dev.store(grad_input_0_at + off, result_0, mask)
        grad_state_0 = result_1
        grad_lifted_0 += result_2.to(tl.float32)
    dev.store(grad_state_0_ptr + off, grad_state_0, mask)
    dev.store(grad_lifted_0_ptr + off, grad_lifted_0, mask)


@triton.jit(do_not_specialize=["T"])
def core_forward_2419e085667a(
    input_0_ptr,
    lifted_0_ptr,
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
    lifted_0 = dev.load(lifted_0_ptr + off, mask)
    input_0_at = input_0_ptr
    output_0_at = output_0_ptr
    chunks = T // 2
    for c in range(0, chunks):
        input_0_0 = dev.load(input_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        dev.store(checkpoint_0_ptr + tl.cast(c * 0 + -1, tl.int64) * step + off, state_0, mask & (c > 0))
        output_0, state_0 = core_step_a0cb3adb881d(input_0_0, state_0, lifted_0)
        dev.store(output_0_at + off, output_0, mask)
        output_0, state_0 = core_step_a0cb3adb881d(input_0_1, state_0, lifted_0)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        input_0_at += 2 * step
        output_0_at += 2 * step
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
def core_backward_e71c7956bd9d(
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
    BLOCK: tl.constexpr,
):
    """Backward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    lifted_0 = dev.load(lifted_0_ptr + off, mask)
    grad_state_0 = dev.load(grad_final_state_0_ptr + off, mask)
    grad_lifted_0 = tl.zeros([BLOCK], tl.float32)
    chunks = T // 2
    input_0_at = input_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    saved_0_at = saved_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    grad_output_0_at = grad_output_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    grad_input_0_at = grad_input_0_ptr + tl.cast(chunks, tl.int64) * 2 * step
    for i in range(0, chunks):
        input_0_at -= 2 * step
        saved_0_at -= 2 * step
        grad_output_0_at -= 2 * step
        grad_input_0_at -= 2 * step
        c = chunks - 1 - i
        input_0_0 = dev.load(input_0_at + off, mask)
        saved_0_0 = dev.load(saved_0_at + off, mask)
        grad_output_0_0 = dev.load(grad_output_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        saved_0_1 = dev.load(saved_0_at + 1 * step + off, mask)
        grad_output_0_1 = dev.load(grad_output_0_at + 1 * step + off, mask)
        result_0, result_1, result_2 = core_vjp_715d64def23d(input_0_1, lifted_0, saved_0_1, grad_output_0_1, grad_state_0)
        dev.store(grad_input_0_at + 1 * step + off, result_0, mask)
        grad_state_0 = result_1
        grad_lifted_0 += result_2.to(tl.float32)
        result_0, result_1, result_2 = core_vjp_715d64def23d(input_0_0, lifted_0, saved_0_0, grad_output_0_0, grad_state_0)
        dev.store(grad_input_0_at + off, result_0, mask)
        grad_state_0 = result_1
        grad_lifted_0 += result_2.to(tl.float32)
    dev.store(grad_state_0_ptr + off, grad_state_0, mask)
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
def core_forward_e79d90b9ceab(
    input_0_ptr,
    lifted_0_ptr,
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
    lifted_0 = dev.load(lifted_0_ptr + off, mask)
    input_0_at = input_0_ptr
    output_0_at = output_0_ptr
    saved_0_at = saved_0_ptr
    chunks = T // 2
    for c in range(0, chunks):
        input_0_0 = dev.load(input_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        output_0, state_0, saved_0 = core_step_b97df8f20e69(input_0_0, state_0, lifted_0)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(saved_0_at + off, saved_0, mask)
        output_0, state_0, saved_0 = core_step_b97df8f20e69(input_0_1, state_0, lifted_0)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        dev.store(saved_0_at + 1 * step + off, saved_0, mask)
        input_0_at += 2 * step
        output_0_at += 2 * step
        saved_0_at += 2 * step
    dev.store(final_state_0_ptr + off, state_0, mask)


@triton.jit(do_not_specialize=["T"])
def core_backward_accb82654be4(
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
    BLOCK: tl.constexpr,
):
    """Backward scan, 2 steps a chunk. One program: BLOCK elements, all T."""
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = off < NCL
    step = tl.cast(NCL, tl.int64)
    lifted_0 = dev.load(lifted_0_ptr + off, mask)
    initial_0 = dev.load(state_0_ptr + off, mask)
    grad_state_0 = tl.zeros([BLOCK], tl.float32)
    grad_lifted_0 = tl.zeros([BLOCK], tl.float32)
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
        unused_0, state_0_1 = core_step_a0cb3adb881d(input_0_0, state_0_0, lifted_0)
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
    dev.store(grad_state_0_ptr + off, grad_state_0, mask)
    dev.store(grad_lifted_0_ptr + off, grad_lifted_0, mask)


@triton.jit(do_not_specialize=["T"])
def core_forward_7d23d5d9f3b7(
    input_0_ptr,
    lifted_0_ptr,
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
    lifted_0 = dev.load(lifted_0_ptr + off, mask)
    input_0_at = input_0_ptr
    output_0_at = output_0_ptr
    state_seq_0_at = state_seq_0_ptr
    chunks = T // 2
    for c in range(0, chunks):
        input_0_0 = dev.load(input_0_at + off, mask)
        input_0_1 = dev.load(input_0_at + 1 * step + off, mask)
        dev.store(checkpoint_0_ptr + tl.cast(c * 0 + -1, tl.int64) * step + off, state_0, mask & (c > 0))
        output_0, state_0 = core_step_a0cb3adb881d(input_0_0, state_0, lifted_0)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(state_seq_0_at + off, state_0, mask)
        output_0, state_0 = core_step_a0cb3adb881d(input_0_1, state_0, lifted_0)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        dev.store(state_seq_0_at + 1 * step + off, state_0, mask)
        input_0_at += 2 * step
        output_0_at += 2 * step
        state_seq_0_at += 2 * step


