"""Slots of a cache of experts, on random traces and with experts that are chosen early."""

from __future__ import annotations

import random
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn

from moe_plugin.config import from_dict
from moe_plugin.layer import MoELayer
from moe_plugin.memory.copier import Copier
from moe_plugin.memory.experts.cache import (
    CachePolicy,
    CacheSpec,
    ExpertCache,
    StoreCounters,
    policies,
)
from moe_plugin.routing import pregate

pytestmark = pytest.mark.fast


# Slots of a cache on random traces: nothing is used before its copy is complete, nothing in use
# leaves.


SHAPES = (("w", (2,)), ("b", ()))
EXPERT = 3 * 4  # bytes


def cache_of(slots: int, policy: str = "lru", layers: int = 3, experts: int = 6) -> ExpertCache:
    cache = ExpertCache(CacheSpec(SHAPES, torch.float32, torch.device("cpu"), slots * EXPERT,
                                  policy))
    for _ in range(layers):
        cache.add_layer(experts)
    return cache


class Late:
    """A copier whose jobs run when they are waited for, or when `some` says."""

    def __init__(self, random_: random.Random) -> None:
        self.random, self.waiting, self.copier = random_, [], Copier("cpu")

    def fetch(self, layer, parts):
        job = {"parts": [(layer, expert, targets) for expert, targets in parts], "done": False}
        self.waiting.append(job)
        return _Ticket(self, job)

    def run_until(self, job):
        while not job["done"]:
            first = self.waiting.pop(0)  # in order, as a copier
            for layer, expert, targets in first["parts"]:
                targets["w"].fill_(100 * layer + expert)
                targets["b"].fill_(-(100 * layer + expert))
            first["done"] = True

    def some(self):
        for _ in range(self.random.randrange(3)):
            if self.waiting:
                self.run_until(self.waiting[0])


class _Ticket:
    def __init__(self, late, job):
        self.late, self.job, self.nbytes = late, job, EXPERT * len(job["parts"])

    @property
    def done(self):
        return self.job["done"]

    def wait(self):
        self.late.run_until(self.job)


@pytest.mark.parametrize("policy", policies.names())
@pytest.mark.parametrize("seed", range(8))
def test_random_traces(policy, seed):
    draw = random.Random(seed)
    slots = draw.choice([2, 3, 5, 9])
    cache, late = cache_of(slots, policy), Late(draw)
    counters = [StoreCounters() for _ in range(3)]
    for step in range(60):
        layer = step % 3
        fetch = [lambda parts, layer=layer: late.fetch(layer, parts) for layer in range(3)]
        asked = draw.sample(range(6), draw.randrange(1, 7))
        room = cache.room(len(asked))
        assert 1 <= room <= slots and cache.nbytes <= slots * EXPERT
        for at in range(0, len(asked), room):
            with ExitStack() as stack:
                part = asked[at:at + room]
                where = stack.enter_context(cache.use(layer, part, fetch[layer], counters[layer]))
                assert len(set(where)) == len(part)
                other = (layer + draw.randrange(3)) % 3
                if draw.random() < 0.7:  # while these are in use
                    ids = draw.sample(range(6), draw.randrange(1, 4))
                    cache.prefetch(other, ids, fetch[other], counters[other])
                    late.some()
                for expert, slot in zip(part, where, strict=True):
                    assert float(cache.buffers["b"][slot]) == -(100 * layer + expert)
                    assert cache.buffers["w"][slot].tolist() == [100.0 * layer + expert] * 2
        if draw.random() < 0.1:
            cache.forget(layer)
            assert cache.resident(layer) == []
    assert sum(len(cache.resident(layer)) for layer in range(3)) <= slots
    for each in counters:
        assert each.bytes == EXPERT * (each.prefetched + each.misses)
        assert 0 <= each.wasted <= each.prefetched


def uses(policy: str, trace: list[tuple[int, int]], slots: int = 2, layers: int = 3) -> list[bool]:
    """Which uses of a trace of (layer, expert) were hits."""
    cache, late, hits = cache_of(slots, policy, layers), Late(random.Random(0)), []
    for layer, expert in trace:
        counters = StoreCounters()
        with cache.use(layer, [expert], lambda parts, layer=layer: late.fetch(layer, parts),
                       counters):
            hits.append(bool(counters.hits))
    return hits


def test_policies_choose_who_leaves():
    a, b, c = (0, 1), (0, 2), (0, 3)
    assert uses("lru", [a, b, a, c, a, b]) == [False, False, True, False, True, False]
    assert uses("lru", [a, a, b, c, a]) == [False, True, False, False, False]
    assert uses("lfu", [a, a, b, c, a]) == [False, True, False, False, True]
    # the second layer keeps what the third needs next, although it was used longest ago
    third, first, second = (2, 0), (0, 0), (1, 0)
    assert uses("next-layer", [third, first, second, third]) == [False, False, False, True]
    assert uses("lru", [third, first, second, third]) == [False, False, False, False]


def test_a_policy_that_counts_by_itself_and_one_that_says_nothing():
    """`left` asks nothing of it; who leaves must be said."""
    class First(CachePolicy):
        """The expert that came first leaves."""

        def __init__(self):
            self.order = []

        def used(self, key):
            if key not in self.order:
                self.order.append(key)

        def victim(self, keys, layer, layers):
            found = next(key for key in self.order if key in keys)
            self.order.remove(found)
            return found

    class Counts(CachePolicy):
        def used(self, key):
            super().used(key)

    a, b, c = (0, 1), (0, 2), (0, 3)
    with policies.temporary():
        policies.register("first")(First)
        assert uses("first", [a, b, a, c, b, a]) == [False, False, True, False, True, False]
        with pytest.raises(ValueError, match="expert is evicted: Counts must"):
            policies.register("counts")(Counts)


def test_slots_are_twice_the_most_that_a_call_uses():
    cache, late = cache_of(0, layers=4), Late(random.Random(0))
    for active, slots in ((1, 2), (3, 6), (2, 6), (6, 12)):
        cache.room(active)
        with cache.use(0, list(range(active)), lambda parts: late.fetch(0, parts),
                       StoreCounters()):
            assert cache.slots == slots and cache.nbytes == slots * EXPERT


def test_a_limit_below_one_expert_and_full_slots_are_named():
    with pytest.raises(ValueError, match="too small for one expert: it must be >= 12 bytes"):
        ExpertCache(CacheSpec(SHAPES, torch.float32, torch.device("cpu"), 11)).room(1)
    with pytest.raises(ValueError, match="unknown cache_policy 'fifo'; known: lfu, lru, next"):
        cache_of(2, "fifo")
    cache, late = cache_of(2), Late(random.Random(0))

    def fetch(parts):
        return late.fetch(0, parts)

    assert cache.room(4) == 2
    with cache.use(0, [0, 1], fetch, StoreCounters()):
        with pytest.raises(ValueError, match="has 2 slots of 12 bytes, and all of them are in use"):
            cache.room(1)
        cache.prefetch(0, [2], fetch, StoreCounters())
        assert cache.resident(0) == [0, 1]


def test_an_error_of_a_copy_comes_out_where_the_expert_is_used_and_it_is_copied_again():
    cache, copier, late = cache_of(3), Copier("cpu"), Late(random.Random(0))

    def bad(parts):
        return copier.start_call(lambda: 1 / 0, 0)

    cache.prefetch(0, [0, 1], bad, StoreCounters())
    with pytest.raises(ZeroDivisionError), cache.use(0, [1, 2], bad, StoreCounters()):
        pass
    with cache.use(0, [0, 1, 2], lambda parts: late.fetch(0, parts), StoreCounters()) as slots:
        assert [float(cache.buffers["b"][slot]) for slot in slots] == [0, -1, -2]
    copier.close()


# Experts outside the device that are chosen, or predicted, one block early.


D, F, E, BLOCKS = 8, 12, 8, 4


def model_of(store: str = "device", folder=None, policy: str = "lru", hidden: int = F,
             **router) -> nn.ModuleList:
    torch.manual_seed(5)
    model = nn.ModuleList(MoELayer(D, num_experts=E, router={"top_k": 2, **router},
                                   experts={"hidden_dim": hidden, "compute": "loop", "store": store,
                                            "cache_policy": policy,
                                            "store_path": str(folder) if store == "disk" else None})
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
