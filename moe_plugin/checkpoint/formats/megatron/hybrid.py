"""Checkpoints of Megatron's hybrid models (`HybridModel`) as those of GPT models, and back.

A layer of a GPT model is two of a hybrid one: `*`, its attention, and `-` or `E`, its MLP or
experts. Tensors, and what the optimizer keeps for them, change numbers and nothing else:

    decoder.layers.3.self_attention, input_layernorm      decoder.layers.6. the same
    decoder.layers.3.mlp, pre_mlp_layernorm               decoder.layers.7. the same
    decoder.final_layernorm                               decoder.final_norm
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_plugin.checkpoint.formats.megatron import common, names
from moe_plugin.checkpoint.source import CheckpointError, Source, View
from moe_plugin.messages import short

PATTERN = "hybrid_layer_pattern"
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
    main = pattern.replace("|", "")
    if set(main[::2]) != {"*"} or not set(main[1::2]) <= {"-", "E"} or len(main) % 2:
        raise CheckpointError(f"{PATTERN}={short(pattern)} is not that of a GPT model: must be * "
                              "and, after each, - or E; convert to the checkpoint's own format")
    return _renumbered(source, {(number, number % 2): number // 2 for number in range(len(main))},
                       _NORM[::-1], "")


def pattern_of(source: Source) -> str:
    """Pattern of a hybrid model; empty for a GPT model."""
    return str((source.values.get("settings") or {}).get(PATTERN) or "")


def _renumbered(source: Source, numbers: Mapping[tuple[int, int], int], norm: tuple[str, str],
                pattern: str) -> Source:
    """numbers: of a layer and a part of it -> the new one."""
    def renamed(name: str) -> str:
        rest, number = names.without_number(name)
        if number is None:
            return name.replace(norm[0], norm[1]) if name.startswith(norm[0]) else name
        inner = rest.removeprefix(names.LAYERS)
        part = _PARTS.get(inner.partition(".")[0])
        if (number, part) not in numbers:
            raise CheckpointError(f"tensor {name!r} has no place in a model with "
                                  f"{PATTERN}={short(pattern)}")
        return f"{names.LAYERS}{numbers[number, part or 0]}.{inner}"

    derived = [replace(one, key=(one.key[0], renamed(one.key[1])))
               for one in map(source.tensor, source.entries)]
    layers = {renamed(f"{prefix}x").removesuffix("x"): dict(layer)
              for prefix, layer in source.layers.items()}
    settings = {**source.values.get("settings", {}), **_settings(layers, pattern, len(numbers))}
    kept = _kept(source.values.get("megatron") or {}, settings, layers,
                 any(".shared_experts." in one.key[1] for one in derived))
    return View(source, derived, layers=layers,
                values={**source.values, "settings": settings, "megatron": kept})


def _settings(layers: Mapping[str, Any], pattern: str, parts: int) -> dict[str, Any]:
    if pattern:
        return {"num_layers": parts, PATTERN: pattern, "moe_layer_freq": 1}
    experts = set(names.layer_numbers(layers))
    with_experts = [int(number in experts) for number in range(parts // 2)]
    return {"num_layers": parts // 2, PATTERN: None,
            "moe_layer_freq": 1 if all(with_experts) else with_experts}


def _kept(kept: Mapping[str, Any], settings: Mapping[str, Any], layers: Mapping[str, Any],
          shared: bool) -> dict[str, Any]:
    """What a writer needs, for the new layers. Objects of modules are empty, as they are without
    8-bit numbers, and may be more than a model asks for.
    """
    found = dict(kept)
    pattern, experts = settings[PATTERN], names.layer_numbers(layers)
    if isinstance(kept.get("common", {}).get("args"), argparse.Namespace):
        args = argparse.Namespace(**vars(kept["common"]["args"]))
        vars(args).update({name: settings[name] for name in (
            "num_layers", PATTERN, "moe_layer_freq")})
        found["common"] = {**kept["common"], "args": args}
    # a GPT model's layers are in one tensor where all are alike
    numbers = range(settings["num_layers"])
    found["stacked"] = not pattern and len(experts) in (0, len(numbers))
    modules = [*common.module_objects(numbers, experts, shared, found["stacked"])]
    if pattern:
        modules += [names.object_name(f"{_NORM[1]}_extra_state"),
                    names.object_name("output_layer._extra_state")]
    found["objects"] = {
        **{name: read for name, read in kept.get("objects", {}).items() if "decoder." not in name},
        **dict.fromkeys(modules, common.object_bytes)}
    found["meta"] = {name: value for name, value in kept.get("meta", {}).items()
                     if name != "model"}
    return found
