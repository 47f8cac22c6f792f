"""Writes a function's kernels, in Triton or in C++, as one standalone file that does not need the FlexSN packages."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flexsn_codegen._shown import ShownFunction, UsageError
from flexsn_codegen.functions._host_numbers import Expression
from flexsn_codegen.functions._launch import BLOCK, CPP_BLOCK
from flexsn_codegen.functions._plan import Trace, TracedStep
from flexsn_codegen.source._numbers import Number
from flexsn_codegen.source._numerics import compile_options
from flexsn_codegen.source._source import KernelSource, identifier
from flexsn_codegen.targets.cpp import CppKernel, inlined
from flexsn_codegen.targets.cpp._literals import cpp_name
from flexsn_graph import CellGraph, Cells, Part

_LAUNCHES = Path(__file__).parent / "targets" / "triton" / "launches_alone.py.txt"
_OPERATORS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "floordiv": "//",
    "mod": "%",
    "pow": "**",
    "and_": "&",
    "or_": "|",
    "xor": "^",
    "lshift": "<<",
    "rshift": ">>",
    "lt": "<",
    "le": "<=",
    "eq": "==",
    "ne": "!=",
    "gt": ">",
    "ge": ">=",
}
_UNARY = {"neg": "-", "pos": "+", "invert": "~"}


def standalone(loaded: ShownFunction, language: str, command: str, version: str) -> str:
    """The text of a standalone file.

    Args:
        loaded: result of `_shown.load` for the language's target.
        language: ``"triton"`` or ``"cpp"``.
        command: the command that creates the file. The file's header contains it.
        version: version of this package, for the header.

    Raises:
        UsageError: the function reduces rows, and the language is Triton.
    """
    origin = f"Made by `{command}`, flexsn-codegen {version}."
    return _write_cpp(loaded, origin) if language == "cpp" else _write_triton(loaded, origin)


# -- Triton --------------------------------------------------------------------------------------------------


def _write_triton(loaded: ShownFunction, origin: str) -> str:
    from flexsn_codegen.targets.triton._standalone import HEADER, linked  # imports triton, which may be absent

    name = identifier(loaded.kernel.name)
    traces = {"_FORWARD": (loaded.trace, loaded.tensors)}
    if loaded.backward is not None:
        traces["_BACKWARD"] = (loaded.backward, loaded.gradient_inputs)
    if any(step.source.stages for trace, _ in traces.values() for step in trace.steps):
        raise UsageError("a function that reduces rows has a standalone file in C++ only: pass --target cpp")
    functions: dict[str, str] = {}
    plans = []
    for plan, (trace, tensors) in traces.items():
        launches = trace.plan(tensors, plain=True).launches
        for launch in launches:
            functions |= linked(launch.built.compiled())
        sources = [launch.built.source for launch in launches]
        plans.append(f"{plan} = {_write_plan(trace, tensors, sources)}\n")
        plans.append(_write_words(f"{plan.lower()}_words", trace))
    parameters = _list_parameters(loaded)
    options = compile_options("cuda", fast_math=loaded.kernel.numerics.fast_math)
    parts = [
        f'"""{name}, as kernels in Triton.\n\n{origin} This file only needs torch and triton.\n"""\n',
        f"import math\nimport struct\n\nimport torch\n{HEADER}",
        *functions.values(),
        f"BLOCK = {BLOCK}\nOPTIONS = {{}} if torch.version.hip else {options!r}\n",
        _LAUNCHES.read_text(encoding="utf-8"),
        f"# -- {name} {'-' * (104 - len(name))}\n",
        *plans,
        _write_entry(name, loaded, parameters),
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _list_parameters(loaded: ShownFunction) -> list[tuple[str, str]]:
    """The name and the kind of each parameter of the standalone function, with the captured tensors last.

    The kind is ``"tensor"`` or ``"number"``. Arguments that are constants are omitted.
    """
    kinds = [part[0] for part in loaded.structure[1]]
    try:
        names = list(inspect.signature(loaded.fn).parameters)
    except (TypeError, ValueError):
        names = []
    results = []
    for i, kind in enumerate(kinds):
        name = identifier(names[i]) if i < len(names) else f"argument_{i}"
        if kind == "tensor":
            results.append((name, "tensor"))
        elif kind in ("float", "int"):
            results.append((name, "number"))
    captured = len(loaded.tensors) - sum(kind == "tensor" for kind in kinds)
    return [*results, *((f"captured_{i}", "tensor") for i in range(captured))]


def _write_entry(name: str, loaded: ShownFunction, parameters: Sequence[tuple[str, str]]) -> str:
    tensors = ", ".join(p for p, kind in parameters if kind == "tensor")
    numbers = "".join(f"{p}, " for p, kind in parameters if kind == "number")
    signature = ", ".join(p for p, _ in parameters)
    graph = loaded.trace.graph
    is_single = graph.single if loaded.kernel.cuts else loaded.kernel.result[0] == "tensor"
    single = "results[0]" if is_single else "tuple(results)"
    if loaded.backward is None:
        return f"""def {name}({signature}):
    results = _run(_FORWARD, [{tensors}], _forward_words({numbers.rstrip(", ")}))
    return {single}
"""
    saved_numbers = "tuple(numbers)"
    flows = tuple(graph.differentiable)
    return f"""class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, numbers, *tensors):
        results = _run(_FORWARD, tensors, _forward_words(*numbers))
        ctx.numbers = {saved_numbers}
        ctx.save_for_backward(*tensors)
        ctx.results = [(r.shape, r.dtype) for r in results]
        ctx.mark_non_differentiable(*(r for r, flows in zip(results, {flows!r}) if not flows))
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *cotangents):
        tensors = ctx.saved_tensors
        given = [c for c, flows in zip(cotangents, {flows!r}) if flows]
        found = iter(_run(_BACKWARD, [*tensors, *given], _backward_words(*ctx.numbers)))
        wanted = {tuple(loaded.needs_gradient)!r}
        return None, *(
            next(found).sum_to_size(t.shape).to(t.dtype) if want else None for t, want in zip(tensors, wanted)
        )


def {name}({signature}):
    results = _Function.apply(({numbers}), {tensors})
    return {single}
"""


def _write_plan(trace: Trace, tensors: Sequence[torch.Tensor], sources: Sequence[KernelSource]) -> str:
    graph = trace.graph
    steps = []
    for step, source in zip(trace.steps, sources, strict=True):
        count = len(step.source.arguments)
        entries = [
            f'"kernel": {source.name}',
            f'"layouts": {tuple(_list_layouts(source))!r}',
            f'"used": {tuple(port.index for port in source.params[:count])!r}',
        ]
        if step.cells is None:
            entries.append('"inputs": None')
        else:
            cells = step.cells
            assert isinstance(graph, CellGraph)
            inputs = [(part.tensor, _list_dimensions(part)) for part in cells.inputs]
            outputs = ", ".join(
                f"({part.tensor}, {_list_dimensions(part)!r}, {dtype}, {tuple(graph.results[part.tensor].summed)!r})"
                for part, dtype in zip(cells.outputs, cells.dtypes, strict=True)
            )
            entries += [
                f'"inputs": {inputs!r}',
                f'"outputs": [{outputs}]',
                f'"sizes": {cells.sizes!r}',
                f'"where": {cells.where!r}',
            ]
        steps.append("{" + ", ".join(entries) + "}")
    entries = [
        f'"steps": [{", ".join(steps)}]',
        f'"dtypes": [{", ".join(map(str, trace.dtypes))}]',
        f'"written": {trace.written!r}',
    ]
    if isinstance(graph, CellGraph):
        results = [(r.step, _list_factors(r.dimensions), r.constant) for r in graph.results]
        entries += [
            f'"results": {results!r}',
            f'"shapes": {tuple(tuple(t.shape) for t in tensors)!r}',
            f'"free": {graph.free!r}',
        ]
    return "{\n    " + ",\n    ".join(entries) + ",\n}"


def _list_layouts(source: KernelSource) -> list[int]:
    """For each operand, the number of terms in its offsets, which is 0 for an operand of one element.

    For a dense operand, which needs no offsets, the entry is -1.
    """
    results = []
    for port in source.params:
        terms = sum(size.startswith(f"{port.name}_inner") for size in source.sizes)
        is_single = f"{port.name}_ptr + off" not in source.source and terms == 0
        results.append(0 if is_single else terms or -1)
    return results


def _list_dimensions(part: Part) -> tuple[Any, ...]:
    return _list_factors(part.dimensions)


def _list_factors(dimensions: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    return tuple(tuple((f.count, f.chosen) if isinstance(f, Cells) else f.number for f in dim) for dim in dimensions)


def _write_words(name: str, trace: Trace) -> str:
    """The source of a function that encodes the numbers of a call as the integer arguments of each kernel."""
    conditions = [f"    if {_to_python(e)} != {outcome!r}:\n        {_REFUSAL}" for e, outcome in trace.conditions]
    steps = [f"[{', '.join(_encode(step))}]" for step in trace.steps]
    body = "\n".join([*conditions, f"    return [{', '.join(steps)}]"])
    return f"def {name}(*numbers):\n{body}\n"


_REFUSAL = 'raise ValueError("for these numbers, the function computes something else: make kernels for them")'


def _encode(step: TracedStep) -> list[str]:
    return [
        f"*_bits({_format(number)!r}, {_to_python(expression)})"
        for number, expression in zip(step.source.numbers, step.slots, strict=True)
    ]


def _format(number: Number) -> str:
    if number.dtype == torch.bool:
        return "?"
    if not number.dtype.is_floating_point:
        return "q" if number.dtype.itemsize == 8 else "i"
    return "d" if number.dtype == torch.float64 else "f"


def _to_python(expression: Expression) -> str:
    """The Python source of an expression of numbers."""
    kind, *parts = expression
    if kind == "argument":
        return f"numbers[{parts[0]}]"
    if kind == "constant":
        return _write_constant(parts[0])
    if kind == "rounded":
        layout = {torch.float32: "f", torch.float16: "e", torch.bfloat16: "bfloat16"}[parts[1]]
        return f"_rounded({layout!r}, {_to_python(parts[0])})"
    texts = [_to_python(part) for part in parts]
    if kind in _OPERATORS:
        return f"({texts[0]} {_OPERATORS[kind]} {texts[1]})"
    if kind in _UNARY:
        return f"({_UNARY[kind]}{texts[0]})"
    if kind in ("reciprocal", "value"):
        return f"(1.0 / {texts[0]})" if kind == "reciprocal" else texts[0]
    name = {"floor": "math.floor", "ceil": "math.ceil", "trunc": "math.trunc", "index": "int"}.get(kind, kind)
    return f"{name}({', '.join(texts)})"


def _write_constant(value: Any) -> str:
    return f"float({str(value)!r})" if isinstance(value, float) and value - value != 0 else repr(value)


# -- C++ -----------------------------------------------------------------------------------------------------


def _write_cpp(loaded: ShownFunction, origin: str) -> str:
    name = identifier(loaded.kernel.name)
    head = [
        f"// {name}, as kernels in C++.",
        "//",
        f"// {origin} This file only needs a C++17 compiler. These flags give the results of eager mode:",
        "//     -O3 -march=native -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math -fwrapv",
        "//",
        "// Strides are in elements. Numbers are rounded to the parameters' types. At most `threads` threads run.",
    ]
    parts = ["\n".join(head)]
    traces: list[tuple[str, Trace, Sequence[torch.Tensor]]] = [(name, loaded.trace, loaded.tensors)]
    if loaded.backward is not None:
        traces.append((f"{name}_backward", loaded.backward, loaded.gradient_inputs))
    for entry, trace, tensors in traces:
        plan = trace.plan(tensors, plain=True)
        dtypes = [*(t.dtype for t in tensors), *(memory.dtype for memory in plan.new)]
        for i, (step, launch) in enumerate(zip(trace.steps, plan.launches, strict=True)):
            operand_dtypes = tuple(dtypes[operand.tensor] for operand in launch.operands)
            text = CppKernel(launch.built.source).text(operand_dtypes, CPP_BLOCK, fast_math=launch.fast_math)
            program = inlined(text)
            parts.append(f"#include <cstdint>\n{program.declaration}\n{program.source}")
            suffix = "" if len(trace.steps) == 1 else f"_{i}"
            parts.append(_write_wrapper(f"{entry}{suffix}", program.name, launch.built.source, operand_dtypes, step))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _write_wrapper(
    entry: str, program: str, source: KernelSource, dtypes: Sequence[torch.dtype], step: TracedStep
) -> str:
    """The source of a function that calls a step's kernel.

    The function's arguments are tensors, sizes, strides, numbers, and the largest number of threads.
    """
    count = len(step.source.arguments)
    memory = {torch.float16: "uint16_t", torch.bfloat16: "uint16_t"}
    parameters, arguments, before = [], [], []
    for i, (port, dtype) in enumerate(zip(source.params, dtypes, strict=True)):
        kind = memory.get(dtype, cpp_name(dtype))
        parameters.append(f"{'const ' if i < count else ''}{kind}* {port.name}")
        arguments.append(f"int64_t({port.name})")
    numbers = {argument for number in step.source.numbers for argument in number.arguments}
    for size in source.sizes:
        if size not in numbers:
            parameters.append(f"int64_t {size}")
            arguments.append(size)
    for number in step.source.numbers:
        kind = cpp_name(number.dtype)
        parameters.append(f"{kind} {number.name}")
        bits = f"{number.name}_all"
        if number.dtype.is_floating_point or number.dtype.itemsize == 8:
            before += [f"uint64_t {bits} = 0;", f"__builtin_memcpy(&{bits}, &{number.name}, sizeof({kind}));"]
        else:
            before.append(f"uint64_t {bits} = uint64_t(int64_t({number.name}));")
        arguments += [
            f"int64_t(int32_t(uint32_t({bits}{' >> 32' if i else ''})))" for i in range(len(number.arguments))
        ]
    lines = [
        *before,
        f"const int64_t arguments[] = {{{', '.join([*arguments, 'threads'])}}};",
        f"{program}(arguments);",
    ]
    body = "\n".join(f"    {line}" for line in lines)
    signature = ",\n    ".join([*parameters, "int64_t threads"])
    return f'extern "C" void {entry}(\n    {signature}) {{\n{body}\n}}'
