"""The imports of the package, and its message if torch lacks a required function."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch

from flexsn_hop import (
    FlexSNScan,
    dynamo_hop_available,
    flex_sn_scan,
    why_dynamo_hop_unavailable,
)
from flexsn_hop._torch_private import _dynamo


def test_package_imports_neither_triton_nor_dynamo_nor_a_sibling() -> None:
    code = "import sys, flexsn_hop; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(result.stdout.split())
    assert "flexsn_hop" in modules
    siblings = {"flexsn_graph", "flexsn_codegen", "flexsn_runtime", "flexsn_nn"}
    assert not modules & {"triton", "torch._dynamo", "torch._inductor", *siblings}


def test_operator_belongs_to_torch() -> None:
    assert isinstance(flex_sn_scan, FlexSNScan)
    assert flex_sn_scan.__name__ == str(flex_sn_scan) == "flex_sn_scan"
    assert torch.ops.higher_order.flex_sn_scan is flex_sn_scan


def test_operator_can_be_copied_and_pickled() -> None:
    assert copy.deepcopy({"scan": flex_sn_scan})["scan"] is flex_sn_scan
    assert pickle.loads(pickle.dumps(flex_sn_scan)) is flex_sn_scan


def test_missing_hook_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_dynamo_hop_unavailable() is None
    missing_hooks = {"torch._dynamo.variables.builder": ("wrap_fx_proxy", "a_missing_hook")}
    monkeypatch.setattr(_dynamo, "_REQUIRED_FOR_DYNAMO", missing_hooks)
    assert dynamo_hop_available() is False
    reason = why_dynamo_hop_unavailable()
    assert reason is not None
    assert "a_missing_hook" in reason
    assert torch.__version__ in reason
    (doubled,) = flex_sn_scan(lambda x: 2 * x, 1, 0, 1, torch.ones(3))
    assert doubled.tolist() == [2.0, 2.0, 2.0]
