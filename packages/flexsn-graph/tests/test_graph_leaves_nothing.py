"""After a trace, all objects to which the core wrote are unchanged. Errors name the objects that store tensors."""

from __future__ import annotations

import gc
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from flexsn_graph import RecurrentTrace, StatefulCoreError, trace_core, trace_step

Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
TRACE = torch.zeros(4)


@dataclass
class Record:
    trace: Tensor


@dataclass(frozen=True)
class Frozen:
    trace: Tensor


class Slotted:
    __slots__ = ("trace",)

    def __init__(self) -> None:
        self.trace = torch.zeros(4)


class OfClass:
    trace: ClassVar[Tensor] = torch.zeros(4)


class Buffered(nn.Module):
    trace: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("trace", torch.zeros(4))

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.trace = 0.5 * self.trace + x
        return self.trace, v


def attribute() -> tuple[Any, Step, str]:
    memory = SimpleNamespace(trace=torch.zeros(4))

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        memory.trace = 0.5 * memory.trace + x
        return memory.trace, v

    return memory.__dict__, core, "closure variable memory.trace"


def buffer() -> tuple[Any, Step, str]:
    module = Buffered()
    return module._buffers, module, "self.trace"


def in_a_list() -> tuple[Any, Step, str]:
    memory: list[Tensor] = []

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        memory.append(x + 1.0)
        return x, v

    return memory, core, "closure variable memory"


def in_a_deque() -> tuple[Any, Step, str]:
    memory: deque[Tensor] = deque([torch.zeros(4)], maxlen=2)

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        memory.append(memory[-1] + x)
        return memory[-1], v

    return memory, core, "closure variable memory"


def in_a_dictionary() -> tuple[Any, Step, str]:
    memory: OrderedDict[str, Any] = OrderedDict(a=1, trace=torch.zeros(4), b=2)

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        memory["trace"] = memory.pop("trace") * 0.5 + x
        return memory["trace"], v

    return memory, core, r"closure variable memory\['trace'\]"


def nested() -> tuple[Any, Step, str]:
    memory: dict[str, list[Any]] = {"all": [(torch.zeros(4), 1)]}

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        memory["all"][0] = (memory["all"][0][0] + x, 2)
        return x, v

    return memory["all"], core, r"closure variable memory\['all'\]"


def closure() -> tuple[Any, Step, str]:
    trace = torch.zeros(4)

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal trace
        trace = 0.5 * trace + x
        return trace, v

    return core.__closure__, core, "closure variable trace"


def global_variable() -> tuple[Any, Step, str]:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        global TRACE
        TRACE = 0.5 * TRACE + x
        return TRACE, v

    return globals(), core, "TRACE"


def function_attribute() -> tuple[Any, Step, str]:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        core.trace = 0.5 * getattr(core, "trace", 0.0) + x  # type: ignore[attr-defined]
        return core.trace, v  # type: ignore[attr-defined]

    return core.__dict__, core, "core.trace"


def default() -> tuple[Any, Step, str]:
    memory: list[Tensor] = [torch.zeros(4)]

    def core(x: Tensor, v: Tensor, memory: list[Tensor] = memory) -> tuple[Tensor, Tensor]:
        memory[0] = memory[0] + x
        return memory[0], v

    return memory, core, "a default of core"


def class_attribute() -> tuple[Any, Step, str]:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        OfClass.trace = 0.5 * OfClass.trace + x
        return OfClass.trace, v

    return OfClass, core, "OfClass.trace"


def slots() -> tuple[Any, Step, str]:
    memory = Slotted()

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        memory.trace = 0.5 * memory.trace + x
        return memory.trace, v

    return memory, core, "closure variable memory.trace"


def dataclass_field() -> tuple[Any, Step, str]:
    memory = Record(torch.zeros(4))

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        memory.trace = 0.5 * memory.trace + x
        return memory.trace, v

    return memory.__dict__, core, "closure variable memory.trace"


def frozen_field() -> tuple[Any, Step, str]:
    memory = Frozen(torch.zeros(4))

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        object.__setattr__(memory, "trace", 0.5 * memory.trace + x)
        return memory.trace, v

    return memory.__dict__, core, "closure variable memory.trace"


def on_a_parameter() -> tuple[Any, Step, str]:
    w = nn.Parameter(torch.ones(4))

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        w.memory = x * 2.0  # type: ignore[attr-defined]
        return x * w, v

    return w.__dict__, core, "closure variable w.memory"


def of_captured_tensors_alone() -> tuple[Any, Step, str]:
    memory = SimpleNamespace(w=torch.ones(4))

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        memory.w = memory.w * 0.9
        return x * memory.w, v

    return memory.__dict__, core, "closure variable memory.w"


class Memo:
    def __init__(self) -> None:
        self.w = nn.Parameter(torch.ones(4))
        self.twice: Tensor | None = None

    def __call__(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.twice is None:
            self.twice = self.w * 2.0
        return x * self.twice, v


def memo() -> tuple[Any, Step, str]:
    core = Memo()
    return core.__dict__, core, "self.twice"


KINDS = [
    *(attribute, buffer, in_a_list, in_a_deque, in_a_dictionary, nested, closure, global_variable, memo),
    *(function_attribute, default, class_attribute, slots, dataclass_field, frozen_field, on_a_parameter),
    of_captured_tensors_alone,
]


def list_values(storage: Any) -> list[Any]:
    """Returns the values in `storage`, in their order."""
    if isinstance(storage, Slotted):
        return [storage.trace]
    if isinstance(storage, type):
        return [value for key, value in sorted(vars(storage).items()) if key[:2] != "__"]
    if isinstance(storage, tuple):
        return [cell.cell_contents for cell in storage]
    return [*storage.keys(), *storage.values()] if isinstance(storage, dict) else list(storage)


@pytest.mark.long(all_but=["attribute", "buffer", "in_a_list", "closure", "memo", "class_attribute", "slots"])
@pytest.mark.parametrize("make", KINDS)
def test_object_that_stores_a_tensor_is_named_and_restored(make: Callable[[], tuple[Any, Step, str]]) -> None:
    storage, core, name = make()
    old_values = list_values(storage)
    for _ in range(2):
        with pytest.raises(StatefulCoreError, match=rf"keeps a tensor in {name},") as raised:
            trace_step(core, 1, 1, 1, (torch.zeros(4), torch.zeros(4)))
        location = raised.value.location
        assert location is not None
        assert location.file == __file__
        assert location.code
        assert [id(value) for value in list_values(storage)] == [id(value) for value in old_values]
    core(torch.ones(4), torch.zeros(4))  # the core still runs as a plain function


def test_error_cites_the_line_that_writes() -> None:
    _, core, _ = attribute()
    with pytest.raises(StatefulCoreError) as raised:
        trace_step(core, 1, 1, 1, (torch.zeros(4), torch.zeros(4)))
    assert raised.value.location is not None
    assert raised.value.location.code == "memory.trace = 0.5 * memory.trace + x"


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.log = 0, [0.5]
        self.seen: set[str] = set()

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        self.log.append(float(len(self.log)))
        self.seen.add("forward")
        self.shape = x.shape
        self.register_buffer("fixed", torch.ones(4), persistent=False)
        return x * 0.5, v


def test_other_values_that_a_core_writes_are_restored() -> None:
    core = Counts()
    before = dict(vars(core))
    with pytest.raises(StatefulCoreError, match=r"self\.fixed"):
        trace_step(core, 1, 1, 1, (torch.zeros(4), torch.zeros(4)))
    assert vars(core) == before
    assert core.log == [0.5]
    assert core.seen == set()
    assert not core._buffers
    assert not core._non_persistent_buffers_set


def test_core_that_fails_leaves_no_changes() -> None:
    memory = SimpleNamespace(trace=None, count=0)

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        memory.trace, memory.count = x * 2.0, memory.count + 1
        raise KeyError("of the user's")

    with pytest.raises(KeyError, match="of the user's"):
        trace_step(core, 1, 1, 1, (torch.zeros(4), torch.zeros(4)))
    assert vars(memory) == {"trace": None, "count": 0}


class Backward(torch.autograd.Function):
    memory: ClassVar[list[Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        Backward.memory.append(grads[0] * 2.0)
        return grads[0] * 2.0


def test_backward_formula_that_stores_a_tensor_is_refused() -> None:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out: Tensor = Backward.apply(x)
        return out, v

    trace = trace_step(core, 1, 1, 1, (torch.zeros(4), torch.zeros(4)))
    with pytest.raises(StatefulCoreError, match=r"keeps a tensor in Backward\.memory"):
        trace.vjp((True, True), (True, True))
    assert Backward.memory == []


def pruned(linear: nn.Linear) -> None:
    prune.l1_unstructured(linear, "weight", 0.5)


def normed(linear: nn.Linear) -> None:
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(linear)


def squashed(linear: nn.Linear) -> None:
    linear.raw = nn.Parameter(linear.weight.detach().clone())
    del linear.weight
    linear.register_forward_pre_hook(lambda module, args: setattr(module, "weight", torch.tanh(module.raw)))


@pytest.mark.parametrize("hook", [pruned, normed, squashed])
def test_attributes_set_by_forward_pre_hooks_are_restored(hook: Callable[[nn.Linear], None]) -> None:
    linear = nn.Linear(4, 4, bias=False)
    hook(linear)

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return v, x + linear(v)

    before = dict(vars(linear))
    trace = trace_core(core, 1, 1, 1, (torch.zeros(2, 4), torch.zeros(2, 4)))
    assert isinstance(trace, RecurrentTrace)
    assert vars(linear) == before
    assert trace.reads.derived == ["closure variable linear.weight"]
    core(torch.zeros(2, 4), torch.zeros(2, 4))  # sets another tensor
    assert trace.reads.fetch() is not None
    trace.vjp(trace.differentiable, [True] * (2 + len(trace.lifted_values)))
    assert not isinstance(linear.weight, torch._subclasses.FakeTensor)


@pytest.mark.parametrize("size", [None, 128])
def test_function_that_caches_results_of_tensors_is_refused(size: int | None) -> None:
    w = nn.Parameter(torch.ones(4))

    @lru_cache(size)
    def power(t: Tensor, exponent: int) -> Tensor:
        return t**exponent

    with pytest.raises(StatefulCoreError, match="keeps a tensor in the cache of closure variable power"):
        trace_step(lambda x, v: (x * power(w, 2), v), 1, 1, 1, (torch.zeros(4), torch.zeros(4)))
    assert power.cache_info().currsize == 0


def test_function_that_caches_numbers_is_accepted() -> None:
    half = lru_cache(lambda n: n / 2)
    trace = trace_step(lambda x, v: (x * half(3), v), 1, 1, 1, (torch.zeros(4), torch.zeros(4)))
    assert trace.reads.fetch() is not None


@pytest.mark.long(all_but=["class_attribute", "attribute"])
@pytest.mark.parametrize("make", [attribute, in_a_list, class_attribute])
def test_no_tensor_of_a_trace_stays_alive(make: Callable[[], tuple[Any, Step, str]]) -> None:
    from torch._subclasses import FakeTensor

    gc.collect()
    before = {id(o) for o in gc.get_objects() if type(o) is FakeTensor}
    _, core, _ = make()
    with pytest.raises(StatefulCoreError):
        trace_step(core, 1, 1, 1, (torch.zeros(4), torch.zeros(4)))
    gc.collect()
    assert not [o for o in gc.get_objects() if type(o) is FakeTensor and id(o) not in before]
