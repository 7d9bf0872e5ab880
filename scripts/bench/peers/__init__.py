"""Other layers that compute the same function as ours, built from the same weights.

Importing this package registers every peer in `peers`. A peer imports its library when it is built.
"""

from scripts.bench.peers import (
    deepspeed,
    grouped_mm,
    local,
    megatron,
    olmo_core,
    scattermoe,
    sonicmoe,
    torchtitan,
    transformers,
)
from scripts.bench.peers.base import Candidate, UnsupportedProblem, peers
from scripts.bench.peers.local import ours

__all__ = [
    "Candidate", "UnsupportedProblem", "deepspeed", "grouped_mm", "local", "megatron",
    "olmo_core", "ours", "peers", "scattermoe", "sonicmoe", "torchtitan", "transformers"
]
