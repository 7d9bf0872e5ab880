"""Programs of several ranks under the detector: exchanges in pieces by every algorithm, and what
else runs beside a layer's computations.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch._dynamo  # ranks are forked from a process that has imported it, and Triton
import torch.distributed as dist
import triton  # noqa: F401

from moe_plugin.comm import LocalComm, Topology, TorchComm
from moe_plugin.dispatch import dispatchers, token_exchange
from moe_plugin.gradients.sync import reduce_experts
from moe_plugin.pregate import link
from tests.combinations import Cell, all_pairs, name_of
from tests.exactness.cells import traits_of
from tests.exactness.spills import planned, random_planner
from tests.races.changed import changed
from tests.races.mutants import TOGETHER
from tests.races.programs import found_by, prepare, train
from tests.races.ranks import StreamComm, device_buffer
from tests.streams.programs import layer_of

FAKE_DEEPEP = str(Path(__file__).parents[1] / "fake_deepep")
# of pieces, forward and backward; by every algorithm that a group of so many ranks has
PIECES = ((2, 0), (1, 2), (3, 2))
ALGORITHMS = {2: ("linear", "native"), 4: ("2dh", "leader")}
Program = Callable[[StreamComm], None]


def exchange_cells(world: int) -> list[Cell]:
    """Dispatchers whose rows travel in pieces, with algorithms and numbers of pieces, by pairs."""
    names = [name for name in dispatchers.names()
             if traits_of(name).supports_pieces and not traits_of(name).splits_slots]
    pieces = PIECES if world == 2 else PIECES[2:]
    return all_pairs({"dispatch": names, "all_to_all": ALGORITHMS[world], "pieces": pieces})


def exchanges(cell: Cell, comm: StreamComm) -> None:
    """Training steps of a cell."""
    name, (forward, backward) = cell["dispatch"], cell["pieces"]
    factor = {"capacity_factor": 1.25} if traits_of(name).fixed_slots else {}
    train(layer_of(comm, dispatch={"name": name, **factor},
                   comm={"all_to_all": cell["all_to_all"]},
                   parallel={"d": forward, "d_backward": backward}), tokens=6 + 2 * comm.rank)


def pieces(comm: StreamComm) -> None:
    """Exchanges of rows beside the experts, for mutants."""
    exchanges({"dispatch": "ragged", "all_to_all": "linear", "pieces": (3, 2)}, comm)


def spilled(comm: StreamComm) -> None:
    """Rows that other ranks compute, whose experts' weights travel, too."""
    with planned(random_planner(0)) as plans:
        train(layer_of(comm, parallel={"d": 2, "spill": "least_loaded"}))
    assert plans, "no expert was borrowed"


def pages(comm: StreamComm) -> None:
    """Bounded rows that wait for backward in pages, of the device and of the host."""
    train(layer_of(comm, dispatch={"name": "bounded", "stash_mib": 0.07, "stash_host_mib": 1.0},
                   parallel={"d": 2}), tokens=64)


def pre_gated(comm: StreamComm) -> None:
    """Three layers, each choosing for the next: only the first one makes the host wait."""
    layers = torch.nn.ModuleList([layer_of(comm, router={"pre_gate": 1}, parallel={"d": 2})
                                  for _ in range(3)])
    link(layers)
    train(*layers)


def hooked(comm: StreamComm) -> None:
    """Replicas whose gradients are averaged behind backward, in buckets."""
    layers = torch.nn.ModuleList([layer_of(LocalComm()) for _ in range(2)])
    assert reduce_experts(layers, comm, bucket_bytes=512)
    train(*layers)


def deep_ep(comm: StreamComm) -> None:
    """Rows by DeepEP's stand-in."""
    with ExitStack() as inside:
        inside.enter_context(patch.object(sys, "path", [FAKE_DEEPEP, *sys.path]))
        package = __import__("deep_ep")
        inside.enter_context(patch.object(package, "Buffer", device_buffer(package.Buffer)))
        inside.enter_context(patch.object(token_exchange, "TorchComm", StreamComm))
        train(layer_of(comm, dispatch={"name": "deepep"}, parallel={"d": 2}, dtype=torch.bfloat16))


PROGRAMS: dict[str, Program] = {
    "pieces": pieces, "spilled": spilled, "pages": pages, "pre-gated": pre_gated,
    "gradient hooks": hooked, "deepep": deep_ep}


def programs(world: int) -> dict[str, Program]:
    """What so many ranks run; `pieces` is among the cells."""
    made: dict[str, Program] = {name_of(cell): partial(exchanges, cell)
                                for cell in exchange_cells(world)}
    if world == 2:
        made |= {name: program for name, program in PROGRAMS.items() if name != "pieces"}
    return made


def group(world: int, folder: str) -> TorchComm:
    """This rank's group of gloo, in nodes of two ranks."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", world_size=world,
                            rank=int(os.environ["RANK"]), timeout=timedelta(seconds=120))
    made = TorchComm(timeout_s=120)
    made.prepare(Topology.uniform(world, 2))
    return made


def together(world: int, folder: str) -> dict[str, list[str]]:
    """What this rank finds in each program; of two ranks, in the package with each mutant, too."""
    detector = prepare()
    ranks = group(world, folder)
    found = {name: found_by(detector, lambda program=program: program(StreamComm(ranks)))
             for name, program in programs(world).items()}
    for mutant in TOGETHER if world == 2 else ():
        with changed(mutant.function, mutant.old, mutant.new):
            found[str(mutant)] = found_by(
                detector, lambda: PROGRAMS[mutant.program](StreamComm(ranks)))  # noqa: B023
    return found
