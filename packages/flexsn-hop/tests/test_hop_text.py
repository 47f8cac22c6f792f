"""Text arguments of an operator are restored as they were written."""

from __future__ import annotations

import pytest
import torch

from flexsn_hop import BackwardLayout, ScanLayout
from flexsn_hop.text import from_text, merged, read_layout, to_text, write_layout

SCAN = ScanLayout(2, 1, 1, final_state=True, checkpoint_interval=4, spare_checkpoints=2, zero_states=(True,))
BACKWARD = BackwardLayout(SCAN, (True, False, True), (True,), (True,), (False,), 4)


@pytest.mark.parametrize("layout", [SCAN, ScanLayout(1, 0, 1), BACKWARD], ids=lambda layout: type(layout).__name__)
def test_layouts(layout: ScanLayout | BackwardLayout) -> None:
    text = to_text(write_layout(layout))
    assert text.isascii()
    assert not set(text) & set("\\\"'\n")
    found = read_layout(from_text(text))
    assert found == layout
    assert hash(found) == hash(layout)


def test_tensors_and_sizes_are_joined_in_order() -> None:
    a, b = torch.zeros(2), torch.zeros(3)
    found = merged([a, b], [5, 7], [0, 2])
    assert found[0] == 5
    assert found[1] is a
    assert found[2] == 7
    assert found[3] is b
    assert merged([a], None, None)[0] is a
