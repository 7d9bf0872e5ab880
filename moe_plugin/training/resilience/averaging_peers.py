"""Peers that train independently and average their weights every few steps (local SGD and DiLoCo).

Each peer trains a full copy of the model. The weights of each peer are streamed through its device.
The two methods correspond to `LocalSGD` and `DiLoCo` in torchft. Peers may join and leave at any
time.
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
_START, _MOMENTUM = "start", "momentum"  # names in a saved folder
BlockState = Mapping[str, Sequence[Tensor]]  # the outer optimizer's state of a block


@dataclass(frozen=True)
class OuterNesterov:
    """The outer optimizer of DiLoCo: SGD with Nesterov momentum, applied to the mean change of the
    peers' weights.

    Let theta be the weights after the last averaging, theta_i the current weights of peer i, and b
    the momentum buffer, which is initially 0. The update is `Delta = mean_i(theta - theta_i)`,
    `b <- mu b + Delta` and `theta <- theta - lr (Delta + mu b)`. Source: Douillard and others,
    DiLoCo (arXiv 2311.08105), algorithm
    1. The default values are those of the DiLoCo paper.

    Attributes:
        lr: learning rate of the outer optimizer, which must be above 0.
        momentum: momentum `mu` of the outer optimizer, which must be in [0, 1).
    Raises:
        ValueError: If a number is out of bounds.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"outer lr={self.lr}: must be > 0 and finite; use e.g. 0.7")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"outer momentum={self.momentum}: must be in [0, 1); use e.g. 0.9")

    @torch.no_grad()
    def step(self, weights: Sequence[Tensor], momenta: Sequence[Tensor],
             changes: Sequence[Tensor]) -> None:
        """Update the weights theta and the momentum buffer b in place. `changes` contains `Delta`.
        The values of `changes` are overwritten.
        """
        for theta, b, delta in zip(weights, momenta, changes, strict=True):
            b.mul_(self.momentum).add_(delta)
            theta.add_(delta.add_(b, alpha=self.momentum), alpha=-self.lr)


class StreamedPeer:
    """The trainer of a peer and its connection to the other peers, over which the weights are
    averaged.

    Weights are averaged one block at a time, so no peer ever has the whole model in memory. When
    the weights are averaged, a joining or returning peer receives the weights of the other peers.
    With DiLoCo, it also receives the state of the outer optimizer. The joining peer also receives
    the counts of the other peers. Counts are integer buffers, which averaging does not change. As
    usual for local SGD, its inner optimizer starts with a new state.

    Args:
        trainer: trainer of this peer. The model and the optimizer of the trainer must be the same
            on every peer.
        lighthouse: see `ElasticReplica`.
        replica: see `ElasticReplica`.
        every: number of training steps after which the weights are averaged.
        timeout_s: see `ElasticReplica`.
        outer: optional. Outer optimizer of DiLoCo, which must be the same on every peer. The state
            of the outer optimizer is twice as large as the weights. This state is stored in the
            trainer's storage tier. By default, there is no outer optimizer, and the weights are
            replaced by the mean of the peers' weights.
        resume: optional. A folder that `save` has written. The trainer and the outer optimizer are
            restored from this folder.
        outer_states: optional. The values that `outer_state` returned for all blocks, which a host
            framework restores from its checkpoint. By default, the outer optimizer starts with a
            new state.

    Attributes:
        replica: the connection to the other peers. `replica.members` is the number of peers whose
            weights were averaged most recently, and `replica.lost` is the number of averaging
            rounds that failed.
    Raises:
        ValueError: If `every` is less than 1, or for the reasons listed in `ElasticReplica` and
            `load_weights`.
    """

    def __init__(self, trainer: StreamedTrainer, lighthouse: str, replica: int, every: int,
                 timeout_s: float = 60.0, outer: OuterNesterov | None = None,
                 resume: str | os.PathLike[str] | None = None,
                 outer_states: Iterable[BlockState] | None = None) -> None:
        if every < 1:
            raise ValueError(f"every={every} is out of bounds: weights can be averaged only after "
                             "a number of steps >= 1; use e.g. 50")
        self.trainer, self.every, self.outer = trainer, every, outer
        self._kept: list[_OuterState] = []
        if resume is not None:
            load_weights(trainer, resume)
            outer_states = (read_beside(resume, block) for block in trainer.blocks)
        if outer is not None and outer_states is not None:
            self._take(outer_states)
        self.replica = ElasticReplica(lighthouse, replica, lambda: {"steps": trainer.steps},
                                      self._load, timeout_s, trainer.steps)
        self._locks: dict[str, FolderLock | None] = {}  # locks of the folders of `save`
        self._joined = False
        self._steps_of_others: int | None = None
        self._counts: list[tuple[Tensor, Tensor]] = []  # buffers, and another peer's values

    def _load(self, state: dict[str, int]) -> None:
        self._steps_of_others = state["steps"]

    def step(self, micro_batches: Sequence[tuple[Tensor, Any]]) -> StepResult:
        """Run a step of the trainer, and average the weights if an averaging round is due.

        The first call joins the other peers before the step.

        This method raises the same errors as `StreamedTrainer.step` and
        `ElasticReplica.average_parts`.
        """
        if not self._joined:
            self.join()
        result = self.trainer.step(micro_batches)
        self.stepped()
        return result

    def stepped(self) -> None:
        """Call this after each step of the trainer. It averages the weights every `every` steps."""
        if self.trainer.steps % self.every == 0:
            self.average()

    def join(self) -> None:
        """Join the other peers. Afterwards, this peer has the same weights as the other peers.

        With DiLoCo, if all peers start together and resume the same saved run, they keep their own
        weights and the outer optimizer performs no step.
        """
        while not self._average(meeting=True):
            pass
        self._joined = True

    def average(self) -> bool:
        """Average the weights of all active peers.

        Returns: False if a peer was lost while the weights were averaged. If so, every peer
            continues with its own weights.
        """
        return self._average(meeting=False)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the states of the trainer and of the outer optimizer to a folder, which can later
        be passed as `resume`.

        Each peer must use a separate folder. The folder stays locked until `close` is called.

        Raises:
            ValueError: If another run uses the folder, or for the reasons listed in `save_weights`.
        """
        if (name := os.path.realpath(folder)) not in self._locks:
            self._locks[name] = hold_saved(folder)
        return save_weights(self.trainer, folder, self.outer_state)

    def outer_state(self, number: int) -> dict[str, list[Tensor]]:
        """Return a copy of the outer optimizer's state for a block.

        If there is no state yet, the copy is empty.
        """
        if not self._kept:
            return {}
        _, theta, momenta = self._kept[number].read()
        return {_START: theta, _MOMENTUM: momenta}

    def _take(self, outer_states: Iterable[BlockState]) -> None:
        for state in outer_states:
            if not {_START, _MOMENTUM} <= set(state):
                log.warning("the resumed run has no state of an outer optimizer; its momentum "
                            "starts at zero")
                self._kept = []
                return
            self._kept.append(_OuterState(self.trainer, state[_START], state[_MOMENTUM]))

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
            self.trainer.steps = self._steps_of_others  # together with the loaded weights
            for buffer, theirs in self._counts:
                buffer.copy_(theirs)
        return taken

    def _mine(self, blocks: Iterator[list[Tensor]]) -> Iterator[list[Tensor]]:
        for number, tensors in enumerate(blocks):
            if self.replica.joining:
                self._spread_counts(number)
            yield tensors

    def _spread_counts(self, number: int) -> None:
        """Send a block's buffers whose dtypes are not floating-point to joining peers."""
        buffers = [x for x in self.trainer.blocks[number].saved_buffers().values()
                   if not x.is_floating_point()]
        copies = [x.detach().cpu().contiguous().clone() for x in buffers]
        if copies:  # sent as bytes, because not every dtype is supported
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
        yield [trained]  # summed over all peers that are not joining
        yield from (self._changes if trained.item() else self._meet)(blocks, staged)

    def _meet(self, blocks: Iterator[list[Tensor]], staged: list[Callable[[bool], None]]
              ) -> Iterator[list[Tensor]]:
        """If no peer has trained since the last averaging round, send the state of the first active
        peer to all peers.

        Peers that already have this state keep their own weights, which may be several steps ahead.
        """
        digest = self._digest()
        first = digest.clone()
        self.replica.spread([first])
        same = torch.equal(first, digest)
        for number, (kept, tensors) in enumerate(zip(self._kept, blocks, strict=True)):
            flat_N, theta, momenta = kept.read()
            buffers = [x.clone() for x in tensors[len(theta):]]
            self.replica.spread([*theta, *momenta, *buffers])
            self._spread_counts(number)
            if not same:
                for x, new in zip(tensors, [*theta, *buffers], strict=True):
                    x.copy_(new)
                staged.append(self._kept[number].held.stage(flat_N))
            yield []

    def _digest(self) -> Tensor:
        """Return a digest of the outer optimizer's state and of the number of steps, int64 [4]."""
        digest = blake2b(str(self.trainer.steps).encode(), digest_size=32)
        for kept in self._kept:
            digest.update(kept.read()[0].numpy().data)
        return torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64)

    def _changes(self, blocks: Iterator[list[Tensor]], staged: list[Callable[[bool], None]]
                 ) -> Iterator[list[Tensor]]:
        """For each block, yield the changes of the weights since the last averaging round, and the
        buffers.

        The caller averages the yielded tensors in place, and the averages become the block's new
        weights and buffers.
        """
        for number, tensors in enumerate(blocks):
            flat_N, theta, momenta = self._kept[number].read()
            if self.replica.joining:
                self.replica.spread([*theta, *momenta])
                self._spread_counts(number)
            weights = tensors[:len(theta)]
            for x, start in zip(weights, theta, strict=True):
                torch.sub(start, x, out=x)
            yield tensors
            assert self.outer is not None
            self.outer.step(theta, momenta, weights)
            for x, new in zip(weights, theta, strict=True):
                x.copy_(new)
            staged.append(self._kept[number].held.stage(flat_N))

    def close(self) -> None:
        """Leave the averages. The other peers continue without this peer."""
        for lock in filter(None, self._locks.values()):
            lock.release()
        self._locks.clear()
        self.replica.close()


class _OuterState:
    """The weights of a block after the last averaging round, and the momentum of the outer
    optimizer. Weights and momentum are stored in the trainer's storage tier.
    """

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
        """Return a copy of the state, and views of the weights and of the momentum in this copy."""
        flat_N = aligned_buffer(self.layout.nbytes, "cpu")
        self.held.read(flat_N)
        both = self.layout.views(flat_N)
        return flat_N, both[:len(both) // 2], both[len(both) // 2:]


def peer_of(settings: OffloadConfig, trainer: StreamedTrainer, lighthouse: str, replica: int,
            timeout_s: float = 60.0,
            outer_states: Iterable[BlockState] | None = None) -> StreamedPeer:
    """Create the peer for the settings `offload.average_every`, `outer_lr` and `outer_momentum`.

    For the arguments and errors, see `StreamedPeer`.
    """
    outer = None if settings.outer_lr is None else OuterNesterov(settings.outer_lr,
                                                                 settings.outer_momentum)
    return StreamedPeer(trainer, lighthouse, replica, settings.average_every, timeout_s, outer,
                        outer_states=outer_states)


class PeerSteps(RunFeature):
    """A run feature for a host framework with streamed weights, where this run is one of several
    peers.

    Args:
        settings: see `peer_of`.
        trainer: see `peer_of`.
        place: position of this run among the peers, with the models and optimizers of the trainer.

    Attributes:
        saved: value for the argument `outer_states` of `StreamedPeer`. The host reads this value
            from a checkpoint and sets it before the first step.
    """

    def __init__(self, settings: OffloadConfig, trainer: StreamedTrainer,
                 place: ReplicaPlace) -> None:
        logging.getLogger("torchft").setLevel(logging.WARNING)  # torchft logs every average
        self.settings, self.trainer, self.place = settings, trainer, place
        self.saved: Iterable[BlockState] | None = None
        self.peer: StreamedPeer | None = None

    def begin(self) -> None:
        """Join the other peers. The weights of this peer are initialized from the checkpoint."""
        self.trainer.steps, place = self.place.done, self.place
        self.peer = peer_of(self.settings, self.trainer, place.lighthouse, place.replica,
                            place.timeout_s, self.saved)
        self.saved = None
        self.peer.join()
        self._follow()

    def after_step(self, facts: StepFacts) -> None:
        """Average the weights if `every` steps have been completed since the last averaging round.
        All peers must call this method.
        """
        if facts.made and self.peer is not None:
            self.peer.stepped()
            self._follow()

    def _follow(self) -> None:
        if self.trainer.steps != self.place.done:
            self.place.take(self.trainer.steps)

    def outer_state(self, number: int) -> BlockState:
        """Return the outer optimizer's state for a block, to be saved in a checkpoint.

        To restore this state, set `saved`.
        """
        return {} if self.peer is None else self.peer.outer_state(number)

    def numbers(self) -> dict[str, float]:
        return {} if self.peer is None else {"replicas": self.peer.replica.members}

    def close(self) -> None:
        if self.peer is not None:
            self.peer.close()
