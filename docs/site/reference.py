"""A reference page for each public module: its exports and its errors."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from types import ModuleType
from typing import get_origin

PACKAGES = ["flexsn_nn", "flexsn_hop", "flexsn_runtime", "flexsn_codegen", "flexsn_graph"]


def public_modules(name: str) -> list[str]:
    """Returns the name of a package, and the names of the modules that it exports."""
    package = importlib.import_module(name)
    return [name, *(f"{name}.{export}" for export in package.__all__ if inspect.ismodule(getattr(package, export)))]


# The first object on the page of a module.
FIRST = {"flexsn_nn": "FlexSN"}

MODULES = [module for package in PACKAGES for module in public_modules(package)]


def home(value: object, name: str, module: ModuleType) -> str:
    """Returns the module on whose page an export of `module` is described.

    If a submodule of `module` also exports the object, the page of that submodule describes it. The page of another
    package describes the errors of that package.
    """
    below = [importlib.import_module(other) for other in MODULES if other.startswith(f"{module.__name__}.")]
    homes = [other.__name__ for other in below if name in other.__all__ and getattr(other, name) is value]
    package = getattr(value, "__module__", module.__name__).partition(".")[0]
    if not homes and inspect.isclass(value) and package in PACKAGES and package != module.__name__.partition(".")[0]:
        homes = [package]
    return homes[0] if homes else module.__name__


def heading(text: str, line: str) -> list[str]:
    """Returns the lines of a heading, which is underlined with the character `line`."""
    return [text, line * len(text), ""]


def is_class(value: object) -> bool:
    """Returns True for a class of this project, but not for an alias of a built-in type such as `StepLayout = int`."""
    return inspect.isclass(value) and value.__module__ != "builtins"


def is_function(value: object) -> bool:
    """Returns True for objects that users call: functions and operators, but not annotations such as `Callable[...,
    Any]`.
    """
    return callable(value) and not inspect.isclass(value) and get_origin(value) is None


def described(place: str, name: str, value: object) -> list[str]:
    """Returns the directive that describes one export of the module `place`."""
    if isinstance(value, type) and is_class(value):
        kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
        options = ["   :show-inheritance:"] if value.__bases__ != (object,) else []
    elif inspect.isroutine(value):
        kind, options = "autofunction", []
    else:
        kind, options = "autodata", ["   :no-value:"]
    return [f".. {kind}:: {place}.{name}", *options, ""]


def errors_of(module: ModuleType) -> dict[str, type[BaseException]]:
    """Returns the exceptions in a package's `errors.py`. Errors of sibling packages are described on their own
    pages.
    """
    try:
        errors = importlib.import_module(f"{module.__name__}.errors")
    except ModuleNotFoundError:
        return {}
    return {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, BaseException) and value.__module__ == errors.__name__
    }


def neurons() -> list[str]:
    """Returns a table of the ready-made neurons, with their names and the first sentences of their docstrings."""
    module = importlib.import_module("flexsn_nn.neuron")
    ready = importlib.import_module("flexsn_nn").__all__  # without the base classes
    lines = [*heading("Ready-made neurons", "-"), ".. list-table::", "   :widths: 1 3", ""]
    for name in sorted(set(module.__all__) & set(ready), key=str.lower):
        value = getattr(module, name)
        if inspect.isclass(value):
            lines += [
                f"   * - :py:class:`{name} <{home(value, name, module)}.{name}>`",
                f"     - {(inspect.getdoc(value) or '').partition(chr(10))[0]}",
            ]
    return [*lines, ""]


def page(name: str) -> str:
    """Returns the reference page of one module, in reStructuredText."""
    module = importlib.import_module(name)
    exports = {
        export: getattr(module, export)
        for export in module.__all__
        if export != "__version__" and not inspect.ismodule(getattr(module, export))
    }
    errors = errors_of(module)
    homes = {export: home(value, export, module) for export, value in exports.items() if export not in errors}
    lines = [*heading(name, "="), f".. automodule:: {name}", "   :no-members:", ""]
    local_exports = {export: value for export, value in exports.items() if homes.get(export) == name}
    if first := FIRST.get(name):
        lines += described(name, first, local_exports.pop(first))
        lines += neurons()
    if moved := [export for export, where in homes.items() if where != name]:
        links = ", ".join(f":py:obj:`{export} <{homes[export]}.{export}>`" for export in moved)
        lines += [f"Also imported from here, and described on other pages: {links}.", ""]
    for title, chosen in {
        "Classes": {export: value for export, value in local_exports.items() if is_class(value)},
        "Functions": {export: value for export, value in local_exports.items() if is_function(value)},
        "Values and types": {
            e: value for e, value in local_exports.items() if not is_class(value) and not is_function(value)
        },
        "Errors": errors,
    }.items():
        if chosen:
            lines += heading(title, "-")
            for export, value in chosen.items():
                place = name if export in exports else f"{name}.errors"
                lines += described(place, export, value)
    return "\n".join(lines)


def write_reference(folder: Path) -> None:
    """Writes the pages into `folder`. Unchanged files keep their time, so that Sphinx does not read them again."""
    folder.mkdir(exist_ok=True)
    for name in MODULES:
        path, text = folder / f"{name}.rst", page(name)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
