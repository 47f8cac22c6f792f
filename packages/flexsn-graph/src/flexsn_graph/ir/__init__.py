"""Steps as data: graphs, their ports, facts about ops, layouts of captured tensors."""

from __future__ import annotations
