"""Ratios of committed measurements that the page of published results shows.

Every function receives the numbers of a page; `pages/headlines.yaml` names the functions.
"""

from __future__ import annotations

import statistics
from fnmatch import fnmatchcase
from typing import Any

from scripts.bench.train.results import median_ms, newest, reports
from scripts.bench.train.sides import OURS, PIECES


def ratios(found: Any, text: str) -> list[float]:
    """Return numbers, or quotients of numbers.

    Args:
        found: numbers of a page.
        text: a path of keys, such as "rows.*.factor", or two of them, such as "plain / parm.s?".
            A pattern selects all keys that match, or with `*` all entries of a list. Values
            without a key of the path are left out.
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
    """Return the faster one of recomputing and swapping everything, relative to the plan."""
    seconds = found["seconds"]
    return min(seconds["recompute"], seconds["swap"]) / seconds["auto"]


def steps(found: Any, of: dict[str, str]) -> list[float]:
    """Return the median step of side `over` divided by that of side `under`, for each shape."""
    return [median_ms(cell.side(of["over"])) / median_ms(cell.side(of["under"]))
            for cell in newest(reports(found)) if cell.host == of["host"]
            and cell.place.startswith(of["place"]) and of.get("shape", "") in cell.shape.name]


def pieces(found: Any, *kinds: str) -> list[float]:
    """Return the time with one piece divided by that with the best number of pieces."""
    totals = [cell[way]["total"] for kind in kinds for cell in found["cells"][kind]
              for way in ("forward", "backward")]
    return [total["d=1"] / min(total.values()) for total in totals]


def by_load(found: Any) -> list[float]:
    """Return the time of whole evaluations with one piece divided by that with pieces by load."""
    return [median_ms(cell.side(OURS)) / median_ms(cell.side(PIECES))
            for cell in newest(reports(found), evaluate=True)]


def hierarchical(found: Any) -> list[float]:
    """Return the time of linear divided by that of 2DH all-to-all, by grid and size."""
    times: dict[Any, dict[str, float]] = {}
    for number, rows in enumerate((found["rows"], found["rows_with_message_cost"])):
        for row in rows:
            key = number, row["nodes"], row["ranks_per_node"], row["bytes"]
            times.setdefault(key, {})[row["algorithm"]] = row["median_ms"]
    return [cell["linear"] / cell["2dh"] for cell in times.values() if "2dh" in cell]


def einsum(found: Any) -> list[float]:
    """Return the time of the one-hot form divided by that of our layer, for each layer."""
    return [peer["median_ms"] / cell["median_ms"] for cell in found["one_rank"]
            for peer in cell["peers"] if peer["name"] == "einsum"]


def tokens_s(found: Any, over: str, under: str) -> float:
    """Return the tokens per second of one mode divided by those of another."""
    rate = {row["mode"]: row["tokens_s"] for row in found["rows"]}
    return rate[over] / rate[under]


def top1_change(found: Any) -> float:
    """Return the relative change of the top-1 error by CMCL."""
    alone, ours = (statistics.mean(run["top1_error"] for run in found["results"][name])
                   for name in ("independent (k = 5)", "CMCL, features shared"))
    return ours / alone - 1
