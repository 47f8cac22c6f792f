"""Objects that replace the `forward` of layers and run kernels where possible, and reports about these layers."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

from torch import nn

_NEVER = "not called yet"


class ReplacedForward(ABC):
    """Object that replaces the attribute `forward` of a layer.

    Attributes:
        layer: the layer.
        last: outcome of the last call in eager mode, as text or numbers, and a flag that is True if a kernel ran.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.last: tuple[Any, bool] = (_NEVER, False)

    @property
    def was_called(self) -> bool:
        return bool(self.last[0] != _NEVER)

    @abstractmethod
    def account(self) -> tuple[str, bool]:
        """Returns a description of the last call, and True if a kernel ran."""


class _Replaced(NamedTuple):
    layer: str
    ran: bool
    words: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.words}"


class ReplacementReport:
    """Report about layers, some of which have a `ReplacedForward`.

    Args:
        net: the network.
        left: reasons why the forwards of some layers were not replaced, by name of the layer.
    """

    _forward: ClassVar[type[ReplacedForward]]
    _did: ClassVar[str]
    _others: ClassVar[str]

    def __init__(self, net: nn.Module, left: dict[str, str]) -> None:
        self._net, self._left = weakref.ref(net), left

    def __str__(self) -> str:
        accounts = list(self._describe_layers())
        ran = [account for account in accounts if account.ran]
        without_kernels = [account for account in accounts if not account.ran]
        lines = [f"{len(ran)} of {len(accounts)} layers {self._did}", *(f"  {account}" for account in ran)]
        if without_kernels:
            lines += [f"{self._others}:", *(f"  {account}" for account in without_kernels)]
        return "\n".join(lines)

    def _describe_layers(self) -> Iterator[_Replaced]:
        net = self._net()
        for name, module in () if net is None else net.named_modules():
            forward = vars(module).get("forward")
            if isinstance(forward, self._forward):
                words, ran = forward.account()
                yield _Replaced(name, ran, words)
            elif name in self._left:
                yield _Replaced(name, False, self._left[name])

    def _undo(self, restore: Callable[[nn.Module], None]) -> None:
        net = self._net()
        if net is not None:
            restore(net)
