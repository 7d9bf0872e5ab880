"""Settings of statistics."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moe_plugin.config.options import SettingsSection, option

_PROJECT = re.compile(r"([\w.-]+/)?[\w.-]{1,128}")


@dataclass(kw_only=True)
class ObserveConfig(SettingsSection):
    """Where the layers' statistics go besides the host's own log."""

    PATH = "observe."

    interval: int = option(100, "steps between two records", flag="stats-interval")
    jsonl: str | None = option(None, "file to which one JSON object per record is appended",
                               flag="stats-jsonl")
    tensorboard: str | None = option(None, "directory for TensorBoard event files",
                                     flag="stats-tensorboard")
    wandb: str | None = option(
        None,
        "PROJECT or ENTITY/PROJECT of Weights & Biases to which a run is added",
        flag="stats-wandb")
    timeline: int = option(
        0,
        "training step of which rank 0 writes a timeline to the JSONL file (slows that step "
        "down); 0: none",
        flag="stats-timeline")

    @property
    def writes(self) -> bool:
        """Whether statistics go anywhere besides the host's own log."""
        return bool(self.jsonl or self.tensorboard or self.wandb)

    def check_bounds(self) -> None:
        """Check steps, and that a timeline has a file."""
        self.require("interval", self.interval >= 1, ">= 1", "use 100")
        self.require("timeline", self.timeline >= 0, ">= 0",
                     "use 0 for none, or the number of a step")
        self.require("wandb", self.wandb is None or _PROJECT.fullmatch(self.wandb) is not None,
                     "PROJECT or ENTITY/PROJECT", "use letters, digits and -_. in both, e.g. moe")
        self.require("timeline", not self.timeline or self.jsonl is not None,
                     "0 without observe.jsonl", "it is written there: name a file")
