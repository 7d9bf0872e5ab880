"""One rank's run of the matrix of waits."""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import Mock, patch

import torch
from torch import Tensor

from moe_plugin import MoELayer, TorchComm
from moe_plugin.comm import Comm, LocalComm
from moe_plugin.comm.placement import HostContext
from moe_plugin.config import MoEConfig
from moe_plugin.planner.cluster import load_cluster
from moe_plugin.records import TokenInfo
from moe_plugin.routing.pregate import link
from moe_plugin.routing.routers import balanced as assignment
from moe_plugin.tuning.default_hardware import Calibration
from tests.combinations import Cell
from tests.exactness import cells
from tests.exactness.harness import load_experts
from tests.exactness.spills import planned, random_planner
from tests.fake_gpu import stand_ins
from tests.fake_gpu.device import CountingDevice, OnDevice, inner, register
from tests.fake_gpu.events import EVENTS, Event
from tests.fake_gpu.harness import group
from tests.fake_gpu.matrix import config_of, matrix
from tests.fake_gpu.ranks import CountingComm
from tests.kernels.compiled_or_not import compiled
from tests.oracle import Case, make_inputs, make_parameters
from tests.routing.references import reference_of

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Seen:
    """What one rank saw in one cell: events of a call and of its backward pass.

    error: of the run; empty: none. loans: experts that ranks borrowed. looks: how often auctions of
    router `base` must look at the device whether they are over. apart: the largest difference to
    the same layer on the CPU, relative to the largest value.
    """

    forward: list[Event] = field(default_factory=list)
    backward: list[Event] = field(default_factory=list)
    error: str = ""
    loans: int = 0
    looks: int = 0
    apart: float = 0.0


def measure(world: int, folder: str, places: Sequence[int]) -> list[Seen]:
    """Those of the cells that have this number of ranks, on this rank."""
    torch.set_num_threads(1)
    ranks = None
    if world > 1:
        ranks = group(world, folder)
        # `auto` chooses by the model, without trials, which wait to measure
        ranks.state.get(Calibration).cluster = load_cluster(
            str(ROOT / "configs" / "clusters" / "emulated.yaml"))
    register()
    stand_ins.install()
    found: list[Seen] = []
    for cell in (matrix()[place] for place in places):
        if cell["size"].world != world:
            continue
        found.append(_measured(cell, ranks))
        if found[-1].error:  # other ranks may wait for this one
            break
    return found


def _measured(cell: Cell, group: TorchComm | None) -> Seen:
    seen = Seen()
    try:
        with contextlib.ExitStack() as inside:
            plans = inside.enter_context(planned(random_planner(0))) if "spill" in cell else []
            config = config_of(cell)
            want = CellCall(cell, config, group or LocalComm(), torch.device("cpu"))
            with CountingDevice():
                call = CellCall(cell, config, LocalComm() if group is None else CountingComm(group),
                             register())
                # not counted: what a first call agrees on, and that ranks compare samples of their
                # experts in training calls 2, 4, 8, ..., 256
                call.forward()
                call.forward()
                with _looks() as looks:
                    call.run(seen)
            with compiled(False):  # it rounds where the device's operations do
                want.run(Seen())
        seen.looks = sum(looks)
        seen.loans = sum(len(plan.loans) for plan in plans)
        seen.apart = max(_apart(a, b) for a, b in zip(call.results(), want.results(), strict=True))
    except BaseException:  # noqa: BLE001 - handed to the test
        seen.error = traceback.format_exc()
    return seen


class CellCall:
    """A layer of a cell on one device, with its inputs."""

    def __init__(self, cell: Cell, config: MoEConfig, comm: Comm, device: torch.device) -> None:
        case = cells.case_of(cell)
        self.dtype = getattr(torch, cell.get("dtype", "float32"))
        self.config, self.case, self.comm, self.device = config, case, comm, device
        ranks = dataclasses.replace(case, world=comm.size)
        shared = comm if cell.get("batch") == "shared" else None
        experts = _module if "experts" in cell else None
        self.layer = self._made(ranks, HostContext(loss_comm=shared), experts)
        if "router" in cell:
            self.layer.router.train(reference_of(cell["router"]).training)
        xs, masks = make_inputs(case, self.dtype)
        mine = comm.rank * case.world // comm.size
        self.x = xs[mine].to(device).requires_grad_()
        self.mask = None if masks[mine] is None else masks[mine].to(device)
        ids = torch.arange(len(self.x))
        self.info = TokenInfo((ids * 7 % 11).to(device), (ids % 2).to(device), 2)
        self.before = None
        if "pre_gate" in cell:
            self.before = self._made(ranks, HostContext(), None)
            link(torch.nn.ModuleList([self.before, self.layer]))

    def _made(self, ranks: Case, host: HostContext,
              experts: Callable[[int], torch.nn.Module] | None) -> MoELayer:
        torch.manual_seed(0)
        layer = MoELayer(self.config, self.comm, host=host, experts=experts, dtype=self.dtype,
                         device=self.device)
        load_experts(layer, make_parameters(self.case, self.dtype), ranks)
        return layer.to(self.device)

    def forward(self) -> None:
        """One call; of two blocks, what the first one decides and the second one does."""
        torch.manual_seed(1)
        x = self.x
        if self.before is not None:
            x = x + self.before(x, self.mask, info=self.info).output
        self.out = self.layer(x, self.mask, info=self.info)

    def run(self, seen: Seen) -> None:
        """One call and its backward pass."""
        with EVENTS.noted() as seen.forward:
            self.forward()
        with EVENTS.noted() as seen.backward:
            assert set(self.out.losses) == {n for n, w in self.config.losses.items() if w > 0}
            loss = self.out.output.float().square().sum()
            for value in self.out.losses.values():
                loss = loss + value
            loss.backward()

    def results(self) -> list[Tensor]:
        """Output and all gradients, on the CPU."""
        grads = [self.x.grad, *(p.grad for p in self.layer.parameters())]
        return [inner(t.detach() if t is not None else t) for t in (self.out.output, *grads)
                if t is not None]


def _module(index: int) -> torch.nn.Module:
    """An expert that a user brings."""
    return torch.nn.Linear(8, 8)


@contextlib.contextmanager
def _looks() -> Iterator[list[int]]:
    """For each auction inside, how often it must look at the device whether it is over.

    A host that computes the same auction looks in every round; a device is looked at before the
    first round, and every `LOOK` rounds until it is over or rounds run out.
    """
    found: list[int] = []
    auction, accept = assignment.auction, assignment.accept

    def counted(value_NE: Tensor, price_E: Tensor, each: int) -> Tensor:
        accepts = Mock(side_effect=accept)
        with EVENTS.paused(), patch.object(assignment, "accept", accepts):
            auction(inner(value_NE), inner(price_E), each)
        found.append(min(-(-accepts.call_count // assignment.LOOK) + 1,
                         assignment.MOST_ROUNDS // assignment.LOOK))
        return auction(value_NE, price_E, each)

    with patch.object(assignment, "auction", counted):
        yield found


def auctions() -> list[tuple[int, int]]:
    """Of balanced assignments of more and more tokens: (reads, looks that they must take)."""
    found = []
    for tokens in (0, 5, 64, 500, 2000):
        torch.manual_seed(tokens)
        with CountingDevice(), _looks() as looks:
            scores_TE = torch.randn(tokens, 16).to(register())
            with EVENTS.noted() as seen:
                assignment.balanced_assignment(scores_TE)
        found.append((sum(event.kind == "read" for event in seen), sum(looks)))
    return found


def _apart(one: Tensor, other: Tensor) -> float:
    if not other.numel():
        return 0.0
    assert not isinstance(one, OnDevice)
    apart = (one.float() - other.float()).abs().nan_to_num(torch.inf)
    return float(apart.max() / other.abs().max().clamp(min=1.0))


