"""Ranks that compute or send wrong numbers, in fairseq: what `guard` asks for, and votes on a
step's gradients (`plain.vote`).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.checkpoint.formats.fairseq.translate import setting
from moe_plugin.comm.named_errors import gather_objects
from moe_plugin.config import GuardConfig
from moe_plugin.hosts.fairseq.layers import moe_layers
from moe_plugin.hosts.fairseq.sharding import join
from moe_plugin.layer import MoELayer
from moe_plugin.planner.byzshield import Assignment, assign
from moe_plugin.resilience.overflow import StepStart
from moe_plugin.resilience.twins import alike
from moe_plugin.resilience.vote import (
    Ballots,
    flat_gradients,
    refuse_reported_loads,
    refuse_spread_experts,
)

logger = logging.getLogger(__name__)


def guard_of(cfg: Any, model: nn.Module) -> GuardConfig:
    """What a model's layers ask for; without experts nothing.

    Raises:
        ValueError: the run cannot have it; it names the flag, the reason and the remedy.
    """
    layers = moe_layers(model)
    if not layers:
        return GuardConfig()
    config = layers[0].moe_layer.moe.config
    guard, settings = config.guard, cfg.distributed_training
    several = ("one rank", "use several, or 0", settings.distributed_world_size > 1)
    fully = ("--ddp-backend fully_sharded", settings.ddp_backend != "fully_sharded")
    if guard.twins:
        _refuse(f"--moe-check-twins {guard.twins}", [
            ("--checkpoint-activations", "drop one of both",
             not setting(cfg.model, "checkpoint_activations", False)),
            (fully[0], "use legacy_ddp or pytorch_ddp (c10d)", fully[1]), several])
    if guard.votes:
        alone = "what one rank updates for all cannot be voted on; "
        _refuse(f"--moe-votes {guard.votes}", [
            several, (fully[0], f"{alone}use legacy_ddp", fully[1]),
            ("--zero-sharding os", f"{alone}leave it out", settings.zero_sharding != "os"),
            ("--moe-lighthouse", "replicas' gradients are averaged, whatever they are; leave it "
             "out", not setting(cfg.model, "moe_lighthouse")),
            ("losses.global_batch", "it is computed from all ranks' tokens, so that no two ranks "
             "compute it alike; use losses.gshard", not config.losses.get("global_batch"))])
        refuse_spread_experts(model)
        refuse_reported_loads(model)
        assignment_of(guard, settings.distributed_world_size)
    return guard


def assignment_of(guard: GuardConfig, ranks: int) -> Assignment:
    """Which of the data-parallel ranks compute which files. `ValueError`: there is none."""
    return assign(guard.assignment, ranks, guard.votes)


def _refuse(flag: str, unfit: Sequence[tuple[str, str, bool]]) -> None:
    for what, remedy, ok in unfit:
        if not ok:
            raise ValueError(f"{flag} does not fit {what}: {remedy}")


@dataclass(frozen=True)
class _Batch:
    """A batch of this rank in a step. begins: it is its file's first. counts: in the log, on the
    first of the file's ranks. real: it is not there to fill a short step.
    """

    begins: bool
    counts: bool
    real: bool


class StepVotes:
    """Votes in training steps. The batches that all ranks would have had are the files, by turns;
    each rank's step runs over the batches of its own files.

    Args:
        ballots: of the data-parallel ranks. model, criterion: not wrapped. group: the process group
            of these ranks.

    Attributes:
        running: whether a step is being computed.
    """

    def __init__(self, ballots: Ballots, model: nn.Module, criterion: nn.Module,
                 group: Any) -> None:
        self.ballots, self.criterion, self.group = ballots, criterion, group
        self.parameters = [p for module in (model, criterion) for p in module.parameters()
                           if p.requires_grad]
        self.layers = [each for each in model.modules() if isinstance(each, MoELayer)]
        self.running = False

    def attach(self, optimizer: Any) -> None:
        """Let an optimizer of fairseq's vote where it would reduce gradients. In place."""
        optimizer.votes = self
        join(optimizer, _VotingOptimizer)

    @contextmanager
    def around(self, step: int, samples: list[Any]) -> Iterator[list[Any]]:
        """The batches of the step inside, in place of this rank's own ones. Collective."""
        self.step = step
        every = gather_objects(samples, "the batches of a step", self.group)
        in_turn = [each for turn in itertools.zip_longest(*every) for each in turn]
        count, me = self.ballots.assignment.count, self.ballots.comm.rank
        batches: list[Any] = []
        self._batches: list[_Batch] = []
        for file in self.ballots.files:
            speaks = self.ballots.assignment.workers_of[file][0] == me
            for i, sample in enumerate(in_turn[file::count] or [None]):
                batches.append(sample)
                self._batches.append(_Batch(i == 0, speaks and bool(sample), bool(sample)))
        self._at, self._start = 0, None
        self._answers: list[Tensor] = []
        self._sizes: list[float] = []
        with ExitStack() as stack:
            stack.callback(self.criterion.register_forward_pre_hook(self._begin).remove)
            stack.callback(self.criterion.register_forward_hook(self._end).remove)
            stack.enter_context(alike(self.layers))
            self.running = True
            try:
                yield batches
            finally:
                self.running = False

    def _begin(self, criterion: nn.Module, args: Any) -> None:
        if self._at == len(self._batches) or not self._batches[self._at].begins:
            return
        if self._start is None:
            self._start = StepStart([])  # fairseq has just set the seed of this step
        else:
            self._close()
            self._start.restore()
        self._sizes.append(0.0)

    def _end(self, criterion: nn.Module, args: Any, output: Any) -> None:
        if self._at < len(self._batches):
            self._sizes[-1] += float(output[1]) if self._batches[self._at].real else 0.0
            self._at += 1

    @torch.no_grad()
    def _close(self) -> None:
        """Keep a file's gradients."""
        gradients = [p.grad for p in self.parameters]
        self._answers.append(flat_gradients(self.parameters, gradients))
        for gradient in gradients:
            if gradient is not None:
                gradient.zero_()

    def counted(self, logged: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Of what this rank's batches log, that which counts: each batch on one rank."""
        kept = [entry for entry, batch in zip(logged, self._batches, strict=False) if batch.counts]
        return kept or [{name: value * 0 for name, value in entry.items()} for entry in logged[:1]]

    def sample_size(self) -> float:
        """Of all files, by vote. Collective."""
        files = len(self.ballots.files)
        sizes = (self._sizes + [0.0] * files)[:files]  # fewer where memory ran out
        mine_L1 = torch.tensor(sizes, dtype=torch.float64, device=self.ballots.comm.device)
        return float(self.ballots.winners(mine_L1.view(-1, 1)).sum())

    @torch.no_grad()
    def finish(self) -> None:
        """Set all gradients, as the mean over ranks that fairseq's reduction gives. Collective."""
        if not self.running or self._start is None:
            return
        self._close()
        self._start = None
        files = len(self.ballots.files)
        self._answers += [torch.zeros_like(self._answers[0])] * (files - len(self._answers))
        scale = self.ballots.assignment.count / self.ballots.comm.size
        result_N = self.ballots.result(torch.stack(self._answers)).mul_(scale)
        self._answers.clear()
        for p, part_N in zip(self.parameters, result_N.split([p.numel() for p in self.parameters]),
                             strict=True):
            p.grad = part_N.view_as(p).to(p.dtype) if p.grad is None else p.grad.copy_(
                part_N.view_as(p))
        _report(self.step, self.ballots)


def _report(step: int, ballots: Ballots) -> None:
    found = ballots.verdict()
    if ballots.comm.rank == 0 and (found.outvoted or found.undecided):
        logger.warning("step %d: outvoted ranks: %s; parts without a majority: %s", step,
                       list(found.outvoted), list(found.undecided))


class _VotingOptimizer:
    """Joins the class of an optimizer of fairseq's."""

    votes: StepVotes

    def all_reduce_grads(self: Any, module: nn.Module) -> None:
        self.votes.finish()
