"""Mistakes made with neurons, surrogates and helpers; each is also a built-in kind."""

from __future__ import annotations


class ParameterError(ValueError):
    """A parameter out of its range, or two that do not go together."""


class InputDtypeError(TypeError):
    """A neuron was given integers or booleans."""


class MissingExtraError(ImportError):
    """An optional dependency is not installed."""


class NirError(ValueError):
    """A network that NIR cannot express, or a graph that cannot be read without changing its meaning."""
