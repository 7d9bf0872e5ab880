"""Ratios of committed measurements that the page of published results shows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from scripts.bench.train.host_sides import OURS
from scripts.bench.train.results import median_ms, newest, reports
from scripts.bench.train.sides import PIECES


def steps(found: Any, host: str, place: str, over: str, under: str,
          shape: str = "") -> list[float]:
    """Return the median step of one side divided by that of another, for each shape."""
    return [median_ms(cell.side(over)) / median_ms(cell.side(under))
            for cell in newest(reports(found)) if cell.host == host
            and cell.place.startswith(place) and shape in cell.shape.name]


def pieces(found: Any, kinds: Iterable[str]) -> list[float]:
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


def of_rows(found: Any, over: str, under: str) -> list[float]:
    """Return the quotients of two columns."""
    return [row[over] / row[under] for row in found["rows"]]
