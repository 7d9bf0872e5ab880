"""Translate Megatron's settings to settings of this package.

Megatron's MoE arguments keep their meaning. If the router of this package gives the same results as
Megatron's router, the router of this package is used. If only Megatron's router supports a setting,
the layer of this package uses Megatron's router. If neither router supports a setting, a
`ValueError` is raised. Settings that only select an implementation in Megatron (dispatcher type,
fusions) do not change the results, so they are logged and otherwise ignored.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
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
from moe_plugin.config.refusals import Values
from moe_plugin.config.router import router_names
from moe_plugin.config.tree import describes_layers
from moe_plugin.hosts.megatron.compat import fields, recipes
from moe_plugin.hosts.megatron.compat.settings import (
    cuda_graphs,
    megatrons_own,
    parsed_defaults,
    plain_name,
    script_arguments,
    setting,
    with_known_names,
)
from moe_plugin.hosts.megatron.refusals import MESSAGES
from moe_plugin.kernels.scores import score_functions
from moe_plugin.memory.weights.refusal import refuse_streamed_weights
from moe_plugin.routing import only_read
from moe_plugin.utils.messages import short
from moe_plugin.utils.registry import import_user_modules

logger = logging.getLogger(__name__)

# Paths of our settings that a native Megatron argument sets. No flags are generated for these
# paths, so that every setting has only one flag.
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
    "experts.latent_dim": "--moe-latent-size",
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
    """The settings of a Megatron layer after translation to settings of this package.

    Attributes:
        config: settings of the layer.
        run: settings of the whole run.
        native_router: list of the reasons why Megatron's router must be used. The list is empty if
            the router of this package is used.
        notices: log lines about settings that have no effect.
        native_balance: True if Megatron's router balances the load.
        follows_recipe: True if `experts.precision` is derived from Megatron's precision recipe. A
            recipe may exclude some layers.
    """

    config: MoEConfig
    run: RunConfig
    native_router: tuple[str, ...]
    notices: tuple[str, ...]
    native_balance: bool
    follows_recipe: bool = False


def settings_from_flags(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in the `--moe-config` file and in flags, which override the file."""
    return {**flags.file_settings(values), **flags.settings_from_flags(values, NATIVE_ARGUMENTS)}


def timeout_of(settings: Mapping[str, Any]) -> float:
    """Return the setting `comm.timeout_s`. `settings` is a dict of settings by dotted path.

    Raises:
        ValueError: If the timeout is out of bounds.
    """
    given = {path: settings[path] for path in ("comm.timeout_s",) if path in settings}
    return with_overrides(MoEConfig(), given).comm.timeout_s


def translate(native: Any, settings: Mapping[str, Any], *,
              injected_router: bool = False) -> Translation:
    """Return the `MoEConfig` and the other settings of this package that correspond to a Megatron
    `TransformerConfig`.

    Args:
        native: `TransformerConfig` of any supported version of Megatron.
        settings: settings of this package that the user set, by dotted path.
        injected_router: True if the layer spec defines a custom router class.
    Raises:
        ValueError: If this package's layer does not support a Megatron setting, if a setting of
            this package contradicts a Megatron setting, or if a value is invalid.
    """
    import_user_modules(settings.get("imports"))  # may register the score function
    refuse_unsupported(with_known_names(native))
    if not injected_router:
        fields.refuse_unknown_balance(native)
        fields.refuse_unmatched_balance(native)
    whole = describes_layers(settings)
    settings = _without_open(settings)
    reasons = [reason for reason in fields.router_reasons(native)
               # a settings file that describes layers also decides whether the router has a bias
               if not (whole and reason.startswith("add_bias_linear="))]
    reasons += ["the spec's own router"] if injected_router else []
    known = _agreed(native, settings, whole and not reasons)
    known |= fields.batch_invariant(native, settings)
    known["losses"] = _losses(native, settings.get("losses"), bool(reasons), whole)
    name = settings.get("router.name", RouterConfig.name)
    known = only_read(known, router_names(name), native.moe_router_topk)
    recipe = recipes.precision_settings(native, settings)
    known = {**recipe, **of_layer(settings), **known}
    if reasons:
        _check_native_router_settings(settings, reasons)
        known = {path: value for path, value in known.items() if path == "router.top_k"
                 or not (path.startswith("router.") and path in NATIVE_ARGUMENTS)}
    config = with_overrides(from_dict({"losses": {}}), known)
    run = run_config(settings)
    refuse_streamed_weights(run.offload, "Megatron")
    return Translation(config, run, tuple(reasons), (*_notices(native), *_followed(recipe)),
                       injected_router or fields.router_balances(native),
                       follows_recipe="experts.precision" in recipe)


def native_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of Megatron that correspond to the given settings of this package, by
    attribute name.

    Settings that have no corresponding argument are left out.
    """
    settings = _without_open(settings)
    arguments = {name: settings[path] for path, name in _ATTRIBUTES.items()
                 if settings.get(path) or settings.get(path) is False}
    experts_kind, activation = (settings.get(f"experts.{name}") for name in ("kind", "activation"))
    if (experts_kind, activation) == ("gated_ffn", "silu"):
        arguments["swiglu"] = True
    if (experts_kind, activation) in ((None, "squared_relu"), ("ffn", "squared_relu")):
        arguments["squared_relu"] = True
    of_one = describes_layers(settings) and settings.get("router.top_k") == 1
    if settings.get("router.normalize", "none" if of_one else "") == "none":
        arguments["moe_router_pre_softmax"] = True
    return arguments


# settings for which Megatron has an argument with the same values: our path -> attribute
_ATTRIBUTES = {
    "model_dim": "hidden_size",
    "num_experts": "num_experts",
    "deterministic": "deterministic_mode",
    "router.top_k": "moe_router_topk",
    "router.score": "moe_router_score_function",
    "router.scaling": "moe_router_topk_scaling_factor",
    "router.input_jitter": "moe_input_jitter_eps",
    "experts.hidden_dim": "moe_ffn_hidden_size",
    "experts.latent_dim": "moe_latent_size",
    "experts.bias": "add_bias_linear",
    "experts.shared_hidden_dim": "moe_shared_expert_intermediate_size",
    "experts.shared_gate": "moe_shared_expert_gate",
    "experts.shared_overlap": "moe_shared_expert_overlap",
    "experts.init_std": "init_method_std",
    "experts.weights_first": "moe_apply_probs_on_input",
}


def _without_open(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those whose value leaves the choice to Megatron."""
    open_values = {"model_dim": 0, "experts.hidden_dim": 0, "router.normalize": "auto",
                   "experts.init_std": None}
    return {path: value for path, value in settings.items()
            if path not in open_values or value != open_values[path]}


def _agreed(native: Any, settings: Mapping[str, Any], whole: bool) -> dict[str, Any]:
    """Check that Megatron's settings do not contradict the user's settings of this package, and
    translate them to settings of this package.

    whole: True if the user's settings describe complete layers. If True, a value that only this
        package's layer supports overrides Megatron's default value.
    """
    known = _native_values(native)
    said = {**known, "experts.init_std": setting(native, "init_method_std"),
            # contains Megatron's size, although our layer uses Megatron's shared expert
            "experts.shared_hidden_dim": native.moe_shared_expert_intermediate_size or 0,
            "experts.shared_gate": bool(setting(native, "moe_shared_expert_gate", False))}
    defaults = {"router.normalize": "before_drop", "experts.kind": "ffn",
                "experts.activation": "gelu"} if whole else {}
    for path, value in said.items():
        ours = settings.get(path, value)
        by_shared = path.startswith("experts.") and said["experts.shared_hidden_dim"]
        if ours != value and value == defaults.get(path) and not by_shared:
            known[path] = ours
        else:
            _check_agreement(path, settings, value)
    return known


def _native_values(native: Any) -> dict[str, Any]:
    score = native.moe_router_score_function
    post_softmax = score != "softmax" or not native.moe_router_pre_softmax
    return {
        "model_dim": native.hidden_size,
        "num_experts": native.num_moe_experts,
        "deterministic": bool(setting(native, "deterministic_mode", False)),
        "router.top_k": native.moe_router_topk,
        "router.score": score if score in score_functions else "softmax",
        "router.normalize": "before_drop" if post_softmax else "none",
        "router.scaling": float(native.moe_router_topk_scaling_factor or 1.0),
        "router.input_jitter": float(native.moe_input_jitter_eps or 0.0),
        "experts.kind": "gated_ffn" if native.gated_linear_unit else "ffn",
        "experts.hidden_dim": native.moe_ffn_hidden_size or native.ffn_hidden_size,
        "experts.latent_dim": setting(native, "moe_latent_size") or 0,
        "experts.activation": _activation(native),
        "experts.bias": bool(native.add_bias_linear),
        "experts.shared_hidden_dim": 0,  # Megatron's own shared expert is used
        "experts.shared_gate": False,  # the gate belongs to Megatron's shared expert
        "experts.shared_overlap": bool(setting(native, "moe_shared_expert_overlap", False)),
        "experts.recompute_activation": native.recompute_granularity == "selective" and "moe_act" in
                                        (setting(native, "recompute_modules") or []),
        "experts.weights_first": bool(setting(native, "moe_apply_probs_on_input", False)),
    }


def _check_agreement(path: str, settings: Mapping[str, Any], native_value: Any) -> None:
    if path in settings and settings[path] != native_value:
        argument = NATIVE_ARGUMENTS.get(path, "--hidden-size")
        raise ValueError(
            f"{path}={short(settings[path])} contradicts Megatron's own setting, which is "
            f"{short(native_value)}. Set both to the same value, or remove one of the two: "
            f"{argument}, or {path} in the moe-plugin settings.")


def _losses(native: Any, given: Mapping[str, float] | None,
            native_router: bool, whole: bool) -> dict[str, float]:
    extra = given or {}
    if native_router:  # Megatron's router attaches its own losses
        if extra:
            raise ValueError(
                f"losses={short(dict(extra))} cannot be used with Megatron's own router. Use "
                "moe_aux_loss_coeff and moe_z_loss_coeff.")
        return {}
    weights = {"switch": fields.aux_coefficient(native),
               "z": float(native.moe_z_loss_coeff or 0.0)}
    weights = {name: weight for name, weight in weights.items() if weight}
    if weights and given is not None and not given:
        raise ValueError(
            f"losses=none contradicts {weights} from moe_aux_loss_coeff/moe_z_loss_coeff. Set "
            "these two to 0, or leave losses out.")
    both = sorted(set(weights) & set(extra))
    if both:
        raise ValueError(
            f"losses.{both[0]}={short(extra[both[0]])} contradicts {short(weights[both[0]])} from "
            "moe_aux_loss_coeff/moe_z_loss_coeff. Use only one of the two.")
    if whole and given is None and not weights:
        return dict(MoEConfig().losses)
    return {**weights, **extra}


def _activation(native: Any) -> str:
    from moe_plugin.hosts.megatron.compat.names import squared_relu

    names = {F.gelu: "gelu", F.silu: "silu", F.relu: "relu", squared_relu: "squared_relu"}
    if native.activation_func not in names:
        raise ValueError(
            f"activation_func={native.activation_func!r} is not supported. Use gelu, silu, relu or "
            "squared_relu.")
    return names[native.activation_func]


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
                f"{', '.join(reasons)} requires. Leave out one of the two.")


def refuse_unsupported(native: Any) -> None:
    """Raise a `ValueError` for the first of Megatron's settings that would change the results or
    the order of computation but that the layer of this package does not support.

    Without an error, the layer would silently ignore the setting.
    """
    if not native.num_moe_experts:
        raise ValueError(
            f"num_moe_experts={short(native.num_moe_experts)} must be >= 1 for an MoE layer. Set "
            "--num-experts.")
    fields.refuse_by_row(native)
    fields.refuse_unknown_score(native)
    fields.refuse_unknown(native)
    _refuse_lists(native)
    MESSAGES.refuse(Values({"batch_p2p_comm": setting(native, "batch_p2p_comm", True)},
                           functools.partial(setting, native)))


def refuse_arguments() -> None:
    """Raise a `ValueError` for the first argument of Megatron's training script that this package
    does not support.

    This function does not check arguments that are fields of `TransformerConfig`. An expert-related
    argument that this package does not know also raises an error.
    """
    given = script_arguments()
    fields.refuse_by_row(SimpleNamespace(**given), fields.ARGUMENTS)
    defaults = parsed_defaults()
    fields.refuse_unknown_arguments({name: defaults[name] for name in megatrons_own(defaults)},
                                    given)


def _refuse_lists(native: Any) -> None:
    chosen = setting(native, "cuda_graph_scope") or []
    scopes = {plain_name(scope) for scope in fields.as_list(chosen)}
    if cuda_graphs(native) and scopes != {"attn"}:
        raise ValueError(
            f"cuda_graph_impl={short(native.cuda_graph_impl)} with scope {sorted(scopes)} is not "
            "supported, because sizes inside an MoE layer change from step to step. Use only the "
            "scope 'attn', or cuda_graph_impl='none'.")
    offloaded = {"expert_fc1", "moe_act", "fused_group_mlp"} & set(
        setting(native, "offload_modules") or [])
    if setting(native, "fine_grained_activation_offloading", False) and offloaded:
        raise ValueError(
            f"offload_modules contains {sorted(offloaded)}, which is not supported. Remove these "
            "modules.")


def _followed(recipe: Mapping[str, Any]) -> Iterable[str]:
    if recipe:
        yield "MoE layers follow Megatron's low-precision formats: " + ", ".join(
            f"{path}={value}" for path, value in recipe.items())


def _notices(native: Any) -> Iterable[str]:
    if given := fields.without_effect(native):
        yield ("Megatron settings that choose a native implementation and have no effect on this "
               f"layer: {', '.join(given)}")
    if native.moe_router_dtype is None and not tuple(fields.router_reasons(native)):
        yield "moe_router_dtype is not set, but routing is computed in fp32 anyway"


def announce(plan: Translation) -> None:
    """On rank 0, log why layers use Megatron's own router, and log the notices in `plan`."""
    if dist.is_initialized() and dist.get_rank():
        return
    if plan.native_router:
        logger.info("MoE layers use Megatron's own router, because of %s",
                    ", ".join(plan.native_router))
    for notice in plan.notices:
        logger.info("%s", notice)
