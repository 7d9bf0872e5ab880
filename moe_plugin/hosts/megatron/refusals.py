"""Combinations of settings that Megatron's training loop or this package's layer reject.

Settings that are always rejected are listed in `fields`. A check can use three groups of values:
the script's arguments or the settings of `TransformerConfig`, by name; this package's settings, by
dotted path; and facts about the model that the caller adds. Importing this module imports neither
Megatron nor torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from moe_plugin.config import flatten, run_config, to_dict
from moe_plugin.config.refusals import (
    ACTIVATION_POLICY,
    CONTROLLED_TWICE,
    Request,
    Values,
    at_most_one,
    off,
    one_of,
    streamed_peer,
    when,
)

LEAVE = "leave it out"
_IN_MEGATRON = "{request} does not fit {setting} in Megatron: {remedy}"
_VALUE, _REPR = "{}={{}}", "{}={{}!r}"


def values_of(args: argparse.Namespace, settings: Mapping[str, Any], **facts: Any) -> Values:
    """Return the settings of a run, and the facts about it, that the checks need.

    Args:
        args: arguments of the script. Some training loops do not define all arguments.
        settings: settings of this package that the user set, by dotted path.
        facts: additional values. Facts take precedence over arguments and settings with the same
            name.
    """
    run = flatten(to_dict(run_config(settings)))
    return Values({**vars(args), **run, **settings, **facts})


def _stages(values: Values) -> bool:
    return (values["pipeline_model_parallel_size"] or 1) > 1


_WHOLE = (*at_most_one("use 1", "tensor_model_parallel_size"), *off(LEAVE, "native_moe"))
_ADAM_OR_SGD = one_of("use adam or sgd", "optimizer", "adam", "sgd", shown="{flag} {{}}",
                      given="muon")
TWINS = Request(
    "guard.twins={guard.twins}, which computes the whole model one additional time on each rank,", (
        *_WHOLE, *at_most_one("use 1", "pipeline_model_parallel_size"),
        *off(LEAVE, "recompute_granularity", given="full")), {"guard.twins": 2})
VOTES = Request(
    "guard.votes={guard.votes}, where each worker (a rank, an expert-parallel group or a pipeline) "
    "must compute and update the whole model independently and identically,", (
        *_WHOLE,
        *at_most_one("use 1", "context_parallel_size", "expert_tensor_parallel_size"),
        *when("embeddings that the first and the last stage share",
              lambda v: _stages(v) and not v["untie_embeddings_and_output_weights"],
              "use --untie-embeddings-and-output-weights, because the gradients of tied weights "
              "are summed after the vote", pipeline_model_parallel_size=2),
        *when("--mtp-num-layers on several stages", lambda v: _stages(v) and v["mtp_num_layers"],
              "leave it out, because the gradients of its embedding are summed after the vote",
              pipeline_model_parallel_size=2, mtp_num_layers=1,
              untie_embeddings_and_output_weights=True),
        *off("leave them out", "virtual_pipeline_model_parallel_size", shown="virtual stages",
             given=2),
        *one_of("use 1f1b", "pipeline.schedule", "1f1b", shown=_VALUE, given="auto"),
        *off(LEAVE, "stage_layouts"),
        *off("leave it out, because ranks cannot vote on parameters that only one rank updates",
             "use_distributed_optimizer"),
        *off("leave it out, because gradients would be summed before the vote",
             "overlap_grad_reduce"),
        *off("leave it out, because it counts the tokens of one rank's whole step",
             "calculate_per_token_loss"),
        *off("leave it out, because it averages the replicas' gradients without a vote",
             "moe_lighthouse"),
        *when("--moe-router-enable-expert-bias", lambda v: v["moe_router_enable_expert_bias"]
              and v["moe_router_bias_update_rate"] != 0,
              "leave it out, because its biases follow the loads that every rank reports",
              moe_router_enable_expert_bias=True, moe_router_bias_update_rate=1e-3),
        *when("losses.global_batch", lambda v: (v["losses"] or {}).get("global_batch"),
              "use --moe-aux-loss-coeff", losses={"global_batch": 0.1}),
        *when("--moe-router-load-balancing-type",
              lambda v: "global" in str(v["moe_router_load_balancing_type"]), "use aux_loss",
              moe_router_load_balancing_type="global_aux_loss")), {"guard.votes": 3})
REPLICAS = Request("--moe-lighthouse", (
    # with average_every peers average float32 weights, so half-precision gradients are allowed
    *when("--fp16, --bf16 and --use-distributed-optimizer",
          lambda v: v["use_distributed_optimizer"]
          or not v["offload.average_every"] and (v["fp16"] or v["bf16"]),
          "leave these three out, because replicas average float32 gradients of whole parameters",
          bf16=True),
    *off("use --moe-router sigmoid_bias, because Megatron's biases follow only the loads of one "
         "replica", "moe_router_enable_expert_bias")))
_OLD_GRAPH = "leave it out, because a graph would use the old experts"
RESIZE = Request("resize.expert_parallel_at={resize.expert_parallel_at}", (
    *at_most_one("use 1, because experts move between whole data-parallel ranks",
                 "tensor_model_parallel_size", "pipeline_model_parallel_size",
                 "context_parallel_size", "expert_tensor_parallel_size", "gtp_weight_remat_size",
                 "expert_gtp_weight_remat_size"),
    *off("leave it out, because Megatron's own layer cannot change its size", "native_moe"),
    *off("leave it out, because the state of a parameter is split over ranks",
         "use_distributed_optimizer"),
    *off("leave it out, because parameters are split over ranks", "use_megatron_fsdp",
         "use_torch_fsdp2"),
    *off("leave it out, because the optimizer's state is offloaded", "optimizer_cpu_offload"),
    *off("leave it out, because replicas would have experts on different ranks", "moe_lighthouse"),
    *off("leave it out, because its passes would use the old experts",
         "overlap_moe_expert_parallel_comm"),
    *off("leave it out, because its hooks would use the old experts", "delay_wgrad_compute"),
    *off(_OLD_GRAPH, "enable_cuda_graph", "external_cuda_graph"),
    *off("leave it out, because the parameters could change while a checkpoint is written",
         "async_save"),
    *one_of(_OLD_GRAPH, "cuda_graph_impl", "none", shown="{flag} {{}}", given="local"),
    *_ADAM_OR_SGD,
    *off("the number of experts must be divisible by {indivisible}; choose a divisor",
         "indivisible", shown="--num-experts {num_experts}", given=4)),
    {"resize.expert_parallel_at": {3: 4}})

ACTIVATIONS = Request(ACTIVATION_POLICY, off(
    CONTROLLED_TWICE, "recompute_granularity", "overlap_moe_expert_parallel_comm",
    "enable_cuda_graph", "external_cuda_graph", "cpu_offloading",
    "fine_grained_activation_offloading", "cuda_graph_impl", shown="Megatron's {}"),
    {"offload.activations": "swap"})
_AGAIN = "leave it out, because every part is recomputed anyway"
STREAMED = Request("offload.weights=host", (
    *at_most_one("use 1, because a rank computes all layers one after another",
                 "pipeline_model_parallel_size", shown="{flag} {{}}"),
    *at_most_one("use 1, because sequences can be split only by --sequence-parallel",
                 "context_parallel_size", shown="{flag} {{}}"),
    *_ADAM_OR_SGD,
    *off("use --moe-router sigmoid_bias", "moe_router_enable_expert_bias"),
    *off(_AGAIN, "recompute_granularity", given="full"),
    *at_most_one(LEAVE, "ensemble_heads"),
    *streamed_peer("moe_lighthouse"),
    *one_of(_AGAIN, "offload.activations", "keep", shown=_VALUE, given="recompute"),
    *off("use 0, because parts run one after another", "router.pre_gate", shown="{}", given=1),
    *when("dispatch.name=bounded", lambda v: v["dispatch.name"] == "bounded",
          "use another dispatcher, because a step cannot be repeated", dispatch__name="bounded"),
    *off("use --no-gradient-accumulation-fusion", "gradient_accumulation_fusion", shown="{}"),
    # --skip-train implies --no-load-optim
    *when("--no-load-optim", lambda v: v["no_load_optim"] and not v["skip_train"], LEAVE,
          no_load_optim=True),
    *off(LEAVE, "guard.votes", "guard.twins", shown="{}", given=3),
    *off(LEAVE, "fp8", "fp4", "native_moe", "calculate_per_token_loss", "use_distributed_optimizer",
         "hybrid_layer_pattern", "mtp_num_layers", "log_params_norm", "decoupled_lr",
         "use_megatron_fsdp", "use_torch_fsdp2", "finetune", "pretrained_checkpoint", "async_save",
         "moe_use_upcycling", "overlap_moe_expert_parallel_comm", "freeze_all_layers", "use_mup",
         "no_save_optim", "exit_on_missing_checkpoint", "ckpt_convert_format",
         "no_weight_decay_cond_type", "apply_wd_to_qk_layernorm")), message=_IN_MEGATRON)
SWARM = Request("--swarm", (
    *at_most_one("start a single process, and add more machines as peers", "processes",
                 shown="{processes} processes"),
    *when("tied embeddings, which are shared by two stages",
          lambda v: (v["swarm.stages"] or 1) > 1 and not v["untie_embeddings_and_output_weights"],
          "use --untie-embeddings-and-output-weights", swarm__stages=2),
    *when("--num-layers {num_layers} below --swarm-stages {swarm.stages}",
          lambda v: v["swarm.stages"] and v["num_layers"] < v["swarm.stages"], "use fewer stages",
          num_layers=1, swarm__stages=2, untie_embeddings_and_output_weights=True),
    *when("--bf16 or --fp16", lambda v: v["bf16"] or v["fp16"],
          "train in float32; --swarm-wire bf16 sends 16 bits", bf16=True),
    *_ADAM_OR_SGD,
    *off("leave it out, because every stage is recomputed anyway", "recompute_granularity",
         given="full"),
    *off(LEAVE, "native_moe", "calculate_per_token_loss", "use_distributed_optimizer", "skip_train",
         "mtp_num_layers", "hybrid_layer_pattern", "rampup_batch_size", "moe_lighthouse",
         "use_megatron_fsdp", "use_torch_fsdp2", "finetune", "pretrained_checkpoint", "async_save",
         "decoupled_lr")), message=_IN_MEGATRON)

def _overlap(name: str, bound: Any, *accepted: Any, given: Any = True,
             fact: str = "") -> tuple[Any, ...]:
    """Return a row of `OVERLAP`, which rejects values of a setting. By default, all values except
    those in `accepted` are rejected. If `fact` is given, the setting is rejected whenever this fact
    is true.
    """
    remedy = f"{name} must be {bound}, or turn the overlap off"
    if fact:
        return when(f"{name}={{{name}!r}}", lambda v: v[fact], remedy,
                    **{name.replace(".", "__"): given, fact: True})
    return one_of(remedy, name, *accepted, shown=_REPR, given=given)


OVERLAP = Request(
    "overlap_moe_expert_parallel_comm=True, which hides exchanges behind another micro-batch,", (
        *_overlap("parallel.mode", "'fixed'", "fixed", given="auto"),
        *_overlap("parallel.d", 1, 1, given=2),
        *_overlap("parallel.d_backward", 0, 0, 1, given=2),
        *_overlap("parallel.spill", "'never'", "never", given="everywhere"),
        *_overlap("dispatch.send", "'rows'", "rows", "auto", given="nodes"),
        *_overlap("experts.weights_first", False, False),
        *_overlap("parallel.replicas", 1, 1, given=2),
        *_overlap("dispatch.name", "'ragged' or 'padded'", given="bounded", fact="indivisible"),
        *_overlap("sequence_parallel", True, given=False, fact="tokens_of_all_ranks"),
        *_overlap("router.pre_gate", 0, 0, given=1),
        *_overlap("router.name", "a router that reads no token ids", given="hash",
                  fact="reads_token_ids"),
        # Megatron's schedule applies the final norm only in the last step of an MoE layer
        *_overlap("moe_layer_freq", "such that the last layer is an MoE layer", given=2,
                  fact="dense_at_end"),
        # the schedule accesses attributes of Megatron's flex dispatcher, and with CUDA graphs
        # attributes of Megatron's own layer
        *when("moe_token_dispatcher_type={moe_token_dispatcher_type!r}",
              lambda v: v["moe_token_dispatcher_type"] == "flex",
              "moe_token_dispatcher_type must be 'alltoall', or turn the overlap off",
              moe_token_dispatcher_type="flex"),
        *_overlap("cuda_graph_impl", "'none'", "none", given="local")))

_SIZES = "tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
STAGE_LAYOUTS = Request("--stage-layouts", (
    *when("stage_layouts={words}", lambda v: v["layouts"] != v["pipeline_model_parallel_size"]
          or v["layouts"] < 2, "one layout for each of at least 2 stages, but there are "
          "{pipeline_model_parallel_size} stages. Use --pipeline-model-parallel-size {most}",
          words="tp=2", layouts=1, pipeline_model_parallel_size=1, most=2),
    *when("pipeline_model_parallel_size={pipeline_model_parallel_size}",
          lambda v: v["world"] % v["pipeline_model_parallel_size"],
          "a divisor of the number of processes, {world}. Start another number of processes",
          world=3),
    *when(f"{', '.join(_SIZES)}=({', '.join(f'{{{size}}}' for size in _SIZES)})",
          lambda v: any(v[size] not in (None, 1) for size in _SIZES[:2])
          or v[_SIZES[2]] is not None,
          "left out. Set tp, ep and etp in the layouts instead", tensor_model_parallel_size=2),
    *when("untie_embeddings_and_output_weights=False", lambda v: v["first_tp"] != v["last_tp"]
          and not v["untie_embeddings_and_output_weights"],
          "True if the first and the last stage have different tp. Use "
          "--untie-embeddings-and-output-weights, because the two stages split the vocabulary "
          "differently, and Megatron sums the gradients of tied weights rank by rank", first_tp=2),
    *at_most_one("1. Leave it out", "num_virtual_stages_per_pipeline_rank",
                 "num_layers_per_virtual_pipeline_stage", "context_parallel_size", shown=_VALUE),
    *off("left out. Stages have different groups, which this setting does not support",
         "mtp_num_layers", "mtp_detach_heads", "use_tp_pp_dp_mapping", "hybrid_layer_pattern",
         shown=_VALUE),
    *off("left out. Use --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers "
         "for stages with different numbers of layers", "pipeline_model_parallel_layout",
         shown=_VALUE, given="Et|tL"),
    *when("eval_micro_batch_size={eval_micro_batch_size}",
          lambda v: v["eval_micro_batch_size"] not in (None, v["micro_batch_size"]),
          "equal to micro_batch_size={micro_batch_size}. Leave it out", eval_micro_batch_size=7,
          micro_batch_size=2),
    *when("log_num_zeros_in_grad=True",
          lambda v: v["log_num_zeros_in_grad"] and not v["use_distributed_optimizer"],
          "left out without the distributed optimizer, whose ranks count over all stages. Leave it "
          "out, or use --use-distributed-optimizer", log_num_zeros_in_grad=True),
    *one_of("1f1b. Leave it out", "pipeline.schedule", "1f1b", shown=_VALUE, given="auto"),
    *off("left out. The replicas of a rank must have the same layout", "moe_lighthouse",
         shown=_VALUE, given="http://a:1")),
    {"layouts": 2, "pipeline_model_parallel_size": 2, "world": 4},
    "{setting} cannot be used with stages of different layouts. The setting must be {remedy}.")

_UNSUPPORTED = "{request} does not support {setting}, which must be {remedy}"
_PLAIN = "; use pipeline.schedule=1f1b, or leave it out"
_NAME, _SCHEDULE = "pipeline.schedule={pipeline.schedule!r}", {"pipeline.schedule": "terapipe"}
VIRTUAL_STAGES = Request(_NAME, (
    # with virtual stages `auto` uses Megatron's own schedule
    *when("virtual stages, num_virtual_stages_per_pipeline_rank="
          "{virtual_pipeline_model_parallel_size!r}",
          lambda v: (v["virtual_pipeline_model_parallel_size"] or 1) > 1
          and v["pipeline.schedule"] not in ("1f1b", "auto"),
          "left out; use pipeline.schedule=1f1b (Megatron's own interleaved schedule), or leave "
          "out --num-virtual-stages-per-pipeline-rank, --num-layers-per-virtual-pipeline-stage or "
          "the further stages of --pipeline-model-parallel-layout",
          virtual_pipeline_model_parallel_size=2),), _SCHEDULE, _UNSUPPORTED)
OWN_SCHEDULES = Request(_NAME, (
    *VIRTUAL_STAGES.rows,
    # settings that Megatron's own schedules support and ours do not
    *off(f"off{_PLAIN}", "overlap_moe_expert_parallel_comm", "use_ring_exchange_p2p",
         "variable_seq_lengths", "mtp_standalone", "defer_embedding_wgrad_compute",
         "enable_cuda_graph", "fine_grained_activation_offloading", "moe_paged_stash",
         "delay_wgrad_compute", shown=_REPR),
    *one_of(f"'none'{_PLAIN}", "cuda_graph_impl", "none", shown=_REPR, given="local")),
    _SCHEDULE, _UNSUPPORTED)
SLICES = Request(_NAME, (
    *at_most_one(f"1{_PLAIN}", "context_parallel_size", shown=_REPR),
    *off(f"False{_PLAIN}", "multi_latent_attention", shown=_REPR),
    *off(f"None{_PLAIN}", "mtp_num_layers", "num_microbatches_with_partial_activation_checkpoints",
         shown=_REPR, given=1)), _SCHEDULE, _UNSUPPORTED)
MEASURED_SLICES = Request(_NAME, (
    *when("deterministic_mode=True",
          lambda v: v["deterministic_mode"] and v["pipeline.schedule"] == "terapipe",
          "off without pipeline.slices; set pipeline.slices to fixed lengths, because slices "
          "chosen by measured times change the order of sums from run to run",
          deterministic_mode=True),
    *when("deterministic_mode=True", lambda v: v["deterministic_mode"],
          "off with pipeline.slices; leave out one of the two, because measured times decide "
          "whether sequences are cut, and slices change the order of sums",
          deterministic_mode=True, pipeline__schedule="auto")), _SCHEDULE, _UNSUPPORTED)
DELAYED_WEIGHTS = Request("pipeline.schedule='eager-1f1b, pipeline.delay_weights=True'", off(
    "off; use --no-gradient-accumulation-fusion, because the fused kernel adds weight gradients in "
    "the backward pass, or leave out --pipeline-delay-weights", "gradient_accumulation_fusion",
    shown="gradient_accumulation_fusion=True"), message=_UNSUPPORTED)
SLICED_ATTENTION = Request("pipeline.schedule='terapipe'", (
    *one_of("softmax_type='vanilla'", "softmax_type", "vanilla", shown=_REPR, given="learnable"),
    *off("window_size=None", "window_size", shown=_REPR, given=(2, 0))),
    message="{setting} cannot be used with {request}, which needs {remedy}. Use "
    "pipeline.schedule=1f1b.")

HYBRID = Request("hybrid_layer_pattern={hybrid_layer_pattern!r}", (
    *off("it is only for GPT models. Leave it out", "overlap_moe_expert_parallel_comm",
         shown="overlap_moe_expert_parallel_comm=True"),
    *off("it is only for GPT models. Leave it out", "cuts",
         shown="pipeline.schedule={pipeline.schedule}")),
    {"hybrid_layer_pattern": "M*E", "pipeline.schedule": "terapipe"},
    "{setting} cannot be combined with {request}, because {remedy}.")
SPEC = Request("--spec moe_plugin.hosts.megatron.spec", off(
    "Leave out {flag}, or replace the MoE layers of your own spec with "
    "moe_plugin.hosts.megatron.spec.swap_moe", "yaml_cfg", "heterogeneous_layers_config_path",
    "experimental_attention_variant", "use_kitchen", "use_kitchen_attention", shown=_REPR),
    message="{setting} describes layers that {request} cannot build. {remedy}.")
HEADS = Request("ensemble heads", (
    *at_most_one("because heads cannot be split over ranks. Use 1", "tensor_model_parallel_size",
                 shown=_VALUE),
    *off("which have separate weights. Set it to False", "shared_embeddings",
         shown="share_embeddings_and_output_weights=True")),
    message="{setting} cannot be used with {request}, {remedy}.")
PRE_GATE = Request("router.pre_gate=1", when(
    "mtp_num_layers", lambda v: v["router.pre_gate"] and v["mtp_num_layers"] and v["moe_at_end"],
    "because the multi-token prediction layers read other tokens than the block before. Remove one "
    "of the two", mtp_num_layers=1, moe_at_end=True), {"router.pre_gate": 1},
    "{request} cannot be combined with {setting}, {remedy}.")
BATCH_INVARIANT = Request("batch_invariant=True", (
    *when("Megatron's own router or shared experts",
          lambda v: v["batch_invariant"] and not v["batch_invariant_mode"]
          and (v["native_router"] or v["shared_experts"]),
          "because their results depend on the batch. Use --batch-invariant-mode, or leave out "
          "--moe-batch-invariant", shared_experts=True),
    *when("moe_expert_capacity_factor={moe_expert_capacity_factor}", lambda v:
          v["batch_invariant"] and v["moe_expert_capacity_factor"] is not None,
          "because the batch decides which tokens are dropped. Leave out one of the two",
          batch_invariant_mode=True, moe_expert_capacity_factor=1.0)), {"batch_invariant": True},
    "{request} cannot be used with {setting}, {remedy}.")
ROUTER_REPLAY = Request("moe_enable_routing_replay=True", (
    *when("tensor parallelism without sequence parallelism", lambda v: v["split_tokens"],
          "because each rank then routes a part of the tokens. Use --sequence-parallel",
          split_tokens=True),
    *at_most_one("because it changes the order in which ranks share tokens. Leave it out",
                 "parallel.replicas", shown=_VALUE)),
    message="{request} cannot be used with {setting}, {remedy}.")
SHARED_TOKENS = Request("{asked}", (
    *off("because tensor-parallel ranks then have different tokens and share no work. Leave out "
         "--sequence-parallel, or use parallel.replicas=1, which then routes like Parm's S1",
         "sequence_parallel", shown="sequence_parallel=True"),
    *off("because the losses of this router count tokens once per tensor-parallel rank. Leave that "
         "setting out, or use dispatch.name='ragged' and parallel.replicas=1", "native_router",
         shown="Megatron's own router (required by {native_router})",
         given="moe_router_num_groups=2")), {"asked": "parallel.replicas=2"},
    "{request} cannot be used with {setting}, {remedy}.")
STORED = Request("experts.store={experts.store}", (
    *when("experts.store_path={experts.store_path!r}", lambda v: v["experts.store"] == "disk"
          and not (v["experts.store_path"] or "").endswith(".safetensors"),
          "which loads its checkpoints into memory. Use a .safetensors file with the experts of "
          "all layers (docs/offload.md), or experts.store=host", experts__store_path=None),),
    {"experts.store": "disk", "experts.store_path": "experts.safetensors"},
    "{setting} cannot be used with {request} in Megatron, {remedy}.")
FROZEN = Request(
    "finetune.frozen_experts={finetune.frozen_experts}, finetune.lora_rank={finetune.lora_rank}", (
        *one_of("Use torch_dist", "ckpt_format", "torch_dist", shown="{flag} {{}}", given="torch"),
        *one_of("Use ieee or tf32, or leave out the recipe", "experts.precision", "ieee", "tf32",
                shown=_VALUE, given="mxfp8"),
        *one_of("Use auto", "experts.compute", "auto", shown=_VALUE, given="grouped"),
        *one_of("Use device", "experts.store", "device", shown=_VALUE, given="host"),
        *one_of("Use adam or sgd", "optimizer", "adam", "sgd", shown="{flag} {{}}", given="muon"),
        *one_of("Use device", "offload.weights", "device", shown=_VALUE, given="host"),
        *one_of("Use none", "swarm.role", "none", shown=_VALUE, given="lead"),
        *off("Leave it out", "batch_invariant", "auto_detect_ckpt_format", "delay_wgrad_compute",
             "freeze_all_layers", "log_params_norm", "native_moe", "moe_use_upcycling",
             "moe_lighthouse"),
        *off("Leave it out", "guard.votes", "guard.twins", "resize.expert_parallel_at",
             shown=_VALUE, given=3)),
    {"finetune.frozen_experts": "nf4", "finetune.lora_rank": 8},
    "{request} cannot be used with {setting}. {remedy}.")
MESSAGES = Request("pipeline_model_parallel_size={pipeline_model_parallel_size}", when(
    # Between two ranks an activation and a gradient in the same batch of messages are confused.
    # Both have the same shape, so nothing fails, but the results are wrong.
    "virtual_pipeline_model_parallel_size={virtual_pipeline_model_parallel_size}",
    lambda v: (v["virtual_pipeline_model_parallel_size"] or 1) > 1
    and v["pipeline_model_parallel_size"] == 2 and v["batch_p2p_comm"],
    "Set overlap_p2p_comm=True and batch_p2p_comm=False (leave out "
    "--no-overlap-p2p-communication), use 3 or more pipeline stages, or use no virtual stages",
    virtual_pipeline_model_parallel_size=2, batch_p2p_comm=True),
    {"pipeline_model_parallel_size": 2}, "{setting} with {request} gives wrong results if Megatron "
    "sends messages in batches (batch_p2p_comm=True), because Megatron then confuses activations "
    "and gradients. {remedy}.")
TABLE = {name: value for name, value in list(globals().items()) if isinstance(value, Request)}
