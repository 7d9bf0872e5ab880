"""Our example script, trained with choices that follow from a token and its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moe_plugin.hosts.megatron.examples import pretrain_gpt_moe as example
from moe_plugin.hosts.megatron.rollouts import replay_rollouts

own_step = example.forward_step
EXPERTS, LAYERS = 4, 4


def choices(tokens_BS: Tensor, missing: bool = True) -> Tensor:
    """[B, S, L, 2]; if some are missing, none for each seventh token."""
    places = torch.arange(tokens_BS.shape[1])[None]
    first_BS = (tokens_BS + places) % EXPERTS
    layer_L = torch.arange(LAYERS)
    first_BSL = (first_BS[..., None] + layer_L) % EXPERTS
    second_BSL = (first_BSL + 1 + places[..., None] % (EXPERTS - 1)) % EXPERTS
    ids_BSLK = torch.stack([first_BSL, second_BSL], -1)
    if missing:
        ids_BSLK[(tokens_BS + places) % 7 == 0] = -1
    return ids_BSLK


def forward_step(batches: Iterator[dict[str, Any]], model: Any, *args: Any) -> Any:
    """With the rollout of the micro-batch."""
    batch = next(batches)
    with replay_rollouts(model, choices(batch["tokens"])):
        return own_step(iter([batch]), model, *args)


if __name__ == "__main__":
    example.forward_step = forward_step
    example.main()
