"""The cells of the matrix of waits, what each may wait for, and one rank's run of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton  # noqa: F401  (ranks are forked from a process that has imported it)
from torch import Tensor

from moe_plugin import MoELayer, TorchComm
from moe_plugin.comm import Comm, LocalComm, Topology
from moe_plugin.config import MoEConfig, from_dict, to_dict
from moe_plugin.dispatch import dispatchers
from moe_plugin.planner.cluster import load_cluster
from moe_plugin.records import TokenInfo
from moe_plugin.routing import routers
from moe_plugin.routing.pregate import link
from moe_plugin.tuning.default_hardware import Calibration
from tests.combinations import Cell, all_pairs
from tests.exactness import cells
from tests.exactness.harness import load_experts
from tests.exactness.spills import planned, random_planner
from tests.oracle import make_inputs, make_parameters
from tests.routing.references import reference_of
from tests.waits import stand_ins
from tests.waits.device import EVENTS, CountingDevice, Event, OnDevice, inner, register
from tests.waits.ranks import CountingComm

ROOT = Path(__file__).resolve().parents[2]
WORLDS = (1, 2, 4)
# ranks, experts, shards; an exchange over nodes needs two of two ranks, all else two ranks
ALONE, PAIR, NODES = (1, 8, None), ((2, 8, None), (2, 1, None)), ((4, 8, None), (4, 2, None))
# how experts are computed where the device alone may know the counts
FROM_DEVICE = ("auto", "kernels", "grouped")
BASE_READS = 2  # which tokens are real; and now and then whether the auction is over
COMMON: dict[str, Any] = {
    "factor": (None, 1.0, 0.0, -1.0), "tokens": ("even", "uneven", "padding"), "k": (2,),
    "kind": ("gated_ffn",), "bias": (True,), "activation": ("gelu",), "score": ("softmax",),
    "normalize": ("none",), "prioritized": (False,), "dropout": (0.0,), "weights_first": (False,),
    "pieces": ((1, 0), (2, 0), (1, 2)), "collectives": ("native", "forest"),
    "rows_computed": ("own",)
}

# over nodes: waits of the dispatchers are seen on two ranks, those of exchanges here
_FEW: dict[str, Any] = {"tokens": ("uneven",), "factor": (None, 1.0), "pieces": ((1, 0), (2, 0))}


@dataclass
class Seen:
    """What one rank saw in one cell: events of a call and of its backward pass.

    error: of the run; empty: none. loans: experts that ranks borrowed. apart: the largest
    difference to the same layer on the CPU,
    relative to the largest value.
    """

    forward: list[Event] = field(default_factory=list)
    backward: list[Event] = field(default_factory=list)
    error: str = ""
    loans: int = 0
    apart: float = 0.0


@functools.cache
def matrix() -> list[Cell]:
    """Every dispatcher by pairs with every layout, exchange and compute strategy, and every router.
    """
    return [cell for name in dispatchers.names()
            for cell in (*_alone(name), *_together(name), *_spilling(name))] + [
                *_sharing(), *_pre_gated(), *_routed()]


def _alone(dispatch: str) -> list[Cell]:
    # a rank alone sends nothing: dispatchers differ in whether they make slots
    more = {} if dispatch in ("ragged", "padded") else {
        "compute": ("kernels",), "tokens": ("padding",), "pieces": ((1, 0),)}
    return cells.cells_of(dispatch, [ALONE], **COMMON | more, all_to_all=("linear",))


def _together(dispatch: str) -> list[Cell]:
    traits = cells.traits_of(dispatch)
    compute = ("kernels", "grouped") if traits.bounded else ("kernels", "grouped", "loop")
    factors = (None, 1.0) if traits.bounded else COMMON["factor"]  # which have no part in pages
    if not traits.cuts:  # rows go by other collectives, or by one exchange
        return cells.cells_of(dispatch, PAIR, **COMMON | {
            "all_to_all": ("linear",), "compute": ("kernels",), "tokens": ("uneven",)})
    nodes = {"size": [size for size in cells.layouts(dispatch, NODES) if size.r != 0],
             "all_to_all": ("2dh", "leader", "auto"), "compute": ("kernels",),
             "cut": traits.cuts_by[:1], **_FEW}
    return [*cells.cells_of(dispatch, PAIR, **COMMON | {
        "factor": factors, "compute": compute, "all_to_all": ("linear",)}),
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
    """Every router, with and without slots."""
    pairs = all_pairs({
        "router": routers.names(), "dispatch": ["ragged", "padded"],
        "size": [cells.Size(1, 8, None, 1), cells.Size(2, 8, None, 1)]
    })
    return [{"factor": 1.0 if pair["dispatch"] == "padded" else None, "tokens": "padding",
             "compute": "kernels", "all_to_all": "linear", "cut": "rows", **_first(COMMON), **pair}
            for pair in pairs]


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
        for name, value in reference_of(cell["router"]).settings.items():
            known = tree["router"][name]
            tree["router"][name] = known | value if isinstance(value, dict) else value
        tree["router"]["name"], tree["losses"] = cell["router"], {}
    return from_dict(tree)


def reads(cell: Cell) -> int:
    """How often the host reads the device in a forward pass, before any row leaves its rank, by
    what the page promises; BASE has at least `BASE_READS` more. Of pre-gated blocks all but the
    first.
    """
    if "pre_gate" in cell:
        return 0
    size, traits, factor = cell["size"], cells.traits_of(cell["dispatch"]), cell["factor"]
    if traits.bounded:
        return 0
    asked = int(traits.fixed_slots and size.world > 1 and factor <= 0)  # for the load
    if size.world > 1 and size.r != 0:
        return asked or int(not traits.fixed_slots)
    exact = not traits.fixed_slots or factor == 0
    return asked or int(exact and cell["compute"] not in FROM_DEVICE)


def measure(world: int, folder: str) -> list[Seen]:
    """Every cell of this number of ranks, on this rank."""
    torch.set_num_threads(1)
    group = None
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", world_size=world,
                                rank=int(os.environ["RANK"]), timeout=timedelta(seconds=60))
        group = TorchComm(timeout_s=60)
        group.prepare(Topology.uniform(world, 2))
        # `auto` chooses by the model, without trials, which wait to measure
        group.state.get(Calibration).cluster = load_cluster(
            str(ROOT / "configs" / "clusters" / "emulated.yaml"))
    register()
    stand_ins.install()
    found: list[Seen] = []
    for cell in matrix():
        if cell["size"].world != world:
            continue
        found.append(_measured(cell, group))
        if found[-1].error:  # other ranks may wait for this one
            break
    return found


def _measured(cell: Cell, group: TorchComm | None) -> Seen:
    seen = Seen()
    try:
        with contextlib.ExitStack() as inside:
            plans = inside.enter_context(planned(random_planner(0))) if "spill" in cell else []
            config = config_of(cell)
            want = _Call(cell, config, group or LocalComm(), torch.device("cpu"))
            with CountingDevice():
                call = _Call(cell, config, LocalComm() if group is None else CountingComm(group),
                             register())
                call.forward()  # what a first call agrees on is not counted
                call.run(seen)
            want.run(Seen())
        seen.loans = sum(len(plan.loans) for plan in plans)
        seen.apart = max(_apart(a, b) for a, b in zip(call.results(), want.results(), strict=True))
    except BaseException:  # noqa: BLE001 - handed to the test
        seen.error = traceback.format_exc()
    return seen


class _Call:
    """A layer of a cell on one device, with its inputs."""

    def __init__(self, cell: Cell, config: MoEConfig, comm: Comm, device: torch.device) -> None:
        case = cells.case_of(cell)
        torch.manual_seed(0)
        self.layer = MoELayer(config, comm, dtype=torch.float32, device=device)
        ranks = dataclasses.replace(case, world=comm.size)
        load_experts(self.layer, make_parameters(case, torch.float32), ranks)
        if "router" in cell:
            self.layer.router.train(reference_of(cell["router"]).training)
        xs, masks = make_inputs(case, torch.float32)
        mine = comm.rank * case.world // comm.size
        self.x = xs[mine].to(device).requires_grad_()
        self.mask = None if masks[mine] is None else masks[mine].to(device)
        self.ids = (torch.arange(len(self.x)) * 7 % 11).to(device)
        self.output, self.before = self.x, None
        if "pre_gate" in cell:
            self.before = MoELayer(config, comm, dtype=torch.float32, device=device)
            load_experts(self.before, make_parameters(case, torch.float32), ranks)
            link(torch.nn.ModuleList([self.before, self.layer]))

    def forward(self) -> None:
        """One call; of two blocks, what the first one decides and the second one does."""
        torch.manual_seed(1)
        x, info = self.x, TokenInfo(self.ids)
        if self.before is not None:
            x = x + self.before(x, self.mask, info=info).output
        self.output = self.layer(x, self.mask, info=info).output

    def run(self, seen: Seen) -> None:
        """One call and its backward pass."""
        with EVENTS.noted() as seen.forward:
            self.forward()
        with EVENTS.noted() as seen.backward:
            self.output.square().sum().backward()

    def results(self) -> list[Tensor]:
        """Output and all gradients, on the CPU."""
        grads = [self.x.grad, *(p.grad for p in self.layer.parameters())]
        return [inner(t.detach() if t is not None else t) for t in (self.output, *grads)
                if t is not None]


def _apart(one: Tensor, other: Tensor) -> float:
    if not other.numel():
        return 0.0
    assert not isinstance(one, OnDevice)
    apart = (one - other).abs().nan_to_num(torch.inf)
    return float(apart.max() / other.abs().max().clamp(min=1.0))


