"""Prepare a group for the configured topology, cluster model, watchdog and all-to-all."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from moe_plugin.comm.algorithms import algorithms
from moe_plugin.comm.base import Comm
from moe_plugin.comm.exchange import Exchange
from moe_plugin.comm.topology import Topology
from moe_plugin.comm.watchdog import Watchdog
from moe_plugin.config import CommConfig
from moe_plugin.dispatch.wire import with_wire
from moe_plugin.planner.cluster import load_cluster
from moe_plugin.tuning import exchange_tuner  # registers algorithm `auto`  # noqa: F401
from moe_plugin.tuning.default_hardware import Calibration
from moe_plugin.utils.messages import short
from moe_plugin.utils.yaml_file import read_yaml

log = logging.getLogger(__name__)
# values of settings that are left open: (on one node, on several nodes)
DEFAULT_WHEN_UNSET = {
    "comm.all_to_all": ("linear", "auto"), "parallel.mode": ("predicted", "auto"),
    "parallel.spill": ("never", "by the load")}


@dataclass
class _Announced:
    """The keys of all messages that have been logged for a group."""

    names: set[str] = field(default_factory=set)


def prepare(comm: Comm, config: CommConfig, measures: bool = True) -> Exchange:
    """Prepare a group according to its settings, and return the configured all-to-all.

    All ranks must call this function with the same settings. This is the only function in which the
    ranks agree on the topology.

    Args:
        comm: the group.
        config: communication settings.
        measures: whether measurements may determine settings that the user has not set; see
            `exchange_name`.

    Raises:
        ValueError: If a name is unknown, if a file cannot be read, or if the topology contains
            other ranks than the group.
    """
    if config.all_to_all is not None:
        algorithms.get(config.all_to_all)  # reject unknown names before anything is sent
    if comm.size == 1:
        return _exchange(comm, config, measures)
    cluster = load_cluster(config.cluster) if config.cluster else None
    nics = cluster.nics if cluster else 1
    comm.prepare(None if config.topology == "detect" else read_topology(
        config.topology, comm.size, nics))
    if cluster is not None:
        comm.state.get(Calibration).cluster = cluster
    _announce(comm, exchange_name(comm, config, measures))
    if config.watchdog_s > 0 and comm.state.watchdog is None:
        comm.state.watchdog = _watchdog(comm, config.watchdog_s)
    return _exchange(comm, config, measures)


def spans_nodes(comm: Comm) -> bool:
    """Return true if a prepared group spans several nodes. Simulated ranks never span nodes."""
    return comm.size > 1 and comm.separate and len(comm.topology.nodes) > 1


def exchange_name(comm: Comm, config: CommConfig, measures: bool = True) -> str:
    """Return the name of the all-to-all for a prepared group.

    If the settings specify no algorithm, the name is `auto` for a group that spans several nodes,
    and `linear` otherwise.

    Args:
        comm: a prepared group.
        config: communication settings.
        measures: whether measurements during training may determine settings that the user has not
            set. If `measures` is False, `linear` is used instead of `auto`.
    """
    unset = DEFAULT_WHEN_UNSET["comm.all_to_all"]
    return config.all_to_all or unset[measures and spans_nodes(comm)]


def _exchange(comm: Comm, config: CommConfig, measures: bool) -> Exchange:
    return with_wire(algorithms.get(exchange_name(comm, config, measures)), config.wire,
                     config.wire_back)


def _announce(comm: Comm, name: str) -> None:
    """Log the nodes of a group's ranks, and the reason if `linear` is used in place of another
    algorithm. Each message is logged once per group.
    """
    topology = comm.topology
    reason = algorithms.get(name).lacks(comm)
    log_once(comm, name, f"all-to-all {name} over {comm.name}: {topology}"
             + (f"; it runs as linear, because {reason}" if reason else ""))


def log_once(comm: Comm, name: str, text: str) -> None:
    """Log a message on the first rank of a group, once per group. name: key of the message."""
    announced = comm.state.get(_Announced).names
    if comm.rank == 0 and name not in announced:
        announced.add(name)
        log.info(text)


def read_topology(text: str, size: int, nics: int = 1) -> Topology:
    """Return the topology that `comm.topology` specifies for a group of `size` ranks.

    Args:
        text: number of ranks per node (with ranks numbered node by node), or path of a YAML file
            that lists the ranks of each node, such as `nodes: [[0, 1], [2, 3]]`.
        size: number of ranks.
        nics: number of network cards per node. Defaults to 1.

    Raises:
        ValueError: If the file cannot be read, if it contains no list of nodes, or if ranks are
            missing.
    """
    if text.isdecimal() and len(text) < 10:
        return Topology.uniform(size, int(text), nics)
    values = read_yaml(text, "comm.topology", "use detect, a number of ranks per node, or a YAML "
                       "file with nodes: [[0, 1], [2, 3]]")
    nodes = values.get("nodes")
    if not isinstance(nodes, list) or not all(
            isinstance(node, list) and all(isinstance(r, int) for r in node) for node in nodes):
        raise ValueError(
            f"comm.topology={short(text)} contains no node lists; write nodes: [[0, 1], [2, 3]]")
    return Topology(tuple(tuple(node) for node in nodes), nics, source=text)


def _watchdog(comm: Comm, interval_s: float) -> Watchdog | None:
    store: Any = comm.store()
    if store is None:
        log.warning("comm.watchdog_s=%s has no effect, because %s has no store", interval_s,
                    comm.name)
        return None
    return Watchdog(store, comm.rank, comm.size, comm.name, interval_s)
