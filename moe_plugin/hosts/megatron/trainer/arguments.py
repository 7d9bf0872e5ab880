"""Command line of the training script: Megatron's own argument names, then our generated flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn

import torch
import torch.nn.functional as F

from moe_plugin.config.flags import add_arguments
from moe_plugin.hosts.megatron import balance, ensemble, replicas
from moe_plugin.hosts.megatron.own_flags import FUSED_ADAM, LOG_FILE, STAGE_LAYOUTS, Flag
from moe_plugin.hosts.megatron.trainer import copied_flags
from moe_plugin.hosts.megatron.translate import NATIVE_ARGUMENTS, settings_from_flags
from moe_plugin.machine import memory_bytes
from moe_plugin.messages import short

MOST = 10**9  # beyond any use of a size or a number of steps


def _typed(kind: type, **defaults: Any) -> tuple[Flag, ...]:
    """Flags with values of a type."""
    return tuple((name.replace("_", "-"), {"type": kind, "default": default})
                 for name, default in defaults.items())


def _needed(kind: type, *names: str) -> tuple[Flag, ...]:
    return tuple((name, {"type": kind, "required": True}) for name in names)


def _switches(*names: str) -> tuple[Flag, ...]:
    return tuple((name, {"action": "store_true"}) for name in names)


def _choices(**known: Sequence[str | None]) -> tuple[Flag, ...]:
    """Flags by their choices; the first is the default. None: not given."""
    return tuple((name.replace("_", "-"), {"default": values[0],
                                           "choices": tuple(v for v in values if v is not None)})
                 for name, values in known.items())


_MODEL = (
    *_needed(int, "num-layers", "hidden-size", "num-attention-heads", "seq-length"),
    *_typed(int, ffn_hidden_size=None, num_query_groups=1, kv_channels=None, rotary_base=10000),
    *_typed(float, norm_epsilon=1e-5, rotary_percent=1.0, init_method_std=0.02, hidden_dropout=0.1,
            attention_dropout=0.1),
    ("max-position-embeddings", {"type": int, "help": "default: --seq-length"}),
    *_choices(position_embedding_type=("learned_absolute", "rope"),
              normalization=("LayerNorm", "RMSNorm")),
    *_switches("swiglu", "squared-relu", "disable-bias-linear", "group-query-attention",
               "add-qkv-bias", "qk-layernorm", "untie-embeddings-and-output-weights"))
_MOE = (
    *_typed(int, num_experts=None, moe_ffn_hidden_size=None, moe_router_topk=2,
            moe_router_num_groups=None, moe_router_group_topk=None,
            moe_shared_expert_intermediate_size=None),
    *_typed(float, moe_router_topk_scaling_factor=None, moe_z_loss_coeff=None,
            moe_input_jitter_eps=None, moe_router_bias_update_rate=1e-3,
            moe_expert_capacity_factor=None),
    *_choices(moe_router_score_function=("softmax", "sigmoid"),
              moe_router_dtype=(None, "fp32", "fp64"),
              moe_token_drop_policy=("probs", "position"),
              moe_token_dispatcher_type=("alltoall", "allgather", "flex")),
    *_switches("moe-router-pre-softmax", "moe-router-enable-expert-bias",
               "moe-pad-expert-input-to-capacity", "moe-apply-probs-on-input",
               "moe-shared-expert-gate", "moe-shared-expert-overlap"),
    ("moe-layer-freq", {"type": copied_flags.layer_freq, "default": 1}),
    ("moe-router-load-balancing-type", {
        "default": "aux_loss", "choices": copied_flags.BALANCE, "nargs": "+",
        "action": copied_flags.OneOrMore}),
    ("moe-aux-loss-coeff", {"type": float, "default": 0.0, "nargs": "+",
                            "action": copied_flags.OneOrMore}))
_TRAINING = (
    *_needed(int, "micro-batch-size", "train-iters"), *_needed(float, "lr"),
    *_typed(int, global_batch_size=None, lr_warmup_iters=0, lr_decay_iters=None, seed=1234,
            loss_scale_window=1000, hysteresis=2, ddp_bucket_size=None, recompute_num_layers=None,
            exit_interval=None, eval_interval=None, eval_iters=10),
    *_typed(float, min_lr=0.0, weight_decay=0.01, clip_grad=1.0, adam_beta1=0.9, adam_beta2=0.999,
            sgd_momentum=0.9, loss_scale=None, initial_loss_scale=2.0**32, min_loss_scale=1.0),
    *_choices(lr_decay_style=("linear", "constant", "cosine"), optimizer=("adam", "sgd"),
              recompute_granularity=(None, "full", "selective"),
              recompute_method=(None, "uniform", "block")),
    *_switches("bf16", "fp16", "use-distributed-optimizer", "overlap-grad-reduce",
               "overlap-param-gather", "calculate-per-token-loss",
               "accumulate-allreduce-grads-in-fp32", "deterministic-mode"),
    ("recompute-modules", {"nargs": "*"}),
    ("recompute-activations", {
        "action": "store_true",
        "help": "--recompute-granularity selective, whatever else is given for it"}),
    ("skip-train", {"action": "store_true", "help": "evaluate the checkpoint of --load, without "
                    "gradients and optimizer, and end"}))
_PARALLEL = (
    *_typed(int, tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
            num_virtual_stages_per_pipeline_rank=None, expert_model_parallel_size=1,
            expert_tensor_parallel_size=None, context_parallel_size=1),
    *_typed(float, distributed_timeout_minutes=10.0),
    *_switches("sequence-parallel", "overlap-moe-expert-parallel-comm"),
    STAGE_LAYOUTS)
_FILES = (
    ("data-path", {"required": True}), ("split", {"default": "969,30,1"}), ("data-cache-path", {}),
    ("save", {}), ("load", {}), *_switches("trust-checkpoint"),
    *_typed(int, save_interval=None, log_interval=10))
_OURS = (
    ("vocab-size", {"type": int, "help": "vocabulary of a dataset made by another tokenizer; "
                    "default: bytes, 257"}),
    LOG_FILE,
    ("native-moe", {"action": "store_true",
                    "help": "train with Megatron's own MoE layer, for comparison"}),
    ("cpu", {"action": "store_true", "help": "train on CPU although a GPU is there"}),
    FUSED_ADAM, *replicas.FLAGS)


def parser() -> argparse.ArgumentParser:
    """All arguments; those of Megatron mean what they mean there."""
    p = copied_flags.CopiedParser(
        prog="python -m moe_plugin.hosts.megatron.train", allow_abbrev=False,
        description="Train a GPT language model with MoE layers on Megatron-core.")
    for title, flags in (("model", _MODEL), ("mixture of experts", _MOE), ("training", _TRAINING),
                         ("parallelism", _PARALLEL), ("files", _FILES),
                         ("ensemble", ensemble.FLAGS), ("this script", _OURS),
                         ("without effect", copied_flags.WITHOUT_EFFECT)):
        group = p.add_argument_group(title)
        for name, options in flags:
            group.add_argument("--" + name, **options)
    add_arguments(p, NATIVE_ARGUMENTS)
    return p


def changed_defaults(args: argparse.Namespace) -> dict[str, Any]:
    """By name: the defaults of the flags whose values differ from them."""
    ours = parser()
    return {name: ours.get_default(name) for name, value in vars(args).items()
            if value != ours.get_default(name)}


def check(args: argparse.Namespace, world: int) -> None:
    """`ValueError` for sizes that do not fit together; fills in what defaults to another argument.
    """
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length",
                 "micro_batch_size", "train_iters", "log_interval", "tensor_model_parallel_size",
                 "pipeline_model_parallel_size", "expert_model_parallel_size"):
        _need(args, name, 1 <= getattr(args, name) <= MOST, f"in 1..{MOST}",
              "give a positive number")
    _need(args, "num_experts", args.num_experts is None or args.num_experts >= 1, ">= 1",
          "leave it out for a dense model")
    positions = args.max_position_embeddings
    _need(args, "max_position_embeddings",
          positions is None or args.seq_length <= positions <= MOST,
          f"in seq_length={args.seq_length}..{MOST}", "leave it out for seq_length")
    _need(args, "rotary_percent", 0 < args.rotary_percent <= 1, "> 0 and <= 1",
          "give the part of each head that rotary positions turn, 1 for all of it")
    balance.refuse_unmatched(args)
    freq = args.moe_layer_freq
    _need(args, "moe_layer_freq",
          freq >= 1 if isinstance(freq, int) else len(freq) == args.num_layers,
          f">= 1, or a list of num_layers={args.num_layers} numbers 0 and 1",
          "change one of the two")
    weights = 12 * args.num_layers * args.hidden_size**2  # bytes, at least one each
    memory = memory_bytes(torch.device("cpu"))
    if memory is not None and weights > world * memory:
        _refuse("num_layers * hidden_size^2", f"{args.num_layers} * {args.hidden_size}^2",
                "such that the weights fit the memory of the ranks", "lower one of the two")
    groups = args.num_query_groups
    _need(args, "num_query_groups", groups >= 1 and args.num_attention_heads % groups == 0,
          f"a divisor of num_attention_heads={args.num_attention_heads}", "change one of the two")
    _check_parallel(args, world)
    _check_training(args)
    ensemble.ensemble_of(args)


def _check_parallel(args: argparse.Namespace, world: int) -> None:
    tensor, experts = args.tensor_model_parallel_size, args.expert_model_parallel_size
    model = tensor * args.pipeline_model_parallel_size
    if world % model:
        _refuse("tensor_model_parallel_size * pipeline_model_parallel_size", model,
                f"a divisor of the {world} processes",
                "start another number of processes or change one of the two")
    _need(args, "num_experts", not args.num_experts or args.num_experts % experts == 0,
          f"a multiple of expert_model_parallel_size={experts}",
          "change one of the two; --expert-tensor-parallel-size cuts experts over more ranks")
    step = args.micro_batch_size * (world // model)
    args.global_batch_size = args.global_batch_size or step
    _need(args, "global_batch_size", args.global_batch_size % step == 0,
          f"a multiple of micro_batch_size * data-parallel size = {step}",
          f"use {max(1, args.global_batch_size // step) * step}")
    _need(args, "seq_length", args.seq_length % tensor == 0 or not args.sequence_parallel,
          f"a multiple of tensor_model_parallel_size={tensor} under --sequence-parallel",
          "change one of the two")
    _need(args, "context_parallel_size", args.context_parallel_size == 1, "1",
          "Megatron's attention is cut over ranks by Transformer Engine only, through "
          "moe_plugin.hosts.megatron.launch and Megatron-LM's script; use --sequence-parallel")
    stages = args.num_virtual_stages_per_pipeline_rank or 1
    _need(args, "num_virtual_stages_per_pipeline_rank",
          stages == 1 or args.pipeline_model_parallel_size > 1, "1 without pipeline stages",
          "use --pipeline-model-parallel-size 2 or more, or leave it out")
    parts = stages * args.pipeline_model_parallel_size
    _need(args, "num_layers", args.num_layers % parts == 0,
          f"a multiple of the {parts} pipeline stages", "change one of the two")


def _check_training(args: argparse.Namespace) -> None:
    _need(args, "skip_train", not args.skip_train or args.load, "False without --load",
          "give the folder of the checkpoints to evaluate")
    _need(args, "eval_iters", args.eval_iters >= 1 or not (args.skip_train or args.eval_interval),
          ">= 1 with --skip-train or --eval-interval",
          "give a positive number, or train without them")
    _need(args, "save_interval", args.save_interval is None or args.save_interval >= 1, ">= 1",
          "leave it out to save at the end only")
    _need(args, "fp16", not (args.bf16 and args.fp16), "False with --bf16",
          "leave out one of the two")
    for name in ("loss_scale", "initial_loss_scale", "min_loss_scale"):
        scale = getattr(args, name)
        _need(args, name, scale is None or scale > 0, "> 0", "leave it out for the default")
    sharded = args.use_distributed_optimizer and args.overlap_grad_reduce
    _need(args, "overlap_param_gather", not args.overlap_param_gather or sharded,
          "False without --use-distributed-optimizer and --overlap-grad-reduce", "give both")
    replicas.check(args)


def _need(args: argparse.Namespace, name: str, ok: Any, bound: str, remedy: str) -> None:
    if not ok:
        _refuse(name, getattr(args, name), bound, remedy)


def _refuse(name: str, value: Any, bound: str, remedy: str) -> NoReturn:
    raise ValueError(f"{name}={short(value)} is out of bounds: must be {bound}; {remedy}")


def values_for(kind: type, args: argparse.Namespace) -> dict[str, Any]:
    """The arguments that fields of a config of Megatron's have the names of, where given."""
    of_experts = _MOE if args.num_experts else ()
    names = {name.replace("-", "_") for name, _ in (*_MODEL, *of_experts, *_TRAINING, *_PARALLEL)}
    values = {field.name: getattr(args, field.name) for field in fields(kind)
              if field.name in names}
    return {name: value for name, value in values.items() if value is not None}


def transformer_config(args: argparse.Namespace, *, cpu: bool) -> Any:
    """Megatron's `TransformerConfig`; what it refuses becomes a `ValueError`."""
    from moe_plugin.hosts.megatron.compat.names import TransformerConfig

    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    stages = args.num_virtual_stages_per_pipeline_rank
    values = {
        **values_for(TransformerConfig, args), "add_bias_linear": not args.disable_bias_linear,
        "layernorm_epsilon": args.norm_epsilon, "params_dtype": dtype, "pipeline_dtype": dtype,
        "autocast_dtype": dtype, "use_cpu_initialization": cpu,
        "virtual_pipeline_model_parallel_size": stages,
        # as Megatron-LM's script has it: see `translate` for what the other way does to two ranks
        "overlap_p2p_comm": (stages or 1) > 1, "batch_p2p_comm": (stages or 1) == 1,
        "gradient_accumulation_fusion": False,
        "recompute_granularity": copied_flags.recompute_granularity(args), **_activation(args),
        "num_query_groups": args.num_query_groups if args.group_query_attention else None,
        **(_moe_values(args) if args.num_experts else {"expert_model_parallel_size": 1,
                                                       "expert_tensor_parallel_size": None})
    }
    try:
        config = TransformerConfig(**{k: v for k, v in values.items() if v is not None})
    except (AssertionError, ImportError) as error:  # a package for what was chosen is missing
        raise ValueError(f"Megatron refuses these settings: {error}") from error
    if args.num_experts and args.native_moe:  # of our layers `translate` says it
        balance.refuse_unknown(config)
    return config


def _activation(args: argparse.Namespace) -> dict[str, Any]:
    from moe_plugin.hosts.megatron.compat.names import squared_relu

    if args.swiglu:
        return {"gated_linear_unit": True, "activation_func": F.silu}
    return {"activation_func": squared_relu if args.squared_relu else F.gelu}


def _moe_values(args: argparse.Namespace) -> dict[str, Any]:
    values = {
        "num_moe_experts": args.num_experts,
        # Megatron allows moe_act with it alone; our experts do not read it
        "moe_grouped_gemm": "moe_act" in (args.recompute_modules or [])
    }
    if args.native_moe:
        chosen = (name.replace("-", "_") for name in copied_flags.NATIVE_MOE)
        return {**values, **{name: getattr(args, name) for name in chosen}}
    # what Megatron checks before our layer: flex asks for a package of a dispatcher of its own
    return {**values, "moe_token_dispatcher_type":
            args.moe_token_dispatcher_type.replace("flex", "alltoall")}


def our_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The moe-plugin settings that were given, by dotted path."""
    return settings_from_flags(vars(args))
