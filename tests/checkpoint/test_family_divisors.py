"""What families divide the weights of a token's experts by: blocks of `transformers` whose scores
are small, and ours in their place.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from moe_plugin.checkpoint.formats.huggingface.families import FAMILIES
from moe_plugin.checkpoint.formats.huggingface.family import Block
from moe_plugin.hosts.plain.blocks import blocks_in
from moe_plugin.hosts.plain.huggingface import swap_moe_blocks
from tests.checkpoint.hf_models import tiny

transformers = pytest.importorskip("transformers", minversion="5.20")
KINDS = [name for name, family in FAMILIES.items() if family.block is not None]


def lowered(block: nn.Module, family: Block, level: float) -> None:
    """Let the first value of a token, which is 1, decide: scores of all experts, or of all that the
    bias lets it choose, are as small as a logit of `level` makes them.
    """
    weight_ED = block.get_parameter(family.names["router.weight"])
    nn.init.normal_(weight_ED, 0.0, 0.02)
    weight_ED[:, 0] = level if family.scores == "sigmoid" else 0.0
    if "router.expert_bias" in family.names:
        path, _, name = family.names["router.expert_bias"].rpartition(".")
        bias = getattr(block.get_submodule(path), name)
        bias.zero_()
        if family.scores == "softmax":
            weight_ED[0, 0], bias[..., 0] = -level, -2.0


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_small_scores_weigh_as_in_transformers(kind: str) -> None:
    model, family = tiny(kind), FAMILIES[kind].block
    names = swap_moe_blocks(copy.deepcopy(model))
    x_BSD = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    x_BSD[..., 0] = 1
    for level in (-18.0, -20.0, -46.0):
        made = copy.deepcopy(model)
        block: Any = made.get_submodule(names[-1])
        lowered(block, family, level)
        want = block(x_BSD)
        swap_moe_blocks(made)
        got = made.get_submodule(names[-1])(x_BSD)
        got, want = (y[0] if isinstance(y, tuple) else y for y in (got, want))
        torch.testing.assert_close(got, want.view_as(got), rtol=1e-4, atol=1e-5)


def test_numbers_of_configurations_reach_the_router() -> None:
    for kind, add, least in (("deepseek_v3", 1e-20, 0.0), ("lfm2_moe", 1e-6, 0.0),
                             ("minimax_m2", 0.0, 0.0), ("ernie4_5_moe", 0.0, 1e-12)):
        for more in ({}, {"moe_norm_min": 1e-3}) if least else ({},):
            model = tiny(kind, **more)
            swap_moe_blocks(model)
            router = next(blocks_in(model))[1].moe.config.router
            assert (router.normalize_add, router.normalize_min) == (
                add, more.get("moe_norm_min", least))
