"""Putting the layer into a model: `swap_moe` for code, layer specs for `--spec`.

In code, with any spec that Megatron's functions build:

    spec = swap_moe(get_gpt_layer_local_spec(num_experts=8), {"comm.all_to_all": "leader"})

On the command line of Megatron's training script:

    --spec moe_plugin.hosts.megatron.spec moe_layer          Transformer Engine where installed,
    else Megatron's own layers
    --spec moe_plugin.hosts.megatron.spec moe_layer_local    Megatron's own layers

Both follow the script's arguments: attention (`--qk-layernorm`, `--multi-latent-attention`,
`--qk-l2-norm`), normalization, `--moe-layer-freq`, multi-token prediction, and are the stack of a
`HybridModel` with `--hybrid-layer-pattern`. Settings come from the
launcher
(`python -m moe_plugin.hosts.megatron.launch pretrain_gpt.py ...`), which adds our arguments.
Without it: a module of your own with `spec = script_spec("settings.yaml")`, and
`--spec your_module spec`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

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
from moe_plugin.hosts.megatron.translate import settings_from_flags
from moe_plugin.utils.messages import short


def swap_moe(spec: Any, settings: Mapping[str, Any] | str | None = None, *,
             allow_none: bool = False) -> Any:
    """A copy of a Megatron layer or block spec with every MoE layer replaced by ours.

    Args:
        spec: transformer layer spec, `TransformerBlockSubmodules`, or the stack of a
            `HybridModel`; it is left as it is.
        settings: ours, dotted paths to values, or the path of a YAML file (one with `imports` is
            refused: see `moe_plugin.config.settings_from_yaml`); None: the launcher's arguments
            where it runs, else defaults.
        allow_none: do not mind a spec without MoE layers (a pipeline stage of dense layers).
    Raises:
        ValueError: no MoE layer in the spec, or bad settings.
    """
    settings = _checked(settings)
    swapped, count = core.swap_spec(spec, PluginMoELayer, {"settings": settings})
    if not count and not allow_none:
        raise ValueError(
            f"no MoE layer found in a spec of type {type(spec).__name__}; build it with "
            "num_experts set, and pass the "
            "transformer layer's spec or a TransformerBlockSubmodules")
    return swapped


def _checked(settings: Mapping[str, Any] | str | None) -> Mapping[str, Any] | None:
    """Settings by dotted path, whose names, types and bounds are those of the tree. What Megatron's
    own settings decide, such as the number of experts, is compared when a layer is built.
    """
    if isinstance(settings, str):
        return settings_from_yaml(settings)
    if settings:
        unread({"losses": {}, "num_experts": MOST_EXPERTS, **settings})
    return settings


def swap_attention(spec: Any) -> Any:
    """A copy of a Megatron layer or block spec whose attention can take slices of sequences, for
    `pipeline.schedule=terapipe`; with whole sequences it is Megatron's `DotProductAttention`.
    """
    # imported here: it imports Megatron's layers, which other schedules may not have
    from moe_plugin.hosts.megatron.pipeline.attention import SliceAttention

    return core.replace_attention(spec, SliceAttention)


def script_spec(settings: Mapping[str, Any] | str | None = None, *,
                transformer_engine: bool | None = None) -> Any:
    """What `--spec` gives Megatron's training script: the layers that its arguments describe, with
    our MoE layer. Before there are arguments and groups: what the script's model builder calls.

    Raises:
        ValueError: arguments that describe other layers than Megatron's standard ones; it names
            the flag.
    """
    arguments, settings = script_arguments(), _checked(settings)
    for name in _OTHER_LAYERS:
        if arguments.get(name):
            raise ValueError(
                f"{name}={short(arguments[name])} describes layers that --spec "
                "moe_plugin.hosts.megatron.spec does not build; leave out "
                f"--{name.replace('_', '-')}, or swap the MoE layers of your own spec with "
                "moe_plugin.hosts.megatron.spec.swap_moe")
    if transformer_engine is None and arguments.get("transformer_impl") == "local":
        transformer_engine = False
    if arguments.get("hybrid_layer_pattern"):
        return _hybrid_stack(settings, transformer_engine)
    if arguments and core.has_groups():
        return _block(settings, transformer_engine)
    # a newer script may ask before it has groups; the model builder calls what it gets
    return functools.partial(_later_block, settings, transformer_engine)


def _hybrid_stack(settings: Mapping[str, Any] | None, transformer_engine: bool | None) -> Any:
    arguments = script_arguments()
    try:
        from moe_plugin.hosts.megatron.compat import hybrid
    except ModuleNotFoundError as error:
        raise ValueError(
            f"hybrid_layer_pattern={short(arguments['hybrid_layer_pattern'])} needs a Megatron "
            f"with HybridModel ({error}): {WITH_HYBRID}") from error
    given = settings_from_flags(arguments) if settings is None else settings
    for name, value, is_so in (
            ("overlap_moe_expert_parallel_comm", True,
             arguments.get("overlap_moe_expert_parallel_comm")),
            ("pipeline.schedule", run_config(given).pipeline.schedule,
             run_config(given).pipeline.cuts)):
        if is_so:
            raise ValueError(f"{name}={value} does not fit hybrid_layer_pattern="
                             f"{short(arguments['hybrid_layer_pattern'])}: it is for GPT models; "
                             "leave it out")
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
    """Those of all pipeline stages."""
    return _swapped(core.gpt_block_spec(in_one_stage(config), transformer_engine), settings)


def _later_block(settings: Mapping[str, Any] | None, transformer_engine: bool | None,
                 _model_config: Any, vp_stage: int | None = None) -> Any:
    if not script_arguments():
        raise ValueError("--spec moe_plugin.hosts.megatron.spec needs the arguments of Megatron's "
                         "training script, and there are none; in a program of your own use "
                         "moe_plugin.hosts.megatron.spec.swap_moe")
    config = script_config()
    if config.mtp_num_layers:  # the builder makes these layers next, and takes its own for them
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


_OTHER_LAYERS = ("yaml_cfg", "heterogeneous_layers_config_path", "experimental_attention_variant",
                 "use_kitchen", "use_kitchen_attention")
moe_layer = script_spec()
moe_layer_local = script_spec(transformer_engine=False)
