"""Measured launch plans on disk. Each step, size class and GPU has a file in the cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from flexsn_codegen import cache_folder, write_private
from flexsn_runtime.plans._buckets import LaunchConfig, LaunchPlan, fits


def step_key(core: str, dtypes: tuple[torch.dtype, ...], device: torch.device, limit: int) -> dict[str, str | int]:
    """Returns the key of a measurement: device, step, dtypes and size class.

    Args:
        core: name of the step's source. The name contains a hash of the source.
        dtypes: dtypes of inputs, states and lifted tensors.
        limit: maximum number of elements in the size class, see `size_class`.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"device": name, "core": core, "dtypes": ", ".join(map(str, dtypes)), "elements": limit}


def load(key: Mapping[str, str | int], usual: LaunchPlan) -> LaunchPlan | None:
    """Returns the measured plan; `None` if no plan is stored, or if the plan no longer fits.

    Args:
        usual: the plan without tuning. A measured plan must have the checkpoint distance of this plan.
    """
    path = _get_path(key)
    try:
        stored_plan = json.loads(path.read_text(encoding="utf-8"))
        launches = {name: LaunchConfig(**config) for name, config in stored_plan["launches"].items()}
        plan = LaunchPlan(**launches)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if stored_plan.get("key") != key or not fits(plan, usual):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # marks the file as used, so that it is not pruned
    return plan


def save(key: Mapping[str, str | int], plan: LaunchPlan) -> Path:
    """Stores a plan, and returns its file."""
    path = _get_path(key)
    write_private(path, json.dumps({"key": key, "launches": asdict(plan)}, indent=2) + "\n")
    return path


def _get_path(key: Mapping[str, str | int]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder() / f"launches_{digest}.json"
