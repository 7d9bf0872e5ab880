"""Settings of the dispatcher and of capacity."""

from __future__ import annotations

from dataclasses import dataclass

from moe_plugin.config.options import MOST_MIB, MOST_SECONDS, MOST_TOKENS, SettingsSection, option

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


@dataclass(kw_only=True)
class DispatchConfig(SettingsSection):
    """How tokens become expert rows, and how many rows an expert takes."""

    PATH = "dispatch."

    name: str = option(
        "ragged",
        "dispatcher: ragged (exact rows), padded (fixed slots) or bounded (exact rows, numbers of "
        "rows stay on the device), by registered name",
        flag="dispatch")
    capacity_factor: float | None = option(
        None,
        "none: dropless. f > 0: k*int(f*ceil(T/E)) slots per expert and source rank, at least 1; "
        "0: the largest load (never drops); f < 0: the largest load, at most the slots of -f",
        flag="capacity-factor")
    eval_capacity_factor: float | None = option(
        None, "capacity factor outside training; none: the training one",
        flag="eval-capacity-factor")
    eval_token_fraction: float = option(
        0.0, "> 0: outside training, capacity is ceil(fraction * T) for any capacity factor",
        flag="eval-token-fraction")
    send: str = option(
        "rows",
        "ragged, bounded: how often a token's row travels. rows: once for each of its experts; "
        "ranks: once to each rank that has some of them; nodes: once to each node, and on from "
        "there; auto: what is predicted or measured best where parallel.mode says so, else rows",
        choices=("rows", "ranks", "nodes", "auto"), flag="send")
    equal_tokens: bool = option(
        False,
        "promise that every rank always has the same number of tokens: saves one small all-reduce "
        "per layer and counts padding as tokens in the capacity",
        flag="equal-tokens")

    max_rows_factor: float | None = option(
        None,
        "bounded: f lets ceil(f*T*k/W) rows through from one rank to one other (T tokens, k "
        "experts a token, W ranks: f times an even load); none: T times k or a rank's experts, "
        "whichever are fewer, which fits any load of max_tokens tokens",
        flag="max-rows-factor")
    max_tokens: int = option(
        0, "bounded: T, the most tokens that a rank has in a call; 0: the most that any has in the "
        "first training call decides: set it where later calls, of evaluation too, may have more",
        flag="max-tokens")
    stash_mib: float = option(
        0.0,
        "bounded: MiB of device memory in pages for the rows that backward needs, shared by all "
        "layers of a group; 0: each layer keeps its buffers, filler included. Needs "
        "experts.compute auto, kernels, grouped or loop, no experts.dropout, and parallel.r other "
        "than 0",
        flag="stash-mib")
    stash_host_mib: float = option(
        0.0, "MiB of pinned host memory for rows that find no page of stash_mib",
        flag="stash-host-mib")
    on_overflow: str = option(
        "error",
        "bounded: what follows a step in which rows or pages did not fit, whose results are NaN: "
        "error, or repeat it (an evaluation, too) with a larger bound",
        choices=("error", "repeat"), flag="on-overflow")

    def check_bounds(self) -> None:
        self.require("max_rows_factor", self.max_rows_factor is None or self.max_rows_factor > 0,
                     "> 0 or none", "use 2, or none for no overflow")
        self.within("max_rows_factor", 0, 1e6, "use none for no overflow")
        self.within("max_tokens", 0, MOST_TOKENS, "use 0 for those of the first training call")
        for name in ("stash_mib", "stash_host_mib"):
            self.within(name, 0, MOST_MIB, "use 0 for none")
        self.require("stash_host_mib", self.stash_mib > 0 or not self.stash_host_mib,
                     "0 where stash_mib is 0", "set stash_mib, too")
        for name in ("capacity_factor", "eval_capacity_factor"):
            self.within(name, -1e6, 1e6, "use none for no capacity")
        self.require("eval_token_fraction", 0 <= self.eval_token_fraction <= 1, "in [0, 1]",
                     "use 0 to take the capacity factor")
