"""The page on several GPUs: it agrees with the stored table of scaling."""

from __future__ import annotations

import re

from scripts import ROOT


def test_page_has_the_efficiencies_of_the_table() -> None:
    kept = (ROOT / "benchmarks" / "results" / "scaling.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| (ddp|fsdp) \| (\d) \| .* \| ([\d.]+) \|$", kept, re.MULTILINE)
    wanted: dict[tuple[str, str], list[str]] = {}
    for network, parallel, gpus, efficiency in rows:
        if gpus != "1":
            wanted.setdefault((network, parallel), []).append(efficiency)
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    found = re.findall(r"`(?:DistributedDataParallel|fully_shard)` \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert [list(row) for row in found] == list(wanted.values())
    assert len(found) == 4
