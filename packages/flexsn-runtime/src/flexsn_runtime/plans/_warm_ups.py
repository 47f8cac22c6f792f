"""Learned warm-ups on disk. Each step and GPU has a file in the cache folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from flexsn_codegen import cache_folder, write_private

Key = Mapping[str, object]

# Stored if no warm-up is long enough, because the step's trajectories do not converge.
NEVER = 0


def load_warm_up(key: Key) -> int | None:
    """Returns the learned warm-up, in steps, or `NEVER`; `None` if no warm-up is stored."""
    try:
        stored_steps = json.loads(_get_path(key).read_text(encoding="utf-8"))
        steps = stored_steps["warm_up"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_valid = stored_steps.get("key") == dict(key) and type(steps) is int and steps >= 0
    return steps if is_valid else None


def save_warm_up(key: Key, steps: int) -> None:
    """Stores a warm-up."""
    write_private(_get_path(key), json.dumps({"key": dict(key), "warm_up": steps}, indent=2) + "\n")


def _get_path(key: Key) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder() / f"warm_up_{digest}.json"
