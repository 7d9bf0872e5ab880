"""A cluster's links as numbers, and the YAML file that holds them (`configs/clusters/`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_SECONDS = ("copy_s", "phase_s", "wake_s")


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a message costs: `alpha_s` seconds each, and `beta_s` seconds a byte (inverse
    bandwidth).
    """

    alpha_s: float = 0.0
    beta_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not 0 <= value < float("inf"):
                raise ValueError(
                    f"link {name}={value} must be a finite number >= 0; calibrate again or correct "
                    "the file"
                )

    def seconds(self, messages: float, size: float) -> float:
        """Time of `messages` messages that together hold `size` bytes, one after another."""
        return messages * self.alpha_s + size * self.beta_s


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes, ranks and links.

    nodes, ranks_per_node: N, P. nics: network cards a node; the ranks of a node share them evenly.
    intra: between ranks of a node. inter: a network card. copy_s: seconds a byte to copy in memory
    (read or write).
    phase_s: fixed cost of one round of messages (propagation delay, synchronisation).
    host, wake_s: for clusters emulated on one machine, what every message of every rank, and waking
        a rank, costs its processors; zero elsewhere. See `planner.all_to_all`.
    """

    name: str = "cluster"
    nodes: int = 1
    ranks_per_node: int = 1
    nics: int = 1
    intra: Link = field(default_factory=Link)
    inter: Link = field(default_factory=Link)
    copy_s: float = 0.0
    phase_s: float = 0.0
    host: Link = field(default_factory=Link)
    wake_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node", "nics"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"cluster {name}={getattr(self, name)} must be >= 1; correct the file")
        for name in _SECONDS:
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(
                    f"cluster {name}={getattr(self, name)} must be a finite number >= 0; correct "
                    "the file"
                )

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.nodes * self.ranks_per_node

    def machine_s(self, wakes: float, messages: float, size: float) -> float:
        """What an emulated cluster's ranks together cost the machine under it: `wakes` wakings,
        `messages` of `size` bytes together.
        """
        return wakes * self.wake_s + self.host.seconds(messages, size)

    def resized(self, nodes: int, ranks_per_node: int | None = None) -> Cluster:
        """The same links with another number of nodes (and ranks a node)."""
        return dataclasses.replace(self, nodes=nodes, ranks_per_node=ranks_per_node
                                   or self.ranks_per_node)


def cluster_from_dict(values: Mapping[str, Any], where: str = "cluster") -> Cluster:
    """Plain nested values to a `Cluster`; unknown keys and wrong types are a `ValueError`."""
    known = {f.name: f for f in dataclasses.fields(Cluster)}
    built: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}; known keys: {', '.join(known)}")
        built[key] = _link(value, f"{where}: {key}") if key in ("intra", "inter",
                                                                "host") else _plain(
                                                                    key, value, where)
    return Cluster(**built)


def _link(value: Any, where: str) -> Link:
    if not isinstance(value, Mapping) or not set(value) <= {"alpha_s", "beta_s"}:
        raise ValueError(
            f"{where}={value!r} must be a mapping with keys alpha_s (seconds a message) and beta_s "
            "(seconds a byte)"
        )
    return Link(**{key: _number(number, f"{where}.{key}") for key, number in value.items()})


def _plain(key: str, value: Any, where: str) -> Any:
    if key == "name":
        return str(value)
    if key in _SECONDS:
        return _number(value, f"{where}: {key}")
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{where}: {key}={value!r} must be a whole number")  # noqa: TRY004 - bad input is a ValueError
    return value


def _number(value: Any, where: str) -> float:
    try:
        return float(value)  # YAML reads 3e-6 (no point) as a string
    except (TypeError, ValueError):
        raise ValueError(f"{where}={value!r} must be a number") from None


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file. A file that is missing, no YAML mapping, or holds wrong values is a
    `ValueError`.
    """
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"cluster file {str(path)!r} cannot be read ({error.strerror}); make one with "
            "`moe-plugin calibrate`"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(
            f"cluster file {str(path)!r} is not YAML: {error}; see configs/clusters/") from error
    if not isinstance(values, Mapping):
        raise ValueError(f"cluster file {str(path)!r} holds a {type(values).__name__}, not a "
                         "mapping; see configs/clusters/")  # noqa: TRY004 - bad input is a ValueError
    return cluster_from_dict(values, f"cluster file {str(path)!r}")


def dump_cluster(cluster: Cluster, comment: str = "") -> str:
    """A cluster file's text."""
    import yaml

    head = "".join(f"# {line}\n" for line in comment.splitlines())
    return head + yaml.safe_dump(dataclasses.asdict(cluster), sort_keys=False)
