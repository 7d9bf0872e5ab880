"""A pipeline of peers that come and go trains as one process does."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from moe_plugin import MoELayer
from moe_plugin.config import from_dict
from moe_plugin.dispatch.wire import FORMATS
from moe_plugin.output import weighted_loss
from moe_plugin.training.resilience.swarm import JoinedTrainer, StagePeer, Swarm, make_stage
from moe_plugin.training.resilience.swarm.journeys import Member, SwarmMembers
from moe_plugin.training.resilience.swarm.messages import MessageServer, PeerError, ask
from moe_plugin.training.resilience.swarm.rounds import SharedRound
from moe_plugin.training.resilience.swarm.stage import ServedStage, save_swarm
from moe_plugin.utils.determinism import seed_of, seeded
from scripts.emulate.ranks import RankProcess, fork, stop
from tests.distributed import free_port

BATCHES, SEED = 6, 3
SGD = partial(torch.optim.SGD, lr=0.5)


class Experts(nn.Module):
    """An MoE layer, dropout, and the balance loss as a share of the step's."""

    def __init__(self, router: str = "topk") -> None:
        super().__init__()
        self.moe = MoELayer(from_dict({"model_dim": 16, "num_experts": 4,
                                       "experts": {"hidden_dim": 24},
                                       "router": {"name": router, "top_k": 2},
                                       "losses": {"gshard": 0.1}}))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        out = self.moe(x_BTD)
        balance = weighted_loss(out.losses, {"gshard": 0.1})
        return x_BTD + self.dropout(out.output), balance / BATCHES


STAGES: list[Callable[[], nn.Module]] = [
    partial(nn.Embedding, 11, 16), Experts, lambda: nn.Sequential(nn.ReLU(), nn.Linear(16, 11))]


def loss(out_BTV: Tensor, ids_BT: Tensor) -> Tensor:
    return F.cross_entropy(out_BTV.flatten(0, 1), ids_BT.flatten()) / BATCHES


def batches(step: int) -> list[tuple[Tensor, Tensor]]:
    dice = torch.Generator().manual_seed(step)
    made = torch.randint(11, (BATCHES, 2, 9), generator=dice)
    return [(ids[:, :-1], ids[:, 1:]) for ids in made]


def alone(steps: int, optimizer: Any = SGD, clip: float | None = None) -> list[float]:
    """The losses of one process, which draws the random numbers that a peer draws."""
    modules = [make_stage(STAGES, number, SEED) for number in range(len(STAGES))]
    every = [p for module in modules for p in module.parameters()]
    stepper, found = optimizer(every), []
    for step in range(steps):
        total = 0.0
        for number, (x, target) in enumerate(batches(step)):
            own = []
            for module in modules:
                with seeded(torch.device("cpu"), seed_of(SEED, step, number)):
                    x = module(x)
                if isinstance(x, tuple):
                    x, balance = x
                    own.append(balance)
            all_of_it = sum(own, loss(x, target))
            all_of_it.backward()
            total += float(all_of_it.detach())
        if clip is not None:
            nn.utils.clip_grad_norm_(every, clip)
        stepper.step()
        stepper.zero_grad()
        found.append(total)
    return found


@functools.cache
def exact(steps: int) -> list[float]:
    """`alone`, of which the processes that begin later need not compute anything again."""
    return alone(steps)


class Crew:
    """Processes that serve stages."""

    def __init__(self) -> None:
        self.port = free_port()  # peers look for the trainer before it listens there
        self.processes: list[RankProcess] = []

    def start(self, number: int = 1, kind: type[StagePeer] = StagePeer, *,
              optimizer: Any = SGD, **about: float) -> None:
        def serve() -> None:
            torch.set_num_threads(1)
            kind(("127.0.0.1", self.port), STAGES, optimizer, loss, timeout_s=20.0, **about).run()

        self.processes += [fork(serve, None, len(self.processes) + i) for i in range(number)]

    def help(self, steps: int, kind: type[JoinedTrainer] = JoinedTrainer) -> None:
        """A further trainer, which checks what it is told of the losses."""
        expected = exact(steps)

        def work() -> None:
            torch.set_num_threads(1)
            trainer = kind(("127.0.0.1", self.port), timeout_s=20.0)
            while trainer.steps < steps:
                result = trainer.step(batches(trainer.steps))
                assert sum(result["losses"]) == pytest.approx(expected[trainer.steps - 1], rel=2e-6)

        self.processes.append(fork(work, None, len(self.processes)))

    def signal(self, number: signal.Signals, *which: int) -> None:
        for i in which:
            os.kill(self.processes[i].pid, number)


@contextlib.contextmanager
def crew() -> Iterator[Crew]:
    made = Crew()
    try:
        yield made
    finally:
        made.signal(signal.SIGCONT, *range(len(made.processes)))
        stop(made.processes)


def swarm_of(made: Crew, peers: int, **options: Any) -> Swarm:
    swarm = Swarm(len(STAGES), port=made.port, seed=SEED, **{
        "wire": "none", "timeout_s": 5.0, "rebalance_s": None, **options})
    # a busy machine may start processes slowly
    assert swarm.members.wait_for(peers, 120.0), f"{len(swarm.members)} of {peers} peers have come"
    return swarm


def losses(swarm: Swarm, steps: Sequence[int]) -> list[float]:
    return [sum(swarm.step(batches(step)).losses) for step in steps]


@pytest.mark.parametrize(("optimizer", "clip"), [
    (SGD, None), (SGD, 0.05), (partial(torch.optim.AdamW, lr=0.01), None)])
def test_losses_are_those_of_one_process(optimizer: Any, clip: float | None) -> None:
    expected = alone(4, optimizer, clip)
    with crew() as made:
        made.start(5, optimizer=optimizer)
        swarm = swarm_of(made, 5, clip=clip)
        assert losses(swarm, range(4)) == pytest.approx(expected, rel=2e-6)
        assert sorted(map(len, swarm.members.stages)) == [1, 2, 2]
        swarm.close()


@pytest.mark.parametrize("wire", sorted(FORMATS))
def test_boundaries_in_fewer_bits(wire: str) -> None:
    """One step, so that the difference is that of the boundaries alone: two of them, of which the
    stages' outputs change no faster than their inputs."""
    with crew() as made:
        made.start(3)
        swarm = swarm_of(made, 3, wire=wire)
        [got], [exact] = losses(swarm, [0]), alone(1)
        assert got != exact and got == pytest.approx(exact, rel=2**-4)
        swarm.close()


def test_peers_that_die_lose_nothing() -> None:
    """At the next task that it is given."""
    with crew() as made:
        made.start(7)
        swarm = swarm_of(made, 7)
        first = losses(swarm, [0])
        made.signal(signal.SIGKILL, 0)
        second = swarm.step(batches(1))
        assert len(second.gone) == 1
        third = swarm.step(batches(2))
        assert [*first, sum(second.losses), sum(third.losses)] == pytest.approx(alone(3), rel=2e-6)
        swarm.close()


class DiesBeforeSumming(StagePeer):
    """Its gradients were computed, and are gone."""

    def _reduce(self, key: tuple[int, int], **rest: Any) -> Any:
        if key[0] == 1:
            os._exit(1)
        return super()._reduce(key, **rest)


class DiesInTheMidst(StagePeer):
    """At its second backward pass of the second step."""

    calls = 0

    def _backward(self, task: tuple[int, int], **rest: Any) -> Any:
        DiesInTheMidst.calls += task[0] == 1
        if DiesInTheMidst.calls == 2:
            os._exit(1)
        return super()._backward(task, **rest)


class LosesAnAnswer(StagePeer):
    """Computes, and its answer arrives after the others have done it again."""

    slow = threading.Event()

    def _backward(self, task: tuple[int, int], **rest: Any) -> Any:
        found = super()._backward(task, **rest)
        if task[0] == 1 and not self.slow.is_set():  # the first one that it gets
            self.slow.set()
            time.sleep(7)
        return found


@pytest.mark.parametrize(("kind", "what"), [
    (DiesBeforeSumming, "redone"), (DiesInTheMidst, "resent"), (LosesAnAnswer, "resent")])
def test_gradients_count_once(kind: type[StagePeer], what: str) -> None:
    with crew() as made:
        made.start(3)  # one for each stage, whatever happens to those of the kind
        swarm = swarm_of(made, 3, timeout_s=4.0)
        first = losses(swarm, [0])
        stay, choose = {*itertools.chain(*swarm.members.stages)}, swarm.members.choose
        made.start(3, kind)
        swarm.wait_for(6)
        # whatever is free: those of the kind have work as long as they are there
        swarm.members.choose = lambda stage, number, size, but: (
            choose(stage, number, size, but | stay) or choose(stage, number, size, but))
        second = swarm.step(batches(1))
        assert getattr(second, what) > 0
        assert [*first, sum(second.losses), *losses(swarm, [2])] == pytest.approx(
            alone(3), rel=2e-6)
        swarm.close()


def driven_by_two(swarm: Swarm, step: int) -> list[str]:
    """Make steps until the other trainer drives a part of one."""
    result = swarm.step(batches(step))
    assert sum(result.losses) == pytest.approx(exact(4)[step], rel=2e-6)
    return result.by


def shared(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leading trainer waits until the other one has a micro-batch."""
    numbers = SharedRound.numbers

    def later(self: SharedRound, timeout_s: float) -> Iterator[int]:
        with self.changed:
            assert self.changed.wait_for(lambda: self._with or self.over, 60.0)
        yield from numbers(self, timeout_s)

    monkeypatch.setattr(SharedRound, "numbers", later)
    number_for = SharedRound.number_for

    def noticed(self: SharedRound, trainer: str) -> int | None:
        with self.changed:
            number = number_for(self, trainer)
            self.changed.notify_all()
            return number

    monkeypatch.setattr(SharedRound, "number_for", noticed)


@pytest.mark.parametrize("kind", [StagePeer, DiesBeforeSumming, DiesInTheMidst])
def test_two_trainers_have_the_gradients_of_one(kind: type[StagePeer],
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a peer dies with what it computed for the other trainer."""
    exact(4)
    with crew() as made:
        made.start(3)
        swarm = swarm_of(made, 3, timeout_s=6.0)
        made.start(3, kind)
        swarm.wait_for(6)
        shared(swarm, monkeypatch)
        made.help(4)
        found = [driven_by_two(swarm, step) for step in range(4)]
        assert all(any(by) for by in found) and any("" in by for by in found)
        swarm.close()
        ends_well(made.processes.pop())


def ends_well(process: RankProcess) -> None:
    """It ends by itself, without an error."""
    assert os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1]) == 0


class DiesWithMicroBatches(JoinedTrainer):
    """On a micro-batch's way back: the last stage counts it, the others do not."""

    def _took(self, stage: int, *given: Any) -> bool:
        if stage == 1:
            os._exit(0)
        return super()._took(stage, *given)


def test_a_trainer_that_dies_and_one_that_joins_later(monkeypatch: pytest.MonkeyPatch) -> None:
    exact(4)
    with crew() as made:
        made.start(4)
        swarm = swarm_of(made, 4, timeout_s=6.0)
        driven_by_two(swarm, 0)
        with monkeypatch.context() as patch:
            shared(swarm, patch)
            made.help(4, DiesWithMicroBatches)
            assert not any(driven_by_two(swarm, 1))
            made.help(4)
            assert any(driven_by_two(swarm, 2))
        driven_by_two(swarm, 3)
        swarm.close()
        ends_well(made.processes.pop())


def test_trainers_with_other_data_are_refused() -> None:
    with crew() as made:
        made.start(3)
        swarm = swarm_of(made, 3)
        trainer = JoinedTrainer(swarm.address, in_flight=1)
        with ThreadPoolExecutor(1) as pool:
            swarm.members.choose = lambda *given: time.sleep(1)
            step = pool.submit(swarm.step, batches(0))
            with pytest.raises(PeerError, match="5 micro-batches per step, but .* has 6"):
                trainer.step(batches(0)[:5])
            with pytest.raises(RuntimeError, match="no peer of stage 0"):
                step.result()
        swarm.close()


class DiesAskedAgain(StagePeer):
    """At the first backward pass after it was asked to sum."""

    asked = False

    def _reduce(self, key: tuple[int, int], **rest: Any) -> Any:
        self.asked |= key[0] == 1
        return super()._reduce(key, **rest)

    def _backward(self, task: tuple[int, int], **rest: Any) -> Any:
        if self.asked:
            os._exit(1)
        return super()._backward(task, **rest)


def test_a_peer_that_dies_in_place_of_another() -> None:
    """What it had summed itself is computed again, too, though it comes before in the step."""
    with crew() as made:
        made.start(3)
        swarm = swarm_of(made, 3, timeout_s=4.0, in_flight=1)
        first = losses(swarm, [0])
        [stays], doers = swarm.members.stages[1], []
        for kind in (DiesAskedAgain, DiesBeforeSumming):
            made.start(1, kind)
            swarm.wait_for(4 + len(doers))
            doers += [m.address for m in swarm.members.newcomers if m.address not in doers]
        swarm.members.place = lambda member: 1
        choose, again = swarm.members.choose, doers[0]
        wanted = {0: [again], 1: [doers[1], again]}

        def scripted(stage: int, number: int, size: float, but: set[Any]) -> Any:
            there = [*wanted.get(number, []), stays] if stage == 1 else []
            left = [a for a in there if a in swarm.members.stages[1] and a not in but]
            return left[0] if left else choose(stage, number, size, but)

        swarm.members.choose = scripted
        second = swarm.step(batches(1))
        assert (second.redone, set(second.gone)) == (2, set(doers))
        assert [*first, sum(second.losses), *losses(swarm, [2])] == pytest.approx(
            alone(3), rel=2e-6)
        swarm.close()


def test_a_silent_peer() -> None:
    """Stopped, not dead: nothing says so but the time."""
    with crew() as made:
        made.start(6)
        swarm = swarm_of(made, 6, timeout_s=3.0)
        first = losses(swarm, [0])
        made.signal(signal.SIGSTOP, 4)
        second = swarm.step(batches(1))
        assert len(second.gone) == 1
        made.signal(signal.SIGCONT, 4)
        swarm.wait_for(6)  # it comes back, and loads what it has missed
        assert [*first, sum(second.losses), *losses(swarm, [2, 3])] == pytest.approx(
            alone(4), rel=2e-6)
        assert sum(map(len, swarm.members.stages)) == 6
        swarm.close()


def test_peers_that_come_together_are_all_accepted() -> None:
    server = MessageServer("127.0.0.1", 0, lambda request: request)
    server._server.shutdown()  # nobody takes connections, as on a machine that is busy
    with contextlib.ExitStack() as opened:
        for _ in range(100):
            opened.enter_context(socket.create_connection(server.address, timeout=0.9))
    server._server.server_close()


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.permutations(range(8)))
def test_any_peers_die_at_any_step(order: list[int]) -> None:
    with crew() as made:
        made.start(8)
        swarm = swarm_of(made, 8)
        expected, got = alone(4), []
        for step in range(4):
            got += losses(swarm, [step])
            # which stage a process serves is not known here: as long as each has two
            if step < 2 and min(map(len, swarm.members.stages)) > 1:
                made.signal(signal.SIGKILL, order[step])
        assert got == pytest.approx(expected, rel=2e-6)
        swarm.close()


def test_a_newcomer_and_a_peer_that_moves_load_what_they_serve() -> None:
    with crew() as made:
        made.start(3)
        swarm = swarm_of(made, 3, rebalance_s=0.0)
        got = losses(swarm, [0])
        made.start(1)
        swarm.wait_for(4)
        moves = []
        for step in range(1, 5):
            two = next((i for i, peers in enumerate(swarm.members.stages) if len(peers) == 2), 0)
            there = swarm.members.stages[two]
            swarm.members.best_move = lambda there=there, two=two: (
                (Member(there[0], 1.0, None), two, (two + 1) % 3) if len(there) == 2 else None)
            result = swarm.step(batches(step))
            got.append(sum(result.losses))
            moves += result.moved
        assert len(moves) == 3 and not result.gone
        assert got == pytest.approx(alone(5), rel=2e-6)
        swarm.close()


def test_who_moves() -> None:
    """The peer that makes the slowest stage fastest, if the stage that it leaves stays faster."""
    members = SwarmMembers(2, 0)
    for name, speed, stage in (("a", 1.0, 0), ("b", 5.0, 1), ("c", 2.0, 1), ("d", 0.5, 1)):
        members.serve(Member((name, 1), 1.0, speed), stage)
    moved, old, new = members.best_move()
    assert (moved.address[0], old, new) == ("c", 1, 0)  # 3 and 5.5; b would leave 6 and 2.5
    members.leave(1, moved.address)
    members.serve(moved, 0)
    assert members.best_move()[0].address[0] == "d"  # 3.5 and 5
    members.leave(1, ("d", 1))
    members.serve(Member(("d", 1), 1.0, 0.5), 0)
    assert members.best_move() is None


def test_own_placement_of_peers() -> None:
    class Reversed(SwarmMembers):
        """The first peer gets the last stage, the second one the stage before it, and so on."""

        asked = 0

        def place(self, member: Member) -> int:
            self.asked += 1
            return (len(STAGES) - self.asked) % len(STAGES)

    members = Reversed(len(STAGES), SEED)
    with crew() as made:
        made.start(len(STAGES) + 1)
        swarm = swarm_of(made, len(STAGES) + 1, members=members)
        assert losses(swarm, range(2)) == pytest.approx(exact(2), rel=2e-6)
        assert swarm.members is members
        assert list(map(len, members.stages)) == [1, 1, 2]
        swarm.close()


def test_a_stage_without_peers_and_a_saved_folder(tmp_path: Path) -> None:
    with crew() as made:
        made.start(3)
        swarm = swarm_of(made, 3)
        before = losses(swarm, [0, 1])
        swarm.save(tmp_path / "saved")
        losses(swarm, [2])
        made.signal(signal.SIGKILL, 0)
        with pytest.raises(RuntimeError, match="no peer of stage|has no peer"):
            losses(swarm, [3])
        with pytest.raises(RuntimeError, match="resume from the last folder of `save`"):
            losses(swarm, [3])
        swarm.close()
    with crew() as made:
        made.start(4)
        with pytest.raises(ValueError, match="has 3 stages, but the swarm has 2"):
            Swarm(2, resume=tmp_path / "saved")
        swarm = swarm_of(made, 4, resume=tmp_path / "saved")
        assert swarm.steps == 2
        assert before + losses(swarm, [2, 3]) == pytest.approx(alone(4), rel=2e-6)
        swarm.close()


@pytest.mark.parametrize("name", ["swarm.json", "step_1_stage_0.pt"])
@pytest.mark.parametrize("damage", [lambda data: data[:len(data) // 2], lambda data: b"[1]",
                                    lambda data: b""])
def test_a_damaged_folder_is_named(name: str, damage: Callable[[bytes], bytes], tmp_path: Path
                                   ) -> None:
    save_swarm(tmp_path, 1, [{"module": nn.Linear(2, 2).state_dict(), "optimizer": {}}])
    path = tmp_path / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=f"{name} cannot be read"):
        Swarm(1, resume=tmp_path)


class PartlyFrozen(nn.Module):
    """A bias that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.linear.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_what_is_frozen_stays() -> None:
    """Also under weight decay, which changes every parameter that has a gradient."""
    stage = ServedStage(make_stage([PartlyFrozen], 0, SEED),
                        partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5),
                        lambda out, target: out.sum(), SEED, 0)
    before = {name: x.clone() for name, x in stage.module.named_parameters()}
    stage.backward(0, torch.ones(2, 4), None, None)
    stage.count(0)
    stage.apply(stage.gradients, 1.0)
    after = dict(stage.module.named_parameters())
    assert torch.equal(after["linear.bias"], before["linear.bias"])
    assert not torch.equal(after["linear.weight"], before["linear.weight"])


class Sometimes(nn.Module):
    """Of two matrices the second one is for positive tokens alone."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x_BD: Tensor) -> Tensor:
        y_BD = self.always(x_BD)
        return y_BD + self.sometimes(x_BD) if bool((x_BD > 0).any()) else y_BD


def test_what_no_pass_of_any_peer_needs_stays() -> None:
    """Two peers and one process: no decay and no momentum moves it, as an optimizer has it."""
    adamw = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    peers = [ServedStage(make_stage([Sometimes], 0, SEED), adamw, lambda y, _: y.square().mean(),
                         SEED, 0) for _ in range(2)]
    alone = make_stage([Sometimes], 0, SEED)
    stepper = adamw(alone.parameters())
    for step, signs in enumerate(((1.0, -1.0), (-1.0, -1.0), (-1.0, 1.0))):
        before = alone.sometimes.weight.detach().clone()
        inputs = [sign * torch.full((2, 3), step + 0.5) for sign in signs]
        for number, (peer, x) in enumerate(zip(peers, inputs, strict=True)):
            peer.backward(number, x, None, None)
            peer.count(number)
            alone(x).square().mean().backward()
        total = peers[0].gradients + peers[1].gradients
        grads = [p.grad for p in alone.parameters() if p.grad is not None]
        assert peers[0].norm(total) == pytest.approx(float(nn.utils.get_total_norm(grads)))
        for peer in peers:
            peer.apply(total.clone(), 1.0)
        stepper.step()
        stepper.zero_grad()
        for peer in peers:
            for mine, theirs in zip(peer.parameters, alone.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
        assert torch.equal(before, alone.sometimes.weight) == (max(signs) < 0)


def test_a_peer_does_what_is_listed_alone() -> None:
    peer = StagePeer(("127.0.0.1", 1), STAGES, SGD, loss)
    try:
        for what in ("_class__", "answer", "nothing"):
            with pytest.raises(PeerError, match=f"unknown request '{what}'; known: apply"):
                ask(peer.about["address"], what, 5.0)
    finally:
        peer.close()


@pytest.mark.parametrize(("options", "match"), [
    ({"stages": 0}, "stages=0 must be >= 1"), ({"timeout_s": 0}, "timeout_s=0 > 0"),
    ({"wire": "fp9"}, "unknown wire 'fp9'; known: none, bf16"),
    ({"resume": "nowhere"}, "nowhere/swarm.json is missing")])
def test_wrong_arguments(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Swarm(**{"stages": 2, **options})


def served(stages: list[Callable[[], nn.Module]], message: str) -> None:
    """A step over one peer for each stage, in threads, fails with this message."""
    swarm = Swarm(len(stages), timeout_s=2.0)
    peers = [StagePeer(swarm.address, stages, SGD, lambda out, target: out.sum(), timeout_s=2.0)
             for _ in stages]
    threads = [threading.Thread(target=peer.run) for peer in peers]
    for thread in threads:
        thread.start()
    try:
        swarm.wait_for(len(stages))
        with pytest.raises(RuntimeError, match=message):
            swarm.step([(torch.randn(4, 16), torch.zeros(4))])
    finally:
        for peer in peers:
            peer.close()
        swarm.close()
        for thread in threads:
            thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_state_that_peers_do_not_share_is_refused() -> None:
    served([partial(nn.BatchNorm1d, 16), partial(nn.Linear, 16, 3)],
           "buffer 'running_mean' changes in a training pass")


def test_a_router_that_counts_is_refused() -> None:
    served([partial(Experts, "sigmoid_bias"), partial(nn.Linear, 16, 3)],
           r"buffer 'moe.router.\w+' changes in a training pass")


def test_an_error_of_the_model_is_told() -> None:
    served([partial(nn.Linear, 15, 3)], "backward of micro-batch 0: no peer of stage 0 compl.*"
           "RuntimeError: mat1 and mat2 shapes")
