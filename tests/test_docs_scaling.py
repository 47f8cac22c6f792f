"""The page about training on several GPUs. Its efficiencies equal the stored table."""

from __future__ import annotations

import re

from scripts import ROOT


def test_page_has_the_stored_efficiencies() -> None:
    table = (ROOT / "benchmarks" / "results" / "scaling.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| (ddp|fsdp) \| (\d) \| .* \| ([\d.]+) \|$", table, re.MULTILINE)
    expected: dict[tuple[str, str], list[str]] = {}
    for network, parallel, gpus, efficiency in rows:
        if gpus != "1":
            expected.setdefault((network, parallel), []).append(efficiency)
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    rows_of_page = re.findall(
        r"`(?:DistributedDataParallel|fully_shard)` \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE
    )
    assert [list(row) for row in rows_of_page] == list(expected.values())
    assert len(rows_of_page) == 4
