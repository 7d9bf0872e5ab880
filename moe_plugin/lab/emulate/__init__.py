"""An emulated cluster on one machine: network namespaces with shaped links (Linux, root)."""

from moe_plugin.lab.emulate.cluster import EmulatedCluster, PortStats
from moe_plugin.lab.emulate.namespaces import why_not
from moe_plugin.lab.emulate.ranks import RankEnd, RankProcess

__all__ = ["EmulatedCluster", "PortStats", "RankEnd", "RankProcess", "why_not"]
