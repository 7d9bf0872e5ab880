"""What the host of a GPU waits for, seen without a GPU: every dispatcher, layout, exchange, router
and compute strategy on a device that notes it (`device.py`), and the page that says so.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence

import pytest

from moe_plugin.comm import algorithms
from moe_plugin.dispatch import dispatchers
from moe_plugin.experts import strategies
from moe_plugin.routing import routers
from moe_plugin.routing.losses import losses
from moe_plugin.routing.routers.balanced import LOOK, MOST_ROUNDS
from tests.combinations import Cell, every_value, name_of
from tests.fake_gpu import page
from tests.fake_gpu.cells import Seen, auctions, measure
from tests.fake_gpu.events import Event
from tests.fake_gpu.harness import on_ranks
from tests.fake_gpu.matrix import BASE_READS, WORLDS, matrix, reads, reads_late, waits_of_hosts
from tests.fake_gpu.page import STATEMENTS

pytest.importorskip("triton", reason="triton is not installed")
CLOSE, ROUNDED = 2e-5, 4e-2  # in float32; in bfloat16


def measured(places: Sequence[int]) -> list[list[Seen]]:
    """For each of these cells of the matrix what its ranks saw."""
    by_world = {}
    for world in WORLDS:
        with tempfile.TemporaryDirectory() as folder:
            results = on_ranks(world, measure, world, folder, places)
        by_world[world] = iter(zip(*results, strict=True))
    return [list(next(by_world[matrix()[place]["size"].world], [Seen(error="not reached")]))
            for place in places]


def wrong_in(cell: Cell, seen: Seen) -> list[str]:
    """What one rank saw that must not be."""
    if seen.error:
        return [seen.error]
    found, wanted = kinds(seen.forward).count("read"), wanted_reads(cell, seen)
    wrong = [f"{found} reads, must be {wanted}"] * (found != wanted)
    wrong += ["a read after rows left"] * (read_late(seen) and not reads_late(cell))
    hosts = tuple(kinds(events).count("hosts") for events in (seen.forward, seen.backward))
    wrong += [f"hosts wait {hosts}, must be {waits_of_hosts(cell)}"] * (
        hosts != waits_of_hosts(cell))
    wrong += [f"{seen.apart:.1g} from the layer on the CPU"] * (not seen.apart <= close(cell))
    wrong += ["no expert was borrowed"] * ("spill" in cell and not seen.loans)
    wrong += [f"in backward: {e}" for e in seen.backward if e.kind in ("read", "pageable")]
    wrong += [f"{e}" for e in seen.forward if e.kind == "pageable"]
    return wrong + [f"{e}" for e in seen.forward if e.kind == "read" and wrong]


def kinds(events: list[Event]) -> list[str]:
    return [event.kind for event in events]


def wanted_reads(cell: Cell, seen: Seen) -> int:
    """Reads of the layer, of the block before it, and of its router."""
    of_router = BASE_READS + seen.looks if cell.get("router") == "base" else 0
    return reads(cell) + of_router + ("pre_gate" in cell)


def read_late(seen: Seen) -> bool:
    """Whether the host read the device after rows had left."""
    found = kinds(seen.forward)
    return "exchange" in found and "read" in found[found.index("exchange"):]


def close(cell: Cell) -> float:
    """How far from the layer on the CPU a layer may be."""
    return ROUNDED if cell.get("dtype") == "bfloat16" else CLOSE


@pytest.mark.parametrize("all_cells", [
    False, pytest.param(True, marks=pytest.mark.slow)], ids=["every value", "all"])
def test_what_the_host_waits_for(all_cells: bool) -> None:
    """All of them: `bash scripts/test.sh --all tests/fake_gpu`, about ten minutes."""
    places = range(len(matrix())) if all_cells else every_value(matrix(), along=None)
    seen, wrong = measured(places), []
    for cell, ranks in zip((matrix()[place] for place in places), seen, strict=True):
        for rank, one in enumerate(ranks):
            name = f"{name_of(cell)}, rank {rank}"
            wrong += [f"{name}: {what}" for what in wrong_in(cell, one)]
    assert not wrong, "\n".join(wrong)


def test_looks_at_auctions() -> None:
    """The host reads in each check, and nothing else; many rounds take more checks than few."""
    [found] = on_ranks(1, auctions)
    assert all(reads == looks for reads, looks in found), found
    assert found[0] == (0, 0) and 2 <= found[1][0] < found[-1][0] <= MOST_ROUNDS // LOOK, found


@pytest.mark.fast
def test_a_cell_shows_each_statement() -> None:
    said = " ".join(page.text().split())
    assert not [phrase for phrase in STATEMENTS if phrase not in said]
    assert not [phrase for phrase, shows in STATEMENTS.items() if not any(map(shows, matrix()))]
    bullets = [" ".join(part.split()) for part in page.HEAD.split("\n- ")[1:]]
    assert not [each for each in bullets if not any(phrase in each for phrase in STATEMENTS)]


@pytest.mark.fast
def test_every_line_of_a_table_is_of_a_cell() -> None:
    """And nothing that is registered is left out but what needs a package and a GPU."""
    lines = [line for line in page.text().splitlines()
             if line.startswith("| `") and not line.endswith("waits |")]
    assert not [line for line in lines if not any(c.isdigit() for c in line.split("|", 2)[2])]
    shown = {name for line in lines for name in re.findall(r"`(\w+)`", line)}
    names = {*dispatchers.names(), *strategies.names(), *routers.names()} - {
        "deepep", "deepep_v2", "hybridep", "nccl_ep"}
    assert names <= shown
    assert {cell["all_to_all"] for cell in matrix()} == set(algorithms.names())
    assert {name for cell in matrix() for name in cell.get("losses", ())} == set(losses.names())


@pytest.mark.fast
def test_the_page_says_so() -> None:
    assert page.text() == page.PAGE.read_text(encoding="utf-8"), (
        f"{page.PAGE.name} is out of date; run: python -m tests.fake_gpu")
