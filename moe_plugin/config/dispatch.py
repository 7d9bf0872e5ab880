"""Settings for exchanging rows between ranks (`comm`), and for the dispatcher and its capacity
(`dispatch`).
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_plugin.config.options import MOST_MIB, MOST_SECONDS, MOST_TOKENS, SettingsSection, option

WIRES = ("none", "bf16", "fp16", "fp8", "mxfp8")


@dataclass(kw_only=True)
class CommConfig(SettingsSection):
    """How rows are exchanged between ranks."""

    PATH = "comm."

    all_to_all: str | None = option(None, "all-to-all algorithm, by registered name: linear, 2dh, "
                                    "leader or native; auto measures and chooses the fastest "
                                    "algorithm. Default (none): auto if the group spans several "
                                    "nodes, else linear", flag="all-to-all")
    topology: str = option("detect", "which ranks share a node: detect (from the launcher and the "
                           "host names), a number of ranks per node, or a YAML file with nodes: "
                           "[[0, 1], ...]", flag="topology")
    cluster: str | None = option(None, "cluster file written by `moe-plugin calibrate`, from which "
                                 "auto predicts the fastest algorithm. Default (none): auto "
                                 "measures the algorithms", flag="cluster")
    collectives: str = option("native", "collectives that gather and sum expert parameters, their "
                              "gradients, and the results of ranks with the same tokens, by "
                              "registered name: native (the backend's collectives), forest (along "
                              "trees planned for the network), auto (the faster of the two; "
                              "docs/collectives.md)", flag="collectives")
    network: str | None = option(None, "network for which forest plans its trees: a file "
                                 "(docs/collectives.md) or a preset such as dgx-a100:2. Default "
                                 "(none): the network described by comm.cluster, else by "
                                 "comm.topology", flag="network")
    wire: str = option("none", "dtype in which rows travel between ranks, if it is smaller than "
                       "the rows' own dtype: bf16, fp16, fp8 or mxfp8 (error bounds: "
                       "docs/precision.md)", choices=WIRES, flag="wire")
    wire_back: str = option("same", "dtype of the results that return from the experts, and of the "
                            "gradients of the rows that were sent there; same: the dtype of "
                            "comm.wire", choices=("same", *WIRES), flag="wire-back")
    watchdog_s: float = option(0.0, "seconds between heartbeats. With a value > 0, the error of a "
                               "failed exchange names the missing ranks; 0: no watchdog",
                               flag="watchdog")
    timeout_s: float = option(1800.0, "timeout, in seconds, of a collective that waits for another "
                              "rank", flag="timeout")

    def check_bounds(self) -> None:
        self.within("watchdog_s", 0, MOST_SECONDS, "use 0 for no watchdog")
        self.require("timeout_s", self.timeout_s > 0, "> 0", "use 1800")
        self.within("timeout_s", 0, MOST_SECONDS, "use 1800")
        self.read_where(self.collectives != "native", "where comm.collectives=native",
                        "use comm.collectives=forest or auto", "network")


@dataclass(kw_only=True)
class DispatchConfig(SettingsSection):
    """How tokens are arranged as rows for the experts, and how many rows an expert accepts."""

    PATH = "dispatch."

    name: str = option("ragged", "dispatcher, by registered name: ragged (exact numbers of rows), "
                       "padded (fixed slots) or bounded (exact numbers of rows, with the counts "
                       "kept on the device)", flag="dispatch")
    capacity_factor: float | None = option(
        None, "limit on the rows per expert. none: no limit, no token is dropped. f > 0: "
        "k*int(f*ceil(T/E)) slots per expert and source rank, at least 1. 0: the largest load, so "
        "that no token is dropped. f < 0: the largest load, but at most the slots of factor -f",
        flag="capacity-factor")
    eval_capacity_factor: float | None = option(None, "capacity factor outside training. 0: no "
                                                "token is dropped. Default (none): the training "
                                                "capacity factor", flag="eval-capacity-factor")
    eval_token_fraction: float = option(0.0, "if > 0, the capacity outside training is "
                                        "ceil(fraction * T), for any capacity factor",
                                        flag="eval-token-fraction")
    send: str = option("rows", "how often the ragged and bounded dispatchers send a token's row. "
                       "rows: once for each of its experts; ranks: once to each rank that has some "
                       "of its experts; nodes: once to each node, which forwards it; auto: the "
                       "choice predicted or measured as fastest if parallel.mode chooses layouts, "
                       "else rows", choices=("rows", "ranks", "nodes", "auto"), flag="send")
    equal_tokens: bool = option(False, "promise that all ranks always have the same number of "
                                "tokens. This saves one small all-reduce per layer and counts "
                                "padding as tokens in the capacity", flag="equal-tokens")

    max_rows_factor: float | None = option(
        None, "bounded: a factor f limits the rows from one rank to another to ceil(f*T*k/W), for "
        "T tokens, k experts per token and W ranks, that is f times an even load. Default (none): "
        "T times the smaller of k and the number of experts per rank, which fits every load of "
        "max_tokens tokens", flag="max-rows-factor")
    max_tokens: int = option(0, "bounded: T, the largest number of tokens of one rank in a call. "
                             "0: the largest number of any rank in the first training call; set "
                             "max_tokens if later calls, including evaluation, can have more",
                             flag="max-tokens")
    stash_mib: float = option(0.0, "bounded: MiB of device memory, in pages, for the rows that "
                              "backward needs; all layers of a group share it. 0: each layer "
                              "stores its whole buffers, including unused rows. Requires "
                              "experts.compute auto, kernels, grouped or loop, no experts.dropout, "
                              "and parallel.r other than 0", flag="stash-mib")
    stash_host_mib: float = option(0.0, "MiB of pinned host memory for rows that do not fit in "
                                   "stash_mib", flag="stash-host-mib")
    on_overflow: str = option("error", "bounded: what to do after a step in which rows or pages "
                              "did not fit and the results are NaN: error raises an error, repeat "
                              "repeats the step (also in evaluation) with a larger bound",
                              choices=("error", "repeat"), flag="on-overflow")

    def check_bounds(self) -> None:
        self.require("max_rows_factor", self.max_rows_factor is None or self.max_rows_factor > 0,
                     "> 0 or none", "use 2, or none if no row may overflow")
        self.within("max_rows_factor", 0, 1e6, "use none if no row may overflow")
        self.within("max_tokens", 0, MOST_TOKENS,
                    "use 0 to use the number of tokens of the first training call")
        for name in ("stash_mib", "stash_host_mib"):
            self.within(name, 0, MOST_MIB, "use 0 for no stash")
        self.require("stash_host_mib", self.stash_mib > 0 or not self.stash_host_mib,
                     "0 where stash_mib is 0", "set stash_mib as well")
        for name in ("capacity_factor", "eval_capacity_factor"):
            self.within(name, -1e6, 1e6, "use none for no limit")
        self.require("eval_token_fraction", 0 <= self.eval_token_fraction <= 1, "in [0, 1]",
                     "use 0 to use the capacity factor")
