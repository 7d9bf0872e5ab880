"""One rank of the exactness matrix on a GPU that computes later."""

from __future__ import annotations

import contextlib
import importlib
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo  # ranks are forked from a process that has imported all
import torch.distributed as dist
from torch import Tensor

from moe_plugin import MoELayer, TorchComm
from moe_plugin.comm import Comm, LocalComm, Topology
from moe_plugin.kernels.triton_ops import MODULES
from tests.combinations import Cell
from tests.exactness import cells, harness
from tests.exactness.harness import RankResult
from tests.exactness.spills import planned, random_planner
from tests.lazy.later import Later, Without
from tests.lazy.matrix import cells_of_world
from tests.oracle import direction_of, make_inputs, make_parameters, objective
from tests.streams.fake import install
from tests.streams.gpu import CUDA, Stream
from tests.streams.programs import ALONE
from tests.streams.seen import Executor
from tests.waits import stand_ins
from tests.waits.device import CountingDevice, inner, mapped
from tests.waits.ranks import CountingComm, HostComm

for _module in {*MODULES.values()}:
    importlib.import_module(f"moe_plugin.kernels.gpu.{_module}")
TIMEOUT_S = 60.0
# what is left out of what orders streams, by name: each must lead to wrong numbers
FAULTS: dict[str, Callable[[str, Stream], bool]] = {
    "the side stream waits for nothing":
        lambda what, stream: what == "stream_waits" and stream.cuda_stream > 0,
    "the main stream waits for nothing":
        lambda what, stream: what == "stream_waits" and stream.cuda_stream == 0,
    "no other stream is recorded": lambda what, stream: what == "used_by",
    "the host waits for nothing": lambda what, stream: what == "reach",
}
# those with which ranks still agree on sizes, and none waits for ever
OF_RANKS = tuple(FAULTS)[:3]


class LaterComm(CountingComm):
    """Ranks whose hosts have a group of their own, as with NCCL: what they tell each other does not
    mix with what the device does later.
    """

    def __init__(self, group: TorchComm, on_hosts: TorchComm) -> None:
        super().__init__(group)
        self.on_hosts = HostComm(on_hosts.group)

    def subgroup(self, ranks: Sequence[int]) -> LaterComm | None:
        made, hosts = self.group.subgroup(ranks), self.on_hosts.subgroup(ranks)
        return None if made is None or hosts is None else LaterComm(made, hosts)


def run(world: int, seeds: Sequence[int], faults: Sequence[str], folder: str) -> list[Any]:
    """For every cell of this number of ranks, and then for the first cell with each fault: what
    this rank computed under the first seed, and the seeds that gave anything else; or an error.
    """
    torch.set_num_threads(1)
    later = Without()
    install(later, later)
    stand_ins.install()
    comm = _group(world, folder)
    done: list[Any] = []
    cells = cells_of_world(world)
    for cell, fault in [*((cell, None) for cell in cells), *((cells[0], name) for name in faults)]:
        try:
            done.append(_run(cell, seeds, comm, later, fault))
        except BaseException:  # noqa: BLE001 - handed to the test
            done.append(traceback.format_exc())
            break  # other ranks may wait for this one
    return done


def alone(seeds: Sequence[int], faults: Sequence[str]) -> dict[str, tuple[int, list[int]]]:
    """For every program of one rank, and for all with each fault: of how many tensors the seeds are
    that gave other values than a GPU that computes at once, or ended in an error.
    """
    torch.set_num_threads(1)
    later = Without()
    gpu = install(None, later)
    stand_ins.install()
    found: dict[str, tuple[int, list[int]]] = {}
    for name, program in ALONE.items():
        gpu.executor, gpu.observers = Executor(), []
        want = _values(program, later)
        gpu.executor, gpu.observers = later, [later]
        for fault in (None, *faults):
            wrong = [seed for seed in seeds if not _gives(want, program, later, seed, fault)]
            key = name if fault is None else fault
            found[key] = len(want), [*found.get(key, (0, []))[1], *wrong]
    return found


def _gives(want: list[Tensor], program: Callable[[Comm], list[Tensor]], later: Without, seed: int,
           fault: str | None) -> bool:
    later.restart(seed)
    later.missing = FAULTS.get(fault or "")
    try:
        got = _values(program, later)
    except (RuntimeError, IndexError, ValueError):
        if fault is None:
            raise
        return False
    finally:
        later.missing = None
    return len(got) == len(want) and all(map(torch.equal, got, want))


def _values(program: Callable[[Comm], list[Tensor]], later: Later) -> list[Tensor]:
    torch.manual_seed(0)
    with CountingDevice():
        made = program(LocalComm())
        later.queue.finish()
    return [x.clone() for x in inner([x.detach() for x in made])]


def _group(world: int, folder: str) -> Comm:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", world_size=world,
                            rank=int(os.environ["RANK"]), timeout=timedelta(seconds=TIMEOUT_S))
    hosts, device = (TorchComm(dist.new_group(), TIMEOUT_S) for _ in range(2))
    for each in (hosts, device):
        each.prepare(Topology.uniform(world, 2))
    return LaterComm(device, hosts)


def _run(cell: Cell, seeds: Sequence[int], comm: Comm, later: Without,
         fault: str | None) -> tuple[RankResult, list[int]]:
    case = cells.case_of(cell)
    with contextlib.ExitStack() as inside:
        if "spill" in cell:
            inside.enter_context(planned(random_planner(0)))
        inside.enter_context(CountingDevice())
        later.restart(-1)
        config = cells.settings_of(cell)
        if "spill" in cell:
            config.parallel.spill = cell["spill"]
        config.dispatch.stash_host_mib = cell.get("stash_host_mib", 0.0)
        config.parallel.mode = "fixed"
        layer = MoELayer(config, comm, dtype=torch.float32, device=CUDA)
        harness.load(layer, make_parameters(case, torch.float32), replace(case, world=comm.size))
        later.restart(-1)
        later.missing = FAULTS.get(fault or "")
        results = []
        for seed in seeds:
            later.restart(seed)
            results.append(_step(cell, layer, later))
        later.missing = None
    return results[0], [seed for seed, one in zip(seeds, results, strict=True)
                        if not _same(one, results[0])]


def _step(cell: Cell, layer: MoELayer, later: Later) -> RankResult:
    """Forward and backward on this rank."""
    case = cells.case_of(cell)
    xs, masks = make_inputs(case, torch.float32)
    group = layer.comm.rank * case.world // layer.comm.size
    x = xs[group].to(CUDA).requires_grad_()
    mask = None if masks[group] is None else masks[group].to(CUDA)
    direction = direction_of(x, group).to(CUDA)  # before: a copy that the host waits for
    out = layer(x, mask)
    objective(out.output, out.losses, group, direction).backward()
    grads = {name: getattr(layer.experts, attribute).grad
             for name, (attribute, _) in harness.NAMES.items()
             if getattr(layer.experts, attribute, None) is not None}
    grads["router"] = layer.router.weight_ED.grad
    for p in layer.parameters():
        p.grad = None
    later.queue.finish()
    return RankResult(*mapped(inner((out.output.detach(), {n: v.detach() for n, v
                                                           in out.losses.items()}, x.grad, grads)),
                              torch.Tensor.clone), out.stats.as_dict())


def _same(one: RankResult, other: RankResult) -> bool:
    pairs = [(one.output, other.output), (one.input_grad, other.input_grad),
             *((one.losses[n], other.losses[n]) for n in one.losses),
             *((one.grads[n], other.grads[n]) for n in one.grads)]
    return all(torch.equal(a, b) for a, b in pairs)
