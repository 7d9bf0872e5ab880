"""Votes in fairseq: where the batches of a file begin, and what of them counts in the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.experts.base import is_expert
from moe_plugin.training.gradients import multi_tensor
from moe_plugin.training.resilience.step_votes import StepVotes
from moe_plugin.training.resilience.vote import Ballots
from moe_plugin.utils.run_feature import StepInput

logger = logging.getLogger(__name__)
NORM_ERROR = 1e-6  # relative, as fairseq's


class FileTurns(StepVotes):
    """`StepVotes` in a step over the batches of all files, which calls the criterion for each.

    Args:
        ballots: see `StepVotes`.
        model, criterion: not wrapped.
        group: the process group of the data-parallel ranks.
    """

    def __init__(self, ballots: Ballots, model: nn.Module, criterion: nn.Module,
                 group: Any) -> None:
        super().__init__(ballots, [model, criterion], group=group)
        self.criterion = criterion

    def reduce_by_vote(self, module: nn.Module) -> None:
        """In place of an optimizer's `all_reduce_grads`."""
        # fairseq's gradients are means over ranks; an expert's is divided by its group already
        scale = self.ballots.assignment.count / self.ballots.comm.size
        self.finish(scale / self.ballots.sharing.size, scale)

    def norm_squared(self, parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
        """Of a worker's gradients after the vote, float64, each parameter once. Collective in it.
        """
        shared, experts = (
            multi_tensor.squared_norm([p.grad for p in parameters if is_expert(p) == expert],
                                      device) for expert in (False, True))
        return shared + self.ballots.sharing.all_reduce(experts)

    def check_norm(self, norm: Tensor) -> None:
        """In place of fairseq's check that all ranks have one norm: a warning of ranks that differ
        from most. Collective. `FloatingPointError`, on all ranks: most do not agree.
        """
        norms_K = self.ballots.comm.all_gather(norm.detach().double().view(1)).cpu()
        # where most agree, theirs
        middle = norms_K.nan_to_num(float("inf")).sort().values[len(norms_K) // 2]
        if not middle.isfinite():
            return
        wrong = (~((norms_K - middle).abs() <= NORM_ERROR * middle)).nonzero().flatten().tolist()
        if 2 * len(wrong) >= len(norms_K):
            raise FloatingPointError(
                f"step {self.step}: no majority of {len(norms_K)} workers has one gradient norm "
                f"({norms_K.tolist()}), though gradients were voted on: their weights differ; "
                "resume from the newest checkpoint, and check these machines")
        if wrong and self.ballots.comm.rank == self.ballots.worker.rank == 0:
            logger.warning("step %d: ranks with another gradient norm than most: %s", self.step,
                           self.ranks_of(wrong))

    @contextmanager
    def around_step(self, step: StepInput) -> Iterator[None]:
        """And the criterion tells of batches."""
        hooks = (self.criterion.register_forward_pre_hook(self._begin),
                 self.criterion.register_forward_hook(self._end))
        try:
            with super().around_step(step):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _restart(self) -> None:
        super()._restart()
        self._at = 0
        self._sizes: list[float] = []

    def _begin(self, criterion: nn.Module, args: Any) -> None:
        if self._at < len(self.dealt) and self.dealt[self._at].begins:
            self.begin_file()
            self._sizes.append(0.0)

    def _end(self, criterion: nn.Module, args: Any, output: Any) -> None:
        if self._at < len(self.dealt):
            self._sizes[-1] += float(output[1]) if self.dealt[self._at].batch else 0.0
            self._at += 1

    def counted(self, logged: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Of what this rank's batches log, that which counts: each batch on one rank."""
        kept = [entry for entry, batch in zip(logged, self.dealt, strict=False) if batch.counts]
        return kept or [{name: value * 0 for name, value in entry.items()} for entry in logged[:1]]

    def sample_size(self) -> float:
        """Of all files, by vote. Collective."""
        sizes = torch.tensor(self._sizes or [0.0], dtype=torch.float64)
        return float(self.agreed_sums(sizes.split(1)))
