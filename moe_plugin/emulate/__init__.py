"""A cluster of network namespaces with shaped links on one machine (Linux, root or a user
namespace).
"""

from moe_plugin.emulate.cluster import EmulatedCluster, PortStats
from moe_plugin.emulate.namespaces import why_not
from moe_plugin.emulate.ranks import RankEnd, RankProcess

__all__ = ["EmulatedCluster", "PortStats", "RankEnd", "RankProcess", "why_not"]
