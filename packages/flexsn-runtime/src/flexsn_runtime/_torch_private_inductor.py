"""Makes Inductor add launches of C++ kernels to the C++ programs that it generates, for example for AOTInductor."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from flexsn_codegen.targets.cpp import inlined
from flexsn_hop.versions import expect, needed

_NO_CPP = "AOTInductor cannot compile networks with neurons for the CPU"

# These names are looked up when code is compiled, because importing Inductor is slow.
for _module, _names in (
    ("torch._inductor.ir", ["ExternKernel.require_exact_strides", "MutationOutput", "NoneLayout"]),
    ("torch._inductor.lowering", ["fallback_handler.add_to_fallback_set", "register_lowering"]),
    ("torch._inductor.virtualized", ["V"]),
    ("torch._inductor.codegen.cpp_wrapper_cpu", ["CppWrapperCpu"]),
):
    expect(_module, _names, _NO_CPP)


def is_ahead_of_time() -> bool:
    """True if Inductor is generating a C++ program, which runs without Python."""
    V = needed("torch._inductor.virtualized", "V", _NO_CPP)
    return bool(getattr(V.graph, "aot_mode", False))


def records_cuda_graphs() -> bool:
    """True if Inductor records its compiled code in CUDA graphs, for example in ``mode="reduce-overhead"``."""
    config = needed("torch._inductor", "config", _NO_CPP)
    return bool(getattr(config.triton, "cudagraphs", False))


@functools.cache
def lower_launches(op: Any) -> None:
    """Registers Inductor's lowering of `op(read, written, sizes, source)`, an operator that launches a kernel.

    A Python program calls the operator. A C++ program contains the kernel's source and calls the kernel.
    """
    register_lowering = needed("torch._inductor.lowering", "register_lowering", _NO_CPP)
    fallback_handler = needed("torch._inductor.lowering", "fallback_handler", _NO_CPP)
    V = needed("torch._inductor.virtualized", "V", _NO_CPP)
    ir = needed("torch._inductor", "ir", _NO_CPP)
    call = fallback_handler(op, add_to_fallback_set=False)

    def lower(read: Sequence[Any], written: Sequence[Any], sizes: Sequence[Any], source: str) -> None:
        # Only tensors that are read may have strides other than those that the kernel requires. Written tensors are
        # allocated with the required strides.
        strides = (node.meta["val"].stride() for node in V.graph.current_node.args[0])
        read = [ir.ExternKernel.require_exact_strides(x, s) for x, s in zip(read, strides, strict=True)]
        (_launch_node() if V.graph.cpp_wrapper else call)(read, written, sizes, source)

    register_lowering(op, type_promotion_kind=None)(lower)


@functools.cache
def _launch_node() -> Any:
    ir = needed("torch._inductor", "ir", _NO_CPP)
    V = needed("torch._inductor.virtualized", "V", _NO_CPP)

    class LaunchNode(ir.ExternKernel):  # type: ignore[misc, name-defined]
        """A node of Inductor's graph that launches a kernel."""

        def __init__(self, read: Sequence[Any], written: Sequence[Any], sizes: Sequence[Any], source: str) -> None:
            inputs = [self.realize_input(x) for x in (*read, *written)]
            self._device = inputs[0].get_device()
            none = ir.NoneLayout(device=self._device)
            super().__init__(None, none, self.unwrap_storage(inputs), tuple(sizes))
            self._source = source
            self._outputs = [ir.MutationOutput(none, x, self) for x in written]
            V.graph.register_operation(self)

        def get_outputs(self) -> list[Any]:
            return list(self._outputs)

        def get_device(self) -> Any:
            return self._device

        def codegen(self, wrapper: Any) -> None:
            kernel = inlined(self._source)
            if kernel.source not in wrapper.src_to_kernel:
                wrapper.src_to_kernel[kernel.source] = kernel.name
                wrapper.define_kernel(kernel.name, kernel.source, gpu=False, cpp_definition=kernel.declaration)
            addresses = [f"reinterpret_cast<int64_t>({x.codegen_reference()}.data_ptr())" for x in self.inputs]
            sizes = [f"static_cast<int64_t>({wrapper.codegen_sizevar(size)})" for size in self.constant_args]
            arguments = ", ".join([*addresses, *sizes, "0"])  # 0 means all threads of OpenMP
            wrapper.writeline(f"{{ const int64_t arguments[] = {{{arguments}}}; {kernel.name}(arguments); }}")

    return LaunchNode
