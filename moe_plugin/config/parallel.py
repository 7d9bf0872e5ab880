"""Settings for the parallel layout of a layer (`parallel`), and for the tuner that measures layouts
during training (`tuner`).
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_plugin.config.options import MOST_EXPERTS, MOST_RANKS, MOST_STEPS, SettingsSection, option

CUTS = ("rows", "experts", "peers")
MOST_PIECES, MOST_TRIALS = 4096, 10_000  # far above any practical value
MEASURED = "measured"
LEAST_SPEED = 1e-6


@dataclass(kw_only=True)
class ParallelConfig(SettingsSection):
    """Parallel layout of a layer. `parallel: auto` is short for `parallel: {mode: auto}`."""

    PATH = "parallel."
    SHORTHAND = "mode"

    mode: str | None = option(
        None, "how the layout is chosen. fixed: the layout given in this section; predicted: "
        "chosen once, by the predicted time for the tokens of the first call; auto: measured and "
        "chosen during training, for the current load. Default (none): fixed if this section sets "
        "a layout or there is only one rank; else auto if the group spans several nodes, and "
        "predicted on one node", choices=("fixed", "predicted", "auto"), flag="parallel")
    r: int | None = option(None, "routing degree. 0: gather the parameters of all experts, without "
                           "an all-to-all; r >= 1 (a divisor of the number of ranks that share an "
                           "expert): each token is sent to r ranks. Default (none): the number of "
                           "ranks that share an expert", flag="parallel-r", alias="routing_degree")
    shards: int | None = option(
        None, "number of ranks over which every expert is split along its inner width (Megatron's "
        "expert-tensor parallelism); must divide the number of expert-parallel ranks. Default "
        "(none): the smallest possible number, ranks/experts but at least 1", flag="expert-shards")
    d: int = option(1, "overlap degree: number of pieces in which rows are sent and computed, so "
                    "that sending and computing overlap; 1: no overlap", flag="overlap",
                    alias="overlap_degree")
    d_backward: int = option(0, "overlap degree of the backward pass; 0: same as forward",
                             flag="overlap-backward")
    cut: str = option("rows", "how rows are cut into pieces. rows: every piece contains some rows "
                      "of each expert and rank; experts: a rank's experts one after another "
                      "(EPS-MoE); peers: ranks one after another, with the rows that stay on the "
                      "rank first and last (FasterMoE)", choices=CUTS, flag="overlap-cut")
    prefill: bool = option(False, "in evaluation and generation, choose the number of pieces of "
                           "each call, and whether to cut along rows or experts, by the predicted "
                           "time for its load (EPS-MoE), instead of using d and cut",
                           flag="prefill-pieces")
    replicas: int = option(1, "number of consecutive expert-parallel ranks that have the same "
                           "tokens (tensor parallelism without sequence parallelism)",
                           flag="replicas")
    schedule: str = option("auto", "with replicas: s1 splits the tokens before the router, s2 "
                           "splits the slots after it (needs a capacity); auto: the faster one "
                           "according to the cost model", choices=("auto", "s1", "s2"),
                           flag="replicas-schedule")
    spill: str | None = option(
        None, "whether other ranks borrow the weights of overloaded experts for one call and "
        "compute some of their rows, if this is predicted to be faster. least_loaded: rows above a "
        "rank's share move to the least loaded ranks (LLEP); everywhere: every rank computes its "
        "own rows (FasterMoE's shadowing); standing: replicas are placed by the loads of earlier "
        "steps, see replan; never: rows do not move. Default (none): chosen for the load with mode "
        "auto, else never", choices=("never", "least_loaded", "everywhere", "standing"),
        flag="spill")
    replan: int = option(100, "with spill=standing: number of steps after which the replicas are "
                         "placed again, by the mean load of these steps", flag="replan")
    guests: int = option(2, "with spill: largest number of experts that a rank borrows at the same "
                         "time. Each borrowed expert needs memory for its weights and gradients",
                         flag="guests")
    speeds: str | None = option(None, "with spill: relative speeds of the expert-parallel ranks, "
                                "separated by commas, in the order of ranks. Slower ranks receive "
                                "fewer of the rows that move. measured: with spill=standing, "
                                "moving averages of the ranks' compute times. Default (none): all "
                                "ranks are equally fast", flag="speeds")

    def check_bounds(self) -> None:
        # Only bounds are checked here. Whether a setting is read may depend on the group of ranks,
        # which is not known yet if the layout is left open.
        for name, least, most in (("d", 1, MOST_PIECES), ("d_backward", 0, MOST_PIECES),
                                  ("replicas", 1, MOST_RANKS), ("guests", 1, MOST_EXPERTS),
                                  ("replan", 1, MOST_STEPS)):
            self.within(name, least, most, f"use {max(1, least)}")
        self.within("r", 0, MOST_RANKS, "use none")
        self.within("shards", 1, MOST_RANKS, "use none")
        self.require("speeds", self.speeds is None or self.speeds == MEASURED
                     or _are_speeds(self.speeds),
                     "numbers > 0 separated by commas, or measured",
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
        """True if every setting allows layouts to be measured during training."""
        return self.mode in (None, "auto")

    def rank_speeds(self, ranks: int) -> tuple[float, ...] | None:
        """Return the setting `speeds` as a sequence of numbers.

        Returns: The relative speed of each rank, or None if the user gave no speeds or requested
            that they be measured.
        Raises:
            ValueError: If the number of speeds differs from `ranks`.
        """
        if self.speeds is None or self.speeds == MEASURED:
            return None
        speeds = tuple(float(word) for word in self.speeds.split(","))
        self.require("speeds", len(speeds) == ranks,
                     f"as many numbers as expert-parallel ranks, {ranks}",
                     "give one number per rank")
        return speeds


def _are_speeds(text: str) -> bool:
    try:
        return all(LEAST_SPEED <= float(word) <= 1 / LEAST_SPEED for word in text.split(","))
    except ValueError:
        return False


@dataclass(kw_only=True)
class TunerConfig(SettingsSection):
    """How `parallel.mode: auto` searches for the fastest layout. See docs/adaptive.md."""

    PATH = "tuner."

    max_d: int = option(4, "auto: largest overlap degree that is tried (1, 2, 4, ... up to max_d)",
                        flag="overlap-max")
    tries: int = option(6, "auto: number of layouts timed for a new load, in the order of "
                        "predicted speed", flag="parallel-tries")
    samples: int = option(2, "auto: smallest number of rounds of timed calls before layouts are "
                          "compared", flag="parallel-samples")
    drift: float = option(0.3, "auto: relative change of a layer's time after which the layer is "
                          "tuned again", flag="parallel-drift")
    bucket: float = option(1.5, "auto: loads that differ by at most this factor share one choice "
                           "of layout", flag="parallel-bucket")
    device: str | None = option(None, "device file for the cost model (see configs/devices). "
                                "Default (none): default values of the model",
                                flag="parallel-device")

    def check_bounds(self) -> None:
        for name, most in (("max_d", MOST_PIECES), ("tries", MOST_TRIALS),
                           ("samples", MOST_TRIALS)):
            self.within(name, 1, most, "use 1")
        self.require("drift", self.drift > 0, "> 0", "use 0.3")
        self.require("bucket", self.bucket > 1, "> 1", "use 1.5")
