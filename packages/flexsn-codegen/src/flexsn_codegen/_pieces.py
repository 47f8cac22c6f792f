"""Calls of functions that cut their arguments into pieces, and so are no kernel on whole tensors."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen._autograd import WithGradients
from flexsn_codegen._calls import Parts, Structure, put_together
from flexsn_codegen._checks import check_gradients, wants_gradients
from flexsn_codegen._cut import CutFunction, Function
from flexsn_codegen._host_numbers import Notes, noting
from flexsn_codegen._kernels import Kernels
from flexsn_codegen.errors import ArgumentError
from flexsn_graph import MutationError, NothingCutError, TorchError

# Functions that cut are kept for as many kinds of calls.
_MAX_CUTS = 256


class Pieces:
    """A function in those kinds of calls in which it cuts."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._known: dict[tuple[Any, ...], CutFunction] = {}

    def known(self, structure: Structure, parts: Parts) -> CutFunction | None:
        """The function for a call, if it is known to cut there."""
        return self._known.get(_kind(structure, parts)) if self._known else None

    def made(self, structure: Structure, parts: Parts, error: Exception) -> CutFunction:
        """The function as one that cuts its arguments.

        Args:
            error: why it is no kernel on whole tensors.

        Raises:
            The reason why it is a kernel of neither kind.
        """
        tensors = parts.tensors
        cut = cut_function(self._kernels, structure)
        grad = torch.is_grad_enabled()
        try:
            # What torch refuses for the tracer's shapes may be fine for the arguments' own.
            wanted = tuple(grad and t.requires_grad for t in tensors)
            cut.trace(tensors, parts.numbers, wanted, must_cut=not isinstance(error, TorchError))
        except NothingCutError:
            raise error from None
        except (TorchError, MutationError) as second:
            if isinstance(error, ArgumentError) or isinstance(second, MutationError):
                raise error from second
            raise second from None  # it speaks of the arguments' own shapes
        if len(self._known) >= _MAX_CUTS:
            self._known.clear()
        self._known[_kind(structure, parts)] = cut
        return cut

    def run(self, cut: CutFunction, parts: Parts) -> Any:
        """Calls it.

        Raises:
            NothingCutError: with these numbers, it cuts nothing.
        """
        tensors, numbers = parts.tensors, parts.numbers
        if wants_gradients(tensors):
            check_gradients(self._kernels.name, writes=False, autograd=self._kernels.autograd)
            results = WithGradients.apply(cut, numbers, *tensors)
        else:
            results = cut.run(tensors, numbers, (False,) * len(tensors))[0]
        return results[0] if cut.single else tuple(results)


def cut_function(kernels: Kernels, structure: Structure, otherwise: Exception | None = None) -> CutFunction:
    """A function, called in such a structure, as one that cuts.

    Args:
        otherwise: raised where it cuts nothing.
    """
    fn = kernels.fn

    def bind(notes: Notes) -> Function:
        def function(*values: Tensor) -> Any:
            args, kwargs = put_together(structure, values, notes.arguments())
            with noting() if notes.numbers else ExitStack():
                return fn(*args, **kwargs)

        # What is called as it is keeps its own name and lines.
        plain_call = not notes.numbers and structure == ("call", (("tensor",),) * len(structure[1]), ())
        return fn if plain_call else function

    cut = CutFunction(bind, kernels.name, kernels.numerics, otherwise=otherwise)
    cut.must_cut = not isinstance(otherwise, TorchError)
    return cut


def _kind(structure: Structure, parts: Parts) -> tuple[Any, ...]:
    """What decides whether a function is a kernel on pieces."""
    return (structure, *[(t.dtype, t.dim(), t.device.type) for t in parts.tensors])
