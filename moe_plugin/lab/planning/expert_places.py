"""Experts placed by who is chosen together, in words: what an order would save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_plugin.planner.expert_order import PlacedExperts


def explain(placed: Mapping[str, PlacedExperts], nodes: int, ranks_per_node: int) -> str:
    """A line for each layer, and what all save."""
    levels = (["nodes"] if nodes > 1 else []) + (["ranks"] if ranks_per_node > 1 else [])
    width = max(len(name) for name in ("layer", *placed))
    head = "".join(f"{f'to {level}':>22}" for level in levels)
    lines = [f"{nodes} nodes of {ranks_per_node} ranks. Rows of a token, now and after, by choices "
             "that the search did not see where there are some:", "",
             f"{'layer':<{width}}{head}{'busiest rank':>18}{'experts moved':>16}"]
    for name, one in placed.items():
        cells = "".join(f"{_pair(one, level):>22}" for level in levels)
        busiest = f"{one.busiest[0]:.2f} -> {one.busiest[1]:.2f}"
        lines.append(f"{name:<{width}}{cells}{busiest:>18}{one.moves:>16}")
    saves = [f"{share:.0%} of rows between {level} with dispatch.send={level}"
             for level, share in total(placed).items() if level in levels]
    return "\n".join([*lines, "", f"would save {', '.join(saves) or 'nothing on one rank'}; "
                      "nothing with dispatch.send=rows"])


def total(placed: Mapping[str, PlacedExperts]) -> dict[str, float]:
    """Share of rows that all layers together save, by level."""
    return {level: 1 - sum(getattr(one.after, level) for one in placed.values())
            / sum(getattr(one.before, level) for one in placed.values())
            for level in ("nodes", "ranks")}


def _pair(one: PlacedExperts, level: str) -> str:
    before, after = getattr(one.before, level), getattr(one.after, level)
    return f"{before:.2f} -> {after:.2f} ({one.saved(level):.0%} less)"


def as_dict(placed: Mapping[str, PlacedExperts]) -> dict[str, Any]:
    """The same as JSON values."""
    return {"saved": total(placed), "layers": {name: {
        "order": list(one.order), "busiest": list(one.busiest), "moved": one.moves,
        "rows": {level: [getattr(one.before, level), getattr(one.after, level)]
                 for level in ("nodes", "ranks")}} for name, one in placed.items()}}
