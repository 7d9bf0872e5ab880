"""The cells of the matrix of waits, and what each may wait for."""

from __future__ import annotations

import functools
import math
from typing import Any

from moe_plugin.config import MoEConfig, from_dict, to_dict
from moe_plugin.dispatch import dispatchers
from moe_plugin.experts import expert_kinds
from moe_plugin.routing import routers
from moe_plugin.routing.losses import losses
from tests.combinations import Cell, all_pairs
from tests.exactness import cells
from tests.routing.references import reference_of

WORLDS = (1, 2, 4)
# ranks, experts, shards; an exchange over nodes needs two of two ranks, all else two ranks
ALONE, PAIR, NODES = (1, 8, None), ((2, 8, None), (2, 1, None)), ((4, 8, None), (4, 2, None))
# how experts are computed where the device alone may know the counts
FROM_DEVICE = ("auto", "kernels", "grouped")
BASE_READS = 2  # which tokens are real, to take them and to write their experts; and its looks
# of a layer's losses those that any router computes
LOSSES = ("global_batch", "gshard", "importance", "switch", "z")
# losses that a router of their own computes, and the settings that they need
_OF_ROUTER: dict[str, dict[str, Any]] = {
    "load_importance": {"noise": 1.0}, "tutel_load_importance": {"noise": 1.0},
    "noisy_load": {"name": "noisy_topk"}, "sam_alignment": {"name": "sam", "groups": 2}
}
COMMON: dict[str, Any] = {
    "factor": (None, 1.0, 0.0, -1.0), "tokens": ("even", "uneven", "padding"), "k": (2,),
    "kind": ("gated_ffn",), "bias": (True,), "activation": ("gelu",), "score": ("softmax",),
    "normalize": ("none",), "prioritized": (False,), "dropout": (0.0,), "weights_first": (False,),
    "pieces": ((1, 0), (2, 0), (1, 2)), "collectives": ("native", "forest"),
    "rows_computed": ("own",)
}

# over nodes: waits of the dispatchers are seen on two ranks, those of exchanges here
_FEW: dict[str, Any] = {"tokens": ("uneven",), "factor": (None, 1.0), "pieces": ((1, 0), (2, 0))}


@functools.cache
def matrix() -> list[Cell]:
    """Every dispatcher by pairs with every layout, exchange and compute strategy, and every router.
    """
    return [cell for name in dispatchers.names()
            for cell in (*_alone(name), *_together(name), *_spilling(name), *_once(name),
                         *_left(name))] + [
                *_sharing(), *_pre_gated(), *_routed(), *_losing(), *_foreign()]


def _alone(dispatch: str) -> list[Cell]:
    # a rank alone sends nothing: dispatchers differ in whether they make slots
    more = {} if dispatch in ("ragged", "padded") else {
        "compute": ("kernels",), "tokens": ("padding",), "pieces": ((1, 0),)}
    return cells.cells_of(dispatch, [ALONE], **COMMON | more, all_to_all=("linear",))


def _together(dispatch: str) -> list[Cell]:
    traits = cells.traits_of(dispatch)
    factors = (None, 1.0) if traits.bounded else COMMON["factor"]  # which have no part in pages
    if not traits.supports_pieces:  # rows go by other collectives, or by one exchange
        return cells.cells_of(dispatch, PAIR, **COMMON | {
            "all_to_all": ("linear",), "compute": ("kernels",), "tokens": ("uneven",)})
    nodes = {"size": [size for size in cells.layouts(dispatch, NODES) if size.r != 0],
             "all_to_all": ("2dh", "leader", "auto"), "compute": ("kernels",),
             "cut": traits.piece_axes[:1], **_FEW}
    return [*cells.cells_of(dispatch, PAIR, **COMMON | {
        "factor": factors, "compute": ("kernels", "grouped", "loop"), "all_to_all": ("linear",)}),
            *cells.cells_of(dispatch, NODES, **COMMON | nodes)]


def _spilling(dispatch: str) -> list[Cell]:
    """Rows that ranks compute for others, in the layout in which they may."""
    if not cells.traits_of(dispatch).spills:
        return []
    pair = {"size": (cells.Size(2, 8, None, 1), cells.Size(2, 1, None, 2)),
            "compute": ("kernels", "loop"), "all_to_all": ("linear",), "factor": (None, 1.0),
            "tokens": ("uneven",)}
    nodes = {"size": (cells.Size(4, 8, None, 1), cells.Size(4, 2, None, 2)),
             "compute": ("kernels",), "all_to_all": ("2dh",), **_FEW}
    found = [*cells.cells_of(dispatch, PAIR, **COMMON | pair),
             *cells.cells_of(dispatch, NODES, **COMMON | nodes)]
    return [{**cell, "spill": "least_loaded"} for cell in found]


def _once(dispatch: str) -> list[Cell]:
    """Rows that go once to each rank or node, over nodes."""
    return cells.once_cells(dispatch, NODES, **COMMON | {
        "compute": ("kernels",), "all_to_all": ("linear", "2dh"), "cut": ("rows",), **_FEW})


def _left(dispatch: str) -> list[Cell]:
    """Strategies, exchanges, kinds, numbers of choices and dtypes that are left out above."""
    traits = cells.traits_of(dispatch)
    sizes = [size for size in cells.layouts(dispatch, [ALONE, *PAIR]) if size.r != 0]
    pairs = all_pairs({
        "size": sizes, "compute": ["auto", "fused", "batched", *["loop"] * traits.bounded],
        "all_to_all": ["native", "linear"] if traits.supports_pieces else ["linear"], "k": [1, 2],
        "kind": expert_kinds.names(), "dtype": ["float32", "bfloat16"],
        "pieces": [(1, 0), (2, 0)] if traits.supports_pieces else [(1, 0)],
        "factor": [None, 1.0] if not traits.fixed_slots else [0.0, 1.0],
    })
    more = {"replicas": "all"} if traits.shares_tokens else {}
    return [{"dispatch": dispatch, "tokens": "uneven", "cut": traits.piece_axes[0],
             **_first(COMMON), **more, **pair} for pair in pairs]


def _sharing() -> list[Cell]:
    """Ranks that hold the same tokens, in Parm's schedules."""
    few = {**COMMON, "tokens": ("even",), "pieces": ((1, 0), (2, 0)), "replicas": (2,),
           "compute": ("kernels",), "all_to_all": ("linear",)}
    return [cell for name in ("ragged", "padded")
            for cell in cells.parm_cells(name, NODES[:1], **few)]


def _pre_gated() -> list[Cell]:
    """The second of two blocks, whose choices the first one makes."""
    few = {**COMMON, "tokens": ("uneven",), "factor": (None,), "compute": ("kernels",),
           "all_to_all": ("linear",), "collectives": ("native",)}
    return [{**cell, "pre_gate": True} for cell in cells.cells_of("ragged", PAIR, **few)
            if cell["size"].r != 0]


def _routed() -> list[Cell]:
    """Every router, with and without slots and losses."""
    pairs = all_pairs({
        "router": routers.names(), "dispatch": ["ragged", "padded"],
        "size": [cells.Size(1, 8, None, 1), cells.Size(2, 8, None, 1)], "losses": [(), LOSSES]
    })
    return [_plain({"tokens": "padding", "factor": 1.0 if pair["dispatch"] == "padded" else None,
                    **pair}) for pair in pairs]


def _losing() -> list[Cell]:
    """Every loss of its own, of a batch that one rank has, and of one that two ranks share."""
    return [_plain({"losses": (name,), "batch": batch, "size": cells.Size(2, 8, None, 1)})
            for name in losses.names() for batch in ("own", "shared")]


def _foreign() -> list[Cell]:
    """Experts that are a user's modules, and `grouped` that passes rows to `loop`."""
    sizes = cells.Size(1, 8, None, 1), cells.Size(2, 8, None, 1)
    return [_plain({"size": size, **more}) for size in sizes
            for more in ({"experts": "modules"}, {"compute": "grouped", "dtype": "float64"})]


def _plain(cell: Cell) -> Cell:
    """The cell with one value of all settings that it leaves out."""
    return {"dispatch": "ragged", "factor": None, "tokens": "uneven", "compute": "kernels",
            "all_to_all": "linear", "cut": "rows", **_first(COMMON), **cell}


def _first(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: values[0] for name, values in settings.items()
            if name not in ("factor", "tokens")}


def config_of(cell: Cell) -> MoEConfig:
    """The layer's settings; ranks with equal numbers of tokens promise them."""
    config = cells.settings_of(cell)
    tree = to_dict(config)
    tree["dispatch"]["equal_tokens"] = cell["tokens"] == "even"
    tree["parallel"]["mode"] = "fixed"
    tree["parallel"]["spill"] = cell.get("spill", "never")
    tree["router"]["pre_gate"] = int("pre_gate" in cell)
    if "router" in cell:
        _set(tree["router"], reference_of(cell["router"]).settings | {"name": cell["router"]})
    if "experts" in cell:
        del tree["experts"]  # which settings of ours are for
    if "losses" in cell:
        tree["losses"] = dict.fromkeys(cell["losses"], 1.0)
        for name in cell["losses"]:
            _set(tree["router"], _OF_ROUTER.get(name, {}))
    return from_dict(tree)


def _set(settings: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        known = settings[name]
        settings[name] = known | value if isinstance(value, dict) else value


def reads(cell: Cell) -> int:
    """How often the host reads the device in a forward pass, by what the page promises; the router
    `base` reads more. Of pre-gated blocks all but the first.
    """
    if "pre_gate" in cell:
        return 0
    size, traits, factor = cell["size"], cells.traits_of(cell["dispatch"]), cell["factor"]
    together = size.world > 1 and size.r != 0  # rows are sent
    if traits.bounded:
        return 0 if counts_stay(cell) else pieces(cell) if together else 1
    asked = int(traits.fixed_slots and size.world > 1 and factor <= 0)  # for the load
    if together:
        return asked or int(not traits.fixed_slots)
    exact = not traits.fixed_slots or factor == 0
    return asked or int(exact and not counts_stay(cell))


def pieces(cell: Cell) -> int:
    """In how many pieces rows are cut that are sent: so that they can be grouped both ways."""
    forward, backward = cell["pieces"]
    return math.lcm(forward, backward or forward)


def counts_stay(cell: Cell) -> bool:
    """Whether experts take the numbers of rows from the device."""
    passed_on = cell["compute"] == "grouped" and cell.get("dtype") == "float64"  # to `loop`
    return cell["compute"] in FROM_DEVICE and not passed_on and "experts" not in cell


def reads_late(cell: Cell) -> bool:
    """Whether the host may read the device after values have left for other ranks: of `bounded` it
    reads the counts of a piece before its experts; `base` sends scores, losses send sums.
    """
    bounded = cells.traits_of(cell["dispatch"]).bounded
    return (cell.get("router") == "base" or cell.get("batch") == "shared"
            or (bounded and not counts_stay(cell)))


def waits_of_hosts(cell: Cell) -> tuple[int, int]:
    """How often the hosts of the ranks wait for each other, in forward and backward."""
    traits, (forward, backward) = cells.traits_of(cell["dispatch"]), cell["pieces"]
    if cell["size"].world == 1:
        return 0, 0
    if "router" in cell and cell["router"] == "base":  # how many tokens each rank has
        return 1 + int(_longest(cell)), 0
    even = traits.fixed_slots or (traits.bounded and cell.get("send") != "nodes")
    if cell["all_to_all"] in ("2dh", "leader") and not even:
        return 2 * forward, 2 * (backward or forward)  # lengths: of rows there, and of those back
    return int(_longest(cell)), 0


def _longest(cell: Cell) -> bool:
    """Whether hosts agree on the longest batch."""
    traits = cells.traits_of(cell["dispatch"])
    slots = traits.fixed_slots and cell["factor"] > 0 and cell["tokens"] != "even"
    return slots or cell["dispatch"] == "all_gather"
