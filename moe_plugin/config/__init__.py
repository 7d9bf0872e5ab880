"""The settings tree: one file per section, flags generated from it, YAML files, users' own modules.
"""

from moe_plugin.config.comm import CommConfig
from moe_plugin.config.dispatch import DispatchConfig
from moe_plugin.config.experts import ExpertsConfig
from moe_plugin.config.guard import GuardConfig
from moe_plugin.config.observe import ObserveConfig
from moe_plugin.config.offload import OffloadConfig
from moe_plugin.config.parallel import ParallelConfig
from moe_plugin.config.pipeline import PipelineConfig
from moe_plugin.config.router import RouterConfig
from moe_plugin.config.tree import (
    MoEConfig,
    flatten,
    from_dict,
    from_yaml,
    register_hydra,
    settings_from_yaml,
    to_dict,
    with_overrides,
)

__all__ = [
    "CommConfig", "DispatchConfig", "ExpertsConfig", "GuardConfig", "MoEConfig", "ObserveConfig",
    "OffloadConfig", "ParallelConfig", "PipelineConfig", "RouterConfig", "flatten", "from_dict",
    "from_yaml", "register_hydra", "settings_from_yaml", "to_dict", "with_overrides",
]
