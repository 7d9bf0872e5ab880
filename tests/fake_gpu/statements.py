"""What the page says in words, and which cells show it: `test_waits.py` holds each cell to it."""

from __future__ import annotations

from collections.abc import Callable

from tests.combinations import Cell
from tests.exactness.cells import traits_of
from tests.fake_gpu.matrix import FROM_DEVICE, counts_stay, pieces


def _slots(cell: Cell) -> bool:
    return traits_of(cell["dispatch"]).fixed_slots


def _together(cell: Cell) -> bool:
    return cell["size"].world > 1 and cell["size"].r != 0


def _dropless(cell: Cell) -> bool:
    return cell["dispatch"] == "ragged" and "router" not in cell


def _sent(cell: Cell) -> bool:
    return _dropless(cell) and _together(cell) and "pre_gate" not in cell


def _bounded(cell: Cell) -> bool:
    return cell["dispatch"] == "bounded" and _together(cell)


STATEMENTS: dict[str, Callable[[Cell], bool]] = {
    "no wait, even without `dispatch.equal_tokens`":
        lambda c: _slots(c) and _together(c) and c["factor"] > 0 and c["tokens"] != "even",
    "the load decides how many slots there are, which costs one wait":
        lambda c: _slots(c) and _together(c) and c["factor"] <= 0,
    "On one rank there is no wait, because exact rows are computed":
        lambda c: _slots(c) and c["size"].world == 1 and c["factor"] <= 0 and counts_stay(c),
    "**Dropless on one rank**: no wait":
        lambda c: _dropless(c) and c["size"].world == 1 and counts_stay(c),
    "The same holds where parameters are gathered (`parallel.r: 0`)":
        lambda c: _dropless(c) and c["size"].world > 1 and c["size"].r == 0 and counts_stay(c),
    "with any exchange, strategy, dtype and number of pieces":
        lambda c: _sent(c) and c["all_to_all"] == "native" and c["compute"] not in FROM_DEVICE
        and c.get("dtype") == "bfloat16" and c["pieces"] != (1, 0),
    "It also holds with `parallel.spill`": lambda c: "spill" in c,
    "and with `dispatch.send`": lambda c: "send" in c and c["pieces"] != (1, 0),
    "no wait with a strategy that takes the numbers from the device":
        lambda c: _bounded(c) and counts_stay(c),
    "for rows sent once or not": lambda c: _bounded(c) and counts_stay(c) and "send" in c,
    "Even `bounded` has uneven pieces with `dispatch.send: nodes`":
        lambda c: _bounded(c) and c.get("send") == "nodes" and c["all_to_all"] == "2dh",
    "With another strategy there is one wait for each piece":
        lambda c: _bounded(c) and not counts_stay(c) and pieces(c) > c["pieces"][0],
    "If no rows are sent, there is one wait": lambda c: c["dispatch"] == "bounded" and not (
        _together(c) or counts_stay(c)),
    "the counts of a block are exchanged and copied to the host as soon as":
        lambda c: "pre_gate" in c,
    "**Losses**: no wait": lambda c: bool(c.get("losses")) and c.get("batch") != "shared",
    "A batch that ranks share causes no wait either": lambda c: c.get("batch") == "shared",
    "**Backward**: no wait": _sent,
    "Nothing is copied to the device from memory that is not pinned": _sent,
    "the longest batch for fixed slots with f > 0 without the promise":
        lambda c: _slots(c) and _together(c) and c["factor"] > 0 and c["tokens"] != "even",
    "and for `all_gather`": lambda c: c["dispatch"] == "all_gather" and _together(c),
    "`2dh` and `leader` exchange these lengths before each exchange, from host to host":
        lambda c: _sent(c) and c["all_to_all"] in ("2dh", "leader"),
    "In training the router `base` exchanges the numbers of tokens":
        lambda c: c.get("router") == "base" and _together(c),
    "Experts that are a user's modules (`MoELayer(experts=...)`) need the numbers":
        lambda c: "experts" in c and c["size"].world == 1,
    "`grouped` also waits where it passes rows to `loop`":
        lambda c: c.get("dtype") == "float64" and c["size"].world == 1,
}
