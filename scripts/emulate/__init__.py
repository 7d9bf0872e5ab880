"""An emulated cluster on one machine: network namespaces with shaped links (Linux, root)."""

from scripts.emulate.cluster import EmulatedCluster, PortStats
from scripts.emulate.namespaces import why_not
from scripts.emulate.ranks import RankEnd, RankProcess

__all__ = ["EmulatedCluster", "PortStats", "RankEnd", "RankProcess", "why_not"]
