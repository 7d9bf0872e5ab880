"""Settings of layouts, and of the tuner that measures them while a layer trains."""

from __future__ import annotations

from dataclasses import dataclass

from moe_plugin.config.options import (
    MOST_EXPERTS,
    MOST_RANKS,
    MOST_STEPS,
    SettingsSection,
    option,
)

CUTS = ("rows", "experts", "peers")
MOST_PIECES, MOST_TRIALS = 4096, 10_000  # beyond any use
MEASURED = "measured"
LEAST_SPEED = 1e-6


@dataclass(kw_only=True)
class ParallelConfig(SettingsSection):
    """Layout of a layer, fixed or tuned. `parallel: auto` is short for `parallel: {mode: auto}`."""

    PATH = "parallel."
    SHORTHAND = "mode"

    mode: str | None = option(
        None,
        "fixed: the layout given here; predicted: chosen once, by predicted time for the tokens of "
        "the first call; auto: measured and chosen during training, for the current load; none: "
        "fixed where a layout is named here or there is one rank, else auto where the group spans "
        "nodes and predicted on one node",
        choices=("fixed", "predicted", "auto"), flag="parallel")
    r: int | None = option(
        None,
        "routing degree. 0: gather all experts' parameters, no all-to-all; r >= 1 (a divisor of "
        "the ranks that an expert is cut over): each token goes to r ranks; none: as many as an "
        "expert is cut into",
        flag="parallel-r", alias="routing_degree")
    shards: int | None = option(
        None,
        "ranks over which every expert is cut along its inner width (Megatron's expert-tensor "
        "parallelism), a divisor of the expert-parallel ranks; none: as few as the experts leave, "
        "ranks/experts and at least 1",
        flag="expert-shards")
    d: int = option(
        1,
        "overlap degree: pieces in which rows are sent and computed, so that both overlap; 1: no "
        "overlap",
        flag="overlap", alias="overlap_degree")
    d_backward: int = option(0, "overlap degree of the backward pass; 0: as forward",
                             flag="overlap-backward")
    cut: str = option(
        "rows",
        "how pieces are cut. rows: some of each expert and rank in every piece; experts: a rank's "
        "experts one after another (EPS-MoE); peers: ranks one after another, rows that stay first "
        "and last (FasterMoE)",
        choices=CUTS, flag="overlap-cut")
    prefill: bool = option(
        False,
        "in evaluation and generation, cut each call's rows by its load: as many pieces, along "
        "rows or experts, as are predicted to take the least time (EPS-MoE), in place of d and cut",
        flag="prefill-pieces")
    replicas: int = option(
        1,
        "consecutive expert-parallel ranks that have the same tokens (tensor parallelism without "
        "sequence parallelism)",
        flag="replicas")
    schedule: str = option(
        "auto",
        "with replicas: s1 splits tokens before the router, s2 the slots after it (needs a "
        "capacity); auto: the faster one by the cost model",
        choices=("auto", "s1", "s2"), flag="replicas-schedule")
    spill: str | None = option(
        None,
        "rows of overloaded experts, computed on ranks that borrow the expert's weights for one "
        "call, where a prediction for its load says that this is faster. least_loaded: rows above "
        "a rank's share, on the least loaded ranks (LLEP); everywhere: every rank keeps its own "
        "rows (FasterMoE's shadowing); standing: replicas placed by the loads of earlier steps, "
        "see replan; never; none: by the load with mode auto, else never",
        choices=("never", "least_loaded", "everywhere", "standing"), flag="spill")
    replan: int = option(
        100,
        "with spill standing: steps after which replicas are placed again, by the mean load of "
        "these steps",
        flag="replan")
    guests: int = option(
        2,
        "experts that a rank may borrow at a time with spill: each takes the memory of an expert's "
        "weights and gradients",
        flag="guests")
    speeds: str | None = option(
        None,
        "with spill: speeds of the expert-parallel ranks relative to each other, with commas, in "
        "the order of ranks; slower ranks get fewer of the rows that move; measured: with spill "
        "standing, moving averages of what ranks take; none: all alike",
        flag="speeds")

    def check_bounds(self) -> None:
        # a layout that is left open may read less, once the group of ranks is known
        for name, least, most in (("d", 1, MOST_PIECES), ("d_backward", 0, MOST_PIECES),
                                  ("replicas", 1, MOST_RANKS), ("guests", 1, MOST_EXPERTS),
                                  ("replan", 1, MOST_STEPS)):
            self.within(name, least, most, f"use {max(1, least)}")
        self.within("r", 0, MOST_RANKS, "use none")
        self.within("shards", 1, MOST_RANKS, "use none")
        self.require("speeds", self.speeds is None or self.speeds == MEASURED
                     or _are_speeds(self.speeds),
                     "numbers > 0 with commas, or measured",
                     "use 1,1,0.5,1 for four ranks, or none")
        self.require("speeds", self.speeds != MEASURED or self.spill == "standing",
                     "numbers where parallel.spill is not standing",
                     "set parallel.spill=standing, or give numbers")
        lends = self.spill not in (None, "never") or (self.spill is None and self.may_be_tuned)
        self.read_where(lends, f"where parallel.spill={self.spill or 'never'}",
                        "use parallel.spill=least_loaded", "guests", "speeds")
        self.read_where(self.replicas > 1, "where parallel.replicas=1", "use parallel.replicas=2",
                        "schedule")
        self.read_where(self.spill == "standing", f"where parallel.spill={self.spill or 'never'}",
                        "use parallel.spill=standing", "replan")

    @property
    def may_be_tuned(self) -> bool:
        """Whether layouts are measured while training, as far as settings alone say it."""
        return self.mode in (None, "auto")

    def rank_speeds(self, ranks: int) -> tuple[float, ...] | None:
        """`speeds` as numbers; None: not given, or measured. `ValueError`: another number than
        `ranks`.
        """
        if self.speeds is None or self.speeds == MEASURED:
            return None
        speeds = tuple(float(word) for word in self.speeds.split(","))
        self.require("speeds", len(speeds) == ranks,
                     f"as many numbers as expert-parallel ranks, {ranks}", "give one for each")
        return speeds


def _are_speeds(text: str) -> bool:
    try:
        return all(LEAST_SPEED <= float(word) <= 1 / LEAST_SPEED for word in text.split(","))
    except ValueError:
        return False


@dataclass(kw_only=True)
class TunerConfig(SettingsSection):
    """How `parallel.mode: auto` looks for the fastest layout; see docs/adaptive.md."""

    PATH = "tuner."

    max_d: int = option(4, "auto: largest overlap degree tried (1, 2, 4, ... up to it)",
                        flag="overlap-max")
    tries: int = option(6, "auto: layouts timed for a new load, the best predicted first",
                        flag="parallel-tries")
    samples: int = option(2, "auto: rounds of timed calls, at least, before layouts are compared",
                         flag="parallel-samples")
    drift: float = option(
        0.3, "auto: relative change of a layer's time after which it is tuned again",
        flag="parallel-drift")
    bucket: float = option(1.5, "auto: loads within this factor of each other share a choice",
                           flag="parallel-bucket")
    device: str | None = option(
        None, "device file for the cost model (see configs/devices); none: default values",
        flag="parallel-device")

    def check_bounds(self) -> None:
        for name, most in (("max_d", MOST_PIECES), ("tries", MOST_TRIALS),
                           ("samples", MOST_TRIALS)):
            self.within(name, 1, most, "use 1")
        self.require("drift", self.drift > 0, "> 0", "use 0.3")
        self.require("bucket", self.bucket > 1, "> 1", "use 1.5")
