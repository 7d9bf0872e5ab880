"""Translate fairseq's settings to a `MoEConfig`.

Settings come from four sources. In order of increasing precedence, the sources are: the defaults;
fairseq's own settings (inner width, activation, flags of the `moe` branch); the `--moe-config`
file; and the generated flags. A branch flag that differs from its default can add a setting that
the file does not contain. If a branch flag contradicts the file or another flag, an error is
raised. If the file sets the number of experts, the branch's default values are ignored.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Container, Mapping
from typing import Any

from moe_plugin.checkpoint.formats.fairseq.entries import ACTIVATIONS, plain_value
from moe_plugin.config import MoEConfig, RunConfig
from moe_plugin.config.flags import (
    CONFIG_FLAG,
    config_from_flags,
    file_settings,
    flag_specs,
    parse_value,
    run_from_flags,
    setting_specs,
)
from moe_plugin.config.refusals import refuse_lacking
from moe_plugin.config.router import router_names
from moe_plugin.config.tree import describes_layers
from moe_plugin.dispatch import check_settings, dispatchers
from moe_plugin.routing import only_read
from moe_plugin.utils.messages import short
from moe_plugin.utils.yaml_file import source_of

logger = logging.getLogger(__name__)

# branch flag: (its default, the path of our setting)
BRANCH_PATHS: dict[str, tuple[Any, str]] = {
    "moe_expert_count": (0, "num_experts"),
    "moe_top1_expert": (False, "router.top_k"),
    "moe_second_expert_policy": ("sampling", "router.second_expert_policy"),
    "moe_normalize_gate_prob_before_dropping": (False, "router.normalize"),
    "moe_batch_prioritized_routing": (False, "router.batch_prioritized"),
    "moe_eval_capacity_token_fraction": (0.25, "dispatch.eval_token_fraction"),
}
# the branch divides weights by their sum, but at least by torch.finfo(torch.float32).eps
BRANCH_DIVISOR = 2.0**-23
_OF_DENSE_LAYERS = "experts.hidden_dim", "experts.activation", "experts.dropout"
_TOP_K_AT = next(spec for spec in setting_specs() if spec.path == "router.top_k_at")
DISPATCH_FLAGS = ("moe_dispatch", "moe_capacity_factor", "moe_eval_capacity_factor",
                  "moe_eval_token_fraction")


def setting(args: Any, name: str, default: Any = None) -> Any:
    """Return an attribute of a namespace or config, or `default` if the attribute does not exist.
    Enum members are returned as strings.
    """
    return plain_value(getattr(args, name, default))


def layer_config(args: Any, *, model_dim: int, ffn_dim: int, activation: str) -> MoEConfig:
    """Return the settings of the MoE layers in one stack of the model (encoder or decoder).

    Args:
        args: namespace or config that contains the branch's flags and the generated flags. Flags
            that are missing have their default values.
        model_dim, ffn_dim, activation: width, inner width and activation function of the dense
            layers. The activation function has the same name as in fairseq.
    Raises:
        ValueError: If settings contradict each other or are invalid.
    """
    in_file = file_settings(flag_values(args)).get("model_dim")
    if in_file and in_file != model_dim:
        raise ValueError(
            f"model_dim={in_file} in {source_of(setting(args, CONFIG_FLAG.dest))} contradicts the "
            f"width {model_dim} of fairseq's layers; set both to the same value "
            "(--decoder-embed-dim, --encoder-embed-dim), or remove model_dim from the file")
    config = _settings(args, model_dim, ffn_dim, activation)
    _warn(args, config)
    return config


def check_flags(args: Any, given: Container[str] = ()) -> None:
    """Raise a `ValueError` for invalid settings that can be detected before a model is built.

    Args:
        args: parsed flags of a model, which may have no experts.
        given: names of the flags that the user passed. In `args` alone, a flag that was passed with
            its default value cannot be told from a flag that was not passed.
    """
    freqs = [freq for name in ("moe_freq", "encoder_moe_freq", "decoder_moe_freq")
             if (freq := setting(args, name, 0))]
    for freq in freqs:
        check_experts_given(args, freq)
    if not freqs:
        return
    config = _settings(args, 1, setting(args, "decoder_ffn_embed_dim") or 1,
                       str(setting(args, "activation_fn", "relu")))
    _refuse_given(args, given, config)
    run_config(args)
    if config.dispatch.name in dispatchers:  # a module in `imports` may register it later
        check_settings(config.dispatch)


def _settings(args: Any, model_dim: int, ffn_dim: int, activation: str) -> MoEConfig:
    flags = flag_values(args)
    own_dispatch = bool(flags[CONFIG_FLAG.dest]) or any(flags[name] is not None
                                                        for name in DISPATCH_FLAGS)
    in_file = file_settings(flags)
    chosen_k = _chosen_k(args, flags, in_file)
    base = {"experts.hidden_dim": ffn_dim, "experts.activation": _activation(activation),
            "experts.dropout": _dropout(args), **_branch_base(args, chosen_k, own_dispatch)}
    changed = set(_changed_branch_paths(args))
    whole = describes_layers(in_file)
    names = router_names(str(flags.get("moe_router") or in_file.get("router.name", "topk")))
    # the branch's defaults apply to the branch's gates only
    read = only_read(base, names, max(chosen_k))
    base = {path: value for path, value in base.items()
            if (path in read and path not in in_file and (not whole or path in _OF_DENSE_LAYERS))
            or path in changed}
    if max(chosen_k) > 1 and _branch_gates(names, flags, in_file) \
            and "router.normalize_min" not in in_file and not whole:
        base["router.normalize_min"] = BRANCH_DIVISOR
    _refuse_contradictions(args, flags, base, changed, in_file)
    return config_from_flags(flags, {**base, "model_dim": model_dim})


def run_config(args: Any) -> RunConfig:
    """Return the settings (`RunConfig`) of a whole fairseq run.

    Raises:
        ValueError: If fairseq does not support a setting, or if a value is invalid.
    """
    run = run_from_flags(flag_values(args))
    refuse_lacking(run, "fairseq")
    return run


def flag_values(args: Any) -> dict[str, Any]:
    """Return a dict of the generated flags in a namespace or config. The keys are the `dest` names
    of the flags. Flags that the user did not set have the value None.
    """
    return {spec.dest: setting(args, spec.dest) for spec in flag_specs()}


def _dropout(args: Any) -> float:
    return float(setting(args, "activation_dropout", 0) or setting(args, "relu_dropout", 0) or 0)


def _activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise ValueError(
            f"--activation-fn {short(name)} is not available for experts; use one of "
            f"{', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _branch_gates(names: list[str], flags: Mapping[str, Any], in_file: Mapping[str, Any]) -> bool:
    """Return True if a run uses the branch's gates, which divide routing weights by their sum."""
    def given(name: str) -> Any:
        return flags.get(f"moe_router_{name}") or in_file.get(f"router.{name}")

    return (set(names) <= {"topk", "gshard"} and given("score") in (None, "softmax")
            and given("normalize") != "none")


def _changed_branch_paths(args: Any) -> dict[str, str]:
    """Return the branch flags that differ from their defaults, by dotted path of the setting."""
    return {
        path: name for name, (default, path) in BRANCH_PATHS.items()
        if setting(args, name, default) != default
    }


def _chosen_k(args: Any, flags: Mapping[str, Any], in_file: Mapping[str, Any]) -> set[int]:
    """Return all numbers of experts per token that a run uses: the initial number, and the numbers
    in `router.top_k_at`.

    The initial number is taken from the first of these sources that contains it: the generated
    flag, the file, and the branch's flag. This function does not check the numbers.
    """
    later = (parse_value(_TOP_K_AT, flags[_TOP_K_AT.dest]) if flags.get(_TOP_K_AT.dest) else
             in_file.get(_TOP_K_AT.path) or {})
    branch = 1 if setting(args, "moe_top1_expert", False) else 2
    for value in (flags.get("moe_top_k"), None if branch == 1 else in_file.get("router.top_k")):
        if str(value).isdigit():
            return {int(str(value)), *later.values()}
    return {branch, *later.values()}


def _branch_base(args: Any, chosen_k: set[int], own_dispatch: bool) -> dict[str, Any]:
    """Translate the branch's flags to settings of this package.

    In the branch, an expert has `2*ceil(S/E)` slots for top-2 and `ceil(S/E)` slots for top-1. For
    top-2 and for top-1, this corresponds to a capacity factor of 1. During evaluation, an expert
    has `ceil(fraction*S)` slots. The branch normalizes top-2 weights after tokens are dropped, and
    does not normalize the top-1 weight.
    """
    before = setting(args, "moe_normalize_gate_prob_before_dropping", False)
    base: dict[str, Any] = {
        "router.top_k": 1 if setting(args, "moe_top1_expert", False) else 2,
        "router.second_expert_policy": setting(args, "moe_second_expert_policy", "sampling")
        if chosen_k == {2} else "all",
        "router.normalize": "none" if chosen_k == {1} else "before_drop" if before else
                            "after_drop",
        "router.batch_prioritized": setting(args, "moe_batch_prioritized_routing",
                                            False), "losses": {"gshard": 1.0},
    }
    if setting(args, "moe_expert_count", 0):
        base["num_experts"] = setting(args, "moe_expert_count")
    fraction = setting(args, "moe_eval_capacity_token_fraction", 0.25)
    if not own_dispatch:
        base.update({"dispatch.name": "padded", "dispatch.capacity_factor": 1.0})
    if not own_dispatch or fraction != BRANCH_PATHS["moe_eval_capacity_token_fraction"][0]:
        base["dispatch.eval_token_fraction"] = max(fraction, 0.0)
    return base


def _refuse_contradictions(args: Any, flags: Mapping[str, Any], base: Mapping[str, Any],
                           changed: set[str], in_file: Mapping[str, Any]) -> None:
    by_path = _changed_branch_paths(args)
    for path, name in by_path.items():
        if path in in_file and path in base and in_file[path] != base[path]:
            raise ValueError(
                f"--{name.replace('_', '-')} ({path}={short(base[path])}) contradicts "
                f"{path}={short(in_file[path])} in {source_of(flags[CONFIG_FLAG.dest])}; remove "
                "the flag, or the setting in the file")
    for spec in setting_specs():
        given = flags.get(spec.dest)
        if given is None or spec.path not in changed:
            continue
        name = by_path[spec.path]
        by_flag = parse_value(spec, given)
        said = base.get(spec.path, setting(args, name))
        if by_flag != said:
            raise ValueError(
                f"--{name.replace('_', '-')} ({spec.path}={short(said)}) contradicts {spec.flag} "
                f"{short(given)}; use only one of the two flags")


def _refuse_given(args: Any, given: Container[str], config: MoEConfig) -> None:
    """Raise a `ValueError` if the layers would not have the value of a flag that the user passed,
    because the `--moe-config` file determines another value.

    Flags that set a number of experts or a number of experts per token are compared in
    `_refuse_contradictions`, because such flags differ from their defaults.
    """
    flags = flag_values(args)
    specs = {spec.path: spec for spec in setting_specs()}
    activation = str(setting(args, "activation_fn", "relu"))
    of_two = set(config.router.several_k) == {2}  # other layers have no policy
    policy = setting(args, "moe_second_expert_policy") if of_two else "all"
    values = {
        "activation_fn": ("experts.activation", _activation(activation)),
        "activation_dropout": ("experts.dropout", _dropout(args)),
        "relu_dropout": ("experts.dropout", _dropout(args)),
        "moe_second_expert_policy": ("router.second_expert_policy", policy),
        "moe_eval_capacity_token_fraction": ("dispatch.eval_token_fraction", max(setting(
            args, "moe_eval_capacity_token_fraction", 0.0), 0.0)),
    } if flags[CONFIG_FLAG.dest] else {}
    for name, (path, value) in values.items():
        used, spec = operator.attrgetter(path)(config), specs[path]
        if name in given and flags[spec.dest] is None and used != value:
            raise ValueError(
                f"--{name.replace('_', '-')} {setting(args, name)} contradicts "
                f"{path}={short(used)} of {source_of(flags[CONFIG_FLAG.dest])}. Remove one of the "
                f"two, or set the value of the experts with {spec.flag}")


def _warn(args: Any, config: MoEConfig) -> None:
    ffn = setting(args, "moe_expert_ffn_dim")
    if ffn and ffn != config.hidden_dim:
        logger.warning(
            "--moe-expert-ffn-dim %s is ignored, as in fairseq's moe branch; "
            "--moe-expert-hidden-dim sets the width",
            ffn)
    if setting(args, "dummy_a2a", False):
        logger.warning(
            "--dummy-a2a: tokens are not sent to their experts, so results are wrong; use it only "
            "for profiling")


def check_experts_given(args: Any, freq: int) -> None:
    """Check that the number of experts is set and the frequency of MoE layers is not negative."""
    if freq < 0:
        raise ValueError(
            f"--moe-freq {freq} is out of bounds: it must be >= 0; use 0 for a dense model")
    named = setting(args, "moe_expert_count", 0) or setting(args, "moe_num_experts") or setting(
        args, CONFIG_FLAG.dest)
    if freq and not named:
        raise ValueError(
            f"--moe-freq {freq} requests MoE layers, but --moe-expert-count is 0; set it, e.g. to "
            "8, or use --moe-freq 0")
    if not freq and setting(args, "moe_expert_count", 0):
        logger.warning("--moe-expert-count %s has no effect, because --moe-freq 0 builds a dense "
                       "model",
                       setting(args, "moe_expert_count"))


def masks_padding(args: Any, config: MoEConfig) -> bool:
    """Return whether padding tokens are excluded from routing.

    Padding tokens are excluded with `--use-moe-pad-mask`, and always if dispatch is dropless.
    """
    return bool(setting(args, "use_moe_pad_mask", False)) or config.dispatch.capacity_factor is None


def gradient_factor(args: Any, world: int) -> float:
    """Return the factor by which the gradients of experts are multiplied.

    fairseq multiplies all gradients by `W / sample_size`, where `W` is the number of ranks. Before
    this multiplication, the gradients of shared parameters have been divided by `W`. The gradient
    of an expert is a sum over all ranks. The factor therefore divides the gradient of an expert by
    `W`, or by the square root of `W` with `--moe-normalize-expert-grad sqrt_world_size`.
    """
    rule = setting(args, "moe_normalize_expert_grad", "world_size")
    if rule not in ("world_size", "sqrt_world_size"):
        raise ValueError(
            f"--moe-normalize-expert-grad {short(rule)} is unknown; use world_size or "
            "sqrt_world_size")
    return 1.0 / world if rule == "world_size" else world**-0.5
