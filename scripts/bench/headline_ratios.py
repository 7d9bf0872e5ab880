"""Compute ratios of committed measurements for the page of published results. Every function
receives the data of one benchmark page.
"""

from __future__ import annotations

import statistics
from fnmatch import fnmatchcase
from typing import Any

from scripts.bench.train.results import median_ms, newest, reports


def ratios(found: Any, text: str) -> list[float]:
    """Return values of a benchmark page, or ratios of such values.

    Args:
        found: the data of a benchmark page.
        text: a path of keys, such as "rows.*.factor", or two paths, such as "plain / parm.s?". A
            pattern selects all matching keys of a dict. The pattern `*` also selects all items of a
            list, and "name=einsum" selects the items whose `name` is "einsum". Items without a
            matching key are skipped.
    """
    top, *bottom = (_at(found, path) for path in text.split(" / "))
    if not bottom:
        return top
    top = top * len(bottom[0]) if len(top) == 1 else top
    return [a / b for a, b in zip(top, bottom[0], strict=True)]


def _at(found: Any, path: str) -> list[Any]:
    values = [found]
    for pattern in path.split("."):
        parts: list[Any] = []
        for value in values:
            if isinstance(value, list):
                key, _, wanted = pattern.partition("=")
                parts += [one for one in value if pattern == "*" or wanted and one[key] == wanted]
            elif isinstance(value, dict):
                parts += [one for key, one in value.items() if fnmatchcase(key, pattern)]
        values = parts
    return values


def faster_policy(found: Any) -> float:
    """Return the time of the faster uniform policy (recompute everything or swap everything)
    divided by the time of the plan.
    """
    seconds = found["seconds"]
    return min(seconds["recompute"], seconds["swap"]) / seconds["auto"]


def steps(found: Any, of: dict[str, Any]) -> list[float]:
    """For each model shape, return the median step time of the model `over` divided by that of the
    model `under`. `host`, `place` and `shape` select reports. With `evaluate`, a step is a forward
    pass of an evaluation.
    """
    return [median_ms(cell.side(of["over"])) / median_ms(cell.side(of["under"]))
            for cell in newest(reports(found), of.get("evaluate", False))
            if of.get("host", cell.host) == cell.host
            and cell.place.startswith(of.get("place", ""))
            and of.get("shape", "") in cell.shape.name]


def pieces(found: Any, *kinds: str) -> list[float]:
    """Return the time with one piece divided by the time with the best number of pieces."""
    totals = [cell[way]["total"] for kind in kinds for cell in found["cells"][kind]
              for way in ("forward", "backward")]
    return [total["d=1"] / min(total.values()) for total in totals]


def hierarchical(found: Any) -> list[float]:
    """For each grid and size, return the time of the linear all-to-all divided by the time of the
    2DH all-to-all.
    """
    times: dict[Any, dict[str, float]] = {}
    for number, rows in enumerate((found["rows"], found["rows_with_message_cost"])):
        for row in rows:
            key = number, row["nodes"], row["ranks_per_node"], row["bytes"]
            times.setdefault(key, {})[row["algorithm"]] = row["median_ms"]
    return [cell["linear"] / cell["2dh"] for cell in times.values() if "2dh" in cell]


def top1_change(found: Any, images: str = "") -> float:
    """Return the relative change of the top-1 error that CMCL causes, on the digits or on other
    images of the page.
    """
    results = (found[images] if images else found)["results"]
    alone, ours = (statistics.mean(run["top1_error"] for run in results[name])
                   for name in ("independent (k = 5)", "CMCL, features shared"))
    return ours / alone - 1
