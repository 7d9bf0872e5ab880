"""The cells of the exactness matrix, made from what is registered and the traits of dispatchers.

Whatever registers joins: nothing here names a dispatcher, an exchange, a compute strategy, an
expert kind or a score function.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from moe_plugin.comm import algorithms
from moe_plugin.comm.base import collective_kinds as collectives
from moe_plugin.config import MoEConfig, RouterConfig
from moe_plugin.dispatch import dispatchers
from moe_plugin.dispatch.base import DispatchTraits
from moe_plugin.dispatch.once import OnceDispatcher
from moe_plugin.experts import expert_kinds, strategies
from moe_plugin.kernels.expert_ffn import KEEPS_ROWS
from moe_plugin.kernels.scores import score_functions
from moe_plugin.memory.experts.cache import policies
from moe_plugin.planner.choice import SENDS, legal_r
from tests.combinations import Cell, all_pairs, name_of
from tests.exactness.harness import config_of
from tests.kernels.row_rules import RULES
from tests.oracle import ACTIVATIONS, Case

FACTORS = [None, 1.0, 0.5, 1.6, 0.0, -1.0]
# tokens of each rank, padding tokens of each rank, pull towards the first expert
TOKENS: dict[str, tuple[list[int], list[int] | None, float]] = {
    "even": ([6] * 8, None, 0.0),
    "uneven": ([7, 0, 3, 11, 1, 0, 5, 2], None, 0.0),
    "padding": ([6] * 8, [2, 6, 0, 1, 3, 0, 6, 1], 0.0),
    "starving": ([5] * 8, None, 3.0),
    "one": ([1] * 8, None, 3.0),  # fewer rows than pieces
    "few": ([1, 2, 3, 0, 3, 1, 2, 0], None, 1.0),  # as in generation
    "none": ([0] * 8, None, 0.0),
}
PIECES = [(1, 0), (2, 0), (3, 0), (1, 2), (4, 3)]  # forward, backward (0: as forward)


@dataclass(frozen=True)
class Size:
    """Ranks and experts; every expert cut over `shards` ranks (None: as few as possible); r of the
    layout (None: the only one).
    """

    world: int
    experts: int
    shards: int | None = None
    r: int | None = None

    def __str__(self) -> str:
        shown = {"experts": self.experts, "ranks": self.world, "shards": self.shards, "r": self.r}
        return ",".join(f"{name}={value}" for name, value in shown.items() if value is not None)


# ranks, experts, ranks over which each expert is cut (None: as few as possible)
SIZES = [
    (1, 1, None), (1, 8, None), (2, 1, None), (2, 8, None), (2, 4, 2), (4, 1, None), (4, 2, None),
    (4, 8, None), (4, 4, 2), (4, 2, 4), (8, 2, None), (8, 8, None), (8, 4, 4)
]
PARM_SIZES = [(2, 1, None), (2, 8, None), (4, 2, None), (4, 4, 2), (8, 2, None), (8, 8, 2)]


def scores() -> list[str]:
    """Registered score functions, the default first."""
    names = score_functions.names()
    return sorted(names, key=lambda name: (name != RouterConfig.score, name))


def own_tokens() -> list[str]:
    """Registered dispatchers for ranks that have tokens of their own."""
    return [name for name in dispatchers.names() if not traits_of(name).shares_tokens]


def traits_of(dispatch: str) -> DispatchTraits:
    return dispatchers.get(dispatch).traits


def layouts(dispatch: str, sizes: Sequence[tuple[int, int, int | None]]) -> list[Size]:
    """Every layout of these sizes that a dispatcher declares."""
    traits = traits_of(dispatch)
    one = traits.single_layout or traits.splits_slots
    return [
        Size(world, experts, shards, r) for world, experts, shards in sizes
        for r in ([None] if one else legal_r(experts, world, shards))
    ]


def cells_of(dispatch: str, sizes: Sequence[tuple[int, int, int | None]] = tuple(SIZES),
             **fewer: Sequence[Any]) -> list[Cell]:
    """All pairs of all settings of one dispatcher, in every layout that it declares.

    Where its ranks hold the same tokens, all ranks of the group do. fewer: the only values of a
    setting to take.
    """
    traits = traits_of(dispatch)
    more = {"replicas": ["all"]} if traits.shares_tokens else {}
    cells = worth_their_time(_pairs(_settings(dispatch, layouts(dispatch, sizes)) | more, fewer))
    return cells + _paged_cells(dispatch, sizes, fewer) if traits.bounded else cells


ONCE_SIZES = [(4, 16, None), (4, 2, None), (4, 4, 2), (8, 8, None)]


def once_cells(dispatch: str,
               sizes: Sequence[tuple[int, int, int | None]] | None = None,
               **fewer: Sequence[Any]) -> list[Cell]:
    """All pairs of the settings that go with rows sent once, for up to eight experts per token;
    none for a dispatcher that does not declare it. sizes: None: `ONCE_SIZES`, two of them where
    rows are bounded.
    """
    traits = traits_of(dispatch)
    if not traits.sends_once:
        return []
    sizes = sizes or (ONCE_SIZES[::2] if traits.bounded else ONCE_SIZES)
    settings = _settings(dispatch, [size for size in layouts(dispatch, sizes) if size.r])
    # of the others hops know nothing: they meet in the cells of rows
    few = {name: settings[name][:2]
           for name in ("activation", "clamp", "kind", "normalize", "collectives", "rows_computed")}
    if traits.bounded:
        few |= {"factor": [None, 1.0], "pieces": [*PIECES[:2], PIECES[-1]],
                "tokens": ["uneven", "padding", "few", "none"]}
    return _pairs(settings | few | {
        "send": [send for send in SENDS if send != "rows"], "k": [1, 2, 4, 8],
        "cut": [axis for axis in OnceDispatcher.traits.piece_axes if axis in traits.piece_axes]},
        fewer)


def _paged_cells(dispatch: str, sizes: Sequence[tuple[int, int, int | None]],
                 fewer: dict[str, Sequence[Any]]) -> list[Cell]:
    """All pairs of the settings that go with pages, in every other layout."""
    some = [size for size in layouts(dispatch, sizes) if size.r != 0][::2]
    paged = {"compute": list(KEEPS_ROWS), "dropout": [0.0], "stash_mib": [8.0]}
    return worth_their_time(_pairs(_settings(dispatch, some) | paged, fewer))


# ranks, experts, shards: alone, together, cut
FP8_SIZES = [(1, 8, None), (4, 8, None), (4, 2, None)]


def fp8_cells(dispatch: str) -> list[Cell]:
    """All pairs of the settings that go with products in fp8.

    Where an activation's derivative jumps, rounding moves a gradient by any amount: not these.
    """
    cells = cells_of(dispatch, FP8_SIZES, compute=["auto", "kernels", "loop"], dropout=[0.0],
                     clamp=[0.0], tokens=["even", "uneven", "padding", "none"], pieces=PIECES[:2],
                     factor=[None, 1.0, 0.0], all_to_all=["linear", "2dh"],
                     activation=["gelu", "gelu_tanh", "silu"])
    dropping = [cell for cell in cells if cell["prioritized"] and cell["factor"] == 1.0]
    cells += [{**cell, "tokens": "starving"} for cell in dropping[:2]]
    # the weights of a token sum to a constant: its terms of the router's gradient cancel
    summing = {"tokens": "starving", "score": "sigmoid", "normalize": "after_drop", "factor": 0.0}
    cells += [{**cell, **summing, "k": k} for k in (2, 4) for cell in cells[:2]]
    return [{**cell, "precision": "fp8"} for cell in cells]


def block_cells(dispatch: str) -> list[Cell]:
    """Some of them in each block format: what differs is in the products alone."""
    cells, names = fp8_cells(dispatch), ("mxfp8", "nvfp4", "fp8_blockwise_hybrid")
    return [{**cell, "precision": precision} for first, precision in enumerate(names)
            for cell in cells[first::24]]


# ranks, experts, shards: alone, together, cut
STORED_SIZES = [(1, 8, None), (2, 8, None), (4, 4, 2)]


def stored_cells(dispatch: str) -> list[Cell]:
    """All pairs of the settings that go with experts in host memory, in the layout in which they
    are stored.
    """
    traits = traits_of(dispatch)
    one = traits.single_layout or traits.splits_slots
    sizes = [Size(world, experts, shards, None if one else shards or 1)
             for world, experts, shards in STORED_SIZES]
    settings = _settings(dispatch, sizes) | {
        "slots": [0, 1], "policy": policies.names(), "dropout": [0.0], "k": [2],
        "pieces": PIECES[:2] if traits.supports_pieces else PIECES[:1],
        "compute": ["loop", "fused"],
        "activation": ["gelu"], "score": ["softmax"], "normalize": ["after_drop"],
        "all_to_all": ["linear"], "collectives": ["native"], "tokens": ["uneven", "none"],
        "factor": [0.0] if traits.fixed_slots else [None, 1.0],
    }
    return _pairs(settings | ({"replicas": ["all"]} if traits.shares_tokens else {}), {})


def parm_cells(dispatch: str,
               sizes: Sequence[tuple[int, int, int | None]] = tuple(PARM_SIZES),
               **fewer: Sequence[Any]) -> list[Cell]:
    """All pairs for ranks of which some hold the same tokens, in the schedules that a dispatcher's
    traits allow: S1 splits tokens before they are routed, S2 splits slots.
    """
    traits, cells = traits_of(dispatch), []
    more = {"replicas": [2, 4]}
    if not traits.splits_slots:  # a capacity would be that of a part of the tokens
        exact = {"factor": [0.0] if traits.fixed_slots else [None, 0.0], "schedule": ["s1"]}
        cells += worth_their_time(
            _pairs(_settings(dispatch, layouts(dispatch, sizes)) | more | exact, fewer))
    if traits.fixed_slots:
        one_layout = [Size(*size) for size in sizes]
        slots = {"pieces": PIECES, "schedule": ["s2"]}
        cells += _pairs(_settings(dispatch, one_layout) | more | slots, fewer)
    return cells


def worth_their_time(cells: list[Cell]) -> list[Cell]:
    """Without cells of eight ranks, which took half of the time, in layouts that fewer ranks have,
    too. Those stay that hold two values, of other settings than the layout, which no other has.
    """
    kept = [cell for cell in cells if not _has_smaller(cell["size"])]
    met = {pair for cell in kept for pair in _pairs_in(cell)}
    for cell in cells:
        if _has_smaller(cell["size"]) and not met.issuperset(_pairs_in(cell)):
            kept.append(cell)
            met.update(_pairs_in(cell))
    return kept


def _has_smaller(size: Size) -> bool:
    """Whether up to four ranks have such a layout: not experts of which ranks that share one hold a
    part each. Expert parallelism alone stays, too.
    """
    shards = size.shards or max(1, size.world // size.experts)
    return size.world == 8 and not (size.r is None or 1 < size.r < shards or size.r == shards == 1)


def _pairs_in(cell: Cell) -> set[tuple[tuple[str, Any], ...]]:
    values = [(name, value) for name, value in cell.items() if name != "size"]
    return set(itertools.combinations(values, 2))


def _pairs(settings: dict[str, Sequence[Any]], fewer: dict[str, Sequence[Any]]) -> list[Cell]:
    return all_pairs({
        name: [value for value in values if value in fewer.get(name, values)]
        for name, values in settings.items()
    })


def _settings(dispatch: str, sizes: Sequence[Size]) -> dict[str, Sequence[Any]]:
    traits = traits_of(dispatch)
    return {
        "dispatch": [dispatch],
        "size": sizes,
        "pieces": PIECES if traits.supports_pieces else PIECES[:1],
        "cut": traits.piece_axes,
        "factor": [f for f in FACTORS if f is not None or not traits.fixed_slots],
        "tokens": list(TOKENS),
        "k": [1, 2, 4],
        "kind": expert_kinds.names(),
        "compute": ["auto", *strategies.names()],
        "all_to_all": algorithms.names(),
        "collectives": collectives.names(),
        "bias": [True, False],
        "activation": list(ACTIVATIONS),
        "score": scores(),
        "normalize": ["none", "before_drop", "after_drop"],
        "prioritized": [False, True],
        "weights_first": [False, True],
        "dropout": [0.0, 0.3],
        "clamp": [0.0, 0.5],
        "rows_computed": list(RULES),
    }


def replicas_of(cell: Cell) -> int:
    """Ranks that hold the same tokens."""
    asked, world = cell.get("replicas", 1), cell["size"].world
    return world if asked == "all" else min(asked, world)


def case_of(cell: Cell) -> Case:
    """What the dense reference computes for a cell: its ranks are groups of ranks with the same
    tokens.
    """
    size, groups = cell["size"], cell["size"].world // replicas_of(cell)
    tokens, masked, skew = TOKENS[cell["tokens"]]
    clamp = cell.get("clamp", 0.0) if cell["kind"] == "gated_ffn" else 0.0
    # sums of few products are off by more of their norm
    width, hidden = (64, 96) if "precision" in cell else (8, 16)
    # logits pull as much at any width: where the scores of all experts but one vanish (1e-60), and
    # that one drops a token, `after_drop` divides by the dtype's epsilon instead of their sum
    skew *= 8 / width
    return Case(groups, size.experts, min(cell["k"], size.experts), tokens[:groups],
                None if masked is None else masked[:groups], cell["factor"], cell["kind"],
                cell["activation"], cell["bias"], cell["score"], cell["normalize"], 1.7,
                cell["prioritized"], skew, seed=zlib.crc32(name_of(cell).encode()) % 1000,
                shards=size.shards, weights_first=cell["weights_first"], dropout=cell["dropout"],
                clamp=clamp, offset=clamp / 2,
                width=width, hidden=hidden)


def rounded(cell: Cell) -> Case:
    """The case of a cell with the rounding of its products: a rank rounds its part of an expert, of
    which a layout has as many as ranks that share its rows.
    """
    size = cell["size"]
    parts = size.r
    if parts is None:
        parts = size.shards or max(1, size.world // size.experts)
    return replace(case_of(cell), rounded_parts=max(1, parts), precision=cell["precision"])


def settings_of(cell: Cell) -> MoEConfig:
    """The layer's settings for a cell."""
    forward, backward = cell["pieces"]
    config = config_of(case_of(cell), dispatch__name=cell["dispatch"], parallel__r=cell["size"].r,
                       parallel__d=forward, parallel__d_backward=backward,
                       parallel__cut=cell["cut"], comm__all_to_all=cell["all_to_all"],
                       comm__collectives=cell["collectives"], experts__compute=cell["compute"],
                       dispatch__send=cell.get("send", "auto"))
    config.experts.precision = cell.get("precision", "ieee")
    config.dispatch.stash_mib = cell.get("stash_mib", 0.0)
    if "slots" in cell:
        case, shards = case_of(cell), cell["size"].shards or 1
        inner, maps = case.hidden // shards, 2 if case.kind == "gated_ffn" else 1
        elements = (maps + 1) * case.width * inner
        if case.bias:
            elements += maps * inner + case.width // shards
        config.experts.store, config.experts.cache_policy = "host", cell["policy"]
        config.experts.cache = str(8 * elements * cell["slots"])
    if "schedule" in cell:
        config.parallel.replicas, config.parallel.schedule = replicas_of(cell), cell["schedule"]
    return config
