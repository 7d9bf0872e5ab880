"""Routings that are given, for tests that count what travels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_plugin.comm import Topology
from moe_plugin.records import Routing, TokenInfo
from moe_plugin.routing import RouterModule

WIDTH = 8
UNEQUAL = Topology(((0, 3, 4), (1,), (2, 5)))


class Fixed(RouterModule):
    """The experts of each token as given; weights are parameters."""

    def __init__(self, ids_TK: Tensor) -> None:
        super().__init__()
        self.ids_TK = ids_TK
        self.weights_TK = nn.Parameter(torch.rand(ids_TK.shape, dtype=torch.float64))

    def forward(self, x_TD: Tensor, mask_T: Tensor | None = None, top_k: int | None = None,
                info: TokenInfo | None = None) -> Routing:
        return Routing(self.ids_TK, self.weights_TK, torch.zeros(len(x_TD)), {}, torch.zeros(()),
                       torch.tensor(len(x_TD)))


def drawn(world: int, experts: int, k: int, tokens: list[int]) -> list[Tensor]:
    """Some tokens' experts on each rank; a few choices are none."""
    g = torch.Generator().manual_seed(k)
    found = []
    for rank in range(world):
        ids_TK = torch.rand(tokens[rank % len(tokens)], experts, generator=g).argsort(1)[:, :k]
        found.append(ids_TK.masked_fill(torch.rand(ids_TK.shape, generator=g) < 0.1, -1))
    return found
