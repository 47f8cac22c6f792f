# Made by: python packages/flexsn-codegen/tests/test_codegen_offline.py
import triton
import triton.language as tl

from flexsn_codegen.targets.triton import device as dev


@triton.jit
def izhikevich_f8290fa7d111(input_0, state_0, state_1):
    mul = state_0 * tl.full([], 0.04, tl.float32)
    mul_1 = mul * state_0
    mul_2 = state_0 * tl.full([], 5.0, tl.float32)
    add = mul_1 + mul_2
    add_1 = add + tl.full([], 140.0, tl.float32)
    sub = add_1 - state_1
    add_2 = sub + input_0
    mul_3 = add_2 * tl.full([], 0.5, tl.float32)
    add_3 = state_0 + mul_3
    ge = add_3 >= tl.full([], 30.0, tl.float32)
    convert_element_type = ge.to(tl.float32)
    ge_1 = add_3 >= tl.full([], 30.0, tl.float32)
    where = tl.where(ge_1, tl.full([], -65.0, tl.float32), add_3)
    mul_4 = add_3 * tl.full([], 0.2, tl.float32)
    sub_1 = mul_4 - state_1
    mul_5 = sub_1 * tl.full([], 0.01, tl.float32)
    add_4 = state_1 + mul_5
    mul_6 = convert_element_type * tl.full([], 8.0, tl.float32)
    add_5 = add_4 + mul_6
    return convert_element_type, where, add_5
