"""Cost models for clusters, exchanges and layers, and searches that use these cost models. Never
imports torch.
"""

from moe_plugin.planner.all_to_all_cost import COSTS, Cost, predict, predict_table
from moe_plugin.planner.cluster import Cluster, Link, dump_cluster, load_cluster

__all__ = [
    "COSTS", "Cluster", "Cost", "Link", "dump_cluster", "load_cluster", "predict",
    "predict_table",
]
