"""Throughput-optimal trees for collectives on any network (ForestColl). Never imports torch."""

from moe_plugin.planner.forest.forest import plan
from moe_plugin.planner.forest.network import Network, Wire
from moe_plugin.planner.forest.schedule import COLLECTIVES, Edge, Schedule, Tree

__all__ = ["COLLECTIVES", "Edge", "Network", "Schedule", "Tree", "Wire", "plan"]
