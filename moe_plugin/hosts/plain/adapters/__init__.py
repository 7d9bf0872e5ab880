"""LoRA and DoRA adapters for the experts of `MoELayer`s. All parallel layouts and numbers of ranks
are supported.

    swap_moe_blocks(model)                      # or replace_ffn, or your own layers
    add_lora(model, rank=8, alpha=16)
    ...                                         # train: only the adapters have gradients
    save_adapter(model, folder)
    merge_lora(model)
"""

from moe_plugin.hosts.plain.adapters.add import (
    add_lora,
    freeze_experts,
    merge_lora,
    unmerge_lora,
)
from moe_plugin.hosts.plain.adapters.files import save_adapter
from moe_plugin.hosts.plain.adapters.load import merge_adapter
from moe_plugin.hosts.plain.adapters.sources import load_adapter

__all__ = ["add_lora", "freeze_experts", "load_adapter", "merge_adapter", "merge_lora",
           "save_adapter", "unmerge_lora"]
