"""One rank of the exactness matrix on a GPU that computes later."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_plugin import MoELayer, TorchComm
from moe_plugin.comm import Comm, LocalComm, Topology
from moe_plugin.kernels.triton_ops import MODULES
from tests.combinations import Cell
from tests.exactness import cells, harness
from tests.exactness.cells import Size, traits_of
from tests.exactness.harness import RankResult
from tests.exactness.spills import planned, random_planner
from tests.fake_gpu import stand_ins
from tests.fake_gpu.device import CountingDevice, inner, mapped
from tests.fake_gpu.fake import install
from tests.fake_gpu.gpu import CUDA, Stream
from tests.fake_gpu.later import Later, Without
from tests.fake_gpu.layers import ALONE
from tests.fake_gpu.ranks import CountingComm, HostComm
from tests.oracle import direction_of, make_inputs, make_parameters, objective

# what orders nothing is left as it is
_PLAIN: dict[str, Any] = {
    "k": 2, "bias": True, "activation": "gelu", "score": "softmax", "normalize": "none",
    "prioritized": False, "kind": "gated_ffn", "compute": "kernels", "dropout": 0.0,
    "weights_first": False, "rows_computed": "own", "collectives": "native"
}
# by number of ranks: each dispatcher, pages, spilled rows; exchanges over two nodes
FEW = {2: (0, 2, 6, 7), 4: (0, 3)}


@functools.cache
def cells_of_world(world: int) -> list[Cell]:
    """Exchanges that run while rows are computed: every dispatcher with pieces forward, backward
    and both, by every exchange; of even, uneven and empty loads; of whole experts and of cut ones;
    rows that ranks compute for others; rows that backward needs in pages, on the host, too.
    """
    whole, cut = Size(world, 8, None, 1), Size(world, world // 2, None, 2)
    pages = {"stash_mib": 0.02, "stash_host_mib": 1.0}
    if world == 4:
        return [_cell("ragged", whole, (2, 0), "2dh", "uneven"),
                _cell("bounded", cut, (1, 2), "leader", "padding"),
                _cell("padded", whole, (3, 2), "2dh", "starving"),
                _cell("bounded", whole, (3, 2), "2dh", "uneven"),
                _cell("ragged", cut, (1, 2), "leader", "starving", spill="least_loaded"),
                _cell("padded", whole, (2, 0), "leader", "padding", compute="loop")]
    return [_cell("ragged", whole, (2, 3), "linear", "uneven"),
            _cell("ragged", cut, (1, 2), "native", "padding", kind="ffn", compute="loop"),
            _cell("padded", whole, (3, 2), "native", "starving"),
            _cell("padded", whole, (2, 0), "linear", "padding", kind="ffn", compute="loop"),
            _cell("bounded", cut, (3, 2), "linear", "uneven", kind="ffn"),
            _cell("bounded", whole, (1, 2), "native", "starving"),
            _cell("bounded", whole, (2, 0), "native", "uneven", **pages),
            _cell("ragged", whole, (3, 2), "linear", "uneven", spill="least_loaded")]


def _cell(dispatch: str, size: Size, pieces: tuple[int, int], exchange: str, tokens: str,
          **more: Any) -> Cell:
    return {**_PLAIN, "dispatch": dispatch, "size": size, "pieces": pieces, "all_to_all": exchange,
            "tokens": tokens, "cut": traits_of(dispatch).piece_axes[0],
            "factor": 1.0 if dispatch == "padded" else None, **more}


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
# those with which ranks still agree on sizes, and none hangs
OF_RANKS = tuple(FAULTS)[:3]
MANY = range(20)  # seeds of which one must show a fault


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


def run(world: int, places: Sequence[int], seeds: Sequence[int],
        folder: str) -> tuple[list[Any], dict[str, int | None]]:
    """For cells of this number of ranks, by their places, what this rank computed under the first
    seed, and the seeds that gave anything else; or an error. And for each of `OF_RANKS` the first
    seed that shows it in the first cell, on any rank; None: none does.
    """
    torch.set_num_threads(1)
    later = Without()
    install(later, later)
    stand_ins.install()
    comm, done = _group(world, folder), []
    matrix = [cells_of_world(world)[place] for place in places]
    try:
        for cell in matrix:
            with _layer(cell, comm, later) as layer:
                results = [_step(cell, layer, later, seed) for seed in seeds]
            done.append((results[0], [seed for seed, one in zip(seeds, results, strict=True)
                                      if not _same(one, results[0])]))
        with _layer(matrix[0], comm, later) as layer:
            shown = {fault: _shown_by(fault, matrix[0], layer, later, done[0][0])
                     for fault in OF_RANKS}
    except BaseException:  # noqa: BLE001 - handed to the test
        return [*done, traceback.format_exc()], {}
    return done, shown


def _shown_by(fault: str, cell: Cell, layer: MoELayer, later: Without,
              want: RankResult) -> int | None:
    for seed in MANY:
        with later.without(FAULTS[fault]):
            wrong = not _same(_step(cell, layer, later, seed), want)
        if layer.comm.hosts.agree_max([float(wrong)])[0]:
            return seed
    return None


def alone(seeds: Sequence[int]) -> tuple[dict[str, tuple[int, list[int]]], dict[str, Any]]:
    """For every program of one rank the number of its results, and the seeds that gave others than
    a GPU that computes at once. And for each of `FAULTS` a program and a seed that show it; None:
    none does.
    """
    torch.set_num_threads(1)
    later = Without()
    gpu = install(None)
    stand_ins.install()
    want = {name: _values(program, later) for name, program in ALONE.items()}
    gpu.executor, gpu.observers = later, [later]
    found = {name: (len(want[name]), [seed for seed in seeds
                                      if not _gives(want[name], program, later, seed)])
             for name, program in ALONE.items()}
    shown: dict[str, Any] = {}
    for fault, missing in FAULTS.items():
        with later.without(missing):
            shown[fault] = next(
                ((name, seed) for seed in MANY for name, program in ALONE.items()
                 if not _gives(want[name], program, later, seed)), None)
    return found, shown


def _gives(want: list[Tensor], program: Callable[[Comm], list[Tensor]], later: Without,
           seed: int) -> bool:
    later.restart(seed)
    try:
        got = _values(program, later)
    except (RuntimeError, IndexError, ValueError):
        if later.missing is None:
            raise
        return False
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


@contextlib.contextmanager
def _layer(cell: Cell, comm: Comm, later: Later) -> Iterator[MoELayer]:
    """The layer of a cell on the fake GPU, which is there inside."""
    case = cells.case_of(cell)
    config = cells.settings_of(cell)
    config.parallel.mode, config.parallel.spill = "fixed", cell.get("spill", "never")
    config.dispatch.stash_host_mib = cell.get("stash_host_mib", 0.0)
    with contextlib.ExitStack() as inside:
        if "spill" in cell:
            inside.enter_context(planned(random_planner(0)))
        inside.enter_context(CountingDevice())
        layer = MoELayer(config, comm, dtype=torch.float32, device=CUDA)
        harness.load(layer, make_parameters(case, torch.float32), replace(case, world=comm.size))
        later.queue.finish()
        yield layer


def _step(cell: Cell, layer: MoELayer, later: Later, seed: int) -> RankResult:
    """Forward and backward on this rank, in another order."""
    later.restart(seed)
    case = cells.case_of(cell)
    xs, masks = make_inputs(case, torch.float32)
    group = layer.comm.rank * case.world // layer.comm.size
    x = xs[group].to(CUDA).requires_grad_()
    mask = None if masks[group] is None else masks[group].to(CUDA)
    direction = direction_of(x, group).to(CUDA)  # before: a copy that the host waits for
    out = layer(x, mask)
    objective(out.output, out.losses, group, direction).backward()
    grads = {"router": layer.router.weight_ED.grad, **harness.expert_grads(layer)}
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
