"""Tools for neurons on several GPUs and machines, for cases that torch's own tools do not support.

`DistributedDataParallel`, `fully_shard` and tensor-parallel linear layers support neurons without these tools: see
docs/distributed.md.
"""

from __future__ import annotations

from flexsn_nn.distributed._from_reset import FromReset
from flexsn_nn.distributed._time_shards import TimeShards, time_shard

__all__ = ["FromReset", "TimeShards", "time_shard"]
