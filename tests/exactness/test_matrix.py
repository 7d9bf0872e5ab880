"""The exactness matrix on the simulated group: every registered choice against one dense reference.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_plugin.comm import Topology, algorithms, run_simulated
from moe_plugin.comm.base import collective_kinds as collectives
from moe_plugin.dispatch import dispatchers
from moe_plugin.experts import expert_kinds, strategies
from tests.combinations import Cell, all_pairs, every_value, name_of
from tests.exactness import cells
from tests.exactness.harness import (
    RankResult,
    compare,
    config_of,
    dropping_by_value,
    naming,
    reference,
    run_rank,
)
from tests.kernels.compiled_or_not import compiled
from tests.kernels.row_rules import RULES, rows_computed
from tests.oracle import ACTIVATIONS, Case

MATRIX = [cell for dispatch in dispatchers.names()
          for cell in cells.cells_of(dispatch) + cells.once_cells(dispatch)]
SAME_TOKENS = [cell for dispatch in cells.own_tokens() for cell in cells.parm_cells(dispatch)]
ROUNDED = [cell for name in dispatchers.names()
           for cell in cells.fp8_cells(name) + cells.block_cells(name)]
EVERY = 20  # of so many cells one runs with the fast tests
LOOSE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
# of the norm, as docs/precision.md says: to the reference, and to one that rounds as the layer does
# (of MXFP8 and NVFP4 without the rounding in weight gradients, whose blocks are rows of a layout)
OFF = {"fp8": (0.25, 0.1), "mxfp8": (0.25, 0.2), "nvfp4": (0.75, 0.3),
       "fp8_blockwise_hybrid": (0.3, 0.25)}


def results_of(cell: Cell) -> list[RankResult]:
    """What the layer computes for a cell, dropout as in the reference; two ranks per node, so that
    hierarchical exchanges have work.
    """
    case, config = cells.case_of(cell), cells.settings_of(cell)
    world = cell["size"].world
    with rows_computed(cell["rows_computed"]):
        return run_simulated(world, lambda comm: run_rank(case, comm, config),
                             topology=Topology.uniform(world, 2))


def run_cell(cell: Cell) -> None:
    """One cell against the reference."""
    case = cells.case_of(cell)
    with naming(name_of(cell)), dropping_by_value():
        compare(case, results_of(cell), reference(case))


def lanes(some: list[Cell], fast: bool = False) -> list[Any]:
    """Every value, and every 20th cell, with the usual tests; the others with the slow ones."""
    usual = {*every_value(some), *range(0, len(some), EVERY)}
    return [pytest.param(cell, marks=[pytest.mark.fast] if fast and number % EVERY == 0 else
                         [] if number in usual else [pytest.mark.slow])
            for number, cell in enumerate(some)]


@pytest.mark.parametrize("cell", lanes(MATRIX, fast=True), ids=name_of)
def test_cell(cell: Cell) -> None:
    run_cell(cell)


@pytest.mark.parametrize("cell", lanes(SAME_TOKENS), ids=name_of)
def test_cell_of_ranks_with_the_same_tokens(cell: Cell) -> None:
    run_cell(cell)


@pytest.mark.parametrize("cell", lanes(ROUNDED), ids=name_of)
def test_cell_of_rounded_products(cell: Cell) -> None:
    """The router's gradient is that of the rounded products: where the weights of a token sum to a
    constant, it is a difference between experts, and rounding changes it by any amount.

    One rank computes the gradient of a weight as <a, round(g) round(W)^T> from the activation a,
    the reference as <g, round(a) round(W)>. These numbers are 1 % apart, and the router's gradient,
    in which most of them cancels, up to 34 %.
    """
    case, rounded = cells.case_of(cell), cells.rounded(cell)
    off, off_rounded = OFF[cell["precision"]]
    constant = cell["k"] > 1 and cell["normalize"] != "none"
    with naming(name_of(cell)), dropping_by_value():
        results, answer = results_of(cell), reference(rounded)
        compare(case, results, reference(case), of_norm=off, router=False)
        compare(case, results, answer, of_norm=off_rounded, of_router=0.4 if constant else None)
    if cell["precision"] != "fp8":  # in every layout the same codes
        copies = len(results) // case.world
        for rank, result in enumerate(results):
            want_TD = answer.outputs[rank // copies]
            same_T = torch.isclose(result.output, want_TD, rtol=1e-6, atol=1e-6).all(1)
            # but where the last bit of an activation, which processors differ in, decides a code
            assert int((~same_T).sum()) <= max(2, same_T.numel() // 5)


@pytest.mark.parametrize("cell", [cell for name in dispatchers.names()
                                  for cell in cells.stored_cells(name)], ids=name_of)
def test_cell_with_experts_in_host_memory(cell: Cell) -> None:
    run_cell(cell)


def test_all_that_is_registered_is_in_the_matrix() -> None:
    for setting, registry in (("kind", expert_kinds), ("compute", strategies),
                              ("all_to_all", algorithms), ("collectives", collectives)):
        for dispatch in dispatchers.names():
            seen = {cell[setting] for cell in MATRIX if cell["dispatch"] == dispatch}
            assert seen >= set(registry.names()), (dispatch, setting)
    schedules = {(cell["dispatch"], cell["schedule"]) for cell in SAME_TOKENS}
    assert {name for name, _ in schedules} == set(cells.own_tokens())
    assert {schedule for _, schedule in schedules} == {"s1", "s2"}


def test_a_layout_for_every_r() -> None:
    for world, experts, shards in cells.SIZES:
        parts = shards or max(1, world // experts)
        divisors = {0, *(r for r in range(1, parts + 1) if parts % r == 0)}
        for dispatch in dispatchers.names():
            traits = cells.traits_of(dispatch)
            found = {size.r for size in cells.layouts(dispatch, [(world, experts, shards)])}
            one = traits.single_layout or traits.splits_slots
            assert found == ({None} if one else {1} if world == 1 else divisors), dispatch


EVALUATED = all_pairs({
    "dispatch": cells.own_tokens(), "compute": ["auto", *strategies.names()], "world": [1, 2],
    "kind": expert_kinds.names(), "dropout": [0.0, 0.3], "weights_first": [False, True]
})


@pytest.mark.parametrize("cell", EVALUATED, ids=name_of)
def test_evaluation_has_no_dropout(cell: Cell) -> None:
    world, dispatch = cell["world"], cell["dispatch"]
    factor = 0.0 if cells.traits_of(dispatch).fixed_slots else None
    case = Case(world, 4, 2, [6, 3][:world], None, factor, cell["kind"],
                weights_first=cell["weights_first"])
    config = config_of(case, dispatch__name=dispatch, experts__compute=cell["compute"],
                       experts__dropout=cell["dropout"])
    results = run_simulated(world, lambda comm: run_rank(case, comm, config, training=False))
    with naming(name_of(cell)):
        compare(case, results, reference(case))


PRECISIONS = all_pairs({
    "dtype": list(LOOSE), "dispatch": cells.own_tokens(), "compute": strategies.names(),
    "world": [1, 2, 4], "kind": expert_kinds.names(), "router_fp32": [False, True],
    "weights_first": [False, True], "bias": [False, True], "activation": list(ACTIVATIONS),
    "recompute": [False, True], "rows_computed": list(RULES), "compiled": [False, True]
})


@pytest.mark.parametrize("cell", PRECISIONS, ids=name_of)
def test_lower_precision(cell: Cell) -> None:
    """A seed whose routing does not hinge on rounding: the reference routes the same rounded inputs
    in float64.
    """
    world, dtype, dispatch = cell["world"], cell["dtype"], cell["dispatch"]
    factor = 1.0 if cells.traits_of(dispatch).fixed_slots else None
    case = Case(world, 4, 2, [6, 0, 4, 3][:world], None, factor, cell["kind"], seed=3,
                activation=cell["activation"], bias=cell["bias"],
                router_fp32=cell["router_fp32"], weights_first=cell["weights_first"])
    config = config_of(case, dispatch__name=dispatch, experts__compute=cell["compute"],
                       experts__recompute_activation=cell["recompute"])
    with rows_computed(cell["rows_computed"]), compiled(cell["compiled"]):
        results = run_simulated(world, lambda comm: run_rank(case, comm, config, dtype),
                                topology=Topology.uniform(world, 2))
    with naming(name_of(cell)):
        compare(case, results, reference(case, dtype), rtol=LOOSE[dtype], atol=LOOSE[dtype])
