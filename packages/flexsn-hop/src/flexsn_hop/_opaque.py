"""The loop as an ordinary custom operator, which carries the step's graph as text.

A compiler that knows nothing of the scan can call it: Inductor does, where no kernel is registered.
"""

from __future__ import annotations

import base64
import functools
import json
import types
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ._layout import BackwardLayout, ScanLayout
from ._loop import (
    backward_loop,
    backward_samples,
    backward_shapes,
    forward_loop,
    forward_shapes,
)
from .errors import LoweringError

__all__ = ["encode_program", "run_scan"]

_MOST_CONSTANT_ELEMENTS = 4096

_SCHEMA = "(str program, Tensor[] tensors, SymInt[] sizes, int[] size_positions) -> Tensor[]"


@dataclass(frozen=True)
class _Program:
    """One of the two operators with its graphs, ready to be called."""

    graphs: tuple[functools.partial[Any], ...]
    layout: ScanLayout | BackwardLayout

    @functools.cached_property
    def vjp(self) -> torch.fx.GraphModule:
        """The second graph as one again, which tells what depends on a gradient that did not come."""
        function = self.graphs[1]
        step = type("Step", (torch.nn.Module,), {"forward": function.func})()
        vars(step).update(vars(*function.args))  # its constants
        return torch.fx.symbolic_trace(step)

    def run(self, args: Sequence[Any]) -> Sequence[torch.Tensor]:
        if isinstance(self.layout, BackwardLayout):
            return backward_loop(self.graphs[0], self.vjp, self.layout, args)
        return forward_loop(self.graphs[0], self.layout, args)

    def shapes(self, args: Sequence[Any]) -> Sequence[torch.Tensor]:
        if isinstance(self.layout, BackwardLayout):
            samples = backward_samples(self.layout, args)
            return backward_shapes(self.graphs[1], self.layout, args, samples)
        return forward_shapes(self.graphs[0], self.layout, args)


def encode_program(graphs: Sequence[torch.fx.GraphModule], layout: ScanLayout | BackwardLayout) -> str:
    """The text that :func:`run_scan` takes: layout and source of the graphs.

    Base64, because code generators write it into a string literal of Python or C++.

    Raises:
        LoweringError: A graph holds something that has no text.
    """
    program = {"layout": asdict(layout), "graphs": [_source(graph) for graph in graphs]}
    return base64.b64encode(json.dumps(program).encode()).decode()


def _source(module: torch.fx.GraphModule) -> str:
    """Python source that defines ``forward(self, *placeholders)``, and ``self`` with constants."""
    code = module.graph.python_code(root_module="self")
    lines = ["import torch", "import types", "inf, nan = float('inf'), float('nan')"]
    for name, value in code.globals.items():
        if isinstance(value, types.ModuleType):
            lines.append(f"import {value.__name__} as {name}" if name != "torch" else "")
        elif getattr(torch, name, None) is value:
            lines.append(f"from torch import {name}")
        elif not name.startswith("fx_pytree") and name not in ("pytree", "NoneType", "inf", "nan"):
            raise LoweringError(
                f"the core uses {name} ({value!r}), which cannot be written as text; use PyTorch operators"
            )
    lines.append("self = types.SimpleNamespace()")
    for node in module.graph.find_nodes(op="get_attr"):
        lines.append(f"self.{node.target} = {_constant(node.target, getattr(module, node.target))}")
    return "\n".join([*lines, code.src])


def _constant(name: str, value: object) -> str:
    if not isinstance(value, torch.Tensor):
        raise LoweringError(f"the core holds {name}, a {type(value).__name__}, which cannot be written as text")
    if value.numel() > _MOST_CONSTANT_ELEMENTS:
        raise LoweringError(
            f"the core makes a constant of {value.numel()} elements; at most "
            f"{_MOST_CONSTANT_ELEMENTS} can be part of its code: make it outside of the core"
        )
    return f"torch.tensor({value.tolist()!r}, dtype={value.dtype}, device={str(value.device)!r})"


@functools.lru_cache(maxsize=512)
def _decode(program: str) -> _Program:
    content = json.loads(base64.b64decode(program))
    fields = content["layout"]
    layout: ScanLayout | BackwardLayout
    if "scan" in fields:
        lists = {key: tuple(v) for key, v in fields.items() if isinstance(v, list)}
        layout = BackwardLayout(scan=ScanLayout(**fields["scan"]), saved_interval=fields["saved_interval"], **lists)
    else:
        layout = ScanLayout(**fields)
    return _Program(tuple(_function(source) for source in content["graphs"]), layout)


def _function(source: str) -> functools.partial[Any]:
    namespace: dict[str, Any] = {}
    exec(compile(source, "<step of a scan>", "exec"), namespace)
    return functools.partial(namespace["forward"], namespace["self"])


def _merge(
    tensors: Sequence[torch.Tensor],
    sizes: Sequence[int] | None,
    size_positions: Sequence[int] | None,
) -> list[Any]:
    """The flat arguments; AOTInductor's runtime gives an empty list as None."""
    args: list[Any] = list(tensors)
    for position, size in zip(size_positions or (), sizes or (), strict=True):  # ascending positions
        args.insert(position, size)
    return args


def _run(
    program: str,
    tensors: Sequence[torch.Tensor],
    sizes: Sequence[int] | None,
    size_positions: Sequence[int] | None,
) -> list[torch.Tensor]:
    return list(_decode(program).run(_merge(tensors, sizes, size_positions)))


def _shapes(
    program: str,
    tensors: Sequence[torch.Tensor],
    sizes: Sequence[int] | None,
    size_positions: Sequence[int] | None,
) -> list[torch.Tensor]:
    # Not from the cache: the graph's constants are fake here.
    return list(_decode.__wrapped__(program).shapes(_merge(tensors, sizes, size_positions)))


# The loop reads any strides, so that the compiler need not copy an input to a certain layout.
torch.library.define("flexsn_hop::run_scan", _SCHEMA, tags=(torch.Tag.flexible_layout,))
torch.library.impl("flexsn_hop::run_scan", "CompositeExplicitAutograd", _run)
torch.library.register_fake("flexsn_hop::run_scan", _shapes)

run_scan = torch.ops.flexsn_hop.run_scan.default
