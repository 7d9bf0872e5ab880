"""Selection of the collectives that a group uses (`comm.collectives`), including `auto`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from moe_plugin.comm.base import NATIVE, Collectives, Comm, FindNetwork, collective_kinds
from moe_plugin.comm.forest import Forest
from moe_plugin.config import CommConfig
from moe_plugin.planner.cluster import Cluster, load_cluster
from moe_plugin.planner.forest import Network
from moe_plugin.planner.forest.network import part_of
from moe_plugin.planner.forest.source import find_network
from moe_plugin.planner.once import GroupShape, all_gather_s, all_reduce_s, reduce_scatter_s
from moe_plugin.tuning.decisions import TunerSettings
from moe_plugin.tuning.default_hardware import Calibration, default_cluster
from moe_plugin.tuning.engine import Tuner
from moe_plugin.tuning.exchange_tuner import RULES, bucket_of, trial, turn
from moe_plugin.tuning.prepare_group import log_once
from moe_plugin.utils.messages import short

LEAST_BETA_S = 1e-12  # seconds per byte, which is 1000 GB/s
GAIN = 0.97  # forest is used if its predicted time is below this share of native's time


class WrongNetwork(ValueError):
    """Raised if `comm.network` cannot be read or has a wrong number of ranks."""


def with_collectives(comm: Comm, config: CommConfig, measures: bool = True) -> Comm:
    """Return a prepared group with the collectives that the settings select.

    If the group already uses these collectives, return the group itself. All ranks must call this
    function, because the first rank plans the trees.

    Args:
        comm: a prepared group.
        config: communication settings.
        measures: whether `auto` may measure times. If `measures` is False, `auto` uses predicted
            times, even without a cluster file.

    Raises:
        ValueError: If the network file cannot be read, or if the network has a wrong number of
            ranks.
    """
    kind = collective_kinds.get(config.collectives)
    if kind is Collectives or comm.size == 1:
        return comm
    known = comm.state.get(Calibration).cluster
    chosen = kind.make(comm, lambda: network_of(comm, config),
                       None if measures and known is None else _cluster(comm))
    configured = comm.with_collectives(chosen)
    log_once(comm, f"collectives {config.collectives}",
             f"collectives over {comm.name}: {chosen.describe(configured)}")
    return configured


def prepare_replicas(comm: Comm, config: CommConfig, measures: bool = True) -> Comm:
    """Prepare a new group of ranks that store the same experts, with the configured collectives.

    See `with_collectives`. With native collectives, this function sends no messages.
    """
    if collective_kinds.get(config.collectives) is not Collectives:
        comm.prepare()
        if config.cluster:
            comm.state.get(Calibration).cluster = load_cluster(config.cluster)
    return with_collectives(comm, config, measures)


def network_of(comm: Comm, config: CommConfig) -> tuple[Network, str]:
    """Return the network between the ranks of a prepared group, and a description of where this
    information comes from.

    If `comm.network` is set (see `find_network`), the network must have as many ranks as the group
    or as the whole job. If the network file describes a single node, all nodes of the group are
    assumed to be like this node. If `comm.network` is not set, the nodes are those of the topology,
    and the links are those of the cluster file, or typical links.

    Raises:
        ValueError: If the network cannot be read, or if it has a wrong number of ranks.
    """
    if config.network is not None:
        where = f"comm.network={short(config.network)}"
        network, note = _named_network(config.network, comm)
        return _of_group(network, comm, where), f"{where} ({note})" if note else where
    nodes = comm.topology.nodes
    width = max(map(len, nodes))
    network = Network.from_cluster(_of_some_cost(_cluster(comm).resized(len(nodes), width)))
    place = {rank: node * width + index for node, ranks in enumerate(nodes)
             for index, rank in enumerate(ranks)}
    links = f"comm.cluster={short(config.cluster)}" if config.cluster else "typical links"
    return (part_of(network, [place[rank] for rank in range(comm.size)]),
            f"{len(nodes)} node{'s' * (len(nodes) > 1)} (comm.topology) with {links}")


def _named_network(text: str, comm: Comm) -> tuple[Network, str]:
    nodes = len(comm.topology.nodes)
    try:
        network, note = find_network(text)
        if nodes > 1 and len(network.ranks) * nodes == comm.size:
            network, note = find_network(text, nodes)
    except ValueError as error:
        raise WrongNetwork(f"comm.network: {error}") from error
    return network, note


def _of_group(network: Network, comm: Comm, where: str) -> Network:
    count = len(network.ranks)
    if count == comm.size:
        return network
    if count % comm.size or count <= max(comm.ranks):
        raise WrongNetwork(
            f"{where} has {count} ranks, but the group {comm.name!r} has {comm.size} ranks. The "
            "network must have as many ranks as the group or the whole job; correct its ranks")
    return part_of(network, comm.ranks)


def _of_some_cost(cluster: Cluster) -> Cluster:
    """Return a copy of the cluster in which all links have a finite bandwidth.

    A calibrated cluster may contain links with almost zero cost, for example links inside emulated
    nodes.
    """
    intra, inter = (replace(link, beta_s=max(link.beta_s, LEAST_BETA_S))
                    for link in (cluster.intra, cluster.inter))
    return replace(cluster, intra=intra, inter=inter)


def _cluster(comm: Comm) -> Cluster:
    nodes = comm.topology.nodes
    return default_cluster(comm, comm.device).resized(len(nodes), max(map(len, nodes)))


@collective_kinds.register("auto")
@dataclass(frozen=True)
class AutoCollectives(Collectives):
    """Collectives that use either the native or the forest implementation, whichever is faster for
    each collective and size.

    Trials run in the same way as trials of all-to-all algorithms (`tuning.exchange_tuner`).

    cluster: cluster that is used to predict times, or None if times are measured.
    """

    forest: Forest
    cluster: Cluster | None
    name = "auto"

    @classmethod
    def make(cls, comm: Comm, network: FindNetwork, cluster: Cluster | None) -> Collectives:
        """Create the collectives. If no trees can be planned, native collectives are returned.

        Raises:
            WrongNetwork: If the configured network is not valid. Such a network must not be
                ignored.
        """
        try:
            forest = Forest(*network())
            forest.trees(comm)
        except WrongNetwork:
            raise
        except ValueError as error:
            log_once(comm, "no forest", f"collectives auto over {comm.name} are native: {error}")
            return NATIVE
        return cls(forest, cluster)

    def all_gather(self, comm: Comm, x: Tensor) -> Tensor:
        return self._run(comm, "all_gather", x, x.nbytes * comm.size)

    def reduce_scatter(self, comm: Comm, x: Tensor) -> Tensor:
        return self._run(comm, "reduce_scatter", x, x.nbytes)

    def all_reduce(self, comm: Comm, x: Tensor) -> Tensor:
        return self._run(comm, "all_reduce", x, x.nbytes)

    def start_all_reduce(self, comm: Comm, x: Tensor) -> Callable[[], Tensor]:
        """See `Collectives`. In a trial, the reduction is already complete on return."""
        name, trial_of = self._turn(comm, "all_reduce", x, x.nbytes)
        if trial_of is None:
            return self._named(name).start_all_reduce(comm, x)
        total = self._trial(comm, trial_of, name, x)
        return lambda: total

    def part(self, ranks: Sequence[int]) -> Collectives:
        forest = self.forest.part(ranks)
        return AutoCollectives(forest, self.cluster) if isinstance(forest, Forest) else NATIVE

    def describe(self, comm: Comm) -> str:
        how = "measured in the first calls" if self.cluster is None else "predicted from the links"
        settled = [f"{entry.settled} for {kind} of up to {2 ** size} bytes" for (kind, size), entry
                   in comm.state.get(Choices).tuner.entries.items() if entry.known]
        return f"auto: native or {self.forest.describe(comm)}; {', '.join(settled) or how}"

    def seconds(self, comm: Comm, kind: str, size: int) -> float:
        """Return the predicted time of the faster collective, in seconds. See `Collectives`."""
        return min(self.predicted(comm, kind, size).values())

    def active(self, comm: Comm) -> str:
        """Return the names of the implementations chosen so far. See `Collectives`."""
        predicted = set(comm.state.get(Predictions).known.values())
        tuner = comm.state.get(Choices).tuner
        measured = {entry.settled for entry in tuner.entries.values() if entry.known}
        return f"auto: {', '.join(sorted(predicted | measured))}".rstrip(": ")

    def chosen(self, comm: Comm, kind: str, size: int) -> Collectives | None:
        """Return the implementation chosen for `size` bytes, or None if trials are pending."""
        if self.cluster is not None:
            known = comm.state.get(Predictions).known
            key = self.forest.key, self.cluster, kind, size
            if key not in known:
                seconds = self.predicted(comm, kind, size)
                known[key] = "forest" if seconds["forest"] < GAIN * seconds["native"] else "native"
            return self._named(known[key])
        tuner, bucket = comm.state.get(Choices).tuner, (kind, bucket_of(size))
        return self._named(tuner.latest(bucket).choice) if tuner.known(bucket) else None

    def predicted(self, comm: Comm, kind: str, size: int) -> dict[str, float]:
        """Return the predicted times of `native` and `forest` for `size` bytes, in seconds."""
        group, piece = GroupShape(comm.size), size / comm.size
        native = {"all_gather": all_gather_s, "reduce_scatter": reduce_scatter_s,
                  "all_reduce": all_reduce_s}[kind]
        cluster = _cluster(comm) if self.cluster is None else self.cluster
        return {"native": native(cluster, group, size if kind == "all_reduce" else piece),
                "forest": self.forest.seconds(comm, kind, size)}

    def measured(self, comm: Comm, kind: str, size: int) -> dict[str, float]:
        """Return the median times of `native` and `forest` on the slowest rank, in seconds."""
        return dict(comm.state.get(Choices).tuner.entries[kind, bucket_of(size)].measured)

    def _named(self, name: str) -> Collectives:
        return self.forest if name == "forest" else NATIVE

    def _turn(self, comm: Comm, kind: str, x: Tensor,
              size: int) -> tuple[str, tuple[str, int] | None]:
        """Return the name of the implementation to run, and the bucket of its trial, or None if the
        call is not a trial.
        """
        if self.cluster is not None:
            chosen = self.chosen(comm, kind, size)
            assert chosen is not None  # a cluster file predicts it
            return chosen.name, None
        bucket = kind, bucket_of(size)
        name, timed = turn(comm.state.get(Choices).tuner, bucket, x)
        return name, bucket if timed else None

    def _run(self, comm: Comm, kind: str, x: Tensor, size: int) -> Tensor:
        name, bucket = self._turn(comm, kind, x, size)
        if bucket is None:
            return getattr(self._named(name), kind)(comm, x)
        return self._trial(comm, bucket, name, x)

    def _trial(self, comm: Comm, bucket: tuple[str, int], name: str, x: Tensor) -> Tensor:
        kind, size = bucket
        self.forest.trees(comm)  # planning must not be part of the measured time
        return trial(comm.state.get(Choices).tuner, bucket, name, comm, x,
                     lambda one: getattr(self._named(one), kind)(comm, x),
                     f"collectives auto over {comm.name}, {kind} of about {2 ** size} bytes")


@dataclass
class Predictions:
    """Predictions of the setting `auto`, keyed by network, cluster, collective and total number of
    bytes.

    There are only a few predictions, because a model uses only a few different sizes. The object is
    stored in the state of the group.
    """

    known: dict[tuple[str, Cluster, str, int], str] = field(default_factory=dict)


class Choices:
    """The trials of the collectives in one group, stored in the state of the group."""

    def __init__(self, rules: TunerSettings = RULES) -> None:
        self.tuner: Tuner[tuple[str, int], str] = Tuner(
            lambda bucket: dict.fromkeys(("native", "forest")), rules)
