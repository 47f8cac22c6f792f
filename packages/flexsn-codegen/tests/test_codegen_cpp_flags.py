"""In C++ kernels, flags with known values are no conditions in the loop over lanes."""

from __future__ import annotations

import torch

from flexsn_codegen.targets.cpp import CPP


def generate_source(first: str, second: str) -> str:
    """Writes a loop that reads a flag, assigns a value to it, and reads it again."""
    writer = CPP.writer()
    writer.assign("came", first, flag=True)
    writer.assign("other", writer.flag(False), flag=True)
    with writer.loop("t", "0", "T"):
        writer.assign("before", f"came ? float(1) : {writer.zeros(torch.float32)}")
        writer.assign("came", second, flag=True)
        writer.assign("after", "came ? float(2) : before")
    return writer.finish("kernel", [], "").source


def test_known_flag_is_no_condition() -> None:
    for second in ("true", "other | true"):
        source = generate_source("false", second)
        assert "auto after = true ? float(2)" in source
        # At the start of the loop, the flag has its value from the previous iteration, which is not known.
        assert "auto before = (dev::conditions<condition_t, BLOCK>.all(came)[lane] != 0) ?" in source
        assert "\n            came = true;" in source
    assert "auto after = false ? float(2)" in generate_source("true", "false")


def test_unknown_flag_is_a_condition() -> None:
    source = generate_source("true", "came | other")
    assert "const bool came_1 = came | other;" in source
    assert "auto after = (dev::conditions<condition_t, BLOCK>.all(came_1)[lane] != 0) ?" in source
    assert "\n            came = came_1;" in source
