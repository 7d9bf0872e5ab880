"""Precision recipes for fp8 and fp4 (`--fp8-format`, `--fp8-recipe`, `--fp4-format`) of Megatron
0.15 to main.

The module contains a table with one row for each recipe. Each row lists the matmul precisions with
which this package's experts implement the recipe. Modules of Transformer Engine implement the
recipes themselves. The recipes are defined by the source code of Transformer Engine 2.0 to 2.9
(`Float8BlockScaling` and `MXFP8BlockScaling` in `common/recipe/__init__.py`, and the scales in
`tests/pytorch/references/quantize_scale_calc.py`). Importing this module does not import Megatron.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_plugin.hosts.megatron.compat.settings import plain_name, setting
from moe_plugin.utils.messages import short


@dataclass(frozen=True)
class Recipe:
    """How this package's experts behave under one precision recipe.

    Attributes:
        products: dict that maps each format (`fp8` or `fp4` in `TransformerConfig`) to the
            corresponding value of `experts.precision`.
        why_not: reason why the experts do not support the recipe, for the error message. An empty
            string means that the experts support the recipe.
        variables: dict of Transformer Engine's environment variables that modify the recipe. Each
            variable is mapped to the values that leave the recipe unchanged.
    """

    products: Mapping[str, str] = field(default_factory=dict)
    why_not: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)


_OVERRIDE = {"NVTE_BACKWARD_OVERRIDE": ""}
RECIPES: dict[tuple[str, str], Recipe] = {
    ("fp8", "blockwise"): Recipe(
        {"e4m3": "fp8_blockwise", "hybrid": "fp8_blockwise_hybrid"},
        variables={"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "0", **_OVERRIDE}),
    ("fp8", "mxfp8"): Recipe({"e4m3": "mxfp8", "hybrid": "mxfp8_hybrid"}, variables=_OVERRIDE),
    ("fp8", "tensorwise"): Recipe(why_not="it rounds a whole tensor with one scale"),
    ("fp8", "delayed"): Recipe(why_not="it rounds a whole tensor with a scale of earlier steps"),
    ("fp8", "custom"): Recipe(why_not="its quantizers are functions of Transformer Engine"),
    ("fp4", "nvfp4"): Recipe(why_not="it rounds stochastically after Hadamard transforms, and "
                             "scales weights in 16 x 16 blocks"),
    ("fp4", "custom"): Recipe(why_not="its quantizers are functions of Transformer Engine"),
}
_DEFAULTS = {"fp8": "delayed", "fp4": "nvfp4"}
WIRES = {"bf16": "none", "mxfp8": "mxfp8"}  # moe_dispatch_fwd_dtype -> `comm.wire`


def refuse_primary_weights(native: Any) -> None:
    """Raise a `ValueError` if Megatron stores weights in fp8 or fp4."""
    for bits in ("fp8", "fp4"):
        if setting(native, f"{bits}_param", False):
            raise ValueError(
                f"{bits}_param=True is not supported by moe-plugin's MoE layer, which stores its "
                f"weights in params_dtype. Leave out --{bits}-param-gather.")


def precision_settings(native: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plugin settings that make a layer use Megatron's precision recipe and Megatron's
    formats for sending rows.

    Return an empty dict if Megatron uses no recipe.

    Args:
        native: `TransformerConfig`.
        given: the user's settings by dotted path. The user's settings take precedence over
            Megatron's recipe.
    Raises:
        ValueError: If the experts do not support the recipe, if weights are stored in fp8, or if
            Megatron's settings request different formats for sending rows.
    """
    refuse_primary_weights(native)
    settings = _wires(native, given)
    if "experts.precision" in given:
        return settings
    if setting(native, "quant_recipe") is not None:
        raise ValueError(
            "quant_recipe (--te-precision-config-file, --kitchen-config-file, "
            "--kitchen-recipe-number), which sets formats module by module, is not supported by "
            "moe-plugin's experts. Leave it out, or set the precision of the experts with "
            "--moe-expert-precision (ieee is the layer's dtype).")
    for bits in ("fp8", "fp4"):
        if chosen := setting(native, bits):
            settings["experts.precision"] = _products(bits, plain_name(chosen), plain_name(
                setting(native, f"{bits}_recipe", _DEFAULTS[bits])))
            break
    return settings


def _products(bits: str, chosen: str, name: str) -> str:
    recipe = RECIPES.get((bits, name), Recipe(why_not="it is unknown to moe-plugin"))
    followed = [known for (of, known), row in RECIPES.items() if of == "fp8" and row.products]
    if chosen not in recipe.products:
        raise ValueError(
            f"{bits}_recipe={short(name)} with {bits}={short(chosen)} is not supported by "
            "moe-plugin's experts, because "
            f"{recipe.why_not or 'this format is not part of the recipe'}. Use --fp8-format e4m3 "
            f"or hybrid with --fp8-recipe {' or '.join(followed)}, or set the precision of the "
            "experts with --moe-expert-precision (ieee is the layer's dtype).")
    for variable, neutral in recipe.variables.items():
        if (value := os.environ.get(variable, neutral)) != neutral:
            raise ValueError(
                f"{variable}={short(value)} changes {bits}_recipe={short(name)} in a way that "
                f"moe-plugin's experts do not support. Unset it or set it to {short(neutral)}, or "
                "set the precision of the experts with --moe-expert-precision.")
    return recipe.products[chosen]


def in_bf16(native: Any, layer_number: int) -> bool:
    """Return True if Megatron computes this layer in bf16 instead of using the precision recipe.
    layer_number is 1-based and counts all layers of the model.
    """
    if not setting(native, "first_last_layers_bf16", False):
        return False
    return not (setting(native, "num_layers_at_start_in_bf16", 1) < layer_number
                <= native.num_layers - setting(native, "num_layers_at_end_in_bf16", 1))


def recomputed(function: Callable[..., Any], config: Any, tp_group: Any,
               *inputs: Any) -> Any:
    """Return `function(*inputs)` without storing intermediate results. The backward pass computes
    the function again.

    With an fp8 or fp4 recipe, Transformer Engine's own checkpoint function is used, because it
    saves the state of the recipe.
    """
    from megatron.core import tensor_parallel

    if setting(config, "fp8") or setting(config, "fp4"):
        from megatron.core.extensions.transformer_engine import te_checkpoint

        return te_checkpoint(function, False, tensor_parallel.random.get_cuda_rng_tracker,
                             tp_group, *inputs)
    return tensor_parallel.checkpoint(function, False, *inputs)


def _wires(native: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    names = "moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype"
    there, gradient = (plain_name(setting(native, name, "bf16")) for name in names)
    if there == gradient == "bf16" or "comm.wire" in given:
        return {}
    if there != gradient or there not in WIRES:
        raise ValueError(
            f"{names[0]}={short(there)} with {names[1]}={short(gradient)} is not supported by "
            "moe-plugin's MoE layer, which sends both in the same format. Set both to one of "
            f"{', '.join(WIRES)}, or use --moe-wire.")
    back = {} if "comm.wire_back" in given else {"comm.wire_back": "none"}
    return {"comm.wire": WIRES[there], **back}
