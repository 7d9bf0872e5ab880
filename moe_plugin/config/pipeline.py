"""Settings of pipeline stages, which a host with stages manages for a whole model."""

from __future__ import annotations

from dataclasses import dataclass

from moe_plugin.config.options import SettingsSection, option

SCHEDULES = ("1f1b", "eager-1f1b", "terapipe", "auto")


@dataclass(kw_only=True)
class PipelineConfig(SettingsSection):
    """The order of forward and backward passes over pipeline stages; see docs/pipeline.md."""

    PATH = "pipeline."
    SHORTHAND = "schedule"

    schedule: str = option(
        "1f1b",
        "what a stage computes when (Megatron). 1f1b: Megatron's own; eager-1f1b: more forward "
        "passes first, so that transfers between stages hide behind compute; terapipe: slices of a "
        "sequence flow through the stages; auto: the fastest of 1f1b, eager-1f1b "
        "and, with slices, terapipe that fits the memory, by measured times",
        choices=SCHEDULES, flag="pipeline-schedule", prefix="--")
    slices: str | None = option(
        None,
        "with terapipe: lengths of a sequence's slices, first to last, such as "
        "512,256,256, or how many equal ones; best, and none: the best by measured times. With "
        "auto: the same, and none: terapipe is not tried",
        flag="pipeline-slices", prefix="--")
    memory: str | None = option(
        None,
        "with auto: what the activations of all micro-batches may take on a rank, such as 8GiB; "
        "none: on a GPU what is free, on a CPU any",
        flag="pipeline-memory", prefix="--")

    def check_bounds(self) -> None:
        """Check that slices have a schedule that cuts, and memory one that chooses."""
        self.require("memory", self.memory is None or self.schedule == "auto",
                     "none without pipeline.schedule=auto", "use pipeline.schedule=auto")
        self.require("slices", self.slices is None or self.cuts,
                     "none without pipeline.schedule=terapipe or auto",
                     "use pipeline.schedule=terapipe")

    @property
    def cuts(self) -> bool:
        """Whether a model's layers may get slices of sequences."""
        tries = self.schedule == "auto" and self.slices is not None
        return self.schedule == "terapipe" or tries
