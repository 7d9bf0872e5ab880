"""Read a run's progress from a checkpoint, and compare the settings that determine what a model
computes with those in the checkpoint.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_plugin.hosts.megatron import checkpoint_files as files
from moe_plugin.hosts.megatron.compat.settings import setting
from moe_plugin.hosts.megatron.translate import settings_from_flags
from moe_plugin.utils import checksums
from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import check_input

logger = logging.getLogger("moe_plugin.megatron")
_OF_CONFIG = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
              "ffn_hidden_size", "normalization", "add_bias_linear", "add_qkv_bias", "qk_layernorm",
              "moe_shared_expert_intermediate_size", "moe_latent_size")
_OF_ARGUMENTS = (
    "norm_epsilon", "rotary_base", "rotary_percent", "swiglu", "squared_relu",
    "position_embedding_type", "untie_embeddings_and_output_weights", "num_experts",
    "moe_ffn_hidden_size", "moe_layer_freq", "moe_router_topk", "moe_router_score_function",
    "moe_router_pre_softmax", "moe_router_topk_scaling_factor", "moe_router_num_groups",
    "moe_router_group_topk", "moe_router_enable_expert_bias", "moe_expert_capacity_factor",
    "moe_apply_probs_on_input", "moe_shared_expert_gate")
# _TENSORS decide which tensors the model has; _COMPUTED change only how they are used
_TENSORS = ("add_bias_linear", "add_qkv_bias", "qk_layernorm", "normalization", "swiglu",
            "untie_embeddings_and_output_weights", "moe_shared_expert_intermediate_size",
            "moe_shared_expert_gate", "num_experts", "moe_latent_size")
_COMPUTED = ("norm_epsilon", "rotary_base", "rotary_percent", "position_embedding_type",
             "moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax",
             "moe_router_topk_scaling_factor", "squared_relu")


def model_settings(args: argparse.Namespace, config: Any) -> dict[str, Any]:
    """Return the settings that determine what the model computes. The values can be stored as JSON
    in a checkpoint.

    The keys are the names of Megatron's arguments. The settings of this package are stored under
    the key "moe_plugin".
    """
    settings = {name: setting(config, name) for name in _OF_CONFIG}
    settings.update({name: getattr(args, name, None) for name in _OF_ARGUMENTS})
    settings["max_position_embeddings"] = args.max_position_embeddings or args.seq_length
    return {**settings, "moe_plugin": settings_from_flags(vars(args))}


def check_settings(path: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Compare the settings in a checkpoint with the settings of the current run.

    Args:
        path: path of the checkpoint, which the error message contains.
        saved: return value of `model_settings` in the run that saved the checkpoint.
        current: return value of `model_settings` in the current run.
    Raises:
        ValueError: If the runs differ in a setting that determines which tensors the model has. If
            the runs differ in another setting that changes the computation, a warning is logged.
    """
    saved, current = _all_biases(saved), _all_biases(current)
    both = [name for name in current if name in saved and name != "moe_plugin"
            and (saved[name] or None) != (current[name] or None)]
    for name in both:
        if name in _TENSORS or name == "max_position_embeddings" and _learned(saved, current):
            raise ValueError(differs(path, name, saved[name], current[name]))
        if name in _COMPUTED:
            logger.warning("checkpoint %s was trained with %s=%s, but this run uses %s", path,
                           name, short(saved[name]), short(current[name]))


def _all_biases(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    # Megatron's script sets add_qkv_bias whenever add_bias_linear is set; conversions and configs
    # may set add_bias_linear alone
    return {**settings, "add_qkv_bias": True} if settings.get("add_bias_linear") else settings


def _learned(*settings: Mapping[str, Any]) -> bool:
    # learned positions are rows of a tensor; a missing setting counts as learned_absolute
    name, learned = "position_embedding_type", "learned_absolute"
    return all(each.get(name, learned) == learned for each in settings)


def differs(path: str, name: str, saved: Any, current: Any) -> str:
    """Return the error message for a setting that differs between a checkpoint and this run."""
    return (f"checkpoint {path!r} has {name}={short(saved)}, but this run has {name}={current!r}. "
            "Use the arguments with which the checkpoint was saved, or another --load.")


def read_progress(root: str, iteration: int | None, name: str, settings: Mapping[str, Any],
                  otherwise: str, evaluates: bool = False) -> tuple[dict[str, Any], Path] | None:
    """Return the progress that a checkpoint's file `name` describes, and the checkpoint's folder.

    Return None if there is no checkpoint to resume from.

    Args:
        root: folder of the checkpoints.
        iteration: iteration of the checkpoint. Defaults to that of the newest checkpoint.
        settings: `model_settings` of this run.
        otherwise: what a missing file means, and what to do, for the error message.
        evaluates: True if the run only evaluates. A missing checkpoint is then an error.
    Raises:
        ValueError: If the file is missing or damaged, or belongs to a different model.
    """
    iteration = iteration or files.latest(root)
    if iteration is None:
        files.nothing_found(root, evaluates)
        return None
    path = Path(files.folder(root, iteration)) / name
    if not path.exists():
        raise ValueError(f"{path.parent} has no {name}, so {otherwise}")
    check_input(path)
    try:
        progress, _ = checksums.open_json(path.read_text(encoding="utf-8"))
        progress |= {key: int(progress[key]) for key in ("iteration", "consumed_samples")}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({short(error)}). To load another checkpoint, write "
                         f"its iteration number into {Path(root, files.LATEST)}.") from error
    check_settings(str(path.parent), progress.get("settings") or {}, settings)
    return progress, path.parent
