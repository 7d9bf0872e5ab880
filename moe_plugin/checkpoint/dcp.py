"""Load `torch.distributed.checkpoint` folders that contain former parameter names."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import DefaultLoadPlanner, Metadata

from moe_plugin.experts.base import current_name


class FormerNamesPlanner(DefaultLoadPlanner):
    """A load planner that finds the experts' biases under their current or former names.

    Example: `dcp.load(state, checkpoint_id=folder, planner=FormerNamesPlanner())`.
    """

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None,
                       is_coordinator: bool = False) -> None:
        """See `LoadPlanner`."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        assert metadata is not None
        stored = {current_name(name): name for name in metadata.state_dict_metadata}
        self.state_dict, self.mappings = (
            {stored.get(name, name): value for name, value in column.items()}
            for column in (self.state_dict, self.mappings))
