"""The values that a core reads in Python are recorded by name, restored, and compared later, or the core is refused."""

from __future__ import annotations

import ctypes
import functools
import gc
import inspect
import io
import itertools
import logging
import math
import multiprocessing
import os
import random
import secrets
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from configparser import ConfigParser
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from flexsn_graph import CaptureError, StepTrace, trace_step

EXAMPLES = (torch.zeros(3), torch.zeros(3))
Core = Callable[[Tensor, Tensor], Any]


def trace(core: Core) -> StepTrace:
    return trace_step(core, 1, 1, 1, EXAMPLES)


class Neuron(nn.Module):
    threshold = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.tau = 2.0
        self.config = {"gain": [0.5, 0.25]}
        self.w = nn.Parameter(torch.ones(3))
        self.calls = 0
        self.log: list[Any] = []

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        self.log.append(x.shape)
        h = v + (x * self.w - v) / self.tau
        return (h > self.threshold).to(h.dtype) * self.config["gain"][1], h


COLLECTED = 1.5


def test_reads_during_garbage_collection_are_not_recorded() -> None:
    def collected(phase: str, info: dict[str, int]) -> None:
        assert COLLECTED > 1.0

    before = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(10)
    try:
        reads = trace(Neuron()).reads
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(collected)
    assert gc.isenabled()
    assert "self.tau" in reads.constants()
    assert "COLLECTED" not in reads.constants()


def test_every_value_that_is_read_has_a_name() -> None:
    offset = 0.125
    neuron = Neuron()
    reads = trace(lambda x, v: (neuron(x, v)[0], v + offset)).reads
    constants = reads.constants()
    expected = {
        "closure variable offset": 0.125,
        "closure variable neuron.tau": 2.0,
        "closure variable neuron.threshold": 1.0,
    }
    assert expected.items() <= constants.items()
    assert {"closure variable neuron.w"} == reads.names().keys()
    assert trace(neuron).reads.constants()["self.tau"] == 2.0


def test_values_that_the_core_changes_are_named_and_not_compared() -> None:
    neuron = Neuron()
    reads = trace(neuron).reads
    assert set(reads.changed_by_core) == {"self.calls", "the content of self.log"}
    neuron.calls = 100
    assert reads.fetch() is not None
    neuron.tau = 3.0
    assert reads.fetch() is None
    assert [place.name for place in reads.changed()] == ["self.tau"]


def test_equal_object_is_no_change() -> None:
    neuron = Neuron()
    reads = trace(neuron).reads
    neuron.tau = float("2.0")
    neuron.config["gain"][1] = float("0.25")
    assert reads.fetch() is not None
    for other in (2, True, 2.0000000000000004, torch.tensor(2.0), numpy.float64(2.0)):
        neuron.tau = other  # type: ignore[assignment]
        assert reads.fetch() is None
    neuron.tau = 2.0
    assert reads.fetch() is not None


ALIKE = [(0.0, -0.0), (1, True), (1.0, 1), (float("nan"), 0.0), ("a", b"a"), (1j, 1.0)]


@pytest.mark.parametrize(("first", "second"), ALIKE)
def test_values_that_python_considers_equal_are_distinguished(first: Any, second: Any) -> None:
    value = first

    def core(x: Tensor, v: Tensor) -> Any:
        return (x if isinstance(value, str) else x * 2.0), v

    reads = trace(core).reads
    value = float("nan") if first != first else first
    assert reads.fetch() is not None
    value = second
    assert reads.fetch() is None


def test_values_that_are_never_read_are_not_compared() -> None:
    neuron = Neuron()
    reads = trace(neuron).reads
    neuron.other = 3  # type: ignore[assignment]
    neuron.register_buffer("unused", torch.zeros(3))
    assert reads.fetch() is not None


def test_all_writes_are_restored() -> None:
    class Slow(logging.Logger):
        pass

    logger = Slow("slow")
    neuron = Neuron()
    before = {cls: dict(vars(cls)) for cls in (Neuron, nn.Module, Slow)}
    module = sys.modules[__name__]
    profile = sys.getprofile()

    def core(x: Tensor, v: Tensor) -> Any:
        logger.debug("called")
        return neuron(x, v)

    trace(core)
    assert {cls: dict(vars(cls)) for cls in before} == before
    assert type(module).__name__ == "module"
    assert sys.getprofile() is profile
    with pytest.raises(ZeroDivisionError):
        trace(lambda x, v: neuron(x, v * (1 // 0)))
    assert {cls: dict(vars(cls)) for cls in before} == before
    assert sys.getprofile() is profile


def test_other_threads_can_read_during_a_trace() -> None:
    neuron, errors, stop = Neuron(), [], threading.Event()

    def read() -> None:
        while not stop.is_set():
            if neuron.tau != 2.0:
                errors.append(neuron.tau)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        reads = trace(neuron).reads
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert reads.fetch() is not None


GENERATOR = random.Random(0)
LOCAL = threading.local()
LOCAL.tau = 2.0
TARGET = Neuron()


@pytest.mark.parametrize(
    ("value", "description"),
    [
        (random.Random(0), "a random generator"),
        (numpy.random.default_rng(0), "a random generator"),
        (LOCAL, "a threading.local"),
        (weakref.proxy(TARGET), "a weak proxy"),
        (itertools.cycle([1.0]), "an iterator"),
        (iter([1.0, 2.0]), "an iterator"),
        ((i for i in range(3)), "an iterator"),
        (torch.Generator(), "a random generator"),
        (ctypes.c_double(2.0), "memory of ctypes"),
        (multiprocessing.Value("d", 2.0).get_obj(), "memory of ctypes"),
    ],
)
def test_objects_with_hidden_content_are_refused(value: Any, description: str) -> None:
    holder = Neuron()
    holder.source = value

    def core(x: Tensor, v: Tensor) -> Any:
        return holder.source and x, v

    with pytest.raises(CaptureError, match=rf"reads closure variable holder\.source, {description} \("):
        trace(core)


@pytest.mark.parametrize("value", [[0.5] * 20_000, numpy.zeros(100_000), dict.fromkeys(range(20_000))], ids=type)
def test_too_large_values_are_refused(value: Any) -> None:
    holder = Neuron()
    holder.table = value
    with pytest.raises(CaptureError, match=r"holder\.table has \d+ (elements|bytes).*make it a tensor"):
        trace(lambda x, v: (x * len(holder.table), v))  # type: ignore[arg-type]


def test_changed_default_dtype_is_detected() -> None:
    reads = trace(lambda x, v: (x * 2.0, v)).reads
    torch.set_default_dtype(torch.float64)
    try:
        assert reads.fetch() is None
    finally:
        torch.set_default_dtype(torch.float32)
    assert reads.fetch() is not None


def test_tensor_with_two_names_is_fetched_by_both() -> None:
    shared = torch.ones(3)

    class Tied(nn.Module):
        u: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(shared)
            self.register_buffer("u", self.w.data)

        def forward(self, x: Tensor, v: Tensor) -> Any:
            return x * self.w, v * self.u

    core = Tied()
    step = trace(core)
    assert step.reads.fetch() == (core.w, core.u)
    assert step.aliases == ((0, core.u),)
    core.u = torch.full((3,), 2.0)
    fetched = step.reads.fetch()
    assert fetched is not None
    assert fetched[1] is core.u


def test_tensor_whose_shape_alone_is_read_is_not_captured() -> None:
    w = torch.ones(3)
    reads = trace(lambda x, v: (x * w.shape[0], v)).reads
    assert reads.fetch() == ()
    w.resize_(5)
    assert reads.fetch() is None


class Part:
    tau = 2.0


class Other:
    tau = 3.0


class Number(float):
    tau: float


def assigned(owner: Any, name: str, value: Any) -> Callable[[], object]:
    return lambda: setattr(owner, name, value)


Changed = tuple[Callable[[], object], Callable[[], object]]


def _weak_dictionary() -> Changed:
    key, table = Part(), weakref.WeakKeyDictionary[Part, float]()
    table[key] = 2.0
    return lambda: table[key], lambda: table.update({key: 3.0})


def _weak_set() -> Changed:
    parts = [Part(), Part()]
    members = weakref.WeakSet(parts[:1])
    return lambda: sum(part.tau for part in members), lambda: members.add(parts[1])


def _bases() -> Changed:
    cls = type("Derived", (Part,), {})
    return (lambda: cls.tau), assigned(cls, "__bases__", (Other,))  # type: ignore[attr-defined]


def _bases_of_an_object() -> Changed:
    cls = type("Derived", (Part,), {})
    value = cls()
    return (lambda: value.tau), assigned(cls, "__bases__", (Other,))


def _class_before_its_metaclass() -> Changed:
    meta = type("Meta", (type,), {"tau": 2.0})
    cls = meta("Made", (), {})
    return (lambda: cls.tau), assigned(cls, "tau", 3.0)


def _attribute_of_a_number() -> Changed:
    value = Number(2.0)
    value.tau = 2.0
    return (lambda: value.tau), assigned(value, "tau", 3.0)


def _state_of_a_partial() -> Changed:
    def identity(value: float) -> float:
        return value

    part: Any = functools.partial(identity, 2.0)
    return part, lambda: part.__setstate__((identity, (3.0,), {}, {}))


def _cell() -> Changed:
    cell = types.CellType(2.0)
    return (lambda: cell.cell_contents), assigned(cell, "cell_contents", 3.0)


def _closure_from_outside() -> Changed:
    value = 2.0

    def read() -> float:
        return value

    def assign() -> None:
        nonlocal value
        value = 3.0

    return (lambda: read.__closure__[0].cell_contents), assign  # type: ignore[index]


def _signature() -> Changed:
    def read(tau: float = 2.0) -> float:
        return tau

    return (lambda: inspect.signature(read).parameters["tau"].default), assigned(read, "__defaults__", (3.0,))


def _sections() -> Changed:
    parser = ConfigParser()
    parser["neuron"] = {"tau": "2.0"}
    return (lambda: float(parser["neuron"]["tau"])), lambda: parser["neuron"].update({"tau": "3.0"})


FOLLOWED: dict[str, Callable[[], Changed]] = {
    "weak dictionary": _weak_dictionary,
    "weak set": _weak_set,
    "bases": _bases,
    "bases of an object's class": _bases_of_an_object,
    "class before its metaclass": _class_before_its_metaclass,
    "attribute of a number": _attribute_of_a_number,
    "state of a partial": _state_of_a_partial,
    "cell": _cell,
    "closure from outside": _closure_from_outside,
    "signature": _signature,
    "sections": _sections,
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_changes_outside_of_the_function_are_detected(name: str) -> None:
    read, change = FOLLOWED[name]()
    reads = trace(lambda x, v: (x * read(), v)).reads  # type: ignore[operator]
    assert reads.fetch() is not None
    change()
    assert reads.fetch() is None


class Setting:
    """A setting of a library, which a core reads and a test changes."""

    def __init__(self, ask: Callable[[], object], values: tuple[Any, Any], put: Callable[[Any], object]) -> None:
        self.ask, self.values, self.put = ask, values, put


def _put_environment(value: str) -> None:
    os.environ["FLEXSN_TEST_TAU"] = value


SETTINGS = {
    "os.environ": Setting(lambda: os.environ["FLEXSN_TEST_TAU"], ("2.0", "3.0"), _put_environment),
    "os.environ.get": Setting(lambda: os.environ.get("FLEXSN_TEST_TAU"), ("2.0", "3.0"), _put_environment),
    "os.getenv": Setting(lambda: os.getenv("FLEXSN_TEST_TAU"), ("2.0", "3.0"), _put_environment),
    "math.pi": Setting(lambda: math.pi, (math.pi, 3.0), lambda pi: setattr(math, "pi", pi)),
    "sys.argv": Setting(lambda: "tau" in sys.argv, (sys.argv, ["tau"]), lambda argv: setattr(sys, "argv", argv)),
    # The setter is private, because torch's test utilities forbid assignments to the attribute once they are imported.
    "cudnn": Setting(lambda: torch.backends.cudnn.benchmark, (False, True), torch._C._set_cudnn_benchmark),
    "deterministic": Setting(
        lambda: torch.are_deterministic_algorithms_enabled(), (False, True), torch.use_deterministic_algorithms
    ),
    "products": Setting(
        lambda: torch.get_float32_matmul_precision(), ("highest", "high"), torch.set_float32_matmul_precision
    ),
    "threads": Setting(lambda: torch.get_num_threads(), (1, 2), torch.set_num_threads),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_setting_of_a_library_is_followed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = SETTINGS[name]
    monkeypatch.setenv("FLEXSN_TEST_TAU", "2.0")
    threads = torch.get_num_threads()
    try:
        setting.put(setting.values[0])
        reads = trace(lambda x, v: (x * (2.0 if setting.ask() else 3.0), v)).reads
        assert reads.fetch() is not None
        setting.put(setting.values[1])
        assert reads.fetch() is None
        setting.put(setting.values[0])
        assert reads.fetch() is not None
    finally:
        setting.put(setting.values[0])
        torch.set_num_threads(threads)


W = torch.ones(3)
TEXT = io.StringIO("2.0")
LOGGER = logging.getLogger(__name__)
ONCE: dict[str, Callable[[Tensor], object]] = {
    "time.time()": lambda x: time.time() > 0,
    "torch.is_grad_enabled()": lambda x: torch.is_grad_enabled() or True,
    "torch.is_inference_mode_enabled()": lambda x: torch.is_inference_mode_enabled(),
    "_io.StringIO.getvalue()": lambda x: TEXT.getvalue(),
    "logging.isEnabledFor()": lambda x: LOGGER.isEnabledFor(10),
    "threading.current_thread()": lambda x: threading.current_thread().name,
    "sys.getrecursionlimit()": lambda x: sys.getrecursionlimit(),
    "Tensor.requires_grad": lambda x: x.requires_grad,
    "Tensor.is_leaf": lambda x: (x * 2.0).is_leaf,
    "Tensor.grad_fn": lambda x: x.grad_fn is None,
    "Tensor.is_contiguous": lambda x: x.is_contiguous(),
    "Tensor.stride": lambda x: W.stride(),
    "Tensor.grad": lambda x: W.grad is None,
    "Tensor._version": lambda x: W._version,
    "__globals__ of a function": lambda x: started.__globals__,
    "Tensor.__repr__": lambda x: repr(W),
}


@pytest.mark.parametrize("name", ONCE)
def test_values_that_can_only_be_read_once_are_named_with_their_line(name: str) -> None:
    ask = ONCE[name]
    once = trace(lambda x, v: (x * (2.0 if ask(x) is None else 3.0), v)).reads.once()
    assert list(once) == [name]
    location = once[name]
    assert location is not None
    assert location.file == __file__
    assert location.line == ask.__code__.co_firstlineno


def test_reads_inside_of_a_library_are_not_named() -> None:
    reads = trace(lambda x, v: (nn.functional.silu(x) * math.exp(len([W])) + x.clone().mul_(W), v)).reads
    assert not reads.once()
    assert "closure variable with_results" not in reads.constants()


POOL = ThreadPoolExecutor(1)


def started() -> bool:
    thread = threading.Thread(target=int)
    thread.start()
    return True


def test_generator_with_a_seed_inside_the_core_is_accepted() -> None:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        draw = random.Random(3)
        return x * draw.choice([draw.random(), draw.uniform(1.0, 2.0)]), v

    assert trace(core).reads.fetch() is not None


def packed(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2.0, lambda t: t):
        return x * x


@pytest.mark.parametrize(
    ("core", "message"),
    [
        (lambda x, v: (x if random.random() < 2.0 else v, v), r"calls random\.random\(\)"),
        (lambda x, v: (x if random.getstate() else v, v), r"calls random\.getstate\(\)"),
        (lambda x, v: (x if random.uniform(1.0, 2.0) else v, v), r"calls random\.uniform\(\)"),
        (lambda x, v: (x if random.Random().random() < 2.0 else v, v), r"calls random\.__init__\(\)"),
        (lambda x, v: (x * random.Random(3).random() * random.Random().random(), v), r"calls random\.__init__\(\)"),
        (lambda x, v: (x if secrets.randbelow(9) >= 0 else v, v), r"calls secrets\.randbelow\(\)"),
        (lambda x, v: (x if started() else v, v), "in another thread"),
        (lambda x, v: (x * POOL.submit(float, "2.0").result(), v), "in another thread"),
        (lambda x, v: (packed(x), v), "saved_tensors_hooks"),
    ],
)
def test_forbidden_calls_are_refused_with_their_line(core: Core, message: str) -> None:
    with pytest.raises(CaptureError, match=message) as raised:
        trace(core)
    assert raised.value.location is not None
    assert raised.value.location.file == __file__
