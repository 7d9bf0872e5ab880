"""Runs the matrix of waits: a process for every rank, forked from one that has imported all."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

from tests.fake_gpu.cells import Seen, measure
from tests.fake_gpu.matrix import WORLDS, matrix
from tests.preloaded import Server


def measured(places: Sequence[int]) -> list[list[Seen]]:
    """For each of these cells of the matrix what its ranks saw."""
    server = Server("tests.fake_gpu.cells")
    by_world = {}
    for world in WORLDS:
        with tempfile.TemporaryDirectory() as folder:
            done = server.run(world, measure, world, folder, places, timeout_s=400)
        if done.code:
            raise RuntimeError(done.log)
        by_world[world] = iter(zip(*done.results, strict=True))
    return [list(next(by_world[matrix()[place]["size"].world], [Seen(error="not reached")]))
            for place in places]
