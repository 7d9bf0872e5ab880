"""Table that states how each MoE setting of Megatron 0.15 to main (0.20) is handled.

The table has one row per setting. To change how a setting is handled, change its row. `translate`
converts the settings. A setting of a newer Megatron that is not in the table must have its default
value. Otherwise, `refuse_unknown` raises an error. `tests/hosts/megatron/test_megatron_fields.py`
fails until the setting is added to the table. Importing this module does not import Megatron.

This module also checks the load-balancing types and their coefficients. The settings
`moe_router_load_balancing_type` and `moe_aux_loss_coeff` can each be a single value or a list.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_plugin.checkpoint.formats.megatron.common import RENAMED
from moe_plugin.hosts.megatron.compat.settings import balance_kinds, setting
from moe_plugin.kernels.scores import score_functions
from moe_plugin.utils.messages import short
from moe_plugin.utils.registry import Registry

OFF: tuple[Any, ...] = (None, False)
# names of settings about experts, in `TransformerConfig` and on the command line
_OF_EXPERTS = re.compile(r"moe|expert|rout(er|ing)|(^|_)ep_|hybridep|deepep|ncclep")


class By(enum.Enum):
    """The component that implements a setting."""

    OURS = "this package's layer"
    ROUTER = "Megatron's router, which is built if the setting needs it"
    MODEL = "Megatron's model or loop, outside of this package's layer"
    NOTHING = "no effect: the setting selects an implementation that this package does not have"
    REFUSED = "refused"


@dataclass(frozen=True)
class Row:
    """A row of the table of Megatron's MoE settings, which states how one setting is handled.

    Attributes:
        by: the component that implements the setting.
        taken: accepted values of the setting if `by` is REFUSED. If `by` is ROUTER, `taken` lists
            the values for which the router of this package gives the same results as Megatron's
            router. If `taken` is a registry, the accepted values are the names in the registry. If
            `taken` is None, any value is accepted.
        words: if `by` is REFUSED, the part of the error message that tells the user what to do. If
            `by` is ROUTER, an optional explanation of a setting whose name is not self-explanatory.
    """

    by: By
    taken: tuple[Any, ...] | Registry[Any] | None = OFF
    words: str = ""

    @property
    def accepted(self) -> tuple[Any, ...] | None:
        """Return the accepted values, or None if any value is accepted."""
        return tuple(self.taken.names()) if isinstance(self.taken, Registry) else self.taken

    def takes(self, value: Any) -> bool:
        """Return True if `value`, or every value in a list, is accepted."""
        accepted = self.accepted
        if accepted is None:
            return True
        values = value if isinstance(value, (list, tuple)) else [value]
        return all(any(_same(item, taken) for taken in accepted) for item in values)


def _same(value: Any, taken: Any) -> bool:
    return value is taken or (taken is not None and value is not None and bool(value == taken))


def _rows(by: By, *names: str) -> dict[str, Row]:
    return dict.fromkeys(names, Row(by))


def _refused(words: str, *names: str, taken: tuple[Any, ...] = OFF) -> dict[str, Row]:
    return dict.fromkeys(names, Row(By.REFUSED, taken, words))


_SIZES_CHANGE = "set it to False, because sizes change from step to step"

# Settings of `TransformerConfig`. Settings without "moe" or "expert" in their names are listed if
# they are refused or if the router depends on them.
FIELDS: dict[str, Row] = {
    **_rows(By.OURS, "num_moe_experts", "moe_router_topk", "moe_router_pre_softmax",
            "moe_router_topk_scaling_factor", "moe_input_jitter_eps", "moe_aux_loss_coeff",
            "moe_z_loss_coeff", "moe_ffn_hidden_size", "moe_latent_size",
            "moe_apply_probs_on_input",
            "moe_shared_expert_overlap", "moe_layer_recompute", "moe_enable_routing_replay",
            "batch_invariant_mode", "expert_model_parallel_size",
            "expert_tensor_parallel_size", "overlap_moe_expert_parallel_comm",
            # refused in combination with some other settings (`recipes`)
            "fp8", "fp8_recipe", "fp8_param", "fp4", "fp4_recipe", "fp4_param",
            "first_last_layers_bf16", "quant_recipe", "moe_dispatch_fwd_dtype",
            "moe_combine_bwd_dtype", "delay_wgrad_compute"),
    **_rows(By.MODEL, "moe_layer_freq", "moe_shared_expert_intermediate_size",
            "moe_shared_expert_gate", "moe_shared_expert_glu_interleave_size",
            "use_grouped_gemm_for_shared_expert", "moe_per_layer_logging", "moe_grad_scale_func",
            "expert_tensor_parallel_num_weight_shards", "ep_overlap_early_attn_memory_release"),
    "moe_router_load_balancing_type": Row(By.ROUTER, ("aux_loss", "none")),
    "moe_router_score_function": Row(By.ROUTER, score_functions),
    "moe_router_dtype": Row(By.ROUTER, (None, "fp32")),
    "add_bias_linear": Row(By.ROUTER, OFF, "a bias in the router"),
    **_rows(By.ROUTER, "moe_router_num_groups", "moe_router_group_topk",
            "moe_router_topk_limited_devices", "moe_router_enable_expert_bias",
            "moe_expert_capacity_factor", "moe_router_force_load_balancing",
            "moe_router_force_biased"),
    # these settings are read only together with other settings of this class
    **dict.fromkeys(("moe_router_bias_update_rate", "moe_router_quantile_balancing_ema",
                     "moe_token_drop_policy", "moe_router_fusion"), Row(By.ROUTER, None)),
    **_rows(By.NOTHING, "moe_token_dispatcher_type", "moe_enable_deepep",
            "moe_flex_dispatcher_backend", "moe_flex_dispatcher_num_sms", "moe_deepep_num_sms",
            "moe_hybridep_num_sms", "moe_hybridep_num_sms_preprocessing",
            "moe_hybridep_num_blocks_permute", "moe_hybridep_num_blocks_unpermute",
            "moe_hybridep_pad_uneven_dispatch_inputs", "moe_permute_fusion_into_hybridep",
            "moe_ncclep_static_shape", "moe_ncclep_zero_copy", "moe_grouped_gemm",
            "moe_use_legacy_grouped_gemm", "moe_use_grouped_tensor",
            "moe_use_device_initiated_grouped_gemm", "moe_single_grouped_weight",
            "moe_single_grouped_bias", "moe_permute_fusion",
            "moe_pad_expert_input_to_capacity", "moe_pad_experts_for_cuda_graph_inference",
            "inference_moe_token_dispatcher_type", "inference_moe_disable_fused_quant_kernels",
            "moe_token_dropping",  # Megatron never reads this setting
            # read only together with moe_paged_stash, which is refused
            "moe_paged_stash_page_size", "moe_paged_stash_buffer_size_factor_cuda",
            "moe_paged_stash_buffer_size_factor_cpu",
            # our matrix products pad the rows of each expert themselves
            "moe_router_padding_for_quantization", "moe_router_padding_for_fp8",
            "use_te_activation_func", "activation_func_fp8_input_store"),
    **_refused("leave it unset", "moe_mlp_glu_interleave_size", "activation_func_clamp_value",
               taken=(None,)),
    **_refused("leave it unset, and use dispatch.capacity_factor to limit the rows of each expert",
               "moe_expert_rank_capacity_factor", taken=(None,)),
    **_refused("set it to False", "overlap_dispatch_backward_with_experts_wgrad", "moe_paged_stash",
               "init_model_with_meta_device"),
    **_refused("set it to 0", "glu_linear_offset", taken=(None, 0, 0.0)),
    **_refused("leave out --expert-tensor-parallel-num-weight-shards",
               "expert_gtp_weight_remat_size", taken=(None, 1)),
    **_refused("leave out --tensor-parallel-num-weight-shards", "gtp_weight_remat_size",
               taken=(None, 1)),
    **_refused(_SIZES_CHANGE, "enable_cuda_graph", "external_cuda_graph"),
    **_refused("leave it out, because a router must process its micro-batch at once",
               "mlp_chunks_for_training",
               taken=(None, 1)),
}
# arguments that only the training script has
ARGUMENTS: dict[str, Row] = {
    **_rows(By.OURS, "num_experts", "moe_routing_trace_path",
            "moe_routing_trace_max_training_iters"),
    **_rows(By.MODEL, "inference_dynamic_batching_prefix_caching_routing_alpha",
            "inference_disable_ep_consensus"),
    # with our router these are refused in `run.traced`
    **_rows(By.ROUTER, "moe_routing_trace_capture_logits",
            "moe_routing_trace_capture_hidden_states", "moe_routing_trace_dump_weights"),
    # read only together with settings that are refused
    **_rows(By.NOTHING, "moe_upcycling_granularity", "gtp_expert_remat_nccl_ub",
            "moe_extended_tp"),
    **_refused("leave it out, and use moe-plugin upcycle to convert a dense checkpoint to a "
               "checkpoint with experts and moe-plugin reshard to write it for Megatron",
               "moe_use_upcycling"),
    **_refused("leave it out, and use --moe-stats-jsonl to record the tokens of each expert",
               "save_tokens_per_expert_interval", taken=(None,)),
    # wrappers of the whole model, with which results have not been compared with Megatron's own
    **_refused("leave it out, and use --use-distributed-optimizer", "use_megatron_fsdp",
               "use_torch_fsdp2"),
    **_refused("leave it out", "hybrid_context_parallel"),
    **_refused("leave it out", "rl_inference_expert_model_parallel_size",
               "rl_inference_expert_tensor_model_parallel_size", taken=(None,)),
}


def of_experts(name: str) -> bool:
    """Return True if the name of a setting indicates that the setting concerns experts."""
    return _OF_EXPERTS.search(name) is not None


def names(by: By, rows: Mapping[str, Row] = FIELDS) -> list[str]:
    """Return the names of all settings handled by one component, in the order of the table."""
    return [name for name, row in rows.items() if row.by is by]


def without_row(settings: Iterable[str], rows: Mapping[str, Row] = FIELDS) -> list[str]:
    """Return the names of expert-related settings that are missing from the table. A setting that
    the table contains under its older name is not missing.
    """
    known = {*rows, *(RENAMED.get(name, name) for name in rows)}
    return sorted(name for name in settings if of_experts(name) and name not in known)


def refuse_by_row(values: Any, rows: Mapping[str, Row] = FIELDS) -> None:
    """Raise a `ValueError` for the first setting whose value is rejected by its row in the table.

    values: a `TransformerConfig`, or an object whose attributes are the script's arguments.
    """
    for name in names(By.REFUSED, rows):
        value, row = setting(values, name), rows[name]
        if not row.takes(value):
            raise ValueError(f"{name}={short(value)} is not supported by moe-plugin's MoE layer. "
                             f"It must be {short((row.accepted or OFF)[-1])}; {row.words}")


def refuse_unknown(native: Any) -> None:
    """Raise a `ValueError` if an expert-related setting is missing from the table and does not have
    its default value.

    Without this check, the MoE layer of this package would silently ignore the setting.
    """
    by_name = {field.name: field for field in dataclasses.fields(native)}
    for name in without_row(by_name):
        default, value = _default(by_name[name]), getattr(native, name)
        if default is not dataclasses.MISSING and not _same(value, default):
            raise _unknown(name, value, default)


def _default(field: dataclasses.Field[Any]) -> Any:
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def refuse_unknown_arguments(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise a `ValueError` for an unknown expert-related argument of Megatron's own script.

    Args:
        defaults: dict from each argument that differs from its default value to the default value.
        given: dict of all arguments by name.
    """
    for name in without_row(defaults, {**FIELDS, **ARGUMENTS}):
        raise _unknown(name, given[name], defaults[name])


def _unknown(name: str, value: Any, default: Any) -> ValueError:
    return ValueError(
        f"{name}={short(value)} is unknown to moe-plugin, and its MoE layer would ignore the "
        f"setting. Leave it out (the default is {short(default)}), or use a newer moe-plugin.")


def router_reasons(native: Any) -> Iterable[str]:
    """Yield the settings that require Megatron's own router, as "name=value" strings."""
    for name in names(By.ROUTER):
        value, row = setting(native, name), FIELDS[name]
        if value is not None and not row.takes(value):
            yield f"{name}={value}" + (f" ({row.words})" if row.words else "")


def refuse_unknown_score(native: Any) -> None:
    """Raise a `ValueError` if neither this package nor Megatron has the score function."""
    setting_name = "moe_router_score_function"
    megatrons = [value for field in dataclasses.fields(native)
                 if field.name in (setting_name, RENAMED.get(setting_name))
                 for value in typing.get_args(field.type)]
    if (name := setting(native, setting_name)) not in megatrons:
        score_functions.entry(name)


def without_effect(native: Any) -> list[str]:
    """Return all settings without effect that differ from their defaults, as "name=value"."""
    defaults = {field.name: _default(field) for field in dataclasses.fields(native)}
    return [f"{name}={value}" for name in names(By.NOTHING)
            if (value := setting(native, name)) not in (None, False, defaults.get(name))]


def batch_invariant(native: Any, settings: Mapping[str, Any]) -> dict[str, bool]:
    """Return the setting `batch_invariant` if Megatron's own mode is enabled, or else an empty
    dict. The user may also enable only the setting of this package.

    settings: settings of this package that the user set, by dotted path.
    """
    if not setting(native, "batch_invariant_mode"):
        return {}
    if not settings.get("batch_invariant", True):
        raise ValueError("batch_invariant=False contradicts Megatron's own setting, which is "
                         "batch_invariant_mode=True. Remove one of the two.")
    return {"batch_invariant": True}


def as_list(value: Any) -> list[Any]:
    """Return a setting as a list. The setting may be a single value or a sequence."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def refuse_unknown_balance(native: Any) -> None:
    """Raise a `ValueError` for a load-balancing type that Megatron would silently ignore."""
    known = balance_kinds(native)
    for name in as_list(native.moe_router_load_balancing_type):
        if name not in known:
            raise ValueError(
                f"moe_router_load_balancing_type={short(name)} is unknown to the router of this "
                "Megatron version, which would not balance the load. Choose one of "
                f"{', '.join(known)}.")


def refuse_unmatched_balance(native: Any) -> None:
    """Raise a `ValueError` unless there is one coefficient for each load-balancing type."""
    kinds, weights = native.moe_router_load_balancing_type, native.moe_aux_loss_coeff
    count, given = len(as_list(kinds)), len(as_list(weights))
    if count != given:
        raise ValueError(
            f"moe_aux_loss_coeff={short(weights)} has {given} values, but "
            f"moe_router_load_balancing_type={short(kinds)} needs {count}. Pass one coefficient "
            "for each type.")
    if len(set(as_list(kinds))) != count:
        raise ValueError(
            f"moe_router_load_balancing_type={short(kinds)} contains a type more than once. Pass "
            "each type once, with the sum of its coefficients.")


def aux_coefficient(native: Any) -> float:
    """Return the coefficient of the load-balancing type `aux_loss`, or 0 if it is not used."""
    return float(sum(weight for name, weight in _balance_pairs(native) if name == "aux_loss"))


def router_balances(native: Any) -> bool:
    """Return True if Megatron's router balances the load with the settings in `native`."""
    weighted = any(weight and "aux_loss" in balance for balance, weight in _balance_pairs(native))
    others = any(balance != "none" and "aux_loss" not in balance
                 for balance in as_list(native.moe_router_load_balancing_type))
    return weighted or others or any(
        setting(native, name) for name in ("moe_router_enable_expert_bias",
                                           "moe_router_force_load_balancing"))


def _balance_pairs(native: Any) -> list[tuple[Any, Any]]:
    # not strict: with a custom router in the spec, the numbers of types and coefficients may differ
    return list(zip(as_list(native.moe_router_load_balancing_type),
                    as_list(native.moe_aux_loss_coeff), strict=False))
