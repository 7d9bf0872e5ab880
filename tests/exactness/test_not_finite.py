"""A token that is not finite stays in its own row: all others get what they get without it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_plugin.comm import Comm, run_simulated
from moe_plugin.dispatch import dispatchers
from moe_plugin.experts import strategies
from moe_plugin.layer import MoELayer
from moe_plugin.records import Routing, TokenInfo
from moe_plugin.routing import RouterModule
from tests.exactness.harness import config_of, load_experts
from tests.oracle import Case, make_parameters

pytestmark = pytest.mark.fast

SHARED = [name for name in dispatchers.names() if dispatchers.get(name).traits.shares_tokens]
TOKENS, ODD, WIDTH = 9, 0, 8


class FixedExperts(RouterModule):
    """Experts by position, so that no token's value moves another's slot; weights by the token.

    The odd token comes first and takes the first row of all: what reads row 0 for want of another
    meets it.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(3)
        self.weight_KD = torch.nn.Parameter(torch.randn(2, WIDTH, generator=g).to(dtype))

    def forward(self, x_TD: Tensor, mask_T: Tensor | None = None, top_k: int | None = None,
                info: TokenInfo | None = None) -> Routing:
        first_T = torch.arange(x_TD.shape[0]) % 3 // 2
        ids_TK = torch.stack([first_T, first_T + 1], 1)
        weights_TK = torch.sigmoid(x_TD @ self.weight_KD.t())
        return Routing(ids_TK, weights_TK, torch.zeros(x_TD.shape[0]), {}, torch.zeros(()),
                       torch.tensor(x_TD.shape[0]))


def run(comm: Comm, dispatch: str, factor: float | None, dtype: torch.dtype, odd: float | None,
        compute: str, weights_first: bool) -> tuple[Tensor, Tensor]:
    """(outputs, input gradients) of one rank; rank 0 has the odd token."""
    case = Case(comm.size, 4, 2, [TOKENS] * comm.size, None, factor, normalize="none",
                weights_first=weights_first)
    config = config_of(case, dispatch__name=dispatch, experts__compute=compute)
    config.losses.clear()
    layer = MoELayer(config, comm, router=FixedExperts(dtype), dtype=dtype)
    load_experts(layer, make_parameters(case, dtype), case)
    g = torch.Generator().manual_seed(0 if dispatch in SHARED else comm.rank)
    x = torch.randn(TOKENS, WIDTH, generator=g).to(dtype)
    if odd is not None and (comm.rank == 0 or dispatch in SHARED):
        x[ODD, 1] = odd
    x.requires_grad_()
    out = layer(x)
    (out.output * torch.linspace(-1, 1, WIDTH, dtype=dtype)).sum().backward()
    return out.output.detach(), x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("factor", [None, 0.4, 0.0])
@pytest.mark.parametrize("dispatch", dispatchers.names())
def test_other_tokens_do_not_see_it(dispatch: str, factor: float | None,
                                    dtype: torch.dtype) -> None:
    if factor is None and dispatchers.get(dispatch).traits.fixed_slots:
        factor = 1.0
    for world in (2,) if dispatch in SHARED else (1, 2):
        # experts see the same rows whatever brought them
        for compute in strategies.names() if dispatch == "ragged" and world == 1 else ["auto"]:
            check(world, dispatch, factor, dtype, compute)
        if dtype == torch.float32:
            check(world, dispatch, factor, dtype, "auto", weights_first=True)


def check(world: int, dispatch: str, factor: float | None, dtype: torch.dtype, compute: str,
          weights_first: bool = False) -> None:
    def results(odd: float | None) -> list[tuple[Tensor, Tensor]]:
        return run_simulated(world, lambda comm: run(comm, dispatch, factor, dtype, odd, compute,
                                                     weights_first))

    finite = results(None)
    for odd in (float("nan"), float("inf")):
        got = results(odd)
        for rank, (mine, clean) in enumerate(zip(got, finite, strict=True)):
            others = torch.ones(TOKENS, dtype=torch.bool)
            if rank == 0 or dispatch in SHARED:
                others[ODD] = False
                assert not mine[0][ODD].isfinite().all()
            for value, want, what in zip(mine, clean, ("output", "input gradient"), strict=True):
                torch.testing.assert_close(
                    value[others], want[others], rtol=1e-2 if dtype == torch.bfloat16 else 1e-5,
                    atol=1e-5, msg=lambda m, w=what, r=rank: f"{w} of rank {r}, {compute}: {m}")
