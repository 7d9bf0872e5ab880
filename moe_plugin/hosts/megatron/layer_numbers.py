"""Which layer of its model an MoE layer is; those of multi-token prediction come after all others.
"""

from __future__ import annotations

from typing import Any

from moe_plugin.hosts.megatron.compat.settings import script_arguments, setting


def in_model(layer_number: int | None, config: Any, is_mtp: bool,
             prediction: int | None = None) -> int | None:
    """1-based number among all transformer layers, as in Megatron's log of auxiliary losses.

    Args:
        layer_number: Megatron's.
        is_mtp, prediction: see `compat.multi_token`, which says how versions number.
    """
    if layer_number is None or not is_mtp:
        return layer_number
    return layer_number + config.num_layers + (prediction or 0) * _layers_a_prediction(config)


def trace_key(number: int, config: Any,
              prediction: int | None) -> tuple[str, int | None, int]:
    """Block, depth of multi-token prediction and layer of layer `number` (see `in_model`), from 0,
    as in Megatron's routing traces.
    """
    place = number - 1 - config.num_layers
    if place < 0:
        return "decoder", None, number - 1
    if prediction is None:
        return "mtp", place, 0
    return "mtp", prediction, place - prediction * _layers_a_prediction(config)


def moe_layers_before(config: Any, number: int) -> int | None:
    """MoE layers ahead of layer `number` (see `in_model`) on all pipeline stages; None: the pattern
    of this hybrid model is not known.
    """
    pattern = _pattern(config)
    if pattern is None:
        return None
    return sum(pattern[: number - 1]) + max(0, number - 1 - len(pattern))


def last_layer_is_moe(config: Any) -> bool:
    """True where the last layer, which those of multi-token prediction are like, is an MoE layer,
    as far as is known.
    """
    pattern = _pattern(config)
    return pattern is None or bool(pattern[config.num_layers - 1])


def passes_a_microbatch(config: Any, is_mtp: bool) -> int:
    """Forward passes of a layer per micro-batch: `mtp_num_layers` for multi-token prediction with
    one repeated layer (`mtp_use_repeated_layer`).
    """
    repeated = is_mtp and setting(config, "mtp_use_repeated_layer", False)
    return config.mtp_num_layers if repeated else 1


def _layers_a_prediction(config: Any) -> int:
    return len(_hybrid_parts()[1]) or int(config.num_layers)


def _hybrid_parts() -> tuple[str, str, int]:
    """(symbols of the layers, of those of a prediction, number of predictions) of the hybrid model
    that Megatron's script trains; empty for another one.
    """
    main, *predictions = (script_arguments().get("hybrid_layer_pattern") or "").split("/")
    return main.replace("|", ""), predictions[0] if predictions else "", len(predictions)


def _pattern(config: Any) -> list[int] | None:
    main, prediction, count = _hybrid_parts()
    if main:
        return [int(symbol == "E") for symbol in main + prediction * count]
    if setting(config, "is_hybrid_model", False):
        return None  # its pattern is an argument of the model alone
    # an integer: layers 1, 1 + n, 1 + 2n ...; a list: one entry per layer
    pattern = config.moe_layer_freq
    if isinstance(pattern, (list, tuple)):
        return list(pattern)
    return [int(i % pattern == 0) for i in range(config.num_layers)]
