"""Our example script, which drives Megatron's `RouterReplay` as reinforcement learning frameworks
do, with the choices of `rollout_script`; with ROUTER_REPLAY_NATIVE=1, Megatron's own layers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from megatron.core import parallel_state as ps
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from moe_plugin.hosts.megatron.compat.core import bare
from moe_plugin.hosts.megatron.compat.settings import script_arguments
from moe_plugin.hosts.megatron.examples import pretrain_gpt_moe as example
from moe_plugin.routing.rollouts import tokens_of_rank
from tests.hosts.megatron.native_script import model_provider
from tests.hosts.megatron.rollout_script import LAYERS, choices

own_step = example.forward_step


def of_chunk(model: Any) -> list[Any]:
    """The objects of this model chunk: a part of the rank's list, in the order of the chunks."""
    every = RouterReplay.global_router_replay_instances
    chunks = ps.get_virtual_pipeline_model_parallel_world_size() or 1
    here, size = getattr(bare(model), "vp_stage", None) or 0, len(every) // chunks
    assert len(every) * ps.get_pipeline_model_parallel_world_size() == LAYERS
    return every[here * size:(here + 1) * size]


def forward_step(batches: Iterator[dict[str, Any]], model: Any, *args: Any) -> Any:
    """Set the targets of the micro-batch; all passes between two of these are recomputations."""
    batch = next(batches)
    ids_BSLK = choices(batch["tokens"], missing=False)  # Megatron's router cannot choose these
    context = ps.get_context_parallel_rank(), ps.get_context_parallel_world_size()
    ids_TLK = tokens_of_rank(ids_BSLK, context=context)
    part = ps.get_tensor_model_parallel_rank(), ps.get_tensor_model_parallel_world_size()
    ids_TLK = tokens_of_rank(ids_TLK.view(len(ids_BSLK), -1, *ids_TLK.shape[1:]), sequence=part,
                             sequence_first=True)
    for replay in of_chunk(model):
        replay.set_target_indices(ids_TLK[:, replay.layer_number - 1])
        replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    output = own_step(iter([batch]), model, *args)
    for replay in of_chunk(model):
        replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
    return output


if __name__ == "__main__":
    example.forward_step = forward_step
    if "ROUTER_REPLAY_NATIVE" in os.environ:
        example.model_provider = model_provider
    example.main()
    left = [len(replay.replay_backward_list)
            for replay in RouterReplay.global_router_replay_instances]
    # Each recomputation took one entry; other runs leave all of them to `clear_global_indices`.
    recomputed = script_arguments()["recompute_granularity"] == "full"
    assert len(left) and all(bool(count) != recomputed for count in left), left
