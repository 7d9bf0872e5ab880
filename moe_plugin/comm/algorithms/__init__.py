"""All-to-all algorithms by name, each an `Exchange` with the result of `Comm.all_to_all`."""

from moe_plugin.comm.algorithms import leader, linear, two_d
from moe_plugin.comm.algorithms.registry import algorithms

__all__ = ["algorithms", "leader", "linear", "two_d"]
