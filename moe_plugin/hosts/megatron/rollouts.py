"""Make this package's layers in Megatron replay the expert choices that were recorded during
rollouts. All parallel layouts are supported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from megatron.core import parallel_state as ps
from torch import Tensor, nn

from moe_plugin.hosts.megatron import losses
from moe_plugin.hosts.megatron.layer import PluginMoELayer, plugin_layers
from moe_plugin.routing.rollouts import replay_choices, tokens_of_rank


@contextmanager
def replay_rollouts(model: nn.Module, ids_BSLK: Tensor,
                    lengths: Sequence[int] | None = None) -> Iterator[None]:
    """Make the layers of the current pipeline stage select the same experts that were used to
    generate the samples.

    In a script's `forward_step`, call the model inside this context. Recomputed layers repeat the
    same choices, even after the context has ended.

    Layers of multi-token prediction still select experts themselves, because inference engines do
    not record choices for these layers.

    Args:
        model: the model that is passed to `forward_step`.
        ids_BSLK: expert ids of the whole micro-batch, before the micro-batch is split for context
            parallelism. To create this tensor, use `padded` or `packed` of
            `moe_plugin.routing.rollouts`. Dimension L consists of either all layers of the model or
            only the MoE layers.
        lengths: lengths of packed sequences. See `tokens_of_rank`.
    Raises:
        ValueError: see `moe_plugin.routing.rollouts.replay_rollouts`.
    """
    moe_layers = [layer for layer in plugin_layers(model)
                  if layer.layer_number <= layer.config.num_layers]
    if not moe_layers:
        yield
        return
    if moe_layers[0].moe.token_entry.sharing is not None:
        raise ValueError("parallel.replicas cannot be used with replay_rollouts, because it "
                         "changes the order in which ranks share tokens. Leave out "
                         "parallel.replicas.")
    context = ps.get_context_parallel_rank(), ps.get_context_parallel_world_size()
    ids_TLK = tokens_of_rank(ids_BSLK, context=context, lengths=lengths)
    ids_BSLK = ids_TLK.view(ids_BSLK.shape[0], -1, *ids_TLK.shape[1:])
    group = moe_layers[0].groups.tensor
    part = (0, 1) if moe_layers[0].shares_tokens else (group.rank(), group.size())
    # without sequence parallelism a layer pads the sequence before splitting it over ranks
    if not moe_layers[0].config.sequence_parallel:
        ids_BSLK = F.pad(ids_BSLK, (0, 0, 0, 0, 0, -ids_BSLK.shape[1] % part[1]), value=-1)
    ids_TLK = tokens_of_rank(ids_BSLK, sequence=part, sequence_first=True)
    places = [_place(layer, ids_TLK.shape[1]) for layer in moe_layers]
    with replay_choices([layer.moe.router for layer in moe_layers], ids_TLK, places):
        yield


def _place(layer: PluginMoELayer, layers: int) -> int:
    """Return the index of a layer's choices along dimension L (all layers or only MoE layers)."""
    number: Any = layer.layer_number
    count = layer.config.num_layers
    before, all_moe = (losses.moe_layers_before(layer.config, n)
                       for n in (number, count + 1))
    if layers == count:
        return int(number) - 1
    if layers == all_moe and before is not None:
        return before
    raise ValueError(f"The expert choices were recorded for {layers} layers, but this model has "
                     f"{count} layers, of which {all_moe} have experts. Pass choices that were "
                     "recorded with this model.")
