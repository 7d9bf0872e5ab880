"""Plans of what lies where and when it is copied: pre-gated experts, KARMA, ATOM.

Never imports torch.
"""

from moe_plugin.planner.offload.schedule import OffloadSchedule, OffloadStep, Outcome

__all__ = ["OffloadSchedule", "Outcome", "OffloadStep"]
