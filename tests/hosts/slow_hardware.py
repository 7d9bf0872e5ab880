"""Files of a processor and links so slow that pieces of a call's rows pay, however few."""

from __future__ import annotations

from pathlib import Path

from moe_plugin.planner.cluster import Cluster, Link, dump_cluster


def slow_hardware(folder: Path) -> tuple[str, str]:
    """(device file, cluster file) in a folder."""
    device, cluster = folder / "device.yaml", folder / "cluster.yaml"
    device.write_text("flops: 1e9\nhalf_rows: 0\nlaunch_s: 0\nmemory_bytes_s: 1e12\n")
    cluster.write_text(dump_cluster(Cluster(nodes=1, ranks_per_node=2,
                                            intra=Link(alpha_s=1e-6, beta_s=1e-7))))
    return str(device), str(cluster)
