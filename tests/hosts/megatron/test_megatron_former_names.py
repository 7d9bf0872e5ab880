"""Experts' biases have the names in Megatron's checkpoints that they always had; state dicts take
both.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")
from tests.former_names import former
from tests.hosts.megatron.layers import Case, build, initialise_parallel
from tests.hosts.megatron.ranks import on_ranks

pytestmark = pytest.mark.megatron


def _names(folder: str) -> tuple[dict[str, str], bool, bool]:
    """The sharded tensors' names by those in the layer; whether copies by a state dict and by a
    distributed checkpoint are equal.
    """
    from megatron.core import dist_checkpointing

    from moe_plugin.hosts.megatron.compat.checkpointing import wrap
    from moe_plugin.hosts.megatron.compat.writers import saves_whose_writers_end

    wrap("save", saves_whose_writers_end)
    case = Case(gated=True, native={"add_bias_linear": True})
    initialise_parallel(case)
    layer, other, third = (build(case, True) for _ in range(3))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    state = former(layer.state_dict())
    assert "experts.b_gate_LF" in state
    other.load_state_dict(state)
    sharded = layer.sharded_state_dict("mlp.")
    dist_checkpointing.save(sharded, folder)
    third.load_state_dict({
        name.removeprefix("mlp."): value for name, value in
        dist_checkpointing.load(third.sharded_state_dict("mlp."), folder).items()})
    x = torch.randn(3, 2, 16)
    wanted = layer(x)[0]
    return ({name: shard.key for name, shard in sharded.items()}, torch.equal(wanted, other(x)[0]),
            torch.equal(wanted, third(x)[0]))


def test_names_of_biases(tmp_path: object) -> None:
    [(names, by_state, by_checkpoint)] = on_ranks(1, _names, str(tmp_path))
    assert by_state and by_checkpoint
    for part in ("in_LF", "gate_LF", "out_LD"):
        assert names[f"mlp.experts.bias_{part}"] == f"mlp.experts.b_{part}"


def test_neutral_names_of_biases() -> None:
    from moe_plugin.checkpoint.formats.megatron.neutral import _table
    from moe_plugin.checkpoint.neutral import DecoderSettings

    table = _table(DecoderSettings(
        heads=2, kv_heads=2, norm="rmsnorm", norm_eps=1e-5, activation="silu", gated=True,
        positions="rotary", tied=False))
    ours, theirs = "layers.1.moe.experts.bias_in_LF", "decoder.layers.1.mlp.experts.b_in_LF"
    assert table.neutral_name(theirs) == ours and table.their_names(ours, 2) == [theirs]
