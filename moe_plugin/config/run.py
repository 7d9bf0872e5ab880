"""The settings of a run: what a host, or your own training loop, does with a whole model."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_plugin.config.guard import GuardConfig
from moe_plugin.config.observe import ObserveConfig
from moe_plugin.config.offload import OffloadConfig
from moe_plugin.config.options import SettingsSection
from moe_plugin.config.pipeline import PipelineConfig

# what reads them outside of fairseq and Megatron; the first beginning of a path counts
READERS = {
    "offload.weights": "give it to moe_plugin.hosts.plain.streamed.streamed_trainer",
    "offload.": "call moe_plugin.memory.activations.auto.manage in your training loop",
    "pipeline.": "use Megatron, which has pipeline stages",
    "guard.twins": "use moe_plugin.resilience.twins.TwinCheck, or a host, fairseq or Megatron",
    "observe.": "give an ObserveConfig to moe_plugin.observe.recorder.StatsRecorder in your loop, "
                "or use a host, fairseq or Megatron",
    "guard.": "use moe_plugin.resilience.vote.VotedGradients, or a host, fairseq or Megatron",
}


@dataclass(kw_only=True)
class RunConfig(SettingsSection):
    """All settings of a run that no single layer reads."""

    observe: ObserveConfig = field(default_factory=ObserveConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)

    def check_bounds(self) -> None:
        """Check settings of several sections against each other."""
        cuts = self.pipeline.cuts
        self.require("offload.activations", not cuts or self.offload.activations == "keep",
                     f"keep where pipeline.schedule={self.pipeline.schedule} cuts sequences",
                     "use Megatron's --recompute-granularity with slices of sequences, or "
                     "pipeline.schedule=1f1b")


def reader_of(path: str) -> str:
    """What to do with a run's setting, by its path, where there is no host."""
    return next(text for start, text in READERS.items() if f"{path}.".startswith(start))
