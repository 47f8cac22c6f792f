"""Describes the kernels of a scan, and the bytes that they move through memory, for `FlexSN.explain`."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from flexsn_runtime import (
    Arguments,
    CutSpecialization,
    Phase,
    RecurrentSpecialization,
    ScanProgram,
    Specialization,
    launcher_in_words,
)


def kernels(program: ScanProgram) -> list[str]:
    """Lists the kernels that have been compiled so far, with a line for each set of shapes and dtypes."""
    return [
        f"kernels for steps of {', '.join(map(str, step.trace.inputs))}: {', '.join(_count_names(step.kernel_names))}"
        for step in program.specializations
        if step.kernel_names
    ]


def without_hash(name: str) -> str:
    """Returns the name that profilers show for a kernel, without the hash of the kernel's source."""
    return re.sub(r"_[0-9a-f]{12}$", "", name)


def _count_names(names: Sequence[str]) -> list[str]:
    """Returns the names of kernels without hashes. A name that several kernels share appears once, with their count."""
    counts = Counter(map(without_hash, names))
    return [name if count == 1 else f"{name} ({count} kernels)" for name, count in counts.items()]


def launchers(program: ScanProgram) -> list[str]:
    """Describes the launcher of repeated training steps, with a line for each device."""
    devices = {step.device: None for step in program.specializations if isinstance(step, Specialization)}
    return [f"repeated training steps are launched by: {launcher_in_words(device)}" for device in devices]


def segments(programs: Sequence[ScanProgram]) -> list[str]:
    """Describes parallel segments of time: their number, warm-up, and the number of steps that were computed again."""
    steps = [step for program in programs for step in program.specializations if isinstance(step, Specialization)]
    lines = [f"few neurons over many steps: {line}" for step in steps for line in step.segments_in_words()]
    return list(dict.fromkeys(lines))


_PHASES = {
    Phase.BEFORE: "one product for all steps, before the loop: it depends only on inputs",
    Phase.LOOP: "at every step",
    Phase.AFTER: "one product for all steps, after the loop: no later step needs it",
}


_PLURALS = {"product": "products", "convolution": "convolutions", "reduction of rows": "reductions"}


def products(program: ScanProgram) -> list[str]:
    """Describes each product with a matrix and each reduction of rows, for each set of shapes and dtypes."""
    lines = []
    for step in program.specializations:
        if isinstance(step, RecurrentSpecialization):
            staged = step.trace.forward
            count = sum(stage.phase is Phase.LOOP for stage in staged.stages)
            kinds = {product.kind for product in staged.products}
            operations = " and ".join(several for kind, several in _PLURALS.items() if kind in kinds)
            previous = "" if "reduction of rows" in kinds else "previous "
            lines.append(
                f"{operations} in steps of {', '.join(map(str, step.trace.inputs))}: one launch for all steps, or "
                f"launches step by step (kernels in each step: {count}; a library computes the {operations}), because "
                f"an element depends on other elements of the {previous}step"
            )
            lines += [f"  the last {direction}: {loop}" for direction, loop in sorted(step.loops.descriptions.items())]
            for product in staged.products:
                where = "" if product.location is None else f", {product.location}"
                sizes = " x ".join(str(list(shape)) for shape in product.factor_shapes)
                when = _PHASES[product.phase]
                when = when.replace("product", product.kind)
                lines.append(f"  {product.name} {sizes}: {when}{where}")
    return lines


def constants(program: ScanProgram) -> list[str]:
    """Lists the values that the core read in Python.

    Some of the values are constants of the kernels. If such a constant changes, the kernels are built again. Changes of
    the other values have no effect.
    """
    kernel_constants: dict[str, object] = {}
    changed_by_core: dict[str, None] = {}
    read_once: dict[str, object] = {}
    for step in program.specializations:
        kernel_constants |= step.trace.reads.constants()
        changed_by_core |= dict.fromkeys(step.trace.reads.changed_by_core)
        read_once |= step.trace.reads.once()
    lines = []
    if kernel_constants:
        lines.append(
            f"read as constants: {', '.join(f'{name} = {value!r}' for name, value in kernel_constants.items())}"
        )
    if changed_by_core:
        lines.append(f"changed by the core itself, and therefore not followed: {', '.join(changed_by_core)}")
    if read_once:
        lines.append("read once, when the step was traced, and not followed:")
        lines += [f"  {name}{'' if where is None else f', {where}'}" for name, where in read_once.items()]
    return lines


def traffic(
    program: ScanProgram, inputs: Sequence[Tensor], states: Sequence[Tensor] | None, *, keep: bool
) -> list[str]:
    """Describes the bytes that compiled kernels move in a call with these inputs.

    Args:
        inputs: sequences `[T, *step]`.
        states: initial states; `None` for zeros, which no kernel reads.
        keep: True if state sequences are kept.
    """
    try:
        step, captured = program.specialize(inputs, states)
    except (NotImplementedError, ValueError, TypeError) as error:
        return [f"not in kernels: {error}"]
    if isinstance(step, RecurrentSpecialization):
        return _describe_staged_traffic(step, inputs)
    if isinstance(step, CutSpecialization):
        pieces = step.trace.pieces
        parts = step.split(Arguments(tuple(inputs), tuple(states or ()), ()))
        descriptions = [
            f"{role} {i} as {piece.count} pieces"
            for role, values in (("input", pieces.inputs), ("state", pieces.states), ("output", pieces.outputs))
            for i, piece in enumerate(values)
            if piece.count > 1
        ]
        rest = traffic(step.program, *parts, keep=keep)
        return [f"small dimensions are written out: {', '.join(descriptions) or 'only inside of the step'}", *rest]
    assert isinstance(step, Specialization)
    trace, num_steps = step.trace, inputs[0].shape[0]
    size = math.prod(trace.step_shape)
    read = {f"input {i}": _count_bytes_in_memory(x) for i, x in enumerate(inputs)}
    read |= {f"state {i}": _count_bytes(v) for i, v in enumerate(states or ())}
    read |= {f"captured {value}": math.prod(value.shape) * value.dtype.itemsize for value in trace.lifted_values}
    written = {f"output {i}": num_steps * size * v.dtype.itemsize for i, v in enumerate(trace.outputs)}
    carried = [size * v.dtype.itemsize for v in trace.states]
    rows, kind = (num_steps, "state sequence") if keep else (1, "final state")
    written |= {f"{kind} {i}": rows * count for i, count in enumerate(carried)}
    gradients = sum(_count_bytes(x) for x in inputs if x.is_floating_point())
    outputs = num_steps * size * sum(v.dtype.itemsize for v in trace.outputs)
    stream = num_steps * size * inputs[0].element_size()
    values = (*trace.inputs, *trace.states, *trace.lifted_values)
    residuals = step.residuals(tuple(value.dtype.is_floating_point for value in values))
    if residuals is None:
        segment = step.segment(step.plan(size), num_steps)
        checkpoints = sum(carried) * max(0, -(-num_steps // segment) - 1)
        saved_words = f"checkpoints of the states every {segment} steps ({_format_bytes(checkpoints)})"
        read_words, moved = "the checkpoints, the inputs again", sum(read.values()) + 2 * checkpoints
    else:
        dtypes = [str(dtype).removeprefix("torch.") for dtype in residuals.dtypes]
        saved_words = f"the values that the backward needs ({', '.join(dtypes) or 'nothing'} at every step)"
        read_words, moved = "them", int(num_steps * size * residuals.traffic)
    return [
        f"compiled kernels over {num_steps} steps of {size} elements "
        f"(a stream, which is one sequence: {_format_bytes(stream)}):",
        f"  forward reads {_format_sizes(read)}; writes {_format_sizes(written)}: "
        f"{_format_streams(_add_sizes(read, written), stream)}",
        f"  training writes {saved_words}, and backward reads {read_words} and the outputs' gradients, and writes the "
        f"inputs' gradients: {_format_streams(outputs + gradients + moved, stream)} more",
        f"  memory format: {_describe_format(step, inputs, states)}",
        f"  copies for layout: {_describe_copies(inputs, captured)}",
    ]


def _describe_staged_traffic(step: RecurrentSpecialization, inputs: Sequence[Tensor]) -> list[str]:
    """Describes the values that a step with products keeps for its backward."""
    trace, num_steps = step.trace, inputs[0].shape[0]
    values = (*trace.inputs, *trace.states, *trace.lifted_values)
    saved = step.kept(tuple(value.dtype.is_floating_point for value in values))
    sizes = {
        f"{port.role.value} {port.index}": num_steps * math.prod(shape) * dtype.itemsize
        for port, (shape, dtype) in sorted(saved.items(), key=lambda item: item[0].name)
    }
    return [
        f"launches over {num_steps} steps of {math.prod(trace.step_shape)} elements:",
        f"  training keeps for the backward, over all steps: {_format_sizes(sizes) or 'nothing'}",
    ]


def _describe_format(step: Specialization, inputs: Sequence[Tensor], states: Sequence[Tensor] | None) -> str:
    """Describes the memory format of the results, and names the tensors with a different format."""
    form = step.format(inputs, states or ())
    shape = step.trace.step_shape
    dims = sorted(range(len(shape) + 1), key=lambda d: -form.sequence[d])
    names = ["T", *(f"step[{d}]" for d in range(len(shape)))]
    is_contiguous = dims == sorted(dims)
    description = (
        "outputs and states are contiguous"
        if is_contiguous
        else f"outputs and states have {_describe_order(names, dims)}"
    )
    strided = [
        f"input {i}" for i, x in enumerate(inputs) if not _has_layout(x, (inputs[0].shape[0], *shape), form.sequence)
    ]
    strided += [f"state {i}" for i, v in enumerate(states or ()) if not _has_layout(v, shape, form.step)]
    return description + (f"; {', '.join(strided)}, in another memory format, read with strides" if strided else "")


def _describe_order(names: Sequence[str], dims: Sequence[int]) -> str:
    return f"the dimensions {', '.join(names[d] for d in dims)} in memory, the outermost first"


def _has_layout(tensor: Tensor, shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True if a tensor has this shape and these strides. The stride of a dimension of size 1 does not matter."""
    return tuple(tensor.shape) == tuple(shape) and all(
        size == 1 or stride == expected for size, stride, expected in zip(shape, tensor.stride(), strides, strict=True)
    )


def _describe_copies(inputs: Sequence[Tensor], captured: Sequence[Tensor]) -> str:
    negated = [
        f"input {i}, which is negated lazily ({_format_bytes(_count_bytes(x))})"
        for i, x in enumerate(inputs)
        if x.is_neg()
    ]
    strided = [
        f"captured {list(t.shape)} ({_format_bytes(_count_bytes(t))})" for t in captured if not t.is_contiguous()
    ]
    return ", ".join([*negated, *strided]) or "none, even for gradients in other formats"


def _count_bytes_in_memory(x: Tensor) -> int:
    """Returns the number of bytes that a tensor occupies. An expanded dimension counts as one element."""
    sizes = [n for n, stride in zip(x.shape, x.stride(), strict=True) if stride != 0]
    return math.prod(sizes) * x.element_size()


def _count_bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _add_sizes(*parts: dict[str, int]) -> int:
    return sum(sum(part.values()) for part in parts)


def _format_streams(count: int, stream: int) -> str:
    return f"{_format_bytes(count)}, {count / stream:.2f} streams" if stream else _format_bytes(count)


def _format_sizes(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} ({_format_bytes(count)})" for name, count in parts.items())


def _format_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 999.5:  # 999.5 would be rounded to 1000
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
