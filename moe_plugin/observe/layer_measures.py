"""Measures of the load of a layer, which are used by the rules about layers.

For an even load, the largest load divided by the mean load is 1. If every token chooses the same
`k` of `E` experts, this ratio is `E / k`, which may be less than 2. Therefore the rules examine
where the measured ratio lies between 1 and `E / k`.
"""

from __future__ import annotations

import math

from moe_plugin.observe.history.records import LayerRecord

UNEVEN_WAY, COLLAPSED_WAY = 0.5, 0.75
UNEVEN = 2.0  # times the mean load, used if UNEVEN_WAY allows a larger value
FEW = 2  # choices per expert; a record with fewer choices does not show a collapse
PART = 0.05  # experts per token; smaller differences are rounding


def per_token(record: LayerRecord) -> float | None:
    """Return the number of experts per token, or None if unknown."""
    k = record.choices / record.tokens if record.tokens else 0.0
    return k if k > 0 and math.isfinite(k) else None


def ratio_of_same_experts(record: LayerRecord) -> float | None:
    """Return `E / k`, which is the value of `max_over_mean` if all tokens choose the same experts.
    """
    k = per_token(record)
    return None if k is None else len(record.load) / k


def concentration(record: LayerRecord) -> float | None:
    """Return how concentrated the load is: 0 for an even load, 1 if all tokens choose the same `k`
    experts, or a value in between.

    The concentration is a linear function of the fraction of choices that go to the `k` busiest
    experts. Return None if the load is unknown, or if every token chooses all experts.
    """
    k, experts, total = per_token(record), len(record.load), record.choices
    if k is None or total < FEW * experts:
        return None
    busiest = max(1, math.ceil(k - PART))
    even = busiest / experts
    if even >= 1:
        return None
    return (sum(sorted(record.load)[-busiest:]) / total - even) / (1 - even)


def may_be_concentrated(record: LayerRecord) -> bool:
    """Return False if `concentration` cannot reach its limit. This is a fast check that examines
    only the load of the busiest expert.
    """
    k, experts = per_token(record), len(record.load)
    if k is None:
        return False
    busiest = max(1, math.ceil(k - PART))
    even = busiest / experts
    least = record.choices * (even + COLLAPSED_WAY * (1 - even))
    return busiest * max(record.load) >= (1 - 1e-9) * least


def bound(record: LayerRecord) -> float:
    """Return the limit of `max_over_mean` above which a load is considered uneven.

    The limit is infinite if every token chooses all experts.
    """
    top = ratio_of_same_experts(record)
    if top is None:
        return UNEVEN
    return min(UNEVEN, 1 + UNEVEN_WAY * (top - 1)) if top > 1 + PART else math.inf


def over_bound(record: LayerRecord) -> float | None:
    """Return `max_over_mean` relative to its limit `bound(record)`."""
    return None if record.max_over_mean is None else record.max_over_mean / bound(record)


def is_over_bound(record: LayerRecord) -> bool:
    """Return whether the load of a layer is considered uneven."""
    return (over_bound(record) or 0.0) >= 1


def without_loss(record: LayerRecord) -> float | None:
    """Return `over_bound` for a layer without load balancing, and 0 for all other layers."""
    return over_bound(record) if has_no_loss(record) else 0.0


def has_no_loss(record: LayerRecord) -> bool:
    """Return whether a layer is known to have no load balancing.

    A record without an entropy comes from a router of another framework, whose losses are unknown.
    The z-loss (`z_loss` in Megatron) does not balance the load. A router may declare that it
    balances the load without a loss.
    """
    balance = record.losses.keys() - {"z", "z_loss"} or record.self_balanced_calls
    return bool(record.load) and not balance and record.entropy is not None


def with_loss(record: LayerRecord) -> float | None:
    """Return `over_bound` for a layer with load balancing, and 0 for all other layers.

    Also return 0 for a collapsed layer, because the rule `collapse` already reports it.
    """
    if has_no_loss(record):
        return 0.0
    collapsed = (concentration(record) or 0.0) >= COLLAPSED_WAY
    return 0.0 if collapsed else over_bound(record)


def unchosen(record: LayerRecord) -> tuple[int, int] | None:
    """Return the number of experts, and a bit mask of the experts that received no token."""
    if not record.load:
        return None
    bits = 0 if all(record.load) else sum(1 << i for i, n in enumerate(record.load) if not n)
    return len(record.load), bits


def sureness(record: LayerRecord) -> float | None:
    """Return the entropy of the routing divided by the entropy of a uniform distribution, or None
    if each token chooses a single expert.
    """
    k, experts = per_token(record) or 0.0, len(record.load)
    known = record.entropy is not None and experts > 1 and k > 1 + PART
    return (record.entropy or 0.0) / math.log(experts) if known else None
