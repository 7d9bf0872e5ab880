"""From settings to a group that is ready: topology, cluster model, watchdog; and the all-to-all
that a layer uses.
"""

from __future__ import annotations

import logging
from typing import Any

from moe_plugin.comm.algorithms import algorithms
from moe_plugin.comm.base import Comm, Exchange
from moe_plugin.comm.topology import Topology
from moe_plugin.comm.watchdog import Watchdog
from moe_plugin.config import CommConfig
from moe_plugin.dispatch.wire import with_wire
from moe_plugin.planner.cluster import load_cluster
from moe_plugin.tuning import exchange_tuner  # registers algorithm `auto`  # noqa: F401
from moe_plugin.yaml_file import read_yaml

log = logging.getLogger(__name__)


def prepare(comm: Comm, config: CommConfig) -> Exchange:
    """Give the group what `config` says of it, and return the configured all-to-all. All ranks call
    it alike.

    Raises: ValueError: an unknown name, a file that cannot be read, a topology that does not fit
    the group.
    """
    algorithm = with_wire(algorithms.get(config.all_to_all), config.wire)
    if comm.size == 1:
        return algorithm
    cluster = load_cluster(config.cluster) if config.cluster else None
    if cluster is not None:
        comm.memo["cluster"] = cluster
    if config.topology != "detect":
        comm.topology = read_topology(config.topology, comm.size, cluster.nics if cluster else 1)
    _announce(comm, config.all_to_all)
    if config.watchdog_s > 0 and "watchdog" not in comm.memo:
        comm.memo["watchdog"] = _watchdog(comm, config.watchdog_s)
    return algorithm


def _announce(comm: Comm, name: str) -> None:
    """Say once for a group where its ranks are, and where an algorithm that was asked for has
    nothing to gain. Collective.
    """
    topology = comm.topology
    if comm.rank or name in comm.memo.setdefault("announced", set()):
        return
    comm.memo["announced"].add(name)
    reason = topology.why_flat() if name in ("2dh", "leader") else None
    log.info("all-to-all %s over %s: %s%s", name, comm.name, topology,
             f"; it runs as linear, because {reason}" if reason else "")


def read_topology(text: str, size: int, nics: int = 1) -> Topology:
    """`4`: nodes of four ranks in rank order; otherwise a YAML file with `nodes: [[0, 1], [2, 3]]`,
    ranks of the group by node.
    """
    if text.isdigit():
        return Topology.uniform(size, int(text), nics)
    values = read_yaml(text, "comm.topology", "use detect, a number of ranks per node, or a YAML "
                       "file with nodes: [[0, 1], [2, 3]]")
    nodes = values.get("nodes")
    if not isinstance(nodes, list) or not all(
            isinstance(node, list) and all(isinstance(r, int) for r in node) for node in nodes):
        raise ValueError(
            f"comm.topology={text!r} holds no node lists; write nodes: [[0, 1], [2, 3]]")
    return Topology(tuple(tuple(node) for node in nodes), nics, source=text)


def _watchdog(comm: Comm, interval_s: float) -> Watchdog | None:
    store: Any = comm.store()
    if store is None:
        log.warning("comm.watchdog_s=%s has no effect: %s has no store", interval_s, comm.name)
        return None
    return Watchdog(store, comm.rank, comm.size, comm.name, interval_s)
