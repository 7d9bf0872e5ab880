"""Checks of Megatron's load-balancing types and their coefficients.

`moe_router_load_balancing_type` and `moe_aux_loss_coeff` can each be a single value or a list.
"""

from __future__ import annotations

from typing import Any

from moe_plugin.hosts.megatron.compat.settings import balance_kinds, setting
from moe_plugin.utils.messages import short


def as_list(value: Any) -> list[Any]:
    """Return a setting as a list. The setting may be a single value or a sequence."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def refuse_unknown(native: Any) -> None:
    """Raise a `ValueError` if the router of the installed Megatron does not support a
    load-balancing type.

    Megatron would silently ignore an unsupported type, so the load would not be balanced.
    """
    known = balance_kinds(native)
    for name in as_list(native.moe_router_load_balancing_type):
        if name not in known:
            raise ValueError(
                f"moe_router_load_balancing_type={short(name)} is unknown to the router of this "
                "Megatron version, which would not balance the load. Choose one of "
                f"{', '.join(known)}.")


def refuse_unmatched(native: Any) -> None:
    """Raise a `ValueError` if the number of load-balancing types differs from the number of
    coefficients, or if a type is repeated.

    native: Megatron's `TransformerConfig`, or the arguments from which it is built.
    """
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
    return float(sum(weight for name, weight in _pairs(native) if name == "aux_loss"))


def router_balances(native: Any) -> bool:
    """Return True if Megatron's router balances the load with the settings in `native`."""
    weighted = any(weight and "aux_loss" in balance for balance, weight in _pairs(native))
    others = any(balance != "none" and "aux_loss" not in balance
                 for balance in as_list(native.moe_router_load_balancing_type))
    return weighted or others or any(
        setting(native, name) for name in ("moe_router_enable_expert_bias",
                                           "moe_router_force_load_balancing"))


def _pairs(native: Any) -> list[tuple[Any, Any]]:
    # not strict: with a custom router in the spec, the numbers of types and coefficients may differ
    return list(zip(as_list(native.moe_router_load_balancing_type),
                    as_list(native.moe_aux_loss_coeff), strict=False))
