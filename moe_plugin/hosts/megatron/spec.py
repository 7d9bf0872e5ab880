"""Putting the layer into a model: `swap_moe` for code, layer specs for `--spec`.

In code, with any spec that Megatron's functions build:

    spec = swap_moe(get_gpt_layer_local_spec(num_experts=8), {"dispatch.name": "padded"})

On the command line of Megatron's training script (0.16 on):

    --spec moe_plugin.hosts.megatron.spec moe_layer          Transformer Engine where installed,
    else Megatron's own layers
    --spec moe_plugin.hosts.megatron.spec moe_layer_local    Megatron's own layers

Settings then come from the launcher
(`python -m moe_plugin.hosts.megatron.launch pretrain_gpt.py ...`), which adds our arguments.
Without it: a module of your own with `spec = moe_layer_spec("settings.yaml")`, and
`--spec your_module spec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_plugin.config import settings_from_yaml
from moe_plugin.hosts.megatron.compat import core
from moe_plugin.hosts.megatron.layer import PluginMoELayer


def swap_moe(spec: Any, settings: Mapping[str, Any] | str | None = None, *,
             allow_none: bool = False) -> Any:
    """A copy of a Megatron layer or block spec with every MoE layer replaced by ours.

    Args:
        spec: transformer layer spec or `TransformerBlockSubmodules`; it is left as it is.
        settings: ours, dotted paths to values, or the path of a YAML file; None: the launcher's
            arguments where it runs, else defaults.
        allow_none: do not mind a spec without MoE layers (a pipeline stage of dense layers).
    Raises:
        ValueError: no MoE layer in the spec, or bad settings.
    """
    settings = settings_from_yaml(settings) if isinstance(settings, str) else settings
    swapped, count = core.swap_spec(spec, PluginMoELayer, {"settings": settings})
    if not count and not allow_none:
        raise ValueError(
            f"no MoE layer found in a spec of type {type(spec).__name__}; build it with "
            "num_experts set, and pass the "
            "transformer layer's spec or a TransformerBlockSubmodules")
    return swapped


def moe_layer_spec(settings: Mapping[str, Any] | str | None = None, *,
                   transformer_engine: bool | None = None) -> Any:
    """A GPT transformer layer spec with our MoE layer. transformer_engine: None takes it where it
    is installed.
    """
    return swap_moe(core.gpt_moe_layer_spec(transformer_engine), settings)


moe_layer = moe_layer_spec()
moe_layer_local = moe_layer_spec(transformer_engine=False)
