"""Megatron's settings to ours: what our router expresses, what Megatron's own router does, what is
refused.

Native MoE arguments keep their meaning. Where our router gives the same numbers it is used; where a
setting is known only to Megatron's router, that router is built and its decision is carried into
our layer; what neither can do is a `ValueError`. Settings that only choose a native implementation
(dispatcher type, fusions) have no effect on results and are logged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch.nn.functional as F

from moe_plugin.config import (
    MoEConfig,
    RouterConfig,
    RunConfig,
    flags,
    flatten,
    from_dict,
    of_layer,
    run_config,
    to_dict,
    with_overrides,
)
from moe_plugin.config.router import router_names
from moe_plugin.hosts.megatron import balance
from moe_plugin.hosts.megatron.compat.settings import (
    plain_name,
    script_arguments,
    setting,
    with_known_names,
)
from moe_plugin.memory.weights.refusal import refuse_streamed_weights
from moe_plugin.messages import short
from moe_plugin.routing import only_read

# Paths of our tree that a native Megatron argument sets. Our generated flags for them are not
# offered.
NATIVE_ARGUMENTS: dict[str, str] = {
    "num_experts": "--num-experts",
    "deterministic": "--deterministic-mode",
    "router.top_k": "--moe-router-topk",
    "router.score": "--moe-router-score-function",
    "router.normalize": "--moe-router-pre-softmax",
    "router.scaling": "--moe-router-topk-scaling-factor",
    "router.input_jitter": "--moe-input-jitter-eps",
    "experts.kind": "--swiglu",
    "experts.hidden_dim": "--moe-ffn-hidden-size",
    "experts.activation": "--swiglu, --squared-relu",
    "experts.bias": "--disable-bias-linear",
    "experts.recompute_activation": "--recompute-modules",
    "experts.shared_overlap": "--moe-shared-expert-overlap",
    "experts.shared_hidden_dim": "--moe-shared-expert-intermediate-size",
    "experts.shared_gate": "--moe-shared-expert-gate",
    "experts.init_std": "--init-method-std",
    "experts.weights_first": "--moe-apply-probs-on-input",
}
LOSS_NAMES = {"switch": "load_balancing_loss", "z": "z_loss"}  # our name: name in Megatron's log


@dataclass(frozen=True)
class Translation:
    """A layer's settings in our terms.

    Attributes:
        config: of the layer.
        run: what the host reads.
        native_router: why Megatron's router is needed (empty: ours is used).
        notices: what has no effect here.
        native_balance: Megatron's router keeps the load even.
    """

    config: MoEConfig
    run: RunConfig
    native_router: tuple[str, ...]
    notices: tuple[str, ...]
    native_balance: bool


def settings_from_flags(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings given by `--moe-config` and the generated flags, as dotted paths.

    Flags override the file.
    """
    return {**flags.file_settings(values), **flags.settings_from_flags(values, NATIVE_ARGUMENTS)}


def timeout_of(settings: Mapping[str, Any]) -> float:
    """`comm.timeout_s` of settings by dotted paths, in seconds.

    Raises:
        ValueError: it is out of bounds.
    """
    given = {path: settings[path] for path in ("comm.timeout_s",) if path in settings}
    return with_overrides(MoEConfig(), given).comm.timeout_s


def translate(native: Any, settings: Mapping[str, Any], *,
              injected_router: bool = False) -> Translation:
    """Our config for a Megatron `TransformerConfig`.

    Args:
        native: `TransformerConfig` (any supported version).
        settings: ours, dotted paths to values, only those that were given.
        injected_router: the layer spec names a router class of its own.
    Raises:
        ValueError: a native setting that this layer does not support, one of ours that contradicts
            a native one, a bad value.
    """
    refuse_unsupported(with_known_names(native))
    if not injected_router:
        balance.refuse_unknown(native)
        balance.refuse_unmatched(native)
    reasons = list(
        native_router_reasons(native)) + (["the spec's own router"] if injected_router else [])
    known = _native_values(native)
    for path, value in known.items():
        _check_agreement(path, settings, value)
    # Megatron's init methods fill the weights
    _check_agreement("experts.init_std", settings, setting(native, "init_method_std"))
    known["losses"] = _losses(native, settings.get("losses"), bool(reasons))
    name = settings.get("router.name", RouterConfig.name)
    known = only_read(known, router_names(name), native.moe_router_topk)
    known = {**of_layer(settings), **known}
    if reasons:
        _check_native_router_settings(settings, reasons)
        known = {path: value for path, value in known.items() if path == "router.top_k"
                 or not (path.startswith("router.") and path in NATIVE_ARGUMENTS)}
    config = with_overrides(from_dict({"losses": {}}), known)
    run = run_config(settings)
    refuse_streamed_weights(run.offload, "Megatron")
    return Translation(config, run, tuple(reasons), tuple(_notices(native)),
                       injected_router or balance.router_balances(native))


def _native_values(native: Any) -> dict[str, Any]:
    sigmoid = native.moe_router_score_function == "sigmoid"
    post_softmax = sigmoid or not native.moe_router_pre_softmax
    return {
        "model_dim": native.hidden_size,
        "num_experts": native.num_moe_experts,
        "deterministic": bool(setting(native, "deterministic_mode", False)),
        "router.top_k": native.moe_router_topk,
        "router.score": "sigmoid" if sigmoid else "softmax",
        "router.normalize": "before_drop" if post_softmax else "none",
        "router.scaling": float(native.moe_router_topk_scaling_factor or 1.0),
        "router.input_jitter": float(native.moe_input_jitter_eps or 0.0),
        "experts.kind": "gated_ffn" if native.gated_linear_unit else "ffn",
        "experts.hidden_dim": native.moe_ffn_hidden_size or native.ffn_hidden_size,
        "experts.activation": _activation(native),
        "experts.bias": bool(native.add_bias_linear),
        "experts.shared_hidden_dim": 0,  # Megatron's own shared expert is used
        "experts.shared_gate": False,  # with its own gate
        "experts.shared_overlap": bool(setting(native, "moe_shared_expert_overlap", False)),
        "experts.recompute_activation": native.recompute_granularity == "selective" and "moe_act" in
                                        (setting(native, "recompute_modules") or []),
        "experts.weights_first": bool(setting(native, "moe_apply_probs_on_input", False)),
    }


def _check_agreement(path: str, settings: Mapping[str, Any], native_value: Any) -> None:
    if path in settings and settings[path] != native_value:
        argument = NATIVE_ARGUMENTS.get(path, "--hidden-size")
        raise ValueError(
            f"{path}={short(settings[path])} contradicts Megatron's own setting, which says "
            f"{short(native_value)}; in this host "
            f"set it by {argument} and leave it out of the moe-plugin settings")


def _losses(native: Any, given: Mapping[str, float] | None,
            native_router: bool) -> dict[str, float]:
    extra = given or {}
    if native_router:  # Megatron's router attaches its own losses
        if extra:
            raise ValueError(
                f"losses={short(dict(extra))} cannot be used with Megatron's own router; use "
                "moe_aux_loss_coeff and moe_z_loss_coeff"
            )
        return {}
    weights = {"switch": balance.aux_coefficient(native),
               "z": float(native.moe_z_loss_coeff or 0.0)}
    weights = {name: weight for name, weight in weights.items() if weight}
    if weights and given is not None and not given:
        raise ValueError(
            f"losses=none contradicts {weights} from moe_aux_loss_coeff/moe_z_loss_coeff; set "
            "these to 0, or leave losses out"
        )
    both = sorted(set(weights) & set(extra))
    if both:
        raise ValueError(
            f"losses.{both[0]}={short(extra[both[0]])} contradicts {short(weights[both[0]])} from "
            "moe_aux_loss_coeff/moe_z_loss_coeff; "
            "give one of the two")
    return {**weights, **extra}


def _activation(native: Any) -> str:
    from moe_plugin.hosts.megatron.compat.names import squared_relu

    names = {F.gelu: "gelu", F.silu: "silu", F.relu: "relu", squared_relu: "squared_relu"}
    if native.activation_func not in names:
        raise ValueError(
            f"activation_func={native.activation_func!r} is not supported: must be one of gelu, "
            "silu, relu, squared_relu; "
            "choose one of these")
    return names[native.activation_func]


def native_router_reasons(native: Any) -> Iterable[str]:
    """Settings, as name=value, that only Megatron's own router knows."""
    if any(kind not in ("aux_loss", "none")
           for kind in balance.as_list(native.moe_router_load_balancing_type)):
        yield f"moe_router_load_balancing_type={native.moe_router_load_balancing_type}"
    if native.moe_router_score_function not in ("softmax", "sigmoid"):
        yield f"moe_router_score_function={native.moe_router_score_function}"
    if native.moe_router_dtype == "fp64":
        yield "moe_router_dtype=fp64"
    if native.add_bias_linear:
        yield "add_bias_linear=True (a bias in the router)"
    for name in ("moe_router_num_groups", "moe_router_group_topk", "moe_router_enable_expert_bias",
                 "moe_expert_capacity_factor", "moe_router_force_load_balancing",
                 "moe_router_force_biased", "moe_enable_routing_replay"):
        if setting(native, name) not in (None, False):
            yield f"{name}={setting(native, name)}"


def _check_native_router_settings(settings: Mapping[str, Any], reasons: list[str]) -> None:
    ours = [
        path for path in settings
        if path.startswith(("router.", "dispatch.capacity",
                            "dispatch.eval")) and path not in NATIVE_ARGUMENTS
    ]
    defaults = flatten(to_dict(from_dict({})))
    for path in ours:
        if settings[path] != defaults[path]:
            raise ValueError(
                f"{path}={short(settings[path])} cannot be used with Megatron's own router, which "
                f"{', '.join(reasons)} asks for; "
                "leave out one of the two")


# name, values that are supported, remedy
_OFF, _SIZES_CHANGE = (None, False), "set it to False: sizes change from step to step"
_UNSUPPORTED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("fp8", _OFF, "run the MoE layers in bf16"), ("fp4", _OFF, "run the MoE layers in bf16"),
    ("moe_latent_size", (None, 0), "leave it unset"),
    ("glu_linear_offset", (None, 0, 0.0), "set it to 0"),
    ("activation_func_clamp_value", (None,), "leave it unset"),
    ("overlap_dispatch_backward_with_experts_wgrad", _OFF, "set it to False"),
    ("moe_mlp_glu_interleave_size", (None,), "leave it unset"),
    ("moe_expert_rank_capacity_factor", (None,), "leave it unset"),
    ("moe_paged_stash", _OFF, "set it to False"),
    ("moe_router_padding_for_quantization", _OFF, "set it to False"),
    ("init_model_with_meta_device", _OFF, "set it to False"),
    ("expert_gtp_weight_remat_size", (None, 1),
     "leave out --expert-tensor-parallel-num-weight-shards"),
    ("gtp_weight_remat_size", (None, 1), "leave out --tensor-parallel-num-weight-shards"),
    ("enable_cuda_graph", _OFF, _SIZES_CHANGE), ("external_cuda_graph", _OFF, _SIZES_CHANGE))


def refuse_unsupported(native: Any) -> None:
    """`ValueError` for the first native setting that this layer cannot honour.

    That is one that it would have to ignore although it changes what is computed or when.
    """
    if not native.num_moe_experts:
        raise ValueError(
            f"num_moe_experts={short(native.num_moe_experts)} must be >= 1 for an MoE layer; set "
            "--num-experts"
        )
    for name, supported, remedy in _UNSUPPORTED:
        value = setting(native, name)
        if not any(value is ok or (ok is not None and value is not None and value == ok)
                   for ok in supported):
            raise ValueError(
                f"{name}={short(value)} is not supported by moe-plugin's MoE layer: must be "
                f"{short(supported[-1])}; {remedy}"
            )
    _refuse_lists(native)
    _refuse_confused_stages(native)
    _refuse_wrappers(script_arguments())


def _refuse_confused_stages(native: Any) -> None:
    # between two ranks an activation and a gradient of one batch of messages are taken for each
    # other: both have the same shape, so that the numbers are wrong and nothing fails
    stages = setting(native, "virtual_pipeline_model_parallel_size") or 1
    if stages > 1 and native.pipeline_model_parallel_size == 2 and setting(
            native, "batch_p2p_comm", True):
        raise ValueError(
            f"virtual_pipeline_model_parallel_size={stages} with pipeline_model_parallel_size=2 "
            "trains wrongly where Megatron sends messages in batches (batch_p2p_comm=True): "
            "between two ranks it takes activations for gradients; set overlap_p2p_comm=True and "
            "batch_p2p_comm=False (leave out --no-overlap-p2p-communication), use 3 or more "
            "pipeline stages, or no virtual ones")


def _refuse_wrappers(arguments: Mapping[str, Any]) -> None:
    for name in ("use_megatron_fsdp", "use_torch_fsdp2", "hybrid_context_parallel"):
        if arguments.get(name):
            raise ValueError(
                f"{name}=True is not supported by moe-plugin's MoE layer, whose results with it "
                f"nobody has compared with Megatron's own: must be False; leave out "
                f"--{name.replace('_', '-')}" + (
                    ", and use --use-distributed-optimizer" if "fsdp" in name else ""))


def _refuse_lists(native: Any) -> None:
    chosen = setting(native, "cuda_graph_scope") or []
    scopes = {plain_name(scope) for scope in balance.as_list(chosen)}
    if setting(native, "cuda_graph_impl", "none") not in (None, "none") and scopes != {"attn"}:
        raise ValueError(
            f"cuda_graph_impl={short(native.cuda_graph_impl)} with scope {sorted(scopes)} is not "
            "supported: sizes inside an MoE "
            "layer change from step to step; use the scope 'attn' alone, or cuda_graph_impl='none'")
    offloaded = {"expert_fc1", "moe_act"} & set(setting(native, "offload_modules") or [])
    if setting(native, "fine_grained_activation_offloading", False) and offloaded:
        raise ValueError(
            f"offload_modules contains {sorted(offloaded)}, which is not supported: must be "
            "without; remove them"
        )


_WITHOUT_EFFECT = ("moe_token_dispatcher_type", "moe_enable_deepep", "moe_flex_dispatcher_backend",
                   "moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion",
                   "moe_pad_expert_input_to_capacity", "moe_use_legacy_grouped_gemm",
                   "use_te_activation_func", "activation_func_fp8_input_store")


def _notices(native: Any) -> Iterable[str]:
    defaults = {field.name: field.default for field in fields(native)}
    given = [
        f"{name}={setting(native, name)}" for name in _WITHOUT_EFFECT
        if setting(native, name) not in (None, False, defaults.get(name))
    ]
    if given:
        yield f"choose a native implementation and have no effect on this layer: {', '.join(given)}"
    if native.moe_router_dtype is None and not tuple(native_router_reasons(native)):
        yield "moe_router_dtype is not set: routing is computed in fp32 all the same"
