"""Read the model of `moe-plugin plan --model` from the files that users already have."""

from __future__ import annotations

import importlib
import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from moe_plugin.cli.planning.launch import FAIRSEQ, MEGATRON, TRANSFORMERS, YAML, Flags, flags_of
from moe_plugin.planner.fine_tuned import BF16, DECODED_BYTES, FineTuning
from moe_plugin.planner.model import ModelShape, load_model
from moe_plugin.planner.units import show_size
from moe_plugin.utils.messages import short
from moe_plugin.utils.yaml_file import read_yaml

SEQUENCE, SEQUENCES = 4096, 256  # default sequence length, and least sequences per step
VOCABULARY = 50304  # GPT-2's vocabulary, padded to a multiple of 128


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """A model, and the file from which it was read.

    Attributes:
        host: framework to which the file belongs, or `YAML` for a file of this package.
        model: sizes of the model.
        assumed: default values that were used because the file does not contain them.
        script: the Python file that a launch script runs, or None.
        flags: the flags of a launch script; see `launch.flags_of`.
    """

    host: str
    model: ModelShape
    assumed: tuple[str, ...]
    script: str | None = None
    flags: Flags = field(default_factory=dict)


def host_of(path: Path) -> str:
    """Return the framework to which a file or folder belongs, or `YAML`.

    Raises:
        ValueError: If a folder contains no `config.json`, or if a YAML file cannot be read.
    """
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"--model {short(str(path))} is a folder without config.json. Pass a "
                             "Hugging Face folder, or a file")
        return TRANSFORMERS
    if path.suffix == ".json":
        return TRANSFORMERS
    if path.suffix in (".yaml", ".yml") or not path.is_file():
        if path.is_file():
            tree = read_yaml(path, "model file", "see configs/plans/")
            if "model" in tree or "task" in tree:
                return FAIRSEQ
            if "megatron" in tree:
                return MEGATRON
        return YAML  # also names of installed files, which `load_model` finds
    text = path.read_text(encoding="utf-8", errors="replace")
    return FAIRSEQ if "--arch" in text and "--num-layers" not in text else MEGATRON


def read_source(path: Path, gpus: int, sequence: int | None, batch: int | None,
                tuning: FineTuning | None = None) -> ModelFile:
    """Read a model.

    Args:
        path: a Hugging Face folder or `config.json`, a Megatron launch script or file of arguments,
            a fairseq command or YAML file, or a YAML file of this package.
        gpus: number of devices, which determines the default number of sequences per step.
        sequence: number of tokens per sequence. Defaults to the number in the file.
        batch: number of sequences per training step. Defaults to the number in the file.
        tuning: how the model is fine-tuned. Optional. By default, all parameters are trained.
    Raises:
        ValueError: If the file cannot be read, or if the model has no experts.
    """
    host = host_of(path)
    if tuning is not None and host != TRANSFORMERS:
        raise ValueError(f"--fine-tune {short(tuning.format)} needs a model of transformers, but "
                         f"--model {short(str(path))} is a {host} file. Pass a Hugging Face folder "
                         "or config.json")
    if host == YAML:
        model = load_model(path)
        given = {"sequence": sequence, "global_batch": batch}
        return ModelFile(host=host, assumed=(), model=_changed(model, given))
    assumed: list[str] = []
    default_batch = gpus * -(-SEQUENCES // gpus)
    if host == TRANSFORMERS:
        from moe_plugin.cli.measure.traced_transformers import traced_model

        file = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(config, dict):
                raise ValueError("it contains no object")
        except (OSError, ValueError) as error:
            raise ValueError(f"--model {short(str(file))} cannot be read: {short(error)}. Pass the "
                             "config.json of a model") from error
        length = sequence or SEQUENCE
        if sequence is None:
            assumed.append(f"{SEQUENCE} tokens per sequence (--sequence)")
        if batch is None:
            assumed.append(f"{default_batch} sequences per step (--batch)")
        model = traced_model(config, file, length, batch or default_batch, tuning)
        assumed += ["fused attention, which stores no scores"]
        if tuning is None:
            assumed += ["weights, gradients and both moments of Adam in bf16"]
        else:
            assumed += [f"adapters of rank {tuning.rank} for all experts, with gradients and both "
                        "moments of Adam in bf16", "all other parameters frozen in bf16"]
            assumed += [f"decoding reads and writes {DECODED_BYTES} bytes per weight and pass"
                        ] if tuning.format != BF16 else []
            assumed += [f"{show_size(tuning.link_bytes_s)}/s from the {tuning.store} to each rank "
                        "(--link), not overlapped with computation"
                        ] if tuning.store != "device" else []
        return ModelFile(host=host, assumed=tuple(assumed), model=model)
    script, given_flags = (None, {}) if path.suffix in (".yaml", ".yml") else flags_of(
        path, "num-layers" if host == MEGATRON else "arch")
    read = _megatron if host == MEGATRON else _fairseq
    sizes = read(_named(path, host, given_flags))
    sizes |= {"sequence": sequence or sizes.get("sequence"),
              "global_batch": batch or sizes.get("global_batch")}
    for name, default, option in (("sequence", SEQUENCE, "tokens per sequence (--sequence)"),
                                  ("global_batch", default_batch,
                                   "sequences per step (--batch)"),
                                  ("vocab", VOCABULARY, "tokens in the vocabulary")):
        if sizes.get(name) is None:
            sizes[name] = default
            assumed.append(f"{default} {option}")
    if not sizes.get("experts"):
        raise ValueError(f"--model {short(str(path))} describes a model without experts. Add "
                         + ("--num-experts" if host == MEGATRON else "--moe-expert-count")
                         + ", or plan the dense model with your framework")
    assumed.append("memory computed by formulas, not by tracing the model")
    model = ModelShape(**{k: v for k, v in sizes.items() if v is not None})
    return ModelFile(host=host, assumed=tuple(assumed), model=model, script=script,
                     flags=given_flags)


def _changed(model: ModelShape, values: Mapping[str, int | None]) -> ModelShape:
    own = {f.name: getattr(model, f.name) for f in fields(model)}
    return type(model)(**{**own, **{k: v for k, v in values.items() if v is not None}})


def _named(path: Path, host: str, flags: Flags) -> dict[str, Any]:
    """Return the flags of a launch script or YAML file, by their names with underscores."""
    if path.suffix in (".yaml", ".yml"):
        tree = read_yaml(path, "model file", "see configs/plans/")
        if host == MEGATRON:
            given = {**{k: v for k, v in tree.items() if not isinstance(v, dict)},
                     **tree["megatron"]}
        else:
            model = tree.get("model") or {}
            given = {**(tree.get("dataset") or {}), **(tree.get("task") or {}), **model,
                     "arch": model.get("_name"), "bf16": (tree.get("common") or {}).get("bf16"),
                     "fp16": (tree.get("common") or {}).get("fp16")}
    else:
        given = dict(flags)
    return {str(name).replace("-", "_"): _value(value) for name, value in given.items()
            if value is not None}


def _value(value: Any) -> Any:
    """Convert the text of a flag to a number or a switch."""
    if not isinstance(value, str):
        return value
    if value in ("true", "True"):
        return True
    try:
        return int(value)
    except ValueError:
        return value


def _number(flags: Mapping[str, Any], name: str, default: int | None = None) -> int | None:
    value = flags.get(name, default)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError(f"--{name.replace('_', '-')} {short(value)} must be an integer. Replace "
                         "the variable in the script by its value")
    return value


def _needed(flags: Mapping[str, Any], name: str) -> int:
    value = _number(flags, name)
    if value is None:
        raise ValueError(f"the command contains no --{name.replace('_', '-')}. Add it")
    return value


def _megatron(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the flags of Megatron to the fields of `ModelShape`, with Megatron's defaults."""
    width, gated = _needed(flags, "hidden_size"), bool(flags.get("swiglu"))
    inner = _number(flags, "ffn_hidden_size") or (
        int(4 * width * 2 / 3 / 64) * 64 if gated else 4 * width)
    every = flags.get("moe_layer_freq", 1)
    if not isinstance(every, int):
        raise ValueError(f"--moe-layer-freq {short(every)} must be a number in a plan. Use a "
                         "number, or plan the model from its Hugging Face config.json")
    return {
        "layers": _needed(flags, "num_layers"), "model_dim": width, "ffn_dim": inner,
        "heads": _needed(flags, "num_attention_heads"), "vocab": _number(flags, "vocab_size") or
        _number(flags, "padded_vocab_size"), "sequence": _number(flags, "seq_length"),
        "global_batch": _number(flags, "global_batch_size"), "moe_every": every,
        "experts": _number(flags, "num_experts"),
        "hidden_dim": _number(flags, "moe_ffn_hidden_size") or inner,
        "latent_dim": _number(flags, "moe_latent_size", 0),
        "top_k": _number(flags, "moe_router_topk", 2), "groups":
        _number(flags, "moe_router_num_groups", 1),
        "group_top_k": _number(flags, "moe_router_group_topk", 1), "gated": gated,
        "element_bytes": 2 if flags.get("bf16") or flags.get("fp16") else 4,
        "moe_first": True, "sharded_optimizer": bool(flags.get("use_distributed_optimizer"))}


def _fairseq(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the flags of fairseq to the fields of `ModelShape`. The architecture sets the sizes
    that are not given.
    """
    filled = Namespace(**flags)
    if flags.get("arch"):
        try:
            importlib.import_module("moe_plugin.hosts.fairseq.registered")  # our architectures
            from moe_plugin.hosts.fairseq.compat.names import ARCH_CONFIG_REGISTRY
        except ImportError as error:
            raise ValueError(f"--arch {short(flags['arch'])} needs fairseq for its sizes: "
                             f"{short(error)}. Install fairseq") from error
        if flags["arch"] not in ARCH_CONFIG_REGISTRY:
            raise ValueError(f"--arch {short(flags['arch'])} is not known to fairseq. Use the name "
                             "of a registered architecture")
        ARCH_CONFIG_REGISTRY[flags["arch"]](filled)
    sizes = {**vars(filled)}
    return {
        "layers": _needed(sizes, "decoder_layers"), "model_dim": _needed(sizes,
                                                                         "decoder_embed_dim"),
        "ffn_dim": _needed(sizes, "decoder_ffn_embed_dim"),
        "heads": _needed(sizes, "decoder_attention_heads"),
        "sequence": _number(sizes, "tokens_per_sample"),
        "moe_every": _number(sizes, "moe_freq") or 2,
        "experts": _number(sizes, "moe_expert_count"),
        "top_k": 1 if sizes.get("moe_top1_expert") else 2,
        "element_bytes": 2 if sizes.get("fp16") or sizes.get("bf16") else 4}
