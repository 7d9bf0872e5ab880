"""`batch_invariant`: a token's output has the same bits in every batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_plugin import MoELayer
from moe_plugin.comm import Comm, LocalComm, run_simulated
from moe_plugin.config import from_dict
from moe_plugin.kernels.in_blocks import BLOCK, product_in_blocks
from tests.seeds import seeded

pytestmark = pytest.mark.fast
WIDTH, TOKENS = 48, 150


def layer_of(comm: Comm | None = None, dtype: torch.dtype = torch.float32, *, on: bool = True,
             **settings: Any) -> MoELayer:
    experts = {"hidden_dim": 40, **settings.pop("experts", {})}
    router = {"top_k": 3, **settings.pop("router", {})}
    config = from_dict({"model_dim": WIDTH, "num_experts": 6, "batch_invariant": on,
                        "experts": experts, "router": router, **settings})
    with seeded(0):
        return MoELayer(config, comm or LocalComm(), dtype=dtype)


def tokens(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


BATCHES = [slice(0, 1), slice(7, 9), slice(3, 34), slice(0, 32), slice(20, 85), slice(149, 150)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("settings", [
    {}, {"experts": {"kind": "gated_ffn", "activation": "silu", "bias": False}},
    {"experts": {"shared_hidden_dim": 24, "shared_gate": True, "latent_dim": 16}},
    {"router": {"name": "sigmoid_bias"}}, {"router": {"name": "group_limited", "groups": 2}},
    {"router": {"top_k": 1, "normalize": "none"}},
], ids=str)
def test_a_token_alone_and_in_any_batch(settings: dict[str, Any], dtype: torch.dtype) -> None:
    layer, x_TD = layer_of(dtype=dtype, **settings), tokens(dtype)
    with torch.no_grad():
        whole_TD = layer(x_TD).output
        assert torch.equal(layer(x_TD.flip(0)).output.flip(0), whole_TD)
        for some in BATCHES:
            assert torch.equal(layer(x_TD[some]).output, whole_TD[some])


def test_padding_and_views_change_nothing() -> None:
    layer, x_TD = layer_of(), tokens()
    with torch.no_grad():
        whole_TD = layer(x_TD).output
        mask_T = torch.arange(TOKENS) % 3 > 0
        assert torch.equal(layer(x_TD, mask_T).output[mask_T], whole_TD[mask_T])
        assert torch.equal(layer(x_TD.T.contiguous().T).output, whole_TD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [
    {}, {"dispatch": {"name": "bounded"}}, {"parallel": {"d": 2}}, {"parallel": {"r": 0}},
    {"router": {"name": "sigmoid_bias"}, "experts": {"shared_hidden_dim": 24}}], ids=str)
def test_over_ranks(settings: dict[str, Any], dtype: torch.dtype) -> None:
    """The bits of one rank, for any number of ranks and any other tokens of a rank."""
    x_TD = tokens(dtype)
    with torch.no_grad():
        whole_TD = layer_of(dtype=dtype, num_experts=8, **settings).eval()(x_TD).output

    def rank(comm: Comm, count: int) -> Tensor:
        layer = layer_of(comm, dtype, num_experts=8, **settings).eval()
        with torch.no_grad():  # the first ranks have one token more, or the only ones
            return layer(x_TD[:count].tensor_split(comm.size)[comm.rank]).output

    for ranks in (1, 2, 4):
        for count in (1, 3, 8, 64):
            got_TD = torch.cat(run_simulated(ranks, lambda comm, count=count: rank(comm, count)))
            assert torch.equal(got_TD, whole_TD[:count]), (ranks, count)


def test_gradients_are_those_of_other_products() -> None:
    x_TD = tokens(torch.float64)
    found = []
    for on in (True, False):
        layer, x = layer_of(dtype=torch.float64, on=on), x_TD.clone().requires_grad_()
        layer(x).output.square().sum().backward()
        found.append([x.grad, *(p.grad for p in layer.parameters())])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("rows", [0, 1, BLOCK - 1, BLOCK, 3 * BLOCK + 5])
def test_a_product_in_blocks(rows: int) -> None:
    x_RI, w_IO = torch.randn(rows, 20), torch.randn(20, 12)
    got_RO = product_in_blocks(x_RI, w_IO)
    torch.testing.assert_close(got_RO, x_RI @ w_IO)
    for row in range(rows):
        assert torch.equal(product_in_blocks(x_RI[row:row + 1], w_IO)[0], got_RO[row])
    with torch.autocast("cpu"):
        assert product_in_blocks(x_RI, w_IO).dtype == torch.bfloat16


def test_without_it_bits_differ() -> None:
    """Else nothing here would need it."""
    layer, x_TD = layer_of(on=False), tokens()
    with torch.no_grad():
        whole_TD = layer(x_TD).output
        assert not all(torch.equal(layer(x_TD[some]).output, whole_TD[some]) for some in BATCHES)


@pytest.mark.parametrize(("settings", "said"), [
    ({"dispatch": {"capacity_factor": 1.0}}, "dispatch.capacity_factor=1.0"),
    ({"dispatch": {"eval_capacity_factor": 1.0}}, "dispatch.eval_capacity_factor=1.0"),
    ({"dispatch": {"name": "all_gather"}}, "dispatch.name='?all_gather'?"),
    ({"dispatch": {"send": "ranks"}}, "dispatch.send='?ranks'?"),
    ({"dispatch": {"send": "nodes"}}, "dispatch.send='?nodes'?"),
    ({"parallel": {"mode": "auto"}}, "parallel.mode='?auto'?"),
    ({"experts": {"compute": "loop"}}, "experts.compute='?loop'?"),
    ({"experts": {"dropout": 0.1}}, "experts.dropout=0.1"),
    ({"router": {"noise": 1.0}}, "router.noise=1.0"),
    ({"router": {"name": "cosine"}}, "False with CosineRouter"),
    ({"router": {"name": "expert_choice"}}, "False with ExpertChoiceRouter"),
])
def test_what_depends_on_the_batch_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        layer_of(**settings)


def test_own_parts_and_transforms_are_refused() -> None:
    config = from_dict({"model_dim": 8, "num_experts": 2, "batch_invariant": True})
    with pytest.raises(ValueError, match="False if you pass your own experts"):
        MoELayer(config, experts=lambda index: torch.nn.Linear(8, 8))
    layer = MoELayer(config)
    with pytest.raises(ValueError, match="cannot be used with torch.func"):
        torch.func.grad(lambda x: layer(x).output.sum())(torch.randn(3, 8))


def test_under_autocast_and_another_default_device() -> None:
    layer, x_TD = layer_of(experts={"shared_hidden_dim": 24}), tokens()
    with torch.no_grad(), torch.autocast("cpu"), torch.device("meta"):
        whole_TD = layer(x_TD).output
        assert torch.equal(layer(x_TD[3:5]).output, whole_TD[3:5])


def test_cut_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="False if experts are split into 2 shards"):
        run_simulated(2, lambda comm: layer_of(comm, num_experts=1, router={"top_k": 1}))
