"""Settings of communication."""

from __future__ import annotations

from dataclasses import dataclass

from moe_plugin.config.options import MOST_SECONDS, SettingsSection, option

WIRES = ("none", "bf16", "fp16", "fp8", "mxfp8")


@dataclass(kw_only=True)
class CommConfig(SettingsSection):
    """How ranks exchange rows."""

    PATH = "comm."

    all_to_all: str | None = option(
        None,
        "all-to-all algorithm, by registered name: linear, 2dh, leader, native; auto measures and "
        "chooses; none: auto where the group spans nodes, else linear",
        flag="all-to-all")
    topology: str = option(
        "detect",
        "which ranks share a node: detect (launcher and host names), a number of ranks per node, "
        "or a YAML file with nodes: [[0, 1], ...]",
        flag="topology")
    cluster: str | None = option(
        None,
        "cluster file of `moe-plugin calibrate`, by which auto chooses; none: auto measures",
        flag="cluster")
    collectives: str = option(
        "native",
        "how expert parameters, their gradients and the parts of ranks with the same tokens are "
        "gathered and summed, by registered name: native (the backend's own), forest (along trees "
        "planned for the network), auto (the faster one; docs/collectives.md)",
        flag="collectives")
    network: str | None = option(
        None,
        "network by which forest plans: a file (docs/collectives.md) or a preset such as "
        "dgx-a100:2; none: by comm.cluster, else by comm.topology",
        flag="network")
    wire: str = option(
        "none",
        "dtype of rows between ranks, where it is smaller than theirs: bf16, fp16, fp8 or mxfp8 "
        "(error bounds: docs/precision.md)",
        choices=WIRES, flag="wire")
    wire_back: str = option(
        "same",
        "the same for results on their way back from the experts, and the gradients of what went "
        "there; same: as comm.wire", choices=("same", *WIRES), flag="wire-back")
    watchdog_s: float = option(
        0.0,
        "> 0: seconds between heartbeats, so that the error of a failed exchange names the "
        "missing ranks",
        flag="watchdog")
    timeout_s: float = option(
        1800.0, "timeout in seconds of a collective that waits for a peer", flag="timeout")

    def check_bounds(self) -> None:
        self.within("watchdog_s", 0, MOST_SECONDS, "use 0 for no watchdog")
        self.require("timeout_s", self.timeout_s > 0, "> 0", "use 1800")
        self.within("timeout_s", 0, MOST_SECONDS, "use 1800")
        self.read_where(self.collectives != "native", "where comm.collectives=native",
                        "use comm.collectives=forest or auto", "network")
