"""The models against dense references: exact forward, gradients, padding, recomputation,
incremental decoding.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import build_model
from torch import nn

from moe_plugin.experts.base import expert_parameters
from moe_plugin.hosts.fairseq.layers import moe_layers
from moe_plugin.hosts.fairseq.models import MoETransformerLanguageModel
from moe_plugin.routing.pregate import has_own_gate
from tests.hosts.fairseq.small import dictionary, language_model, task, tokens, translation_model

pytestmark = pytest.mark.fast

DROPLESS = {
    "moe_dispatch": "ragged", "moe_capacity_factor": "none", "moe_second_expert_policy": "all"
}


def copy_dense_weights(dense: nn.Module, moe: nn.Module) -> None:
    """Give the single expert of each MoE layer the weights of the dense layer in its place, and
    share everything else.
    """
    state = dict(dense.state_dict())
    target = moe.state_dict()
    for name in target:
        if name in state:
            target[name] = state[name]
    for name in list(target):
        if ".moe_layer.moe.experts." not in name:
            continue
        layer, parameter = name.split(".moe_layer.moe.experts.")
        source = {
            "w_in_LDF": "fc1.weight", "bias_in_LF": "fc1.bias", "w_out_LFD": "fc2.weight",
            "bias_out_LD": "fc2.bias"
        }[parameter]
        value = state[f"{layer}.{source}"]
        target[name] = (value.t() if value.dim() == 2 else value)[None]
    moe.load_state_dict(target)


@pytest.mark.parametrize("dispatch", [{"moe_dispatch": "padded", "moe_capacity_factor": "1.0"},
                                      {"moe_dispatch": "ragged", "moe_capacity_factor": "none"}])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_one_expert_with_room_for_all_is_the_dense_network(dispatch: dict[str, str],
                                                           activation: str) -> None:
    dense = language_model(moe_freq=0, activation_fn=activation)
    moe = language_model(moe_expert_count=1, moe_top1_expert=True, activation_fn=activation,
                         **dispatch)
    copy_dense_weights(dense, moe)
    ids = tokens(pads=3)
    out_dense, out_moe = dense(ids)[0], moe(ids)[0]
    real = ids.ne(dictionary().pad())
    torch.testing.assert_close(out_moe[real], out_dense[real], atol=1e-5, rtol=1e-5)
    for out in (out_dense, out_moe):
        (out[real] ** 2).sum().backward()
    layer = moe.decoder.layers[1].moe_layer.moe.experts
    old = dense.decoder.layers[1]
    torch.testing.assert_close(layer.w_in_LDF.grad[0].t(), old.fc1.weight.grad, atol=1e-4,
                               rtol=1e-4)
    torch.testing.assert_close(layer.w_out_LFD.grad[0].t(), old.fc2.weight.grad, atol=1e-4,
                               rtol=1e-4)
    torch.testing.assert_close(layer.bias_in_LF.grad[0], old.fc1.bias.grad, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(moe.decoder.embed_tokens.weight.grad,
                               dense.decoder.embed_tokens.weight.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("layers", "freq", "positions"), [(4, 1, [0, 1, 2, 3]), (4, 2, [1, 3]),
                                                           (5, 3, [2])])
def test_positions_of_moe_layers(layers: int, freq: int, positions: list[int]) -> None:
    model = language_model(decoder_layers=layers, moe_freq=freq)
    assert [i for i, layer in enumerate(model.decoder.layers)
            if layer in moe_layers(model)] == positions


def test_padding_is_not_routed() -> None:
    model = language_model(use_moe_pad_mask=True, **DROPLESS)
    ids = tokens(pads=3)
    model(ids)
    assert int(moe_layers(model)[0].moe_layer.stats.tokens) == int(ids.ne(dictionary().pad()).sum())
    branch = language_model()
    branch(ids)
    assert int(moe_layers(branch)[0].moe_layer.stats.tokens) == ids.numel()


def test_encoder_padding_is_not_routed() -> None:
    model = translation_model()
    source = tokens(pads=4)
    model(source, source.ne(1).sum(1), tokens(length=5))
    encoder, decoder = moe_layers(model)
    assert int(encoder.moe_layer.stats.tokens) == int(source.ne(1).sum())
    assert int(decoder.moe_layer.stats.tokens) == 15


@pytest.mark.parametrize("build", [language_model, translation_model])
def test_recomputed_activations_give_the_same_gradients(build: Any) -> None:
    # noise in routing: only a recorded choice can be repeated
    plain, recomputed = (build(**DROPLESS, moe_router_noise="4.0", moe_expert_dropout="0.2",
                               checkpoint_activations=flag) for flag in (False, True))
    recomputed.load_state_dict(plain.state_dict())
    for model in (plain, recomputed):
        torch.manual_seed(7)
        ids = tokens()
        out = model(ids)[0] if build is language_model else model(ids, torch.full((3,), 8), ids)[0]
        gate = sum(layer.gate_loss for layer in moe_layers(model))
        (out.square().sum() + 10 * gate).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    for name, parameter in recomputed.named_parameters():
        if wanted[name] is None:
            assert parameter.grad is None, name
        else:
            torch.testing.assert_close(parameter.grad, wanted[name], atol=1e-5, rtol=1e-4,
                                       msg=lambda m, name=name: f"{name}: {m}")
    router = moe_layers(recomputed)[0].moe_layer.moe.router.weight_ED
    assert router.grad.abs().sum() > 0


def test_incremental_decoding_gives_the_same_scores() -> None:
    model = language_model(**DROPLESS).eval()
    ids = tokens()
    with torch.no_grad():
        whole = model(ids)[0]
        state: dict[str, Any] = {}
        steps = [
            model.decoder(ids[:, :end + 1], incremental_state=state)[0][:, -1]
            for end in range(ids.shape[1])
        ]
    torch.testing.assert_close(torch.stack(steps, 1), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("settings", "words"), [
    ({"moe_freq": 3}, "--moe-freq 3"),
    ({"moe_expert_count": 0}, "--moe-expert-count"),
    ({"decoder_layerdrop": 0.1}, "--decoder-layerdrop"),
    ({"quant_noise_pq": 0.1}, "--quant-noise-pq"),
    ({"scale_fc": True}, "--scale-fc"),
    ({"base_layers": 1}, "--base-layers"),
    ({"moe_expert_parallel_size": 2}, "--moe-expert-parallel-size"),
])
def test_impossible_models_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        language_model(**settings)


def test_alternate_width_makes_dense_layers() -> None:
    model = language_model(alternate_decoder_ffn_embed_dim=48)
    assert not expert_parameters(model)
    assert [layer.fc1.out_features for layer in model.decoder.layers] == [32, 48]


def test_named_sizes_build() -> None:
    from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

    assert ARCH_MODEL_REGISTRY["moe_lm_tiny"] is MoETransformerLanguageModel
    from moe_plugin.hosts.fairseq.options import MoELanguageModelConfig

    given = Namespace()
    ARCH_CONFIG_REGISTRY["moe_lm_tiny"](given)
    known = {
        k: v for k, v in vars(given).items() if k in MoELanguageModelConfig.__dataclass_fields__
    }
    config = MoELanguageModelConfig(
        **{
            **known, "max_target_positions": 32, "tokens_per_sample": 32, "add_bos_token": False,
            "tpu": False
        })
    model = MoETransformerLanguageModel.build_model(config, task())
    assert moe_layers(model)[0].moe_layer.moe.config.num_experts == 8


@pytest.mark.parametrize(("arch", "flags", "experts"), [
    ("moe_lm_tiny", "", [8]),
    ("moe_lm_tiny", "--moe-freq 1 --moe-expert-count 4 --decoder-embed-dim 16", [4, 4]),
    ("moe_lm_tiny", "--moe-freq 0", []),
    ("moe_transformer_tiny", "", [8, 8]),
    ("moe_transformer_tiny", "--moe-freq 1 --moe-expert-count 2", [2] * 4),
    ("moe_transformer_tiny", "--decoder-moe-freq 1 --moe-expert-count 2", [2] * 2),
])
def test_flags_win_over_named_sizes(arch: str, flags: str, experts: list[int]) -> None:
    """fairseq fills in a size twice: when it parses the flags, and when it builds the model."""
    job = "language_modeling" if arch == "moe_lm_tiny" else "translation"
    given = f"data --user-dir moe_plugin --task {job} --arch {arch} {flags}"
    parsed = options.parse_args_and_arch(options.get_training_parser(), given.split())
    model = build_model(convert_namespace_to_omegaconf(parsed).model, task())
    assert [each.moe_layer.moe.config.num_experts for each in moe_layers(model)] == experts
    if "embed-dim" in flags:
        assert model.decoder.embed_dim == 16


def test_a_checkpoint_of_another_expert_count_is_refused() -> None:
    with pytest.raises((ValueError, RuntimeError), match="num_experts=4|size mismatch"):
        language_model(moe_expert_count=8).load_state_dict(language_model().state_dict())


@pytest.mark.parametrize(("settings", "words"), [
    ({"dispatch": {"name": "index_slice"}}, "dispatch.name='index_slice' cannot be used in"),
    ({"parallel": {"replicas": 2}}, "parallel.replicas=2 cannot be used in fairseq"),
])
def test_what_needs_tensor_parallel_ranks_is_refused(settings: dict[str, Any], words: str) -> None:
    from moe_plugin.comm import run_simulated
    from moe_plugin.config import from_dict
    from moe_plugin.hosts.fairseq.groups import FairseqGroups
    from moe_plugin.hosts.fairseq.layers import FairseqMoELayer, LayerSettings

    config = from_dict({"model_dim": 8, "num_experts": 4, **settings})
    with pytest.raises(ValueError, match=words):
        run_simulated(
            2, lambda comm: FairseqMoELayer(
                LayerSettings(config, FairseqGroups(comm, 1, 2), True, 1.0)))


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_pre_gates_join_a_stack_and_start_from_an_ordinary_checkpoint(
        again: bool, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"decoder_layers": 3, "moe_freq": 1, **DROPLESS}
    ordinary = language_model(**settings)
    caplog.set_level("INFO", "moe_plugin.routing.pregate")
    one = language_model(moe_pre_gate=1, **settings)
    assert "MoE layers 2 to 3 of 3" in caplog.text and "starts as the gate" in caplog.text
    two = language_model(moe_pre_gate=1, checkpoint_activations=again, **settings)
    for model in (one, two):  # the same names
        model.load_state_dict(ordinary.state_dict())
    grads = []
    for model in (one, two):
        ids = tokens()
        loss = (model(ids)[0] ** 2).sum() + sum(layer.gate_loss for layer in moe_layers(model))
        loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])
    assert all(grads[0][name].abs().sum() > 0 for name in grads[0] if name.endswith("weight_ED"))
    assert not torch.equal(one(tokens())[0], ordinary(tokens())[0])


def test_pre_gates_generate_as_they_read() -> None:
    model = language_model(moe_freq=1, moe_pre_gate=1, **DROPLESS).eval()
    ids, state = tokens(batch=2), {}
    with torch.no_grad():
        whole = model(ids)[0]
        for i in range(1, ids.shape[1] + 1):
            step = model(ids[:, :i], incremental_state=state)[0]
            torch.testing.assert_close(step[:, 0], whole[:, i - 1], atol=1e-5, rtol=1e-5)


def test_pre_gates_of_encoder_and_decoder_are_apart() -> None:
    model = translation_model(moe_freq=1, moe_pre_gate=1)
    layers = [layer.moe_layer.moe for layer in moe_layers(model)]
    assert [has_own_gate(layer) for layer in layers] == [True, False, True, False]
    with pytest.raises(ValueError, match="pre_gate=1 cannot be used with dispatch.name='bounded'"):
        language_model(moe_pre_gate=1, **{**DROPLESS, "moe_dispatch": "bounded"})
    from moe_plugin.hosts.fairseq.sharding import shard_model

    with pytest.raises(ValueError, match="--moe-pre-gate 1 cannot be used with --ddp-backend full"):
        shard_model(model, None, None)
