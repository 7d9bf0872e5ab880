"""Megatron-core symbols whose import path may differ between versions. Each symbol is imported when
it is first used.

If a symbol moves in a new Megatron version, only one line of this module has to change. In Megatron
0.15 to 0.19, the import path of every symbol is the same.

All other modules may import only `parallel_state`, `tensor_parallel` and `dist_checkpointing`
directly from Megatron-core. `tests/packaging/test_names.py` checks this rule.
"""

from __future__ import annotations

import importlib
from typing import Any

# module below megatron.core -> names in it
_PLACES = {
    "activations": ("squared_relu",),
    "datasets.indexed_dataset": ("IndexedDatasetBuilder",),
    "dist_checkpointing.dict_utils": ("dict_list_map_outplace",),
    "dist_checkpointing.mapping": ("LocalNonpersistentObject", "ShardedObject", "ShardedTensor",
                                   "ShardedTensorFactory"),
    "distributed": ("DistributedDataParallel", "DistributedDataParallelConfig",
                    "finalize_model_grads"),
    "models.gpt.gpt_model": ("GPTModel",),
    "optimizer": ("OptimizerConfig", "get_megatron_optimizer"),
    "pipeline_parallel.p2p_communication": ("P2PCommunicator",),
    "pipeline_parallel.schedules": ("get_forward_backward_func",),
    "process_groups_config": ("ProcessGroupCollection",),
    "rerun_state_machine": ("get_rerun_state_machine",),
    "transformer.attention": ("Attention",),
    "transformer.dot_product_attention": ("DotProductAttention",),
    "transformer.module": ("Float16Module",),
    "transformer.transformer_config": ("TransformerConfig",),
    "transformer.transformer_layer": ("TransformerLayer",),
    "transformer.utils": ("make_sharded_object_for_checkpoint",),
    "utils": ("get_model_config",),
}
MODULES = {"mappings": "tensor_parallel.mappings", "schedules": "pipeline_parallel.schedules"}
PLACE_OF = {name: place for place, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return importlib.import_module(f"megatron.core.{MODULES[name]}")
    if name not in PLACE_OF:
        raise AttributeError(f"Module {__name__} has no name {name!r}. Add the name to the table "
                             "there.")
    return vars(importlib.import_module(f"megatron.core.{PLACE_OF[name]}"))[name]
