# Made by: python packages/flexsn-codegen/tests/test_codegen_offline.py
import triton
import triton.language as tl

from flexsn_codegen.targets.triton import device as dev


@triton.jit
def adaptive_0340a373f110(input_0, state_0, state_1):
    mul = state_0 * tl.full([], 0.9, tl.float32)
    add = mul + input_0
    add_1 = state_1 + tl.full([], 1.0, tl.float32)
    ge = add >= add_1
    convert_element_type = ge.to(tl.float32)
    sub = add - convert_element_type
    mul_1 = state_1 * tl.full([], 0.95, tl.float32)
    mul_2 = convert_element_type * tl.full([], 0.1, tl.float32)
    add_2 = mul_1 + mul_2
    return convert_element_type, sub, add_2
