"""The settings of a layer (`MoEConfig`) and of a training run (`RunConfig`), and the functions that
read them from dictionaries and YAML files.

Command-line flags are generated from these classes by `moe_plugin.config.flags`.
"""

from moe_plugin.config.dispatch import CommConfig, DispatchConfig
from moe_plugin.config.experts import ExpertsConfig
from moe_plugin.config.parallel import ParallelConfig, TunerConfig
from moe_plugin.config.router import RouterConfig
from moe_plugin.config.run import (
    FinetuneConfig,
    GuardConfig,
    ObserveConfig,
    OffloadConfig,
    PipelineConfig,
    ResizeConfig,
    RunConfig,
    SwarmConfig,
)
from moe_plugin.config.tree import (
    MoEConfig,
    both_from_yaml,
    flatten,
    from_dict,
    from_yaml,
    of_layer,
    of_run,
    register_hydra,
    run_config,
    run_from_dict,
    settings_from_yaml,
    to_dict,
    with_overrides,
)

__all__ = [
    "CommConfig", "DispatchConfig", "ExpertsConfig", "FinetuneConfig", "GuardConfig", "MoEConfig",
    "ObserveConfig", "OffloadConfig", "ParallelConfig", "PipelineConfig", "ResizeConfig",
    "RouterConfig", "RunConfig", "SwarmConfig", "TunerConfig",
    "both_from_yaml", "flatten", "from_dict", "from_yaml", "of_layer", "of_run", "register_hydra",
    "run_config", "run_from_dict", "settings_from_yaml", "to_dict", "with_overrides",
]
