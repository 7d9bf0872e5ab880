"""All-to-all algorithms by name. Each takes (comm, x, send, recv) and returns what
`Comm.all_to_all` would.
"""

from moe_plugin.comm.algorithms import leader, linear, two_d
from moe_plugin.comm.algorithms.registry import algorithms

__all__ = ["algorithms", "leader", "linear", "two_d"]
