"""Peers that stream their weights and average them: as one process that averages by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from moe_plugin.memory.tiers import DiskTier, HostTier
from moe_plugin.memory.weights.blocks import MakeOptimizer
from moe_plugin.memory.weights.files import save_weights
from moe_plugin.memory.weights.streamed import StreamedTrainer
from moe_plugin.training.resilience.averaging_peers import OuterNesterov, StreamedPeer

coordination = pytest.importorskip("torchft.coordination")
SGD = partial(torch.optim.SGD, lr=0.1)
STEPS, EVERY = 4, 2


class Counting(nn.Linear):
    """Counts the micro-batches that it was trained with."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__(width, inner)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("trained", torch.zeros(2, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls = self.calls + 1
            self.trained = torch.tensor([True, False])
        return super().forward(x)


def counts_of(trainer: StreamedTrainer) -> list[object]:
    module = trainer.blocks[0].module
    return [int(module.calls), module.trained.tolist()]


def trainer_of(tier: HostTier | DiskTier, seed: int = 1,
               optimizer: MakeOptimizer = SGD) -> StreamedTrainer:
    torch.manual_seed(seed)
    return StreamedTrainer([Counting(4, 6), nn.Linear(6, 4), nn.Linear(4, 1)],
                           lambda y, target: (y - target).square().mean(), optimizer, tier)


def data(peer: int, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(10 * peer + step)
    return [(torch.randn(3, 4, generator=random), torch.ones(3, 1))]


def weights_of(trainer: StreamedTrainer) -> list[torch.Tensor]:
    trainer.settle()
    return [x.clone() for block in trainer.blocks for x in block.read()]


def by_hand(seeds: tuple[int, ...]) -> list[list[torch.Tensor]]:
    """Weights of the peers after each average; they begin with the first one's."""
    trainers = [trainer_of(HostTier("cpu")) for _ in seeds]
    seen = []
    for step in range(STEPS):
        for peer, trainer in enumerate(trainers):
            trainer.step(data(peer, step))
        if (step + 1) % EVERY == 0:
            means = [sum(parts) / len(parts) for parts in zip(*map(weights_of, trainers),
                                                              strict=True)]
            for trainer in trainers:
                left = iter(means)

                def take(blocks, left=left):
                    for block in blocks:
                        for x in block:
                            x.copy_(next(left))
                    return True

                trainer.replace_weights(take)
            seen.append(means)
    return seen


def start_lighthouse() -> Any:
    """It waits for two peers, and up to a minute for more."""
    return coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=2,
                                         join_timeout_ms=60_000)


def run_peers(work: Callable[[int], None], peers: int, lighthouse: Any,
              failed: list[BaseException], timeout_s: float) -> None:
    """`work(number)` of all peers in threads of this process; none of them may have failed."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(peers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    lighthouse.shutdown()
    assert not failed, failed


def lose_joining(peer: StreamedPeer) -> list[bool]:
    """The first average in which a peer joins is lost, after all parts of it were averaged: as all
    lose it where one more of them dies. Returns what says that it was.
    """
    replica, commit, lost = peer.replica, peer.replica._commit, []

    def lose() -> bool:
        if replica.joining and replica._group.size() == 3 and not lost:
            lost.append(True)
            replica._manager.report_error(TimeoutError("on purpose"))
        return commit()

    replica._commit = lose
    return lost


def test_averages_are_those_of_one_process_and_a_peer_joins(tmp_path):
    """Two peers, weights in files and in host memory; a third one starts when they are at work. The
    average in which it joins is lost first: its own weights must not be in the next one.
    """
    lighthouse = start_lighthouse()
    trainers = [trainer_of(DiskTier(tmp_path) if number else HostTier("cpu"),
                           seed=7 if number == 2 else 1) for number in range(3)]
    seen: dict[int, list[torch.Tensor]] = {}
    failed: list[BaseException] = []
    ready, joined = threading.Event(), threading.Event()
    ended: list[bool] = []
    both = threading.Barrier(2, action=lambda: ended.append(joined.is_set() or bool(failed)))

    def work(number: int) -> None:
        trainer = trainers[number]
        try:
            late = number == 2  # its weights are others: it takes those of the two
            assert not late or ready.wait(60)
            peer = StreamedPeer(trainer, lighthouse.address(), number, EVERY, timeout_s=20)
            lost = lose_joining(peer)
            for step in range(0 if late else STEPS):
                peer.step(data(number, step))
            ready.set()
            while late and not peer.average():
                assert trainer.steps == 0 and lost
            seen[number] = weights_of(trainer)
            joined.set() if late else both.wait(60)
            while not late and not ended[-1]:
                peer.average()
                both.wait(60)
            assert trainer.steps == STEPS and lost
            assert counts_of(trainer) == [STEPS, [True, False]]
            peer.close()
        except BaseException as error:
            failed.append(error)
        trainer.close()

    run_peers(work, 3, lighthouse, failed, timeout_s=100)
    expected = by_hand((1, 1))[-1]
    for number in range(3):
        for x, y in zip(seen[number], expected, strict=True):
            assert torch.equal(x, y)


def test_refuses_averages_without_steps_between(tmp_path):
    """By name and bound."""
    with pytest.raises(ValueError, match="every=0 is out of bounds: .* >= 1; use e.g. 50"):
        StreamedPeer(trainer_of(HostTier("cpu")), "http://127.0.0.1:1", 0, 0)


def resident_peer(start: list[torch.Tensor], peer: int, steps: tuple[int, ...]
                  ) -> list[torch.Tensor]:
    """Weights of a peer after steps from `start`."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 1))
    with torch.no_grad():
        for p, x in zip(model.parameters(), start, strict=True):
            p.copy_(x)
    optimizer = SGD(model.parameters())
    for step in steps:
        for x, target in data(peer, step):
            optimizer.zero_grad()
            (model(x) - target).square().mean().backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


def diloco(rounds: list[tuple[int, tuple[int, ...]]]) -> list[list[torch.Tensor]]:
    """DiLoCo's algorithm 1 with torch's own SGD as outer optimizer: the weights after each round of
    so many peers and steps.
    """
    theta = [nn.Parameter(x) for x in weights_of(trainer_of(HostTier("cpu")))]
    outer, seen = torch.optim.SGD(theta, lr=0.7, momentum=0.9, nesterov=True), []
    for peers, steps in rounds:
        start = [x.detach().clone() for x in theta]
        ends = [resident_peer(start, peer, steps) for peer in range(peers)]
        for x, begin, *parts in zip(theta, start, *ends, strict=True):
            x.grad = sum(begin - part for part in parts) / peers
        outer.step()
        seen.append([x.detach().clone() for x in theta])
    return seen


def test_diloco_is_its_published_formula_and_a_peer_joins_and_leaves(tmp_path):
    """Two peers; a third one takes weights and outer momentum of these, trains with them, and
    leaves.
    """
    lighthouse = start_lighthouse()
    trainers = [trainer_of(DiskTier(tmp_path) if number else HostTier("cpu"),
                           seed=7 if number == 2 else 1) for number in range(3)]
    seen: list[list[tuple[int, list[torch.Tensor]]]] = [[], [], []]
    failed: list[BaseException] = []
    ready, left = threading.Event(), threading.Event()
    both = threading.Barrier(2)

    def work(number: int) -> None:
        trainer = trainers[number]

        def note(peer: StreamedPeer) -> None:
            seen[number].append((peer.replica.members, weights_of(trainer)))

        try:
            late = number == 2
            assert not late or ready.wait(120)
            peer = StreamedPeer(trainer, lighthouse.address(), number, EVERY, 120.0,
                                OuterNesterov())
            peer.join()
            if late:
                assert counts_of(trainer) == [STEPS, [True, False]]
                note(peer)
            else:
                for step in range(STEPS):
                    peer.step(data(number, step))
                    if step % EVERY == EVERY - 1:
                        note(peer)
                ready.set()
                there = False
                while not there:  # both see it in the same average
                    assert peer.average()
                    note(peer)
                    there = peer.replica.joining
            while trainer.steps < STEPS + EVERY:
                peer.step(data(number, trainer.steps))
            note(peer)
            if late:
                peer.close()
                left.set()
            else:
                assert left.wait(120)
                while not peer.average():  # it may be lost: the third one was in the last one
                    pass
                note(peer)
                both.wait(120)
                peer.close()
        except BaseException as error:
            failed.append(error)
            both.abort()
        trainer.close()

    run_peers(work, 3, lighthouse, failed, timeout_s=300)
    ours, of_late = seen[0], seen[2]
    idle = len(ours) - STEPS // EVERY - 2
    assert idle > 0 and ours[-1][0] == 2 and ours[-2][0] == of_late[-1][0] == 3
    expected = diloco([(2, (0, 1)), (2, (2, 3)), *[(2, ())] * idle, (3, (4, 5)), (2, ())])
    for (_, found), (_, other), wanted in zip(ours, seen[1], expected, strict=True):
        assert all(map(torch.equal, found, other))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert all(map(torch.equal, of_late[0][1], ours[-3][1]))  # it took what they had then
    assert all(map(torch.equal, of_late[1][1], ours[-2][1]))
    assert not torch.allclose(ours[-1][1][0], ours[-2][1][0], rtol=0, atol=1e-4)  # momentum goes on


def of_two_peers(folder, begin: int, end: int) -> list[tuple[list[torch.Tensor], ...]]:
    """Losses of steps `begin` to `end`, then weights and outer momenta, of both peers of a run that
    continues what was saved at `begin`, and is saved at `end`.
    """
    lighthouse = start_lighthouse()
    found: list[tuple[list[torch.Tensor], ...]] = [(), ()]
    failed: list[BaseException] = []
    both = threading.Barrier(2)

    trainers = [trainer_of(DiskTier(folder), optimizer=partial(torch.optim.Adam, lr=0.1))
                for _ in range(2)]

    def work(number: int) -> None:
        trainer = trainers[number]
        try:
            peer = StreamedPeer(trainer, lighthouse.address(), number, EVERY, 120.0,
                                OuterNesterov(),
                                resume=folder / f"{number} at {begin}" if begin else None)
            losses = [peer.step(data(number, step)).losses[0] for step in range(begin, end)]
            momenta = [x.clone() for kept in peer._kept for x in kept.read()[2]]
            peer.save(folder / f"{number} at {end}")
            found[number] = losses, weights_of(trainer), momenta
            assert trainer.steps == end
            both.wait(120)
            peer.close()
        except BaseException as error:
            failed.append(error)
            both.abort()
        trainer.close()

    run_peers(work, 2, lighthouse, failed, timeout_s=300)
    return found


def test_diloco_continues_from_a_checkpoint_with_the_same_bits(tmp_path):
    """Saved right after an average, and between two of them; weights and momenta at the end are
    those of a run that nothing stopped, and losses all the way.
    """
    whole = of_two_peers(tmp_path, 0, 3 * EVERY)
    parts = [of_two_peers(tmp_path, begin, end)
             for begin, end in ((0, EVERY), (EVERY, 2 * EVERY + 1), (2 * EVERY + 1, 3 * EVERY))]
    for number in range(2):
        losses, weights, momenta = whole[number]
        assert all(map(torch.equal, losses, [x for part in parts for x in part[number][0]]))
        assert all(map(torch.equal, weights, parts[-1][number][1]))
        assert all(map(torch.equal, momenta, parts[-1][number][2]))
        assert any(x.any() for x in momenta)
    assert len(losses) == 3 * EVERY


def test_a_folder_without_outer_momentum_says_so(tmp_path, caplog):
    """One of `save_weights`; one whose momentum is of another shape is refused by name."""
    trainer = trainer_of(HostTier("cpu"))
    save_weights(trainer, tmp_path / "plain")
    save_weights(trainer, tmp_path / "other", lambda number: {
        "momentum": [x[:1].clone() for x in trainer.blocks[number].read()]})
    with pytest.raises(ValueError, match="no lighthouse"):
        StreamedPeer(trainer, "http://127.0.0.1:1", 0, EVERY, 0.0, OuterNesterov(),
                     resume=tmp_path / "plain")
    assert "its momentum starts at zero" in caplog.text
    with pytest.raises(ValueError, match=r"beside.momentum.weight' has shape \[1, 4\], but block 0 "
                                         r"needs shape \[6, 4\]"):
        StreamedPeer(trainer, "http://127.0.0.1:1", 0, EVERY, 0.0, OuterNesterov(),
                     resume=tmp_path / "other")
    trainer.close()
