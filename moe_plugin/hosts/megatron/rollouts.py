"""Routing of rollouts, replayed by our layers in Megatron, in every layout of its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.nn.functional as F
from megatron.core import parallel_state as ps
from torch import Tensor, nn

from moe_plugin.hosts.megatron import losses
from moe_plugin.hosts.megatron.layer import PluginMoELayer, plugin_layers
from moe_plugin.routing.rollouts import replay_choices, tokens_of_rank


@contextmanager
def replay_rollouts(model: nn.Module, ids_BSLK: Tensor,
                    lengths: Sequence[int] | None = None) -> Iterator[None]:
    """While open, the layers of this pipeline stage take the experts that samples were generated
    with: around the call of the model in a script's `forward_step`. Recomputed layers repeat what
    they chose, also later.

    Layers of multi-token prediction choose themselves: an engine has no choices for them.

    Args:
        model: what `forward_step` is given.
        ids_BSLK: of the whole micro-batch, before it is cut for context parallelism, as `padded`
            and `packed` of `moe_plugin.routing.rollouts` give it. L: all layers of the model, or
            those with experts.
        lengths: of packed sequences; see `tokens_of_rank`.
    Raises:
        ValueError: see `moe_plugin.routing.rollouts.replay_rollouts`.
    """
    found = [layer for layer in plugin_layers(model)
             if layer.layer_number <= layer.config.num_layers]
    if not found:
        yield
        return
    if found[0].moe.token_entry.sharing is not None:
        raise ValueError("parallel.replicas does not fit replay_rollouts, because ranks then share "
                         "tokens in another order: must not be set; leave it out")
    context = ps.get_context_parallel_rank(), ps.get_context_parallel_world_size()
    ids_TLK = tokens_of_rank(ids_BSLK, context=context, lengths=lengths)
    ids_BSLK = ids_TLK.view(ids_BSLK.shape[0], -1, *ids_TLK.shape[1:])
    group = found[0].groups.tensor
    part = (0, 1) if found[0].shares_tokens else (group.rank(), group.size())
    if not found[0].config.sequence_parallel:  # a layer fills the sequence up before it cuts it
        ids_BSLK = F.pad(ids_BSLK, (0, 0, 0, 0, 0, -ids_BSLK.shape[1] % part[1]), value=-1)
    ids_TLK = tokens_of_rank(ids_BSLK, sequence=part, sequence_first=True)
    places = [_place(layer, ids_TLK.shape[1]) for layer in found]
    with replay_choices([layer.moe.router for layer in found], ids_TLK, places):
        yield


def _place(layer: PluginMoELayer, layers: int) -> int:
    """Of the choices of a layer, where all layers of the model have some, or those with experts."""
    number, count = layer.layer_number, layer.config.num_layers
    before, all_moe = (losses.moe_layers_before(layer.config, n)
                       for n in (number, count + 1))
    if layers == count:
        return int(number) - 1
    if layers == all_moe and before is not None:
        return before
    raise ValueError(f"routed experts have {layers} layers: must be {count}, of all layers of the "
                     f"model, or {all_moe}, of those with experts; give those of this model")
