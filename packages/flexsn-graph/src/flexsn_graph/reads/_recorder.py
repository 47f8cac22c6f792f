"""Records the values that a core reads while it runs. Each value that the core can read has a place.

An attribute is recorded when the core reads it. Reads of global variables, closure variables, elements of containers
and special methods cannot be observed. The recorder records such values when the function that names them runs, or when
the core reads the object that contains them.
"""

from __future__ import annotations

import builtins
import gc
import importlib.util
import os
import random
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property, lru_cache, partial, partialmethod, singledispatchmethod
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from flexsn_graph._location import SourceLocation, user_location
from flexsn_graph._torch_private_modules import DEFAULTS, MODULE_CALL, REGISTRIES, hooks_of_all_modules
from flexsn_graph.errors import CaptureError, StatefulCoreError
from flexsn_graph.reads._code import names_of, nested
from flexsn_graph.reads._library import is_internal, is_library, is_library_class, is_library_function
from flexsn_graph.reads._outside import depends_on_more, find_repeatable, is_random, origin
from flexsn_graph.reads._places import (
    ANY_NAME,
    Attribute,
    Cached,
    Cell,
    ClassEntry,
    ClassKeys,
    Content,
    DictEntry,
    Equal,
    Place,
    Result,
    TensorAttributes,
    base_of,
)
from flexsn_graph.reads._stores import Cache
from flexsn_graph.reads._surroundings import Origin, Surroundings
from flexsn_graph.reads._values import MISSING, SCALARS, is_atom, is_numpy, is_python_class
from flexsn_graph.reads._watch import AttributeWatch, calls_watched, resume, suspend

# The largest numbers of elements and bytes that a core may read, because every call compares all of them.
MAX_ELEMENTS = 10_000
MAX_BYTES = 65_536

# Entries that Python adds to a class, and entries that no running function reads.
_NOT_DATA = """
    __module__ __dict__ __weakref__ __doc__ __qualname__ __annotations__ __firstlineno__ __static_attributes__
    __dataclass_fields__ __dataclass_params__ __match_args__ __slots__ __parameters__ __orig_bases__ _abc_impl
    __abstractmethods__ __annotations_cache__ __annotate_func__ __getattribute__ __hash__
"""
_NOT_DATA_NAMES = frozenset(_NOT_DATA.split())
# Names by which a function reads the properties of another function.
_FUNCTION_PROPERTIES = frozenset(
    ["__closure__", "__code__", "__defaults__", "__kwdefaults__", "getclosurevars", "getfullargspec", "signature"]
)
# Names by which a function may distinguish two equal objects.
_IDENTITY_NAMES = frozenset(["__hash__", "__repr__", "__str__", "data_ptr", "format", "hash", "id", "repr", "str"])
_STARTERS = frozenset(
    {threading.Thread.start.__code__, ThreadPoolExecutor.submit.__code__, ProcessPoolExecutor.submit.__code__}
)
_CTYPES_CLASSES = frozenset(f"_ctypes.{name}" for name in ("_SimpleCData", "Array", "Structure", "Union", "_Pointer"))
_SAVED_HOOKS = saved_tensors_hooks.__enter__.__code__
_SEEDING = random.Random.__init__.__code__
_CACHED = type(lru_cache(lambda: None))
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))


class Recorder:
    """Records the places that a core reads.

    Attributes:
        places: the places that were read, by key, in order.
        once: for each library value that was read and cannot be compared, its name and the location of the read.
        surroundings: objects that the core can write to.
        overwritten: names of places that the core itself sets to tensors.
        in_backward: True while a backward formula runs.
        reads_identities: True if the core contains the name of a function that may distinguish two equal objects.
    """

    def __init__(self) -> None:
        self.surroundings = Surroundings()
        self.places: dict[Hashable, Place] = {}
        self.once: dict[str, SourceLocation | None] = {}
        self.overwritten: dict[str, None] = {}
        self.in_backward = False
        self.reads_identities = False
        self._classes: dict[type, set[str]] = {}  # by class of a recorded object: the names that were read from it
        self._reads_everything = False
        self._reset()

    def _reset(self) -> None:
        """Resets everything that belongs to a single recording."""
        self._watch = AttributeWatch(self._record_read)
        self._paths: dict[int, str] = {}  # by id of an object whose attributes are watched
        # The key consists of a flag, which is True for backward formulas, and the object's id. The objects are kept
        # alive, so that no other object gets the same id in the meantime.
        self._recorded: dict[tuple[bool, int], Any] = {}
        self._elements = [0, 0]
        self._bytes = [0, 0]
        self._entered: set[type] = set()
        self._functions: dict[CodeType, list[tuple[FunctionType, str]]] = {}
        self._methods: dict[int, list[tuple[type, str]]] = {}  # by id of a function: pairs of a class and a name
        self._nested_code: set[CodeType] = set()
        self._executed: dict[CodeType, bool] = {}  # by code that has run: True if it ran in a backward formula
        self._user_code: set[CodeType] = set()
        # The pairs `_called` and `_attributes` each consist of a set for the step and a set for backward formulas.
        # `_called` contains the code of functions that user code called, and `_attributes` the names after a dot.
        self._called: tuple[set[CodeType], set[CodeType]] = (set(), set())
        self._seeded: dict[int, random.Random] = {}  # by id: generators that the core created from a seed, kept alive
        self._attributes: tuple[set[str], set[str]] = (set(), set())
        self._modules: dict[str, ModuleType] = {}  # library modules, by path
        self._recorded_libraries: dict[tuple[bool, int], Any] = {}

    @contextmanager
    def run(self, origin: Origin) -> Iterator[None]:
        """Context of one run of the core or of its backward formulas. After the run, no object contains traced tensors.

        Raises:
            StatefulCoreError: the core stores a tensor outside of itself.
        """
        with self._unobserved():
            self.surroundings.begin_run()
        refusal: StatefulCoreError | None = None
        try:
            yield
        finally:
            with self._unobserved():
                self.overwritten |= {
                    place.name: None for place in self.places.values() if _has_traced(place.read(), origin.is_traced)
                }
                refusal = self.surroundings.end_run(origin)
        if refusal is not None:
            raise refusal

    @contextmanager
    def _unobserved(self) -> Iterator[None]:
        profile = suspend()
        try:
            with self._watch.paused():
                yield
        finally:
            resume(profile)

    @contextmanager
    def recording(self, core: Any) -> Iterator[None]:
        """Records the reads of all functions that run in this context and in this thread."""
        self._reset()
        try:
            with self._watch.paused():
                for name, default in DEFAULTS.items():
                    self._add_place(Result(name, name, default))
                self._record_core(core)
            # Garbage collection during a core calls finalizers, which are not part of the core.
            with _no_collection(), calls_watched(self._handle_call, self._handle_builtin, self._user_code):
                yield
            with self._watch.paused():
                self._record_libraries()
        finally:
            self._watch.close()
            self._reset()

    # -- values ------------------------------------------------------------------------------------------

    def _record_core(self, core: Any) -> None:
        """Records the core itself, without the wrappers of this project. In messages, the core is `self`."""
        if isinstance(core, partial) and isinstance(core.func, FunctionType) and is_library_function(core.func):
            for argument in core.args:
                self._record_core(argument)
        elif isinstance(core, MethodType):
            self._record_value(core.__func__, core.__func__.__name__)
            self._record_value(core.__self__, "self")
        else:
            self._record_value(core, core.__name__ if isinstance(core, FunctionType) else "self")

    def _record_value(self, value: Any, path: str) -> None:
        """Records a value that the core can use, except for its attributes, which are recorded when they are read."""
        if is_atom(value) or (self.in_backward, id(value)) in self._recorded:
            return
        self._recorded[self.in_backward, id(value)] = value
        self.surroundings.register(value, path)
        if isinstance(value, Tensor):
            self._record_content(value.__dict__, path, place=TensorAttributes(f"the content of {path}", value.__dict__))
        elif isinstance(value, FunctionType):
            self._record_function(value, path)
        elif isinstance(value, type):
            self._record_class(value, path)
        elif isinstance(value, ModuleType):
            self._record_module(value, path)
        elif not self._record_wrapper(value, path):
            self._record_object(value, path)

    def _record_function(self, function: FunctionType, path: str) -> None:
        """Registers a function. Its reads are recorded when it runs."""
        self._register(function, path)
        if function.__dict__ and not is_library_function(function):
            self._record_content(function.__dict__, path, ".")

    def _register(self, function: FunctionType, path: str) -> None:
        registered = self._functions.setdefault(function.__code__, [])
        if all(function is not other for other, _ in registered):
            registered.append((function, path))

    def _record_class(self, cls: type, path: str) -> None:
        for kind in cls.__mro__:
            if is_library_class(kind) or not is_python_class(kind):
                continue
            self._enter_class(kind)
            self._classes[kind].add(ANY_NAME)
            self._add_place(Attribute(f"the bases of {path}", kind, "__mro__"))
            for name, entry in list(kind.__dict__.items()):
                if name in _NOT_DATA_NAMES or isinstance(entry, GetSetDescriptorType | MemberDescriptorType):
                    continue
                if isinstance(entry, FunctionType | staticmethod | classmethod | property):
                    continue  # `_enter_class` registers the function, which gets a place when it runs
                self._record_place(ClassEntry(f"{path}.{name}", kind, name))

    def _record_module(self, module: ModuleType, path: str) -> None:
        if is_library(module.__name__):
            self._modules[path] = module
        else:
            self._observe(module, path)

    def _record_wrapper(self, value: Any, path: str) -> bool:
        """Records the value inside a wrapper. Returns True if `value` is a wrapper."""
        if isinstance(value, MethodType):
            self._record_value(value.__func__, path)
            self._record_value(value.__self__, path.rpartition(".")[0] or path)
        elif isinstance(value, partial):
            for name in ("func", "args", "keywords"):
                self._record_place(Attribute(path, value, name))
            self._record_content(value.__dict__, path)
        elif isinstance(value, staticmethod | classmethod):
            self._record_value(value.__func__, path)
        elif type(value) is property:
            for function in (value.fget, value.fset, value.fdel):
                self._record_value(function, path)
        elif isinstance(value, cached_property):
            self._record_value(value.func, path)
        elif isinstance(value, partialmethod):
            for part in (value.func, value.args, value.keywords):
                self._record_value(part, path)
        elif isinstance(value, singledispatchmethod):
            self._record_value(value.dispatcher, path)
        elif type(value) is _CACHED:
            for cache in gc.get_referents(value):
                if type(cache) is dict and cache is not value.__dict__:
                    self._count_elements(len(cache), f"the cache of {path}")
                    self._add_place(Cached(f"the cache of {path}", cache))
                    self.surroundings.add(("cache", id(cache)), Cache(f"the cache of {path}", cache), cache)
            self._record_value(value.__wrapped__, path)
        elif isinstance(value, _VIEWS):
            self._record_value(value.mapping, path)  # type: ignore[attr-defined]
        elif isinstance(value, BuiltinFunctionType | MethodWrapperType):
            if not isinstance(value.__self__, ModuleType | type):
                self._record_value(value.__self__, path)
        elif isinstance(value, weakref.ref):
            self._record_place(Result(path, "target", value))
        elif isinstance(value, CellType):
            self._record_place(Cell(path, value))
        elif isinstance(value, ContextVar):
            self._record_place(Result(path, "context", value.get, MISSING))
        else:
            return False
        return True

    def _record_object(self, value: Any, path: str) -> None:
        cls = type(value)
        self._refuse(value, path)
        if isinstance(value, tuple | frozenset):
            self._count_elements(len(value), path)
            base: Any = tuple if isinstance(value, tuple) else frozenset
            for i, element in enumerate(base.__iter__(value)):
                self._record_value(element, f"{path}[{i}]")
        elif base_of(value) is not None:
            self._record_content(value, path)
        elif is_numpy(value, "ndarray"):
            self._record_array(value, path)
        elif type(value).__name__ in ("bytearray", "array", "memoryview"):
            self._record_bytes(Equal(path, "bytes", _read_bytes, value), len(bytes(value)), path)
        elif isinstance(value, SimpleNamespace):
            self._record_content(value.__dict__, path, ".")
        elif value is os.environ:
            self._record_content(vars(value)["_data"], path)
        if is_python_class(cls) and not is_internal(cls):
            self._observe(value, path)
            self._enter_object_classes(cls)

    def _observe(self, value: Any, path: str) -> None:
        self._paths[id(value)] = path
        self._watch.watch(value)

    def _enter_object_classes(self, cls: type) -> None:
        for kind in cls.__mro__:
            if is_python_class(kind):
                self._enter_class(kind)

    def _enter_class(self, cls: type) -> None:
        """Registers the functions of a class.

        Some functions, such as `__call__`, may run without a recorded read of an attribute.
        """
        names = self._classes.setdefault(cls, set())
        if not is_library_class(cls):
            self._add_place(ClassKeys(cls, names))
        if cls in self._entered:
            return
        self._entered.add(cls)
        self.surroundings.register(cls, cls.__qualname__)
        for name, entry in list(cls.__dict__.items()):
            for function in () if name == "__getattribute__" else _list_functions(entry):
                self._methods.setdefault(id(function), []).append((cls, name))
                self._register(function, f"{cls.__qualname__}.{name}")
        if not is_library_class(type(cls)):
            self._record_class(type(cls), type(cls).__qualname__)

    def _record_content(self, container: Any, path: str, separator: str = "[", place: Content | None = None) -> None:
        """Records all elements of a mutable container."""
        place = place or Content(f"the content of {path}", container)
        if place.key in self.places:
            self._mark(self.places[place.key])
            place = self.places[place.key]  # type: ignore[assignment]
        else:
            self._add_place(place)
        self.surroundings.register_content(container, path)
        elements = place.get()
        self._count_elements(len(elements), path)
        for key, element in _pair_with_keys(container, elements):
            name = f"{path}.{key}" if separator == "." else f"{path}[{key!r}]"
            if isinstance(element, Tensor) and not isinstance(container, set):
                if isinstance(container, dict | MappingProxyType):
                    self._add_place(DictEntry(name, container, key))
                else:
                    self._add_place(Result(name, f"item {key}", _read_item, container, key))
            self._record_value(element, name)

    def _record_array(self, array: Any, path: str) -> None:
        if array.dtype.hasobject:
            self._record_bytes(Equal(path, "bytes", _read_objects, array), array.size * 8, path)
        else:
            self._record_bytes(Equal(path, "bytes", _read_array, array), array.nbytes, path)

    def _record_bytes(self, place: Place, count: int, path: str) -> None:
        self._bytes[self.in_backward] += count
        if self._bytes[self.in_backward] > MAX_BYTES:
            raise _capture_error(
                f"{path} has {count} bytes, and the core reads more than {MAX_BYTES} bytes in total, too many to "
                "compare at every call. Outside of the core, make it a tensor, or read only the necessary part of it."
            )
        self._add_place(place)

    def _count_elements(self, count: int, path: str) -> None:
        self._elements[self.in_backward] += count
        if self._elements[self.in_backward] > MAX_ELEMENTS:
            raise _capture_error(
                f"{path} has {count} elements, and the core reads more than {MAX_ELEMENTS} elements in total, too "
                "many to compare at every call. Outside of the core, make it a tensor, or read only the necessary part "
                "of it."
            )

    def _refuse(self, value: Any, path: str) -> None:
        """Refuses objects whose content can change undetected."""
        cls = type(value)
        bases = {f"{kind.__module__}.{kind.__qualname__}" for kind in cls.__mro__}
        description = None
        if "torch._C.Generator" in bases or is_random(None, value):
            description = "a random generator"
        elif bases & _CTYPES_CLASSES:
            description = "memory of ctypes"
        elif "_thread._local" in bases:
            description = "a threading.local"
        elif isinstance(value, weakref.ProxyTypes):
            description = "a weak proxy"
        elif hasattr(cls, "__next__") and not is_python_class(cls) and cls.__module__ in ("builtins", "itertools"):
            description = "an iterator"
        elif not is_python_class(cls) and not is_library_class(cls) and cls.__module__ != "builtins":
            description = "an object of a C extension"
        if description is not None:
            raise _capture_error(
                f"the core reads {path}, {description} ({cls.__module__}.{cls.__qualname__}): its values can change "
                "from call to call, and no check can detect this. Read it outside of the core, and pass a number or a "
                "tensor to the core."
            )

    # -- places ------------------------------------------------------------------------------------------

    def _add_place(self, place: Place) -> Place:
        place = self.places.setdefault(place.key, place)
        self._mark(place)
        return place

    def _mark(self, place: Place) -> None:
        if self.in_backward:
            place.in_backward = True
        else:
            place.in_forward = True

    def _record_place(self, place: Place) -> None:
        """Records a place and its value."""
        place = self._add_place(place)
        value = place.read()
        if value is not MISSING:
            self._record_value(value, place.name)

    # -- attributes --------------------------------------------------------------------------------------

    def _record_read(self, owner: Any, name: str) -> None:
        """Records the read of an attribute of a watched object, before the read takes place."""
        path = self._paths[id(owner)]
        if isinstance(owner, ModuleType):
            self._record_module_read(owner, name, path)
            return
        cls = type(owner)
        self._add_place(Result(f"the class of {path}", "class", type, owner))
        if is_python_class(cls) and not is_library_class(cls):
            self._add_place(Attribute(f"the bases of {cls.__qualname__}", cls, "__mro__"))
        attributes, is_usual = _get_dict(owner), self._watch.own_getattribute(cls) is None
        if attributes is not None and is_usual:
            self._add_place(Attribute(f"the attributes of {path}", owner, "__dict__"))
        elif attributes is not None:
            self._add_place(Result(f"the attributes of {path}", "dict", object.__getattribute__, owner, "__dict__"))
        if name == "__dict__" or not is_usual or self._reads_everything:
            self._record_all_attributes(owner, attributes, path)
        if name in ("__reduce_ex__", "__reduce__", "__getstate__"):  # the core copies the object
            self._record_all_attributes(owner, attributes, path)
        for kind in cls.__mro__:
            if kind in self._classes:
                self._classes[kind].add(name)
        entry, definer = _look_up(cls, name)
        full = f"{path}.{name}"
        for kind in cls.__mro__ if definer is not None and is_python_class(definer) else ():
            self._add_place(ClassEntry(full, kind, name))  # a class that lacks the name may get it later
            if kind is definer:
                break
        if entry is not MISSING and _is_data_descriptor(entry):
            if isinstance(entry, MemberDescriptorType):
                self.surroundings.note_read(("slots", id(owner)), name)
                self._record_place(Result(full, f"slot {name}", entry.__get__, owner))
            elif not isinstance(entry, GetSetDescriptorType):
                self._record_value(entry, full)
            return
        if attributes is not None:
            self.surroundings.note_read(("attributes", id(attributes)), name)
            self._record_place(DictEntry(full, attributes, name))
            if name in attributes:
                return
        if entry is not MISSING:
            self._record_value(entry, full)
        elif attributes is not None and isinstance(owner, nn.Module):
            self._record_registry_read(attributes, name, path)

    def _record_registry_read(self, attributes: dict[str, Any], name: str, path: str) -> None:
        """Records a parameter, a buffer or a child of a module. `nn.Module.__getattr__` finds it in a registry."""
        for registry in REGISTRIES:
            entries = attributes.get(registry)
            if entries is None:
                continue
            self._add_place(DictEntry(f"{path}.{registry}", attributes, registry))
            self.surroundings.note_read(("attributes", id(entries)), name)
            self._record_place(DictEntry(f"{path}.{name}", entries, name))
            if name in entries:
                return

    def _record_module_read(self, module: ModuleType, name: str, path: str) -> None:
        variables = module.__dict__
        if name == "__dict__":
            self._record_content(variables, path, ".")
            return
        self._record_place(DictEntry(f"{path}.{name}", variables, name))
        if name not in variables:
            self._record_place(DictEntry(f"{path}.__getattr__", variables, "__getattr__"))

    def _record_all_attributes(self, owner: Any, attributes: dict[str, Any] | None, path: str) -> None:
        if attributes is not None:
            self._record_content(attributes, path, ".")
        for kind in type(owner).__mro__:
            for name, entry in kind.__dict__.items():
                if isinstance(entry, MemberDescriptorType) and is_python_class(kind):
                    self._record_place(Result(f"{path}.{name}", f"slot {name}", entry.__get__, owner))

    # -- functions ---------------------------------------------------------------------------------------

    def _handle_call(self, frame: FrameType) -> None:
        code, caller = frame.f_code, frame.f_back
        if self._executed.get(code) not in (True, self.in_backward):
            with self._watch.paused():
                self._enter_frame(frame)
        called = self._called[self.in_backward]
        if (
            caller is not None
            and caller.f_code in self._user_code
            and code not in called
            and not self._is_seeded(frame)
        ):
            called.add(code)
            module = frame.f_globals.get("__name__")
            if isinstance(module, str) and is_library(module):
                with self._watch.paused():
                    self._record_call(code, module, code.co_name, caller)
        if code in _STARTERS:
            self._refuse_start(frame)
        if code is _SAVED_HOOKS:
            kind = type(frame.f_locals["self"])
            if kind is saved_tensors_hooks or not is_library_class(kind):
                raise _capture_error(_HOOKS, self._find_user_frame(frame))

    def _handle_builtin(self, frame: FrameType, function: Any) -> None:
        """Records the call of a builtin function by a user's function."""
        if not isinstance(function, BuiltinFunctionType):
            return
        module, name = origin(function)
        if isinstance(function.__self__, random.Random):
            if id(function.__self__) in self._seeded:
                return
            module = "random"
        if module is not None:
            with self._watch.paused():
                self._record_call(function, module, name, frame)

    def _is_seeded(self, frame: FrameType) -> bool:
        """True if a function belongs to a generator that the core created from a seed.

        Such a generator draws equal numbers in each call of the core.
        """
        generator = frame.f_locals.get("self")
        if not isinstance(generator, random.Random):
            return False
        if frame.f_code is _SEEDING and frame.f_locals["x"] is not None:
            self._seeded[id(generator)] = generator
        return id(generator) in self._seeded

    def _record_call(self, function: Any, module: str, name: str, caller: FrameType) -> None:
        """Records the call of a library function. `function` is the function itself or its code."""
        repeatable = find_repeatable(function)
        if repeatable is not None:
            self._add_place(Equal(f"{module}.{name}()", name, repeatable))
        elif function is os.getenv.__code__:
            self._record_value(os.environ, "os.environ")
        elif is_random(module):
            raise _capture_error(
                f"the core calls {module}.{name}() of a random generator, whose numbers change from call to call. "
                "Draw the numbers outside of the core, and pass them as an input.",
                caller,
            )
        elif depends_on_more(module, name):
            self.once.setdefault(f"{module}.{name}()", SourceLocation.of(caller))

    def _find_user_frame(self, frame: FrameType) -> FrameType | None:
        """The user's frame that called a library function, directly or indirectly.

        `None` if torch or Triton called the function, or if no frame of the user did.
        """
        caller = frame.f_back
        while caller is not None and caller.f_code not in self._user_code:
            if caller.f_globals.get("__name__", "").partition(".")[0] in ("torch", "triton"):
                return None
            caller = caller.f_back
        return caller

    def _refuse_start(self, frame: FrameType) -> None:
        caller = self._find_user_frame(frame)
        if caller is not None:
            raise _capture_error(
                "the core runs code in another thread or process, where its reads cannot be recorded. Run it in the "
                "thread of the core, or outside of the core.",
                caller,
            )

    def _enter_frame(self, frame: FrameType) -> None:
        """Records that a function starts to run."""
        code = frame.f_code
        self._executed[code] = self.in_backward
        module = frame.f_globals.get("__name__")
        if module == _WATCH or (module is None and _is_called_by_fx(frame)):
            return
        is_in_library = is_library(module)
        registered = self._functions.get(code)
        if registered is None and not is_in_library and code not in self._nested_code and code.co_name != "<module>":
            # The core reached the function on a path that was not recorded, such as through a library's object.
            for function in gc.get_referrers(code):
                if isinstance(function, FunctionType) and function.__code__ is code:
                    self._record_value(function, function.__qualname__)
        for function, path in self._functions.get(code, ()):
            self._enter_function(function, path)
        if is_in_library:
            if code is MODULE_CALL:
                self._enter_module_hooks()
            return
        self._nested_code.update(nested(code))
        self._user_code.add(code)
        self._enter_code(code, frame.f_globals)

    def _enter_function(self, function: FunctionType, path: str) -> None:
        for cls, name in self._methods.get(id(function), ()):
            self._add_place(ClassEntry(f"{cls.__qualname__}.{name}", cls, name))
        if not is_library_function(function):
            self._add_place(Attribute(f"the code of {path}", function, "__code__"))
            # If the function has no defaults, all arguments were passed.
            for part in ("__defaults__", "__kwdefaults__"):
                if getattr(function, part) is not None:
                    self._add_place(Attribute(f"the defaults of {path}", function, part))
        for default in function.__defaults__ or ():
            self._record_value(default, f"a default of {path}")
        if function.__kwdefaults__:
            self._record_content(function.__kwdefaults__, f"the defaults of {path}")
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                self.surroundings.register(cell, f"closure variable {name}")
                self._record_place(Cell(f"closure variable {name}", cell))

    def _enter_code(self, code: CodeType, variables: dict[str, Any]) -> None:
        self.surroundings.register_code(code, variables)
        names = names_of(code)
        self.reads_identities |= not _IDENTITY_NAMES.isdisjoint((*names.variables, *names.attributes))
        for name in names.variables:
            self._record_variable(name, variables)
        for level, name in names.imports:
            self._record_import(level, name, variables)
        if names.attributes & {"__getattribute__", "getattr_static"}:
            self._reads_everything = True
        if "super" in names.variables:
            for cls in list(self._classes):
                for name in names.attributes & cls.__dict__.keys():
                    self._record_place(ClassEntry(f"{cls.__qualname__}.{name}", cls, name))
        self._attributes[self.in_backward].update(names.attributes)
        if names.attributes & _FUNCTION_PROPERTIES:
            self._record_functions()
        if "__globals__" in names.attributes:
            location = SourceLocation(code.co_filename, code.co_firstlineno, code.co_name)
            self.once.setdefault("__globals__ of a function", location)
        if {"globals", "eval", "exec"} & set(names.variables):
            self._record_content(variables, variables.get("__name__", "globals()"), ".")
        if {"modules", "import_module", "__import__"} & {*names.attributes, *names.variables}:
            for module in list(sys.modules.values()):
                if type(module) is ModuleType and not is_library(module.__name__):
                    self._record_value(module, module.__name__)

    def _record_functions(self) -> None:
        """Records the reads of the user's functions without running them."""
        for function, path in [entry for entries in self._functions.values() for entry in entries]:
            if not is_library_function(function):
                self._enter_function(function, path)

    def _record_libraries(self) -> None:
        modules = list(self._modules.items())
        for self.in_backward in (True, False):
            for path, module in modules:
                self._record_library(module, path)

    def _record_library(self, module: ModuleType, path: str) -> None:
        """Records the settings of a library module: values that are not functions, under names that the core uses."""
        if (self.in_backward, id(module)) in self._recorded_libraries:
            return
        self._recorded_libraries[self.in_backward, id(module)] = module
        for name in sorted(self._attributes[self.in_backward] & module.__dict__.keys()):
            value, full = module.__dict__[name], f"{path}.{name}"
            if isinstance(value, ModuleType) and is_library(value.__name__):
                self._record_library(value, full)
            elif name[:2] == "__" or value is sys.modules:
                continue
            elif type(value) in (*SCALARS, list, dict, set, deque) or value is os.environ:
                self._record_place(DictEntry(full, module.__dict__, name))
            elif type(value).__module__.startswith("torch.backends"):
                self._record_settings(value, full)
        if type(module) is not ModuleType:
            self._record_settings(module, path)

    def _record_settings(self, owner: Any, path: str) -> None:
        """Records settings of torch that are stored in C++."""
        for name in sorted(self._attributes[self.in_backward]):
            if name[:1] != "_" and name not in getattr(owner, "__dict__", ()):
                place = Equal(f"{path}.{name}", name, getattr, owner, name)
                if isinstance(place.read(), SCALARS):
                    self._add_place(place)

    def _record_variable(self, name: str, variables: dict[str, Any]) -> None:
        self._record_place(DictEntry(name, variables, name))
        builtin_variables = builtins.__dict__
        if name not in variables and not isinstance(builtin_variables.get(name), BuiltinFunctionType | type):
            self._record_place(DictEntry(name, builtin_variables, name))

    def _record_import(self, level: int, name: str, variables: dict[str, Any]) -> None:
        if level:
            try:
                name = importlib.util.resolve_name("." * level + name, variables.get("__package__"))
            except ImportError:
                return
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            full = ".".join(parts[:end])
            if not is_library(full):
                self._record_place(DictEntry(full, sys.modules, full))

    def _enter_module_hooks(self) -> None:
        """Records the hooks of all modules. `nn.Module.__call__` reads them."""
        for name, hooks in hooks_of_all_modules().items():
            self._record_content(hooks, name)


_WATCH = AttributeWatch.__module__
_HOOKS = (
    "the core sets torch.autograd.graph.saved_tensors_hooks: kernels recompute the values that the loop would save, "
    "and never call the hooks. Leave the hooks out of the core."
)


@contextmanager
def _no_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _capture_error(message: str, caller: FrameType | None = None) -> CaptureError:
    return CaptureError(message, "read", user_location() if caller is None else SourceLocation.of(caller))


def _is_called_by_fx(frame: FrameType) -> bool:
    """True for a function that torch.fx generates to call the function that it traces."""
    caller = frame.f_back
    return caller is not None and caller.f_globals.get("__name__", "").startswith("torch.fx.")


def _has_traced(value: Any, is_traced: Callable[[Tensor], bool]) -> bool:
    values = value if type(value) is list else (value,)
    return any(isinstance(element, Tensor) and is_traced(element) for element in values)


def _get_dict(owner: Any) -> dict[str, Any] | None:
    try:
        result = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None
    return result if isinstance(result, dict) else None


def _look_up(cls: type, name: str) -> tuple[Any, type | None]:
    for kind in cls.__mro__:
        if name in kind.__dict__:
            return kind.__dict__[name], kind
    return MISSING, None


def _is_data_descriptor(value: Any) -> bool:
    kind = type(value)
    return hasattr(kind, "__get__") and (hasattr(kind, "__set__") or hasattr(kind, "__delete__"))


def _list_functions(entry: Any) -> list[FunctionType]:
    """The functions within an entry of a class."""
    if isinstance(entry, staticmethod | classmethod):
        return _list_functions(entry.__func__)
    if isinstance(entry, property):
        return [f for part in (entry.fget, entry.fset, entry.fdel) for f in _list_functions(part)]
    if isinstance(entry, cached_property | partialmethod):
        return _list_functions(entry.func)
    return [entry] if isinstance(entry, FunctionType) else []


def _pair_with_keys(container: Any, elements: list[Any]) -> Iterator[tuple[Any, Any]]:
    if not isinstance(container, dict | MappingProxyType):
        yield from enumerate(elements)
        return
    half = len(elements) // 2
    yield from zip(elements[:half], elements[half:], strict=True)


def _read_item(container: Any, index: int) -> Any:
    return (deque if isinstance(container, deque) else list).__getitem__(container, index)


def _read_bytes(value: Any) -> tuple[str, bytes]:
    return getattr(value, "typecode", ""), bytes(value)


def _read_array(array: Any) -> tuple[Any, ...]:
    return array.dtype, array.shape, array.tobytes()


def _read_objects(array: Any) -> tuple[Any, ...]:
    return array.shape, tuple((type(element).__name__, repr(element)) for element in array.flat)
