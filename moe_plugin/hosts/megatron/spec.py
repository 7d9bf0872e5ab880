"""Functions that put this package's MoE layer into a model. Call `swap_moe` in your own program, or
select one of the layer specs with `--spec`.

Usage in code, with any spec that Megatron's functions build:

    spec = swap_moe(get_gpt_layer_local_spec(num_experts=8), {"comm.all_to_all": "leader"})

Usage on the command line of Megatron's training script:

    --spec moe_plugin.hosts.megatron.spec moe_layer          Transformer Engine if installed,
    otherwise Megatron's own layers
    --spec moe_plugin.hosts.megatron.spec moe_layer_local    Megatron's own layers

Both specs follow the script's arguments for attention (`--qk-layernorm`,
`--multi-latent-attention`, `--qk-l2-norm`), normalization, `--moe-layer-freq` and multi-token
prediction. With `--hybrid-layer-pattern`, both specs return the layer stack of a `HybridModel`. The
settings come from the launcher (`python -m moe_plugin.hosts.megatron.launch pretrain_gpt.py ...`),
which adds this package's arguments to the script. Without the launcher, write a module with
`spec = script_spec("settings.yaml")` and pass `--spec your_module spec`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from megatron.core import parallel_state

from moe_plugin.config import run_config, settings_from_yaml
from moe_plugin.config.options import MOST_EXPERTS
from moe_plugin.config.tree import unread
from moe_plugin.hosts.megatron.compat import core
from moe_plugin.hosts.megatron.compat.settings import (
    WITH_HYBRID,
    replace_training,
    script_arguments,
    script_config,
    setting,
)
from moe_plugin.hosts.megatron.compat.stage_specs import StageSpecs, in_one_stage
from moe_plugin.hosts.megatron.layer import PluginMoELayer
from moe_plugin.hosts.megatron.refusals import HYBRID, SPEC
from moe_plugin.hosts.megatron.translate import settings_from_flags
from moe_plugin.utils.messages import short


def swap_moe(spec: Any, settings: Mapping[str, Any] | str | None = None, *,
             allow_none: bool = False) -> Any:
    """Return a copy of a Megatron spec in which this package's layer replaces every MoE layer.

    Args:
        spec: spec of a transformer layer, `TransformerBlockSubmodules`, or the layer stack of a
            `HybridModel`. The given spec is not modified.
        settings: settings of this package. `settings` can be a mapping from dotted paths to values,
            or the path of a YAML file. A file with `imports` is rejected (see
            `moe_plugin.config.settings_from_yaml`). By default, the settings passed to the launcher
            are used, or this package's defaults if the launcher is not used.
        allow_none: True to accept a spec without MoE layers, for example the spec of a pipeline
            stage that has only dense layers.
    Raises:
        ValueError: If the spec has no MoE layer, or if a setting is invalid.
    """
    settings = _checked(settings)
    swapped, count = core.swap_spec(spec, PluginMoELayer, {"settings": settings})
    if not count and not allow_none:
        raise ValueError(
            f"No MoE layer found in a spec of type {type(spec).__name__}. Build the spec with "
            "num_experts set, and pass the spec of a transformer layer or a "
            "TransformerBlockSubmodules.")
    return swapped


def _checked(settings: Mapping[str, Any] | str | None) -> Mapping[str, Any] | None:
    """Check the names, types and bounds of settings, and return the settings by dotted path.

    Values that depend on Megatron's own settings, such as the number of experts, are checked when
    a layer is built.
    """
    if isinstance(settings, str):
        return settings_from_yaml(settings)
    if settings:
        unread({"losses": {}, "num_experts": MOST_EXPERTS, **settings})
    return settings


def swap_attention(spec: Any) -> Any:
    """Return a copy of a Megatron layer or block spec whose attention supports sequence slices.

    `pipeline.schedule=terapipe` requires these attention modules. Whole sequences are still
    computed by Megatron's `DotProductAttention`.
    """
    # imported here: it imports Megatron's layers, which other schedules may not have
    from moe_plugin.hosts.megatron.pipeline.attention import SliceAttention

    return core.replace_attention(spec, SliceAttention)


def script_spec(settings: Mapping[str, Any] | str | None = None, *,
                transformer_engine: bool | None = None) -> Any:
    """Return an object for `--spec` that builds the script's layers with our MoE layer.

    It is a function, which the model builder calls, if arguments and groups do not exist yet.
    Raises: ValueError: If an argument requests layers that are not Megatron's standard layers.
    """
    arguments, settings = script_arguments(), _checked(settings)
    SPEC.refuse(arguments)
    if transformer_engine is None and arguments.get("transformer_impl") == "local":
        transformer_engine = False
    if arguments.get("hybrid_layer_pattern"):
        return _hybrid_stack(settings, transformer_engine)
    if arguments and parallel_state.model_parallel_is_initialized():
        return _block(settings, transformer_engine)
    # newer scripts import the spec before process groups exist; their model builder accepts a
    # function in place of a spec and calls it
    return functools.partial(_later_block, settings, transformer_engine)


def _hybrid_stack(settings: Mapping[str, Any] | None, transformer_engine: bool | None) -> Any:
    arguments = script_arguments()
    try:
        from moe_plugin.hosts.megatron.compat import hybrid
    except ModuleNotFoundError as error:
        raise ValueError(
            f"hybrid_layer_pattern={short(arguments['hybrid_layer_pattern'])} needs a version of "
            f"Megatron with HybridModel ({error}). Install {WITH_HYBRID}.") from error
    given = settings_from_flags(arguments) if settings is None else settings
    pipeline = run_config(given).pipeline
    HYBRID.refuse({**arguments, "pipeline.schedule": pipeline.schedule, "cuts": pipeline.cuts})
    hybrid.mend_loss_log()
    return _swapped(hybrid.stack_spec(script_config(), arguments["hybrid_layer_pattern"],
                                      transformer_engine), settings, allow_none=False)


def _block(settings: Mapping[str, Any] | None, transformer_engine: bool | None) -> Any:
    config = script_config()

    def of_stage(vp_stage: int | None) -> Any:
        return _swapped(core.gpt_block_spec(config, transformer_engine, vp_stage), settings)

    if not config.virtual_pipeline_model_parallel_size and not setting(
            config, "pipeline_model_parallel_layout"):
        return of_stage(None)
    return StageSpecs(_all_layers(config, settings, transformer_engine), of_stage)


def _all_layers(config: Any, settings: Mapping[str, Any] | None,
                transformer_engine: bool | None) -> Any:
    return _swapped(core.gpt_block_spec(in_one_stage(config), transformer_engine), settings)


def _later_block(settings: Mapping[str, Any] | None, transformer_engine: bool | None,
                 _model_config: Any, vp_stage: int | None = None) -> Any:
    if not script_arguments():
        raise ValueError("--spec moe_plugin.hosts.megatron.spec needs the arguments of Megatron's "
                         "training script, but no arguments were parsed. In your own program use "
                         "moe_plugin.hosts.megatron.spec.swap_moe.")
    config = script_config()
    if config.mtp_num_layers:  # the builder would use Megatron's own spec for these layers
        whole = _all_layers(config, settings, transformer_engine)
        replace_training("mtp_block_spec", lambda _: lambda _config, _layers, vp_stage=None: (
            core.predictions_spec(config, whole, transformer_engine, vp_stage)))
    return _swapped(core.gpt_block_spec(config, transformer_engine, vp_stage), settings)


def _swapped(block: Any, settings: Mapping[str, Any] | None, allow_none: bool = True) -> Any:
    given = settings_from_flags(script_arguments()) if settings is None else settings
    if run_config(given).pipeline.cuts:
        block = swap_attention(block)
    if script_arguments().get("native_moe"):
        return block
    return swap_moe(block, settings, allow_none=allow_none)


moe_layer = script_spec()
moe_layer_local = script_spec(transformer_engine=False)
