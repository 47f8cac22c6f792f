"""`CapturedStep`: kinds of calls, their graphs, and calls that run in Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flexsn_hop.callers import warn
from flexsn_nn.errors import CaptureWarning
from flexsn_nn.functional import with_state
from flexsn_nn.graphs._arguments import CallArguments, take_apart
from flexsn_nn.graphs._distributed import average_gradients, local, share_buffers
from flexsn_nn.graphs._graph import Graph, record
from flexsn_nn.graphs._lines import line_of_error, names_of
from flexsn_nn.graphs._obstacles import why_no_graph, why_update_eager
from flexsn_nn.graphs._recorder import GraphRecorder, recorder_for, replaced_states
from flexsn_nn.graphs._settings import draws, settings
from flexsn_nn.graphs._step import TrainingStep
from flexsn_nn.graphs._watch import StepWatch, WatchedAttributes, readable
from flexsn_nn.neuron import Neuron

# Minimum number of calls for which recording a graph pays off.
_FEW_CALLS = 20
# A warning is given when this number of graphs have become outdated after fewer than `_FEW_CALLS` calls each. If
# changed numbers of the optimizer are the cause, later graphs do not contain the optimizer's step.
_MAX_SHORT_LIVED = 3
# A warning is given when `max_graphs * _MAX_DROPPED_RATIO` kinds have been dropped after fewer than `_FEW_CALLS` calls
# each.
_MAX_DROPPED_RATIO = 4
# Number of calls after which learned parameters are compared with their ranges.
_CALLS_BETWEEN_RANGE_CHECKS = 8
_OPTIMIZER = "optimizer"


@dataclass(slots=True, eq=False)
class _Kind:
    """Calls of one kind, with their graph, or the reason why they have no graph.

    Attributes:
        key: key of the arguments.
        settings: settings of torch during these calls.
        layers: layers with a state.
        states: layouts of the states at the beginning of the calls; `None` if the step does not carry states.
        parameters: all parameters for which the step computes gradients.
        gradients: addresses and strides of the gradients to which the calls add; `None` with an optimizer.
        watch: all values that must not change between calls; `None` before the end of the first run.
        runs: number of runs in Python before the recording.
        rehearsed: True if a graph could repeat all operations of the last run.
        calls: total number of calls.
        graph: the graph; `None` before the recording.
        reason: reason why the calls cannot have a graph; `None` if they have a graph, or may get one.
        update_reason: reason why the optimizer's part is not in the graph; `None` if the graph contains this part.
        ignoring: names of the values that the step itself changes, which are not watched.
        outdated: True if a watched value has changed since the recording.
    """

    key: Hashable
    settings: Hashable
    layers: Sequence[Any]
    states: Hashable
    parameters: Sequence[nn.Parameter]
    gradients: Hashable
    watch: StepWatch | None = None
    runs: int = 0
    rehearsed: bool = False
    calls: int = 0
    graph: Graph | None = None
    reason: str | None = None
    update_reason: str | None = None
    ignoring: Sequence[str] = ()
    outdated: bool = False


class CapturedStep:
    """A training step from `capture`; call it as `step(inputs, *others)`.

    Attributes:
        step: training step without a graph.
    """

    def __init__(self, step: TrainingStep, max_graphs: int, generators: Sequence[torch.Generator]) -> None:
        self.step = step
        self._max_graphs = max_graphs
        self._generators = generators
        self._recorder: GraphRecorder | None = None
        self._reason_without_recorder = "nothing has run yet"
        self._first: Tensor | None = None
        self._device = torch.device("cpu")
        self._kinds: list[_Kind] = []  # the most recently used kind first
        self._num_recorded = 0
        self._update_reason: str | None = None
        self._changes: Counter[str] = Counter()
        self._num_short_lived = 0
        self._num_dropped_early = 0
        self._replaced = replaced_states()
        self._warned: set[str] = set()

    def __call__(self, inputs: Any, *others: Any) -> Any:
        """Runs one training step.

        Args:
            inputs: input of the network: a tensor, or a tuple of positional arguments.
            others: arguments of the loss function after the network's output.

        Returns:
            The detached result of the loss function, in memory that is not reused.
        """
        if torch.compiler.is_compiling() or not self._can_record():
            return self.step.run(inputs, others)
        arguments = CallArguments.of((inputs, others))
        reason = arguments.check(self._device)
        if reason is not None:
            self._warn_once(reason)
            return self.step.run(inputs, others)
        kind = self._find_kind(arguments)
        kind.calls += 1
        if kind.graph is None and kind.reason is None and kind.rehearsed and kind.runs >= self._num_warm_ups:
            self._record(kind, arguments)
        if kind.reason is not None:
            result = self.step.run(inputs, others)
            if kind.watch is None or not kind.watch.holds():
                kind.watch = self._watch(kind)
            return result
        share_buffers(self.step.net)
        if kind.graph is None:
            result = self._warm_up(kind, inputs, others)
        else:
            states = [state.detach() for layer in kind.layers for state in layer.states] if self.step.carry else []
            result = kind.graph.run(arguments.tensors, states)
            if kind.calls % _CALLS_BETWEEN_RANGE_CHECKS == 0:
                _check_ranges(kind.layers)
        self._finish(kind)
        return result

    def explain(self) -> str:
        """Describes the graphs in use, and the calls that run in Python, with reasons. The first line is a summary."""
        recorded = [kind for kind in self._kinds if kind.graph is not None]
        if self._recorder is None:
            return f"plain calls: {self._reason_without_recorder}"
        if not self._kinds:
            return "no graph: nothing has run yet"
        summary = "1 graph" if len(recorded) == 1 else f"{len(recorded)} graphs"
        has_python_calls = any(kind.reason is not None for kind in self._kinds)
        lines = [
            f"{summary} in use, of at most {self._max_graphs}{'; some calls run in Python' if has_python_calls else ''}"
        ]
        for kind in self._kinds:
            shapes = ", ".join(str(list(shape)) for shape, *_ in kind.key[1])  # type: ignore[index]
            if kind.graph is not None:
                state = "a graph"
            elif kind.reason is not None:
                state = f"in Python: {kind.reason}"
            else:
                state = f"in Python before the recording: {kind.runs} runs so far"
            lines.append(f"  {shapes}, {kind.calls} calls: {state}")
        updates = dict.fromkeys(kind.update_reason for kind in self._kinds if kind.update_reason is not None)
        lines += [f"  the optimizer's step runs in Python: {reason}" for reason in updates]
        lines += [f"  recorded again, {count} times, after a change of {name}" for name, count in self._changes.items()]
        return "\n".join(lines)

    def forget(self) -> None:
        """Drops all graphs and their memory; later calls record again."""
        self._kinds.clear()
        self._num_recorded = 0

    # -- the choice of the graph ---------------------------------------------------------------------------

    def _can_record(self) -> bool:
        """True if a recorder exists for the network on its current device, and the caller is not capturing a graph."""
        first = self._first
        if self._replaced != replaced_states():
            self.forget()
            self._replaced = replaced_states()
        if first is None or first.device != self._device:
            self.forget()
            net = self.step.net
            self._recorder, self._reason_without_recorder = recorder_for(net, self._generators)
            tensors = [*net.parameters(), *net.buffers()]
            if self._recorder is None and any(tensor.is_cuda for tensor in tensors):
                self._warn_once(self._reason_without_recorder)  # the next call checks again
            elif tensors:
                self._first, self._device = tensors[0], tensors[0].device
        return self._recorder is not None and not _is_being_captured(self._device)

    def _find_kind(self, arguments: CallArguments) -> _Kind:
        """Returns the kind of a call, which may be new. Stores the `max_graphs` kinds that were used last."""
        key, current_settings = arguments.key, settings(self._device, self.step.scaler)
        outdated = []
        for i, kind in enumerate(self._kinds):
            if kind.key != key or kind.settings != current_settings:
                continue
            if kind.watch is not None and not kind.watch.holds():
                outdated.append(kind)
                continue
            has_states = kind.states == self._read_states(kind.layers)
            if has_states and kind.gradients == self._read_gradients(kind.parameters):
                if i:
                    self._kinds.insert(0, self._kinds.pop(i))
                return kind
        for kind in outdated:
            self._note_change(kind)
        layers = [layer for _, layer in with_state(self.step.net)]
        parameters = self.step.parameters()
        new = _Kind(
            key, current_settings, layers, self._read_states(layers), parameters, self._read_gradients(parameters)
        )
        new.reason = why_no_graph(self.step)
        if new.reason is not None:
            self._warn_once(new.reason)
        elif self.step.optimizer is not None:
            new.update_reason = self._update_reason or why_update_eager(self.step)
            if new.update_reason is not None:
                self._warn_once(f"the optimizer's step runs in Python: {new.update_reason}")
        self._kinds.insert(0, new)
        for dropped in self._kinds[self._max_graphs :]:
            self._num_dropped_early += dropped.calls < _FEW_CALLS
        del self._kinds[self._max_graphs :]
        if self._num_dropped_early >= _MAX_DROPPED_RATIO * self._max_graphs:
            self._warn_once(
                f"more than max_graphs={self._max_graphs} kinds of calls alternate, and graphs are dropped after few "
                "calls. Raise max_graphs, pad batches to fewer shapes, or give tensors for numbers that change"
            )
        return new

    def _read_states(self, layers: Sequence[Any]) -> Hashable:
        if not self.step.carry:
            return None
        return tuple(
            tuple((state.shape, state.stride(), state.dtype, state.device) for state in layer.states)
            for layer in layers
        )

    def _read_gradients(self, parameters: Sequence[nn.Parameter]) -> Hashable:
        if self.step.optimizer is not None:
            return None
        return tuple(None if p.grad is None else (p.grad.data_ptr(), p.grad.stride()) for p in parameters)

    def _watch(self, kind: _Kind) -> StepWatch:
        """Collects all values that a graph of this kind's calls contains as constants."""
        step = self.step
        roots: dict[str, object] = {"net": step.net, "loss": step.loss, "before_update": step.before_update}
        optimizer = step.optimizer
        if optimizer is not None and kind.update_reason is None and kind.reason is None:
            hooks = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
            roots[_OPTIMIZER] = WatchedAttributes(optimizer, ("param_groups", "state", *hooks))
        elif optimizer is not None:
            for i, group in enumerate(optimizer.param_groups):
                roots[f"{_OPTIMIZER}.param_groups[{i}]['params']"] = group["params"]
        return StepWatch(roots, self._device, kind.ignoring)

    def _note_change(self, kind: _Kind) -> None:
        """Counts a change that requires a new recording.

        Drops the kind if only numbers of the optimizer have changed.
        """
        assert kind.watch is not None
        changes = kind.watch.changes()
        if kind.outdated or not changes:
            return
        kind.outdated = True
        optimizer_changes = [name for name in changes if name.startswith(f"{_OPTIMIZER}.param_groups")]
        if len(optimizer_changes) == len(changes):
            self._kinds.remove(kind)
        if kind.reason is not None:
            return
        self._changes.update([readable(name) for name in changes[:1]])
        if kind.calls >= _FEW_CALLS:
            return
        self._num_short_lived += 1
        if self._num_short_lived < _MAX_SHORT_LIVED:
            return
        if optimizer_changes:
            self._update_reason = (
                f"{readable(optimizer_changes[0])} changes often, and a graph contains its value: give a tensor on "
                f"{self._device}, as in torch.optim.SGD(net.parameters(), lr=torch.tensor(0.1, "
                f"device='{self._device.type}'), fused=True)"
            )
        else:
            self._warn_once(f"{readable(changes[0])} changes often, and each new value needs another recording")

    # -- one run -----------------------------------------------------------------------------------------

    @property
    def _num_warm_ups(self) -> int:
        """Number of runs in Python before a recording: 1; 2 before the first, to create the optimizer's state."""
        return 1 if self._num_recorded else 2

    def _run_recorded_part(self, kind: _Kind, inputs: Any, others: Sequence[Any]) -> Any:
        step = self.step
        result = step.gradients(inputs, others, local(step.net))
        if kind.update_reason is None:
            step.update()
        return result

    def _finish(self, kind: _Kind) -> None:
        """Averages gradients over processes, and runs the optimizer's part if the graph does not contain this part."""
        average_gradients(self.step.net, kind.parameters)
        if kind.update_reason is not None:
            self.step.update()

    def _warm_up(self, kind: _Kind, inputs: Any, others: Sequence[Any]) -> Any:
        """Runs the step in Python, and notes everything that a graph could not repeat.

        The first run may contain one-time work, such as compilation, or the creation of the optimizer's state. Such
        work does not prevent a graph, because the step is rehearsed again.
        """
        assert self._recorder is not None
        watch = kind.watch or self._watch(kind)
        before = draws(self._device)
        result, notes = self._recorder.rehearse(
            lambda: self._run_recorded_part(kind, inputs, others), names_of(self.step.net)
        )
        after = draws(self._device)
        notes += [f"the step draws from {name}" for name in before if before[name] != after[name]]
        changes = watch.changes()
        if changes:
            names = ", ".join(readable(name) for name in changes[:3])
            notes.append(f"the step itself changes {names}, in Python")
        if watch.too_many:
            notes.append("the network or the loss function refers to more objects than each call can compare")
        kind.rehearsed = not notes
        if notes and kind.runs:
            kind.reason, kind.ignoring = "; ".join(notes[:3]), changes
            self._warn_once(kind.reason)
        kind.runs += 1
        kind.watch = self._watch(kind)
        return result

    def _record(self, kind: _Kind, arguments: CallArguments) -> None:
        """Records the graph of a kind. If the recording fails, stores the reason."""
        assert self._recorder is not None
        assert kind.watch is not None
        step = self.step
        torch.clear_autocast_cache()
        try:
            graph = record(
                self._recorder,
                lambda rebuilt: take_apart(self._run_recorded_part(kind, *rebuilt)),
                step.net,
                arguments,
                kind.parameters,
                carry=step.carry,
            )
        except Exception as error:
            line = line_of_error(error, names_of(step.net))
            kind.reason = f"{line} cannot be recorded: {type(error).__name__}: {str(error).splitlines()[0]}"
            if step.scaler is not None:
                step.scaler._per_optimizer_states.clear()
        else:
            changes = kind.watch.changes()
            if changes:
                kind.reason = f"the step itself changes {readable(changes[0])}, in Python"
                kind.ignoring = changes
            else:
                kind.graph = graph
                self._num_recorded += 1
        finally:
            torch.clear_autocast_cache()
        if kind.reason is not None:
            self._warn_once(kind.reason)

    def _warn_once(self, reason: str) -> None:
        """Warns, once for each reason."""
        if reason not in self._warned:
            self._warned.add(reason)
            warn(f"a captured step runs in Python: {reason}.", CaptureWarning)


def _check_ranges(layers: Sequence[Any]) -> None:
    """Warns about learned parameters that have left their ranges, as calls of the neurons in Python do."""
    for layer in layers:
        if isinstance(layer, Neuron):
            layer._ranges.written()
            layer._check_ranges()


def _is_being_captured(device: torch.device) -> bool:
    """True during a capture that the caller has started."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
