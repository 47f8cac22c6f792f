"""Functions of the first input that the step computes, such as the affine part of a norm."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from flexsn_nn._affine import Absorbed, FrontParts, Producer
from flexsn_nn.transforms._transform import Call, Changed, Core, Own, Transform, Values
from flexsn_runtime import Completion


class Absorb(Transform):
    """A producer of the first input. If possible, the producer runs inside of the step, otherwise before the step.

    Args:
        producer: producer of the first input.
        flows: True if gradients flow to the first input and therefore to the tensors that the producer captures.
    """

    def __init__(self, producer: Producer, *, flows: bool = True) -> None:
        self.producer = producer
        self.flows = flows

    def before(self, call: Call) -> tuple[Values, Transform | None]:
        """Computes the statistics of a norm for a function in the step, or computes the first input before the step."""
        x, *others = call.inputs
        if not call.in_step:
            return (self.producer.of(x), *others), None
        x, absorbed = self.producer.absorbed(x)
        if not self.flows:
            absorbed = absorbed.with_tensors(*(tensor.detach() for tensor in absorbed.tensors))
        return (x, *others), InStep(absorbed, flows=self.flows)


def parts_of(front: object) -> FrontParts | None:
    """Returns `front.parts()`; `None` for a delay, and for a user's object without this method."""
    parts: FrontParts | None = front.parts() if hasattr(front, "parts") else None
    return parts


class InStep(Absorb):
    """A function of the first input that runs in the step."""

    def __init__(self, absorbed: Absorbed, *, flows: bool) -> None:
        super().__init__(absorbed, flows=flows)
        self.absorbed = absorbed

    @property
    def key(self) -> Hashable:
        """Key of the function."""
        return self.absorbed.kind

    @property
    def tensors(self) -> Values:
        """Tensors that the function captures."""
        return self.absorbed.tensors

    @property
    def learned(self) -> tuple[bool, ...]:
        """For each tensor that the function captures, True if a gradient may flow to it."""
        return self.absorbed.learned

    @property
    def completion(self) -> Completion | None:
        """Completion of the function's gradient."""
        return self.absorbed.completion

    def step(self, core: Core, inputs: Values, states: Values, own: Own) -> Changed:
        """Runs `core` with the function's value as the first input."""
        x: Tensor = self.absorbed.with_tensors(*own.tensors).of(inputs[0])
        return Changed(*core((x, *inputs[1:]), states))
