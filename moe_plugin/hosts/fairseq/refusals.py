"""Combinations of settings that fairseq's training loop or this package's models in fairseq reject.

A check can use three groups of values: fairseq's settings, by group and name (`common.amp`); this
package's settings, by dotted path (`guard.votes`); and facts that the caller adds. Importing this
module imports neither fairseq nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from moe_plugin.config import MoEConfig, RunConfig, flatten, to_dict
from moe_plugin.config.refusals import (
    ACTIVATION_POLICY,
    CONTROLLED_TWICE,
    Request,
    Values,
    off,
    one_of,
    streamed_peer,
    when,
)

LEAVE = "leave it out"
_VALUE = "{flag} {{}}"
# their rates depend on the epoch or a validation, which differ between replicas
_OWN_RATES = ("manual", "pass_through", "reduce_lr_on_plateau")


def values_of(cfg: Any, *configs: MoEConfig | RunConfig | None, **facts: Any) -> Values:
    """Return the settings of a run, and the facts about it, that the checks need.

    Args:
        cfg: settings of fairseq, or the arguments of a model.
        configs: settings of this package.
        facts: additional values. Facts take precedence over settings with the same name.
    """

    def read(path: str) -> Any:
        value = cfg
        for name in path.split("."):
            value = getattr(value, name, None)
        return value.value if isinstance(value, Enum) else value  # of a choice

    ours: dict[str, Any] = {}
    for config in configs:
        ours |= {} if config is None else flatten(to_dict(config))
    return Values({**ours, **facts}, read)


def _fully_sharded(values: Mapping[str, Any]) -> bool:
    return values["distributed_training.ddp_backend"] == "fully_sharded"


def _sharded(values: Mapping[str, Any]) -> bool:
    return _fully_sharded(values) or values["distributed_training.zero_sharding"] == "os"


def _several(remedy: str) -> tuple[Any, ...]:
    return when("one rank", lambda v: (v["distributed_training.distributed_world_size"] or 1) < 2,
                remedy, distributed_training__distributed_world_size=1)


_TWO = {"distributed_training.distributed_world_size": 2}
_BOTH_SHARDINGS = "--zero-sharding os and --ddp-backend fully_sharded"
_SHARDED = {"distributed_training__zero_sharding": "os"}
_FULLY = {"distributed_training__ddp_backend": "fully_sharded"}
MODEL = Request("a model with MoE layers", (
    *off("ranks would skip different layers and wait for each other; use 0", "encoder_layerdrop",
         "decoder_layerdrop", shown=_VALUE, given=0.1),
    *off("quantization noise applies to nn.Linear, and experts have none; use 0", "quant_noise_pq",
         shown=_VALUE, given=0.1),
    *off("its layer norm is inside the feed-forward network; use 0", "scale_fc", shown=_VALUE),
    *off("BASE layers have their own experts; use 0", "base_layers", shown=_VALUE, given=1)))
EXPERTS = Request("a model with experts", (
    *when("--ddp-backend slowmo", lambda v: v["distributed_training.ddp_backend"] == "slowmo",
          "it averages the experts; use legacy_ddp, pytorch_ddp (c10d) or fully_sharded",
          distributed_training__ddp_backend="slowmo"),
    *off("it averages the experts of all ranks; leave it out", "optimization.use_bmuf")))
TWINS = Request("--moe-check-twins {guard.twins}", (
    *off("leave one of the two out", "model.checkpoint_activations"),
    *when("--ddp-backend fully_sharded", _fully_sharded, "use legacy_ddp or pytorch_ddp (c10d)",
          **_FULLY),
    *_several("use several, or 0")), {"guard.twins": 2, **_TWO})
_ALONE = "updates made by one rank for all ranks cannot be voted on; "
VOTES = Request("--moe-votes {guard.votes}", (
    *_several("use several, or 0"),
    *when("--ddp-backend fully_sharded", _fully_sharded, f"{_ALONE}use legacy_ddp", **_FULLY),
    *when("--zero-sharding os", _sharded, f"{_ALONE}leave it out", **_SHARDED),
    *off("the gradients of replicas are averaged without a vote; leave it out",
         "model.moe_lighthouse"),
    *when("losses.global_batch", lambda v: (v["losses"] or {}).get("global_batch"),
          "it is computed from all ranks' tokens, so that no two ranks get the same result; use "
          "losses.gshard", losses={"global_batch": 0.1})), {"guard.votes": 3, **_TWO})
REPLICAS = Request("--moe-lighthouse", (
    *off("use --moe-freq and --moe-expert-count", "dense", shown="a model without experts"),
    # with average_every, peers average float32 weights
    *when("--fp16, --bf16 and --amp", lambda v: not v["offload.average_every"] and any(
        v[f"common.{name}"] for name in ("fp16", "bf16", "amp")), "leave them out",
        common__bf16=True),
    *when(_BOTH_SHARDINGS, _sharded, "leave them out", **_SHARDED),
    *off(LEAVE, "ema.store_ema"),
    *when("rates by epoch (several --lr, --force-anneal, or --lr-scheduler "
          f"{', '.join(_OWN_RATES)})",
          lambda v: v["lr_scheduler._name"] in _OWN_RATES or len(v["optimization.lr"] or [0]) != 1
          or v["lr_scheduler.force_anneal"] is not None, "use one --lr and a schedule by updates",
          lr_scheduler___name="manual")))
RESIZE = Request("--moe-expert-parallel-at {sizes}", (
    *_several("use several, or leave it out"),
    *when("--ddp-backend fully_sharded and --zero-sharding os", _sharded,
          "it assigns parts of parameters to ranks; use legacy_ddp or pytorch_ddp (c10d)",
          **_SHARDED),
    *off("the replicas would store experts on different ranks; leave one of the two out",
         "model.moe_lighthouse"),
    *off("averages would not be moved; leave it out", "ema.store_ema"),
    *off("use --bf16 or --fp16", "common.amp"),
    # their state has other shapes than the parameters, or is spread over several torch optimizers
    *when("--optimizer {optimizer._name}",
          lambda v: v["optimizer._name"] in ("adafactor", "composite"),
          "its state cannot move with the experts; use adam or sgd",
          optimizer___name="adafactor")), {"sizes": "3=2", **_TWO})
SHARDING = Request("{sharding}", (
    *when("--zero-sharding {distributed_training.zero_sharding}", lambda v: _fully_sharded(v)
          and v["distributed_training.zero_sharding"] not in (None, "none"),
          "fully_sharded already shards the optimizer state; leave it out", **_SHARDED),
    *when("--cpu-offload", lambda v: _fully_sharded(v) and v["distributed_training.cpu_offload"],
          "parameters remain on the device; leave it out", distributed_training__cpu_offload=True),
    *off("its loss scale differs between ranks; use --bf16 or --fp16", "common.amp"),
    *when("--store-ema", lambda v: _fully_sharded(v) and v["ema.store_ema"],
          "it copies the model; use --zero-sharding os, which does not shard parameters",
          ema__store_ema=True),
    # only the translation task has this setting
    *when("--eval-bleu", lambda v: _fully_sharded(v) and v["task.eval_bleu"],
          "generation runs only parts of the model; score with fairseq-generate afterwards",
          task__eval_bleu=True),
    *when("a criterion with parameters", lambda v: _fully_sharded(v) and v["trains_criterion"],
          "only the model is sharded; use --zero-sharding os", trains_criterion=True),
    *off("it averages parameters in its own way; leave it out", "optimization.use_bmuf"),
    *off("all ranks must participate in every save; leave it out",
         "checkpoint.no_last_checkpoints")), {
    "sharding": "--ddp-backend fully_sharded",
    "distributed_training.ddp_backend": "fully_sharded"})
ACTIVATIONS = Request(ACTIVATION_POLICY, (
    *off(CONTROLLED_TWICE, "model.checkpoint_activations"),
    *when("--ddp-backend fully_sharded", _fully_sharded, CONTROLLED_TWICE, **_FULLY),
    *off(CONTROLLED_TWICE, "guard.twins", shown="--moe-check-twins", given=2),
    *off(CONTROLLED_TWICE, "guard.votes", shown="--moe-votes", given=3)),
    {"offload.activations": "swap"})
_AGAIN = "leave it out, because streamed weights always recompute every part"


def _small(values: Mapping[str, Any]) -> bool:
    return bool(values["common.memory_efficient_fp16"] or values["common.memory_efficient_bf16"])


STREAMED = Request("--weights-on host", (
    *when("{distributed_training.distributed_world_size} processes",
          lambda v: (v["distributed_training.distributed_world_size"] or 1) > 1,
          "start one (--distributed-world-size 1)", distributed_training__distributed_world_size=2),
    *off("use --arch transformer_lm or moe_transformer_lm", "other_model",
         shown="model {other_model}", given="MoEEnsembleLanguageModel"),
    *off("use --fp16 or --bf16", "common.amp"),
    *when("--optimizer {optimizer._name} with --memory-efficient-fp16 or --memory-efficient-bf16",
          lambda v: v["optimizer._name"] == "sgd" and _small(v),
          "use adam, or --fp16 or --bf16 alone", optimizer___name="sgd",
          common__memory_efficient_fp16=True),
    *when("--moe-average-every with --memory-efficient-fp16 or --memory-efficient-bf16",
          lambda v: v["offload.average_every"] and _small(v),
          "use --fp16 or --bf16 alone, because peers average float32 weights",
          offload__average_every=5, common__memory_efficient_bf16=True),
    *one_of("use adam or sgd", "optimizer._name", "adam", "sgd",
            shown="--optimizer {{}}", given="adagrad"),
    *off(LEAVE, "optimizer.fp16_adam_stats"),
    *off("use language_modeling", "own_step", shown="task {own_step}, which defines its own "
         "train_step", given="TranslationTask"),
    *off("use moe_cross_entropy", "trained_criterion",
         shown="criterion {trained_criterion}, which has parameters", given="ModelCriterion"),
    *off(LEAVE, "ema.store_ema", "checkpoint.write_checkpoints_asynchronously"),
    *when(_BOTH_SHARDINGS, _sharded, "leave them out", **_SHARDED),
    *off(LEAVE, "common.quantization_config_path", given="quant.yaml"),
    *off(_AGAIN, "model.checkpoint_activations", "model.offload_activations"),
    *off(LEAVE, "model.adaptive_input", "model.adaptive_softmax_cutoff",
         "model.quant_noise_scalar"),
    *streamed_peer("model.moe_lighthouse"),
    *one_of(_AGAIN, "offload.activations", "keep",
            shown="--moe-activations {offload.activations}", given="recompute"),
    *when("--moe-votes and --moe-check-twins", lambda v: v["guard.votes"] or v["guard.twins"],
          LEAVE, guard__twins=5),
    *off("use 0, because the parts run one after another", "router.pre_gate",
         shown="--moe-pre-gate", given=1),
    *when("--moe-dispatch bounded", lambda v: v["dispatch.name"] == "bounded",
          "use another dispatcher, because a step cannot be repeated", dispatch__name="bounded")),
    message="{request} does not fit {setting} in fairseq: {remedy}")
PRE_GATE = Request("router.pre_gate=1", (
    *when("dispatch.name={dispatch.name!r}", lambda v: v["router.pre_gate"] and v["bounded"],
          "because its evaluation repeats a layer's call when rows exceed the bound. Use "
          "router.pre_gate=0 or dispatch.name='ragged'", bounded=True, dispatch__name="bounded"),),
    {"router.pre_gate": 1}, "{request} cannot be used with {setting} in fairseq, {remedy}")
LAYER = Request("fairseq", (
    *when("experts.store={experts.store} cannot be used for training", lambda v: v["training"]
          and v["experts.store"] not in (None, "device"), "which reduces and updates parameters on "
          "the device. Use experts.store=device. Only evaluation (fairseq-validate, "
          "fairseq-eval-lm, fairseq-generate) supports --moe-experts-on", experts__store="host",
          training=True),
    *(row for setting in ("dispatch.name", "parallel.replicas") for row in off(
        "because it requires ranks with the same tokens, and fairseq's data-parallel ranks have "
        "different tokens. Use dispatch.name='ragged' or 'padded', and parallel.replicas=1",
        f"same_tokens.{setting}", shown=f"{setting}={{{setting}!r}} cannot be used"))),
    message="{setting} in {request}, {remedy}")
GATHERED_PRE_GATE = Request("--moe-pre-gate 1", off(
    "which gathers the parameters of one layer at a time. Use --moe-pre-gate 0 or --zero-sharding "
    "os", "router.pre_gate", shown="--ddp-backend fully_sharded", given=1),
    message="{request} cannot be used with {setting}, {remedy}")
HEADS = Request("an ensemble of output heads", off(
    "Leave {flag} out", "adaptive_softmax_cutoff", shown=_VALUE, given="8,16"),
    message="{setting} cannot be combined with {request}. {remedy}")
BRANCH = Request("fairseq's moe branch", (
    *off("whose gate is a single linear layer from tokens to experts. Use topk, switch or gshard",
         "other_router", shown="router.name={router.name!r}"),
    *off("which converts its gate to the model's precision. Leave --moe-router-fp32 out",
         "router.fp32", shown="router.fp32=True")),
    message="{setting} cannot be used with {request}, {remedy}")
TABLE = {name: value for name, value in list(globals().items()) if isinstance(value, Request)}
