"""Step functions that read a value which is not an argument. The value can change between two calls.

`PLACES` contains one function for each place that can hold the value. This function receives the first value, and
returns two functions: the step function, and a function that assigns another value. Values are numbers, tensors or
functions. The places in `NUMBERS_ONLY` hold only numbers.
"""

from __future__ import annotations

import argparse
import array
import builtins
import collections
import functools
import importlib
import operator
import sys
import types
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar

import changing_config
import numpy
import torch
from changing_config import charge
from torch import Tensor, nn

Core = Callable[..., Any]
Assign = Callable[[Any], object]
CoreAndAssign = tuple[Core, Assign]

PLACES: dict[str, Callable[[Any], CoreAndAssign]] = {}
NUMBERS_ONLY: set[str] = set()


def place(make: Callable[[Any], CoreAndAssign]) -> Callable[[Any], CoreAndAssign]:
    PLACES[make.__name__] = make
    return make


def numbers_only(make: Callable[[Any], CoreAndAssign]) -> Callable[[Any], CoreAndAssign]:
    NUMBERS_ONLY.add(make.__name__)
    return place(make)


def step(x: Tensor, v: Tensor, value: Any) -> tuple[Tensor, Tensor]:
    h = v * 0.5 + charge(x, value)
    return h * h, h


class Holder:
    """An object whose attributes hold values."""

    value: Any


# -- attributes ----------------------------------------------------------------------------------------------


@place
def attribute_of_module(first: Any) -> CoreAndAssign:
    class Core(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = first

        def forward(self, x: Tensor, v: Tensor) -> Any:
            return step(x, v, self.value)

    core = Core()
    return core, lambda new: setattr(core, "value", new)


@place
def attribute_of_object(first: Any) -> CoreAndAssign:
    class Core:
        def __init__(self) -> None:
            self.value = first

        def __call__(self, x: Tensor, v: Tensor) -> Any:
            return step(x, v, self.value)

    core = Core()
    return core, lambda new: setattr(core, "value", new)


@place
def attribute_that_the_core_assigns_on_another_object(first: Any) -> CoreAndAssign:
    holder = Holder()
    holder.value = first

    def core(x: Tensor, v: Tensor) -> Any:
        other = Holder()
        other.value = 2.0
        return step(x, v * other.value, holder.value)

    return core, lambda new: setattr(holder, "value", new)


@place
def attribute_over_a_class_default(first: Any) -> CoreAndAssign:
    class Core:
        value = first

        def __call__(self, x: Tensor, v: Tensor) -> Any:
            value = self.value
            return step(x, v, value.__func__ if isinstance(value, types.MethodType) else value)

    core = Core()
    return core, lambda new: setattr(core, "value", new)


@place
def attribute_deleted_before_a_class_default(first: Any) -> CoreAndAssign:
    class Core:
        def __call__(self, x: Tensor, v: Tensor) -> Any:
            value = self.value  # type: ignore[attr-defined]
            return step(x, v, value.__func__ if isinstance(value, types.MethodType) else value)

    core = Core()
    core.__dict__["value"] = first

    def assign(new: Any) -> None:
        core.__dict__.pop("value", None)
        Core.value = new  # type: ignore[attr-defined]

    return core, assign


@place
def attribute_by_getattr(first: Any) -> CoreAndAssign:
    holder, name = Holder(), "".join(["val", "ue"])
    holder.value = first
    return lambda x, v: step(x, v, getattr(holder, name)), lambda new: setattr(holder, "value", new)


@place
def attribute_by_attrgetter(first: Any) -> CoreAndAssign:
    holder, read = Holder(), operator.attrgetter("value")
    holder.value = first
    return lambda x, v: step(x, v, read(holder)), lambda new: setattr(holder, "value", new)


@place
def attribute_by_default_of_getattr(first: Any) -> CoreAndAssign:
    holder = Holder()
    return lambda x, v: step(x, v, getattr(holder, "value", first)), lambda new: setattr(holder, "value", new)


@place
def attribute_by_hasattr(first: Any) -> CoreAndAssign:
    holder = Holder()

    def core(x: Tensor, v: Tensor) -> Any:
        return step(x, v, holder.value if hasattr(holder, "value") else first)

    return core, lambda new: setattr(holder, "value", new)


@place
def attribute_by_dict(first: Any) -> CoreAndAssign:
    class Core(nn.Module):
        def forward(self, x: Tensor, v: Tensor) -> Any:
            return step(x, v, self.__dict__["value"])

    core = Core()
    core.__dict__["value"] = first
    return core, lambda new: core.__dict__.update(value=new)


@place
def attribute_by_vars(first: Any) -> CoreAndAssign:
    holder = Holder()
    holder.value = first
    return lambda x, v: step(x, v, vars(holder)["value"]), lambda new: setattr(holder, "value", new)


@place
def attribute_by_object_getattribute(first: Any) -> CoreAndAssign:
    holder = Holder()
    holder.value = first

    def core(x: Tensor, v: Tensor) -> Any:
        assert holder.__class__ is Holder
        return step(x, v, object.__getattribute__(holder, "value"))

    return core, lambda new: setattr(holder, "value", new)


@place
def attribute_by_custom_getattribute(first: Any) -> CoreAndAssign:
    class Upper:
        def __init__(self) -> None:
            self.value = first

        def __getattribute__(self, name: str) -> Any:
            return object.__getattribute__(self, name.lower())

    holder: Any = Upper()
    return lambda x, v: step(x, v, holder.VALUE), lambda new: setattr(holder, "value", new)


@place
def attribute_by_custom_getattr(first: Any) -> CoreAndAssign:
    class Config:
        def __init__(self) -> None:
            self._entries = {"value": first}

        def __getattr__(self, name: str) -> Any:
            return self._entries[name]

    holder = Config()
    return lambda x, v: step(x, v, holder.value), lambda new: holder._entries.update(value=new)


@place
def replaced_dict(first: Any) -> CoreAndAssign:
    holder = Holder()
    holder.value = first
    return lambda x, v: step(x, v, holder.value), lambda new: setattr(holder, "__dict__", {"value": new})


@place
def class_of_an_object(first: Any) -> CoreAndAssign:
    holder: Any = type("First", (), {"read": lambda self: first})()

    def assign(new: Any) -> None:
        holder.__class__ = type("Second", (), {"read": lambda self: new})

    return lambda x, v: step(x, v, holder.read()), assign


@place
def slot(first: Any) -> CoreAndAssign:
    class Config:
        __slots__ = ("value",)
        value: Any

    holder = Config()
    holder.value = first
    return lambda x, v: step(x, v, holder.value), lambda new: setattr(holder, "value", new)


@place
def private_slot(first: Any) -> CoreAndAssign:
    class Config:
        __slots__ = ("__value",)

        def __init__(self, value: Any) -> None:
            self.__value = value

        def read(self) -> Any:
            return self.__value

        def assign(self, new: Any) -> None:
            self.__value = new

    holder = Config(first)
    return lambda x, v: step(x, v, holder.read()), holder.assign


@place
def field_of_a_dataclass(first: Any) -> CoreAndAssign:
    @dataclass
    class Config:
        value: Any = None

    holder = Config(first)
    return lambda x, v: step(x, v, holder.value), lambda new: setattr(holder, "value", new)


@place
def field_of_a_frozen_dataclass(first: Any) -> CoreAndAssign:
    @dataclass(frozen=True)
    class Config:
        value: Any = 0.0

    holder = Config(first)
    return lambda x, v: step(x, v, holder.value), lambda new: object.__setattr__(holder, "value", new)


@place
def namespace(first: Any) -> CoreAndAssign:
    holder = types.SimpleNamespace(value=first)
    return lambda x, v: step(x, v, holder.value), lambda new: setattr(holder, "value", new)


@place
def arguments(first: Any) -> CoreAndAssign:
    holder = argparse.Namespace(value=first)
    return lambda x, v: step(x, v, holder.value), lambda new: setattr(holder, "value", new)


@place
def attribute_of_a_function(first: Any) -> CoreAndAssign:
    def core(x: Tensor, v: Tensor) -> Any:
        return step(x, v, core.value)  # type: ignore[attr-defined]

    core.value = first  # type: ignore[attr-defined]
    return core, lambda new: setattr(core, "value", new)


@place
def attribute_of_a_tensor(first: Any) -> CoreAndAssign:
    w: Any = torch.tensor(2.0)
    w.value = first
    return lambda x, v: step(x, v * w, w.value), lambda new: setattr(w, "value", new)


@place
def attribute_of_an_element(first: Any) -> CoreAndAssign:
    holders = [Holder(), Holder()]
    for holder in holders:
        holder.value = first
    return lambda x, v: step(x, v, holders[1].value), lambda new: setattr(holders[1], "value", new)


# -- classes -------------------------------------------------------------------------------------------------


@place
def attribute_of_a_class(first: Any) -> CoreAndAssign:
    config: Any = type("Config", (), {"value": first})
    return lambda x, v: step(x, v, config.value), lambda new: setattr(config, "value", new)


@place
def attribute_of_a_base_class(first: Any) -> CoreAndAssign:
    base: Any = type("Base", (), {"value": first})
    config: Any = type("Config", (base,), {})
    return lambda x, v: step(x, v, config.value), lambda new: setattr(base, "value", new)


@place
def attribute_of_a_class_before_its_base(first: Any) -> CoreAndAssign:
    base: Any = type("Base", (), {"value": [first]})
    config: Any = type("Config", (base,), {})
    holder = config()
    return lambda x, v: step(x, v, holder.value[0]), lambda new: setattr(config, "value", [new])


@place
def attribute_of_a_metaclass(first: Any) -> CoreAndAssign:
    class Meta(type):
        value: Any = first

    class Config(metaclass=Meta):
        pass

    return lambda x, v: step(x, v, Config.value), lambda new: setattr(Meta, "value", new)


@place
def property_of_an_object(first: Any) -> CoreAndAssign:
    class Config:
        _value = first

        @property
        def value(self) -> Any:
            return self.__dict__.get("_value", first)

    holder = Config()
    return lambda x, v: step(x, v, holder.value), lambda new: setattr(holder, "_value", new)


@place
def replaced_property(first: Any) -> CoreAndAssign:
    class Config:
        @property
        def value(self) -> Any:
            return first

    holder = Config()
    return lambda x, v: step(x, v, holder.value), lambda new: setattr(Config, "value", property(lambda self: new))


@place
def descriptor(first: Any) -> CoreAndAssign:
    class Value:
        stored = first

        def __get__(self, owner: Any, kind: Any = None) -> Any:
            return self.__dict__.get("stored", first)

        def __set__(self, owner: Any, value: Any) -> None:
            self.stored = value

    class Config:
        value = Value()

    holder = Config()
    return lambda x, v: step(x, v, holder.value), lambda new: setattr(holder, "value", new)


@place
def descriptor_with_values_of_objects(first: Any) -> CoreAndAssign:
    class Value:
        def __get__(self, owner: Any, kind: Any = None) -> Any:
            return owner.__dict__["_value"]

    class Config:
        value = Value()

    holder = Config()
    holder.__dict__["_value"] = first
    return lambda x, v: step(x, v, holder.value), lambda new: holder.__dict__.update(_value=new)


@place
def attribute_by_super(first: Any) -> CoreAndAssign:
    class Base:
        value: ClassVar[Any] = [first]

    class Core(Base):
        value: ClassVar[Any] = None

        def __call__(self, x: Tensor, v: Tensor) -> Any:
            return step(x, v, super().value[0])

    return Core(), lambda new: setattr(Base, "value", [new])


@place
def method_by_super(first: Any) -> CoreAndAssign:
    class Base:
        def read(self) -> Any:
            return first

    class Core(Base):
        def read(self) -> Any:
            return super().read()

        def __call__(self, x: Tensor, v: Tensor) -> Any:
            return step(x, v, self.read())

    return Core(), lambda new: setattr(Base, "read", lambda self: new)


@place
def method_of_an_object(first: Any) -> CoreAndAssign:
    class Core(nn.Module):
        def read(self) -> Any:
            return first

        def forward(self, x: Tensor, v: Tensor) -> Any:
            return step(x, v, self.read())

    core = Core()
    return core, lambda new: setattr(core, "read", lambda: new)


@place
def method_of_a_class(first: Any) -> CoreAndAssign:
    class Core(nn.Module):
        def read(self) -> Any:
            return first

        def forward(self, x: Tensor, v: Tensor) -> Any:
            return step(x, v, self.read())

    return Core(), lambda new: setattr(Core, "read", lambda self: new)


@place
def method_added_to_a_class(first: Any) -> CoreAndAssign:
    class Base(nn.Module):
        def read(self) -> Any:
            return first

    class Core(Base):
        def forward(self, x: Tensor, v: Tensor) -> Any:
            return step(x, v, self.read())

    return Core(), lambda new: setattr(Core, "read", lambda self: new)


@place
def forward_of_a_class(first: Any) -> CoreAndAssign:
    class Core(nn.Module):
        def forward(self, x: Tensor, v: Tensor) -> Any:
            return step(x, v, first)

    return Core(), lambda new: setattr(Core, "forward", lambda self, x, v: step(x, v, new))


@place
def call_of_a_class(first: Any) -> CoreAndAssign:
    class Core:
        def __call__(self, x: Tensor, v: Tensor) -> Any:
            return step(x, v, first)

    return Core(), lambda new: setattr(Core, "__call__", lambda self, x, v: step(x, v, new))


@place
def static_method(first: Any) -> CoreAndAssign:
    class Config:
        @staticmethod
        def read() -> Any:
            return first

    return lambda x, v: step(x, v, Config.read()), lambda new: setattr(Config, "read", staticmethod(lambda: new))


@place
def class_method(first: Any) -> CoreAndAssign:
    class Config:
        value: ClassVar[Any] = [first]

        @classmethod
        def read(cls) -> Any:
            return cls.value[0]

    return lambda x, v: step(x, v, Config().read()), lambda new: setattr(Config, "value", [new])


@place
def special_method(first: Any) -> CoreAndAssign:
    class Config:
        def __getitem__(self, key: str) -> Any:
            return first

    holder = Config()
    return lambda x, v: step(x, v, holder["tau"]), lambda new: setattr(Config, "__getitem__", lambda self, key: new)


@place
def added_special_method(first: Any) -> CoreAndAssign:
    class Config:
        pass

    holder = Config()
    second: list[Any] = []

    def core(x: Tensor, v: Tensor) -> Any:
        return step(x, v, first if holder else second[0])

    def assign(new: Any) -> None:
        second[:] = [new]
        Config.__bool__ = lambda self: False  # type: ignore[attr-defined]

    return core, assign


# -- variables -----------------------------------------------------------------------------------------------


@place
def closure_variable(first: Any) -> CoreAndAssign:
    value = first

    def core(x: Tensor, v: Tensor) -> Any:
        return step(x, v, value)

    def assign(new: Any) -> None:
        nonlocal value
        value = new

    return core, assign


@place
def closure_variable_of_a_helper(first: Any) -> CoreAndAssign:
    value = first

    def helper() -> Any:
        return value

    def core(x: Tensor, v: Tensor) -> Any:
        return step(x, v, helper())

    def assign(new: Any) -> None:
        nonlocal value
        value = new

    return core, assign


@place
def closure_variable_of_an_inner_function(first: Any) -> CoreAndAssign:
    value = first

    def core(x: Tensor, v: Tensor) -> Any:
        def inner() -> Any:
            return [value for _ in range(2)][1]

        return step(x, v, inner())

    def assign(new: Any) -> None:
        nonlocal value
        value = new

    return core, assign


GLOBAL: Any = None


@place
def global_variable(first: Any) -> CoreAndAssign:
    globals()["GLOBAL"] = first
    return lambda x, v: step(x, v, GLOBAL), lambda new: globals().update(GLOBAL=new)


@place
def global_variable_by_globals(first: Any) -> CoreAndAssign:
    globals()["GLOBAL"] = first
    return lambda x, v: step(x, v, globals()["GLOBAL"]), lambda new: globals().update(GLOBAL=new)


@place
def global_variable_over_a_builtin(first: Any) -> CoreAndAssign:
    globals().pop("max", None)

    def core(x: Tensor, v: Tensor) -> Any:
        return step(x, v, first if max(1, 2) == 2 else max(1, 2, 3))

    def assign(new: Any) -> None:
        globals()["max"] = lambda *values: 1 if len(values) == 2 else new

    return core, assign


@place
def builtin(first: Any) -> CoreAndAssign:
    builtins.flexsn_value = first  # type: ignore[attr-defined]
    return (
        lambda x, v: step(x, v, flexsn_value),  # type: ignore[name-defined]  # noqa: F821
        lambda new: setattr(builtins, "flexsn_value", new),
    )


@place
def constant_of_a_module(first: Any) -> CoreAndAssign:
    changing_config.TAU = first
    return lambda x, v: step(x, v, changing_config.TAU), lambda new: setattr(changing_config, "TAU", new)


@place
def constant_of_a_module_by_getattr(first: Any) -> CoreAndAssign:
    changing_config.TAU = first
    name = "".join(["T", "AU"])
    return lambda x, v: step(x, v, getattr(changing_config, name)), lambda new: setattr(changing_config, "TAU", new)


@place
def constant_of_a_module_by_vars(first: Any) -> CoreAndAssign:
    changing_config.TAU = first
    return lambda x, v: step(x, v, vars(changing_config)["TAU"]), lambda new: setattr(changing_config, "TAU", new)


@place
def constant_imported_inside_the_core(first: Any) -> CoreAndAssign:
    changing_config.TAU = first

    def core(x: Tensor, v: Tensor) -> Any:
        from changing_config import TAU

        return step(x, v, TAU)

    return core, lambda new: setattr(changing_config, "TAU", new)


@place
def constant_by_import_module(first: Any) -> CoreAndAssign:
    changing_config.TAU = first

    def core(x: Tensor, v: Tensor) -> Any:
        return step(x, v, importlib.import_module("changing_config").TAU)

    return core, lambda new: setattr(changing_config, "TAU", new)


@place
def constant_by_sys_modules(first: Any) -> CoreAndAssign:
    changing_config.TAU = first
    return lambda x, v: step(x, v, sys.modules["changing_config"].TAU), lambda new: setattr(changing_config, "TAU", new)


@place
def table_of_a_module(first: Any) -> CoreAndAssign:
    changing_config.TABLE["tau"] = first
    return lambda x, v: step(x, v, changing_config.TABLE["tau"]), lambda new: changing_config.TABLE.update(tau=new)


@place
def function_of_a_module(first: Any) -> CoreAndAssign:
    changing_config.read = lambda: first  # type: ignore[attr-defined]
    return (
        lambda x, v: step(x, v, changing_config.read()),  # type: ignore[attr-defined]
        lambda new: setattr(changing_config, "read", lambda: new),
    )


# -- functions -----------------------------------------------------------------------------------------------


@place
def default(first: Any) -> CoreAndAssign:
    def core(x: Tensor, v: Tensor, value: Any = first) -> Any:
        return step(x, v, value)

    return core, lambda new: setattr(core, "__defaults__", (new,))


@place
def default_of_a_helper(first: Any) -> CoreAndAssign:
    def helper(value: Any = first) -> Any:
        return value

    return lambda x, v: step(x, v, helper()), lambda new: setattr(helper, "__defaults__", (new,))


@place
def keyword_default(first: Any) -> CoreAndAssign:
    def core(x: Tensor, v: Tensor, *, value: Any = first) -> Any:
        return step(x, v, value)

    return core, lambda new: core.__kwdefaults__.update(value=new)  # type: ignore[union-attr]


@place
def code_object(first: Any) -> CoreAndAssign:
    values = [first]

    def core(x: Tensor, v: Tensor) -> Any:
        return step(x, v, values[0])

    def replacement(x: Tensor, v: Tensor) -> Any:
        return step(x * 2.0, v, values[0])

    def assign(new: Any) -> None:
        values[0] = new
        core.__code__ = replacement.__code__

    return core, assign


@place
def keyword_of_a_partial(first: Any) -> CoreAndAssign:
    core = functools.partial(lambda x, v, value: step(x, v, value), value=first)
    return core, lambda new: core.keywords.update(value=new)


@place
def argument_of_a_partial(first: Any) -> CoreAndAssign:
    holder = [first]
    return functools.partial(lambda values, x, v: step(x, v, values[0]), holder), lambda new: holder.__setitem__(0, new)


@place
def wrapped_function(first: Any) -> CoreAndAssign:
    values = [first]

    def decorate(function: Core) -> Core:
        @functools.wraps(function)
        def wrapper(*arguments: Any) -> Any:
            return function(*arguments)

        return wrapper

    @decorate
    def core(x: Tensor, v: Tensor) -> Any:
        return step(x, v, values[0])

    return core, lambda new: values.__setitem__(0, new)


@place
def function_under_no_grad(first: Any) -> CoreAndAssign:
    values = [first]

    @torch.no_grad()
    def read(x: Tensor) -> Any:
        return values[0]

    return lambda x, v: step(x, v, read(x)), lambda new: values.__setitem__(0, new)


@place
def single_dispatch(first: Any) -> CoreAndAssign:
    holder = Holder()
    holder.value = first

    @functools.singledispatch
    def read(key: Any) -> Any:
        raise AssertionError(key)

    @read.register
    def _(key: int) -> Any:
        return holder.value

    return lambda x, v: step(x, v, read(1)), lambda new: setattr(holder, "value", new)


@place
def cached_function(first: Any) -> CoreAndAssign:
    holder = Holder()
    holder.value = first

    @functools.lru_cache
    def read() -> Any:
        return holder.value

    def assign(new: Any) -> None:
        holder.value = new
        read.cache_clear()

    return lambda x, v: step(x, v, read()), assign


@place
def cached_function_after_a_call(first: Any) -> CoreAndAssign:
    holder = Holder()
    holder.value = first

    @functools.lru_cache
    def read() -> Any:
        return holder.value

    read()

    def assign(new: Any) -> None:
        holder.value = new
        read.cache_clear()

    return lambda x, v: step(x, v, read()), assign


@place
def cached_property(first: Any) -> CoreAndAssign:
    class Config:
        container: ClassVar[Any] = [first]

        @functools.cached_property
        def value(self) -> Any:
            return self.container[0]

    holder = Config()

    def assign(new: Any) -> None:
        Config.container[0] = new
        del holder.value

    return lambda x, v: step(x, v, holder.value), assign


@place
def bound_method_of_a_container(first: Any) -> CoreAndAssign:
    table = {"tau": first}
    read = table.get
    return lambda x, v: step(x, v, read("tau")), lambda new: table.update(tau=new)


@place
def bound_method_of_an_object(first: Any) -> CoreAndAssign:
    class Config:
        def __init__(self) -> None:
            self.value = first

        def read(self) -> Any:
            return self.value

    holder = Config()
    read = holder.read
    return lambda x, v: step(x, v, read()), lambda new: setattr(holder, "value", new)


# -- containers ----------------------------------------------------------------------------------------------


@place
def element_of_a_list(first: Any) -> CoreAndAssign:
    values = [1.0, first]
    return lambda x, v: step(x, v, values[1]), lambda new: values.__setitem__(1, new)


@place
def growing_list(first: Any) -> CoreAndAssign:
    values = [first]

    def core(x: Tensor, v: Tensor) -> Any:
        for value in values:
            _, v = step(x, v, value)
        return v * v, v

    return core, values.append


@place
def last_element_of_a_list(first: Any) -> CoreAndAssign:
    values = [first]
    return lambda x, v: step(x, v, values[-1]), values.append


@place
def list_inside_a_tuple(first: Any) -> CoreAndAssign:
    values: tuple[float, list[Any]] = (1.0, [first])
    return lambda x, v: step(x, v, values[1][0]), lambda new: values[1].__setitem__(0, new)


@place
def value_of_a_dictionary(first: Any) -> CoreAndAssign:
    table = {"tau": first}
    return lambda x, v: step(x, v, table["tau"]), lambda new: table.update(tau=new)


@place
def new_key(first: Any) -> CoreAndAssign:
    table: dict[str, Any] = {}
    return lambda x, v: step(x, v, table.get("tau", first)), lambda new: table.update(tau=new)


@place
def nested_dictionary(first: Any) -> CoreAndAssign:
    table = {"neuron": {"tau": [first]}}
    return lambda x, v: step(x, v, table["neuron"]["tau"][0]), lambda new: table.update(neuron={"tau": [new]})


@place
def order_of_a_dictionary(first: Any) -> CoreAndAssign:
    table: dict[str, Any] = {"a": first}

    def assign(new: Any) -> None:
        table.clear()
        table.update(b=new, a=first)

    return lambda x, v: step(x, v, next(iter(table.values()))), assign


@place
def ordered_dictionary(first: Any) -> CoreAndAssign:
    table: collections.OrderedDict[str, Any] = collections.OrderedDict(tau=first, other=1.0)

    def assign(new: Any) -> None:
        table["tau"] = new
        table.move_to_end("other")

    return lambda x, v: step(x, v, table["tau"]), assign


@place
def default_dictionary(first: Any) -> CoreAndAssign:
    table: Any = collections.defaultdict(lambda: first)
    return lambda x, v: step(x, v, table["tau"]), lambda new: table.update(tau=new)


@place
def user_dictionary(first: Any) -> CoreAndAssign:
    table: Any = collections.UserDict(tau=first)
    return lambda x, v: step(x, v, table["tau"]), lambda new: table.update(tau=new)


@place
def chain_of_dictionaries(first: Any) -> CoreAndAssign:
    table: Any = collections.ChainMap({}, {"tau": first})
    return lambda x, v: step(x, v, table["tau"]), lambda new: table.update(tau=new)


@place
def view_of_a_dictionary(first: Any) -> CoreAndAssign:
    table = {"tau": first}
    view = types.MappingProxyType(table)
    return lambda x, v: step(x, v, view["tau"]), lambda new: table.update(tau=new)


@place
def values_of_a_dictionary(first: Any) -> CoreAndAssign:
    table = {"tau": first}
    view = table.values()
    return lambda x, v: step(x, v, next(iter(view))), lambda new: table.update(tau=new)


@place
def custom_dictionary(first: Any) -> CoreAndAssign:
    class Config(dict[str, Any]):
        def __getattr__(self, name: str) -> Any:
            return self[name]

    table = Config(tau=first)
    return lambda x, v: step(x, v, table.tau), lambda new: table.update(tau=new)


@place
def custom_list(first: Any) -> CoreAndAssign:
    class Values(list[Any]):
        def __getitem__(self, key: Any) -> Any:
            return list.__getitem__(self, 0)

    values = Values([first])
    return lambda x, v: step(x, v, values[7]), lambda new: list.__setitem__(values, 0, new)


@place
def double_ended_queue(first: Any) -> CoreAndAssign:
    values = collections.deque([first, 1.0])
    return lambda x, v: step(x, v, values[0]), values.appendleft


@place
def named_tuple(first: Any) -> CoreAndAssign:
    make: Any = collections.namedtuple("make", ["value"])
    holder = Holder()
    holder.value = make(first)
    return lambda x, v: step(x, v, holder.value.value), lambda new: setattr(holder, "value", make(new))


@numbers_only
def number_in_a_set(first: Any) -> CoreAndAssign:
    values = {first}

    def assign(new: Any) -> None:
        values.clear()
        values.add(new)

    return lambda x, v: step(x, v, max(values, default=0.0)), assign


@numbers_only
def number_in_a_numpy_array(first: Any) -> CoreAndAssign:
    values = numpy.array([1.0, first])
    return lambda x, v: step(x, v, float(values[1])), lambda new: values.__setitem__(1, new)


@numbers_only
def object_in_a_numpy_array(first: Any) -> CoreAndAssign:
    values = numpy.array([1.0, first], dtype=object)
    return lambda x, v: step(x, v, values[1]), lambda new: values.__setitem__(1, new)


@numbers_only
def number_of_numpy(first: Any) -> CoreAndAssign:
    holder = Holder()
    holder.value = numpy.float64(first)
    return lambda x, v: step(x, v, float(holder.value)), lambda new: setattr(holder, "value", numpy.float64(new))


@numbers_only
def number_in_an_array(first: Any) -> CoreAndAssign:
    values = array.array("d", [first])
    return lambda x, v: step(x, v, values[0]), lambda new: values.__setitem__(0, new)


@numbers_only
def number_in_bytes(first: Any) -> CoreAndAssign:
    values = bytearray([int(8 * first)])
    return lambda x, v: step(x, v, values[0] / 8), lambda new: values.__setitem__(0, int(8 * new))


# -- other places -------------------------------------------------------------------------------------------


@place
def target_of_a_weak_reference(first: Any) -> CoreAndAssign:
    holder = Holder()
    holder.value = first
    reference = weakref.ref(holder)

    def assign(new: Any) -> None:
        holder.value = new

    return lambda x, v: step(x, v, reference().value), assign  # type: ignore[union-attr]


@place
def context_variable(first: Any) -> CoreAndAssign:
    variable: ContextVar[Any] = ContextVar("variable")
    variable.set(first)
    return lambda x, v: step(x, v, variable.get()), lambda new: variable.set(new)


@numbers_only
def learning_rate(first: Any) -> CoreAndAssign:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=first)
    (group,) = optimizer.param_groups
    return lambda x, v: step(x, v, optimizer.param_groups[0]["lr"]), lambda new: group.update(lr=new)


# -- torch ---------------------------------------------------------------------------------------------------


class Charge(nn.Module):
    """A module that computes `charge`."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Any:
        return charge(x, self.value)


@place
def child_module(first: Any) -> CoreAndAssign:
    class Core(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = Charge(first)

        def forward(self, x: Tensor, v: Tensor) -> Any:
            return step(x, v, self.child)

    core = Core()
    return core, lambda new: setattr(core, "child", Charge(new))


@place
def element_of_a_module_list(first: Any) -> CoreAndAssign:
    children = nn.ModuleList([Charge(1.0), Charge(first)])

    def core(x: Tensor, v: Tensor) -> Any:
        for child in children:
            x = child(x)
        return step(x, v, 1.0)

    return core, lambda new: children.__setitem__(1, Charge(new))


@place
def module_appended_to_a_list(first: Any) -> CoreAndAssign:
    children = nn.ModuleList([Charge(first)])

    def core(x: Tensor, v: Tensor) -> Any:
        for child in children:
            x = child(x)
        return step(x, v, 1.0)

    return core, lambda new: children.append(Charge(new))


@place
def module_appended_to_a_sequence(first: Any) -> CoreAndAssign:
    children = nn.Sequential(Charge(first), nn.Tanh())
    return lambda x, v: step(children(x), v, 1.0), lambda new: children.append(Charge(new))


@place
def forward_hook(first: Any) -> CoreAndAssign:
    child = Charge(first)

    def assign(new: Any) -> None:
        child.register_forward_hook(lambda module, inputs, result: charge(result, new))

    return lambda x, v: step(x, v, child), assign


@place
def removed_forward_hook(first: Any) -> CoreAndAssign:
    child = Charge(first)
    handle = child.register_forward_hook(lambda module, inputs, result: result * 2.0)

    def assign(new: Any) -> None:
        handle.remove()
        child.value = new

    return lambda x, v: step(x, v, child), assign


@place
def forward_pre_hook(first: Any) -> CoreAndAssign:
    child = Charge(first)

    def assign(new: Any) -> None:
        child.register_forward_pre_hook(lambda module, inputs: (charge(inputs[0], new),))

    return lambda x, v: step(x, v, child), assign


@place
def hook_of_all_modules(first: Any) -> CoreAndAssign:
    child = Charge(first)
    values: list[Any] = []

    def hook(module: nn.Module, inputs: Any, result: Any) -> Any:
        return charge(result, values[0]) if module is child else None

    def assign(new: Any) -> None:
        values[:] = [new]
        if len(values) == 1 and not registered:
            registered.append(nn.modules.module.register_module_forward_hook(hook))

    registered: list[Any] = []
    return lambda x, v: step(x, v, child), assign


class STE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, container: list[Any]) -> Tensor:
        ctx.container = container
        ctx.value = container[0]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return charge(grads[0], ctx.container[0]), None


@place
def value_of_a_backward(first: Any) -> CoreAndAssign:
    container = [first]
    return lambda x, v: step(STE.apply(x, container), v, 1.0), lambda new: container.__setitem__(0, new)


@place
def attribute_saved_in_a_context(first: Any) -> CoreAndAssign:
    class Surrogate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = [first]

        def forward(self, x: Tensor) -> Any:
            return STE.apply(x, self.value)

    surrogate = Surrogate()
    return lambda x, v: step(surrogate(x), v, 1.0), lambda new: setattr(surrogate, "value", [new])


@place
def attribute_of_an_autograd_function(first: Any) -> CoreAndAssign:
    class Scale(torch.autograd.Function):
        value: ClassVar[Any] = [first]

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return charge(grads[0], Scale.value[0])

    return lambda x, v: step(Scale.apply(x), v, 1.0), lambda new: setattr(Scale, "value", [new])


@place
def backward_of_an_autograd_function(first: Any) -> CoreAndAssign:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return charge(grads[0], first)

    def assign(new: Any) -> None:
        Scale.backward = staticmethod(lambda ctx, *grads: charge(grads[0], new))  # type: ignore[method-assign]

    return lambda x, v: step(Scale.apply(x), v, 1.0), assign


@place
def body_of_a_custom_operator(first: Any) -> CoreAndAssign:
    return _make_core_with_operator(first)


_OPERATOR_VALUES: list[Any] = []


@torch.library.custom_op("flexsn_tests::changing", mutates_args=())
def _operator(x: Tensor) -> Tensor:
    result: Tensor = charge(x, _OPERATOR_VALUES[0]) * 1.0
    return result


def _make_core_with_operator(first: Any) -> CoreAndAssign:
    _OPERATOR_VALUES[:] = [first]
    return lambda x, v: step(_operator(x.detach()) + x, v, 1.0), lambda new: _OPERATOR_VALUES.__setitem__(0, new)


@place
def second_slot(first: Any) -> CoreAndAssign:
    class Config:
        __slots__ = ("other", "value")
        other: Any
        value: Any

    holder = Config()
    holder.other, holder.value = 1.0, first

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return step(x * holder.other, v, holder.value)

    return core, lambda new: setattr(holder, "value", new)
