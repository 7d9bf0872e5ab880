"""Layers from other frameworks ("peers") that compute the same function as our layer, with the same
weights.

Importing this package registers every peer in `peers`. The framework of a peer is imported only
when the peer is built.
"""

from scripts.bench.peers import local, megatron, packages
from scripts.bench.peers.base import Candidate, UnsupportedProblem, peers
from scripts.bench.peers.local import ours

__all__ = ["Candidate", "UnsupportedProblem", "local", "megatron", "ours", "packages", "peers"]
