"""Layer specs that depend on which virtual pipeline stage is being built."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron.core.transformer import transformer_block
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

_STAGES = {"pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None,
           "pipeline_model_parallel_layout": None, "num_layers_in_first_pipeline_stage": None,
           "num_layers_in_last_pipeline_stage": None,
           "account_for_embedding_in_pipeline_split": False,
           "account_for_loss_in_pipeline_split": False}


class StageSpecs(TransformerBlockSubmodules):  # type: ignore[misc]
    """A block spec that contains a separate spec for each virtual pipeline stage. Use `StageSpecs`
    with scripts that pass only one spec to the model builder.

    Attributes:
        layer_specs: layer specs of the whole model. Multi-token prediction uses the last of these
            layer specs.
        of_stage: function that returns the block spec of a virtual stage. The argument of this
            function is the index of the virtual stage, or None if there are no virtual stages.
    """

    def __init__(self, whole: Any, of_stage: Callable[[int | None], Any]) -> None:
        super().__init__(layer_specs=whole.layer_specs, layer_norm=whole.layer_norm)
        self.of_stage = of_stage
        _follow()


def _follow() -> None:
    """Make each block that is built from `StageSpecs` use the layers of the virtual stage to which
    the block belongs.

    Megatron 0.15 to 0.19 calls `_get_block_submodules` to get the layers of a block. This function
    replaces `_get_block_submodules`.
    """
    ask = transformer_block._get_block_submodules
    if hasattr(ask, "asks_stages"):
        return
    arguments = inspect.signature(ask)

    @functools.wraps(ask)
    def asked(*args: Any, **kwargs: Any) -> Any:
        given = arguments.bind(*args, **kwargs)
        spec = given.arguments["spec"]
        if isinstance(spec, StageSpecs):
            given.arguments["spec"] = spec.of_stage(given.arguments.get("vp_stage"))
        return ask(*given.args, **given.kwargs)

    asked.asks_stages = True  # type: ignore[attr-defined]
    transformer_block._get_block_submodules = asked


def in_one_stage(config: Any) -> Any:
    """Return a copy of a `TransformerConfig` with all layers in a single pipeline stage."""
    whole = copy.copy(config)
    for name, value in _STAGES.items():
        if hasattr(whole, name):
            setattr(whole, name, value)
    return whole
