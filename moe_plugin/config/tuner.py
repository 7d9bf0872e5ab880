"""Settings of the tuner, which measures layouts while a layer trains."""

from __future__ import annotations

from dataclasses import dataclass

from moe_plugin.config.options import SettingsSection, option
from moe_plugin.config.parallel import MOST_PIECES

MOST_TRIALS = 10_000  # beyond any use


@dataclass(kw_only=True)
class TunerConfig(SettingsSection):
    """How `parallel.mode: auto` looks for the fastest layout; see docs/adaptive.md."""

    PATH = "tuner."

    max_d: int = option(4, "auto: largest overlap degree tried (1, 2, 4, ... up to it)",
                        flag="overlap-max")
    tries: int = option(6, "auto: layouts timed for a new load, the best predicted first",
                        flag="parallel-tries")
    samples: int = option(2, "auto: timed calls per layout", flag="parallel-samples")
    drift: float = option(
        0.3, "auto: relative change of a layer's time after which it is tuned again",
        flag="parallel-drift")
    bucket: float = option(1.5, "auto: loads within this factor of each other share a choice",
                           flag="parallel-bucket")
    device: str | None = option(
        None, "device file for the cost model (see configs/devices); none: default values",
        flag="parallel-device")

    def check_bounds(self) -> None:
        """Check the numbers."""
        for name, most in (("max_d", MOST_PIECES), ("tries", MOST_TRIALS),
                           ("samples", MOST_TRIALS)):
            self.within(name, 1, most, "use 1")
        self.require("drift", self.drift > 0, "> 0", "use 0.3")
        self.require("bucket", self.bucket > 1, "> 1", "use 1.5")
