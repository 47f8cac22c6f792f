"""Neurons on several GPUs and machines, where torch's own tools need help.

`DistributedDataParallel`, `fully_shard` and tensor-parallel linear layers work with neurons as they are; see
docs/distributed.md.
"""

from __future__ import annotations

from flexsn_nn.distributed._from_reset import FromReset
from flexsn_nn.distributed._time_shards import TimeShards, time_shard

__all__ = ["FromReset", "TimeShards", "time_shard"]
