"""Cost models of clusters, exchanges, layers and models, and searches. Never imports torch."""

from moe_plugin.planner.all_to_all import COSTS, Cost, best, predict, predict_table, wire_floor_s
from moe_plugin.planner.cluster import Cluster, Link, dump_cluster, load_cluster
from moe_plugin.planner.fit import Fit, Measurement, fit, nonnegative_least_squares, relative_errors

__all__ = [
    "COSTS", "Cluster", "Cost", "Fit", "Link", "Measurement", "best", "dump_cluster", "fit",
    "load_cluster", "nonnegative_least_squares", "predict", "predict_table", "relative_errors",
    "wire_floor_s"
]
