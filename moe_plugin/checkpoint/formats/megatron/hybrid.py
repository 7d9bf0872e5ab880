"""Checkpoints of Megatron's hybrid models (`HybridModel`) as those of GPT models, and back.

A layer of a GPT model is two of a hybrid one: `*`, its attention, and `-` or `E`, its MLP or
experts. Tensors, and what the optimizer keeps for them, change numbers and nothing else:

    decoder.layers.3.self_attention, input_layernorm      decoder.layers.6. the same
    decoder.layers.3.mlp, pre_mlp_layernorm               decoder.layers.7. the same
    decoder.final_layernorm                               decoder.final_norm
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from moe_plugin.checkpoint.formats.megatron import common, names
from moe_plugin.checkpoint.source import CheckpointError, Source, View
from moe_plugin.messages import short

PATTERN, OLD_PATTERN = "hybrid_layer_pattern", "hybrid_override_pattern"
_PARTS = {"self_attention": 0, "input_layernorm": 0, "mlp": 1, "pre_mlp_layernorm": 1}
_NORM = "decoder.final_layernorm.", "decoder.final_norm."


def with_pattern(source: Source, pattern: str) -> Source:
    """A view of a checkpoint of Megatron as that of a hybrid model with this pattern; empty: as
    that of a GPT model.

    Raises:
        CheckpointError: it is of another format, or its layers are not those of the pattern.
    """
    if source.format not in (names.OURS, names.NATIVE):
        raise CheckpointError(f"{PATTERN}={short(pattern)} does not fit the format "
                              f"{source.format!r}: must be {names.OURS!r} or {names.NATIVE!r}; "
                              f"give --to {names.OURS}")
    source = as_gpt(source)
    if not pattern:
        return source
    _refuse_predictions(source)
    layers = names.layer_numbers(name for _, name in source.entries)
    experts = names.layer_numbers(source.layers)
    kinds = "".join("*E" if number in experts else "*-" for number in layers)
    if pattern.replace("|", "") != kinds:
        raise CheckpointError(f"{PATTERN}={short(pattern)} does not fit the checkpoint, whose "
                              f"layers are {short(kinds)}: must be these, with | anywhere")
    return _renumbered(source, {(number, part): 2 * place + part for place, number
                                in enumerate(layers) for part in (0, 1)}, _NORM, pattern)


def as_gpt(source: Source) -> Source:
    """A view of a checkpoint of a hybrid model as that of a GPT model; of a GPT model as it is.

    Raises:
        CheckpointError: its layers are not attention and MLP or experts by turns.
    """
    pattern = pattern_of(source)
    if not pattern:
        return source
    _refuse_predictions(source)
    main = pattern.replace("|", "")
    if set(main[::2]) != {"*"} or not set(main[1::2]) <= {"-", "E"} or len(main) % 2:
        raise CheckpointError(f"{PATTERN}={short(pattern)} is not that of a GPT model: must be * "
                              "and, after each, - or E; convert to the checkpoint's own format")
    return _renumbered(source, {(number, number % 2): number // 2 for number in range(len(main))},
                       _NORM[::-1], "")


def pattern_of(source: Source) -> str:
    """Pattern of a hybrid model; empty for a GPT model."""
    settings = source.values.get("settings") or {}
    return str(settings.get(PATTERN) or settings.get(OLD_PATTERN) or "")


def arguments(source: Source) -> argparse.Namespace:
    """Those of a training script, as far as settings say them: without a pattern among them
    Megatron 0.19 takes a checkpoint for that of a GPT model.
    """
    settings = {**source.values["settings"]}
    settings.pop("moe_plugin", None)
    settings["consumed_train_samples"] = int(source.values.get("consumed_samples") or 0)
    return argparse.Namespace(**settings)


def _refuse_predictions(source: Source) -> None:
    count = (source.values.get("settings") or {}).get("mtp_num_layers")
    if count or any(name.startswith("mtp.") for _, name in source.entries):
        raise CheckpointError(
            f"the checkpoint has layers of multi-token prediction (mtp_num_layers={short(count)}), "
            "which a GPT model and a hybrid one store differently: must have none to become the "
            "other's; keep its kind of model, without --hybrid-layer-pattern and in its own format")


def _renumbered(source: Source, numbers: Mapping[tuple[int, int], int], norm: tuple[str, str],
                pattern: str) -> Source:
    """numbers: of a layer and a part of it -> the new one."""
    def found(name: str) -> str | None:
        rest, number = names.without_number(name)
        if number is None:
            return name.replace(norm[0], norm[1]) if name.startswith(norm[0]) else name
        inner = rest.removeprefix(names.LAYERS)
        new = numbers.get((number, _PARTS.get(inner.partition(".")[0], -1)))
        return None if new is None else f"{names.LAYERS}{new}.{inner}"

    def renamed(name: str) -> str:
        new = found(name)
        if new is None:
            raise CheckpointError(f"tensor {name!r} has no place in a model with "
                                  f"{PATTERN}={short(pattern)}")
        return new

    derived = [replace(one, key=(one.key[0], renamed(one.key[1])))
               for one in map(source.tensor, source.entries)]
    layers = {renamed(f"{prefix}x").removesuffix("x"): dict(layer)
              for prefix, layer in source.layers.items()}
    settings = {**source.values.get("settings", {}), **_settings(layers, pattern, len(numbers))}
    settings.pop(OLD_PATTERN, None)
    kept = dict(source.values.get("megatron") or {})
    # a GPT model's layers are in one tensor where all are alike
    count, experts = settings["num_layers"], names.layer_numbers(layers)
    kept["stacked"] = not pattern and len(experts) in (0, count)
    modules = [*common.module_objects(range(count), experts, [one.key[1] for one in derived],
                                      kept["stacked"])]
    if pattern:
        modules += map(names.object_name, (f"{norm[1]}_extra_state", "output_layer._extra_state"))
    # empty, as they are without 8-bit numbers, where there were none; may be more than needed
    kept["objects"] = {**dict.fromkeys(modules, common.object_bytes), **_objects(
        kept.get("objects", {}), found, norm[1], count if kept["stacked"] else None)}
    return View(source, derived, layers=layers, values={
        **source.values, "settings": settings, "megatron": _with_arguments(kept, settings)})


def _objects(kept: Mapping[str, Any], found: Callable[[str], str | None], norm: str,
             stacked: int | None) -> dict[str, Any]:
    """Objects under the other model's names, without those that it has no place for.

    Args:
        found: the new name of a tensor.
        norm: what the other model's last norm is called.
        stacked: its layers, where they are in one tensor.
    """
    objects = {}
    for name, read in kept.items():
        key, offsets, shape = names.split_object(name)
        if not key.startswith("decoder."):
            objects[name] = read
            continue
        if names.is_stacked(key):
            key = f"{names.LAYERS}{offsets[0]}.{key.removeprefix(names.LAYERS)}"
            offsets, shape = offsets[1:] or (0,), shape[1:] or (1,)
        new = None if key.startswith(norm) else found(key)
        if new is None:
            continue
        rest, number = names.without_number(new)
        if stacked is not None and number is not None:
            many = names.NATIVE_EXPERTS in rest
            new, offsets = rest, (number, *offsets) if many else (number,)
            shape = (stacked, *shape) if many else (stacked,)
        objects[names.object_name(new, offsets, shape)] = read
    return objects


def _settings(layers: Mapping[str, Any], pattern: str, parts: int) -> dict[str, Any]:
    if pattern:
        return {"num_layers": parts, PATTERN: pattern, "moe_layer_freq": 1}
    experts = set(names.layer_numbers(layers))
    with_experts = [int(number in experts) for number in range(parts // 2)]
    return {"num_layers": parts // 2, PATTERN: None,
            "moe_layer_freq": 1 if all(with_experts) else with_experts}


def _with_arguments(kept: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a writer needs, with the new settings among the script's arguments."""
    if isinstance(kept.get("common", {}).get("args"), argparse.Namespace):
        args = argparse.Namespace(**vars(kept["common"]["args"]))
        vars(args).update({name: settings[name] for name in (
            "num_layers", PATTERN, "moe_layer_freq")})
        vars(args).pop(OLD_PATTERN, None)
        kept["common"] = {**kept["common"], "args": args}
    kept["meta"] = {name: value for name, value in kept.get("meta", {}).items() if name != "model"}
    return kept
