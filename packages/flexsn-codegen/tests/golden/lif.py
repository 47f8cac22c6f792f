# Made by: python packages/flexsn-codegen/tests/test_codegen_offline.py
import triton
import triton.language as tl

from flexsn_codegen.targets.triton import device as dev


@triton.jit
def lif_1d36e8ac0187(input_0, state_0):
    sub = input_0 - state_0
    div = dev.div_by_constant(sub, tl.full([], 2.0, tl.float32), tl.full([], 0.5, tl.float32))
    add = state_0 + div
    ge = add >= tl.full([], 1.0, tl.float32)
    convert_element_type = ge.to(tl.float32)
    sub_1 = tl.full([], 1.0, tl.float32) - convert_element_type
    mul = add * sub_1
    return convert_element_type, mul
