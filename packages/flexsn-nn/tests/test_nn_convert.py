"""Tests `convert` without snnTorch and SpikingJelly: it leaves modules unchanged, and imports neither library."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from flexsn_nn import LIF, OverTime, UnknownNameError
from flexsn_nn.convert import Conversion, Converted, Left, Moved, convert


def test_networks_without_modules_of_other_libraries_are_unchanged() -> None:
    net = nn.Sequential(nn.Linear(3, 3), LIF(), OverTime(nn.Conv1d(1, 1, 1)))
    children = list(net)
    conversion = convert(net)
    assert conversion.model is net
    assert list(net) == children
    assert not conversion.converted
    assert not conversion.left
    assert conversion.load_state_dict(net.state_dict()).missing == ()
    with pytest.raises(UnknownNameError, match="Did you mean 'triton'"):
        convert(net, backend="trition")


def test_neither_library_is_imported() -> None:
    code = (
        "import sys, torch; from flexsn_nn import LIF; from flexsn_nn.convert import convert; "
        "convert(torch.nn.Sequential(torch.nn.Linear(2, 2), LIF())); "
        "print(*sorted({name.partition('.')[0] for name in sys.modules} & {'snntorch', 'spikingjelly'}), 'none')"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.split() == ["none"]


def test_the_report_lists_each_entry_once() -> None:
    conversion = Conversion(
        nn.Linear(1, 1),
        [Converted("a", "lib Old", "New", ("it rounds.",))],
        [Left("b", "lib Other", "it mixes.")],
        {"a.x": Moved("a.y"), "a.z": Moved("a.z"), "a.w": Moved("a.w", (2, 1))},
        {"a.gone": "no use."},
    )
    assert str(conversion).splitlines() == [
        "1 converted, 1 left unchanged",
        "  a: lib Old -> New",
        "    differs: it rounds.",
        "  left b: lib Other: it mixes.",
        "  moved a.x -> a.y",
        "  moved a.w -> a.w as [2, 1]",
        "  dropped a.gone: no use.",
    ]
    mapped = conversion.map_state_dict({"a.x": torch.zeros(1), "a.w": torch.zeros(2), "a.gone": torch.zeros(1)})
    assert {key: tuple(value.shape) for key, value in mapped.items()} == {"a.y": (1,), "a.w": (2, 1)}
