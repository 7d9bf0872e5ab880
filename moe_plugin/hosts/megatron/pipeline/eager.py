"""Eager 1F1B (AlpaComm, arXiv 2211.05322): more forward passes first, transfers behind compute."""

from __future__ import annotations

from typing import Any

from moe_plugin.hosts.megatron.pipeline.base import PipelineSchedule, register
from moe_plugin.hosts.megatron.pipeline.executor import Step


@register
class EagerSchedule(PipelineSchedule):
    """Stage i of n begins with 2 (n - i) - 1 forward passes, so that nothing waits for transfers.
    """

    name = "eager-1f1b"

    def step(self, passes: dict[str, Any], config: Any) -> list[Any]:
        """See `PipelineSchedule`."""
        return Step(passes, config, self.group, self.gradients, "eager").run()
