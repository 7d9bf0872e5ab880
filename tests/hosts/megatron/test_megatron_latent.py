"""Latent MoE next to Megatron's own: `moe_latent_size`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.hosts.megatron.layers import Case, build, initialise_parallel, run
from tests.hosts.megatron.ranks import on_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.distributed, pytest.mark.skipif(
    "moe_latent_size" not in TransformerConfig.__dataclass_fields__,
    reason="needs a megatron-core with latent MoE, 0.17 or newer")]
LATENT = {"moe_latent_size": 8, "moe_router_load_balancing_type": "aux_loss",
          "moe_aux_loss_coeff": 0.1}
SHARED = {**LATENT, "moe_shared_expert_intermediate_size": 12}
CASES = {
    "alone": (1, Case(native=SHARED)),
    "EP2": (2, Case(ep=2, gated=True, native=LATENT)),
    "EP2 with biases": (2, Case(ep=2, gated=True, native={**LATENT, "add_bias_linear": True})),
    "EP2 with a hidden shared expert": (2, Case(ep=2, native=SHARED)),
    "TP2": (2, Case(tp=2, sequence_parallel=True, native=LATENT)),
}


class Duplicated(nn.Module):
    """Megatron's `TELinear(parallel_mode="duplicated")`, of torch alone."""

    def __init__(self, inputs: int, outputs: int, *, config: Any, bias: bool, **_rest: Any) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight, self.bias), None


def _results(case: Case, ours: bool) -> dict[str, Tensor]:
    layer: Any = build(case, ours)
    drawn = torch.Generator().manual_seed(5)
    latent = {f"{name}.{part}": parameter for name in ("fc1_latent_proj", "fc2_latent_proj")
              for part, parameter in sorted(getattr(layer, name).named_parameters())}
    others = [] if layer.shared_experts is None else list(layer.shared_experts.parameters())
    with torch.no_grad():
        for parameter in (*latent.values(), *others):
            parameter.copy_(torch.randn(parameter.shape, generator=drawn))
    found = {name: value for name, value in run(layer, case).items() if value is not None}
    assert all(p.sequence_parallel == case.sequence_parallel for p in latent.values())
    for name, parameter in latent.items():
        dist.all_reduce(parameter.grad)  # parts of it under sequence parallelism
        found[f"gradient of {name}"] = parameter.grad
    return found | {f"gradient {i} of the shared expert": p.grad for i, p in enumerate(others)}


def _differences(case: Case) -> dict[str, float]:
    """Of every result, between Megatron's layer and ours, relative to its size."""
    from megatron.core.transformer.moe import moe_layer

    initialise_parallel(case)
    moe_layer.HAVE_TE, moe_layer.TELinear = True, Duplicated
    shared = case.native.get("moe_shared_expert_intermediate_size")
    # Megatron's own layer hides it on a GPU only
    hidden = replace(case, native={**case.native, "moe_shared_expert_overlap": bool(shared)})
    native, ours = _results(case, False), _results(hidden, True)
    assert native.keys() == ours.keys()
    return {name: float((native[name] - ours[name]).abs().max() / native[name].abs().max())
            for name in native}


@pytest.mark.parametrize(("world", "case"), CASES.values(), ids=CASES.keys())
def test_equals_native(world: int, case: Case) -> None:
    for found in on_ranks(world, _differences, case):
        assert len(found) >= 7 and max(found.values()) < 5e-6, found


def _split(sequence_parallel: bool) -> dict[str, Tensor]:
    """Of our layer on two ranks that have the same tokens, or each a part of them."""
    case = Case(tp=2, sequence_parallel=sequence_parallel, native=LATENT)
    initialise_parallel(case)
    found = _results(case, True)
    return {name: value if sequence_parallel else value / 2 for name, value in found.items()
            if "latent_proj" in name}


def test_ranks_with_the_same_tokens_have_whole_gradients() -> None:
    """Without sequence parallelism each computes its part, and sums."""
    parts, whole = on_ranks(2, _split, True), on_ranks(2, _split, False)
    for name in parts[0]:
        torch.testing.assert_close(whole[0][name], parts[0][name])
        torch.testing.assert_close(whole[1][name], parts[0][name])


def _bytes(latent: int | None) -> int:
    case = Case(ep=2, native={"moe_latent_size": latent})
    initialise_parallel(case)
    layer: Any = build(case, True)
    run(layer, case)
    sent: int = layer.last_stats.bytes_sent
    return sent


def test_rows_travel_in_the_latent_width() -> None:
    whole, narrow = on_ranks(2, _bytes, None), on_ranks(2, _bytes, 4)
    for sent, less in zip(whole, narrow, strict=True):
        assert 0 < less < sent / 2 and (sent - less) % (16 - 4) == 0


def _checkpoint() -> tuple[list[str], list[str], bool]:
    """Keys of the sharded state, those of the state dict, and whether a copy is equal."""
    case = Case(native=LATENT)
    initialise_parallel(case)
    layer, other = build(case, True), build(case, True)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    other.load_state_dict(layer.state_dict())
    x = torch.randn(3, 2, 16)
    keys = [shard.key for shard in layer.sharded_state_dict().values()]
    return keys, list(layer.state_dict()), torch.equal(layer(x)[0], other(x)[0])


def test_checkpoints_have_the_projections_by_megatrons_names() -> None:
    [(keys, names, equal)] = on_ranks(1, _checkpoint)
    for part in ("fc1_latent_proj.weight", "fc2_latent_proj.weight"):
        assert part in keys and part in names
    assert not [name for name in names if name.startswith("moe.")] and equal


def test_ours_is_refused_where_it_contradicts() -> None:
    from moe_plugin.hosts.megatron.translate import translate

    config = Case(native=LATENT).config()
    assert translate(config, {}).config.experts.latent_dim == 8
    with pytest.raises(ValueError, match="experts.latent_dim=4 contradicts .*--moe-latent-size"):
        translate(config, {"experts.latent_dim": 4})
