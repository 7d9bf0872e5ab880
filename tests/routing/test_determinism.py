"""Routing recorded and replayed, bitwise repetition, and every router on a GPU as on the CPU."""

from __future__ import annotations

import pytest
import torch

from moe_plugin import MoELayer
from moe_plugin.config import from_dict
from moe_plugin.parallel.recompute import record_routing, replay_routing
from moe_plugin.records import TokenInfo
from moe_plugin.routing import finish_step, routers
from tests.routing.references import reference_of

LOSSES = {"gshard": 1.0, "switch": 1.0, "sequence": 1.0, "global_batch": 1.0, "ta_moe": 1.0, "sam_alignment": 1.0, "importance": 1.0, "z": 1.0}


def make(name: str, **where) -> MoELayer:
    torch.manual_seed(5)
    router = {"name": name, **reference_of(name).settings}
    return MoELayer(from_dict({"model_dim": 8, "num_experts": 4, "losses": LOSSES, "router": router, "experts": {"hidden_dim": 16}}), **where)


def info(device: str = "cpu") -> TokenInfo:
    return TokenInfo(torch.arange(24, device=device) % 11, torch.arange(24, device=device) // 8, 3)


def step(layer: MoELayer, x: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """Everything a step gives, router state after it included."""
    layer.zero_grad()
    out = layer(x, mask, info=info(x.device.type))
    (out.output.square().sum() + sum(out.losses.values())).backward()
    finish_step(layer)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in layer.parameters()]
    return [out.output.detach(), out.stats.load_KE, *(v.detach() for v in out.losses.values()), *grads, *layer.router.buffers()]


@pytest.mark.parametrize("name", routers.names())
def test_the_same_seed_gives_the_same_bits(name: str) -> None:
    x, mask = torch.randn(24, 8), torch.arange(24) < 20
    runs = []
    for _ in range(2):
        layer = make(name)
        torch.manual_seed(7)
        runs.append(step(layer, x, mask))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("name", routers.names())
def test_recorded_routing_is_replayed_under_other_weights(name: str, tmp_path) -> None:
    layer, x = make(name), torch.randn(24, 8)
    with record_routing() as tape:
        first = [layer(x, info=info()).stats.load_KE for _ in range(2)]
    torch.save(tape.ids, tmp_path / "routing.pt")
    assert all(torch.equal(a, b) for a, b in zip(torch.load(tmp_path / "routing.pt"), tape.ids, strict=True))
    with torch.no_grad():
        for parameter in layer.router.parameters():
            parameter += torch.randn_like(parameter)
    with replay_routing(tape):
        again = [layer(x, info=info()).stats.load_KE for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: compares routing there with the CPU's")
@pytest.mark.parametrize("name", routers.names())
def test_on_a_gpu_as_on_the_cpu_and_bitwise_repeatable(name: str) -> None:
    on_cpu, on_gpu = make(name, dtype=torch.float64), make(name, dtype=torch.float64, device="cuda")
    on_gpu.load_state_dict(on_cpu.state_dict())
    x, mask = torch.randn(24, 8, dtype=torch.float64), torch.arange(24) < 20
    if not reference_of(name).modes[0]:  # chance decides in training
        on_cpu.eval(), on_gpu.eval()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        state = {key: value.clone() for key, value in on_gpu.state_dict().items() if isinstance(value, torch.Tensor)}
        runs = []
        for _ in range(2):
            on_gpu.load_state_dict(state, strict=False)
            torch.manual_seed(1)
            runs.append(step(on_gpu, x.cuda(), mask.cuda()))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    for got, want in zip(runs[0], step(on_cpu, x, mask), strict=True):
        torch.testing.assert_close(got.cpu(), want)
