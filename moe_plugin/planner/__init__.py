"""Models of clusters and of what exchanges cost. Never imports torch."""

from moe_plugin.planner.all_to_all import COSTS, Cost, best, predict, wire_floor_s
from moe_plugin.planner.cluster import Cluster, Link, cluster_from_dict, dump_cluster, load_cluster
from moe_plugin.planner.fit import Fit, Measurement, fit, nonnegative_least_squares, relative_errors

__all__ = [
    "COSTS", "Cluster", "Cost", "Fit", "Link", "Measurement", "best", "cluster_from_dict",
    "dump_cluster", "fit", "load_cluster", "nonnegative_least_squares", "predict",
    "relative_errors", "wire_floor_s"
]
