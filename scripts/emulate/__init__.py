"""Emulate a cluster on one Linux machine. The nodes are network namespaces, which are connected by
links of limited bandwidth.
"""

from scripts.emulate.cluster import EmulatedCluster, PortStats
from scripts.emulate.namespaces import why_not
from scripts.emulate.ranks import RankEnd, RankProcess

__all__ = ["EmulatedCluster", "PortStats", "RankEnd", "RankProcess", "why_not"]
