"""Ratios of committed measurements, which `pages/headlines.yaml` compares with published results.
Every function receives the data of one benchmark page.
"""

from __future__ import annotations

import statistics
from fnmatch import fnmatchcase
from typing import Any

from scripts.bench.train.results import median_ms, newest, reports
from scripts.bench.train.sides import OURS, PIECES


def ratios(found: Any, text: str) -> list[float]:
    """Return the values at a path of keys, such as "rows.*.factor", or ratios of the values at two
    paths, such as "plain / parm.s?". A pattern selects all matching keys of a dict, and `*` also
    all items of a list. Items without a matching key are skipped.
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
                parts += value if pattern == "*" else []
            elif isinstance(value, dict):
                parts += [one for key, one in value.items() if fnmatchcase(key, pattern)]
        values = parts
    return values


def faster_policy(found: Any) -> float:
    """Return the time of the faster uniform policy (recompute or swap) divided by that of the plan.
    """
    seconds = found["seconds"]
    return min(seconds["recompute"], seconds["swap"]) / seconds["auto"]


def steps(found: Any, of: dict[str, str]) -> list[float]:
    """For each shape, return the median step time of the model `over` divided by that of `under`.
    """
    return [median_ms(cell.side(of["over"])) / median_ms(cell.side(of["under"]))
            for cell in newest(reports(found)) if cell.host == of["host"]
            and cell.place.startswith(of["place"]) and of.get("shape", "") in cell.shape.name]


def pieces(found: Any, *kinds: str) -> list[float]:
    """Return the time with one piece divided by the time with the best number of pieces."""
    totals = [cell[way]["total"] for kind in kinds for cell in found["cells"][kind]
              for way in ("forward", "backward")]
    return [total["d=1"] / min(total.values()) for total in totals]


def by_load(found: Any) -> list[float]:
    """Return the time of evaluations with one piece divided by that with pieces by load."""
    return [median_ms(cell.side(OURS)) / median_ms(cell.side(PIECES))
            for cell in newest(reports(found), evaluate=True)]


def hierarchical(found: Any) -> list[float]:
    """For each grid and size, return the time of the linear all-to-all divided by that of 2DH."""
    times: dict[Any, dict[str, float]] = {}
    for number, rows in enumerate((found["rows"], found["rows_with_message_cost"])):
        for row in rows:
            key = number, row["nodes"], row["ranks_per_node"], row["bytes"]
            times.setdefault(key, {})[row["algorithm"]] = row["median_ms"]
    return [cell["linear"] / cell["2dh"] for cell in times.values() if "2dh" in cell]


def einsum(found: Any) -> list[float]:
    """For each layer, return the time of the one-hot implementation divided by that of our layer.
    """
    return [peer["median_ms"] / cell["median_ms"] for cell in found["one_rank"]
            for peer in cell["peers"] if peer["name"] == "einsum"]


def tokens_s(found: Any, over: str, under: str) -> float:
    """Return the tokens per second of the mode `over` divided by those of the mode `under`."""
    rate = {row["mode"]: row["tokens_s"] for row in found["rows"]}
    return rate[over] / rate[under]


def top1_change(found: Any) -> float:
    """Return the relative change of the top-1 error that CMCL causes."""
    alone, ours = (statistics.mean(run["top1_error"] for run in found["results"][name])
                   for name in ("independent (k = 5)", "CMCL, features shared"))
    return ours / alone - 1
