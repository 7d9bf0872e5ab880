"""Settings of layouts and of the tuner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moe_plugin.config.options import check, check_leaves, option


@dataclass(kw_only=True)
class ParallelConfig:
    """In which layout a layer runs, and whether it finds out by itself. `parallel: auto` is short
    for `parallel: {mode: auto}`.
    """

    SHORTHAND: ClassVar[str] = "mode"

    mode: str = option(
        "fixed",
        "fixed: the layout named here; auto: measured and chosen while training runs, for the "
        "current load",
        choices=("fixed", "auto"), flag="parallel")
    r: int | None = option(
        None,
        "0: gather all experts' parameters, no all-to-all; r >= 1 (a divisor of the ranks that an "
        "expert is cut over): each token goes to r ranks; "
        "none: as many as an expert is cut into", flag="parallel-r")
    shards: int | None = option(
        None,
        "ranks over which every expert is cut along its inner width (Megatron's expert-tensor "
        "parallelism), a divisor of the expert-parallel "
        "ranks; none: as few as the experts leave, ranks/experts and at least 1",
        flag="expert-shards")
    d: int = option(
        1, "pieces in which rows travel and are computed, so that both overlap; 1: no overlap",
        flag="overlap")
    d_backward: int = option(0, "the same for backward; 0: as forward", flag="overlap-backward")
    replicas: int = option(
        1,
        "consecutive expert-parallel ranks that hold the same tokens (tensor parallelism without "
        "sequence parallelism)",
        flag="replicas")
    schedule: str = option(
        "auto",
        "with replicas: s1 splits tokens before the gate, s2 the slots after it (needs a "
        "capacity); auto: by the "
        "cost model", choices=("auto", "s1", "s2"), flag="replicas-schedule")
    shadow: int = option(
        0,
        "most hot experts at a time whose weights are sent to all ranks instead of their tokens "
        "(FasterMoE); 0: none",
        flag="shadow")
    max_d: int = option(4, "auto: the most pieces tried (1, 2, 4, ... up to it)",
                        flag="overlap-max")
    tries: int = option(4,
                        "auto: layouts timed for a load not seen before, the best predicted first",
                        flag="parallel-tries")
    samples: int = option(2, "auto: timed calls a layout", flag="parallel-samples")
    drift: float = option(0.3,
                          "auto: relative change of a layer's time after which it is tuned again",
                          flag="parallel-drift")
    bucket: float = option(1.5, "auto: loads within this factor of each other share a choice",
                           flag="parallel-bucket")
    device: str | None = option(
        None, "auto: device file for the cost model (see configs/devices); none: default values",
        flag="parallel-device")

    def __post_init__(self) -> None:
        check_leaves(self, "parallel.")
        for name, least in (("d", 1), ("d_backward", 0), ("max_d", 1), ("tries", 1), ("samples", 1),
                            ("replicas", 1), ("shadow", 0)):
            check(
                getattr(self, name) >= least, f"parallel.{name}", getattr(self, name),
                f">= {least}", f"use {max(1, least)}")
        check(self.r is None or self.r >= 0, "parallel.r", self.r, ">= 0 or none", "use none")
        check(self.shards is None or self.shards >= 1, "parallel.shards", self.shards,
              ">= 1 or none", "use none")
        check(self.drift > 0, "parallel.drift", self.drift, "> 0", "use 0.3")
        check(self.bucket > 1, "parallel.bucket", self.bucket, "> 1", "use 1.5")
