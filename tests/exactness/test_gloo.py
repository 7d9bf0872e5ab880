"""The same cells over real processes, and a training run that must not depend on the number of
ranks.
"""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from moe_plugin import MoELayer, TorchComm, weighted_loss
from moe_plugin.comm import LocalComm, Topology
from moe_plugin.config import from_dict
from moe_plugin.dispatch import dispatchers
from moe_plugin.training.gradients.sync import exclude_experts, sync_gradients
from tests.combinations import Cell, every_value, name_of
from tests.distributed import run_gloo
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
from tests.exactness.spills import planned, random_planner
from tests.oracle import Case

pytestmark = pytest.mark.distributed


SIZES = {2: [(2, 1, None), (2, 8, None), (2, 4, 2)], 4: [(4, 2, None), (4, 4, 2)]}
# what a network does not see, the simulated group covers
FEWER = {
    "factor": [0.0, 1.0], "tokens": ["uneven", "padding", "one"], "compute": ["auto"],
    "activation": ["gelu"], "pieces": [(1, 0), (3, 0), (1, 2)],
    "rows_computed": ["own"]
}


def gloo_cells(world: int, few: bool = False) -> list[Cell]:
    """All pairs of all settings for every dispatcher, also with ranks that hold the same tokens.

    few: some of them, which hold every value of every setting with every dispatcher.
    """
    found = [
        cell for dispatch in dispatchers.names()
        for cell in cells.cells_of(dispatch, SIZES[world], **FEWER)
    ]
    found += [cell for dispatch in dispatchers.names() if world > 2
              for cell in cells.once_cells(dispatch, SIZES[world][1:], **FEWER)]
    found += [
        cell for dispatch in cells.own_tokens()
        for cell in cells.parm_cells(dispatch, SIZES[world][:1], replicas=[2, 4][:world // 2],
                                     **FEWER)
    ]
    return [found[place] for place in every_value(found)] if few else found


SPILLS = [{"parallel__d": d, "comm__wire": wire} for d, wire in ((1, "none"), (2, "bf16"))]


def _spilled(world: int) -> Case:
    return Case(world, 4, 2, [7, 0, 12, 3][:world], None, None, "gated_ffn", skew=3.0)


def _run_cells(world: int, few: bool) -> tuple[list[RankResult], list[RankResult]]:
    """The cells, and rows of overloaded experts on ranks that borrow them."""
    comm, found = TorchComm(), []
    comm.prepare(Topology.uniform(world, 2))  # as if on two nodes
    for cell in gloo_cells(world, few):
        with naming(name_of(cell)), dropping_by_value():
            found.append(run_rank(cells.case_of(cell), comm, cells.settings_of(cell)))
    case = _spilled(world)
    with planned(random_planner(7)) as made:
        spilled = [run_rank(case, comm, config_of(case, parallel__spill="everywhere", **changes))
                   for changes in SPILLS]
    assert len(made) == len(SPILLS)
    return found, spilled


@pytest.mark.parametrize("few", [
    True, pytest.param(False, marks=pytest.mark.slow)], ids=["every value", "all pairs"])
@pytest.mark.parametrize("world", [2, 4])
def test_cells(world: int, few: bool) -> None:
    by_rank = run_gloo(world, _run_cells, world, few)
    for index, cell in enumerate(gloo_cells(world, few)):
        case = cells.case_of(cell)
        with naming(name_of(cell)):
            compare(case, [results[index] for results, _ in by_rank], reference(case))
    case = _spilled(world)
    for index, changes in enumerate(SPILLS):
        with naming(f"spilled {changes}"):
            loose = {} if changes["comm__wire"] == "none" else {"rtol": 0.05, "atol": 0.02}
            compare(case, [results[index] for _, results in by_rank], reference(case), **loose)


def _grows(counts: list[int]) -> bool:
    return all(more > fewer for fewer, more in itertools.pairwise(counts))


def _kept(world: int) -> dict[str, list[int]]:
    """How many tensors there are after each run of a cell, where each leaves some behind."""
    comm, found = TorchComm(), {}
    comm.prepare(Topology.uniform(world, 2))
    for cell in gloo_cells(world, few=True):
        alive: list[int] = []
        # one or two are now and then still on their way out; ranks make as many runs
        while len(alive) < 4 and comm.agree_max([float(_grows(alive))])[0]:
            run_rank(cells.case_of(cell), comm, cells.settings_of(cell))
            gc.collect()
            alive.append(sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()))
        if _grows(alive):
            found[name_of(cell)] = alive
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_nothing_is_kept_of_a_call(world: int) -> None:
    """A tensor that reaches its own autograd node is never given back: Python does not look into
    such circles.
    """
    assert run_gloo(world, _kept, world) == [{}] * world


def _train(expert_parallel: bool, optimizer: str, steps: int = 12) -> list[float]:
    """A small regression under data parallelism; experts over all ranks, or replicated on each."""
    torch.manual_seed(7)
    rank, world = dist.get_rank(), dist.get_world_size()
    config = from_dict({
        "model_dim": 8, "num_experts": 4, "experts": {"hidden_dim": 16}, "losses": {"switch": 0.05}
    })
    layer = MoELayer(config, TorchComm() if expert_parallel else LocalComm())
    optim = {"sgd": torch.optim.SGD,
             "adam": torch.optim.AdamW}[optimizer](layer.parameters(),
                                                   lr={"sgd": 0.5, "adam": 0.05}[optimizer])
    curve = []
    for step in range(steps):
        g = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(16, 8, generator=g)
        out = layer(x)
        loss = (out.output - x.roll(1, 1)).square().mean() + weighted_loss(
            out.losses, config.losses)
        optim.zero_grad()
        loss.backward()
        sync_gradients(layer, TorchComm(), expert_group=layer.comm)
        optim.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        curve.append(float(total) / world)
    return curve


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_training_does_not_depend_on_expert_parallelism(optimizer: str) -> None:
    one = run_gloo(2, _train, False, optimizer)[0]
    two = run_gloo(2, _train, True, optimizer)[0]
    torch.testing.assert_close(torch.tensor(two), torch.tensor(one), rtol=1e-4, atol=1e-5)
    assert two[-1] < 0.9 * two[0]


def _under_ddp(excluded: bool) -> tuple[str, list[torch.Tensor], list[torch.Tensor]]:
    """What happened, and the gradients with and without DDP."""
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    seen = []
    for wrapped in (False, True):
        torch.manual_seed(1)
        layer = MoELayer(from_dict({"model_dim": 4, "num_experts": 4}), TorchComm())
        if wrapped and excluded:
            exclude_experts(layer)
        try:
            (DistributedDataParallel(layer)
             if wrapped else layer)(x).output.square().sum().backward()
        except ValueError as error:
            return str(error), [], []
        sync_gradients(layer, TorchComm(), layer.comm)
        seen.append([p.grad for p in layer.parameters()])
    return "fine", *seen


def test_torch_ddp_leaves_experts_alone_or_is_refused() -> None:
    for said, _, _ in run_gloo(2, _under_ddp, False):
        assert "DistributedDataParallel averages 'experts." in said
        assert "exclude_experts(model)" in said
    for said, plain, wrapped in run_gloo(2, _under_ddp, True):
        assert said == "fine"
        torch.testing.assert_close(wrapped, plain)


def _break_the_promise(dispatch: str, tokens: list[list[int]]) -> list[str]:
    comm = TorchComm()
    layer = MoELayer(4, comm, num_experts=2, dispatch={
        "name": dispatch, "capacity_factor": 1.0, "equal_tokens": True})
    seen = []
    for tokens_W in tokens:
        try:
            layer(torch.randn(tokens_W[comm.rank], 4))
            seen.append("fine")
        except (ValueError, RuntimeError) as error:
            seen.append(f"{type(error).__name__}: {error}")
    if any("CommError" in line for line in seen):
        dist.destroy_process_group()
    return seen


@pytest.mark.parametrize("dispatch", ["ragged", "padded"])
def test_a_broken_promise_of_equal_tokens_is_an_error(dispatch: str) -> None:
    for seen in run_gloo(2, _break_the_promise, dispatch, [[6, 6], [3, 3], [6, 2], [6, 6]]):
        assert seen[:2] == ["fine", "fine"] and seen[3] == "fine"
        assert "ValueError: dispatch.equal_tokens=True" in seen[2]
        assert "the ranks have 2 to 6" in seen[2]


def test_a_promise_broken_by_one_rank_alone_ends_in_an_error_on_all() -> None:
    for seen in run_gloo(2, _break_the_promise, "padded", [[6, 6], [6, 2]], group_timeout_s=4):
        assert seen[0] == "fine" and "CommError" in seen[1]


def _forward_with_a_missing_peer() -> str:
    comm = TorchComm()
    layer = MoELayer(from_dict({"model_dim": 4, "num_experts": 2, "parallel": {"r": 1}}), comm)
    if comm.rank == 1:
        dist.destroy_process_group()
        return "left"
    try:
        layer(torch.randn(3, 4))
    except RuntimeError as error:
        dist.destroy_process_group()
        return f"{type(error).__name__}: {error}"
    return "nothing happened"


def test_a_missing_peer_is_an_error_that_says_what_waited() -> None:
    stayed, left = run_gloo(2, _forward_with_a_missing_peer, group_timeout_s=5)
    assert left == "left"
    assert "CommError: rank 0 of 2" in stayed and "all_to_all" in stayed and "send [1, 1]" in stayed
