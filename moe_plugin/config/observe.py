"""Settings of statistics."""

from __future__ import annotations

from dataclasses import dataclass

from moe_plugin.config.options import check, check_leaves, option


@dataclass(kw_only=True)
class ObserveConfig:
    """Where the layers' statistics go besides the host's own log."""

    interval: int = option(100, "steps between two records", flag="stats-interval")
    jsonl: str | None = option(None, "file to which one JSON object a record is appended",
                               flag="stats-jsonl")
    tensorboard: str | None = option(None, "directory for TensorBoard event files",
                                     flag="stats-tensorboard")
    timeline: int = option(
        0,
        "training step of which rank 0 writes a timeline to the JSONL file (slows that step down); "
        "0: none",
        flag="stats-timeline")

    def __post_init__(self) -> None:
        check_leaves(self, "observe.")
        check(self.interval >= 1, "observe.interval", self.interval, ">= 1", "use 100")
        check(self.timeline >= 0, "observe.timeline", self.timeline, ">= 0",
              "use 0 for none, or the number of a step")
        check(not self.timeline or self.jsonl is not None, "observe.timeline", self.timeline,
              "0 without observe.jsonl", "it is written there: name a file")
