"""Experts outside the device that are chosen, or predicted, one block early."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moe_plugin.config import from_dict
from moe_plugin.layer import MoELayer
from moe_plugin.routing import pregate

pytestmark = pytest.mark.fast

D, F, E, BLOCKS = 8, 12, 8, 4


def model_of(store: str = "device", folder=None, policy: str = "lru", hidden: int = F,
             **router) -> nn.ModuleList:
    torch.manual_seed(5)
    model = nn.ModuleList(MoELayer(from_dict({
        "model_dim": D, "num_experts": E, "router": {"top_k": 2, **router},
        "experts": {"hidden_dim": hidden, "compute": "loop", "store": store,
                    "cache_policy": policy,
                    "store_path": str(folder) if store == "disk" else None}}))
        for _ in range(BLOCKS)).eval()
    pregate.link(model)
    return model


@torch.no_grad()
def run(model: nn.ModuleList, x: Tensor) -> list[Tensor]:
    seen = [x]
    for layer in model:
        seen.append(seen[-1] + layer(seen[-1]).output)
    return seen


def counts(model: nn.ModuleList) -> list[dict[str, int]]:
    return [layer.experts.store.counters.as_dict() for layer in model]


def passes(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, D, generator=generator) for n in (1, 2, 1, 0, 2, 1, 1)]


@pytest.mark.parametrize("policy", ["lru", "lfu", "next-layer"])
@pytest.mark.parametrize("store", ["host", "disk"])
def test_chosen_experts_are_there_when_they_compute(store, policy, tmp_path) -> None:
    resident, model = model_of(pre_gate=1), model_of(store, tmp_path, policy, pre_gate=1)
    model.load_state_dict(resident.state_dict())
    run(model, torch.randn(9, D))  # the cache has its size
    before = counts(model)
    for x in passes():
        want, got = run(resident, x), run(model, x)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    after = counts(model)
    for old, new in zip(before[1:], after[1:], strict=True):
        assert new["misses"] == old["misses"] and new["hits"] > old["hits"]
        assert new["wasted"] == old["wasted"]  # fetched is needed


def test_buffers_hold_twice_the_most_active() -> None:
    # no other model has such experts, and so slots
    model, most = model_of("host", hidden=F + 1, pre_gate=1), 0
    for x in passes(1):
        h = x
        with torch.no_grad():
            for layer in model:
                out = layer(h)
                h = h + out.output
                most = max(most, int((out.stats.load_KE.sum(0) > 0).sum()))
                assert layer.experts.store.cache.slots <= 2 * most
    assert model[0].experts.store.cache.slots == 2 * most


def test_predictions_are_fetched_and_change_nothing() -> None:
    plain, predicts = model_of("host"), model_of("host", predict=True)
    resident = model_of()
    for model in (plain, predicts):
        model.load_state_dict(resident.state_dict())
    for x in passes():
        want = run(resident, x)
        for model in (plain, predicts):
            assert all(torch.equal(a, b) for a, b in zip(want, run(model, x), strict=True))
    with torch.no_grad():
        stats = [layer(torch.randn(1, D)).stats.as_dict()["store"] for layer in predicts]
    assert all(one["hits"] + one["misses"] >= 2 for one in stats)
    cache = predicts[0].experts.store.cache
    assert all(0 < one["resident_bytes"] <= cache.nbytes for one in stats)
    hits = [sum(one["hits"] for one in counts(model)[1:]) for model in (plain, predicts)]
    assert hits[1] > hits[0]
    assert sum(one["prefetched"] for one in counts(predicts)) > 0 == counts(plain)[1]["prefetched"]


def test_a_prediction_from_the_same_tokens_is_right() -> None:
    model = model_of("host", predict=True)
    for layer in model:
        layer.experts.w_out_LFD.data.zero_()
    run(model, torch.randn(9, D))
    before = counts(model)
    for x in passes():
        run(model, x)
    for old, new in zip(before[1:], counts(model)[1:], strict=True):
        assert new["misses"] == old["misses"]


def test_nothing_is_predicted_in_training() -> None:
    model = model_of("host", predict=True).train()
    run(model, torch.randn(3, D))
    assert all(one["prefetched"] == 0 for one in counts(model))


def test_settings_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"router\.predict=True.*off where router\.pre_gate=1"):
        model_of(predict=True, pre_gate=1)
    alone = MoELayer(from_dict({"model_dim": D, "num_experts": E, "router": {"predict": True}}))
    with pytest.raises(ValueError, match=r"router\.predict=True requires linked layers"):
        alone(torch.randn(2, D))
