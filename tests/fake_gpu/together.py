"""Programs of several ranks under the detector: exchanges in pieces by every algorithm, and what
else runs beside a layer's computations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moe_plugin.comm import LocalComm
from moe_plugin.dispatch import dispatchers
from moe_plugin.routing.pregate import link
from moe_plugin.training.gradients.sync import reduce_experts
from tests.combinations import Cell, all_pairs, name_of
from tests.exactness.cells import traits_of
from tests.exactness.spills import planned, random_planner
from tests.fake_gpu.gpu import CUDA, Stream, cuda
from tests.fake_gpu.harness import group
from tests.fake_gpu.layers import layer_of
from tests.fake_gpu.mutants import TOGETHER, changed
from tests.fake_gpu.packages import installed
from tests.fake_gpu.race_programs import found_by, prepare, rows, train
from tests.fake_gpu.ranks import StreamComm


def ddp(layer: nn.Module, comm: StreamComm, views: bool) -> DistributedDataParallel:
    """A layer in DDP with several buckets. views: gradients are views of them."""
    model = DistributedDataParallel(layer, process_group=comm.group.group, bucket_cap_mb=0.001,
                                    gradient_as_bucket_view=views, init_sync=False)
    model.register_comm_hook(comm, summed_behind)
    return model


def summed_behind(comm, bucket):  # DDP reads annotations as types, which here are words
    """The sum of a bucket, begun on the group's stream; as with NCCL the main stream waits for it
    where DDP takes the results, after all hooks.
    """
    wait, done = comm.start_all_reduce(bucket.buffer()), torch.futures.Future()
    torch.autograd.Variable._execution_engine.queue_callback(wait)
    done.set_result(bucket.buffer())
    return done


class BucketHooks:
    """One bucket of `parameter.main_grad`, as Megatron keeps gradients; hooks take what backward
    has not added there. The last hook of a backward pass begins the sum on the group's stream;
    `step` lets the current stream wait for it.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], comm: StreamComm) -> None:
        self.comm = comm
        self.parameters = [p for p in parameters if p.requires_grad]
        self.flat_N = torch.zeros(sum(p.numel() for p in self.parameters), device=CUDA)
        self.missing, self.wait = len(self.parameters), lambda: self.flat_N
        parts = self.flat_N.split([p.numel() for p in self.parameters])
        for p, part_N in zip(self.parameters, parts, strict=True):
            p.main_grad, p.grad_added_to_main_grad = part_N.view_as(p), False
            p.register_post_accumulate_grad_hook(partial(self._added, part_N.view_as(p)))

    @torch.no_grad()
    def _added(self, view: Tensor, p: nn.Parameter) -> None:
        if not p.grad_added_to_main_grad:
            view.add_(p.grad)
        p.grad = None
        self.missing -= 1
        if not self.missing:
            self.wait: Callable[[], Tensor] = self.comm.start_all_reduce(self.flat_N)

    @torch.no_grad()
    def step(self) -> None:
        """Wait for the sums, and take a step with them."""
        assert not self.missing, "hooks that did not run"
        self.wait()
        for p in self.parameters:
            p.add_(p.main_grad, alpha=-0.01)
            p.grad_added_to_main_grad = False
        self.flat_N.zero_()
        self.missing = len(self.parameters)


# of pieces, forward and backward; by every algorithm that a group of so many ranks has
PIECES = ((2, 0), (1, 2), (3, 2))
ALGORITHMS = {2: ("linear", "native"), 4: ("2dh", "leader")}
ONCE = ("ranks", "nodes")
Program = Callable[[StreamComm], None]


def exchange_cells(world: int) -> list[Cell]:
    """Dispatchers whose rows travel in pieces, with algorithms and numbers of pieces, by pairs."""
    names = [name for name in dispatchers.names()
             if traits_of(name).supports_pieces and not traits_of(name).splits_slots]
    pieces = PIECES if world == 2 else PIECES[2:]
    return all_pairs({"dispatch": names, "all_to_all": ALGORITHMS[world], "pieces": pieces})


def exchanges(cell: Cell, comm: StreamComm, steps: int = 1) -> None:
    """Training steps of a cell."""
    name, (forward, backward) = cell["dispatch"], cell["pieces"]
    factor = {"capacity_factor": 1.25} if traits_of(name).fixed_slots else {}
    train(layer_of(comm, dispatch={"name": name, **factor},
                   comm={"all_to_all": cell["all_to_all"]},
                   parallel={"d": forward, "d_backward": backward}), steps=steps,
          tokens=6 + 2 * comm.rank)


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


def in_ddp(views: bool, comm: StreamComm) -> None:
    """Replicas in torch's DDP, which stay equal although their tokens differ."""
    layer = layer_of(LocalComm())
    train(ddp(layer, comm, views), tokens=6 + 2 * comm.rank)
    mine_N = torch.cat([p.detach().flatten() for p in layer.parameters()]).cpu()
    torch.testing.assert_close(2 * mine_N, comm.group.all_reduce(mine_N.clone()))


def in_buckets(comm: StreamComm) -> None:
    """Replicas whose gradients are summed behind backward by Megatron's hooks."""
    layer = layer_of(LocalComm())
    layer.experts.adds_to_main_grad = True
    train(layer, step=BucketHooks(layer.parameters(), comm).step)


def once(send: str, name: str, comm: StreamComm, spill: str = "never") -> None:
    """Tokens once to each rank or node, in pieces."""
    with planned(random_planner(0)) as plans:
        train(layer_of(comm, dispatch={"name": name, "send": send},
                       parallel={"d": 2, "spill": spill}), steps=1, tokens=6 + 2 * comm.rank)
    assert bool(plans) == (spill != "never"), "no expert was borrowed"


def shared(comm: StreamComm) -> None:
    """Ranks with the same tokens, which share out their slots and gather what comes back."""
    train(layer_of(comm, dispatch={"name": "padded", "capacity_factor": 1.25},
                   parallel={"replicas": 2, "schedule": "s2", "d": 3, "d_backward": 2}), steps=1)


def by_package(name: str, comm: StreamComm) -> None:
    """Rows by the stand-in of a package that sends tokens; then, without gradients, on a stream
    that is not the main one.
    """
    with installed():
        pieces = {"d": 2} if traits_of(name).supports_pieces else {}
        layer = layer_of(comm, dispatch={"name": name}, parallel=pieces, dtype=torch.bfloat16)
        train(layer, steps=1)
        x_TD, main, other = rows(dtype=torch.bfloat16), cuda().current, Stream()
        other.wait_stream(main)
        with torch.no_grad(), cuda().using(other):
            layer(x_TD)
        main.wait_stream(other)


PROGRAMS: dict[str, Program] = {
    "pieces": pieces, "spilled": spilled, "pages": pages, "pre-gated": pre_gated,
    "gradient hooks": hooked, "DDP": partial(in_ddp, False), "DDP, views": partial(in_ddp, True),
    "main_grad in buckets": in_buckets,
    **{f"once to {send}": partial(once, send, "ragged") for send in ONCE},
    **{f"once to {send}, bounded": partial(once, send, "bounded") for send in ONCE},
    **{f"once to {send}, spilled": partial(once, send, "ragged", spill="least_loaded")
       for send in ONCE},
    "slots shared": shared,
    **{name: partial(by_package, name) for name in ("deepep", "deepep_v2", "hybridep", "nccl_ep")}}


def programs(world: int) -> dict[str, Program]:
    """What so many ranks run; `pieces` is among the cells."""
    made: dict[str, Program] = {
        # what one step leaves to the next, two ranks show
        name_of(cell): partial(exchanges, cell,
                               steps=1 + (world == 2 and cell["pieces"] == PIECES[2]))
        for cell in exchange_cells(world)}
    nodes = {name: program for name, program in PROGRAMS.items()
             if name.startswith("once to nodes")}
    if world == 2:  # one node
        return made | {name: program for name, program in PROGRAMS.items()
                       if name != "pieces" and name not in nodes}
    return made | nodes


def together(world: int, folder: str) -> dict[str, list[str]]:
    """What this rank finds in each program, and in the package with each mutant."""
    detector = prepare()
    ranks = group(world, folder, 120)
    found = {name: found_by(detector, lambda program=program: program(StreamComm(ranks)))
             for name, program in programs(world).items()}
    for mutant in TOGETHER[world]:
        with changed(mutant.function, mutant.old, mutant.new):
            found[str(mutant)] = found_by(
                detector, lambda: PROGRAMS[mutant.program](StreamComm(ranks)))  # noqa: B023
    return found
