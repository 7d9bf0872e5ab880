"""Peers that each train a whole model whose weights stream through their device, and average their
weights every so many steps (local SGD, DiLoCo, as torchft's `LocalSGD` and `DiLoCo`). Peers come
and go.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_plugin.config import OffloadConfig
from moe_plugin.memory.passes import FlatLayout, aligned_buffer
from moe_plugin.memory.tiers import TierBuffer
from moe_plugin.memory.weights.files import load_weights, read_beside, save_weights
from moe_plugin.memory.weights.streamed import StepResult, StreamedTrainer
from moe_plugin.training.resilience.elastic import ElasticReplica, ReplicaPlace
from moe_plugin.utils.folder_lock import FolderLock, hold_saved
from moe_plugin.utils.run_feature import RunFeature, StepFacts

log = logging.getLogger(__name__)
_START, _MOMENTUM = "start", "momentum"  # in a saved folder
BlockState = Mapping[str, Sequence[Tensor]]  # a block's state of the outer optimizer


@dataclass(frozen=True)
class OuterNesterov:
    """DiLoCo's outer optimizer: SGD with Nesterov momentum on the mean of the peers' changes.

    With theta, the weights after the last average, theta_i, those of peer i now, and a momentum b
    that begins at 0: Delta = mean_i(theta - theta_i); b <- mu b + Delta; theta <- theta - lr (Delta
    + mu b). Source: Douillard et al., DiLoCo (arXiv 2311.08105), algorithm 1, with its values.

    Attributes:
        lr: above 0. momentum: mu, in [0, 1).
    Raises:
        ValueError: a number is out of bounds.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"outer lr={self.lr}: must be > 0 and finite, e.g. 0.7")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"outer momentum={self.momentum}: must be in [0, 1), e.g. 0.9")

    @torch.no_grad()
    def step(self, weights: Sequence[Tensor], momenta: Sequence[Tensor],
             changes: Sequence[Tensor]) -> None:
        """Update theta and b in place; changes: Delta, which is overwritten."""
        for theta, b, delta in zip(weights, momenta, changes, strict=True):
            b.mul_(self.momentum).add_(delta)
            theta.add_(delta.add_(b, alpha=self.momentum), alpha=-self.lr)


class StreamedPeer:
    """This peer's trainer and its part in the averages.

    Weights are averaged block by block, so that no peer ever has the whole model in memory. A peer
    that joins, or comes back, gets the others' weights in its first average, their counts (buffers
    of integers, which no average changes), with DiLoCo the outer optimizer's state, too; its own
    optimizer begins again, as with any local SGD.

    Args:
        trainer: the same model and optimizer on every peer.
        lighthouse, replica, timeout_s: see `ElasticReplica`.
        every: steps between averages.
        outer: DiLoCo's outer optimizer, the same on every peer, whose state is in the trainer's
            tier: twice the weights. None: weights become their mean.
        resume: a folder that `save` wrote, which the trainer and the outer optimizer continue.
        outer_states: what `outer_state` gave of each block, from a host's checkpoint; None: the
            outer optimizer starts from zero.

    Attributes:
        replica: with `members` of the last average and averages that were `lost`.
    Raises:
        ValueError: `every` is below 1, and what `ElasticReplica` and `load_weights` raise.
    """

    def __init__(self, trainer: StreamedTrainer, lighthouse: str, replica: int, every: int,
                 timeout_s: float = 60.0, outer: OuterNesterov | None = None,
                 resume: str | os.PathLike[str] | None = None,
                 outer_states: Iterable[BlockState] | None = None) -> None:
        if every < 1:
            raise ValueError(f"every={every}: must be >= 1; give steps between averages, e.g. 50")
        self.trainer, self.every, self.outer = trainer, every, outer
        self._kept: list[_OuterState] = []
        if resume is not None:
            load_weights(trainer, resume)
            outer_states = (read_beside(resume, block) for block in trainer.blocks)
        if outer is not None and outer_states is not None:
            self._take(outer_states)
        self.replica = ElasticReplica(lighthouse, replica, lambda: {"steps": trainer.steps},
                                      self._load, timeout_s, trainer.steps)
        self._locks: dict[str, FolderLock | None] = {}  # of the folders of `save`
        self._joined = False
        self._steps_of_others: int | None = None
        self._counts: list[tuple[Tensor, Tensor]] = []  # buffers, and those of another peer

    def _load(self, state: dict[str, int]) -> None:
        self._steps_of_others = state["steps"]

    def step(self, micro_batches: Sequence[tuple[Tensor, Any]]) -> StepResult:
        """A step of the trainer, and after every so many an average; the first call begins with
        one, by which a peer joins.

        Raises: what `StreamedTrainer.step` and `ElasticReplica.average_parts` raise.
        """
        if not self._joined:
            self.join()
        result = self.trainer.step(micro_batches)
        self.stepped()
        return result

    def stepped(self) -> None:
        """After a step of the trainer: an average, if one is due."""
        if self.trainer.steps % self.every == 0:
            self.average()

    def join(self) -> None:
        """Meet the others: afterwards this peer has their weights. With DiLoCo peers that start
        together and continue one saved run keep their own, and no outer step is made.
        """
        while not self._average(meeting=True):
            pass
        self._joined = True

    def average(self) -> bool:
        """Average the weights of the living peers now; False: a peer was lost meanwhile, and every
        peer goes on with its own.
        """
        return self._average(meeting=False)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the trainer's state and the outer optimizer's, for `resume`; each peer to a folder
        of its own, which is its own until `close`.

        Raises: ValueError: see `save_weights`; another run has the folder.
        """
        if (name := os.path.realpath(folder)) not in self._locks:
            self._locks[name] = hold_saved(folder)
        return save_weights(self.trainer, folder, self.outer_state)

    def outer_state(self, number: int) -> dict[str, list[Tensor]]:
        """The outer optimizer's state of a block, a copy; empty: there is none."""
        if not self._kept:
            return {}
        _, theta, momenta = self._kept[number].read()
        return {_START: theta, _MOMENTUM: momenta}

    def _take(self, outer_states: Iterable[BlockState]) -> None:
        for each in outer_states:
            if not {_START, _MOMENTUM} <= set(each):
                log.warning("what is resumed has no state of an outer optimizer: its momentum "
                            "begins at zero")
                self._kept = []
                return
            self._kept.append(_OuterState(self.trainer, each[_START], each[_MOMENTUM]))

    def _average(self, meeting: bool) -> bool:
        self._steps_of_others = None
        if self.outer is not None and not self._kept:
            self.trainer.settle()
            self._kept = [_OuterState(self.trainer, block.read()) for block in self.trainer.blocks]
        self._counts = []
        taken = self.trainer.replace_weights(
            (lambda blocks: self.replica.average_parts(self._mine(blocks))) if self.outer is None
            else lambda blocks: self._outer_average(blocks, meeting))
        if taken and self._steps_of_others is not None:
            self.trainer.steps = self._steps_of_others  # with the weights that belong to it
            for buffer, theirs in self._counts:
                buffer.copy_(theirs)
        return taken

    def _mine(self, blocks: Iterator[list[Tensor]]) -> Iterator[list[Tensor]]:
        for number, mine in enumerate(blocks):
            if self.replica.joining:
                self._spread_counts(number)
            yield mine

    def _spread_counts(self, number: int) -> None:
        """Send a block's buffers that are not floating-point numbers, which a newcomer takes."""
        buffers = [x for x in self.trainer.blocks[number].saved_buffers().values()
                   if not x.is_floating_point()]
        copies = [x.detach().cpu().contiguous().clone() for x in buffers]
        if copies:  # as bytes: any dtype can be sent
            self.replica.spread([x.view(-1).view(torch.uint8) for x in copies])
        self._counts += zip(buffers, copies, strict=True)

    def _outer_average(self, blocks: Iterator[list[Tensor]], meeting: bool) -> bool:
        staged: list[Callable[[bool], None]] = []
        taken = False
        try:
            taken = self.replica.average_parts(self._parts(blocks, staged, meeting))
        finally:
            for finish in staged:
                finish(taken)
        return taken

    def _parts(self, blocks: Iterator[list[Tensor]], staged: list[Callable[[bool], None]],
               meeting: bool) -> Iterator[list[Tensor]]:
        trained = torch.tensor([0 if meeting else 1])
        yield [trained]  # its sum over the peers that are no newcomers
        yield from (self._changes if trained.item() else self._meet)(blocks, staged)

    def _meet(self, blocks: Iterator[list[Tensor]], staged: list[Callable[[bool], None]]
              ) -> Iterator[list[Tensor]]:
        """No peer has trained since: all take the first living peer's state, except those that
        have it already, whose own weights may be some steps further.
        """
        mine = self._digest()
        first = mine.clone()
        self.replica.spread([first])
        same = torch.equal(first, mine)
        for number, (kept, own) in enumerate(zip(self._kept, blocks, strict=True)):
            flat_N, theta, momenta = kept.read()
            buffers = [x.clone() for x in own[len(theta):]]
            self.replica.spread([*theta, *momenta, *buffers])
            self._spread_counts(number)
            if not same:
                for x, new in zip(own, [*theta, *buffers], strict=True):
                    x.copy_(new)
                staged.append(self._kept[number].held.stage(flat_N))
            yield []

    def _digest(self) -> Tensor:
        """int64 [4]: of the outer optimizer's state, and the steps done."""
        found = blake2b(str(self.trainer.steps).encode(), digest_size=32)
        for kept in self._kept:
            found.update(kept.read()[0].numpy())
        return torch.frombuffer(bytearray(found.digest()), dtype=torch.int64)

    def _changes(self, blocks: Iterator[list[Tensor]], staged: list[Callable[[bool], None]]
                 ) -> Iterator[list[Tensor]]:
        """By block the changes since the last average, and buffers; once averaged, both become the
        block's new weights and buffers.
        """
        for number, mine in enumerate(blocks):
            flat_N, theta, momenta = self._kept[number].read()
            if self.replica.joining:
                self.replica.spread([*theta, *momenta])
                self._spread_counts(number)
            weights = mine[:len(theta)]
            for x, start in zip(weights, theta, strict=True):
                torch.sub(start, x, out=x)
            yield mine
            self.outer.step(theta, momenta, weights)
            for x, new in zip(weights, theta, strict=True):
                x.copy_(new)
            staged.append(self._kept[number].held.stage(flat_N))

    def close(self) -> None:
        """Leave. The others go on without this peer."""
        for lock in filter(None, self._locks.values()):
            lock.release()
        self._locks.clear()
        self.replica.close()


class _OuterState:
    """A block's weights after the last average, and the outer momentum, in the trainer's tier."""

    def __init__(self, trainer: StreamedTrainer, weights: Sequence[Tensor],
                 momenta: Sequence[Tensor] | None = None) -> None:
        if momenta is None:
            momenta = [torch.zeros_like(x) for x in weights]
        self.layout = FlatLayout.of([*weights, *weights])
        self.held = TierBuffer(trainer.tier)
        flat_N = aligned_buffer(self.layout.nbytes, "cpu")
        self.layout.fill(flat_N, [*weights, *momenta])
        self.held.put(flat_N)

    def read(self) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """A copy: all, weights and momenta, which are its parts."""
        flat_N = aligned_buffer(self.layout.nbytes, "cpu")
        self.held.read(flat_N)
        both = self.layout.views(flat_N)
        return flat_N, both[:len(both) // 2], both[len(both) // 2:]


def peer_of(settings: OffloadConfig, trainer: StreamedTrainer, lighthouse: str, replica: int,
            timeout_s: float = 60.0,
            outer_states: Iterable[BlockState] | None = None) -> StreamedPeer:
    """The peer that `offload.average_every`, `outer_lr` and `outer_momentum` ask for; arguments and
    errors as of `StreamedPeer`.
    """
    outer = None if settings.outer_lr is None else OuterNesterov(settings.outer_lr,
                                                                 settings.outer_momentum)
    return StreamedPeer(trainer, lighthouse, replica, settings.average_every, timeout_s, outer,
                        outer_states=outer_states)


def unfit_peer(settings: OffloadConfig, lighthouse: str | None) -> list[tuple[str, bool, str]]:
    """(setting, whether it does not fit, remedy) of a run whose weights stream."""
    every = settings.average_every
    return [("--moe-lighthouse without --moe-average-every", bool(lighthouse) and not every,
             "peers average weights, not gradients: give it, e.g. 50"),
            (f"--moe-average-every {every} without --moe-lighthouse", every > 0 and not lighthouse,
             "give the address of the lighthouse")]


class PeerSteps(RunFeature):
    """A run of a host whose weights stream, as a peer.

    Args:
        settings, trainer: see `peer_of`.
        place: of this run among the peers; its models and optimizers are those of the trainer.

    Attributes:
        saved: `outer_states` of `StreamedPeer` from a checkpoint, set before the first step.
    """

    def __init__(self, settings: OffloadConfig, trainer: StreamedTrainer,
                 place: ReplicaPlace) -> None:
        logging.getLogger("torchft").setLevel(logging.WARNING)  # it has lines for each average
        self.settings, self.trainer, self.place = settings, trainer, place
        self.saved: Iterable[BlockState] | None = None
        self.peer: StreamedPeer | None = None

    def begin(self) -> None:
        """Meet the others with the weights of the checkpoint."""
        self.trainer.steps, place = self.place.done, self.place
        self.peer = peer_of(self.settings, self.trainer, place.lighthouse, place.replica,
                            place.timeout_s, self.saved)
        self.saved = None
        self.peer.join()
        self._follow()

    def after_step(self, facts: StepFacts) -> None:
        """An average, if one is due. Collective over the peers."""
        if facts.made and self.peer is not None:
            self.peer.stepped()
            self._follow()

    def _follow(self) -> None:
        if self.trainer.steps != self.place.done:
            self.place.take(self.trainer.steps)

    def outer_state(self, number: int) -> BlockState:
        """For a checkpoint: a block's part of what `saved` is to be."""
        return {} if self.peer is None else self.peer.outer_state(number)

    def numbers(self) -> dict[str, float]:
        return {} if self.peer is None else {"replicas": self.peer.replica.members}

    def close(self) -> None:
        if self.peer is not None:
            self.peer.close()
