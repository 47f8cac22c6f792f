# Made by: PYTHONPATH=tests hatch run python tests/test_scan_goldens.py
import triton
import triton.language as tl

from flexsn_codegen.targets.triton import device as dev


@triton.jit
def core_step_8766e5dc1d32(input_0, state_0):
    add = state_0 + input_0  # scan_cores.py: h = v + x
    sub = add - tl.full([], 1.0, tl.float32)  # scan_cores.py: s = spike(h - 1.0)
    ge = sub >= tl.full([], 0.0, tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type = ge.to(tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    sub_1 = tl.full([], 1.0, tl.float32) - convert_element_type  # scan_cores.py: return s, h * (1.0 - s)
    mul = add * sub_1  # scan_cores.py: return s, h * (1.0 - s)
    return convert_element_type, mul


@triton.jit(do_not_specialize=["T"])
def core_forward_7247dd71271a(
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
        output_0, state_0 = core_step_8766e5dc1d32(input_0_0, state_0)
        dev.store(output_0_at + off, output_0, mask)
        output_0, state_0 = core_step_8766e5dc1d32(input_0_1, state_0)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        input_0_at += 2 * step
        output_0_at += 2 * step
    dev.store(final_state_0_ptr + off, state_0, mask)


@triton.jit(do_not_specialize=["T"])
def core_forward_a9f1421ade9f(
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
        output_0, state_0 = core_step_8766e5dc1d32(input_0_0, state_0)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(state_seq_0_at + off, state_0, mask)
        output_0, state_0 = core_step_8766e5dc1d32(input_0_1, state_0)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        dev.store(state_seq_0_at + 1 * step + off, state_0, mask)
        input_0_at += 2 * step
        output_0_at += 2 * step
        state_seq_0_at += 2 * step


@triton.jit
def core_vjp_597a1ee1d06c(input_0, state_0, grad_output_0, grad_state_0):
    add = state_0 + input_0  # scan_cores.py: h = v + x
    sub = add - tl.full([], 1.0, tl.float32)  # scan_cores.py: s = spike(h - 1.0)
    ge = sub >= tl.full([], 0.0, tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type = ge.to(tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    sub_1 = tl.full([], 1.0, tl.float32) - convert_element_type  # scan_cores.py: return s, h * (1.0 - s)
    mul_1 = grad_state_0 * add  # scan_cores.py: return s, h * (1.0 - s)
    mul_2 = grad_state_0 * sub_1  # scan_cores.py: return s, h * (1.0 - s)
    neg = mul_1 * tl.full([], -1.0, tl.float32)  # scan_cores.py: return s, h * (1.0 - s)
    add_1 = grad_output_0 + neg  # scan_cores.py: return s, h * (1.0 - s)
    mul_3 = sub * tl.full([], 4.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    neg_1 = mul_3 * tl.full([], -1.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    exp = dev.exp(neg_1)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    add_2 = tl.full([], 1.0, tl.float32) + exp  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    div = dev.fast_div(tl.full([], 1.0, tl.float32), add_2)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    mul_4 = add_1 * tl.full([], 4.0, tl.float32)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_5 = mul_4 * div  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    sub_2 = tl.full([], 1.0, tl.float32) - div  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_6 = mul_5 * sub_2  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    add_3 = mul_2 + mul_6  # scan_cores.py: s = spike(h - 1.0)
    return add_3, add_3


@triton.jit(do_not_specialize=["T"])
def core_backward_43395ded51e9(
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
        unused_0, state_0_1 = core_step_8766e5dc1d32(input_0_0, state_0_0)
        result_0, result_1 = core_vjp_597a1ee1d06c(input_0_1, state_0_1, grad_output_0_1, grad_state_0)
        dev.store(grad_input_0_at + 1 * step + off, result_0, mask)
        grad_state_0 = result_1
        result_0, result_1 = core_vjp_597a1ee1d06c(input_0_0, state_0_0, grad_output_0_0, grad_state_0)
        dev.store(grad_input_0_at + off, result_0, mask)
        grad_state_0 = result_1
    dev.store(grad_state_0_ptr + off, grad_state_0, mask)


@triton.jit(do_not_specialize=["T"])
def core_forward_c3de8b82bf22(
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
        output_0, state_0 = core_step_8766e5dc1d32(input_0_0, state_0)
        dev.store(output_0_at + off, output_0, mask)
        output_0, state_0 = core_step_8766e5dc1d32(input_0_1, state_0)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        input_0_at += 2 * step
        output_0_at += 2 * step
    dev.store(final_state_0_ptr + off, state_0, mask)


@triton.jit
def core_vjp_3d002082d289(saved_0, grad_output_0, grad_state_0):
    sub = saved_0 - tl.full([], 1.0, tl.float32)  # scan_cores.py: s = spike(h - 1.0)
    ge = sub >= tl.full([], 0.0, tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type = ge.to(tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    sub_1 = tl.full([], 1.0, tl.float32) - convert_element_type  # scan_cores.py: return s, h * (1.0 - s)
    mul_1 = grad_state_0 * saved_0  # scan_cores.py: return s, h * (1.0 - s)
    mul_2 = grad_state_0 * sub_1  # scan_cores.py: return s, h * (1.0 - s)
    neg = mul_1 * tl.full([], -1.0, tl.float32)  # scan_cores.py: return s, h * (1.0 - s)
    add_1 = grad_output_0 + neg  # scan_cores.py: return s, h * (1.0 - s)
    mul_3 = sub * tl.full([], 4.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    neg_1 = mul_3 * tl.full([], -1.0, tl.float32)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    exp = dev.exp(neg_1)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    add_2 = tl.full([], 1.0, tl.float32) + exp  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    div = dev.fast_div(tl.full([], 1.0, tl.float32), add_2)  # scan_cores.py: soft = torch.sigmoid(4.0 * x)
    mul_4 = add_1 * tl.full([], 4.0, tl.float32)  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_5 = mul_4 * div  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    sub_2 = tl.full([], 1.0, tl.float32) - div  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    mul_6 = mul_5 * sub_2  # scan_cores.py: return grad * 4.0 * soft * (1.0 - soft)
    add_3 = mul_2 + mul_6  # scan_cores.py: s = spike(h - 1.0)
    return add_3, add_3


@triton.jit(do_not_specialize=["T"])
def core_backward_5ba599ebca70(
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
        result_0, result_1 = core_vjp_3d002082d289(saved_0_1, grad_output_0_1, grad_state_0)
        dev.store(grad_input_0_at + 1 * step + off, result_0, mask)
        grad_state_0 = result_1
        result_0, result_1 = core_vjp_3d002082d289(saved_0_0, grad_output_0_0, grad_state_0)
        dev.store(grad_input_0_at + off, result_0, mask)
        grad_state_0 = result_1
    dev.store(grad_state_0_ptr + off, grad_state_0, mask)


@triton.jit
def core_step_5333155a4c6b(input_0, state_0):
    add = state_0 + input_0  # scan_cores.py: h = v + x
    sub = add - tl.full([], 1.0, tl.float32)  # scan_cores.py: s = spike(h - 1.0)
    ge = sub >= tl.full([], 0.0, tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    convert_element_type = ge.to(tl.float32)  # scan_cores.py: return (x >= 0).to(x.dtype)
    sub_1 = tl.full([], 1.0, tl.float32) - convert_element_type  # scan_cores.py: return s, h * (1.0 - s)
    mul = add * sub_1  # scan_cores.py: return s, h * (1.0 - s)
    return convert_element_type, mul, add


@triton.jit(do_not_specialize=["T"])
def core_forward_c2a4e737125c(
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
        output_0, state_0, saved_0 = core_step_5333155a4c6b(input_0_0, state_0)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(saved_0_at + off, saved_0, mask)
        output_0, state_0, saved_0 = core_step_5333155a4c6b(input_0_1, state_0)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        dev.store(saved_0_at + 1 * step + off, saved_0, mask)
        input_0_at += 2 * step
        output_0_at += 2 * step
        saved_0_at += 2 * step
    dev.store(final_state_0_ptr + off, state_0, mask)


@triton.jit(do_not_specialize=["T"])
def core_backward_f64d3f842f01(
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
        unused_0, state_0_1 = core_step_8766e5dc1d32(input_0_0, state_0_0)
        grad_state_0 += grad_state_seq_0_1
        result_0, result_1 = core_vjp_597a1ee1d06c(input_0_1, state_0_1, grad_output_0_1, grad_state_0)
        dev.store(grad_input_0_at + 1 * step + off, result_0, mask)
        grad_state_0 = result_1
        grad_state_0 += grad_state_seq_0_0
        result_0, result_1 = core_vjp_597a1ee1d06c(input_0_0, state_0_0, grad_output_0_0, grad_state_0)
        dev.store(grad_input_0_at + off, result_0, mask)
        grad_state_0 = result_1
    dev.store(grad_state_0_ptr + off, grad_state_0, mask)


@triton.jit(do_not_specialize=["T"])
def core_forward_1ddd268636e5(
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
        output_0, state_0 = core_step_8766e5dc1d32(input_0_0, state_0)
        dev.store(output_0_at + off, output_0, mask)
        dev.store(state_seq_0_at + off, state_0, mask)
        output_0, state_0 = core_step_8766e5dc1d32(input_0_1, state_0)
        dev.store(output_0_at + 1 * step + off, output_0, mask)
        dev.store(state_seq_0_at + 1 * step + off, state_0, mask)
        input_0_at += 2 * step
        output_0_at += 2 * step
        state_seq_0_at += 2 * step


