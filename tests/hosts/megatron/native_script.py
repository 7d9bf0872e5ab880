"""Our example script with Megatron's own MoE layers: what runs of ours are compared with."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

from moe_plugin.hosts.megatron.examples import pretrain_gpt_moe as example

provide = example.model_provider


def model_provider(*args: Any, vp_stage: int | None = None, config: Any = None,
                   **kwargs: Any) -> Any:
    """The part of the model that a stage has."""
    config = config or example.arguments.core_transformer_config_from_args(example.get_args())
    example.import_module = lambda name: get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization,
        vp_stage=vp_stage)
    return provide(*args, vp_stage=vp_stage, config=config, **kwargs)


if __name__ == "__main__":
    example.model_provider = model_provider
    example.main()
