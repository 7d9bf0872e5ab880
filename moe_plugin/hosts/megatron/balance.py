"""Megatron's load-balancing types and their coefficients: `moe_router_load_balancing_type` and
`moe_aux_loss_coeff`, each one value or a list.
"""

from __future__ import annotations

from typing import Any

from moe_plugin.hosts.megatron.compat.settings import balance_kinds, setting
from moe_plugin.utils.messages import short


def as_list(value: Any) -> list[Any]:
    """A setting that is one value or several, as several."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def refuse_unknown(native: Any) -> None:
    """`ValueError` for a type that this Megatron's router does not know: it ignores the name, and
    nothing balances the load.
    """
    known = balance_kinds(native)
    for kind in as_list(native.moe_router_load_balancing_type):
        if kind not in known:
            raise ValueError(
                f"moe_router_load_balancing_type={short(kind)} is unknown to this Megatron's "
                f"router, which would not balance the load: must be one of {', '.join(known)}; "
                "choose one of these")


def refuse_unmatched(native: Any) -> None:
    """`ValueError` where types and coefficients differ in number, or a type is given twice.

    native: `TransformerConfig`, or the arguments for it.
    """
    kinds, weights = native.moe_router_load_balancing_type, native.moe_aux_loss_coeff
    count, given = len(as_list(kinds)), len(as_list(weights))
    if count != given:
        raise ValueError(
            f"moe_aux_loss_coeff={short(weights)} is out of bounds: must be {count} of them, one "
            f"for each of moe_router_load_balancing_type={short(kinds)}; give as many of both")
    if len(set(as_list(kinds))) != count:
        raise ValueError(
            f"moe_router_load_balancing_type={short(kinds)} is out of bounds: must be different "
            "types; give each once, with the sum of its coefficients")


def aux_coefficient(native: Any) -> float:
    """Coefficient of the type aux_loss; 0: it is not among the types."""
    return float(sum(weight for kind, weight in _pairs(native) if kind == "aux_loss"))


def router_balances(native: Any) -> bool:
    """Whether these settings have Megatron's router keep the load even."""
    weighted = any(weight and "aux_loss" in kind for kind, weight in _pairs(native))
    others = any(kind != "none" and "aux_loss" not in kind
                 for kind in as_list(native.moe_router_load_balancing_type))
    return weighted or others or any(
        setting(native, name) for name in ("moe_router_enable_expert_bias",
                                           "moe_router_force_load_balancing"))


def _pairs(native: Any) -> list[tuple[Any, Any]]:
    # of unequal numbers, which a router of the spec's own may have, those of both
    return list(zip(as_list(native.moe_router_load_balancing_type),
                    as_list(native.moe_aux_loss_coeff), strict=False))
