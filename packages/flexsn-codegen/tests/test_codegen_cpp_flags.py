"""In C++ kernels, flags with known values are no conditions in the loop over lanes."""

from __future__ import annotations

import torch

from flexsn_codegen.targets.cpp import CPP


def generate_source(first: str, second: str) -> str:
    """Writes a loop that reads a flag, assigns a value to it, and reads it again."""
    writer = CPP.writer()
    writer.assign("fired", first, flag=True)
    writer.assign("other", writer.flag(False), flag=True)
    with writer.loop("t", "0", "T"):
        writer.assign("before", f"fired ? float(1) : {writer.zeros(torch.float32)}")
        writer.assign("fired", second, flag=True)
        writer.assign("after", "fired ? float(2) : before")
    return writer.finish("kernel", [], "").source


def test_known_flag_is_no_condition() -> None:
    for second in ("true", "other | true"):
        source = generate_source("false", second)
        assert "auto after = true ? float(2)" in source
        # At the start of the loop, the flag has its value from the previous iteration, which is not known.
        assert "auto before = (dev::conditions<condition_t, BLOCK>.all(fired)[lane] != 0) ?" in source
        assert "\n            fired = true;" in source
    assert "auto after = false ? float(2)" in generate_source("true", "false")


def test_unknown_flag_is_a_condition() -> None:
    source = generate_source("true", "fired | other")
    assert "const bool fired_1 = fired | other;" in source
    assert "auto after = (dev::conditions<condition_t, BLOCK>.all(fired_1)[lane] != 0) ?" in source
    assert "\n            fired = fired_1;" in source
