"""Devices and networks that have a name on the command line.

The speeds come from data sheets and were not measured. A network reaches the same fractions of its
data sheet as in `configs/clusters/a100_ib.yaml`, 5/6 within a node and 0.88 between nodes, and has
the latencies of this file. The files in `configs/devices` state the fractions for devices.

Bytes per second and direction that the links between the devices of a node reach according to the
data sheets: NVLink 3 of the A100 300e9 (NVIDIA A100 data sheet, 600 GB/s in both directions),
NVLink 4 of the H100 and H200 450e9 (NVIDIA H100 and H200 data sheets, 900 GB/s), NVLink 5 of the
B200 900e9 (NVIDIA DGX B200 data sheet, 1.8 TB/s), Infinity Fabric of the MI300X 448e9 (AMD MI300X
data sheet, seven links of 128 GB/s in both directions), NVLink 2 of the V100 150e9 (NVIDIA V100
data sheet, 300 GB/s), PCIe 4.0 and 5.0 with 16 lanes 31.5e9 and 63e9 (PCI-SIG).
"""

from __future__ import annotations

from pathlib import Path

from moe_plugin.planner.cluster import Cluster, Device, Link, load_device
from moe_plugin.utils.messages import did_you_mean, short, similar_names

# name on the command line: file in configs/devices, and links within a node in bytes per second
DEVICES = {
    "a100": ("a100_80g", 300e9), "b200": ("b200", 900e9), "h100": ("h100", 450e9),
    "h200": ("h200", 450e9), "mi300x": ("mi300x", 448e9), "v100": ("v100_32g", 150e9),
}
# links between nodes: bits per second of one card per device (HDR and NDR InfiniBand, Ethernet)
BETWEEN = {f"{kind}{rate}": rate * 1e9 for kind, rates in {
    "ib": (100, 200, 400, 800), "roce": (100, 200, 400)}.items() for rate in rates}
WITHIN = {"pcie4": 31.5e9, "pcie5": 63e9}  # instead of the device's own links
PER_NODE = 8  # devices per node in the servers of the data sheets
OWN_LINKS = ("nvlink", "xgmi")
WITHIN_S, BETWEEN_S, WITHIN_SHARE, BETWEEN_SHARE = 3e-6, 5e-6, 5 / 6, 0.88


def device_of(given: str) -> Device:
    """Return a device by its name, or from its file.

    Raises:
        ValueError: If there is neither a device nor a file with this name.
    """
    if given.lower() in DEVICES:
        return load_device(f"configs/devices/{DEVICES[given.lower()][0]}.yaml")
    if not Path(given).suffix and not Path(given).is_file():
        raise _unknown("--device", given, list(DEVICES),
                       "a file written by `moe-plugin profile-device`")
    return load_device(given)


def cluster_of(network: str, gpus: int, device: str, per_node: int | None = None) -> Cluster:
    """Return `gpus` devices that are connected by a named network.

    Args:
        network: name of the links between nodes, optionally after the links within a node and a
            `+`, such as `ib400`, `nvlink+ib400` or `pcie4+roce100`.
        gpus: number of devices.
        device: the name of the device, which determines the links within a node.
        per_node: number of devices per node. Defaults to at most 8.
    Raises:
        ValueError: If a name is unknown, or if the devices do not fill the nodes.
    """
    within, _, between = network.lower().rpartition("+")
    if between not in BETWEEN:
        raise _unknown("--network", network, list(BETWEEN), "--cluster FILE instead")
    if within not in ("", *OWN_LINKS, *WITHIN):
        raise _unknown("--network", network, [*OWN_LINKS, *WITHIN], "no links before the +")
    own = DEVICES.get(device.lower(), ("", WITHIN["pcie4"]))[1]
    speed = WITHIN.get(within, own)
    rate = BETWEEN[between] / 8
    size = per_node or min(gpus, PER_NODE)
    return Cluster(
        name=network, nodes=1, ranks_per_node=size, nics=size,
        intra=Link(alpha_s=WITHIN_S, beta_s=1 / (speed * WITHIN_SHARE)),
        inter=Link(alpha_s=BETWEEN_S, beta_s=1 / (rate * BETWEEN_SHARE)),
        copy_s=1 / device_of(device).memory_bytes_s).with_ranks(gpus)


def _unknown(option: str, given: str, names: list[str], remedy: str) -> ValueError:
    return ValueError(f"{option} {short(given)} is unknown; "
                      f"{did_you_mean(similar_names(given.lower(), names))}"
                      f"known names: {', '.join(names)}. Or use {remedy}")
