"""`prepare`: topology, cluster model and watchdog of a group from settings, and its all-to-all."""

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
# what settings become that are left open: on one node, and over several
DEFAULT_WHEN_UNSET = {
    "comm.all_to_all": ("linear", "auto"), "parallel.mode": ("predicted", "auto"),
    "parallel.spill": ("never", "by the load")}


@dataclass
class _Announced:
    """What is logged for a group: names of all-to-alls, and `layouts`."""

    names: set[str] = field(default_factory=set)


def prepare(comm: Comm, config: CommConfig, measures: bool = True) -> Exchange:
    """Prepare a group by its settings and return the configured all-to-all.

    Collective: all ranks call it with the same settings. The topology is agreed here and nowhere
    else.

    measures: see `exchange_name`.
    Raises: ValueError: an unknown name, a file that cannot be read, a topology that does not fit
    the group.
    """
    if config.all_to_all is not None:
        algorithms.get(config.all_to_all)  # an unknown name, before anything is sent
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
    """Whether a prepared group of processes is on more than one node; simulated ranks are not."""
    return comm.size > 1 and comm.separate and len(comm.topology.nodes) > 1


def exchange_name(comm: Comm, config: CommConfig, measures: bool = True) -> str:
    """The all-to-all of the settings; where they name none, auto for a group that spans nodes, else
    linear. The group is prepared.

    measures: whether what settings leave open may be measured while training; False: linear.
    """
    unset = DEFAULT_WHEN_UNSET["comm.all_to_all"]
    return config.all_to_all or unset[measures and spans_nodes(comm)]


def _exchange(comm: Comm, config: CommConfig, measures: bool) -> Exchange:
    return with_wire(algorithms.get(exchange_name(comm, config, measures)), config.wire,
                     config.wire_back)


def _announce(comm: Comm, name: str) -> None:
    """Log once per group where its ranks are, and why an algorithm falls back to linear."""
    topology = comm.topology
    reason = algorithms.get(name).lacks(comm)
    log_once(comm, name, f"all-to-all {name} over {comm.name}: {topology}"
             + (f"; it runs as linear, because {reason}" if reason else ""))


def log_once(comm: Comm, name: str, text: str) -> None:
    """Log a text once per group, on its first rank. name: of the text."""
    announced = comm.state.get(_Announced).names
    if comm.rank == 0 and name not in announced:
        announced.add(name)
        log.info(text)


def read_topology(text: str, size: int, nics: int = 1) -> Topology:
    """The topology that `comm.topology` describes, for a group of `size` ranks.

    Args:
        text: a number of ranks per node (in rank order), or a YAML file with the ranks of the group
            by node, `nodes: [[0, 1], [2, 3]]`.
        nics: network cards per node.
    Raises: ValueError: the file cannot be read or has no node lists, or ranks are missing.
    """
    if text.isdecimal() and len(text) < 10:
        return Topology.uniform(size, int(text), nics)
    values = read_yaml(text, "comm.topology", "use detect, a number of ranks per node, or a YAML "
                       "file with nodes: [[0, 1], [2, 3]]")
    nodes = values.get("nodes")
    if not isinstance(nodes, list) or not all(
            isinstance(node, list) and all(isinstance(r, int) for r in node) for node in nodes):
        raise ValueError(
            f"comm.topology={short(text)} holds no node lists; write nodes: [[0, 1], [2, 3]]")
    return Topology(tuple(tuple(node) for node in nodes), nics, source=text)


def _watchdog(comm: Comm, interval_s: float) -> Watchdog | None:
    store: Any = comm.store()
    if store is None:
        log.warning("comm.watchdog_s=%s has no effect: %s has no store", interval_s, comm.name)
        return None
    return Watchdog(store, comm.rank, comm.size, comm.name, interval_s)
