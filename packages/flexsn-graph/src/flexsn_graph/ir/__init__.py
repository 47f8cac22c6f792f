"""Steps as data: graphs, their ports, facts about ops, and layouts of captured tensors."""

from __future__ import annotations
