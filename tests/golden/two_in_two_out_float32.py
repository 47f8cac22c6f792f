# Made by: PYTHONPATH=tests hatch run python tests/test_scan_goldens.py
import triton
import triton.language as tl

from flexsn_codegen.targets.triton import device as dev


@triton.jit
def core_step_76fa5340911f(input_0, input_1, state_0, state_1, lifted_0):
    mul = state_0 * tl.full([], 0.5, tl.float32)  # scan_cores.py: current = 0.5 * i + x * gain
    mul_1 = input_0 * lifted_0  # scan_cores.py: current = 0.5 * i + x * gain
    add = mul + mul_1  # scan_cores.py: current = 0.5 * i + x * gain
    mul_2 = state_1 * tl.full([], 0.75, tl.float32)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    add_1 = mul_2 + add  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    tanh = dev.tanh(input_1)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    sub = add_1 - tanh  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    sub_1 = sub - tl.full([], 0.5, tl.float32)  # scan_cores.py: s = spike(h - 0.5)
    ge = sub_1 >= tl.full([], 0.0, tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type = ge.to(tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    mul_3 = convert_element_type * tl.full([], 0.5, tl.float32)  # scan_cores.py: return s, h, current, h - 0.5 * s
    sub_2 = sub - mul_3  # scan_cores.py: return s, h, current, h - 0.5 * s
    return convert_element_type, sub, add, sub_2


@triton.jit(do_not_specialize=["T"])
def core_forward_ffc7d8df9a89(
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
        output_0, output_1, state_0, state_1 = core_step_76fa5340911f(input_0_0, input_1_0, state_0, state_1, lifted_0)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(output_1_at + off, output_1, mask)
        output_0, output_1, state_0, state_1 = core_step_76fa5340911f(input_0_1, input_1_1, state_0, state_1, lifted_0)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        dev.store(output_1_at + 1 * step + off, output_1, mask)
        input_0_at += 2 * step
        input_1_at += 2 * step
        output_0_at += 2 * step
        output_1_at += 2 * step
    dev.store(final_state_0_ptr + off, state_0, mask)
    dev.store(final_state_1_ptr + off, state_1, mask)


@triton.jit(do_not_specialize=["T"])
def core_forward_4863823b53be(
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
        output_0, output_1, state_0, state_1 = core_step_76fa5340911f(input_0_0, input_1_0, state_0, state_1, lifted_0)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(output_1_at + off, output_1, mask)
        dev.store(state_seq_0_at + off, state_0, mask)
        dev.store(state_seq_1_at + off, state_1, mask)
        output_0, output_1, state_0, state_1 = core_step_76fa5340911f(input_0_1, input_1_1, state_0, state_1, lifted_0)
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
def core_vjp_884fb8c4a870(input_0, input_1, state_0, state_1, lifted_0, grad_output_0, grad_output_1, grad_state_0, grad_state_1):
    mul = state_0 * tl.full([], 0.5, tl.float32)  # scan_cores.py: current = 0.5 * i + x * gain
    mul_1 = input_0 * lifted_0  # scan_cores.py: current = 0.5 * i + x * gain
    add = mul + mul_1  # scan_cores.py: current = 0.5 * i + x * gain
    mul_2 = state_1 * tl.full([], 0.75, tl.float32)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    add_1 = mul_2 + add  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    tanh = dev.tanh(input_1)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    sub = add_1 - tanh  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    sub_1 = sub - tl.full([], 0.5, tl.float32)  # scan_cores.py: s = spike(h - 0.5)
    neg = grad_state_1 * tl.full([], -1.0, tl.float32)  # scan_cores.py: return s, h, current, h - 0.5 * s
    add_2 = grad_output_1 + grad_state_1  # scan_cores.py: return s, h, current, h - 0.5 * s
    mul_4 = neg * tl.full([], 0.5, tl.float32)  # scan_cores.py: return s, h, current, h - 0.5 * s
    add_3 = grad_output_0 + mul_4  # scan_cores.py: return s, h, current, h - 0.5 * s
    mul_5 = sub_1 * tl.full([], 4.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    neg_1 = mul_5 * tl.full([], -1.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    exp = dev.exp(neg_1)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    add_4 = tl.full([], 1.0, tl.float32) + exp  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    div = dev.fast_div(tl.full([], 1.0, tl.float32), add_4)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    mul_6 = add_3 * tl.full([], 4.0, tl.float32)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_7 = mul_6 * div  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    sub_3 = tl.full([], 1.0, tl.float32) - div  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_8 = mul_7 * sub_3  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    add_5 = add_2 + mul_8  # scan_cores.py: s = spike(h - 0.5)
    neg_2 = add_5 * tl.full([], -1.0, tl.float32)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    mul_9 = tanh * tanh  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    sub_4 = tl.full([], 1.0, tl.float32) - mul_9  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    mul_10 = neg_2 * sub_4  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    add_6 = grad_state_0 + add_5  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    mul_11 = add_5 * tl.full([], 0.75, tl.float32)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    mul_12 = add_6 * input_0  # scan_cores.py: current = 0.5 * i + x * gain
    mul_13 = add_6 * lifted_0  # scan_cores.py: current = 0.5 * i + x * gain
    mul_14 = add_6 * tl.full([], 0.5, tl.float32)  # scan_cores.py: current = 0.5 * i + x * gain
    return mul_13, mul_10, mul_14, mul_11, mul_12


@triton.jit(do_not_specialize=["T"])
def core_backward_44911af93bae(
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
        unused_0, unused_1, state_0_1, state_1_1 = core_step_76fa5340911f(input_0_0, input_1_0, state_0_0, state_1_0, lifted_0)
        result_0, result_1, result_2, result_3, result_4 = core_vjp_884fb8c4a870(input_0_1, input_1_1, state_0_1, state_1_1, lifted_0, grad_output_0_1, grad_output_1_1, grad_state_0, grad_state_1)
        dev.store(grad_input_0_at + 1 * step + off, result_0, mask)
        dev.store(grad_input_1_at + 1 * step + off, result_1, mask)
        grad_state_0 = result_2
        grad_state_1 = result_3
        grad_lifted_0 += result_4.to(tl.float32)
        result_0, result_1, result_2, result_3, result_4 = core_vjp_884fb8c4a870(input_0_0, input_1_0, state_0_0, state_1_0, lifted_0, grad_output_0_0, grad_output_1_0, grad_state_0, grad_state_1)
        dev.store(grad_input_0_at + off, result_0, mask)
        dev.store(grad_input_1_at + off, result_1, mask)
        grad_state_0 = result_2
        grad_state_1 = result_3
        grad_lifted_0 += result_4.to(tl.float32)
    dev.store(grad_state_0_ptr + off, grad_state_0, mask)
    dev.store(grad_state_1_ptr + off, grad_state_1, mask)
    dev.store(grad_lifted_0_ptr + off, grad_lifted_0, mask)


@triton.jit(do_not_specialize=["T"])
def core_forward_318f2d9ab83a(
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
        output_0, output_1, state_0, state_1 = core_step_76fa5340911f(input_0_0, input_1_0, state_0, state_1, lifted_0)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(output_1_at + off, output_1, mask)
        output_0, output_1, state_0, state_1 = core_step_76fa5340911f(input_0_1, input_1_1, state_0, state_1, lifted_0)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        dev.store(output_1_at + 1 * step + off, output_1, mask)
        input_0_at += 2 * step
        input_1_at += 2 * step
        output_0_at += 2 * step
        output_1_at += 2 * step
    dev.store(final_state_0_ptr + off, state_0, mask)
    dev.store(final_state_1_ptr + off, state_1, mask)


@triton.jit
def core_vjp_abcda542dd4b(input_0, input_1, lifted_0, saved_0, grad_output_0, grad_output_1, grad_state_0, grad_state_1):
    tanh = dev.tanh(input_1)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    neg = grad_state_1 * tl.full([], -1.0, tl.float32)  # scan_cores.py: return s, h, current, h - 0.5 * s
    add_2 = grad_output_1 + grad_state_1  # scan_cores.py: return s, h, current, h - 0.5 * s
    mul_4 = neg * tl.full([], 0.5, tl.float32)  # scan_cores.py: return s, h, current, h - 0.5 * s
    add_3 = grad_output_0 + mul_4  # scan_cores.py: return s, h, current, h - 0.5 * s
    mul_6 = add_3 * tl.full([], 4.0, tl.float32)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_7 = mul_6 * saved_0  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    sub_3 = tl.full([], 1.0, tl.float32) - saved_0  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_8 = mul_7 * sub_3  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    add_5 = add_2 + mul_8  # scan_cores.py: s = spike(h - 0.5)
    neg_2 = add_5 * tl.full([], -1.0, tl.float32)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    mul_9 = tanh * tanh  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    sub_4 = tl.full([], 1.0, tl.float32) - mul_9  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    mul_10 = neg_2 * sub_4  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    add_6 = grad_state_0 + add_5  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    mul_11 = add_5 * tl.full([], 0.75, tl.float32)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    mul_12 = add_6 * input_0  # scan_cores.py: current = 0.5 * i + x * gain
    mul_13 = add_6 * lifted_0  # scan_cores.py: current = 0.5 * i + x * gain
    mul_14 = add_6 * tl.full([], 0.5, tl.float32)  # scan_cores.py: current = 0.5 * i + x * gain
    return mul_13, mul_10, mul_14, mul_11, mul_12


@triton.jit(do_not_specialize=["T"])
def core_backward_cc74ebb67c6b(
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
        result_0, result_1, result_2, result_3, result_4 = core_vjp_abcda542dd4b(input_0_1, input_1_1, lifted_0, saved_0_1, grad_output_0_1, grad_output_1_1, grad_state_0, grad_state_1)
        dev.store(grad_input_0_at + 1 * step + off, result_0, mask)
        dev.store(grad_input_1_at + 1 * step + off, result_1, mask)
        grad_state_0 = result_2
        grad_state_1 = result_3
        grad_lifted_0 += result_4.to(tl.float32)
        result_0, result_1, result_2, result_3, result_4 = core_vjp_abcda542dd4b(input_0_0, input_1_0, lifted_0, saved_0_0, grad_output_0_0, grad_output_1_0, grad_state_0, grad_state_1)
        dev.store(grad_input_0_at + off, result_0, mask)
        dev.store(grad_input_1_at + off, result_1, mask)
        grad_state_0 = result_2
        grad_state_1 = result_3
        grad_lifted_0 += result_4.to(tl.float32)
    dev.store(grad_state_0_ptr + off, grad_state_0, mask)
    dev.store(grad_state_1_ptr + off, grad_state_1, mask)
    dev.store(grad_lifted_0_ptr + off, grad_lifted_0, mask)


@triton.jit
def core_step_70b0951ff3be(input_0, input_1, state_0, state_1, lifted_0):
    mul = state_0 * tl.full([], 0.5, tl.float32)  # scan_cores.py: current = 0.5 * i + x * gain
    mul_1 = input_0 * lifted_0  # scan_cores.py: current = 0.5 * i + x * gain
    add = mul + mul_1  # scan_cores.py: current = 0.5 * i + x * gain
    mul_2 = state_1 * tl.full([], 0.75, tl.float32)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    add_1 = mul_2 + add  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    tanh = dev.tanh(input_1)  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    sub = add_1 - tanh  # scan_cores.py: h = 0.75 * v + current - torch.tanh(y)
    sub_1 = sub - tl.full([], 0.5, tl.float32)  # scan_cores.py: s = spike(h - 0.5)
    ge = sub_1 >= tl.full([], 0.0, tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type = ge.to(tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    mul_3 = convert_element_type * tl.full([], 0.5, tl.float32)  # scan_cores.py: return s, h, current, h - 0.5 * s
    sub_2 = sub - mul_3  # scan_cores.py: return s, h, current, h - 0.5 * s
    mul_5 = sub_1 * tl.full([], 4.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    neg_1 = mul_5 * tl.full([], -1.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    exp = dev.exp(neg_1)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    add_4 = tl.full([], 1.0, tl.float32) + exp  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    div = dev.div(tl.full([], 1.0, tl.float32), add_4)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    return convert_element_type, sub, add, sub_2, div


@triton.jit(do_not_specialize=["T"])
def core_forward_04440defab52(
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
        output_0, output_1, state_0, state_1, saved_0 = core_step_70b0951ff3be(input_0_0, input_1_0, state_0, state_1, lifted_0)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(output_1_at + off, output_1, mask)
        dev.store(saved_0_at + off, saved_0, mask)
        output_0, output_1, state_0, state_1, saved_0 = core_step_70b0951ff3be(input_0_1, input_1_1, state_0, state_1, lifted_0)
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
def core_backward_381bcc5adcba(
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
        unused_0, unused_1, state_0_1, state_1_1 = core_step_76fa5340911f(input_0_0, input_1_0, state_0_0, state_1_0, lifted_0)
        grad_state_0 += grad_state_seq_0_1
        grad_state_1 += grad_state_seq_1_1
        result_0, result_1, result_2, result_3, result_4 = core_vjp_884fb8c4a870(input_0_1, input_1_1, state_0_1, state_1_1, lifted_0, grad_output_0_1, grad_output_1_1, grad_state_0, grad_state_1)
        dev.store(grad_input_0_at + 1 * step + off, result_0, mask)
        dev.store(grad_input_1_at + 1 * step + off, result_1, mask)
        grad_state_0 = result_2
        grad_state_1 = result_3
        grad_lifted_0 += result_4.to(tl.float32)
        grad_state_0 += grad_state_seq_0_0
        grad_state_1 += grad_state_seq_1_0
        result_0, result_1, result_2, result_3, result_4 = core_vjp_884fb8c4a870(input_0_0, input_1_0, state_0_0, state_1_0, lifted_0, grad_output_0_0, grad_output_1_0, grad_state_0, grad_state_1)
        dev.store(grad_input_0_at + off, result_0, mask)
        dev.store(grad_input_1_at + off, result_1, mask)
        grad_state_0 = result_2
        grad_state_1 = result_3
        grad_lifted_0 += result_4.to(tl.float32)
    dev.store(grad_state_0_ptr + off, grad_state_0, mask)
    dev.store(grad_state_1_ptr + off, grad_state_1, mask)
    dev.store(grad_lifted_0_ptr + off, grad_lifted_0, mask)


@triton.jit(do_not_specialize=["T"])
def core_forward_3e8fd97b2c9e(
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
        output_0, output_1, state_0, state_1 = core_step_76fa5340911f(input_0_0, input_1_0, state_0, state_1, lifted_0)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(output_1_at + off, output_1, mask)
        dev.store(state_seq_0_at + off, state_0, mask)
        dev.store(state_seq_1_at + off, state_1, mask)
        output_0, output_1, state_0, state_1 = core_step_76fa5340911f(input_0_1, input_1_1, state_0, state_1, lifted_0)
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


