"""Megatron's hybrid and latent models with our layers of experts, and published launch scripts at
small sizes: their flags as they stand, the losses of Megatron's own layers.

Sources: Megatron-LM's examples/mixtral, its configurations of Nemotron 3 in examples/post_training
(without the layers that need Mamba's kernels) and of the functional test deepseekv3_proxy_flex;
Qwen3-30B-A3B of Megatron-MoE-ModelZoo.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from tests.hosts.megatron.layers import (
    Case,
    build,
    draw,
    initialise_parallel,
    load,
    run,
    whole_gradients,
)
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import MODEL, PP2, VERSION, Run, launched, when_built

needs_hybrid = pytest.mark.skipif(
    importlib.util.find_spec("megatron.core.models.hybrid") is None,
    reason="needs HybridModel, of megatron-core 0.18 and newer")
needs_latent = pytest.mark.skipif(
    "moe_latent_size" not in TransformerConfig.__dataclass_fields__,
    reason="needs a megatron-core with latent MoE, 0.17 or newer")
needs_newest = pytest.mark.skipif(VERSION < (0, 19), reason="flags of megatron-core 0.19")
TOKENS, LENGTH, BATCH = 24, 8, 2
LOSSES = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1,
          "moe_z_loss_coeff": 0.01}


def _config(pattern: str, case: Case) -> Any:
    main, *predictions = pattern.split("/")
    case.native |= {**LOSSES, "num_layers": len(main), "is_hybrid_model": True, "ffn_hidden_size":
                    20, "mtp_num_layers": len(predictions) or None, "hidden_dropout": 0.0,
                    "attention_dropout": 0.0, "gated_linear_unit": False}
    return case.config()


def _model(pattern: str, case: Case, ours: bool) -> Any:
    """A hybrid model; the same weights on all ranks, ours or not."""
    model = _build(_config(pattern, case), pattern, ours)
    layers = _layers_of_experts(model)
    drawn = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if ".router." not in name and ".experts." not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=drawn) * 0.2)
    for number, layer in enumerate(layers):
        load(layer, case, draw(case, seed=number))
    return model


def _build(config: Any, pattern: str, ours: bool) -> Any:
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from moe_plugin.hosts.megatron.compat import hybrid
    from moe_plugin.hosts.megatron.spec import swap_moe

    stack = hybrid.stack_spec(config, pattern, False)
    return HybridModel(config, swap_moe(stack, {}) if ours else stack, TOKENS, LENGTH,
                       hybrid_layer_pattern=pattern)


def _layers_of_experts(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "shared_experts")
            and hasattr(module, "router")]


def _results(model: Any, case: Case) -> dict[str, Tensor]:
    from megatron.core import parallel_state as ps

    from moe_plugin.hosts.megatron.compat import aux_losses

    aux_losses.set_logged_losses({})
    ids = torch.randint(TOKENS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(
        ps.get_data_parallel_rank()))
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    losses = model(ids, torch.arange(LENGTH).expand_as(ids), mask, labels=ids.roll(-1, 1),
                   loss_mask=torch.ones(BATCH, LENGTH))
    losses.mean().backward()
    found = {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()
             if ".router." not in name and ".experts." not in name}
    for number, layer in enumerate(_layers_of_experts(model)):
        for name, grad in vars(whole_gradients(layer, case)).items():
            found[f"gradient of {name} in layer of experts {number}"] = grad
    found |= {"losses": losses.detach()}
    found |= {f"logged {name}": entry.values.sum()
              for name, entry in aux_losses.logged_losses().items()}
    return {name: value for name, value in found.items() if value is not None}


def _differences(pattern: str, case: Case) -> tuple[dict[str, float], list[Any]]:
    """(of every result, relative to its size, between Megatron's layers and ours; numbers of our
    layers in the model).
    """
    initialise_parallel(case)
    models = [_model(pattern, case, ours) for ours in (False, True)]
    native, ours = (_results(model, case) for model in models)
    assert native.keys() == ours.keys()
    return ({name: float((native[name] - ours[name]).abs().max()
                         / native[name].abs().max().clamp(min=1e-6)) for name in native},
            [layer.layer_number for layer in _layers_of_experts(models[1])])


@needs_hybrid
@pytest.mark.parametrize(("world", "pattern", "case", "numbers"), [
    (1, "*E-*E/*E/*E", Case(), [2, 5, 7, 12]), (2, "E*-E", Case(ep=2), [1, 4]),
    (1, "*E-*E/*E/*E", Case(native={"mtp_use_repeated_layer": True}), [2, 5, 7])],
    ids=["alone", "EP2", "repeated"])
def test_losses_and_gradients_are_natives(world: int, pattern: str, case: Case,
                                          numbers: list[int]) -> None:
    for found, mine in on_ranks(world, _differences, pattern, case):
        assert len(found) > 20 and max(found.values()) < 2e-5, sorted(
            found.items(), key=lambda item: -item[1])[:5]
        assert mine == numbers


def _said_of_a_config_without_the_mark() -> str:
    """Megatron builds such a model; its layers of experts are then numbered wrongly."""
    initialise_parallel(case := Case())
    config = _config("*E", case)
    config.is_hybrid_model = False
    with pytest.raises(ValueError, match="is_hybrid_model") as error:
        _build(config, "*E", True)
    return str(error.value)


@needs_hybrid
def test_a_config_that_does_not_say_hybrid_is_refused() -> None:
    [said] = on_ranks(1, _said_of_a_config_without_the_mark)
    assert "must be True" in said and "TransformerConfig(is_hybrid_model=True" in said


def _native_layers(argv: list[str]) -> tuple[set[str], list[str]]:
    """Classes of the layers of experts of a run, and what is said of --native-moe."""
    said: list[str] = []
    logging.getLogger("moe_plugin.megatron").addFilter(
        lambda record: said.append(record.getMessage()) or True)

    def kinds(run: Run) -> set[str]:
        return {type(m).__name__ for m in run.model.modules()
                if type(m).__name__.endswith("MoELayer")}

    return when_built(argv, kinds), [line for line in said if line.startswith("--native-moe")]


@needs_hybrid
def test_native_layers_where_they_are_asked_for(data: str) -> None:
    """Settings of ours are then named: nothing reads them."""
    argv = [*MODEL[2:], "--hybrid-layer-pattern", "*E", "--data-path", data, "--train-iters", "1",
            "--native-moe", "--moe-parallel", "fixed", "--moe-timeout", "60"]
    [(kinds, said)] = on_ranks(1, _native_layers, argv)
    assert kinds == {"MoELayer"}
    [line] = said
    assert "--moe-parallel 'fixed'" in line and "timeout" not in line


@needs_hybrid
@pytest.mark.parametrize("pattern", ["*E|*-", "*-|*E/*E"], ids=["last without E", "predictions"])
def test_stages_of_a_pattern_train_as_natives(data: str, tmp_path: Path, pattern: str) -> None:
    """Two pipeline stages, one of them without experts, from a checkpoint of Megatron's layers."""
    argv = [*MODEL[2:], *PP2, "--hybrid-layer-pattern", pattern, "--data-path", data,
            "--untie-embeddings-and-output-weights", "--position-embedding-type", "rope",
            "--train-iters", "3"]
    native = ["--native-moe"]
    launched([*native, "--save", "first", "--save-interval", "1", "--exit-interval", "1"], 2,
             tmp_path, model=argv)
    found = []
    for log, more in (("native", native), ("ours", [])):
        launched([*more, "--load", "first", "--no-load-optim", "--no-load-rng", "--log-file",
                  f"{log}.jsonl"], 2, tmp_path, model=argv)
        rows = map(json.loads, (tmp_path / f"{log}.jsonl").read_text().splitlines())
        # of a prediction's layer Megatron's own is in another place of the log
        found.append([{**{name: sorted(values) for name, values in row["aux_losses"].items()},
                       **{key: row[key] for key in row if key.endswith(("_loss", "grad_norm"))}}
                      for row in rows if "lm_loss" in row])
    assert [len(rows) for rows in found] == [2, 2] and found[0][0]["load_balancing_loss"]
    assert found[1] == [{key: pytest.approx(value, rel=1e-5) for key, value in row.items()}
                        for row in found[0]]


def _reported_mean(pattern: str) -> float:
    """Megatron's log of an auxiliary loss that is 1 in every layer of experts."""
    from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker

    from moe_plugin.hosts.megatron.compat import hybrid

    initialise_parallel(Case())
    hybrid.mend_loss_log()
    name, found = "load_balancing_loss", {}
    writer = SimpleNamespace(
        add_scalar=lambda name, value, step: found.update({name: float(value)}))
    args = argparse.Namespace(hybrid_layer_pattern=pattern, num_layers=4, mtp_num_layers=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "megatron.training.global_vars",
                      SimpleNamespace(_GLOBAL_ARGS=args))
        tracker = MoEMetricsTracker()
        for place in (2, 4, 5, 6, 6, 6):  # those of predictions share what there is behind
            tracker.record(name, torch.tensor(1.0), place, 6)
        tracker.report(1.0, 1, writer, force_initialize=True, track_names=[name],
                       num_layers=pattern.count("E"), moe_layer_freq=2, mtp_num_layers=2)
    return found[name]


@needs_hybrid
def test_the_log_is_a_mean_over_all_layers_of_experts() -> None:
    assert on_ranks(1, _reported_mean, "*E*E/EE/EE") == [1.0]


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


def _latent_results(case: Case, ours: bool) -> dict[str, Tensor]:
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


def _latent_differences(case: Case) -> dict[str, float]:
    """Of every result, between Megatron's layer and ours, relative to its size."""
    from megatron.core.transformer.moe import moe_layer

    initialise_parallel(case)
    moe_layer.HAVE_TE, moe_layer.TELinear = True, Duplicated
    shared = case.native.get("moe_shared_expert_intermediate_size")
    # Megatron's own layer hides it on a GPU only
    hidden = replace(case, native={**case.native, "moe_shared_expert_overlap": bool(shared)})
    native, ours = _latent_results(case, False), _latent_results(hidden, True)
    assert native.keys() == ours.keys()
    return {name: float((native[name] - ours[name]).abs().max() / native[name].abs().max())
            for name in native}


@needs_latent
@pytest.mark.parametrize(("world", "case"), CASES.values(), ids=CASES.keys())
def test_latent_equals_native(world: int, case: Case) -> None:
    for found in on_ranks(world, _latent_differences, case):
        assert len(found) >= 7 and max(found.values()) < 5e-6, found


def _split(sequence_parallel: bool) -> dict[str, Tensor]:
    """Of our layer on two ranks that have the same tokens, or each a part of them."""
    case = Case(tp=2, sequence_parallel=sequence_parallel, native=LATENT)
    initialise_parallel(case)
    found = _latent_results(case, True)
    return {name: value if sequence_parallel else value / 2 for name, value in found.items()
            if "latent_proj" in name}


@needs_latent
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


@needs_latent
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


@needs_latent
def test_checkpoints_have_the_projections_by_megatrons_names() -> None:
    [(keys, names, equal)] = on_ranks(1, _checkpoint)
    for part in ("fc1_latent_proj.weight", "fc2_latent_proj.weight"):
        assert part in keys and part in names
    assert not [name for name in names if name.startswith("moe.")] and equal


@needs_latent
def test_ours_is_refused_where_it_contradicts() -> None:
    from moe_plugin.hosts.megatron.translate import translate

    config = Case(native=LATENT).config()
    assert translate(config, {}).config.experts.latent_dim == 8
    with pytest.raises(ValueError, match="experts.latent_dim=4 contradicts .*--moe-latent-size"):
        translate(config, {"experts.latent_dim": 4})


OF_ALL = """--use-mcore-models --disable-bias-linear --normalization RMSNorm
--untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0
--moe-grouped-gemm --clip-grad 1.0 --weight-decay 0.1 --lr-decay-style cosine
--use-distributed-optimizer --sequence-parallel --overlap-grad-reduce --overlap-param-gather"""
MODEL_ZOO = """--distributed-timeout-minutes 60 --use-flash-attn --manual-gc --manual-gc-interval 5
--exit-duration-in-mins 230 --transformer-impl transformer_engine --no-mmap-bin-files
--no-create-attention-mask-in-dataloader --norm-epsilon 1e-6 --adam-beta1 0.9 --adam-beta2 0.95
--auto-detect-ckpt-format --dist-ckpt-strictness log_all --log-timers-to-tensorboard
--log-memory-to-tensorboard --log-validation-ppl-to-tensorboard --log-throughput
--init-method-std 0.02 --moe-permute-fusion --moe-router-dtype fp32 --swiglu
--position-embedding-type rope --expert-tensor-parallel-size 1 --context-parallel-size 1"""
NEMOTRON = """--moe-token-dispatcher-type alltoall --enable-experimental --moe-permute-fusion
--use-fused-weighted-squared-relu --cross-entropy-loss-fusion --cross-entropy-fusion-impl native
--moe-router-score-function sigmoid --moe-aux-loss-coeff 1e-4 --moe-router-enable-expert-bias
--moe-router-dtype fp32 --moe-router-load-balancing-type seq_aux_loss --attention-backend flash
--position-embedding-type none --squared-relu --group-query-attention --num-query-groups 2"""
# what stands in the script, and the layout and sizes of here
SCRIPTS = {
    "Mixtral 8x7B": ("""--position-embedding-type rope --swiglu --group-query-attention
        --num-query-groups 8 --no-masked-softmax-fusion --no-position-embedding
        --rotary-base 1000000 --init-method-std 0.01 --moe-router-topk 2
        --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
        --moe-token-dispatcher-type alltoall --no-load-optim --no-load-rng""",
                     "--num-layers 2 --num-query-groups 2 --expert-model-parallel-size 2"),
    "Qwen3 30B-A3B": (MODEL_ZOO + """ --rotary-percent 1.0 --rotary-base 1000000
        --rotary-seq-len-interpolation-factor 1 --group-query-attention --num-query-groups 4
        --qk-layernorm --moe-router-load-balancing-type aux_loss --moe-router-topk 8
        --moe-aux-loss-coeff 1e-3 --moe-token-dispatcher-type alltoall --log-num-zeros-in-grad
        --log-params-norm""",
                      "--num-layers 2 --num-query-groups 2 --num-experts 16 --kv-channels 16 "
                      "--tensor-model-parallel-size 2 --expert-model-parallel-size 2"),
    "DeepSeek-V3": (MODEL_ZOO + """ --no-check-for-nan-in-loss-and-grad --cross-entropy-loss-fusion
        --cross-entropy-fusion-impl native --multi-latent-attention --rotary-base 10000
        --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1 --qk-layernorm
        --moe-router-load-balancing-type seq_aux_loss --moe-router-topk 8
        --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep
        --moe-router-pre-softmax --moe-aux-loss-coeff 1e-4 --moe-router-group-topk 4
        --moe-router-num-groups 8 --moe-router-topk-scaling-factor 2.5
        --moe-router-score-function sigmoid --moe-router-enable-expert-bias
        --moe-router-bias-update-rate 1e-3 --moe-router-fusion --rotary-scaling-factor 40
        --mscale 1.0 --mscale-all-dim 1.0 --enable-experimental""",
                    "--num-layers 4 --num-experts 16 --moe-shared-expert-intermediate-size 32 "
                    "--moe-layer-freq ([0]*2+[1]*2) --q-lora-rank 32 --kv-lora-rank 16 "
                    "--qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --kv-channels 16 "
                    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*2|t*2mL"),
    "Nemotron 3 Nano": (NEMOTRON + """ --moe-router-topk 6 --moe-router-topk-scaling-factor 2.5
        --init-method-std 0.0173""",
                        "--hybrid-layer-pattern *E*E --num-experts 16 "
                        "--moe-shared-expert-intermediate-size 48 --expert-model-parallel-size 2"),
    "Nemotron 3 Super": (NEMOTRON + """ --moe-router-topk 22 --moe-router-topk-scaling-factor 5.0
        --is-hybrid-model --init-method-std 0.014""",
                         "--hybrid-layer-pattern *E-E --num-experts 32 --moe-latent-size 16 "
                         "--moe-shared-expert-intermediate-size 48 --tensor-model-parallel-size 2"),
}
SIZES = """--hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 64 --moe-ffn-hidden-size 32 --micro-batch-size 1 --global-batch-size 4
--train-iters 4 --lr 1e-2 --min-lr 1e-3 --lr-decay-iters 3 --log-interval 1 --split 90,10,0"""


def _published_losses(name: str, data: str, folder: Path, log: str,
            *more: str) -> list[dict[str, torch.Tensor]]:
    published, sizes = SCRIPTS[name]
    experts = [] if "--num-experts" in sizes else ["--num-experts", "8"]
    launched([*OF_ALL.split(), *published.split(), *SIZES.split(), *sizes.split(), *experts,
              "--data-path", data, "--log-file", log, *more], 2, folder, model=())
    rows = map(json.loads, (folder / log).read_text().splitlines())
    return [{key: torch.tensor(value) for key, value in row.items()
             if key == "grad_norm" or key.endswith("loss") and not isinstance(value, dict)}
            for row in rows if "lm_loss" in row]


@needs_newest
@pytest.mark.parametrize("name", SCRIPTS)
def test_losses_are_those_of_megatrons_layers(name: str, data: str, tmp_path: Path) -> None:
    """From one checkpoint of theirs; their latent layers need Transformer Engine."""
    latent = "--moe-latent-size" in SCRIPTS[name][1]
    native = [] if latent else ["--native-moe"]
    _published_losses(name, data, tmp_path, "first.jsonl", *native, "--exit-interval", "1",
                      "--save", "first", "--save-interval", "1")
    goes_on = ["--load", "first", "--no-load-optim", "--no-load-rng"]
    ours = _published_losses(name, data, tmp_path, "ours.jsonl", *goes_on)
    assert len(ours) == 3 and ours[2]["lm_loss"] < ours[0]["lm_loss"]
    if not latent:
        wanted = _published_losses(name, data, tmp_path, "native.jsonl", *goes_on, *native)
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-7)
