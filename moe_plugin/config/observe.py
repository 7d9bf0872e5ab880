"""Settings of statistics."""

from __future__ import annotations

from dataclasses import dataclass

from moe_plugin.config.options import Section, option


@dataclass(kw_only=True)
class ObserveConfig(Section):
    """Where the layers' statistics go besides the host's own log."""

    PATH = "observe."

    interval: int = option(100, "steps between two records", flag="stats-interval")
    jsonl: str | None = option(None, "file to which one JSON object per record is appended",
                               flag="stats-jsonl")
    tensorboard: str | None = option(None, "directory for TensorBoard event files",
                                     flag="stats-tensorboard")
    timeline: int = option(
        0,
        "training step of which rank 0 writes a timeline to the JSONL file (slows that step "
        "down); 0: none",
        flag="stats-timeline")

    def check_bounds(self) -> None:
        """Check steps, and that a timeline has a file."""
        self.require("interval", self.interval >= 1, ">= 1", "use 100")
        self.require("timeline", self.timeline >= 0, ">= 0",
                     "use 0 for none, or the number of a step")
        self.require("timeline", not self.timeline or self.jsonl is not None,
                     "0 without observe.jsonl", "it is written there: name a file")
