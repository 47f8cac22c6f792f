"""Records the values that a core reads in Python during a trace, and checks at later calls that they are unchanged."""

from __future__ import annotations

from flexsn_graph.reads._library import is_library
from flexsn_graph.reads._places import Place
from flexsn_graph.reads._reads import Reads
from flexsn_graph.reads._surroundings import Origin
from flexsn_graph.reads._watch import Profile, resume, suspend

__all__ = ["Origin", "Place", "Profile", "Reads", "is_library", "resume", "suspend"]
