"""Describes the bytes that a scan moves through memory, for `FlexSN.explain`."""

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
    """Lists the kernels that were compiled so far, with a line for each set of shapes and dtypes."""
    return [
        f"kernels for steps of {', '.join(map(str, step.trace.inputs))}: {', '.join(_counted(step.kernel_names))}"
        for step in program.specializations
        if step.kernel_names
    ]


def without_hash(name: str) -> str:
    """Removes the hash of the source from a kernel's name, as profilers show it."""
    return re.sub(r"_[0-9a-f]{12}$", "", name)


def _counted(names: Sequence[str]) -> list[str]:
    """Returns the names of kernels without hashes. A name that several kernels share appears once, with a number."""
    counts = Counter(map(without_hash, names))
    return [name if count == 1 else f"{name} ({count} kernels)" for name, count in counts.items()]


def launchers(program: ScanProgram) -> list[str]:
    """Describes the launcher of compiled training steps, with a line for each device."""
    devices = {step.device: None for step in program.specializations if isinstance(step, Specialization)}
    return [f"steps of training that repeat are launched by: {launcher_in_words(device)}" for device in devices]


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
            what = " and ".join(several for kind, several in _PLURALS.items() if kind in kinds)
            before = "" if "reduction of rows" in kinds else " before"
            lines.append(
                f"{what} in steps of {', '.join(map(str, step.trace.inputs))}: no loop in Python's operations, "
                f"but one launch for all steps, or launches step by step ({count} of kernels, and a library's "
                f"{what}), because one element needs others of the step{before}"
            )
            lines += [f"  the last {direction}: {what}" for direction, what in sorted(step.loops.descriptions.items())]
            for product in staged.products:
                where = "" if product.location is None else f", {product.location}"
                sizes = " x ".join(str(list(shape)) for shape in product.factor_shapes)
                when = _PHASES[product.phase]
                when = when.replace("product", product.kind)
                lines.append(f"  {product.name} {sizes}: {when}{where}")
    return lines


def constants(program: ScanProgram) -> list[str]:
    """Lists the values that the core read in Python.

    Some of the values are constants of the kernels; when such a constant changes, the kernels are built again. Changes
    of other values have no effect.
    """
    found: dict[str, object] = {}
    own: dict[str, None] = {}
    once: dict[str, object] = {}
    for step in program.specializations:
        found |= step.trace.reads.constants()
        own |= dict.fromkeys(step.trace.reads.changed_by_core)
        once |= step.trace.reads.once()
    lines = []
    if found:
        lines.append(f"read as constants: {', '.join(f'{name} = {value!r}' for name, value in found.items())}")
    if own:
        lines.append(f"not followed, because the core itself changes it: {', '.join(own)}")
    if once:
        lines.append("read once, when the step was traced, and not followed:")
        lines += [f"  {name}{'' if where is None else f', {where}'}" for name, where in once.items()]
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
        return [f"not triton: {error}"]
    if isinstance(step, RecurrentSpecialization):
        return _staged_traffic(step, inputs)
    if isinstance(step, CutSpecialization):
        pieces = step.trace.pieces
        parts = step.split(Arguments(tuple(inputs), tuple(states or ()), ()))
        described = [
            f"{what} {i} as {one.count} pieces"
            for what, many in (("input", pieces.inputs), ("state", pieces.states), ("output", pieces.outputs))
            for i, one in enumerate(many)
            if one.count > 1
        ]
        rest = traffic(step.program, *parts, keep=keep)
        return [f"small dimensions are written out: {', '.join(described) or 'of values inside of the step'}", *rest]
    assert isinstance(step, Specialization)
    trace, num_steps = step.trace, inputs[0].shape[0]
    size = math.prod(trace.step_shape)
    read = {f"input {i}": _size_in_memory(x) for i, x in enumerate(inputs)}
    read |= {f"state {i}": _bytes(v) for i, v in enumerate(states or ())}
    read |= {f"captured {value}": math.prod(value.shape) * value.dtype.itemsize for value in trace.lifted_values}
    written = {f"output {i}": num_steps * size * v.dtype.itemsize for i, v in enumerate(trace.outputs)}
    carried = [size * v.dtype.itemsize for v in trace.states]
    rows, kind = (num_steps, "state sequence") if keep else (1, "final state")
    written |= {f"{kind} {i}": rows * count for i, count in enumerate(carried)}
    gradients = sum(_bytes(x) for x in inputs if x.is_floating_point())
    outputs = num_steps * size * sum(v.dtype.itemsize for v in trace.outputs)
    stream = num_steps * size * inputs[0].element_size()
    values = (*trace.inputs, *trace.states, *trace.lifted_values)
    residuals = step.residuals(tuple(value.dtype.is_floating_point for value in values))
    if residuals is None:
        segment = step.segment(step.plan(size), num_steps)
        checkpoints = sum(carried) * max(0, -(-num_steps // segment) - 1)
        writes = f"a checkpoint of each state every {segment} steps ({_human(checkpoints)})"
        reads, moved = "them, the inputs again", sum(read.values()) + 2 * checkpoints
    else:
        kept = [str(dtype).removeprefix("torch.") for dtype in residuals.dtypes]
        writes = f"the values that its gradient needs ({', '.join(kept) or 'nothing'} at every step)"
        reads, moved = "them", int(num_steps * size * residuals.traffic)
    return [
        f"compiled kernels over {num_steps} steps of {size} elements (once through them, a stream: {_human(stream)}):",
        f"  forward reads {_list(read)}; writes {_list(written)}: {_streams(_sum(read, written), stream)}",
        f"  training writes {writes}, and backward reads {reads} and the outputs' gradients, and writes the inputs' "
        f"gradients: {_streams(outputs + gradients + moved, stream)} more",
        f"  memory format: {_format(step, inputs, states)}",
        f"  copies for layout: {_copies(inputs, captured)}",
    ]


def _staged_traffic(step: RecurrentSpecialization, inputs: Sequence[Tensor]) -> list[str]:
    """Describes the values that a step with products keeps for its backward."""
    trace, num_steps = step.trace, inputs[0].shape[0]
    values = (*trace.inputs, *trace.states, *trace.lifted_values)
    kept = step.kept(tuple(value.dtype.is_floating_point for value in values))
    sizes = {
        f"{port.role.value} {port.index}": num_steps * math.prod(shape) * dtype.itemsize
        for port, (shape, dtype) in sorted(kept.items(), key=lambda item: item[0].name)
    }
    return [
        f"launches over {num_steps} steps of {math.prod(trace.step_shape)} elements:",
        f"  training keeps at every step, for the backward: {_list(sizes) or 'nothing'}",
    ]


def _format(step: Specialization, inputs: Sequence[Tensor], states: Sequence[Tensor] | None) -> str:
    """Describes the memory format of the results, and names the tensors with a different format."""
    form = step.format(inputs, states or ())
    shape = step.trace.step_shape
    dims = sorted(range(len(shape) + 1), key=lambda d: -form.sequence[d])
    names = ["T", *(f"step[{d}]" for d in range(len(shape)))]
    usual = dims == sorted(dims)
    told = "outputs and states are contiguous" if usual else f"outputs and states have {_names(names, dims)}"
    others = [f"input {i}" for i, x in enumerate(inputs) if not _lies(x, (inputs[0].shape[0], *shape), form.sequence)]
    others += [f"state {i}" for i, v in enumerate(states or ()) if not _lies(v, shape, form.step)]
    return told + (f"; {', '.join(others)}, in another memory format, read with strides" if others else "")


def _names(names: Sequence[str], dims: Sequence[int]) -> str:
    return f"the dimensions {', '.join(names[d] for d in dims)} in memory, the outermost first"


def _lies(tensor: Tensor, shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True if a tensor has this shape and these strides."""
    return tuple(tensor.shape) == tuple(shape) and all(
        size == 1 or stride == wanted for size, stride, wanted in zip(shape, tensor.stride(), strides, strict=True)
    )


def _copies(inputs: Sequence[Tensor], captured: Sequence[Tensor]) -> str:
    negated = [f"input {i}, which is negated lazily ({_human(_bytes(x))})" for i, x in enumerate(inputs) if x.is_neg()]
    strided = [f"captured {list(t.shape)} ({_human(_bytes(t))})" for t in captured if not t.is_contiguous()]
    return ", ".join([*negated, *strided]) or "none, also for gradients in any format"


def _size_in_memory(x: Tensor) -> int:
    """Returns the number of bytes to read. An expanded dimension counts once."""
    sizes = [n for n, stride in zip(x.shape, x.stride(), strict=True) if stride != 0]
    return math.prod(sizes) * x.element_size()


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _sum(*parts: dict[str, int]) -> int:
    return sum(sum(part.values()) for part in parts)


def _streams(count: int, stream: int) -> str:
    return f"{_human(count)}, {count / stream:.2f} streams" if stream else _human(count)


def _list(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} ({_human(count)})" for name, count in parts.items())


def _human(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 999.5:  # 999.5 would be rounded to 1000
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
