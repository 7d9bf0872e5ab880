"""Every registered router inside a fairseq model: forward, backward, recomputation, token ids,
steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from moe_plugin.hosts.fairseq.layers import moe_layers
from moe_plugin.routing import finish_step, routers
from moe_plugin.routing.replay import record_routing, replay_routing
from tests.hosts.fairseq.small import dictionary, language_model, tokens, translation_model
from tests.hosts.fairseq.test_criterion import criterion
from tests.routing.references import reference_of

pytestmark = pytest.mark.fast


def settings_file(home: Path, name: str, **losses: float) -> dict[str, str]:
    """Flags of a model with this router."""
    router = {"name": name, **reference_of(name).settings}
    if name == "hash":
        router["hash"] = {"vocabulary": len(dictionary())}
    path = home / "moe.yaml"
    path.write_text(yaml.safe_dump({"router": router, "losses": losses or {"switch": 0.01}}))
    return {
        "moe_config": str(path), "moe_dispatch": "ragged", "moe_capacity_factor": "none",
        "moe_second_expert_policy": "all"
    }


def gradients(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    loss = (model(ids)[0] ** 2).sum() + sum(layer.gate_loss for layer in moe_layers(model))
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", routers.names())
def test_trains_and_recomputes(name: str, tmp_path: Path) -> None:
    flags = settings_file(tmp_path, name)
    plain, again = language_model(**flags), language_model(**flags, checkpoint_activations=True)
    again.load_state_dict(plain.state_dict())
    ids = tokens(pads=2)
    want, got = gradients(plain.train(), ids), gradients(again.train(), ids)
    assert set(want) == set(got) and any("experts" in key for key in want)
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, msg=lambda m, key=key: f"{key}: {m}")
    routed = [m.moe_layer.stats for m in moe_layers(again)]
    assert all(stats.tokens == int(ids.ne(dictionary().pad()).sum()) for stats in routed)
    finish_step(again)


def test_token_ids_reach_the_hash_router(tmp_path: Path) -> None:
    model = language_model(**settings_file(tmp_path, "hash", gshard=1.0)).eval()
    ids = tokens()
    out = model(ids)[0]
    [layer] = moe_layers(model)
    table_V = layer.moe_layer.moe.router.table_V
    assert torch.equal(layer.moe_layer.stats.load_KE[0],
                       torch.bincount(table_V[ids.flatten()], minlength=4))
    # incremental decoding hands over all ids so far and computes the last
    state: dict[str, Any] = {}
    steps = [model.decoder(ids[:, :t + 1], incremental_state=state)[0] for t in range(ids.shape[1])]
    torch.testing.assert_close(torch.cat(steps, 1), out, rtol=1e-4, atol=1e-5)


def test_token_ids_reach_encoder_and_decoder(tmp_path: Path) -> None:
    model = translation_model(**settings_file(tmp_path, "hash", sequence=1.0)).eval()
    source, target = tokens(length=7, pads=2), tokens(length=5)
    model(source, torch.full((3,), 7), target)
    for layer, ids in zip(moe_layers(model), (source, target), strict=True):
        real = ids[ids.ne(dictionary().pad())] if ids is source else ids.flatten()
        assert torch.equal(layer.moe_layer.stats.load_KE[0],
                           torch.bincount(layer.moe_layer.moe.router.table_V[real], minlength=4))
        assert layer.moe_layer.stats.losses["sequence"].isfinite()


def test_the_sequence_loss_is_by_sentence(tmp_path: Path) -> None:
    model = language_model(**settings_file(tmp_path, "topk", sequence=1.0)).eval()
    ids = tokens(batch=2)
    [layer] = moe_layers(model)

    def loss(batch: torch.Tensor) -> float:
        model(batch)
        return float(layer.moe_layer.stats.losses["sequence"])

    assert loss(ids) == pytest.approx((loss(ids[:1]) + loss(ids[1:])) / 2, rel=1e-5)


def test_recorded_routing_is_replayed_under_other_weights() -> None:
    model, ids = language_model(moe_router="base", moe_dispatch="ragged",
                                moe_capacity_factor="none",
                                moe_second_expert_policy="all").train(), tokens()
    [layer] = moe_layers(model)
    with record_routing() as tape:
        model(ids)
    first = layer.moe_layer.stats.load_KE
    with torch.no_grad():
        layer.moe_layer.moe.router.weight_ED.normal_()
    with replay_routing(tape):
        model(ids)
    assert torch.equal(first, layer.moe_layer.stats.load_KE)


def test_by_layer_the_layers_of_each_stack_are_numbered() -> None:
    flags = {
        "moe_router": "switch,expert_choice", "moe_router_selection": "layer",
        "moe_dispatch": "ragged", "moe_capacity_factor": "none", "moe_second_expert_policy": "all"
    }
    model = language_model(decoder_layers=3, moe_freq=1, **flags)
    model(tokens())
    assert [layer.moe_layer.stats.router
            for layer in moe_layers(model)] == ["switch", "expert_choice", "switch"]
    both = translation_model(**flags | {"moe_freq": 1})
    both(tokens(), torch.full((3,), 8), tokens())
    assert [layer.moe_layer.stats.router
            for layer in moe_layers(both)] == ["switch", "expert_choice"] * 2


def test_a_step_whose_routers_have_no_loss_adds_nothing_under_neg_log() -> None:
    zero = torch.zeros((), requires_grad=True)
    total = criterion(moe_gate_loss_transform="neg_log").gate_loss([zero, zero])
    total.backward()
    assert float(total) == 0 and zero.grad == 0
