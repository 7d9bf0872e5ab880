"""Votes on the gradients of each training step, for every host framework; see `resilience.vote`."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.comm import Comm, LocalComm
from moe_plugin.comm.host_collectives import gather_objects
from moe_plugin.config import GuardConfig
from moe_plugin.dispatch.rows_limit import most_of, needed_of, settle
from moe_plugin.layer import layers_in
from moe_plugin.planner.vote_assignments import assign
from moe_plugin.training.gradients.replicas import replica_comm
from moe_plugin.training.resilience.skipped_steps import StepStart, limits_of
from moe_plugin.training.resilience.twins import deterministic_layers
from moe_plugin.training.resilience.vote import Ballots, flat_gradients, set_gradients, shared_first
from moe_plugin.utils.run_feature import RunFeature, StepInput

# Base of torchft's step count for replicas that have made a step together. Smaller counts are of
# starting replicas, by their progress.
LIVING = 1 << 60
IN_A_QUORUM = 1 << 32  # step counts reserved between two quorum changes
_EVERY_S = 0.1  # interval between requests to a lighthouse that does not answer


def retries(wait_s: float) -> int:
    """While the lighthouse is unavailable, torchft repeats its requests. Return the number of
    requests that torchft repeats within `wait_s` seconds.
    """
    return max(0, round(wait_s / _EVERY_S) - 1)


class Quorums:
    """A replacement for torchft's quorum client that assigns a unique number to each quorum.

    A lighthouse numbers its quorums from 1. After a restart, it starts at 1 again. torchft assumes
    that the quorum has not changed if its number is the same. torchft also uses this number to find
    the other replicas in a store, and the store may still contain entries of an earlier quorum.
    This class never assigns a number twice. All members of a quorum compute the same number.

    Args:
        client: torchft's client.

    Attributes:
        least_count: minimum step count in the current quorum, which is larger than the step count
            of any replica in an earlier quorum.
    """

    def __init__(self, client: Any) -> None:
        self._client, self._met, self._number, self.least_count = client, (), -1, 0

    def _quorum(self, **asked: Any) -> Any:
        quorum = self._client._quorum(**asked)
        met = (quorum.quorum_id, *sorted(quorum.replica_ids))
        # A request to heal in an unchanged quorum means that the lighthouse was restarted, and that
        # the other replicas have been in another quorum in the meantime.
        if met != self._met or quorum.heal:
            self._met = met
            digest = blake2b(repr((met, quorum.max_step)).encode(), digest_size=7).digest()
            self._number = int.from_bytes(digest, "big")
            before = (max(quorum.max_step, LIVING) - LIVING) // IN_A_QUORUM
            self.least_count = LIVING + max(before + 1, quorum.quorum_id) * IN_A_QUORUM
        quorum.quorum_id = self._number
        return quorum

    def should_commit(self, *args: Any, **kwargs: Any) -> bool:
        """See torchft's client."""
        return self._client.should_commit(*args, **kwargs)


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileBatch:
    """A micro-batch that this rank processes in a step with votes. Micro-batches are grouped into
    files.

    Attributes:
        batch: batch from the host framework, or None for padding in a file that has fewer
            micro-batches.
        begins: whether this is the first micro-batch of its file.
        counts: whether this micro-batch is counted in the log. `counts` is True only on the first
            worker of the file, so that each micro-batch is counted once.
    """

    batch: Any
    begins: bool
    counts: bool


class StepVotes(RunFeature):
    """Votes on the gradients of each step in a run.

    All ranks must call the constructor.

    The micro-batches of all ranks are assigned to the files in round-robin order. Each worker
    processes the micro-batches of its own files. The host framework calls `begin_file` at the start
    of each file.

    Args:
        ballots: votes among the ranks that store the same parameters as this rank.
        models: models whose trainable parameters receive the gradients that win the votes. The
            trainable parameters must be equal on all voting ranks.
        gradient_of: function that returns the gradient of a parameter, or None if the parameter has
            no gradient.
        start: function that returns a snapshot of the random generators. `start` is called with an
            empty list of models.
        group: process group of the voting ranks.

    Attributes:
        running: whether a step is currently being computed.
        dealt: micro-batches of the current step that this rank processes.
    """

    reduces = True

    def __init__(self, ballots: Ballots, models: Sequence[nn.Module],
                 gradient_of: Callable[[nn.Parameter], Tensor | None] = lambda p: p.grad,
                 start: Callable[[list[nn.Module]], StepStart] = StepStart,
                 group: Any = None) -> None:
        self.ballots, self.gradient_of, self.start = ballots, gradient_of, start
        self.group = group
        self.parameters, self.shared = shared_first(
            p for model in models for p in model.parameters())
        self._ranks_KW = _ranks_of_workers(ballots)
        self.layers = layers_in(*models)
        self.limits = limits_of(models)
        self.running, self.step = False, 0
        self.dealt: list[FileBatch] = []
        self._restart()

    def _restart(self) -> None:
        self._began: StepStart | None = None
        self._answers: list[Tensor] = []
        self._needed: list[Tensor] = []  # rows needed by each file, see `rows_overflowed`

    @contextmanager
    def around_step(self, step: StepInput) -> Iterator[None]:
        """During the step, make all workers of a file compute identical results."""
        self.step = step.number
        with deterministic_layers(self.layers):
            self.running = True
            try:
                yield
            finally:
                self.running = False

    def batches(self, own: list[Any]) -> list[Any]:
        """Return the micro-batches of this rank's files. Collective."""
        every = gather_objects(own, "the batches of a step", self.group)
        return self.deal([batch for nth in itertools.zip_longest(*every) for batch in nth])

    def deal(self, interleaved: list[Any]) -> list[Any]:
        """Select the micro-batches that belong to this rank's files from those of all ranks.

        interleaved: the first micro-batch of each rank, followed by the second micro-batch of each
            rank, and so on.
        """
        me, self.dealt = self.ballots.comm.rank, []
        position, ranks = self.ballots.sharing.rank, self.ballots.sharing.size
        step = self.ballots.assignment.count * ranks
        for file in self.ballots.files:
            speaks = self.ballots.assignment.workers_of[file][0] == me
            # each rank of a worker gets the batches it would have had without votes
            own_batches = interleaved[file * ranks + position::step]
            most = max(1, len(interleaved[file * ranks::step]))
            for i, batch in enumerate([*own_batches, *[None] * (most - len(own_batches))]):
                empty = batch is None or (isinstance(batch, list | dict) and not batch)
                self.dealt.append(FileBatch(batch, i == 0, speaks and not empty))
        return [file_batch.batch for file_batch in self.dealt]

    def files_dealt(self) -> list[list[Any]]:
        """Return this rank's micro-batches, grouped by file."""
        files: list[list[Any]] = []
        for file_batch in self.dealt:
            files += [[]] if file_batch.begins else []
            files[-1].append(file_batch.batch)
        return files

    def before_passes(self) -> Callable[[], None]:
        """Discard the gradients of passes that will be repeated."""
        self._restart()
        return self._restart

    def begin_file(self) -> None:
        """Start the rank's next file. The gradients must be zero or those of the previous file."""
        if self._began is None:
            self._began = self.start([])  # at this point the host has set the seed of this step
        else:
            self._keep()
            self._began.restore()

    @torch.no_grad()
    def _keep(self) -> None:
        gradients = [self.gradient_of(p) for p in self.parameters]
        self._answers.append(flat_gradients(self.parameters, gradients))
        for gradient in gradients:
            if gradient is not None:
                gradient.zero_()
        self._needed.append(needed_of(self.limits, self.ballots.comm.device))
        for limit in self.limits:
            limit.forget()

    def rows_overflowed(self) -> bool:
        """Return true if a vote decides that rows did not fit into a buffer (see
        `Ballots.rows_needed`). Collective.

        Call this method after `finish`, or at the end of an evaluation.
        """
        if not self.running:
            return self._evaluation_overflowed()
        missing = len(self.ballots.files) - len(self._needed)
        nothing_N = torch.zeros(len(self.limits), dtype=torch.int64,
                                device=self.ballots.comm.device)
        own_LN = torch.stack([*self._needed, *[nothing_N] * missing])
        found_N = self.ballots.rows_needed(self.limits, own_LN)
        self._report()
        return settle(self.limits, found_N)

    def _evaluation_overflowed(self) -> bool:
        """Vote on whether rows did not fit into a buffer during an evaluation. In an evaluation,
        each batch is processed by a single worker.

        If rows did not fit on a majority of workers, the evaluation is repeated or an error is
        raised. If rows did not fit only on a minority of workers, the outputs of these workers are
        NaN, and their row limit is raised for later evaluations.
        """
        own_N = needed_of(self.limits, self.ballots.comm.device)
        most_K = most_of(self.limits, own_N)
        agreed_K = self.ballots.most_need(most_K)
        if most_K.any() and not agreed_K.any():
            logger.warning("rows of an evaluation did not fit on rank %d, but fit on most "
                           "workers. Its outputs are NaN; raise dispatch.max_rows_factor",
                           self.ballots.comm.ranks[self.ballots.comm.rank])
        return settle(self.limits, torch.cat([agreed_K, own_N]))

    def agreed_sums(self, mine: Sequence[Tensor]) -> Tensor:
        """Return the sums over all files, as determined by votes, float64 [S]. Collective.

        Args:
            mine: for each file of this rank, the sums [S] over this rank's part of the file. Files
                at the end may be missing if the device ran out of memory.
        """
        missing = len(self.ballots.files) - len(mine)
        sums_LS = torch.stack([*mine, *[torch.zeros_like(mine[0])] * missing]).double()
        sums_LS = self.ballots.summed(sums_LS.to(self.ballots.comm.device))
        return self.ballots.winners(sums_LS).sum(0)

    @torch.no_grad()
    def finish(self, shared_scale: float, expert_scale: float) -> None:
        """Replace all gradients by the result of the vote, multiplied by a factor, and log which
        ranks were outvoted. Collective.

        Args:
            shared_scale: factor for gradients that are summed over the ranks of a worker.
            expert_scale: factor for the gradients of experts, which are different on each rank.
        """
        if not self.running or self._began is None:
            return
        self._keep()
        self._began = None
        missing = len(self.ballots.files) - len(self._answers)
        self._answers += [torch.zeros_like(self._answers[0])] * missing
        result_N = self.ballots.result(torch.stack(self._answers), self.shared)
        result_N[:self.shared] *= shared_scale
        result_N[self.shared:] *= expert_scale
        self._answers.clear()
        set_gradients(self.parameters, result_N, self.gradient_of)
        self._report()

    def _report(self) -> None:
        verdict = self.ballots.verdict()
        first = self.ballots.comm.rank == self.ballots.worker.rank == 0
        if first and (verdict.outvoted or verdict.undecided):
            logger.warning("step %d: outvoted ranks: %s; files without a majority: %s", self.step,
                           self.ranks_of(verdict.outvoted), list(verdict.undecided))

    def ranks_of(self, workers: Iterable[int]) -> list[int]:
        """Return the global ranks of these workers in ascending order."""
        return sorted(rank for worker in workers for rank in self._ranks_KW[worker])


def ballots_of(guard: GuardConfig, model: nn.Module, world: Comm) -> Ballots:
    """Create the votes of the data-parallel ranks. Each expert-parallel group of the model is one
    worker. Collective.

    Raises:
        ValueError: If files cannot be assigned to this number of workers.
    """
    worker = next((layer.comm for layer in layers_in(model)), LocalComm())
    assignment = assign(guard.assignment, world.size // worker.size, guard.votes)
    comm = replica_comm(worker, world)
    assert comm is not None  # there are several workers
    return Ballots(assignment, comm, guard.aggregate, worker)


def _ranks_of_workers(ballots: Ballots) -> list[list[int]]:
    """Return the global ranks of each worker. Collective."""
    comm, worker = ballots.comm, ballots.worker
    own_W = worker.all_gather(torch.tensor([comm.ranks[comm.rank]], device=comm.device))
    return comm.all_gather(own_W).view(-1, worker.size).tolist()
