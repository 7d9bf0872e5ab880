"""Ranks that send or compute wrong numbers: outvoted, or found and named."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_plugin import MoELayer, TorchComm
from moe_plugin.comm import Comm, LocalComm, run_simulated
from moe_plugin.config import from_dict
from moe_plugin.dispatch.rows_limit import RowsOverflow, with_room
from moe_plugin.experts.base import is_expert
from moe_plugin.hosts.plain.run import TrainingSteps
from moe_plugin.planner.vote_assignments import Assignment, cyclic, mols, repetition
from moe_plugin.training.gradients.replicas import replica_comm
from moe_plugin.training.gradients.sync import sync_gradients
from moe_plugin.training.resilience.skipped_steps import RowsFit
from moe_plugin.training.resilience.step_votes import StepVotes
from moe_plugin.training.resilience.twins import TwinCheck, WrongResultError, checksum
from moe_plugin.training.resilience.vote import (
    Ballots,
    VotedGradients,
    coordinate_median,
    majority,
    vote,
)
from moe_plugin.utils.run_feature import StepRepeat
from tests.attacks.votes import ATTACKS, Attack
from tests.distributed import run_gloo
from tests.logs import warned


def data(file: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    """Points of two classes on either side of a plane, with noise."""
    g = torch.Generator().manual_seed(file)
    x = torch.randn(rows, 5, generator=g, dtype=torch.float64)
    score = x @ torch.tensor([1.0, -2.0, 0.5, 0.0, 1.0], dtype=torch.float64)
    return x, (score + torch.randn(rows, generator=g, dtype=torch.float64) * 0.5 > 0).double()


def regression() -> nn.Module:
    model = nn.Linear(5, 1, dtype=torch.float64)
    with torch.no_grad():  # simulated ranks share torch's generator
        for parameter in model.parameters():
            parameter.fill_(0.1)
    return model


def loss_of(model: nn.Module, file: int) -> Tensor:
    x, y = data(file)
    return nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)


def gradient_of(model: nn.Module, file: int) -> Tensor:
    found = torch.autograd.grad(loss_of(model, file), list(model.parameters()))
    return torch.cat([g.flatten() for g in found])


def voted(comm: Comm, scheme: Assignment, wrong: tuple[int, ...],
          attack: Attack) -> tuple[Tensor, tuple[int, ...]]:
    """The gradient of a step in which some ranks send something else than they computed."""
    model = regression()
    gather = comm.all_gather
    if comm.rank in wrong:
        comm.all_gather = lambda x: gather(attack(x))
    verdict = VotedGradients(model, scheme, comm).backward(lambda file: loss_of(model, file))
    return torch.cat([p.grad.flatten() for p in model.parameters()]), verdict.outvoted


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("wrong", [(), (0,), (7,)])
def test_the_clean_gradient_where_no_file_is_spoiled(attack: str, wrong: tuple[int, ...]) -> None:
    """15 ranks, 25 files, 3 ranks each: c(1) = 0."""
    scheme = mols(5, 3)
    assert scheme.worst(2) == [0, 0, 1]
    model = regression()
    clean = coordinate_median(torch.stack([gradient_of(model, f) for f in range(25)]))
    for got, outvoted in run_simulated(15, lambda c: voted(c, scheme, wrong, ATTACKS[attack])):
        assert torch.equal(got, clean) and outvoted == wrong


def worst_workers(scheme: Assignment, count: int) -> tuple[int, ...]:
    """Greedy: workers that spoil many files."""
    wrong: tuple[int, ...] = ()
    for _ in range(count):
        wrong = max(((*wrong, w) for w in range(scheme.workers) if w not in wrong),
                    key=lambda some: (scheme.spoiled(some), -some[-1]))
    return wrong


def accuracy(scheme: Assignment, wrong: tuple[int, ...], attack: Attack, aggregate: Any) -> float:
    """Of a regression trained with all ranks in one process, on new points."""
    model = regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(30):
        answers = torch.stack([torch.stack([gradient_of(model, 1000 * step + f) for f in mine])
                               for mine in scheme.files])
        for worker in wrong:
            answers[worker] = attack(answers[worker])
        winners, _ = vote(answers, scheme)
        parts = aggregate(winners).split([p.numel() for p in model.parameters()])
        for parameter, part in zip(model.parameters(), parts, strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.step()
    x, y = data(10**6, 2000)
    return ((model(x).squeeze(1) > 0) == (y > 0)).double().mean().item()


def test_accuracy_under_reversed_gradients() -> None:
    """3 of 15 wrong, at the worst places: vote and median over files of Latin squares keep what is
    lost where most ranks of a group of repetition are wrong and the mean is taken.
    """
    squares, groups = mols(5, 3), repetition(5, 3)
    clean = accuracy(squares, (), ATTACKS["reversed"], coordinate_median)
    kept = accuracy(squares, worst_workers(squares, 3), ATTACKS["reversed"], coordinate_median)
    lost = accuracy(groups, (0, 1, 2), ATTACKS["reversed"], lambda x: x.mean(0))
    assert clean > 0.85 and kept > clean - 0.03 and lost < 0.5


def test_votes_by_hand() -> None:
    a, b = torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])
    assert majority([b, a, a.clone()]) == (1, [0])
    assert majority([a, b]) == (0, [1])
    assert majority([torch.zeros(1), -torch.zeros(1), torch.zeros(1)]) == (0, [1])
    x = torch.tensor([[1.0, 9.0], [2.0, 8.0], [30.0, 7.0], [4.0, 6.0]])
    assert coordinate_median(x[:3]).tolist() == [2.0, 8.0]
    assert coordinate_median(x).tolist() == [3.0, 7.5]


def rows_fit(comm: Comm, how: str, needed: list[list[int]], running: bool = True
             ) -> tuple[str, int]:
    """What becomes of a step in whose files each rank's layer needs so many rows, and the bound
    that follows; needed: by file and rank.
    """
    layer = MoELayer(from_dict({"model_dim": 8, "num_experts": 2, "dispatch": {
        "name": "bounded", "on_overflow": how}}), LocalComm())
    votes = StepVotes(Ballots(cyclic(3, 3), comm), [layer])
    limit, rows = layer.routed_experts.layouts.limit, RowsFit([layer], comm, votes=votes)
    assert limit is not None
    votes.running = running
    votes.before_passes()
    for file in votes.ballots.files:
        votes.begin_file()
        limit.needed.fill_(needed[file][comm.rank])
    votes.finish(1.0, 1.0)
    try:
        rows.after_passes()
    except StepRepeat:
        return "repeated", limit.least
    except RowsOverflow as error:
        return str(error).split(" rows")[0], limit.least
    return "fits", limit.least


@pytest.mark.parametrize(("how", "needed", "said"), [
    ("repeat", [[0, 0, 99]] * 3, ("fits", 0)), ("error", [[0, 0, 99]] * 3, ("fits", 0)),
    ("repeat", [[0, 0, 99], [7, 8, 8], [9, 0, 0]], ("repeated", with_room(8))),
    ("repeat", [[4, 4, 0]] * 3, ("repeated", with_room(4))),
    ("error", [[0, 0, 0], [5, 5, 0], [0, 0, 9]], ("a rank had 5", 0))])
def test_no_single_rank_makes_all_repeat_a_step(how: str, needed: list[list[int]],
                                                said: tuple[str, int]) -> None:
    """What a file needs is what most of its workers say, and all bounds stay alike."""
    assert run_simulated(3, lambda comm: rows_fit(comm, how, needed)) == [said] * 3


@pytest.mark.parametrize(("how", "needed", "said", "rooms"), [
    ("repeat", [0, 0, 99], "fits", [0, 0, 99]), ("repeat", [0, 7, 99], "repeated", [0, 7, 99]),
    ("error", [0, 0, 99], "fits", [0, 0, 0]), ("error", [0, 7, 99], "a rank had 7", [0, 0, 0])])
def test_no_single_rank_makes_all_repeat_an_evaluation(how: str, needed: list[int], said: str,
                                                       rooms: list[int]) -> None:
    """It has no copies to vote with: most ranks must say so, and one that alone does is named."""
    with warned("moe_plugin.training.resilience.step_votes") as lines:
        found = run_simulated(3, lambda comm: rows_fit(comm, how, [needed] * 3, False))
    assert found == [(said, with_room(room)) for room in rooms]
    assert [line.split(",")[0] for line in lines] == (
        ["rows of an evaluation did not fit on rank 2"] if said == "fits" else [])


def voted_rows(comm: Comm, said: dict[int, int]) -> tuple[int, list[Tensor]]:
    """Files computed, and gradients by vote.

    said: ranks that say of so many files, the first ones, that rows did not fit.
    """
    layer = MoELayer(from_dict({
        "model_dim": 8, "num_experts": 2, "losses": {}, "dispatch": {
            "name": "bounded", "on_overflow": "repeat"}}), LocalComm())
    g, computed = torch.Generator().manual_seed(3), []
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=g))
    limit = layer.routed_experts.layouts.limit

    def loss_of(file: int) -> Tensor:
        computed.append(file)
        x_TD = torch.randn(9, 8, generator=torch.Generator().manual_seed(file))
        loss = layer(x_TD).output.square().sum()
        if len(computed) <= said.get(comm.rank, 0):
            limit.needed.fill_(99)
        return loss

    VotedGradients(layer, cyclic(3, 3), comm).backward(loss_of)
    return len(computed), [p.grad for p in layer.parameters()]


def test_gradients_by_vote_of_rows_that_did_not_fit() -> None:
    """Computed again where most say so, and not for one rank."""
    _, wanted = run_simulated(3, lambda comm: voted_rows(comm, {}))[0]
    for said, count in (({2: 99}, 3), ({1: 3, 2: 99}, 6), ({0: 1, 1: 1}, 6)):
        for computed, found in run_simulated(3, lambda comm, said=said: voted_rows(comm, said)):
            assert computed == count
            assert all(map(torch.equal, found, wanted))


def test_what_most_workers_say() -> None:
    """Of three workers of two ranks: a worker says so where one of its ranks does."""
    def rank(world: Comm, said: set[int]) -> bool:
        pair, alike = ([comm for comm in map(world.subgroup, ranks) if comm is not None][0]
                       for ranks in ([[0, 1], [2, 3], [4, 5]], [[0, 2, 4], [1, 3, 5]]))
        return Ballots(cyclic(3, 3), alike, worker=pair).most_say(world.rank in said)

    for said, most in (({5}, False), ({4, 5}, False), ({1, 4}, True), ({0, 2, 4}, True)):
        assert run_simulated(6, lambda world, said=said: rank(world, said)) == [most] * 6


def test_what_cannot_be_voted_on_is_refused() -> None:
    model = nn.ModuleList([MoELayer(from_dict({"model_dim": 8, "num_experts": 2}), LocalComm())])
    with pytest.raises(ValueError, match="for 15 workers, but the group has 1 ranks"):
        VotedGradients(model, mols(5, 3), LocalComm())
    with pytest.raises(ValueError, match="one of median, mean"):
        VotedGradients(model, cyclic(1, 1), LocalComm(), aggregate="sum")

    for rate in (0.0, 0.001):
        router = {"name": "sigmoid_bias", "bias_rate": rate}
        biased = nn.ModuleList([MoELayer(from_dict(
            {"model_dim": 8, "num_experts": 2, "router": router}), LocalComm())])
        if rate:
            with pytest.raises(ValueError, match="SigmoidBiasRouter of .0.router. cannot "
                                                 "be used with votes: .* router.bias_rate=0"):
                VotedGradients(biased, cyclic(1, 1), LocalComm())
        else:
            VotedGradients(biased, cyclic(1, 1), LocalComm())

    def spread(comm: Comm) -> None:
        layer = nn.ModuleList([MoELayer(from_dict({"model_dim": 8, "num_experts": 2}), comm)])
        VotedGradients(layer, cyclic(2, 1), comm)

    with pytest.raises(ValueError, match="are distributed over . ranks"):
        run_simulated(2, spread)
    with pytest.raises(ValueError, match="no two of 1 ranks store the same experts"):
        TwinCheck(model, LocalComm(), every=1)
    with pytest.raises(ValueError, match="between two checks must be >= 1"):
        TwinCheck(model, LocalComm(), every=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_checksums_see_every_bit(dtype: torch.dtype) -> None:
    x = torch.randn(11).to(dtype)
    before = checksum(x)
    for byte in range(x.nbytes):
        for bit in range(8):
            flipped = x.clone()
            flipped.view(torch.uint8)[byte] ^= 1 << bit
            assert checksum(flipped)[0] != before[0]
    assert not torch.equal(checksum(x.flip(0)), before) and torch.equal(checksum(x.clone()), before)
    assert checksum(x[:0]).tolist() == [0, 0] and checksum(x[3]).shape == (2,)


class Model(nn.Module):
    """A dense layer, dropout, experts, a dense layer."""

    def __init__(self, comm: Comm, router: str = "sigmoid_bias") -> None:
        super().__init__()
        torch.manual_seed(4)
        self.enter, self.drop = nn.Linear(8, 8), nn.Dropout(0.2)
        self.moe = MoELayer(from_dict({
            "model_dim": 8, "num_experts": 6, "experts": {"hidden_dim": 16},
            "router": {"name": router, "top_k": 2}}), comm)
        self.leave = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.moe(self.drop(self.enter(x))).output)


def flip(x: Tensor) -> Tensor:
    """The same with the lowest bit of one number flipped."""
    wrong = x.clone()
    wrong.view(torch.int32).view(-1)[3] ^= 1
    return wrong


def break_forward(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, output: flip(output) + (output - output))


def break_backward(module: nn.Module) -> None:
    """A wrong gradient of what the module reads: it travels to other ranks from experts."""
    module.register_full_backward_pre_hook(lambda module, grads: tuple(map(flip, grads)))


def break_router(module: nn.Module) -> None:
    """Its tokens go to other experts, first on this rank alone."""
    module.register_forward_pre_hook(lambda module, args: (args[0] + 0.5, *args[1:]))


def train(world: Comm, ep: int, every: int, broken: tuple[str, int, Any] | None,
          steps: int = 6) -> tuple[list[float], Any]:
    """Losses, and the error that ended the run. broken: a module of a rank that is wrong from step
    3 on.
    """
    comm = LocalComm() if ep == 1 else world.contiguous_subgroup(ep)
    model = Model(comm)
    replicas = replica_comm(comm, world) if ep > 1 else None
    check = TwinCheck(model, world, every=every) if every else None
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []

    def loss_of(batch: dict[str, Any]) -> Tensor:
        return (model(batch["x"]) - batch["x"].flip(1)).square().mean()

    torch.manual_seed(world.rank)
    for step in range(1, steps + 1):
        if broken and step == 3 and world.rank == broken[1]:
            broken[2](model.get_submodule(broken[0]))
        batch = {"x": torch.randn(6, 8), "ids": [step]}
        optimizer.zero_grad()
        try:
            if check is not None and check.due(step):
                check(step, batch, loss_of)
        except WrongResultError as error:
            return seen, (error.step, error.ranks, error.hosts, error.where, str(error))
        loss = loss_of(batch)
        loss.backward()
        sync_gradients(model, world, comm, replicas)
        optimizer.step()
        seen.append(loss.item())
    return seen, None


def loss_of_part(model: nn.Module, number: int) -> Tensor:
    torch.manual_seed(number)
    x = torch.randn(6, 8)
    return (model(x) - x.flip(1)).square().sum()


def voted_by_pairs(world: Comm) -> tuple[list[Tensor], list[Tensor], tuple[int, ...]]:
    """Gradients by votes of expert-parallel groups of two, of which the last has a rank that votes
    wrongly; the same without votes; and who was outvoted.
    """
    pair, whole = world.contiguous_subgroup(2), Model(LocalComm(), "topk")
    model, comm = Model(pair, "topk"), replica_comm(pair, world)
    assert comm is not None
    gather = comm.all_gather
    if world.rank == 5:
        comm.all_gather = lambda x: gather(ATTACKS["reversed"](x))
    verdict = VotedGradients(model, cyclic(3, 3), comm, aggregate="mean", worker=pair).backward(
        lambda file: loss_of_part(model, 2 * file + pair.rank))
    torch.stack([loss_of_part(whole, i) for i in range(6)]).sum().div(3).backward()
    wanted = [p.grad.chunk(2)[pair.rank] if is_expert(p) else p.grad for p in whole.parameters()]
    return [p.grad for p in model.parameters()], wanted, verdict.outvoted


CASES = {
    "all alike": (1, 2, ("enter", 2, break_forward)),
    "experts": (2, 2, ("moe.experts", 3, break_forward)),
    "router": (2, 2, ("moe.router", 1, break_router)),
    "first layer": (2, 4, ("enter", 1, break_backward)),
    "backward": (1, 1, ("leave", 5, break_backward)),
    "two twins": (3, 2, ("leave", 4, break_forward)),
}


def on_processes() -> dict[str, Any]:
    world = TorchComm()
    found = {name: train(world, *case) for name, case in CASES.items()}
    for ep in (1, 2):
        found[f"checked {ep}"] = train(world, ep, 2, None)
        found[f"unchecked {ep}"] = train(world, ep, 0, None)
    found["pairs"] = voted_by_pairs(world)
    found["voted"] = voted(world, cyclic(6, 3), (4,), ATTACKS["reversed"])
    return found


@pytest.mark.distributed
def test_on_processes() -> None:
    """Six ranks: wrong ones are named within `every` steps, and nothing else changes."""
    model = regression()
    clean = coordinate_median(torch.stack([gradient_of(model, f) for f in range(6)]))
    here = socket.gethostname()
    for found in run_gloo(6, on_processes):
        for name, (ep, every, (module, rank, _)) in CASES.items():
            assert found[name][1] is not None, name
            step, ranks, hosts, where, text = found[name][1]
            assert 3 <= step <= 3 + every - 1 and hosts == (here,) * len(ranks)
            assert ranks == ((rank % ep, rank % ep + ep) if name == "two twins" else (rank,)), name
            assert module.split(".")[0] in where and f"rank {ranks[0]} on {here}" in text
        for ep in (1, 2):
            assert found[f"checked {ep}"] == found[f"unchecked {ep}"]
        assert torch.equal(found["voted"][0], clean) and found["voted"][1] == (4,)
        got, wanted, outvoted = found["pairs"]
        torch.testing.assert_close(got, wanted)
        assert outvoted == (2,)


@pytest.mark.fast
def test_the_loss_of_a_step_with_votes_is_the_mean_over_all_files() -> None:
    votes = SimpleNamespace(
        step=3, files_dealt=lambda: [[1.0, None, 2.0], [4.0]], begin_file=lambda: None,
        ballots=SimpleNamespace(assignment=SimpleNamespace(count=2)),
        finish=lambda *scales: None, agreed_sums=lambda losses: [sum(losses)])
    steps = SimpleNamespace(world=SimpleNamespace(device="cpu", size=2),
                            _backward=lambda batch: torch.tensor([batch]))
    assert float(TrainingSteps._voted(steps, votes)) == (1.0 + 2.0 + 4.0) / 2
