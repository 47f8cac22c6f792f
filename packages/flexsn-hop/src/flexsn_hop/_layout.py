"""The order of arguments and results of the forward operator and the backward operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["BackwardLayout", "ScanLayout", "num_checkpoints"]

T = TypeVar("T")


def num_checkpoints(steps: Any, interval: int) -> Any:
    """Returns the number of checkpoints: one less than the number of segments of ``interval`` steps.

    The last segment may be shorter. ``steps`` is at least 1 and may be symbolic.
    """
    return (steps - 1) // interval


@dataclass(frozen=True, slots=True)
class ScanLayout:
    """The layout of the forward operator: the order of its arguments and results.

    The arguments are ``[*input_seqs, *init_states, *lifted]``. The results are ``(*output_seqs, *state_results,
    *checkpoints)``. A state result is the sequence ``[T, *step]``, or the last state ``[*step]`` if ``final_state``
    is True. If ``checkpoint_interval`` K is not 0, there is one checkpoint tensor
    ``[ceil(T / K) - 1 + spare_checkpoints, *step]`` for each state. This tensor contains the state before each segment
    of K steps except for the first segment, followed by ``spare_checkpoints`` unused rows. With 2 spare rows, a
    symbolic number of rows is never 0 or 1. Compilers would specialize the graph on these two numbers.

    ``zero_states`` has one entry for each initial state, which is True if the state is known to be zeros. The tuple is
    empty if no state is known to be zeros. Kernels do not read a state whose entry is True, so only the shape and the
    dtype of this state matter.
    """

    num_inputs: int
    num_states: int
    num_outputs: int
    final_state: bool = False
    checkpoint_interval: int = 0
    spare_checkpoints: int = 0
    zero_states: tuple[bool, ...] = ()

    @property
    def counts(self) -> tuple[int, int, int]:
        """``(num_inputs, num_states, num_outputs)``, in the order of the operator's arguments."""
        return self.num_inputs, self.num_states, self.num_outputs

    def split(self, flat_args: Sequence[T]) -> tuple[Sequence[T], Sequence[T], Sequence[T]]:
        """Splits the arguments into input sequences, initial states and lifted values."""
        states = self.num_inputs + self.num_states
        return flat_args[: self.num_inputs], flat_args[self.num_inputs : states], flat_args[states:]

    @property
    def zero_positions(self) -> list[int]:
        """Positions in ``flat_args`` of the states that are known to be zeros."""
        return [self.num_inputs + index for index, zero in enumerate(self.zero_states) if zero]


@dataclass(frozen=True, slots=True)
class BackwardLayout:
    """The layout of the backward operator.

    The arguments are, in order: the arguments of the forward operator except for states that are known to be zeros;
    the saved states of ``scan``, which are checkpoints with the interval ``saved_interval``, possibly with unused rows
    at the end; the present gradients of output sequences; and the present gradients of state results. The results are
    the gradients of the arguments for which ``needs`` is True, in the order of these arguments. Each gradient has the
    memory format of its argument.

    Attributes:
        scan: The forward operator's layout.
        needs: For each forward argument, True if its gradient is required.
        active_states: For each state, True if a gradient flows through it.
        output_grads: For each output, True if its gradient is present.
        state_grads: For each state result, True if its gradient is present. False for states that are not active.
        saved_interval: Number of steps between two saved states.
    """

    scan: ScanLayout
    needs: tuple[bool, ...]
    active_states: tuple[bool, ...]
    output_grads: tuple[bool, ...]
    state_grads: tuple[bool, ...]
    saved_interval: int

    @property
    def wanted(self) -> tuple[bool, ...]:
        """For each argument of one step, True if the step's VJP returns its gradient.

        An active state's gradient is carried from step to step, even if the gradient of the initial state is
        not needed.
        """
        inputs, _, lifted = self.scan.split(self.needs)
        return (*inputs, *self.active_states, *lifted)

    @property
    def num_given(self) -> int:
        """Number of the forward operator's arguments that the backward operator takes."""
        return len(self.needs) - len(self.scan.zero_positions)

    def split(self, args: Sequence[Any]) -> tuple[Sequence[Any], ...]:
        """Splits the arguments into forward arguments, saved states, output gradients and state gradients.

        Adds zeros to the forward arguments for states that are known to be zeros.
        """
        parts = []
        start = 0
        for size in (
            self.num_given,
            self.scan.num_states,
            sum(self.output_grads),
            sum(self.state_grads),
        ):
            parts.append(args[start : start + size])
            start += size
        assert start == len(args)
        flat_args, saved = [*parts[0]], parts[1]
        for position in self.scan.zero_positions:
            like = saved[position - self.scan.num_inputs]
            flat_args.insert(position, like.new_zeros(()).expand(like.shape[1:]))
        return flat_args, *parts[1:]

    def encode(self) -> dict[str, Any]:
        """Returns the layout as keyword arguments of the operator, with types that a graph node can contain."""
        return {
            "final_state": self.scan.final_state,
            "zero_states": self.scan.zero_states,
            "needs": self.needs,
            "active_states": self.active_states,
            "output_grads": self.output_grads,
            "state_grads": self.state_grads,
            "saved_interval": self.saved_interval,
        }
