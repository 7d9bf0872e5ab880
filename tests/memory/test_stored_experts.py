"""Layers whose experts lie in host memory or in a file against the same layers on the device."""

from __future__ import annotations

import copy
import resource

import pytest
import torch
from torch import Tensor

from moe_plugin.checkpoint.reshard import split
from moe_plugin.checkpoint.resize import change_expert_parallel
from moe_plugin.comm import LocalComm
from moe_plugin.comm.placement import HostContext
from moe_plugin.comm.simulated import run_simulated
from moe_plugin.config import from_dict
from moe_plugin.dispatch import dispatchers
from moe_plugin.experts import is_expert
from moe_plugin.layer import MoELayer
from moe_plugin.memory.tiers import TierError
from tests.seeds import seeded

D, F, E = 8, 12, 6
EXPERT = 4 * (2 * D * F + F + D)  # bytes


def layer_of(store: str = "device", comm=None, number: int | None = None, dtype=torch.float32,
             tmp=None, device=None, **changes) -> MoELayer:
    tree = {"model_dim": D, "num_experts": changes.pop("experts", E),
            "router": {"top_k": 2}, "dispatch": changes.pop("dispatch", {}),
            "parallel": changes.pop("parallel", {}),
            "experts": {"hidden_dim": F, "compute": "loop", "store": store,
                        "store_path": None if tmp is None or store != "disk" else str(tmp),
                        **changes}}
    config, host = from_dict(tree), HostContext(layer_number=number)
    if config.dispatch.name == "parm_s2":  # its ranks meet where the layer is made
        torch.manual_seed(3)
        return MoELayer(config, comm, host=host, dtype=dtype, device=device)
    with seeded(3):
        return MoELayer(config, comm, host=host, dtype=dtype, device=device)


def tokens(count: int = 9, seed: int = 0, dtype=torch.float32) -> Tensor:
    return torch.randn(count, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(layer: MoELayer, x: Tensor) -> Tensor:
    with torch.no_grad():
        return layer.eval()(x).output


def gradients(layer: MoELayer, x: Tensor) -> tuple[Tensor, ...]:
    x = x.clone().requires_grad_()
    y = layer.train()(x).output
    y.square().sum().backward()
    return (y.detach(), x.grad, layer.router.weight_ED.grad,
            *(p.grad for p in layer.experts.parameters()))


@pytest.mark.parametrize("compute", ["loop", "fused", "batched", "grouped", "auto"])
@pytest.mark.parametrize("kind", ["ffn", "gated_ffn"])
def test_every_store_gives_the_same_bits(compute, kind, tmp_path):
    want = layer_of(compute=compute, kind=kind, compute_selection="rule")
    for store in ("host", "disk"):
        for cache in ("0", f"{3 * EXPERT * 2}B", "1GiB"):
            got = layer_of(store, tmp=tmp_path, compute=compute, kind=kind, cache=cache,
                           compute_selection="rule")
            for count, seed in ((9, 0), (1, 1), (9, 2), (0, 3), (2, 4)):
                x = tokens(count, seed)
                a, b = bits(got, x), bits(want, x)
                # in parts, `batched` pads to other lengths
                close = compute == "batched" and cache[-2:] not in ("0", "iB")
                same = torch.allclose if close else torch.equal
                assert same(a, b), (store, cache, count)


@pytest.mark.parametrize("compute", ["loop", "fused", "grouped"])
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("policy", ["lru", "lfu", "next-layer"])
def test_a_small_cache_computes_in_parts(compute, slots, policy):
    want = layer_of(compute=compute)
    got = layer_of("host", compute=compute, cache=str(slots * EXPERT), cache_policy=policy)
    for seed in range(3):
        x = tokens(11, seed)
        assert torch.equal(bits(got, x), bits(want, x))
        for a, b in zip(gradients(got, x), gradients(want, x), strict=True):
            assert torch.equal(a, b)
    assert got.experts.store.cache.slots == slots
    assert got.experts.store.counters.misses > got.experts.store.counters.hits
    with torch.no_grad():
        found = got(tokens(11, 4)).stats.store
    assert found["misses"] > slots and found["stalls"] in (0, 1)  # of calls, not of parts


@pytest.mark.parametrize("compute", ["loop", "fused", "batched", "grouped"])
def test_gradients_in_host_memory_are_the_same_bits(compute):
    want, got = layer_of(compute=compute), layer_of("host", compute=compute)
    steps = [torch.optim.SGD(layer.parameters(), 0.1) for layer in (want, got)]
    for seed, count in enumerate((9, 2, 0, 5)):
        for a, b in zip(gradients(got, tokens(count, seed)), gradients(want, tokens(count, seed)),
                        strict=True):
            assert torch.equal(a, b)
        for step in steps:
            step.step()
            step.zero_grad()
    for (name, a), (_, b) in zip(got.named_parameters(), want.named_parameters(), strict=True):
        assert torch.equal(a, b) and is_expert(a) == is_expert(b), name


def test_frozen_experts_and_tokens_alone_have_gradients():
    want, got = layer_of(), layer_of("host")
    for layer in (want, got):
        layer.experts.requires_grad_(False)
    x = tokens()
    for a, b in zip(gradients(got, x)[:3], gradients(want, x)[:3], strict=True):
        assert torch.equal(a, b)
    disk = layer_of("disk")
    disk.eval()
    y = x.clone().requires_grad_()
    disk(y).output.square().sum().backward()
    assert torch.equal(y.grad, gradients(want, x)[1])


@pytest.mark.parametrize("dispatch", sorted(set(dispatchers.names())))
@pytest.mark.parametrize("size, experts", [(2, 6), (4, 2)])
def test_every_rank_stores_its_own_experts(dispatch, size, experts, tmp_path):
    if dispatchers.entry(dispatch).optional:
        pytest.skip("not here")
    traits = dispatchers.get(dispatch).traits
    capacity = {"capacity_factor": 0.0} if traits.fixed_slots else {}
    parallel = {"mode": "fixed"}
    if traits.splits_slots:  # pairs of ranks with the same tokens
        parallel |= {"replicas": 2, "schedule": "s2"}
    alike = 2 if traits.splits_slots else size if traits.shares_tokens else 1
    settings = {"dispatch": {"name": dispatch, **capacity}, "parallel": parallel,
                "experts": experts}

    whole = layer_of(experts=experts).state_dict()

    def run(comm, store):
        layer = layer_of(store, comm, tmp=tmp_path, **copy.deepcopy(settings))
        layer.load_state_dict(split(whole, comm.rank, comm.size))
        x = tokens(7, comm.rank // alike)
        y = bits(layer, x)
        return (y, *gradients(layer, x)) if store != "disk" else (y,)

    want = run_simulated(size, lambda comm: run(comm, "device"))
    for store in ("host", "disk"):
        for rank, got in enumerate(run_simulated(size, lambda comm, store=store: run(comm, store))):
            for a, b in zip(got, want[rank], strict=store == "host"):
                assert torch.equal(a, b), (store, rank)


def test_a_file_is_used_as_it_is(tmp_path, monkeypatch):
    from safetensors.torch import save_file

    want = [layer_of(number=0), layer_of(number=1)]
    for p in want[1].experts.parameters():
        p.data.normal_()
    path = tmp_path / "model.safetensors"
    save_file({f"layers.{n}.moe.experts.{name}": value for n, layer in enumerate(want)
               for name, value in layer.experts.state_dict().items()}, path)
    before = path.read_bytes()
    for n in range(2):
        got = layer_of("disk", tmp=path, number=n)
        got.router.load_state_dict(want[n].router.state_dict())
        assert torch.equal(bits(got, tokens()), bits(want[n], tokens()))
        # what is loaded later goes to a file of our own
        with torch.no_grad():
            for p in want[n].experts.parameters():
                p.mul_(2)
        monkeypatch.setattr("moe_plugin.memory.experts.stored.user_cache", lambda _: tmp_path)
        got.load_state_dict(want[n].state_dict())
        assert torch.equal(bits(got, tokens()), bits(want[n], tokens()))
    assert path.read_bytes() == before

    whole = layer_of(number=0).state_dict()

    def ranks(comm, store):
        layer = layer_of(store, comm, number=0, tmp=path)
        part = split(whole, comm.rank, comm.size)
        if store == "disk":
            part = {name: value for name, value in part.items() if "experts." not in name}
        layer.load_state_dict(part)
        return bits(layer, tokens(7, comm.rank))

    assert all(torch.equal(a, b) for a, b in zip(run_simulated(2, lambda c: ranks(c, "disk")),
                                                 run_simulated(2, lambda c: ranks(c, "device")),
                                                 strict=True))


def test_a_file_of_other_shape_is_named(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    state = layer_of(number=0).experts.state_dict()
    save_file({f"experts.{name}": value for name, value in state.items()}, path)
    with pytest.raises(ValueError, match=r"'experts.w_in_LDF' of shape \(6, 8, 12\), but the "
                                         r"layer needs \(6, 8, 16\); use the file of this model"):
        layer_of("disk", tmp=path, number=0, hidden_dim=16)
    with pytest.raises(ValueError, match="has 1 layers with a 'w_in_LDF', but this layer has n"):
        layer_of("disk", tmp=path, number=1)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        layer_of("disk", tmp=path, number=0)


def test_states_are_saved_and_loaded(tmp_path):
    source = layer_of()
    with torch.no_grad():
        for p in source.experts.parameters():
            p.normal_()
    for store in ("host", "disk"):
        got = layer_of(store, tmp=tmp_path)
        first = {name: value.clone() for name, value in got.experts.state_dict().items()}
        assert first.keys() == source.experts.state_dict().keys()
        assert torch.equal(first["w_in_LDF"], layer_of().experts.w_in_LDF)
        bits(got, tokens())  # in slots before
        got.load_state_dict(source.state_dict())
        assert torch.equal(bits(got, tokens()), bits(source, tokens()))
        torch.save(got.state_dict(), tmp_path / "saved.pt")
        again = layer_of()
        again.load_state_dict(torch.load(tmp_path / "saved.pt"))
        assert torch.equal(bits(again, tokens()), bits(source, tokens()))
        other = copy.deepcopy(got)
        assert torch.equal(bits(other, tokens()), bits(source, tokens()))
        assert min(other.experts.taken_counts().values()) >= 0
        with pytest.raises(RuntimeError, match="w_out_LFD.*w_in_LDF|w_in_LDF"):
            got.load_state_dict(layer_of(hidden_dim=16).state_dict())
        with pytest.raises(RuntimeError, match="experts.w_in_LDF"):
            got.load_state_dict({k: v for k, v in source.state_dict().items()
                                 if not k.endswith("w_in_LDF")})
        assert torch.equal(bits(got, tokens()), bits(source, tokens()))


def test_experts_on_disk_are_no_parameters_and_never_all_in_memory(tmp_path):
    layer = layer_of("disk", tmp=tmp_path, store_throttle=1e6)  # shares no cache
    assert list(layer.experts.parameters()) == [] and list(tmp_path.iterdir()) == []
    bits(layer, tokens(1))
    store = layer.experts.store
    assert len(store.resident()) == 2 and store.cache.slots == 4
    assert store.counters.bytes == 2 * EXPERT
    with pytest.raises(ValueError, match="experts.store=disk cannot be used in training"):
        gradients(layer, tokens())


def test_what_is_prefetched_is_a_hit(tmp_path):
    layer = layer_of("disk", tmp=tmp_path, cache="1MiB").eval()
    store = layer.experts.store
    store.prefetch(range(E))
    bits(layer, tokens())
    assert store.counters.misses == 0 and store.counters.prefetched == E
    assert store.counters.hits > 0 and store.counters.as_dict()["wasted"] == 0


def test_layers_share_slots_and_another_dtype_has_its_own(tmp_path):
    layers = [layer_of("host", cache="1MiB") for _ in range(2)]
    assert layers[0].experts.store.cache is layers[1].experts.store.cache
    before = layers[0].experts.store.cache
    layers[0].to(torch.float64)
    assert layers[0].experts.store.cache is not before
    want = layer_of().to(torch.float64)
    x = tokens(dtype=torch.float64)
    assert torch.equal(bits(layers[0], x), bits(want, x))
    disk = layer_of("disk", tmp=tmp_path)
    disk.to(torch.float64)
    assert torch.equal(bits(disk, x), bits(want, x))


def test_changed_parameters_are_fetched_again():
    layer, want = layer_of("host", cache="1MiB"), layer_of()
    bits(layer, tokens())
    with torch.no_grad():
        for a, b in zip(layer.experts.parameters(), want.experts.parameters(), strict=True):
            a.mul_(2)
            b.mul_(2)
    assert torch.equal(bits(layer, tokens()), bits(want, tokens()))


def test_settings_that_do_not_fit_are_named():
    def refused(match: str, **changes) -> None:
        with pytest.raises(ValueError, match=match):
            layer = layer_of("host", **changes)
            gradients(layer, tokens())

    refused("experts.dropout=0.5 cannot be used in training with experts.store=host", dropout=0.5)
    refused("experts.cache=64 B is too small for one expert", cache="64")
    refused("'plenty' is not a size", cache="plenty")
    refused("unknown cache_policy 'fifo'", cache_policy="fifo")
    refused("experts.store_throttle=-1.0 is out of bounds", store_throttle=-1.0)


def test_a_disk_that_is_full_loses_nothing(tmp_path):
    layer, source = layer_of("disk", tmp=tmp_path), layer_of()
    layer.load_state_dict(source.state_dict())
    want = bits(layer, tokens())
    other = {name: value * 2 if isinstance(value, Tensor) else value
             for name, value in source.state_dict().items()}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (E * EXPERT // 2, before[1]))
    try:
        with pytest.raises((TierError, ValueError), match="experts.store_path|free space"):
            layer.load_state_dict(other)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    layer.router.load_state_dict(source.router.state_dict())
    assert torch.equal(bits(layer, tokens()), want)


def test_compiled_graphs_leave_the_store_alone():
    slots = {"name": "padded", "capacity_factor": 1.0}
    want, got = layer_of(dispatch=dict(slots)), layer_of("host", dispatch=dict(slots))
    compiled = torch.compile(got.eval(), backend="eager")
    for count, seed in ((9, 0), (9, 1)):
        x = tokens(count, seed)
        with torch.no_grad():
            assert torch.equal(compiled(x).output, bits(want, x))


def test_experts_of_a_store_do_not_travel_between_ranks():
    with pytest.raises(ValueError, match="store=host, but only experts in device memory can move"):
        change_expert_parallel(layer_of("host"), None, LocalComm())
