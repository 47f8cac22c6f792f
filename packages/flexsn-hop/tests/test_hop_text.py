"""Layouts can be written as text arguments of an operator, and read again."""

from __future__ import annotations

import pytest
import torch

from flexsn_hop import BackwardLayout, ScanLayout
from flexsn_hop.text import from_text, merged, read_layout, to_text, write_layout

SCAN = ScanLayout(2, 1, 1, final_state=True, checkpoint_interval=4, spare_checkpoints=2, zero_states=(True,))
BACKWARD = BackwardLayout(SCAN, (True, False, True), (True,), (True,), (False,), 4)


@pytest.mark.parametrize("layout", [SCAN, ScanLayout(1, 0, 1), BACKWARD], ids=lambda layout: type(layout).__name__)
def test_layouts_are_restored_from_text(layout: ScanLayout | BackwardLayout) -> None:
    text = to_text(write_layout(layout))
    assert text.isascii()
    assert not set(text) & set("\\\"'\n")
    actual = read_layout(from_text(text))
    assert actual == layout
    assert hash(actual) == hash(layout)


def test_tensors_and_sizes_are_joined_in_order() -> None:
    a, b = torch.zeros(2), torch.zeros(3)
    actual = merged([a, b], [5, 7], [0, 2])
    assert actual[0] == 5
    assert actual[1] is a
    assert actual[2] == 7
    assert actual[3] is b
    assert merged([a], None, None)[0] is a
