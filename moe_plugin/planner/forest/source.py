"""A network from whatever the user has: a preset's name or one of three kinds of files."""

from __future__ import annotations

from pathlib import Path

from moe_plugin.planner.cluster import load_cluster
from moe_plugin.planner.forest.network import Network
from moe_plugin.planner.forest.nvidia import Speeds, is_table, network_of, parse_table
from moe_plugin.planner.forest.presets import preset
from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import check_input
from moe_plugin.utils.yaml_file import bundled, read_yaml

KINDS = ("a network file (configs/networks/), a cluster file (`moe-plugin calibrate`), the output "
         "of `nvidia-smi topo -m`, or a preset such as dgx-a100:2")
MAX_BYTES, MAX_RANKS = 4_000_000, 1 << 13
_CLUSTER_KEYS = {"nodes", "ranks_per_node", "nics", "intra", "inter"}


def find_network(text: str, nodes: int | None = None) -> tuple[Network, str]:
    """The network that a user names, and a line on what was assumed ("" for nothing).

    Args:
        text: a path, or a preset's name. A file of that name goes first.
        nodes: machines, of a cluster file or of `nvidia-smi`'s output; None: as the file says, 1.
    Raises:
        ValueError: neither a file nor a preset; a file that is no network; `nodes` where the
            network says it itself.
    """
    path = Path(bundled(text))
    if nodes is not None and nodes < 1:
        raise ValueError(f"nodes={nodes} must be at least 1; leave it out for the file's number")
    if not path.exists():
        if len(path.parts) > 1 or path.suffix in (".yaml", ".yml", ".txt", ".json"):
            raise ValueError(f"topology {short(text)} cannot be read (there is no such file); give "
                             f"{KINDS}")
        _without_nodes(text, nodes, "write the number after its colon")
        return preset(text), ""
    check_input(path, "topology", f"give {KINDS}")
    try:
        with open(path, "rb") as stream:
            content = stream.read(MAX_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise ValueError(f"topology {short(text)} cannot be read ({error.strerror}); give "
                         f"{KINDS}") from error
    try:
        return _read(path, content, nodes)
    except ValueError as error:  # may name the network instead of the file
        raise ValueError(error if short(text) in str(error)
                         else f"topology {short(text)}: {error}") from error


def _read(path: Path, content: str, nodes: int | None) -> tuple[Network, str]:
    if is_table(content):
        speeds = Speeds()
        table = parse_table(content, "the table")
        _check_size(len(table.gpus) * (nodes or 1))
        return network_of(table, nodes or 1, speeds, path.stem), str(speeds)
    values = read_yaml(path, "topology", f"give {KINDS}")
    if _CLUSTER_KEYS & set(values):
        cluster = load_cluster(path)
        cluster = cluster.resized(nodes or cluster.nodes)
        _check_size(cluster.ranks)
        return Network.from_cluster(cluster), ""
    _without_nodes(path.name, nodes, "add the nodes to the file")
    return Network.from_dict({"name": path.stem, **values}), ""


def _without_nodes(text: str, nodes: int | None, remedy: str) -> None:
    if nodes is not None:
        raise ValueError(f"nodes={nodes} has no meaning with {short(text)}, which says it itself; "
                         f"{remedy}")


def _check_size(ranks: int) -> None:
    if ranks > MAX_RANKS:
        raise ValueError(f"{ranks} ranks are more than {MAX_RANKS}; give fewer nodes")
