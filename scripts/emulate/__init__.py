"""A cluster emulated on one Linux machine by network namespaces with links of limited speed."""

from scripts.emulate.cluster import EmulatedCluster, PortStats
from scripts.emulate.namespaces import why_not
from scripts.emulate.ranks import RankEnd, RankProcess

__all__ = ["EmulatedCluster", "PortStats", "RankEnd", "RankProcess", "why_not"]
