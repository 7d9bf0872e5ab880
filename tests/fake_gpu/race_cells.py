"""The cells of the matrix of waits under the detector, on the ranks that each is of."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from moe_plugin.comm import Comm, LocalComm
from moe_plugin.planner.cluster import load_cluster
from moe_plugin.tuning.default_hardware import Calibration
from tests.combinations import Cell
from tests.exactness.spills import planned, random_planner
from tests.fake_gpu.cells import ROOT, CellCall, Seen
from tests.fake_gpu.gpu import CUDA
from tests.fake_gpu.harness import group
from tests.fake_gpu.matrix import config_of, matrix
from tests.fake_gpu.race_programs import found_by, prepare
from tests.fake_gpu.ranks import StreamComm


def found_in(world: int, folder: str, places: Sequence[int]) -> dict[int, list[str]]:
    """What this rank finds, by the place of a cell that has so many ranks."""
    detector = prepare()
    ranks = group(world, folder, 120) if world > 1 else None
    if ranks is not None:  # `auto` chooses by the model, without trials
        ranks.state.get(Calibration).cluster = load_cluster(
            str(ROOT / "configs" / "clusters" / "emulated.yaml"))
    return {place: found_by(detector, lambda place=place: _steps(
        matrix()[place], LocalComm() if ranks is None else StreamComm(ranks)))
        for place in places if matrix()[place]["size"].world == world}


def _steps(cell: Cell, comm: Comm) -> None:
    """What a first step leaves to the next counts, too."""
    with contextlib.ExitStack() as inside:
        if "spill" in cell:
            inside.enter_context(planned(random_planner(0)))
        call = CellCall(cell, config_of(cell), comm, CUDA)
        for _ in range(2):
            call.run(Seen())
